// timed_ops.h: the ops as the trainer calls them: the build's own (ops.h), each a span of the run's timeline where there is one.
#pragma once

#include "ops.h"
#include "timeline.h"

// What each op costs, from its arguments. Elementwise operations are not counted: bytes bound those ops.
namespace costs {

// Bytes of an element of each array; 0 where it is null.
template <typename... X>
double width(const X*... array) { return (0.0 + ... + (array ? (double)sizeof(X) : 0.0)); }
inline double width(const Gradient& gradient) { return gradient ? (double)dtype_bytes(gradient.dtype) : 0.0; }
inline double passes(GradMode mode) { return mode == GradMode::ADD ? 2 : 1; }  // read and written, or written
inline Cost moved(double bytes) { return {0, bytes}; }
inline Cost product(i64 N, i64 K, i64 OC, double bytes) { return {2.0 * (double)N * (double)K * (double)OC, bytes}; }
// Causal: S (S + 1)/2 pairs of a query and a key for each head (those with keys before pos0 are not counted). `arrays` of NH heads, and as many of KVH.
template <typename X>
Cost attention(i64 products, const X*, i64 arrays, i64 B, i64 S, i64 NH, i64 KVH, i64 HS) {
    const double pairs = (double)(B * NH * S) * ((double)S + 1) / 2;
    return {2.0 * (double)HS * pairs * (double)products, (double)(B * HS * arrays * S * (NH + KVH)) * sizeof(X) + 4.0 * (double)(B * S * NH)};
}

template <typename X>
Cost embedding_forward(const X* x, const int*, const X* wte, const X*, Range, i64 B, i64 S, i64 C, const int*, Run&) { return moved((double)(B * S) * (4 + width(x, wte) * (double)C)); }
template <typename G>
Cost embedding_backward(const G* dwte, const float*, const int*, Range vocab, i64 N, i64 C, GradMode mode, Run&) {
    return moved((double)C * (4.0 * (double)N + width(dwte) * (double)(mode == GradMode::WRITE ? vocab.size() : 2 * std::min(vocab.size(), N))));
}
template <typename G>
Cost position_backward(const G* dwpe, const float*, i64 B, i64 S, i64 C, i64 P, GradMode mode, Run&) {
    return moved((double)C * (4.0 * (double)(B * S) + width(dwpe) * (double)P * passes(mode)));
}
template <typename X>
Cost residual_norm_forward(const X* x, const X* n, const float* mean, const float* rstd, const X* x_in, const Blocks<X>* out, const X*, const X*, const X*, NormKind, i64 N, i64 C, Run&) {
    const double block = out ? (double)(out->Ck * dtype_bytes(out->wire)) + (double)(C - out->Ck) * width(n) : 0;
    return moved((double)N * (block + (double)C * width(x, x_in, n) + width(mean, rstd)));
}
template <typename X>
Cost norm_apply(const X* n, const X* x, const float* mean, const float* rstd, const X*, const X*, NormKind, i64 N, i64 C, Run&) {
    return moved((double)N * ((double)C * width(n, x) + width(mean, rstd)));
}
template <typename X>
Cost norm_backward(const X* dx, bool residual, const void*, i64, DType wire, i64 Ck, const void*, const void*, const X* dn, const X* x, const float* mean, const float* rstd, const X*, NormKind,
                   GradMode, i64 N, i64 C, Run&) {
    return moved((double)N * ((double)C * (width(dn, x) + width(dx) * (residual ? 2 : 1)) + (double)(Ck * dtype_bytes(wire)) + width(mean, rstd)));
}
template <typename X, typename Y>
Cost matmul_forward(const Y* out, i64, const X* in, const X*, const X*, i64 N, i64 K, i64 OC, float, Run&) {
    return product(N, K, OC, (double)(N * K + OC * K) * width(in) + (double)(N * OC) * width(out));
}
template <typename X, typename Y>
Cost matmul_dgrad(const Y* din, const X* dout, i64, const X*, i64 N, i64 K, i64 OC, float, bool accumulate, Run&) {
    return product(N, K, OC, (double)(N * OC + OC * K) * width(dout) + (double)(N * K) * width(din) * (accumulate ? 2 : 1));
}
// A bias gradient that is added to has a pass over dout of its own; one that is written is summed in the product.
template <typename X>
Cost matmul_wgrad(Gradient dweight, Gradient dbias, const X* dout, i64, const X* in, i64 N, i64 K, i64 OC, float, GradMode mode, Run&) {
    return product(N, K, OC, (double)(N * OC) * width(dout) * (width(dbias) > 0 ? passes(mode) : 1) + (double)(N * K) * width(in) + (double)(OC * K) * width(dweight) * passes(mode));
}
template <typename X>
Cost matmul_gelu_forward(const X* h, const X*, const X*, const X*, const X*, i64 N, i64 K, i64 OC, Run&) { return product(N, K, OC, (double)(N * K + OC * K + 2 * N * OC) * width(h)); }
template <typename X>
Cost bias_backward(Gradient, const X* dout, i64 N, i64 OC, GradMode, Run&) { return moved((double)(N * OC) * width(dout)); }
template <typename From, typename To>
Cost cast(const To* to, const From* from, i64 count, Run&) { return moved((double)count * width(to, from)); }
template <typename X>
Cost rope_split_forward(const X* q, const X*, const X*, const X*, const float*, const float*, const int*, i64, i64 B, i64 S, i64 NH, i64 KVH, i64 HS, Run&) {
    return moved((double)(B * S * HS * 2 * (NH + 2 * KVH)) * width(q));
}
template <typename X>
Cost rope_split_backward(const X* dqkv, const X*, const X*, const X*, const float*, const float*, i64 B, i64 S, i64 NH, i64 KVH, i64 HS, Run&) {
    return moved((double)(B * S * HS * 2 * (NH + 2 * KVH)) * width(dqkv));
}
template <typename X>
Cost attention_forward(const X* att, const float*, const X*, const X*, const X*, const int*, i64, i64 B, i64 S, i64 NH, i64 KVH, i64 HS, Run&) {
    return attention(2, att, 2, B, S, NH, KVH, HS);  // q k^T and p v; q, att, and k, v
}
template <typename X>
Cost attention_backward(const X* dq, const X*, const X*, const X*, const X*, const float*, const X*, const X*, const X*, i64 B, i64 S, i64 NH, i64 KVH, i64 HS, Run&) {
    return attention(4, dq, 4, B, S, NH, KVH, HS);  // dv, dp, dq, dk (q k^T once more is not counted); q, att, datt, dq, and k, v, dk, dv
}
template <typename X>
Cost swiglu_forward(const X* h, const X*, i64 N, i64 F, Run&) { return moved((double)(N * F) * 3 * width(h)); }
template <typename X>
Cost swiglu_backward(const X* d, const X*, const X*, i64 N, i64 F, Run&) { return moved((double)(N * F) * 5 * width(d)); }
template <typename X>
Cost gelu_forward(const X* h, const X*, i64 N, i64 F, Run&) { return moved((double)(N * F) * 2 * width(h)); }
template <typename X>
Cost gelu_backward(const X* du, const X*, const X*, i64 N, i64 F, Run&) { return moved((double)(N * F) * 3 * width(du)); }
template <typename X>
Cost classifier_stats(const float*, const X* logits, const int*, Range vocab, i64 n, Run&) { return moved((double)n * ((double)vocab.size() * width(logits) + 12)); }
inline Cost classifier_loss(const float*, const float*, const float*, const int*, i64 T, i64 n, Run&) { return moved((double)(n * (12 * T + 12))); }
template <typename X>
Cost classifier_backward(const X* logits, const float*, const int*, Range vocab, float, i64 n, Run&) { return moved((double)(n * vocab.size()) * 2 * width(logits)); }
inline Cost sample_token(const int*, const int*, i64, const uint64_t*, const float* logits, i64 V, const Sampling&, Run&) {
    return moved((double)V * width(logits));
}
template <typename X>
Cost adamw_update(const X*, const uint16_t*, const float*, const float*, Gradient grad, i64 count, const AdamW&, Run&) {
    return moved((double)count * (24 + width(grad)));  // 8 of them for the master weight, in one piece or in two
}
inline Cost sums_of_squares(const std::vector<GradientPiece>& pieces, Run&) {
    double bytes = 0;
    for (const GradientPiece& piece : pieces) { bytes += (double)piece.count * width(piece.begin); }
    return moved(bytes);
}
template <typename X>
Cost sum_of_squared_differences(const X* a, const float* b, float, i64, i64 N, i64 cols, Run&) { return moved((double)(N * cols) * width(a, b)); }

}  // namespace costs

