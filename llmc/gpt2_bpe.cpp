// gpt2_bpe.cpp: GPT-2's words, files and ids.
#include "llmc/gpt2_bpe.h"

#include <array>
#include <optional>
#include <unordered_map>

#include "llmc/bpe.h"
#include "llmc/json_file.h"
#include "llmc/unicode_tables.h"

namespace {

// ---------------------------------------------------------------------------------------------------------------
// Words

enum class CharacterKind : uint8_t { other, letter, number, space };

const std::vector<CharacterKind>& character_kinds() {
    static const std::vector<CharacterKind> kinds = [] {
        std::vector<CharacterKind> of(CODE_POINTS, CharacterKind::other);
        const auto set = [&](const auto& ranges, CharacterKind kind) {
            for (const CodePointRange& r : ranges) { std::fill(of.begin() + r.first, of.begin() + r.last + 1, kind); }
        };
        set(UNICODE_LETTERS, CharacterKind::letter);
        set(UNICODE_NUMBERS, CharacterKind::number);
        set(UNICODE_SPACES, CharacterKind::space);
        return of;
    }();
    return kinds;
}

}  // namespace

size_t gpt2_word(std::string_view text) {
    static const std::vector<CharacterKind>& kinds = character_kinds();
    if (text[0] == '\'') {
        for (const std::string_view ending : {"s", "t", "re", "ve", "m", "ll", "d"}) {
            if (text.substr(1).starts_with(ending)) { return 1 + ending.size(); }
        }
    }
    Character c = first_character(text);
    size_t end = c.bytes;
    if (text[0] == ' ' && text.size() > 1) {  // one space goes with what follows it, unless that is white space, too
        const Character next = first_character(text.substr(1));
        if (kinds[next.code] != CharacterKind::space) {
            c = next;
            end = 1 + next.bytes;
        }
    }
    const CharacterKind kind = kinds[c.code];
    size_t before_last = 0;
    while (end < text.size()) {
        const Character next = first_character(text.substr(end));
        if (kinds[next.code] != kind) {
            // White space leaves its last character to what follows: (?!\S).
            return kind == CharacterKind::space && before_last > 0 ? before_last : end;
        }
        before_last = end;
        end += next.bytes;
    }
    return end;
}

namespace {

// ---------------------------------------------------------------------------------------------------------------
// Files

// The printable character that stands for each byte: itself, or those from U+0100 on in turn.
uint32_t character_of_byte(int byte) {
    static const std::array<uint16_t, 256> characters = [] {
        std::array<uint16_t, 256> of;
        uint16_t next = 256;
        for (int b = 0; b < 256; b++) {
            const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
            of[b] = printable ? b : next++;
        }
        return of;
    }();
    return characters[byte];
}

// The bytes that a token of the files stands for; nothing if it has another character, as tokens made by hand may.
std::optional<std::string> token_bytes(std::string_view token) {
    static const std::unordered_map<uint32_t, char> byte_of = [] {
        std::unordered_map<uint32_t, char> of;
        for (int b = 0; b < 256; b++) { of[character_of_byte(b)] = (char)b; }
        return of;
    }();
    std::string bytes;
    while (!token.empty()) {
        if (utf8_length(token) <= 0) { return {}; }
        const Character c = first_character(token);
        const auto found = byte_of.find(c.code);
        if (found == byte_of.end()) { return {}; }
        bytes += found->second;
        token.remove_prefix(c.bytes);
    }
    return bytes;
}

constexpr char END_OF_TEXT[] = "<|endoftext|>";

class Gpt2Tokenizer : public Tokenizer {
public:
    Gpt2Tokenizer(const Gpt2Files& names, const std::string& vocab, const std::string& merges) {
        kind = "gpt2";
        read_vocab(names.vocab, vocab);
        read_merges(names, merges);
    }

protected:
    void encode_text(std::string_view text, std::vector<int32_t>& ids) const override {
        std::string repaired;
        if (utf8_prefix(text) != text.size()) {
            repaired = text;
            repair_utf8(repaired);
            text = repaired;
        }
        const auto scratch = scratches_.take();
        ids.reserve(ids.size() + text.size() / 4 + 8);
        while (!text.empty()) {
            const size_t end = gpt2_word(text);
            encode_word(text.substr(0, end), *scratch, ids);
            text.remove_prefix(end);
        }
    }

private:
    struct Scratch {
        Bpe::Scratch bpe;
        SegmentCache cache;
    };

