// gemm_amx.h: one block of a bf16 product on AMX's tiles (amx.h), for gemm_cpu.h.
//
// As in BLIS (Van Zee, van de Geijn 2015), with 32 x 32 elements of c in four tiles: a slab of b, (depth, cols), is packed into L2 in the order in which tiles are read; strips
// of 32 rows of a go past it, read where they lie, or packed where they are transposed or ragged. What comes next is fetched meanwhile: b into L1, the next strip into L2,
// the lines of c that will be written. An element's sum runs over k in order, in slices whose length depends on K and on whether a is transposed: no cut of c changes its bits.
#pragma once

#include "amx.h"
#include "gemm_block.h"

namespace cpu {

constexpr i64 AMX_SIDE = 32;  // rows and columns of c that a product works on at once

// How c is cut, and k into slabs. Elements: a thread's slab fills a quarter of a 2 MiB L2 (3/8: 6% slower), with the sums between
// slabs, where there are several, 5/8. Weight gradients, where a is transposed, have larger slabs, since a strip is packed for each of them, and are summed where they stand: more rows were 2 to 15% faster.
struct AmxCut {
    i64 rows, cols, slabs;
    AmxCut(i64 M, i64 N, i64 K, bool a_transposed, i64 threads) {
        constexpr i64 SUMS = 192 * 1024, TALLEST = 2048, LOWEST = 256, A_THREAD = 3;
        const i64 slab = (a_transposed ? 384 : 256) * 1024;
        slabs = std::max<i64>(ceil_div(K, a_transposed ? 512 : 4096), 1);  // a transposed strip is packed for every block of columns: short slabs, wide blocks
        const i64 depth = std::max(round_up(ceil_div(K, slabs), amx::DEPTH), amx::DEPTH), across = ceil_div(N, slab / depth / AMX_SIDE * AMX_SIDE);
        cols = round_up(ceil_div(N, across), AMX_SIDE);
        const i64 wanted = ceil_div(A_THREAD * threads, across), tallest = slabs == 1 ? TALLEST : (a_transposed ? 2 : 1) * SUMS / cols;
        rows = std::min(tallest, std::max(LOWEST, ceil_div(M, wanted)));
        rows = round_up(ceil_div(M, ceil_div(M, rows)), AMX_SIDE);
    }
};

#if !defined(__AMX_BF16__) || defined(LLMC_GEMM_PLAIN)
template <typename X>
bool amx_takes() {
    return false;
}
template <typename X, typename Y>
void amx_block(const Block<X, Y>&, i64) {}
#else

template <typename X>
bool amx_takes() {
    return dtype_of<X> == DType::BF16 && amx::available();
}
template <typename Y>
void amx_block(const Block<float, Y>&, i64) {}  // has no tiles

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
constexpr i64 AMX_TILE = amx::ROWS * amx::DEPTH;  // elements
__attribute__((noinline)) inline void amx_pack_b(bf16* to, Matrix<bf16> b, i64 k0, i64 depth, i64 cols) {
    if (!b.transposed) {  // along its rows, as it lies
        const i64 panel = ceil_div(depth, amx::DEPTH) * 2 * AMX_TILE;
        for (i64 k = 0; k < depth; k += amx::DEPTH, to += 2 * AMX_TILE) {
            for (i64 j = 0; j < cols; j += AMX_SIDE) { pack_rows<false>(to + j / AMX_SIDE * panel, amx::DEPTH, AMX_TILE, b.data + (k0 + k) * b.ld + j, b.ld, depth - k, cols - j); }
        }
        return;
    }
    for (i64 j = 0; j < cols; j += AMX_SIDE) {
        for (i64 k = 0; k < depth; k += amx::DEPTH, to += 2 * AMX_TILE) {
            const bf16* from = b.data + j * b.ld + k0 + k;
            pack_columns(to, from, b.ld, depth - k, cols - j), pack_columns(to + AMX_TILE, from + amx::COLS * b.ld, b.ld, depth - k, cols - j - amx::COLS);
        }
    }
}
// A strip (32, depth; ld), zeros past the edges.
__attribute__((noinline)) inline void amx_pack_a(bf16* to, i64 ld, Matrix<bf16> a, i64 i, i64 rows, i64 k0, i64 depth) {
    for (i64 k = 0; k < depth; k += amx::DEPTH) {
        if (a.transposed) {
            pack_rows<true>(to + k, ld, amx::ROWS * ld, a.data + (k0 + k) * a.ld + i, a.ld, depth - k, rows);
            continue;
        }
        for (i64 r = 0; r < AMX_SIDE; r++) { _mm512_storeu_si512(to + r * ld + k, load_row(a.data + (i + r) * a.ld + k0 + k, depth - k, r < rows)); }
    }
}

// What is fetched while a product runs: lines of c, and ROWS of the next strip.
struct AmxAhead {
    const char* c;
    i64 ldc, lines;  // bytes; lines of 64 bytes a row
    const bf16* a;
    i64 lda, rows;
};

// sums (32, 32; ld) = or += the strip times one panel.
ALWAYS_INLINE void amx_tiles(float* sums, i64 ld, const bf16* a, i64 lda, const bf16* b, i64 steps, bool accumulate, const AmxAhead& ahead) {
    constexpr i64 FETCHED = 2 * 2 * AMX_TILE;
    const i64 LD = 4 * ld;
    float* below = sums + amx::ROWS * ld;
    if (accumulate) {
        amx::load<0>(sums, LD), amx::load<1>(sums + amx::COLS, LD), amx::load<2>(below, LD), amx::load<3>(below + amx::COLS, LD);
    } else {
        amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
    }
    for (i64 s = 0; s < steps; s++, a += amx::DEPTH, b += 2 * AMX_TILE) {
        amx::load<4>(a, 2 * lda), amx::load<6>(b, 64), amx::load<7>(b + AMX_TILE, 64), amx::load<5>(a + amx::ROWS * lda, 2 * lda);
        amx::multiply_add<0, 4, 6>(), amx::multiply_add<1, 4, 7>(), amx::multiply_add<2, 5, 6>(), amx::multiply_add<3, 5, 7>();
#pragma GCC unroll 32
        for (i64 line = 0; line < 2 * AMX_TILE; line += 32) { __builtin_prefetch(b + FETCHED + line, 0, 3); }
        for (i64 r = 0; r < ahead.rows; r++) { __builtin_prefetch(ahead.a + r * ahead.lda + s * amx::DEPTH, 0, 2); }
        for (i64 r = 2 * s; r < 2 * s + 2 && s < amx::ROWS; r++) {
            for (i64 line = 0; line < ahead.lines; line++) { __builtin_prefetch(ahead.c + r * ahead.ldc + 64 * line, 1, 3); }
        }
    }
    amx::store<0>(sums, LD), amx::store<1>(sums + amx::COLS, LD), amx::store<2>(below, LD), amx::store<3>(below + amx::COLS, LD);
}

// c's elements from (i, j) on, 32 x 32 of them where there are as many, = or += alpha times their sums, plus the bias.
template <typename Y>
ALWAYS_INLINE void amx_write(const Block<bf16, Y>& block, i64 i, i64 j, const float* sums) {
    for (i64 r = 0; r < std::min(block.rows - i, AMX_SIDE); r++, sums += AMX_SIDE) {
        Y* out = block.c + (i + r) * block.ldc + j;
        vector_loop(std::min(block.cols - j, AMX_SIDE), [&](i64 n, auto lanes) {
            vfloat value = block.alpha * load(sums + n, lanes);
            if (block.bias) { value += load(block.bias + j + n, lanes); }
            if (block.accumulate) { value += load(out + n, lanes); }
            store(out + n, value, lanes);
        });
    }
}

template <typename Y>
void amx_block(const Block<bf16, Y>& block, i64 slabs) {
    static thread_local Scratch<bf16> a_scratch, b_scratch;
    static thread_local Scratch<float> c_scratch;
    const auto& [c, ldc, a, b, bias, rows, cols, K, alpha, accumulate] = block;
    const i64 deepest = std::max(round_up(ceil_div(K, slabs), amx::DEPTH), amx::DEPTH), panels = ceil_div(cols, AMX_SIDE), strips = ceil_div(rows, AMX_SIDE), ld = deepest + amx::DEPTH;
    constexpr i64 SQUARE = AMX_SIDE * AMX_SIDE;
    bf16 *packed_a = a_scratch.get(AMX_SIDE * ld), *packed_b = b_scratch.get(deepest * panels * AMX_SIDE);
    float* sums = c_scratch.get(slabs > 1 ? strips * panels * SQUARE : SQUARE);
    const bool in_place = std::is_same_v<Y, float> && alpha == 1 && !bias;  // whole tiles are summed where they stand: without a second pass wgrad was 1.1 times as fast
    const amx::Tiles tiles;
    for (i64 k = 0; k < std::max<i64>(K, 1); k += deepest) {
        const i64 depth = std::min(deepest, K - k), steps = ceil_div(depth, amx::DEPTH);
        const bool last = k + deepest >= K;
        amx_pack_b(packed_b, b, k, depth, cols);
        for (i64 strip = 0; strip < strips; strip++) {
            const i64 i = strip * AMX_SIDE, height = std::min(rows - i, AMX_SIDE);
            const bool as_it_lies = !a.transposed && height == AMX_SIDE && depth % amx::DEPTH == 0;
            if (!as_it_lies) { amx_pack_a(packed_a, ld, a, i, height, k, depth); }
            const bf16* left = as_it_lies ? a.data + i * a.ld + k : packed_a;
            const i64 lda = as_it_lies ? a.ld : ld;
            const bool more = as_it_lies && i + 2 * AMX_SIDE <= rows;
            for (i64 panel = 0; panel < panels; panel++) {
                Y* out = c + i * ldc + panel * AMX_SIDE;
                const Range next = split_range(AMX_SIDE, panels, panel);
                const Y* soon = !in_place ? out : panel + 1 < panels ? out + AMX_SIDE : c + std::min(i + AMX_SIDE, rows - AMX_SIDE) * ldc;  // what is written, or read, next
                const AmxAhead ahead{(const char*)soon, ldc * (i64)sizeof(Y), (in_place ? k == 0 : last) && height == AMX_SIDE ? (i64)sizeof(Y) / 2 : 0,
                                     left + (AMX_SIDE + next.begin) * lda, lda, more ? next.size() : 0};
                const bool stands = in_place && height == AMX_SIDE && (panel + 1) * AMX_SIDE <= cols;
                float* square = stands ? (float*)out : slabs > 1 ? sums + (strip * panels + panel) * SQUARE : sums;
                amx_tiles(square, stands ? ldc : AMX_SIDE, left, lda, packed_b + panel * steps * 2 * AMX_TILE, steps, k > 0 || (stands && accumulate), ahead);
                if (last && !stands) { amx_write(block, i, panel * AMX_SIDE, square); }
            }
        }
    }
}

#endif

}  // namespace cpu
