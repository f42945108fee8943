// attention_amx.h: the loops of ops/attention.cuh on a processor's tiles (amx.h), for bf16. Formulas and shapes are there.
//
// A step takes many keys and LANES queries; its scores are held transposed, (keys, LANES), so that lanes of vectors are queries: what belongs to a query is
// a vector, and probabilities leave as words of two keys, a right operand. As a left operand, for dv and dk, a row of them is words of two queries, i and
// i + LANES / 2: their order in a sum is free, and dO and Q are stacked in the same one. All are padded with zeros to whole tiles.
#pragma once

#include "attention_softmax.h"

namespace cpu::tiled {

constexpr i64 LANES = 32, FORWARD_KEYS = 256, FORWARD_QUERIES = 512, BACKWARD_KEYS = 128, BACKWARD_QUERIES = 256;
constexpr int V = LANES / VL;  // vectors of a row of scores

// Channels of a head: as a product's depth, and as its rows or columns.
struct Width {
    i64 HS, depth, rows;
    explicit Width(i64 HS) : HS(HS), depth(round_up(HS, amx::DEPTH)), rows(round_up(HS, amx::ROWS)) {}
};

// to (padded, depth) = rows of HS, and zeros.
inline void pad_rows(bf16* to, const bf16* from, i64 ld_from, i64 rows, i64 padded, const Width& w) {
    for (i64 r = 0; r < padded; r++, to += w.depth, from += ld_from) {
        const i64 words = r < rows ? w.HS / 2 : 0;
        for (i64 i = 0; i < w.depth / 2; i += VL) { store((float*)to + i, load((const float*)from + i, Part{(int)std::clamp<i64>(words - i, 0, VL)})); }
        if (r < rows && w.HS % 2 != 0) { to[w.HS - 1] = from[w.HS - 1]; }
    }
}
// to (rows / 2, cols): words of rows of (rows, depth): of rows 2k and 2k + 1 (gap 1), or, in each run of 2 gap rows, of i and i + gap.
inline void stack(bf16x2* to, const bf16* from, i64 depth, i64 gap, i64 rows, i64 cols) {
    for (i64 r = 0; r < rows / 2; r++, to += cols) {
        const bf16* even = from + (r / gap * 2 * gap + r % gap) * depth;
        for (i64 i = 0; i < cols; i += VL) { store(to + i, (vuint)load(even + i) >> 16 | (vuint)load(even + gap * depth + i)); }
    }
}

// One head's query block: o (rows, HS; ld_o) and lse (rows).
inline void attend_block(bf16* o, i64 ld_o, float* lse, const bf16* q, const bf16* k, const bf16* v, i64 first_query, i64 rows, i64 HS) {
    constexpr i64 KEYS = FORWARD_KEYS;
    static thread_local Scratch<float> scratch;
    const Width w(HS);
    const i64 visible = first_query + rows, padded = round_up(visible, KEYS);
    float* s = scratch.get(LANES * (3 * KEYS / 2 + w.rows + w.depth) + KEYS / 2 * (w.depth + w.rows) + padded / 2 * (w.depth + w.rows));  // (KEYS, LANES)
    bf16x2* p = (bf16x2*)(s + KEYS * LANES);                             // (KEYS / 2, LANES)
    float* ot = (float*)(p + KEYS / 2 * LANES);                          // (channels, LANES)
    bf16x2* qt = (bf16x2*)(ot + w.rows * LANES);                         // (depth / 2, LANES)
    bf16* rows_padded = (bf16*)(qt + w.depth / 2 * LANES);               // (KEYS or LANES, depth)
    bf16x2* stacked = (bf16x2*)(rows_padded + std::max(KEYS, LANES) * w.depth);  // (KEYS / 2, channels)
    bf16* k_rows = (bf16*)(stacked + KEYS / 2 * w.rows);                 // (visible, depth)
    bf16* vt = k_rows + padded * w.depth;                                // (visible / KEYS, channels, KEYS)
    alignas(64) float reference[LANES], sum[LANES];
    const float scale = LOG2_E / sqrtf((float)HS);

    const amx::Tiles tiles;
    pad_rows(k_rows, k, HS, visible, round_up(visible, amx::ROWS), w);
    for (i64 key0 = 0; key0 < visible; key0 += KEYS) {
        const i64 keys = std::min(KEYS, visible - key0), whole = round_up(keys, amx::DEPTH);
        pad_rows(rows_padded, v + key0 * HS, HS, keys, whole, w);
        stack(stacked, rows_padded, w.depth, 1, whole, w.rows);
        transpose_block((float*)(vt + key0 * w.rows), KEYS / 2, (const float*)stacked, w.rows, whole / 2, w.rows);
    }
    for (i64 r = 0; r < rows; r += LANES) {
        const i64 query0 = first_query + r, count = std::min(LANES, rows - r);
        pad_rows(rows_padded, q + r * HS, HS, count, LANES, w);
        transpose_block((float*)qt, LANES, (const float*)rows_padded, w.depth / 2, LANES, w.depth / 2);
        std::fill(reference, reference + LANES, -INFINITY), std::fill(sum, sum + LANES, 0.0f);
        for (i64 key0 = 0; key0 < query0 + count; key0 += KEYS) {
            const i64 keys = std::min(KEYS, query0 + count - key0), whole = round_up(keys, amx::DEPTH);
            amx::block_product(s, LANES, k_rows + key0 * w.depth, w.depth, qt, LANES, round_up(keys, amx::ROWS), LANES, w.depth, false);
            mask_after<LANES>(s, key0, keys, whole, query0, LANES);
            soften<LANES, V>(p, s, ot, key0 > 0 ? w.rows : 0, reference, sum, whole, scale);
            amx::block_product(ot, LANES, vt + key0 * w.rows, KEYS, p, LANES, w.rows, LANES, whole, key0 > 0);
        }
        for (int v = 0; v < V; v++) {
            const vfloat inverse = 1.0f / load(sum + v * VL);
            for (i64 d = 0; d < HS; d++) { store(ot + d * LANES + v * VL, load(ot + d * LANES + v * VL) * inverse); }
        }
        transpose_block(o + r * ld_o, ld_o, ot, LANES, HS, count);
        for (i64 i = 0; i < count; i++) { lse[r + i] = reference[i] * LN_2 + logf(sum[i]); }
    }
}

// p = 2^(scale s - log2_sum) and ds = p (dp - D), of scores s and dp (keys, LANES), keys even: rows (keys, LANES / 2; ld) of words of queries i and
// i + LANES / 2, and ds_words (keys / 2, LANES) of two keys.
ALWAYS_INLINE void soften_backward(bf16x2* p_rows, bf16x2* ds_rows, i64 ld, bf16x2* ds_words, const float* s, const float* dp, const float* log2_sum, const float* D, i64 keys, float scale) {
    vfloat log2_sums[V], Ds[V];
    for (int v = 0; v < V; v++) { log2_sums[v] = load(log2_sum + v * VL), Ds[v] = load(D + v * VL); }
    for (i64 j = 0; j < keys; j += 2) {
        vfloat p_j[2][V], ds_j[2][V];
#pragma GCC unroll 4
        for (int r = 0; r < 2 * V; r++) {
            const i64 at = (j + r / V) * LANES + r % V * VL;
            p_j[r / V][r % V] = exp2(load(s + at) * scale - log2_sums[r % V]);
            ds_j[r / V][r % V] = p_j[r / V][r % V] * (load(dp + at) - Ds[r % V]);
        }
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++) {
            for (int v = 0; v < V / 2; v++) {
                const i64 at = (j + r) * ld + v * VL;
                store(p_rows + at, words_of(p_j[r][v], p_j[r][v + V / 2]));
                store(ds_rows + at, words_of(ds_j[r][v], ds_j[r][v + V / 2]));
            }
        }
#pragma GCC unroll 2
        for (int v = 0; v < V; v++) { store(ds_words + j / 2 * LANES + v * VL, words_of(ds_j[0][v], ds_j[1][v])); }
    }
}

