// norm.cuh: residual plus norm, and back.
//
//   x (N,C) = x_in + out + out_bias          out = [shared | priv], as the row-parallel product and its reduce left it
//   RMSNorm:   n = x * rstd * weight                     rstd = 1/sqrt(mean(x^2) + eps)            arXiv 1910.07467
//   LayerNorm: n = (x - mean) * rstd * weight + bias     rstd = 1/sqrt(mean((x - mean)^2) + eps)   arXiv 1607.06450
//
//   with xh = (x - mean) * rstd and g = dn * weight:
//   dx (N,C) = (residual ? dx : 0) + rstd * (g - [LayerNorm: mean(g)] - xh * mean(g * xh))
//   dweight (C) (+)= sum over rows of dn * xh      dbias (C) (+)= sum over rows of dn      shared_out (N,Ck) = dx[:, :Ck]
//
// Means are over the C channels of a row. The statistics are those of x as stored: norm_apply gives the same bits again.
#pragma once

#include "common.cuh"

#ifndef LLMC_KERNELS
namespace cpu {

// n = norm of one row given its statistics.
template <typename X, typename Row>
ALWAYS_INLINE void norm_row(X* n, const Row* x, float mean, float rstd, const X* weight, const X* bias, i64 C) {
    vector_loop(C, [&](i64 i, auto lanes) {
        vfloat value = (load(x + i, lanes) - mean) * rstd * load(weight + i, lanes);
        if (bias) { value += load(bias + i, lanes); }
        store(n + i, value, lanes);
    });
}

template <typename X>
void residual_norm_forward(X* x, X* n, float* mean, float* rstd, const X* x_in, const Blocks<X>* out, const X* out_bias, const X* weight,
                           const X* bias, NormKind kind, i64 N, i64 C, Run& run) {
    check(x || (!out && !out_bias), "residual_norm_forward: something is added, but there is no x to write it to");
    parallel_rows(N, C, run, [&](i64 r) {
        static thread_local Scratch<float> scratch;
        float* row = scratch.get(C);
        const auto add = [&](const auto* from, Range channels) {
            const i64 begin = channels.begin;
            vector_loop(channels.size(), [&](i64 i, auto lanes) {
                vfloat value = load(ahead(x_in + r * C + begin + i), lanes);
                if (from) { value += load(ahead(from + i), lanes); }
                if (out_bias) { value += load(out_bias + begin + i, lanes); }
                store(row + begin + i, rounded<X>(value), lanes);
                if (x) { store(ahead(x + r * C + begin + i), value, lanes); }
            });
        };
        if (out) {
            with_type(out->wire, [&](auto type) { add((const decltype(type)*)out->shared + r * out->ld_shared, Range{0, out->Ck}); });
            add(out->priv + r * out->ld_priv, Range{out->Ck, C});
        } else {
            add((const X*)nullptr, Range{0, C});
        }
        float m = 0.0f;
        if (!kind.rms) {
            vfloat sum{};
            vector_loop(C, [&](i64 i, auto lanes) { sum += load(row + i, lanes); });
            m = sum_lanes(sum) / C;
            mean[r] = m;
        }
        vfloat squares{};
        vector_loop(C, [&](i64 i, auto lanes) {
            const vfloat centred = pad(load(row + i, lanes) - m, 0.0f, lanes);
            squares += centred * centred;
        });
        rstd[r] = 1.0f / sqrtf(sum_lanes(squares) / C + kind.eps);
        norm_row(n + r * C, row, m, rstd[r], weight, bias, C);
    });
}

template <typename X>
void norm_apply(X* n, const X* x, const float* mean, const float* rstd, const X* weight, const X* bias, NormKind kind, i64 N, i64 C,
                Run& run) {
    parallel_rows(N, C, run, [&](i64 r) { norm_row(n + r * C, x + r * C, kind.rms ? 0.0f : mean[r], rstd[r], weight, bias, C); });
}

// One pass over each chunk of rows: a row's two sums and its part of dweight and dbias, then its dx while it is in L1.
template <typename X>
void norm_backward(X* dx, bool residual, void* shared_out, i64 ld_shared, DType wire, i64 Ck, float* dweight, float* dbias, const X* dn,
                   const X* x, const float* mean, const float* rstd, const X* weight, NormKind kind, GradMode mode, i64 N, i64 C,
                   Run& run) {
    static thread_local Scratch<float> scratch;
    const RowChunks chunks(N);
    float* partials = scratch.get(chunks.count * 2 * C);  // (chunk, dweight | dbias, C)
    run.parallel(chunks.count, [&](i64 chunk) {
        float* dw = partials + chunk * 2 * C;
        float* db = dw + C;
        std::fill(dw, dw + 2 * C, 0.0f);
        for (i64 r = chunks[chunk].begin; r < chunks[chunk].end; r++) {
            const X *dn_row = dn + r * C, *x_row = x + r * C;
            X* dx_row = dx + r * C;
            const float m = kind.rms ? 0.0f : mean[r];
            vfloat sum_g{}, sum_gx{};
            vector_loop(C, [&](i64 i, auto lanes) {
                const vfloat d = load(ahead(dn_row + i), lanes), xh = (load(ahead(x_row + i), lanes) - m) * rstd[r], g = d * load(weight + i, lanes);
                sum_g += g;  // lanes past the end: d is 0
                sum_gx += g * xh;
                store(dw + i, load(dw + i, lanes) + d * xh, lanes);
                if (dbias) { store(db + i, load(db + i, lanes) + d, lanes); }
            });
            const float mean_g = kind.rms ? 0.0f : sum_lanes(sum_g) / C, mean_gx = sum_lanes(sum_gx) / C;
            vector_loop(C, [&](i64 i, auto lanes) {
                const vfloat xh = (load(x_row + i, lanes) - m) * rstd[r], g = load(dn_row + i, lanes) * load(weight + i, lanes);
                vfloat value = rstd[r] * (g - mean_g - xh * mean_gx);
                if (residual) { value += load(ahead(dx_row + i), lanes); }
                store(dx_row + i, value, lanes);
            });
            if (shared_out && Ck > 0) {
                with_type(wire, [&](auto type) {
                    auto* to = (decltype(type)*)shared_out + r * ld_shared;
                    vector_loop(Ck, [&](i64 i, auto lanes) { store(to + i, load(dx_row + i, lanes), lanes); });
                });
            }
        }
    });
    combine_partials(dweight, partials, chunks.count, 2 * C, C, mode, run);
    if (dbias) { combine_partials(dbias, partials + C, chunks.count, 2 * C, C, mode, run); }
}

}  // namespace cpu

