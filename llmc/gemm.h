// gemm.h: the matrix product, behind one call. A build picks its library; ops/matmul.cuh says which products there are.
//
//   gemm(c, ldc, a, b, bias, M, N, K, alpha, accumulate, run)
//     c (M, N; ldc) = alpha * a b + bias, or += alpha * a b where `accumulate`; sums in fp32, rounded once to c's type.
//     a is (M, K) and b is (K, N), each a Matrix: row-major with a stride, or stored the other way round.
//     bias (N) may be null. The same bits for any number of threads.
//
// and what a library may do with it in one pass; false where this one does not, and nothing is done then:
//
//   gemm_gelu(h, u, a, b, bias, M, N, K, run)           u (M, N) = a b + bias; h (M, N) = gelu(u)
//   gemm_row_sums(c, sums, a, b, M, N, K, alpha, run)   c (M, N) = alpha * a b; sums (M), of c's type = sums over K of a
#pragma once

#include "device.h"

template <typename X>
struct Matrix {
    const X* data;
    i64 ld;
    bool transposed;  // element (i, j) is data[j*ld + i], else data[i*ld + j]
};

#ifdef LLMC_CUDA
#include "gemm_cublaslt.h"
#else
#include "gemm_cpu.h"
#endif
