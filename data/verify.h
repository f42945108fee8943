// verify.h: are files of token ids whole, and what their side file says they are?
#pragma once

#include "data/token_sets.h"

inline void check_xxh3(const std::string& path, const std::string& wanted) {
    ReadingProgress reading(path, File(path, "rb").size());
    const std::string found = file_xxh3(path, [&](size_t n) { reading.add(n); });
    check(found == wanted, "'%s' has the xxh3 %s, wanted %s", path.c_str(), found.c_str(), wanted.c_str());
}

// Throws for what is wrong. Returns what was looked at.
inline std::string verify_file(const LookOptions& options, const std::string& path, Tokenizers& tokenizers) {
    const TokenFile file(path);
    const i64 tokens = file.tokens();
    const auto side = find_side_file(file.path());
    check(!side || side->shard.tokens == tokens, "'%s' has %lld tokens, wanted the %lld that '%s' says", path.c_str(), (long long)tokens,
          (long long)(side ? side->shard.tokens : 0), side ? side->path.c_str() : "");
    const Known known = what_is_known(options, side, tokenizers);
    ReadingProgress progress(path, tokens);
    int32_t largest = -1;
    for_each_piece(file, known, [&](std::span<const int32_t> ids, bool) {
        for (const int32_t id : ids) { largest = std::max(largest, id); }
        progress.add(ids.size());
    });
    std::string text = format("%s tokens, largest id %d", grouped(tokens).c_str(), largest);
    text += known.vocab > 0 ? format(" below %lld", (long long)known.vocab) : " (the vocabulary is not known: --vocab)";
    if (!side || side->shard.xxh3.empty()) { return text + ", no checksum to compare"; }
    check_xxh3(file.path(), side->shard.xxh3);
    if (const MegatronIndex* index = file.megatron()) {
        for (const ShardInfo& s : side->split().shards) {
            if (index->path() == parent_folder(file.path()) + "/" + s.file) { check_xxh3(index->path(), s.xxh3); }
        }
    }
    return text + ", checksum right";
}

// One line for each file. Returns how many are not as they should be.
inline i64 verify(const LookOptions& options) {
    i64 failed = 0;
    Tokenizers tokenizers;
    const auto guarded = [&](const std::string& path, const auto& function) {
        try {
            function();
        } catch (const Error& e) {
            const std::string message = e.what();
            printf("FAIL %s: %s\n", path.c_str(), message.substr(0, message.find('\n')).c_str());
            failed++;
        }
    };
    for (const std::string& input : options.inputs) {
        guarded(input, [&] {
            for (const std::string& path : token_files(input)) {
                guarded(path, [&] { printf("ok   %s: %s\n", path.c_str(), verify_file(options, path, tokenizers).c_str()); });
            }
        });
    }
    return failed;
}
