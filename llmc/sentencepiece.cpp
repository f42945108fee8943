// sentencepiece.cpp: SentencePiece models: loaded and decoded by the library, encoded by it or by sentencepiece_bpe.h and sentencepiece_unigram.h.
#include "llmc/sentencepiece.h"

#include <sentencepiece_processor.h>

#include "llmc/sentencepiece_bpe.h"
#include "llmc/sentencepiece_unigram.h"

namespace {

class SentencePieceTokenizer : public Tokenizer {
public:
    SentencePieceTokenizer(const std::string& path, const std::string& model) {
        const std::string problem = load_problem(model);
        check(problem.empty(), "tokenizer '%s' is not a whole SentencePiece model: %s\nHINT: copy it again", path.c_str(), problem.c_str());
        kind = "sentencepiece";
        bos_id = processor_.bos_id();
        eos_id = processor_.eos_id();
        unknown_id = processor_.unk_id();
        for (int id = 0; id < processor_.GetPieceSize(); id++) { pieces.push_back(make_piece(id)); }
        // The library does not show the model's normalizer flags; what they do shows them.
        adds_space = normalized("a").starts_with(' ');
        trims_spaces = normalized("a  ") == normalized("a");

        const auto parsed = parse_sentencepiece_model(model);
        if (parsed && (i64)parsed->pieces.size() == vocab_size() && SentencePieceBpe::can_encode(*parsed)) {
            bpe_ = std::make_unique<SentencePieceBpe>(*parsed, unknown_id);
        } else if (parsed && (i64)parsed->pieces.size() == vocab_size() && SentencePieceUnigram::can_encode(*parsed)) {
            unigram_ = std::make_unique<SentencePieceUnigram>(*parsed, unknown_id);
        } else {
            whole_text_bytes = MOST_FOR_LIBRARY;
            // Protobuf takes a part that comes again as corrections: field 3 (normalizer), of 2 bytes: its field 3 (add_dummy_prefix)
            // false.
            const std::string without_space = model + std::string("\x1A\x02\x18\x00", 4);
            can_go_on_ = going_on_.LoadFromSerializedProto(absl::string_view(without_space.data(), without_space.size())).ok();
        }
    }

protected:
    void encode_text(std::string_view text, std::vector<int32_t>& ids) const override {
        if (bpe_) { return bpe_->encode(text, ids); }
        if (unigram_ && text.size() > MOST_FOR_LIBRARY) {
            const std::vector<int32_t> all = unigram_->encode(text);
            ids.insert(ids.end(), all.begin(), all.end());
            return;
        }
        // A part ends before a space, which the library puts before the next text by itself; or where there is none in reach, before a
        // character, and the next text goes on without one.
        const sentencepiece::SentencePieceProcessor* processor = &processor_;
        while (true) {
            std::vector<int> more;
            const size_t end = part_end(text);
            const auto status = processor->Encode(absl::string_view(text.data(), end), &more);
            check(status.ok(), "SentencePiece cannot encode a text of %zu bytes: %s", end, sentencepiece_reason(status.message()).c_str());
            ids.insert(ids.end(), more.begin(), more.end());
            if (end == text.size()) { return; }
            const bool space_given = text[end] == ' ' && end + 1 < text.size() && adds_space;
            text.remove_prefix(end + space_given);
            processor = space_given || !can_go_on_ ? &processor_ : &going_on_;
        }
    }

private:
    // Loads the model; "" if that is well. Of some pieces, such as one that begins with a NUL, the library throws.
    std::string load_problem(const std::string& model) {
        try {
            const auto status = processor_.LoadFromSerializedProto(absl::string_view(model.data(), model.size()));
            return status.ok() ? "" : sentencepiece_reason(status.message());
        } catch (const std::exception& e) {
            const std::string_view message = e.what(), mark = "exception: ";
            const size_t at = message.rfind(mark);
            return std::string(at == std::string_view::npos ? message : message.substr(at + mark.size()));
        }
    }

    // It takes up to some 200 bytes of memory per byte of text: where each is an id.
    static constexpr size_t MOST_FOR_LIBRARY = 2 << 20;

    size_t part_end(std::string_view text) const {
        if (text.size() <= whole_text_bytes) { return text.size(); }
        size_t end = text.rfind(' ', whole_text_bytes - 1);  // never the last of the text: it would be lost
        if (end == std::string_view::npos || end < whole_text_bytes / 2) {
            end = whole_text_bytes;
            for (int i = 0; i < 3 && ((unsigned char)text[end] & 0xC0) == 0x80; i++) { end--; }
        }
        return end;
    }

    Piece make_piece(int id) const {
        if (processor_.IsControl(id)) { return {"", PieceKind::control}; }
        const std::string& piece = processor_.IdToPiece(id);
        if (processor_.IsByte(id)) { return {std::string(1, (char)byte_of_piece(piece)), PieceKind::byte}; }
        if (processor_.IsUnknown(id)) { return {processor_.DecodeIds({id}), PieceKind::unknown}; }
        return {with_spaces(piece), PieceKind::text};
    }
    std::string normalized(const char* text) const {
        std::string out;
        for (const std::string& piece : processor_.EncodeAsPieces(text)) { out += piece; }
        return with_spaces(out);
    }

    sentencepiece::SentencePieceProcessor processor_, going_on_;  // the latter puts no space before a text
    bool can_go_on_ = false;
    std::unique_ptr<SentencePieceBpe> bpe_;
    std::unique_ptr<SentencePieceUnigram> unigram_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const std::string& path, const std::string& model) {
    return std::make_unique<SentencePieceTokenizer>(path, model);
}
