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
                vfloat value = load(x_in + r * C + begin + i, lanes);
                if (from) { value += load(from + i, lanes); }
                if (out_bias) { value += load(out_bias + begin + i, lanes); }
                store(row + begin + i, rounded<X>(value), lanes);
                if (x) { store(x + r * C + begin + i, value, lanes); }
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
                const vfloat d = load(dn_row + i, lanes), xh = (load(x_row + i, lanes) - m) * rstd[r], g = d * load(weight + i, lanes);
                sum_g += g;  // lanes past the end: d is 0
                sum_gx += g * xh;
                store(dw + i, load(dw + i, lanes) + d * xh, lanes);
                if (dbias) { store(db + i, load(db + i, lanes) + d, lanes); }
            });
            const float mean_g = kind.rms ? 0.0f : sum_lanes(sum_g) / C, mean_gx = sum_lanes(sum_gx) / C;
            vector_loop(C, [&](i64 i, auto lanes) {
                const vfloat xh = (load(x_row + i, lanes) - m) * rstd[r], g = load(dn_row + i, lanes) * load(weight + i, lanes);
                vfloat value = rstd[r] * (g - mean_g - xh * mean_gx);
                if (residual) { value += load(dx_row + i, lanes); }
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

template <typename X>
void residual_norm_forward(X* x, X* n, float* mean, float* rstd, const X* x_in, const Blocks<X>* out, const X* out_bias, const X* weight,
                           const X* bias, NormKind kind, i64 N, i64 C, Run& run) {
    cpu::residual_norm_forward(x, n, mean, rstd, x_in, out, out_bias, weight, bias, kind, N, C, run);
}
template <typename X>
void norm_apply(X* n, const X* x, const float* mean, const float* rstd, const X* weight, const X* bias, NormKind kind, i64 N, i64 C,
                Run& run) {
    cpu::norm_apply(n, x, mean, rstd, weight, bias, kind, N, C, run);
}
template <typename X>
void norm_backward(X* dx, bool residual, void* shared_out, i64 ld_shared, DType wire, i64 Ck, float* dweight, float* dbias, const X* dn,
                   const X* x, const float* mean, const float* rstd, const X* weight, NormKind kind, GradMode mode, i64 N, i64 C,
                   Run& run) {
    cpu::norm_backward(dx, residual, shared_out, ld_shared, wire, Ck, dweight, dbias, dn, x, mean, rstd, weight, kind, mode, N, C, run);
}
