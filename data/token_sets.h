// token_sets.h: what --inspect, --verify, --decode and --convert share: which files are meant, what is known of their ids, their documents.
#pragma once

#include "data/summary.h"
#include "llmc/data_spec.h"
#include "llmc/megatron.h"

struct LookOptions {
    std::vector<std::string> inputs;
    std::string tokenizer, doc_separator;
    i64 vocab = 0;    // 0: not given
    int eos_id = -1;  // -1: not given
};

// Files of tokens; a side file PREFIX.json stands for the files of its set.
inline std::vector<std::string> token_files(const std::string& input) {
    if (!input.ends_with(".json")) { return find_token_files(input); }
    const auto info = read_token_set_info(input);
    check(info.has_value(), "'%s' is not the side file of a set of tokens\nHINT: pass the set's files of ids", input.c_str());
    std::vector<std::string> files;
    for (const SplitInfo* split : {&info->train, &info->val}) {
        for (const ShardInfo& s : split->shards) {
            if (!s.file.ends_with(".idx")) { files.push_back(parent_folder(input) + "/" + s.file); }
        }
    }
    return files;
}
inline std::vector<std::string> token_files(const std::vector<std::string>& inputs) {
    std::vector<std::string> files;
    for (const std::string& input : inputs) {
        for (const std::string& file : token_files(input)) { files.push_back(file); }
    }
    return files;
}

// What the command line and a side file tell of a file's ids.
struct Known {
    std::optional<SideFile> side;
    std::shared_ptr<const Tokenizer> tokenizer;  // the one given; nullptr: none
    i64 vocab = 0;                               // 0: not known
    int end_id = -1, start_id = -1;              // what a document ends with, or starts with; -1: no such
};

// Many files mostly have one tokenizer: the one used last is kept.
class Tokenizers {
public:
    std::shared_ptr<const Tokenizer> load(const std::string& path) {
        if (!last_ || path != path_) { last_ = load_tokenizer(path); }
        path_ = path;
        return last_;
    }

private:
    std::string path_;
    std::shared_ptr<const Tokenizer> last_;
};

// Ids of another tokenizer would be shown as nonsense, and passed on under a wrong name.
inline void check_tokenizer(const SideFile& side, const Tokenizer& tokenizer) {
    const std::string& wanted = side.info->tokenizer_hash;
    check(wanted.empty() || wanted == tokenizer.hash,
          "'%s' was made with another tokenizer than '%s' (xxh3 %s, found %s)\nHINT: --tokenizer FILE", side.path.c_str(),
          tokenizer.file.c_str(), wanted.c_str(), tokenizer.hash.c_str());
}

inline Known what_is_known(const LookOptions& options, std::optional<SideFile> side, Tokenizers& tokenizers) {
    Known known;
    known.side = std::move(side);
    const TokenSetInfo* info = known.side ? known.side->info.get() : nullptr;
    if (!options.tokenizer.empty()) {
        known.tokenizer = tokenizers.load(options.tokenizer);
        if (known.side) { check_tokenizer(*known.side, *known.tokenizer); }
    }
    known.vocab = options.vocab > 0 ? options.vocab : known.tokenizer ? known.tokenizer->vocab_size() : info ? info->vocab : 0;
    if (options.eos_id >= 0) {
        known.end_id = options.eos_id;
    } else if (info) {
        known.end_id = info->eos ? info->eos_id : -1;
        known.start_id = !info->eos && info->bos ? info->bos_id : -1;
    } else if (known.tokenizer) {
        known.end_id = known.tokenizer->eos_id;
    }
    return known;
}

inline Known what_is_known(const LookOptions& options, const TokenFile& file, Tokenizers& tokenizers) {
    return what_is_known(options, find_side_file(file.path(), file.tokens()), tokenizers);
}

// The tokenizer given, else the one that the side file names, if that is to be had.
inline std::shared_ptr<const Tokenizer> tokenizer_for_text(const Known& known, Tokenizers& tokenizers) {
    if (known.tokenizer || !known.side || known.side->info->tokenizer_file.empty()) { return known.tokenizer; }
    const TokenSetInfo& info = *known.side->info;
    if (!path_exists(info.tokenizer_file)) { return nullptr; }
    const auto tokenizer = tokenizers.load(info.tokenizer_file);
    check_tokenizer(*known.side, *tokenizer);
    return tokenizer;
}

// Tells every few seconds how far the reading of large files is.
class ReadingProgress {
public:
    ReadingProgress(const std::string& path, i64 total) : path_(path), total_(total) {}
    void add(i64 n) {
        done_ += n;
        if (every_.due()) {
            fprintf(stderr, "tokenize: %s: %.0f%%\n", path_.c_str(), 100 * (double)done_ / (double)std::max<i64>(total_, 1));
        }
    }

private:
    std::string path_;
    i64 total_, done_ = 0;
    Every every_{5};
};

// All ids of a file in order, in pieces: function(ids, ends), where ends says that a document ends after them; one without ids counts only
// in a Megatron set, whose index tells its documents. Elsewhere the ids end_id and start_id do, and where neither is known none ends. Ids
// must be below vocab (0: any).
template <typename Function>
void for_each_piece(const TokenFile& file, const Known& known, Function function) {
    constexpr i64 CHUNK = 1 << 16;
    const i64 vocab = known.vocab > 0 ? known.vocab : std::numeric_limits<int32_t>::max();
    std::vector<int32_t> ids(CHUNK);
    if (const MegatronIndex* index = file.megatron()) {
        for (i64 d = 0; d < index->documents(); d++) {
            for (i64 s = index->first_sequence(d); s < index->first_sequence(d + 1); s++) {
                for (i64 at = 0, n; at < index->length(s); at += n) {
                    n = std::min(CHUNK, index->length(s) - at);
                    file.read_sequence(s, at, n, vocab, ids.data());
                    function(std::span<const int32_t>(ids.data(), n), false);
                }
            }
            function(std::span<const int32_t>(), true);
        }
        return;
    }
    for (i64 at = 0, n; at < file.tokens(); at += n) {
        n = std::min(CHUNK, file.tokens() - at);
        file.read(at, n, vocab, ids.data());
        std::span<const int32_t> rest(ids.data(), n);
        for (size_t i = 0; i < rest.size();) {
            const bool starts = rest[i] == known.start_id, ends = rest[i] == known.end_id;
            i += !starts;
            if (!starts && !ends) { continue; }
            function(rest.first(i), true);
            rest = rest.subspan(i);
            i = starts;
        }
        function(rest, false);
    }
}
