// gemm_block.h: what gemm_cpu.h hands to one of its ways of multiplying.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace cpu {

// One block of c: what gemm() was given, moved to the block's corner.
template <typename X, typename Y>
struct Block {
    Y* c;
    i64 ldc;
    Matrix<X> a, b;
    const X* bias;
    i64 rows, cols, K;
    float alpha;
    bool accumulate;
};

// c's elements (i, j) to (i, j + count) = or += alpha times their sums, plus the bias.
template <typename X, typename Y>
ALWAYS_INLINE void write_row(const Block<X, Y>& block, i64 i, i64 j, i64 count, const float* sums) {
    Y* out = block.c + i * block.ldc + j;
    vector_loop(count, [&](i64 n, auto lanes) {
        vfloat value = block.alpha * load(sums + n, lanes);
        if (block.bias) { value += load(block.bias + j + n, lanes); }
        if (block.accumulate) { value += load(out + n, lanes); }
        store(out + n, value, lanes);
    });
}

}  // namespace cpu
