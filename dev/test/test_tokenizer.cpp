// test_tokenizer.cpp: tokenizers. Oracles: the SentencePiece library; for GPT-2's, dev/reference/make_gpt2_goldens.py. B.x n: rows of
// CASES.md.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <random>
#include <set>
#include <thread>

#include <nlohmann/json.hpp>
#include <sentencepiece_processor.h>
#include <zlib.h>

#include "dev/test/data_testing.h"
#include "dev/test/small_model.h"
#include "llmc/gpt2_bpe.h"
#include "llmc/sentencepiece_bpe.h"
#include "llmc/sentencepiece_unigram.h"

namespace {

using TokenizerTest = DataTest;

const std::string SHARED = "../shared/data/", GOLDEN = "dev/golden/gpt2/";
const std::string LLAMA2 = SHARED + "llama2-tokenizer/tokenizer.model";

constexpr bool SANITIZED =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    true;
#else
    false;
#endif

// ---------------------------------------------------------------------------------------------------------------
// SentencePiece

// B.3 23, 26, 28, 29: what goes in comes out, byte for byte, and markers in the text are text.
TEST_F(TokenizerTest, TokenizerLosesNothing) {
    const auto tokenizer = load_tokenizer(write_file("t.model", small_model()));
    EXPECT_EQ(tokenizer->vocab_size(), 340);
    EXPECT_EQ(tokenizer->bos_id, 1);
    EXPECT_EQ(tokenizer->eos_id, 2);
    EXPECT_TRUE(tokenizer->adds_space);
    EXPECT_FALSE(tokenizer->trims_spaces);
    std::vector<std::string> texts = {"",
                                      " ",
                                      "a  b",
                                      "  hello",
                                      "a\n\nb  \n",
                                      "<s>",
                                      "</s> <0x40> <unk>",
                                      "\xC3\xA9\xC3\xBC",
                                      "\xE6\x97\xA5\xE6\x9C\xAC",
                                      "\xF0\x9F\x98\x80!",
                                      "\xF0\x92\x80\x80",
                                      "\tx\r\n",
                                      std::string("nul \0 kept", 10),
                                      "abcdefgh",
                                      TRAINING_TEXT};
    for (char c = 1; c < 127; c++) { texts.push_back(std::string(1, c)); }
    for (const std::string& text : texts) {
        const std::vector<int32_t> ids = tokenizer->encode(text);
        EXPECT_EQ(tokenizer->decode(ids), text);
        for (const int32_t id : ids) { EXPECT_GT(id, 2) << text; }
    }
    EXPECT_TRUE(tokenizer->encode("").empty());
    EXPECT_NE(tokenizer->encode("hello"), tokenizer->encode(" hello"));
    EXPECT_EQ(small_model(), read_text_file(path("t.model")));
    SentencePieceTraining again;
    again.vocab_size = 340;
    int left = 20;
    EXPECT_EQ(train_sentencepiece(again, [&](std::string& text) { return text = TRAINING_TEXT, left-- > 0; }), small_model());
}

// B.3 25, B.8 106: a character cut across ids is whole or U+FFFD, never half.
TEST_F(TokenizerTest, StreamDecoderNeverBreaksACharacter) {
    const auto tokenizer = load_tokenizer(write_file("t.model", small_model()));
    auto byte_id = [](int byte) { return 3 + byte; };
    StreamDecoder decoder(*tokenizer);
    EXPECT_EQ(decoder.feed(byte_id(0xF0)), "");
    EXPECT_EQ(decoder.feed(byte_id(0x9F)), "");
    EXPECT_EQ(decoder.feed(byte_id(0x98)), "");
    EXPECT_EQ(decoder.feed(byte_id(0x80)), "\xF0\x9F\x98\x80");
    EXPECT_EQ(decoder.feed(byte_id(0x80)), REPLACEMENT_CHARACTER);  // a stray continuation byte
    EXPECT_EQ(decoder.feed(byte_id(0xE6)), "");
    EXPECT_EQ(decoder.feed(byte_id('a')), REPLACEMENT_CHARACTER + std::string("a"));
    EXPECT_EQ(decoder.feed(byte_id(0xE6)), "");
    EXPECT_EQ(decoder.feed(byte_id(0x97)), "");
    EXPECT_EQ(decoder.flush(), REPLACEMENT_CHARACTER + std::string(REPLACEMENT_CHARACTER));
    EXPECT_EQ(decoder.flush(), "");
    // After EOS a new text begins, and so its first space is the tokenizer's, not the text's.
    std::vector<int32_t> ids = tokenizer->encode("the");
    ids.push_back(tokenizer->eos_id);
    for (const int32_t id : tokenizer->encode("the")) { ids.push_back(id); }
    EXPECT_EQ(tokenizer->decode(ids), "thethe");
    EXPECT_SAYS(failure_of([&] { tokenizer->decode({340}); }).message, "340");
    EXPECT_SAYS(failure_of([&] { tokenizer->decode({-1}); }).message, "HINT");
}

// Our decoder against the library's, for random ids, with and without a normalizer that changes spaces.
TEST_F(TokenizerTest, DecodingEqualsTheLibrarys) {
    std::unordered_map<std::string, std::string> options = {{"vocab_size", "320"},
                                                            {"hard_vocab_limit", "false"},
                                                            {"model_type", "unigram"},
                                                            {"byte_fallback", "true"},
                                                            {"input", write_file("t", TRAINING_TEXT)},
                                                            {"minloglevel", "2"},
                                                            {"num_threads", "1"}};
    std::string trimming, plain;
    ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(options, nullptr, &trimming).ok());
    options["add_dummy_prefix"] = options["remove_extra_whitespaces"] = "false";
    ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(options, nullptr, &plain).ok());
    const std::string models[] = {small_model(), trimming, plain};
    for (int m = 0; m < 3; m++) {
        const auto tokenizer = load_tokenizer(write_file("m.model", models[m]));
        EXPECT_EQ(tokenizer->adds_space, m != 2);
        EXPECT_EQ(tokenizer->trims_spaces, m == 1);
        sentencepiece::SentencePieceProcessor library;
        ASSERT_TRUE(library.LoadFromSerializedProto(models[m]).ok());
        std::mt19937 random(1);
        for (int i = 0; i < 2000; i++) {
            std::vector<int32_t> ids;
            for (int n = random() % 8; n >= 0; n--) {
                int32_t id = random() % tokenizer->vocab_size();
                // The library goes on with the same text after a control id, and takes a first <0x20> for text: not compared.
                if (tokenizer->piece(id).kind == PieceKind::control || tokenizer->piece(id).bytes == " ") { id = 0; }
                ids.push_back(id);
            }
            ASSERT_EQ(tokenizer->decode(ids), library.DecodeIds(ids)) << "model " << m;
        }
    }
}

