// tokenize.cpp: ./tokenize makes shards of token ids from text, shows them, turns them back into text, and trains tokenizers.
#include <CLI/CLI.hpp>

#include <thread>

#include "data/convert.h"
#include "data/decode.h"
#include "data/inspect.h"
#include "data/make_shards.h"
#include "data/train_sentencepiece.h"
#include "data/verify.h"

namespace {

enum class Mode { tokenize, inspect, verify, decode, convert, train_tokenizer };

struct Options : ShardOptions {
    Mode mode = Mode::tokenize;
    std::string convert_to;
    i64 vocab = 0;
    int eos_id = -1;
    SentencePieceTraining training;

    LookOptions look() const { return {inputs, tokenizer, read.doc_separator, vocab, eos_id}; }
};

void train_tokenizer(const Options& options) {
    check(!is_directory(options.out), "--out '%s' is a folder; wanted a file name\nHINT: --out %s/tokenizer.model", options.out.c_str(),
          options.out.c_str());
    prepare_out(options.out);
    const OutLock lock(options.out);
    const std::vector<InputFile> files = list_inputs(options.inputs, options.read.input_format);
    for (const InputFile& file : files) {
        std::error_code none_of_them;
        check(!std::filesystem::equivalent(file.path, options.out, none_of_them),
              "--out '%s' is an input, which the tokenizer would replace\nHINT: another --out", options.out.c_str());
    }
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
    "  ./tokenize --inspect FILE...                              print header, counts, first, last and most frequent tokens\n"
    "  ./tokenize --verify FILE...                               check sizes, ids and checksums; a line for each file\n"
    "  ./tokenize --decode FILE...                               write the text back, to standard output\n"
    "  ./tokenize --convert megatron --out PREFIX FILE...        write the same ids as a Megatron set, or (llm.c) as shards\n"
    "  ./tokenize --train-tokenizer V --out FILE.model INPUT...  make a SentencePiece model of V pieces\n\n"
    "INPUT is .jsonl (one object per line) or .txt, plain or packed (.gz, .zst), a folder of them, or - for standard input.\n"
    "FILE is an llm.c shard, a lit-gpt packed shard, a Megatron set (PREFIX, PREFIX.bin or PREFIX.idx), or PREFIX.json for a whole set.\n"
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
    bool inspect = false, verify = false, decode = false;
    app.get_formatter()->column_width(34);

    // Which option means something in which mode; the rest is refused, not ignored.
    std::vector<std::pair<CLI::Option*, std::vector<Mode>>> valid_in;
    auto in = [&](std::initializer_list<Mode> modes, CLI::Option* option, const CLI::Validator& validator = {}) {
        valid_in.push_back({option, modes});
        (option->check)(validator);  // the brackets keep base.h's macro away
        option->capture_default_str();
    };
    constexpr Mode T = Mode::tokenize, I = Mode::inspect, V = Mode::verify, D = Mode::decode, C = Mode::convert, M = Mode::train_tokenizer;
    app.add_option("INPUT", o.inputs, "Files, folders, - (standard input); with --inspect, --verify, --decode and --convert: files of ids");
    in({T, I, V, D, C}, app.add_option("--tokenizer", o.tokenizer,
                                       "A SentencePiece .model, or GPT-2's encoder.json with vocab.bpe beside it; --inspect and --decode "
                                       "find it in PREFIX.json if it is still there"));
    in({T, C, M}, app.add_option("--out", o.out, "Start of the names of the files to write (with --train-tokenizer: the file)"));
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
    in({T, C}, app.add_option("--shard-tokens", o.shard_tokens, "Tokens per shard"), CLI::Range((i64)1, SHARD_MAX_TOKENS));
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
    app.add_flag("--inspect", inspect, "Show files of ids");
    app.add_flag("--verify", verify, "Check files of ids: one line each, exit code 1 if any is not as it should be");
    app.add_flag("--decode", decode, "Write the text of files of ids to standard output");
    CLI::Option* convert = app.add_option("--convert", o.convert_to, "Write the same ids as a set of another kind");
    in({C}, convert, CLI::IsMember({"megatron", "llm.c"}));
    in({V, C}, app.add_option("--vocab", o.vocab, "Size of the vocabulary, where no tokenizer or PREFIX.json tells it"),
       CLI::Range((i64)1, (i64)std::numeric_limits<int32_t>::max()));
    in({I, D, C}, app.add_option("--eos-id", o.eos_id, "The id that ends a document, where no tokenizer or PREFIX.json tells it"),
       CLI::Range(0, std::numeric_limits<int32_t>::max()));
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

    const std::pair<bool, std::pair<Mode, const char*>> chosen[] = {{inspect, {I, "--inspect"}},
                                                                    {verify, {V, "--verify"}},
                                                                    {decode, {D, "--decode"}},
                                                                    {convert->count() > 0, {C, "--convert"}},
                                                                    {train->count() > 0, {M, "--train-tokenizer"}}};
    const char* mode_name = "tokenizing";
    for (const auto& [is_chosen, mode] : chosen) {
        if (!is_chosen) { continue; }
        if (o.mode != T) { usage_error("%s and %s exclude one another", mode_name, mode.second); }
        std::tie(o.mode, mode_name) = mode;
    }
    for (const auto& [option, modes] : valid_in) {
        if (option->count() > 0 && std::find(modes.begin(), modes.end(), o.mode) == modes.end()) {
            usage_error("%s means nothing with %s", option->get_name().c_str(), mode_name);
        }
    }
    if (o.inputs.empty()) { usage_error("no INPUT given\nHINT: ./tokenize --help"); }
    if (o.mode == T && o.tokenizer.empty()) { usage_error("--tokenizer FILE is missing\nHINT: --train-tokenizer makes one"); }
    if ((o.mode == T || o.mode == C || o.mode == M) && o.out.empty()) { usage_error("--out is missing"); }
    o.stop_on_error = on_error == "stop";
    if (o.threads == 0) { o.threads = std::max(1u, std::thread::hardware_concurrency()); }
    return o;
}

}  // namespace

int main(int argc, char** argv) {
    CLI::App app(DESCRIPTION, "tokenize");
    try {
        const Options options = parse_options(app, argc, argv);
        i64 failed = 0;
        switch (options.mode) {
            case Mode::tokenize:
                make_shards(options);
                break;
            case Mode::inspect:
                inspect(options.look());
                break;
            case Mode::verify:
                failed = verify(options.look());
                break;
            case Mode::decode:
                decode(options.look());
                break;
            case Mode::convert:
                convert({options.look(), options.convert_to, options.out, options.shard_tokens});
                break;
            case Mode::train_tokenizer:
                train_tokenizer(options);
                break;
        }
        check(fflush(stdout) == 0, "cannot write to standard output: %s", strerror(errno));
        return failed > 0 ? EXIT_FAILED : EXIT_OK;
    } catch (const CLI::ParseError& e) { return app.exit(e) == 0 ? EXIT_OK : EXIT_USAGE; } catch (const Error& e) {
        fprintf(stderr, "tokenize: %s\n", e.what());
        return e.exit_code;
    } catch (const std::exception& e) {
        fprintf(stderr, "tokenize: %s\n", e.what());
        return EXIT_FAILED;
    }
}
