// sentencepiece_bpe.h: the ids of SentencePiece's BPE at some 20 times the library's speed and a few bytes of memory per byte of text, for
// models that leave the text as it is (Llama's do). A merge joins neighbouring characters into a piece, so where no piece of the vocabulary
// holds two characters side by side, no merge ever crosses between them: there the text is cut, and the ids of the segments are cached.
#pragma once

#include <algorithm>
#include <array>
#include <unordered_map>

#include "bpe.h"
#include "sentencepiece_model.h"
#include "tokenizer.h"

class SentencePieceBpe {
public:
    static bool can_encode(const SentencePieceModel& model) { return model.model_type == SentencePieceModel::BPE && is_plain(model); }

    SentencePieceBpe(const SentencePieceModel& model, int unknown_id)
        : adds_space_(model.adds_space), byte_fallback_(model.byte_fallback), unknown_id_(unknown_id), vocab_(model.pieces.size()) {
        // Symbols are the ids of the pieces, then the characters that have no piece of their own but are part of others.
        std::vector<std::string> texts(vocab_);
        std::unordered_map<std::string_view, int32_t> symbols;
        std::vector<float> scores;
        for (int32_t id = 0; id < vocab_; id++) {
            const auto& piece = model.pieces[id];
            if (piece.type == SentencePieceModel::BYTE) { byte_ids_[byte_of_piece(piece.text)] = id; }
            const bool can_come_up = piece.text.find(' ') == std::string::npos && utf8_prefix(piece.text) == piece.text.size();
            if (piece.type != SentencePieceModel::NORMAL || !can_come_up) { continue; }
            texts[id] = with_spaces(std::string(piece.text));
            symbols[texts[id]] = id;
            scores.push_back(piece.score);
            const Character c = first_character(texts[id]);
            if (c.bytes == texts[id].size()) { set_symbol(c.code, id); }
        }
        std::sort(scores.begin(), scores.end(), std::greater<float>());
        scores.erase(std::unique(scores.begin(), scores.end()), scores.end());

        for (int32_t id = 0; id < vocab_; id++) {
            std::vector<int32_t> units;
            uint32_t before = 0;
            for (std::string_view rest = texts[id]; !rest.empty();) {
                const Character c = first_character(rest);
                if (symbol_of(c.code) == NO_SYMBOL) {
                    const int32_t symbol = vocab_ + (int32_t)characters_.size();
                    characters_.push_back(std::string(rest.substr(0, c.bytes)));
                    set_symbol(c.code, symbol);
                    symbols[rest.substr(0, c.bytes)] = symbol;
                    bpe_.add_symbol(symbol, c.bytes, {symbol});
                }
                units.push_back(symbol_of(c.code));
                if (units.size() > 1) { join(before, c.code); }
                before = c.code;
                rest.remove_prefix(c.bytes);
            }
            if (!units.empty()) { bpe_.add_symbol(id, texts[id].size(), units); }
        }
        for (int32_t id = 0; id < vocab_; id++) {
            const int32_t rank =
                std::lower_bound(scores.begin(), scores.end(), model.pieces[id].score, std::greater<float>()) - scores.begin();
            const std::string_view text = texts[id];
            for (size_t at = 1; at < text.size(); at++) {
                const auto left = symbols.find(text.substr(0, at)), right = symbols.find(text.substr(at));
                if (left != symbols.end() && right != symbols.end()) { bpe_.add_merge(left->second, right->second, {rank, id}); }
            }
        }
    }

    // Appends the ids of a text.
    void encode(std::string_view text, std::vector<int32_t>& ids) const {
        if (text.empty()) { return; }
        std::string room;
        text = cleaned(text, room);
        const auto scratch = scratches_.take();
        const size_t first = ids.size();
        ids.reserve(first + text.size() / 4 + 8);
        size_t at = 0;
        if (adds_space_) {
            at = joins(' ', first_character(text).code) ? segment_end(text, 0) : 0;
            encode_segment(" " + std::string(text.substr(0, at)), *scratch, ids, first);
        }
        while (at < text.size()) {
            const size_t end = segment_end(text, at);
            encode_segment(text.substr(at, end - at), *scratch, ids, first);
            at = end;
        }
    }

private:
    static constexpr uint32_t ASCII = 128, PAGE = 256;
    static constexpr int32_t NO_SYMBOL = -1;

    struct Scratch {
        Bpe::Scratch bpe;
        SegmentCache cache;
    };