// Facts about Llama 2's own tokenizer; the file is not part of this repository.
TEST(Llama2Tokenizer, KnownIds) {
    const std::string file = "../shared/data/llama2-tokenizer/tokenizer.model";
    if (!path_exists(file)) { GTEST_SKIP() << "no " << file; }
    const auto tokenizer = load_tokenizer(file);
    EXPECT_EQ(tokenizer->vocab_size(), 32000);
    EXPECT_TRUE(tokenizer->encode("").empty());
    EXPECT_EQ(tokenizer->encode(" "), (std::vector<int32_t>{259}));
    EXPECT_EQ(tokenizer->encode("hello"), (std::vector<int32_t>{22172}));
    const std::string text = read_text_file("../shared/data/tinyshakespeare/input.txt");
    const std::vector<int32_t> ids = tokenizer->encode(text);
    EXPECT_EQ(ids.size(), 368633u);
    EXPECT_TRUE(tokenizer->decode(ids) == text);
}

// ---------------------------------------------------------------------------------------------------------------
// SentencePiece's BPE without the library, against the library

std::vector<int32_t> library_ids(const sentencepiece::SentencePieceProcessor& library, const std::string& text) {
    std::vector<int> ids;
    EXPECT_TRUE(library.Encode(absl::string_view(text.data(), text.size()), &ids).ok());
    return ids;
}

