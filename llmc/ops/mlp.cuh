// mlp.cuh: the activations of the feed-forward block, elementwise.
//
//   SwiGLU (arXiv 2002.05202): h (N,F) = silu(g) * u,  gate_up (N,2F) = [g | u],  silu(g) = g s, s = sigmoid(g)
//     dg = dh u s (1 + g (1 - s))      du = dh g s
//   GELU (arXiv 1606.08415, the tanh form): h (N,F) = u/2 (1 + tanh(t)) = u s,  s = sigmoid(2t),
//     t = sqrt(2/pi) (u + 0.044715 u^3)
//     du = dh (s + u s (1 - s) 2 dt/du),  dt/du = sqrt(2/pi) (1 + 3 * 0.044715 u^2)
#pragma once

#include "common.cuh"

constexpr float GELU_SLOPE = 1.5957691216057308f, GELU_CUBIC = 0.044715f;  // 2 sqrt(2/pi): the sigmoid is of 2t

#ifndef LLMC_KERNELS
namespace cpu {

template <typename X>
void swiglu_forward(X* h, const X* gate_up, i64 N, i64 F, Run& run) {
    parallel_rows(N, F, run, [&](i64 n) {
        const X *gate = gate_up + n * 2 * F, *up = gate + F;
        vector_loop(F, [&](i64 i, auto lanes) {
            const vfloat g = load(ahead(gate + i, 2 * F), lanes);
            store(ahead(h + n * F + i, F), g * sigmoid(g) * load(ahead(up + i, 2 * F), lanes), lanes);
        });
    });
}

template <typename X>
void swiglu_backward(X* dgate_up, const X* dh, const X* gate_up, i64 N, i64 F, Run& run) {
    parallel_rows(N, 2 * F, run, [&](i64 n) {
        const X *gate = gate_up + n * 2 * F, *up = gate + F;
        X *dgate = dgate_up + n * 2 * F, *dup = dgate + F;
        vector_loop(F, [&](i64 i, auto lanes) {
            const vfloat g = load(ahead(gate + i, 2 * F), lanes), u = load(ahead(up + i, 2 * F), lanes), d = load(ahead(dh + n * F + i, F), lanes), s = sigmoid(g);
            store(dgate + i, d * u * s * (1.0f + g * (1.0f - s)), lanes);
            store(dup + i, d * g * s, lanes);
        });
    });
}

template <typename X>
void gelu_forward(X* h, const X* u, i64 N, i64 F, Run& run) {
    parallel_pieces(N * F, 16384, run, [&](i64 begin, i64 n) {
        vector_loop(n, [&](i64 i, auto lanes) {
            const vfloat x = load(u + begin + i, lanes);
            store(h + begin + i, x * sigmoid(GELU_SLOPE * x * (1.0f + GELU_CUBIC * x * x)), lanes);
        });
    });
}

template <typename X>
void gelu_backward(X* du, const X* dh, const X* u, i64 N, i64 F, Run& run) {
    parallel_pieces(N * F, 16384, run, [&](i64 begin, i64 n) {
        vector_loop(n, [&](i64 i, auto lanes) {
            const vfloat x = load(u + begin + i, lanes), s = sigmoid(GELU_SLOPE * x * (1.0f + GELU_CUBIC * x * x));
            const vfloat slope = s + x * s * (1.0f - s) * GELU_SLOPE * (1.0f + 3.0f * GELU_CUBIC * x * x);
            store(du + begin + i, load(dh + begin + i, lanes) * slope, lanes);
        });
    });
}

}  // namespace cpu

