// rope.cuh: splits the QKV product into heads and rotates queries and keys by position (arXiv 2104.09864, the half-split
// form of GPT-NeoX and Llama: pairs are (i, i + HS/2)).
//
//   qkv (B,S,(NH+2*KVH)*HS) = [q heads | k heads | v heads]
//   q (B,NH,S,HS),  rows [pos0, pos0+S) of k, v (B,KVH,S_kv,HS):
//     a' = a cos - b sin,  b' = b cos + a sin,   cos, sin (positions, HS/2) at pos0 + s; v is copied
//   backward: dqkv from dq, dk, dv at pos0 = 0, the transposed rotation: sin changes sign
#pragma once

#include "common.cuh"

#ifndef LLMC_KERNELS
namespace cpu {

// Some rows of one head, its rows ld_to and ld_from apart; cos (rows, HS/2) null: a copy. sign is +1 forward, -1 backward.
template <typename X>
ALWAYS_INLINE void rotate_rows(X* to, i64 ld_to, const X* from, i64 ld_from, const float* cos, const float* sin, float sign, i64 rows, i64 HS) {
    const i64 half = HS / 2;
    for (i64 row = 0; row < rows; row++, to += ld_to, from += ld_from) {
        ahead(to, rows * ld_to), ahead(to + HS / 2, rows * ld_to);
        ahead(from, rows * ld_from), ahead(from + HS / 2, rows * ld_from);
        if (!cos) {
            std::copy(from, from + HS, to);
            continue;
        }
        vector_loop(half, [&](i64 i, auto lanes) {
            const vfloat a = load(from + i, lanes), b = load(from + half + i, lanes);
            const vfloat c = load(cos + row * half + i, lanes), s = sign * load(sin + row * half + i, lanes);
            store(to + i, a * c - b * s, lanes);
            store(to + half + i, b * c + a * s, lanes);
        });
    }
}

// body(b, h, rows) for every sequence and head, h counting q's, k's and v's heads, some rows at a time, eight times in a row. Not a row at a time: its
// heads lie a multiple of S apart, as a rule in one set of the cache.
template <typename Body>
void parallel_heads(i64 B, i64 S, i64 heads, i64 HS, Run& run, const Body& body) {
    const i64 rows = std::max<i64>(16384 / (heads * HS), 1), item_rows = 8 * rows, pieces = ceil_div(S, item_rows);
    run.parallel(B * pieces, [&](i64 item) {
        const i64 b = item / pieces, end = std::min(S, (item % pieces + 1) * item_rows);
        for (i64 begin = item % pieces * item_rows; begin < end; begin += rows) {
            for (i64 h = 0; h < heads; h++) { body(b, h, Range{begin, std::min(end, begin + rows)}); }
        }
    });
}

// Where head h of sequence b begins in q (B,NH,S,HS), or in k or v (B,KVH,S_kv,HS) at position `first`.
template <typename X>
X* head_rows(X* q, X* k, X* v, i64 b, i64 h, i64 S, i64 S_kv, i64 first, i64 NH, i64 KVH, i64 HS) {
    if (h < NH) { return q + (b * NH + h) * S * HS; }
    const i64 kv_head = (h - NH) % KVH;
    return (h < NH + KVH ? k : v) + ((b * KVH + kv_head) * S_kv + first) * HS;
}

template <typename X>
void rope_split_forward(X* q, X* k, X* v, const X* qkv, const float* cos, const float* sin, const int* pos0, i64 S_kv, i64 B, i64 S, i64 NH,
                        i64 KVH, i64 HS, Run& run) {
    check(!cos || HS % 2 == 0, "rotary positions need an even head size, not %lld", (long long)HS);
    const i64 heads = NH + 2 * KVH, first = pos0 ? *pos0 : 0;
    parallel_heads(B, S, heads, HS, run, [&](i64 b, i64 h, Range rows) {
        X* to = head_rows(q, k, v, b, h, S, S_kv, first, NH, KVH, HS);
        const bool rotated = cos && h < NH + KVH;
        const i64 angles = (first + rows.begin) * (HS / 2);
        rotate_rows(to + rows.begin * HS, HS, qkv + ((b * S + rows.begin) * heads + h) * HS, heads * HS, rotated ? cos + angles : nullptr, rotated ? sin + angles : nullptr,
                    1.0f, rows.size(), HS);
    });
}

template <typename X>
void rope_split_backward(X* dqkv, const X* dq, const X* dk, const X* dv, const float* cos, const float* sin, i64 B, i64 S, i64 NH, i64 KVH,
                         i64 HS, Run& run) {
    const i64 heads = NH + 2 * KVH;
    parallel_heads(B, S, heads, HS, run, [&](i64 b, i64 h, Range rows) {
        const X* from = head_rows(dq, dk, dv, b, h, S, S, 0, NH, KVH, HS);
        const bool rotated = cos && h < NH + KVH;
        const i64 angles = rows.begin * (HS / 2);
        rotate_rows(dqkv + ((b * S + rows.begin) * heads + h) * HS, heads * HS, from + rows.begin * HS, HS, rotated ? cos + angles : nullptr, rotated ? sin + angles : nullptr,
                    -1.0f, rows.size(), HS);
    });
}

}  // namespace cpu

