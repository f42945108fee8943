// run_data.h: what a run's flags ask of the data, and what its log says of it.
#pragma once

#include <cmath>
#include <optional>

#include "dataloader.h"
#include "flags.h"
#include "json_file.h"
#include "logger.h"

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

// A source in the box that a run begins with.
inline std::string describe(const DataSource& source) {
    return format("%s: %s, %s tokens in %zu file%s, %lld windows", source.glob.c_str(), source.kinds().c_str(), human_count((double)source.tokens).c_str(), source.files.size(),
                  source.files.size() == 1 ? "" : "s", (long long)source.windows()) +
           (source.order ? "" : format(", %lld tokens left over", (long long)source.left_over));
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

// A source that repeats is said when it does. `before`: of the stream, a step ago.
inline void report_epochs(const DataLoader& data, const StreamState& before, i64 step, Logger& log) {
    for (size_t s = 0; s < data.sources().size(); s++) {
        const i64 epoch = data.epochs_begun(s, data.state());
        if (epoch < 2 || epoch == data.epochs_begun(s, before)) { continue; }
        const std::string& glob = data.sources()[s].glob;
        log.line("step %lld | source %s begins its epoch %lld", (long long)step, glob.c_str(), (long long)epoch);
        log.record({{"kind", "epoch"}, {"step", step}, {"source", glob}, {"epoch", epoch}});
    }
}
// At the end of a run: what was drawn.
inline void report_shares(const DataLoader& data, i64 step, Logger& log) {
    for (size_t s = 0; s < data.sources().size(); s++) {
        const DataSource& source = data.sources()[s];
        const std::string share = data.sources().size() > 1 ? format("share %.4f wanted, %.4f drawn; ", source.weight, data.share_drawn(s)) : "";
        log.line("source %s: %s%.2f epochs", source.glob.c_str(), share.c_str(), data.epochs(s));
    }
    log.record({{"kind", "data"}, {"step", step}, {"sources", sources_record(data)}});
}
