// train_gpt.cu: a GPT/Llama trainer with CAAT-Net tensor parallelism, top to bottom.
//
//   1. parameters     one table: names, shapes, how T ranks split them
//   2. activations    what forward keeps for backward, and scratch
//   3. the model      forward, loss, backward: one op per line, every collective marked with <=>
//   4. the step       micro-batches, gradient sums, clipping, AdamW
//   5. generation     the same forward with a KV cache
//   6. the run        data, validation, checkpoints, logs, signals
//
// Ranks: world rank = dp * T + tp. A rank is a thread of this process, or a process under mpirun; this file cannot tell.
// The mathematics: docs/caat.md. The ops: llmc/ops.h.
#include <cinttypes>
#include <deque>

#include "llmc/checkpoint_load.h"
#include "llmc/checkpoint_save.h"
#include "llmc/comm.h"
#include "llmc/dataloader.h"
#include "llmc/device.h"
#include "llmc/device_rank.h"
#include "llmc/flags.h"
#include "llmc/huggingface_export.h"
#include "llmc/launch.h"
#include "llmc/logger.h"
#include "llmc/pass.h"
#include "llmc/profile.h"
#include "llmc/read_ahead.h"
#include "llmc/run_data.h"
#include "llmc/run_report.h"
#include "llmc/run_state.h"
#include "llmc/schedule.h"
#include "llmc/tensors.h"
#include "llmc/text_rule.h"
#include "llmc/timed_ops.h"
#include "llmc/tokenizer.h"
#include "llmc/tp.h"
#include "llmc/weights.h"
#include "llmc/zero.h"

// =====================================================================================================================
// 1. Parameters

// Everything there is to know about each tensor. Hugging Face names are Llama's and GPT-2's; GPT-2 stores its matrices
// transposed, and q, k, v in one of them.
std::vector<TensorSpec> parameter_specs(const ModelConfig& m) {
    const i64 C = m.channels, A = m.attn_width(), KV = m.kv_heads * m.head_size, F = m.ffn;
    std::vector<TensorSpec> specs;
    auto tensor = [&](std::string name, i64 cols, std::vector<HfPart> parts, Split split, Init init, bool decay) {
        specs.push_back({std::move(name), cols, std::move(parts), split, init, decay, false});
    };
    auto matrix = [&](std::string name, i64 cols, std::vector<HfPart> parts, Split split, Init init) { tensor(name, cols, std::move(parts), split, init, true); };
    auto vector = [&](std::string name, std::vector<HfPart> parts, Split split, Init init) { tensor(name, 0, std::move(parts), split, init, false); };
    auto whole = [](std::string hf, i64 rows, bool transposed = false) { return std::vector<HfPart>{{hf, rows, 0, rows, transposed}}; };

    if (m.is_llama()) {
        matrix("embedding", C, whole("model.embed_tokens.weight", m.vocab), Split::VOCAB, Init::NORMAL);
        if (!m.rotary) { matrix("position", C, whole("model.embed_positions.weight", m.max_positions), Split::NONE, Init::NORMAL); }
        for (i64 l = 0; l < m.layers; l++) {
            const std::string our = format("layers.%lld.", (long long)l), hf = "model." + our;
            vector(our + "norm1", whole(hf + "input_layernorm.weight", C), Split::NONE, Init::ONE);
            matrix(our + "qkv", C, {{hf + "self_attn.q_proj.weight", A, 0, A, false}, {hf + "self_attn.k_proj.weight", KV, 0, KV, false},
                                    {hf + "self_attn.v_proj.weight", KV, 0, KV, false}}, Split::ROWS, Init::NORMAL);
            matrix(our + "attn_out", A, whole(hf + "self_attn.o_proj.weight", C), Split::COLS, Init::NORMAL_RESIDUAL);
            vector(our + "norm2", whole(hf + "post_attention_layernorm.weight", C), Split::NONE, Init::ONE);
            matrix(our + "up", C, {{hf + "mlp.gate_proj.weight", F, 0, F, false}, {hf + "mlp.up_proj.weight", F, 0, F, false}}, Split::ROWS, Init::NORMAL);
            matrix(our + "down", F, whole(hf + "mlp.down_proj.weight", C), Split::COLS, Init::NORMAL_RESIDUAL);
        }
        vector("final_norm", whole("model.norm.weight", C), Split::NONE, Init::ONE);
    } else {
        matrix("embedding", C, whole("wte.weight", m.vocab), Split::VOCAB, Init::NORMAL);
        if (!m.rotary) { matrix("position", C, whole("wpe.weight", m.max_positions), Split::NONE, Init::NORMAL); }
        for (i64 l = 0; l < m.layers; l++) {
            const std::string our = format("layers.%lld.", (long long)l), hf = format("h.%lld.", (long long)l);
            auto qkv = [&](const std::string& name) {
                const i64 rows = m.qkv_rows();
                return std::vector<HfPart>{{name, A, 0, rows, true}, {name, KV, A, rows, true}, {name, KV, A + KV, rows, true}};
            };
            vector(our + "norm1", whole(hf + "ln_1.weight", C), Split::NONE, Init::ONE);
            vector(our + "norm1_bias", whole(hf + "ln_1.bias", C), Split::NONE, Init::ZERO);
            matrix(our + "qkv", C, qkv(hf + "attn.c_attn.weight"), Split::ROWS, Init::NORMAL);
            vector(our + "qkv_bias", qkv(hf + "attn.c_attn.bias"), Split::ROWS, Init::ZERO);
            matrix(our + "attn_out", A, whole(hf + "attn.c_proj.weight", C, true), Split::COLS, Init::NORMAL_RESIDUAL);
            vector(our + "attn_out_bias", whole(hf + "attn.c_proj.bias", C), Split::NONE, Init::ZERO);
            vector(our + "norm2", whole(hf + "ln_2.weight", C), Split::NONE, Init::ONE);
            vector(our + "norm2_bias", whole(hf + "ln_2.bias", C), Split::NONE, Init::ZERO);
            matrix(our + "up", C, whole(hf + "mlp.c_fc.weight", F, true), Split::ROWS, Init::NORMAL);
            vector(our + "up_bias", whole(hf + "mlp.c_fc.bias", F), Split::ROWS, Init::ZERO);
            matrix(our + "down", F, whole(hf + "mlp.c_proj.weight", C, true), Split::COLS, Init::NORMAL_RESIDUAL);
            vector(our + "down_bias", whole(hf + "mlp.c_proj.bias", C), Split::NONE, Init::ZERO);
        }
        vector("final_norm", whole("ln_f.weight", C), Split::NONE, Init::ONE);
        vector("final_norm_bias", whole("ln_f.bias", C), Split::NONE, Init::ZERO);
    }
    if (!m.tie) { matrix("head", C, whole("lm_head.weight", m.vocab), Split::VOCAB, Init::NORMAL); }
    for (TensorSpec& spec : specs) { spec.complete_gradient = spec.name == "position"; }
    return specs;
}

// One rank's parameters (P = X*), or their gradients (P = float*; those that are sharded in a layer may be bf16, S = Gradient).
// What a model lacks is null.
template <typename P, typename S = P>
struct LayerTensors {
    P norm1, norm1_bias;          // (C)
    S qkv, qkv_bias;              // (QKVr, C), (QKVr): this rank's query heads, then its key heads, then its value heads
    S attn_out;                   // (C, Ar)
    P attn_out_bias;              // (C)
    P norm2, norm2_bias;          // (C)
    S up, up_bias;                // (Ur, C), (Ur): gate and up stacked (Llama), or fc1 (GPT)
    S down;                       // (C, Fr)
    P down_bias;                  // (C)
};
template <typename P, typename S = P>
struct ModelTensors {
    P embedding, position;        // (Vr, C), (max_positions, C)
    std::vector<LayerTensors<P, S>> layers;
    P final_norm, final_norm_bias;
    P head;                       // (Vr, C); the embedding itself where tied

    ModelTensors() = default;
    // place(i), place_in_layers(i): of element i of the family.
    template <typename Place, typename PlaceInLayers>
    ModelTensors(const ParameterTable& table, const ModelConfig& m, const Place& place, const PlaceInLayers& place_in_layers) {
        auto at = [&](const std::string& name) { return table.has(name) ? place(table[name].offset) : nullptr; };
        embedding = at("embedding"), position = at("position");
        for (i64 l = 0; l < m.layers; l++) {
            auto named = [&](const char* name) { return format("layers.%lld.%s", (long long)l, name); };
            auto in = [&](const char* name) { return at(named(name)); };
            auto sharded = [&](const char* name) { return table.has(named(name)) ? place_in_layers(table[named(name)].offset) : nullptr; };
            layers.push_back({in("norm1"), in("norm1_bias"), sharded("qkv"), sharded("qkv_bias"), sharded("attn_out"), in("attn_out_bias"), in("norm2"), in("norm2_bias"),
                              sharded("up"), sharded("up_bias"), sharded("down"), in("down_bias")});
        }
        final_norm = at("final_norm"), final_norm_bias = at("final_norm_bias");
        head = m.tie ? embedding : at("head");
    }
};