// dq, dk and dv of one key-value head, from every parts-th of its key blocks, from `part` on; sums have the order of ops/attention.cuh.
inline void attend_backward_head(bf16* dq, float* dq_partial, bf16* dk, bf16* dv, const bf16* datt, const bf16* att, i64 ld_att, const float* lse,
                                 const bf16* q, const bf16* k, const bf16* v, i64 S, i64 group, i64 HS, i64 part, i64 parts) {
    constexpr i64 KEYS = BACKWARD_KEYS, QUERIES = BACKWARD_QUERIES;
    static thread_local Scratch<float> scratch;
    const Width w(HS);
    const i64 padded = round_up(S, KEYS), words = w.depth / 2;
    float* s = scratch.get(KEYS * (2 * LANES + 3 * QUERIES / 2) + QUERIES * (4 * words + 2 * w.rows) + KEYS * w.rows / 2 + padded * (2 * words + 5 * w.rows / 2));  // (KEYS, LANES)
    float* ds = s + KEYS * LANES;                                     // (KEYS, LANES)
    bf16x2* p_rows = (bf16x2*)(ds + KEYS * LANES);                    // (KEYS, QUERIES / 2)
    bf16x2* ds_rows = p_rows + KEYS * QUERIES / 2;                    // (KEYS, QUERIES / 2)
    bf16x2* ds_words = ds_rows + KEYS * QUERIES / 2;                  // (groups, KEYS / 2, LANES)
    bf16* q_rows = (bf16*)(ds_words + KEYS / 2 * QUERIES);            // (QUERIES, depth)
    bf16* do_rows = q_rows + QUERIES * w.depth;                       // (QUERIES, depth)
    bf16x2* qt = (bf16x2*)(do_rows + QUERIES * w.depth);              // (groups, depth / 2, LANES)
    bf16x2* dot = qt + QUERIES * words;                               // (groups, depth / 2, LANES)
    bf16x2* q_words = dot + QUERIES * words;                          // (QUERIES / 2, channels)
    bf16x2* do_words = q_words + QUERIES / 2 * w.rows;                // (QUERIES / 2, channels)
    float* dqt = (float*)(do_words + QUERIES / 2 * w.rows);           // (groups, channels, LANES)
    bf16x2* stacked = (bf16x2*)(dqt + QUERIES * w.rows);              // (KEYS / 2, channels)
    bf16* k_rows = (bf16*)(stacked + KEYS / 2 * w.rows);              // (S, depth)
    bf16* v_rows = k_rows + padded * w.depth;                         // (S, depth)
    bf16* kt = v_rows + padded * w.depth;                             // (S / KEYS, channels, KEYS)
    float* dk_sum = (float*)(kt + padded * w.rows);                   // (S, channels)
    float* dv_sum = dk_sum + padded * w.rows;                         // (S, channels)
    alignas(64) float log2_sum[QUERIES], D[QUERIES];
    const float scale = 1.0f / sqrtf((float)HS), scale_log2 = scale * LOG2_E;

    const amx::Tiles tiles;
    for (i64 key0 = part * KEYS; key0 < S; key0 += parts * KEYS) {
        pad_rows(k_rows + key0 * w.depth, k + key0 * HS, HS, std::min(KEYS, S - key0), KEYS, w);
        pad_rows(v_rows + key0 * w.depth, v + key0 * HS, HS, std::min(KEYS, S - key0), KEYS, w);
        stack(stacked, k_rows + key0 * w.depth, w.depth, 1, KEYS, w.rows);
        transpose_block((float*)(kt + key0 * w.rows), KEYS / 2, (const float*)stacked, w.rows, KEYS / 2, w.rows);
    }
    std::fill(dk_sum, dk_sum + 2 * padded * w.rows, 0.0f);
    for (i64 h = 0; h < group; h++) {
        for (i64 q0 = 0; q0 < S; q0 += QUERIES) {
            const i64 rows = std::min(QUERIES, S - q0), groups = ceil_div(rows, LANES), from = h * S + q0;
            const bf16 *datt_rows = datt + q0 * ld_att + h * HS, *att_rows = att + q0 * ld_att + h * HS;
            for (i64 i = 0; i < groups * LANES; i += VL) {  // a query that is not there has zeros for q and dO: whatever its probabilities, it adds nothing
                vfloat products[VL] = {};
                for (i64 r = 0; r < std::min<i64>(VL, rows - i); r++) {
                    const i64 at = (i + r) * ld_att;
                    vector_loop(HS, [&](i64 d, auto lanes) { products[r] += load(datt_rows + at + d, lanes) * load(att_rows + at + d, lanes); });
                }
                store(D + i, sums_of_lanes<VL>(products));
                const Part there{(int)std::clamp<i64>(rows - i, 0, VL)};
                store(log2_sum + i, load(lse + from + i, there) * LOG2_E);
            }
            pad_rows(q_rows, q + from * HS, HS, rows, groups * LANES, w);
            pad_rows(do_rows, datt_rows, ld_att, rows, groups * LANES, w);
            stack(q_words, q_rows, w.depth, LANES / 2, groups * LANES, w.rows);
            stack(do_words, do_rows, w.depth, LANES / 2, groups * LANES, w.rows);
            for (i64 g = 0; g < groups; g++) {
                transpose_block((float*)(qt + g * words * LANES), LANES, (const float*)(q_rows + g * LANES * w.depth), words, LANES, words);
                transpose_block((float*)(dot + g * words * LANES), LANES, (const float*)(do_rows + g * LANES * w.depth), words, LANES, words);
            }
            std::fill(dqt, dqt + groups * w.rows * LANES, 0.0f);
            for (i64 key0 = part * KEYS; key0 < q0 + rows; key0 += parts * KEYS) {
                const i64 keys = std::min(KEYS, q0 + rows - key0), whole = round_up(keys, amx::DEPTH), first = std::max<i64>(key0 - q0, 0) / LANES;
                for (i64 g = first; g < groups; g++) {
                    const i64 query0 = q0 + g * LANES, seen = std::min(keys, query0 + LANES - key0);
                    amx::block_product(s, LANES, k_rows + key0 * w.depth, w.depth, qt + g * words * LANES, LANES, round_up(seen, amx::ROWS), LANES, w.depth, false);
                    amx::block_product(ds, LANES, v_rows + key0 * w.depth, w.depth, dot + g * words * LANES, LANES, round_up(seen, amx::ROWS), LANES, w.depth, false);
                    mask_after<LANES>(s, key0, seen, whole, query0, LANES);
                    std::fill(ds + seen * LANES, ds + whole * LANES, 0.0f);
                    soften_backward(p_rows + g * LANES / 2, ds_rows + g * LANES / 2, QUERIES / 2, ds_words + g * KEYS / 2 * LANES, s, ds, log2_sum + g * LANES, D + g * LANES, whole, scale_log2);
                }
                for (i64 g = first; g < groups; g++) {  // not at once: a tile's load waits for every row that is still on its way to L1
                    amx::block_product(dqt + g * w.rows * LANES, LANES, kt + key0 * w.rows, KEYS, ds_words + g * KEYS / 2 * LANES, LANES, w.rows, LANES, whole, true);
                }
                const i64 depth = (groups - first) * LANES, skip = first * LANES / 2;
                amx::block_product(dv_sum + key0 * w.rows, w.rows, (const bf16*)(p_rows + skip), QUERIES, do_words + skip * w.rows, w.rows, round_up(keys, amx::ROWS), w.rows, depth, true);
                amx::block_product(dk_sum + key0 * w.rows, w.rows, (const bf16*)(ds_rows + skip), QUERIES, q_words + skip * w.rows, w.rows, round_up(keys, amx::ROWS), w.rows, depth, true);
            }
            for (i64 i = 0; i < groups * w.rows * LANES; i += VL) { store(dqt + i, scale * load(dqt + i)); }
            for (i64 g = 0; g < groups; g++) {
                const i64 count = std::min(LANES, rows - g * LANES), to = (from + g * LANES) * HS;
                if (dq_partial) {
                    transpose_block(dq_partial + to, HS, dqt + g * w.rows * LANES, LANES, HS, count);
                } else {
                    transpose_block(dq + to, HS, dqt + g * w.rows * LANES, LANES, HS, count);
                }
            }
        }
    }
    for (i64 key0 = part * KEYS; key0 < S; key0 += parts * KEYS) {
        for (i64 j = key0; j < std::min(S, key0 + KEYS); j++) {
            vector_loop(HS, [&](i64 d, auto lanes) {
                store(dk + j * HS + d, scale * load(dk_sum + j * w.rows + d, lanes), lanes);
                store(dv + j * HS + d, load(dv_sum + j * w.rows + d, lanes), lanes);
            });
        }
    }
}

}  // namespace cpu::tiled
