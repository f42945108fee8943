// comm_device.h: collectives on arrays in a GPU's memory, built on the host's own communicator (threads or MPI).
//
// An exchange runs on the communicator's own stream, between two events:
//
//      run.stream    ... writes data | ready . private products ... . wait(end) | reads data ...
//      stream                          wait(ready) | the exchange | end
//
// so the host waits for nothing, and whatever the run's stream is given between start() and wait() runs beside the exchange.
#pragma once

#include <deque>

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
    DeviceComm(Comm& host, Run& run) : Comm(host.rank, host.size), host_(host), run_(run) {
        cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    }
    ~DeviceComm() override { cudaStreamDestroy(stream_); }

    void share(const void* mine, void* all, i64 bytes) override {
        const ExposedTimer timer(stats);
        stats.bytes[(int)Traffic::OTHER] += (size - 1) * bytes;
        host_.share(mine, all, bytes);
    }

protected:
    // Queues the exchange on stream_, which waits for ready_[slot], or prepares it.
    virtual void enqueue(int slot, const Exchange& exchange) = 0;
    // Queues what is left of it and returns the event at its end. The host may wait here for the other ranks' hosts.
    virtual cudaEvent_t complete(int slot) = 0;

    Comm& host_;
    Run& run_;
    cudaStream_t stream_;
    DeviceEvent ready_[SLOTS], end_[SLOTS];  // end_: for complete() to record and return, where it needs one

private:
    void start(int slot, Exchange exchange) final {
        stats.bytes[(int)exchange.traffic] += exchange.bytes_sent(rank);
        ready_[slot].record(run_.stream);
        ready_[slot].hold_back(stream_);
        enqueue(slot, exchange);
    }
    void finish(int slot) final { cuda_check(cudaStreamWaitEvent(run_.stream, complete(slot), 0)); }
    void copy(void* to, const void* from, i64 bytes) final {
        cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, run_.stream));
    }
};
