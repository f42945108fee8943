// gpt2_bpe.h: GPT-2's byte-level BPE. A text is cut into words by one rule; each word's bytes are merged by rank; bytes are written as
// printable characters in the two files, encoder.json (token -> id) and vocab.bpe (merges). Source: openai/gpt-2, encoder.py.
#pragma once

#include "tokenizer.h"

// Bytes of the first word of `text`, which is UTF-8 and not empty. A word is the first of these to match:
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t gpt2_word(std::string_view text);

struct Gpt2Files {
    std::string vocab, merges;  // encoder.json or ...vocab.json; vocab.bpe or ...merges.txt
};
// The two files when `path` is one of them, by their names: the other is looked for beside it.
Gpt2Files gpt2_files(const std::string& path, bool is_vocab);

// The contents of the two files; their names are for messages.
std::unique_ptr<Tokenizer> make_gpt2_tokenizer(const Gpt2Files& names, const std::string& vocab, const std::string& merges);
