// gemm_cpu.h: the CPU side of gemm.h. The product is cut into blocks of c; a block is one item of the rank's parallel
// loop, so that results do not depend on the number of threads, epilogues run in cache, and Run::poll is called often.
//
// A block goes to one of four:
//   dot products    few rows against a transposed b: decode and short prompts, which mostly read the weight
//   pairs           bf16 where the processor has AMX or AVX512_BF16 (gemm_pairs.h)
//   oneDNN          sgemm, called by each thread for itself: float, but for weight gradients on Intel
//   plain loops     the rest, widened to float while packing, and everything under -DLLMC_GEMM_PLAIN, which needs no library: oracle and sanitizer builds
#pragma once

#include <bit>

#include "gemm_pairs.h"

#ifndef LLMC_GEMM_PLAIN
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#endif

namespace cpu {

// How c is cut: by shape only. Large blocks pack their operands least often; small products are cut finer, down to blocks
// that still run at about 90% of the large ones' speed (130M shapes), so that a team has work.
struct GemmBlocks {
    i64 rows, cols, down, across;
    GemmBlocks(i64 M, i64 N, i64 K) {
        constexpr i64 WANTED = 16, FLOP = 1000000000;
        constexpr struct { i64 rows, cols; } SIZES[] = {{512, 768}, {512, 384}, {256, 384}, {128, 384}};
        for (const auto& size : SIZES) {
            across = ceil_div(N, size.cols);
            down = ceil_div(M, size.rows);
            if (down * across >= WANTED && 2 * size.rows * size.cols * K <= FLOP) { break; }
        }
        rows = round_up(ceil_div(M, down), 16);
        cols = round_up(ceil_div(N, across), TILE_COLS);
        down = ceil_div(M, rows);
        across = ceil_div(N, cols);
    }
};

// ---- plain loops ----------------------------------------------------------------------------------------------------
// As in BLIS (Van Zee, van de Geijn 2015): a slice of b is packed into panels, a slice of a stays in L2 beside it, tiles
// run over both. The block's sums are kept in fp32 scratch until the last slice.
constexpr i64 GEMM_DEPTH = 256, GEMM_ROWS = 192;
constexpr i64 GEMM_PAD = 16;  // keeps the rows of a tile out of one another's cache sets

// a's slice as floats: (rows, depth), or as it is stored, (depth, rows).
template <typename X>
Strided<float> pack_a(float* to, Matrix<X> a, i64 i0, i64 rows, i64 k0, i64 depth) {
    const i64 lines = a.transposed ? depth : rows, width = a.transposed ? rows : depth;
    const i64 ld = (a.transposed ? GEMM_ROWS : GEMM_DEPTH) + GEMM_PAD;
    const X* from = a.transposed ? a.data + k0 * a.ld + i0 : a.data + i0 * a.ld + k0;
    for (i64 line = 0; line < lines; line++) {
        vector_loop(width, [&](i64 i, auto lanes) { store(to + line * ld + i, load(from + line * a.ld + i, lanes), lanes); });
    }
    return {to, a.transposed ? 1 : ld, a.transposed ? ld : 1};
}

// to: panels of TILE_COLS columns, each (depth, TILE_COLS). What stands past the last column is left as it was: columns of
// a product do not mix, and the epilogue does not read those.
template <typename X>
void pack_b(float* to, Matrix<X> b, i64 k0, i64 depth, i64 cols) {
    for (i64 j = 0; j < cols; j += TILE_COLS, to += depth * TILE_COLS) {
        const i64 width = std::min<i64>(cols - j, TILE_COLS);
        if (b.transposed) {
            transpose_block(to, TILE_COLS, b.data + j * b.ld + k0, b.ld, width, depth);
            continue;
        }
        for (i64 k = 0; k < depth; k++) {
            const X* from = b.data + (k0 + k) * b.ld + j;
            vector_loop(width, [&](i64 i, auto lanes) { store(to + k * TILE_COLS + i, load(from + i, lanes), lanes); });
        }
    }
}

template <typename X, typename Y>
void plain_block(const Block<X, Y>& block) {
    static thread_local Scratch<float> a_scratch, b_scratch, c_scratch;
    const auto& [c, ldc, a, b, bias, rows, cols, K, alpha, accumulate] = block;
    const i64 ldp = round_up(cols, TILE_COLS), slices = std::max<i64>(ceil_div(K, GEMM_DEPTH), 1);
    float* packed_a = a_scratch.get((GEMM_ROWS + GEMM_PAD) * (GEMM_DEPTH + GEMM_PAD));
    float* packed_b = b_scratch.get(GEMM_DEPTH * ldp);
    float* sums = c_scratch.get(rows * ldp);
    for (i64 slice = 0; slice < slices; slice++) {
        const Range k = split_range(K, slices, slice);
        pack_b(packed_b, b, k.begin, k.size(), cols);
        for (i64 i = 0; i < rows; i += GEMM_ROWS) {
            const i64 height = std::min(rows - i, GEMM_ROWS);
            const Strided<float> packed = pack_a(packed_a, a, i, height, k.begin, k.size());
            for (i64 j = 0; j < cols; j += TILE_COLS) {
                panel_product<TILE_VECTORS>(sums + i * ldp + j, ldp, packed, packed_b + j * k.size(), TILE_COLS, height, k.size(),
                                            slice > 0);
            }
            for (i64 r = i; r < i + height && slice == slices - 1; r++) { write_row(block, r, 0, cols, sums + r * ldp); }
        }
    }
}

// ---- dot products ---------------------------------------------------------------------------------------------------
constexpr i64 FEW_ROWS = 32, FEW_ROWS_COLS = 768;

// What one instruction multiplies: single elements, or pairs of them.
template <typename X>
using DotStep = std::conditional_t<FAST_PAIRS && std::is_same_v<X, bf16>, bf16x2, X>;
template <typename X>
constexpr i64 DOT_WIDTH = VL * (i64)(sizeof(DotStep<X>) / sizeof(X));
template <typename X>
ALWAYS_INLINE auto load_step(const X* p) {
    return load((const DotStep<X>*)p);
}
template <typename X, typename Y>
ALWAYS_INLINE void put_dot(const Block<X, Y>& block, i64 i, i64 j, float dot) {
    Y& out = block.c[i * block.ldc + j];
    out = block.alpha * dot + (block.bias ? (float)block.bias[j] : 0.0f) + (block.accumulate ? (float)out : 0.0f);
}

// Row i of a against W rows of the weight, those of c's columns j, j + gap, ... AHEAD: what comes FAR bytes later is fetched into L2, NEAR bytes later into L1.
constexpr i64 FAR = 8192, NEAR = 2048;
template <int W, bool AHEAD, typename X, typename Y>
ALWAYS_INLINE void dots(const Block<X, Y>& block, i64 i, i64 j, i64 gap) {
    constexpr i64 AT_ONCE = 4, STEP = AT_ONCE * DOT_WIDTH<X>;  // at once: hides the latency of additions
    const X *row = block.a.data + i * block.a.ld, *w = block.b.data + j * block.b.ld;
    const i64 next = gap * block.b.ld;
    vfloat sums[W][AT_ONCE];
#pragma GCC unroll 8
    for (int n = 0; n < W * AT_ONCE; n++) { sums[n / AT_ONCE][n % AT_ONCE] = vfloat{}; }
    i64 k = 0;
    for (; k + STEP <= block.K; k += STEP) {
#pragma GCC unroll 4
        for (int s = 0; s < AT_ONCE; s++) {
            const auto x = load_step(row + k + s * DOT_WIDTH<X>);
#pragma GCC unroll 2
            for (int n = 0; n < W; n++) {
                const X* from = w + n * next + k + s * DOT_WIDTH<X>;
                if (AHEAD && s * DOT_WIDTH<X> * (i64)sizeof(X) % LINE == 0) { __builtin_prefetch((const char*)from + FAR, 0, 2), __builtin_prefetch((const char*)from + NEAR, 0, 3); }
                sums[n][s] = multiply_add(sums[n][s], x, load_step(from));
            }
        }
    }
#pragma GCC unroll 2
    for (int n = 0; n < W; n++) {
        vfloat sum = (sums[n][0] + sums[n][1]) + (sums[n][2] + sums[n][3]);  // not in the array: taking its address would keep it in memory
        vector_loop(block.K - k, [&](i64 r, auto lanes) { sum += load(row + k + r, lanes) * load(w + n * next + k + r, lanes); });
        put_dot(block, i, j + n * gap, sum_lanes(sum));
    }
}

// One row. The weight is read as two streams, one from its first row on, one from its middle on. An AMD EPYC fetches them ahead by itself: prefetches cost it 1 to 14%; in bf16 one
// stream alone is read at 0.91 to 0.97 of that rate (K = 768, 2048), rows side by side at half of it (2 cores, 30 November 2026). An Intel Xeon with AMX reads 130M's products at 0.92
// (fp32) and 0.71 (bf16) of the memory's rate without them, at 0.97 and 0.88 with those into L2 only, and at all of it with both (2 cores, 1 December 2026).
template <bool AHEAD, typename X, typename Y>
void dot_row(const Block<X, Y>& block) {
    const i64 half = block.cols / 2;
    for (i64 j = 0; j < half; j++) { dots<2, AHEAD>(block, 0, j, half); }
    if (block.cols % 2 != 0) { dots<1, AHEAD>(block, 0, block.cols - 1, 0); }
}

// Several rows: R of them by DOT_COLS rows of the weight, which are read from memory once, while those of the next tile are fetched. A tile's sums are vectors along K, in
// registers. Against oneDNN (K = 768 and 2048, AMD EPYC, 2 cores, 30 November 2026): 8 rows 1.5 to 1.8 times as fast in fp32 and 2.1 to 3 in bf16, 32 rows 1.2 to 1.5 and 1.1 to 1.6.
constexpr int DOT_COLS = 4, DOT_ROWS = VL / DOT_COLS;
template <int R, typename X, typename Y>
void dot_tile(const Block<X, Y>& block, i64 i, i64 j) {
    constexpr int C = DOT_COLS, COUNT = std::bit_ceil((unsigned)R) * C;
    const i64 lda = block.a.ld, ldb = block.b.ld, K = block.K;
    const X *a = block.a.data + i * lda, *b = block.b.data + j * ldb;
    vfloat sums[COUNT] = {};  // (R, C)
    i64 k = 0;
    for (; k + DOT_WIDTH<X> <= K; k += DOT_WIDTH<X>) {
        decltype(load_step(b)) weights[C];
#pragma GCC unroll 4
        for (int v = 0; v < C; v++) {
            weights[v] = load_step(b + v * ldb + k);
            if (i == 0) { __builtin_prefetch(b + (v + C) * ldb + k, 0, 2); }  // into L2
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const auto x = load_step(a + r * lda + k);
#pragma GCC unroll 4
            for (int v = 0; v < C; v++) { sums[r * C + v] = multiply_add(sums[r * C + v], x, weights[v]); }
        }
    }
    vector_loop(K - k, [&](i64 rest, auto lanes) {
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int v = 0; v < C; v++) { sums[r * C + v] += load(a + r * lda + k + rest, lanes) * load(b + v * ldb + k + rest, lanes); }
        }
    });
    float results[VL];
    store(results, sums_of_lanes<COUNT>(sums));
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < C; v++) { put_dot(block, i + r, j + v, results[(r * C + v) * (VL / COUNT)]); }
    }
}
template <int R, typename X, typename Y>
void dot_tiles(const Block<X, Y>& block, i64 i, i64 j) {
    for (; i + R <= block.rows; i += R) { dot_tile<R>(block, i, j); }
    if constexpr (R > 1) { dot_tiles<R - 1>(block, i, j); }
}
template <typename X, typename Y>
void dot_block(const Block<X, Y>& block) {
    if (block.rows == 1) { return __builtin_cpu_is("intel") ? dot_row<true>(block) : dot_row<false>(block); }
    i64 j = 0;
    for (; j + DOT_COLS <= block.cols; j += DOT_COLS) { dot_tiles<DOT_ROWS>(block, 0, j); }
    for (; j < block.cols; j++) {
        for (i64 i = 0; i < block.rows; i++) { dots<1, false>(block, i, j, 0); }
    }
}

