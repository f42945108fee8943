// test_data.cpp: ./tokenize. The letters B.x n are rows of CASES.md.
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <clocale>
#include <map>
#include <random>
#include <set>

// The program itself is tested in this process, so that its functions can be, too.
#define main tokenize_main
#include "data/tokenize.cpp"
#undef main

#include "dev/test/data_testing.h"
#include "dev/test/packing.h"
#include "dev/test/small_model.h"

namespace {

using Data = DataTest;

// ---------------------------------------------------------------------------------------------------------------
// Shards

TEST_F(Data, WhatIsNoFileIsRefusedWithoutWaiting) {
    ASSERT_EQ(mkfifo(path("pipe.bin").c_str(), 0600), 0);
    for (const std::string& file : {path("pipe.bin"), std::string("/dev/null")}) {
        EXPECT_SAYS(failure_of([&] { load_tokenizer(file); }).message, "a pipe or a device");
        EXPECT_FALSE(read_token_set_info(file));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// UTF-8

TEST(Utf8, LengthAgreesWithSimdjson) {
    std::mt19937 random(1);
    const std::string_view bytes("\x00\x41\x7F\x80\x8F\x90\x9F\xA0\xBF\xC0\xC1\xC2\xDF\xE0\xE1\xED\xEF\xF0\xF1\xF4\xF5\xFF", 22);
    for (int i = 0; i < 100000; i++) {
        std::string text;
        for (int n = 1 + random() % 4; n > 0; n--) { text += bytes[random() % bytes.size()]; }
        bool valid = true;
        for (size_t at = 0; at < text.size() && valid;) {
            const int length = utf8_length(std::string_view(text).substr(at));
            valid = length > 0;
            at += length;
        }
        ASSERT_EQ(valid, simdjson::validate_utf8(text.data(), text.size()));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// ./tokenize

struct Outcome {
    int exit_code;
    std::string out, err;
};
Outcome run_tokenize(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "tokenize");
    std::vector<char*> argv;
    for (std::string& a : arguments) { argv.push_back(a.data()); }
    argv.push_back(nullptr);
    testing::internal::CaptureStdout();
    testing::internal::CaptureStderr();
    Outcome run;
    run.exit_code = tokenize_main((int)arguments.size(), argv.data());
    run.out = testing::internal::GetCapturedStdout();
    run.err = testing::internal::GetCapturedStderr();
    return run;
}

class Tokenize : public Data {
protected:
    void SetUp() override {
        Data::SetUp();
        model_ = write_file("t.model", small_model());
    }
    Outcome make(std::vector<std::string> arguments, const std::string& prefix = "o") const {
        for (const std::string& a : {std::string("--tokenizer"), model_, std::string("--out"), path(prefix)}) { arguments.push_back(a); }
        return run_tokenize(arguments);
    }
    std::string decoded(const std::string& file = "o_000000.bin", const std::string& separator = "") const {
        std::vector<std::string> arguments = {"--decode", path(file)};
        if (!separator.empty()) { arguments.insert(arguments.end(), {"--doc-separator", separator}); }
        return run_tokenize(arguments).out;
    }
    std::string model_;
};

TEST_F(Tokenize, TextComesBack) {
    std::string text;
    for (int i = 0; i < 300; i++) { text += TRAINING_TEXT + "\xE6\x97\xA5 line " + std::to_string(i) + " <s>\r\n\n"; }
    const std::string file = write_file("in.txt", text);
    EXPECT_EQ(make({file}).exit_code, EXIT_OK);
    EXPECT_TRUE(decoded() == text);
    EXPECT_EQ(make({file, "--split-documents", "1000", "--bos"}).exit_code, EXIT_OK);
    EXPECT_TRUE(decoded() == text);
    EXPECT_EQ(make({file, "--shard-tokens", "5000", "--split-documents", "1000"}).exit_code, EXIT_OK);
    EXPECT_TRUE(decoded("o_0*.bin") == text);
    EXPECT_GT(file_names().size(), 10u);
    // A shorter set of the same name leaves no old shard behind.
    EXPECT_EQ(make({write_file("short.txt", "short")}).exit_code, EXIT_OK);
    EXPECT_EQ(file_names(), (std::vector<std::string>{"in.txt", "o.json", "o_000000.bin", "short.txt", "t.model"}));
    EXPECT_EQ(decoded(), "short");
}

TEST_F(Tokenize, SeparatorsMakeDocuments) {
    const std::string file = write_file("in.txt", "one\ntwo\n\n\nthree\r\n\r\nfour");
    EXPECT_EQ(make({file, "--doc-separator", "blank-lines"}).exit_code, EXIT_OK);
    EXPECT_EQ(read_token_set_info(path("o.json"))->train.documents, 3);
    EXPECT_EQ(decoded("o_000000.bin", "--"), "one\ntwo\n--\nthree\r\n--\nfour");
    const std::string stories = write_file("in2.txt", "one\n<|endoftext|>\ntwo <|endoftext|>\n");
    EXPECT_EQ(make({stories, "--doc-separator", "<|endoftext|>"}).exit_code, EXIT_OK);
    EXPECT_EQ(decoded("o_000000.bin", "--"), "one\n--\ntwo <|endoftext|>\n");
}

std::string many_documents(int n) {
    std::string lines;
    for (int i = 0; i < n; i++) {
        lines += format("{\"meta\": {\"text\": \"not this\"}, \"text\": \"document %d of the earth%s\", \"n\": 1e999}\n", i,
                        std::string(i % 50, '.').c_str());
    }
    return lines;
}

TEST_F(Tokenize, SameOutputForAnyNumberOfThreads) {
    const std::string file = write_file("in.jsonl", many_documents(2000));
    std::map<std::string, std::string> first;
    for (const char* threads : {"1", "2", "7"}) {
        const Outcome run = make({file, "--threads", threads, "--val-fraction", "0.1", "--shard-tokens", "7000"});
        EXPECT_EQ(run.exit_code, EXIT_OK) << run.err;
        std::map<std::string, std::string> content;
        for (const std::string& name : file_names()) { content[name] = read_text_file(path(name)); }
        if (first.empty()) { first = content; }
        EXPECT_TRUE(content == first);
    }
    const TokenSetInfo info = *read_token_set_info(path("o.json"));
    EXPECT_EQ(info.train.documents + info.val.documents, 2000);
    EXPECT_NEAR(info.val.documents, 200, 60);
    EXPECT_TRUE(info.eos && !info.bos && info.eos_id == 2 && info.vocab == 340);
    const DataLoader train(path("o_0*.bin"), 8, 340, 1, WindowOrder::shuffled),
        val(path("o_val_*.bin"), 8, 340, 1, WindowOrder::sequential);
    EXPECT_EQ(train.tokens(), info.train.tokens);
    EXPECT_EQ(val.tokens(), info.val.tokens);
    EXPECT_DOUBLE_EQ(train.text_bytes_per_token(), (double)info.train.text_bytes / (double)info.train.tokens);
    EXPECT_DOUBLE_EQ(val.text_bytes_per_token(), (double)info.val.text_bytes / (double)info.val.tokens);
    EXPECT_EQ(train.token_set()->tokenizer_hash, load_tokenizer(model_)->hash);
    // A shard that the side file does not speak of: not known, rather than wrong.
    write_shard("o_val", iota_ids(100));
    EXPECT_EQ(DataLoader(path("o_val_000000.bin"), 8, 340, 1, WindowOrder::sequential).text_bytes_per_token(), 0);
}

TEST_F(Tokenize, SourcesOfDifferentTokenizersAreRefused) {
    const std::string text = write_file("in.txt", TRAINING_TEXT);
    EXPECT_EQ(make({text}, "a").exit_code, EXIT_OK);
    EXPECT_EQ(run_tokenize({"--train-tokenizer", "330", "--out", path("u.model"), text}).exit_code, EXIT_OK);
    EXPECT_EQ(run_tokenize({"--tokenizer", path("u.model"), "--out", path("b"), text}).exit_code, EXIT_OK);
    const std::string a = path("a_000000.bin"), b = path("b_000000.bin");
    EXPECT_SAYS(failure_of([&] { DataLoader("1:" + a + ",1:" + b, 8, 340, 1, WindowOrder::shuffled); }).message, "u.model");
    EXPECT_SAYS(failure_of([&] { DataLoader(path("?_000000.bin"), 8, 340, 1, WindowOrder::shuffled); }).message, "u.model");
}

// B.3 31, 32, 34
TEST_F(Tokenize, BrokenLinesAreNamedAndCounted) {
    const std::string lines =
        "{\"text\":\"one\"}\n\n{\"text\":\"\\ud83d\\ude00\"}\n{\"text\":\"lone \\ud83d\"}\n{\"text\":\"low "
        "\\ude00\\\\ud83d\"}\n{\"text\":\"nul \\u0000\"}\n"
        "{\"text\":null}\n{\"txt\":\"x\"}\nnot json\n{\"text\":\"raw \xff\"}\n{\"text\":\"a\"} "
        "junk\n{\"text\":\"\"}\n[1]\n{\"text\":\"crlf\"}\r\n"
        "{\"n\":123456789012345678901234567890,\"text\":\"big\"}\n{\"text\":\"cut\",\"meta\":{}\n{\"text\":\"cut";
    const std::string file = write_file("in.jsonl", lines);
    const Outcome run = make({file});
    EXPECT_EQ(run.exit_code, EXIT_OK);
    for (const int line : {4, 5, 7, 8, 9, 10, 11, 12, 13, 16, 17}) { EXPECT_SAYS(run.err, format("in.jsonl:%d: ", line)); }
    const std::string repaired =
        "one\n|\n\xF0\x9F\x98\x80\n|\nlone \xEF\xBF\xBD\n|\nlow \xEF\xBF\xBD\\ud83d\n|\nnul @\n|\nraw \xEF\xBF\xBD\n|\ncrlf\n|\nbig";
    std::string with_nul = repaired;
    with_nul[repaired.find('@')] = '\0';
    EXPECT_EQ(decoded("o_000000.bin", "|"), with_nul);
    const nlohmann::ordered_json counts = read_token_set_info(path("o.json"))->problems;
    EXPECT_EQ(counts.dump(),
              "{\"documents_with_invalid_utf8\":1,\"documents_with_lone_surrogates\":2,\"documents_without_text\":1,\"lines_not_json\":5,"
              "\"lines_without_text_key\":1,\"text_not_a_string\":1}");
    const Outcome stopped = make({file, "--on-error", "stop"}, "p");
    EXPECT_EQ(stopped.exit_code, EXIT_FAILED);
    EXPECT_SAYS(stopped.err, "in.jsonl:4");
    const Outcome other_key = make({file, "--text-key", "txt"});
    EXPECT_EQ(decoded(), "x");
    EXPECT_EQ(file_names(), (std::vector<std::string>{"in.jsonl", "o.json", "o_000000.bin", "t.model"}));
}

TEST_F(Tokenize, PackedFilesAndFolders) {
    const std::string lines = many_documents(4000), half = lines.substr(0, lines.size() / 2);
    EXPECT_EQ(make({write_file("in.jsonl", lines)}).exit_code, EXIT_OK);
    const std::string wanted = read_text_file(path("o_000000.bin"));
    for (const std::string& packed :
         {gzip(lines), gzip(half) + gzip(lines.substr(half.size())), zstd(lines), zstd(half) + zstd(lines.substr(half.size()))}) {
        EXPECT_EQ(make({write_file("in.jsonl.gz", packed)}).exit_code, EXIT_OK);
        EXPECT_TRUE(read_text_file(path("o_000000.bin")) == wanted);
    }
    for (const std::string& packed : {gzip(lines), zstd(lines)}) {
        const std::string cut = write_file("cut.jsonl.gz", packed.substr(0, packed.size() - 10));
        const Outcome run = make({cut});
        EXPECT_EQ(run.exit_code, EXIT_OK);
        EXPECT_SAYS(run.err, "cut.jsonl.gz");
        EXPECT_EQ(read_token_set_info(path("o.json"))->problems["files_cut"], 1);
        EXPECT_EQ(make({cut, "--on-error", "stop"}, "p").exit_code, EXIT_FAILED);
    }
    // A checksum says too late that what was read is not what was packed.
    std::string wrong_gzip = gzip(lines), wrong_zstd = zstd(lines, 1);
    wrong_gzip[wrong_gzip.size() - 8] ^= 1;
    wrong_zstd.back() ^= 1;
    for (const std::string& packed : {wrong_gzip, wrong_zstd}) {
        const std::string wrong = write_file("wrong.jsonl.gz", packed);
        EXPECT_SAYS(make({wrong}).err, "damaged somewhere");
        EXPECT_EQ(read_token_set_info(path("o.json"))->problems.dump(), "{\"files_with_a_wrong_checksum\":1}");
        EXPECT_EQ(make({wrong, "--on-error", "stop"}, "p").exit_code, EXIT_FAILED);
    }
    write_file("folder/b.txt", "from b");
    write_file("folder/a/c.jsonl", "\xEF\xBB\xBF{\"text\":\"from c\"}");
    write_file("folder/ignored.md", "no");
    EXPECT_EQ(make({path("folder")}).exit_code, EXIT_OK);
    EXPECT_EQ(decoded("o_000000.bin", "|"), "from c\n|\nfrom b");
    // Zeros after gzip's data are padding; anything else there is not.
    const std::string zeros(3 << 20, '\0');
    EXPECT_EQ(make({write_file("in.jsonl.gz", gzip(half) + zeros + gzip(lines.substr(half.size())) + zeros)}).exit_code, EXIT_OK);
    EXPECT_TRUE(read_token_set_info(path("o.json"))->problems.empty());
    EXPECT_TRUE(read_text_file(path("o_000000.bin")) == wanted);
    EXPECT_SAYS(make({write_file("in.jsonl.gz", gzip(lines) + "junk")}).err, "broken");
    // A link that leads nowhere is named, not left out.
    std::filesystem::create_symlink("loop.txt", path("folder/loop.txt"));
    EXPECT_SAYS(make({path("folder")}).err, path("folder/loop.txt") + "': " + strerror(ELOOP));
}

TEST_F(Tokenize, ThreadsAreNoMoreThanThereIsWork) {
    const std::string file = write_file("in.txt", "text");
    EXPECT_EQ(make({file, "--threads", "1000"}).exit_code, EXIT_OK);
    const pid_t child = fork();
    if (child == 0) {  // no more threads for this user
        if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) { _exit(0); }
        const Limit limit(RLIMIT_NPROC, 0);
        const Failure failure = failure_of([] { start_thread([] {}); });
        _exit(failure.message.find("fewer --threads") == std::string::npos);
    }
    int status = 1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

TEST_F(Tokenize, OneProgramAtATimeWritesASet) {
    const std::string file = write_file("in.txt", TRAINING_TEXT);
    {
        const OutLock lock(path("o"));
        const Outcome run = make({file});
        EXPECT_EQ(run.exit_code, EXIT_FAILED);
        EXPECT_SAYS(run.err, "another ./tokenize");
        EXPECT_SAYS(run.err, path("o") + "'");
        EXPECT_EQ(make({file}, "p").exit_code, EXIT_OK);
    }
    {  // o's shards for validation are named as those of a set o_val
        const OutLock lock(path("o_val"));
        EXPECT_SAYS(make({file}).err, "another ./tokenize");
    }
    for (const auto& [broken_off, out] : {std::pair("o", "o_val"), std::pair("o_val", "o")}) {
        const std::string state = write_file(std::string(broken_off) + ".resume.json", "{}"),
                          shard = write_file("o_val_000000.bin.tmp", "what it goes on from");
        EXPECT_SAYS(make({file}, out).err, "begin anew");
        EXPECT_TRUE(path_exists(shard));
        unlink(state.c_str());
        unlink(shard.c_str());
    }
    EXPECT_EQ(make({file}).exit_code, EXIT_OK);
    write_file("o.lock", "");  // its holder was killed
    EXPECT_EQ(make({file}).exit_code, EXIT_OK);
    EXPECT_FALSE(path_exists(path("o.lock")));
}

// B.3 35: stopped in the middle, nothing is left that passes for a set.
TEST_F(Tokenize, AStopLeavesNothing) {
    const std::string file = write_file("in.txt", TRAINING_TEXT);
    const std::vector<std::string> before = file_names();
    stop_signal = SIGTERM;
    const Outcome run = make({file});
    stop_signal = 0;
    EXPECT_EQ(run.exit_code, 128 + SIGTERM);
    EXPECT_SAYS(run.err, "nothing was written");
    EXPECT_EQ(file_names(), before);
}

TEST_F(Tokenize, FailuresLeaveNothingAndSayWhy) {
    const std::string text = write_file("in.txt", "text"), utf16 = write_file("u.txt", std::string("\xFF\xFEh\0", 4)),
                      empty = write_file("e.jsonl", ""), odd = write_file("in.md", "x");
    const std::vector<std::string> before = file_names();
    struct Case {
        Outcome run;
        int exit_code;
        std::string part;
    };
    const Case cases[] = {
        {run_tokenize({"--tokenizer", path("nope"), "--out", path("o"), text}), EXIT_FAILED, "nope': No such file or directory\nHINT"},
        {make({path("nope.txt")}), EXIT_FAILED, "nope.txt"},
        {make({utf16}), EXIT_FAILED, "UTF-16"},
        {make({empty}), EXIT_FAILED, "no training tokens"},
        {make({odd}), EXIT_USAGE, "--format"},
        {make({text, path(".") + "/in.txt"}), EXIT_USAGE, "the same file"},
        {make({"-", text, "-"}), EXIT_USAGE, "the same file"},
        {make({text}, "in.txt/o"), EXIT_FAILED, "--out"},
        {make({text, "--bogus"}), EXIT_USAGE, "--bogus"},
        {make({text, "--shard-tokens", "0"}), EXIT_USAGE, "--shard-tokens"},
        {make({text, "--threads", "abc"}), EXIT_USAGE, "--threads"},
        {make({text, "--val-fraction", "nan"}), EXIT_USAGE, "--val-fraction"},
        {make({text, "--val-fraction", "1.5"}), EXIT_USAGE, "--val-fraction"},
        {make({text, "--val-fraction", "0.5x"}), EXIT_USAGE, "--val-fraction"},
        {make({text, "--model-type", "bpe"}), EXIT_USAGE, "--model-type"},
        {make({}), EXIT_USAGE, "INPUT"},
        {run_tokenize({text, "--tokenizer", model_}), EXIT_USAGE, "--out"},
        {run_tokenize({"--inspect", "--decode", text}), EXIT_USAGE, "--inspect"},
        {run_tokenize({"--inspect", text}), EXIT_FAILED, "text file"},
        {run_tokenize({"--train-tokenizer", "270", "--out", path("in.txt"), text}), EXIT_FAILED, "is an input"},
        {run_tokenize({"--train-tokenizer", "100", "--out", path("m.model"), text}), EXIT_FAILED, "100"},
        {run_tokenize({"--train-tokenizer", "300", "--out", path("m.model"), text}), EXIT_FAILED, "a longer text allows more"},
        {run_tokenize({"--train-tokenizer", "270", "--train-lines", "1", "--out", path("m.model"), text}), EXIT_USAGE, "--train-lines"},
        {run_tokenize({"--train-tokenizer", "270", "--character-coverage", "nan", "--out", path("m.model"), text}), EXIT_USAGE,
         "--character-coverage"},
    };
    for (const Case& c : cases) {
        EXPECT_EQ(c.run.exit_code, c.exit_code) << c.run.err;
        EXPECT_SAYS(c.run.err, c.part);
        EXPECT_EQ(c.run.err.find(".cc("), std::string::npos) << c.run.err;
    }
    EXPECT_EQ(file_names(), before);
    // A set that is replaced takes its own shards with it, nothing else.
    EXPECT_EQ(make({text}, "set/o").exit_code, EXIT_OK);
    std::string side = read_text_file(path("set/o.json"));
    side.replace(side.find("o_000000.bin"), strlen("o_000000.bin"), "../in.txt");
    write_file("set/o.json", side);
    const Outcome run = make({text}, "set/o");
    EXPECT_EQ(run.exit_code, EXIT_FAILED);
    EXPECT_SAYS(run.err, "'../in.txt', wanted a name without a folder");
    EXPECT_TRUE(path_exists(text));
    // Shards that no side file vouches for are neither replaced nor mixed with the new ones.
    write_shard("o", iota_ids(3));
    EXPECT_SAYS(make({text}).err, "in the way");
    EXPECT_EQ(run_tokenize({"--help"}).exit_code, EXIT_OK);
}

TEST_F(Tokenize, InspectShowsHeaderAndText) {
    EXPECT_EQ(make({write_file("in.jsonl", "{\"text\":\"the earth\"}\n{\"text\":\"the \\\"deep\\\"\"}\n"), "--bos"}).exit_code, EXIT_OK);
    const Outcome run = run_tokenize({"--inspect", path("o_000000.bin")});
    EXPECT_EQ(run.exit_code, EXIT_OK);
    for (const char* part :
         {"magic 20240520", "2 documents", "starts with BOS (1) and ends with EOS (2)", "the earth", "the \\\"deep\\\""}) {
        EXPECT_SAYS(run.out, part);
    }
    // Another tokenizer under the old name must not be believed.
    EXPECT_EQ(run_tokenize({"--train-tokenizer", "330", "--out", model_, write_file("in.txt", TRAINING_TEXT)}).exit_code, EXIT_OK);
    EXPECT_SAYS(run_tokenize({"--inspect", path("o_000000.bin")}).err, "another tokenizer");
    EXPECT_EQ(make({path("in.txt")}, "p").exit_code, EXIT_OK);
    EXPECT_SAYS(run_tokenize({"--decode", path("p_000000.bin"), path("o_000000.bin")}).err, "another tokenizer");
    EXPECT_SAYS(run_tokenize({"--convert", "megatron", "--tokenizer", model_, "--out", path("m"), path("o.json")}).err,
                "another tokenizer");
}

}  // namespace
