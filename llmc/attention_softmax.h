// attention_softmax.h: the softmax of attention's loops (ops/attention.cuh, attention_amx.h). Scores are transposed, (keys, queries; LD): a vector is one key's of VL queries.
#pragma once

#include "amx.h"

namespace cpu {

constexpr float LN_2 = 0.693147181f;

// What products are made of: E is float, or bf16x2 where X is bf16 and the processor multiplies pairs fast, or has tiles. It takes STEPS of a product's depth,
// and probabilities and their gradients are rounded to bf16 before the products that take them, as in the kernels.
template <typename E>
constexpr i64 STEPS = sizeof(E) / (std::is_same_v<E, float> ? 4 : 2);

// Words of floats, which are rounded to nearest, ties away from zero: half the instructions of pairs_of on an Intel.
ALWAYS_INLINE vuint words_of(vfloat low, vfloat high) { return ((vuint)low + 0x8000) >> 16 | (((vuint)high + 0x8000) & 0xFFFF0000); }

// STEPS rows of floats as one of E.
ALWAYS_INLINE void store_steps(float* to, const vfloat (&row)[1]) { store(to, row[0]); }
ALWAYS_INLINE void store_steps(bf16x2* to, const vfloat (&rows)[2]) { store(to, AMX ? words_of(rows[0], rows[1]) : pairs_of(rows[0], rows[1])); }

// s[j] = -inf where key0 + j is after the query of the lane, and in rows from keys to whole. first_query is lane 0's position.
template <i64 LD>
void mask_after(float* s, i64 key0, i64 keys, i64 whole, i64 first_query, i64 lanes) {
    for (i64 j = std::clamp<i64>(first_query + 1 - key0, 0, keys); j < whole; j++) {
        const int hidden = (int)(j < keys ? key0 + j - first_query : lanes);  // lanes [0, hidden) do not see this key
        for (i64 i = 0; i < std::min<i64>(lanes, hidden); i += VL) {
            float* p = s + j * LD + i;
            store(p, lane_numbers() < hidden - (int)i ? splat(-INFINITY) : load(p));
        }
    }
}

// Of V vectors of queries: powers of two of scale s less the reference, to p (keys / STEPS; LD), which may lie in place of s, and to their sum. keys is a multiple of STEPS.
// The reference, -inf before the first keys, follows the highest score only once that is 2^8 above: what was summed before, `sum` and ot (rows; LD), seldom shrinks.
template <i64 LD, int V, typename E>
ALWAYS_INLINE void soften(E* p, const float* s, float* ot, i64 rows, float* reference, float* sum, i64 keys, float scale) {
    constexpr int W = STEPS<E>;
    vfloat now[V], sums[V][W];
    i64 j = 0;
    for (int v = 0; v < V; v++, s += VL, ot += VL) {
        vfloat even = load(s), odd = even;
        for (j = 1; j + 2 <= keys; j += 2) { even = max(load(s + j * LD), even), odd = max(load(s + (j + 1) * LD), odd); }
        if (j < keys) { even = max(load(s + j * LD), even); }
        const vfloat top = max(even, odd) * scale, before = load(reference + v * VL);
        const vint moves = top > before + 8.0f;
        now[v] = moves ? top : before;
        for (int w = 0; w < W; w++) { sums[v][w] = w == 0 ? load(sum + v * VL) : vfloat{}; }
        if (any(moves)) {
            const vfloat shrink = exp2(before - now[v]);
            sums[v][0] *= shrink;
            for (i64 d = 0; d < rows; d++) { store(ot + d * LD, load(ot + d * LD) * shrink); }
            store(reference + v * VL, now[v]);
        }
    }
    s -= V * VL;
    for (j = 0; j < keys; j += W, s += W * LD, p += LD) {
        vfloat p_j[V][W];
#pragma GCC unroll 4
        for (int i = 0; i < V * W; i++) { p_j[i % V][i / V] = exp2(load(s + i / V * LD + i % V * VL) * scale - now[i % V]); }
#pragma GCC unroll 4
        for (int i = 0; i < V * W; i++) { sums[i % V][i / V] += p_j[i % V][i / V]; }
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) { store_steps(p + v * VL, p_j[v]); }
    }
    for (int v = 0; v < V; v++) { store(sum + v * VL, W == 1 ? sums[v][0] : sums[v][0] + sums[v][W - 1]); }
}

}  // namespace cpu
