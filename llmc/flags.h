// flags.h: every flag once. visit_flags() is the table from which the parser, --help, the log's first record and the
// checkpoint's options are made; flags.cpp does the parsing (CLI11: a well-kept parser with good messages).
#pragma once

#include <string>
#include <vector>

#include "config.h"

struct Options {
    // model
    std::string model = "130m";
    ModelConfig shape;
    std::string arch, positions;
    std::string init_from;
    // ranks
    int tp = 1, dp = 0, zero = 0;
    double sync_factor = 1.0;
    std::string private_scale = "forward";
    // data
    std::string train, val, order = "auto", split, data_cache;
    i64 seq = 0, micro_batch = -1, global_batch = 0;
    i64 seed = 1337;
    // optimiser
    i64 steps = 100;
    double lr = 0, min_lr = -1;
    i64 warmup = -1;
    std::string schedule = "cosine", rounding = "nearest";
    i64 decay_steps = 0, wsd_decay = 0;
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 0, clip = 1.0, skip_spikes = 0;
    // run
    std::string out, log, trace, dtype = "auto", grad_dtype = "fp32", reduce_dtype = "auto";
    bool resume = false, dry_run = false;
    i64 save_every = 0, keep = 3, val_every = 0, val_batches = 2, sample_every = 0, insight_every = 0;
    int threads = 0, recompute = 1;
    bool interleave = false, profile = false;
    i64 overlap_batches = 1;
    double comm_timeout = 600;
    // use
    std::string checkpoint, prompt, tokenizer, export_hf;
    i64 generate = -1;  // -1: not asked
    double temperature = 1.0, top_p = 1.0;
    i64 top_k = 0;
    bool ignore_eos = false, no_graph = false, info = false;
    std::vector<std::string> eval;

    i64 passes_at_once() const { return interleave ? 2 : 1; }  // that a micro-batch is computed in
    // A trained model is used, not trained.
    bool uses_a_model() const { return generate >= 0 || !eval.empty() || info || !export_hf.empty(); }
};

