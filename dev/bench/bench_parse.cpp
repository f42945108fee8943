// bench_parse.cpp: what reading, unpacking and parsing add to tokenizing: wall time from the files to all ids, over wall time from the same
// texts, in memory, to all ids, minus one. Both on the same number of threads, neither writes anything.
//
//   build/bench_parse TOKENIZER THREADS INPUT...      all inputs hold the same texts; some 100 MB are enough
//
// The two run in turn, many short rounds, each a ratio: what other programs of the machine do falls on both. A line for each input: what is
// added, the median of the rounds and its quartiles; the same of processor time; how much of it is the library's own, which is what it alone takes
// to unpack the file, from memory to memory on one core, shared out perfectly over the threads; and what is added beyond that.
#include <sys/resource.h>

#include <chrono>

#include "data/pipeline.h"

namespace {

constexpr int ROUNDS = 15;

struct Cost {
    double wall, cpu;  // seconds
};
template <typename Function>
Cost cost_of(Function function) {
    const auto cpu = [] {
        struct rusage use;
        getrusage(RUSAGE_SELF, &use);
        return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) + 1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
    };
    const auto start = std::chrono::steady_clock::now();
    const double cpu_before = cpu();
    function();
    return {std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), cpu() - cpu_before};
}
double quantile(std::vector<double> values, double q) {
    std::sort(values.begin(), values.end());
    return values[(size_t)(q * (double)(values.size() - 1) + 0.5)];
}

// Calls use(work) for each document.
template <typename Function>
void read_all(const PipelineOptions& options, const Tokenizer* tokenizer, Function use) {
    const std::vector<InputFile> files = list_inputs(options.inputs, options.read.input_format);
    const Filter filter(options.filter);
    Pipeline pipeline(options, files, filter, tokenizer);
    while (const Work* work = pipeline.next()) { use(*work); }
}

// As the pipeline shares out the work: some documents at a time, whose ids lie together until somebody has taken them.
void tokenize_all(const std::vector<std::string>& texts, const Tokenizer& tokenizer, int threads) {
    constexpr size_t BATCH_BYTES = 512 << 10, BATCHES = 16;
    struct alignas(64) Ids {
        std::vector<int32_t> ids;  // of a batch
    };
    static std::vector<Ids> kept(BATCHES);
    std::mutex mutex;
    size_t next = 0, batches = 0;
    const auto work = [&] {
        while (true) {
            std::unique_lock lock(mutex);
            size_t at = next, bytes = 0;
            std::vector<int32_t>& ids = kept[batches++ % BATCHES].ids;
            while (next < texts.size() && bytes < BATCH_BYTES) { bytes += texts[next++].size(); }
            const size_t end = next;
            lock.unlock();
            if (at == end) { return; }
            ids.clear();
            for (; at < end; at++) { tokenizer.encode(texts[at], ids); }
        }
    };
    std::vector<std::future<void>> running;
    for (int t = 0; t < threads; t++) { running.push_back(start_thread(work)); }
}

// The file through its library's own call for data that is in memory as a whole.
class BareLibrary {
public:
    BareLibrary(const std::string& path, size_t unpacked_bytes) : packed_(read_text_file(path)), unpacked_(unpacked_bytes, '\0') {}
    void run() {
        if (packed_.starts_with("\x1f\x8b")) {
            inflate_state state;
            isal_inflate_init(&state);
            state.crc_flag = ISAL_GZIP;
            state.next_in = (uint8_t*)packed_.data();
            state.avail_in = packed_.size();
            state.next_out = (uint8_t*)unpacked_.data();
            state.avail_out = unpacked_.size();
            const int status = isal_inflate_stateless(&state);
            check(status == ISAL_DECOMP_OK, "ISA-L: %d", status);
        } else if (packed_.starts_with("\x28\xb5\x2f\xfd")) {
            const size_t status = ZSTD_decompress(unpacked_.data(), unpacked_.size(), packed_.data(), packed_.size());
            check(!ZSTD_isError(status), "libzstd: %s", ZSTD_getErrorName(status));
        }
    }

private:
    std::string packed_, unpacked_;
};

}  // namespace

int main(int argc, char** argv) {
    try {
        if (argc < 4) { usage_error("bench_parse TOKENIZER THREADS INPUT..."); }
        const auto tokenizer = load_tokenizer(argv[1]);
        const int threads = atoi(argv[2]);
        const auto options_of = [&](const char* input) {
            PipelineOptions options;
            options.threads = threads;
            options.inputs = {input};
            return options;
        };
        std::vector<std::string> texts;
        read_all(options_of(argv[3]), nullptr, [&](const Work& work) { texts.push_back(work.text); });
        const auto from_texts = [&] { return cost_of([&] { tokenize_all(texts, *tokenizer, threads); }); };
        from_texts();  // fills the caches
        i64 bytes = 0;
        for (const std::string& text : texts) { bytes += text.size(); }
        printf("%.1f MB of text, %d threads, %d rounds; added over texts in memory: median (quartiles)\n", (double)bytes / 1e6, threads, ROUNDS);
        for (int i = 3; i < argc; i++) {
            BareLibrary library(argv[i], 2 * bytes + (1 << 20));
            std::vector<double> wall, cpu, library_own, beyond;
            for (int round = 0; round < ROUNDS; round++) {
                size_t documents = 0;
                const Cost alone = from_texts();
                const Cost all = cost_of([&] { read_all(options_of(argv[i]), tokenizer.get(), [&](const Work& work) { documents += work.kept; }); });
                check(documents == texts.size(), "'%s' has %zu documents, '%s' %zu", argv[i], documents, argv[3], texts.size());
                wall.push_back(all.wall / alone.wall - 1);
                cpu.push_back(all.cpu / alone.cpu - 1);
                library_own.push_back(cost_of([&] { library.run(); }).wall / threads / alone.wall);
                beyond.push_back(wall.back() - library_own.back());
            }
            const auto percent = [](const std::vector<double>& values, double q) { return 100 * quantile(values, q); };
            printf("%s: wall time %.1f%% (%.1f to %.1f), processor time %.1f%%; the library's own %.1f%%, beyond it %.1f%% (%.1f to %.1f)\n", argv[i],
                   percent(wall, 0.5), percent(wall, 0.25), percent(wall, 0.75), percent(cpu, 0.5), percent(library_own, 0.5), percent(beyond, 0.5),
                   percent(beyond, 0.25), percent(beyond, 0.75));
            fflush(stdout);
        }
        return EXIT_OK;
    } catch (const Error& e) {
        fprintf(stderr, "bench_parse: %s\n", e.what());
        return e.exit_code;
    }
}
