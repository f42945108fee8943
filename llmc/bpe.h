// bpe.h: byte-pair encoding of a segment of text, exactly, fast, in bounded memory: what SentencePiece's BPE and GPT-2's have in common.
//
// A text starts as one symbol per unit (SentencePiece: a character; GPT-2: a byte). Of all pairs of neighbours that may merge, the one of
// lowest rank merges, of equal ones the leftmost, until none is left. Short segments are encoded just so. That takes quadratic time, so
// long ones go from left to right instead, by this law: symbols are the encoding of their text if, and only if, any two neighbours among
// them are the encoding of theirs. (Which pair merges next depends on ranks and on what lies further left, not on places. So as long as
// no merge has crossed a border between those symbols, what happens within two of them happens also to the two alone, and the first merge
// to cross their border would cross it there, too.) The last symbol of the encoding of each prefix then follows from those before.
#pragma once

#include <xxhash.h>

#include <memory>
#include <mutex>
#include <span>

#include "base.h"

// A hash table of keys below 2^64 - 1, for reading much: open addressing, at most half full.
template <typename Value>
class FlatMap {
public:
    // Returns what is now under this key: what was there before, else `value`.
    const Value& insert(uint64_t key, Value value) {
        if (2 * (size_ + 1) > slots_.size()) { grow(); }
        Slot& slot = slots_[find_slot(key)];
        if (slot.key != key) {
            slot = {key, value};
            size_++;
        }
        return slot.value;
    }
    const Value* find(uint64_t key) const {
        const Slot& slot = slots_[find_slot(key)];
        return slot.key == key ? &slot.value : nullptr;
    }

private:
    struct Slot {
        uint64_t key = UINT64_MAX;
        Value value = {};
    };
    size_t find_slot(uint64_t key) const {
        size_t at = (key * 0x9E3779B97F4A7C15u) >> shift_;
        while (slots_[at].key != key && slots_[at].key != UINT64_MAX) { at = (at + 1) & (slots_.size() - 1); }
        return at;
    }
    void grow() {
        std::vector<Slot> before(2 * slots_.size());
        before.swap(slots_);
        shift_--;
        for (const Slot& s : before) {
            if (s.key != UINT64_MAX) { slots_[find_slot(s.key)] = s; }
        }
    }

    int shift_ = 60;
    std::vector<Slot> slots_ = std::vector<Slot>(16);
    size_t size_ = 0;
};

constexpr uint64_t pair_key(uint32_t left, uint32_t right) { return (uint64_t)left << 32 | right; }

// The ids of short segments that came lately. Of two that fall to the same place the newer stays.
class SegmentCache {
public:
    static constexpr size_t MAX_BYTES = 30;

    // The ids of a segment of at most MAX_BYTES, from 1 on: what is kept, else what encode(ids) appends. Good until the next call.
    template <typename Encode>
    std::span<const int32_t> ids_of(std::string_view segment, const Encode& encode) {
        Entry& entry = entries_[XXH3_64bits(segment.data(), segment.size()) % ENTRIES];
        if (entry.bytes == segment.size() && memcmp(entry.text, segment.data(), segment.size()) == 0) { return {entry.id, entry.ids}; }
        ids_.clear();
        encode(ids_);
        if (ids_.size() <= std::size(entry.id)) {
            entry.bytes = segment.size();
            entry.ids = ids_.size();
            memcpy(entry.text, segment.data(), segment.size());
            memcpy(entry.id, ids_.data(), ids_.size() * sizeof(int32_t));
        }
        return ids_;
    }

private:
    struct Entry {
        uint8_t bytes = 0, ids = 0;  // 0 bytes: nothing yet
        char text[MAX_BYTES];
        int32_t id[8];
    };
    static constexpr size_t ENTRIES = 1 << 17;  // of 64 bytes: 8 MiB
    std::vector<Entry> entries_ = std::vector<Entry>(ENTRIES);
    std::vector<int32_t> ids_;
};

// Two neighbours that may merge: when, and into what.
struct Merge {
    int32_t rank = std::numeric_limits<int32_t>::max();  // lower ranks merge first; this one never
    int32_t result = -1;
};

class Bpe {
public:
    // What one thread needs while it encodes.
    struct Scratch {
        std::vector<int32_t> symbols;
        std::vector<Merge> merges;
        struct Compatible {
            uint64_t key = UINT64_MAX;
            bool yes = false;
        };
        std::vector<Compatible> compatible = std::vector<Compatible>(1 << 16);
    };
    // A unit of text: its symbol, and how many bytes of text it is.
    struct Unit {
        int32_t symbol;
        size_t bytes;
    };

    // same_pair_at_once: GPT-2's encoder merges all places of the chosen pair before it chooses again. That differs only where a merge's
    // result takes part in a merge of lower rank than its own.
    explicit Bpe(bool same_pair_at_once) : same_pair_at_once_(same_pair_at_once) {}

    // A symbol (from 0), the bytes of its text, and the units, symbols themselves, that its text consists of.
    void add_symbol(int32_t symbol, size_t bytes, const std::vector<int32_t>& units) {
        if (symbol >= (int32_t)symbols_.size()) { symbols_.resize(symbol + 1); }
        symbols_[symbol] = {bytes, units_.size(), units.size()};
        units_.insert(units_.end(), units.begin(), units.end());
        int32_t node = ROOT;
        for (const int32_t unit : units) {
            const int32_t next = children_.insert(pair_key(node, unit), (int32_t)ends_.size());
            if (next == (int32_t)ends_.size()) { ends_.push_back(NONE); }
            node = next;
        }
        ends_[node] = symbol;
    }
    // False if these two have one already, which stays.
    bool add_merge(int32_t left, int32_t right, Merge merge) {
        const Merge& now = merges_.insert(pair_key(left, right), merge);
        return now.rank == merge.rank && now.result == merge.result;
    }

