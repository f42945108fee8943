// comm.h: what ranks say to each other. One interface; behind it threads of one process (comm_local.h) or MPI (comm_mpi.h).
//
// A sum over ranks is a direct exchange: the owner of each element adds s0 + s1 + ... in rank order in fp32, rounds once to
// the type on the wire, and sends the sum to all. The bytes are those of a ring, 2(T-1)/T times the payload for each rank,
// and the bits are the same for threads, for MPI and for any split into pieces.
#pragma once

#include "device.h"

// What bytes are sent for, as the log reports them.
enum class Traffic { TP_LAYERS, EMBEDDING, LOSS, DP, OTHER, COUNT };

struct CommStats {
    i64 bytes[(int)Traffic::COUNT] = {};  // sent by this rank
    double exposed_seconds = 0;           // time spent waiting, nothing computed meanwhile
};

// One group of ranks, as one of them sees it. All ranks of a group make the same calls in the same order.
// A rank makes its calls from one thread. Every wait sleeps or yields: ranks may share cores.
class Comm {
public:
    using Ticket = i64;  // 0: nothing to wait for

    Comm(int rank, int size) : rank(rank), size(size) {}
    virtual ~Comm() = default;

    // data[0, count) = sum over ranks, in place. Nobody may touch data between start and wait. Up to 4 at a time are in flight.
    virtual Ticket start_all_reduce(void* data, i64 count, DType dtype, Traffic traffic) = 0;
    virtual void wait(Ticket ticket) = 0;
    // Moves bytes along, where nothing else would. Cheap; called between blocks of a GEMM.
    virtual void poll() {}

    // all[r * bytes, (r + 1) * bytes) = rank r's `mine`, for every r.
    virtual void all_gather(const void* mine, void* all, i64 bytes, Traffic traffic) = 0;
    // data[ranges[rank]] = sum over ranks of their data[ranges[rank]]; the other ranges keep what they had. One range a rank.
    virtual void reduce_scatter(float* data, const std::vector<Range>& ranges, Traffic traffic) = 0;
    // Every rank's data[ranges[r]] = rank r's, for every r. Elements of element_bytes.
    virtual void all_gather_ranges(void* data, i64 element_bytes, const std::vector<Range>& ranges, Traffic traffic) = 0;

    void all_reduce(void* data, i64 count, DType dtype, Traffic traffic) { wait(start_all_reduce(data, count, dtype, traffic)); }
    void barrier() {
        char mine = 0;
        std::vector<char> all(size);
        all_gather(&mine, all.data(), 1, Traffic::OTHER);
    }

    const int rank, size;
    CommStats stats;
};

// The groups that one rank belongs to. World rank = dp.rank * tp.size + tp.rank.
struct Ranks {
    Comm *world, *tp, *dp;
    int ranks_on_host;  // how many of the job's ranks share this host: they divide its threads

    void poll() const {
        tp->poll();
        dp->poll();
    }
};
