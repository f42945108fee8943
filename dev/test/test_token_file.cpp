// test_token_file.cpp: files of tokens of every kind, and what is no such file. Oracles: the ids that were written, formats written here
// byte by byte, and the reader's own rules. The letters B.x n are rows of CASES.md.
#include "dev/test/data_testing.h"

#include <sys/stat.h>

#include <atomic>
#include <thread>

#include "llmc/megatron.h"

namespace {

class TokenFiles : public DataTest {
protected:
    // The bytes of ids of one type, as any writer stores them.
    template <typename Id>
    static std::string stored(const std::vector<int64_t>& ids) {
        std::string bytes;
        for (const int64_t id : ids) {
            const Id narrow = (Id)id;
            bytes.append((const char*)&narrow, sizeof narrow);
        }
        return bytes;
    }
    static std::string u64(uint64_t x) { return std::string((const char*)&x, 8); }

    static std::string packed(int code, uint64_t slots, const std::string& ids, uint64_t version = 1) {
        return "LITPKDS" + u64(version) + (char)code + u64(slots) + ids;
    }
    static std::string index(int code, const std::vector<int64_t>& lengths, const std::vector<int64_t>& pointers,
                             const std::vector<int64_t>& documents, const std::string& rest = "") {
        return std::string("MMIDIDX\0\0", 9) + u64(1) + (char)code + u64(lengths.size()) + u64(documents.size()) +
               stored<int32_t>(lengths) + stored<int64_t>(pointers) + stored<int64_t>(documents) + rest;
    }
    // A set of three sequences of 3, 0 and 4 tokens in two documents.
    std::string write_set(const std::string& name, int code, const std::string& ids, int bytes) const {
        write_file(name + ".bin", ids);
        return write_file(name + ".idx", index(code, {3, 0, 4}, {0, 3 * bytes, 3 * bytes}, {0, 1, 3}));
    }
    static std::vector<int32_t> all_of(const TokenFile& file, i64 vocab = 70000) {
        std::vector<int32_t> ids(file.tokens());
        file.read(0, file.tokens(), vocab, ids.data());
        return ids;
    }
    static std::string why_not(const std::string& path) {
        const Failure failure = failure_of([&] { TokenFile file(path); });
        EXPECT_EQ(failure.exit_code, EXIT_FAILED) << path;
        EXPECT_SAYS(failure.message, path.substr(0, path.rfind('.')));
        EXPECT_SAYS(failure.message, "HINT");
        return failure.message;
    }
};

// ---------------------------------------------------------------------------------------------------------------
// llm.c's shards

// B.1 7: no filler.
TEST_F(TokenFiles, ShardHoldsWhatItSays) {
    ShardWriter writer(path("x"), 1000, 1'000'000);
    writer.write(iota_ids(1000));
    writer.finish();
    EXPECT_EQ(file_names(), std::vector<std::string>{"x_000000.bin.tmp"});
    writer.publish();
    EXPECT_EQ(std::filesystem::file_size(path("x_000000.bin")), 1024u + 2000u);
    const TokenFile file(path("x_000000.bin"));
    EXPECT_EQ(file.tokens(), 1000);
    EXPECT_EQ(file.kind(), TokenFileKind::llmc);
    EXPECT_EQ(file.megatron(), nullptr);
    EXPECT_EQ(file.describe(), "llm.c shard, magic 20240520, version 1, uint16 ids");
    EXPECT_EQ(all_of(file), iota_ids(1000));
}

TEST_F(TokenFiles, ShardsSplitAndUnpublishedOnesVanish) {
    {
        ShardWriter writer(path("x"), 1000, 7);
        for (int i = 0; i < 5; i++) { writer.write(iota_ids(4, 4 * i)); }
        writer.publish();
        ASSERT_EQ(writer.shards().size(), 3u);
        EXPECT_EQ(writer.shards()[2].tokens, 6);
    }
    EXPECT_EQ(all_of(TokenFile(path("x_000002.bin"))), iota_ids(6, 14));
    {
        ShardWriter writer(path("y"), 1000, 7);
        writer.write(iota_ids(20));
        EXPECT_NE(failure_of([&] { writer.write(iota_ids(1, 1000)); }).message, "");
    }
    EXPECT_EQ(file_names().size(), 3u);
}

// B.1 10 and 11: at most 65,536 ids fit 16 bits; the reader goes by the file.
TEST_F(TokenFiles, WidthFollowsTheVocabulary) {
    for (const i64 vocab : {1, 65499, 65500, 65535, 65536, 65537, 70000}) {
        const std::vector<int32_t> ids = {0, (int32_t)vocab - 1, 0};
        const TokenFile shard(write_shard(format("v%lld", (long long)vocab), ids, vocab));
        EXPECT_EQ(shard.bytes_per_token(), vocab <= 65536 ? 2 : 4);
        EXPECT_EQ(all_of(shard, vocab), ids);
    }
    // A 32 bit file under a small vocabulary, and one of 16 bit under a large one.
    EXPECT_EQ(all_of(TokenFile(write_shard("wide", iota_ids(9), 70000)), 100), iota_ids(9));
    EXPECT_EQ(all_of(TokenFile(write_shard("narrow", iota_ids(9), 100)), 70000), iota_ids(9));
}

TEST_F(TokenFiles, IdsAreCheckedAgainstTheVocabulary) {
    constexpr i64 LONG = 100'000, CULPRIT = 70'001;  // beyond the piece that is read at a time
    for (const i64 written_for : {1000, 70000}) {
        std::vector<int32_t> ids(LONG, 5);
        ids[CULPRIT] = 777;
        const TokenFile file(write_shard("x", ids, written_for));
        const std::string message = failure_of([&] { file.read(1, LONG - 1, 777, ids.data()); }).message;
        for (const char* part : {"x_000000.bin", "token 70001", "777", "HINT"}) { EXPECT_SAYS(message, part); }
        file.read(0, LONG, 778, ids.data());
        EXPECT_EQ(ids[CULPRIT], 777);
        for (const auto& [begin, count] : {std::pair<i64, i64>{-1, 1}, {0, LONG + 1}, {LONG, 1}, {1, -1}}) {
            EXPECT_SAYS(failure_of([&] { file.read(begin, count, 1000, ids.data()); }).message, "are not among its 100000");
        }
    }
    write_shard("y", {69999}, 70000);
    {
        File file(path("y_000000.bin"), "r+b");
        fseeko(file.handle(), SHARD_HEADER_BYTES, SEEK_SET);
        const uint32_t huge = 0xFFFFFFFF;  // must not pass as -1
        file.write(&huge, sizeof huge);
        file.close();
    }
    EXPECT_SAYS(failure_of([&] { all_of(TokenFile(path("y_000000.bin"))); }).message, "4294967295");
}

// B.1 8
TEST_F(TokenFiles, ForeignFilesAreNamed) {
    const std::string good = read_text_file(write_shard("good", iota_ids(100)));
    auto with_int = [&](int index, int32_t value) {
        std::string bytes = good;
        memcpy(&bytes[index * 4], &value, 4);
        return bytes;
    };
    const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
        {with_int(0, 20240521), {"20240521", "20240520", "20240801"}},
        {with_int(1, 2), {"version 2", "wanted 1"}},
        {with_int(0, 20240801), {"version 1", "wanted 7"}},
        {with_int(2, 101), {"1224 bytes", "1226"}},
        {with_int(2, 99), {"1224 bytes", "1222"}},
        {with_int(2, -1), {"-1"}},
        {with_int(0, 20240522), {"evaluation", "not read yet"}},
        {with_int(0, 20240326), {"checkpoint"}},
        {std::string("MMIDIDX\0\0", 9) + std::string(50, '\1'), {"a Megatron index", "PREFIX.idx"}},
        {"TNTIDX" + std::string(50, '\0'), {"old Megatron"}},
        {"BIN.TOK\n", {"llmq"}},
        {"\x93NUMPY\1\0", {"NumPy"}},
        {"LITPKDS", {"cut", "7 bytes", "24"}},
        {"Once upon a time", {"text"}},
        {"{\"text\": 1}\n", {"text"}},
        {"", {"empty"}},
        {good.substr(0, 100), {"100 bytes", "1024"}},
        {good.substr(0, good.size() - 1), {"1223 bytes", "1224"}},
        {good + "x", {"1225 bytes", "1224"}},
        {"version https://git-lfs.github.com/spec/v1\n", {"LFS"}},
        {"\x1f\x8b\x08", {"gzip"}},
        {"\x28\xb5\x2f\xfd\x04", {"zstd"}},
        {std::string(1000, '\1'), {"unknown kind", "no '" + path("bad.idx") + "'"}},  // a Megatron .bin looks like anything
    };
    for (const auto& [content, parts] : cases) {
        const std::string message = why_not(write_file("bad.bin", content));
        for (const std::string& part : parts) { EXPECT_SAYS(message, part); }
    }
    EXPECT_SAYS(failure_of([&] { TokenFile file(folder_); }).message, "folder");
    EXPECT_SAYS(failure_of([&] { TokenFile file(path("nope")); }).message, "'" + path("nope") + "' for reading: No such file");
}