// Each thread reads few long ranges, as many as every other: to begin anew takes the memory time (with 96 rows at a time 130M in bf16 had 0.88 of the tokens/s). A dot
// product is the same however c is cut, at multiples of VL, so here the cut may depend on the threads.
inline i64 dot_cols(i64 N, const Run& run) {
    const i64 parts = run.threads() * ceil_div(N, run.threads() * FEW_ROWS_COLS);
    return round_up(ceil_div(N, parts), VL);
}

// ---- oneDNN ---------------------------------------------------------------------------------------------------------
template <typename X, typename Y>
bool vendor_takes(const Block<X, Y>&) {
    return false;
}
template <typename X, typename Y>
void vendor_block(const Block<X, Y>&) {}
#ifndef LLMC_GEMM_PLAIN

// oneDNN's own threads stay out: the team is the parallelism. The setting is the calling thread's.
inline void one_omp_thread() {
    static thread_local const bool done = (omp_set_num_threads(1), true);
    (void)done;
}
inline void check_dnnl(dnnl_status_t status, const char* what) {
    check(status == dnnl_success, "oneDNN: %s failed (%d)", what, (int)status);
}

inline void vendor_block(const Block<float, float>& block) {
    one_omp_thread();
    const auto& [c, ldc, a, b, bias, rows, cols, K, alpha, accumulate] = block;
    check_dnnl(dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', rows, cols, K, alpha, a.data, a.ld, b.data, b.ld,
                          accumulate ? 1.0f : 0.0f, c, ldc),
               "sgemm");
    for (i64 r = 0; r < rows && bias; r++) {
        float* out = c + r * ldc;
        vector_loop(cols, [&](i64 j, auto lanes) { store(out + j, load(out + j, lanes) + load(bias + j, lanes), lanes); });
    }
}

