// gemm_pairs.h: one block of a bf16 product for gemm_cpu.h, on processors that multiply pairs of bf16: on AMX's tiles (amx.h), or by AVX512_BF16's vectors.
//
// As in BLIS (Van Zee, van de Geijn 2015), with squares of 32 x 32 elements of c: a slab of b, (depth, cols), is packed into L2 in the order in which it is read; strips
// of 32 rows of a go past it, read where they lie, or packed where they are transposed or ragged. What comes next is fetched meanwhile: b into L1, the next strip into L2,
// the lines of c that will be written. An element's sum runs over k in order, in slices whose length depends on K and on whether a is transposed: no cut of c changes its bits.
#pragma once

#include "amx.h"
#include "gemm_block.h"

namespace cpu {

constexpr i64 SIDE = 32;  // rows and columns of c that a product works on at once

// How c is cut, and k into slabs. Elements: a thread's slab fills a quarter of an L2 (3/8: 6% slower), which has 2 MiB where there is AMX, 1 MiB on AMD's; with the sums between
// slabs, where there are several, 5/8. Weight gradients, where a is transposed, have larger slabs, since a strip is packed for each of them, and are summed where they stand:
// more rows were 2 to 15% faster (130M's shapes on tiles, 2 threads, Xeon with AMX, 1 December 2026).
struct PairCut {
    i64 rows, cols, slabs;
    PairCut(i64 M, i64 N, i64 K, bool a_transposed, i64 threads, bool tiles = amx::available()) {
        constexpr i64 TALLEST = 2048, LOWEST = 256, A_THREAD = 3;
        const i64 l2 = (tiles ? 1024 : 512) * 1024, slab = a_transposed ? l2 * 3 / 8 : l2 / 4, sums = l2 * 3 / 16;
        slabs = std::max<i64>(ceil_div(K, a_transposed ? 512 : tiles ? 4096 : 1024), 1);  // a transposed strip is packed for every block of columns: short slabs, wide blocks
        const i64 depth = std::max(round_up(ceil_div(K, slabs), amx::DEPTH), amx::DEPTH), across = ceil_div(N, slab / depth / SIDE * SIDE);
        cols = round_up(ceil_div(N, across), SIDE);
        const i64 wanted = ceil_div(A_THREAD * threads, across), tallest = slabs == 1 ? TALLEST : (a_transposed ? 2 : 1) * sums / cols;
        rows = std::min(tallest, std::max(LOWEST, ceil_div(M, wanted)));
        rows = round_up(ceil_div(M, ceil_div(M, rows)), SIDE);
    }
};

template <typename X>
constexpr bool PAIRS_TAKE = false;
#if defined(__AVX512BF16__) && !defined(LLMC_GEMM_PLAIN)
template <>
constexpr bool PAIRS_TAKE<bf16> = true;

// Words of an even and an odd row: of columns 0 to 15 and 16 to 31.
ALWAYS_INLINE std::pair<vuint, vuint> interleave(__m512i even, __m512i odd) {
    const auto order = [](int first) { return vector_of([=](int lane) { return (first + lane) | (first + lane + 32) << 16; }); };
    return {(vuint)_mm512_permutex2var_epi16(even, (__m512i)order(0), odd), (vuint)_mm512_permutex2var_epi16(even, (__m512i)order(VL), odd)};
}
// Up to 32 elements of a row; no row at all is zeros.
ALWAYS_INLINE __m512i load_row(const bf16* from, i64 count, bool there = true) {
    return _mm512_maskz_loadu_epi16(!there || count <= 0 ? 0 : count >= 32 ? ~0u : (1u << count) - 1, from);
}

// Two tiles, DEPTH rows of which stand in memory as rows of up to 32 columns: to[0], columns 0 to 15, to[1], 16 to 31, in pairs of rows; transposed: in pairs along the columns.
template <bool TRANSPOSED>
ALWAYS_INLINE void pack_rows(bf16* to, i64 ld, i64 second, const bf16* from, i64 ld_from, i64 depth, i64 width) {
    vfloat left[VL], right[VL];
#pragma GCC unroll 16
    for (int p = 0; p < VL; p++) {
        const bf16* row = from + 2 * p * ld_from;
        const auto [low, high] = interleave(load_row(row, width, 2 * p < depth), load_row(row + ld_from, width, 2 * p + 1 < depth));
        left[p] = (vfloat)low, right[p] = (vfloat)high;
    }
    if constexpr (TRANSPOSED) { transpose(left), transpose(right); }
#pragma GCC unroll 16
    for (int p = 0; p < VL; p++) { store((float*)(to + p * ld), left[p]), store((float*)(to + second + p * ld), right[p]); }
}
// One tile from 16 rows along depth: words transposed.
ALWAYS_INLINE void pack_columns(bf16* to, const bf16* from, i64 ld_from, i64 depth, i64 width) {
    vfloat square[VL];
#pragma GCC unroll 16
    for (int c = 0; c < VL; c++) { square[c] = (vfloat)load_row(from + c * ld_from, depth, c < width); }
    transpose(square);
#pragma GCC unroll 16
    for (int p = 0; p < VL; p++) { store((float*)(to + p * amx::DEPTH), square[p]); }
}

// to: for each 32 columns, for each 32 of depth, two tiles. Past the edges there are zeros.
constexpr i64 TILE = amx::ROWS * amx::DEPTH;  // elements
__attribute__((noinline)) inline void pair_pack_b(bf16* to, Matrix<bf16> b, i64 k0, i64 depth, i64 cols) {
    if (!b.transposed) {  // along its rows, as it lies
        const i64 panel = ceil_div(depth, amx::DEPTH) * 2 * TILE;
        for (i64 k = 0; k < depth; k += amx::DEPTH, to += 2 * TILE) {
            for (i64 j = 0; j < cols; j += SIDE) { pack_rows<false>(to + j / SIDE * panel, amx::DEPTH, TILE, b.data + (k0 + k) * b.ld + j, b.ld, depth - k, cols - j); }
        }
        return;
    }
    for (i64 j = 0; j < cols; j += SIDE) {
        for (i64 k = 0; k < depth; k += amx::DEPTH, to += 2 * TILE) {
            const bf16* from = b.data + j * b.ld + k0 + k;
            pack_columns(to, from, b.ld, depth - k, cols - j), pack_columns(to + TILE, from + amx::COLS * b.ld, b.ld, depth - k, cols - j - amx::COLS);
        }
    }
}
// 32 rows of a: pair k of row r at data[r*row + k*pair].
struct Strip {
    const bf16* data;
    i64 row, pair;  // elements
};
// Packed, with zeros past the edges: as rows, or, where a is transposed and STANDING, as words of two rows along depth, which is cheaper.
template <bool STANDING>
__attribute__((noinline)) Strip pair_pack_a(bf16* to, i64 ld, Matrix<bf16> a, i64 i, i64 rows, i64 k0, i64 depth) {
    for (i64 k = 0; k < depth; k += amx::DEPTH) {
        const bf16* from = a.data + (k0 + k) * a.ld + i;
        if (a.transposed && STANDING) {
            pack_rows<false>(to + k * SIDE, 2 * SIDE, SIDE, from, a.ld, depth - k, rows);
        } else if (a.transposed) {
            pack_rows<true>(to + k, ld, amx::ROWS * ld, from, a.ld, depth - k, rows);
        } else {
            for (i64 r = 0; r < SIDE; r++) { _mm512_storeu_si512(to + r * ld + k, load_row(a.data + (i + r) * a.ld + k0 + k, depth - k, r < rows)); }
        }
    }
    return a.transposed && STANDING ? Strip{to, 2, 2 * SIDE} : Strip{to, ld, 2};
}

// What is fetched while a product runs: lines of c, and rows of the next strip.
struct Ahead {
    const char* c;
    i64 ldc, lines;  // bytes; lines of 64 bytes a row
    const bf16* a;
    i64 lda, rows;

