// gemm_cpu.h: the CPU side of gemm.h. The product is cut into blocks of c; a block is one item of the rank's parallel
// loop, so that results do not depend on the number of threads, epilogues run in cache, and Run::poll is called often.
#pragma once

#include "simd.h"

namespace cpu {

// How c is cut: by shape only.
struct GemmBlocks {
    i64 rows, cols;
    i64 down, across;
    GemmBlocks(i64 M, i64 N, i64 K);
};

constexpr i64 GEMM_DEPTH = 256;  // a panel of b, GEMM_DEPTH x TILE_COLS, streams from L2; 6 rows of a stay in L1
constexpr i64 GEMM_ROWS = 192;   // a's slice, GEMM_ROWS x GEMM_DEPTH, stays in L2 beside b's

inline GemmBlocks::GemmBlocks(i64 M, i64 N, i64 K) {
    const i64 most_cols = 6 * TILE_COLS, flop = 250000000, wanted = 24;
    across = ceil_div(N, most_cols);
    cols = round_up(ceil_div(N, across), TILE_COLS);
    const i64 fit = std::max<i64>(flop / (2 * cols * std::max<i64>(K, 1)), GEMM_ROWS);
    down = std::max(ceil_div(M, fit), std::min(ceil_div(wanted, across), ceil_div(M, 96)));
    rows = round_up(ceil_div(M, down), TILE_ROWS);
    down = ceil_div(M, rows);
    across = ceil_div(N, cols);
}

// to (rows, depth; GEMM_DEPTH) or, where stored transposed, to (depth, rows; GEMM_ROWS): a's slice as floats.
template <typename X>
Strided pack_a(float* to, Matrix<X> a, i64 i0, i64 rows, i64 k0, i64 depth) {
    constexpr i64 PAD = 16;  // keeps the rows of a tile out of one another's cache sets
    if (a.transposed) {
        for (i64 k = 0; k < depth; k++) {
            const X* from = a.data + (k0 + k) * a.ld + i0;
            vector_loop(rows, [&](i64 i, auto lanes) { store(to + k * (GEMM_ROWS + PAD) + i, load(from + i, lanes)); });
        }
        return {to, 1, GEMM_ROWS + PAD};
    }
    for (i64 i = 0; i < rows; i++) {
        const X* from = a.data + (i0 + i) * a.ld + k0;
        vector_loop(depth, [&](i64 k, auto lanes) { store(to + i * (GEMM_DEPTH + PAD) + k, load(from + k, lanes)); });
    }
    return {to, GEMM_DEPTH + PAD, 1};
}

// to: panels of TILE_COLS columns, each (depth, TILE_COLS). What stands past the last column is left as it was: columns of
// a product do not mix, and the epilogue does not read those.
template <typename X>
void pack_b(float* to, Matrix<X> b, i64 k0, i64 depth, i64 j0, i64 cols) {
    for (i64 j = 0; j < cols; j += TILE_COLS, to += depth * TILE_COLS) {
        const i64 width = std::min<i64>(cols - j, TILE_COLS);
        if (!b.transposed) {
            for (i64 k = 0; k < depth; k++) {
                const X* from = b.data + (k0 + k) * b.ld + j0 + j;
                vector_loop(width, [&](i64 i, auto lanes) { store(to + k * TILE_COLS + i, load(from + i, lanes)); });
            }
            continue;
        }
        transpose_block(to, TILE_COLS, b.data + (j0 + j) * b.ld + k0, b.ld, width, depth);
    }
}

// c's block at (i0, j0).
template <typename X, typename Y>
void gemm_block(Y* c, i64 ldc, Matrix<X> a, Matrix<X> b, const X* bias, i64 i0, i64 rows, i64 j0, i64 cols, i64 K, float alpha,
                bool accumulate) {
    static thread_local Scratch<float> a_scratch, b_scratch, c_scratch;
    const i64 ldp = round_up(cols, TILE_COLS);
    float* packed_a = a_scratch.get((GEMM_ROWS + 16) * (GEMM_DEPTH + 16));
    float* packed_b = b_scratch.get(GEMM_DEPTH * ldp);
    float* product = c_scratch.get(rows * ldp);
    const i64 slices = std::max<i64>(ceil_div(K, GEMM_DEPTH), 1);
    for (i64 slice = 0; slice < slices; slice++) {
        const Range k = split_range(K, slices, slice);
        pack_b(packed_b, b, k.begin, k.size(), j0, cols);
        for (i64 i = 0; i < rows; i += GEMM_ROWS) {
            const i64 height = std::min(rows - i, GEMM_ROWS);
            const Strided packed = pack_a(packed_a, a, i0 + i, height, k.begin, k.size());
            for (i64 j = 0; j < cols; j += TILE_COLS) {
                panel_product<TILE_VECTORS>(product + i * ldp + j, ldp, packed, packed_b + j * k.size(), TILE_COLS, height, k.size(),
                                            slice > 0);
            }
            if (slice < slices - 1) { continue; }
            for (i64 r = i; r < i + height; r++) {
                Y* out = c + (i0 + r) * ldc + j0;
                vector_loop(cols, [&](i64 j, auto lanes) {
                    vfloat value = alpha * load(product + r * ldp + j);
                    if (bias) { value += load(bias + j0 + j, lanes); }
                    if (accumulate) { value += load(out + j, lanes); }
                    store(out + j, value, lanes);
                });
            }
        }
    }
}

}  // namespace cpu

template <typename X, typename Y>
void gemm(Y* c, i64 ldc, Matrix<X> a, Matrix<X> b, const X* bias, i64 M, i64 N, i64 K, float alpha, bool accumulate, Run& run) {
    if (M == 0 || N == 0) { return; }
    const cpu::GemmBlocks blocks(M, N, K);
    run.parallel(blocks.down * blocks.across, [&](i64 item) {
        const i64 i0 = item % blocks.down * blocks.rows, j0 = item / blocks.down * blocks.cols;
        cpu::gemm_block(c, ldc, a, b, bias, i0, std::min(M - i0, blocks.rows), j0, std::min(N - j0, blocks.cols), K, alpha, accumulate);
    });
}
