// run_data.h: what a run's flags ask of the data, and what its log says of it.
#pragma once

#include <cmath>
#include <optional>

#include "dataloader.h"
#include "flags.h"
#include "json_file.h"

// Windows that --steps draw.
inline i64 windows_of_run(const Options& o) {
    i64 windows;
    return __builtin_mul_overflow(o.steps, o.global_batch, &windows) ? std::numeric_limits<i64>::max() : windows;
}

// From nats per token; not a number where the set does not know its bytes of text.
inline double bits_per_byte(double loss, const DataLoader& set) {
    const double bytes = set.text_bytes_per_token();
    return bytes > 0 ? loss / M_LN2 / bytes : NAN;
}

// What --train asks for: Megatron's order depends on how many windows the run will draw.
inline DataRequest train_request(const Options& o) {
    DataRequest r = {o.train, o.seq, o.shape.vocab, (uint64_t)o.seed, WindowOrder::automatic, {}};
    if (o.order != "auto") { r.order = o.order == "megatron" ? WindowOrder::megatron : WindowOrder::shuffled; }
    r.split = {o.split, 0};
    r.windows = windows_of_run(o);
    r.cache = o.data_cache;
    return r;
}
// Without --val, the second part of a split of --train's sets.
inline std::optional<DataRequest> val_request(const Options& o) {
    if (o.val.empty() && !DocumentSplit{o.split, 1}.names_documents()) { return {}; }
    return DataRequest{o.val.empty() ? o.train : o.val, o.seq, o.shape.vocab, 0, WindowOrder::sequential, {o.split, 1}};
}

// Share, size and epochs of each source, for the log.
inline json sources_record(const DataLoader& data) {
    json sources = json::array();
    for (size_t s = 0; s < data.sources().size(); s++) {
        const DataSource& source = data.sources()[s];
        sources.push_back({{"source", source.glob}, {"kind", source.kinds()}, {"share_wanted", source.weight}, {"tokens", source.tokens}, {"windows", source.windows()},
                           {"windows_drawn", data.state().drawn[s]}, {"share_drawn", data.share_drawn(s)}, {"epochs", data.epochs(s)}});
    }
    return sources;
}
