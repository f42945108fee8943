// comm_device_local.h: ranks that are threads of one process and share one GPU. Their arrays lie side by side in its memory, so an exchange
// is one kernel that reads all of them and writes all of them; the sums are those of comm.h, bit for bit.
//
//   a rank publishes its array and its event -> the last one to do so lets its own stream wait for all events, launches the kernel, and
//   opens the slot -> every rank's run waits for the kernel
//
// Only the ranks' host threads meet, and only to hand over pointers and events: no kernel waits for another.
#pragma once

#include <memory>

#include "comm_device.h"
#include "ops.h"

// What the ranks of one group share: for each slot, the exchange that they meet in.
class LocalDeviceGroup {
public:
    explicit LocalDeviceGroup(int size) : size(size) {
        check(size <= RankArrays::MOST, "%d ranks share one GPU as threads, at most %d\nHINT: start them with mpirun", size, RankArrays::MOST);
        for (Slot& slot : slots_) {
            slot.data.resize(size);
            slot.ready.resize(size);
            slot.signature.resize(size);
        }
    }
    const int size;

    // All ranks of `host` get the same group; the first one makes it.
    static std::shared_ptr<LocalDeviceGroup> meet(Comm& host) {
        std::shared_ptr<LocalDeviceGroup> mine;
        if (host.rank == 0) { mine = std::make_shared<LocalDeviceGroup>(host.size); }
        const auto* const address = &mine;
        std::vector<const std::shared_ptr<LocalDeviceGroup>*> all(host.size);
        host.share(&address, all.data(), sizeof(address));
        const std::shared_ptr<LocalDeviceGroup> group = *all[0];
        host.barrier();  // rank 0's stays until all have theirs
        return group;
    }

private:
    friend class LocalDeviceComm;
    // A rank publishes again only after it has left the slot's exchange before: so the last rank may reset the slot.
    struct Slot {
        std::vector<void*> data;         // by rank
        std::vector<cudaEvent_t> ready;  // by rank
        std::vector<size_t> signature;   // by rank: must agree
        DeviceEvent end;
        std::atomic<int> arrived{0};
        std::atomic<uint32_t> opened{0};  // how many exchanges have been opened
    };
    Slot slots_[Comm::SLOTS];
};

class LocalDeviceComm final : public DeviceComm {
public:
    LocalDeviceComm(Comm& host, Run& run) : DeviceComm(host, run), group_(LocalDeviceGroup::meet(host)) {}

private:
    void enqueue(int slot, const Exchange& exchange) override {
        LocalDeviceGroup::Slot& shared = group_->slots_[slot];
        const uint32_t mine = ++generation_[slot];
        shared.data[rank] = exchange.data;
        shared.ready[rank] = ready_[slot];
        shared.signature[rank] = exchange.signature();
        if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size) { return; }
        for (int r = 0; r < size; r++) {
            check(shared.signature[r] == shared.signature[rank], "ranks %d and %d of a group of %d call different collectives", r, rank,
                  size);
            cuda_check(cudaStreamWaitEvent(stream_, shared.ready[r], 0));
        }
        queue_kernel(exchange, shared.data);
        shared.end.record(stream_);
        shared.arrived.store(0, std::memory_order_relaxed);
        shared.opened.store(mine);  // sequentially consistent: notify looks for sleepers, which may not pass the store
        shared.opened.notify_all();
    }

    cudaEvent_t complete(int slot) override {
        LocalDeviceGroup::Slot& shared = group_->slots_[slot];
        for (uint32_t now; (now = shared.opened.load(std::memory_order_acquire)) != generation_[slot];) {
            shared.opened.wait(now, std::memory_order_acquire);
        }
        return shared.end;
    }

    void queue_kernel(const Exchange& exchange, const std::vector<void*>& data) {
        RankArrays arrays = {};
        arrays.ranks = size;
        for (int r = 0; r < size; r++) { arrays.data[r] = data[r], arrays.parts[r] = exchange.parts[r]; }
        if (exchange.reduce) { gpu::sum_over_ranks(arrays, exchange.dtype, exchange.gather, side_); }
        else { gpu::copy_over_ranks(arrays, exchange.element_bytes, side_); }
    }

    std::shared_ptr<LocalDeviceGroup> group_;
    uint32_t generation_[SLOTS] = {};
};