    ALWAYS_INLINE void fetch(i64 step) const {
        for (i64 r = 0; r < rows; r++) { __builtin_prefetch(a + r * lda + step * amx::DEPTH, 0, 2); }
        for (i64 r = 2 * step; r < 2 * step + 2 && step < amx::ROWS; r++) {
            for (i64 line = 0; line < lines; line++) { __builtin_prefetch(c + r * ldc + 64 * line, 1, 3); }
        }
    }
};

// sums (32, 32; ld) = or += a strip times one panel of b, a step 32 of depth.
struct OnTiles {
    static constexpr bool STANDING = false;
    amx::Tiles tiles;

    ALWAYS_INLINE static void square(float* sums, i64 ld, Strip strip, const bf16* b, i64 steps, bool accumulate, const Ahead& ahead) {
        const bf16* a = strip.data;
        const i64 lda = strip.row;
        constexpr i64 FETCHED = 2 * 2 * TILE;
        const i64 LD = 4 * ld;
        float* below = sums + amx::ROWS * ld;
        if (accumulate) {
            amx::load<0>(sums, LD), amx::load<1>(sums + amx::COLS, LD), amx::load<2>(below, LD), amx::load<3>(below + amx::COLS, LD);
        } else {
            amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
        }
        for (i64 s = 0; s < steps; s++, a += amx::DEPTH, b += 2 * TILE) {
            amx::load<4>(a, 2 * lda), amx::load<6>(b, 64), amx::load<7>(b + TILE, 64), amx::load<5>(a + amx::ROWS * lda, 2 * lda);
            amx::multiply_add<0, 4, 6>(), amx::multiply_add<1, 4, 7>(), amx::multiply_add<2, 5, 6>(), amx::multiply_add<3, 5, 7>();
#pragma GCC unroll 32
            for (i64 line = 0; line < 2 * TILE; line += 32) { __builtin_prefetch(b + FETCHED + line, 0, 3); }
            ahead.fetch(s);
        }
        amx::store<0>(sums, LD), amx::store<1>(sums + amx::COLS, LD), amx::store<2>(below, LD), amx::store<3>(below + amx::COLS, LD);
    }
};
// The sums of ROWS rows stay in registers: 16 vectors, to which a step of pairs adds two vectors of b times a word of each row.
struct OnVectors {
    static constexpr bool STANDING = true;
    static constexpr int ROWS = 8;

