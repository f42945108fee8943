// attention.cuh: causal attention without the S x S matrix (FlashAttention, arXiv 2205.14135; the backward's D as there).
//
//   s_ij = q_i k_j / sqrt(HS) for j <= pos0 + i,  p_ij = exp(s_ij - lse_i),  lse_i = log sum_j exp(s_ij)
//   att (B,S,NH,HS): o_i = sum_j p_ij v_j          q (B,NH,S,HS), k and v (B,KVH,S_kv,HS), lse (B,NH,S)
//   dv_j = sum_i p_ij do_i      ds_ij = p_ij (do_i v_j - D_i),  D_i = do_i o_i
//   dq_i = sum_j ds_ij k_j / sqrt(HS)      dk_j = sum_i ds_ij q_i / sqrt(HS)      sums over i include the group's query heads
//
// On the CPU a tile is held transposed, (keys, queries): the lanes of a vector are queries. Keys and values are then only
// ever broadcast, from memory as it is; the softmax needs no sum across lanes; any HS works; only queries are transposed.
#pragma once

#include "common.cuh"

namespace cpu {

constexpr i64 QUERY_BLOCK = 64, KEY_BLOCK = 64;

// Rows of HS elements as floats: in place, or converted into scratch.
inline const float* as_floats(const float* from, i64, float*) { return from; }
inline const float* as_floats(const bf16* from, i64 count, float* scratch) {
    vector_loop(count, [&](i64 i, auto lanes) { store(scratch + i, load(from + i, lanes), lanes); });
    return scratch;
}

// s[j] = value where key0 + j is after the query of the lane. first_query is lane 0's position.
inline void mask_after(float* s, float value, i64 key0, i64 keys, i64 first_query, i64 lanes) {
    for (i64 j = std::max<i64>(first_query + 1 - key0, 0); j < keys; j++) {
        const int hidden = (int)(key0 + j - first_query);  // lanes [0, hidden) do not see this key
        for (i64 i = 0; i < std::min<i64>(lanes, hidden); i += VL) {
            float* p = s + j * QUERY_BLOCK + i;
            store(p, lane_numbers() < hidden - (int)i ? splat(value) : load(p));
        }
    }
}

// One head's query block: o (rows, HS; ld_o) and lse (rows).
template <typename X>
void attend_block(X* o, i64 ld_o, float* lse, const X* q, const X* k, const X* v, i64 first_query, i64 rows, i64 HS) {
    static thread_local Scratch<float> scratch;
    float* qt = scratch.get((2 * HS + KEY_BLOCK) * QUERY_BLOCK + 2 * KEY_BLOCK * HS);  // (HS, queries)
    float* ot = qt + HS * QUERY_BLOCK;                                                 // (HS, queries)
    float* s = ot + HS * QUERY_BLOCK;                                                  // (keys, queries)
    float *k_floats = s + KEY_BLOCK * QUERY_BLOCK, *v_floats = k_floats + KEY_BLOCK * HS;
    alignas(64) float highest[QUERY_BLOCK], sum[QUERY_BLOCK];
    const i64 lanes = round_up(rows, VL), visible = first_query + rows;
    const float scale = 1.0f / sqrtf((float)HS);

    transpose_block(qt, QUERY_BLOCK, q, HS, rows, HS);
    std::fill(ot, ot + HS * QUERY_BLOCK, 0.0f);
    std::fill(highest, highest + QUERY_BLOCK, -INFINITY);
    std::fill(sum, sum + QUERY_BLOCK, 0.0f);
    for (i64 key0 = 0; key0 < visible; key0 += KEY_BLOCK) {
        const i64 keys = std::min(KEY_BLOCK, visible - key0);
        const float* kf = as_floats(k + key0 * HS, keys * HS, k_floats);
        const float* vf = as_floats(v + key0 * HS, keys * HS, v_floats);
        block_product(s, QUERY_BLOCK, {kf, HS, 1}, qt, QUERY_BLOCK, keys, lanes, HS, false);
        mask_after(s, -INFINITY, key0, keys, first_query, lanes);
        for (i64 i = 0; i < lanes; i += VL) {
            vfloat top = load(s + i);
            for (i64 j = 1; j < keys; j++) { top = max(load(s + j * QUERY_BLOCK + i), top); }
            const vfloat before = load(highest + i), now = max(before, top * scale);
            vfloat exps{};
            for (i64 j = 0; j < keys; j++) {
                const vfloat p = exp(load(s + j * QUERY_BLOCK + i) * scale - now);
                exps += p;
                store(s + j * QUERY_BLOCK + i, p);
            }
            const vfloat shrink = exp(before - now);
            store(sum + i, load(sum + i) * shrink + exps);
            store(highest + i, now);
            for (i64 d = 0; d < HS; d++) { store(ot + d * QUERY_BLOCK + i, load(ot + d * QUERY_BLOCK + i) * shrink); }
        }
        block_product(ot, QUERY_BLOCK, {vf, 1, HS}, s, QUERY_BLOCK, HS, lanes, keys, true);
    }
    for (i64 i = 0; i < lanes; i += VL) {
        const vfloat inverse = 1.0f / load(sum + i);
        for (i64 d = 0; d < HS; d++) { store(ot + d * QUERY_BLOCK + i, load(ot + d * QUERY_BLOCK + i) * inverse); }
    }
    transpose_block(o, ld_o, ot, QUERY_BLOCK, HS, rows);
    for (i64 i = 0; i < rows; i++) { lse[i] = highest[i] + logf(sum[i]); }
}

// One head's single query (decode): lanes are channels instead, and every key and value is read once.
template <typename X>
void attend_one(X* o, float* lse, const X* q, const X* k, const X* v, i64 keys, i64 HS) {
    static thread_local Scratch<float> scratch;
    float* p = scratch.get(keys);
    const float scale = 1.0f / sqrtf((float)HS);
    for (i64 j = 0; j < keys; j++) {
        vfloat dot{};
        vector_loop(HS, [&](i64 d, auto lanes) { dot += load(q + d, lanes) * load(k + j * HS + d, lanes); });
        p[j] = sum_lanes(dot) * scale;
    }
    vfloat top = splat(-INFINITY), exps{};
    vector_loop(keys, [&](i64 j, auto lanes) { top = max(pad(load(p + j, lanes), -INFINITY, lanes), top); });
    const float highest = max_lanes(top);
    vector_loop(keys, [&](i64 j, auto lanes) {
        const vfloat e = pad(exp(load(p + j, lanes) - highest), 0.0f, lanes);
        exps += e;
        store(p + j, e, lanes);
    });
    const float sum = sum_lanes(exps);
    vector_loop(HS, [&](i64 d, auto lanes) {
        vfloat even{}, odd{};  // two chains of additions hide half of their latency
        i64 j = 0;
        for (; j + 1 < keys; j += 2) {
            even += p[j] * load(v + j * HS + d, lanes);
            odd += p[j + 1] * load(v + (j + 1) * HS + d, lanes);
        }
        if (j < keys) { even += p[j] * load(v + j * HS + d, lanes); }
        store(o + d, (even + odd) * (1.0f / sum), lanes);
    });
    *lse = highest + logf(sum);
}

template <typename X>
void attention_forward(X* att, float* lse, const X* q, const X* k, const X* v, i64 pos0, i64 S_kv, i64 B, i64 S, i64 NH, i64 KVH, i64 HS,
                       Run& run) {
    const i64 blocks = ceil_div(S, QUERY_BLOCK), group = div_exact(NH, KVH, "query heads over key-value heads");
    run.parallel(B * NH * blocks, [&](i64 item) {
        const i64 bh = item / blocks, b = bh / NH, h = bh % NH;     // a head's blocks in a row: its keys and values stay in L2
        const i64 q0 = (blocks - 1 - item % blocks) * QUERY_BLOCK;  // the longest first: the last items are short
        const i64 kv = (b * KVH + h / group) * S_kv * HS;
        X* o = att + ((b * S + q0) * NH + h) * HS;
        const X* from = q + (bh * S + q0) * HS;
        if (S == 1) {
            attend_one(o, lse + bh, from, k + kv, v + kv, pos0 + 1, HS);
        } else {
            attend_block(o, NH * HS, lse + bh * S + q0, from, k + kv, v + kv, pos0 + q0, std::min(QUERY_BLOCK, S - q0), HS);
        }
    });
}

// A query block of one head as the backward wants it: transposed and by rows, the query scaled.
struct QueryBlock {
    float *qt, *dot;   // (HS, queries)
    float *q, *d_out;  // (queries, HSp)
    float *lse, *D;    // (queries)
    static i64 floats(i64 HS, i64 HSp) { return 2 * QUERY_BLOCK * (HS + HSp + 1); }
    QueryBlock(float* memory, i64 HS, i64 HSp) {
        for (float** part : {&qt, &dot}) { *part = std::exchange(memory, memory + HS * QUERY_BLOCK); }
        for (float** part : {&q, &d_out}) { *part = std::exchange(memory, memory + HSp * QUERY_BLOCK); }
        for (float** part : {&lse, &D}) { *part = std::exchange(memory, memory + QUERY_BLOCK); }
    }

