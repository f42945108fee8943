// tokenizer.h: text <-> token ids. The libraries behind it are included only by tokenizer.cpp, so that what includes this compiles fast.
#pragma once

#include <memory>

#include "llmc/base.h"

// ---------------------------------------------------------------------------------------------------------------
// UTF-8

constexpr char REPLACEMENT_CHARACTER[] = "\xEF\xBF\xBD";  // U+FFFD, stands for bytes that are not UTF-8

constexpr int UTF8_INVALID = 0, UTF8_INCOMPLETE = -1;

// Length of the character at the start of `text`; UTF8_INVALID if there is none (overlong forms, surrogates and values past U+10FFFF are
// none); UTF8_INCOMPLETE if `text` ends in the middle of what may become one.
inline int utf8_length(std::string_view text) {
    if (text.empty()) { return UTF8_INCOMPLETE; }
    const unsigned char lead = text[0];
    if (lead < 0x80) { return 1; }
    const int length = lead >= 0xC2 && lead <= 0xDF ? 2 : (lead & 0xF0) == 0xE0 ? 3 : lead >= 0xF0 && lead <= 0xF4 ? 4 : UTF8_INVALID;
    for (int i = 1; i < length; i++) {
        if (i == (int)text.size()) { return UTF8_INCOMPLETE; }
        const unsigned char c = text[i];
        const unsigned char low = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        const unsigned char high = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        if (c < low || c > high) { return UTF8_INVALID; }
    }
    return length;
}

// The first bytes of `text` that are UTF-8.
inline size_t utf8_prefix(std::string_view text) {
    size_t at = 0;
    while (at < text.size()) {
        if ((unsigned char)text[at] < 0x80) {
            at++;
            continue;
        }
        const int length = utf8_length(text.substr(at));
        if (length <= 0) { break; }
        at += length;
    }
    return at;
}

// Puts one U+FFFD in the place of each byte that is not UTF-8. Returns how many.
inline i64 repair_utf8(std::string& text) {
    size_t valid = utf8_prefix(text);
    if (valid == text.size()) { return 0; }
    std::string out;
    i64 replaced = 0;
    for (std::string_view rest = text; !rest.empty(); valid = utf8_prefix(rest)) {
        out += rest.substr(0, valid);
        rest.remove_prefix(valid);
        if (rest.empty()) { break; }
        out += REPLACEMENT_CHARACTER;
        rest.remove_prefix(1);
        replaced++;
    }
    text = std::move(out);
    return replaced;
}

// The character at the start of `text`, which is UTF-8.
struct Character {
    uint32_t code;
    uint32_t bytes;
};
inline Character first_character(std::string_view text) {
    const auto byte = [&](size_t i) { return (uint32_t)(unsigned char)text[i]; };
    const uint32_t lead = byte(0);
    if (lead < 0x80) { return {lead, 1}; }
    if (lead < 0xE0) { return {(lead & 0x1F) << 6 | (byte(1) & 0x3F), 2}; }
    if (lead < 0xF0) { return {(lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3}; }
    return {(lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F), 4};
}
constexpr uint32_t CODE_POINTS = 0x110000;

// ---------------------------------------------------------------------------------------------------------------
// Tokenizers

enum class PieceKind : uint8_t { text, byte, control, unknown };

struct Piece {
    std::string bytes;  // what the id adds to a text: for PieceKind::byte maybe only a part of a character, for control nothing
    PieceKind kind;
};

struct Tokenizer {
    virtual ~Tokenizer() = default;

    // Plain text only: "<s>" gives the ids of three characters. BOS and EOS are for the caller to add. Safe from several threads; texts of
    // many MiB wait for one another, so that a few hundred MiB are enough for all. Bytes that are not UTF-8 count as U+FFFD each.
    std::vector<int32_t> encode(std::string_view text) const {
        std::vector<int32_t> ids;
        encode(text, ids);
        return ids;
    }
    void encode(std::string_view text, std::vector<int32_t>& ids) const;  // appends them
    std::string decode(const std::vector<int32_t>& ids) const;

    i64 vocab_size() const { return pieces.size(); }
    const Piece& piece(i64 id) const {
        check(id >= 0 && id < vocab_size(),
              "id %lld is outside the tokenizer's vocabulary of %lld\nHINT: pass the tokenizer that made the tokens", (long long)id,
              (long long)vocab_size());
        return pieces[id];
    }

    std::string file, kind, hash;  // hash: XXH3 of the file, in hex
    std::vector<Piece> pieces;
    int bos_id = -1, eos_id = -1, unknown_id = -1;  // -1: there is none
    bool adds_space = false;                        // encode() puts a space before the text, so decoding takes one away
    bool trims_spaces = false;                      // encode() drops spaces at the start of the text, so decoding drops all of them there
    size_t whole_text_bytes = SIZE_MAX;             // longer texts are encoded in parts, cut at a space, as if each were a text of its own

protected:
    virtual void encode_text(std::string_view text, std::vector<int32_t>& ids) const = 0;
};

// A SentencePiece model, or GPT-2's two files by the name of either, or a folder that holds one of these. Tells by the content what a file
// is; refuses what it cannot use, by name.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);

// Ids in, text out, as soon as characters are whole: a character cut across ids is held back. A control id (BOS, EOS) ends a text, the next
// one begins anew. One U+FFFD for each byte that is not UTF-8, as the SentencePiece library does.
class StreamDecoder {
public:
    explicit StreamDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

    std::string feed(int32_t id) {
        const Piece& piece = tokenizer_.piece(id);
        if (piece.kind == PieceKind::control) { return end_of_text(); }
        std::string_view bytes = piece.bytes;
        const bool strip = at_start_ && (tokenizer_.adds_space || tokenizer_.trims_spaces) && piece.kind == PieceKind::text;
        if (strip && bytes.starts_with(' ')) { bytes.remove_prefix(1); }
        at_start_ = at_start_ && tokenizer_.trims_spaces && bytes.empty();
        pending_ += bytes;
        return take_complete();
    }

    // What a control id does: the next id begins another text.
    std::string end_of_text() {
        at_start_ = true;
        return flush();
    }
    // The end: what is held back comes as U+FFFD.
    std::string flush() {
        std::string out;
        for (size_t i = 0; i < pending_.size(); i++) { out += REPLACEMENT_CHARACTER; }
        pending_.clear();
        return out;
    }

private:
    std::string take_complete() {
        std::string out;
        size_t at = 0;
        while (at < pending_.size()) {
            const int length = utf8_length(std::string_view(pending_).substr(at));
            if (length == UTF8_INCOMPLETE) { break; }
            out += length == UTF8_INVALID ? REPLACEMENT_CHARACTER : pending_.substr(at, length);
            at += length == UTF8_INVALID ? 1 : length;
        }
        pending_.erase(0, at);
        return out;
    }

    const Tokenizer& tokenizer_;
    std::string pending_;
    bool at_start_ = true;
};

inline std::string Tokenizer::decode(const std::vector<int32_t>& ids) const {
    StreamDecoder decoder(*this);
    std::string text;
    for (const int32_t id : ids) { text += decoder.feed(id); }
    return text + decoder.flush();
}
