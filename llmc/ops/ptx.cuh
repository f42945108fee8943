// ptx.cuh: the instructions that C++ has no word for, the only inline PTX here: products of small matrices on tensor cores (sm_80 and up),
// the loads that feed them, and copies to shared memory that run meanwhile. Layouts: PTX ISA, "Warp Level Matrix Multiply-Accumulate
// Instructions" and "Asynchronous copy". The emulator's bodies follow the same text; they have not been compared with a GPU.
//
// All lanes of a warp take part in mma and load_matrices. With g = lane / 4 and t = lane % 4:
#pragma once

#include "kernel.cuh"

#ifdef LLMC_SIMT
#define WHERE , SIMT_SITE
#else
#define WHERE
#endif

namespace gpu {

// d (16,8) += a (16,16) b (16,8), bf16 in, fp32 sums. Registers hold pairs, the first in the low half:
//   a[0] = A[g][2t..], a[1] = A[g+8][2t..], a[2] = A[g][2t+8..], a[3] = A[g+8][2t+8..]      b[0] = B[2t..][g], b[1] = B[2t+8..][g]
//   d[0], d[1] = D[g][2t..], d[2], d[3] = D[g+8][2t..]
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2] WHERE) {
#ifdef LLMC_SIMT
    struct Lane {
        float* d;
        const uint32_t *a, *b;
    } mine{d, a, b};
    const auto product = [](void* const* args, unsigned members) {
        if (members != ALL_LANES) { simt::fail("mma of the lanes %08x: all 32 must take part", members); }
        const auto half = [](uint32_t pair, int high) { return __uint_as_float(high ? pair & 0xFFFF0000u : pair << 16); };
        float A[16][16], B[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const Lane& from = *(const Lane*)args[lane];
            const int g = lane / 4, t = lane % 4;
            for (int h = 0; h < 2; h++) {
                for (int i = 0; i < 4; i++) { A[g + i % 2 * 8][2 * t + i / 2 * 8 + h] = half(from.a[i], h); }
                for (int i = 0; i < 2; i++) { B[2 * t + i * 8 + h][g] = half(from.b[i], h); }
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
                float sum = 0.0f;
                for (int k = 0; k < 16; k++) { sum += A[row][k] * B[k][col]; }
                ((Lane*)args[lane])->d[i] += sum;
            }
        }
    };
    simt::collective("mma", ALL_LANES, &mine, product, {file, line});
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// COUNT (2 or 4) matrices of 8x8 bf16 from shared memory: lane 8 m + i names row i of matrix m, 16 aligned bytes (with COUNT = 2, lanes
// from 16 on name anything readable). r[m] = M[g][2t..], or, TRANSPOSED, M[2t][g] and M[2t+1][g].
template <int COUNT, bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[COUNT], const bf16* row WHERE) {
    static_assert(COUNT == 2 || COUNT == 4);
#ifdef LLMC_SIMT
    if ((uintptr_t)row % 16 != 0) { simt::fail("load_matrices (%s:%d): a row is not aligned to 16 bytes", file, line); }
    if (simt::lane_id() < 8 * COUNT) { simt::thread_reads(row, 16, {file, line}); }
    struct Lane {
        uint32_t* r;
        const bf16* row;
    } mine{r, row};
    const auto load = [](void* const* args, unsigned members) {
        if (members != ALL_LANES) { simt::fail("load_matrices of the lanes %08x: all 32 must take part", members); }
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, t = lane % 4;
            for (int m = 0; m < COUNT; m++) {
                uint16_t pair[2];
                for (int h = 0; h < 2; h++) {
                    const int i = TRANSPOSED ? 2 * t + h : g, j = TRANSPOSED ? g : 2 * t + h;
                    memcpy(&pair[h], ((const Lane*)args[8 * m + i])->row + j, 2);
                }
                ((Lane*)args[lane])->r[m] = pair[0] | (uint32_t)pair[1] << 16;
            }
        }
    };
    simt::collective("load_matrices", ALL_LANES, &mine, load, {file, line});
#else
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(row);
    if constexpr (COUNT == 4 && TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else if constexpr (COUNT == 4) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    } else if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
    }
#endif
}

// Begins to copy BYTES (8 or 16) aligned bytes from global to shared memory; zeros instead where not `valid` (`global` is not read then).
template <int BYTES = 16>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid WHERE) {
    static_assert(BYTES == 8 || BYTES == 16);
#ifdef LLMC_SIMT
    simt::copy_async(shared, global, BYTES, valid, {file, line});
#else
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(shared);
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(address), "l"(global), "r"(valid ? 16 : 0) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" : : "r"(address), "l"(global), "r"(valid ? 8 : 0) : "memory");
    }
#endif
}
// Ends a group of copies of this thread.
__device__ __forceinline__ void copies_commit() {
#ifdef LLMC_SIMT
    simt::copies_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most GROUPS groups of this thread are on their way. Other threads' copies are there after a barrier.
template <int GROUPS>
__device__ __forceinline__ void copies_wait() {
#ifdef LLMC_SIMT
    simt::copies_wait(GROUPS);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
#endif
}

// 2^x to 2 units in the last place, one instruction; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef LLMC_SIMT
    const float power = exp2f(x);
    return power < 0x1p-126f ? 0.0f : power;
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#endif
}

// Two floats as the pair that a register of mma holds.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

}  // namespace gpu

#undef WHERE
