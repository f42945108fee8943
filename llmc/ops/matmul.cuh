// matmul.cuh: the three products of a linear layer, its bias, and casts. Weights are (OC, K), row-major.
//
//   forward  out (N,OC; ld_out)   = alpha * in W^T + bias
//   dgrad    din (N,K)            = or += alpha * dout W
//   wgrad    dweight (OC,K)       = or += alpha * dout^T in         dbias (OC) = or += column sums of dout
//   gelu     u (N,OC) = in W^T + bias, h = gelu(u)
//
// Sums in fp32, rounded once. A product with nothing to sum over (a rank without vocabulary rows) writes zeros.
#pragma once

#include "../gemm.h"
#include "common.cuh"

#ifndef LLMC_KERNELS
namespace cpu {

template <typename X>
void bias_backward(Gradient dbias, const X* dout, i64 N, i64 OC, GradMode mode, Run& run) {
    static thread_local Scratch<float> scratch;
    const RowChunks chunks(N);
    float* partials = scratch.get(chunks.count * OC);
    run.parallel(chunks.count, [&](i64 chunk) {
        float* sum = partials + chunk * OC;
        std::fill(sum, sum + OC, 0.0f);
        for (i64 r = chunks[chunk].begin; r < chunks[chunk].end; r++) { add_to(sum, dout + r * OC, OC); }
    });
    dbias.visit<X>([&](auto* to) { combine_partials(to, partials, chunks.count, OC, OC, mode, run); });
}

template <typename From, typename To>
void cast(To* to, const From* from, i64 count, Run& run) {
    parallel_pieces(count, 65536, run, [&](i64 begin, i64 n) {
        vector_loop(n, [&](i64 i, auto lanes) { store(to + begin + i, load(from + begin + i, lanes), lanes); });
    });
}

}  // namespace cpu

#else
namespace gpu {

// A chunk of rows and 32 W columns a block, W columns a thread, WARPS warps that each take every WARPS-th row.
template <typename X, int W, int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
    column_sums_kernel(float* __restrict__ partials, const X* __restrict__ dout, i64 chunk_rows, i64 N, i64 OC) {
    __shared__ Floats<W> sums[WARPS][32];
    const i64 c = ((i64)blockIdx.x * 32 + threadIdx.x) * W;
    const i64 begin = blockIdx.y * chunk_rows, end = begin + chunk_rows < N ? begin + chunk_rows : N;
    Floats<W> sum = {};
    if (c < OC) {
        for (i64 r = begin + threadIdx.y; r < end; r += WARPS) { sum += load<W>(dout + r * OC + c); }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < OC) {
        for (int warp = 1; warp < WARPS; warp++) { sum += sums[warp][threadIdx.x]; }
        store(partials + blockIdx.y * OC + c, sum);
    }
}
template <typename X>
void bias_backward(Gradient dbias, const X* dout, i64 N, i64 OC, GradMode mode, Run& run) {
    const RowChunks chunks(N);
    float* partials = run.workspace.get<float>(chunks.count * OC);
    const int W = widest<X>, WARPS = 8;
    with_width<X>(rows_aligned(W, dout, OC) && rows_aligned(W, partials, OC), [&](auto width) {
        launch(column_sums_kernel<X, width, WARPS>, {dim3(blocks(ceil_div(OC, 32 * width)), blocks(chunks.count)), dim3(32, WARPS)}, run,
               partials, dout, chunks.size, N, OC);
    });
    dbias.visit<X>([&](auto* to) { combine_partials(to, partials, chunks.count, OC, OC, mode, run); });
}

template <typename From, typename To, int W>
__global__ void __launch_bounds__(THREADS) cast_kernel(To* __restrict__ to, const From* __restrict__ from, i64 count) {
    flat_loop<W>(count, [&](i64 i, auto width) { store(to + i, load<width>(from + i)); });
}
template <typename From, typename To>
void cast(To* to, const From* from, i64 count, Run& run) {
    using Narrow = std::conditional_t<sizeof(From) < sizeof(To), From, To>;
    const int W = widest<Narrow>;
    with_width<Narrow>(rows_aligned(W, to, 0) && rows_aligned(W, from, 0),
                       [&](auto width) { launch(cast_kernel<From, To, width>, flat_shape(count, width), run, to, from, count); });
}

// A row a block.
template <typename X, typename Y>
__global__ void __launch_bounds__(THREADS) fill_rows_kernel(Y* __restrict__ c, i64 ldc, const X* __restrict__ bias, i64 N) {
    Y* row = c + blockIdx.x * ldc;
    for (i64 i = threadIdx.x; i < N; i += blockDim.x) { row[i] = Y(bias ? (float)bias[i] : 0.0f); }
}
template <typename X, typename Y>
void fill_rows(Y* c, i64 ldc, const X* bias, i64 M, i64 N, Run& run) {
    launch(fill_rows_kernel<X, Y>, {blocks(M), row_threads(N, 1)}, run, c, ldc, bias, N);
}

}  // namespace gpu
#endif