std::string quoted(const std::string& text) {
    return nlohmann::json(text.substr(0, 300)).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

struct Both {
    explicit Both(const std::string& model) {
        EXPECT_TRUE(library.LoadFromSerializedProto(absl::string_view(model.data(), model.size())).ok());
        ours = make_sentencepiece_tokenizer("", model);
        const auto parsed = parse_sentencepiece_model(model);
        without_library = parsed && SentencePieceBpe::can_encode(*parsed);
    }
    sentencepiece::SentencePieceProcessor library;
    std::unique_ptr<Tokenizer> ours;
    bool without_library;
};

void expect_same_ids(const Both& both, const std::string& text) {
    const std::vector<int32_t> wanted = library_ids(both.library, text);
    EXPECT_TRUE(both.ours->encode(text) == wanted) << quoted(text);
    std::vector<int32_t> after = wanted;  // ids are appended as if nothing were before
    both.ours->encode(text, after);
    EXPECT_TRUE(after.size() == 2 * wanted.size() && std::equal(wanted.begin(), wanted.end(), after.begin() + wanted.size())) << quoted(text);
}

// A model as a file, made by hand: protobuf.
struct ModelMaker {
    struct Piece {
        std::string text;
        float score = 0;
        int type = SentencePieceModel::NORMAL;
    };
    std::vector<Piece> pieces = {{"<unk>", 0, SentencePieceModel::UNKNOWN}, {"<s>", 0, SentencePieceModel::CONTROL}};
    bool byte_fallback = false, adds_space = true;
    SentencePieceModel::ModelType type = SentencePieceModel::BPE;

    static std::string field(int number, const std::string& bytes) {
        EXPECT_LT(bytes.size(), 128u);
        return std::string(1, (char)(number * 8 + 2)) + (char)bytes.size() + bytes;
    }
    std::string operator()() const {
        std::vector<Piece> all = pieces;
        for (int b = 0; byte_fallback && b < 256; b++) { all.push_back({format("<0x%02X>", b), 0, SentencePieceModel::BYTE}); }
        std::string file;
        for (const Piece& p : all) {
            file += field(1, field(1, p.text) + "\x15" + std::string((const char*)&p.score, 4) + "\x18" + (char)p.type);
        }
        file += field(2, std::string("\x18") + (char)type + "\x98\x02" + (char)byte_fallback);  // model_type; byte_fallback
        return file +
               field(3, std::string("\x18") + (char)adds_space + std::string("\x20\x00", 2));  // add_dummy_prefix; remove_extra_whitespaces
    }
};

std::string random_text(std::mt19937& random, const std::vector<std::string>& characters, size_t length) {
    std::string text;
    while (length-- > 0) { text += characters[random() % characters.size()]; }
    return text;
}

const std::vector<std::string> TORTURE = {
    "",
    " ",
    "  ",
    "   ",
    std::string(100, ' '),
    std::string(1000, ' ') + "x",
    "\t",
    "\t\t \t",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    " \n \n",
    std::string(7, '\0'),
    std::string("a\0b \0 c", 7),
    "<s>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "<s> <0x41></s>",
    "\xE2\x96\x81",
    "a\xE2\x96\x81\xE2\x96\x81 b",
    " \xE2\x96\x81",
    "e\xCC\x81\xCC\x80\xCC\x88 a\xCC\x81",
    "\xE4\xBD\xA0\xE5\xA5\xBD\xEF\xBC\x8C\xE4\xB8\x96\xE7\x95\x8C",
    "\xF0\x9F\x98\x80\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7",
    "\xF4\x8F\xBF\xBF",
    "\xEF\xBF\xBD",
    "\xEF\xBB\xBF",
    "\xFF",
    "a\xFF\xFE"
    "b",
    "\xE2\x96",
    "\xE2\x96 \x81",
    "\xC0\x80",
    "\xED\xA0\x80",
    "\xF0\x9F\x98",
    "ab\xF0\x9F\x98 cd",
    "\xD0\x9F\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82, \xD0\xBA\xD0\xB0\xD0\xBA \xD0\xB4\xD0\xB5\xD0\xBB\xD0\xB0?",
    "1234567890",
    "3.14159 x 10^-7",
    "don't we'll",
    "https://www.example.org/a/b?c=d&e=f#g",
    std::string(3000, 'a'),
    std::string(3000, '.'),
    std::string(300, '\xC3'),
    TRAINING_TEXT,
};

std::string utf8(uint32_t code) {
    if (code < 0x80) { return {(char)code}; }
    if (code < 0x800) { return {(char)(0xC0 | code >> 6), (char)(0x80 | (code & 63))}; }
    if (code < 0x10000) { return {(char)(0xE0 | code >> 12), (char)(0x80 | (code >> 6 & 63)), (char)(0x80 | (code & 63))}; }
    return {(char)(0xF0 | code >> 18), (char)(0x80 | (code >> 12 & 63)), (char)(0x80 | (code >> 6 & 63)), (char)(0x80 | (code & 63))};
}

// One character of every 251st code point, of all planes, with others around it.
std::vector<std::string> every_plane() {
    std::vector<std::string> texts;
    for (uint32_t code = 1; code < CODE_POINTS; code += 251) {
        if (code >= 0xD800 && code < 0xE000) { continue; }
        const std::string c = utf8(code);
        texts.push_back(c + "a " + c + c + " b" + c);
    }
    return texts;
}

const std::vector<std::string> MIXED = {"a",
                                        "b",
                                        "th",
                                        "e",
                                        "in",
                                        " ",
                                        " ",
                                        "  ",
                                        "\n",
                                        "\t",
                                        "1",
                                        "2",
                                        ".",
                                        ",",
                                        "(",
                                        ")",
                                        "\xC3\xA9",
                                        "\xD0\xBF",
                                        "\xE4\xBD\xA0",
                                        "\xF0\x9F\x98\x80",
                                        "\xCC\x81",
                                        "\xE2\x96\x81",
                                        "\xFF",
                                        "The ",
                                        "God "};

void compare_on_everything(const Both& both) {
    for (const std::string& text : TORTURE) { expect_same_ids(both, text); }
    for (const std::string& text : every_plane()) { expect_same_ids(both, text); }
    std::mt19937 random(1);
    for (int i = 0; i < 1000 && !testing::Test::HasFailure(); i++) { expect_same_ids(both, random_text(random, MIXED, 1 + random() % 60)); }
    // Long stretches without a place to cut: the other way to encode.
    const std::vector<std::string> letters = {"t", "h", "e", "a", "n", "d", "o", "f"};
    for (int i = 0; i < 20 && !testing::Test::HasFailure(); i++) {
        expect_same_ids(both, random_text(random, letters, 250 + random() % 1000));
    }
    const std::string long_line = random_text(random, letters, 1 << 20);
    EXPECT_TRUE(both.ours->encode(long_line) == library_ids(both.library, long_line));
}

TEST(SentencePieceBpe, EqualsTheLibraryOnATrainedModel) {
    const Both both(small_model());
    EXPECT_TRUE(both.without_library);
    compare_on_everything(both);
}

TEST(SentencePieceBpe, EqualsTheLibraryOnRealModels) {
    for (const std::string& file : {LLAMA2, SHARED + "stories260k/tok512.model"}) {
        if (!path_exists(file)) { GTEST_SKIP() << "no " << file; }
        const Both both(read_text_file(file));
        EXPECT_EQ(both.without_library, file == LLAMA2);  // the other one removes spaces
        compare_on_everything(both);
    }
}

// B.3 23
TEST(SentencePieceBpe, EqualsTheLibraryOnRedPajama) {
    if (SANITIZED) { GTEST_SKIP() << "minutes under a sanitizer"; }
    const std::string folder = SHARED + "redpajama-sample";
    if (!path_exists(folder)) { GTEST_SKIP() << "no " << folder; }
    const Both both(read_text_file(LLAMA2));
    i64 documents = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        std::string lines = read_text_file(entry.path());
        for (size_t at = 0, end; at < lines.size(); at = end + 1) {
            end = std::min(lines.find('\n', at), lines.size());
            const std::string text = nlohmann::json::parse(lines.begin() + at, lines.begin() + end).at("text");
            ASSERT_TRUE(both.ours->encode(text) == library_ids(both.library, text)) << entry.path() << " at byte " << at;
            documents++;
        }
    }
    EXPECT_GT(documents, 1000);
}

