// sentencepiece.h: SentencePiece's tokenizers (Llama's tokenizer.model). The library itself is included only by sentencepiece.cpp.
#pragma once

#include "tokenizer.h"

// What a SentencePiece error says, without the place in the library's source: "./src/x.cc(76) [condition] text" -> "text".
inline std::string sentencepiece_reason(const std::string& message) {
    const size_t bracket = message.rfind("] ");
    const std::string text =
        message.find(".cc(") == std::string::npos || bracket == std::string::npos ? message : message.substr(bracket + 2);
    return text.empty() ? "the library gives no reason" : text;
}

// `model` holds the bytes of the file `path`, which is for messages.
std::unique_ptr<Tokenizer> make_sentencepiece_tokenizer(const std::string& path, const std::string& model);
