// test_loader.cpp: which windows training reads, in which order: every kind of set, mixes, Megatron's order, resuming, reading ahead. The
// letters B.x n are rows of CASES.md.
#include <clocale>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "dev/test/data_testing.h"
#include "llmc/dataloader.h"
#include "llmc/read_ahead.h"

namespace {

constexpr i64 ANY_VOCAB = 65536;

// ---------------------------------------------------------------------------------------------------------------
// Sets of other people's kinds, written by the formats' rules

using Documents = std::vector<std::vector<int32_t>>;

template <typename Id>
std::string bytes_of(const std::vector<int32_t>& ids) {
    const std::vector<Id> narrow(ids.begin(), ids.end());
    return std::string((const char*)narrow.data(), narrow.size() * sizeof(Id));
}
template <typename T>
void append(std::string& bytes, T value) {
    bytes.append((const char*)&value, sizeof value);
}

constexpr uint8_t INT32 = 4, UINT16 = 8;  // codes of Megatron and lit-gpt

class Loader : public DataTest {
protected:
    void write_megatron(const std::string& name, const Documents& documents, uint8_t code) {
        std::string bin, lengths, pointers, starts, idx("MMIDIDX\0\0", 9);
        append<int64_t>(starts, 0);
        for (size_t d = 0; d < documents.size(); d++) {
            append<int32_t>(lengths, documents[d].size());
            append<int64_t>(pointers, bin.size());
            append<int64_t>(starts, d + 1);
            bin += code == UINT16 ? bytes_of<uint16_t>(documents[d]) : bytes_of<int32_t>(documents[d]);
        }
        append<uint64_t>(idx, 1);
        append<uint8_t>(idx, code);
        append<uint64_t>(idx, documents.size());
        append<uint64_t>(idx, documents.size() + 1);
        write_file(name + ".bin", bin);
        write_file(name + ".idx", idx + lengths + pointers + starts);
    }

