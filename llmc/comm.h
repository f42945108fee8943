// comm.h: what ranks say to each other. One interface; behind it threads of one process (comm_local.h) or MPI (comm_mpi.h), and for
// arrays on a GPU what comm_device.h builds on those.
//
// Arrays lie where kernels reach them; a collective on them comes after what the rank's Run was given before, and what the Run is given
// after wait() comes after the collective. Values of the host's (losses, norms, texts) go through share().
//
// A sum over ranks is a direct exchange: the owner of each element adds s0 + s1 + ... in rank order in fp32, rounds once to
// the type on the wire, and sends the sum to all. The bytes are those of a ring, 2(T-1)/T times the payload for each rank,
// and the bits are the same for threads, for MPI and for any split into pieces.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>

#include "timeline.h"

// What bytes are sent for, as the log reports them.
enum class Traffic { TP_LAYERS, EMBEDDING, LOSS, DP, OTHER, COUNT };
constexpr const char* TRAFFIC_NAMES[] = {"partial channel reduce", "embedding", "loss", "data parallel", "other"};

struct CommStats {
    i64 bytes[(int)Traffic::COUNT] = {};  // sent by this rank
    double exposed_seconds = 0;           // time spent waiting, in which this rank's own work stood still
};

// Counts its own lifetime as exposed: a host that waits.
class ExposedTimer {
public:
    explicit ExposedTimer(CommStats& stats) : stats_(stats) {}
    ExposedTimer(const ExposedTimer&) = delete;
    ~ExposedTimer() { stats_.exposed_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

private:
    CommStats& stats_;
    const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Every collective is this one: all ranks hold the same array, and each element of it is owned by one rank, or by none.
//   reduce: the owner of an element adds all ranks' values of it.     reduce and gather: an all-reduce
//   gather: everyone gets the owner's value.                          reduce alone: a reduce-scatter; gather alone: an all-gather
struct Exchange {
    void* data;
    i64 element_bytes;
    DType dtype;               // of the elements, where they are added
    std::vector<Range> parts;  // parts[r], in elements, is rank r's. Disjoint; may be empty, and need not cover the array
    bool reduce, gather;
    Traffic traffic;

    char* at(i64 element) const { return (char*)data + element * element_bytes; }

    // What rank `rank` sends: its values of the others' parts to their owners, and its own part to each of the others.
    i64 bytes_sent(int rank) const {
        i64 elements = 0;
        for (int peer = 0; peer < (int)parts.size(); peer++) {
            if (peer == rank) { continue; }
            if (reduce) { elements += parts[peer].size(); }
            if (gather) { elements += parts[rank].size(); }
        }
        return elements * element_bytes;
    }
    // What all ranks must agree on. A difference is a bug that would otherwise show as a hang or as wrong numbers.
    size_t signature() const {
        size_t hash = element_bytes * 8 + (size_t)dtype * 4 + reduce * 2 + gather;
        for (const Range& part : parts) {
            for (i64 end : {part.begin, part.end}) { hash = (hash ^ (size_t)end) * 0x9E3779B97F4A7C15; }
        }
        return hash;
    }
};

// One group of ranks, as one of them sees it. All ranks of a group make the same calls in the same order.
// A rank makes its calls from one thread. Every wait sleeps or yields: ranks may share cores.
class Comm {
public:
    using Ticket = i64;  // 0: nothing to wait for
    // A slot holds one exchange at a time; those in different slots proceed independently.
    static constexpr int MAX_IN_FLIGHT = 8, BLOCKING_SLOT = MAX_IN_FLIGHT, SLOTS = MAX_IN_FLIGHT + 1;

    Comm(int rank, int size) : rank(rank), size(size) {}
    Comm(const Comm&) = delete;
    Comm& operator=(const Comm&) = delete;
    virtual ~Comm() = default;

    // data[0, count) = sum over ranks, in place. Nobody may touch data between start and wait. Up to MAX_IN_FLIGHT are in
    // flight at once, besides the blocking calls below, which may be made meanwhile.
    Ticket start_all_reduce(void* data, i64 count, DType dtype, Traffic traffic) {
        std::vector<Range> parts(size);
        for (int r = 0; r < size; r++) { parts[r] = split_range(count, size, r); }
        return start_in_flight({data, dtype_bytes(dtype), dtype, std::move(parts), /*reduce=*/true, /*gather=*/true, traffic});
    }
    // reduce_scatter, below, in the same way.
    Ticket start_reduce_scatter(void* data, DType dtype, const std::vector<Range>& ranges, Traffic traffic) {
        return start_in_flight({data, dtype_bytes(dtype), dtype, ranges, /*reduce=*/true, /*gather=*/false, traffic});
    }
    // all_gather_ranges, below, in the same way.
    Ticket start_all_gather_ranges(void* data, i64 element_bytes, const std::vector<Range>& ranges, Traffic traffic) {
        return start_in_flight({data, element_bytes, DType::FP32, ranges, /*reduce=*/false, /*gather=*/true, traffic});
    }
    // all_gather, below, in the same way; `mine` is free on return.
    Ticket start_all_gather(const void* mine, void* all, i64 bytes, Traffic traffic) {
        return start_in_flight({all, 1, DType::FP32, place_in_all(mine, all, bytes), /*reduce=*/false, /*gather=*/true, traffic});
    }
    // Waiting again for what is done is harmless.
    void wait(Ticket ticket) {
        Ticket& in_flight = in_flight_[ticket % MAX_IN_FLIGHT];
        if (ticket == 0 || in_flight != ticket) { return; }
        finish_timed((int)(ticket % MAX_IN_FLIGHT));
        in_flight = 0;
    }
    // Moves bytes along, where nothing else would. Cheap; called between blocks of a GEMM.
    virtual void poll() {}
    // What a rank that waits may do meanwhile: a little work, or nothing (false). May be empty.
    std::function<bool()> meanwhile;

    void all_reduce(void* data, i64 count, DType dtype, Traffic traffic) { wait(start_all_reduce(data, count, dtype, traffic)); }

    // all[r * bytes, (r + 1) * bytes) = rank r's `mine`, for every r. `mine` may be its place in `all`.
    void all_gather(const void* mine, void* all, i64 bytes, Traffic traffic) {
        all_gather_ranges(all, 1, place_in_all(mine, all, bytes), traffic);
    }
    // data[ranges[rank]] = sum over ranks of their data[ranges[rank]]; all else keeps what it had. One range a rank, disjoint.
    void reduce_scatter(void* data, DType dtype, const std::vector<Range>& ranges, Traffic traffic) {
        exchange({data, dtype_bytes(dtype), dtype, ranges, /*reduce=*/true, /*gather=*/false, traffic});
    }
    // Every rank's data[ranges[r]] = rank r's, for every r. Elements of element_bytes.
    void all_gather_ranges(void* data, i64 element_bytes, const std::vector<Range>& ranges, Traffic traffic) {
        exchange({data, element_bytes, DType::FP32, ranges, /*reduce=*/false, /*gather=*/true, traffic});
    }
    // Whether exchanges may be in what Run::replay does: then ranks meet on the device alone.
    virtual bool can_be_recorded() const { return size == 1; }
    // Any exchange, complete on return.
    void exchange(Exchange exchange) {
        if (is_nothing(exchange)) { return; }
        start_timed(BLOCKING_SLOT, std::move(exchange));
        finish_timed(BLOCKING_SLOT);
    }

    // all_gather of values that lie in the host's memory, complete on return.
    virtual void share(const void* mine, void* all, i64 bytes) { all_gather(mine, all, bytes, Traffic::OTHER); }
    void barrier() {
        char mine = 0;
        std::vector<char> all(size);
        share(&mine, all.data(), 1);
    }

    const int rank, size;
    CommStats stats;
    // Brings `stats` up to date, where times are known later than their waits.
    virtual void update_stats() {}
    Timeline* timeline = nullptr;  // where collectives and waits for them are noted; null: nowhere

protected:
    // What a communicator implements. An exchange is never empty, and has at least two ranks.
    virtual void start(int slot, Exchange exchange) = 0;
    virtual void finish(int slot) = 0;
    // An exchange may be known to be complete before finish().
    void completed(int slot) {
        if (timeline) { timeline->close(span_[slot]); }
    }
    void completed(int slot, Run& where) {  // by what `where` was given so far
        if (timeline) { timeline->close(span_[slot], where); }
    }
    // Within this rank's memory, in order with its other work.
    virtual void copy(void* to, const void* from, i64 bytes) { memcpy(to, from, bytes); }

private:
    bool is_nothing(const Exchange& exchange) const {
        check((int)exchange.parts.size() == size, "%zu ranges given to a group of %d ranks", exchange.parts.size(), size);
        return size == 1 || std::all_of(exchange.parts.begin(), exchange.parts.end(), [](const Range& part) { return part.size() == 0; });
    }
    // Puts this rank's bytes where an all_gather has them, and says where everybody's are.
    std::vector<Range> place_in_all(const void* mine, void* all, i64 bytes) {
        char* place = (char*)all + rank * bytes;
        if (place != mine && bytes > 0) { copy(place, mine, bytes); }
        std::vector<Range> parts(size);
        for (int r = 0; r < size; r++) { parts[r] = {r * bytes, (r + 1) * bytes}; }
        return parts;
    }
    Ticket start_in_flight(Exchange exchange) {
        if (is_nothing(exchange)) { return 0; }
        const Ticket ticket = ++started_;
        Ticket& in_flight = in_flight_[ticket % MAX_IN_FLIGHT];
        check(in_flight == 0, "%d collectives are in flight: wait for ticket %lld before starting another", MAX_IN_FLIGHT,
              (long long)in_flight);
        in_flight = ticket;
        start_timed((int)(ticket % MAX_IN_FLIGHT), std::move(exchange));
        return ticket;
    }

    void start_timed(int slot, Exchange exchange) {
        if (timeline) { span_[slot] = timeline->open(TRAFFIC_NAMES[(int)exchange.traffic], Timeline::SUMS, {0, (double)exchange.bytes_sent(rank)}); }
        start(slot, std::move(exchange));
    }
    void finish_timed(int slot) {
        {
            const Timeline::Scope scope(timeline, "waiting for ranks", [] { return Cost(); });
            finish(slot);
        }
        completed(slot);
    }

    int span_[SLOTS] = {};
    Ticket started_ = 0;
    Ticket in_flight_[MAX_IN_FLIGHT] = {};  // by slot; 0: free
};

// The groups that one rank belongs to. World rank = dp.rank * tp.size + tp.rank.
struct Ranks {
    Comm *world, *tp, *dp;
    int ranks_on_host;      // how many of the job's ranks share this host: they divide its threads
    int rank_on_host = 0;   // this one's place among them
    int ranks_on_device = ranks_on_host;  // how many share the memory that arrays lie in

    // The rank's loops keep its collectives going, and its waits go on with the loops of other ranks.
    void connect(Run& run) {
        run.poll = [this] { tp->poll(), dp->poll(); };
        for (Comm* comm : {world, tp, dp}) {
            comm->meanwhile = [&run] { return run.help_others(); };
        }
    }
};

// Refuses a job whose ranks see different things where they must see the same: `what` says what they looked at. All ranks throw alike.
inline void check_ranks_agree(Ranks& ranks, const std::string& what, i64 value) {
    std::vector<i64> all(ranks.world->size);
    ranks.world->share(&value, all.data(), sizeof(i64));
    for (int r = 1; r < ranks.world->size; r++) {
        check(all[r] == all[0], "%s: rank 0 has %lld, rank %d has %lld\nHINT: do all hosts see the same files?", what.c_str(),
              (long long)all[0], r, (long long)all[r]);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The sum, for communicators that add on the CPU: one routine, so that all give the same bits.

constexpr i64 SUM_BLOCK = 1024;  // elements whose fp32 sums stay in the L1 cache

// One block: out[o][begin, begin + n) for every o. A constant n lets -O2 vectorise.
template <typename X, typename N>
inline void sum_block(const std::vector<X*>& out, const std::vector<const X*>& in, i64 begin, N n) {
    float sum[SUM_BLOCK];
    X rounded[SUM_BLOCK];
    for (i64 i = 0; i < n; i++) { sum[i] = (float)in[0][begin + i]; }
    for (size_t r = 1; r < in.size(); r++) {
        const X* values = in[r] + begin;
        for (i64 i = 0; i < n; i++) { sum[i] += (float)values[i]; }
    }
    for (i64 i = 0; i < n; i++) { rounded[i] = (X)sum[i]; }
    for (X* place : out) { memcpy(place + begin, rounded, n * sizeof(X)); }
}

// out[o][0, n) = in[0] + in[1] + ... in this order, in fp32, rounded once; for every o. An out may be one of the ins.
template <typename X>
void sum_in_rank_order(const std::vector<X*>& out, const std::vector<const X*>& in, i64 n) {
    i64 begin = 0;
    for (; begin + SUM_BLOCK <= n; begin += SUM_BLOCK) { sum_block(out, in, begin, std::integral_constant<i64, SUM_BLOCK>()); }
    if (begin < n) { sum_block(out, in, begin, n - begin); }
}

inline void sum_in_rank_order(DType dtype, const std::vector<void*>& out, const std::vector<const void*>& in, i64 n) {
    const auto sum = [&]<typename X>(X*) {
        std::vector<X*> typed_out;
        std::vector<const X*> typed_in;
        for (void* place : out) { typed_out.push_back((X*)place); }
        for (const void* values : in) { typed_in.push_back((const X*)values); }
        sum_in_rank_order(typed_out, typed_in, n);
    };
    dtype == DType::BF16 ? sum((bf16*)nullptr) : sum((float*)nullptr);
}
