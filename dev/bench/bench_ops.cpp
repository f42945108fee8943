// bench_ops: every op at the 130M model's sizes (one layer, B = 4, S = 1024), against peaks measured in the same run.
//
//   make build/bench_ops && build/bench_ops [threads] [fp32|bf16] [name]
//
// Percentages are of the multiply-add peak for what computes (GFLOP/s) and of the triad for what moves memory (GB/s,
// counting each operand once).
#include <time.h>

#include <cstdlib>

#include "llmc/ops.h"
#include "llmc/simd.h"

using namespace BACKEND;

namespace {

constexpr i64 B = 4, S = 1024, N = B * S, C = 768, NH = 16, KVH = 16, HS = 48, F = 2048, V = 32000, CHUNK = 1024;

// Wall time; with one thread its CPU time, so that whoever shares the machine takes less part in the result.
clockid_t watch = CLOCK_MONOTONIC;
double now() {
    timespec t;
    clock_gettime(watch, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

template <typename Op>
double seconds(const Op& op) {
    const double start = now();
    op();
    return now() - start;
}

struct Bench {
    static constexpr i64 TRIAD = 1 << 23;
    Run run;
    const char* filter;
    Scratch<float> memory;
    float* data = memory.get(3 * TRIAD);

    Bench(int threads, const char* filter) : run(threads, 2000), filter(filter) {
        std::fill(data, data + 3 * TRIAD, 1e-3f);
        double gflops = 0.0, gbytes = 0.0;
        for (int rep = 0; rep < 20; rep++) {
            gflops = std::max(gflops, multiply_add_rate());
            gbytes = std::max(gbytes, triad_rate());
        }
        printf("%d threads: multiply-add peak %.0f GFLOP/s, triad %.1f GB/s\n\n", threads, gflops * 1e-9, gbytes * 1e-9);
        printf("%-44s %9s %9s %7s\n", "op", "ms", "rate", "of peak");
    }
    double multiply_add_rate() {  // a tile that stays in L1
        const i64 items = 16, times = 50;
        return items * times * 2.0 * TILE_ROWS * TILE_COLS * 64 / seconds([&] {
                   run.parallel(items, [&](i64 item) {
                       float* c = data + item * 65536;
                       for (i64 i = 0; i < times; i++) {
                           tile_product<TILE_ROWS, TILE_VECTORS>(c, TILE_COLS, Strided<float>{c + 4096, 1, 8}, c + 8192, TILE_COLS, 64, false);
                       }
                   });
               });
    }
    double triad_rate() {
        const i64 items = 32, count = TRIAD / items;
        return 3.0 * 4 * TRIAD / seconds([&] {
                   run.parallel(items, [&](i64 item) {
                       float *a = data + item * count, *b = a + TRIAD, *c = b + TRIAD;
                       vector_loop(count, [&](i64 i, auto lanes) { store(a + i, load(b + i, lanes) + 3.0f * load(c + i, lanes), lanes); });
                   });
               });
    }

    // The best time, and the median share of a peak that is measured beside every repetition: the machine may be shared.
    template <typename Op>
    void line(const char* name, double amount, bool flop, const Op& op) {
        if (filter && !strstr(name, filter)) { return; }
        std::vector<double> shares;
        double best = 1e30, spent = 0.0;
        for (int rep = 0; rep < 3 || (spent < 0.4 && rep < 40); rep++) {
            const double before = flop ? multiply_add_rate() : triad_rate(), time = seconds(op),
                         after = flop ? multiply_add_rate() : triad_rate();
            shares.push_back(amount / time / ((before + after) / 2));
            best = std::min(best, time);
            spent += time;
        }
        std::nth_element(shares.begin(), shares.begin() + shares.size() / 2, shares.end());
        printf("%-44s %9.3f %6.1f %s %6.0f%%\n", name, best * 1e3, amount / best * 1e-9, flop ? "GF" : "GB",
               100.0 * shares[shares.size() / 2]);
        fflush(stdout);
    }
    template <typename Op>
    void compute(const char* name, double flop, const Op& op) {
        line(name, flop, true, op);
    }
    template <typename Op>
    void move(const char* name, double bytes, const Op& op) {
        line(name, bytes, false, op);
    }
};

template <typename X>
void bench(Bench& bench) {
    const double x = sizeof(X);
    Arena arena("bench");
    X *in, *out, *weight, *other;
    float *grad, *state, *stats;
    for (X** pointer : {&in, &out, &other}) { arena.add(pointer, std::max(CHUNK * V, N * 2 * F)); }
    arena.add(&weight, V * C);
    arena.add(&grad, V * C);
    arena.add(&state, 3 * V * C);
    arena.add(&stats, B * NH * S);
    arena.allocate();
    for (i64 i = 0; i < std::max(CHUNK * V, N * 2 * F); i++) {
        const float value = (float)(i * 2654435761u % 1000) * 1e-3f - 0.5f;
        in[i] = other[i] = value;
        if (i < V * C) { weight[i] = value; }
    }
    std::vector<int> tokens(N);
    for (i64 n = 0; n < N; n++) { tokens[n] = (int)(n * 7919 % V); }
    Run& run = bench.run;

    struct {
        const char* name;
        i64 n, k, oc;
    } products[] = {{"qkv", N, C, 3 * C},
                    {"attention out", N, C, C},
                    {"gate, up", N, C, 2 * F},
                    {"down", N, F, C},
                    {"out, half the channels", N, C, C / 2},
                    {"head, 1024 tokens", CHUNK, C, V},
                    {"head, 256 tokens", 256, C, V}};
    for (const auto& [name, n, k, oc] : products) {
        const double flop = 2.0 * n * k * oc;
        bench.compute(format("matmul forward %s", name).c_str(), flop,
                      [&] { matmul_forward(out, oc, in, weight, (const X*)nullptr, n, k, oc, 1.0f, run); });
        bench.compute(format("matmul dgrad %s", name).c_str(), flop,
                      [&] { matmul_dgrad(out, in, oc, weight, n, k, oc, 1.0f, false, run); });
        bench.compute(format("matmul wgrad %s", name).c_str(), flop,
                      [&] { matmul_wgrad(grad, nullptr, in, oc, other, n, k, oc, 1.0f, GradMode::ADD, run); });
    }
    for (i64 rows : {1, 4, 16}) {
        bench.move(format("matmul forward qkv, %lld rows (weight bytes)", (long long)rows).c_str(), 3.0 * C * C * x,
                   [&] { matmul_forward(out, 3 * C, in, weight, (const X*)nullptr, rows, C, 3 * C, 1.0f, run); });
    }
    bench.move("matmul forward head, 1 row (weight bytes)", (double)V * C * x,
               [&] { matmul_forward(out, V, in, weight, (const X*)nullptr, 1, C, V, 1.0f, run); });
    bench.compute("matmul forward 20 x 20 x 20 (overhead)", 16000,
                  [&] { matmul_forward(out, 20, in, weight, (const X*)nullptr, 20, 20, 20, 1.0f, run); });

    const double pairs = B * NH * S * (S + 1) / 2.0;  // query-key pairs that count
    X *q = in, *k = in + N * C, *v = in + 2 * N * C, *att = other, *d_att = other + N * C, *dq = out, *dk = out + N * C,
      *dv = out + 2 * N * C;
    bench.compute("attention forward", 4 * HS * pairs, [&] { attention_forward(att, stats, q, k, v, 0, S, B, S, NH, KVH, HS, run); });
    bench.compute("attention backward", 10 * HS * pairs,
                  [&] { attention_backward(dq, dk, dv, d_att, att, stats, q, k, v, B, S, NH, KVH, HS, run); });
    bench.compute("attention forward, 2 of 16 heads, B = 1", 4 * HS * pairs / B / 8,
                  [&] { attention_forward(att, stats, q, k, v, 0, S, 1, S, 2, 2, HS, run); });
    bench.compute("attention backward, 2 of 16 heads, B = 1", 10 * HS * pairs / B / 8,
                  [&] { attention_backward(dq, dk, dv, d_att, att, stats, q, k, v, 1, S, 2, 2, HS, run); });
    const int last = (int)S - 1;
    bench.move("attention decode, 1024 keys, B = 1", 2.0 * NH * S * HS * x,
               [&] { attention_forward(att, stats, q, k, v, &last, S, 1, 1, NH, KVH, HS, run); });

    const NormKind rms{true, 1e-5f};
    const Blocks<X> blocks{other, C / 2, dtype_of<X>, other + N * C, C / 2, C / 2};
    bench.move("residual norm forward", 4 * N * C * x, [&] {
        residual_norm_forward(out, out + N * C, nullptr, stats, in, &blocks, (const X*)nullptr, weight, (const X*)nullptr, rms, N, C, run);
    });
    bench.move("norm backward", 4.5 * N * C * x, [&] {
        norm_backward(out, true, other, C / 2, dtype_of<X>, C / 2, grad, nullptr, in, in + N * C, nullptr, stats, weight, rms,
                      GradMode::ADD, N, C, run);
    });
    bench.move("rope split forward", 6 * N * C * x,
               [&] { rope_split_forward(dq, dk, dv, in, state, state, 0, S, B, S, NH, KVH, HS, run); });
    bench.move("rope split backward", 6 * N * C * x, [&] { rope_split_backward(out, q, k, v, state, state, B, S, NH, KVH, HS, run); });
    bench.move("swiglu forward", 3 * N * F * x, [&] { swiglu_forward(out, in, N, F, run); });
    bench.move("swiglu backward", 5 * N * F * x, [&] { swiglu_backward(out, other, in, N, F, run); });
    bench.move("gelu forward (4C)", 2 * N * 4 * C * x, [&] { gelu_forward(out, in, N, 4 * C, run); });
    bench.move("gelu backward (4C)", 3 * N * 4 * C * x, [&] { gelu_backward(out, other, in, N, 4 * C, run); });
    bench.move("classifier stats, 1024 tokens", CHUNK * V * x, [&] { classifier_stats(stats, in, tokens.data(), {0, V}, CHUNK, run); });
    std::fill(stats, stats + N, 11.0f);
    bench.move("classifier backward, 1024 tokens", 2 * CHUNK * V * x, [&] {
        classifier_backward(in, stats, tokens.data(), {0, V}, 1.0f, CHUNK, run);
    });
    bench.move("embedding forward", 2 * N * C * x, [&] {
        embedding_forward(out, tokens.data(), weight, (const X*)nullptr, {0, V}, B, S, C, 0, run);
    });
    bench.move("embedding backward (dx and all of dwte)", (N + V) * C * 4.0, [&] {
        embedding_backward(grad, state, tokens.data(), {0, V}, N, C, GradMode::WRITE, run);
    });
    bench.move("bias backward, qkv", N * 3 * C * x, [&] { bias_backward(grad, in, N, 3 * C, GradMode::ADD, run); });
    const AdamW hyper{1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.1f, 0.05f, 1.0f};
    uint16_t* low = sizeof(X) == 4 ? nullptr : (uint16_t*)state;
    bench.move("adamw, 24.6M parameters", V * C * 28.0,
               [&] { adamw_update(weight, low, state + V * C, state + 2 * V * C, grad, V * C, hyper, run); });
    bench.move("sum of squares", V * C * 4.0, [&] { sums_of_squares({{grad, V * C}}, run); });
}

}  // namespace

int main(int argc, char** argv) {
    const int threads = argc > 1 ? atoi(argv[1]) : (int)std::thread::hardware_concurrency();
    if (threads == 1) { watch = CLOCK_THREAD_CPUTIME_ID; }
    Bench peaks(threads, argc > 3 ? argv[3] : nullptr);
    const bool low = argc > 2 && !strcmp(argv[2], "bf16");
    low ? bench<bf16>(peaks) : bench<float>(peaks);
}