#else
namespace gpu {

// All kernels here: a row a block.

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename X, int W>
__global__ void __launch_bounds__(THREADS) swiglu_forward_kernel(X* __restrict__ h, const X* __restrict__ gate_up, i64 F) {
    const X *gate = gate_up + blockIdx.x * 2 * F, *up = gate + F;
    for (i64 i = threadIdx.x * W; i < F; i += blockDim.x * W) {
        Floats<W> g = load<W>(gate + i);
        const Floats<W> u = load<W>(up + i);
        for (int j = 0; j < W; j++) { g[j] = g[j] * sigmoid(g[j]) * u[j]; }
        store(h + blockIdx.x * F + i, g);
    }
}
template <typename X>
void swiglu_forward(X* h, const X* gate_up, i64 N, i64 F, Run& run) {
    const int W = widest<X>;
    with_width<X>(rows_aligned(W, h, F) && rows_aligned(W, gate_up, F), [&](auto width) {
        launch(swiglu_forward_kernel<X, width>, {blocks(N), row_threads(F, width)}, run, h, gate_up, F);
    });
}

template <typename X, int W>
__global__ void __launch_bounds__(THREADS)
    swiglu_backward_kernel(X* dgate_up, const X* __restrict__ dh, const X* gate_up, i64 F) {
    const X *gate = gate_up + blockIdx.x * 2 * F, *up = gate + F;
    X *dgate = dgate_up + blockIdx.x * 2 * F, *dup = dgate + F;
    for (i64 i = threadIdx.x * W; i < F; i += blockDim.x * W) {
        Floats<W> g = load<W>(gate + i), u = load<W>(up + i);
        const Floats<W> d = load<W>(dh + blockIdx.x * F + i);
        for (int j = 0; j < W; j++) {
            const float s = sigmoid(g[j]), silu = g[j] * s;
            g[j] = d[j] * u[j] * s * (1.0f + g[j] * (1.0f - s));
            u[j] = d[j] * silu;
        }
        store(dgate + i, g);
        store(dup + i, u);
    }
}
template <typename X>
void swiglu_backward(X* dgate_up, const X* dh, const X* gate_up, i64 N, i64 F, Run& run) {
    const int W = widest<X>;
    with_width<X>(rows_aligned(W, dgate_up, F) && rows_aligned(W, dh, F) && rows_aligned(W, gate_up, F), [&](auto width) {
        launch(swiglu_backward_kernel<X, width>, {blocks(N), row_threads(F, width)}, run, dgate_up, dh, gate_up, F);
    });
}

template <typename X, int W>
__global__ void __launch_bounds__(THREADS) gelu_forward_kernel(X* __restrict__ h, const X* __restrict__ u, i64 count) {
    flat_loop<W>(count, [&](i64 i, auto width) {
        Floats<width> x = load<width>(u + i);
        for (int j = 0; j < width; j++) { x[j] *= sigmoid(GELU_SLOPE * x[j] * (1.0f + GELU_CUBIC * x[j] * x[j])); }
        store(h + i, x);
    });
}
template <typename X>
void gelu_forward(X* h, const X* u, i64 N, i64 F, Run& run) {
    const int W = widest<X>;
    with_width<X>(rows_aligned(W, h, 0) && rows_aligned(W, u, 0),
                  [&](auto width) { launch(gelu_forward_kernel<X, width>, flat_shape(N * F, width), run, h, u, N * F); });
}

template <typename X, int W>
__global__ void __launch_bounds__(THREADS)
    gelu_backward_kernel(X* du, const X* __restrict__ dh, const X* u, i64 count) {
    flat_loop<W>(count, [&](i64 i, auto width) {
        Floats<width> d = load<width>(dh + i);
        const Floats<width> in = load<width>(u + i);
        for (int j = 0; j < width; j++) {
            const float x = in[j], s = sigmoid(GELU_SLOPE * x * (1.0f + GELU_CUBIC * x * x));
            d[j] *= s + x * s * (1.0f - s) * GELU_SLOPE * (1.0f + 3.0f * GELU_CUBIC * x * x);
        }
        store(du + i, d);
    });
}
template <typename X>
void gelu_backward(X* du, const X* dh, const X* u, i64 N, i64 F, Run& run) {
    const int W = widest<X>;
    with_width<X>(rows_aligned(W, du, 0) && rows_aligned(W, dh, 0) && rows_aligned(W, u, 0),
                  [&](auto width) { launch(gelu_backward_kernel<X, width>, flat_shape(N * F, width), run, du, dh, u, N * F); });
}

}  // namespace gpu
#endif