#else
namespace gpu {

// A row a block, both ways. A thread takes W pairs (i, i + HS/2) of one head, or, where HS is odd and so nothing is rotated, W elements.
template <typename X, int W, bool FORWARD>
__global__ void __launch_bounds__(THREADS)
    rope_split_kernel(X* q, X* k, X* v, X* qkv, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ pos0,
                      i64 S_kv, i64 S, int NH, int KVH, int HS) {
    const i64 n = blockIdx.x, b = n / S, s = n % S, t = s + (pos0 ? *pos0 : 0);
    const bool pairs = HS % 2 == 0;
    const int half = pairs ? HS / 2 : HS, items = half / W;  // of one head
    for (int item = threadIdx.x; item < (NH + 2 * KVH) * items; item += blockDim.x) {
        const int head = item / items, i = item % items * W;
        X* joint = qkv + (n * (NH + 2 * KVH) + head) * HS + i;
        X* split = head < NH         ? q + ((b * NH + head) * S + s) * HS + i
                   : head < NH + KVH ? k + ((b * KVH + head - NH) * S_kv + t) * HS + i
                                     : v + ((b * KVH + head - NH - KVH) * S_kv + t) * HS + i;
        const X* from = FORWARD ? joint : split;
        X* to = FORWARD ? split : joint;
        Floats<W> a = load<W>(from), b = {};
        if (pairs) { b = load<W>(from + half); }
        if (cos && head < NH + KVH) {
            const Floats<W> c = load<W>(cos + t * half + i), sines = load<W>(sin + t * half + i);
            for (int j = 0; j < W; j++) {
                const float sine = FORWARD ? sines[j] : -sines[j], a_new = a[j] * c[j] - b[j] * sine;
                b[j] = b[j] * c[j] + a[j] * sine;
                a[j] = a_new;
            }
        }
        store(to, a);
        if (pairs) { store(to + half, b); }
    }
}
template <bool FORWARD, typename X>
void rope_split(X* q, X* k, X* v, X* qkv, const float* cos, const float* sin, const int* pos0, i64 S_kv, i64 B, i64 S, i64 NH, i64 KVH,
                i64 HS, Run& run) {
    check(!cos || HS % 2 == 0, "rotary positions need an even head size, not %lld", (long long)HS);
    const i64 half = HS % 2 == 0 ? HS / 2 : HS, heads = NH + 2 * KVH;
    const int W = widest<X>;
    const bool wide = half % W == 0 && rows_aligned(W, q, HS) && rows_aligned(W, k, HS) && rows_aligned(W, v, HS) &&
                      rows_aligned(W, qkv, HS) && rows_aligned(W, cos, half) && rows_aligned(W, sin, half);
    with_width<X>(wide, [&](auto width) {
        launch(rope_split_kernel<X, width, FORWARD>, {blocks(B * S), row_threads(heads * half, width)}, run, q, k, v, qkv, cos, sin, pos0,
               S_kv, S, narrow<int>(NH), narrow<int>(KVH), narrow<int>(HS));
    });
}

template <typename X>
void rope_split_forward(X* q, X* k, X* v, const X* qkv, const float* cos, const float* sin, const int* pos0, i64 S_kv, i64 B, i64 S, i64 NH,
                        i64 KVH, i64 HS, Run& run) {
    rope_split<true>(q, k, v, const_cast<X*>(qkv), cos, sin, pos0, S_kv, B, S, NH, KVH, HS, run);
}
template <typename X>
void rope_split_backward(X* dqkv, const X* dq, const X* dk, const X* dv, const float* cos, const float* sin, i64 B, i64 S, i64 NH, i64 KVH,
                         i64 HS, Run& run) {
    rope_split<false>(const_cast<X*>(dq), const_cast<X*>(dk), const_cast<X*>(dv), dqkv, cos, sin, nullptr, S, B, S, NH, KVH, HS, run);
}

}  // namespace gpu
#endif
