// tiles.cuh: what attention's kernels are made of: tiles of rows in shared memory, and products of tiles whose sums stay in a warp's
// registers: bf16 on tensor cores, float by multiply-adds (never tf32), both with fp32 sums in the layout of mma (ptx.cuh).
#pragma once

#include "ptx.cuh"

namespace gpu {

// Elements between a tile's rows: a pack more than their width, so that eight rows at one column lie in different banks.
template <typename X>
constexpr int tile_ld(int width) {
    return width + widest<X>;
}

// ---- tiles ----------------------------------------------------------------------------------------------------------
// Elements of rows `ld` apart, from p on, that are read and written at once: as many as make 16 or 8 bytes where alignment allows, else 1.
template <typename X>
int copy_width(const X* p, i64 ld) {
    return rows_aligned(16 / sizeof(X), p, ld) ? 16 / sizeof(X) : rows_aligned(8 / sizeof(X), p, ld) ? 8 / sizeof(X) : 1;
}
// body(Width<W>) for such a W.
template <typename X, typename Body>
__device__ __forceinline__ void with_copy_width(int W, const Body& body) {
    if (W == 16 / sizeof(X)) {
        body(Width<16 / sizeof(X)>{});
    } else if (W == 8 / sizeof(X)) {
        body(Width<8 / sizeof(X)>{});
    } else {
        body(Width<1>{});
    }
}

// Begins to copy `rows` rows of HS elements (ld apart) to a tile of ROWS rows of WIDTH; the rest of it becomes zero. All threads; the tile
// is there after copies_commit, copies_wait and a barrier. A thread has the same columns of every STEP-th row.
template <int THREADS, int ROWS, int WIDTH, typename X>
__device__ __forceinline__ void fetch_tile(X* tile, const X* from, i64 ld, int rows, int HS, int copy_width) {
    constexpr int W = widest<X>, PACKS = WIDTH / W, STEP = THREADS / PACKS;
    static_assert(PACKS <= THREADS);
    const int row0 = threadIdx.x / PACKS, c = threadIdx.x % PACKS * W;
    if (row0 >= STEP) { return; }  // threads left over
    NO_UNROLL
    for (int row = row0; row < ROWS; row += STEP) {
        const int count = row < rows ? HS - c : 0;  // elements that are there
        const X* p = from + row * ld + c;
        X* to = tile + row * tile_ld<X>(WIDTH) + c;
        if (copy_width == W) {
            copy_async<16>(to, p, count > 0);
        } else if (copy_width == W / 2) {
            copy_async<8>(to, p, count > 0);
            copy_async<8>(to + W / 2, p + W / 2, count > W / 2);
        } else {
            UNROLL
            for (int i = 0; i < W; i++) { to[i] = i < count ? p[i] : X(0.0f); }
        }
    }
}

// ---- sums -----------------------------------------------------------------------------------------------------------
// A warp's 16 M rows and 8 N columns. d[m][n][2 h + c] is row 16 m + 8 h + lane / 4, column 8 n + lane % 4 * 2 + c.
template <int M, int N>
struct Sums {
    float d[M][N][4];
};
// body(value, r, n, c) for each of a lane's values: in row lane_row(r) with r < 2 M, and column lane_column(n) + c.
template <int M, int N, typename Body>
__device__ __forceinline__ void each(Sums<M, N>& sums, const Body& body) {
    UNROLL
    for (int n = 0; n < N; n++) {
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int i = 0; i < 4; i++) { body(sums.d[m][n][i], 2 * m + i / 2, n, i % 2); }
        }
    }
}
template <int M, int N, typename Body>
__device__ __forceinline__ void each(Sums<M, N>& a, Sums<M, N>& b, const Body& body) {  // of the values of both
    each(a, [&](float& value, int r, int n, int c) { body(value, b.d[r / 2][n][r % 2 * 2 + c], r, n, c); });
}
__device__ __forceinline__ int lane_row(int r) { return 8 * r + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_column(int n) { return 8 * n + threadIdx.x % 4 * 2; }

// Over the four lanes that hold a row; the same bits on each of them.
template <typename Op>
__device__ __forceinline__ float row_reduce(float value, const Op& op) {
    value = op(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return op(value, __shfl_xor_sync(ALL_LANES, value, 2));
}

// Writes a warp's sums as `rows` rows of HS elements, ld apart, from `to` on; through `tile`, 16 M rows of WIDTH that only this warp uses.
template <int WIDTH, int M, int N, typename X>
__device__ __forceinline__ void store_sums(X* to, i64 ld, Sums<M, N>& sums, X* tile, int rows, int HS, int copy_width) {
    constexpr int LD = tile_ld<X>(WIDTH);
    static_assert(8 * N <= WIDTH);
    __syncwarp();  // what was in the tile is used
    UNROLL
    for (int m = 0; m < M; m++) {
        UNROLL
        for (int n = 0; n < N; n++) {
            UNROLL
            for (int h = 0; h < 2; h++) {
                store(tile + lane_row(2 * m + h) * LD + lane_column(n), Floats<2>{sums.d[m][n][2 * h], sums.d[m][n][2 * h + 1]});
            }
        }
    }
    __syncwarp();
    with_copy_width<X>(copy_width, [&](auto W) {
        constexpr int PACKS = 8 * N / W;  // of a row
        for (int i = threadIdx.x % 32; i < 16 * M * PACKS; i += 32) {
            const int row = i / PACKS, c = i % PACKS * W;
            if (row < rows && c < HS) { store(to + row * ld + c, load<W>(tile + row * LD + c)); }
        }
    });
}

// ---- products -------------------------------------------------------------------------------------------------------
// sums (16 M, 8 N) += a b^T, a (16 M, K) and b (8 N, K) in tiles of width K.
template <int K, int M, int N>
__device__ __forceinline__ void multiply_transposed(Sums<M, N>& sums, const bf16* a, const bf16* b) {
    static_assert(N % 2 == 0 && K % 16 == 0);
    constexpr int LD = tile_ld<bf16>(K);
    const int lane = threadIdx.x % 32;
    a += lane % 16 * LD + lane / 16 * 8;
    b += (lane / 16 * 8 + lane % 8) * LD + lane / 8 % 2 * 8;
    UNROLL_TWICE
    for (int k = 0; k < K; k += 16) {
        uint32_t fa[M][4];
        UNROLL
        for (int m = 0; m < M; m++) { load_matrices<4, false>(fa[m], a + 16 * m * LD + k); }
        UNROLL
        for (int n = 0; n < N; n += 2) {
            uint32_t fb[4];
            load_matrices<4, false>(fb, b + 8 * n * LD + k);
            UNROLL
            for (int m = 0; m < M; m++) {
                mma(sums.d[m][n], fa[m], {fb[0], fb[1]});
                mma(sums.d[m][n + 1], fa[m], {fb[2], fb[3]});
            }
        }
    }
}
template <int K, int M, int N>
__device__ __forceinline__ void multiply_transposed(Sums<M, N>& sums, const float* a, const float* b) {
    constexpr int LD = tile_ld<float>(K);
    for (int k = 0; k < K; k += 4) {
        Floats<4> rows[2 * M];
        UNROLL
        for (int r = 0; r < 2 * M; r++) { rows[r] = load<4>(a + lane_row(r) * LD + k); }
        UNROLL
        for (int n = 0; n < N; n++) {
            UNROLL
            for (int c = 0; c < 2; c++) {
                const Floats<4> column = load<4>(b + (lane_column(n) + c) * LD + k);
                UNROLL
                for (int r = 0; r < 2 * M; r++) {
                    UNROLL
                    for (int i = 0; i < 4; i++) { sums.d[r / 2][n][r % 2 * 2 + c] += rows[r][i] * column[i]; }
                }
            }
        }
    }
}

// sums (16 M, 8 N) += a b, a (16 M, 8 K) another product's sums, b (8 K, 8 N) from some column on in a tile of WIDTH. In bf16, a is
// rounded.
template <int WIDTH, int M, int N, int K>
__device__ __forceinline__ void multiply(Sums<M, N>& sums, const Sums<M, K>& a, const bf16* b) {
    static_assert(N % 2 == 0 && K % 2 == 0);
    constexpr int LD = tile_ld<bf16>(WIDTH);
    const int lane = threadIdx.x % 32;
    b += lane % 16 * LD + lane / 16 * 8;
    UNROLL
    for (int k = 0; k < K; k += 2) {
        uint32_t fa[M][4];  // two sums side by side have the layout of an a
        UNROLL
        for (int m = 0; m < M; m++) {
            UNROLL
            for (int i = 0; i < 4; i++) { fa[m][i] = bf16_pair(a.d[m][k + i / 2][i % 2 * 2], a.d[m][k + i / 2][i % 2 * 2 + 1]); }
        }
        UNROLL
        for (int n = 0; n < N; n += 2) {
            uint32_t fb[4];
            load_matrices<4, true>(fb, b + 8 * k * LD + 8 * n);
            UNROLL
            for (int m = 0; m < M; m++) {
                mma(sums.d[m][n], fa[m], {fb[0], fb[1]});
                mma(sums.d[m][n + 1], fa[m], {fb[2], fb[3]});
            }
        }
    }
}
template <int WIDTH, int M, int N, int K>
__device__ __forceinline__ void multiply(Sums<M, N>& sums, const Sums<M, K>& a, const float* b) {
    constexpr int LD = tile_ld<float>(WIDTH);
    UNROLL
    for (int n = 0; n < K; n++) {
        for (int lane = 0; lane < 4; lane++) {  // which of the row's four holds a's column
            UNROLL
            for (int c = 0; c < 2; c++) {
                float rows[2 * M];
                UNROLL
                for (int r = 0; r < 2 * M; r++) { rows[r] = __shfl_sync(ALL_LANES, a.d[r / 2][n][r % 2 * 2 + c], lane, 4); }
                UNROLL
                for (int j = 0; j < N; j++) {
                    const Floats<2> pair = load<2>(b + (8 * n + 2 * lane + c) * LD + lane_column(j));
                    UNROLL
                    for (int r = 0; r < 2 * M; r++) {
                        sums.d[r / 2][j][r % 2 * 2] += rows[r] * pair[0];
                        sums.d[r / 2][j][r % 2 * 2 + 1] += rows[r] * pair[1];
                    }
                }
            }
        }
    }
}

}  // namespace gpu
