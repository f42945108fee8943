// test_megatron.cpp: Megatron's sample order, blending and writer. Oracles: indices that Megatron-LM's own builders made (../shared), and
// those of dev/reference/make_megatron_goldens.py, which NumPy shuffled. The letters B.x n are rows of CASES.md.
#include "dev/test/data_testing.h"

#include <signal.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <xxhash.h>

#include <fstream>
#include <map>
#include <optional>
#include <thread>

#include "llmc/blend.h"
#include "llmc/megatron.h"

namespace {

const std::string GOLDEN = "dev/golden/megatron/", SHARED = "../shared/data/megatron-sample/";

const nlohmann::json& golden(const char* key) {
    static const nlohmann::json all = nlohmann::json::parse(read_text_file(GOLDEN + "golden.json"));
    return all.at(key);
}

std::string hash_of(const void* data, size_t bytes) { return format("%016llx", (unsigned long long)XXH3_64bits(data, bytes)); }
template <typename X>
std::string hash_of(const std::vector<X>& values) {
    return hash_of(values.data(), values.size() * sizeof(X));
}

std::vector<int64_t> values_of(const IndexArray& array, i64 n) {
    std::vector<int64_t> values(n);
    for (i64 i = 0; i < n; i++) { values[i] = array[i]; }
    return values;
}

class Megatron : public DataTest {
protected:
    // A set with documents of these lengths, its ids counting up through 0 .. vocab - 1.
    std::shared_ptr<const TokenFile> write_set(const std::vector<i64>& lengths, i64 vocab = 1000) const {
        MegatronWriter writer(path("set"), vocab);
        i64 next = 0;
        for (const i64 n : lengths) {
            std::vector<int32_t> ids;
            for (i64 i = 0; i < n; i++) { ids.push_back((int32_t)(next++ % vocab)); }
            writer.add_document(ids);
        }
        writer.publish();
        return std::make_shared<TokenFile>(path("set"));
    }
};

// The tokens of all samples in training order: what the documents, one after the other as the order has them, give when cut every S tokens.
std::vector<std::vector<int32_t>> expected_samples(const TokenFile& file, const std::vector<int64_t>& documents,
                                                   const std::vector<int64_t>& shuffled, i64 S) {
    std::vector<int32_t> flat;
    for (const int64_t d : documents) {
        const size_t at = flat.size();
        flat.resize(at + file.megatron()->length(d));
        file.read_sequence(d, 0, file.megatron()->length(d), 1 << 30, flat.data() + at);
    }
    std::vector<std::vector<int32_t>> samples;
    for (const int64_t j : shuffled) {
        const size_t begin = j * S, end = std::min<size_t>(begin + S + 1, flat.size());
        samples.emplace_back(flat.begin() + begin, flat.begin() + end);
        samples.back().resize(S + 1);
    }
    return samples;
}

std::vector<uint64_t> pseudo_random_states(i64 n) {  // as in make_megatron_goldens.py
    std::vector<uint64_t> states;
    uint64_t x = 1;
    for (i64 i = 0; i < n; i++) { states.push_back(x = (x * 1103515245 + 12345) % (1u << 31)); }
    return states;
}
std::vector<i64> pseudo_random_lengths(i64 n) {
    std::vector<i64> lengths;
    for (const uint64_t x : pseudo_random_states(n)) { lengths.push_back((i64)(x >> 16) % 500); }
    return lengths;
}

// ---------------------------------------------------------------------------------------------------------------
// The rules in numbers

TEST(MegatronRules, ShuffleIsNumPys) {
    for (const auto& c : golden("shuffles")) {
        std::mt19937 random(c.at("seed").get<uint32_t>());
        std::vector<int32_t> values = iota_ids(c.at("n"));
        numpy_shuffle(random, values.data(), (i64)values.size());
        numpy_shuffle(random, values.data(), (i64)values.size());
        EXPECT_EQ(hash_of(values), c.at("twice")) << c;
    }
}

TEST(MegatronRules, Splits) {
    for (const auto& c : golden("splits")) {
        for (int part = 0; part < 3; part++) {
            const Range range = megatron_split(c.at("split"), part, c.at("documents"));
            EXPECT_EQ(range.begin, c.at("ranges")[part][0]) << c;
            EXPECT_EQ(range.end, c.at("ranges")[part][1]) << c;
        }
    }
    EXPECT_EQ(megatron_split(" 98 , 2.", 0, 100).end, 98);
    for (const char* bad : {"", "0", "0,0,0", "-1,2", "1,,2", "1,2,3,4", "a", "1 2", "1,", "nan", "1e2,3", "0x10", "1.2.3", "1;2"}) {
        const Failure failure = failure_of([&] { megatron_split(bad, 0, 10); });
        EXPECT_EQ(failure.exit_code, EXIT_USAGE) << bad;
        EXPECT_SAYS(failure.message, format("'%s'", bad));
    }
}

// B.2 22: the last epoch's arithmetic, and the number of kept samples, which is a float.
TEST(MegatronRules, Epochs) {
    for (const auto& c : golden("counts")) {
        const MegatronEpochs e = megatron_epochs(c[0], c[1], c[2]);
        EXPECT_EQ(e.epochs, c[3]) << c;
        EXPECT_EQ(e.samples, c[4]) << c;
        EXPECT_EQ(e.separate_final_epoch, c[5] == 1) << c;
        EXPECT_EQ(e.samples_before_final, c[6]) << c;
        EXPECT_GE(e.samples, c[2]) << c;
        EXPECT_EQ(megatron_epochs(c[0], c[1], c[2], LastSample::keep).samples, c[7]) << c;
    }
    EXPECT_NE(failure_of([] { megatron_epochs(1000, 4096, (i64)1 << 60); }).message, "");
}

TEST(MegatronRules, SumsAreNumPys) {
    std::vector<double> values;
    for (const uint64_t x : pseudo_random_states(300)) { values.push_back((double)x / 3.0); }
    for (const auto& c : golden("sums")) { EXPECT_EQ(numpy_sum(values.data(), c.at("n")), c.at("sum").get<double>()) << c; }
}

TEST(MegatronRules, Blends) {
    for (const auto& c : golden("blends")) {
        const std::vector<double> once = normalized(c.at("weights")), twice = normalized(once);
        EXPECT_EQ(hash_of(once), c.at("once"));
        EXPECT_EQ(hash_of(twice), c.at("twice"));
        std::vector<i64> drawn(twice.size());
        std::vector<int16_t> picks;
        for (i64 i = 0; i < 5000; i++) {
            picks.push_back((int16_t)next_source(twice, drawn, i));
            drawn[picks.back()]++;
        }
        EXPECT_EQ(std::vector<int16_t>(picks.begin(), picks.begin() + 60), c.at("picks").get<std::vector<int16_t>>());
        EXPECT_EQ(hash_of(picks), c.at("picks_hash"));
        for (size_t i = 0; i < c.at("samples").size(); i++) {
            EXPECT_EQ(hash_of(blend_requests(c.at("samples")[i], once)), c.at("requests")[i]);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The order

TEST_F(Megatron, OrderEqualsNumPys) {
    std::map<std::string, std::vector<std::shared_ptr<const TokenFile>>> sets;
    for (const char* type : {"uint16", "int32"}) { sets["small"].push_back(std::make_shared<TokenFile>(GOLDEN + "small_" + type)); }
    sets["large"].push_back(write_set(pseudo_random_lengths(20000)));
    int cases = 0, compared = 0;
    for (const auto& c : golden("orders")) {
        const i64 S = c.at("S"), n = c.at("samples"), wanted = c.at("wanted"), seed = c.at("seed");
        const LastSample last = c.at("keep") ? LastSample::keep : LastSample::drop;
        std::vector<std::vector<int32_t>> expected;
        for (const auto& file : sets.at(c.at("set"))) {
            const Range documents = megatron_split(c.at("split"), c.at("part"), file->megatron()->sequences());
            EXPECT_EQ(documents.begin, c.at("range")[0]);
            EXPECT_EQ(documents.end, c.at("range")[1]);
            const i64 entries = documents.size() * c.at("epochs").get<i64>();
            std::vector<std::string> folders = {""};  // in memory; some also built in files, and found there
            if (cases++ % 3 == 0) { folders.insert(folders.end(), 2, path("cache")); }
            for (const std::string& folder : folders) {
                const MegatronOrder order(file, documents, S, wanted, seed, folder, last);
                ASSERT_EQ(order.samples(), n) << c;
                ASSERT_EQ(order.epochs(), c.at("epochs")) << c;
                ASSERT_EQ(order.separate_final_epoch(), c.at("apart")) << c;
                ASSERT_EQ(order.tokens_per_epoch(), c.at("tokens_per_epoch")) << c;
                const std::vector<int64_t> document_index = values_of(order.document_index(), entries),
                                           sample_index = values_of(order.sample_index(), 2 * (n + 1)),
                                           shuffle_index = values_of(order.shuffle_index(), n);
                const std::pair<const char*, const std::vector<int64_t>*> indices[] = {
                    {"document_index", &document_index}, {"sample_index", &sample_index}, {"shuffle_index", &shuffle_index}};
                for (const auto& [name, found] : indices) {
                    if (c.at(name).is_string()) {
                        EXPECT_EQ(hash_of(std::vector<int32_t>(found->begin(), found->end())), c.at(name)) << name;
                    } else {
                        EXPECT_EQ(*found, c.at(name).get<std::vector<int64_t>>()) << c;
                    }
                }
                if (expected.empty()) { expected = expected_samples(*file, document_index, shuffle_index, S); }
                std::vector<int32_t> sample(S + 1);
                const i64 last_k = std::min<i64>(n, 500);
                for (i64 k = 0; k < last_k; k++) {
                    std::fill(sample.begin(), sample.end(), -1);
                    const i64 ids = order.read(k, 1 << 30, sample.data());
                    ASSERT_EQ(sample, expected[k]) << "sample " << k << " of " << c;
                    ASSERT_TRUE(ids == S + 1 || last == LastSample::keep);
                    compared++;
                }
            }
        }
    }
    EXPECT_GT(compared, 5000);
}

// Megatron-LM's own builders, ../shared/data/megatron-sample/golden: whole files, and the ids of the samples that were asked for.
TEST_F(Megatron, OrderEqualsMegatronsOwn) {
    if (!path_exists(SHARED)) { GTEST_SKIP() << "no " << SHARED << "; dev/golden/megatron has others"; }
    const nlohmann::json cases = nlohmann::json::parse(read_text_file(SHARED + "golden/golden.json"));
    const auto file = std::make_shared<TokenFile>(SHARED + "meg-gpt2-openwebtext_text_document");
    EXPECT_EQ(file->tokens(), 1361845);
    EXPECT_EQ(file->describe(), "Megatron set, version 1, uint16 ids, 1000 sequences in 1000 documents");
    ASSERT_FALSE(cases.empty());
    for (const auto& [name, c] : cases.items()) {
        const i64 S = c.at("seq_length"), wanted = c.at("num_samples_requested");
        const Range documents = {c.at("doc_range")[0], c.at("doc_range")[1]};
        const MegatronOrder order(file, documents, S, wanted, c.at("seed"), path(name));
        EXPECT_EQ(order.tokens_per_epoch(), c.at("tokens_per_epoch"));
        EXPECT_EQ(order.epochs(), c.at("num_epochs"));
        EXPECT_EQ(order.separate_final_epoch(), c.at("separate_final_epoch"));
        EXPECT_EQ(order.samples(), c.at("num_samples_total"));
        int files = 0;
        for (const auto& entry : std::filesystem::directory_iterator(path(name))) {
            const std::string built = entry.path().string();
            EXPECT_TRUE(read_text_file(built) == read_text_file(SHARED + "golden/" + name + built.substr(built.rfind('-')))) << built;
            files++;
        }
        EXPECT_EQ(files, 3);
        std::ofstream ids(path("ids"), std::ios::binary);
        std::vector<int32_t> sample(S + 1);
        for (i64 k = 0; k < wanted; k++) {
            order.read(k, 5000, sample.data());
            const std::vector<uint16_t> narrow(sample.begin(), sample.end());
            ids.write((const char*)narrow.data(), (std::streamsize)(narrow.size() * sizeof(uint16_t)));
        }
        ids.close();
        ASSERT_EQ(system(("md5sum < " + path("ids") + " > " + path("md5")).c_str()), 0);
        EXPECT_EQ(read_text_file(path("md5")).substr(0, 32), c.at("md5").at("tokens_uint16_of_first_num_samples"));
    }
}

// B.2 20, B.1 13
TEST_F(Megatron, SetsWithTooLittleSayNeedAndHave) {
    const auto order = [&](const std::vector<i64>& lengths, i64 S) {
        const auto file = write_set(lengths);
        return failure_of([&] { MegatronOrder(file, {0, (i64)lengths.size()}, S, 1, 1); }).message;
    };
    EXPECT_SAYS(order({0, 0, 0}, 8), "needs 9 tokens (sequence + 1); found no tokens");
    EXPECT_SAYS(order({}, 8), "found no tokens in documents [0, 0)");
    EXPECT_SAYS(order({1}, 8), "found 1 tokens");
    EXPECT_SAYS(order({3, 0, 5}, 8), "needs 9 tokens (sequence + 1); found 8 tokens in documents [0, 3)");
    EXPECT_EQ(order({3, 0, 5, 1}, 8), "");
    const auto file = write_set({100});
    EXPECT_EQ(failure_of([&] { MegatronOrder(file, {0, 1}, 8, 1, -1); }).exit_code, EXIT_USAGE);
    EXPECT_EQ(failure_of([&] { MegatronOrder(file, {0, 1}, 8, 1, (i64)1 << 32); }).exit_code, EXIT_USAGE);
    EXPECT_SAYS(failure_of([&] { MegatronOrder(file, {0, 2}, 8, 1, 1); }).message, "[0, 2) of 1");
    EXPECT_SAYS(failure_of([&] { MegatronOrder(file, {0, 1}, 8, (i64)1 << 40, 1); }).message, "HINT");
    const auto shard = std::make_shared<TokenFile>(write_shard("s", iota_ids(100)));
    EXPECT_SAYS(failure_of([&] { MegatronOrder(shard, {0, 1}, 8, 1, 1); }).message, "no Megatron set");
    const MegatronOrder good(file, {0, 1}, 8, 1, 1);
    std::vector<int32_t> sample(9);
    EXPECT_EQ(good.samples(), 12);
    EXPECT_SAYS(failure_of([&] { good.read(12, 1000, sample.data()); }).message, "sample 12 of 12");
    EXPECT_SAYS(failure_of([&] { good.read(-1, 1000, sample.data()); }).message, "sample -1");
    EXPECT_SAYS(failure_of([&] {
                    for (i64 k = 0; k < 12; k++) { good.read(k, 50, sample.data()); }
                }).message,
                "outside the vocabulary of 50");
}

// A sample of a 5 GiB file that is mostly a hole, and of a .bin that is cut after it was opened.
TEST_F(Megatron, HugeAndCutSets) {
    constexpr i64 LONG = ((i64)5 << 30) / 2 / 3;
    const auto file = write_set({5, 6});
    {
        const int32_t lengths[] = {(int32_t)LONG, (int32_t)LONG, (int32_t)LONG, 9};
        const int64_t pointers[] = {0, 2 * LONG, 4 * LONG, 6 * LONG}, documents[] = {0, 1, 2, 3, 4};
        File index(path("huge.idx"), "wb");
        index.write("MMIDIDX\0\0\1\0\0\0\0\0\0\0\10\4\0\0\0\0\0\0\0\5\0\0\0\0\0\0\0", 34);
        index.write(lengths, sizeof lengths);
        index.write(pointers, sizeof pointers);
        index.write(documents, sizeof documents);
        index.close();
        File bin(path("huge.bin"), "wb");
        ASSERT_EQ(ftruncate(fileno(bin.handle()), 6 * LONG + 18), 0);
        const uint16_t ids[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
        ASSERT_EQ(pwrite(fileno(bin.handle()), ids, sizeof ids, 6 * LONG), (ssize_t)sizeof ids);
    }
    const auto huge = std::make_shared<TokenFile>(path("huge"));
    std::vector<int32_t> sample(9);
    const MegatronOrder end(huge, {3, 4}, 8, 1, 1);
    end.read(0, 10, sample.data());
    EXPECT_EQ(sample, iota_ids(9, 1));
    const MegatronOrder all(huge, {0, 4}, 1 << 20, 1, 1);
    EXPECT_EQ(all.samples(), (3 * LONG + 8) >> 20);
    std::vector<int32_t> long_sample((1 << 20) + 1);
    all.read(all.samples() - 1, 10, long_sample.data());

    const MegatronOrder order(file, {0, 2}, 10, 1, 1);
    std::filesystem::resize_file(path("set.bin"), 6);
    const std::string message = failure_of([&] { order.read(0, 1000, std::vector<int32_t>(11).data()); }).message;
    for (const char* part : {"set.bin", "byte 6", "HINT"}) { EXPECT_SAYS(message, part); }
}

// ---------------------------------------------------------------------------------------------------------------
// The cache

TEST_F(Megatron, CacheIsNamedByAllThatTheOrderDependsOn) {
    auto file = write_set(pseudo_random_lengths(100));
    auto files_after = [&](Range documents, i64 S, i64 samples, i64 seed) {
        MegatronOrder(file, documents, S, samples, seed, path("cache"));
        return std::distance(std::filesystem::directory_iterator(path("cache")), {});
    };
    EXPECT_EQ(files_after({0, 100}, 64, 100, 1), 3);
    EXPECT_EQ(files_after({0, 100}, 64, 101, 1), 3);  // still one epoch: the same order
    EXPECT_EQ(files_after({0, 100}, 64, 1000, 1), 6);
    EXPECT_EQ(files_after({0, 100}, 64, 100, 2), 9);
    EXPECT_EQ(files_after({0, 100}, 65, 100, 1), 12);
    EXPECT_EQ(files_after({0, 99}, 64, 100, 1), 15);
    EXPECT_EQ(files_after({1, 100}, 64, 100, 1), 18);
    std::vector<i64> lengths = pseudo_random_lengths(100);
    std::swap(lengths[50], lengths[51]);
    file = write_set(lengths);
    EXPECT_EQ(files_after({0, 100}, 64, 100, 1), 21);
}

// Beyond 2^31 entries the indices are int64, which no test can afford: the arrays themselves, as numpy.save would write them.
TEST_F(Megatron, ArraysAreNumPysFiles) {
    const std::string spaces(128, ' ');
    for (const bool wide : {false, true}) {
        IndexArray array(wide ? IndexArray::Type::int64 : IndexArray::Type::uint32, 3, wide ? 2 : 0);
        array.create_file(path("a.npy"));
        array.fill([&](auto* values) {
            for (i64 i = 0; i < (wide ? 6 : 3); i++) { values[i] = ((i64)1 << (wide ? 40 : 31)) + i; }
        });
        array.sync(path("a.npy"));
        std::string wanted = std::string("\x93NUMPY\1\0v\0", 10) + (wide ? "{'descr': '<i8', 'fortran_order': False, 'shape': (3, 2), }"
                                                                         : "{'descr': '<u4', 'fortran_order': False, 'shape': (3,), }");
        wanted = (wanted + spaces).substr(0, 127) + "\n";
        EXPECT_EQ(read_text_file(path("a.npy")).substr(0, 128), wanted);
        EXPECT_EQ(std::filesystem::file_size(path("a.npy")), wide ? 128u + 48u : 128u + 12u);
        IndexArray same(wide ? IndexArray::Type::int64 : IndexArray::Type::uint32, 3, wide ? 2 : 0), other(IndexArray::Type::int32, 3, 0);
        ASSERT_TRUE(same.open(path("a.npy")));
        EXPECT_EQ(same[2], ((i64)1 << (wide ? 40 : 31)) + 2);
        EXPECT_FALSE(other.open(path("a.npy")));
        EXPECT_FALSE(other.open(path("nope.npy")));
    }
}

TEST_F(Megatron, BrokenCaches) {
    const auto file = write_set(pseudo_random_lengths(100));
    const auto order = [&] { return std::make_unique<MegatronOrder>(file, Range{0, 100}, 64, 100, 1, path("cache")); };
    const std::vector<int64_t> wanted = values_of(order()->shuffle_index(), 100);
    std::map<std::string, std::string> good;
    for (const auto& entry : std::filesystem::directory_iterator(path("cache"))) { good[entry.path()] = read_text_file(entry.path()); }
    ASSERT_EQ(good.size(), 3u);
    for (const auto& [path, content] : good) {
        // Cut, of another shape, gone, or with an older one's rest beside it: built again.
        std::filesystem::resize_file(path, content.size() - 1);
        EXPECT_EQ(values_of(order()->shuffle_index(), 100), wanted);
        EXPECT_TRUE(read_text_file(path) == content);
        File(path, "r+b").write("\x93NUMPX", 6);
        EXPECT_EQ(values_of(order()->shuffle_index(), 100), wanted);
        EXPECT_TRUE(read_text_file(path) == content);
        unlink(path.c_str());
        File(path + ".tmp", "wb").write("rest", 4);
        EXPECT_EQ(values_of(order()->shuffle_index(), 100), wanted);
        EXPECT_TRUE(read_text_file(path) == content);
    }
    EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path("cache")), {}), 3);
    // Numbers that cannot be: an error, not a read outside the arrays.
    std::vector<int32_t> sample(65);
    for (const auto& [path, content] : good) {
        std::string broken = content;
        std::fill(broken.begin() + 128, broken.end(), '\x7f');
        File(path, "r+b").write(broken.data(), broken.size());
        EXPECT_SAYS(failure_of([&] { order()->read(0, 1000, sample.data()); }).message, "cache");
        File(path, "r+b").write(content.data(), content.size());
    }
    EXPECT_EQ(order()->read(0, 1000, sample.data()), 65);
}

TEST_F(Megatron, CacheOnAFullDisk) {
    const auto file = write_set(pseudo_random_lengths(1000));
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGXFSZ, SIG_IGN);
        const Limit limit(RLIMIT_FSIZE, 4000);
        const Failure failure = failure_of([&] { MegatronOrder(file, {0, 1000}, 8, 100, 1, path("cache")); });
        _exit(failure.message.find("cannot make '" + path("cache")) == std::string::npos);
    }
    int status = 1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    for (const std::string& name : file_names()) { EXPECT_FALSE(name.ends_with(".npy") || name.ends_with(".tmp")) << name; }
    EXPECT_SAYS(failure_of([&] { MegatronOrder(file, {0, 1000}, 8, 100, 1, path("set.bin") + "/cache"); }).message, "set.bin");
}