// The sizes that one rank sees.
struct RankShape {
    i64 L, C, NHr, KVHr, HS, Ar, QKVr, Fr, Ur;
    i64 Vr;            // rows this rank owns
    i64 Vmax;          // rows of the largest shard
    Range vocab;
    bool tied;         // the head is the embedding
    NormKind norm;
    RankShape(const ModelConfig& m, int T, int rank)
        : L(m.layers), C(m.channels), NHr(m.heads / T), KVHr(m.kv_heads / T), HS(m.head_size), Ar(NHr * HS), QKVr((NHr + 2 * KVHr) * HS), Fr(m.ffn / T),
          Ur(m.up_rows() / T), Vr(vocab_range(m, T, rank).size()), Vmax(vocab_rows_per_rank(m, T)), vocab(vocab_range(m, T, rank)), tied(m.tie),
          norm{m.is_llama(), (float)m.norm_eps} {}
};

// =====================================================================================================================
// 2. Activations

// What forward leaves for backward, per layer. N = B * S rows.
template <typename X>
struct LayerSaved {
    X *x_in, *x_mid;                        // (N, C) the residual stream before attention, before the MLP
    float *mean1, *rstd1, *mean2, *rstd2;   // (N)
    X *n1, *n2;                             // (N, C) normed
    X *q, *k, *v;                           // (B, NHr, S, HS), (B, KVHr, S_kv, HS) twice; k and v are the cache in generation
    X* att;                                 // (N, Ar)
    float* lse;                             // (B, NHr, S)
    X *up, *h;                              // (N, Ur), (N, Fr)
};

// The level says what backward computes again from x_in and x_mid. Since both are kept, that needs no collective.
enum class Keep { ALL, NO_CHEAP, RESIDUAL, NOTHING };  // NO_CHEAP: not n1, n2, h. RESIDUAL: only x_in, x_mid. NOTHING: inference

template <typename X>
struct Activations {
    Arena kept{"activations"}, scratch{"scratch"};
    i64 max_S, S_kv, chunk;                 // chunk: rows of logits at a time
    Keep keep;
    std::vector<LayerSaved<X>> layers;
    X *x_out, *n_out;                       // (N, C)
    float *mean_out, *rstd_out;             // (N)
    // scratch
    LayerSaved<X> shared;                   // where a layer keeps no tensor of its own, all layers use this one
    RowParallelScratch<X> row;
    X* qkv;                                 // (N, QKVr), dqkv in backward
    X* logits;                              // (chunk, Vr), their gradient in place
    float *stats, *all_stats, *losses, *lse;  // (chunk, 3), (T, chunk, 3), (N), (chunk)
    float* row_logits;                      // (T, Vmax): one row of every shard, so the whole vocabulary in order
    int *tokens, *targets;                  // (N)
    int* lookup_rows;                       // (N) of a tied model's LookupGradient
    X *dx, *dn, *datt, *dq, *dk, *dv, *dh;
    float* dx32;                            // (N, C) the residual's gradient at the block entry, summed in fp32

    Activations(const RankShape& r, const TensorParallel& tp, i64 B, i64 S, i64 S_kv, Keep keep) : max_S(S), S_kv(S_kv), keep(keep), layers(r.L) {
        const i64 N = B * S;
        const bool training = keep != Keep::NOTHING;
        chunk = std::clamp<i64>((i64)(64 << 20) / (i64)sizeof(X) / std::max<i64>(r.Vmax, 1), 1, N);  // logits of 64 MiB at most; each chunk reads the head and its gradient again, so smaller ones are slower (docs/notes.md)
        auto plan_layer = [&](Arena& arena, LayerSaved<X>& a, bool residual, bool statistics, bool heavy, bool cache, bool cheap) {
            if (residual) { arena.add(&a.x_in, N * r.C), arena.add(&a.x_mid, N * r.C); }
            if (statistics) {
                if (!r.norm.rms) { arena.add(&a.mean1, N), arena.add(&a.mean2, N); }
                arena.add(&a.rstd1, N), arena.add(&a.rstd2, N);
            }
            if (heavy) { arena.add(&a.q, N * r.Ar), arena.add(&a.att, N * r.Ar), arena.add(&a.lse, N * r.NHr), arena.add(&a.up, N * r.Ur); }
            if (cache) { arena.add(&a.k, B * r.KVHr * S_kv * r.HS), arena.add(&a.v, B * r.KVHr * S_kv * r.HS); }
            if (cheap) { arena.add(&a.n1, N * r.C), arena.add(&a.n2, N * r.C), arena.add(&a.h, N * r.Fr); }
        };
        const bool heavy = keep == Keep::ALL || keep == Keep::NO_CHEAP, cache = heavy || keep == Keep::NOTHING, cheap = keep == Keep::ALL;
        for (LayerSaved<X>& a : layers) { a = {}, plan_layer(kept, a, training, training, heavy, cache, cheap); }
        kept.add(&x_out, N * r.C);
        mean_out = nullptr;
        if (!r.norm.rms) { kept.add(&mean_out, N); }
        kept.add(&rstd_out, N);

        scratch.add(&n_out, N * r.C), scratch.add(&stats, chunk * 3), scratch.add(&all_stats, tp.comm.size * chunk * 3);
        scratch.add(&losses, N), scratch.add(&lse, chunk);
        scratch.add(&tokens, N), scratch.add(&targets, N), scratch.add(&lookup_rows, training && r.tied ? N : 0);
        scratch.add(&row_logits, training ? 0 : tp.comm.size * r.Vmax);
        scratch.add(&dn, training ? N * r.C : 0);
        // What the head reads and leaves is above. Between forward and backward nothing of the rest is in use: the logits take its place.
        const i64 rest = scratch.end();
        scratch.add(&logits, chunk * r.Vr);
        scratch.back_to(rest);
        shared = {}, plan_layer(scratch, shared, !training, !training, !heavy, !cache, !cheap);
        row.plan(scratch, tp, N, std::max(r.Ar, r.Fr), training);
        scratch.add(&qkv, N * r.QKVr);
        if (training) {
            scratch.add(&dx, N * r.C), scratch.add(&datt, N * r.Ar), scratch.add(&dh, N * r.Fr);
            scratch.add(&dq, N * r.Ar), scratch.add(&dk, N * r.KVHr * r.HS), scratch.add(&dv, N * r.KVHr * r.HS);
            scratch.add(&dx32, dtype_of<X> == DType::FP32 ? 0 : N * r.C);
        }
    }
    void allocate() {
        kept.allocate(), scratch.allocate();
        for (LayerSaved<X>& a : layers) {
            auto share = [](auto*& own, auto* common) {
                if (!own) { own = common; }
            };
            share(a.x_in, shared.x_in), share(a.x_mid, shared.x_mid), share(a.mean1, shared.mean1), share(a.rstd1, shared.rstd1);
            share(a.mean2, shared.mean2), share(a.rstd2, shared.rstd2), share(a.n1, shared.n1), share(a.n2, shared.n2), share(a.q, shared.q);
            share(a.k, shared.k), share(a.v, shared.v), share(a.att, shared.att), share(a.lse, shared.lse), share(a.up, shared.up), share(a.h, shared.h);
        }
    }
};

// =====================================================================================================================
// 3. The model

// A tied weight's gradient by the lookup, summed apart from the head's over a step of several micro-batches, so that the order of one's backward and
// another's forward changes no bit. Rows are for the tokens that the step has: few, beside a vocabulary.
struct LookupGradient {
    i64 rows = 0;                     // room; 0 where nothing is summed apart
    float* sum;                       // (rows, C)
    int* tokens;                      // (rows) whose rows they are
    Range vocab{};                    // the rank's shard
    std::vector<int> row_of, used;    // by token of the shard, -1: none yet; the tokens, in order of their rows

    void plan(Arena& arena, Range shard, i64 tokens_of_step, i64 C) {
        vocab = shard, rows = std::min(tokens_of_step, vocab.size());
        arena.add(&sum, rows * C), arena.add(&tokens, rows);
        begin_step();
    }
    void begin_step() { row_of.assign(vocab.size(), -1), used.clear(); }
    // -1: of another rank's shard.
    int row(int token) {
        if (token < vocab.begin || token >= vocab.end) { return -1; }
        int& row = row_of[token - vocab.begin];
        if (row < 0) { row = (int)used.size(), used.push_back(token); }
        return row;
    }
};