// Vocabularies that no trainer makes: few characters, many ties, pieces whose parts are no pieces, merges that make others possible at
// better scores, unknown characters.
ModelMaker random_model(std::mt19937& random, SentencePieceModel::ModelType type) {
    const std::vector<std::string> alphabet = {"a", "b", "c", "\xC3\xA9", "\xE2\x96\x81"};
    ModelMaker maker;
    maker.type = type;
    maker.byte_fallback = random() % 2;
    maker.adds_space = random() % 4 != 0;
    const size_t letters = 1 + random() % alphabet.size(), longest = 2 + random() % 7;
    const int different_scores = 1 + random() % 40;
    std::set<std::string> texts;
    for (int n = random() % 60; n >= 0; n--) {
        texts.insert(random_text(random, {alphabet.begin() + random() % letters, alphabet.begin() + letters}, 1 + random() % longest));
    }
    for (const std::string& a : alphabet) {
        if (random() % 8 != 0) { texts.insert(a); }
    }
    for (const std::string& text : texts) { maker.pieces.push_back({text, -(float)(random() % different_scores)}); }
    return maker;
}
const std::vector<std::string> IN_RANDOM_TEXT = {"a", "b", "c", "a", "b", "c", "\xC3\xA9", " ", "?", "\xE4\xBD\xA0"};

TEST(SentencePieceBpe, EqualsTheLibraryOnRandomModels) {
    const std::vector<std::string>& in_text = IN_RANDOM_TEXT;
    std::mt19937 random(1);
    for (int m = 0; m < (SANITIZED ? 50 : 300); m++) {
        const Both both(random_model(random, SentencePieceModel::BPE)());
        ASSERT_TRUE(both.without_library);
        for (int i = 0; i < 60; i++) {
            const bool is_long = i % 8 == 0;
            const size_t kinds = 1 + random() % in_text.size();
            expect_same_ids(
                both, random_text(random, {in_text.begin(), in_text.begin() + kinds}, is_long ? 300 + random() % 300 : random() % 30));
        }
        if (HasFailure()) { FAIL() << "model " << m; }
    }
}

// Our own way for long texts, on texts of any length.
struct BothUnigram {
    explicit BothUnigram(const std::string& model) : both(model) {
        const auto parsed = parse_sentencepiece_model(model);
        EXPECT_TRUE(SentencePieceUnigram::can_encode(*parsed));
        ours = std::make_unique<SentencePieceUnigram>(*parsed, both.library.unk_id());
    }
    void compare(const std::string& text) const { EXPECT_TRUE(ours->encode(text) == library_ids(both.library, text)) << quoted(text); }

    Both both;
    std::unique_ptr<SentencePieceUnigram> ours;
};

TEST(SentencePieceUnigram, EqualsTheLibraryOnRandomModels) {
    std::mt19937 random(2);
    for (int m = 0; m < (SANITIZED ? 50 : 300); m++) {
        ModelMaker maker = random_model(random, SentencePieceModel::UNIGRAM);
        for (auto& piece : maker.pieces) { piece.score *= m % 2 ? 1 : 0.37f; }
        const BothUnigram both(maker());
        for (int i = 0; i < 60; i++) {
            const size_t kinds = 1 + random() % IN_RANDOM_TEXT.size();
            both.compare(random_text(random, {IN_RANDOM_TEXT.begin(), IN_RANDOM_TEXT.begin() + kinds}, i % 8 == 0 ? 600 : random() % 30));
        }
        if (HasFailure()) { FAIL() << "model " << m; }
    }
}

