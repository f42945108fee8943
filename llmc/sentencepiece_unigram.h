// sentencepiece_unigram.h: the ids of SentencePiece's unigram models for texts of many MiB, in a few bytes of memory per byte of text where
// the library takes some 40 to 200. The best path is found as the library finds it (EncodeOptimized of its unigram_model.cc), score by score:
// the sum of a long text's scores is a large float, so which of two ways is better depends on how it was rounded.
#pragma once

#include <array>
#include <cfloat>
#include <unordered_map>

#include "bpe.h"
#include "sentencepiece_model.h"

class SentencePieceUnigram {
public:
    static bool can_encode(const SentencePieceModel& model) {
        const auto has_nul = [](const auto& piece) { return piece.text.find('\0') != std::string_view::npos; };  // ends it there
        return model.model_type == SentencePieceModel::UNIGRAM && is_plain(model) &&
               std::none_of(model.pieces.begin(), model.pieces.end(), has_nul);
    }

    SentencePieceUnigram(const SentencePieceModel& model, int unknown_id)
        : adds_space_(model.adds_space), byte_fallback_(model.byte_fallback), unknown_id_(unknown_id) {
        float least = FLT_MAX;
        for (const auto& piece : model.pieces) {
            const int32_t id = (int32_t)scores_.size();
            scores_.push_back(piece.score);
            bytes_.push_back(0);
            if (piece.type == SentencePieceModel::BYTE) { byte_ids_[byte_of_piece(piece.text)] = id; }
            if (piece.type != SentencePieceModel::NORMAL) { continue; }
            least = std::min(least, piece.score);
            const bool can_come_up = piece.text.find(' ') == std::string::npos && utf8_prefix(piece.text) == piece.text.size();
            if (can_come_up) { add_piece(id, with_spaces(std::string(piece.text))); }
        }
        constexpr float PENALTY = 10;
        unknown_score_ = least - PENALTY;
    }

    std::vector<int32_t> encode(std::string_view text) const {
        if (text.empty()) { return {}; }
        std::string room, with_space;
        text = cleaned(text, room);
        if (adds_space_) {
            with_space.reserve(text.size() + 1);
            with_space = " ";
            text = with_space += text;
            room = {};
        }
        std::vector<int32_t> path = best_path(text);
        return ids_of(text, path);
    }

private:
    static constexpr int32_t NONE = -1, ROOT = 0;

    void add_piece(int32_t id, const std::string& text) {
        int32_t node = ROOT;
        for (const unsigned char byte : text) {
            node = children_.insert(pair_key(node, byte), (int32_t)ends_.size());
            if (node == (int32_t)ends_.size()) { ends_.push_back(NONE); }
        }
        ends_[node] = id;
        bytes_[id] = text.size();
        longest_ = std::max(longest_, text.size());
    }

    // At each place the last piece of the best way there (or the unknown id, of one character); NONE: no piece ends there.
    std::vector<int32_t> best_path(std::string_view text) const {
        std::vector<int32_t> last(text.size() + 1, NONE);
        std::vector<float> scores(std::bit_ceil(longest_ + 1));  // of the ways to the places ahead, in turns
        const size_t mask = scores.size() - 1;
        for (size_t at = 0; at < text.size();) {
            const float here = at == 0 ? 0 : scores[at & mask];
            const auto offer = [&](size_t end, double score, int32_t id) {  // compared before it is rounded, as there
                if (last[end] != NONE && !(score > scores[end & mask])) { return; }
                last[end] = id;
                scores[end & mask] = (float)score;
            };
            const size_t next = at + first_character(text.substr(at)).bytes;
            bool has_character = false;
            int32_t node = ROOT;
            for (size_t end = at; end < text.size();) {
                const int32_t* child = children_.find(pair_key(node, (unsigned char)text[end]));
                if (child == nullptr) { break; }
                node = *child;
                end++;
                if (ends_[node] == NONE) { continue; }
                offer(end, (double)scores_[ends_[node]] + here, ends_[node]);
                has_character = has_character || end == next;
            }
            if (!has_character) { offer(next, unknown_score_ + here, unknown_id_); }
            at = next;
        }
        return last;
    }

    // The ids of the best path, which is overwritten: a piece has at least a byte, so what is overwritten was used.
    std::vector<int32_t> ids_of(std::string_view text, std::vector<int32_t>& last) const {
        size_t first = last.size(), count = 0;
        for (size_t at = text.size(); at > 0;) {
            const int32_t id = last[at];
            last[--first] = id;
            if (id != unknown_id_) {
                at -= bytes_[id];
                count++;
            } else {
                do { at--; } while (((unsigned char)text[at] & 0xC0) == 0x80);
                count += bytes_of_unknown(text, at).size();
            }
        }
        std::vector<int32_t> ids;
        ids.reserve(count);
        size_t at = 0;
        for (const int32_t id : std::span(last).subspan(first)) {
            if (id != unknown_id_) {
                ids.push_back(id);
                at += bytes_[id];
                continue;
            }
            if (byte_fallback_) {
                for (const unsigned char byte : bytes_of_unknown(text, at)) { ids.push_back(byte_ids_[byte]); }
            } else if (ids.empty() || ids.back() != unknown_id_) {  // a run of unknown characters is one unknown id
                ids.push_back(id);
            }
            at += first_character(text.substr(at)).bytes;
        }
        return ids;
    }

    // Of the character at `at`, as the model has it.
    static std::string_view bytes_of_unknown(std::string_view text, size_t at) {
        return text[at] == ' ' ? std::string_view(SENTENCEPIECE_SPACE) : text.substr(at, first_character(text.substr(at)).bytes);
    }

    const bool adds_space_, byte_fallback_;
    const int32_t unknown_id_;
    float unknown_score_;
    std::array<int32_t, 256> byte_ids_ = {};
    std::vector<float> scores_;
    std::vector<size_t> bytes_;  // of each piece, with a space for its mark
    size_t longest_ = 4;         // a character is a step, too
    FlatMap<int32_t> children_;  // the pieces' trie: from a node by a byte to the next node
    std::vector<int32_t> ends_ = {NONE};
};
