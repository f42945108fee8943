// classifier.cuh: softmax cross-entropy over a vocabulary split by rows over ranks, in three steps with one all-gather
// between the first two (arXiv 1909.08053, section 3).
//
//   stats (n,3) = {m = max l, sum of exp(l - m), l[target] where owned else 0}     l (n,V): this rank's logits
//   lse (n) = m + log(sum over ranks of s_t exp(m_t - m)),  m = max over ranks      losses (n) = lse - l[target]
//   l (n,V) := scale * (exp(l - lse) - onehot(target))      the gradient of scale * sum of losses, in place
//
// A target < 0 is ignored: loss 0, gradient 0.
#pragma once

#include "common.cuh"

namespace cpu {

// One pass over memory: the maximum and the sum of a piece that fits L1, merged into the running pair.
template <typename X>
void classifier_stats(float* stats, const X* logits, const int* targets, Range vocab, i64 n, Run& run) {
    const i64 V = vocab.size(), piece = 4096;
    parallel_rows(n, V, run, [&](i64 r) {
        const X* row = logits + r * V;
        float highest = -INFINITY, sum = 0.0f;
        for (i64 begin = 0; begin < V; begin += piece) {
            const i64 count = std::min(piece, V - begin);
            vfloat top = splat(-INFINITY), exps{};
            vector_loop(count, [&](i64 i, auto lanes) { top = max(pad(load(row + begin + i, lanes), -INFINITY, lanes), top); });
            const float m = std::max(highest, max_lanes(top));
            vector_loop(count, [&](i64 i, auto lanes) { exps += pad(exp(load(row + begin + i, lanes) - m), 0.0f, lanes); });
            sum = sum * expf(highest - m) + sum_lanes(exps);
            highest = m;
        }
        const bool owned = targets[r] >= vocab.begin && targets[r] < vocab.end;
        stats[r * 3] = highest;
        stats[r * 3 + 1] = sum;
        stats[r * 3 + 2] = owned ? (float)row[targets[r] - vocab.begin] : 0.0f;
    });
}

inline void classifier_loss(float* losses, float* lse, const float* all_stats, const int* targets, i64 T, i64 n, Run& run) {
    parallel_rows(n, T * 8, run, [&](i64 r) {
        const auto stats = [&](i64 t) { return all_stats + (t * n + r) * 3; };
        float highest = -INFINITY, sum = 0.0f, target = 0.0f;
        for (i64 t = 0; t < T; t++) { highest = std::max(highest, stats(t)[0]); }
        for (i64 t = 0; t < T; t++) {
            sum += stats(t)[1] * expf(stats(t)[0] - highest);
            target += stats(t)[2];  // all but the owner's are 0
        }
        lse[r] = highest + logf(sum);
        losses[r] = targets[r] < 0 ? 0.0f : lse[r] - target;
    });
}

template <typename X>
void classifier_backward(X* logits, const float* lse, const int* targets, Range vocab, float scale, i64 n, Run& run) {
    const i64 V = vocab.size();
    parallel_rows(n, V, run, [&](i64 r) {
        X* row = logits + r * V;
        if (targets[r] < 0) {
            std::fill(row, row + V, X(0.0f));
            return;
        }
        X* target = targets[r] >= vocab.begin && targets[r] < vocab.end ? row + targets[r] - vocab.begin : nullptr;
        const float target_logit = target ? (float)*target : 0.0f;
        vector_loop(V, [&](i64 i, auto lanes) { store(row + i, scale * exp(load(row + i, lanes) - lse[r]), lanes); });
        if (target) { *target = scale * (expf(target_logit - lse[r]) - 1.0f); }
    });
}

}  // namespace cpu

template <typename X>
void classifier_stats(float* stats, const X* logits, const int* targets, Range vocab, i64 n, Run& run) {
    cpu::classifier_stats(stats, logits, targets, vocab, n, run);
}
void classifier_loss(float* losses, float* lse, const float* all_stats, const int* targets, i64 T, i64 n, Run& run) {
    cpu::classifier_loss(losses, lse, all_stats, targets, T, n, run);
}
template <typename X>
void classifier_backward(X* logits, const float* lse, const int* targets, Range vocab, float scale, i64 n, Run& run) {
    cpu::classifier_backward(logits, lse, targets, vocab, scale, n, run);
}