// Of a text of some MiB the sums are so large that the better of two ways depends on how they were rounded.
TEST(SentencePieceUnigram, EqualsTheLibraryOnATrainedModel) {
    const BothUnigram both(train_small_model("unigram", 320));
    for (const std::string& text : TORTURE) { both.compare(text); }
    for (const std::string& text : every_plane()) { both.compare(text); }
    std::mt19937 random(1);
    for (int i = 0; i < 500; i++) { both.compare(random_text(random, MIXED, 1 + random() % 60)); }
    EXPECT_EQ(both.both.ours->whole_text_bytes, SIZE_MAX);
    const std::string text = random_text(random, {"t", "h", "e", "a", "n", "d", " ", "the ", " earth"}, SANITIZED ? 1 << 20 : 3 << 20);
    expect_same_ids(both.both, text);
    EXPECT_EQ(both.both.ours->decode(both.both.ours->encode(text)), text);
}

// What cutting would change goes through the library as a whole.
TEST_F(TokenizerTest, OtherModelsGoThroughTheLibrary) {
    std::unordered_map<std::string, std::string> options = {{"vocab_size", "320"},
                                                            {"hard_vocab_limit", "false"},
                                                            {"input", write_file("t", TRAINING_TEXT)},
                                                            {"minloglevel", "2"},
                                                            {"num_threads", "1"}};
    for (const char* type : {"unigram", "bpe", "char", "word"}) {
        options["model_type"] = type;
        std::string model;
        ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(options, nullptr, &model).ok());
        const Both both(model);
        EXPECT_FALSE(both.without_library) << type;
        for (const std::string& text : TORTURE) { expect_same_ids(both, text); }
    }
    const Both unigram(train_small_model("unigram", 320));
    EXPECT_FALSE(unigram.without_library);
    for (const std::string& text : TORTURE) { expect_same_ids(unigram, text); }
    std::mt19937 random(1);
    for (int i = 0; i < 500; i++) { expect_same_ids(unigram, random_text(random, MIXED, 1 + random() % 60)); }
    for (const int type : {SentencePieceModel::USER_DEFINED, SentencePieceModel::UNUSED}) {
        ModelMaker maker;
        for (const char* text : {"a", "b", "ab", "aba", "\xE2\x96\x81"}) { maker.pieces.push_back({text, -1}); }
        maker.pieces[4].type = type;
        const Both both(maker());
        EXPECT_FALSE(both.without_library);
        for (const char* text : {"ab", "abab abba", "aaab"}) { expect_same_ids(both, text); }
    }
}

// The library's memory bounds a text; longer ones are encoded in parts, which begin where a space is.
TEST_F(TokenizerTest, LongTextsForTheLibraryAreCutAtSpaces) {
    const Both both(train_small_model("char", 320));
    EXPECT_EQ(both.ours->whole_text_bytes, 2u << 20);
    both.ours->whole_text_bytes = 1000;
    std::string text;
    for (int i = 0; text.size() < 1500; i++) { text += format("earth%d the\n\n  ", i); }
    const size_t cut = text.rfind(' ', 999);
    std::vector<int32_t> expected = library_ids(both.library, text.substr(0, cut));
    for (const int32_t id : library_ids(both.library, text.substr(cut + 1))) { expected.push_back(id); }
    EXPECT_EQ(both.ours->encode(text), expected);
    for (const std::string& long_text :
         {text, text + text + text, std::string(1001, ' '), std::string(5000, 'x'), std::string(1000, 'x') + ' '}) {
        EXPECT_EQ(both.ours->decode(both.ours->encode(long_text)), long_text);
    }
}

// A number of kB from /proc/self/status, in bytes.
i64 process_bytes(const std::string& key) {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.starts_with(key + ":")) { return atoll(line.c_str() + key.size() + 1) << 10; }
    }
    return -1;
}

// Encodes a text of 8 MiB that repeats `part`; memory beside the text at its peak, per byte of text.
double memory_per_byte(const Tokenizer& tokenizer, const std::string& part) {
    std::string text(8 << 20, ' ');
    for (size_t at = 0; at < text.size(); at++) { text[at] = part[at % part.size()]; }
    tokenizer.encode("the first text makes the cache");
    const i64 before = process_bytes("VmRSS");
    std::ofstream("/proc/self/clear_refs") << 5;  // forgets the peak so far
    EXPECT_GT(tokenizer.encode(text).size(), text.size() / 20);
    return (double)(process_bytes("VmHWM") - before) / (double)text.size();
}

// Where the library takes 40 bytes.
TEST(SentencePieceBpe, LargeTextsTakeBoundedMemory) {
    if (SANITIZED) { GTEST_SKIP() << "a sanitizer's own memory would be measured"; }
    for (const std::string& model : {small_model(), train_small_model("unigram", 320)}) {
        const auto tokenizer = make_sentencepiece_tokenizer("", model);
        std::mt19937 random(1);
        for (const std::string& part : {std::string("a"), std::string("the earth "), std::string("\xE4\xBD\xA0\xE5\xA5\xBD"),
                                        random_text(random, {"t", "h", "e", "a", "r"}, 1 << 20)}) {
            EXPECT_LT(memory_per_byte(*tokenizer, part), 10) << part.substr(0, 20);
        }
    }
}

