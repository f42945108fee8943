// product.cu: product.cuh for the tests of every GPU build: nvcc compiles it, or g++ for the emulator.
#include "product.cuh"

namespace gpu {

void product(bool transposed, float* c, const bf16* a, const bf16* b, int M, int N, int K, Run& run) {
    transposed ? product<true, NONE>(c, a, b, M, N, K, run) : product<false, NONE>(c, a, b, M, N, K, run);
}

}  // namespace gpu