// Calls v(group, flag, field, help) for every flag, in the manual's order.
template <typename Visitor>
void visit_flags(Options& o, Visitor&& v) {
    const char* g = "Model";
    v(g, "--model", o.model, "preset: MODELS. It sets shape, --seq, --global-batch, --lr, --warmup and --eps; flags given beside it win");
    v(g, "--arch", o.arch, "llama (RMSNorm, SwiGLU, no biases) or gpt (LayerNorm, GELU, biases)");
    v(g, "--layers", o.shape.layers, "number of blocks");
    v(g, "--channels", o.shape.channels, "width C of the residual stream");
    v(g, "--heads", o.shape.heads, "query heads");
    v(g, "--kv-heads", o.shape.kv_heads, "key and value heads (grouped-query attention); divides --heads");
    v(g, "--head-size", o.shape.head_size, "channels of a head; 0: --channels / --heads");
    v(g, "--ffn", o.shape.ffn, "width inside the MLP");
    v(g, "--vocab", o.shape.vocab, "vocabulary size V; every id must be below it");
    v(g, "--tie", o.shape.tie, "the LM head is the embedding");
    v(g, "--positions", o.positions, "rotary or learned");
    v(g, "--rope-base", o.shape.rope_base, "base of the rotary frequencies");
    v(g, "--norm-eps", o.shape.norm_eps, "epsilon inside the norms");
    v(g, "--vocab-multiple", o.shape.vocab_multiple, "split the vocabulary as if rounded up to a multiple of this times --tp (Megatron: 128); 0: no rounding");
    v(g, "--init-from", o.init_from, "start from a Hugging Face folder (config.json, model.safetensors; Llama or GPT-2) instead of random weights, at any --tp and --sync-factor");
    g = "Ranks";
    v(g, "--tp", o.tp, "tensor-parallel ranks T. Without mpirun they are threads of this process");
    v(g, "--dp", o.dp, "data-parallel ranks D; 0: world size / T under mpirun, else 1");
    v(g, "--sync-factor", o.sync_factor, "p: the first int(C*p) channels are summed over the T ranks after each row-parallel product, the others stay private. 1: plain tensor parallelism");
    v(g, "--private-scale", o.private_scale, "how private channels keep the variance of shared ones: forward (times sqrt(T) in every pass), init (scale the weights once when drawn or imported) or none");
    v(g, "--zero", o.zero, "1: shard master weights and moments over the D ranks (ZeRO-1)");
    g = "Data";
    v(g, "--train", o.train, "data to train on: a glob, 0.7:glob,0.3:glob to mix by weight, or @FILE: a recipe with one WEIGHT:GLOB a line (data/*.mix). Files are llm.c shards, Megatron sets (PREFIX, PREFIX.bin or PREFIX.idx) or lit-gpt packed shards, told apart by what they hold");
    v(g, "--val", o.val, "data to validate on, read in the order in which it lies (optional; with --split the sets of --train by default)");
    v(g, "--order", o.order, "of the training data: windows (each window of S+1 tokens once an epoch, every epoch shuffled anew), megatron (the samples of its GPTDataset, bit for bit, for --seed, --seq and --steps; Megatron's own --seed is 1234) or auto (megatron where every source is one Megatron set, else windows)");
    v(g, "--split", o.split, "Megatron's split of its sets by documents, such as 969,30,1: --train takes the first part, --val the second; empty: all documents");
    v(g, "--data-cache", o.data_cache, "folder for the indices of Megatron's order, mapped into memory and found again by later runs and other ranks; empty: they are made in memory");
    v(g, "--seq", o.seq, "tokens of a sequence S");
    v(g, "--micro-batch", o.micro_batch, "sequences a data-parallel rank computes at once; -1: as many as make 1,024 tokens (8,192 on a GPU), enough for full speed, and divide its share of a step");
    v(g, "--global-batch", o.global_batch, "sequences of a step over all ranks; a multiple of --micro-batch times D");
    v(g, "--seed", o.seed, "of the weights, the data order and sampling");
    g = "Optimiser (AdamW)";
    v(g, "--steps", o.steps, "steps in all, those before a resume included");
    v(g, "--lr", o.lr, "peak learning rate");
    v(g, "--min-lr", o.min_lr, "floor of the learning rate; -1: a tenth of --lr");
    v(g, "--warmup", o.warmup, "steps W over which the learning rate rises linearly: lr(t) = lr*t/W");
    v(g, "--schedule", o.schedule, "after the warm-up: cosine (half a cosine down to the floor), linear (a straight line down to it), wsd (constant, then a straight line down over the last --wsd-decay steps) or constant");
    v(g, "--decay-steps", o.decay_steps, "the step at which cosine or linear reaches the floor; 0: --steps");
    v(g, "--wsd-decay", o.wsd_decay, "length of wsd's last part; 0: a fifth of --steps");
    v(g, "--weight-decay", o.weight_decay, "on matrices and embeddings; not on norms and biases");
    v(g, "--beta1", o.beta1, "decay of the first moment");
    v(g, "--beta2", o.beta2, "decay of the second moment");
    v(g, "--eps", o.eps, "Adam's epsilon");
    v(g, "--clip", o.clip, "largest global gradient norm; 0: no clipping");
    v(g, "--rounding", o.rounding, "of bf16 weights from their fp32 master weights: nearest or stochastic");
    v(g, "--skip-spikes", o.skip_spikes, "skip the update of a step whose loss or gradient norm lies this many standard deviations above the last 128 steps; 0: never");
    g = "Run";
    v(g, "--out", o.out, "folder for checkpoints; empty: none are written");
    v(g, "--resume", o.resume, "continue from the newest checkpoint in --out (start anew where there is none); flags not given are taken from it");
    v(g, "--save-every", o.save_every, "steps between checkpoints; 0: only at the end and on SIGINT, SIGTERM, SIGUSR1");
    v(g, "--keep", o.keep, "newest checkpoints to keep; 0: all");
    v(g, "--val-every", o.val_every, "steps between validations; 0: at the start and the end only");
    v(g, "--val-batches", o.val_batches, "global batches per validation; 0: the whole set");
    v(g, "--sample-every", o.sample_every, "steps between samples of text (needs --tokenizer); 0: none");
    v(g, "--insight-every", o.insight_every, "steps between records of per-layer gradient norms and private-channel divergence in --log; 0: none");
    v(g, "--log", o.log, "JSON Lines file: a record per run, step, validation, checkpoint");
    v(g, "--dtype", o.dtype, "fp32, bf16 (fp32 master weights) or auto (what is fast on this processor)");
    v(g, "--grad-dtype", o.grad_dtype, "of the gradients that are sharded in the layers, also on the wire between data-parallel ranks: fp32, or bf16 (with --dtype bf16): half their memory, rounded once a micro-batch");
    v(g, "--reduce-dtype", o.reduce_dtype, "type on the wire of the partial channel reduce: fp32, bf16 or auto (that of the activations)");
    v(g, "--recompute", o.recompute, "activations computed again in backward instead of kept: 0 none, 1 norms and activation functions, 2 whole blocks");
    v(g, "--interleave", o.interleave, "compute each micro-batch as two halves in turn, so that the sums one half waits for travel under the other half's products: for a slow wire");
    v(g, "--overlap-batches", o.overlap_batches, "micro-batches under way at once, evenly spaced, so that the sums of some travel under the products of others: 8 hide nearly all of a slow wire. As many times the activations");
    v(g, "--profile", o.profile, "at the end, a table of the steps' time by op: calls, milliseconds, FLOP/s, bytes/s; with --generate one of the prompt and one of the tokens after it");
    v(g, "--trace", o.trace, "write a timeline of the run's first 4 steps, all ranks, to this file: ops, waits, sums on their way (Chrome trace format; open it in Perfetto)");
    v(g, "--threads", o.threads, "CPU threads per host, divided among its ranks; 0: one per core");
    v(g, "--comm-timeout", o.comm_timeout, "seconds: a collective between GPUs that takes longer ends the run, for a rank hangs");
    v(g, "--dry-run", o.dry_run, "print the header box (parameters, memory, bytes on the wire) and leave; also for models larger than the machine");
    g = "Use of a trained model";
    v(g, "--checkpoint", o.checkpoint, "a checkpoint, or the --out folder that holds some: for --generate, --eval, --export-hf, --info");
    v(g, "--generate", o.generate, "write up to this many tokens after --prompt; ends at EOS, or where the context is full");
    v(g, "--prompt", o.prompt, "text to continue");
    v(g, "--tokenizer", o.tokenizer, "tokenizer: a SentencePiece .model, or GPT-2's encoder.json with vocab.bpe beside it");
    v(g, "--temperature", o.temperature, "0: always the likeliest token");
    v(g, "--top-k", o.top_k, "sample among the k likeliest tokens; 0 or at least V: all");
    v(g, "--top-p", o.top_p, "sample among the likeliest tokens that hold this probability together");
    v(g, "--ignore-eos", o.ignore_eos, "do not stop at the end-of-text token");
    v(g, "--no-graph", o.no_graph, "on a GPU, launch the kernels of each new token one by one, not as a CUDA graph");
    v(g, "--eval", o.eval, "shards: print the loss over all their windows, in nats per token and bits per byte");
    v(g, "--export-hf", o.export_hf, "write the model as a Hugging Face folder (config.json, model.safetensors in F32); its ranks must be one model: --sync-factor 1, or --tp 1");
    v(g, "--info", o.info, "print what a checkpoint holds");
}

// Parses the command line. Defaults come from the checkpoint that --resume or --checkpoint finds, else from --model's
// preset. Throws Error(EXIT_USAGE); for --help prints the manual (if `speaks`) and returns false.
bool parse_options(int argc, char** argv, bool speaks, Options& options);

// What follows from the number of data-parallel ranks.
Options on_ranks(Options options, int dp);

// Every flag's value as a JSON object (text): keys without leading dashes, words joined by '_'.
std::string options_to_json(const Options& options);
// The other way round: options that the text has, also as another version wrote them.
void options_from_json(Options& options, const std::string& text);
