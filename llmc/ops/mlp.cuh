// mlp.cuh: the activations of the feed-forward block, elementwise.
//
//   SwiGLU (arXiv 2002.05202): h (N,F) = silu(g) * u,  gate_up (N,2F) = [g | u],  silu(g) = g s, s = sigmoid(g)
//     dg = dh u s (1 + g (1 - s))      du = dh g s
//   GELU (arXiv 1606.08415, the tanh form): h (N,F) = u/2 (1 + tanh(t)) = u s,  s = sigmoid(2t),
//     t = sqrt(2/pi) (u + 0.044715 u^3)
//     du = dh (s + u s (1 - s) 2 dt/du),  dt/du = sqrt(2/pi) (1 + 3 * 0.044715 u^2)
#pragma once

#include "common.cuh"

namespace cpu {

template <typename X>
void swiglu_forward(X* h, const X* gate_up, i64 N, i64 F, Run& run) {
    parallel_rows(N, F, run, [&](i64 n) {
        const X *gate = gate_up + n * 2 * F, *up = gate + F;
        vector_loop(F, [&](i64 i, auto lanes) {
            const vfloat g = load(gate + i, lanes);
            store(h + n * F + i, g * sigmoid(g) * load(up + i, lanes), lanes);
        });
    });
}

template <typename X>
void swiglu_backward(X* dgate_up, const X* dh, const X* gate_up, i64 N, i64 F, Run& run) {
    parallel_rows(N, 2 * F, run, [&](i64 n) {
        const X *gate = gate_up + n * 2 * F, *up = gate + F;
        X *dgate = dgate_up + n * 2 * F, *dup = dgate + F;
        vector_loop(F, [&](i64 i, auto lanes) {
            const vfloat g = load(gate + i, lanes), u = load(up + i, lanes), d = load(dh + n * F + i, lanes), s = sigmoid(g);
            store(dgate + i, d * u * s * (1.0f + g * (1.0f - s)), lanes);
            store(dup + i, d * g * s, lanes);
        });
    });
}

constexpr float GELU_SLOPE = 1.5957691216057308f, GELU_CUBIC = 0.044715f;  // 2 sqrt(2/pi): the sigmoid is of 2t

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

template <typename X>
void swiglu_forward(X* h, const X* gate_up, i64 N, i64 F, Run& run) {
    cpu::swiglu_forward(h, gate_up, N, F, run);
}
template <typename X>
void swiglu_backward(X* dgate_up, const X* dh, const X* gate_up, i64 N, i64 F, Run& run) {
    cpu::swiglu_backward(dgate_up, dh, gate_up, N, F, run);
}
template <typename X>
void gelu_forward(X* h, const X* u, i64 N, i64 F, Run& run) {
    cpu::gelu_forward(h, u, N, F, run);
}
template <typename X>
void gelu_backward(X* du, const X* dh, const X* u, i64 N, i64 F, Run& run) {
    cpu::gelu_backward(du, dh, u, N, F, run);
}
