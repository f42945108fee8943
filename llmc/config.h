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

// A named model with the training settings of the paper (arXiv 2506.19645, tables and reference code) or of its source.
struct Preset {
    const char* name;
    const char* what;
    ModelConfig model;
    i64 seq, global_batch;
    double lr;
    i64 warmup;
    double adam_eps;
};
inline const std::vector<Preset>& presets() {
    auto llama = [](i64 L, i64 C, i64 NH, i64 KVH, i64 F, i64 V, double base) {
        ModelConfig m;
        m.layers = L, m.channels = C, m.heads = NH, m.kv_heads = KVH, m.ffn = F, m.vocab = V, m.rope_base = base;
        return m;
    };
    auto gpt = [](i64 L, i64 C, i64 NH, i64 V, bool rotary) {
        ModelConfig m;
        m.arch = Arch::GPT, m.layers = L, m.channels = C, m.heads = NH, m.kv_heads = NH, m.ffn = 4 * C, m.vocab = V, m.rotary = rotary, m.tie = true;
        return m;
    };
    static const std::vector<Preset> table = {
        {"tiny", "Llama, 0.8M without its vocabulary: for tests", llama(4, 128, 4, 2, 352, 512, 1e4), 128, 16, 1e-3, 20, 1e-8},
        {"demo", "Llama, 0.8M without its vocabulary: the quick start", llama(4, 128, 4, 4, 352, 2048, 1e4), 128, 32, 5e-3, 50, 1e-8},
        {"gpt-tiny", "GPT, 0.8M without its vocabulary: for tests", gpt(4, 128, 4, 512, false), 128, 16, 1e-3, 20, 1e-8},
        {"15m", "Llama, the size of stories15M", llama(6, 288, 6, 6, 768, 32000, 1e4), 256, 128, 5e-4, 1000, 1e-8},
        {"130m", "Llama 130M of the paper", llama(12, 768, 16, 16, 2048, 32000, 1e4), 1024, 256, 6e-4, 2000, 1e-8},
        {"1.1b", "TinyLlama 1.1B of the paper (8 KV heads, so that T = 8 divides them)", llama(22, 2048, 32, 8, 5632, 32000, 5e5), 2048, 1024, 4e-4, 2000, 1e-5},
        {"7b", "Llama-2 7B of the paper", llama(32, 4096, 32, 32, 11008, 32000, 1e4), 4096, 1024, 3e-4, 2000, 1e-8},
        {"gpt2", "GPT-2 124M", gpt(12, 768, 12, 50257, false), 1024, 512, 6e-4, 700, 1e-8},
        {"gpt3-xl", "GPT-3 XL 1.3B of the paper", gpt(24, 2048, 16, 32000, true), 2048, 512, 2e-4, 600, 1e-8},
    };
    return table;
}

// The legal tensor-parallel degrees of a model: they divide heads, KV heads and FFN channels.
inline std::string legal_tp(const ModelConfig& m) {
    std::string list;
    for (i64 t = 1; t <= m.kv_heads; t++) {
        if (m.heads % t == 0 && m.kv_heads % t == 0 && m.ffn % t == 0) { list += (list.empty() ? "" : ", ") + std::to_string(t); }
    }
    return list;
}

// Fills what follows from the rest, and refuses a shape or a split that cannot be, with the legal values.
inline void finish_model(ModelConfig& m) {
    auto positive = [](i64 value, const char* flag, i64 most = (i64)1 << 24) {
        if (value < 1 || value > most) { usage_error("%s is %lld: wanted a number from 1 to %lld", flag, (long long)value, (long long)most); }
    };
    positive(m.layers, "--layers", 100000), positive(m.channels, "--channels"), positive(m.heads, "--heads"), positive(m.ffn, "--ffn"), positive(m.vocab, "--vocab");
    positive(m.kv_heads, "--kv-heads");
    if (m.heads % m.kv_heads != 0) {
        usage_error("--kv-heads is %lld and --heads is %lld: heads must be a multiple of KV heads\nHINT: --kv-heads %lld is plain multi-head attention",
                    (long long)m.kv_heads, (long long)m.heads, (long long)m.heads);
    }
    if (m.head_size == 0) {
        if (m.channels % m.heads != 0) {
            usage_error("--channels is %lld and --heads is %lld: channels must be a multiple of heads\nHINT: %lld channels would give heads of %lld",
                        (long long)m.channels, (long long)m.heads, (long long)round_up(m.channels, m.heads), (long long)ceil_div(m.channels, m.heads));
        }
        m.head_size = m.channels / m.heads;
    }
    positive(m.head_size, "--head-size");
    if (m.rotary && m.head_size % 2 != 0) {
        usage_error("the head size is %lld (--channels %lld / --heads %lld): rotary positions need an even one\nHINT: --positions learned works with any",
                    (long long)m.head_size, (long long)m.channels, (long long)m.heads);
    }
    if (!(m.norm_eps > 0) || !std::isfinite(m.norm_eps)) { usage_error("--norm-eps is %g: wanted a number above 0", m.norm_eps); }
    if (!(m.rope_base > 0) || !std::isfinite(m.rope_base)) { usage_error("--rope-base is %g: wanted a number above 0", m.rope_base); }
    if (m.vocab_multiple < 0 || m.vocab_multiple > 1 << 20) {
        usage_error("--vocab-multiple is %lld: wanted 0 (off) to %d", (long long)m.vocab_multiple, 1 << 20);
    }
}
inline void check_split(const ModelConfig& m, int tp, double sync_factor) {
    if (tp < 1) { usage_error("--tp is %d: wanted 1 or more", tp); }
    if (!(sync_factor >= 0 && sync_factor <= 1)) { usage_error("--sync-factor is %g: wanted a number from 0 to 1", sync_factor); }
    const std::pair<i64, const char*> divided[] = {{m.heads, "--heads"}, {m.kv_heads, "--kv-heads"}, {m.ffn, "--ffn"}};
    for (const auto& [count, flag] : divided) {
        if (count % tp != 0) {
            usage_error("--tp is %d and %s is %lld: tensor parallelism splits heads, KV heads and FFN channels evenly\nHINT: this model allows --tp %s", tp,
                        flag, (long long)count, legal_tp(m).c_str());
        }
    }
}
