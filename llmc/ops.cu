// ops.cu: every op, compiled once per build for float and bf16: by g++ -x c++ for the CPU, by nvcc for a GPU, by g++ with
// -include llmc/simt/simt.h for the emulator.
#include "ops/embedding.cuh"
#include "ops/norm.cuh"
#include "ops/rope.cuh"
#include "ops/mlp.cuh"
#include "ops/classifier.cuh"
#include "ops/adamw.cuh"
#include "ops/global_norm.cuh"
#include "ops/matmul.cuh"
#include "ops/exchange.cuh"
#include "ops/sample.cuh"
#include "ops/attention.cuh"

namespace BACKEND {

#define INSTANTIATE(X)                                                                                                                   \
    template void embedding_forward(X*, const int*, const X*, const X*, Range, i64, i64, i64, const int*, Run&);                         \
    template void residual_norm_forward(X*, X*, float*, float*, const X*, const Blocks<X>*, const X*, const X*, const X*, NormKind, i64, \
                                        i64, Run&);                                                                                      \
    template void norm_apply(X*, const X*, const float*, const float*, const X*, const X*, NormKind, i64, i64, Run&);                    \
    template void norm_backward(X*, bool, void*, i64, DType, i64, float*, float*, const X*, const X*, const float*, const float*,        \
                                const X*, NormKind, GradMode, i64, i64, Run&);                                                           \
    template void matmul_wgrad(Gradient, Gradient, const X*, i64, const X*, i64, i64, i64, float, GradMode, Run&);                       \
    template void matmul_gelu_forward(X*, X*, const X*, const X*, const X*, i64, i64, i64, Run&);                                        \
    template void bias_backward(Gradient, const X*, i64, i64, GradMode, Run&);                                                           \
    template void rope_split_forward(X*, X*, X*, const X*, const float*, const float*, const int*, i64, i64, i64, i64, i64, i64, Run&);  \
    template void rope_split_backward(X*, const X*, const X*, const X*, const float*, const float*, i64, i64, i64, i64, i64, Run&);      \
    template void attention_forward(X*, float*, const X*, const X*, const X*, const int*, i64, i64, i64, i64, i64, i64, Run&);           \
    template void attention_backward(X*, X*, X*, const X*, const X*, const float*, const X*, const X*, const X*, i64, i64, i64, i64,     \
                                     i64, Run&);                                                                                         \
    template void swiglu_forward(X*, const X*, i64, i64, Run&);                                                                          \
    template void swiglu_backward(X*, const X*, const X*, i64, i64, Run&);                                                               \
    template void gelu_forward(X*, const X*, i64, i64, Run&);                                                                            \
    template void gelu_backward(X*, const X*, const X*, i64, i64, Run&);                                                                 \
    template void classifier_stats(float*, const X*, const int*, Range, i64, Run&);                                                      \
    template void classifier_backward(X*, const float*, const int*, Range, float, i64, Run&);                                            \
    template void adamw_update(X*, uint16_t*, float*, float*, Gradient, i64, const AdamW&, Run&);                                           \
    template double sum_of_squared_differences(const X*, const float*, float, i64, i64, i64, Run&);
INSTANTIATE(float)
INSTANTIATE(bf16)
template void cast(float*, const float*, i64, Run&);
template void cast(bf16*, const bf16*, i64, Run&);
template void cast(float*, const bf16*, i64, Run&);
template void cast(bf16*, const float*, i64, Run&);

#define INSTANTIATE_PAIR(X, Y)                                                                       \
    template void matmul_forward(Y*, i64, const X*, const X*, const X*, i64, i64, i64, float, Run&); \
    template void matmul_dgrad(Y*, const X*, i64, const X*, i64, i64, i64, float, bool, Run&);
INSTANTIATE_PAIR(float, float)
INSTANTIATE_PAIR(bf16, bf16)
INSTANTIATE_PAIR(bf16, float)

}  // namespace BACKEND
