// decode.h: token ids -> the text they stand for, on standard output.
#pragma once

#include "data/token_sets.h"

inline void print_text(const std::string& text) {
    check(fwrite(text.data(), 1, text.size(), stdout) == text.size(), "cannot write the text: %s", strerror(errno));
}

// One stream of text over all files given: a document may go on from one to the next.
inline void decode(const LookOptions& options) {
    const std::string separator_line = options.doc_separator.empty()            ? ""
                                       : options.doc_separator == "blank-lines" ? "\n"
                                                                                : options.doc_separator + "\n";
    std::optional<StreamDecoder> decoder;
    Tokenizers tokenizers;
    Known known;
    bool line_open = false, between = false, any = false;
    const auto put = [&](const std::string& text) {
        if (text.empty()) { return; }
        if (between && any && !options.doc_separator.empty()) { print_text((line_open ? "\n" : "") + separator_line); }
        print_text(text);
        line_open = !text.ends_with('\n');
        between = false;
        any = true;
    };
    for (const std::string& path : token_files(options.inputs)) {
        const TokenFile file(path);
        if (!decoder) {
            known = what_is_known(options, file, tokenizers);
            known.tokenizer = tokenizer_for_text(known, tokenizers);
            check(known.tokenizer != nullptr, "--decode: no tokenizer known for '%s'\nHINT: --tokenizer FILE", path.c_str());
            known.vocab = known.tokenizer->vocab_size();
            decoder.emplace(*known.tokenizer);
        } else if (const auto side = find_side_file(file.path(), file.tokens())) {
            check_tokenizer(*side, *known.tokenizer);
        }
        for_each_piece(file, known, [&](std::span<const int32_t> ids, bool ends) {
            std::string text;
            for (const int32_t id : ids) { text += decoder->feed(id); }
            if (ends) { text += decoder->end_of_text(); }
            put(text);
            between = between || ends;
        });
    }
    if (decoder) { put(decoder->flush()); }
    check(fflush(stdout) == 0, "cannot write the text: %s", strerror(errno));
}