template <typename X>
struct Model {
    const ModelConfig config;
    TensorParallel tp;
    Run& run;
    const RankShape r;
    const ParameterTable table;
    Arena parameters{"parameters"}, gradients{"gradients"}, rope{"rope table"};
    X* params;
    Gradients grads;
    LookupGradient lookups;
    ModelTensors<X*> w;
    ModelTensors<float*, Gradient> g;
    i64 positions;                    // rows of the rope table
    float *rope_cos, *rope_sin;       // (positions, HS/2); null with learned positions

    // micro_batches: how many are summed into one gradient, of micro_batch_tokens each; 0 outside training.
    Model(const ModelConfig& config, const TensorParallel& tp, i64 positions, i64 micro_batches, i64 micro_batch_tokens, DType grad_dtype, Run& run)
        : config(config), tp(tp), run(run), r(config, tp.comm.size, tp.comm.rank), table(config, parameter_specs(config), tp.comm.size, tp.comm.rank),
          positions(positions), rope_cos(nullptr), rope_sin(nullptr) {
        parameters.add(&params, table.count());
        if (micro_batches > 0) { grads.plan(gradients, table, grad_dtype); }
        if (config.tie && micro_batches > 1) { lookups.plan(gradients, r.vocab, micro_batches * micro_batch_tokens, r.C); }
        if (config.rotary) { rope.add(&rope_cos, positions * (r.HS / 2)), rope.add(&rope_sin, positions * (r.HS / 2)); }
    }
    void allocate() {
        parameters.allocate(), gradients.allocate(), rope.allocate();
        const auto weight = [&](i64 i) { return params + i; };
        w = ModelTensors<X*>(table, config, weight, weight);
        if (grads.others) { g = {table, config, [&](i64 i) { return grads.fp32(i); }, [&](i64 i) { return grads.at(i); }}; }
        if (config.rotary) { fill_rope_table(); }
    }

    // Passes stop at each co_yield, for a sum over ranks (pass.h). Between them nothing of a micro-batch lies outside its Activations.
    Pass forward(Activations<X>& s, i64 B, i64 S, const int* pos0 = nullptr);
    Pass head(Activations<X>& s, i64 N, float scale, GradMode mode, bool want_gradient);
    Pass backward(Activations<X>& s, i64 B, i64 S, GradMode mode, std::function<void(i64 layer)> layer_done = [](i64) {});
    void complete_tied_gradient();
    // How often the three of them stop.
    i64 stops(const Activations<X>& s, i64 N) const { return 2 * (1 + 2 * r.L + ceil_div(N, s.chunk)); }

private:
    void attention_half(Activations<X>& s, i64 l, i64 B, i64 S, const int* pos0);
    void mlp_half(Activations<X>& s, i64 l, i64 N);
    void recompute_attention(Activations<X>& s, i64 l, i64 B, i64 S);
    void recompute_mlp(Activations<X>& s, i64 l, i64 N);
    void fill_rope_table();
};

// Angles position * base^(-2i/HS), in double on the host.
template <typename X>
void Model<X>::fill_rope_table() {
    const i64 half = r.HS / 2;
    std::vector<float> cosines(positions * half), sines(positions * half);
    for (i64 t = 0; t < positions; t++) {
        for (i64 i = 0; i < half; i++) {
            const double angle = (double)t * std::pow(config.rope_base, -2.0 * (double)i / (double)r.HS);
            cosines[t * half + i] = (float)std::cos(angle), sines[t * half + i] = (float)std::sin(angle);
        }
    }
    copy_to_device(rope_cos, cosines.data(), positions * half, run);
    copy_to_device(rope_sin, sines.data(), positions * half, run);
}

// From n1 to att: this rank's heads only, no communication.
template <typename X>
void Model<X>::attention_half(Activations<X>& s, i64 l, i64 B, i64 S, const int* pos0) {
    const LayerSaved<X>& a = s.layers[l];
    const LayerTensors<X*>& p = w.layers[l];
    matmul_forward(s.qkv, r.QKVr, a.n1, p.qkv, p.qkv_bias, B * S, r.C, r.QKVr, 1.0f, run);
    rope_split_forward(a.q, a.k, a.v, s.qkv, rope_cos, rope_sin, pos0, s.S_kv, B, S, r.NHr, r.KVHr, r.HS, run);
    attention_forward(a.att, a.lse, a.q, a.k, a.v, pos0, s.S_kv, B, S, r.NHr, r.KVHr, r.HS, run);
}

// From n2 to h: this rank's FFN channels only, no communication.
template <typename X>
void Model<X>::mlp_half(Activations<X>& s, i64 l, i64 N) {
    const LayerSaved<X>& a = s.layers[l];
    const LayerTensors<X*>& p = w.layers[l];
    if (config.is_llama()) {
        matmul_forward(a.up, r.Ur, a.n2, p.up, p.up_bias, N, r.C, r.Ur, 1.0f, run);
        swiglu_forward(a.h, a.up, N, r.Fr, run);
    } else {
        matmul_gelu_forward(a.h, a.up, a.n2, p.up, p.up_bias, N, r.C, r.Fr, run);
    }
}

// tokens (B, S) at positions pos0.. (ops.h) -> n_out (N, C), this rank's normed residual stream. Everything is N = B*S rows.
template <typename X>
Pass Model<X>::forward(Activations<X>& s, i64 B, i64 S, const int* pos0) {
    const i64 N = B * S, C = r.C, L = r.L;
    embedding_forward(s.layers[0].x_in, s.tokens, w.embedding, w.position, r.vocab, B, S, C, pos0, run);
    co_yield tp.comm.start_all_reduce(s.layers[0].x_in, N * C, dtype_of<X>, Traffic::EMBEDDING);              // <=> all channels, once

    for (i64 l = 0; l < L; l++) {
        const LayerSaved<X>& a = s.layers[l];
        const LayerTensors<X*>& p = w.layers[l];
        if (l == 0) { residual_norm_forward((X*)nullptr, a.n1, a.mean1, a.rstd1, a.x_in, (Blocks<X>*)nullptr, (X*)nullptr, p.norm1, p.norm1_bias, r.norm, N, C, run); }
        else { residual_norm_forward(a.x_in, a.n1, a.mean1, a.rstd1, s.layers[l - 1].x_mid, &s.row.out, w.layers[l - 1].down_bias, p.norm1, p.norm1_bias, r.norm, N, C, run); }
        attention_half(s, l, B, S, pos0);
        co_yield row_parallel_forward(s.row, a.att, p.attn_out, N, r.Ar, tp, run);                            // <=> partial channel reduce 1
        residual_norm_forward(a.x_mid, a.n2, a.mean2, a.rstd2, a.x_in, &s.row.out, p.attn_out_bias, p.norm2, p.norm2_bias, r.norm, N, C, run);
        mlp_half(s, l, N);
        co_yield row_parallel_forward(s.row, a.h, p.down, N, r.Fr, tp, run);                                  // <=> partial channel reduce 2
    }
    residual_norm_forward(s.x_out, s.n_out, s.mean_out, s.rstd_out, s.layers[L - 1].x_mid, &s.row.out, w.layers[L - 1].down_bias, w.final_norm, w.final_norm_bias,
                          r.norm, N, C, run);
}

// The LM head and the loss, some rows at a time, so that the logits never exist as a whole. Each rank scores its own
// vocabulary shard from its own residual stream; one softmax runs over all shards. Leaves the N losses; with gradients also
// dn = scale * d loss / d n_out, and the head's gradient.
template <typename X>
Pass Model<X>::head(Activations<X>& s, i64 N, float scale, GradMode mode, bool want_gradient) {
    const int T = tp.comm.size;
    for (i64 at = 0; at < N; at += s.chunk) {
        const i64 n = std::min(s.chunk, N - at);
        const X* x = s.n_out + at * r.C;
        const int* targets = s.targets + at;
        matmul_forward(s.logits, r.Vr, x, w.head, (const X*)nullptr, n, r.C, r.Vr, 1.0f, run);
        classifier_stats(s.stats, s.logits, targets, r.vocab, n, run);
        co_yield tp.comm.start_all_gather(s.stats, s.all_stats, n * 3 * (i64)sizeof(float), Traffic::LOSS);   // <=> three numbers a token
        classifier_loss(s.losses + at, s.lse, s.all_stats, targets, T, n, run);
        if (!want_gradient) { continue; }
        classifier_backward(s.logits, s.lse, targets, r.vocab, scale, n, run);
        matmul_dgrad(s.dn + at * r.C, s.logits, r.Vr, w.head, n, r.C, r.Vr, 1.0f, false, run);
        co_yield 0;                                                                                           // a long time without a sum: other passes may send theirs
        matmul_wgrad(g.head, nullptr, s.logits, r.Vr, x, n, r.C, r.Vr, 1.0f, at == 0 ? mode : GradMode::ADD, run);
    }
}

