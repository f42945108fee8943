// run_report.h: what a run says of itself: the box before its first step, whether its memory is there, and in the log what runs and what was sent.
#pragma once

#include "device_rank.h"
#include "logger.h"
#include "run_data.h"
#include "tensors.h"
#include "tp.h"

inline i64 bytes_in_all(const std::vector<const Arena*>& families, i64 workspace) {
    for (const Arena* arena : families) { workspace += arena->bytes(); }
    return workspace;
}

// Parameters in all count each tensor once, whatever the ranks. Beside the families: what a library takes for attention.
inline json print_header(const Options& o, const Ranks& ranks, const Run& run, const ParameterTable& table, const TensorParallel& tp, const std::vector<const Arena*>& families,
                         const AttentionBy& attention, const std::optional<DataLoader>& train, const std::optional<DataLoader>& val, Logger& log) {
    const ModelConfig& m = o.shape;
    const int T = ranks.tp->size, D = ranks.dp->size;
    i64 all = 0, here = 0, decayed = 0;
    for (const Tensor& t : table.tensors()) {
        i64 rows = 0;
        for (const HfPart& part : t.spec.parts) { rows += part.rows; }
        const i64 whole = rows * std::max<i64>(t.spec.cols, 1);
        all += whole, here += t.count(), decayed += t.spec.decay ? whole : 0;
    }
    // Bytes a rank sends per step for the partial channel reduces: two forward, two backward.
    const double rows = (double)o.global_batch / (double)D * (double)o.seq;
    const double per_channel = 4.0 * (double)m.layers * rows * (double)dtype_bytes(tp.wire) * 2.0 * (T - 1) / T;
    const double sent = per_channel * (double)tp.Ck, sent_at_p1 = per_channel * (double)tp.C;
    const i64 bytes = bytes_in_all(families, attention.workspace);
    nlohmann::ordered_json sizes = nlohmann::ordered_json::object();
    for (const Arena* arena : families) { sizes[arena->name()] = sizes.value(arena->name(), (i64)0) + arena->bytes(); }
    if (attention.workspace > 0) { sizes["attention workspace"] = attention.workspace; }
    std::string memory;
    for (const auto& [name, size] : sizes.items()) { memory += format("%s%s %.3f", memory.empty() ? "" : ", ", name.c_str(), size.get<double>() / 1073741824.0); }

    auto row = [&](const char* key, const std::string& text) { log.line("| %-11s| %s", key, text.c_str()); };
    const std::string rule = "+" + std::string(12, '-') + "+" + std::string(96, '-');
    log.line("%s", rule.c_str());
    row("model", format("%s: %s, %lld layers, C %lld, %lld heads of %lld (%lld KV), FFN %lld, V %lld, %s positions, %s", o.model.c_str(), m.is_llama() ? "Llama" : "GPT", (long long)m.layers,
                        (long long)m.channels, (long long)m.heads, (long long)m.head_size, (long long)m.kv_heads, (long long)m.ffn, (long long)m.vocab,
                        m.rotary ? "rotary" : "learned", m.tie ? "tied" : "untied"));
    row("parameters", format("%s in all (%lld; %lld decayed, %lld not), %lld on this rank", human_count(all).c_str(), (long long)all, (long long)decayed, (long long)(all - decayed), (long long)here));
    row("ranks", format("tp %d x dp %d, %s, %s%s", T, D, launched_world().by_mpi ? "MPI processes" : "threads of one process", run.place().c_str(), o.zero ? ", ZeRO-1" : ""));
    row("sync", T == 1 ? std::string("one rank: no channel is private")
                       : format("p %g: %lld of %lld channels shared, private scale %s, %s on the wire", o.sync_factor, (long long)tp.Ck, (long long)m.channels,
                                o.private_scale.c_str(), dtype_name(tp.wire)));
    row("wire", human_bytes(sent) + " per rank and step in the layers; " + human_bytes(sent_at_p1) + " at p = 1" +
                (T > 1 && tp.sent_channels() > tp.Ck ? format(" (rows padded to %lld channels: sent are %s)", (long long)tp.sent_channels(),
                                                              human_bytes(sent * (double)tp.sent_channels() / (double)tp.Ck).c_str()) : ""));
    row("memory", format("%.3f GiB per rank: %s", bytes / 1073741824.0, memory.c_str()));
    row("numbers", format("%s activations and weights, fp32 master weights, %smoments; GEMM: %s", o.dtype.c_str(),
                          o.grad_dtype == "bf16" ? "bf16 gradients in the layers, fp32 " : "gradients, ", gemm_library().c_str()) + (attention.library.empty() ? "" : "; attention: " + attention.library));
    row("batch", format("%lld sequences of %lld = %s tokens a step, micro-batch %lld%s", (long long)o.global_batch, (long long)o.seq, human_count((double)(o.global_batch * o.seq)).c_str(),
                        (long long)o.micro_batch, (std::string(o.interleave ? " in two halves, interleaved" : "") + (o.overlap_batches > 1 ? format(", %lld under way at once", (long long)o.overlap_batches) : "")).c_str()));
    row("optimiser", format("AdamW, lr %g (%s, warm-up %lld, floor %g), decay %g, clip %g, %lld steps", o.lr, o.schedule.c_str(), (long long)o.warmup, o.min_lr, o.weight_decay, o.clip,
                            (long long)o.steps));
    if (train) {
        for (const DataSource& source : train->sources()) {
            row("train", describe(source) + (train->sources().size() > 1 ? format(", share %.4f", source.weight) : "") +
                         format(", %.2f epochs in %lld steps", source.weight * (double)windows_of_run(o) / source.windows_per_epoch(o.seq), (long long)o.steps));
        }
        row("order", train->order_text());
    }
    if (val) {
        for (const DataSource& source : val->sources()) { row("validation", describe(source)); }
    }
    log.line("%s", rule.c_str());
    return {{"parameters", all}, {"parameters_per_rank", here}, {"memory_bytes", json(sizes)}, {"memory_bytes_total", bytes}, {"wire_bytes_per_step", sent}, {"wire_bytes_per_step_p1", sent_at_p1}};
}

