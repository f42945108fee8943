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

#ifndef LLMC_KERNELS
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
            vector_loop(count, [&](i64 i, auto lanes) { exps += pad(exp(load(ahead(row + begin + i, piece), lanes) - m), 0.0f, lanes); });
            sum = sum * expf(highest - m) + sum_lanes(exps);
            highest = m;
        }
        const bool owned = targets[r] >= vocab.begin && targets[r] < vocab.end;
        stats[r * 3] = highest;
        stats[r * 3 + 1] = sum;
        stats[r * 3 + 2] = owned ? (float)row[targets[r] - vocab.begin] : 0.0f;
    });
}

void classifier_loss(float* losses, float* lse, const float* all_stats, const int* targets, i64 T, i64 n, Run& run) {
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
        vector_loop(V, [&](i64 i, auto lanes) { store(row + i, scale * exp(load(ahead(row + i), lanes) - lse[r]), lanes); });
        if (target) { *target = scale * (expf(target_logit - lse[r]) - 1.0f); }
    });
}

}  // namespace cpu

#else
namespace gpu {

// A maximum, and the sum of exp(l - maximum) of what was seen.
struct Softmax {
    float highest = -INFINITY, sum = 0.0f;
    // Of both; neither needs to have seen anything.
    __device__ __forceinline__ void merge(float other_highest, float other_sum) {
        const float top = fmaxf(highest, other_highest);
        sum = sum * (highest == top ? 1.0f : expf(highest - top)) + other_sum * (other_highest == top ? 1.0f : expf(other_highest - top));
        highest = top;
    }
};

// A row a block, one pass.
template <typename X, int W>
__global__ void __launch_bounds__(THREADS)
    classifier_stats_kernel(float* stats, const X* __restrict__ logits, const int* __restrict__ targets, i64 vocab_begin, i64 V) {
    __shared__ float highest[THREADS / 32], sums[THREADS / 32];
    const i64 r = blockIdx.x;
    const X* row = logits + r * V;
    Softmax seen;
    row_loop<W>(row, V, [&](i64 i, auto width) {
        const Floats<width> l = load<width>(row + i);
        float top = l[0], sum = 0.0f;
        for (int j = 1; j < width; j++) { top = fmaxf(top, l[j]); }
        top = fmaxf(top, seen.highest);
        for (int j = 0; j < width; j++) { sum += expf(l[j] - top); }
        seen.merge(top, sum);
    });
    for (int distance = 16; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(ALL_LANES, seen.highest, distance), sum = __shfl_xor_sync(ALL_LANES, seen.sum, distance);
        seen.merge(other, sum);
    }
    if (threadIdx.x % 32 == 0) {
        highest[threadIdx.x / 32] = seen.highest;
        sums[threadIdx.x / 32] = seen.sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned warp = 1; warp < blockDim.x / 32; warp++) { seen.merge(highest[warp], sums[warp]); }
        const i64 target = targets[r] - vocab_begin;
        stats[r * 3] = seen.highest;
        stats[r * 3 + 1] = seen.sum;
        stats[r * 3 + 2] = targets[r] >= 0 && target >= 0 && target < V ? (float)row[target] : 0.0f;
    }
}
template <typename X>
void classifier_stats(float* stats, const X* logits, const int* targets, Range vocab, i64 n, Run& run) {
    const i64 V = vocab.size();
    launch(classifier_stats_kernel<X, widest<X> >, {blocks(n), row_threads(V, widest<X>)}, run, stats, logits, targets, vocab.begin, V);
}

__global__ void __launch_bounds__(THREADS)
    classifier_loss_kernel(float* losses, float* lse, const float* __restrict__ all_stats, const int* __restrict__ targets, i64 T, i64 n) {
    flat_loop<1>(n, [&](i64 r, auto) {
        Softmax all;
        float target = 0.0f;
        for (i64 t = 0; t < T; t++) {  // every rank in the same order: the same bits
            const float* stats = all_stats + (t * n + r) * 3;
            all.merge(stats[0], stats[1]);
            target += stats[2];  // all but the owner's are 0
        }
        lse[r] = all.highest + logf(all.sum);
        losses[r] = targets[r] < 0 ? 0.0f : lse[r] - target;
    });
}
void classifier_loss(float* losses, float* lse, const float* all_stats, const int* targets, i64 T, i64 n, Run& run) {
    launch(classifier_loss_kernel, flat_shape(n, 1), run, losses, lse, all_stats, targets, T, n);
}

// A row a block.
template <typename X, int W>
__global__ void __launch_bounds__(THREADS)
    classifier_backward_kernel(X* logits, const float* __restrict__ lse, const int* __restrict__ targets, i64 vocab_begin, i64 V,
                               float scale) {
    const i64 r = blockIdx.x, target = targets[r] - vocab_begin;
    const bool ignored = targets[r] < 0;
    const float row_lse = lse[r];
    X* row = logits + r * V;
    row_loop<W>(row, V, [&](i64 i, auto width) {
        Floats<width> l = load<width>(row + i);
        for (int j = 0; j < width; j++) { l[j] = ignored ? 0.0f : scale * (expf(l[j] - row_lse) - (i + j == target ? 1.0f : 0.0f)); }
        store(row + i, l);
    });
}
template <typename X>
void classifier_backward(X* logits, const float* lse, const int* targets, Range vocab, float scale, i64 n, Run& run) {
    const i64 V = vocab.size();
    launch(classifier_backward_kernel<X, widest<X> >, {blocks(n), row_threads(V, widest<X>)}, run, logits, lse, targets, vocab.begin, V,
           scale);
}

}  // namespace gpu
#endif
