// bench_limit: what the machine gives at best: the vendor library's rate at each product of a step, and the memory's.
//
//   build/bench_limit THREADS fp32|bf16 [BYTES] < PRODUCTS      a line each: forward, dgrad or wgrad, and N K OC, as matmul_... has them (ops.h)
//
// One call of the library on the whole product, with its own threads: dnnl_sgemm in fp32, in bf16 its matmul, the weight as it lies in memory or packed
// beforehand in the library's own layout, whichever is faster. The best of some calls. Prints JSON Lines: {"product", "flops_per_second"} in the order of
// the input, then {"triad"}: bytes a second of a[i] = b[i] + 3 c[i] over three arrays of 256 MiB, on all threads; where BYTES are given, "read" too: of a sum over so many.
// Of reading it is the median of a second, because what it stands beside is a mean: of the time that some tens of tokens took.
// A large L3 keeps part of what is read again and again: 128 MiB were read at 53 GB/s where 1 GiB was at 28 (Xeon, 300 MiB). So the rate of reading weights is asked for at their size.
#include <omp.h>
#include <oneapi/dnnl/dnnl.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <numeric>
#include <sstream>

#include "llmc/device.h"

namespace {

// What calls took, the fastest first.
template <typename Work>
std::vector<double> seconds_of_calls(const Work& work, double enough, size_t most) {
    std::vector<double> seconds;
    for (double spent = 0; seconds.size() < 3 || (spent < enough && seconds.size() < most); spent += seconds.back()) {
        const auto begin = std::chrono::steady_clock::now();
        work();
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds;
}
template <typename Work>
double best_seconds(const Work& work) {
    return seconds_of_calls(work, 0.3, 50).front();
}
template <typename Work>
double median_seconds(const Work& work) {
    const auto seconds = seconds_of_calls(work, 1.0, 1000);
    return seconds[seconds.size() / 2];
}

// From -1 to 1: zeros and constants are multiplied faster than the numbers of a model are.
template <typename X>
void fill_randomly(X* values, i64 count) {
    uint32_t state = 1;
    for (i64 i = 0; i < count; i++) { values[i] = X((float)(int32_t)(state = 1664525 * state + 1013904223) * 0x1p-31f); }
}

// forward: in (N,K) times the transposed weight (OC,K). dgrad: dout (N,OC) times the weight. wgrad: the transposed dout times in.
struct Product {
    std::string form;
    i64 rows, cols, depth;
    bool a_transposed, b_transposed;

    Product(const std::string& line) {
        std::istringstream words(line);
        i64 N = 0, K = 0, OC = 0;
        check((words >> form >> N >> K >> OC) && (form == "forward" || form == "dgrad" || form == "wgrad"), "'%s': wanted forward, dgrad or wgrad, and N K OC", line.c_str());
        rows = form == "wgrad" ? OC : N, cols = form == "forward" ? OC : K, depth = form == "forward" ? K : form == "dgrad" ? OC : N;
        a_transposed = form == "wgrad", b_transposed = form == "forward";
    }
    double flops() const { return 2.0 * (double)rows * (double)cols * (double)depth; }
};

double seconds_fp32(const Product& p) {
    std::vector<float> a(p.rows * p.depth), b(p.depth * p.cols), c(p.rows * p.cols);
    fill_randomly(a.data(), p.rows * p.depth), fill_randomly(b.data(), p.depth * p.cols);
    return best_seconds([&] {
        dnnl_sgemm(p.a_transposed ? 'T' : 'N', p.b_transposed ? 'T' : 'N', p.rows, p.cols, p.depth, 1.0f, a.data(), p.a_transposed ? p.rows : p.depth, b.data(), p.b_transposed ? p.depth : p.cols,
                   0.0f, c.data(), p.cols);
    });
}

// A weight gradient is a sum in fp32; what is on its right is no weight, and is not packed beforehand.
double seconds_bf16(const Product& p) {
    using dnnl::memory;
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    const auto plain = [](i64 rows, i64 cols, bool transposed, memory::data_type type) { return memory::desc({rows, cols}, type, transposed ? memory::dims{1, rows} : memory::dims{cols, 1}); };
    const auto a = plain(p.rows, p.depth, p.a_transposed, memory::data_type::bf16), b = plain(p.depth, p.cols, p.b_transposed, memory::data_type::bf16);
    const auto c = plain(p.rows, p.cols, false, p.form == "wgrad" ? memory::data_type::f32 : memory::data_type::bf16);
    const auto seconds = [&](const memory::desc& weight) {
#if DNNL_VERSION_MAJOR >= 3
        const dnnl::matmul::primitive_desc desc(engine, a, weight, c);
#else
        const dnnl::matmul::primitive_desc desc({a, weight, c}, engine);
#endif
        memory left(a, engine), unpacked(b, engine), right(desc.weights_desc(), engine), out(c, engine);
        fill_randomly((bf16*)left.get_data_handle(), p.rows * p.depth), fill_randomly((bf16*)unpacked.get_data_handle(), p.depth * p.cols);
        dnnl::reorder(unpacked, right).execute(stream, unpacked, right), stream.wait();
        const dnnl::matmul product(desc);
        return best_seconds([&] { product.execute(stream, {{DNNL_ARG_SRC, left}, {DNNL_ARG_WEIGHTS, right}, {DNNL_ARG_DST, out}}), stream.wait(); });
    };
    const memory::desc packed({p.depth, p.cols}, memory::data_type::bf16, memory::format_tag::any);
    return p.form == "wgrad" ? seconds(b) : std::min(seconds(b), seconds(packed));
}

// For each thread work(its part of `count` elements).
template <typename Work>
void in_parallel(i64 count, const Work& work) {
#pragma omp parallel
    { work(split_range(count, omp_get_num_threads(), omp_get_thread_num())); }
}

volatile float sink;

// A sum over one array; AHEAD: what comes 8 KiB later is fetched into L2, 2 KiB later into L1, which some processors do not do by themselves.
template <bool AHEAD>
double read_rate(const float* array, i64 count) {
    const auto sum = [&](Range part) {
        constexpr int LANES = 64, LINE = 16;  // sums side by side, so that no addition waits for another
        float sums[LANES] = {};
        for (i64 i = part.begin; i + LANES <= part.end; i += LANES) {
            for (int j = 0; AHEAD && j < LANES; j += LINE) { __builtin_prefetch(array + i + j + 2048, 0, 2), __builtin_prefetch(array + i + j + 512, 0, 3); }
            for (int j = 0; j < LANES; j++) { sums[j] += array[i + j]; }
        }
        sink = std::accumulate(sums, sums + LANES, 0.0f);  // all of them are wanted: else the compiler reads a part
    };
    return 4.0 * (double)count / median_seconds([&] { in_parallel(count, sum); });
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const std::string dtype = argc == 3 || argc == 4 ? argv[2] : "";
        if (dtype != "fp32" && dtype != "bf16") { usage_error("bench_limit THREADS fp32|bf16 [BYTES] < PRODUCTS"); }
        omp_set_num_threads(atoi(argv[1]));
        for (std::string line; std::getline(std::cin, line);) {
            const Product product(line);
            printf("{\"product\": \"%s\", \"flops_per_second\": %.6g}\n", line.c_str(), product.flops() / (dtype == "fp32" ? seconds_fp32(product) : seconds_bf16(product)));
        }
        constexpr i64 COUNT = 1 << 26;
        const i64 read_count = argc == 4 ? atoll(argv[3]) / 4 : 0;
        const auto array_of = [](i64 count, float value) {  // huge pages, as the trainer's; each thread touches its own part first
            float* array = (float*)device_alloc(4 * count, "an array");
            in_parallel(count, [&](Range part) { std::fill(array + part.begin, array + part.end, value); });
            return array;
        };
        float *const a = array_of(COUNT, 0.0f), *const b = array_of(std::max(COUNT, read_count), 1.0f), *const c = array_of(COUNT, 2.0f);
        const double triad = 3 * 4.0 * COUNT / best_seconds([&] {
            in_parallel(COUNT, [&](Range part) {
                for (i64 i = part.begin; i < part.end; i++) { a[i] = b[i] + 3.0f * c[i]; }
            });
        });
        const std::string read = read_count ? format(", \"read\": %.6g", std::max(read_rate<false>(b, read_count), read_rate<true>(b, read_count))) : "";
        printf("{\"triad\": %.6g%s}\n", triad, read.c_str());
        return EXIT_OK;
    } catch (const Error& e) {
        fprintf(stderr, "bench_limit: %s\n", e.what());
        return e.exit_code;
    }
}
