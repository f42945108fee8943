// ops.h: every op of the network, one launcher each. The file under ops/ gives the formula, the CPU loop (which is also the
// oracle of every other backend) and, in the GPU builds, the kernel. Compiled once per build, for X = float and X = bf16.
//
// Sizes: B batch, S sequence, N = B*S rows, C channels, NH/KVH query/key-value heads of this rank, HS head size, F this
// rank's FFN channels, V this rank's vocabulary rows, Ck shared channels. Everything is row-major and dense unless a
// leading dimension (ld) is named. A gradient of a parameter is written or added to as GradMode says; it is fp32, or what a Gradient says.
//
// The ops are declared in namespace BACKEND: the build's own side, cpu or gpu. The trainer's calls go through timed_ops.h.
#pragma once

#include "device.h"
#include "rounding.h"

enum class GradMode { WRITE, ADD };  // the first micro-batch writes, later ones add: nothing is zeroed

// A gradient in fp32 or bf16. An op sums in fp32, what is there already included, and rounds once on the way in.
struct Gradient {
    void* data = nullptr;
    DType dtype = DType::FP32;

    Gradient(std::nullptr_t = nullptr) {}
    Gradient(float* p) : data(p) {}
    Gradient(bf16* p) : data(p), dtype(DType::BF16) {}
    Gradient(void* p, DType dtype) : data(p), dtype(dtype) {}
    explicit operator bool() const { return data != nullptr; }
    Gradient operator+(i64 elements) const { return {(char*)data + elements * dtype_bytes(dtype), dtype}; }

    // body(the pointer, of its own type), for activations of type X: gradients are no finer than what they are made of.
    template <typename X, typename Body>
    auto visit(const Body& body) const {
        if constexpr (dtype_of<X> == DType::BF16) {
            if (dtype == DType::BF16) { return body((bf16*)data); }
        }
        check(dtype == DType::FP32, "a bf16 gradient of fp32 activations");
        return body((float*)data);
    }
};

struct GradientPiece {
    Gradient begin;
    i64 count;
};

// What a row-parallel product leaves, and what goes back into it: out[:, :Ck] is summed over ranks, out[:, Ck:] is this
// rank's own. Two blocks, so that the sum runs on dense memory and under the product that writes the other block.
template <typename X>
struct Blocks {
    void* shared;   // (N, Ck), stride ld_shared, of type `wire`: what is sent
    i64 ld_shared;
    DType wire;
    X* priv;        // (N, C - Ck), stride ld_priv
    i64 ld_priv;
    i64 Ck;
};

struct NormKind {
    bool rms;   // RMSNorm (mean and bias are null), else LayerNorm
    float eps;
};
struct AttentionBy {
    std::string library;
    i64 workspace;  // bytes
};
struct AdamW {
    float lr, beta1, beta2, eps, weight_decay;
    float correction1, correction2;  // 1 - beta^t
    float grad_scale;                // clipping
    Rounding rounded_by = {};        // how bf16 parameters became what they are
    Rounding rounding = {};          // and how they are rounded now
    i64 first = 0;                   // place of the first element in the rank's parameters
};

// How the next token is drawn.
struct Sampling {
    double temperature = 1.0;  // 0: the likeliest token
    i64 top_k = 0;             // 0, or at least V: off
    double top_p = 1.0;        // 1: off. At least one token is always kept

    constexpr bool cuts(i64 V) const { return (top_k > 0 && top_k < V) || top_p < 1.0; }
};

