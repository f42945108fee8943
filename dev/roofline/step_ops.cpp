// step_ops: the ops and collectives of one optimiser step, in the order in which train_gpt.cu calls them, as JSON Lines.
//
//   build/step_ops FLAG...          rank 0's calls with their arguments. Nothing is computed and no memory touched: any model, T and D
//   build/step_ops --time FLAG...   makes the calls on one rank, random weights and tokens, and adds the seconds of each; then whole steps
//
// FLAG: ./train_gpt's; bf16 unless --dtype says otherwise. The step has two micro-batches (--micro-batches N: as many), so that both kinds are there: the
// first writes gradients, the second adds to them. Lines, one a call:
//   {"op": name, "flops": of its formula, "bytes": of its arrays, argument: value, ...}   an array by the type of its elements, "" where it is null; Blocks by Ck and wire
//   {"start": id, "group": "tp" or "dp", "layers": whether a partial channel reduce, "bytes": that this rank sends, "blocking": bool}
//   {"wait": id}
//   {"steps": n, "seconds": of all of them, "tokens": in all of them}      with --time, at the end: steps whose ops are not timed
#include <sys/syscall.h>

#include <cinttypes>
#include <numeric>
#include <optional>
#include <random>

#include "llmc/checkpoint_load.h"
#include "llmc/checkpoint_save.h"
#include "llmc/dataloader.h"
#include "llmc/device_rank.h"
#include "llmc/flags.h"
#include "llmc/huggingface_export.h"
#include "llmc/init.h"
#include "llmc/launch.h"
#include "llmc/logger.h"
#include "llmc/read_ahead.h"
#include "llmc/schedule.h"
#include "llmc/tensors.h"
#include "llmc/timed_ops.h"
#include "llmc/tokenizer.h"

namespace traced {

std::vector<json> calls;
bool make_calls = false;  // else they are only noted
bool timing = true;       // else they are only made

struct Interval {
    size_t call;
    Moment begin, end;
};
std::vector<Interval> intervals;

// One call of an op, noted when it begins and timed until it leaves its scope.
class Call {
public:
    Call(Run& run, const char* op, const std::function<json()>& arguments, const std::function<Cost()>& cost) : run_(run) {
        if (!timing) { return; }
        index_ = calls.size();
        calls.push_back(arguments());
        calls.back().update({{"op", op}, {"flops", cost().flops}, {"bytes", cost().bytes}});
        if (make_calls) { begin_.emplace(run); }
    }
    ~Call() {
        if (begin_) { intervals.push_back({index_, *begin_, Moment(run_)}); }
    }
    Call(const Call&) = delete;
    bool made() const { return make_calls; }

private:
    Run& run_;
    size_t index_ = 0;
    std::optional<Moment> begin_;
};

inline json value(const float* p) { return p ? "fp32" : ""; }
inline json value(const bf16* p) { return p ? "bf16" : ""; }
inline json value(const int* p) { return p ? "int32" : ""; }
inline json value(const void* p) { return p ? "void" : ""; }
inline json value(Gradient g) { return g ? dtype_name(g.dtype) : ""; }
template <typename X>
json value(const Blocks<X>* b) { return b ? json{{"Ck", b->Ck}, {"wire", dtype_name(b->wire)}} : json(""); }
inline json value(bool b) { return b; }
inline json value(i64 n) { return n; }
inline json value(float x) { return x; }
inline json value(Range r) { return r.size(); }
inline json value(const std::vector<GradientPiece>& pieces) {
    return std::accumulate(pieces.begin(), pieces.end(), (i64)0, [](i64 sum, const GradientPiece& piece) { return sum + piece.count; });
}
inline json value(DType t) { return dtype_name(t); }
inline json value(GradMode mode) { return mode == GradMode::ADD ? "add" : "write"; }
inline json value(NormKind kind) { return kind.rms ? "rms" : "layer"; }
inline json value(const AdamW&) { return json(); }
inline json value(const Sampling& how) { return how.temperature; }

// One of `size` ranks, the others of which are only counted.
class TracedComm : public Comm {
public:
    TracedComm(const char* group, int size) : Comm(0, size), group_(group) {}
    void share(const void* mine, void* all, i64 bytes) override {
        for (int r = 0; r < size; r++) { memcpy((char*)all + r * bytes, mine, bytes); }
    }

private:
    void start(int slot, Exchange exchange) override {
        id_[slot] = ++last_id;
        calls.push_back({{"start", id_[slot]}, {"group", group_}, {"layers", exchange.traffic == Traffic::TP_LAYERS}, {"bytes", exchange.bytes_sent(rank)}, {"blocking", slot == BLOCKING_SLOT}});
    }
    void finish(int slot) override { calls.push_back({{"wait", id_[slot]}}); }
    void copy(void*, const void*, i64) override {}

