// convert.h: sets of token ids in one layout -> the same ids in another: llm.c's shards, or a Megatron set.
#pragma once

#include "data/make_shards.h"
#include "data/token_sets.h"

struct ConvertOptions : LookOptions {
    std::string to, out;  // megatron or llm.c
    i64 shard_tokens = 0;
};

// The largest vocabulary whose ids a type can hold.
inline i64 vocab_of_type(IdType type) {
    switch (type) {
        case IdType::uint8:
            return 1 << 8;
        case IdType::int8:
            return 1 << 7;
        case IdType::int16:
            return 1 << 15;
        case IdType::uint16:
            return 1 << 16;
        default:
            return std::numeric_limits<int32_t>::max();
    }
}

// What comes out, counted on the way.
struct Converted {
    i64 documents = 0, tokens = 0, without_end = 0;  // without_end: documents whose last id is another than the end's
    i64 text_bytes = 0;                              // 0: not known
    int32_t largest = -1;
};

// Of the text that the files stand for, where they are all files of one split of a set that tells; 0: not known.
inline i64 text_bytes_of(const std::vector<std::string>& paths) {
    std::optional<SideFile> first;
    i64 tokens = 0;
    for (const std::string& path : paths) {
        const auto side = find_side_file(token_file_path(path));
        if (!first) { first = side; }
        if (!side || side->path != first->path || side->is_val != first->is_val) { return 0; }
        tokens += side->shard.tokens;
    }
    return first && tokens == first->split().tokens ? first->split().text_bytes : 0;
}

// Feeds all ids of all files to write(ids) and, where a document ends, to end_document().
template <typename Write, typename End>
Converted convert_ids(const std::vector<std::string>& paths, const Known& known, Write write, End end_document) {
    Converted all;
    bool open = false;
    int32_t last = -1;
    const auto end = [&] {
        end_document();
        all.documents++;
        all.without_end += last != known.end_id;
        open = false;
        last = -1;
    };
    for (const std::string& path : paths) {
        const TokenFile file(path);
        ReadingProgress progress(path, file.tokens());
        for_each_piece(file, known, [&](std::span<const int32_t> ids, bool ends) {
            check_stop_signal();
            for (const int32_t id : ids) { all.largest = std::max(all.largest, id); }
            write(ids);
            all.tokens += ids.size();
            open = open || !ids.empty();
            if (!ids.empty()) { last = ids.back(); }
            if (ends && (open || file.megatron())) { end(); }
            progress.add(ids.size());
        });
    }
    if (open) { end(); }
    all.text_bytes = text_bytes_of(paths);
    check(all.tokens > 0, "there are no tokens in the %zu file(s) to convert", paths.size());
    return all;
}

// What is known must be the same for all files.
inline Known known_of_all(const ConvertOptions& options, const std::vector<std::string>& paths) {
    Tokenizers tokenizers;
    std::optional<Known> all;
    i64 fits = 0;
    for (const std::string& path : paths) {
        const TokenFile file(path);
        Known known = what_is_known(options, file, tokenizers);
        fits = std::max(fits, vocab_of_type(file.id_type()));
        if (!all) { all = known; }
        const std::string a = all->side ? all->side->info->tokenizer_hash : "", b = known.side ? known.side->info->tokenizer_hash : "";
        check(a == b && all->end_id == known.end_id && all->start_id == known.start_id,
              "'%s' and '%s' were made with other tokenizers or rules for BOS and EOS\nHINT: convert them one by one", paths[0].c_str(),
              path.c_str());
    }
    if (all->vocab == 0) { all->vocab = fits; }
    return *all;
}

inline TokenSetInfo converted_info(const Known& known, const Converted& all) {
    TokenSetInfo info;
    if (known.side) { info = *known.side->info; }
    if (known.tokenizer) {
        info.tokenizer_file = known.tokenizer->file;
        info.tokenizer_kind = known.tokenizer->kind;
        info.tokenizer_hash = known.tokenizer->hash;
        info.bos_id = known.tokenizer->bos_id;
        info.eos_id = known.tokenizer->eos_id;
    } else if (!known.side) {
        info.tokenizer_kind = "unknown";
    }
    info.vocab = known.vocab < std::numeric_limits<int32_t>::max() ? known.vocab : all.largest + 1;
    info.bos = known.start_id >= 0 || (known.side && info.bos);
    info.eos = known.end_id >= 0 && all.without_end == 0;
    info.eos_id = known.end_id >= 0 ? known.end_id : info.eos_id;
    info.train = {all.documents, all.tokens, all.text_bytes, {}};
    info.val = {};
    info.problems = info.dropped = TokenSetInfo::Json::object();
    info.sources = TokenSetInfo::Json::array();
    info.run = "";
    return info;
}