namespace BACKEND {

// ---- position -------------------------------------------------------------------------------------------------------
// pos0, below: where a sequence's first row stands, in memory that kernels reach; null: at 0. So a recorded step reads it anew each time (Run::replay).

// ---- embedding ------------------------------------------------------------------------------------------------------
// x[b,s,:] = wte[token - vocab.begin, :] + wpe[pos0 + s, :] where this rank owns the token, else 0. wpe may be null.
// Adding the position on the owner keeps the sum over ranks exact: it has one non-zero term.
template <typename X>
void embedding_forward(X* x, const int* tokens, const X* wte, const X* wpe, Range vocab, i64 B, i64 S, i64 C, const int* pos0, Run& run);
// dwte[v,:] (+)= sum over rows n, in order, whose token is v of dx[n,:]. Rows without a token are zero after WRITE.
void embedding_backward(float* dwte, const float* dx, const int* tokens, Range vocab, i64 N, i64 C, GradMode mode, Run& run);
// dwpe[s,:] (+)= sum over b of dx[b,s,:], P rows in all; rows from S on are zero after WRITE.
void position_backward(float* dwpe, const float* dx, i64 B, i64 S, i64 C, i64 P, GradMode mode, Run& run);

// ---- norm -----------------------------------------------------------------------------------------------------------
// x = x_in + out + out_bias (out, out_bias may be null; without out, x may be null: nothing to write);
// n = norm(x) * weight + bias, statistics over all C channels of THIS rank's row. Saves mean (LayerNorm) and rstd, (N).
template <typename X>
void residual_norm_forward(X* x, X* n, float* mean, float* rstd, const X* x_in, const Blocks<X>* out, const X* out_bias,
                           const X* weight, const X* bias, NormKind kind, i64 N, i64 C, Run& run);
// n again from x and the saved statistics: for recomputation.
template <typename X>
void norm_apply(X* n, const X* x, const float* mean, const float* rstd, const X* weight, const X* bias, NormKind kind, i64 N, i64 C, Run& run);
// dx = (residual ? dx : 0) + d norm / d x; dweight, dbias by mode. Also writes the block to send: shared_out (N, Ck) of type
// `wire`, stride ld_shared, = dx[:, :Ck] (nothing where Ck is 0 or shared_out null).
template <typename X>
void norm_backward(X* dx, bool residual, void* shared_out, i64 ld_shared, DType wire, i64 Ck, float* dweight, float* dbias, const X* dn,
                   const X* x, const float* mean, const float* rstd, const X* weight, NormKind kind, GradMode mode, i64 N, i64 C, Run& run);

// ---- matmul ---------------------------------------------------------------------------------------------------------
// Weights are (OC, K), row-major. X -> Y: Y is X, or float for what is summed further.
// out (N, OC; ld_out) = alpha * in (N, K) W^T + bias. bias may be null.
template <typename X, typename Y>
void matmul_forward(Y* out, i64 ld_out, const X* in, const X* weight, const X* bias, i64 N, i64 K, i64 OC, float alpha, Run& run);
// din (N, K) = alpha * dout (N, OC; ld_dout) W, or += where accumulate.
template <typename X, typename Y>
void matmul_dgrad(Y* din, const X* dout, i64 ld_dout, const X* weight, i64 N, i64 K, i64 OC, float alpha, bool accumulate, Run& run);
// dweight (OC, K) (+)= alpha * dout^T in. dbias (OC), which may be null, (+)= column sums of dout, dense then. Both of one type.
template <typename X>
void matmul_wgrad(Gradient dweight, Gradient dbias, const X* dout, i64 ld_dout, const X* in, i64 N, i64 K, i64 OC, float alpha,
                  GradMode mode, Run& run);
// u (N, OC) = in W^T + bias, h (N, OC) = gelu(u); bias may be null. Where a library fuses both, h comes of u before its rounding.
template <typename X>
void matmul_gelu_forward(X* h, X* u, const X* in, const X* weight, const X* bias, i64 N, i64 K, i64 OC, Run& run);
// dbias (OC) (+)= column sums of dout (N, OC; ld OC), in fp32, in a fixed order.
template <typename X>
void bias_backward(Gradient dbias, const X* dout, i64 N, i64 OC, GradMode mode, Run& run);
// to[i] = from[i], another type.
template <typename From, typename To>
void cast(To* to, const From* from, i64 count, Run& run);

// The library behind the products, and its version, for people.
std::string gemm_library();
// The type that products are fast in here, for a model of so many channels.
DType fast_dtype(i64 channels);

// ---- rope -----------------------------------------------------------------------------------------------------------
// Splits qkv (B,S,(NH+2*KVH)*HS) into q (B,NH,S,HS) and rows [pos0, pos0+S) of k, v (B,KVH,S_kv,HS), rotating q and k by
// position: (a, b) -> (a cos - b sin, b cos + a sin) for the pairs (i, i + HS/2). cos, sin: (positions, HS/2), null: no rotation.
template <typename X>
void rope_split_forward(X* q, X* k, X* v, const X* qkv, const float* cos, const float* sin, const int* pos0, i64 S_kv, i64 B, i64 S, i64 NH,
                        i64 KVH, i64 HS, Run& run);
// The way back, at pos0 = 0 and S_kv = S.
template <typename X>
void rope_split_backward(X* dqkv, const X* dq, const X* dk, const X* dv, const float* cos, const float* sin, i64 B, i64 S, i64 NH, i64 KVH,
                         i64 HS, Run& run);

// ---- attention ------------------------------------------------------------------------------------------------------
// Causal: query s sees keys [0, pos0 + s]. att (B,S,NH,HS) = softmax(q k^T / sqrt(HS)) v; lse (B,NH,S) the log-sum-exp of
// each row's scaled scores. Query head h uses key-value head h / (NH/KVH). Nothing of size S*S is kept.
template <typename X>
void attention_forward(X* att, float* lse, const X* q, const X* k, const X* v, const int* pos0, i64 S_kv, i64 B, i64 S, i64 NH, i64 KVH,
                       i64 HS, Run& run);
// dq (B,NH,S,HS), dk and dv (B,KVH,S,HS), all "=", at pos0 = 0 and S_kv = S. Probabilities are recomputed from lse.
template <typename X>
void attention_backward(X* dq, X* dk, X* dv, const X* datt, const X* att, const float* lse, const X* q, const X* k, const X* v, i64 B,
                        i64 S, i64 NH, i64 KVH, i64 HS, Run& run);

// What is asked for training's attention before our own kernels, in words, and the workspace that its backward takes. Empty and 0: nothing.
AttentionBy attention_by(DType dtype, i64 B, i64 S, i64 NH);

// ---- mlp ------------------------------------------------------------------------------------------------------------
// h (N,F) = silu(gate) * up, gate_up (N, 2F) = [gate | up].
template <typename X>
void swiglu_forward(X* h, const X* gate_up, i64 N, i64 F, Run& run);
// Backward, both: the gradient may take the place of its input.
template <typename X>
void swiglu_backward(X* dgate_up, const X* dh, const X* gate_up, i64 N, i64 F, Run& run);
// h (N,F) = gelu(u), the tanh form (GPT-2's).
template <typename X>
void gelu_forward(X* h, const X* u, i64 N, i64 F, Run& run);
template <typename X>
void gelu_backward(X* du, const X* dh, const X* u, i64 N, i64 F, Run& run);

// ---- classifier -----------------------------------------------------------------------------------------------------
// Over this rank's vocabulary rows, for n tokens: stats (n,3) = {max, sum of exp(l - max), target's logit if owned else 0}.
// A rank that owns no row gives {-inf, 0, 0}. A target < 0 is ignored: no loss, no gradient.
template <typename X>
void classifier_stats(float* stats, const X* logits, const int* targets, Range vocab, i64 n, Run& run);
// all_stats (T,n,3), combined in rank order: losses (n) = lse - target's logit (0 where ignored), lse (n).
void classifier_loss(float* losses, float* lse, const float* all_stats, const int* targets, i64 T, i64 n, Run& run);
// logits := scale * (softmax - onehot(target)), in place; zero where ignored.
template <typename X>
void classifier_backward(X* logits, const float* lse, const int* targets, Range vocab, float scale, i64 n, Run& run);

// ---- sampling -------------------------------------------------------------------------------------------------------
// token = one of the first V, drawn by their logits; -1 - i where the i-th logit, the first such one, is not a number. Equal logits: the lower id comes
// first. random: the state of the generator; one number is drawn, whatever the settings, but none at temperature 0. position += rows: where the
// token goes.
void sample_token(int* token, int* position, i64 rows, uint64_t* random, const float* logits, i64 V, const Sampling& how, Run& run);

// ---- optimiser ------------------------------------------------------------------------------------------------------
// One pass: m, v, master -= lr * (m^ / (sqrt(v^) + eps) + weight_decay * master), param = master rounded. `low`: the lower halves of the master weights of
// bf16 parameters (rounding.h); fp32 parameters are their own, and have none.
template <typename X>
void adamw_update(X* param, uint16_t* low, float* m, float* v, Gradient grad, i64 count, const AdamW& hyper, Run& run);
// The sum of squares of each piece, in double, in a fixed order.
std::vector<double> sums_of_squares(const std::vector<GradientPiece>& pieces, Run& run);
// Sum of (a - scale * b)^2 over two (N, cols; ld) blocks in double, in a fixed order.
template <typename X>
double sum_of_squared_differences(const X* a, const float* b, float scale, i64 ld, i64 N, i64 cols, Run& run);

}  // namespace BACKEND

#ifdef LLMC_CUDA
// ---- ranks whose arrays lie on one GPU ------------------------------------------------------------------------------
struct RankArrays {
    static constexpr int MOST = 64;
    int ranks;
    void* data[MOST];   // by rank
    Range parts[MOST];  // the elements that a rank owns; disjoint
};
namespace gpu {
// Every element of every part is summed over the ranks' arrays, in rank order in fp32, and rounded once; for all of them, or for its owner alone.
void sum_over_ranks(RankArrays arrays, DType dtype, bool to_all, Run& run);
// Everyone gets the owner's.
void copy_over_ranks(RankArrays arrays, i64 element_bytes, Run& run);
}  // namespace gpu
#endif
