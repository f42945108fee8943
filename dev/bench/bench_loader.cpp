// bench_loader.cpp: tokens a second that the loader hands out on one core, from page cache, shuffled. Bar: 200 million.
//
//   make bench_loader && build/bench_loader [MILLION_TOKENS [FOLDER]]      64 million tokens a set, in a new folder in /tmp
//
// Sets of the same random ids: an llm.c shard, lit-gpt packed shards, a Megatron set in our order and in its own. Documents are 1 to 2047
// ids long. The page cache is filled by reading the files, as in training: as they are written they lie in smaller pieces there, which are
// slower. Each figure is the median of 5 rounds; rounds of all rows take turns. What counts is the second of processor time: wall time
// beside it is what the machine's other programs left of the core.
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <random>

#include "llmc/dataloader.h"

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
double cpu_seconds() {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) + 1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

void write_sets(const std::string& folder, i64 tokens) {
    constexpr i64 VOCAB = 32000;
    std::mt19937 random(1);
    std::vector<int32_t> ids(tokens);
    for (int32_t& id : ids) { id = random() % VOCAB; }
    ShardWriter shard(folder + "/llmc", VOCAB, SHARD_MAX_TOKENS);
    shard.write(ids);
    shard.publish();
    MegatronWriter megatron(folder + "/megatron", VOCAB);
    for (i64 at = 0; at < tokens;) {
        const i64 length = std::min<i64>(1 + random() % 2047, tokens - at);
        megatron.add_document({&ids[at], (size_t)length});
        at += length;
    }
    megatron.publish();
    const i64 chunk = 2049 * 1024;
    std::vector<uint16_t> narrow(ids.begin(), ids.end());
    for (i64 c = 0; (c + 1) * chunk <= tokens; c++) {
        File file(folder + format("/packed_%010lld.bin", (long long)c), "wb");
        const uint64_t version = 1;
        const uint8_t type = 8;
        file.write("LITPKDS", 7), file.write(&version, 8), file.write(&type, 1), file.write(&chunk, 8);
        file.write(&narrow[c * chunk], chunk * 2);
        file.close();
    }
}

void read_into_page_cache(const std::string& folder) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        const File file(entry.path(), "rb");
        const int fd = fileno(file.handle());
        check(fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, "cannot drop '%s' from the page cache",
              file.path().c_str());
        file_xxh3(file.path());
    }
}

struct Row {
    std::string name;
    i64 S;
    DataLoader loader;
    std::vector<double> rates, cpu_rates;  // tokens a second of wall, of processor time
};

void run(Row& row, i64 tokens) {
    constexpr i64 BATCH = 64;
    std::vector<int32_t> windows(BATCH * (row.S + 1));
    const double begin = now(), cpu_begin = cpu_seconds();
    i64 done = 0;
    for (; done < tokens; done += BATCH * row.S) { row.loader.next(BATCH, 0, BATCH, windows.data()); }
    row.rates.push_back((double)done / (now() - begin));
    row.cpu_rates.push_back((double)done / (cpu_seconds() - cpu_begin));
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
    try {
        constexpr int ROUNDS = 5;
        constexpr double BAR = 200e6;
        const i64 tokens = (argc > 1 ? atoll(argv[1]) : 64) * 1'000'000;
        char made[] = "/tmp/bench_loader.XXXXXX";
        const std::string folder = argc > 2 ? argv[2] : mkdtemp(made) ? made : "/tmp";
        write_sets(folder, tokens);
        read_into_page_cache(folder);
        std::vector<Row> rows;
        for (const i64 S : {256, 1024, 2048}) {
            const std::pair<const char*, const char*> sets[] = {{"llm.c", "/llmc_0*.bin"},
                                                                {"packed", "/packed_*.bin"},
                                                                {"Megatron, windows", "/megatron"},
                                                                {"Megatron, its order", "/megatron"}};
            for (const auto& [name, pattern] : sets) {
                DataRequest r = {folder + pattern, S, 32000, 1, rows.size() % 4 == 3 ? WindowOrder::megatron : WindowOrder::shuffled};
                r.windows = (ROUNDS + 1) * (tokens + 64 * S) / S;
                rows.push_back({name, S, DataLoader(r), {}, {}});
            }
        }
        for (int round = 0; round < ROUNDS; round++) {
            for (Row& row : rows) { run(row, tokens); }
        }
        bool passed = true;
        printf("%-20s %6s %16s %16s\n", "set", "S", "Mtokens/s", "Mtokens/s of CPU");
        for (const Row& row : rows) {
            printf("%-20s %6lld %16.0f %16.0f%s\n", row.name.c_str(), (long long)row.S, median(row.rates) / 1e6,
                   median(row.cpu_rates) / 1e6, !(median(row.cpu_rates) >= BAR) ? "   below the bar" : "");
            passed = passed && median(row.cpu_rates) >= BAR;
        }
        if (argc <= 2) { std::filesystem::remove_all(folder); }
        return passed ? 0 : 1;
    } catch (const Error& error) {
        fprintf(stderr, "bench_loader: %s\n", error.what());
        return error.exit_code;
    }
}
