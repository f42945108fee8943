// bench_parse.cpp: reading and parsing alone, without a tokenizer: what dev/bench/bench_tokenize.py sets beside the whole.
//
//   build/bench_parse THREADS INPUT...      prints seconds, documents, bytes of text
#include <chrono>

#include "data/pipeline.h"

int main(int argc, char** argv) {
    try {
        if (argc < 3) { usage_error("bench_parse THREADS INPUT..."); }
        PipelineOptions options;
        options.threads = atoi(argv[1]);
        options.inputs.assign(argv + 2, argv + argc);
        const auto start = std::chrono::steady_clock::now();
        const std::vector<InputFile> files = list_inputs(options.inputs, options.read.input_format);
        const Filter filter(options.filter);
        Pipeline pipeline(options, files, filter, nullptr);
        i64 documents = 0, bytes = 0;
        while (const Work* work = pipeline.next()) {
            documents++;
            bytes += work->text_bytes;
        }
        printf("%.3f %lld %lld\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), (long long)documents,
               (long long)bytes);
        return EXIT_OK;
    } catch (const Error& e) {
        fprintf(stderr, "bench_parse: %s\n", e.what());
        return e.exit_code;
    }
}