inline void convert_to_shards(const ConvertOptions& options, const std::vector<std::string>& paths, const Known& known) {
    check_replaceable(options.out);
    remove_asides(options.out);
    ShardWriter writer(options.out, known.vocab, options.shard_tokens);
    const Converted all = convert_ids(
        paths, known, [&](std::span<const int32_t> ids) { writer.write(ids); }, [] {});
    writer.finish();
    TokenSetInfo info = converted_info(known, all);
    info.bytes_per_token = shard_format(known.vocab).bytes_per_token;
    info.train.shards = writer.shards();
    if (all.without_end > 0) {
        fprintf(stderr,
                "tokenize: %s of %s documents do not end with %s: llm.c's shards do not tell where they end\nHINT: --eos-id or --tokenizer "
                "names the id\n",
                grouped(all.without_end).c_str(), grouped(all.documents).c_str(),
                known.end_id >= 0 ? format("the id %d", known.end_id).c_str() : "an id that is known");
    }
    write_file_atomically(run_state_path(options.out), "{}\n");  // killed among its renames, it must not pass for a whole set
    publish_set(options.out, info, shards_of_old_set(options.out), {&writer});
    unlink(run_state_path(options.out).c_str());
    print_split("train", options.out, info.train);
}

inline void convert_to_megatron(const ConvertOptions& options, const std::vector<std::string>& paths, const Known& known) {
    const bool borders_known = known.end_id >= 0 || known.start_id >= 0 ||
                               std::all_of(paths.begin(), paths.end(), [](const std::string& p) { return TokenFile(p).megatron(); });
    check(borders_known, "--convert megatron: where do the documents of '%s' end?\nHINT: --eos-id N, or --tokenizer FILE",
          paths[0].c_str());
    const std::vector<std::string> old = shards_of_old_set(options.out);
    for (const char* suffix : {".bin", ".idx"}) {
        const std::string path = options.out + suffix;
        check(!path_exists(path) || std::find(old.begin(), old.end(), base_name(path)) != old.end(),
              "'%s' is in the way\nHINT: another --out, or remove that file", path.c_str());
    }
    MegatronWriter writer(options.out, known.vocab);
    const Converted all = convert_ids(
        paths, known, [&](std::span<const int32_t> ids) { writer.write(ids); }, [&] { writer.end_document(); });
    TokenSetInfo info = converted_info(known, all);
    info.bytes_per_token = id_bytes(writer.id_type());
    unlink(side_path(options.out).c_str());  // first: files without it are nobody's
    writer.publish();
    for (const char* suffix : {".bin", ".idx"}) {
        const std::string path = options.out + suffix;
        info.train.shards.push_back({base_name(path), suffix == std::string(".bin") ? all.tokens : 0, file_xxh3(path)});
    }
    for (const std::string& name : old) {
        const auto is_new = [&](const ShardInfo& s) { return s.file == name; };
        if (std::none_of(info.train.shards.begin(), info.train.shards.end(), is_new)) {
            unlink((parent_folder(options.out) + "/" + name).c_str());
        }
    }
    write_token_set_info(side_path(options.out), info);
    printf("%s.bin and .idx: %s documents, %s tokens\n", options.out.c_str(), grouped(all.documents).c_str(), grouped(all.tokens).c_str());
}

inline void convert(const ConvertOptions& options) {
    for (const std::string& input : options.inputs) { check_not_train_and_val(input, token_files(input)); }
    const std::vector<std::string> paths = token_files(options.inputs);
    for (const std::string& path : paths) {
        const auto side = find_side_file(token_file_path(path));
        std::error_code none;
        check(!side || !std::filesystem::equivalent(side->path, side_path(options.out), none),
              "--out '%s' is the set that is to be converted; it would be replaced\nHINT: another --out", options.out.c_str());
    }
    const Known known = known_of_all(options, paths);
    prepare_out(options.out);
    const OutLock lock(options.out);
    check_no_run_left(options.out);
    stop_cleanly_on_signals();
    if (options.to == "megatron") {
        convert_to_megatron(options, paths, known);
    } else {
        convert_to_shards(options, paths, known);
    }
}