template <typename X>
void Model<X>::recompute_attention(Activations<X>& s, i64 l, i64 B, i64 S) {
    const LayerSaved<X>& a = s.layers[l];
    if (s.keep == Keep::ALL) { return; }
    norm_apply(a.n1, a.x_in, a.mean1, a.rstd1, w.layers[l].norm1, w.layers[l].norm1_bias, r.norm, B * S, r.C, run);
    if (s.keep == Keep::RESIDUAL) { attention_half(s, l, B, S, nullptr); }
}
template <typename X>
void Model<X>::recompute_mlp(Activations<X>& s, i64 l, i64 N) {
    const LayerSaved<X>& a = s.layers[l];
    if (s.keep == Keep::ALL) { return; }
    norm_apply(a.n2, a.x_mid, a.mean2, a.rstd2, w.layers[l].norm2, w.layers[l].norm2_bias, r.norm, N, r.C, run);
    if (s.keep == Keep::RESIDUAL) { mlp_half(s, l, N); }
    else if (config.is_llama()) { swiglu_forward(a.h, a.up, N, r.Fr, run); }
    else { gelu_forward(a.h, a.up, N, r.Fr, run); }
}

// The true gradient of the one loss, every rank with its own residual stream. dx is this rank's gradient of its stream; it
// is never summed on the way down, only its shared channels are, on their way into a row-parallel product. While that sum
// travels, the products that do not need it run: the weight gradients held back from the column-parallel products just
// passed, what is recomputed, and the private channels' products.
template <typename X>
Pass Model<X>::backward(Activations<X>& s, i64 B, i64 S, GradMode mode, std::function<void(i64 layer)> layer_done) {
    const i64 N = B * S, C = r.C, L = r.L;
    Blocks<X>& send = s.row.out;                                       // norm_backward leaves dx's shared channels here
    const i64 Ck = tp.comm.size > 1 ? tp.Ck : 0;
    X* const dqkv = s.qkv;
    norm_backward(s.dx, false, send.shared, send.ld_shared, send.wire, Ck, g.final_norm, g.final_norm_bias, s.dn, s.x_out, s.mean_out, s.rstd_out, w.final_norm,
                  r.norm, mode, N, C, run);

    for (i64 l = L - 1; l >= 0; l--) {
        const LayerSaved<X>& a = s.layers[l];
        const LayerTensors<X*>& p = w.layers[l];
        const LayerTensors<float*, Gradient>& d = g.layers[l];
        // the MLP
        Comm::Ticket ticket = start_partial_reduce(send, N, tp);                                              // <=> partial channel reduce 3
        if (l + 1 < L) { matmul_wgrad(g.layers[l + 1].qkv, g.layers[l + 1].qkv_bias, dqkv, r.QKVr, s.layers[l + 1].n1, N, C, r.QKVr, 1.0f, mode, run), layer_done(l + 1); }
        if (d.down_bias) { bias_backward(d.down_bias, s.dx, N, C, mode, run); }
        recompute_mlp(s, l, N);
        row_parallel_backward_private(s.dh, d.down, s.dx, s.row, a.h, p.down, mode, N, r.Fr, tp, run);
        co_yield ticket;
        row_parallel_backward_shared(s.dh, d.down, s.dx, s.row, a.h, p.down, mode, N, r.Fr, tp, run);
        X* const dup = a.up;                                           // in place: nobody reads up again
        if (config.is_llama()) { swiglu_backward(dup, s.dh, a.up, N, r.Fr, run); }
        else { gelu_backward(dup, s.dh, a.up, N, r.Fr, run); }
        matmul_dgrad(s.dn, dup, r.Ur, p.up, N, C, r.Ur, 1.0f, false, run);
        norm_backward(s.dx, true, send.shared, send.ld_shared, send.wire, Ck, d.norm2, d.norm2_bias, s.dn, a.x_mid, a.mean2, a.rstd2, p.norm2, r.norm, mode, N, C, run);
        // attention
        ticket = start_partial_reduce(send, N, tp);                                                           // <=> partial channel reduce 4
        matmul_wgrad(d.up, d.up_bias, dup, r.Ur, a.n2, N, C, r.Ur, 1.0f, mode, run);
        if (d.attn_out_bias) { bias_backward(d.attn_out_bias, s.dx, N, C, mode, run); }
        recompute_attention(s, l, B, S);
        row_parallel_backward_private(s.datt, d.attn_out, s.dx, s.row, a.att, p.attn_out, mode, N, r.Ar, tp, run);
        co_yield ticket;
        row_parallel_backward_shared(s.datt, d.attn_out, s.dx, s.row, a.att, p.attn_out, mode, N, r.Ar, tp, run);
        attention_backward(s.dq, s.dk, s.dv, s.datt, a.att, a.lse, a.q, a.k, a.v, B, S, r.NHr, r.KVHr, r.HS, run);
        rope_split_backward(dqkv, s.dq, s.dk, s.dv, rope_cos, rope_sin, B, S, r.NHr, r.KVHr, r.HS, run);
        matmul_dgrad(s.dn, dqkv, r.QKVr, p.qkv, N, C, r.QKVr, 1.0f, false, run);
        norm_backward(s.dx, true, send.shared, send.ld_shared, send.wire, Ck, d.norm1, d.norm1_bias, s.dn, a.x_in, a.mean1, a.rstd1, p.norm1, r.norm, mode, N, C, run);
    }

    float* dx32;
    if constexpr (std::is_same_v<X, float>) { dx32 = s.dx; }
    else { dx32 = s.dx32, cast(dx32, s.dx, N * C, run); }
    const Comm::Ticket ticket = tp.comm.start_all_reduce(dx32, N * C, DType::FP32, Traffic::EMBEDDING);      // <=> all channels, once
    matmul_wgrad(g.layers[0].qkv, g.layers[0].qkv_bias, dqkv, r.QKVr, s.layers[0].n1, N, C, r.QKVr, 1.0f, mode, run);
    layer_done(0);
    co_yield ticket;
    if (lookups.rows > 0) { embedding_backward(lookups.sum, dx32, s.lookup_rows, Range{0, lookups.rows}, N, C, mode, run); }
    else { embedding_backward(g.embedding, dx32, s.tokens, r.vocab, N, C, config.tie ? GradMode::ADD : mode, run); }
    if (g.position) { position_backward(g.position, dx32, B, S, C, config.max_positions, mode, run); }
}

// After the last micro-batch.
template <typename X>
void Model<X>::complete_tied_gradient() {
    const i64 n = (i64)lookups.used.size();
    if (n == 0) { return; }
    copy_to_device(lookups.tokens, lookups.used.data(), n, run);
    embedding_backward(g.embedding, lookups.sum, lookups.tokens, r.vocab, n, r.C, GradMode::ADD, run);
}

// =====================================================================================================================
// 4. The step

TensorParallel make_tensor_parallel(const Options& o, Ranks& ranks) {
    const int T = ranks.tp->size;
    const i64 C = o.shape.channels;
    const bool bf16_wire = o.reduce_dtype == "bf16" || (o.reduce_dtype == "auto" && o.dtype == "bf16");
    return {*ranks.tp, C, T == 1 ? C : shared_channels(C, o.sync_factor), o.private_scale == "forward" ? (float)std::sqrt((double)T) : 1.0f,
            bf16_wire && T > 1 ? DType::BF16 : T > 1 ? DType::FP32 : o.dtype == "bf16" ? DType::BF16 : DType::FP32};
}

struct StepResult {
    double loss, grad_norm;
    bool skipped;
};

template <typename X>
struct Trainer {
    const Options& o;
    Ranks& ranks;
    Run& run;
    Model<X> model;
    std::deque<Activations<X>> acts;   // one for each pass under way
    Optimizer<X> optimizer;
    Arena state{"optimiser"};
    SpikeFilter loss_filter, norm_filter;
    i64 updates = 0;  // steps that changed the weights: Adam's t

