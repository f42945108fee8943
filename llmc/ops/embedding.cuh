// embedding.cuh: the lookup, its gradient, and the learned positions' gradient.
//
//   x (B,S,C) =  wte[token - vocab.begin] + wpe[pos0 + s]    on the rank that owns the token, else 0
//   dwte (Vr,C) (+)= sum over rows n whose token it is of dx[n]      dwpe (P,C) (+)= sum over b of dx[b,s]
//
// The vocabulary's rows are split over ranks as in Megatron (arXiv 1909.08053, section 3): the sum over ranks has one
// non-zero term and is exact.
#pragma once

#include "common.cuh"

#ifndef LLMC_KERNELS
namespace cpu {

template <typename X>
void embedding_forward(X* x, const int* tokens, const X* wte, const X* wpe, Range vocab, i64 B, i64 S, i64 C, const int* pos0, Run& run) {
    const i64 first = pos0 ? *pos0 : 0;
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
        const X* position = wpe + (first + n % S) * C;
        vector_loop(C, [&](i64 i, auto lanes) { store(row + i, load(embedding + i, lanes) + load(position + i, lanes), lanes); });
    });
}

// Rows are bucketed by token with a counting sort, so that each gradient row has one writer and one order.
void embedding_backward(float* dwte, const float* dx, const int* tokens, Range vocab, i64 N, i64 C, GradMode mode, Run& run) {
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

void position_backward(float* dwpe, const float* dx, i64 B, i64 S, i64 C, i64 P, GradMode mode, Run& run) {
    parallel_rows(P, B * C, run, [&](i64 s) {
        float* row = dwpe + s * C;
        if (mode == GradMode::WRITE) { std::fill(row, row + C, 0.0f); }
        for (i64 b = 0; b < (s < S ? B : 0); b++) { add_to(row, dx + (b * S + s) * C, C); }
    });
}

}  // namespace cpu

