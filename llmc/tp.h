// tp.h: tensor parallelism with a partial channel reduce (CAAT-Net, arXiv 2506.19645).
//
// A row-parallel product sums over its input columns, which T ranks share; each rank r holds a_r (N, K/T) and W_r (C, K/T):
//
//      z_r = a_r W_r^T                      rank r's part of the sum, (N, C)
//      out_r[:, :Ck] = sum over s of z_s[:, :Ck]        shared channels: the same on all ranks; these are sent
//      out_r[:, Ck:] = sqrt(T) * z_r[:, Ck:]            private channels: this rank's own; nothing is sent
//
//             W_r (C, K/T)              out_r (N, C)
//           +--------------+       +----------+-------------+
//           | rows [0,Ck)  |  -->  |  shared  |   private   |
//           +--------------+       |  reduced |  * sqrt(T)  |
//           | rows [Ck,C)  |  ---------------------^        |
//           +--------------+       +----------+-------------+
//
// The two blocks come from two products, so that the sum of the first travels under the second. Backward is the true
// gradient: the shared channels of dout are summed over ranks, the private ones scaled, and both go through W_r.
#pragma once

#include "comm.h"
#include "timed_ops.h"

struct TensorParallel {
    Comm& comm;
    i64 C, Ck;            // Ck = C where there is one rank: nothing is private then
    float private_scale;  // sqrt(T), or 1
    DType wire;           // type in which shared channels are sent

    i64 private_channels() const { return C - Ck; }
    i64 sent_channels() const { return round_up(Ck, DEVICE_ALIGN); }  // of a row, padding included
};

// The buffers a row-parallel product needs; planned once per run for N rows.
template <typename X>
struct RowParallelScratch {
    Blocks<X> out;        // forward: the product; backward: out.shared is the block of the gradient to send
    X* staging;           // (N, Ck) where the wire's type is not X, else null
    float* dinput;        // (N, K) sum over both blocks, where there are two, before it is rounded once; not used where X is float

    void plan(Arena& arena, const TensorParallel& tp, i64 N, i64 max_K, bool training) {
        out.ld_shared = tp.sent_channels(), out.ld_priv = round_up(tp.private_channels(), DEVICE_ALIGN);
        out.Ck = tp.Ck, out.wire = tp.wire;
        arena.add((char**)&out.shared, N * out.ld_shared * dtype_bytes(tp.wire));
        arena.add(&out.priv, N * out.ld_priv);
        arena.add(&staging, tp.wire != dtype_of<X> ? N * out.ld_shared : 0);
        arena.add(&dinput, training && dtype_of<X> != DType::FP32 && tp.Ck > 0 && tp.private_channels() > 0 ? N * max_K : 0);
    }
};

// Sends the shared block [0, Ck) of N rows; nothing at p = 0, at T = 1. wait() before it is read.
template <typename X>
Comm::Ticket start_partial_reduce(const Blocks<X>& block, i64 N, TensorParallel& tp) {
    if (tp.comm.size == 1 || block.Ck == 0) { return 0; }
    return tp.comm.start_all_reduce(block.shared, N * block.ld_shared, block.wire, Traffic::TP_LAYERS);
}

// s.out = the row-parallel product of a (N, K) with weight (C, K). Returns with the reduce of the shared block on its way.
template <typename X>
Comm::Ticket row_parallel_forward(RowParallelScratch<X>& s, const X* a, const X* weight, i64 N, i64 K, TensorParallel& tp, Run& run) {
    Blocks<X>& out = s.out;
    if (out.Ck > 0) {
        if (out.wire == dtype_of<X>) {
            matmul_forward(static_cast<X*>(out.shared), out.ld_shared, a, weight, (const X*)nullptr, N, K, out.Ck, 1.0f, run);
        } else if (out.wire == DType::FP32) {  // the partial sums go out unrounded
            matmul_forward(static_cast<float*>(out.shared), out.ld_shared, a, weight, (const X*)nullptr, N, K, out.Ck, 1.0f, run);
        } else {
            matmul_forward(s.staging, out.ld_shared, a, weight, (const X*)nullptr, N, K, out.Ck, 1.0f, run);
            cast(static_cast<bf16*>(out.shared), s.staging, N * out.ld_shared, run);
        }
    }
    const Comm::Ticket ticket = start_partial_reduce(out, N, tp);
    if (tp.private_channels() > 0) {
        matmul_forward(out.priv, out.ld_priv, a, weight + out.Ck * K, (const X*)nullptr, N, K, tp.private_channels(), tp.private_scale, run);
    }
    return ticket;
}

// da (N, K) and dweight (C, K) from the residual's gradient dx (N, C). The private block waits for nothing; the shared one is used when its
// sum, in s.out, is complete.
template <typename X>
void row_parallel_input_gradient(X* da, const X* dout, i64 ld, const X* weight, i64 rows, float alpha, bool accumulate, RowParallelScratch<X>& s, i64 N, i64 K,
                                 const TensorParallel& tp, Run& run) {
    if constexpr (std::is_same_v<X, float>) {
        matmul_dgrad(da, dout, ld, weight, N, K, rows, alpha, accumulate, run);
    } else if (tp.Ck > 0 && tp.private_channels() > 0) {
        matmul_dgrad(s.dinput, dout, ld, weight, N, K, rows, alpha, accumulate, run);
    } else {
        matmul_dgrad(da, dout, ld, weight, N, K, rows, alpha, false, run);
    }
}
template <typename X>
void row_parallel_backward_private(X* da, Gradient dweight, const X* dx, RowParallelScratch<X>& s, const X* a, const X* weight, GradMode mode, i64 N, i64 K,
                                   const TensorParallel& tp, Run& run) {
    const i64 Ck = tp.Ck, Cp = tp.private_channels();
    if (Cp == 0) { return; }
    matmul_wgrad(dweight + Ck * K, nullptr, dx + Ck, tp.C, a, N, K, Cp, tp.private_scale, mode, run);
    row_parallel_input_gradient(da, dx + Ck, tp.C, weight + Ck * K, Cp, tp.private_scale, false, s, N, K, tp, run);
}
template <typename X>
void row_parallel_backward_shared(X* da, Gradient dweight, const X* dx, RowParallelScratch<X>& s, const X* a, const X* weight, GradMode mode, i64 N, i64 K,
                                  const TensorParallel& tp, Run& run) {
    const i64 Ck = tp.Ck, Cp = tp.private_channels();
    if (Ck == 0) { return; }
    const X* shared = dx;  // one rank: the sum is the gradient itself
    i64 ld = tp.C;
    if (tp.comm.size > 1) {
        ld = s.out.ld_shared;
        if (s.out.wire == dtype_of<X>) {
            shared = static_cast<const X*>(s.out.shared);
        } else {
            if (s.out.wire == DType::FP32) { cast(s.staging, static_cast<const float*>(s.out.shared), N * ld, run); }
            else { cast(s.staging, static_cast<const bf16*>(s.out.shared), N * ld, run); }
            shared = s.staging;
        }
    }
    matmul_wgrad(dweight, nullptr, shared, ld, a, N, K, Ck, 1.0f, mode, run);
    row_parallel_input_gradient(da, shared, ld, weight, Ck, 1.0f, Cp > 0, s, N, K, tp, run);
    if constexpr (!std::is_same_v<X, float>) {
        if (Cp > 0) { cast(da, s.dinput, N * K, run); }
    }
}
