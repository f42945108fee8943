// test_data.cpp: shards, the order of windows and ./tokenize. The letters B.x n are rows of CASES.md.
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
#include "dev/test/small_model.h"

namespace {

using Data = DataTest;

constexpr i64 ANY_VOCAB = 65536;

// Windows [begin, end) of the next batch of `count`, each named by its first id and the number of its shard's first id.
std::vector<int32_t> first_ids(DataLoader& loader, i64 count, i64 begin, i64 end) {
    std::vector<int32_t> ids((end - begin) * (loader.seq() + 1)), firsts;
    loader.next(count, begin, end, ids.data());
    for (i64 i = 0; i < end - begin; i++) {
        const int32_t* window = &ids[i * (loader.seq() + 1)];
        for (i64 t = 1; t <= loader.seq(); t++) { EXPECT_EQ(window[t], window[t - 1] + 1); }  // shards here count up
        firsts.push_back(window[0]);
    }
    return firsts;
}

// The stream's first `windows` windows, cut into batches of `batch` that `dp` ranks share.
std::vector<int32_t> stream(const DataLoader& start, i64 windows, i64 batch, i64 dp) {
    std::vector<int32_t> all(windows);
    for (i64 rank = 0; rank < dp; rank++) {
        DataLoader loader = start;
        for (i64 at = 0; at < windows; at += batch) {
            const Range part = split_range(batch, dp, rank);
            const std::vector<int32_t> firsts = first_ids(loader, batch, part.begin, part.end);
            std::copy(firsts.begin(), firsts.end(), all.begin() + at + part.begin);
        }
    }
    return all;
}

// ---------------------------------------------------------------------------------------------------------------
// Order

TEST(Permutation, IsABijectionAndDependsOnTheKey) {
    for (const i64 n : {1, 2, 3, 7, 64, 65, 1000, 4097}) {
        for (const uint64_t key : {0, 1, 2}) {
            const Permutation permutation(n, key);
            std::set<i64> seen;
            for (i64 i = 0; i < n; i++) { seen.insert(permutation(i)); }
            EXPECT_EQ((i64)seen.size(), n);
            EXPECT_TRUE(*seen.begin() == 0 && *seen.rbegin() == n - 1);
        }
    }
    i64 in_place = 0, as_other_key = 0;
    for (i64 i = 0; i < 1000; i++) {
        in_place += Permutation(1000, 1)(i) == i;
        as_other_key += Permutation(1000, 1)(i) == Permutation(1000, 2)(i);
    }
    EXPECT_LT(in_place, 10);
    EXPECT_LT(as_other_key, 10);
    const i64 huge = (i64)1 << 40;
    EXPECT_LT(Permutation(huge, 1)(huge - 1), huge);
}

// A fair shuffle puts window 0 everywhere: chi-square over 8 places with 8000 keys, 7 degrees of freedom, 99.99% point 29.9.
TEST(Permutation, IsFair) {
    std::vector<double> count(8);
    for (uint64_t key = 0; key < 8000; key++) { count[Permutation(8, mix64(key))(0)]++; }
    double chi_square = 0;
    for (const double c : count) { chi_square += (c - 1000) * (c - 1000) / 1000; }
    EXPECT_LT(chi_square, 29.9);
}

// B.1 1: k*W*B*T + 1 tokens are k*W*B windows whatever W; with one token fewer one window fewer.
TEST_F(Data, EveryTokenThatFitsIsUsedAtEveryWorldSize) {
    const i64 k = 3, W = 4, B = 2, T = 5;
    write_shard("full", iota_ids(k * W * B * T + 1));
    write_shard("short", iota_ids(k * W * B * T));
    const DataLoader full(path("full*.bin"), T, ANY_VOCAB, 1, WindowOrder::shuffled),
        shorter(path("short*.bin"), T, ANY_VOCAB, 1, WindowOrder::shuffled);
    EXPECT_EQ(full.windows(), k * W * B);
    EXPECT_EQ(full.left_over(), 0);
    EXPECT_EQ(shorter.windows(), k * W * B - 1);
    EXPECT_EQ(shorter.left_over(), T - 1);
    // Two epochs and a bit: batches run on over the epoch's end, and 23 windows are not a multiple of any batch.
    for (const DataLoader* loader : {&full, &shorter}) {
        const std::vector<int32_t> unsplit = stream(*loader, 56, 8, 1);
        for (const i64 dp : {2, 4, 3}) { EXPECT_EQ(stream(*loader, 56, 8, dp), unsplit); }
        EXPECT_EQ(stream(*loader, 56, 2, 1), unsplit);
        for (i64 epoch = 0; epoch < 2; epoch++) {
            const auto begin = unsplit.begin() + epoch * loader->windows();
            std::set<int32_t> seen(begin, begin + loader->windows());
            EXPECT_EQ((i64)seen.size(), loader->windows());
            for (const int32_t first : seen) { EXPECT_EQ(first % T, 0); }
        }
        EXPECT_NE(std::vector<int32_t>(unsplit.begin(), unsplit.begin() + 20),
                  std::vector<int32_t>(unsplit.begin() + loader->windows(), unsplit.begin() + loader->windows() + 20));
    }
}

// B.1 2: left-over tokens are left out and counted, and no window crosses from one shard to the next.
TEST_F(Data, LeftOverTokensAreCounted) {
    const i64 T = 4;
    write_shard("a", iota_ids(6 * T + 5, 0));
    write_shard("b", iota_ids(2 * T + 1, 1000));
    DataLoader loader(path("*.bin"), T, ANY_VOCAB, 1, WindowOrder::sequential);
    EXPECT_EQ(loader.windows(), 7 + 2);
    EXPECT_EQ(loader.tokens(), 6 * T + 5 + 2 * T + 1);
    EXPECT_EQ(loader.left_over(), 6 * T + 5 - (7 * T + 1));
    EXPECT_EQ(first_ids(loader, 11, 0, 11), (std::vector<int32_t>{0, 4, 8, 12, 16, 20, 24, 1000, 1004, 0, 4}));
    std::vector<int32_t> window(T + 1);
    loader.read_sequential(8, window.data());
    EXPECT_EQ(window, iota_ids(T + 1, 1004));
    EXPECT_NE(failure_of([&] { loader.read_sequential(9, window.data()); }).message, "");
}

// B.1 4 and 5: shards of different sizes; the union over ranks is each window exactly once.
TEST_F(Data, ShardsOfDifferentSizesAndDataParallelRanks) {
    const i64 T = 3, sizes[] = {100, 37, 1000};
    i64 first = 0, windows = 0;
    for (int s = 0; s < 3; s++) {
        write_shard(format("shard%d", s), iota_ids(sizes[s] * T + 1, first));
        first += 10000;
        windows += sizes[s];
    }
    const DataLoader loader(path("*.bin"), T, ANY_VOCAB, 7, WindowOrder::shuffled);
    ASSERT_EQ(loader.windows(), windows);
    for (const i64 dp : {1, 2, 4}) {
        std::map<int32_t, i64> times;
        for (const int32_t id : stream(loader, 2 * windows, 2, dp)) { times[id]++; }
        EXPECT_EQ((i64)times.size(), windows);
        for (const auto& [id, n] : times) { EXPECT_EQ(n, 2) << id; }
    }
    const DataLoader other_seed(path("*.bin"), T, ANY_VOCAB, 8, WindowOrder::shuffled);
    EXPECT_NE(stream(loader, 20, 2, 1), stream(other_seed, 20, 2, 1));
}

// B.6 74 and 76: stopped anywhere and taken up again, also with other batches, the stream is the unbroken one.
TEST_F(Data, ResumeAtAnyPoint) {
    write_shard("a", iota_ids(5 * 4 + 1, 0));
    write_shard("b", iota_ids(3 * 4 + 1, 1000));
    write_shard("c", iota_ids(7 * 4 + 1, 2000));
    for (const std::string& spec : {path("*.bin"), "0.5:" + path("a*.bin") + ",0.2:" + path("b*.bin") + ",0.3:" + path("c*.bin")}) {
        const DataLoader fresh(spec, 4, ANY_VOCAB, 3, WindowOrder::shuffled);
        const std::vector<int32_t> unbroken = stream(fresh, 60, 1, 1);
        for (i64 stop = 0; stop <= 50; stop++) {
            DataLoader before = fresh, after = fresh;
            if (stop > 0) { first_ids(before, stop, 0, 0); }
            EXPECT_EQ(before.state().position, stop);
            after.set_state(before.state());
            EXPECT_EQ(first_ids(after, 10, 0, 10), std::vector<int32_t>(unbroken.begin() + stop, unbroken.begin() + stop + 10));
        }
    }
    DataLoader loader(path("*.bin"), 4, ANY_VOCAB, 3, WindowOrder::shuffled);
    EXPECT_SAYS(failure_of([&] { loader.set_state({5, {2, 3}}); }).message, "HINT");
    EXPECT_SAYS(failure_of([&] { loader.set_state({5, {4}}); }).message, "HINT");
    EXPECT_SAYS(failure_of([&] { loader.set_state({-1, {-1}}); }).message, "HINT");
}

// Megatron's rule, worked out by hand for 0.7 and 0.3; weights are normalised; each source has its own endless stream.
TEST_F(Data, MixFollowsMegatronsRule) {
    write_shard("a", iota_ids(100 * 2 + 1, 0));
    write_shard("b", iota_ids(2 * 2 + 1, 1000));
    for (const char* weights : {"0.7:%s,0.3:%s", "7:%s,3:%s", "7e1:%s,30:%s"}) {
        std::string spec = weights;
        spec.replace(spec.find("%s"), 2, path("a*.bin"));
        spec.replace(spec.find("%s"), 2, path("b*.bin"));
        DataLoader loader(spec, 2, ANY_VOCAB, 1, WindowOrder::shuffled);
        std::string picks;
        for (const int32_t id : first_ids(loader, 10, 0, 10)) { picks += id >= 1000 ? 'b' : 'a'; }
        EXPECT_EQ(picks, "abaabaabaa");
        EXPECT_EQ(loader.state(), (StreamState{10, {7, 3}}));
        EXPECT_DOUBLE_EQ(loader.epochs(1), 1.5);
        EXPECT_EQ(loader.sources()[1].windows(), 2);
    }
    DataLoader even("1:" + path("a*.bin") + ",1:" + path("b*.bin"), 2, ANY_VOCAB, 1, WindowOrder::shuffled);
    std::string picks;
    for (const int32_t id : first_ids(even, 6, 0, 6)) { picks += id >= 1000 ? 'b' : 'a'; }
    EXPECT_EQ(picks, "ababab");  // ties go to the first
    // Validation takes everything once, whatever the weights.
    const DataLoader loader("0.7:" + path("a*.bin") + ",0.3:" + path("b*.bin"), 2, ANY_VOCAB, 1, WindowOrder::sequential);
    std::vector<int32_t> window(3);
    loader.read_sequential(101, window.data());
    EXPECT_EQ(window[0], 1002);
}

TEST_F(Data, SpecsAreParsedStrictly) {
    for (const char* spec : {"", "0.7:", "0.7x:a,0.3:b", "0.7:a,b", "0.7:a,0.3", "0,7:a", "0.7:a,", "-1:a", "0:a", "1e999:a", "+1:a", ".:a",
                             "0.5:a,nan:b", "0.5:a,,0.5:b", "1e308:a,1e308:b", "0.5: ,0.5:b"}) {
        const Failure failure = failure_of([&] { parse_data_spec(spec); });
        EXPECT_EQ(failure.exit_code, EXIT_USAGE) << spec;
        EXPECT_SAYS(failure.message, "HINT");
    }
    EXPECT_EQ(parse_data_spec("my data/a:b,c_*.bin").size(), 1u);
    EXPECT_EQ(parse_data_spec("./0.5:x,y").size(), 1u);
    const auto spaced = parse_data_spec(" 0.7:a, 0.3 : b c ,1e100:d");
    ASSERT_EQ(spaced.size(), 3u);
    EXPECT_EQ(spaced[0].glob + "|" + spaced[1].glob + "|" + spaced[2].glob, "a|b c|d");
    EXPECT_EQ(spaced[2].weight, 1.0);
    setlocale(LC_ALL, "de_DE.UTF-8");  // if it is installed: the decimal comma must mean nothing
    const auto parts = parse_data_spec("1.5:x y/*.bin,0.5:z:1");
    setlocale(LC_ALL, "C");
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_DOUBLE_EQ(parts[0].weight, 0.75);
    EXPECT_EQ(parts[0].glob, "x y/*.bin");
    EXPECT_EQ(parts[1].glob, "z:1");
}

TEST_F(Data, IdentityChangesWithTheStreamOnly) {
    write_shard("a/x", iota_ids(41));
    write_shard("b/x", iota_ids(41));
    write_shard("c/x", iota_ids(42));
    write_shard("d/y", iota_ids(41));
    auto identity = [&](const std::string& spec, i64 S, uint64_t seed) {
        return DataLoader(spec, S, ANY_VOCAB, seed, WindowOrder::shuffled).identity();
    };
    const uint64_t one = identity(path("a/*"), 4, 1);
    EXPECT_EQ(identity(path("b/*.bin"), 4, 1), one);
    const std::set<uint64_t> all = {one,
                                    identity(path("c/*"), 4, 1),
                                    identity(path("d/*"), 4, 1),
                                    identity(path("a/*"), 5, 1),
                                    identity(path("a/*"), 4, 2),
                                    identity("1:" + path("a/*") + ",1:" + path("d/*"), 4, 1),
                                    identity("2:" + path("a/*") + ",1:" + path("d/*"), 4, 1)};
    EXPECT_EQ(all.size(), 7u);
    // Other content of the same size: seen at both ends of a large shard.
    std::vector<int32_t> ids(20000, 5);
    std::set<uint64_t> contents;
    for (const size_t changed : {0, 1500, 18000, 19999}) {
        ids[changed]++;
        write_shard("e/x", ids);
        contents.insert(identity(path("e/*"), 4, 1));
    }
    EXPECT_EQ(contents.size(), 4u);
    // The same ids of another tokenizer.
    for (const char* hash : {"aa", "bb"}) {
        TokenSetInfo info;
        info.tokenizer_hash = hash;
        info.vocab = 100;
        info.train = {1, 20000, 20000, {{"x_000000.bin", 20000}}};
        write_token_set_info(path("e/x.json"), info);
        contents.insert(identity(path("e/*.bin"), 4, 1));
    }
    EXPECT_EQ(contents.size(), 6u);
}

// ---------------------------------------------------------------------------------------------------------------
// Shards

TEST_F(Data, WhatIsNoFileIsRefusedWithoutWaiting) {
    ASSERT_EQ(mkfifo(path("pipe.bin").c_str(), 0600), 0);
    for (const std::string& file : {path("pipe.bin"), std::string("/dev/null")}) {
        EXPECT_SAYS(failure_of([&] { load_tokenizer(file); }).message, "a pipe or a device");
        EXPECT_FALSE(read_token_set_info(file));
    }
}

// More shards than descriptors: some stay open, the others are opened for each read. Cut in the run, either kind is a named error.
TEST_F(Data, ManyShardsAndOnesThatAreCutInTheRun) {
    constexpr i64 SHARDS = 200, T = 50;
    for (i64 i = 0; i < SHARDS; i++) { write_shard(format("x%03d", (int)i), iota_ids(T + 1, 100 * i)); }
    const Limit limit(RLIMIT_NOFILE, 100);
    const size_t before = open_files();
    {
        const DataLoader start(path("*.bin"), T, ANY_VOCAB, 1, WindowOrder::sequential);
        EXPECT_EQ(open_files(), before + 25);
        DataLoader loader = start, copy = start;
        EXPECT_EQ(first_ids(loader, SHARDS, 0, SHARDS).back(), 100 * (SHARDS - 1));
        for (const char* name : {"x000_000000.bin", "x199_000000.bin"}) { std::filesystem::resize_file(path(name), 1024 + 60); }
        std::vector<int32_t> window(T + 1);
        for (const i64 cut : {(i64)0, SHARDS - 1}) {
            const Failure failure = failure_of([&] { copy.read_sequential(cut, window.data()); });
            EXPECT_EQ(failure.exit_code, EXIT_FAILED);
            for (const char* part : {cut == 0 ? "x000_000000.bin" : "x199_000000.bin", "byte 1084", "HINT"}) {
                EXPECT_SAYS(failure.message, part);
            }
        }
        unlink(path("x198_000000.bin").c_str());
        EXPECT_SAYS(failure_of([&] { copy.read_sequential(198, window.data()); }).message, "x198_000000.bin");
        copy.read_sequential(1, window.data());
        EXPECT_EQ(window, iota_ids(T + 1, 100));
    }
    EXPECT_EQ(open_files(), before);
}

// Threads that read the same shards at once each get their own.
TEST_F(Data, ThreadsShareShards) {
    write_shard("narrow", iota_ids(4001));
    write_shard("wide", iota_ids(4001, 10000), 70000);
    const DataLoader start(path("*.bin"), 40, 70000, 1, WindowOrder::shuffled);
    const std::vector<int32_t> wanted = stream(start, 400, 1, 1);
    parallel_for(4, 4, [&](size_t) { EXPECT_EQ(stream(start, 400, 1, 1), wanted); });
}

// B.1 13
TEST_F(Data, TooShortDataSaysNeedAndHave) {
    const i64 T = 16;
    for (const i64 n : {0, 1, 16}) {
        write_shard("x", iota_ids(n));
        const std::string message = failure_of([&] { DataLoader(path("x*.bin"), T, ANY_VOCAB, 1, WindowOrder::shuffled); }).message;
        EXPECT_SAYS(message, "17 tokens");
        EXPECT_SAYS(message, format("found %lld tokens", (long long)n));
    }
    write_shard("x", iota_ids(T + 1));
    write_shard("empty", {});
    DataLoader loader(path("*.bin"), T, ANY_VOCAB, 1, WindowOrder::shuffled);  // an empty shard among others is no fault
    EXPECT_EQ(first_ids(loader, 3, 0, 3), (std::vector<int32_t>{0, 0, 0}));
    EXPECT_EQ(failure_of([&] { DataLoader(path("x*.bin"), 0, ANY_VOCAB, 1, WindowOrder::shuffled); }).exit_code, EXIT_USAGE);
}

// B.1 14
TEST_F(Data, GlobsAreSortedAndMayHoldSpacesAndStars) {
    for (int i = 0; i <= 10; i++) {
        std::filesystem::rename(write_shard("my data/t", iota_ids(3, 10 * i)), path(format("my data/s_%d.bin", i)));
    }
    DataLoader loader(path("my data/s_*.bin"), 2, ANY_VOCAB, 1, WindowOrder::sequential);
    EXPECT_EQ(first_ids(loader, 11, 0, 11), (std::vector<int32_t>{0, 10, 100, 20, 30, 40, 50, 60, 70, 80, 90}));
    std::filesystem::rename(path("my data/s_7.bin"), path("my data/s_*.bin"));
    EXPECT_EQ(DataLoader(path("my data/s_*.bin"), 2, ANY_VOCAB, 1, WindowOrder::sequential).windows(), 1);  // the file of that very name
    const Failure failure = failure_of([&] { DataLoader(path("no*.bin"), 2, ANY_VOCAB, 1, WindowOrder::sequential); });
    EXPECT_EQ(failure.exit_code, EXIT_USAGE);
    EXPECT_SAYS(failure.message, "no*.bin");
    std::filesystem::create_directory(path("a * b"));
    std::filesystem::rename(path("my data/s_3.bin"), path("a * b/s_3.bin"));
    DataLoader star(path("a * b/s_?.bin"), 2, ANY_VOCAB, 1, WindowOrder::sequential);
    EXPECT_EQ(first_ids(star, 1, 0, 1), std::vector<int32_t>{30});
}

// What cannot be listed is not "no match".
TEST_F(Data, GlobsSayWhyTheyCannotLook) {
    write_shard("locked/x", iota_ids(10));
    const std::string pattern = path("locked/*.bin");
    {
        const Limit limit(RLIMIT_NOFILE, 3);
        const Failure failure = failure_of([&] { expand_glob(pattern); });
        EXPECT_EQ(failure.exit_code, EXIT_FAILED);
        EXPECT_SAYS(failure.message, strerror(EMFILE));
        EXPECT_SAYS(failure.message, path("locked"));
    }
    constexpr uid_t NOBODY = 65534;
    const bool root = geteuid() == 0;  // may look everywhere
    chmod(path("locked").c_str(), 0);
    if (root && seteuid(NOBODY) != 0) { GTEST_SKIP() << "cannot be another user"; }
    const Failure star = failure_of([&] { expand_glob(pattern); });
    const Failure plain = failure_of([&] { expand_glob(path("locked/x_000000.bin")); });
    if (root) { ASSERT_EQ(seteuid(0), 0); }
    chmod(path("locked").c_str(), 0700);
    for (const Failure& failure : {star, plain}) {
        EXPECT_EQ(failure.exit_code, EXIT_FAILED);
        EXPECT_SAYS(failure.message, strerror(EACCES));
    }
    EXPECT_EQ(expand_glob(pattern).size(), 1u);
}

TEST_F(Data, OnePatternMustNotTakeTrainingAndValidation) {
    write_shard("x", iota_ids(10));
    write_shard("x_val", iota_ids(10));
    const Failure failure = failure_of([&] { DataLoader(path("x_*.bin"), 2, ANY_VOCAB, 1, WindowOrder::shuffled); });
    EXPECT_EQ(failure.exit_code, EXIT_USAGE);
    EXPECT_SAYS(failure.message, "x_[0-9]*.bin");
    EXPECT_EQ(DataLoader(path("x_[0-9]*.bin"), 2, ANY_VOCAB, 1, WindowOrder::shuffled).windows(), 4);
    EXPECT_EQ(DataLoader(path("x_val_*.bin"), 2, ANY_VOCAB, 1, WindowOrder::shuffled).windows(), 4);
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
    for (const int line : {4, 5, 7, 8, 9, 10, 11, 13, 16, 17}) { EXPECT_SAYS(run.err, format("in.jsonl:%d: ", line)); }
    const std::string repaired =
        "one\n|\n\xF0\x9F\x98\x80\n|\nlone \xEF\xBF\xBD\n|\nlow \xEF\xBF\xBD\\ud83d\n|\nnul @\n|\nraw \xEF\xBF\xBD\n|\ncrlf\n|\nbig";
    std::string with_nul = repaired;
    with_nul[repaired.find('@')] = '\0';
    EXPECT_EQ(decoded("o_000000.bin", "|"), with_nul);
    const nlohmann::ordered_json counts = read_token_set_info(path("o.json"))->problems;
    EXPECT_EQ(counts.dump(),
              "{\"lines_not_json\":5,\"lines_without_text_key\":1,\"text_not_a_string\":1,\"documents_with_invalid_utf8\":1,\"documents_"
              "with_lone_surrogates\":2,\"documents_without_text\":1}");
    const Outcome stopped = make({file, "--on-error", "stop"}, "p");
    EXPECT_EQ(stopped.exit_code, EXIT_FAILED);
    EXPECT_SAYS(stopped.err, "in.jsonl:4");
    const Outcome other_key = make({file, "--text-key", "txt"});
    EXPECT_EQ(decoded(), "x");
    EXPECT_EQ(file_names(), (std::vector<std::string>{"in.jsonl", "o.json", "o_000000.bin", "t.model"}));
}

TEST_F(Tokenize, PackedFilesAndFolders) {
    const std::string lines = many_documents(4000), half = lines.substr(0, lines.size() / 2);
    auto gzip = [](const std::string& text) {
        z_stream z = {};
        deflateInit2(&z, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
        std::string out(text.size() + 1000, '\0');
        z.next_in = (Bytef*)text.data();
        z.avail_in = text.size();
        z.next_out = (Bytef*)out.data();
        z.avail_out = out.size();
        EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
        out.resize(z.total_out);
        deflateEnd(&z);
        return out;
    };
    auto zstd = [](const std::string& text) {
        std::string out(ZSTD_compressBound(text.size()), '\0');
        out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
        return out;
    };
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
    std::atomic<int> calls = 0;
    parallel_for(3, 1'000'000'000, [&](size_t) { calls++; });
    EXPECT_EQ(calls, 3);
    const pid_t child = fork();
    if (child == 0) {  // no more threads for this user
        if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) { _exit(0); }
        const Limit limit(RLIMIT_NPROC, 0);
        const Failure failure = failure_of([] { parallel_for(2, 2, [](size_t) {}); });
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
}

}  // namespace