    inline static i64 last_id = 0;
    const char* group_;
    i64 id_[SLOTS] = {};
};

}  // namespace traced

#include "traced_ops.h"  // from here on, an op's name is the wrapper's

#include "llmc/tp.h"
#include "llmc/zero.h"

#define main train_gpt_main
#include "train_gpt.cu"
#undef main

// A trainer's memory is planned, allocated and, unless ops are made, never touched: the kernel need not have it.
#ifndef LLMC_CUDA
extern "C" void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
    return (void*)syscall(SYS_mmap, at, bytes, protection, flags | MAP_NORESERVE, file, offset);
}
#endif

// Weights for speed alone: normal ones, which keep a GPU as busy as real ones do, from a table.
void plausible_weights(const Tensor& t, Range, float* values) {
    constexpr size_t MANY = 65521;
    static const std::vector<float> table = [] {
        std::mt19937 random(2);
        std::normal_distribution<float> normal(0.0f, 0.02f);
        std::vector<float> drawn(MANY);
        for (float& value : drawn) { value = normal(random); }
        return drawn;
    }();
    for (i64 i = 0; i < t.count(); i++) { values[i] = t.spec.init == Init::ONE ? 1.0f : table[i % MANY]; }
}

template <typename X>
void trace_step(const Options& o, Ranks& ranks, Run& run) {
    Trainer<X> trainer(o, ranks, run, true);
    trainer.allocate();
    std::vector<int32_t> windows(o.global_batch / o.dp * (o.seq + 1));
    if (traced::make_calls) {
        trainer.load({plausible_weights});
        std::mt19937 random(1);
        for (int32_t& token : windows) { token = (int32_t)(random() % o.shape.vocab); }
        trainer.step(windows.data(), 1);  // caches, clocks, plans of products
        traced::calls.clear(), traced::intervals.clear();
    }
    const StepResult result = trainer.step(windows.data(), 2);
    check(!traced::make_calls || std::isfinite(result.loss + result.grad_norm), "loss %g, gradient norm %g", result.loss, result.grad_norm);
    if (!traced::make_calls) { return; }
    for (const traced::Interval& i : traced::intervals) { traced::calls[i.call]["seconds"] = seconds_between(i.begin, i.end); }
    traced::intervals.clear();  // events, which must not outlive CUDA
    traced::timing = false;
    constexpr int STEPS = 2;
    const Moment begin(run);
    for (int step = 0; step < STEPS; step++) { trainer.step(windows.data(), 3 + step); }
    const Moment end(run);
    traced::calls.push_back({{"steps", STEPS}, {"seconds", seconds_between(begin, end)}, {"tokens", STEPS * o.global_batch * o.seq}});
}

int trace(const Options& o) {
    const auto of_type = [&](Ranks& ranks, Run& run) {
        o.dtype == "fp32" ? trace_step<float>(o, ranks, run) : trace_step<bf16>(o, ranks, run);
        for (const json& call : traced::calls) { printf("%s\n", call.dump().c_str()); }
        return EXIT_OK;
    };
    if (traced::make_calls) {
        return launch(1, 1, [&](Ranks& host) {
            DeviceRank rank(host, o.threads, o.comm_timeout);
            return of_type(rank.ranks, rank.run);
        });
    }
    traced::TracedComm world("world", o.tp * o.dp), tp("tp", o.tp), dp("dp", o.dp);
    Ranks ranks = {&world, &tp, &dp, 1};
    Run run = planning_run();
    return of_type(ranks, run);
}

int main(int argc, char** argv) {
    try {
        std::vector<char*> flags(argv, argv + argc);
        const auto time = std::find_if(flags.begin(), flags.end(), [](const char* flag) { return std::string("--time") == flag; });
        if (time != flags.end()) { flags.erase(time), traced::make_calls = true; }
        i64 micro_batches = 2;
        const auto count = std::find_if(flags.begin(), flags.end(), [](const char* flag) { return std::string("--micro-batches") == flag; });
        if (flags.end() - count > 1) { micro_batches = std::max(atoll(count[1]), 1LL), flags.erase(count, count + 2); }
        std::string dry = "--dry-run";
        flags.push_back(dry.data());
        Options o;
        if (!parse_options((int)flags.size(), flags.data(), true, o)) { return EXIT_OK; }
        if (traced::make_calls && (o.tp > 1 || o.dp > 1)) { usage_error("--time is for one rank: there are --tp %d and --dp %d", o.tp, o.dp); }
        o = on_ranks(o, std::max(o.dp, 1));
        o.global_batch = micro_batches * o.micro_batch * o.dp;
        if (o.dtype == "auto") { o.dtype = "bf16"; }
        return trace(o);
    } catch (const std::exception& error) {
        return report_error(error);
    }
}
