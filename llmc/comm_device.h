// comm_device.h: collectives on arrays in a GPU's memory, built on the host's own communicator (threads or MPI).
//
// An exchange runs on the communicator's own stream, between two events:
//
//      run.stream     ... writes data | ready | other work ...            | wait(end) | reads data ...
//      stream_                        | wait(ready) | the exchange | end
//
// so the host waits for nothing, and what the run's stream is given between start() and wait() runs beside the exchange.
#pragma once

#include <list>

#include "comm.h"

// An event that only orders work, or one that also knows its time.
class DeviceEvent {
public:
    explicit DeviceEvent(unsigned flags = cudaEventDisableTiming) { cuda_check(cudaEventCreateWithFlags(&event_, flags)); }
    DeviceEvent(const DeviceEvent&) = delete;
    ~DeviceEvent() { cudaEventDestroy(event_); }
    void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream)); }
    void hold_back(cudaStream_t stream) const { cuda_check(cudaStreamWaitEvent(stream, event_, 0)); }
    operator cudaEvent_t() const { return event_; }

private:
    cudaEvent_t event_;
};

// What communicators of GPUs have in common: streams, events, bytes, times. A kind of communicator says what an exchange is.
class DeviceComm : public Comm {
public:
    // `host`: the same ranks' communicator for values of the host's. Both outlive this.
    DeviceComm(Comm& host, Run& run) : Comm(host.rank, host.size), host_(host), run_(run) {}

    void share(const void* mine, void* all, i64 bytes) override {
        const ExposedTimer timer(stats);
        stats.bytes[(int)Traffic::OTHER] += (size - 1) * bytes;
        host_.share(mine, all, bytes);
    }
    // A wait has exposed what lies between the moment the run's stream came to it and the moment it went on.
    void update_stats() override {
        for (float milliseconds; !waits_.empty(); waits_.pop_front()) {
            const cudaError_t error = cudaEventElapsedTime(&milliseconds, waits_.front().begin, waits_.front().end);
            if (error == cudaErrorNotReady) { return; }
            cuda_check(error);
            stats.exposed_seconds += milliseconds * 1e-3;
        }
    }

protected:
    // Queues the exchange on stream_, which waits for ready_[slot], or prepares it.
    virtual void enqueue(int slot, const Exchange& exchange) = 0;
    // Queues what is left of it and returns the event at its end. The host may wait here for the other ranks' hosts.
    virtual cudaEvent_t complete(int slot) = 0;

    // What stream_ was given so far is the exchange: a timeline has its end here, not where the run waits for it.
    void record_end(int slot) {
        completed(slot, side_);
        end_[slot].record(stream_);
    }

    Comm& host_;
    Run& run_;               // the rank's own work
    Run side_{run_.gpu};     // the exchanges'
    const cudaStream_t stream_ = side_.stream;
    DeviceEvent ready_[SLOTS], end_[SLOTS];  // end_: for record_end(), where complete() needs one

private:
    void start(int slot, Exchange exchange) final {
        stats.bytes[(int)exchange.traffic] += exchange.bytes_sent(rank);  // of what is recorded: once
        ready_[slot].record(run_.stream);
        ready_[slot].hold_back(stream_);
        enqueue(slot, exchange);
    }
    void finish(int slot) final {
        const cudaEvent_t end = complete(slot);
        if (run_.recording) {  // events of a graph have no times
            cuda_check(cudaStreamWaitEvent(run_.stream, end, 0));
            return;
        }
        if (waits_.size() >= MANY_WAITS) { update_stats(); }  // where nobody asks for them
        Wait& wait = waits_.emplace_back();
        wait.begin.record(run_.stream);
        cuda_check(cudaStreamWaitEvent(run_.stream, end, 0));
        wait.end.record(run_.stream);
    }
    void copy(void* to, const void* from, i64 bytes) final {
        cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, run_.stream));
    }

    struct Wait {
        DeviceEvent begin{cudaEventDefault}, end{cudaEventDefault};
    };
    static constexpr size_t MANY_WAITS = 256;
    std::list<Wait> waits_;  // those whose times have not been looked at, in order
};
