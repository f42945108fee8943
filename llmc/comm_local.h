// comm_local.h: ranks that are threads of one process. They add in place in each other's buffers: no copies, no staging.
#pragma once

#include "comm.h"

// What the ranks of one group share: for each slot, the exchange that they meet in.
//
//   a rank publishes its buffer -> the last one to do so opens the slot -> whoever waits takes items of work until none
//   is left -> the slot is complete
//
// An item is a run of elements of one part: it alone reads and writes them, on all ranks, so working in place is safe.
// Items are taken by whoever comes first, not by the owner of the part: a rank that has nothing else to do carries on
// for one that still computes. The sums are in rank order whoever adds them.
class LocalGroup {
public:
    // spin: how often a waiting rank looks before it sleeps; above 0 only where every thread of the job has a core.
    explicit LocalGroup(int size, int spin = 0) : size(size), spin(spin) {
        for (Slot& slot : slots_) {
            slot.data.resize(size);
            slot.signature.resize(size);
        }
    }
    const int size, spin;

private:
    friend class LocalComm;
    // All of a rank's stores to a slot happen before the slot opens; the last rank to publish resets it. That is safe since
    // a rank publishes again only after it has left the slot's exchange before: so nobody is in it any more.
    // 32 bits are what a futex is made of.
    struct Slot {
        std::vector<void*> data;        // by rank
        std::vector<size_t> signature;  // by rank: must agree
        std::atomic<int> arrived{0};
        alignas(64) std::atomic<uint32_t> opened{0};  // how many exchanges have been opened
        alignas(64) std::atomic<i64> next_item{0};
        alignas(64) std::atomic<uint32_t> items_left{0};
    };
    Slot slots_[Comm::SLOTS];
};

class LocalComm final : public Comm {
public:
    LocalComm(LocalGroup& group, int rank) : Comm(rank, group.size), group_(group) {}

private:
    // Large enough that taking an item costs nothing, small enough to share evenly; bytes of one rank's buffer.
    static constexpr i64 ITEM_BYTES = 64 << 10;

    // This rank's view of the exchange in a slot.
    struct Mine {
        Exchange exchange;
        i64 item_elements;
        uint32_t generation = 0;
    };

    void start(int slot, Exchange exchange) override {
        LocalGroup::Slot& shared = group_.slots_[slot];
        Mine& mine = mine_[slot];
        mine.exchange = std::move(exchange);
        mine.item_elements = std::max<i64>(1, ITEM_BYTES / mine.exchange.element_bytes);
        mine.generation++;
        stats.bytes[(int)mine.exchange.traffic] += mine.exchange.bytes_sent(rank);

        shared.data[rank] = mine.exchange.data;
        shared.signature[rank] = mine.exchange.signature();
        if (shared.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size) { return; }
        for (int r = 0; r < size; r++) {
            check(shared.signature[r] == shared.signature[rank], "ranks %d and %d of a group of %d call different collectives", r, rank,
                  size);
        }
        shared.arrived.store(0, std::memory_order_relaxed);
        shared.next_item.store(0, std::memory_order_relaxed);
        shared.items_left.store((uint32_t)items(mine), std::memory_order_relaxed);
        shared.opened.store(mine.generation);  // sequentially consistent: notify looks for sleepers, which may not pass the store
        shared.opened.notify_all();
    }

    void finish(int slot) override {
        const ExposedTimer timer(stats);
        LocalGroup::Slot& shared = group_.slots_[slot];
        const Mine& mine = mine_[slot];
        sleep_until(shared.opened, mine.generation);
        const i64 count = items(mine);
        for (i64 item; (item = shared.next_item.fetch_add(1, std::memory_order_relaxed)) < count;) {
            work(mine, shared.data, item);
            if (shared.items_left.fetch_sub(1, std::memory_order_acq_rel) == 1) { shared.items_left.notify_all(); }
        }
        sleep_until(shared.items_left, 0);
    }

    // A rank that waits does items of those it waits for, if it was given that to do: two ranks on two cores then lose little to each other's pace.
    // Where there are none just now it looks again, busily and then less so; in the end it sleeps until it is woken.
    void sleep_until(std::atomic<uint32_t>& word, uint32_t wanted) const {
        constexpr int NAPS = 300;
        const int patience = group_.spin + (meanwhile && group_.spin > 0 ? NAPS : 0);
        for (int idle = 0; word.load(std::memory_order_acquire) != wanted;) {
            if (meanwhile && meanwhile()) {
                idle = 0;
            } else if (idle == patience) {
                break;
            } else if (idle++ < group_.spin) {
                __builtin_ia32_pause();
            } else {
                std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        }
        for (uint32_t now; (now = word.load(std::memory_order_acquire)) != wanted;) { word.wait(now, std::memory_order_acquire); }
    }

    static i64 items(const Mine& mine) {
        i64 count = 0;
        for (const Range& part : mine.exchange.parts) { count += ceil_div(part.size(), mine.item_elements); }
        return count;
    }

    static void work(const Mine& mine, const std::vector<void*>& data, i64 item) {
        const Exchange& exchange = mine.exchange;
        int owner = 0;
        for (i64 n; item >= (n = ceil_div(exchange.parts[owner].size(), mine.item_elements)); owner++) { item -= n; }
        const i64 begin = exchange.parts[owner].begin + item * mine.item_elements;
        const i64 count = std::min(mine.item_elements, exchange.parts[owner].end - begin);

        std::vector<void*> at;  // the item in each rank's buffer
        for (void* base : data) { at.push_back((char*)base + begin * exchange.element_bytes); }
        if (exchange.reduce) {
            const std::vector<const void*> in(at.begin(), at.end());
            sum_in_rank_order(exchange.dtype, exchange.gather ? at : std::vector<void*>{at[owner]}, in, count);
        } else {
            for (void* place : at) {
                if (place != at[owner]) { memcpy(place, at[owner], count * exchange.element_bytes); }
            }
        }
    }

    LocalGroup& group_;
    Mine mine_[SLOTS];
};