// Wherever a model is cut or changed, loading fails with a message or gives a tokenizer that works.
TEST_F(TokenizerTest, BrokenModelsAreRefusedOrWork) {
    const std::string model = small_model();
    std::mt19937 random(1);
    i64 refused = 0;
    for (int i = 0; i < 300; i++) {
        std::string broken = model;
        if (i % 2) { broken.resize(random() % model.size()); }
        for (int n = random() % 3; n > 0 && !broken.empty(); n--) { broken[random() % broken.size()] = random(); }
        try {
            const auto tokenizer = make_sentencepiece_tokenizer("x", broken);
            tokenizer->decode(tokenizer->encode("the earth \xF0\x9F\x98\x80"));
        } catch (const Error&) { refused++; }
        const auto parsed = parse_sentencepiece_model(broken);
        std::vector<int32_t> ids;
        if (parsed && SentencePieceBpe::can_encode(*parsed)) { SentencePieceBpe(*parsed, 0).encode("the earth", ids); }
    }
    EXPECT_GT(refused, 100);
    ModelMaker maker;
    maker.type = SentencePieceModel::UNIGRAM;
    for (const std::string text : {"a", "b", "\xE2\x96\x81"}) { maker.pieces.push_back({text, -1}); }
    maker.pieces.back().text = std::string("\0a", 2);  // empty to the library's trie, which throws
    EXPECT_SAYS(failure_of([&] { make_sentencepiece_tokenizer("x", maker()); }).message, "not a whole SentencePiece model: failed to insert");
}

// Threads share a tokenizer; more segments than the cache has places for.
TEST(SentencePieceBpe, ThreadsAndAFullCacheChangeNothing) {
    const auto tokenizer = make_sentencepiece_tokenizer("", small_model());
    std::string text;
    for (int i = 0; i < (SANITIZED ? 20000 : 300000); i++) { text += format(" x%de", i); }
    const std::vector<int32_t> ids = tokenizer->encode(text);
    EXPECT_TRUE(tokenizer->decode(ids) == text);
    std::vector<std::thread> threads;
    std::atomic<int> equal = 0;
    for (int t = 0; t < 4; t++) {
        threads.emplace_back([&] { equal += tokenizer->encode(text) == ids; });
    }
    for (std::thread& t : threads) { t.join(); }
    EXPECT_EQ(equal, 4);
}

// ---------------------------------------------------------------------------------------------------------------
// Files

TEST_F(TokenizerTest, ForeignTokenizersAreNamed) {
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"", "empty"},
        {"#version: 0.2\n", "GPT-2's merges"},
        {"{\"!\": 0}", "GPT-2's vocabulary"},
        {"{\"added_tokens\": []}", "Hugging Face"},
        {"IQ== 0\nIg== 1\n", "tiktoken"},
        {"\xC8\xD7\x34\x01xxxx", "llm.c"},
        {"hello", "unknown"},
        {"\n\x03", "not a whole"},
        {small_model().substr(0, 1000), "not a whole"},
        {"version https://git-lfs.github.com/spec/v1\n", "LFS"},
    };
    for (const auto& [content, part] : cases) {
        const std::string file = write_file("x", content), message = failure_of([&] { load_tokenizer(file); }).message;
        EXPECT_SAYS(message, part);
        EXPECT_SAYS(message, file);
        EXPECT_SAYS(message, "HINT");
    }
    EXPECT_SAYS(failure_of([&] { load_tokenizer(folder_); }).message, "folder");
}

// ---------------------------------------------------------------------------------------------------------------
// GPT-2's

// Every code point beside letters, numbers, marks, spaces: where words end. The texts are make_gpt2_goldens.py's in_contexts().
TEST(Gpt2, WordsEndWhereTheReferenceEndsThem) {
    std::istringstream golden(read_text_file(GOLDEN + "words.crc32"));
    constexpr uint32_t BLOCK = 1024, STEP = SANITIZED ? 16 : 1;
    for (uint32_t first = 0; first < CODE_POINTS; first += BLOCK) {
        std::string expected;
        ASSERT_TRUE(std::getline(golden, expected));
        if (first / BLOCK % STEP != 0) { continue; }
        uint32_t checksum = 0;
        for (uint32_t code = first; code < first + BLOCK; code++) {
            if (code >= 0xD800 && code < 0xE000) { continue; }
            const std::string c = utf8(code);
            const std::string text =
                c + "a" + c + "b " + c + " x1" + c + "1 2'" + c + "s!" + c + "'t\n" + c + "  " + c + c + "\t" + c + "'s" + c + "'re," + c;
            for (std::string_view rest = text; !rest.empty();) {
                const int32_t length = gpt2_word(rest);
                checksum = crc32(checksum, (const Bytef*)&length, sizeof length);
                rest.remove_prefix(length);
            }
        }
        ASSERT_EQ(format("%08x", checksum), expected) << format("a code point from U+%04X on", first);
    }
}

