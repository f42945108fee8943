// json_text.h: a line of JSON from its start to its end, strictly: what is no JSON is found wherever it stands. Strings come as text.
#pragma once

#if defined(__AVX512VBMI2__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define JSON_BLOCKS
#include <immintrin.h>
#endif

#include <array>
#include <bit>
#include <charconv>
#include <tuple>
#include <vector>

#include "llmc/tokenizer.h"

// What a character means behind a backslash; 0: nothing, or (u) more than one character.
constexpr std::array<char, 128> ESCAPED = [] {
    std::array<char, 128> meaning = {};
    for (const char c : {'"', '\\', '/'}) { meaning[(int)c] = c; }
    meaning['b'] = '\b', meaning['f'] = '\f', meaning['n'] = '\n', meaning['r'] = '\r', meaning['t'] = '\t';
    return meaning;
}();

// Copies the inside of a string up to its end, a control character or an escape, or to `end` or a little beyond. Returns how far it came. A
// step's bytes behind `end` are there to be read, as many behind what is written to be overwritten.
using Copied = std::pair<const char*, char*>;
inline Copied copy_words(const char* at, const char* end, char* out) {
    static_assert(std::endian::native == std::endian::little);
    constexpr uint64_t ONES = ~0ull / 255, HIGH = 0x80 * ONES;
    const auto below = [](uint64_t bytes, uint64_t limit) { return (bytes - limit * ONES) & ~bytes & HIGH; };  // right up to the first that is
    for (; at < end; at += 8, out += 8) {
        uint64_t bytes;
        memcpy(&bytes, at, 8);
        memcpy(out, &bytes, 8);
        if (const uint64_t stop = below(bytes, ' ') | below(bytes ^ ('"' * ONES), 1) | below(bytes ^ ('\\' * ONES), 1)) {
            return {at + std::countr_zero(stop) / 8, out + std::countr_zero(stop) / 8};
        }
    }
    return {at, out};
}

#ifdef JSON_BLOCKS
// The same, 64 bytes at a time and without a branch for each escape: only one by number, or one that is none, ends it.
inline Copied copy_blocks(const char* at, const char* end, char* out) {
    constexpr uint64_t EVEN = ~0ull / 3;
    const __m512i low = _mm512_loadu_si512(ESCAPED.data()), high = _mm512_loadu_si512(ESCAPED.data() + 64);
    uint64_t pending = 0;  // 1: the block's first character is behind a backslash
    for (; at < end; at += 64) {
        const __m512i bytes = _mm512_loadu_si512(at);
        // In a run of backslashes every other one is an escape, from the first on: all that stand at even places, where the run begins at one.
        const uint64_t slashes = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8('\\')) & ~pending;
        const uint64_t even_starts = slashes & ~(slashes << 1) & EVEN, even_runs = slashes & ~(slashes + even_starts);
        const uint64_t escapes = (even_runs & EVEN) | (slashes & ~even_runs & ~EVEN), escaped = escapes << 1 | pending;
        const __m512i text = _mm512_mask2_permutex2var_epi8(low, bytes, escaped, high);
        const uint64_t odd = escaped & (_mm512_testn_epi8_mask(text, text) | _mm512_movepi8_mask(bytes));
        const uint64_t ends = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8('"')) | _mm512_cmplt_epu8_mask(bytes, _mm512_set1_epi8(' '));
        const uint64_t stop = odd | (ends & ~escaped), kept = (stop - 1) & ~stop & ~escapes;  // the first of them: all before
        _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(kept, text));
        out += std::popcount(kept);
        if (stop) {
            const bool behind_backslash = (odd & stop & -stop) != 0;
            return {at + std::countr_zero(stop) - behind_backslash, out};
        }
        pending = escapes >> 63;
    }
    return {at, out};
}
inline constexpr auto copy_string = copy_blocks;
#else
inline constexpr auto copy_string = copy_words;
#endif

// The number in the \uXXXX that `text` begins with, or -1.
inline int utf16_unit(std::string_view text) {
    static constexpr std::array<int, 256> DIGITS = [] {
        std::array<int, 256> value;
        value.fill(-1);
        for (int i = 0; i < 10; i++) { value['0' + i] = i; }
        for (int i = 10; i < 16; i++) { value['a' + i - 10] = value['A' + i - 10] = i; }
        return value;
    }();
    if (text.size() < 6 || text[0] != '\\' || text[1] != 'u') { return -1; }
    const auto digit = [&](int i) { return DIGITS[(unsigned char)text[i]]; };
    const int unit = digit(2) << 12 | digit(3) << 8 | digit(4) << 4 | digit(5);
    return std::max(unit, -1);
}
constexpr bool is_first_half(int unit) { return unit >= 0xD800 && unit <= 0xDBFF; }
constexpr bool is_second_half(int unit) { return unit >= 0xDC00 && unit <= 0xDFFF; }