    // Without training there are no gradients, no optimiser state, and nothing is kept for backward.
    Trainer(const Options& o, Ranks& ranks, Run& run, bool training)
        : o(o), ranks(ranks), run(run),
          model(o.shape, make_tensor_parallel(o, ranks), o.seq, training ? passes() : 0, sequences() * o.seq,
                o.grad_dtype == "bf16" ? DType::BF16 : DType::FP32, run), optimizer(model.table, ranks, o.zero == 1) {
        for (i64 pass = 0; pass < (training ? std::min(o.overlap_batches * o.passes_at_once(), passes()) : o.passes_at_once()); pass++) {
            acts.emplace_back(model.r, model.tp, sequences(), o.seq, o.seq, training ? (Keep)o.recompute : Keep::NOTHING);
        }
        if (training) { optimizer.plan(state); }
    }
    // A micro-batch's, and what each of them computes.
    i64 sequences() const { return o.micro_batch / o.passes_at_once(); }
    i64 passes() const { return o.global_batch / ranks.dp->size / sequences(); }  // of this rank, in a step
    // Beside the families: what a library takes for attention.
    AttentionBy attention() const { return attention_by(dtype_of<X>, sequences(), o.seq, model.r.NHr); }
    std::vector<const Arena*> families() const {
        std::vector<const Arena*> all = {&model.parameters, &model.gradients, &state};
        for (const Activations<X>& a : acts) { all.insert(all.end(), {&a.kept, &a.scratch}); }
        all.push_back(&model.rope);
        return all;
    }
    void allocate() {
        model.allocate(), state.allocate();
        for (Activations<X>& a : acts) { a.allocate(); }
        optimizer.bind(model.params, model.grads);
    }

    // How the last update rounded the parameters; new ones are rounded to nearest.
    Rounding rounding() const { return {o.rounding == "stochastic" && dtype_of<X> != DType::FP32 && updates > 0, hash_bits((uint32_t)updates ^ hash_bits((uint32_t)o.seed))}; }

    // Fills the parameters, and the master weights of what this rank owns, from the source's fp32 values.
    void load(const TensorSource& source) {
        load_parameters(model.params, model.table, source, rounding(), [&](const Tensor& t, Range part, const float* values) {
            optimizer.for_each_owned(t, [&](const auto& owned, i64 begin, i64 end) {
                const i64 first = t.offset + part.begin;
                begin = std::max(begin, first), end = std::min(end, t.offset + part.end);
                if (begin < end) { optimizer.master_from_host(values + (begin - first), owned, {begin, end}, run); }
            });
        }, run);
    }

    // Windows of S+1 tokens to inputs and targets. Past `valid` windows: padding that has no loss.
    void upload(Activations<X>& s, const int32_t* windows, i64 valid) {
        const i64 B = sequences(), S = o.seq;
        std::vector<int> tokens(B * S), targets(B * S);
        for (i64 b = 0; b < B; b++) {
            for (i64 i = 0; i < S; i++) {
                tokens[b * S + i] = b < valid ? windows[b * (S + 1) + i] : 0;
                targets[b * S + i] = b < valid ? windows[b * (S + 1) + i + 1] : -1;
            }
        }
        copy_to_device(s.tokens, tokens.data(), B * S, run);
        copy_to_device(s.targets, targets.data(), B * S, run);
        if (model.lookups.rows == 0) { return; }
        for (int& token : tokens) { token = model.lookups.row(token); }
        copy_to_device(s.lookup_rows, tokens.data(), B * S, run);
    }

    // Everything that is computed from what was uploaded.
    Pass loss(Activations<X>& s) {
        for (Comm::Ticket ticket : model.forward(s, sequences(), o.seq)) { co_yield ticket; }
        for (Comm::Ticket ticket : model.head(s, sequences() * o.seq, 0, GradMode::WRITE, false)) { co_yield ticket; }
    }
    Pass loss_and_gradients(Activations<X>& s, GradMode mode, bool last) {
        const float scale = (float)(1.0 / (double)(o.global_batch * o.seq));
        for (Comm::Ticket ticket : model.forward(s, sequences(), o.seq)) { co_yield ticket; }
        for (Comm::Ticket ticket : model.head(s, sequences() * o.seq, scale, mode, true)) { co_yield ticket; }
        Pass backward = model.backward(s, sequences(), o.seq, mode, [this, last](i64 l) { if (last) { optimizer.start_reduce(l); } });  // <=> the layer's DP sum
        for (Comm::Ticket ticket : backward) { co_yield ticket; }
    }
    // What a pass left.
    double sum_of_losses(const Activations<X>& s) {
        std::vector<float> losses(sequences() * o.seq);
        copy_to_host(losses.data(), s.losses, (i64)losses.size(), run);
        return std::accumulate(losses.begin(), losses.end(), 0.0);
    }

    // This rank's windows of step t's global batch -> one update of the weights, the same on every rank. A loss or norm that is
    // not finite, or a spike, leaves the weights as they are.
    StepResult step(const int32_t* windows, i64 t) {
        const i64 B = sequences(), S = o.seq, all = passes();
        double local_loss = 0;
        Turns turns(*ranks.tp);
        model.lookups.begin_step();
        for (i64 begun = 0, ended = 0; ended < all;) {
            // With --overlap-batches N, a micro-batch begins when the one before is an N-th of its way along: evenly spaced, some are in forward, which sends
            // more than it computes, while others are in the head and backward, which compute more than they send.
            const bool room = turns.under_way() + o.passes_at_once() <= acts.size();
            if (begun < all && room && (turns.under_way() == 0 || turns.youngest().stops() >= model.stops(acts[0], B * S) / o.overlap_batches)) {
                for (i64 i = 0; i < o.passes_at_once(); i++, begun++) {
                    Activations<X>& s = acts[begun % acts.size()];
                    upload(s, windows + begun * B * (S + 1), B);
                    turns.begin(loss_and_gradients(s, begun == 0 ? GradMode::WRITE : GradMode::ADD, begun + 1 == all));
                }
            }
            for (size_t n = turns.turn(); n > 0; n--, ended++) { local_loss += sum_of_losses(acts[ended % acts.size()]); }
        }
        model.complete_tied_gradient();
        StepResult result{sum_over_dp(local_loss) / (double)(o.global_batch * S), 0, false};
        optimizer.reduce_gradients();                                                                         // <=> the rest's DP sum, TP sum of replicated tensors
        result.grad_norm = optimizer.gradient_norm(run);                                                      // <=> two numbers
        if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) { return result; }               // nothing changed: the caller stops
        result.skipped = loss_filter.is_spike(result.loss, o.skip_spikes) || norm_filter.is_spike(result.grad_norm, o.skip_spikes);
        loss_filter.add(result.loss, o.skip_spikes), norm_filter.add(result.grad_norm, o.skip_spikes);
        if (result.skipped) { return result; }
        AdamW hyper;
        hyper.rounded_by = rounding();
        updates++;
        hyper.lr = (float)learning_rate(o, t), hyper.beta1 = (float)o.beta1, hyper.beta2 = (float)o.beta2, hyper.eps = (float)o.eps;
        hyper.weight_decay = (float)o.weight_decay;
        hyper.correction1 = (float)(1.0 - std::pow(o.beta1, (double)updates)), hyper.correction2 = (float)(1.0 - std::pow(o.beta2, (double)updates));
        hyper.rounding = rounding();
        hyper.grad_scale = o.clip > 0 ? (float)std::min(1.0, o.clip / (result.grad_norm + 1e-6)) : 1.0f;
        optimizer.update(hyper, run);                                                                         // <=> ZeRO-1: new parameters
        return result;
    }

    // The mean loss over the first global batches of a set, in order; over all of it where batches is 0.
    double validate(const DataLoader& set, i64 batches) {
        const i64 B = sequences(), S = o.seq, D = ranks.dp->size;
        const i64 windows = batches > 0 ? std::min(set.windows(), batches * o.global_batch) : set.windows();
        std::vector<int32_t> batch(B * (S + 1));
        double loss = 0;
        for (i64 at = 0; at < windows; at += o.micro_batch * D) {
            std::vector<Pass> passes;
            i64 first = at + ranks.dp->rank * o.micro_batch;
            for (i64 i = 0; i < o.passes_at_once(); i++) {
                const i64 valid = std::clamp<i64>(windows - first, 0, B);
                for (i64 b = 0; b < valid; b++) { set.read_sequential(first + b, batch.data() + b * (S + 1)); }
                upload(acts[i], batch.data(), valid);
                passes.push_back(this->loss(acts[i]));
                first += B;
            }
            complete(std::move(passes), *ranks.tp);
            for (i64 i = 0; i < o.passes_at_once(); i++) { loss += sum_of_losses(acts[i]); }
        }
        return sum_over_dp(loss) / (double)(windows * S);
    }

    double sum_over_dp(double mine) {
        std::vector<double> all(ranks.dp->size);
        ranks.dp->share(&mine, all.data(), sizeof(double));
        return std::accumulate(all.begin(), all.end(), 0.0);
    }

    json insight();
};