    // A shard of `slots` ids, the unused ones filled with `filler`.
    void write_packed(const std::string& name, std::vector<int32_t> ids, i64 slots, int32_t filler, uint8_t code) {
        std::string bytes = "LITPKDS";
        append<uint64_t>(bytes, 1);
        append<uint8_t>(bytes, code);
        append<uint64_t>(bytes, slots);
        ids.resize(slots, filler);
        write_file(name, bytes + (code == UINT16 ? bytes_of<uint16_t>(ids) : bytes_of<int32_t>(ids)));
    }
};

// Windows [begin, end) of the next batch of `count`, each named by its first id.
std::vector<int32_t> first_ids(DataLoader& loader, i64 count, i64 begin, i64 end) {
    std::vector<int32_t> ids((end - begin) * (loader.seq() + 1)), firsts;
    loader.next(count, begin, end, ids.data());
    for (i64 i = 0; i < end - begin; i++) {
        const int32_t* window = &ids[i * (loader.seq() + 1)];
        for (i64 t = 1; t <= loader.seq(); t++) { EXPECT_EQ(window[t], window[t - 1] + 1); }  // sets here count up
        firsts.push_back(window[0]);
    }
    return firsts;
}

// The ids of the stream's first `windows` windows, cut into batches of `batch` that `dp` ranks share.
std::vector<int32_t> stream_ids(const DataLoader& start, i64 windows, i64 batch, i64 dp) {
    const i64 width = start.seq() + 1;
    std::vector<int32_t> all(windows * width);
    for (i64 rank = 0; rank < dp; rank++) {
        DataLoader loader = start;
        for (i64 at = 0; at < windows; at += batch) {
            const i64 count = std::min(batch, windows - at);
            const Range part = split_range(count, dp, rank);
            loader.next(count, part.begin, part.end, all.data() + (at + part.begin) * width);
        }
    }
    return all;
}
// The same, each window named by its first id.
std::vector<int32_t> stream(const DataLoader& start, i64 windows, i64 batch, i64 dp) {
    const std::vector<int32_t> ids = stream_ids(start, windows, batch, dp);
    std::vector<int32_t> firsts;
    for (i64 w = 0; w < windows; w++) {
        const int32_t* window = &ids[w * (start.seq() + 1)];
        for (i64 t = 1; t <= start.seq(); t++) { EXPECT_EQ(window[t], window[t - 1] + 1); }
        firsts.push_back(window[0]);
    }
    return firsts;
}

// Documents of 0 to 40 ids that count up through the whole set.
Documents random_documents(int n, uint64_t seed) {
    std::mt19937 random(seed);
    Documents documents(n);
    int32_t id = 0;
    for (auto& d : documents) {
        const int length = random() % 4 == 0 ? random() % 2 : random() % 41;
        for (int i = 0; i < length; i++) { d.push_back(id++); }
    }
    return documents;
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
TEST_F(Loader, EveryTokenThatFitsIsUsedAtEveryWorldSize) {
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
TEST_F(Loader, LeftOverTokensAreCounted) {
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
TEST_F(Loader, ShardsOfDifferentSizesAndDataParallelRanks) {
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

// B.1 1 and 5, B.2 16: of every kind of set and every type of ids each window comes once an epoch, whatever the ranks and the batch.
TEST_F(Loader, EveryKindOfSetGivesEachWindowOnceAnEpoch) {
    const i64 T = 5, n = 23;
    const std::vector<int32_t> ids = iota_ids(n * T + 4, 7);
    const Documents documents = {iota_ids(40, 7), {}, iota_ids(1, 47), iota_ids(n * T + 4 - 41, 48), {}};
    write_shard("narrow", ids);
    write_shard("wide", ids, 70000);
    write_megatron("m16", documents, UINT16);
    write_megatron("m32", documents, INT32);
    std::vector<int32_t> narrow;  // what the kinds of the same tokens must agree on
    for (const char* name : {"narrow_000000.bin", "wide_000000.bin", "m16", "m16.bin", "m16.idx", "m16.*", "m32*"}) {
        DataLoader loader(path(name), T, ANY_VOCAB, 9, WindowOrder::shuffled);
        ASSERT_EQ(loader.windows(), n) << name;
        EXPECT_EQ(loader.tokens(), n * T + 4);
        EXPECT_EQ(loader.left_over(), 3);
        const std::vector<int32_t> unsplit = stream(loader, 2 * n, 4, 1);
        if (narrow.empty()) { narrow = unsplit; }
        EXPECT_EQ(unsplit, narrow) << name;
        for (const i64 dp : {2, 3, 4}) { EXPECT_EQ(stream(loader, 2 * n, 4 * dp, dp), unsplit) << name; }
    }
    // Packed: blocks of T + 1 ids that do not overlap; the filler is no data.
    for (const uint8_t code : {UINT16, INT32}) {
        write_packed("packed/a.bin", iota_ids(6 * 10 + 2), 6 * 12, 61, code);
        write_packed("packed/b.bin", iota_ids(6 * 13, 1000), 6 * 13, 0, code);
        DataLoader loader(path("packed/*.bin"), T, ANY_VOCAB, 9, WindowOrder::shuffled);
        ASSERT_EQ(loader.windows(), 10 + 13);
        EXPECT_EQ(loader.left_over(), 2);
        const std::vector<int32_t> unsplit = stream(loader, 2 * n, 4, 1);
        for (const i64 dp : {2, 3, 4}) { EXPECT_EQ(stream(loader, 2 * n, 4 * dp, dp), unsplit); }
        std::set<int32_t> wanted;
        for (int w = 0; w < 13; w++) {
            wanted.insert(1000 + 6 * w);
            if (w < 10) { wanted.insert(6 * w); }
        }
        for (const i64 epoch : {0, 1}) { EXPECT_EQ(std::set<int32_t>(&unsplit[epoch * n], &unsplit[epoch * n] + n), wanted); }
        std::vector<int32_t> window(T + 1);
        loader.read_sequential(11, window.data());
        EXPECT_EQ(window, iota_ids(T + 1, 1006));
    }
    // All kinds in one source.
    std::filesystem::create_directory(path("all"));
    for (const char* name : {"narrow_000000.bin", "wide_000000.bin", "m16.bin", "m16.idx", "packed/a.bin"}) {
        std::filesystem::copy(path(name), path("all/" + std::filesystem::path(name).filename().string()));
    }
    const DataLoader all(path("all/*"), T, ANY_VOCAB, 9, WindowOrder::automatic);
    EXPECT_EQ(all.order(), WindowOrder::shuffled);
    EXPECT_EQ(all.windows(), 3 * n + 10);
    std::map<int32_t, i64> times, wanted;
    for (const int32_t first : stream(all, all.windows(), 7, 3)) { times[first]++; }
    for (int w = 0; w < n; w++) { wanted[7 + T * w] += 3; }
    for (int w = 0; w < 10; w++) { wanted[6 * w]++; }
    EXPECT_EQ(times, wanted);
    for (const char* kind : {"llm.c", "lit-gpt", "Megatron"}) { EXPECT_SAYS(all.sources()[0].kinds(), kind); }
}

// B.6 74 and 76: stopped anywhere and taken up again, also with other batches, the stream is the unbroken one.
TEST_F(Loader, ResumeAtAnyPoint) {
    write_shard("a", iota_ids(5 * 4 + 1, 0));
    write_shard("b", iota_ids(3 * 4 + 1, 1000));
    write_shard("c", iota_ids(7 * 4 + 1, 2000));
    write_megatron("others/m", {iota_ids(20, 3000), {}, iota_ids(33, 3020)}, UINT16);
    write_packed("others/p.bin", iota_ids(5 * 9 + 2, 4000), 5 * 11, 9, INT32);
    for (const std::string& spec :
         {path("*.bin"), "0.5:" + path("a*.bin") + ",0.2:" + path("b*.bin") + ",0.3:" + path("c*.bin"), path("others/m"),
          path("others/p.bin"), "0.4:" + path("others/m") + ",0.3:" + path("a*.bin") + ",0.3:" + path("others/p.bin")}) {
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
TEST_F(Loader, MixFollowsMegatronsRule) {
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

TEST_F(Loader, IdentityChangesWithTheStreamOnly) {
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
        info.train = {1, 20000, 20000, {{"x_000000.bin", 20000, ""}}};
        write_token_set_info(path("e/x.json"), info);
        contents.insert(identity(path("e/*.bin"), 4, 1));
    }
    EXPECT_EQ(contents.size(), 6u);
}

// Bytes of text for each token, of all sets of a source; not known if one of them does not tell.
TEST_F(Loader, BytesOfTextAreKnownOfAllSetsOrOfNone) {
    TokenSetInfo info;
    info.tokenizer_hash = "aa";
    info.vocab = 100;
    const auto bytes_per_token = [&](i64 text_bytes_of_b) {
        for (const char* name : {"a", "b"}) {
            write_shard(name, iota_ids(50));
            info.train = {1, 50, name[0] == 'a' ? 200 : text_bytes_of_b, {{format("%s_000000.bin", name), 50, ""}}};
            write_token_set_info(path(format("%s.json", name)), info);
        }
        return DataLoader(path("*.bin"), 4, ANY_VOCAB, 1, WindowOrder::sequential).text_bytes_per_token();
    };
    EXPECT_DOUBLE_EQ(bytes_per_token(100), 3);
    EXPECT_EQ(bytes_per_token(0), 0);
}

// ---------------------------------------------------------------------------------------------------------------
// Megatron's order

// The rules of Megatron's GPTDataset once more, in the plainest way: the epochs' documents written out as one stream of ids that is cut
// every S of them. std::mt19937 is NumPy's generator.
struct Samples {
    i64 epochs = 1;
    bool separate_final_epoch = false;
    std::vector<std::vector<int32_t>> ids;  // S + 1 of each sample, in training order
};
void shuffle_like_numpy(std::vector<i64>& items, i64 begin, i64 end, std::mt19937& generator) {
    for (i64 i = end - begin - 1; i > 0; i--) {
        uint32_t mask = 1, j;
        while (mask < i) { mask = mask << 1 | 1; }
        do { j = generator() & mask; } while (j > i);
        std::swap(items[begin + i], items[begin + j]);
    }
}
Samples megatron_samples(const Documents& documents, Range range, i64 S, i64 wanted, uint32_t seed) {
    Samples found;
    i64 T = 0;
    for (i64 d = range.begin; d < range.end; d++) { T += documents[d].size(); }
    while (found.epochs * T < wanted * S + 1) { found.epochs++; }
    const i64 E = found.epochs, n = (E * T - 1) / S, sans_final = ((E - 1) * T - 1) / S;
    found.separate_final_epoch = E > 1 && wanted - sans_final < (i64)(0.80 * (double)((T - 1) / S));
    std::mt19937 generator(seed);
    std::vector<i64> order;
    for (i64 e = 0; e < E; e++) {
        for (i64 d = range.begin; d < range.end; d++) { order.push_back(d); }
    }
    const i64 together = order.size() - (found.separate_final_epoch ? range.size() : 0);
    shuffle_like_numpy(order, 0, together, generator);
    shuffle_like_numpy(order, together, order.size(), generator);
    std::vector<int32_t> flat;
    for (const i64 d : order) { flat.insert(flat.end(), documents[d].begin(), documents[d].end()); }
    std::vector<i64> shuffle(n);
    std::iota(shuffle.begin(), shuffle.end(), 0);
    const i64 first = found.separate_final_epoch ? sans_final : n;
    shuffle_like_numpy(shuffle, 0, first, generator);
    shuffle_like_numpy(shuffle, first, n, generator);
    for (const i64 j : shuffle) { found.ids.emplace_back(&flat[j * S], &flat[j * S] + S + 1); }
    return found;
}
// Which source each of n windows of a blend comes from: the one furthest behind its share. Megatron divides the weights by their sum twice.
std::vector<size_t> blend(std::vector<double> weights, i64 n) {
    for (int twice = 0; twice < 2; twice++) {
        const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (double& w : weights) { w /= sum; }
    }
    std::vector<i64> drawn(weights.size());
    std::vector<size_t> picks;
    for (i64 i = 0; i < n; i++) {
        std::vector<double> behind;
        for (size_t d = 0; d < weights.size(); d++) {
            const volatile double due = weights[d] * (double)std::max<i64>(i, 1);  // not fused
            behind.push_back(due - (double)drawn[d]);
        }
        picks.push_back(std::max_element(behind.begin(), behind.end()) - behind.begin());
        drawn[picks.back()]++;
    }
    return picks;
}

DataRequest megatron_request_for(const std::string& spec, i64 S, uint64_t seed, i64 windows) {
    DataRequest r = {spec, S, ANY_VOCAB, seed, WindowOrder::automatic};
    r.windows = windows;
    return r;
}

// B.2 20 and 22: with empty documents and ones of a single id, for one sample, exactly one epoch, one more sample, 7.5 epochs.
TEST_F(Loader, MegatronsOrderIsItsRule) {
    bool separate = false, together = false;
    for (const uint8_t code : {UINT16, INT32}) {
        for (const i64 S : {4, 7, 60}) {
            const Documents documents = random_documents(30, S);
            write_megatron("m", documents, code);
            i64 T = 0;
            for (const auto& d : documents) { T += d.size(); }
            const i64 epoch = (T - 1) / S;
            for (const i64 wanted : {(i64)1, epoch, epoch + 1, epoch + epoch * 9 / 10, 15 * epoch / 2}) {
                const Samples oracle = megatron_samples(documents, {0, 30}, S, wanted, 1234);
                (oracle.separate_final_epoch ? separate : together) |= oracle.epochs > 1;
                for (const char* cache : {"", "cache", "cache"}) {  // in memory, to the folder, out of the folder
                    DataRequest r = megatron_request_for(path("m"), S, 1234, wanted);
                    r.cache = *cache ? path(cache) : "";
                    const DataLoader loader(r);
                    ASSERT_EQ(loader.order(), WindowOrder::megatron);
                    const MegatronOrder& order = *loader.sources()[0].order;
                    EXPECT_EQ(order.epochs(), oracle.epochs);
                    EXPECT_EQ(order.separate_final_epoch(), oracle.separate_final_epoch);
                    ASSERT_EQ(loader.windows(), (i64)oracle.ids.size());
                    std::vector<int32_t> ids;
                    for (const auto& sample : oracle.ids) { ids.insert(ids.end(), sample.begin(), sample.end()); }
                    for (const i64 dp : {1, 2, 3, 4}) {
                        ASSERT_TRUE(stream_ids(loader, loader.windows(), 4 * dp, dp) == ids) << S << " " << wanted;
                    }
                }
            }
        }
    }
    EXPECT_TRUE(separate && together);
    DataLoader loader(megatron_request_for(path("m"), 60, 1, 2));
    std::vector<int32_t> ids(61 * 1000);
    loader.next(loader.windows(), 0, loader.windows(), ids.data());
    EXPECT_SAYS(failure_of([&] { loader.next(1, 0, 1, ids.data()); }).message, "--steps");
    EXPECT_EQ(failure_of([&] { DataLoader(path("m"), 4, 3, 1, WindowOrder::automatic); }).exit_code, EXIT_OK);
}

// Blending asks each set for ceil(ceil(N w) 1.005) samples, which decides its epochs and so its order.
TEST_F(Loader, MegatronsBlendIsItsRule) {
    const i64 S = 5, N = 400;
    const std::vector<double> weights = {0.7, 3, 0.21, 1.1, 0.05, 2.2, 0.3, 0.9, 0.4};
    std::vector<Documents> sets;
    std::string spec;
    for (size_t d = 0; d < weights.size(); d++) {
        sets.push_back(random_documents(7 + d, 100 + d));
        write_megatron(format("set%zu", d), sets[d], UINT16);
        spec += format("%s%g:%s", d ? "," : "", weights[d], path(format("set%zu", d)).c_str());
    }
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<Samples> oracle;
    for (size_t d = 0; d < weights.size(); d++) {
        const i64 request = std::ceil(std::ceil(N * (weights[d] / sum)) * 1.005);
        oracle.push_back(megatron_samples(sets[d], {0, (i64)sets[d].size()}, S, request, 77));
    }
    std::vector<i64> drawn(weights.size());
    std::vector<int32_t> ids;
    for (const size_t d : blend(weights, N)) {
        const auto& sample = oracle[d].ids[drawn[d]++];
        ids.insert(ids.end(), sample.begin(), sample.end());
    }
    const DataLoader loader(megatron_request_for(spec, S, 77, N));
    for (const i64 dp : {1, 2, 3}) { EXPECT_TRUE(stream_ids(loader, N, 8 * dp, dp) == ids); }
    // 6:4:4 is where one bit of a share decides a tie: divided by their sum once only, the weights would give another eighth window.
    DataLoader tie("6:" + path("set3") + ",4:" + path("set4") + ",4:" + path("set5"), 2, ANY_VOCAB, 1, WindowOrder::shuffled);
    for (const size_t d : blend({6, 4, 4}, 100)) {
        std::vector<i64> after = tie.state().drawn;
        after[d]++;
        tie.next(1, 0, 0, nullptr);
        EXPECT_EQ(tie.state().drawn, after);
    }
    // One set with a weight is a blend for Megatron, too; without one it is asked for N samples.
    for (const bool weighted : {false, true}) {
        i64 n = 0, wanted = 0;
        for (const auto& d : sets[1]) { n += d.size(); }
        for (wanted = 2 * n / S; std::ceil(wanted * 1.005) * S + 1 <= 3 * n; wanted++) {}  // the surplus needs another epoch
        const DataLoader one(megatron_request_for((weighted ? "2:" : "") + path("set1"), S, 1, wanted));
        EXPECT_EQ(one.sources()[0].order->epochs(),
                  megatron_samples(sets[1], {0, (i64)sets[1].size()}, S, weighted ? std::ceil(wanted * 1.005) : wanted, 1).epochs);
        EXPECT_EQ(one.sources()[0].order->epochs(), weighted ? 4 : 3);
    }
}

// "969,30,1" by documents: rounded bounds of the summed shares; parts do not overlap.
TEST_F(Loader, SplitsAreMegatrons) {
    const Documents documents = random_documents(200, 5);
    write_megatron("m", documents, UINT16);
    auto loader = [&](const std::string& split, int part, WindowOrder order) {
        DataRequest r = megatron_request_for(path("m"), 6, 3, 50);
        r.split = {split, part};
        r.order = order;
        return DataLoader(r);
    };
    for (const auto& [split, bounds] : std::vector<std::pair<std::string, std::vector<i64>>>{
             {"969,30,1", {0, 194, 200}}, {"98,2,0", {0, 196, 200}}, {"1,1", {0, 100, 200}}, {"0.5,0.25,0.25", {0, 100, 150}}}) {
        for (const int part : {0, 1}) {
            const Range range = {bounds[part], bounds[part + 1]};
            const Samples oracle = megatron_samples(documents, range, 6, 50, 3);
            std::vector<int32_t> ids, flat;
            for (const auto& sample : oracle.ids) { ids.insert(ids.end(), sample.begin(), sample.end()); }
            const DataLoader samples = loader(split, part, WindowOrder::megatron);
            EXPECT_TRUE(stream_ids(samples, samples.windows(), 5, 1) == ids) << split << part;
            // The windows of the same documents, as they lie.
            for (i64 d = range.begin; d < range.end; d++) { flat.insert(flat.end(), documents[d].begin(), documents[d].end()); }
            const DataLoader windows = loader(split, part, WindowOrder::sequential);
            ASSERT_EQ(windows.windows(), ((i64)flat.size() - 1) / 6);
            std::vector<int32_t> window(7);
            for (i64 w = 0; w < windows.windows(); w++) {
                windows.read_sequential(w, window.data());
                EXPECT_TRUE(std::equal(window.begin(), window.end(), &flat[w * 6]));
            }
        }
    }
    EXPECT_NE(loader("969,30,1", 0, WindowOrder::shuffled).identity(), loader("1,1", 0, WindowOrder::shuffled).identity());
    for (const char* bad : {"a", "1,x", "-1,2", "0,0", "1,2,3,4", "1,,2", "nan", "1,1e999"}) {
        EXPECT_EQ(failure_of([&] { loader(bad, 0, WindowOrder::shuffled); }).exit_code, EXIT_USAGE) << bad;
    }
    write_shard("x", iota_ids(100));
    DataRequest r = {path("x*"), 4, ANY_VOCAB, 1, WindowOrder::shuffled};
    r.split = {"969,30,1", 0};
    EXPECT_SAYS(failure_of([&] { DataLoader{r}; }).message, "--split");
}

// Which order it is: what all sources allow, or what is asked for.
TEST_F(Loader, OrderFollowsTheSources) {
    write_megatron("m0", random_documents(20, 1), UINT16);
    write_megatron("m1", random_documents(20, 2), UINT16);
    write_shard("x", iota_ids(300));
    auto order = [&](const std::string& spec, WindowOrder asked) {
        DataRequest r = megatron_request_for(spec, 4, 1, 20);
        r.order = asked;
        return DataLoader(r).order();
    };
    const std::string m0 = path("m0"), m1 = path("m1.bin"), x = path("x_*.bin");
    EXPECT_EQ(order(m0, WindowOrder::automatic), WindowOrder::megatron);
    EXPECT_EQ(order("1:" + m0 + ",1:" + m1, WindowOrder::automatic), WindowOrder::megatron);
    EXPECT_EQ(order("1:" + m0 + ",1:" + x, WindowOrder::automatic), WindowOrder::shuffled);
    EXPECT_EQ(order(path("m*"), WindowOrder::automatic), WindowOrder::shuffled);  // two sets without weights
    EXPECT_EQ(order(m0, WindowOrder::shuffled), WindowOrder::shuffled);
    for (const std::string& spec : {"1:" + m0 + ",1:" + x, path("m*")}) {
        const Failure failure = failure_of([&] { order(spec, WindowOrder::megatron); });
        EXPECT_EQ(failure.exit_code, EXIT_USAGE);
        EXPECT_SAYS(failure.message, "--order");
    }
}

// A run may be made longer as long as its order stays what it was, and order_text() tells.
TEST_F(Loader, MegatronsOrderResumesAndKnowsWhatItDependsOn) {
    const Documents documents = random_documents(40, 9);
    write_megatron("m", documents, UINT16);
    write_megatron("k", random_documents(9, 10), UINT16);
    for (const std::string& spec : {path("m"), "0.6:" + path("m") + ",0.4:" + path("k")}) {
        const DataLoader fresh(megatron_request_for(spec, 5, 3, 300));
        const std::vector<int32_t> unbroken = stream_ids(fresh, 300, 1, 1);
        for (i64 stop = 0; stop <= 290; stop += 7) {
            DataLoader before = fresh, after(megatron_request_for(spec, 5, 3, 300));
            before.next(stop, 0, 0, nullptr);
            after.set_state(before.state());
            EXPECT_TRUE(stream_ids(after, 10, 5, 1) == std::vector<int32_t>(&unbroken[stop * 6], &unbroken[stop * 6] + 60));
        }
    }
    std::map<std::string, std::vector<int32_t>> orders;
    for (i64 windows = 1; windows < 900; windows += 13) {
        const DataLoader loader(megatron_request_for(path("m"), 5, 3, windows));
        const std::vector<int32_t> all = stream_ids(loader, loader.windows(), 7, 1);
        const auto [known, first] = orders.try_emplace(loader.order_text(), all);
        EXPECT_TRUE(known->second == all) << loader.order_text();
        EXPECT_EQ(loader.identity(), DataLoader(megatron_request_for(path("m"), 5, 3, 1)).identity());
    }
    EXPECT_GT(orders.size(), 4u);
}

// ---------------------------------------------------------------------------------------------------------------
// What --train says

TEST_F(Loader, SpecsAreParsedStrictly) {
    for (const char* spec : {"", "0.7:", "0.7x:a,0.3:b", "0.7:a,b", "0.7:a,0.3", "0,7:a", "0.7:a,", "-1:a", "0:a", "1e999:a", "+1:a", ".:a",
                             "0.5:a,nan:b", "0.5:a,,0.5:b", "1e308:a,1e308:b", "0.5: ,0.5:b"}) {
        const Failure failure = failure_of([&] { parse_data_spec(spec); });
        EXPECT_EQ(failure.exit_code, EXIT_USAGE) << spec;
        EXPECT_SAYS(failure.message, "HINT");
    }
    EXPECT_EQ(parse_data_spec("my data/a:b,c_*.bin").parts.size(), 1u);
    EXPECT_FALSE(parse_data_spec("my data/a:b,c_*.bin").is_mix);
    EXPECT_EQ(parse_data_spec("./0.5:x,y").parts.size(), 1u);
    EXPECT_TRUE(parse_data_spec("2:a").is_mix);
    const auto spaced = parse_data_spec(" 0.7:a, 0.3 : b c ,1e100:d").parts;
    ASSERT_EQ(spaced.size(), 3u);
    EXPECT_EQ(spaced[0].glob + "|" + spaced[1].glob + "|" + spaced[2].glob, "a|b c|d");
    EXPECT_EQ(spaced[2].weight, 1.0);
    setlocale(LC_ALL, "de_DE.UTF-8");  // if it is installed: the decimal comma must mean nothing
    const auto parts = parse_data_spec("1.5:x y/*.bin,0.5:z:1").parts;
    setlocale(LC_ALL, "C");
    ASSERT_EQ(parts.size(), 2u);
    EXPECT_DOUBLE_EQ(parts[0].weight, 0.75);
    EXPECT_EQ(parts[0].glob, "x y/*.bin");
    EXPECT_EQ(parts[1].glob, "z:1");
}

TEST_F(Loader, RecipesAreReadByLine) {
    const std::string recipe = write_file("a.mix", "# shares\n\n 7:web/*.bin\r\n3 : my code/#1_*.bin  # a comment\n   \n#9:x\n");
    const DataSpec spec = parse_data_spec("@" + recipe);
    ASSERT_EQ(spec.parts.size(), 2u);
    EXPECT_TRUE(spec.is_mix);
    EXPECT_EQ(spec.parts[0].glob + "|" + spec.parts[1].glob, "web/*.bin|my code/#1_*.bin");
    EXPECT_DOUBLE_EQ(spec.parts[0].weight, 0.7);
    EXPECT_DOUBLE_EQ(spec.parts[1].weight, 0.3);
    for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{{"1:a\n\nb", "line 3: found 'b'"},
                                                                                     {"0:a", "line 1: found '0:a'"},
                                                                                     {"# 1:a\n", "names no data"},
                                                                                     {"", "names no data"},
                                                                                     {"1:", "line 1"}}) {
        const Failure failure = failure_of([&] { parse_data_spec("@" + write_file("b.mix", text)); });
        EXPECT_EQ(failure.exit_code, EXIT_USAGE);
        EXPECT_SAYS(failure.message, part);
        EXPECT_SAYS(failure.message, "b.mix");
        EXPECT_SAYS(failure.message, "HINT");
    }
    EXPECT_SAYS(failure_of([&] { parse_data_spec("@" + path("none")); }).message, path("none"));
    EXPECT_EQ(failure_of([&] { parse_data_spec("@"); }).exit_code, EXIT_USAGE);
    // The same mix, inline and as a recipe, is the same stream.
    write_shard("a", iota_ids(100));
    write_shard("b", iota_ids(50, 1000));
    const std::string a = path("a*.bin"), b = path("b*.bin");
    write_file("c.mix", "3:" + a + "\n1:" + b + "\n");
    const DataLoader one("@" + path("c.mix"), 4, ANY_VOCAB, 1, WindowOrder::shuffled),
        other("0.75:" + a + ",0.25:" + b, 4, ANY_VOCAB, 1, WindowOrder::shuffled);
    EXPECT_EQ(one.identity(), other.identity());
    EXPECT_EQ(stream(one, 40, 4, 1), stream(other, 40, 4, 1));
}

// The recipes in data/: RedPajama's seven subsets, and their shares of its 1,210 billion tokens, of LLaMA-1's batches.
TEST(Recipes, RedPajamas) {
    const std::map<std::string, std::pair<double, double>> wanted = {
        {"common_crawl", {878, 67}}, {"c4", {175, 15}},        {"github", {59, 4.5}},     {"book", {26, 4.5}},
        {"arxiv", {28, 2.5}},        {"wikipedia", {24, 4.5}}, {"stackexchange", {20, 2}}};
    for (const bool llama : {false, true}) {
        const DataSpec spec = parse_data_spec(llama ? "@data/redpajama-1t-llama.mix" : "@data/redpajama-1t.mix");
        ASSERT_EQ(spec.parts.size(), wanted.size());
        for (const WeightedGlob& p : spec.parts) {
            const std::string name = p.glob.substr(p.glob.rfind('/') + 1);
            const auto& [tokens, percent] = wanted.at(name.substr(0, name.find("_[")));
            EXPECT_DOUBLE_EQ(p.weight, llama ? percent / 100 : tokens / 1210) << p.glob;
        }
    }
}

// B.1 14
TEST_F(Loader, GlobsAreSortedAndMayHoldSpacesAndStars) {
    for (int i = 0; i <= 10; i++) {
        std::filesystem::rename(write_shard("my data/t", iota_ids(3, 10 * i)), path(format("my data/s_%d.bin", i)));
    }
    DataLoader loader(path("my data/s_*.bin"), 2, ANY_VOCAB, 1, WindowOrder::sequential);
    EXPECT_EQ(first_ids(loader, 11, 0, 11), (std::vector<int32_t>{0, 10, 100, 20, 30, 40, 50, 60, 70, 80, 90}));
    EXPECT_EQ(DataLoader(path("my data/{s_?,s_*}.bin"), 2, ANY_VOCAB, 1, WindowOrder::sequential).windows(), 11);  // each file once
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
TEST_F(Loader, GlobsSayWhyTheyCannotLook) {
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

TEST_F(Loader, OnePatternMustNotTakeTrainingAndValidation) {
    write_shard("x", iota_ids(10));
    write_shard("x_val", iota_ids(10));
    const Failure failure = failure_of([&] { DataLoader(path("x_*.bin"), 2, ANY_VOCAB, 1, WindowOrder::shuffled); });
    EXPECT_EQ(failure.exit_code, EXIT_USAGE);
    EXPECT_SAYS(failure.message, "x_[0-9]*.bin");
    EXPECT_EQ(DataLoader(path("x_[0-9]*.bin"), 2, ANY_VOCAB, 1, WindowOrder::shuffled).windows(), 4);
    EXPECT_EQ(DataLoader(path("x_val_*.bin"), 2, ANY_VOCAB, 1, WindowOrder::shuffled).windows(), 4);
}

// ---------------------------------------------------------------------------------------------------------------
// Reading

// More shards than descriptors: some stay open, the others are opened for each read. Cut in the run, either kind is a named error.
TEST_F(Loader, ManyShardsAndOnesThatAreCutInTheRun) {
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
TEST_F(Loader, ThreadsShareShards) {
    write_shard("narrow", iota_ids(4001));
    write_shard("wide", iota_ids(4001, 10000), 70000);
    const DataLoader start(path("*.bin"), 40, 70000, 1, WindowOrder::shuffled);
    const std::vector<int32_t> wanted = stream(start, 400, 1, 1);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++) {
        threads.emplace_back([&] { EXPECT_EQ(stream(start, 400, 1, 1), wanted); });
    }
    for (std::thread& t : threads) { t.join(); }
}

// B.1 13
TEST_F(Loader, TooShortDataSaysNeedAndHave) {
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

// ---------------------------------------------------------------------------------------------------------------
// Reading ahead

// A DataLoader whose batches take a while, or fail from one position on; it counts what was read.
struct SlowLoader : DataLoader {
    SlowLoader(DataLoader loader, double seconds) : DataLoader(std::move(loader)), seconds(seconds) {}
    void next(i64 count, i64 begin, i64 end, int32_t* windows) {
        check(state().position < fails_at, "the disk is gone");
        std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        DataLoader::next(count, begin, end, windows);
        *read_to = std::max<i64>(*read_to, state().position);
    }
    double seconds;
    i64 fails_at = std::numeric_limits<i64>::max();
    std::shared_ptr<std::atomic<i64>> read_to = std::make_shared<std::atomic<i64>>(0);
};

TEST_F(Loader, ReadingAheadChangesNothing) {
    write_shard("a", iota_ids(5 * 4 + 1, 0));
    write_shard("b", iota_ids(3 * 4 + 1, 1000));
    const DataLoader fresh("2:" + path("a*.bin") + ",1:" + path("b*.bin"), 4, ANY_VOCAB, 3, WindowOrder::shuffled);
    DataLoader plain = fresh;
    const i64 windows = 61;
    ReadAhead<SlowLoader> ahead(SlowLoader(fresh, 0), windows);
    std::vector<int32_t> wanted(6 * 5);
    for (i64 step = 0; step < 10; step++) {
        const i64 count = step % 4 == 2 ? 5 : 6, begin = step % 3,
                  end = count - step % 2;  // what was read ahead is not always what is asked for
        plain.next(count, begin, end, wanted.data());
        const int32_t* found = ahead.next(count, begin, end);
        ASSERT_TRUE(std::equal(found, found + (end - begin) * 5, wanted.begin())) << step;
        EXPECT_EQ(ahead.loader().state(), plain.state());
    }
    while (plain.state().position + 6 <= windows) {
        for (const bool once_more : {false, true}) {
            if (once_more) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }
        }
        plain.next(6, 0, 6, wanted.data());
        const int32_t* found = ahead.next(6, 0, 6);
        ASSERT_TRUE(std::equal(found, found + 6 * 5, wanted.begin()));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_EQ(*ahead.loader().read_to, plain.state().position);  // nothing past the run's end
}

TEST_F(Loader, ReadingAheadFailsWhenTheBatchIsAskedFor) {
    write_shard("a", iota_ids(101));
    SlowLoader loader(DataLoader(path("a*.bin"), 4, ANY_VOCAB, 3, WindowOrder::shuffled), 0);
    loader.fails_at = 12;
    ReadAhead<SlowLoader> ahead(loader, 1000);
    for (int step = 0; step < 3; step++) { ahead.next(4, 0, 4); }
    EXPECT_EQ(ahead.loader().state().position, 12);
    for (int attempt = 0; attempt < 2; attempt++) {  // read ahead, then in next() itself
        EXPECT_EQ(failure_of([&] { ahead.next(4, 0, 4); }).message, "the disk is gone");
        EXPECT_EQ(ahead.loader().state().position, 12);
    }
    // One that is read and never asked for harms nobody.
    ReadAhead<SlowLoader> left(loader, 1000);
    for (int step = 0; step < 3; step++) { left.next(4, 0, 4); }
}

// Where no thread can be started the same batches come, one after the other.
TEST_F(Loader, ReadsWithoutThreadsToo) {
    write_shard("a", iota_ids(101));
    chmod(folder_.c_str(), 0755);
    const pid_t child = fork();
    if (child == 0) {  // a user who may start no more threads
        if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) { _exit(0); }
        bool same = true;
        const Failure failure = failure_of([&] {
            DataLoader plain(path("a*.bin"), 4, ANY_VOCAB, 3, WindowOrder::shuffled);
            const Limit limit(RLIMIT_NPROC, 0);
            ReadAhead<DataLoader> ahead(plain, 1000);
            for (int step = 0; step < 5; step++) {
                std::vector<int32_t> wanted(4 * 5);
                plain.next(4, 0, 4, wanted.data());
                same = same && std::equal(wanted.begin(), wanted.end(), ahead.next(4, 0, 4));
            }
        });
        _exit(!same || failure.exit_code != 0);
    }
    int status = 1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
}

// A slow disk and the step's own work overlap: a run takes little more than the longer of the two, not their sum.
TEST_F(Loader, ASlowDiskOverlapsWithTheStep) {
    write_shard("a", iota_ids(1001));
    const DataLoader loader(path("a*.bin"), 4, ANY_VOCAB, 3, WindowOrder::shuffled);
    constexpr int STEPS = 8;
    constexpr double SECONDS = 0.04;
    auto run = [&](i64 ahead_until) {
        ReadAhead<SlowLoader> windows(SlowLoader(loader, SECONDS), ahead_until);
        const auto begin = std::chrono::steady_clock::now();
        double waited = 0;
        for (int step = 0; step < STEPS; step++) {
            windows.next(4, 0, 4);
            waited += step > 0 ? windows.waited() : 0;
            std::this_thread::sleep_for(std::chrono::duration<double>(1.5 * SECONDS));  // the step
        }
        return std::pair(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), waited);
    };
    const auto [one_by_one, waited_each_time] = run(0);  // reads nothing ahead
    const auto [overlapped, waited] = run(4 * STEPS);
    EXPECT_GE(one_by_one, STEPS * 2.5 * SECONDS);
    EXPECT_LT(overlapped, one_by_one - (STEPS - 1) * 0.5 * SECONDS);
    EXPECT_GE(waited_each_time, (STEPS - 1) * SECONDS);
    EXPECT_LT(waited, waited_each_time / 2);
}

// ---------------------------------------------------------------------------------------------------------------
// Size

i64 resident_kib() {
    FILE* status = fopen("/proc/self/status", "r");
    char line[256];
    long long kib = 0;
    while (fgets(line, sizeof line, status)) { sscanf(line, "VmRSS: %lld", &kib); }
    fclose(status);
    return kib;
}

// 100 billion tokens, as shards and as one Megatron set (files with holes): opened, shuffled and read in a few MiB.
TEST_F(Loader, MemoryDoesNotGrowWithTheSet) {
    constexpr i64 SHARDS = 50, TOKENS = 2'000'000'000, T = 2048;
    for (i64 s = 0; s < SHARDS; s++) {
        const ShardHeader header = {SHARD_16_BIT.magic, SHARD_16_BIT.version, (int32_t)TOKENS, {}};
        std::filesystem::resize_file(write_file(format("s_%06lld.bin", (long long)s), std::string((const char*)&header, sizeof header)),
                                     SHARD_HEADER_BYTES + 2 * TOKENS);
    }
    write_megatron("m", Documents(SHARDS), UINT16);
    {
        File idx(path("m.idx"), "r+b");
        for (i64 s = 0; s < SHARDS; s++) {
            const int32_t length = TOKENS;
            const int64_t pointer = s * TOKENS * 2;
            fseeko(idx.handle(), 34 + 4 * s, SEEK_SET), idx.write(&length, sizeof length);
            fseeko(idx.handle(), 34 + 4 * SHARDS + 8 * s, SEEK_SET), idx.write(&pointer, sizeof pointer);
        }
        idx.close();
        std::filesystem::resize_file(path("m.bin"), SHARDS * TOKENS * 2);
    }
    for (const char* name : {"s_*.bin", "m"}) {
        const i64 before = resident_kib();
        DataLoader loader(path(name), T, ANY_VOCAB, 1, WindowOrder::shuffled);
        EXPECT_EQ(loader.tokens(), SHARDS * TOKENS);
        EXPECT_GE(loader.windows(), SHARDS * TOKENS / T - SHARDS);
        std::vector<int32_t> windows(16 * (T + 1), -1);
        for (int step = 0; step < 20; step++) {
            loader.next(16, 0, 16, windows.data());
            EXPECT_EQ(std::count(windows.begin(), windows.end(), 0), 16 * (T + 1));
            if (step == 10) { loader.set_state({loader.windows() - 64, {loader.windows() - 64}}); }
        }
        EXPECT_LT(resident_kib() - before, 8 << 10) << name;
    }
}

}  // namespace