namespace timed {

template <typename... A>
Run& run_of(A&... arguments) { return std::get<sizeof...(A) - 1>(std::tie(arguments...)); }

#define TIMED(op)                                                                                                           \
    template <typename... A>                                                                                                \
    decltype(auto) op(A&&... arguments) {                                                                                   \
        const Timeline::Scope scope(run_of(arguments...).timeline, #op, [&] { return costs::op(arguments...); });           \
        return BACKEND::op(std::forward<A>(arguments)...);                                                                  \
    }
TIMED(embedding_forward) TIMED(embedding_backward) TIMED(position_backward)
TIMED(residual_norm_forward) TIMED(norm_apply) TIMED(norm_backward)
TIMED(matmul_forward) TIMED(matmul_dgrad) TIMED(matmul_wgrad) TIMED(matmul_gelu_forward) TIMED(bias_backward) TIMED(cast)
TIMED(rope_split_forward) TIMED(rope_split_backward) TIMED(attention_forward) TIMED(attention_backward)
TIMED(swiglu_forward) TIMED(swiglu_backward) TIMED(gelu_forward) TIMED(gelu_backward)
TIMED(classifier_stats) TIMED(classifier_loss) TIMED(classifier_backward) TIMED(sample_token)
TIMED(adamw_update) TIMED(sums_of_squares) TIMED(sum_of_squared_differences)
#undef TIMED

using BACKEND::attention_by, BACKEND::fast_dtype, BACKEND::gemm_library;

}  // namespace timed

using namespace timed;
