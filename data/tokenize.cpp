// tokenize.cpp: ./tokenize makes shards of token ids from text, shows them, turns them back into text, and trains tokenizers.
#include <CLI/CLI.hpp>

#include <thread>

#include "data/make_shards.h"
#include "data/train_sentencepiece.h"

namespace {

enum class Mode { tokenize, inspect, decode, train_tokenizer };

struct Options : ShardOptions {
    Mode mode = Mode::tokenize;
    SentencePieceTraining training;
};

// ---------------------------------------------------------------------------------------------------------------
// Shards -> something to look at

// The tokenizer given, else the one that the side file names; nothing if that is not to be had.
std::unique_ptr<Tokenizer> tokenizer_for(const Options& options, const std::optional<SideFile>& side) {
    if (!options.tokenizer.empty()) { return load_tokenizer(options.tokenizer); }
    if (!side || !path_exists(side->info.tokenizer_file)) { return nullptr; }
    auto tokenizer = load_tokenizer(side->info.tokenizer_file);
    check(tokenizer->hash == side->info.tokenizer_hash,
          "'%s' was made with another tokenizer than the '%s' of today (xxh3 %s, now %s)\nHINT: --tokenizer FILE", side->path.c_str(),
          tokenizer->file.c_str(), side->info.tokenizer_hash.c_str(), tokenizer->hash.c_str());
    return tokenizer;
}

std::string quoted(const std::string& text) { return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace); }

void inspect(const Options& options) {
    constexpr i64 SHOWN = 24;
    for (const std::string& input : options.inputs) {
        for (const std::string& path : expand_glob(input)) {
            const TokenFile shard(path);
            const auto side = find_side_file(path, shard.tokens());
            const auto tokenizer = tokenizer_for(options, side);
            printf("%s: %s, %s tokens\n", path.c_str(), shard.describe().c_str(), grouped(shard.tokens()).c_str());
            if (side) {
                const TokenSetInfo& info = side->info;
                printf("  set    %s (%s): %s documents, %s tokens, %s bytes of text; problems: %s\n", side->path.c_str(),
                       side->is_val ? "val" : "train", grouped(side->split().documents).c_str(), grouped(side->split().tokens).c_str(),
                       grouped(side->split().text_bytes).c_str(), counts_text(info.problems).c_str());
                printf("  ids    %s '%s' (xxh3 %s), vocabulary %s; a document %s BOS (%d) and %s EOS (%d)\n", info.tokenizer_kind.c_str(),
                       info.tokenizer_file.c_str(), info.tokenizer_hash.c_str(), grouped(info.vocab).c_str(),
                       info.bos ? "starts with" : "has no", info.bos_id, info.eos ? "ends with" : "no", info.eos_id);
            }
            const i64 n = std::min(SHOWN, shard.tokens());
            for (const bool last : {false, true}) {
                std::vector<int32_t> ids(n);
                shard.read(last ? shard.tokens() - n : 0, n, std::numeric_limits<int32_t>::max(), ids.data());
                printf("  %s ", last ? "last  " : "first ");
                for (const int32_t id : ids) { printf("%d ", id); }
                printf("\n");
                if (tokenizer) { printf("         %s\n", quoted(tokenizer->decode(ids)).c_str()); }
            }
            if (!tokenizer) { printf("         (as text: pass --tokenizer FILE)\n"); }
        }
    }
}

void print_text(const std::string& text) {
    check(fwrite(text.data(), 1, text.size(), stdout) == text.size(), "cannot write the text: %s", strerror(errno));
}

// One stream of text over all shards given: a document may go on from one to the next.
void decode(const Options& options) {
    std::vector<std::string> paths;
    for (const std::string& input : options.inputs) {
        for (const std::string& path : expand_glob(input)) { paths.push_back(path); }
    }
    const auto side = find_side_file(paths.front(), TokenFile(paths.front()).tokens());
    const auto tokenizer = tokenizer_for(options, side);
    check(tokenizer != nullptr, "--decode: no tokenizer known for '%s'\nHINT: --tokenizer FILE", paths.front().c_str());
    const std::string& separator = options.read.doc_separator;
    const std::string separator_line = separator.empty() ? "" : separator == "blank-lines" ? "\n" : separator + "\n";
    const i64 document_end = side && !side->info.eos ? tokenizer->bos_id : tokenizer->eos_id;
    StreamDecoder decoder(*tokenizer);
    bool line_open = false, between = false, any = false;
    auto put = [&](const std::string& text) {
        if (text.empty()) { return; }
        if (between && any && !separator.empty()) { print_text((line_open ? "\n" : "") + separator_line); }
        print_text(text);
        line_open = !text.ends_with('\n');
        between = false;
        any = true;
    };
    std::vector<int32_t> ids;
    for (const std::string& path : paths) {
        const TokenFile shard(path);
        constexpr i64 CHUNK = 1 << 16;
        for (i64 at = 0; at < shard.tokens(); at += CHUNK) {
            ids.resize(std::min(CHUNK, shard.tokens() - at));
            shard.read(at, ids.size(), tokenizer->vocab_size(), ids.data());
            std::string text;
            for (const int32_t id : ids) {
                text += decoder.feed(id);
                if (id == document_end) {
                    put(text);
                    text.clear();
                    between = true;
                }
            }
            put(text);
        }
    }
    put(decoder.flush());
    check(fflush(stdout) == 0, "cannot write the text: %s", strerror(errno));
}