class JsonReader {
public:
    static constexpr size_t PADDING = 64;

    // PADDING bytes behind the text are there to be read, whatever they are. `room`: where its strings will lie, all of them: what is read of
    // one is never longer than how it is written.
    JsonReader(std::string_view text, std::vector<char>& room) : at_(text.data()), end_(at_ + text.size()) {
        if (room.size() < text.size() + PADDING) { room.resize(text.size() + PADDING); }
        out_ = room.data();
    }

    // What comes next but for white space; '\0' at the end.
    char next() {
        while (peek() == ' ' || peek() == '\t' || peek() == '\r' || peek() == '\n') { at_++; }
        return peek();
    }
    bool take(char c) {
        const bool found = next() == c;
        at_ += found;
        return found;
    }
    bool at_end() { return next() == '\0' && at_ == end_; }
    const char* at() const { return at_; }

    // Half characters (\ud800 to \udfff alone) are refused.
    bool string(std::string_view& text) {
        if (!take('"')) { return false; }
        const char* const first = out_;
        while (true) {
            std::tie(at_, out_) = copy_string(at_, end_, out_);
            if (at_ >= end_) { return false; }
            if (*at_ == '"') { break; }
            do {
                if (!escape()) { return false; }
            } while (peek() == '\\');  // those by number come in runs: whole words of other scripts
        }
        at_++;
        text = {first, (size_t)(out_ - first)};
        return true;
    }
    // Any value, passed over. Half characters in it are nobody's.
    bool value(int depth = 0) {
        constexpr int MAX_DEPTH = 1000;  // each takes some of the stack
        if (depth > MAX_DEPTH) { return false; }
        switch (next()) {
            case '{':
                return list('}', [&] { return next() == '"' && pass_string() && take(':') && value(depth + 1); });
            case '[':
                return list(']', [&] { return value(depth + 1); });
            case '"':
                return pass_string();
            case 't':
                return literal("true");
            case 'f':
                return literal("false");
            case 'n':
                return literal("null");
            default:
                return number();
        }
    }

private:
    char peek() const { return at_ < end_ ? *at_ : '\0'; }
    // At a backslash; false anywhere else.
    bool escape() {
        if (end_ - at_ < 2 || *at_ != '\\') { return false; }
        if (at_[1] != 'u') {
            const char meaning = (unsigned char)at_[1] < ESCAPED.size() ? ESCAPED[(int)at_[1]] : '\0';
            *out_++ = meaning;
            at_ += 2;
            return meaning != '\0';
        }
        int code = utf16_unit({at_, end_});
        at_ += 6;
        if (is_first_half(code) && at_ < end_) {
            const int second = utf16_unit({at_, end_});
            if (!is_second_half(second)) { return false; }
            code = 0x10000 + (code - 0xD800) * 0x400 + (second - 0xDC00);
            at_ += 6;
        }
        if (code < 0 || is_first_half(code) || is_second_half(code)) { return false; }
        if (code < 0x80) {
            *out_++ = (char)code;
            return true;
        }
        const int following = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        *out_++ = (char)((0xFF00 >> (following + 1)) | code >> 6 * following);
        for (int i = following - 1; i >= 0; i--) { *out_++ = (char)(0x80 | (code >> 6 * i & 0x3F)); }
        return true;
    }
    template <typename Item>
    bool list(char close, Item item) {
        at_++;
        if (take(close)) { return true; }
        do {
            if (!item()) { return false; }
        } while (take(','));
        return take(close);
    }
    bool literal(std::string_view word) {
        const bool found = std::string_view(at_, end_ - at_).starts_with(word);
        at_ += found ? word.size() : 0;
        return found;
    }
    bool pass_string() {
        for (at_++; at_ < end_ && *at_ != '"'; at_++) {
            if ((unsigned char)*at_ < ' ') { return false; }
            if (*at_ != '\\') { continue; }
            if (utf16_unit({at_, end_}) >= 0) {
                at_ += 5;
            } else {
                at_++;
                if ((unsigned char)peek() >= ESCAPED.size() || ESCAPED[(int)peek()] == '\0') { return false; }
            }
        }
        return take('"');
    }
    bool digits() {
        const char* first = at_;
        while (isdigit((unsigned char)peek())) { at_++; }
        return at_ > first;
    }
    bool number() {
        const auto one_of = [&](std::string_view any) {
            const bool found = at_ < end_ && any.find(*at_) != std::string_view::npos;
            at_ += found;
            return found;
        };
        one_of("-");
        if (!one_of("0") && !digits()) { return false; }
        if (one_of(".") && !digits()) { return false; }
        if (!one_of("eE")) { return true; }
        one_of("+-");
        return digits();
    }

    const char *at_, *end_;
    char* out_;
};
