// residual_norm.cu: residual sum and RMSNorm, from the first idea to 128 bits at a time. Bound by memory: a and b are read, x and n written,
// 4 N C elements, so what counts is how many bytes move, and whether they move in whole lines.
#include "lab.h"
#include "llmc/ops/kernel.cuh"

namespace lab {
using namespace gpu;

// ---- 1. A thread a row. Neighbouring threads are C elements apart: each 32-byte sector is fetched for one element of it, and again for the
// next unless a cache still has it. The row is read twice.
template <typename X>
__global__ void thread_a_row(X* x, X* n, float* rstd, const X* a, const X* b, const X* weight, float eps, i64 N, i64 C) {
    const i64 r = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= N) { return; }
    float sum = 0.0f;
    for (i64 c = 0; c < C; c++) {
        const X value = (X)((float)a[r * C + c] + (float)b[r * C + c]);
        x[r * C + c] = value;
        sum += (float)value * (float)value;
    }
    const float row_rstd = 1.0f / sqrtf(sum / C + eps);
    for (i64 c = 0; c < C; c++) { n[r * C + c] = (X)((float)x[r * C + c] * row_rstd * (float)weight[c]); }
    rstd[r] = row_rstd;
}
template <typename X>
void run_thread_a_row(X* x, X* n, float* rstd, const X* a, const X* b, const X* weight, float eps, i64 N, i64 C, Run& run) {
    constexpr int BLOCK = 64;
    launch(thread_a_row<X>, {blocks(ceil_div(N, BLOCK)), BLOCK}, run, x, n, rstd, a, b, weight, eps, N, C);
}

// ---- 2. A warp a row. Lanes read neighbours: whole lines, each once. x is still read back for n, through the cache.
constexpr int ROWS = 4;  // warps, and rows, of a block
template <typename X>
__global__ void warp_a_row(X* x, X* n, float* rstd, const X* a, const X* b, const X* weight, float eps, i64 N, i64 C) {
    const i64 r = (i64)blockIdx.x * ROWS + threadIdx.y;
    if (r >= N) { return; }  // a whole warp
    float sum = 0.0f;
    for (i64 c = threadIdx.x; c < C; c += 32) {
        const X value = (X)((float)a[r * C + c] + (float)b[r * C + c]);
        x[r * C + c] = value;
        sum += (float)value * (float)value;
    }
    const float row_rstd = 1.0f / sqrtf(warp_sum(sum) / C + eps);
    for (i64 c = threadIdx.x; c < C; c += 32) { n[r * C + c] = (X)((float)x[r * C + c] * row_rstd * (float)weight[c]); }
    if (threadIdx.x == 0) { rstd[r] = row_rstd; }
}
template <typename X>
void run_warp_a_row(X* x, X* n, float* rstd, const X* a, const X* b, const X* weight, float eps, i64 N, i64 C, Run& run) {
    launch(warp_a_row<X>, {blocks(ceil_div(N, ROWS)), dim3(32, ROWS)}, run, x, n, rstd, a, b, weight, eps, N, C);
}

// ---- 3. 128 bits a lane, the row kept in shared memory: an eighth of the instructions in bf16, enough bytes in flight, no line twice. Each
// lane reads back only what it wrote, so no barrier. W = 1 where rows are not aligned, so that any C works.
template <typename X, int W>
__global__ void packs(X* x, X* __restrict__ n, float* __restrict__ rstd, const X* __restrict__ a, const X* __restrict__ b,
                      const X* __restrict__ weight, float eps, i64 N, i64 C) {
    const i64 r = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= N) { return; }
    X* row = dynamic_shared<X>() + threadIdx.y * round_up(C, W);
    float sum = 0.0f;
    for (i64 c = threadIdx.x * W; c < C; c += 32 * W) {
        Floats<W> value = load<W>(a + r * C + c);
        value += load<W>(b + r * C + c);
        store(row + c, value);
        store(x + r * C + c, value);
        value = load<W>(row + c);  // as rounded
        for (int j = 0; j < W; j++) { sum += value[j] * value[j]; }
    }
    const float row_rstd = 1.0f / sqrtf(warp_sum(sum) / C + eps);
    for (i64 c = threadIdx.x * W; c < C; c += 32 * W) {
        Floats<W> value = load<W>(row + c);
        const Floats<W> w = load<W>(weight + c);
        for (int j = 0; j < W; j++) { value[j] *= row_rstd * w[j]; }
        store(n + r * C + c, value);
    }
    if (threadIdx.x == 0) { rstd[r] = row_rstd; }
}
template <typename X>
void run_packs(X* x, X* n, float* rstd, const X* a, const X* b, const X* weight, float eps, i64 N, i64 C, Run& run) {
    const int W = widest<X>;
    const bool wide = rows_aligned(W, x, C) && rows_aligned(W, n, C) && rows_aligned(W, a, C) && rows_aligned(W, b, C) &&
                      rows_aligned(W, weight, 0);
    with_width<X>(wide, [&](auto width) {
        const i64 row_bytes = round_up(C, width) * sizeof(X), rows = std::clamp<i64>((48 << 10) / row_bytes, 1, ROWS);
        launch(packs<X, width>, {blocks(ceil_div(N, rows)), dim3(32, (unsigned)rows), (size_t)(rows * row_bytes)}, run, x, n, rstd, a, b,
               weight, eps, N, C);
    });
}

template <typename X>
std::vector<Variant<ResidualNorm<X>>> residual_norm_variants() {
    return {{"1 a thread a row", run_thread_a_row<X>}, {"2 a warp a row", run_warp_a_row<X>}, {"3 packs of 128 bits", run_packs<X>}};
}
template std::vector<Variant<ResidualNorm<float>>> residual_norm_variants();
template std::vector<Variant<ResidualNorm<bf16>>> residual_norm_variants();

}  // namespace lab
