// config.h: what a model is: its shape, the presets, and which splits it allows.
#pragma once

#include <algorithm>
#include <cmath>

#include "base.h"

enum class Arch { LLAMA, GPT };

struct ModelConfig {
    Arch arch = Arch::LLAMA;     // LLAMA: RMSNorm, SwiGLU, no biases. GPT: LayerNorm, GELU, biases everywhere
    i64 layers = 0;
    i64 channels = 0;            // C
    i64 heads = 0;               // NH
    i64 kv_heads = 0;            // KVH, divides NH (grouped-query attention)
    i64 head_size = 0;           // HS; 0: channels / heads
    i64 ffn = 0;                 // F, the width inside the MLP
    i64 vocab = 0;               // V
    i64 max_positions = 0;       // rows of the learned position embedding; with rotary only a note for export
    bool rotary = true;          // RoPE, half-rotated; else learned positions
    bool tie = false;            // the LM head is the embedding
    double rope_base = 1e4;
    double norm_eps = 1e-5;
    i64 vocab_multiple = 0;      // rounds the vocabulary up to a multiple of vocab_multiple * T before it is split (Megatron: 128)

    bool is_llama() const { return arch == Arch::LLAMA; }
    i64 attn_width() const { return heads * head_size; }
    i64 qkv_rows() const { return (heads + 2 * kv_heads) * head_size; }
    i64 up_rows() const { return is_llama() ? 2 * ffn : ffn; }  // gate and up stacked, or fc1
};

// The number of shared channels: the only place where the sync factor meets the width. p is parsed as double and truncated.
inline i64 shared_channels(i64 channels, double sync_factor) { return (i64)(int)((double)channels * sync_factor); }

// Vocabulary rows of tensor-parallel rank r: [r*Vr, min(V, (r+1)*Vr)), Vr = ceil(Vp/T). A rank may own none.
inline i64 vocab_rows_per_rank(const ModelConfig& m, int tp) {
    const i64 padded = m.vocab_multiple > 0 ? round_up(m.vocab, m.vocab_multiple * tp) : m.vocab;
    return ceil_div(padded, tp);
}
inline Range vocab_range(const ModelConfig& m, int tp, int rank) {
    const i64 rows = vocab_rows_per_rank(m, tp);
    return {std::min(m.vocab, rank * rows), std::min(m.vocab, (rank + 1) * rows)};
}
