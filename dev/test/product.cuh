// product.cuh: a product of matrices on tensor cores, fed by asynchronous copies in two stages: what ptx.cuh is for, in its smallest form.
#pragma once

#include "llmc/ops/ptx.cuh"

namespace gpu {

// c (M,N) = a (M,K) b (K,N) or a (M,K) b^T (N,K): a warp computes 16 rows and 8 columns, 16 deep at a time; the next tiles are copied
// meanwhile.
enum Fault { NONE, NO_WAIT, NO_BARRIER };
template <bool TRANSPOSED, Fault FAULT>
__global__ void product_kernel(float* c, const bf16* a, const bf16* b, int M, int N, int K) {
    __shared__ __align__(16) bf16 a_tile[2][16][24], b_tile[2][16][24];  // rows of 48 bytes
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = blockIdx.y * 16, col0 = blockIdx.x * 16;
    const auto fetch = [&](int stage, int k0) {
        const int r = lane / 2, part = lane % 2 * 8;
        if (warp == 0) {
            copy_async(&a_tile[stage][r][part], &a[(row0 + r) * K + k0 + part], row0 + r < M);
        } else if (TRANSPOSED) {
            copy_async(&b_tile[stage][r][part], &b[(col0 + r) * K + k0 + part], col0 + r < N);
        } else {
            copy_async(&b_tile[stage][r][part], &b[(k0 + r) * N + col0 + part], col0 + part < N);
        }
        copies_commit();
    };
    float d[4] = {};
    fetch(0, 0);
    for (int k0 = 0; k0 < K; k0 += 16) {
        const int stage = k0 / 16 % 2;
        if (k0 + 16 < K) {
            fetch(1 - stage, k0 + 16);
            if (FAULT != NO_WAIT) { copies_wait<1>(); }
        } else {
            copies_wait<0>();
        }
        if (FAULT != NO_BARRIER) { __syncthreads(); }
        uint32_t fa[4], fb[2];
        load_matrices<4, false>(fa, &a_tile[stage][lane % 16][lane / 16 * 8]);
        if (TRANSPOSED) {
            load_matrices<2, false>(fb, &b_tile[stage][warp * 8 + lane % 8][lane / 8 % 2 * 8]);
        } else {
            load_matrices<2, true>(fb, &b_tile[stage][lane % 16][warp * 8]);
        }
        mma(d, fa, fb);
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        const int row = row0 + lane / 4 + i / 2 * 8, col = col0 + warp * 8 + lane % 4 * 2 + i % 2;
        if (row < M && col < N) { c[row * N + col] = d[i]; }
    }
}
template <bool TRANSPOSED, Fault FAULT>
void product(float* c, const bf16* a, const bf16* b, int M, int N, int K, Run& run) {
    launch(product_kernel<TRANSPOSED, FAULT>, {dim3(blocks(ceil_div(N, 16)), blocks(ceil_div(M, 16))), 64}, run, c, a, b, M, N, K);
}

}  // namespace gpu
