// global_norm.cuh: sums of squares in double, over pieces of fixed size added in order: the same bits on every rank and for
// any number of threads, which is what clipping needs.
//
//   sum of a piece's squares     sum of (a[n,c] - scale b[n,c])^2, n < N, c < cols
#pragma once

#include "common.cuh"

#ifndef LLMC_KERNELS
namespace cpu {

ALWAYS_INLINE void add_squares(vdouble& sum, vfloat v) {  // by reference: how a wide vector is returned depends on the target
    const vdouble d = __builtin_convertvector(v, vdouble);
    sum += d * d;
}
ALWAYS_INLINE double sum_in_order(const vdouble& v) {
    double sum = 0.0;
    for (int l = 0; l < VL; l++) { sum += v[l]; }
    return sum;
}
inline double sum_in_order(const std::vector<double>& parts) {
    double sum = 0.0;
    for (double part : parts) { sum += part; }
    return sum;
}

std::vector<double> sums_of_squares(const std::vector<GradientPiece>& pieces, Run& run) {
    const i64 grain = 65536;
    std::vector<double> sums;
    for (const GradientPiece& piece : pieces) {
        std::vector<double> parts(ceil_div(piece.count, grain));
        piece.begin.visit<bf16>([&](const auto* data) {
            parallel_pieces(piece.count, grain, run, [&](i64 begin, i64 n) {
                vdouble sum{};
                vector_loop(n, [&](i64 i, auto lanes) { add_squares(sum, load(ahead(data + begin + i), lanes)); });
                parts[begin / grain] = sum_in_order(sum);
            });
        });
        sums.push_back(sum_in_order(parts));
    }
    return sums;
}

template <typename X>
double sum_of_squared_differences(const X* a, const float* b, float scale, i64 ld, i64 N, i64 cols, Run& run) {
    std::vector<double> parts(N);
    parallel_rows(N, cols, run, [&](i64 r) {
        vdouble sum{};
        vector_loop(cols, [&](i64 i, auto lanes) { add_squares(sum, load(a + r * ld + i, lanes) - scale * load(b + r * ld + i, lanes)); });
        parts[r] = sum_in_order(sum);
    });
    return sum_in_order(parts);
}

}  // namespace cpu

#else
namespace gpu {

constexpr i64 BLOCK_SQUARES = 65536;  // elements summed by one block

// parts[block] = its piece's sum.
template <typename X, int W>
__global__ void __launch_bounds__(THREADS) sum_of_squares_kernel(double* parts, const X* __restrict__ data, i64 count) {
    __shared__ double warps[THREADS / 32];
    const i64 begin = blockIdx.x * BLOCK_SQUARES, left = count - begin;
    double sum = 0.0;
    row_loop<W>(data + begin, left < BLOCK_SQUARES ? left : BLOCK_SQUARES, [&](i64 i, auto width) {
        const Floats<width> values = load<width>(data + begin + i);
        for (int j = 0; j < width; j++) { sum += (double)values[j] * values[j]; }
    });
    sum = block_sum(sum, warps);
    if (threadIdx.x == 0) { parts[blockIdx.x] = sum; }
}
// A row a block.
template <typename X>
__global__ void __launch_bounds__(THREADS)
    sum_of_squared_differences_kernel(double* parts, const X* __restrict__ a, const float* __restrict__ b, float scale, i64 ld, i64 cols) {
    __shared__ double warps[THREADS / 32];
    double sum = 0.0;
    for (i64 c = threadIdx.x; c < cols; c += blockDim.x) {
        const double difference = (float)a[blockIdx.x * ld + c] - scale * b[blockIdx.x * ld + c];
        sum += difference * difference;
    }
    sum = block_sum(sum, warps);
    if (threadIdx.x == 0) { parts[blockIdx.x] = sum; }
}
// total = the sum of the parts, by one block.
__global__ void __launch_bounds__(THREADS) sum_parts_kernel(double* total, const double* __restrict__ parts, i64 count) {
    __shared__ double warps[THREADS / 32];
    double sum = 0.0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) { sum += parts[i]; }
    sum = block_sum(sum, warps);
    if (threadIdx.x == 0) { *total = sum; }
}

// The host waits once, for the sums of all pieces.
std::vector<double> sums_of_squares(const std::vector<GradientPiece>& pieces, Run& run) {
    i64 all = 0;
    for (const GradientPiece& piece : pieces) { all += ceil_div(piece.count, BLOCK_SQUARES); }
    std::vector<double> sums(pieces.size());
    double *parts = run.workspace.get<double>(all + (i64)sums.size()), *const totals = parts + all;
    for (size_t i = 0; i < sums.size(); i++) {
        const i64 n = ceil_div(pieces[i].count, BLOCK_SQUARES);
        pieces[i].begin.visit<bf16>([&]<typename X>(const X* data) {
            launch(sum_of_squares_kernel<X, widest<X> >, {blocks(n), THREADS}, run, parts, data, pieces[i].count);
        });
        launch(sum_parts_kernel, {1, row_threads(n, 1)}, run, totals + i, parts, n);
        parts += n;
    }
    copy_to_host(sums.data(), totals, (i64)sums.size(), run);
    return sums;
}
template <typename X>
double sum_of_squared_differences(const X* a, const float* b, float scale, i64 ld, i64 N, i64 cols, Run& run) {
    double* parts = run.workspace.get<double>(N + 1);
    launch(sum_of_squared_differences_kernel<X>, {blocks(N), row_threads(cols, 1)}, run, parts, a, b, scale, ld, cols);
    launch(sum_parts_kernel, {1, row_threads(N, 1)}, run, parts + N, parts, N);
    double total = 0.0;
    copy_to_host(&total, parts + N, 1, run);
    return total;
}

}  // namespace gpu
#endif
