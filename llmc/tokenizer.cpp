// tokenizer.cpp: tokenizers through their libraries. SentencePiece (Llama's tokenizer.model) so far.
#include "llmc/tokenizer.h"

#include <sentencepiece_processor.h>
#include <xxhash.h>

namespace {

constexpr char SENTENCEPIECE_SPACE[] = "\xE2\x96\x81";  // U+2581 stands for a space in its pieces

std::string with_spaces(std::string piece) {
    for (size_t at = 0; (at = piece.find(SENTENCEPIECE_SPACE, at)) != std::string::npos; at++) {
        piece.replace(at, strlen(SENTENCEPIECE_SPACE), " ");
    }
    return piece;
}

class SentencePieceTokenizer : public Tokenizer {
public:
    SentencePieceTokenizer(const std::string& path, const std::string& model) {
        const auto status = processor_.LoadFromSerializedProto(absl::string_view(model.data(), model.size()));
        check(status.ok(), "tokenizer '%s' is not a whole SentencePiece model: %s\nHINT: copy it again", path.c_str(),
              sentencepiece_reason(status.message()).c_str());
        kind = "sentencepiece";
        bos_id = processor_.bos_id();
        eos_id = processor_.eos_id();
        unknown_id = processor_.unk_id();
        for (int id = 0; id < processor_.GetPieceSize(); id++) { pieces.push_back(make_piece(id)); }
        // The library does not show the model's normalizer flags; what they do shows them.
        adds_space = normalized("a").starts_with(' ');
        trims_spaces = normalized("a  ") == normalized("a");
    }

    std::vector<int32_t> encode(std::string_view text) const override {
        std::vector<int> ids;
        const auto status = processor_.Encode(absl::string_view(text.data(), text.size()), &ids);
        check(status.ok(), "SentencePiece cannot encode a text of %zu bytes: %s", text.size(),
              sentencepiece_reason(status.message()).c_str());
        return ids;
    }

private:
    Piece make_piece(int id) const {
        if (processor_.IsControl(id)) { return {"", PieceKind::control}; }
        const std::string& piece = processor_.IdToPiece(id);
        if (processor_.IsByte(id)) { return {std::string(1, (char)strtol(piece.c_str() + strlen("<0x"), nullptr, 16)), PieceKind::byte}; }
        if (processor_.IsUnknown(id)) { return {processor_.DecodeIds({id}), PieceKind::unknown}; }
        return {with_spaces(piece), PieceKind::text};
    }
    std::string normalized(const char* text) const {
        std::string out;
        for (const std::string& piece : processor_.EncodeAsPieces(text)) { out += piece; }
        return with_spaces(out);
    }

    sentencepiece::SentencePieceProcessor processor_;
};

// The tokenizer files that people have at hand, by how they start. (What is not here and is not protobuf is "not a tokenizer".)
struct ForeignTokenizer {
    std::string_view start;
    const char *name, *hint;
};
constexpr ForeignTokenizer FOREIGN_TOKENIZERS[] = {
    {"version https://git-lfs", "a Git LFS pointer, not the file itself", "run git lfs pull"},
    {"#version:", "GPT-2's merges (vocab.bpe, merges.txt)", "GPT-2 BPE is not supported yet; pass a SentencePiece tokenizer.model"},
    {"IQ== 0", "a tiktoken vocabulary (Llama 3)", "pass a SentencePiece tokenizer.model (Llama 1 or 2)"},
    {std::string_view("\xC8\xD7\x34\x01", 4), "an llm.c tokenizer (magic number 20240328)", "pass a SentencePiece tokenizer.model"},
};

[[noreturn]] void refuse(const std::string& path, const char* name, const char* hint) {
    die("tokenizer '%s' is %s; wanted a SentencePiece model\nHINT: %s", path.c_str(), name, hint);
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
    errno = 0;
    check(path_exists(path), "tokenizer '%s': %s\nHINT: pass a SentencePiece tokenizer.model; ./tokenize --train-tokenizer makes one",
          path.c_str(), strerror(errno));
    if (is_directory(path)) { refuse(path, "a folder", "pass the tokenizer.model in it"); }
    if (!is_regular_file(path)) { refuse(path, "a pipe or a device", "copy it to a file"); }
    const std::string content = read_text_file(path);
    if (content.empty()) { refuse(path, "empty", "copy it again"); }
    for (const ForeignTokenizer& f : FOREIGN_TOKENIZERS) {
        if (content.starts_with(f.start)) { refuse(path, f.name, f.hint); }
    }
    if (content[0] == '{') {
        const bool hugging_face = content.find("\"added_tokens\"") != std::string::npos;
        refuse(path, hugging_face ? "a Hugging Face tokenizer.json" : "JSON (GPT-2's encoder.json, vocab.json?)",
               hugging_face ? "pass the tokenizer.model of the same model"
                            : "GPT-2 BPE is not supported yet; pass a SentencePiece tokenizer.model");
    }
    constexpr char FIRST_FIELD_OF_A_MODEL = 0x0A;  // protobuf: field 1 (a piece), length-delimited
    if (content[0] != FIRST_FIELD_OF_A_MODEL) {
        refuse(path, "of an unknown kind",
               "a llama2.c tokenizer.bin does not work; pass the SentencePiece tokenizer.model that it was made from");
    }
    auto tokenizer = std::make_unique<SentencePieceTokenizer>(path, content);
    tokenizer->file = path;
    tokenizer->hash = format("%016llx", (unsigned long long)XXH3_64bits(content.data(), content.size()));
    return tokenizer;
}