    template <typename X>
    void fill(const X* from_q, const X* from_datt, const X* from_att, i64 ld_att, const float* from_lse, i64 rows, i64 HS, i64 HSp) {
        const float scale = 1.0f / sqrtf((float)HS);
        for (i64 i = 0; i < rows; i++) {
            vfloat product{};
            vector_loop(HS, [&](i64 d, auto lanes) {
                const vfloat grad = load(from_datt + i * ld_att + d, lanes);
                product += grad * load(from_att + i * ld_att + d, lanes);
                store(d_out + i * HSp + d, grad);
                store(q + i * HSp + d, scale * load(from_q + i * HS + d, lanes));
            });
            D[i] = sum_lanes(product);
            lse[i] = from_lse[i];
        }
        transpose_block(qt, QUERY_BLOCK, q, HSp, rows, HS);
        transpose_block(dot, QUERY_BLOCK, d_out, HSp, rows, HS);
    }
};

// dq, dk and dv of one key-value head, from every parts-th of its key blocks, from `part` on. Query heads of the group, query
// blocks and key blocks come in this order, so every sum has one order. dq goes to dq_partial (floats) where that is given.
template <typename X>
void attend_backward_head(X* dq, float* dq_partial, X* dk, X* dv, const X* datt, const X* att, i64 ld_att, const float* lse, const X* q,
                          const X* k, const X* v, i64 S, i64 group, i64 HS, i64 part, i64 parts) {
    static thread_local Scratch<float> scratch;
    const i64 HSp = round_up(HS, VL), tile = KEY_BLOCK * QUERY_BLOCK;
    float* p = scratch.get(2 * tile + QUERY_BLOCK * HS + QueryBlock::floats(HS, HSp) + 2 * S * (HS + HSp));  // (keys, queries)
    float* ds = p + tile;                                                                                    // (keys, queries)
    float* dqt = ds + tile;                                                                                  // (HS, queries)
    QueryBlock block(dqt + QUERY_BLOCK * HS, HS, HSp);
    float* dk_sum = block.D + QUERY_BLOCK;  // (S, HSp)
    float* dv_sum = dk_sum + S * HSp;       // (S, HSp)
    std::fill(dk_sum, dv_sum + S * HSp, 0.0f);
    const float* kf = as_floats(k, S * HS, dv_sum + S * HSp);
    const float* vf = as_floats(v, S * HS, dv_sum + S * HSp + S * HS);
    const float scale = 1.0f / sqrtf((float)HS);

    for (i64 h = 0; h < group; h++) {
        for (i64 q0 = 0; q0 < S; q0 += QUERY_BLOCK) {
            const i64 rows = std::min(QUERY_BLOCK, S - q0), lanes = round_up(rows, VL);
            block.fill(q + (h * S + q0) * HS, datt + q0 * ld_att + h * HS, att + q0 * ld_att + h * HS, ld_att, lse + h * S + q0, rows, HS,
                       HSp);
            std::fill(dqt, dqt + HS * QUERY_BLOCK, 0.0f);
            for (i64 key0 = part * KEY_BLOCK; key0 < q0 + rows; key0 += parts * KEY_BLOCK) {
                const i64 keys = std::min(KEY_BLOCK, q0 + rows - key0);
                const float *k_rows = kf + key0 * HS, *v_rows = vf + key0 * HS;
                block_product(p, QUERY_BLOCK, {k_rows, HS, 1}, block.qt, QUERY_BLOCK, keys, lanes, HS, false);
                block_product(ds, QUERY_BLOCK, {v_rows, HS, 1}, block.dot, QUERY_BLOCK, keys, lanes, HS, false);
                mask_after(p, -INFINITY, key0, keys, q0, lanes);
                for (i64 i = 0; i < lanes; i += VL) {
                    const vfloat lse_i = load(block.lse + i), D_i = load(block.D + i);
                    for (i64 j = i; j < keys * QUERY_BLOCK; j += QUERY_BLOCK) {
                        const vfloat p_ij = exp(load(p + j) - lse_i);
                        store(p + j, p_ij);
                        store(ds + j, p_ij * (load(ds + j) - D_i));
                    }
                }
                block_product(dv_sum + key0 * HSp, HSp, {p, QUERY_BLOCK, 1}, block.d_out, HSp, keys, HSp, rows, true);
                block_product(dk_sum + key0 * HSp, HSp, {ds, QUERY_BLOCK, 1}, block.q, HSp, keys, HSp, rows, true);
                block_product(dqt, QUERY_BLOCK, {k_rows, 1, HS}, ds, QUERY_BLOCK, HS, lanes, keys, true);
            }
            for (i64 i = 0; i < HS * QUERY_BLOCK; i += VL) { store(dqt + i, scale * load(dqt + i)); }
            if (dq_partial) {
                transpose_block(dq_partial + (h * S + q0) * HS, HS, dqt, QUERY_BLOCK, HS, rows);
            } else {
                transpose_block(dq + (h * S + q0) * HS, HS, dqt, QUERY_BLOCK, HS, rows);
            }
        }
    }
    for (i64 key0 = part * KEY_BLOCK; key0 < S; key0 += parts * KEY_BLOCK) {
        for (i64 j = key0; j < std::min(S, key0 + KEY_BLOCK); j++) {
            vector_loop(HS, [&](i64 d, auto lanes) {
                store(dk + j * HS + d, load(dk_sum + j * HSp + d, lanes), lanes);
                store(dv + j * HS + d, load(dv_sum + j * HSp + d, lanes), lanes);
            });
        }
    }
}

// Parallel over key-value heads; where those are few, also over parts of the keys, whose shares of dq are added in order.
template <typename X>
void attention_backward(X* dq, X* dk, X* dv, const X* datt, const X* att, const float* lse, const X* q, const X* k, const X* v, i64 B,
                        i64 S, i64 NH, i64 KVH, i64 HS, Run& run) {
    static thread_local Scratch<float> scratch;
    const i64 group = div_exact(NH, KVH, "query heads over key-value heads"), wanted = 16;
    const i64 parts = std::min(ceil_div(wanted, B * KVH), ceil_div(S, KEY_BLOCK)), size = B * NH * S * HS;
    float* partials = parts > 1 ? scratch.get(parts * size) : nullptr;
    run.parallel(B * KVH * parts, [&](i64 item) {
        const i64 bk = item / parts, part = item % parts, b = bk / KVH, first = bk % KVH * group;  // the group's first query head
        const i64 kv = bk * S * HS, head = (b * NH + first) * S, row = (b * S * NH + first) * HS;
        attend_backward_head(dq + head * HS, partials ? partials + part * size + head * HS : nullptr, dk + kv, dv + kv, datt + row,
                             att + row, NH * HS, lse + head, q + head * HS, k + kv, v + kv, S, group, HS, part, parts);
    });
    if (!partials) { return; }
    parallel_pieces(size, 16384, run, [&](i64 begin, i64 n) {
        vector_loop(n, [&](i64 i, auto lanes) {
            vfloat sum = load(partials + begin + i, lanes);
            for (i64 part = 1; part < parts; part++) { sum += load(partials + part * size + begin + i, lanes); }
            store(dq + begin + i, sum, lanes);
        });
    });
}

}  // namespace cpu