// What the last micro-batch and its step left: per layer the norm of the gradients, and how far the ranks' private channels
// have come apart, sqrt(sum over ranks of |x_r - mean|^2 / sum over ranks of |x_r|^2), at the layer's output.
template <typename X>
json Trainer<X>::insight() {
    const i64 L = model.r.L, N = sequences() * o.seq, C = model.r.C;
    const Activations<X>& last = acts[(passes() - 1) % acts.size()];
    const int T = ranks.tp->size;
    std::vector<double> mine(3 * L), all(3 * L * ranks.world->size), total(3 * L);
    for (const Tensor& t : model.table.tensors()) {
        i64 layer = -1;
        if (sscanf(t.spec.name.c_str(), "layers.%" SCNd64 ".", &layer) != 1) { continue; }
        const bool counted = (t.spec.split != Split::NONE || ranks.tp->rank == 0) && (o.zero == 1 || ranks.dp->rank == 0);  // everything once
        if (!counted) { continue; }
        optimizer.for_each_owned(t, [&](const auto&, i64 begin, i64 end) { mine[layer] += model.grads.squares({{begin, end}}, run)[0]; });
    }
    if (T > 1 && model.tp.private_channels() > 0) {
        const i64 Ck = model.tp.Ck, private_channels = C - Ck;
        Arena arena("insight");
        float* sum;
        arena.add(&sum, N * C);
        arena.allocate();
        for (i64 l = 0; l < L; l++) {
            const X* out = l + 1 < L ? last.layers[l + 1].x_in : last.x_out;
            cast(sum, out, N * C, run);
            ranks.tp->all_reduce(sum, N * C, DType::FP32, Traffic::OTHER);
            mine[L + l] += sum_of_squared_differences(out + Ck, sum + Ck, 1.0f / (float)T, C, N, private_channels, run);
            mine[2 * L + l] += sum_of_squared_differences(out + Ck, sum + Ck, 0.0f, C, N, private_channels, run);
        }
    }
    ranks.world->share(mine.data(), all.data(), 3 * L * (i64)sizeof(double));
    for (size_t i = 0; i < all.size(); i++) { total[i % (3 * L)] += all[i]; }
    json norms = json::array(), divergence = json::array();
    for (i64 l = 0; l < L; l++) {
        norms.push_back(std::sqrt(total[l]));
        divergence.push_back(total[2 * L + l] > 0 ? std::sqrt(total[L + l] / total[2 * L + l]) : 0.0);
    }
    return {{"layer_grad_norm", norms}, {"layer_private_divergence", divergence}};
}

// =====================================================================================================================
// 5. Generation

// How tokens are drawn, and the state of what draws them, which checkpoints keep.
struct Sampler {
    uint64_t state;
    Sampling how;
};

// Feeds tokens through the model with a KV cache. What a step leaves for the next one lies where kernels reach it: the token, its position, the
// random state. So steps are the same work every time: on a GPU they are recorded once, and launched as one.
template <typename X>
struct Generator {
    static constexpr i64 PREFILL = 1024;  // prompt tokens at a time: products of 256 rows are slower by a sixth
    Model<X>& model;
    const i64 context;
    const bool replays;
    Activations<X> acts;
    Arena next{"generation"};
    std::function<void()> on_token = [] {};  // called when a new token is there
    int* position;                       // of the first token that is read next
    uint64_t* random;

    Generator(Model<X>& model, i64 context, bool replay = true)
        : model(model), context(context), replays(replay && model.tp.comm.can_be_recorded()),
          acts(model.r, model.tp, 1, std::min(context, PREFILL), context, Keep::NOTHING) {
        next.add(&position, 1), next.add(&random, 1);
        acts.allocate(), next.allocate();
        for (Arena* arena : {&acts.kept, &acts.scratch}) { arena->touch(model.run); }  // else the prompt would, and its first token nearly all of the cache: heads lie apart
    }

    // The logits of what follows the first n rows of acts, the same on every rank: acts.row_logits (V).
    void score(i64 n) {
        const RankShape& r = model.r;
        float* mine = acts.row_logits + model.tp.comm.rank * r.Vmax;
        matmul_forward(mine, r.Vr, acts.n_out + (n - 1) * r.C, model.w.head, (const X*)nullptr, 1, r.C, r.Vr, 1.0f, model.run);
        model.tp.comm.all_gather(mine, acts.row_logits, r.Vmax * (i64)sizeof(float), Traffic::LOSS);                  // <=> every shard's logits
    }
    // Tokens at positions at.. -> acts.row_logits of what follows them. Returns how many were read last.
    i64 read(const std::vector<int>& tokens, int at) {
        i64 n = 0;
        for (i64 done = 0; done < (i64)tokens.size(); done += n, at += (int)n) {
            n = std::min((i64)tokens.size() - done, acts.max_S);
            copy_to_device(acts.tokens, tokens.data() + done, n, model.run);
            copy_to_device(position, &at, 1, model.run);
            complete(model.forward(acts, 1, n, position), model.tp.comm);
        }
        score(n);
        return n;
    }

    // Calls emit(token) for each new token, one of the first `ids`; ends after `count`, at a token in `stop` (not emitted), or
    // where the context is full.
    i64 generate(const std::vector<int>& prompt, i64 count, i64 ids, Sampler& sampler, const std::vector<int>& stop, const std::function<void(int)>& emit) {
        check((i64)prompt.size() <= context, "the prompt has %zu tokens, but the model's context is %lld\nHINT: shorten the prompt", prompt.size(), (long long)context);
        if (count == 0) { return 0; }
        Run& run = model.run;
        const auto draw = [&](i64 rows) { sample_token(acts.tokens, position, rows, random, acts.row_logits, std::min(ids, model.config.vocab), sampler.how, run); };
        const auto step = [&] { complete(model.forward(acts, 1, 1, position), model.tp.comm), score(1), draw(1); };
        Graph graph;
        copy_to_device(random, &sampler.state, 1, run);
        draw(read(prompt, 0));
        i64 made = 0;
        for (i64 filled = (i64)prompt.size();; filled++) {
            int token;
            copy_to_host(&token, acts.tokens, 1, run);
            on_token();
            check(token >= 0, "the logit of token %d is not a number\nHINT: the weights are damaged, or the run that made them diverged", -1 - token);
            if (std::find(stop.begin(), stop.end(), token) != stop.end()) { break; }
            emit(token);
            if (++made == count || filled == context) { break; }
            if (replays) { run.replay(graph, step); }
            else { step(); }
        }
        copy_to_host(&sampler.state, random, 1, run);
        return made;
    }

    // Continues a text: emit(piece) gets whole characters. The decoder reads the prompt first, so that the continuation keeps
    // the space it begins with.
    i64 write(const TextRule& rule, const std::string& prompt, i64 count, Sampler& sampler, bool ignore_eos, const std::function<void(const std::string&)>& emit) {
        const std::vector<int> ids = rule.encode(prompt);
        StreamDecoder decoder(*rule.tokenizer);
        for (int id : ids) { decoder.feed(id); }
        const i64 made = generate(ids, count, rule.tokenizer->vocab_size(), sampler, rule.stop_tokens(ignore_eos), [&](int id) { emit(decoder.feed(id)); });
        emit(decoder.flush());
        return made;
    }
};

// =====================================================================================================================
// 6. The run

template <typename X>
std::vector<StateView> state_views(Trainer<X>& trainer) {
    std::vector<StateView> views;
    for (const auto& owned : trainer.optimizer.owned()) {
        const auto master = [&trainer, &owned](Range range, float* to) { trainer.optimizer.master_to_host(to, owned, range, trainer.rounding(), trainer.run); };
        views.push_back({owned.range, master, trainer.optimizer.m(owned), trainer.optimizer.v(owned)});
    }
    return views;
}

// Weights, moments, filters, data position, sampler: all as the saved run had them.
template <typename X>
void restore(Trainer<X>& trainer, Checkpoint& checkpoint, DataLoader& data, Sampler& sampler, i64& tokens) {
    const json& meta = checkpoint.meta();
    const ParameterTable& table = trainer.model.table;
    const Comm& tp = *trainer.ranks.tp;
    check_same_model(trainer.o, checkpoint);
    trainer.updates = meta.at("updates");
    checkpoint.believe_later();
    trainer.load(saved_weights(checkpoint, table, tp));
    load_moments(checkpoint, table, tp, state_views(trainer), trainer.run);
    checkpoint.confirm();
    restore_data(data, trainer.o, meta);
    sampler.state = meta.at("sampler");
    trainer.loss_filter.values = meta.at("recent_losses").get<std::deque<double>>();
    trainer.norm_filter.values = meta.at("recent_norms").get<std::deque<double>>();
    tokens = meta.at("tokens_seen");
}

