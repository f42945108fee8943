// bench_limit: what the machine gives at best: the vendor library's rate at each product of a step, and the memory's.
//
//   build/bench_limit THREADS < PRODUCTS      a line each: forward, dgrad or wgrad, and N K OC, as matmul_... has them (ops.h); fp32
//
// One call of dnnl_sgemm on the whole product, with the library's own threads; the best of some. Prints JSON Lines: {"product", "flops_per_second"} in the
// order of the input, then {"triad", "read"}: bytes a second of a[i] = b[i] + 3 c[i] over three arrays, and of a sum over one, on all threads.
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>

#include "llmc/base.h"

namespace {

template <typename Work>
double best_seconds(const Work& work) {
    double best = 1e30, spent = 0;
    for (int times = 0; times < 3 || (spent < 0.3 && times < 50); times++) {
        const auto begin = std::chrono::steady_clock::now();
        work();
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        best = std::min(best, seconds);
        spent += seconds;
    }
    return best;
}

struct Matrices {
    std::vector<float> a, b, c;
    void fit(i64 a_count, i64 b_count, i64 c_count) {
        a.resize(std::max<size_t>(a.size(), a_count), 0.5f), b.resize(std::max<size_t>(b.size(), b_count), 0.5f), c.resize(std::max<size_t>(c.size(), c_count));
    }
};

double product_rate(const std::string& form, i64 N, i64 K, i64 OC, Matrices& m) {
    m.fit(N * std::max(K, OC), std::max(N, OC) * K, std::max({N * OC, N * K, OC * K}));
    float *a = m.a.data(), *b = m.b.data(), *c = m.c.data();
    const double seconds = best_seconds([&] {
        if (form == "forward") { dnnl_sgemm('N', 'T', N, OC, K, 1.0f, a, K, b, K, 0.0f, c, OC); }   // in (N,K), weight (OC,K)
        if (form == "dgrad") { dnnl_sgemm('N', 'N', N, K, OC, 1.0f, a, OC, b, K, 0.0f, c, K); }     // dout (N,OC), weight
        if (form == "wgrad") { dnnl_sgemm('T', 'N', OC, K, N, 1.0f, a, OC, b, K, 0.0f, c, K); }     // dout, in
    });
    return 2.0 * (double)N * (double)K * (double)OC / seconds;
}

// For each thread work(its part of COUNT).
constexpr i64 COUNT = 1 << 25;
template <typename Work>
double memory_rate(int arrays, const Work& work) {
    return arrays * 4.0 * COUNT / best_seconds([&] {
#pragma omp parallel
               { work(split_range(COUNT, omp_get_num_threads(), omp_get_thread_num())); }
           });
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (argc != 2) { usage_error("bench_limit THREADS < PRODUCTS"); }
        omp_set_num_threads(atoi(argv[1]));
        Matrices matrices;
        for (std::string line; std::getline(std::cin, line);) {
            std::istringstream words(line);
            std::string form;
            i64 N = 0, K = 0, OC = 0;
            check((words >> form >> N >> K >> OC) && (form == "forward" || form == "dgrad" || form == "wgrad"), "bench_limit: '%s': wanted forward, dgrad or wgrad, and N K OC", line.c_str());
            printf("{\"product\": \"%s\", \"flops_per_second\": %.6g}\n", line.c_str(), product_rate(form, N, K, OC, matrices));
        }
        std::unique_ptr<float[]> a(new float[COUNT]), b(new float[COUNT]), c(new float[COUNT]);
        const auto fill = [&](Range part) { std::fill(a.get() + part.begin, a.get() + part.end, 0.0f), std::fill(b.get() + part.begin, b.get() + part.end, 1.0f), std::fill(c.get() + part.begin, c.get() + part.end, 2.0f); };
        memory_rate(3, fill);  // each thread touches its own part first
        const double triad = memory_rate(3, [&](Range part) {
            for (i64 i = part.begin; i < part.end; i++) { a[i] = b[i] + 3.0f * c[i]; }
        });
        volatile float sink = 0;
        const double read = memory_rate(1, [&](Range part) {
            constexpr int LANES = 64;  // sums side by side, so that no addition waits for another
            float sums[LANES] = {};
            for (i64 i = part.begin; i + LANES <= part.end; i += LANES) {
                for (int j = 0; j < LANES; j++) { sums[j] += b[i + j]; }
            }
            sink = sums[0];
        });
        printf("{\"triad\": %.6g, \"read\": %.6g}\n", triad, read);
        return EXIT_OK;
    } catch (const Error& e) {
        fprintf(stderr, "bench_limit: %s\n", e.what());
        return e.exit_code;
    }
}