    ALWAYS_INLINE static void square(float* sums, i64 ld, Strip a, const bf16* b, i64 steps, bool accumulate, const Ahead& ahead) {
        for (i64 top = 0; top < SIDE; top += ROWS, a.data += ROWS * a.row, sums += ROWS * ld) {
            const bf16* pairs = a.data;
            const bf16x2* panel = (const bf16x2*)b;
            vfloat left[ROWS], right[ROWS];
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) { left[r] = right[r] = vfloat{}; }
            for (i64 s = 0; s < steps; s++, panel += TILE) {
                for (i64 k = 0; k < amx::DEPTH / 2; k++, pairs += a.pair) {
                    const vuint low = load(panel + k * amx::COLS), high = load(panel + k * amx::COLS + TILE / 2);
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; r++) {
                        const vuint pair = splat(*(const bf16x2*)(pairs + r * a.row));
                        left[r] = multiply_add(left[r], pair, low), right[r] = multiply_add(right[r], pair, high);
                    }
                }
                if (top == 0) { ahead.fetch(s); }
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                float* to = sums + r * ld;
                store(to, accumulate ? load(to) + left[r] : left[r]), store(to + VL, accumulate ? load(to + VL) + right[r] : right[r]);
            }
        }
    }
};

template <typename Kernel, typename Y>
void pair_block_on(const Block<bf16, Y>& block, i64 slabs) {
    static thread_local Scratch<bf16> a_scratch, b_scratch;
    static thread_local Scratch<float> c_scratch;
    const auto& [c, ldc, a, b, bias, rows, cols, K, alpha, accumulate] = block;
    const i64 deepest = std::max(round_up(ceil_div(K, slabs), amx::DEPTH), amx::DEPTH), panels = ceil_div(cols, SIDE), strips = ceil_div(rows, SIDE), ld = deepest + amx::DEPTH;
    constexpr i64 SQUARE = SIDE * SIDE;
    bf16 *packed_a = a_scratch.get(SIDE * ld), *packed_b = b_scratch.get(deepest * panels * SIDE);
    float* sums = c_scratch.get(slabs > 1 ? strips * panels * SQUARE : SQUARE);
    const bool in_place = std::is_same_v<Y, float> && alpha == 1 && !bias;  // whole squares are summed where they stand: without a second pass wgrad was 1.1 times as fast on tiles
    [[maybe_unused]] const Kernel kernel;
    for (i64 k = 0; k < std::max<i64>(K, 1); k += deepest) {
        const i64 depth = std::min(deepest, K - k), steps = ceil_div(depth, amx::DEPTH);
        const bool first = k == 0, last = k + deepest >= K;
        pair_pack_b(packed_b, b, k, depth, cols);
        for (i64 strip = 0; strip < strips; strip++) {
            const i64 i = strip * SIDE, height = std::min(rows - i, SIDE);
            const bool whole = height == SIDE, as_it_lies = !a.transposed && whole && depth % amx::DEPTH == 0;
            const Strip left = as_it_lies ? Strip{a.data + i * a.ld + k, a.ld, 2} : pair_pack_a<Kernel::STANDING>(packed_a, ld, a, i, height, k, depth);
            // c's lines that are written after this square's product, or, summed in place, with the next square's; and this panel's share of the next strip
            const auto ahead = [&](i64 panel) {
                const Y* soon = c + i * ldc + panel * SIDE;
                if (in_place) { soon = panel + 1 < panels ? soon + SIDE : c + std::min(i + SIDE, rows - SIDE) * ldc; }
                const bool fetch_c = whole && (in_place ? first : last), fetch_a = as_it_lies && i + 2 * SIDE <= rows;
                const Range share = split_range(SIDE, panels, panel);
                return Ahead{(const char*)soon, ldc * (i64)sizeof(Y), fetch_c ? SIDE * (i64)sizeof(Y) / LINE : 0, left.data + (SIDE + share.begin) * a.ld, a.ld, fetch_a ? share.size() : 0};
            };
            for (i64 panel = 0; panel < panels; panel++) {
                const bool stands = in_place && whole && (panel + 1) * SIDE <= cols;
                float* square = stands ? (float*)c + i * ldc + panel * SIDE : slabs > 1 ? sums + (strip * panels + panel) * SQUARE : sums;
                Kernel::square(square, stands ? ldc : SIDE, left, packed_b + panel * steps * 2 * TILE, steps, !first || (stands && accumulate), ahead(panel));
                for (i64 r = 0; r < height && last && !stands; r++) { write_row(block, i + r, panel * SIDE, std::min(cols - panel * SIDE, SIDE), square + r * SIDE); }
            }
        }
    }
}
template <typename Y>
void pair_block(const Block<bf16, Y>& block, i64 slabs) {
    amx::available() ? pair_block_on<OnTiles>(block, slabs) : pair_block_on<OnVectors>(block, slabs);
}

#endif

}  // namespace cpu