    // Appends the segment's symbols. unit_at(rest of the segment) gives the unit it starts with.
    template <typename UnitAt>
    void encode(std::string_view segment, const UnitAt& unit_at, Scratch& scratch, std::vector<int32_t>& symbols) const {
        if (segment.size() > LONG_SEGMENT) { return encode_long(segment, unit_at, scratch, symbols); }
        scratch.symbols.clear();
        while (!segment.empty()) {
            const Unit unit = unit_at(segment);
            scratch.symbols.push_back(unit.symbol);
            segment.remove_prefix(unit.bytes);
        }
        merge_by_rank(scratch.symbols, scratch.merges);
        symbols.insert(symbols.end(), scratch.symbols.begin(), scratch.symbols.end());
    }

private:
    static constexpr int32_t NONE = -1, ROOT = 0;
    static constexpr size_t LONG_SEGMENT = 256;  // bytes: from about here on the way for long ones is the faster one

    struct Symbol {
        size_t bytes = 0, first_unit = 0, units = 0;
    };

    Merge find_merge(int32_t left, int32_t right) const {
        const Merge* merge = merges_.find(pair_key(left, right));
        return merge ? *merge : Merge();
    }

    void merge_by_rank(std::vector<int32_t>& symbols, std::vector<Merge>& merges) const {
        merges.clear();  // merges[i]: of symbols[i] and the next one
        for (size_t i = 0; i + 1 < symbols.size(); i++) { merges.push_back(find_merge(symbols[i], symbols[i + 1])); }
        while (!merges.empty()) {
            size_t best = 0;
            for (size_t i = 1; i < merges.size(); i++) {
                if (merges[i].rank < merges[best].rank) { best = i; }
            }
            const int32_t rank = merges[best].rank;
            if (rank == Merge().rank) { return; }
            for (size_t i = best; i < merges.size(); i++) {
                if (merges[i].rank != rank) { continue; }
                symbols[i] = merges[i].result;
                symbols.erase(symbols.begin() + i + 1);
                merges.erase(merges.begin() + i);
                if (i > 0) { merges[i - 1] = find_merge(symbols[i - 1], symbols[i]); }
                if (i < merges.size()) { merges[i] = find_merge(symbols[i], symbols[i + 1]); }
                if (!same_pair_at_once_) { break; }
            }
        }
    }

    // Are the two (or, where left is NONE, is the right one) the encoding of their text?
    bool compatible(int32_t left, int32_t right, Scratch& scratch) const {
        const uint64_t key = pair_key(left, right);
        auto& known = scratch.compatible[XXH3_64bits(&key, sizeof key) % scratch.compatible.size()];
        if (known.key != key) {
            scratch.symbols.clear();
            for (const int32_t symbol : {left, right}) {
                if (symbol == NONE) { continue; }
                const auto units = units_.begin() + symbols_[symbol].first_unit;
                scratch.symbols.insert(scratch.symbols.end(), units, units + symbols_[symbol].units);
            }
            merge_by_rank(scratch.symbols, scratch.merges);
            // Each text has one symbol at most: if two are left and the second is `right`, the first is `left`.
            known = {key, scratch.symbols.size() == 1 + (left != NONE) && scratch.symbols.back() == right};
        }
        return known.yes;
    }

    template <typename UnitAt>
    void encode_long(std::string_view segment, const UnitAt& unit_at, Scratch& scratch, std::vector<int32_t>& symbols) const {
        std::vector<int32_t> last(segment.size() + 1, NONE);  // the last symbol of the encoding of the text up to here
        for (size_t at = 0; at < segment.size(); at += unit_at(segment.substr(at)).bytes) {
            int32_t node = ROOT;
            for (size_t end = at; end < segment.size();) {
                const Unit unit = unit_at(segment.substr(end));
                const int32_t* child = children_.find(pair_key(node, unit.symbol));
                if (child == nullptr) { break; }
                node = *child;
                end += unit.bytes;
                const int32_t symbol = ends_[node];
                if (symbol != NONE && last[end] == NONE && compatible(last[at], symbol, scratch)) { last[end] = symbol; }
            }
        }
        // From the end to the start. A symbol has at least a byte, so what is overwritten was used.
        size_t first = last.size();
        for (size_t at = segment.size(); at > 0; at -= symbols_[last[first]].bytes) {
            const int32_t symbol = last[at];
            last[--first] = symbol;
        }
        symbols.insert(symbols.end(), last.begin() + first, last.end());
    }

    bool same_pair_at_once_;
    std::vector<Symbol> symbols_;
    std::vector<int32_t> units_;
    // The texts of all symbols as a trie: from a node by a unit to the next node; the symbol whose text ends at a node.
    FlatMap<int32_t> children_;
    std::vector<int32_t> ends_ = {NONE};
    FlatMap<Merge> merges_;
};

// Things that threads use in turn: as many as were ever in use at once.
template <typename T>
class Pool {
public:
    class Lease {
    public:
        Lease(Pool& pool, std::unique_ptr<T> thing) : pool_(pool), thing_(std::move(thing)) {}
        ~Lease() {
            const std::lock_guard lock(pool_.mutex_);
            pool_.idle_.push_back(std::move(thing_));
        }
        T& operator*() const { return *thing_; }

    private:
        Pool& pool_;
        std::unique_ptr<T> thing_;
    };

    Lease take() {
        const std::lock_guard lock(mutex_);
        if (idle_.empty()) { return Lease(*this, std::make_unique<T>()); }
        std::unique_ptr<T> thing = std::move(idle_.back());
        idle_.pop_back();
        return Lease(*this, std::move(thing));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<T>> idle_;
};
