// bench_limit: what the machine gives at best: the vendor library's rate at each product of a step, and the memory's.
//
//   build/bench_limit THREADS fp32|bf16 < PRODUCTS      a line each: forward, dgrad or wgrad, and N K OC, as matmul_... has them (ops.h)
//
// One call of the library on the whole product, with its own threads: dnnl_sgemm in fp32, in bf16 its matmul, the weight as it lies in memory or packed
// beforehand in the library's own layout, whichever is faster. The best of some calls. Prints JSON Lines: {"product", "flops_per_second"} in the order of
// the input, then {"triad", "read"}: bytes a second of a[i] = b[i] + 3 c[i] over three arrays, and of a sum over one, on all threads.
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

// forward: in (N,K) times the transposed weight (OC,K). dgrad: dout (N,OC) times the weight. wgrad: the transposed dout times in.
struct Product {
    std::string form;
    i64 rows, cols, depth;
    bool a_transposed, b_transposed;

    Product(const std::string& line) {
        std::istringstream words(line);
        i64 N = 0, K = 0, OC = 0;
        check((words >> form >> N >> K >> OC) && (form == "forward" || form == "dgrad" || form == "wgrad"), "bench_limit: '%s': wanted forward, dgrad or wgrad, and N K OC", line.c_str());
        rows = form == "wgrad" ? OC : N, cols = form == "forward" ? OC : K, depth = form == "forward" ? K : form == "dgrad" ? OC : N;
        a_transposed = form == "wgrad", b_transposed = form == "forward";
    }
    double flops() const { return 2.0 * (double)rows * (double)cols * (double)depth; }
};

double seconds_fp32(const Product& p) {
    std::vector<float> a(p.rows * p.depth, 0.5f), b(p.depth * p.cols, 0.5f), c(p.rows * p.cols);
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
        memory left(a, engine), right(desc.weights_desc(), engine), out(c, engine);
        for (const memory& m : {left, right}) { memset(m.get_data_handle(), 0, m.get_desc().get_size()); }
        const dnnl::matmul product(desc);
        return best_seconds([&] { product.execute(stream, {{DNNL_ARG_SRC, left}, {DNNL_ARG_WEIGHTS, right}, {DNNL_ARG_DST, out}}), stream.wait(); });
    };
    const memory::desc packed({p.depth, p.cols}, memory::data_type::bf16, memory::format_tag::any);
    return p.form == "wgrad" ? seconds(b) : std::min(seconds(b), seconds(packed));
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
        const std::string dtype = argc == 3 ? argv[2] : "";
        if (dtype != "fp32" && dtype != "bf16") { usage_error("bench_limit THREADS fp32|bf16 < PRODUCTS"); }
        omp_set_num_threads(atoi(argv[1]));
        for (std::string line; std::getline(std::cin, line);) {
            const Product product(line);
            printf("{\"product\": \"%s\", \"flops_per_second\": %.6g}\n", line.c_str(), product.flops() / (dtype == "fp32" ? seconds_fp32(product) : seconds_bf16(product)));
        }
        float* arrays[3];
        for (float*& array : arrays) { array = (float*)device_alloc(4 * COUNT, "an array"); }  // huge pages, as the trainer's
        const auto [a, b, c] = arrays;
        const auto fill = [&](Range part) { std::fill(a + part.begin, a + part.end, 0.0f), std::fill(b + part.begin, b + part.end, 1.0f), std::fill(c + part.begin, c + part.end, 2.0f); };
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
            sink = std::accumulate(sums, sums + LANES, 0.0f);  // all of them are wanted: else the compiler reads a part
        });
        printf("{\"triad\": %.6g, \"read\": %.6g}\n", triad, read);
        return EXIT_OK;
    } catch (const Error& e) {
        fprintf(stderr, "bench_limit: %s\n", e.what());
        return e.exit_code;
    }
}