#else
namespace gpu {

template <int W>
__device__ __forceinline__ Floats<W> normalised(Floats<W> x, float mean, float rstd, const Floats<W>& weight, const Floats<W>& bias) {
    for (int j = 0; j < W; j++) { x[j] = (x[j] - mean) * rstd * weight[j] + bias[j]; }
    return x;
}
template <int W, typename X>
__device__ __forceinline__ Floats<W> load_or_zero(const X* p, i64 i) {
    return p ? load<W>(p + i) : Floats<W>{};
}

// Channels [c, c + W) of one row of the two blocks.
template <int W, typename X, typename WIRE>
__device__ __forceinline__ Floats<W> load_blocks(const WIRE* shared, const X* priv, i64 Ck, i64 c) {
    if (c + W <= Ck) { return load<W>(shared + c); }
    if (c >= Ck && Ck % W == 0) { return load<W>(priv + c - Ck); }
    Floats<W> value;  // where the blocks meet, and beyond where that is within a pack
    for (int j = 0; j < W; j++) { value[j] = c + j < Ck ? (float)shared[c + j] : (float)priv[c + j - Ck]; }
    return value;
}

// A row a warp, threads (32, rows of a block). The row waits in shared memory; each lane reads only what it wrote.
constexpr int MOST_ROWS = 4;
template <typename X, typename WIRE, int W>
__global__ void __launch_bounds__(32 * MOST_ROWS, 8)
    residual_norm_forward_kernel(X* x, X* __restrict__ n, float* __restrict__ mean, float* __restrict__ rstd, const X* x_in,
                                 const WIRE* __restrict__ shared, i64 ld_shared, const X* __restrict__ priv, i64 ld_priv, i64 Ck, bool out,
                                 const X* __restrict__ out_bias, const X* __restrict__ weight, const X* __restrict__ bias, NormKind kind,
                                 i64 N, i64 C) {
    const i64 r = (i64)blockIdx.x * blockDim.y + threadIdx.y;
    if (r >= N) { return; }
    X* row = dynamic_shared<X>() + threadIdx.y * round_up(C, W);
    float sum = 0.0f;
    for (i64 c = threadIdx.x * W; c < C; c += 32 * W) {
        Floats<W> value = load<W>(x_in + r * C + c);
        if (out) { value += load_blocks<W>(shared + r * ld_shared, priv + r * ld_priv, Ck, c); }
        if (out_bias) { value += load<W>(out_bias + c); }
        store(row + c, value);
        if (x) { store(x + r * C + c, value); }
        value = load<W>(row + c);  // as rounded
        for (int j = 0; j < W; j++) { sum += kind.rms ? value[j] * value[j] : value[j]; }
    }
    sum = warp_sum(sum);
    float m = 0.0f;
    if (!kind.rms) {
        m = sum / C;
        sum = 0.0f;
        for (i64 c = threadIdx.x * W; c < C; c += 32 * W) {
            const Floats<W> value = load<W>(row + c);
            for (int j = 0; j < W; j++) { sum += (value[j] - m) * (value[j] - m); }
        }
        sum = warp_sum(sum);
    }
    const float row_rstd = 1.0f / sqrtf(sum / C + kind.eps);
    for (i64 c = threadIdx.x * W; c < C; c += 32 * W) {
        store(n + r * C + c, normalised(load<W>(row + c), m, row_rstd, load<W>(weight + c), load_or_zero<W>(bias, c)));
    }
    if (threadIdx.x == 0) {
        rstd[r] = row_rstd;
        if (!kind.rms) { mean[r] = m; }
    }
}
template <typename X>
void residual_norm_forward(X* x, X* n, float* mean, float* rstd, const X* x_in, const Blocks<X>* out, const X* out_bias, const X* weight,
                           const X* bias, NormKind kind, i64 N, i64 C, Run& run) {
    check(x || (!out && !out_bias), "residual_norm_forward: something is added, but there is no x to write it to");
    const Blocks<X> b = out ? *out : Blocks<X>{nullptr, 0, dtype_of<X>, nullptr, 0, 0};
    with_type(b.wire, [&](auto type) {
        using WIRE = decltype(type);
        const WIRE* shared = (const WIRE*)b.shared;
        const int W = widest<X>;
        const bool wide = rows_aligned(W, x, C) && rows_aligned(W, n, C) && rows_aligned(W, x_in, C) &&
                          rows_aligned(W, shared, b.ld_shared) && rows_aligned(W, b.priv, b.ld_priv) && rows_aligned(W, out_bias, 0) &&
                          rows_aligned(W, weight, 0) && rows_aligned(W, bias, 0);
        with_width<X>(wide, [&](auto width) {
            const i64 row_bytes = round_up(C, width) * sizeof(X), rows = std::clamp<i64>((48 << 10) / row_bytes, 1, MOST_ROWS);
            launch(residual_norm_forward_kernel<X, WIRE, width>,
                   {blocks(ceil_div(N, rows)), dim3(32, (unsigned)rows), (size_t)(rows * row_bytes)}, run, x, n, mean, rstd, x_in, shared,
                   b.ld_shared, b.priv, b.ld_priv, b.Ck, out != nullptr, out_bias, weight, bias, kind, N, C);
        });
    });
}

// A row a block.
template <typename X, int W>
__global__ void __launch_bounds__(THREADS)
    norm_apply_kernel(X* __restrict__ n, const X* __restrict__ x, const float* __restrict__ mean, const float* __restrict__ rstd,
                      const X* __restrict__ weight, const X* __restrict__ bias, NormKind kind, i64 C) {
    const i64 r = blockIdx.x;
    const float m = kind.rms ? 0.0f : mean[r], row_rstd = rstd[r];
    for (i64 c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        store(n + r * C + c, normalised(load<W>(x + r * C + c), m, row_rstd, load<W>(weight + c), load_or_zero<W>(bias, c)));
    }
}
template <typename X>
void norm_apply(X* n, const X* x, const float* mean, const float* rstd, const X* weight, const X* bias, NormKind kind, i64 N, i64 C,
                Run& run) {
    const int W = widest<X>;
    const bool wide = rows_aligned(W, n, C) && rows_aligned(W, x, C) && rows_aligned(W, weight, 0) && rows_aligned(W, bias, 0);
    with_width<X>(wide, [&](auto width) {
        launch(norm_apply_kernel<X, width>, {blocks(N), row_threads(C, width)}, run, n, x, mean, rstd, weight, bias, kind, C);
    });
}

// A chunk of rows a block, all threads on one row. A thread has its columns to itself: their parts of dweight and dbias are in shared
// memory. partials (chunk, dweight | dbias, C), the second where `biased`.
template <typename X, typename WIRE, int W>
__global__ void __launch_bounds__(THREADS)
    norm_backward_kernel(X* dx, bool residual, WIRE* __restrict__ shared_out, i64 ld_shared, i64 Ck, float* __restrict__ partials,
                         bool biased, const X* __restrict__ dn, const X* __restrict__ x, const float* __restrict__ mean,
                         const float* __restrict__ rstd, const X* __restrict__ weight, NormKind kind, i64 chunk_rows, i64 N, i64 C) {
    __shared__ Floats<2> warps[2][THREADS / 32];  // by turns, so that one barrier a row is enough
    float *dw = dynamic_shared<float>(), *db = dw + round_up(C, W);
    const i64 first = threadIdx.x * W, step = blockDim.x * W;
    for (i64 c = first; c < C; c += step) {
        store(dw + c, Floats<W>{});
        if (biased) { store(db + c, Floats<W>{}); }
    }
    const i64 begin = blockIdx.x * chunk_rows, end = begin + chunk_rows < N ? begin + chunk_rows : N;
    for (i64 r = begin; r < end; r++) {
        const float m = kind.rms ? 0.0f : mean[r], row_rstd = rstd[r];
        Floats<2> sums = {};  // of g, and of g xh
        for (i64 c = first; c < C; c += step) {
            const Floats<W> d = load<W>(dn + r * C + c), value = load<W>(x + r * C + c), w = load<W>(weight + c);
            Floats<W> dw_new = load<W>(dw + c);
            for (int j = 0; j < W; j++) {
                const float xh = (value[j] - m) * row_rstd;
                sums[0] += d[j] * w[j];
                sums[1] += d[j] * w[j] * xh;
                dw_new[j] += d[j] * xh;
            }
            store(dw + c, dw_new);
            if (biased) {
                Floats<W> db_new = load<W>(db + c);
                db_new += d;
                store(db + c, db_new);
            }
        }
        sums = block_sum(sums, warps[r % 2]);
        const float mean_g = kind.rms ? 0.0f : sums[0] / C, mean_gx = sums[1] / C;
        for (i64 c = first; c < C; c += step) {
            const Floats<W> d = load<W>(dn + r * C + c), value = load<W>(x + r * C + c), w = load<W>(weight + c);
            Floats<W> result = {};
            if (residual) { result = load<W>(dx + r * C + c); }
            for (int j = 0; j < W; j++) { result[j] += row_rstd * (d[j] * w[j] - mean_g - (value[j] - m) * row_rstd * mean_gx); }
            store(dx + r * C + c, result);
            for (int j = 0; j < W; j++) { result[j] = (float)(X)result[j]; }  // what is sent is dx as stored
            if (c + W <= Ck) {
                store(shared_out + r * ld_shared + c, result);
            } else {
                for (int j = 0; j < W; j++) {
                    if (c + j < Ck) { shared_out[r * ld_shared + c + j] = (WIRE)result[j]; }
                }
            }
        }
    }
    float* part = partials + blockIdx.x * (biased ? 2 : 1) * C;
    for (i64 c = first; c < C; c += step) {
        store(part + c, load<W>(dw + c));
        if (biased) { store(part + C + c, load<W>(db + c)); }
    }
}
template <typename X>
void norm_backward(X* dx, bool residual, void* shared_out, i64 ld_shared, DType wire, i64 Ck, float* dweight, float* dbias, const X* dn,
                   const X* x, const float* mean, const float* rstd, const X* weight, NormKind kind, GradMode mode, i64 N, i64 C,
                   Run& run) {
    const RowChunks chunks(N);
    const i64 ld = (dbias ? 2 : 1) * C;
    float* partials = run.workspace.get<float>(chunks.count * ld);
    with_type(wire, [&](auto type) {
        using WIRE = decltype(type);
        WIRE* sent = (WIRE*)shared_out;
        const int W = widest<X>;
        const bool wide = rows_aligned(W, dx, C) && rows_aligned(W, sent, ld_shared) && rows_aligned(W, partials, C) &&
                          rows_aligned(W, dn, C) && rows_aligned(W, x, C) && rows_aligned(W, weight, 0);
        with_width<X>(wide, [&](auto width) {
            const size_t shared_bytes = (dbias ? 2 : 1) * round_up(C, width) * sizeof(float);
            launch(norm_backward_kernel<X, WIRE, width>, {blocks(chunks.count), row_threads(C, width), shared_bytes}, run, dx, residual,
                   sent, ld_shared, sent ? Ck : 0, partials, dbias != nullptr, dn, x, mean, rstd, weight, kind, chunks.size, N, C);
        });
    });
    combine_partials(dweight, partials, chunks.count, ld, C, mode, run);
    if (dbias) { combine_partials(dbias, partials + C, chunks.count, ld, C, mode, run); }
}

}  // namespace gpu
#endif