// What a dry run says of the GPU that it finds.
inline void report_fit(i64 bytes, const PlannedDevice& device, Logger& log) {
    if (device.bytes == 0) { return; }
    const double need = (double)bytes * device.ranks / 1073741824.0, have = (double)device.bytes / 1073741824.0;
    const std::string text = format("%.2f GiB for %d rank%s on a GPU (%s) of %.2f GiB", need, device.ranks, device.ranks == 1 ? "" : "s", device.name.c_str(), have);
    if (need <= have) { log.line("fits: %s, which leaves %.2f GiB for CUDA and its libraries", text.c_str(), have - need); }
    else { log.line("does not fit: %s\nHINT: lower --micro-batch, raise --recompute, --tp, or --dp with --zero 1", text.c_str()); }
}

// Refuses what cannot fit before anything is allocated, with the size; the kernel would kill the job without a word.
inline void check_memory(const std::vector<const Arena*>& families, i64 workspace, const Ranks& ranks) {
    const double need = (double)bytes_in_all(families, workspace) * ranks.ranks_on_device, have = (double)available_memory();
    check(need <= have, "this run needs %.2f GiB on this %s (%d rank%s), and %.2f GiB are free\nHINT: lower --micro-batch (activations), or raise --recompute; --dry-run shows each part",
          need / 1073741824.0, MEMORY_PLACE, ranks.ranks_on_device, ranks.ranks_on_device == 1 ? "" : "s", have / 1073741824.0);
    ranks.world->barrier();  // before a sibling takes its share
}

// The first record of a log: every flag's effective value, what was built, where it runs.
inline json run_record(const Options& o, const Ranks& ranks, const Run& run) {
    Options e = o;
    e.threads = run.threads() * ranks.ranks_on_host;
    if (e.reduce_dtype == "auto") { e.reduce_dtype = e.dtype; }
    if (e.decay_steps == 0) { e.decay_steps = e.steps; }
    if (e.wsd_decay == 0) { e.wsd_decay = e.steps / 5; }
    return {{"kind", "run"}, {"flags", json::parse(options_to_json(e))}, {"build", build_description() + ", " + gemm_library()}, {"host", host_name()}, {"ranks", ranks.world->size}};
}

// What this rank has sent and waited so far, in all its groups.
inline CommStats all_stats(const Ranks& ranks) {
    CommStats sum;
    for (Comm* comm : {ranks.world, ranks.tp, ranks.dp}) {
        comm->update_stats();
        for (int t = 0; t < (int)Traffic::COUNT; t++) { sum.bytes[t] += comm->stats.bytes[t]; }
        sum.exposed_seconds += comm->stats.exposed_seconds;
    }
    return sum;
}
// A step's. Where rows of shared channels are padded, as on a GPU, the padding is sent too, and is said.
inline json bytes_record(const CommStats& before, const CommStats& after, const TensorParallel& tp) {
    auto sent = [&](Traffic t) { return after.bytes[(int)t] - before.bytes[(int)t]; };
    i64 all = 0;
    for (int t = 0; t < (int)Traffic::COUNT; t++) { all += sent((Traffic)t); }
    const i64 row = tp.sent_channels(), padding = row > 0 ? sent(Traffic::TP_LAYERS) * (row - tp.Ck) / row : 0;
    return {{"comm_bytes", all}, {"comm_bytes_tp_layers", sent(Traffic::TP_LAYERS)}, {"comm_bytes_padding", padding}, {"comm_bytes_embedding", sent(Traffic::EMBEDDING)},
            {"comm_bytes_loss", sent(Traffic::LOSS)}, {"comm_bytes_dp", sent(Traffic::DP)}, {"comm_bytes_other", sent(Traffic::OTHER)}, {"comm_exposed_seconds", after.exposed_seconds - before.exposed_seconds}};
}