// The data of this process, which its ranks share.
struct DataSets {
    SharedLoader train, val;
};

template <typename X>
int train(const Options& o, Ranks& ranks, Run& run, DataSets& sets) {
    const bool speaks = ranks.world->rank == 0;
    const i64 D = ranks.dp->size, local = o.global_batch / std::max<i64>(D, 1);
    if (o.global_batch % (o.micro_batch * D) != 0) {
        usage_error("--global-batch is %lld: wanted a multiple of --micro-batch %lld times %lld data-parallel ranks\nHINT: --global-batch %lld", (long long)o.global_batch,
                    (long long)o.micro_batch, (long long)D, (long long)round_up(o.global_batch, o.micro_batch * D));
    }
    const std::string resumed = o.resume && !o.dry_run ? latest_checkpoint(o.out) : "";
    if (!o.out.empty()) { check_not_a_checkpoint(o.out); }
    if (!o.dry_run && resumed.empty() && !o.out.empty() && !latest_checkpoint(o.out).empty()) {
        usage_error("--out '%s' already holds checkpoints\nHINT: --resume continues them; another folder starts anew", o.out.c_str());
    }
    Logger log(speaks);
    Trainer<X> trainer(o, ranks, run, true);
    std::optional<DataLoader> data, val;
    if (!o.train.empty() && !o.dry_run) { data = sets.train.open(train_request(o)); }
    if (const auto request = val_request(o); request && !o.dry_run) { val = sets.val.open(*request); }
    if (speaks && data && !o.data_cache.empty() && data->order() != WindowOrder::megatron) { fprintf(stderr, "note: --data-cache has no effect: the order is not Megatron's\n"); }
    const json rule = data ? token_rule(*data) : json();
    if (val) { check_same_tokenizer(*val, rule, "--val", o.val); }
    std::optional<TextRule> text;
    if (o.sample_every > 0 && !o.dry_run) { text.emplace(o.tokenizer, rule, o.shape.vocab); }
    const json facts = print_header(o, ranks, run, trainer.model.table, trainer.model.tp, trainer.families(), trainer.attention(), data, val, log);
    if (o.dry_run) {
        report_fit(facts["memory_bytes_total"], planned_device(ranks, launched_world()), log);
        log.check_said();
        return EXIT_OK;
    }
    std::optional<Checkpoint> checkpoint;
    if (!resumed.empty()) { checkpoint.emplace(resumed); }
    check_ranks_agree(ranks, "the newest checkpoint in --out", checkpoint ? checkpoint->step() : -1);
    check_ranks_agree(ranks, "the number format (0 fp32, 1 bf16)", (i64)dtype_of<X>);
    check_ranks_agree(ranks, "the fingerprint of --train's files", (i64)data->identity());
    check_memory(trainer.families(), trainer.attention().workspace, ranks);
    std::optional<FolderLock> lock;
    if (!o.out.empty() && speaks) { prepare_folder(o.out), lock.emplace(lock_folder(o.out)); }
    log.open(o.log, !resumed.empty());
    json record = run_record(o, ranks, run);
    record["resumed_from"] = resumed.empty() ? json() : json(resumed);
    record.update(facts);
    record["data"] = {{"order", data->order_text()}, {"train", sources_record(*data)}};
    log.record(record);
    trainer.allocate();

    // Weights: the checkpoint's, a Hugging Face folder's, or new ones.
    Sampler sampler{(uint64_t)o.seed, o.temperature, o.top_k, o.top_p};
    i64 start = 0, tokens = 0;
    if (checkpoint) {
        restore(trainer, *checkpoint, *data, sampler, tokens);
        start = checkpoint->step();
        checkpoint.reset();  // its files need not stay open
        log.line("resumed from '%s' after step %lld", resumed.c_str(), (long long)start);
        if (start >= o.steps) { log.line("nothing to do: --steps is %lld", (long long)o.steps); }
    } else {
        std::optional<HfWeights> imported;
        if (!o.init_from.empty()) { imported.emplace(o.init_from, o.shape, parameter_specs(o.shape)); }
        trainer.load(new_weights(o, trainer.model.tp, imported ? &*imported : nullptr));
        if (imported) {
            if (speaks) { imported->warn_of_ignored_head(); }
            log.line("weights from '%s'; moments start at zero", o.init_from.c_str());
            if (trainer.model.tp.private_channels() > 0) {
                log.line("note: these weights were trained with all channels shared. At p = %g, %lld of %lld channels of every block's output are now each rank's own "
                         "(scale: %s), so the first loss is higher than the imported model's; training adapts it", o.sync_factor,
                         (long long)trainer.model.tp.private_channels(), (long long)o.shape.channels, o.private_scale.c_str());
            }
        }
    }
    std::optional<Generator<X>> generator;
    if (text) { generator.emplace(trainer.model, o.seq); }

    auto validate = [&](i64 step) {
        if (!val) { return; }
        const double loss = trainer.validate(*val, o.val_batches), bits = bits_per_byte(loss, *val);
        log.line("step %*lld | validation loss %.4f nats per token%s", (int)std::to_string(o.steps).size(), (long long)step, loss,
                 val->text_bytes_per_token() > 0 ? format(", %.4f bits per byte", bits).c_str() : "");
        log.record({{"kind", "val"}, {"step", step}, {"loss", loss}, {"bits_per_byte", bits}});
        check(std::isfinite(loss), "step %lld: the validation loss is %g; nothing was saved\nHINT: lower --lr, raise --warmup or --eps", (long long)step, loss);
    };
    auto write_sample = [&](i64 step) {
        std::string out;
        generator->write(*text, o.prompt, std::min<i64>(o.seq - 1, 80), sampler, false, [&](const std::string& piece) { out += piece; });
        log.line("step %lld | sample: %s%s", (long long)step, o.prompt.c_str(), out.c_str());
        log.record({{"kind", "sample"}, {"step", step}, {"text", o.prompt + out}});
    };
    ReadAhead<DataLoader> windows(std::move(*data), windows_of_run(o));
    auto save = [&](i64 step) {
        if (o.out.empty()) { return; }
        const double begin = now_seconds();
        const std::string path = save_checkpoint(o.out, run_state(o, windows.loader(), sampler.state, trainer.loss_filter, trainer.norm_filter, trainer.updates, tokens), step, state_views(trainer), ranks, o.keep, run);
        log.line("step %lld | checkpoint '%s' (%.1f s)", (long long)step, path.c_str(), now_seconds() - begin);
        log.record({{"kind", "checkpoint"}, {"step", step}, {"path", path}});
    };
    auto every = [](i64 period, i64 step) { return period > 0 && step % period == 0; };

    if (resumed.empty()) {
        validate(0);
        if (text) { write_sample(0); }
        if (o.steps == 0) { save(0); }  // an imported model as a checkpoint
    }
    catch_stop_signals();
    std::deque<double> recent;
    StepRecorder recorder(o.profile, o.trace, ranks, run);
    auto report_profile = [&] {
        if (const std::string table = recorder.finish(); !table.empty()) { log.line("%s", table.c_str()); }
    };
    for (i64 t = start + 1; t <= o.steps; t++) {
        const CommStats before = all_stats(ranks);
        recorder.step_begins();
        const double begin = now_seconds();
        const StreamState drawn = windows.loader().state();
        const int32_t* batch = windows.next(o.global_batch, ranks.dp->rank * local, (ranks.dp->rank + 1) * local);
        const StepResult result = trainer.step(batch, t);
        const double seconds = now_seconds() - begin, rate = (double)(o.global_batch * o.seq) / seconds;
        recorder.step_ends(seconds);
        tokens += o.global_batch * o.seq;
        recent.push_back(seconds);
        if (recent.size() > 32) { recent.pop_front(); }
        const json sent = bytes_record(before, all_stats(ranks), trainer.model.tp);
        const double left = std::accumulate(recent.begin(), recent.end(), 0.0) / (double)recent.size() * (double)(o.steps - t);
        log.line("step %*lld/%lld | loss %.4f | norm %.3f | lr %.2e | %s tok/s | comm %2.0f%% | %s left%s", (int)std::to_string(o.steps).size(), (long long)t, (long long)o.steps, result.loss,
                 result.grad_norm, learning_rate(o, t), human_count(rate).c_str(), 100 * sent["comm_exposed_seconds"].get<double>() / seconds, human_duration(left).c_str(),
                 result.skipped ? " | spike: update skipped" : "");
        json step_record = {{"kind", "step"}, {"step", t}, {"loss", result.loss}, {"grad_norm", result.grad_norm}, {"lr", learning_rate(o, t)}, {"tokens", tokens},
                            {"seconds", seconds}, {"tokens_per_second", rate}, {"data_wait_seconds", windows.waited()}, {"skipped", result.skipped}};
        step_record.update(sent);
        log.record(step_record);
        report_epochs(windows.loader(), drawn, t, log);
        check(std::isfinite(result.loss) && std::isfinite(result.grad_norm), "step %lld: the loss is %g and the gradient norm %g; stopped before the weights changed\nHINT: lower --lr, raise --warmup",
              (long long)t, result.loss, result.grad_norm);

        if (every(o.insight_every, t)) {
            json found = trainer.insight();
            found.update({{"kind", "insight"}, {"step", t}});
            log.record(found);
        }
        const int signal = agree_on_stop(ranks);                                                              // <=> the largest signal number
        if (!signal && (every(o.val_every, t) || t == o.steps)) { validate(t); }
        if (!signal && text && (every(o.sample_every, t) || t == o.steps)) { write_sample(t); }
        if (every(o.save_every, t) || t == o.steps || signal) { save(t); }
        if (signal) {
            report_shares(windows.loader(), t, log), report_profile();
            log.line("stopped by signal %d after step %lld%s", signal, (long long)t, o.out.empty() ? "; nothing saved, --out is not set" : ", saved");
            return 128 + signal;
        }
    }
    report_shares(windows.loader(), o.steps, log), report_profile();
    return EXIT_OK;
}

