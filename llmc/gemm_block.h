// gemm_block.h: what gemm_cpu.h hands to one of its ways of multiplying.
#pragma once

#include "gemm.h"

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

}  // namespace cpu