// ---------------------------------------------------------------------------------------------------------------

void train_tokenizer(const Options& options) {
    check(!is_directory(options.out), "--out '%s' is a folder; wanted a file name\nHINT: --out %s/tokenizer.model", options.out.c_str(),
          options.out.c_str());
    prepare_out(options.out);
    const OutLock lock(options.out);
    const std::vector<InputFile> files = list_inputs(options.inputs, options.read.input_format);
    const Filter filter(options.filter);
    Pipeline pipeline(options, files, filter, nullptr);
    Summary summary(files, options.stop_on_error);
    const std::string model = train_sentencepiece(options.training, [&](std::string& text) {
        Work* work = pipeline.next();
        while (work && !summary.add(*work)) { work = pipeline.next(); }
        if (work) { text = std::move(work->text); }
        return work != nullptr;
    });
    write_file_atomically(options.out, model);
    const SourceCounts all = summary.total();
    printf("%s: %s pieces (%s) from %s documents; problems: %s\n", options.out.c_str(), grouped(options.training.vocab_size).c_str(),
           options.training.model_type.c_str(), grouped(all.documents).c_str(), counts_text(all.problems).c_str());
}

// ---------------------------------------------------------------------------------------------------------------

constexpr char DESCRIPTION[] =
    "Text -> shards of token ids, in llm.c's format.\n\n"
    "  ./tokenize --tokenizer FILE --out PREFIX INPUT...         write PREFIX_000000.bin ..., PREFIX_val_000000.bin ... (with "
    "--val-fraction), PREFIX.json\n"
    "  ./tokenize --inspect SHARD...                             print header, counts, first and last tokens\n"
    "  ./tokenize --decode SHARD...                              write the text back, to standard output\n"
    "  ./tokenize --train-tokenizer V --out FILE.model INPUT...  make a SentencePiece model of V pieces\n\n"
    "INPUT is .jsonl (one object per line) or .txt, plain or packed (.gz, .zst), a folder of them, or - for standard input.\n"
    "A set of the same PREFIX is replaced when the new one is complete. Exit code: 0 done, 1 failed, 2 wrong usage.";

// CLI::Range lets NaN pass.
CLI::Validator real_range(double low, double high) {
    const auto outside = [=](const std::string& text) {
        double value = 0;
        const bool inside = CLI::detail::lexical_cast(text, value) && value >= low && value <= high;
        return inside ? std::string() : format("'%s': wanted a number from %g to %g", text.c_str(), low, high);
    };
    return CLI::Validator(outside, format("%g to %g", low, high));
}