#if defined(LLMC_KERNELS) || !defined(LLMC_CUDA)  // the tests of a GPU build have loops of their own
namespace BACKEND {

template <typename X, typename Y>
void matmul_forward(Y* out, i64 ld_out, const X* in, const X* weight, const X* bias, i64 N, i64 K, i64 OC, float alpha, Run& run) {
    const Matrix<X> a{in, K, false}, b{weight, K, true};
    gemm(out, ld_out, a, b, bias, N, OC, K, alpha, false, run);
}
template <typename X, typename Y>
void matmul_dgrad(Y* din, const X* dout, i64 ld_dout, const X* weight, i64 N, i64 K, i64 OC, float alpha, bool accumulate, Run& run) {
    const Matrix<X> a{dout, ld_dout, false}, b{weight, K, false};
    gemm(din, K, a, b, (const X*)nullptr, N, K, OC, alpha, accumulate, run);
}
template <typename X>
void matmul_wgrad(Gradient dweight, Gradient dbias, const X* dout, i64 ld_dout, const X* in, i64 N, i64 K, i64 OC, float alpha,
                  GradMode mode, Run& run) {
    const Matrix<X> a{dout, ld_dout, true}, b{in, K, false};
    check(!dbias || ld_dout == OC, "matmul_wgrad: a bias gradient wants dense rows, not %lld of %lld", (long long)OC, (long long)ld_dout);
    check(!dbias || dbias.dtype == dweight.dtype, "matmul_wgrad: the gradients of a weight and its bias are of two types");
    dweight.visit<X>([&]<typename G>(G* dw) {
        if (dbias && mode == GradMode::WRITE && gemm_row_sums(dw, (G*)dbias.data, a, b, OC, K, N, alpha, run)) { return; }
        gemm(dw, K, a, b, (const X*)nullptr, OC, K, N, alpha, mode == GradMode::ADD, run);
        if (dbias) { bias_backward(dbias, dout, N, OC, mode, run); }
    });
}
template <typename X>
void matmul_gelu_forward(X* h, X* u, const X* in, const X* weight, const X* bias, i64 N, i64 K, i64 OC, Run& run) {
    const Matrix<X> a{in, K, false}, b{weight, K, true};
    if (gemm_gelu(h, u, a, b, bias, N, OC, K, run)) { return; }
    matmul_forward(u, OC, in, weight, bias, N, K, OC, 1.0f, run);
    gelu_forward(h, u, N, OC, run);
}

DType fast_dtype(i64 channels) {
#ifdef LLMC_CUDA
    (void)channels;
    return DType::BF16;
#else
    return channels >= bf16_from() ? DType::BF16 : DType::FP32;
#endif
}
std::string gemm_library() {
#if defined(LLMC_CUDA)
    const size_t version = cublasLtGetVersion();
    return format("cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
#elif defined(DNNL_VERSION_MAJOR)
    return format("oneDNN %d.%d.%d%s", DNNL_VERSION_MAJOR, DNNL_VERSION_MINOR, DNNL_VERSION_PATCH, !PAIRS_TAKE<bf16> ? "" : amx::available() ? ", bf16 on AMX tiles" : ", bf16 by AVX512_BF16");
#else
    return "plain loops";
#endif
}

}  // namespace BACKEND
#endif