// Also with merges in an order that no training gives: there it matters that all places of a pair merge at once.
TEST(Gpt2, IdsEqualTheReferences) {
    std::map<std::string, std::unique_ptr<Tokenizer>> tokenizers;
    std::map<std::string, i64> texts;
    std::istringstream golden(read_text_file(GOLDEN + "texts.jsonl"));
    for (std::string line; std::getline(golden, line);) {
        const auto record = nlohmann::json::parse(line);
        const std::string vocab = record.at("vocab"), text = record.at("text");
        std::unique_ptr<Tokenizer>& tokenizer = tokenizers[vocab];
        if (!tokenizer) { tokenizer = load_tokenizer(GOLDEN + vocab); }
        const std::vector<int32_t> ids = tokenizer->encode(text);
        ASSERT_EQ(ids, record.at("ids").get<std::vector<int32_t>>()) << vocab << ": " << quoted(text);
        EXPECT_EQ(tokenizer->decode(ids), text);
        texts[vocab]++;
    }
    EXPECT_GT(texts["vocab.json"], 200);
    EXPECT_GT(texts["wild-vocab.json"], 200);
}

TEST_F(TokenizerTest, Gpt2FilesByAnyName) {
    const auto first = load_tokenizer(GOLDEN + "vocab.json");
    EXPECT_EQ(first->kind, "gpt2");
    EXPECT_EQ(first->vocab_size(), 557);
    EXPECT_EQ(first->eos_id, 556);
    EXPECT_EQ(first->bos_id, 556);
    EXPECT_FALSE(first->adds_space || first->trims_spaces);
    EXPECT_EQ(load_tokenizer(GOLDEN + "merges.txt")->hash, first->hash);
    EXPECT_EQ(load_tokenizer("dev/golden/gpt2")->hash, first->hash);
    const std::string vocab = read_text_file(GOLDEN + "vocab.json"), merges = read_text_file(GOLDEN + "merges.txt");
    write_file("encoder.json", vocab);
    write_file("vocab.bpe", merges);
    for (const char* name : {"encoder.json", "vocab.bpe", ""}) { EXPECT_EQ(load_tokenizer(path(name))->hash, first->hash); }
    std::string with_carriage_returns;
    for (const char c : merges) { with_carriage_returns += c == '\n' ? "\r\n" : std::string(1, c); }
    write_file("x-vocab.json", vocab);
    write_file("x-merges.txt", with_carriage_returns);
    EXPECT_EQ(load_tokenizer(path("x-vocab.json"))->encode(TRAINING_TEXT), first->encode(TRAINING_TEXT));
    // <|endoftext|> in a text is text, and ends it as an id.
    const std::vector<int32_t> ids = first->encode("a<|endoftext|>b");
    EXPECT_EQ(std::count(ids.begin(), ids.end(), first->eos_id), 0);
    EXPECT_EQ(first->decode(ids), "a<|endoftext|>b");
    EXPECT_EQ(first->decode({first->eos_id}), "");
    // Bytes that are not UTF-8 count as U+FFFD.
    EXPECT_EQ(first->encode("a\xFF"
                            "b\xE2\x96"),
              first->encode("a\xEF\xBF\xBD"
                            "b\xEF\xBF\xBD\xEF\xBF\xBD"));
    // Without <|endoftext|>, and with ids that no token has.
    std::string changed = vocab;
    changed.replace(changed.find("<|endoftext|>\": 556"), 19, "<pad>\": 600");
    write_file("y/vocab.json", changed);
    write_file("y/merges.txt", merges);
    const auto other = load_tokenizer(path("y"));
    EXPECT_EQ(other->eos_id, -1);
    EXPECT_EQ(other->vocab_size(), 601);
    EXPECT_EQ(other->decode({600, 580}), std::string("<pad>") + REPLACEMENT_CHARACTER);
    EXPECT_EQ(other->encode(TRAINING_TEXT), first->encode(TRAINING_TEXT));
    EXPECT_NE(other->hash, first->hash);
}