Options parse_options(CLI::App& app, int argc, char** argv) {
    Options o;
    std::string on_error = "skip";
    bool inspect = false, decode = false;
    app.get_formatter()->column_width(34);

    // Which option means something in which mode; the rest is refused, not ignored.
    std::vector<std::pair<CLI::Option*, std::vector<Mode>>> valid_in;
    auto in = [&](std::initializer_list<Mode> modes, CLI::Option* option, const CLI::Validator& validator = {}) {
        valid_in.push_back({option, modes});
        (option->check)(validator);  // the brackets keep base.h's macro away
        option->capture_default_str();
    };
    constexpr Mode T = Mode::tokenize, I = Mode::inspect, D = Mode::decode, M = Mode::train_tokenizer;
    app.add_option("INPUT", o.inputs, "Files, folders, - (standard input); with --inspect and --decode: shards");
    in({T, I, D}, app.add_option("--tokenizer", o.tokenizer,
                                 "A SentencePiece .model, or GPT-2's encoder.json with vocab.bpe beside it; --inspect and --decode find it in PREFIX.json if it is still there"));
    in({T, M}, app.add_option("--out", o.out, "Start of the names of the files to write (with --train-tokenizer: the file)"));
    in({T, M},
       app.add_option("--format", o.read.input_format, "What the inputs hold; auto: by name, standard input by its first character"),
       CLI::IsMember({"auto", "jsonl", "txt"}));
    in({T, M}, app.add_option("--text-key", o.read.text_key, ".jsonl: the key of the text"));
    in({T, D, M},
       app.add_option(
           "--doc-separator", o.read.doc_separator,
           ".txt: a line equal to this ends a document (such as '<|endoftext|>'), or blank-lines; --decode writes it between documents"));
    in({T, M},
       app.add_option(
           "--split-documents", o.read.split_bytes,
           ".txt: a document ends at the first line end from this many bytes on. Without this and --doc-separator a file is one document"),
       CLI::Range((i64)1, (i64)MAX_DOCUMENT_BYTES));
    in({T}, app.add_option("--shard-tokens", o.shard_tokens, "Tokens per shard"), CLI::Range((i64)1, SHARD_MAX_TOKENS));
    in({T},
       app.add_option("--val-fraction", o.val_fraction,
                      "Part of the documents that goes to PREFIX_val_000000.bin ..., chosen by a hash of the document's number"),
       real_range(0, 1));
    in({T}, app.add_flag("--bos", o.bos, "Put BOS before each document"));
    in({T}, app.add_flag("--no-eos", o.no_eos, "Put no EOS after each document"));
    in({T, M},
       app.add_option("--on-error", on_error,
                      "Broken lines: skip (and count) or stop. Bytes that are not UTF-8 become U+FFFD and count as broken"),
       CLI::IsMember({"skip", "stop"}));
    in({T, M},
       app.add_option("--signals", o.filter.signals, "RedPajama-V2: the folder of quality signals, which mirrors that of the documents"));
    in({T, M},
       app.add_option("--keep", o.filter.keep,
                      "Keep only documents for which this holds, such as 'rps_doc_word_count>=50' or 'bucket=head': a signal of the "
                      "whole document, or a field of the record. May be repeated. Documents without such a value are dropped")
           ->allow_extra_args(false));
    in({T, M},
       app.add_option("--drop-ids", o.filter.drop_ids,
                      "Drop the documents that this file lists, one id a line (plain, .gz, .zst): SNAPSHOT/SHARD/NAME.json.gz/LINE, "
                      "the last three parts of the file's path and the record's line, from 0"));
    in({T}, app.add_flag("--resume", o.resume, "Go on where an earlier run of the same command was killed, stopped or failed"));
    in({T, M}, app.add_option("--threads", o.threads, "0: one per CPU. The output does not depend on it"), CLI::Range(0, 1024));
    app.add_flag("--inspect", inspect, "Show shards");
    app.add_flag("--decode", decode, "Write the text of shards to standard output");
    CLI::Option* train = app.add_option("--train-tokenizer", o.training.vocab_size, "Make a SentencePiece model with this many pieces");
    in({M}, train, CLI::Range((i64)3, (i64)1 << 24));
    in({M}, app.add_option("--model-type", o.training.model_type, "Kind of model"), CLI::IsMember({"bpe", "unigram"}));
    in({M},
       app.add_option("--character-coverage", o.training.character_coverage,
                      "Part of the text's characters that get a piece; the rest is bytes"),
       real_range(0.9, 1));
    in({M}, app.add_option("--train-lines", o.training.max_lines, "Train on a sample of this many lines of a larger text"),
       CLI::Range(MIN_TRAINING_LINES, (i64)1 << 40));
    app.parse(argc, argv);

    if (inspect + decode + (train->count() > 0) > 1) { usage_error("--inspect, --decode and --train-tokenizer exclude one another"); }
    o.mode = inspect ? I : decode ? D : train->count() > 0 ? M : T;
    const char* mode_name = inspect ? "--inspect" : decode ? "--decode" : train->count() > 0 ? "--train-tokenizer" : "tokenizing";
    for (const auto& [option, modes] : valid_in) {
        if (option->count() > 0 && std::find(modes.begin(), modes.end(), o.mode) == modes.end()) {
            usage_error("%s means nothing with %s", option->get_name().c_str(), mode_name);
        }
    }
    if (o.inputs.empty()) { usage_error("no INPUT given\nHINT: ./tokenize --help"); }
    if (o.mode == T && o.tokenizer.empty()) { usage_error("--tokenizer FILE is missing\nHINT: --train-tokenizer makes one"); }
    if ((o.mode == T || o.mode == M) && o.out.empty()) { usage_error("--out is missing"); }
    o.stop_on_error = on_error == "stop";
    if (o.threads == 0) { o.threads = std::max(1u, std::thread::hardware_concurrency()); }
    return o;
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app(DESCRIPTION, "tokenize");
    try {
        const Options options = parse_options(app, argc, argv);
        switch (options.mode) {
            case Mode::tokenize:
                make_shards(options);
                break;
            case Mode::inspect:
                inspect(options);
                break;
            case Mode::decode:
                decode(options);
                break;
            case Mode::train_tokenizer:
                train_tokenizer(options);
                break;
        }
        check(fflush(stdout) == 0, "cannot write to standard output: %s", strerror(errno));
        return EXIT_OK;
    } catch (const CLI::ParseError& e) { return app.exit(e) == 0 ? EXIT_OK : EXIT_USAGE; } catch (const Error& e) {
        fprintf(stderr, "tokenize: %s\n", e.what());
        return e.exit_code;
    } catch (const std::exception& e) {
        fprintf(stderr, "tokenize: %s\n", e.what());
        return EXIT_FAILED;
    }
}
