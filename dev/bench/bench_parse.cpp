// bench_parse.cpp: what reading, unpacking and parsing add to tokenizing: wall time from the files to all ids, over wall time from the same
// texts, in memory, to all ids, minus one. Both on the same number of threads, neither writes anything.
//
//   build/bench_parse TOKENIZER THREADS INPUT...      a line for each input: its name, and what is added in wall and in processor time
#include <sys/resource.h>

#include <chrono>

#include "data/pipeline.h"

namespace {

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

// Calls use(work) for each document.
template <typename Function>
void read_all(const PipelineOptions& options, const Tokenizer* tokenizer, Function use) {
    const std::vector<InputFile> files = list_inputs(options.inputs, options.read.input_format);
    const Filter filter(options.filter);
    Pipeline pipeline(options, files, filter, tokenizer);
    while (const Work* work = pipeline.next()) { use(*work); }
}

// As the pipeline shares out the work: some documents at a time.
void tokenize_all(const std::vector<std::string>& texts, const Tokenizer& tokenizer, int threads) {
    constexpr size_t BATCH_BYTES = 256 << 10;
    std::mutex mutex;
    size_t next = 0;
    const auto work = [&] {
        while (true) {
            std::unique_lock lock(mutex);
            size_t at = next, bytes = 0;
            while (next < texts.size() && bytes < BATCH_BYTES) { bytes += texts[next++].size(); }
            const size_t end = next;
            lock.unlock();
            if (at == end) { return; }
            for (; at < end; at++) { tokenizer.encode(texts[at]); }
        }
    };
    std::vector<std::future<void>> running;
    for (int t = 0; t < threads; t++) { running.push_back(start_thread(work)); }
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (argc < 4) { usage_error("bench_parse TOKENIZER THREADS INPUT..."); }
        const auto tokenizer = load_tokenizer(argv[1]);
        std::vector<std::string> texts;
        for (int i = 3; i < argc; i++) {
            PipelineOptions options;
            options.threads = atoi(argv[2]);
            options.inputs = {argv[i]};
            if (texts.empty()) {  // the inputs after the first hold the same texts
                read_all(options, nullptr, [&](const Work& work) { texts.push_back(work.text); });
                tokenize_all(texts, *tokenizer, options.threads);  // fills the caches
            }
            size_t documents = 0;
            const Cost alone = cost_of([&] { tokenize_all(texts, *tokenizer, options.threads); });
            const Cost all = cost_of([&] { read_all(options, tokenizer.get(), [&](const Work& work) { documents += work.kept; }); });
            check(documents == texts.size(), "'%s' has %zu documents, '%s' %zu", argv[i], documents, argv[3], texts.size());
            printf("%s %.4f %.4f\n", argv[i], all.wall / alone.wall - 1, all.cpu / alone.cpu - 1);
        }
        return EXIT_OK;
    } catch (const Error& e) {
        fprintf(stderr, "bench_parse: %s\n", e.what());
        return e.exit_code;
    }
}
