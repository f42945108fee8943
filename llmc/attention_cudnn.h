// attention_cudnn.h: attention by cuDNN, in place of our own kernels where it can. Built with CUDNN=1; cuDNN itself is seen by
// attention_cudnn.cpp alone.
//
// It does training's attention: bf16, queries and keys of the same positions [0, S). fp32, the cache of a prefill or a decode, and what
// cuDNN refuses stay with ops/attention.cuh. Its log-sum-exp is ours (natural logarithm, of scaled scores), so the forward of one and
// the backward of the other agree.
//
// Never run yet: no GPU was at hand. The graphs that it is given are tested on the CPU (dev/test/test_attention_cudnn.cpp).
#pragma once

#include <memory>

#include "device.h"

struct AttentionShape {
    i64 B, S, NH, KVH, HS;
    auto operator<=>(const AttentionShape&) const = default;
};

// Another's attention. Both calls are those of ops.h at pos0 = 0 and S_kv = S. False, and nothing is done, where it cannot.
struct AttentionLibrary {
    virtual ~AttentionLibrary() = default;
    virtual bool forward(bf16* att, float* lse, const bf16* q, const bf16* k, const bf16* v, const AttentionShape& shape, Run& run) = 0;
    virtual bool backward(bf16* dq, bf16* dk, bf16* dv, const bf16* datt, const bf16* att, const float* lse, const bf16* q, const bf16* k,
                          const bf16* v, const AttentionShape& shape, Run& run) = 0;
    // Why it cannot, in words: of the last call that was false.
    virtual std::string why_not() const = 0;
};

namespace cudnn {

// For the rank that runs on the current GPU; null where this build has no cuDNN.
std::shared_ptr<AttentionLibrary> attention();
// In words; empty where this build has no cuDNN. No GPU is asked.
std::string version();
// Bytes that a backward takes of the run's workspace. It is deterministic: below 9.25 it keeps the gradients of all scores, in bf16.
i64 backward_workspace(i64 B, i64 S, i64 NH);

}  // namespace cudnn
