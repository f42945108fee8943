// inspect.h: what is in files of token ids, for a person to look at.
#pragma once

#include "data/token_sets.h"

inline std::string quoted(const std::string& text) {
    return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// How often each id occurs. Those from MOST_COUNTED on, which no vocabulary has, are not told apart.
class IdStatistics {
public:
    void add(std::span<const int32_t> ids) {
        for (const int32_t id : ids) {
            smallest_ = std::min(smallest_, id);
            largest_ = std::max(largest_, id);
            if (id >= MOST_COUNTED) { continue; }
            if ((size_t)id >= counts_.size()) { counts_.resize(std::min<size_t>(std::bit_ceil((size_t)id + 1), MOST_COUNTED)); }
            counts_[id]++;
        }
    }
    int32_t smallest() const { return smallest_; }
    int32_t largest() const { return largest_; }
    bool complete() const { return largest_ < MOST_COUNTED; }
    i64 distinct() const { return counts_.size() - std::count(counts_.begin(), counts_.end(), 0); }
    i64 count(int32_t id) const { return counts_[id]; }
    std::vector<int32_t> most_frequent(size_t n) const {
        std::vector<int32_t> ids;
        for (size_t id = 0; id < counts_.size(); id++) {
            if (counts_[id] > 0) { ids.push_back((int32_t)id); }
        }
        n = std::min(n, ids.size());
        std::partial_sort(ids.begin(), ids.begin() + n, ids.end(),
                          [&](int32_t a, int32_t b) { return counts_[a] != counts_[b] ? counts_[a] > counts_[b] : a < b; });
        ids.resize(n);
        return ids;
    }

private:
    static constexpr int32_t MOST_COUNTED = 1 << 24;
    int32_t smallest_ = std::numeric_limits<int32_t>::max(), largest_ = -1;
    std::vector<i64> counts_;
};

inline void print_side_file(const SideFile& side) {
    const TokenSetInfo& info = *side.info;
    printf("  set    %s (%s): %s documents, %s tokens, %s bytes of text; problems: %s\n", side.path.c_str(), side.is_val ? "val" : "train",
           grouped(side.split().documents).c_str(), grouped(side.split().tokens).c_str(),
           side.split().text_bytes > 0 ? grouped(side.split().text_bytes).c_str() : "unknown", counts_text(info.problems).c_str());
    const std::string by = info.tokenizer_hash.empty() ? "an unknown tokenizer"
                                                       : format("%s '%s' (xxh3 %s)", info.tokenizer_kind.c_str(),
                                                                info.tokenizer_file.c_str(), info.tokenizer_hash.c_str());
    printf("  made   by %s, vocabulary %s; a document %s BOS (%d) and %s EOS (%d)\n", by.c_str(), grouped(info.vocab).c_str(),
           info.bos ? "starts with" : "has no", info.bos_id, info.eos ? "ends with" : "no", info.eos_id);
}

inline void print_ids(const char* name, const std::vector<int32_t>& ids, const Tokenizer* tokenizer) {
    printf("  %-6s", name);
    for (const int32_t id : ids) { printf(" %d", id); }
    printf("\n");
    // Ids of another vocabulary than the tokenizer's are shown as ids only.
    const bool readable = tokenizer && std::all_of(ids.begin(), ids.end(), [&](int32_t id) { return id < tokenizer->vocab_size(); });
    if (readable) { printf("         %s\n", quoted(tokenizer->decode(ids)).c_str()); }
}

inline void inspect_file(const LookOptions& options, const std::string& path, Tokenizers& tokenizers) {
    constexpr i64 SHOWN = 24, FREQUENT = 8;
    const TokenFile file(path);
    Known known = what_is_known(options, file, tokenizers);
    known.tokenizer = tokenizer_for_text(known, tokenizers);
    known.vocab = 0;  // to look at a file that does not fit its vocabulary, too
    printf("%s: %s, %s tokens\n", path.c_str(), file.describe().c_str(), grouped(file.tokens()).c_str());
    if (known.side) { print_side_file(*known.side); }

    IdStatistics statistics;
    std::vector<int32_t> first, last;
    i64 documents = 0;
    bool open = false;
    ReadingProgress progress(path, file.tokens());
    for_each_piece(file, known, [&](std::span<const int32_t> ids, bool ends) {
        statistics.add(ids);
        first.insert(first.end(), ids.begin(), ids.begin() + std::min<i64>(ids.size(), SHOWN - first.size()));
        last.insert(last.end(), ids.end() - std::min<i64>(ids.size(), SHOWN), ids.end());
        if ((i64)last.size() > SHOWN) { last.erase(last.begin(), last.end() - SHOWN); }
        open = open || !ids.empty();
        documents += ends && (open || file.megatron());
        open = open && !ends;
        progress.add(ids.size());
    });
    if (file.megatron() || known.end_id >= 0 || known.start_id >= 0) {
        printf("  documents %s%s\n", grouped(documents + open).c_str(), open ? ", the last one is not ended in this file" : "");
    }
    if (statistics.largest() >= 0) {
        printf("  ids    smallest %d, largest %d, %s%s different ones\n", statistics.smallest(), statistics.largest(),
               statistics.complete() ? "" : "at least ", grouped(statistics.distinct()).c_str());
        printf("  most frequent");
        for (const int32_t id : statistics.most_frequent(FREQUENT)) {
            const std::string text =
                known.tokenizer && id < known.tokenizer->vocab_size() ? " " + quoted(known.tokenizer->piece(id).bytes) : "";
            printf("%s %d%s (%.2f%%)", id == statistics.most_frequent(1)[0] ? "" : ",", id, text.c_str(),
                   100 * (double)statistics.count(id) / (double)file.tokens());
        }
        printf("\n");
    }
    print_ids("first", first, known.tokenizer.get());
    print_ids("last", last, known.tokenizer.get());
    if (!known.tokenizer) { printf("         (as text: pass --tokenizer FILE)\n"); }
    ReadingProgress reading(file.path(), File(file.path(), "rb").size());
    const std::string xxh3 = file_xxh3(file.path(), [&](size_t n) { reading.add(n); });
    const bool other = known.side && !known.side->shard.xxh3.empty() && known.side->shard.xxh3 != xxh3;
    printf("  xxh3   %s%s\n", xxh3.c_str(), other ? (", but '" + known.side->path + "' has " + known.side->shard.xxh3).c_str() : "");
}

inline void inspect(const LookOptions& options) {
    Tokenizers tokenizers;
    for (const std::string& path : token_files(options.inputs)) { inspect_file(options, path, tokenizers); }
}