#else
namespace gpu {

// A row a block.
template <typename X, int W>
__global__ void __launch_bounds__(THREADS)
    embedding_forward_kernel(X* __restrict__ x, const int* __restrict__ tokens, const X* __restrict__ wte, const X* __restrict__ wpe,
                             i64 vocab_begin, i64 vocab_end, i64 S, i64 C, const int* __restrict__ pos0) {
    const i64 n = blockIdx.x, token = tokens[n], position = n % S + (pos0 ? *pos0 : 0);
    const bool owned = token >= vocab_begin && token < vocab_end;
    for (i64 i = threadIdx.x * W; i < C; i += blockDim.x * W) {
        Floats<W> value = {};
        if (owned) {
            value = load<W>(wte + (token - vocab_begin) * C + i);
            if (wpe) { value += load<W>(wpe + position * C + i); }
        }
        store(x + n * C + i, value);
    }
}
template <typename X>
void embedding_forward(X* x, const int* tokens, const X* wte, const X* wpe, Range vocab, i64 B, i64 S, i64 C, const int* pos0, Run& run) {
    const int W = widest<X>;
    with_width<X>(rows_aligned(W, x, C) && rows_aligned(W, wte, C) && rows_aligned(W, wpe, C), [&](auto width) {
        launch(embedding_forward_kernel<X, width>, {blocks(B * S), row_threads(C, width)}, run, x, tokens, wte, wpe, vocab.begin, vocab.end,
               S, C, pos0);
    });
}

// first[v], count[v]: the first row whose token is v, and how many there are. Integers: the order of atomics does not matter.
__global__ void __launch_bounds__(THREADS)
    count_tokens_kernel(int* first, int* count, const int* __restrict__ tokens, i64 vocab_begin, i64 vocab_end, i64 N) {
    flat_loop<1>(N, [&](i64 n, auto) {
        if (tokens[n] < vocab_begin || tokens[n] >= vocab_end) { return; }
        atomicMin(&first[tokens[n] - vocab_begin], (int)n);
        atomicAdd(&count[tokens[n] - vocab_begin], 1);
    });
}
// A vocabulary row a block, and W columns a thread: from the token's first row on, the block lists its rows, in order, and each thread adds
// them.
template <int W>
__global__ void __launch_bounds__(THREADS)
    embedding_backward_kernel(float* dwte, const float* __restrict__ dx, const int* __restrict__ tokens, const int* __restrict__ first,
                              const int* __restrict__ count, i64 vocab_begin, i64 N, i64 C, bool add) {
    __shared__ int rows[THREADS], found_by_warp[THREADS / 32];
    const i64 v = blockIdx.x, c = ((i64)blockIdx.y * blockDim.x + threadIdx.x) * W;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (add && count[v] == 0) { return; }
    Floats<W> sum = {};
    if (add && c < C) { sum = load<W>(dwte + v * C + c); }
    for (i64 base = first[v], left = count[v]; left > 0; base += blockDim.x) {
        const i64 n = base + threadIdx.x;
        const bool match = n < N && tokens[n] == vocab_begin + v;
        const unsigned matches = __ballot_sync(ALL_LANES, match);
        if (lane == 0) { found_by_warp[warp] = __popc(matches); }
        __syncthreads();
        int found = 0, before = __popc(matches & ((1u << lane) - 1));
        for (int w = 0; w < (int)blockDim.x / 32; w++) {
            if (w < warp) { before += found_by_warp[w]; }
            found += found_by_warp[w];
        }
        if (match) { rows[before] = (int)n; }
        __syncthreads();
        if (c < C) {
            for (int i = 0; i < found; i++) { sum += load<W>(dx + rows[i] * C + c); }
        }
        left -= found;  // no barrier here: the next list is written after the next one, the next counts were read before the last
    }
    if (c < C) { store(dwte + v * C + c, sum); }
}
void embedding_backward(float* dwte, const float* dx, const int* tokens, Range vocab, i64 N, i64 C, GradMode mode, Run& run) {
    const i64 V = vocab.size();
    narrow<int>(N);
    int* first = run.workspace.get<int>(2 * V);
    cuda_check(cudaMemsetAsync(first, 0x7F, V * sizeof(int), run.stream));  // later than any row
    cuda_check(cudaMemsetAsync(first + V, 0, V * sizeof(int), run.stream));
    launch(count_tokens_kernel, flat_shape(N, 1), run, first, first + V, tokens, vocab.begin, vocab.end, N);
    const int W = widest<float>;
    with_width<float>(rows_aligned(W, dwte, C) && rows_aligned(W, dx, C), [&](auto width) {
        const unsigned threads = row_threads(C, width);
        launch(embedding_backward_kernel<width>, {dim3(blocks(V), blocks(ceil_div(C, threads * width))), threads}, run, dwte, dx, tokens,
               first, first + V, vocab.begin, N, C, mode == GradMode::ADD);
    });
}

// A position a block.
template <int W>
__global__ void __launch_bounds__(THREADS)
    position_backward_kernel(float* dwpe, const float* __restrict__ dx, i64 B, i64 S, i64 C, bool add) {
    const i64 s = blockIdx.x;
    for (i64 c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Floats<W> sum = {};
        if (add) { sum = load<W>(dwpe + s * C + c); }
        for (i64 b = 0; b < (s < S ? B : 0); b++) { sum += load<W>(dx + (b * S + s) * C + c); }
        store(dwpe + s * C + c, sum);
    }
}
void position_backward(float* dwpe, const float* dx, i64 B, i64 S, i64 C, i64 P, GradMode mode, Run& run) {
    const int W = widest<float>;
    with_width<float>(rows_aligned(W, dwpe, C) && rows_aligned(W, dx, C), [&](auto width) {
        launch(position_backward_kernel<width>, {blocks(P), row_threads(C, width)}, run, dwpe, dx, B, S, C, mode == GradMode::ADD);
    });
}

}  // namespace gpu
#endif