TEST_F(TokenFiles, WhatIsNoFileIsRefusedWithoutWaiting) {
    for (const char* name : {"pipe.bin", "pipe.idx"}) { ASSERT_EQ(mkfifo(path(name).c_str(), 0600), 0); }
    for (const std::string& file : {path("pipe.bin"), path("pipe.idx"), std::string("/dev/null")}) {
        EXPECT_SAYS(failure_of([&] { TokenFile shard(file); }).message, "'" + file + "' is a pipe or a device");
    }
}

// ---------------------------------------------------------------------------------------------------------------
// lit-gpt's packed shards

TEST_F(TokenFiles, PackedShards) {
    constexpr int64_t SEPARATOR = 2;
    std::vector<int64_t> ids;
    for (int i = 0; i < 100; i++) { ids.push_back(i % 7 == 6 ? SEPARATOR : 3 + i); }
    ids[99] = SEPARATOR;
    for (const i64 filler : {0, 1, 5, 200'000}) {  // the last: longer than what is looked at in one piece
        std::vector<int64_t> slots = ids;
        slots.resize(ids.size() + filler, SEPARATOR);
        const TokenFile file(write_file("p", packed(8, slots.size(), stored<uint16_t>(slots))));
        EXPECT_EQ(file.kind(), TokenFileKind::packed);
        EXPECT_EQ(file.tokens(), 100);  // with the last document's own separator, without the filler
        EXPECT_EQ(file.describe(), format("lit-gpt packed shard, version 1, uint16 ids, 100 of %zu places used", slots.size()));
        EXPECT_EQ(all_of(file), std::vector<int32_t>(ids.begin(), ids.end()));
        EXPECT_EQ(file.windows(9), 10);  // blocks of S + 1, side by side
        EXPECT_EQ(file.windows(10), 9);
        EXPECT_EQ(file.window_begin(9, 9), 90);
    }
    // Full, and cut in the middle of a document; nothing but filler; nothing.
    EXPECT_EQ(TokenFile(write_file("p", packed(4, 99, stored<int32_t>(std::vector<int64_t>(ids.begin(), ids.begin() + 99))))).tokens(), 99);
    EXPECT_EQ(TokenFile(write_file("p", packed(8, 70'000, std::string(140'000, '\0')))).tokens(), 1);
    EXPECT_EQ(TokenFile(write_file("p", packed(8, 0, ""))).windows(1), 0);
    // Others: windows that overlap by one.
    const TokenFile shard(write_shard("s", iota_ids(100)));
    EXPECT_EQ(shard.windows(9), 11);
    EXPECT_EQ(shard.windows(10), 9);
    EXPECT_EQ(shard.window_begin(9, 9), 81);
    EXPECT_EQ(TokenFile(write_shard("e", {})).windows(9), 0);

    const std::string two = stored<uint16_t>({1, 2});
    for (const auto& [content, part] : std::vector<std::pair<std::string, std::string>>{
             {packed(8, 2, two, 2), "version 2, wanted 1"},
             {packed(8, 3, two), "28 bytes, wanted 30"},
             {packed(8, 1, two), "28 bytes, wanted 26"},
             {packed(8, (uint64_t)-1, two), "18446744073709551615"},
             {packed(8, (uint64_t)1 << 62, two), "4611686018427387904"},
             {packed(6, 2, two), "code 6, a float"},
             {packed(7, 2, two), "code 7, a float"},
             {packed(0, 2, two), "code 0, which is none"},
             {packed(9, 2, two), "code 9"},
             {packed(255, 2, two), "code 255"},
             {packed(8, 2, two).substr(0, 23), "23 bytes"},
         }) {
        EXPECT_SAYS(why_not(write_file("bad.bin", content)), part);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Megatron's sets

// B.2 16: the same tokens in every type are the same tokens.
TEST_F(TokenFiles, EveryTypeOfIds) {
    const std::vector<int64_t> ids = {0, 100, 127, 1, 2, 3, 4};
    const std::vector<int32_t> wanted(ids.begin(), ids.end());
    struct Type {
        int code, bytes;
        const char* name;
        std::string stored, negative;
    };
    const std::vector<int64_t> negative = {0, 1, 2, 3, -5, 3, 4};
    for (const Type& t : {Type{1, 1, "uint8", stored<uint8_t>(ids), ""},
                          {2, 1, "int8", stored<int8_t>(ids), stored<int8_t>(negative)},
                          {3, 2, "int16", stored<int16_t>(ids), stored<int16_t>(negative)},
                          {4, 4, "int32", stored<int32_t>(ids), stored<int32_t>(negative)},
                          {5, 8, "int64", stored<int64_t>(ids), stored<int64_t>(negative)},
                          {8, 2, "uint16", stored<uint16_t>(ids), ""}}) {
        write_set(t.name, t.code, t.stored, t.bytes);
        const TokenFile file(path(t.name));
        EXPECT_EQ(file.bytes_per_token(), t.bytes);
        EXPECT_EQ(file.describe(), format("Megatron set, version 1, %s ids, 3 sequences in 2 documents", t.name));
        EXPECT_EQ(all_of(file, 128), wanted);
        EXPECT_SAYS(failure_of([&] { all_of(file, 127); }).message, "token 2 has id 127, outside the vocabulary of 127");
        const TokenFile packed_file(write_file("p", packed(t.code, 7, t.stored)));
        EXPECT_EQ(all_of(packed_file, 128), wanted);
        if (t.negative.empty()) { continue; }
        write_set(t.name, t.code, t.negative, t.bytes);
        const TokenFile bad(path(t.name));
        for (const i64 vocab : {(i64)128, (i64)1 << 31, (i64)1 << 40}) {
            EXPECT_SAYS(failure_of([&] { all_of(bad, vocab); }).message, "token 4 has id -5");
        }
        std::vector<int32_t> out(4);
        EXPECT_SAYS(failure_of([&] { bad.read_sequence(2, 0, 4, 128, out.data()); }).message, "sequence 2, token 1 has id -5");
    }
    write_set("big", 5, stored<int64_t>({1, 1, 1, 1, 1, 1, ((int64_t)1 << 32) + 1}), 8);
    EXPECT_SAYS(failure_of([&] { all_of(TokenFile(path("big")), 128); }).message, "id 4294967297");
    for (const int code : {0, 6, 7, 9, 255}) {
        write_file("f.bin", std::string(7, '\0'));
        EXPECT_SAYS(why_not(write_file("f.idx", index(code, {3, 0, 4}, {0, 3, 3}, {0, 1, 3}))), format("code %d", code));
    }
}

// B.2 19: a set is found by its prefix and by either file.
TEST_F(TokenFiles, SetsAreFoundByTheirNames) {
    write_set("my set.v1", 8, stored<uint16_t>({1, 2, 3, 4, 5, 6, 7}), 2);
    std::vector<uint64_t> fingerprints;
    for (const char* name : {"my set.v1", "my set.v1.bin", "my set.v1.idx"}) {
        const TokenFile file(path(name));
        EXPECT_EQ(file.path(), path("my set.v1.bin"));
        EXPECT_EQ(token_file_path(path(name)), path("my set.v1.bin"));
        EXPECT_EQ(file.kind(), TokenFileKind::megatron);
        EXPECT_EQ(all_of(file), iota_ids(7, 1));
        EXPECT_EQ(file.windows(3), 2);
        ASSERT_NE(file.megatron(), nullptr);
        EXPECT_EQ(file.megatron()->sequences(), 3);
        EXPECT_EQ(file.megatron()->documents(), 2);
        EXPECT_EQ(file.megatron()->first_sequence(1), 1);
        EXPECT_EQ(file.megatron()->first_sequence(2), 3);
        fingerprints.push_back(file.fingerprint());
    }
    EXPECT_TRUE(fingerprints[0] == fingerprints[1] && fingerprints[0] == fingerprints[2]);
    write_file("my set.v1.idx", index(8, {2, 1, 4}, {0, 4, 6}, {0, 1, 3}));
    EXPECT_NE(TokenFile(path("my set.v1")).fingerprint(), fingerprints[0]);
    // An .idx of somebody else's beside an llm.c shard changes nothing, unless it is what was asked for.
    write_file("s_000000.idx", "an index of something");
    EXPECT_EQ(TokenFile(write_shard("s", iota_ids(5))).kind(), TokenFileKind::llmc);
    EXPECT_SAYS(why_not(path("s_000000.idx")), "text file");
    // A set whose ids look like a shard's header is still a set.
    write_file("m.bin", read_text_file(path("s_000000.bin")));
    write_file("m.idx", index(8, {517}, {0}, {0, 1}));
    EXPECT_EQ(TokenFile(path("m.bin")).tokens(), 517);
}

// B.2 19: what is broken is named, whichever of the two files it is.
TEST_F(TokenFiles, BrokenSets) {
    const std::string ids = stored<uint16_t>({1, 2, 3, 4, 5, 6, 7}), good = index(8, {3, 0, 4}, {0, 6, 6}, {0, 1, 3});
    auto refused = [&](const std::string& idx, const std::string& bin, const std::vector<std::string>& parts) {
        write_file("x.bin", bin);
        write_file("x.idx", idx);
        std::string message = failure_of([&] { TokenFile(path("x")).tokens(); }).message;
        EXPECT_SAYS(message, path("x"));
        EXPECT_SAYS(message, "HINT");
        for (const std::string& part : parts) { EXPECT_SAYS(message, part); }
    };
    auto with = [&](size_t at, const std::string& bytes) { return std::string(good).replace(at, bytes.size(), bytes); };
    auto swapped = [&](uint64_t x) { return u64(__builtin_bswap64(x)); };
    refused(good, ids.substr(0, 13), {"too short", "13 bytes", "sequence 2", "4 tokens"});
    refused(good, "", {"too short"});
    for (const size_t cut : {good.size() - 1, good.size() - 8, (size_t)40, (size_t)34}) {
        refused(good.substr(0, cut), ids, {"cut", format("%zu bytes", cut)});
    }
    for (const size_t cut : {33, 9, 7}) { refused(good.substr(0, cut), ids, {"cut", format("%zu bytes", cut)}); }
    refused(good.substr(0, 3), ids, {"x.idx", "text"});
    refused("", ids, {"x.idx", "empty"});
    refused(good + "xx", ids, {"found 96 bytes"});
    refused(with(7, "\1"), ids, {"not a Megatron index"});
    refused(with(9, u64(2)), ids, {"version 2"});
    refused(with(9, swapped(1)), ids, {"big-endian"});
    refused(with(18, swapped(3) + swapped(3)), ids, {"big-endian", "216172782113783808"});
    refused(with(18, u64(4)), ids, {"4 sequences", "106"});
    refused(with(18, u64((uint64_t)-1)), ids, {"18446744073709551615"});
    refused(with(26, u64((uint64_t)1 << 61)), ids, {"2305843009213693952"});
    refused(index(8, {}, {}, {}), ids, {"no document entries"});
    refused(index(8, {3, 0, 4}, {0, 6, 6}, {0, 1, 2}), ids, {"sequences 0 to 2, wanted 0 to 3"});
    refused(index(8, {3, 0, 4}, {0, 6, 6}, {1, 1, 3}), ids, {"sequences 1 to 3"});
    refused(index(8, {3, -1, 4}, {0, 6, 6}, {0, 1, 3}), ids, {"sequence 1 has -1 tokens"});
    refused(index(8, {3, 0, 4}, {-2, 6, 6}, {0, 1, 3}), ids, {"from byte -2"});
    refused(index(8, {9, 0, 4}, {0, 6, 6}, {0, 1, 3}), ids, {"too short", "sequence 0"});
    refused(index(8, {3, 0, 4}, {0, std::numeric_limits<i64>::max(), 6}, {0, 1, 3}), ids, {"too short", "sequence 1"});
    refused("TNTIDX" + std::string(60, '\0'), ids, {"old Megatron", "x.idx"});
    write_file("x.idx", index(8, {3, 0, 4}, {0, 6, 6}, {0, 5, 3}));
    const TokenFile file(path("x"));
    EXPECT_SAYS(failure_of([&] { file.megatron()->first_sequence(1); }).message, "document 1 begins with sequence 5 of 3");
    unlink(path("x.bin").c_str());
    for (const char* name : {"x", "x.bin", "x.idx"}) { EXPECT_SAYS(why_not(path(name)), "without its tokens: '" + path("x.bin") + "'"); }
    write_file("x.bin", ids);
    unlink(path("x.idx").c_str());
    for (const char* name : {"x", "x.bin"}) { EXPECT_SAYS(why_not(path(name)), "there is no '" + path("x.idx") + "'"); }
    EXPECT_SAYS(failure_of([&] { TokenFile f(path("x.idx")); }).message, "'" + path("x.idx") + "' for reading: No such file");
}

// Modes are there when the size says so.
TEST_F(TokenFiles, MultimodalSets) {
    write_file("m.bin", stored<uint8_t>({1, 2, 3, 4, 5, 6, 7}));
    write_file("m.idx", index(1, {3, 0, 4}, {0, 3, 3}, {0, 1, 3}, std::string("\0\1\2", 3)));
    const TokenFile file(path("m"));
    EXPECT_EQ(file.describe(), "Megatron set, version 1, uint8 ids, 3 sequences in 2 documents, multimodal");
    EXPECT_EQ(file.megatron()->mode(2), 2);
    EXPECT_EQ(all_of(file), iota_ids(7, 1));
}

// Sequences that lie in another order, share bytes or leave holes: the flat stream follows the index. B.2 20: empty ones are skipped.
TEST_F(TokenFiles, SequencesOutOfOrder) {
    std::vector<int64_t> ids(3000), lengths, pointers, documents = {0};
    std::vector<int32_t> wanted;
    for (int i = 0; i < 3000; i++) { ids[i] = i; }
    uint32_t random = 1;
    for (int s = 0; s < 2500; s++) {
        random = random * 1664525 + 1013904223;
        const int64_t begin = random / 65536 % 2900, length = s == 0 || s == 2499 ? 0 : random / 4096 % 3 * 20;
        lengths.push_back(length);
        pointers.push_back(2 * begin);
        documents.push_back(s + 1);
        for (int i = 0; i < length; i++) { wanted.push_back((int32_t)(begin + i)); }
    }
    write_file("o.bin", stored<uint16_t>(ids));
    write_file("o.idx", index(8, lengths, pointers, documents));
    const TokenFile file(path("o"));
    EXPECT_FALSE(file.megatron()->contiguous());
    EXPECT_EQ(all_of(file), wanted);
    for (const i64 begin : {(i64)0, (i64)1, (i64)10'239, (i64)wanted.size() - 1, (i64)wanted.size()}) {
        std::vector<int32_t> part(wanted.size() - begin);
        file.read(begin, part.size(), 3000, part.data());
        EXPECT_EQ(part, std::vector<int32_t>(wanted.begin() + begin, wanted.end()));
    }
    for (const std::vector<int64_t>& empty : {std::vector<int64_t>{}, {0, 0}}) {
        write_file("e.bin", "");
        write_file("e.idx", index(8, empty, empty, {0, (int64_t)empty.size()}));
        const TokenFile none(path("e"));
        EXPECT_EQ(none.tokens(), 0);
        EXPECT_EQ(none.windows(1), 0);
        none.read(0, 0, 1, nullptr);
    }
}

// B.2 17: bytes beyond 2^31 and 2^32, in a file that is mostly a hole.
TEST_F(TokenFiles, OffsetsBeyond32Bits) {
    constexpr i64 SIZE = (i64)5 << 30;
    const std::vector<int64_t> pointers = {0, ((i64)1 << 31) + 6, ((i64)1 << 32) + 10, SIZE - 6};
    const std::vector<int64_t> lengths = {1 << 30, 3, 3, 3};
    write_file("h.idx", index(8, lengths, pointers, {0, 1, 2, 3, 4}));
    {
        File file(write_file("h.bin", ""), "r+b");
        ASSERT_EQ(ftruncate(fileno(file.handle()), SIZE), 0);
        for (size_t s = 1; s < 4; s++) {
            const std::string bytes = stored<uint16_t>({(int64_t)s, (int64_t)s + 10, (int64_t)s + 20});
            ASSERT_EQ(pwrite(fileno(file.handle()), bytes.data(), bytes.size(), pointers[s]), (ssize_t)bytes.size());
        }
    }
    const TokenFile file(path("h"));
    ASSERT_EQ(file.tokens(), ((i64)1 << 30) + 9);
    std::vector<int32_t> ids(9);
    file.read((i64)1 << 30, 9, 100, ids.data());
    EXPECT_EQ(ids, (std::vector<int32_t>{1, 11, 21, 2, 12, 22, 3, 13, 23}));
    // The same bytes as one stream.
    write_file("h.idx", index(8, {1 << 30, 1 << 30, 1 << 29}, {0, (i64)1 << 31, (i64)1 << 32}, {0, 1, 2, 3}));
    const TokenFile flat(path("h"));
    EXPECT_TRUE(flat.megatron()->contiguous());
    for (size_t s = 1; s < 4; s++) {
        flat.read(pointers[s] / 2, 3, 100, ids.data());
        EXPECT_EQ((std::vector<int32_t>(ids.begin(), ids.begin() + 3)), (std::vector<int32_t>{(int)s, (int)s + 10, (int)s + 20}));
    }
    EXPECT_EQ(flat.windows(1024), SIZE / 2 / 1024 - 1);
}

// Cut while it is read: named, whether the file was kept open or not. Threads read at the same time.
TEST_F(TokenFiles, CutFilesAndThreads) {
    write_set("m", 8, stored<uint16_t>({1, 2, 3, 4, 5, 6, 7}), 2);
    const size_t before = open_files(), allowed = before + 8;
    const Limit limit(RLIMIT_NOFILE, allowed);
    std::vector<std::unique_ptr<TokenFile>> files;
    for (int i = 0; i < 30; i++) { files.push_back(std::make_unique<TokenFile>(path("m"))); }
    EXPECT_EQ(open_files(), before + allowed / 4);  // the others are opened for each read
    for (const auto& file : files) { EXPECT_EQ(all_of(*file), iota_ids(7, 1)); }
    std::filesystem::resize_file(path("m.bin"), 9);
    for (const auto& file : files) {
        const std::string message = failure_of([&] { all_of(*file); }).message;
        for (const char* part : {"m.bin", "byte 9", "HINT"}) { EXPECT_SAYS(message, part); }
    }
    std::vector<int64_t> ids(50'000);
    std::iota(ids.begin(), ids.end(), 0);
    write_file("t.bin", stored<uint16_t>(ids));
    write_file("t.idx", index(8, {30'000, 20'000}, {0, 60'000}, {0, 1, 2}));
    const TokenFile shard(write_shard("s", iota_ids(50'000))), set(path("t"));  // the set's index is read when the first thread asks
    std::vector<std::thread> threads;
    std::atomic<int> good = 0;
    for (int t = 0; t < 4; t++) {
        threads.emplace_back([&, t] {
            std::vector<int32_t> part(100);
            bool same = true;
            for (int i = 0; i < 200; i++) {
                const i64 begin = (i * 7919 + t * 104729) % 49'900;
                (i % 2 == 0 ? set : shard).read(begin, 100, 65536, part.data());
                same = same && part == iota_ids(100, (int32_t)begin);
            }
            good += same;
        });
    }
    for (std::thread& t : threads) { t.join(); }
    EXPECT_EQ(good, 4);
}

}  // namespace
