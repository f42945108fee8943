// attention.cuh: causal attention without the S x S matrix (FlashAttention, arXiv 2205.14135; the backward's D as there).
//
//   s_ij = q_i k_j / sqrt(HS) for j <= pos0 + i,  p_ij = exp(s_ij - lse_i),  lse_i = log sum_j exp(s_ij)
//   att (B,S,NH,HS): o_i = sum_j p_ij v_j          q (B,NH,S,HS), k and v (B,KVH,S_kv,HS), lse (B,NH,S)
//   dv_j = sum_i p_ij do_i      ds_ij = p_ij (do_i v_j - D_i),  D_i = do_i o_i
//   dq_i = sum_j ds_ij k_j / sqrt(HS)      dk_j = sum_i ds_ij q_i / sqrt(HS)      sums over i include the group's query heads
//
// On the CPU a tile is held transposed, (keys, queries): the lanes of a vector are queries. Keys and values are then only
// ever broadcast, as they lie in memory or two rows to a word; the softmax needs no sum across lanes; any HS works; only queries are transposed.
#pragma once

#include "common.cuh"

#ifndef LLMC_KERNELS
#include "../attention_amx.h"

namespace cpu {

constexpr i64 QUERY_BLOCK = 64, KEY_BLOCK = 64, DIAGONAL = 16;  // keys of a step, and of one where some queries do not see all

// f(E): head sizes are seldom odd.
template <typename X, typename F>
void with_operands(i64 HS, const F& f) {
    if constexpr (FAST_PAIRS && !AMX && std::is_same_v<X, bf16>) {  // with AMX it is an Intel, which multiplies pairs no faster than floats
        if (HS % 2 == 0) { return f(bf16x2{}); }
    }
    f(float{});
}

// Rows of HS elements, (rows, HS / STEPS) of E: in place, or converted into scratch.
inline const float* rows_of(const float* from, i64, float*) { return from; }
inline const float* rows_of(const bf16* from, i64 count, float* scratch) {
    vector_loop(count, [&](i64 i, auto lanes) { store(scratch + i, load(from + i, lanes), lanes); });
    return scratch;
}
inline const bf16x2* rows_of(const bf16* from, i64, bf16x2*) { return (const bf16x2*)from; }

// to (HS / STEPS, queries) = the transpose of those rows.
template <typename X>
void transpose_rows(float* to, const X* from, i64 ld_from, i64 rows, i64 HS) {
    transpose_block(to, QUERY_BLOCK, from, ld_from, rows, HS);
}
inline void transpose_rows(bf16x2* to, const bf16* from, i64 ld_from, i64 rows, i64 HS) {
    transpose_block((float*)to, QUERY_BLOCK, (const float*)from, ld_from / 2, rows, HS / 2);  // words are only moved
}

// to (ceil(rows / STEPS), cols; ld): STEPS rows in one; zeros where there is no row, and up to ld.
template <typename X>
void stack_rows(float* to, i64 ld, const X* from, i64 ld_from, i64 rows, i64 cols) {
    for (i64 r = 0; r < rows; r++) {
        vector_loop(cols, [&](i64 i, auto lanes) { store(to + r * ld + i, load(from + r * ld_from + i, lanes)); });
    }
}
inline void stack_rows(bf16x2* to, i64 ld, const bf16* from, i64 ld_from, i64 rows, i64 cols) {
    for (i64 r = 0; r < rows; r += 2, to += ld, from += 2 * ld_from) {
        vector_loop(cols, [&](i64 i, auto lanes) {
            const vuint even = (vuint)load(from + i, lanes), odd = r + 1 < rows ? (vuint)load(from + ld_from + i, lanes) : vuint{};
            store(to + i, even >> 16 | odd);
        });
    }
}

// The same with ld = cols, in place where nothing has to be done; else in scratch, which has room for a vector more.
template <typename X>
const float* stacked(const X* from, i64 rows, i64 cols, float* scratch) {
    return rows_of(from, rows * cols, scratch);
}
inline const bf16x2* stacked(const bf16* from, i64 rows, i64 cols, bf16x2* scratch) {
    stack_rows(scratch, cols, from, cols, rows, cols);
    return scratch;
}

// One head's query block: o (rows, HS; ld_o) and lse (rows).
template <typename E, typename X>
void attend_block(X* o, i64 ld_o, float* lse, const X* q, const X* k, const X* v, i64 first_query, i64 rows, i64 HS) {
    static thread_local Scratch<float> scratch;
    constexpr i64 W = STEPS<E>;
    const i64 lanes = round_up(rows, VL), visible = first_query + rows;
    float* ot = scratch.get((2 * HS + KEY_BLOCK) * QUERY_BLOCK + 2 * KEY_BLOCK * HS + VL);  // (HS, queries)
    float* s = ot + HS * QUERY_BLOCK;                                                       // (keys, queries)
    E* p = (E*)s;                                                                           // (keys / W, queries), in its place
    E* qt = (E*)(s + KEY_BLOCK * QUERY_BLOCK);                                              // (HS / W, queries)
    E *k_scratch = qt + HS * QUERY_BLOCK, *v_scratch = k_scratch + KEY_BLOCK * HS;
    alignas(64) float reference[QUERY_BLOCK], sum[QUERY_BLOCK];
    const float scale = LOG2_E / sqrtf((float)HS);

    transpose_rows(qt, q, HS, rows, HS);
    std::fill(reference, reference + QUERY_BLOCK, -INFINITY);
    std::fill(sum, sum + QUERY_BLOCK, 0.0f);
    for (i64 key0 = 0, keys; key0 < visible; key0 += keys) {
        keys = key0 < first_query ? std::min(KEY_BLOCK, first_query - key0) : std::min(DIAGONAL, visible - key0);
        const i64 from = std::max<i64>(key0 - first_query, 0);  // a multiple of DIAGONAL: lanes before it see none of these keys
        const E* k_rows = rows_of(k + key0 * HS, keys * HS, k_scratch);
        const E* v_stacked = stacked(v + key0 * HS, keys, HS, v_scratch);
        block_product(s + from, QUERY_BLOCK, Strided<E>{k_rows, HS / W, 1}, qt + from, QUERY_BLOCK, keys, lanes - from, HS / W, false);
        mask_after<QUERY_BLOCK>(s + from, key0, keys, round_up(keys, W), first_query + from, lanes - from);
        for (i64 i = from; i < lanes; i += VL) { soften<QUERY_BLOCK, 1>(p + i, s + i, ot + i, key0 > 0 ? HS : 0, reference + i, sum + i, round_up(keys, W), scale); }
        block_product(ot + from, QUERY_BLOCK, Strided<E>{v_stacked, 1, HS}, p + from, QUERY_BLOCK, HS, lanes - from, ceil_div(keys, W), key0 > 0);
    }
    for (i64 i = 0; i < lanes; i += VL) {
        const vfloat inverse = 1.0f / load(sum + i);
        for (i64 d = 0; d < HS; d++) { store(ot + d * QUERY_BLOCK + i, load(ot + d * QUERY_BLOCK + i) * inverse); }
    }
    transpose_block(o, ld_o, ot, QUERY_BLOCK, HS, rows);
    for (i64 i = 0; i < rows; i++) { lse[i] = reference[i] * LN_2 + logf(sum[i]); }
}

// One head's single query (decode): lanes are channels instead, and every key and value is read once. Keys, then values are one stream, fetched 32 rows ahead.
template <typename X>
void attend_one(X* o, float* lse, const X* q, const X* k, const X* v, i64 keys, i64 HS) {
    static thread_local Scratch<float> scratch;
    constexpr i64 AHEAD = 32, TILE = 16;
    float *p = scratch.get(keys + HS), *sums = p + keys;
    const float scale = 1.0f / sqrtf((float)HS);
    const auto fetch = [&](i64 row) __attribute__((always_inline)) {  // g++ drops calls of what only prefetches
        const X* from = row < keys ? k + row * HS : v + (row - keys) * HS;
        for (i64 d = 0; d < HS && row < 2 * keys; d += LINE / (i64)sizeof(X)) { __builtin_prefetch(from + d, 0, 3); }
    };
    for (i64 j = 0; j < keys; j++) {
        fetch(j + AHEAD);
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
    std::fill(sums, sums + HS, 0.0f);
    for (i64 tile = 0; tile < keys; tile += TILE) {
        const i64 end = std::min(keys, tile + TILE);
        for (i64 j = tile; j < end; j++) { fetch(keys + j + AHEAD); }
        vector_loop(HS, [&](i64 d, auto lanes) {
            vfloat even = load(sums + d, lanes), odd{};  // two chains of additions hide half of their latency
            i64 j = tile;
            for (; j + 1 < end; j += 2) {
                even += p[j] * load(v + j * HS + d, lanes);
                odd += p[j + 1] * load(v + (j + 1) * HS + d, lanes);
            }
            if (j < end) { even += p[j] * load(v + j * HS + d, lanes); }
            store(sums + d, even + odd, lanes);
        });
    }
    vector_loop(HS, [&](i64 d, auto lanes) { store(o + d, load(sums + d, lanes) * (1.0f / sum), lanes); });
    *lse = highest + logf(sum);
}

template <typename X>
void attention_forward(X* att, float* lse, const X* q, const X* k, const X* v, const int* pos0, i64 S_kv, i64 B, i64 S, i64 NH, i64 KVH,
                       i64 HS, Run& run) {
    const bool tiles = std::is_same_v<X, bf16> && amx::available();
    const i64 block = tiles ? tiled::FORWARD_QUERIES : QUERY_BLOCK, blocks = ceil_div(S, block);
    const i64 group = div_exact(NH, KVH, "query heads over key-value heads"), first = pos0 ? *pos0 : 0;
    run.parallel(B * NH * blocks, [&](i64 item) {
        const i64 bh = item / blocks, b = bh / NH, h = bh % NH;     // a head's blocks in a row: its keys and values stay in L2
        const i64 q0 = (blocks - 1 - item % blocks) * block;  // the longest first: the last items are short
        const i64 kv = (b * KVH + h / group) * S_kv * HS;
        X* o = att + ((b * S + q0) * NH + h) * HS;
        const X* from = q + (bh * S + q0) * HS;
        if (S == 1) {
            return attend_one(o, lse + bh, from, k + kv, v + kv, first + 1, HS);
        }
        if constexpr (AMX && std::is_same_v<X, bf16>) {
            if (tiles) { return tiled::attend_block(o, NH * HS, lse + bh * S + q0, from, k + kv, v + kv, first + q0, std::min(block, S - q0), HS); }
        }
        with_operands<X>(HS, [&](auto operand) {
            attend_block<decltype(operand)>(o, NH * HS, lse + bh * S + q0, from, k + kv, v + kv, first + q0, std::min(block, S - q0), HS);
        });
    });
}

// A query block of one head as the backward wants it. Zeros stand for queries that are not there.
template <typename E>
struct QueryBlock {
    E *qt, *dot;      // (HS / STEPS, queries)
    E *q, *d_out;     // (queries / STEPS, HSp)
    float *lse, *D;   // (queries)
    float *begin, *end;
    QueryBlock(float* memory, i64 HS, i64 HSp) : begin(memory) {
        for (E** part : {&qt, &dot}) { *part = (E*)std::exchange(memory, memory + HS / STEPS<E> * QUERY_BLOCK); }
        for (E** part : {&q, &d_out}) { *part = (E*)std::exchange(memory, memory + HSp * QUERY_BLOCK / STEPS<E>); }
        for (float** part : {&lse, &D}) { *part = std::exchange(memory, memory + QUERY_BLOCK); }
        end = memory;
    }
    static i64 floats(i64 HS, i64 HSp) { return 2 * QUERY_BLOCK * (HS + HSp + 1); }  // at most

    template <typename X>
    void fill(const X* from_q, const X* from_datt, const X* from_att, i64 ld_att, const float* from_lse, i64 rows, i64 HS, i64 HSp) {
        if (rows < QUERY_BLOCK) { std::fill(begin, end, 0.0f); }
        for (i64 i = 0; i < rows; i++) {
            vfloat product{};
            vector_loop(HS, [&](i64 d, auto lanes) { product += load(from_datt + i * ld_att + d, lanes) * load(from_att + i * ld_att + d, lanes); });
            D[i] = sum_lanes(product);
            lse[i] = from_lse[i];
        }
        stack_rows(q, HSp, from_q, HS, rows, HS);
        stack_rows(d_out, HSp, from_datt, ld_att, rows, HS);
        transpose_rows(qt, from_q, HS, rows, HS);
        transpose_rows(dot, from_datt, ld_att, rows, HS);
    }
};

// dq, dk and dv of one key-value head, from every parts-th of its key blocks, from `part` on. Query heads of the group, query
// blocks and key blocks come in this order, so every sum has one order. dq goes to dq_partial (floats) where that is given.
template <typename E, typename X>
void attend_backward_head(X* dq, float* dq_partial, X* dk, X* dv, const X* datt, const X* att, i64 ld_att, const float* lse, const X* q,
                          const X* k, const X* v, i64 S, i64 group, i64 HS, i64 part, i64 parts) {
    static thread_local Scratch<float> scratch;
    constexpr i64 W = STEPS<E>;
    using Row = std::conditional_t<W == 2, bf16, float>;  // W of them are an E
    const i64 HSp = round_up(HS, VL), tile = KEY_BLOCK * QUERY_BLOCK;
    float* p = scratch.get(3 * tile + QUERY_BLOCK * HS + QueryBlock<E>::floats(HS, HSp) + 2 * S * (HSp + HS) + HS + VL);  // (keys, queries)
    float* ds = p + tile;                                                                                             // (keys, queries)
    E* ds_stacked = (E*)ds;                                                                                           // (keys / W, queries), in its place
    Row *p_rows = W == 2 ? (Row*)(ds + tile) : (Row*)p, *ds_rows = W == 2 ? p_rows + tile : (Row*)ds;                 // (keys, queries)
    float* dqt = ds + 2 * tile;                                                                                       // (HS, queries)
    QueryBlock<E> block(dqt + QUERY_BLOCK * HS, HS, HSp);
    float* dk_sum = block.end;                  // (S, HSp)
    float* dv_sum = dk_sum + S * HSp;           // (S, HSp)
    E* k_scratch = (E*)(dv_sum + S * HSp);      // (S / W, HS)
    E* v_scratch = k_scratch + (S + 1) * HS;    // (S, HS / W)
    std::fill(dk_sum, dv_sum + S * HSp, 0.0f);
    const E *k_stacked = stacked(k, S, HS, k_scratch), *v_rows = rows_of(v, S * HS, v_scratch), *k_rows = W == 1 ? k_stacked : rows_of(k, S * HS, k_scratch);
    const float scale = 1.0f / sqrtf((float)HS), scale_log2 = scale * LOG2_E;

    for (i64 h = 0; h < group; h++) {
        for (i64 q0 = 0; q0 < S; q0 += QUERY_BLOCK) {
            const i64 rows = std::min(QUERY_BLOCK, S - q0), lanes = round_up(rows, VL);
            block.fill(q + (h * S + q0) * HS, datt + q0 * ld_att + h * HS, att + q0 * ld_att + h * HS, ld_att, lse + h * S + q0, rows, HS,
                       HSp);
            std::fill(dqt, dqt + HS * QUERY_BLOCK, 0.0f);
            for (i64 key0 = part * KEY_BLOCK; key0 < q0 + rows; key0 += parts * KEY_BLOCK) {
                const i64 keys = std::min(KEY_BLOCK, q0 + rows - key0);
                block_product(p, QUERY_BLOCK, Strided<E>{k_rows + key0 * HS / W, HS / W, 1}, block.qt, QUERY_BLOCK, keys, lanes, HS / W, false);
                block_product(ds, QUERY_BLOCK, Strided<E>{v_rows + key0 * HS / W, HS / W, 1}, block.dot, QUERY_BLOCK, keys, lanes, HS / W, false);
                mask_after<QUERY_BLOCK>(p, key0, keys, keys, q0, lanes);
                for (i64 i = 0; i < lanes; i += VL) {
                    const vfloat log2_sum = load(block.lse + i) * LOG2_E, D_i = load(block.D + i);
                    for (i64 j = 0; j < keys; j += W) {
                        vfloat ds_j[W] = {};
                        for (i64 w = 0; w < W && j + w < keys; w++) {
                            const i64 at = (j + w) * QUERY_BLOCK + i;
                            const vfloat p_ij = exp2(load(p + at) * scale_log2 - log2_sum);
                            ds_j[w] = p_ij * (load(ds + at) - D_i);
                            store(p_rows + at, p_ij);
                            store(ds_rows + at, ds_j[w]);
                        }
                        store_steps(ds_stacked + j / W * QUERY_BLOCK + i, ds_j);
                    }
                }
                block_product(dv_sum + key0 * HSp, HSp, Strided<E>{(const E*)p_rows, QUERY_BLOCK / W, 1}, block.d_out, HSp, keys, HSp, ceil_div(rows, W), true);
                block_product(dk_sum + key0 * HSp, HSp, Strided<E>{(const E*)ds_rows, QUERY_BLOCK / W, 1}, block.q, HSp, keys, HSp, ceil_div(rows, W), true);
                block_product(dqt, QUERY_BLOCK, Strided<E>{k_stacked + key0 / W * HS, 1, HS}, ds_stacked, QUERY_BLOCK, HS, lanes, ceil_div(keys, W), true);
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
                store(dk + j * HS + d, scale * load(dk_sum + j * HSp + d, lanes), lanes);
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
    const bool tiles = std::is_same_v<X, bf16> && amx::available();
    const i64 group = div_exact(NH, KVH, "query heads over key-value heads"), wanted = 16;
    const i64 parts = std::min(ceil_div(wanted, B * KVH), ceil_div(S, tiles ? tiled::BACKWARD_KEYS : KEY_BLOCK)), size = B * NH * S * HS;
    float* partials = parts > 1 ? scratch.get(parts * size) : nullptr;
    run.parallel(B * KVH * parts, [&](i64 item) {
        const i64 bk = item / parts, part = item % parts, b = bk / KVH, first = bk % KVH * group;  // the group's first query head
        const i64 kv = bk * S * HS, head = (b * NH + first) * S, row = (b * S * NH + first) * HS;
        if constexpr (AMX && std::is_same_v<X, bf16>) {
            if (tiles) {
                return tiled::attend_backward_head(dq + head * HS, partials ? partials + part * size + head * HS : nullptr, dk + kv, dv + kv, datt + row, att + row, NH * HS,
                                                   lse + head, q + head * HS, k + kv, v + kv, S, group, HS, part, parts);
            }
        }
        with_operands<X>(HS, [&](auto operand) {
            attend_backward_head<decltype(operand)>(dq + head * HS, partials ? partials + part * size + head * HS : nullptr, dk + kv, dv + kv, datt + row, att + row, NH * HS,
                                                    lse + head, q + head * HS, k + kv, v + kv, S, group, HS, part, parts);
        });
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

AttentionBy attention_by(DType, i64, i64, i64) { return {"", 0}; }

}  // namespace cpu

#else
#include "../attention_cudnn.h"
#include "tiles.cuh"

namespace gpu {

constexpr float LOG2_E = 1.44269504f;

struct AttentionSizes {
    const int* pos0;             // null: 0
    int S, S_kv, NH, group, HS;  // group: query heads of a key-value head
    float scale;                 // 1 / sqrt(HS)
    int copy_width;              // of all rows that are read and written
    int step;                    // query s is at position pos0 + step s: 0 where queries are a group's heads (decode)
    int split;                   // keys that one block takes: blockIdx.y is which of them
};

// How a block of the forward is cut: WARPS of 16 M queries each, COLUMNS keys at a time, heads padded to WIDTH.
template <typename X, int WIDTH>
struct ForwardCut {
    static constexpr bool HALF = dtype_of<X> == DType::BF16;
    static constexpr int WARPS = 4, THREADS = 32 * WARPS, M = HALF && WIDTH <= 128 ? 2 : 1, ROWS = 16 * M * WARPS;
    static constexpr int COLUMNS = !HALF ? (WIDTH <= 128 ? 32 : 16) : WIDTH <= 80 ? 64 : WIDTH <= 112 ? 48 : 32, LD = tile_ld<X>(WIDTH);
    static constexpr int BYTES = (ROWS + 2 * COLUMNS) * LD * (int)sizeof(X);
    static_assert(BYTES <= 99 << 10, "more than a block can have on every device");
};
// Of the backward: rows are keys and columns queries for dk and dv, the other way round for dq; two tiles of rows, two stages of two tiles
// of columns. Wide heads have too many sums of dk and dv for one block's registers: PARTS blocks take some channels each.
template <typename X, int WIDTH>
struct BackwardCut {
    static constexpr bool HALF = dtype_of<X> == DType::BF16;
    static constexpr int WARPS = WIDTH <= (HALF ? 128 : 64) ? 4 : 2, THREADS = 32 * WARPS, M = HALF && WIDTH <= 64 ? 2 : 1;
    static constexpr int ROWS = 16 * M * WARPS, COLUMNS = WIDTH <= (HALF ? 128 : 64) ? 32 : HALF || WIDTH <= 128 ? 16 : 8;
    static constexpr int LD = tile_ld<X>(WIDTH), PARTS = WIDTH > 128 ? 2 : 1;
    static constexpr int BLOCKS = HALF && WIDTH == 32 ? 2 : 0;  // a multiprocessor; 0: ptxas decides. The other way round it spills
    static constexpr int BYTES = (2 * ROWS + 4 * COLUMNS) * LD * (int)sizeof(X) + 4 * COLUMNS * (int)sizeof(float);
    static_assert(BYTES <= 99 << 10 && ROWS % COLUMNS == 0);
};

// ---- forward --------------------------------------------------------------------------------------------------------
// Of a lane's 2 M rows: the highest score so far, and this lane's part of the sum of exp(score - highest).
template <int M>
struct RowSoftmax {
    float highest[2 * M], sum[2 * M];
    __device__ __forceinline__ RowSoftmax() {
        UNROLL
        for (int r = 0; r < 2 * M; r++) { highest[r] = -INFINITY, sum[r] = 0.0f; }
    }
    // Scores s become exp(scale s - highest); what was summed before shrinks to the new highest.
    template <int N, int H>
    __device__ __forceinline__ void take(Sums<M, N>& s, Sums<M, H>& o, float scale_log2) {
        float top[2 * M], shrink[2 * M];
        bool changed = false;
        UNROLL
        for (int r = 0; r < 2 * M; r++) { top[r] = highest[r]; }
        each(s, [&](float score, int r, int, int) { top[r] = fmaxf(top[r], score); });
        UNROLL
        for (int r = 0; r < 2 * M; r++) {
            top[r] = row_reduce(top[r], [](float a, float b) { return fmaxf(a, b); });
            shrink[r] = exp2_fast((highest[r] - top[r]) * scale_log2);
            changed |= shrink[r] != 1.0f;
            highest[r] = top[r];
            top[r] *= scale_log2;
            sum[r] *= shrink[r];
        }
        each(s, [&](float& score, int r, int, int) {
            score = exp2_fast(score * scale_log2 - top[r]);
            sum[r] += score;
        });
        if (__any_sync(ALL_LANES, changed)) {
            each(o, [&](float& value, int r, int, int) { value *= shrink[r]; });
        }
    }
};

// ROWS queries of one head a block, the last ones first: they see the most keys. While scores are computed the values come, and then the
// next keys. Where the keys are split, o goes to `partial` (split, B*NH*S, HS), and lse is (split, B*NH*S).
template <typename X, int WIDTH>
__global__ void __launch_bounds__(ForwardCut<X, WIDTH>::THREADS, 2)
    attention_forward_kernel(X* __restrict__ att, float* __restrict__ lse, float* __restrict__ partial, const X* __restrict__ q,
                             const X* __restrict__ k, const X* __restrict__ v, AttentionSizes d) {
    using Cut = ForwardCut<X, WIDTH>;
    constexpr int ROWS = Cut::ROWS, COLUMNS = Cut::COLUMNS, M = Cut::M, LD = Cut::LD;
    X *q_tile = dynamic_shared<X>(), *k_tile = q_tile + ROWS * LD, *v_tile = k_tile + COLUMNS * LD;
    const int blocks = (d.S + ROWS - 1) / ROWS, item = blockIdx.x, head = item / blocks, q0 = (blocks - 1 - item % blocks) * ROWS;
    const int rows = std::min(ROWS, d.S - q0), first = warp_index() * 16 * M;                                        // the warp's first row
    const int pos0 = d.pos0 ? *d.pos0 : 0, begin = blockIdx.y * d.split, end = std::min(begin + d.split, pos0 + (q0 + rows - 1) * d.step + 1);  // keys
    if (begin >= end) { return; }  // a part that decode has not come to yet
    const i64 kv = (i64)(head / d.group) * d.S_kv * d.HS, row0 = (i64)head * d.S + q0;
    X* q_rows = q_tile + first * LD;
    const auto fetch_keys = [&](X* tile, const X* from, int key0) {
        const int count = std::min(COLUMNS, end - key0);
        fetch_tile<Cut::THREADS, COLUMNS, WIDTH>(tile, from + kv + (i64)key0 * d.HS, d.HS, count, d.HS, d.copy_width);
        copies_commit();
    };
    Sums<M, WIDTH / 8> o = {};
    RowSoftmax<M> softmax;
    fetch_tile<Cut::THREADS, ROWS, WIDTH>(q_tile, q + row0 * d.HS, d.HS, rows, d.HS, d.copy_width);
    fetch_keys(k_tile, k, begin);
    for (int key0 = begin; key0 < end; key0 += COLUMNS) {
        const int ahead = key0 - (pos0 + (q0 + first) * d.step);  // of the warp's first query
        const bool visible = first < rows && ahead < 16 * M;        // to any query of the warp
        Sums<M, COLUMNS / 8> s = {};
        copies_wait<0>();
        __syncthreads();  // keys are there, and the last values are used
        fetch_keys(v_tile, v, key0);
        if (visible) { multiply_transposed<WIDTH>(s, q_rows, k_tile); }
        copies_wait<0>();
        __syncthreads();
        if (key0 + COLUMNS < end) { fetch_keys(k_tile, k, key0 + COLUMNS); }
        if (visible) {
            if (ahead + COLUMNS > 1) {
                each(s, [&](float& score, int r, int n, int c) {
                    if (lane_column(n) + c + ahead > lane_row(r) * d.step) { score = -INFINITY; }
                });
            }
            softmax.take(s, o, d.scale * LOG2_E);
            multiply<WIDTH>(o, s, v_tile);
        }
    }
    if (first >= rows) { return; }
    const i64 split = (i64)blockIdx.y * (gridDim.x / blocks) * d.S;
    UNROLL
    for (int r = 0; r < 2 * M; r++) {
        softmax.sum[r] = row_reduce(softmax.sum[r], [](float a, float b) { return a + b; });
        const int row = first + lane_row(r);
        if (threadIdx.x % 4 == 0 && row < rows) { lse[split + row0 + row] = softmax.highest[r] * d.scale + logf(softmax.sum[r]); }
        softmax.sum[r] = 1.0f / softmax.sum[r];
    }
    each(o, [&](float& value, int r, int, int) { value *= softmax.sum[r]; });
    if (partial) {
        each(o, [&](float value, int r, int n, int c) {
            const int row = first + lane_row(r), column = lane_column(n) + c;
            if (row < rows && column < d.HS) { partial[(split + row0 + row) * d.HS + column] = value; }
        });
        return;
    }
    const i64 to = (((i64)(head / d.NH) * d.S + q0 + first) * d.NH + head % d.NH) * d.HS;
    store_sums<WIDTH>(att + to, (i64)d.NH * d.HS, o, q_rows, rows - first, d.HS, d.copy_width);
}

// att (rows, HS) and lse (rows) of the parts that hold keys, in order. A row a block. The second bound: left alone, ptxas spills on sm_80 to get
// to 32 registers; held to 64, on sm_100.
template <typename X>
__global__ void __launch_bounds__(THREADS, 2)
    attention_merge_kernel(X* __restrict__ att, float* __restrict__ lse, const float* __restrict__ part_att,
                           const float* __restrict__ part_lse, const int* __restrict__ pos0, int split, i64 rows, int HS) {
    const i64 row = blockIdx.x;
    const int parts = (pos0 ? *pos0 : 0) / split + 1;
    float highest = -INFINITY, sum = 0.0f;
    for (int i = 0; i < parts; i++) { highest = fmaxf(highest, part_lse[i * rows + row]); }
    for (int i = 0; i < parts; i++) { sum += exp2_fast((part_lse[i * rows + row] - highest) * LOG2_E); }
    for (int c = threadIdx.x; c < HS; c += blockDim.x) {
        float value = 0.0f;
        for (int i = 0; i < parts; i++) {
            value += exp2_fast((part_lse[i * rows + row] - highest) * LOG2_E) * part_att[(i * rows + row) * HS + c];
        }
        att[row * HS + c] = (X)(value / sum);
    }
    if (threadIdx.x == 0) { lse[row] = highest + logf(sum); }
}

// ---- backward -------------------------------------------------------------------------------------------------------
// D (B,NH,S) = sum over channels of datt * att, both (B,S,NH,HS). Threads (lanes of a row, rows); a row's lanes are in one warp.
template <typename X>
__global__ void __launch_bounds__(THREADS) attention_row_products_kernel(float* __restrict__ D, const X* __restrict__ datt,
                                                                         const X* __restrict__ att, i64 rows, AttentionSizes d) {
    const i64 row = (i64)blockIdx.x * blockDim.y + threadIdx.y, n = row / d.NH;
    float sum = 0.0f;
    with_copy_width<X>(d.copy_width, [&](auto W) {
        for (int c = threadIdx.x * W; row < rows && c < d.HS; c += blockDim.x * W) {
            const Floats<W> a = load<W>(datt + row * d.HS + c), b = load<W>(att + row * d.HS + c);
            for (int i = 0; i < W; i++) { sum += a[i] * b[i]; }
        }
    });
    for (int distance = blockDim.x / 2; distance > 0; distance /= 2) { sum += __shfl_xor_sync(ALL_LANES, sum, distance); }
    if (threadIdx.x == 0 && row < rows) { D[(n / d.S * d.NH + row % d.NH) * d.S + n % d.S] = sum; }
}

// step(i, i % 2) for i < count, while fetch(i + 1, (i + 1) % 2) copies what the next step needs to the other of two stages.
template <typename Fetch, typename Step>
__device__ __forceinline__ void two_stages(int count, const Fetch& fetch, const Step& step) {
    fetch(0, 0);
    copies_commit();
    for (int i = 0; i < count; i++) {
        copies_wait<0>();
        __syncthreads();  // stage i is there, and the other one is used
        if (i + 1 < count) {
            fetch(i + 1, (i + 1) % 2);
            copies_commit();
        }
        step(i, i % 2);
    }
}

// dq of ROWS queries of one head a block: the sum over blocks of keys, in order.
template <typename X, int WIDTH>
__global__ void __launch_bounds__(BackwardCut<X, WIDTH>::THREADS)
    attention_dq_kernel(X* __restrict__ dq, const X* __restrict__ datt, const float* __restrict__ lse, const float* __restrict__ D,
                        const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v, AttentionSizes d) {
    using Cut = BackwardCut<X, WIDTH>;
    constexpr int ROWS = Cut::ROWS, COLUMNS = Cut::COLUMNS, M = Cut::M, LD = Cut::LD;
    X *q_tile = dynamic_shared<X>(), *do_tile = q_tile + ROWS * LD, *stages = do_tile + ROWS * LD;  // (stage, k | v, COLUMNS, LD)
    const int blocks = (d.S + ROWS - 1) / ROWS, item = blockIdx.x, head = item / blocks, q0 = (blocks - 1 - item % blocks) * ROWS;
    const int rows = std::min(ROWS, d.S - q0), first = warp_index() * 16 * M;
    const i64 kv = (i64)(head / d.group) * d.S * d.HS, row0 = (i64)head * d.S + q0;
    const i64 out = (((i64)(head / d.NH) * d.S + q0) * d.NH + head % d.NH) * d.HS;
    fetch_tile<Cut::THREADS, ROWS, WIDTH>(q_tile, q + row0 * d.HS, d.HS, rows, d.HS, d.copy_width);
    fetch_tile<Cut::THREADS, ROWS, WIDTH>(do_tile, datt + out, (i64)d.NH * d.HS, rows, d.HS, d.copy_width);
    const auto fetch = [&](int i, int stage) {
        X* tile = stages + stage * 2 * COLUMNS * LD;
        const i64 from = kv + (i64)i * COLUMNS * d.HS;
        const int count = std::min(COLUMNS, d.S - i * COLUMNS);
        fetch_tile<Cut::THREADS, COLUMNS, WIDTH>(tile, k + from, d.HS, count, d.HS, d.copy_width);
        fetch_tile<Cut::THREADS, COLUMNS, WIDTH>(tile + COLUMNS * LD, v + from, d.HS, count, d.HS, d.copy_width);
    };
    float row_lse[2 * M], row_D[2 * M];
    UNROLL
    for (int r = 0; r < 2 * M; r++) {
        const int row = first + lane_row(r);
        row_lse[r] = row < rows ? lse[row0 + row] * LOG2_E : 0.0f;
        row_D[r] = row < rows ? D[row0 + row] : 0.0f;
    }
    Sums<M, WIDTH / 8> sum = {};
    two_stages((q0 + rows + COLUMNS - 1) / COLUMNS, fetch, [&](int i, int stage) {
        const int ahead = i * COLUMNS - (q0 + first);  // the first key, of the warp's first query
        if (first >= rows || ahead >= 16 * M) { return; }
        const X *k_tile = stages + stage * 2 * COLUMNS * LD, *v_tile = k_tile + COLUMNS * LD;
        Sums<M, COLUMNS / 8> s = {}, ds = {};
        multiply_transposed<WIDTH>(s, q_tile + first * LD, k_tile);
        multiply_transposed<WIDTH>(ds, do_tile + first * LD, v_tile);
        each(s, ds, [&](float score, float& value, int r, int n, int c) {
            const float p = lane_column(n) + c + ahead > lane_row(r) ? 0.0f : exp2_fast(score * d.scale * LOG2_E - row_lse[r]);
            value = p * (value - row_D[r]);
        });
        multiply<WIDTH>(sum, ds, k_tile);
    });
    if (first >= rows) { return; }
    each(sum, [&](float& value, int, int, int) { value *= d.scale; });
    store_sums<WIDTH>(dq + (row0 + first) * d.HS, d.HS, sum, q_tile + first * LD, rows - first, d.HS, d.copy_width);
}

// dk and dv of ROWS keys of one key-value head a block (or of 1/PARTS of their channels): the sums over the group's query heads and their
// blocks of queries, in order. Probabilities are computed transposed, (keys, queries), so that they are a product's left side.
template <typename X, int WIDTH>
__global__ void __launch_bounds__(BackwardCut<X, WIDTH>::THREADS, BackwardCut<X, WIDTH>::BLOCKS)
    attention_dkv_kernel(X* __restrict__ dk, X* __restrict__ dv, const X* __restrict__ datt, const float* __restrict__ lse,
                         const float* __restrict__ D, const X* __restrict__ q, const X* __restrict__ k, const X* __restrict__ v,
                         AttentionSizes d) {
    using Cut = BackwardCut<X, WIDTH>;
    constexpr int ROWS = Cut::ROWS, COLUMNS = Cut::COLUMNS, M = Cut::M, LD = Cut::LD, CHANNELS = WIDTH / Cut::PARTS;
    X *k_tile = dynamic_shared<X>(), *v_tile = k_tile + ROWS * LD, *stages = v_tile + ROWS * LD;  // (stage, q | do, COLUMNS, LD)
    float* stage_stats = (float*)(stages + 4 * COLUMNS * LD);                                     // (stage, lse | D, COLUMNS)
    const int blocks = (d.S + ROWS - 1) / ROWS, item = blockIdx.x / Cut::PARTS, channel0 = blockIdx.x % Cut::PARTS * CHANNELS;
    const int kv_head = item / blocks, key0 = item % blocks * ROWS, rows = std::min(ROWS, d.S - key0);
    const int first = warp_index() * 16 * M, per_head = (d.S - key0 + COLUMNS - 1) / COLUMNS;  // blocks of queries that see a key
    const i64 kv = ((i64)kv_head * d.S + key0) * d.HS;
    fetch_tile<Cut::THREADS, ROWS, WIDTH>(k_tile, k + kv, d.HS, rows, d.HS, d.copy_width);
    fetch_tile<Cut::THREADS, ROWS, WIDTH>(v_tile, v + kv, d.HS, rows, d.HS, d.copy_width);
    const auto fetch = [&](int i, int stage) {
        X* tile = stages + stage * 2 * COLUMNS * LD;
        const int head = kv_head * d.group + i / per_head, q0 = key0 + i % per_head * COLUMNS, count = std::min(COLUMNS, d.S - q0);
        const i64 row0 = (i64)head * d.S + q0, out = (((i64)(head / d.NH) * d.S + q0) * d.NH + head % d.NH) * d.HS;
        fetch_tile<Cut::THREADS, COLUMNS, WIDTH>(tile, q + row0 * d.HS, d.HS, count, d.HS, d.copy_width);
        fetch_tile<Cut::THREADS, COLUMNS, WIDTH>(tile + COLUMNS * LD, datt + out, (i64)d.NH * d.HS, count, d.HS, d.copy_width);
        const int column = threadIdx.x;
        if (column < COLUMNS) {
            float* stats = stage_stats + stage * 2 * COLUMNS;
            stats[column] = column < count ? lse[row0 + column] * LOG2_E : 0.0f;  // where there is no query, q and do are zero: all is
            stats[COLUMNS + column] = column < count ? D[row0 + column] : 0.0f;
        }
    };
    Sums<M, CHANNELS / 8> dk_sum = {}, dv_sum = {};
    two_stages(d.group * per_head, fetch, [&](int i, int stage) {
        const int ahead = first - i % per_head * COLUMNS;  // the warp's first key, of the first query
        if (first >= rows || ahead >= COLUMNS) { return; }
        const X *q_tile = stages + stage * 2 * COLUMNS * LD, *do_tile = q_tile + COLUMNS * LD;
        const float* stats = stage_stats + stage * 2 * COLUMNS;
        Sums<M, COLUMNS / 8> p = {}, ds = {};
        multiply_transposed<WIDTH>(p, k_tile + first * LD, q_tile);
        multiply_transposed<WIDTH>(ds, v_tile + first * LD, do_tile);
        each(p, ds, [&](float& score, float& value, int r, int n, int c) {
            const int column = lane_column(n) + c;
            score = lane_row(r) + ahead > column ? 0.0f : exp2_fast(score * d.scale * LOG2_E - stats[column]);
            value = score * (value - stats[COLUMNS + column]);
        });
        multiply<WIDTH>(dv_sum, p, do_tile + channel0);
        multiply<WIDTH>(dk_sum, ds, q_tile + channel0);
    });
    if (first >= rows) { return; }
    each(dk_sum, [&](float& value, int, int, int) { value *= d.scale; });
    const i64 to = kv + (i64)first * d.HS + channel0;
    store_sums<WIDTH>(dk + to, d.HS, dk_sum, k_tile + first * LD, rows - first, d.HS - channel0, d.copy_width);
    store_sums<WIDTH>(dv + to, d.HS, dv_sum, v_tile + first * LD, rows - first, d.HS - channel0, d.copy_width);
}

// ---- launchers ------------------------------------------------------------------------------------------------------
// body(Width<WIDTH>): the least width of tiles that a head fits in.
template <typename X, typename Body>
void with_tile_width(i64 HS, const Body& body) {
    const auto first_of = [&](auto... widths) {
        const bool found = ((HS <= widths && (body(widths), true)) || ...);
        check(found, "attention: the head size is %lld; the kernels take at most 256", (long long)HS);
    };
    if constexpr (dtype_of<X> == DType::BF16) {
        first_of(Width<32>{}, Width<48>{}, Width<64>{}, Width<80>{}, Width<112>{}, Width<128>{}, Width<256>{});
    } else {
        first_of(Width<64>{}, Width<128>{}, Width<256>{});
    }
}
template <typename X, typename... Pointers>
AttentionSizes attention_sizes(i64 S, i64 S_kv, const int* pos0, i64 NH, i64 KVH, i64 HS, Pointers... pointers) {
    const i64 group = div_exact(NH, KVH, "query heads over key-value heads");
    check(S <= S_kv && S_kv <= 1 << 30, "attention: %lld queries, and room for %lld keys", (long long)S, (long long)S_kv);
    return {pos0,
            (int)S,
            (int)S_kv,
            narrow<int>(NH),
            narrow<int>(group),
            narrow<int>(HS),
            1.0f / sqrtf((float)HS),
            std::min({copy_width<X>(pointers, HS)...}),
            1,
            1 << 30};
}

// One query a head (decode): a key-value head's queries are the rows of one block, and its keys are split over blocks: as many as the cache has
// room for, because the host does not know the position; those without keys end at once.
constexpr i64 DECODE_KEYS = 256;  // of a part, at least
template <typename X>
void attention_decode(X* att, float* lse, const X* q, const X* k, const X* v, i64 kv_heads, AttentionSizes d, Run& run) {
    const i64 rows = kv_heads * d.group;
    d.S = std::exchange(d.group, 1), d.NH = 1, d.step = 0;
    with_tile_width<X>(d.HS, [&](auto width) {
        using Cut = ForwardCut<X, width>;
        d.split = (int)round_up(DECODE_KEYS, Cut::COLUMNS);
        const i64 parts = ceil_div(d.S_kv, d.split);
        const Shape shape{dim3(blocks(kv_heads * ceil_div(d.S, Cut::ROWS)), blocks(parts)), Cut::THREADS, Cut::BYTES};
        if (parts == 1) {
            launch(attention_forward_kernel<X, width>, shape, run, att, lse, nullptr, q, k, v, d);
        } else {
            float *part_att = run.workspace.get<float>(parts * rows * (d.HS + 1)), *part_lse = part_att + parts * rows * d.HS;
            launch(attention_forward_kernel<X, width>, shape, run, att, part_lse, part_att, q, k, v, d);
            launch(attention_merge_kernel<X>, {blocks(rows), row_threads(d.HS, 1)}, run, att, lse, part_att, part_lse, d.pos0, d.split,
                   rows, d.HS);
        }
    });
}

template <typename X>
void attention_forward(X* att, float* lse, const X* q, const X* k, const X* v, const int* pos0, i64 S_kv, i64 B, i64 S, i64 NH, i64 KVH,
                       i64 HS, Run& run) {
    const AttentionSizes d = attention_sizes<X>(S, S_kv, pos0, NH, KVH, HS, att, q, k, v);
    if constexpr (dtype_of<X> == DType::BF16) {
        const bool training = S > 1 && S_kv == S;  // so pos0 is 0
        if (training && run.attention && run.attention->forward(att, lse, q, k, v, {B, S, NH, KVH, HS}, run)) { return; }
    }
    if (S == 1) {
        attention_decode(att, lse, q, k, v, B * KVH, d, run);
        return;
    }
    with_tile_width<X>(HS, [&](auto width) {
        using Cut = ForwardCut<X, width>;
        launch(attention_forward_kernel<X, width>, {blocks(B * NH * ceil_div(S, Cut::ROWS)), Cut::THREADS, Cut::BYTES}, run, att, lse,
               nullptr, q, k, v, d);
    });
}

template <typename X>
void attention_backward(X* dq, X* dk, X* dv, const X* datt, const X* att, const float* lse, const X* q, const X* k, const X* v, i64 B,
                        i64 S, i64 NH, i64 KVH, i64 HS, Run& run) {
    const AttentionSizes d = attention_sizes<X>(S, S, nullptr, NH, KVH, HS, dq, dk, dv, datt, att, q, k, v);
    if constexpr (dtype_of<X> == DType::BF16) {
        if (run.attention && run.attention->backward(dq, dk, dv, datt, att, lse, q, k, v, {B, S, NH, KVH, HS}, run)) { return; }
    }
    float* D = run.workspace.get<float>(B * NH * S);
    const unsigned lanes = (unsigned)std::clamp<i64>(std::bit_ceil((uint64_t)ceil_div(HS, d.copy_width)), 1, 32), rows = THREADS / lanes;
    launch(attention_row_products_kernel<X>, {blocks(ceil_div(B * S * NH, rows)), dim3(lanes, rows)}, run, D, datt, att, B * S * NH, d);
    with_tile_width<X>(HS, [&](auto width) {
        using Cut = BackwardCut<X, width>;
        const i64 row_blocks = ceil_div(S, Cut::ROWS);
        launch(attention_dkv_kernel<X, width>, {blocks(B * KVH * row_blocks * Cut::PARTS), Cut::THREADS, Cut::BYTES}, run, dk, dv, datt,
               lse, D, q, k, v, d);
        launch(attention_dq_kernel<X, width>, {blocks(B * NH * row_blocks), Cut::THREADS, Cut::BYTES}, run, dq, datt, lse, D, q, k, v, d);
    });
}

AttentionBy attention_by(DType dtype, i64 B, i64 S, i64 NH) {
    if (dtype != DType::BF16) { return {"", 0}; }
    return {cudnn::version(), cudnn::backward_workspace(B, S, NH)};
}

}  // namespace gpu
#endif