// Weight gradients run 1.1 to 1.3 times as fast in our loops on Intel (130M, 2,048 and 4,096 rows, Xeon with AMX, 1 December 2026): sgemm slows down where a's columns lie far apart.
inline bool vendor_takes(const Block<float, float>& block) {
    static const bool intel = __builtin_cpu_is("intel");
    return block.K > 0 && block.rows * block.cols * block.K > 32768 && !(intel && block.a.transposed);
}
#endif

// From how many channels on a model's products are faster in bf16 than in fp32 here: at 288 with AMX's tiles 3.6 times, with AVX512_BF16 on AMD's processors
// (Intel's have one such unit for two of fp32's) 1.6 to 1.9 times. Tiny models stay in fp32, so that demonstrations print the same everywhere.
inline i64 bf16_from() {
    return PAIRS_TAKE<bf16> && (amx::available() || __builtin_cpu_is("amd")) ? 256 : std::numeric_limits<i64>::max();
}

template <typename X, typename Y>
void gemm(Y* c, i64 ldc, Matrix<X> a, Matrix<X> b, const X* bias, i64 M, i64 N, i64 K, float alpha, bool accumulate, Run& run) {
    if (M == 0 || N == 0) { return; }
    const bool few = M <= FEW_ROWS && !a.transposed && b.transposed, pairs = !few && PAIRS_TAKE<X>;
    const GemmBlocks blocks(M, N, K);
    const PairCut pair_cut(M, N, K, a.transposed, run.threads());
    const i64 rows = few ? M : pairs ? pair_cut.rows : blocks.rows, cols = few ? dot_cols(N, run) : pairs ? pair_cut.cols : blocks.cols, down = ceil_div(M, rows);
    run.parallel(down * ceil_div(N, cols), [&](i64 item) {
        const i64 i = item % down * rows, j = item / down * cols;
        const Matrix<X> a_part{a.data + (a.transposed ? i : i * a.ld), a.ld, a.transposed};
        const Matrix<X> b_part{b.data + (b.transposed ? j * b.ld : j), b.ld, b.transposed};
        const Block<X, Y> block{c + i * ldc + j,       ldc, a_part, b_part,    bias ? bias + j : nullptr, std::min(M - i, rows),
                                std::min(N - j, cols), K,   alpha,  accumulate};
        if (few) {
            dot_block(block);
        } else if constexpr (PAIRS_TAKE<X>) {
            pair_block(block, pair_cut.slabs);
        } else if (vendor_takes(block)) {
            vendor_block(block);
        } else {
            plain_block(block);
        }
    });
}

// Nothing more is fused here: SwiGLU and GELU take 2% of a step, and backward needs what they read (docs/notes.md).
template <typename X>
bool gemm_gelu(X*, X*, Matrix<X>, Matrix<X>, const X*, i64, i64, i64, Run&) {
    return false;
}
template <typename X, typename Y>
bool gemm_row_sums(Y*, Y*, Matrix<X>, Matrix<X>, i64, i64, i64, float, Run&) {
    return false;
}

}  // namespace cpu