// --generate, --eval, --info: a trained model at the T and p it was trained with.
template <typename X>
int use(const Options& o, Ranks& ranks, Run& run) {
    const bool speaks = ranks.world->rank == 0;
    Logger log(speaks);
    if (ranks.dp->size != 1 && o.eval.empty() && !o.info) { usage_error("--dp is %d: %s is for one data-parallel rank\nHINT: --dp 1, and no more ranks under mpirun than --tp", ranks.dp->size, o.generate >= 0 ? "generation" : "export"); }
    std::optional<Checkpoint> checkpoint;
    std::optional<HfWeights> imported;
    if (!o.checkpoint.empty()) { checkpoint.emplace(latest_checkpoint(o.checkpoint)); }
    else { imported.emplace(o.init_from, o.shape, parameter_specs(o.shape)); }
    if (imported && speaks) { imported->warn_of_ignored_head(); }
    if (o.info) {
        json info = {{"path", checkpoint->dir()}, {"step", checkpoint->step()}};
        info.update(checkpoint->meta());
        log.line("%s", info.dump(2, ' ', false, json::error_handler_t::replace).c_str());
        log.check_said();
        return EXIT_OK;
    }
    if (checkpoint) { check_same_model(o, *checkpoint); }
    const json rule = checkpoint ? checkpoint->meta().value("tokens", json()) : json();
    auto load = [&](Model<X>& model) {
        if (checkpoint) { checkpoint->believe_later(); }
        const TensorSource source = imported ? new_weights(o, model.tp, &*imported) : saved_weights(*checkpoint, model.table, model.tp.comm);
        load_parameters(model.params, model.table, source, {}, [](const Tensor&, Range, const float*) {}, run);
        if (checkpoint) { checkpoint->confirm(); }
    };
    if (!o.export_hf.empty()) {
        const ParameterTable table(o.shape, parameter_specs(o.shape), 1, 0);
        export_hf(o.export_hf, o.shape, table, [&](const Tensor& t, float* values) { checkpoint->read(StateArray::MASTER, table, 1, 0, {t.offset, t.offset + t.count()}, values); });
        log.line("%s: config.json and model.safetensors of step %lld", o.export_hf.c_str(), (long long)checkpoint->step());
        log.check_said();
        return EXIT_OK;
    }
    if (!o.eval.empty()) {
        Trainer<X> trainer(o, ranks, run, false);
        check_memory(trainer.families(), 0, ranks);
        log.open(o.log, true);
        log.record(run_record(o, ranks, run));
        trainer.allocate();
        load(trainer.model);
        for (const std::string& file : o.eval) {
            const DataLoader set(file, o.seq, o.shape.vocab, 0, WindowOrder::sequential);
            check_same_tokenizer(set, rule, "--eval", file);
            const double loss = trainer.validate(set, 0), bits = bits_per_byte(loss, set);
            log.line("%s: %lld windows of %lld tokens | loss %.6f nats per token | perplexity %.4f%s", file.c_str(), (long long)set.windows(), (long long)o.seq, loss, std::exp(loss),
                     set.text_bytes_per_token() > 0 ? format(" | %.6f bits per byte", bits).c_str() : "");
            check(std::isfinite(loss), "the loss of '%s' is %g: the weights are damaged, or the run that made them diverged", file.c_str(), loss);
            log.record({{"kind", "eval"}, {"file", file}, {"loss", loss}, {"windows", set.windows()}, {"bits_per_byte", bits}});
        }
        log.check_said();
        return EXIT_OK;
    }
    const i64 context = std::max<i64>(o.shape.max_positions, 1);
    const TextRule text(o.tokenizer, rule, o.shape.vocab);
    text.encode(o.prompt);  // refuses what it must before the weights are read
    Model<X> model(o.shape, make_tensor_parallel(o, ranks), context, 0, 0, DType::FP32, run);
    check_memory({&model.parameters, &model.rope}, 0, ranks);
    model.allocate();
    load(model);
    Generator<X> generator(model, context, !o.no_graph && !o.profile);
    Sampler sampler{(uint64_t)o.seed, o.temperature, o.top_k, o.top_p};
    std::string before = o.prompt;  // is said with the first piece
    auto say = [&](const std::string& piece) {
        const std::string all = std::exchange(before, "") + piece;
        if (!speaks) { return; }
        check(fwrite(all.data(), 1, all.size(), stdout) == all.size() && fflush(stdout) == 0, "cannot write to standard output: %s", strerror(errno));
    };
    // --profile: what leads to a token is a step. The first reads the prompt, and has a table of its own.
    std::optional<StepRecorder> recorder(std::in_place, o.profile, "", ranks, run);
    const auto profile = [&](const char* what) {
        if (const std::string table = recorder->finish(); speaks && !table.empty()) { fprintf(stderr, "%s:\n%s\n", what, table.c_str()); }
    };
    const double begin = now_seconds();
    double first = begin, last = begin;  // when a token was there
    generator.on_token = [&] {
        recorder->step_ends(now_seconds() - last);
        last = now_seconds();
        if (first == begin) {
            first = last;
            profile("the prompt"), recorder.emplace(o.profile, "", ranks, run);
        }
        recorder->step_begins();
    };
    recorder->step_begins();
    const i64 made = generator.write(text, o.prompt, o.generate, sampler, o.ignore_eos, say);
    const double seconds = now_seconds() - first;
    say("\n");
    const std::string replayed = run.replays > 0 ? format("; %lld of the steps by one launch each", (long long)run.replays) : "";
    if (speaks) { fprintf(stderr, "[%lld tokens, %.1f tokens/s after the first, which took %.3f s%s]\n", (long long)made, (double)std::max<i64>(made - 1, 0) / std::max(seconds, 1e-9), first - begin, replayed.c_str()); }
    profile("each token after it");
    return EXIT_OK;
}

int run_ranks(const Options& options) {
    const bool planned = options.dry_run && !launched_world().by_mpi;
    DataSets sets;
    const auto on_rank = [&](Ranks& ranks, Run& run) {
        const Options o = on_ranks(options, ranks.dp->size);
        if (o.uses_a_model() && !planned) { return o.dtype == "bf16" ? use<bf16>(o, ranks, run) : use<float>(o, ranks, run); }
        return o.dtype == "bf16" ? train<bf16>(o, ranks, run, sets) : train<float>(o, ranks, run, sets);
    };
    if (planned) {
        PlannedRank rank(options.tp, std::max(options.dp, 1));
        return on_rank(rank.ranks, rank.run);
    }
    return launch(options.tp, options.dp, [&](Ranks& host) {
        DeviceRank rank(host, options.threads, options.comm_timeout);
        return on_rank(rank.ranks, rank.run);
    });
}

int main(int argc, char** argv) {
    for (int fd : {0, 1, 2}) {  // one that is closed would become the next file that is opened
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) { return EXIT_FAILED; }
    }
    const bool speaks = launched_world().rank == 0;
    Options options;
    try {
        if (!parse_options(argc, argv, speaks, options)) { return EXIT_OK; }
        if (options.dtype == "auto") { options.dtype = dtype_name(fast_dtype(options.shape.channels)); }
        return run_ranks(options);
    } catch (const std::exception& error) {
        return report_error(error);
    }
}