    void encode_word(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const {
        const auto unit_at = [this](std::string_view rest) { return Bpe::Unit{byte_ids_[(unsigned char)rest[0]], 1}; };
        const auto encode = [&](std::vector<int32_t>& ids) { bpe_.encode(word, unit_at, scratch.bpe, ids); };
        if (word.size() <= SegmentCache::MAX_BYTES) {
            const auto kept = scratch.cache.ids_of(word, encode);
            ids.insert(ids.end(), kept.begin(), kept.end());
        } else {
            encode(ids);
        }
    }

    void read_vocab(const std::string& path, const std::string& content) {
        const json vocab = parse_json(content, path);
        check(vocab.is_object() && !vocab.empty(), "tokenizer '%s' is not GPT-2's vocabulary: wanted an object of tokens and ids",
              path.c_str());
        i64 size = 0;
        for (const auto& [token, id] : vocab.items()) {
            check(id.is_number_unsigned(), "tokenizer '%s': the id of '%s' is %.100s, wanted a number from 0 on", path.c_str(),
                  token.c_str(), id.dump().c_str());
            const uint64_t number = id.get<uint64_t>();
            check(number < 2 * vocab.size() + 1024, "tokenizer '%s': '%s' has id %llu, but there are only %zu tokens\nHINT: is it GPT-2's?",
                  path.c_str(), token.c_str(), (unsigned long long)number, vocab.size());
            size = std::max(size, (i64)number + 1);
        }
        pieces.resize(size, {REPLACEMENT_CHARACTER, PieceKind::unknown});  // what stays so is an id without a token
        byte_ids_.fill(-1);
        for (const auto& [token, id] : vocab.items()) {
            Piece& piece = pieces[id.get<i64>()];
            check(piece.kind == PieceKind::unknown, "tokenizer '%s' has two tokens of id %s: '%s' is one", path.c_str(), id.dump().c_str(),
                  token.c_str());
            const auto bytes = token_bytes(token);
            piece = {bytes ? *bytes : token, PieceKind::text};
            if (bytes && bytes->size() == 1) { byte_ids_[(unsigned char)(*bytes)[0]] = id.get<int32_t>(); }
            ids_[token] = id.get<int32_t>();
        }
        const auto end_of_text = ids_.find(END_OF_TEXT);
        if (end_of_text != ids_.end()) {
            bos_id = eos_id = end_of_text->second;
            pieces[eos_id] = {"", PieceKind::control};
        }
        std::string missing;
        for (int b = 0; b < 256; b++) {
            const bool in_utf8 = b < 0xC0 || (b >= 0xC2 && b <= 0xF4);
            if (byte_ids_[b] < 0 && in_utf8) { missing += format(" %02X", b); }
            if (byte_ids_[b] >= 0) { bpe_.add_symbol(byte_ids_[b], 1, {byte_ids_[b]}); }
        }
        check(missing.empty(),
              "tokenizer '%s' has no token for the bytes%.300s: texts that hold them could not be encoded\nHINT: wanted a byte-level "
              "vocabulary as GPT-2's",
              path.c_str(), missing.c_str());
    }

    void read_merges(const Gpt2Files& names, std::string_view content) {
        const char* file = names.merges.c_str();
        int32_t rank = 0;
        std::vector<bool> made(pieces.size(), false);
        for (i64 number = 1; !content.empty(); number++) {
            const size_t newline = content.find('\n');
            std::string_view line = content.substr(0, newline);
            content.remove_prefix(newline == std::string_view::npos ? content.size() : newline + 1);
            if (line.ends_with('\r')) { line.remove_suffix(1); }
            if ((number == 1 && line.starts_with("#version")) || (line.empty() && content.empty())) { continue; }
            const size_t space = line.find(' ');
            check(space != std::string_view::npos && space > 0 && space + 1 < line.size() &&
                      line.find(' ', space + 1) == std::string_view::npos,
                  "tokenizer '%s', line %lld: '%.*s' is no merge; wanted two tokens and a space between\nHINT: is the file cut? copy it "
                  "again",
                  file, (long long)number, (int)std::min<size_t>(line.size(), 100), line.data());
            const auto id_of = [&](std::string_view token) {
                const auto found = ids_.find(std::string(token));
                check(found != ids_.end() && found->second != eos_id,
                      "tokenizer '%s', line %lld: '%.*s' is no token of '%s'\nHINT: are both files of the same vocabulary?", file,
                      (long long)number, (int)token.size(), token.data(), names.vocab.c_str());
                return found->second;
            };
            const std::string_view left = line.substr(0, space), right = line.substr(space + 1);
            const int32_t result = id_of(std::string(left) + std::string(right));
            check(bpe_.add_merge(id_of(left), id_of(right), {rank++, result}), "tokenizer '%s', line %lld: this merge came before", file,
                  (long long)number);
            if (made[result]) { continue; }
            made[result] = true;
            std::vector<int32_t> units;
            for (const unsigned char byte : pieces[result].bytes) { units.push_back(byte_ids_[byte]); }
            bpe_.add_symbol(result, units.size(), units);
        }
        check_all_made(names, made);
    }

    // A token that no merge makes never comes up, and no merge makes what the rule takes for two words.
    void check_all_made(const Gpt2Files& names, const std::vector<bool>& made) const {
        i64 unmade = 0, not_words = 0;
        std::string unmade_example, not_word_example;
        for (const auto& [token, id] : ids_) {
            const std::string& bytes = pieces[id].bytes;
            const bool mark = (token.starts_with('<') && token.ends_with('>')) || (token.starts_with('[') && token.ends_with(']'));
            const bool whole = !bytes.empty() && utf8_prefix(bytes) == bytes.size();  // not a part of a character
            if (!made[id] && !mark && bytes.size() != 1 && unmade++ == 0) { unmade_example = token; }
            if (made[id] && whole && gpt2_word(bytes) != bytes.size() && not_words++ == 0) { not_word_example = token; }
        }
        check(unmade == 0, "tokenizer '%s': no merge makes %lld of the tokens of '%s', such as '%s'\nHINT: is the file cut? copy it again",
              names.merges.c_str(), (long long)unmade, names.vocab.c_str(), unmade_example.c_str());
        constexpr i64 ONE_IN = 100;  // other versions of Unicode have other letters
        check(
            not_words * ONE_IN <= vocab_size(),
            "tokenizer '%s': %lld of its %lld tokens, such as '%s', are more than one word by GPT-2's rule\nHINT: it was made with another "
            "rule (Qwen's, Llama 3's?), which is not known here",
            names.merges.c_str(), (long long)not_words, (long long)vocab_size(), not_word_example.c_str());
    }

    std::unordered_map<std::string, int32_t> ids_;  // by the token as the files write it
    std::array<int32_t, 256> byte_ids_;
    Bpe bpe_{true};
    mutable Pool<Scratch> scratches_;
};

}  // namespace

Gpt2Files gpt2_files(const std::string& path, bool is_vocab) {
    const std::vector<std::string> vocabs = {"encoder.json", "vocab.json"}, merges = {"vocab.bpe", "merges.txt"};
    std::string wanted;
    for (const std::string& ending : is_vocab ? vocabs : merges) {
        if (!path.ends_with(ending)) { continue; }
        const std::string start = path.substr(0, path.size() - ending.size());
        for (const std::string& other : is_vocab ? merges : vocabs) {
            if (is_regular_file(start + other)) { return is_vocab ? Gpt2Files{path, start + other} : Gpt2Files{start + other, path}; }
            wanted += (wanted.empty() ? "'" : " or '") + start + other + "'";
        }
        break;
    }
    die("tokenizer '%s' is GPT-2's %s; the %s that belong to it %s\nHINT: GPT-2's files come in pairs: encoder.json and vocab.bpe, "
        "...vocab.json and ...merges.txt",
        path.c_str(), is_vocab ? "vocabulary" : "merges", is_vocab ? "merges" : "tokens",
        wanted.empty() ? "are not known by its name" : ("are missing: there is no " + wanted).c_str());
}

std::unique_ptr<Tokenizer> make_gpt2_tokenizer(const Gpt2Files& names, const std::string& vocab, const std::string& merges) {
    return std::make_unique<Gpt2Tokenizer>(names, vocab, merges);
}
