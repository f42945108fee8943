// comm_nccl.cpp: the exchange of comm.h as calls of NCCL's.
//
//   all-reduce                    ncclAllReduce in the wire's type
//   reduce-scatter, all-gather    the collective of that name where the parts are equal and lie in rank order; else a reduce to, or a
//                                 broadcast from, each part's owner, in one group, so that NCCL runs them together
//
// All exchanges of a rank go through one stream, in the order of their starts, as NCCL demands. NCCL adds in an order of its own, and
// rounds bf16 at every step of it: bits are not those of threads or MPI, which add in fp32 in rank order and round once.
#include "comm_nccl.h"

#ifndef LLMC_NCCL
#define LLMC_NCCL 1
#endif

#if LLMC_NCCL

#include <nccl.h>

#include <optional>
#include <thread>

namespace {

void nccl_check(ncclResult_t result, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (result == ncclSuccess) [[likely]] { return; }
    die("%s:%d: NCCL: %s: %s", file, line, ncclGetErrorString(result), ncclGetLastError(nullptr));
}

class NcclComm final : public DeviceComm {
public:
    NcclComm(Comm& host, Run& run, double timeout) : DeviceComm(host, run), timeout_(timeout) {
        if (size == 1) { return; }
        // A rank's groups run beside each other. In the order in which its host queues them, they cannot wait for each other in a circle.
        setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", /*overwrite=*/0);
        ncclUniqueId mine = {};
        std::vector<ncclUniqueId> all(size);
        if (rank == 0) { nccl_check(ncclGetUniqueId(&mine)); }
        host.share(&mine, all.data(), sizeof(mine));
        nccl_check(ncclCommInitRank(&comm_, size, all[0], rank));
    }
    // What is under way when a rank fails may never end, and everything else on this device would wait for it.
    ~NcclComm() override {
        if (comm_) { std::uncaught_exceptions() > 0 ? ncclCommAbort(comm_) : ncclCommDestroy(comm_); }
    }

    bool can_be_recorded() const override { return true; }

    void poll() override {
        if (!comm_) { return; }
        ncclResult_t state = ncclSuccess;
        nccl_check(ncclCommGetAsyncError(comm_, &state));
        if (state != ncclSuccess && state != ncclInProgress) {
            const std::string reason = format("%s: %s", ncclGetErrorString(state), ncclGetLastError(comm_));
            ncclCommAbort(std::exchange(comm_, nullptr));
            std::this_thread::sleep_for(std::chrono::seconds(1));  // another rank has left, as a rule, and knows why: it speaks first
            give_up(reason);
        }
        for (int slot = 0; slot < SLOTS; slot++) {
            if (!deadline_[slot] || Clock::now() < *deadline_[slot]) { continue; }
            if (cudaEventQuery(end_[slot]) == cudaErrorNotReady) {
                give_up(format("a collective of rank %d of %d has not ended within %g s", rank, size, timeout_));
            }
            deadline_[slot].reset();
        }
        if (recorded_ && replays_ != run_.replays) { replays_ = run_.replays, replay_deadline_ = deadline(); }
        if (replay_deadline_ && Clock::now() >= *replay_deadline_) {
            if (cudaStreamQuery(run_.stream) == cudaErrorNotReady) {
                give_up(format("recorded collectives of rank %d of %d have not ended within %g s", rank, size, timeout_));
            }
            replay_deadline_.reset();
        }
    }

private:
    using Clock = std::chrono::steady_clock;

    [[noreturn]] void give_up(const std::string& reason) {
        if (comm_) { ncclCommAbort(std::exchange(comm_, nullptr)); }
        die("NCCL: %s\nHINT: did another rank fail, or hang? NCCL_DEBUG=INFO tells more; --comm-timeout gives it more time", reason.c_str());
    }

    void enqueue(int slot, const Exchange& exchange) override {
        nccl_check(ncclGroupStart());
        const bool in_order = lie_in_order(exchange.parts), equal = in_order && all_equal(exchange.parts);
        if (exchange.reduce && exchange.gather && in_order) {
            all_reduce(exchange, {exchange.parts.front().begin, exchange.parts.back().end});
        } else if (equal && exchange.reduce != exchange.gather) {
            exchange.reduce ? reduce_scatter(exchange) : all_gather(exchange);
        } else {
            for (int owner = 0; owner < size; owner++) { part(exchange, owner); }
        }
        nccl_check(ncclGroupEnd());
        record_end(slot);
        if (run_.recording) {
            recorded_ = true, deadline_[slot].reset();
        } else {
            deadline_[slot] = deadline();
            replays_ = run_.replays, replay_deadline_.reset();  // graphs have ended, or this exchange waits for them
        }
    }
    cudaEvent_t complete(int slot) override { return end_[slot]; }

    Clock::time_point deadline() const { return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_)); }

    static bool lie_in_order(const std::vector<Range>& parts) {
        return std::adjacent_find(parts.begin(), parts.end(), [](Range a, Range b) { return a.end != b.begin; }) == parts.end();
    }
    static bool all_equal(const std::vector<Range>& parts) {
        return std::adjacent_find(parts.begin(), parts.end(), [](Range a, Range b) { return a.size() != b.size(); }) == parts.end();
    }
    static ncclDataType_t type(const Exchange& exchange) { return exchange.dtype == DType::BF16 ? ncclBfloat16 : ncclFloat32; }

    void all_reduce(const Exchange& exchange, Range range) {
        char* data = exchange.at(range.begin);
        nccl_check(ncclAllReduce(data, data, range.size(), type(exchange), ncclSum, comm_, stream_));
    }
    void reduce_scatter(const Exchange& exchange) {
        const Range mine = exchange.parts[rank];
        nccl_check(ncclReduceScatter(exchange.at(exchange.parts[0].begin), exchange.at(mine.begin), mine.size(), type(exchange), ncclSum,
                                     comm_, stream_));
    }
    void all_gather(const Exchange& exchange) {
        const Range mine = exchange.parts[rank];
        nccl_check(ncclAllGather(exchange.at(mine.begin), exchange.at(exchange.parts[0].begin), mine.size() * exchange.element_bytes,
                                 ncclInt8, comm_, stream_));
    }
    void part(const Exchange& exchange, int owner) {
        const Range range = exchange.parts[owner];
        char* data = exchange.at(range.begin);
        if (exchange.reduce && exchange.gather) {
            all_reduce(exchange, range);
        } else if (exchange.reduce) {
            nccl_check(ncclReduce(data, data, range.size(), type(exchange), ncclSum, owner, comm_, stream_));
        } else {
            nccl_check(ncclBroadcast(data, data, range.size() * exchange.element_bytes, ncclInt8, owner, comm_, stream_));
        }
    }

    const double timeout_;
    ncclComm_t comm_ = nullptr;
    std::optional<Clock::time_point> deadline_[SLOTS];  // of the last exchange in the slot; none: it has ended, or was recorded
    bool recorded_ = false;                             // exchanges are in a graph
    i64 replays_ = 0;                                   // of the run, when they were last looked at
    std::optional<Clock::time_point> replay_deadline_;  // of the graph that was launched last
};

}  // namespace

namespace nccl {

const bool BUILT = true;
std::unique_ptr<DeviceComm> group(Comm& host, Run& run, double timeout) { return std::make_unique<NcclComm>(host, run, timeout); }

}  // namespace nccl

#else

namespace nccl {

const bool BUILT = false;
std::unique_ptr<DeviceComm> group(Comm&, Run&, double) { die("this build has no NCCL\nHINT: build with NCCL=1"); }

}  // namespace nccl

#endif