// Processes and threads that start at once, some killed while they build: everyone who finishes has the order.
TEST_F(Megatron, ManyBuildTheSameCacheAtOnce) {
    const auto file = write_set(pseudo_random_lengths(3000));
    const MegatronOrder in_memory(file, {0, 3000}, 8, 200'000, 5);
    const std::vector<int64_t> wanted = values_of(in_memory.shuffle_index(), in_memory.samples());
    const auto built_well = [&] {
        const MegatronOrder order(file, {0, 3000}, 8, 200'000, 5, path("cache"));
        return values_of(order.shuffle_index(), order.samples()) == wanted;
    };
    std::vector<pid_t> children;
    for (int i = 0; i < 6; i++) {
        children.push_back(fork());
        if (children.back() == 0) { _exit(built_well() ? 0 : 1); }
        if (i % 2 == 1) {
            usleep(1000 * i);
            kill(children.back(), SIGKILL);
        }
    }
    std::atomic<int> good = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; t++) {
        threads.emplace_back([&] { good += built_well(); });
    }
    for (std::thread& t : threads) { t.join(); }
    EXPECT_EQ(good, 3);
    for (const pid_t child : children) {
        int status = 1;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        EXPECT_TRUE(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
    }
    EXPECT_TRUE(built_well());
}

// Who waited for another's work takes it, and does not make it again.
TEST_F(Megatron, CacheIsBuiltOnce) {
    const auto file = write_set(pseudo_random_lengths(100));
    const auto build = [&] { MegatronOrder(file, {0, 100}, 64, 100, 1, path("cache")); };
    build();
    std::string base;
    for (const auto& entry : std::filesystem::directory_iterator(path("cache"))) { base = entry.path(); }
    base = base.substr(0, base.rfind('-'));
    std::filesystem::rename(path("cache"), path("elsewhere"));
    std::filesystem::create_directory(path("cache"));
    std::optional<File> lock(std::in_place, base + ".lock", "ae");
    ASSERT_EQ(flock(fileno(lock->handle()), LOCK_EX), 0);
    std::thread waiting(build);
    usleep(50'000);
    for (const auto& entry : std::filesystem::directory_iterator(path("elsewhere"))) {
        std::filesystem::create_hard_link(entry.path(), path("cache/" + entry.path().filename().string()));
    }
    lock.reset();
    waiting.join();
    for (const auto& entry : std::filesystem::directory_iterator(path("elsewhere"))) {
        EXPECT_TRUE(std::filesystem::equivalent(entry.path(), path("cache/" + entry.path().filename().string())));
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The writer

TEST_F(Megatron, WriterWritesWhatOthersWrote) {
    for (const char* type : {"uint16", "int32"}) {
        const std::string name = GOLDEN + "small_" + type;
        const TokenFile file(name);
        MegatronWriter writer(path("w"), type == std::string("uint16") ? 65499 : 65500);
        EXPECT_EQ(writer.id_type(), file.id_type());
        for (i64 d = 0; d < file.megatron()->sequences(); d++) {
            std::vector<int32_t> ids(file.megatron()->length(d));
            file.read_sequence(d, 0, (i64)ids.size(), 1000, ids.data());
            for (const int32_t id : ids) { writer.write({&id, 1}); }
            writer.end_document();
        }
        EXPECT_EQ(writer.documents(), 23);
        EXPECT_EQ(writer.tokens(), file.tokens());
        EXPECT_FALSE(path_exists(path("w.idx")) && read_text_file(path("w.idx")) == read_text_file(name + ".idx"));
        writer.publish();
        for (const char* suffix : {".bin", ".idx"}) { EXPECT_TRUE(read_text_file(path("w") + suffix) == read_text_file(name + suffix)); }
    }
    EXPECT_EQ(file_names(), (std::vector<std::string>{"w.bin", "w.idx"}));
    {
        MegatronWriter writer(path("v"), 100);
        writer.add_document(std::vector<int32_t>{1, 99});
        for (const int32_t bad : {100, -1}) {
            EXPECT_SAYS(failure_of([&] { writer.write({&bad, 1}); }).message, format("id %d", bad));
        }
    }
    EXPECT_EQ(file_names(), (std::vector<std::string>{"w.bin", "w.idx"}));
    MegatronWriter writer(path("open"), 100);
    writer.write(iota_ids(5));
    writer.publish();  // ends the open document
    EXPECT_EQ(TokenFile(path("open")).megatron()->length(0), 5);
    EXPECT_SAYS(failure_of([&] { MegatronWriter(path("no/such/folder"), 100); }).message, "no/such/folder");
}

}  // namespace