    // Code point -> symbol.
    int32_t symbol_of(uint32_t code) const { return symbol_pages_[page_of_[code / PAGE] * PAGE + code % PAGE]; }
    void set_symbol(uint32_t code, int32_t symbol) {
        if (page_of_[code / PAGE] == 0) {
            page_of_[code / PAGE] = symbol_pages_.size() / PAGE;
            symbol_pages_.resize(symbol_pages_.size() + PAGE, NO_SYMBOL);
        }
        symbol_pages_[page_of_[code / PAGE] * PAGE + code % PAGE] = symbol;
    }

    // Does any piece hold these two characters side by side?
    bool joins(uint32_t left, uint32_t right) const {
        return left < ASCII && right < ASCII ? ascii_joins_[left * ASCII + right] : joins_.find(pair_key(left, right)) != nullptr;
    }
    void join(uint32_t left, uint32_t right) {
        if (left < ASCII && right < ASCII) { ascii_joins_[left * ASCII + right] = true; }
        joins_.insert(pair_key(left, right), true);
    }

    size_t segment_end(std::string_view text, size_t at) const {
        Character before = first_character(text.substr(at));
        for (at += before.bytes; at < text.size(); at += before.bytes) {
            const Character next = first_character(text.substr(at));
            if (!joins(before.code, next.code)) { break; }
            before = next;
        }
        return at;
    }

    // Appends the ids of a segment to those of its text, which begin at `first`.
    void encode_segment(std::string_view segment, Scratch& scratch, std::vector<int32_t>& ids, size_t first) const {
        if (segment.size() <= SegmentCache::MAX_BYTES) {
            const auto encode = [&](std::vector<int32_t>& alone) { encode_anew(segment, scratch.bpe, alone, 0); };
            append(scratch.cache.ids_of(segment, encode), ids, first);
        } else {
            encode_anew(segment, scratch.bpe, ids, first);
        }
    }

    // Nothing large is held beside the ids.
    void encode_anew(std::string_view segment, Bpe::Scratch& scratch, std::vector<int32_t>& ids, size_t first) const {
        const Character c = first_character(segment);
        if (c.bytes == segment.size() && symbol_of(c.code) == NO_SYMBOL) { return append_unknown(segment, ids, first); }
        const auto unit_at = [this](std::string_view rest) {
            const Character c = first_character(rest);
            return Bpe::Unit{symbol_of(c.code), c.bytes};
        };
        const size_t begin = ids.size();
        bpe_.encode(segment, unit_at, scratch, ids);
        const auto is_character = [this](int32_t symbol) { return symbol >= vocab_; };
        if (std::none_of(ids.begin() + begin, ids.end(), is_character)) { return; }
        const std::vector<int32_t> symbols(ids.begin() + begin, ids.end());
        ids.resize(begin);
        for (const int32_t symbol : symbols) {
            if (is_character(symbol)) {
                append_unknown(characters_[symbol - vocab_], ids, first);
            } else {
                ids.push_back(symbol);
            }
        }
    }

    // A run of unknown characters is one unknown id.
    void append(std::span<const int32_t> more, std::vector<int32_t>& ids, size_t first) const {
        const bool goes_on = more[0] == unknown_id_ && ids.size() > first && ids.back() == unknown_id_;
        ids.insert(ids.end(), more.begin() + goes_on, more.end());
    }
    void append_unknown(std::string_view character, std::vector<int32_t>& ids, size_t first) const {
        if (!byte_fallback_) { return append({&unknown_id_, 1}, ids, first); }
        for (const unsigned char byte : character == " " ? std::string_view(SENTENCEPIECE_SPACE) : character) {
            ids.push_back(byte_ids_[byte]);
        }
    }

    const bool adds_space_, byte_fallback_;
    const int32_t unknown_id_, vocab_;
    std::array<int32_t, 256> byte_ids_ = {};
    std::vector<std::string> characters_;  // of the symbols from vocab_ on
    std::vector<uint16_t> page_of_ = std::vector<uint16_t>(CODE_POINTS / PAGE, 0);
    std::vector<int32_t> symbol_pages_ = std::vector<int32_t>(PAGE, NO_SYMBOL);
    std::vector<uint8_t> ascii_joins_ = std::vector<uint8_t>(ASCII * ASCII, false);
    FlatMap<bool> joins_;
    Bpe bpe_{false};
    mutable Pool<Scratch> scratches_;
};
