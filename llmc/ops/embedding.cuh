// embedding.cuh: the lookup, its gradient, and the learned positions' gradient.
//
//   x (B,S,C) =  wte[token - vocab.begin] + wpe[pos0 + s]    on the rank that owns the token, else 0
//   dwte (Vr,C) (+)= sum over rows n whose token it is of dx[n]      dwpe (P,C) (+)= sum over b of dx[b,s]
//
// The vocabulary's rows are split over ranks as in Megatron (arXiv 1909.08053, section 3): the sum over ranks has one
// non-zero term and is exact.
#pragma once

#include "common.cuh"

namespace cpu {

template <typename X>
void embedding_forward(X* x, const int* tokens, const X* wte, const X* wpe, Range vocab, i64 B, i64 S, i64 C, i64 pos0, Run& run) {
    parallel_rows(B * S, C, run, [&](i64 n) {
        X* row = x + n * C;
        if (tokens[n] < vocab.begin || tokens[n] >= vocab.end) {
            std::fill(row, row + C, X(0.0f));
            return;
        }
        const X* embedding = wte + (tokens[n] - vocab.begin) * C;
        if (!wpe) {
            std::copy(embedding, embedding + C, row);
            return;
        }
        const X* position = wpe + (pos0 + n % S) * C;
        vector_loop(C, [&](i64 i, auto lanes) { store(row + i, load(embedding + i, lanes) + load(position + i, lanes), lanes); });
    });
}

// Rows are bucketed by token with a counting sort, so that each gradient row has one writer and one order.
inline void embedding_backward(float* dwte, const float* dx, const int* tokens, Range vocab, i64 N, i64 C, GradMode mode, Run& run) {
    std::vector<i64> first(vocab.size() + 1, 0), rows(N);
    const auto owned = [&](i64 n) { return tokens[n] >= vocab.begin && tokens[n] < vocab.end; };
    for (i64 n = 0; n < N; n++) {
        if (owned(n)) { first[tokens[n] - vocab.begin + 1]++; }
    }
    for (i64 v = 0; v < vocab.size(); v++) { first[v + 1] += first[v]; }
    std::vector<i64> next(first.begin(), first.end() - 1);
    for (i64 n = 0; n < N; n++) {
        if (owned(n)) { rows[next[tokens[n] - vocab.begin]++] = n; }
    }
    parallel_rows(vocab.size(), C, run, [&](i64 v) {
        float* row = dwte + v * C;
        if (mode == GradMode::WRITE) { std::fill(row, row + C, 0.0f); }
        for (i64 r = first[v]; r < first[v + 1]; r++) { add_to(row, dx + rows[r] * C, C); }
    });
}

inline void position_backward(float* dwpe, const float* dx, i64 B, i64 S, i64 C, i64 P, GradMode mode, Run& run) {
    parallel_rows(P, B * C, run, [&](i64 s) {
        float* row = dwpe + s * C;
        if (mode == GradMode::WRITE) { std::fill(row, row + C, 0.0f); }
        for (i64 b = 0; b < (s < S ? B : 0); b++) { add_to(row, dx + (b * S + s) * C, C); }
    });
}

}  // namespace cpu

template <typename X>
void embedding_forward(X* x, const int* tokens, const X* wte, const X* wpe, Range vocab, i64 B, i64 S, i64 C, i64 pos0, Run& run) {
    cpu::embedding_forward(x, tokens, wte, wpe, vocab, B, S, C, pos0, run);
}
void embedding_backward(float* dwte, const float* dx, const int* tokens, Range vocab, i64 N, i64 C, GradMode mode, Run& run) {
    cpu::embedding_backward(dwte, dx, tokens, vocab, N, C, mode, run);
}
void position_backward(float* dwpe, const float* dx, i64 B, i64 S, i64 C, i64 P, GradMode mode, Run& run) {
    cpu::position_backward(dwpe, dx, B, S, C, P, mode, run);
}
