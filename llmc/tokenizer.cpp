// tokenizer.cpp: which file is which tokenizer.
#include "llmc/tokenizer.h"

#include <xxhash.h>

#include <mutex>

#include "llmc/gpt2_bpe.h"
#include "llmc/sentencepiece.h"

void Tokenizer::encode(std::string_view text, std::vector<int32_t>& ids) const {
    constexpr size_t LARGE = 4 << 20;
    static std::mutex one_large_text;
    std::unique_lock lock(one_large_text, std::defer_lock);
    if (text.size() > LARGE) { lock.lock(); }
    encode_text(text, ids);
}

namespace {

// The tokenizer files that people have at hand, by how they start. (What is not here and is not protobuf is "not a tokenizer".)
struct ForeignTokenizer {
    std::string_view start;
    const char *name, *hint;
};
constexpr ForeignTokenizer FOREIGN_TOKENIZERS[] = {
    {"version https://git-lfs", "a Git LFS pointer, not the file itself", "run git lfs pull"},
    {"IQ== 0", "a tiktoken vocabulary (Llama 3)", "pass a SentencePiece tokenizer.model (Llama 1 or 2)"},
    {std::string_view("\xC8\xD7\x34\x01", 4), "an llm.c tokenizer (magic number 20240328)",
     "pass GPT-2's encoder.json, vocab.bpe beside it"},
};
constexpr char WANTED[] = "a SentencePiece model or GPT-2's files";

[[noreturn]] void refuse(const std::string& path, const char* name, const char* hint) {
    die("tokenizer '%s' is %s; wanted %s\nHINT: %s", path.c_str(), name, WANTED, hint);
}

std::string file_in_folder(const std::string& folder) {
    for (const char* name : {"tokenizer.model", "vocab.bpe", "merges.txt"}) {
        const std::string path = folder + "/" + name;
        if (is_regular_file(path)) { return path; }
    }
    refuse(folder, "a folder without tokenizer.model, vocab.bpe or merges.txt", "pass the file itself");
}

std::string read_tokenizer_file(const std::string& path) {
    if (!is_regular_file(path)) { refuse(path, "a pipe or a device", "copy it to a file"); }
    std::string content = read_text_file(path);
    if (content.empty()) { refuse(path, "empty", "copy it again"); }
    for (const ForeignTokenizer& f : FOREIGN_TOKENIZERS) {
        if (content.starts_with(f.start)) { refuse(path, f.name, f.hint); }
    }
    return content;
}

std::string hash_of(std::initializer_list<std::string_view> contents) {
    XXH3_state_t* state = XXH3_createState();
    XXH3_64bits_reset(state);
    for (const std::string_view c : contents) { XXH3_64bits_update(state, c.data(), c.size()); }
    const unsigned long long hash = XXH3_64bits_digest(state);
    XXH3_freeState(state);
    return format("%016llx", hash);
}

}  // namespace

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path) {
    errno = 0;
    check(path_exists(path),
          "tokenizer '%s': %s\nHINT: pass a SentencePiece tokenizer.model (./tokenize --train-tokenizer makes one) or GPT-2's encoder.json",
          path.c_str(), strerror(errno));
    const std::string file = is_directory(path) ? file_in_folder(path) : path, content = read_tokenizer_file(file);
    const bool is_json = content.starts_with('{');
    if (is_json && content.find("\"added_tokens\"") != std::string::npos) {
        refuse(file, "a Hugging Face tokenizer.json", "pass the tokenizer.model of the same model, or its vocab.json and merges.txt");
    }
    const bool is_merges = content.starts_with("#version") || file.ends_with("vocab.bpe") || file.ends_with("merges.txt");
    constexpr char FIRST_FIELD_OF_A_MODEL = 0x0A;  // protobuf: field 1 (a piece), length-delimited
    std::unique_ptr<Tokenizer> tokenizer;
    if (is_json || is_merges) {
        const Gpt2Files names = gpt2_files(file, is_json);
        const std::string other = read_tokenizer_file(is_json ? names.merges : names.vocab);
        const std::string &vocab = is_json ? content : other, &merges = is_json ? other : content;
        tokenizer = make_gpt2_tokenizer(names, vocab, merges);
        tokenizer->hash = hash_of({vocab, merges});
    } else if (content[0] == FIRST_FIELD_OF_A_MODEL) {
        tokenizer = make_sentencepiece_tokenizer(file, content);
        tokenizer->hash = hash_of({content});
    } else {
        refuse(file, "of an unknown kind",
               "a llama2.c tokenizer.bin does not work; pass the SentencePiece tokenizer.model that it was made from");
    }
    tokenizer->file = file;
    return tokenizer;
}