TEST_F(TokenizerTest, BrokenGpt2FilesAreNamed) {
    const std::string vocab = read_text_file(GOLDEN + "vocab.json"), merges = read_text_file(GOLDEN + "merges.txt");
    auto replaced = [](std::string text, const std::string& from, const std::string& to) {
        const size_t at = text.find(from);
        EXPECT_NE(at, std::string::npos) << from;
        return text.replace(at, from.size(), to);
    };
    std::string other_rule_vocab = vocab.substr(0, vocab.rfind('}')), other_rule_merges = merges;
    for (char c = 'a'; c <= 'z'; c++) {  // "a1" ... "z1" as tokens
        other_rule_vocab += format(", \"%c1\": %d", c, 557 + c - 'a');
        other_rule_merges += format("%c 1\n", c);
    }
    other_rule_vocab += "}";
    const struct {
        std::string vocab, merges, says;
    } cases[] = {
        {vocab.substr(0, vocab.size() / 2), merges, "not valid JSON"},
        {"{}", merges, "not GPT-2's vocabulary"},
        {"", merges, "empty"},
        {vocab, "", "empty"},
        {vocab, "version https://git-lfs.github.com/spec/v1\n", "LFS"},
        {"version https://git-lfs.github.com/spec/v1\n", merges, "LFS"},
        {replaced(vocab, "\"A\": 32", "\"A\": 33"), merges, "two tokens of id 33"},
        {replaced(vocab, "\"A\": 32", "\"A\": 3.5"), merges, "3.5"},
        {replaced(vocab, "\"A\": 32", "\"A\": -1"), merges, "-1"},
        {replaced(vocab, "\"A\": 32", "\"A\": 4000000000"), merges, "4000000000"},
        {replaced(vocab, "\"A\": 32", "\"AQ\": 32"), merges, "bytes 41"},
        {replaced(vocab, "\"A\": 32", "\"B\": 32"), merges, "twice"},
        {replaced(vocab, "{", "{\"strange\": 557, "), merges, "'strange'"},
        {vocab, merges.substr(0, merges.size() / 2), "is the file cut"},
        {vocab, merges + "x y\n", "'xy' is no token"},
        {vocab, merges + "xy\n", "line 302"},
        {vocab, merges + "a b c\n", "line 302"},
        {vocab, merges + "\na b\n", "line 302"},
        {vocab, merges + merges.substr(merges.find('\n') + 1), "came before"},
        {other_rule_vocab, other_rule_merges, "another rule"},
        {"[1, 2]", merges, "not GPT-2's vocabulary"},
        {"{\"added_tokens\": []}", merges, "added_tokens"},
        {"\"x\"", merges, "not GPT-2's vocabulary"},
    };
    for (const auto& c : cases) {
        write_file("x/vocab.json", c.vocab);
        write_file("x/merges.txt", c.merges);
        const std::string message = failure_of([&] { load_tokenizer(path("x")); }).message;
        EXPECT_SAYS(message, c.says);
        EXPECT_SAYS(message, path("x"));
    }
    write_file("alone/vocab.json", vocab);
    EXPECT_SAYS(failure_of([&] { load_tokenizer(path("alone/vocab.json")); }).message, "alone/merges.txt");
    write_file("alone/other.json", vocab);
    EXPECT_SAYS(failure_of([&] { load_tokenizer(path("alone/other.json")); }).message, "HINT");
    EXPECT_SAYS(failure_of([&] { load_tokenizer(write_file("merges2/merges.txt", merges)); }).message, "merges2/encoder.json");
    // Anything may be wrong with either.
    std::mt19937 random(1);
    for (int i = 0; i < 100; i++) {
        std::string texts[] = {vocab, merges};
        std::string& broken = texts[random() % 2];
        if (i % 2) { broken.resize(random() % broken.size()); }
        for (int n = random() % 3; n > 0 && !broken.empty(); n--) { broken[random() % broken.size()] = random(); }
        try {
            const auto tokenizer = make_gpt2_tokenizer({"v", "m"}, texts[0], texts[1]);
            tokenizer->decode(tokenizer->encode(TRAINING_TEXT));
        } catch (const Error&) {}
    }
}

// Numbers that others published for these files, which are not part of this repository.
TEST(Gpt2, KnownIds) {
    const std::string folder = SHARED + "gpt2-tokenizer";
    if (!path_exists(folder)) { GTEST_SKIP() << "no " << folder; }
    const auto tokenizer = load_tokenizer(folder);
    EXPECT_EQ(tokenizer->vocab_size(), 50257);
    EXPECT_EQ(tokenizer->eos_id, 50256);
    EXPECT_EQ(tokenizer->encode("Hello world"), (std::vector<int32_t>{15496, 995}));
    const std::string text = read_text_file(SHARED + "tinyshakespeare/input.txt");
    const size_t cut = text.size() * 9 / 10;  // all ASCII
    EXPECT_EQ(tokenizer->encode(text.substr(0, cut)).size(), 301966u);
    EXPECT_EQ(tokenizer->encode(text.substr(cut)).size(), 36059u);
    EXPECT_TRUE(tokenizer->decode(tokenizer->encode(text)) == text);
    const auto tiny = load_tokenizer(SHARED + "megatron-sample/gpt2-tiny-vocab.json");
    EXPECT_EQ(tiny->vocab_size(), 5000);
    EXPECT_EQ(tiny->eos_id, 4999);
    EXPECT_TRUE(tiny->decode(tiny->encode(text)) == text);
}

// Text without a space is one word.
TEST(Gpt2, LargeWordsTakeBoundedMemory) {
    if (SANITIZED) { GTEST_SKIP() << "a sanitizer's own memory would be measured"; }
    const auto tokenizer = load_tokenizer(GOLDEN);
    for (const char* part : {"a", "the", "   ", "\xE4\xBD\xA0"}) { EXPECT_LT(memory_per_byte(*tokenizer, part), 10) << part; }
}

}  // namespace
