// run_state.h: what a resumed run must find again, beside the arrays of its checkpoint: the same model, the same data at the same place.
#pragma once

#include "checkpoint_load.h"
#include "run_data.h"
#include "schedule.h"
#include "text_rule.h"

// A checkpoint's "meta".
inline json run_state(const Options& o, const DataLoader& data, uint64_t sampler, const SpikeFilter& losses, const SpikeFilter& norms, i64 updates, i64 tokens) {
    return {{"model", model_to_json(o.shape)}, {"tp", o.tp}, {"sync_factor", o.sync_factor}, {"private_scale", o.private_scale},
            {"vocab_rows_per_rank", vocab_rows_per_rank(o.shape, o.tp)}, {"options", json::parse(options_to_json(o))},
            {"data", {{"position", data.state().position}, {"drawn", data.state().drawn}, {"identity", data.identity()}, {"order", data.order_text()}}},
            {"sampler", sampler}, {"recent_losses", losses.values}, {"recent_norms", norms.values}, {"updates", updates}, {"tokens_seen", tokens}, {"tokens", token_rule(data)}};
}

// p, T and who owns a vocabulary row are part of a model with private channels. The flags were compared by name already; this
// is the law, whatever way a checkpoint came here.
inline void check_same_model(const Options& o, const Checkpoint& checkpoint) {
    const json& meta = checkpoint.meta();
    const bool plain = o.sync_factor == 1.0 && meta.at("sync_factor") == 1.0;
    const bool same = model_to_json(o.shape) == meta.at("model") && o.sync_factor == meta.at("sync_factor") &&
                      (plain || (o.tp == checkpoint.tp() && meta.at("private_scale") == json(o.private_scale) && vocab_rows_per_rank(o.shape, o.tp) == meta.at("vocab_rows_per_rank")));
    if (!same) { usage_error("'%s' holds another model: shape, --sync-factor, --tp or --private-scale differ\nHINT: leave those flags out to use the checkpoint's own", checkpoint.dir().c_str()); }
}

// Where the saved run stood in its data, which must be the same.
inline void restore_data(DataLoader& data, const Options& o, const json& meta) {
    const json& saved = meta.at("data");
    const uint64_t identity = saved.at("identity");
    const std::string order = saved.at("order");
    if (identity != data.identity()) {
        usage_error("--train '%s' is not the data of the checkpoint: other shards, --seq, --seed, --split or weights\nHINT: pass the same; a new run on other data starts with --init-from or anew",
                    o.train.c_str());
    }
    if (order != data.order_text()) {
        usage_error("the order of --train would change: the checkpoint's is %s; --order %s and --steps %lld give %s\nHINT: Megatron shuffles all epochs of a run together, so that their number is part of "
                    "the order: the run was started with --order %s --steps %s", order.c_str(), o.order.c_str(), (long long)o.steps, data.order_text().c_str(),
                    meta.at("options").at("order").get<std::string>().c_str(), meta.at("options").at("steps").dump().c_str());
    }
    data.set_state({saved.at("position"), saved.at("drawn")});
}
