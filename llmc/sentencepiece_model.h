// sentencepiece_model.h: what a SentencePiece model file says and the library does not tell: kinds of its pieces, and how it treats spaces.
// Read from the protobuf wire format itself; field numbers are those of the library's sentencepiece_model.proto.
#pragma once

#include <optional>
#include <unordered_set>

#include "tokenizer.h"

struct SentencePieceModel {
    enum PieceType { NORMAL = 1, UNKNOWN = 2, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5, BYTE = 6 };
    enum ModelType { UNIGRAM = 1, BPE = 2, WORD = 3, CHARACTER = 4 };
    struct Piece {
        std::string_view text;  // in the model's bytes
        float score = 0;
        int type = NORMAL;
    };
    std::vector<Piece> pieces;
    int model_type = UNIGRAM;
    bool byte_fallback = false, space_as_suffix = false;                                     // TrainerSpec
    bool adds_space = true, removes_spaces = true, escapes_spaces = true, charsmap = false;  // NormalizerSpec
};

// The fields of one protobuf message, in the order of the file.
class ProtobufReader {
public:
    explicit ProtobufReader(std::string_view bytes) : rest_(bytes) {}

    uint64_t tag = 0;        // field number * 8 + wire type
    uint64_t number = 0;     // the value, of a varint
    std::string_view bytes;  // the value, of anything else
    bool broken = false;

    enum WireType { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

    // False at the end, and where what follows is not protobuf: then it is broken.
    bool next() {
        if (broken || rest_.empty()) { return false; }
        broken = !read_field();
        return !broken;
    }

private:
    bool read_field() {
        if (!read_varint(tag)) { return false; }
        switch (tag & 7) {
            case VARINT:
                return read_varint(number);
            case FIXED64:
                return read_bytes(8);
            case BYTES:
                return read_varint(number) && read_bytes(number);
            case FIXED32:
                return read_bytes(4);
        }
        return false;  // groups: not in these files
    }
    bool read_varint(uint64_t& value) {
        value = 0;
        for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
            const unsigned char byte = rest_[0];
            rest_.remove_prefix(1);
            value |= (uint64_t)(byte & 0x7F) << shift;
            if (byte < 0x80) { return true; }
        }
        return false;
    }
    bool read_bytes(uint64_t n) {
        if (n > rest_.size()) { return false; }
        bytes = rest_.substr(0, n);
        rest_.remove_prefix(n);
        return true;
    }

    std::string_view rest_;
};

// Nothing if the file is not what this knows. A field that comes twice counts as the library counts it: the later one.
inline std::optional<SentencePieceModel> parse_sentencepiece_model(std::string_view file) {
    using P = ProtobufReader;
    const auto tag = [](int field, int wire) { return (uint64_t)field * 8 + wire; };
    SentencePieceModel model;
    P fields(file);
    while (fields.next()) {
        P inner(fields.bytes);
        if (fields.tag == tag(1, P::BYTES)) {
            SentencePieceModel::Piece& piece = model.pieces.emplace_back();
            while (inner.next()) {
                if (inner.tag == tag(1, P::BYTES)) { piece.text = inner.bytes; }
                if (inner.tag == tag(2, P::FIXED32)) { memcpy(&piece.score, inner.bytes.data(), sizeof piece.score); }
                if (inner.tag == tag(3, P::VARINT) && inner.number >= 1 && inner.number <= 6) { piece.type = inner.number; }
            }
        } else if (fields.tag == tag(2, P::BYTES)) {
            while (inner.next()) {
                if (inner.tag == tag(3, P::VARINT) && inner.number >= 1 && inner.number <= 4) { model.model_type = inner.number; }
                if (inner.tag == tag(24, P::VARINT)) { model.space_as_suffix = inner.number != 0; }
                if (inner.tag == tag(35, P::VARINT)) { model.byte_fallback = inner.number != 0; }
            }
        } else if (fields.tag == tag(3, P::BYTES)) {
            while (inner.next()) {
                if (inner.tag == tag(2, P::BYTES)) { model.charsmap = !inner.bytes.empty(); }
                if (inner.tag == tag(3, P::VARINT)) { model.adds_space = inner.number != 0; }
                if (inner.tag == tag(4, P::VARINT)) { model.removes_spaces = inner.number != 0; }
                if (inner.tag == tag(5, P::VARINT)) { model.escapes_spaces = inner.number != 0; }
            }
        }
        if (inner.broken) { return {}; }
    }
    if (fields.broken) { return {}; }
    return model;
}

// ---------------------------------------------------------------------------------------------------------------
// What our encoders share

constexpr char SENTENCEPIECE_SPACE[] = "\xE2\x96\x81";  // U+2581 stands for a space in pieces, and in a text means one

inline std::string with_spaces(std::string piece) {
    for (size_t at = 0; (at = piece.find(SENTENCEPIECE_SPACE, at)) != std::string::npos; at++) {
        piece.replace(at, strlen(SENTENCEPIECE_SPACE), " ");
    }
    return piece;
}

// "<0x0A>" -> 10
inline uint8_t byte_of_piece(std::string_view piece) { return strtol(std::string(piece).c_str() + strlen("<0x"), nullptr, 16); }

// The text as the library takes it, in room if that is another.
inline std::string_view cleaned(std::string_view text, std::string& room) {
    if (utf8_prefix(text) == text.size() && text.find(SENTENCEPIECE_SPACE) == std::string_view::npos) { return text; }
    room = text;
    repair_utf8(room);
    room = with_spaces(std::move(room));
    return room;
}

// Others go through the library: normalizers that change the text, pieces that are cut out of the text first or taken apart afterwards,
// and oddities that only a model made by hand has.
inline bool is_plain(const SentencePieceModel& model) {
    constexpr size_t MAX_PIECES = 1 << 24, MAX_PIECE_BYTES = 1024;
    if (model.charsmap || model.removes_spaces || model.space_as_suffix || !model.escapes_spaces || model.pieces.size() > MAX_PIECES) {
        return false;
    }
    std::unordered_set<std::string_view> normal;
    for (const auto& piece : model.pieces) {
        if (piece.type == SentencePieceModel::NORMAL) { normal.insert(piece.text); }
    }
    for (const auto& piece : model.pieces) {
        if (piece.type == SentencePieceModel::USER_DEFINED || piece.type == SentencePieceModel::UNUSED) { return false; }
        if (piece.text.empty() || piece.text.size() > MAX_PIECE_BYTES || piece.score != piece.score) { return false; }
        if (piece.type == SentencePieceModel::BYTE && piece.text.size() != strlen("<0x00>")) { return false; }
        // The text of a reserved piece may come up as text, and then stands for that piece.
        const bool reserved = piece.type != SentencePieceModel::NORMAL;
        if (reserved && (normal.contains(piece.text) || utf8_length(piece.text) == (int)piece.text.size())) { return false; }
    }
    return true;
}
