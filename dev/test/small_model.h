// small_model.h: a SentencePiece model that tests train for themselves, in a tenth of a second.
#pragma once

#include "data/train_sentencepiece.h"

inline const std::string TRAINING_TEXT =
    "In the beginning God created the heaven and the earth.\nAnd the earth was without form, and void; and darkness was upon the face\n"
    "of the deep. And the Spirit of God moved upon the face of the waters.\n    if (x > 10) {\n        return x;\n    }\n";

inline std::string train_small_model(const std::string& model_type = "bpe", i64 vocab_size = 340) {
    SentencePieceTraining training;
    training.vocab_size = vocab_size;
    training.model_type = model_type;
    int left = 20;
    return train_sentencepiece(training, [&](std::string& text) {
        text = TRAINING_TEXT;
        return left-- > 0;
    });
}

inline std::string small_model() {
    static const std::string model = train_small_model();
    return model;
}
