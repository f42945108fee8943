// train_sentencepiece.h: text -> a SentencePiece model like Llama's: nothing of the text is changed or lost (identity normalizer, bytes for
// what has no piece), digits one by one, runs of spaces as pieces. Equal text gives an equal model.
#pragma once

#include <sentencepiece_trainer.h>

#include <functional>
#include <unordered_map>

#include "llmc/sentencepiece.h"

struct SentencePieceTraining {
    i64 vocab_size = 0;
    std::string model_type = "bpe";      // bpe (as Llama), unigram
    double character_coverage = 0.9995;  // rarer characters are left to bytes
    i64 max_lines = 5'000'000;           // of more, a sample is drawn: bounds the memory
};

constexpr i64 FIXED_PIECES = 3 + 256;    // the unknown id, BOS and EOS; bytes
constexpr i64 MIN_TRAINING_LINES = 101;  // SentencePiece draws no smaller sample

// SentencePiece drops longer lines, so they are cut before it sees them.
constexpr size_t TRAINING_LINE_BYTES = 4096;

// Returns the bytes of the model file. next_text gives the texts one after another, and false at the end.
inline std::string train_sentencepiece(const SentencePieceTraining& training, const std::function<bool(std::string&)>& next_text) {
    // Texts -> lines of at most TRAINING_LINE_BYTES, cut at character borders.
    class Lines : public sentencepiece::SentenceIterator {
    public:
        explicit Lines(const std::function<bool(std::string&)>& next_text) : next_text_(next_text) { Next(); }
        bool done() const override { return done_; }
        const std::string& value() const override { return line_; }
        sentencepiece::util::Status status() const override { return {}; }
        void Next() override {
            do {
                while (at_ >= text_.size()) {
                    at_ = 0;
                    if (!next_text_(text_)) {
                        done_ = true;
                        return;
                    }
                }
                const size_t newline = std::min(text_.find('\n', at_), text_.size());
                size_t end = std::min(newline, at_ + TRAINING_LINE_BYTES);
                while (end < newline && ((unsigned char)text_[end] & 0xC0) == 0x80) { end--; }
                line_ = text_.substr(at_, end - at_);
                at_ = end + (end == newline);
                std::erase(line_, '\0');  // SentencePiece refuses it; the byte piece <0x00> stands for it anyway
            } while (line_.empty());
        }

    private:
        const std::function<bool(std::string&)>& next_text_;
        std::string text_, line_;
        size_t at_ = 0;
        bool done_ = false;
    };

    constexpr unsigned SAMPLE_SEED = 1;
    sentencepiece::SetRandomGeneratorSeed(SAMPLE_SEED);
    const std::unordered_map<std::string, std::string> options = {
        {"vocab_size", std::to_string(training.vocab_size)},
        {"model_type", training.model_type},
        {"character_coverage", format("%.6f", training.character_coverage)},
        {"input_sentence_size", std::to_string(training.max_lines)},
        {"shuffle_input_sentence", "true"},
        {"max_sentence_length", std::to_string(2 * TRAINING_LINE_BYTES)},
        {"normalization_rule_name", "identity"},
        {"remove_extra_whitespaces", "false"},
        {"allow_whitespace_only_pieces", "true"},
        {"split_digits", "true"},
        {"byte_fallback", "true"},
        {"num_threads", "1"},  // the sums of unigram's EM depend on the number of threads
        {"minloglevel", "2"},
    };
    Lines lines(next_text);
    check(!lines.done(), "there is no text to train a tokenizer on\nHINT: look at --text-key and at the lines that were skipped");
    std::string model;
    const auto status = sentencepiece::SentencePieceTrainer::Train(options, &lines, &model);
    check(status.ok(),
          "SentencePiece cannot train a vocabulary of %lld: %s\nHINT: the text bounds it: %lld pieces and one for each character that "
          "--character-coverage takes are the least, and a longer text allows more",
          (long long)training.vocab_size, sentencepiece_reason(status.message()).c_str(), (long long)FIXED_PIECES);
    return model;
}
