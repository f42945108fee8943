// device_ranks.h: ranks as threads, arrays in the memory of (emulated) GPUs, and a communicator of GPUs held against the host's: bits and
// bytes sent must agree.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <thread>

#include "llmc/comm_device.h"
#include "llmc/comm_local.h"
#include "values.h"

namespace device_ranks {

// One rank: a thread with a device.
struct Rank {
    LocalComm host;
    ::Run run;
    Rank(LocalGroup& group, int rank) : host(group, rank) {}
};
// Runs body(rank) as `size` threads on so many devices, one after the other. What each of them threw, or "".
template <typename Body>
Vec<std::string> run_ranks_on(int devices, int size, const Body& body) {
    LocalGroup group(size);
    Vec<std::string> errors(size);
    Vec<std::thread> threads;
    for (int r = 0; r < size; r++) {
        threads.emplace_back([&, r] {
            try {
                cuda_check(cudaSetDevice(r % devices));
                Rank rank(group, r);
                body(rank);
            } catch (const std::exception& error) { errors[r] = error.what(); }
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    return errors;
}
// A device each.
template <typename Body>
Vec<std::string> run_ranks(int size, const Body& body) {
    return run_ranks_on(size, size, body);
}

// Device memory, all bits set, and its way there and back without a wait of the host's.
template <typename X>
struct Array {
    X* data = nullptr;
    Vec<X> host;
    Run& run;
    Array(Vec<X> values, Run& r) : host(std::move(values)), run(r) {
        cuda_check(cudaMalloc((void**)&data, host.size() * sizeof(X)));
        cuda_check(cudaMemcpyAsync(data, host.data(), host.size() * sizeof(X), cudaMemcpyHostToDevice, run.stream));
    }
    Array(const Array&) = delete;
    ~Array() { cudaFree(data); }
    Vec<X> values() {
        cuda_check(cudaMemcpyAsync(host.data(), data, host.size() * sizeof(X), cudaMemcpyDeviceToHost, run.stream));
        cuda_check(cudaStreamSynchronize(run.stream));
        return host;
    }
};
template <typename X>
Vec<X> start_values(i64 count, int rank, int seed) {
    return random_values<X>(count, 100 * seed + rank, rank % 2 ? 100.0 : 0.01);  // another order of the sum has other bits
}

// ---- against the host's communicator --------------------------------------------------------------------------------------
// The same exchange on the device and on the host. Bits and bytes sent must agree.
template <typename X>
void expect_same(Rank& rank, Comm& comm, i64 count, int seed, const std::function<void(Comm&, X*)>& exchange, const std::string& what) {
    Vec<X> wanted = start_values<X>(count, rank.host.rank, seed);
    Array<X> found(wanted, rank.run);
    const CommStats before_device = comm.stats;
    exchange(comm, found.data);
    const CommStats before = rank.host.stats;  // some communicators use the host's
    exchange(rank.host, wanted.data());
    EXPECT_TRUE(same_bits(found.values(), wanted)) << what << ", rank " << rank.host.rank;
    for (int t = 0; t < (int)Traffic::COUNT; t++) {
        EXPECT_EQ(comm.stats.bytes[t] - before_device.bytes[t], rank.host.stats.bytes[t] - before.bytes[t]) << what;
    }
}
// Parts in rank order: of equal size, or with gaps, empty ones and odd sizes.
inline Vec<Range> ranges(int ranks, i64 unit, bool equal) {
    Vec<Range> parts;
    i64 begin = 3;
    for (int r = 0; r < ranks; r++) {
        const i64 size = equal ? unit : r % 3 == 1 ? 0 : unit * (r + 1) + r;
        parts.push_back({begin, begin + size});
        begin += size + (equal ? 0 : r % 2);
    }
    return parts;
}
template <typename X>
void try_all_reduce(Rank& rank, Comm& comm) {
    const i64 T = comm.size;
    int seed = 0;
    for (i64 count : {(i64)1, (i64)2, T - 1, T, T + 1, (i64)1023, (i64)1025, (i64)4097 * T}) {
        expect_same<X>(
            rank, comm, count, ++seed, [&](Comm& c, X* data) { c.all_reduce(data, count, dtype_of<X>, Traffic::TP_LAYERS); },
            format("all-reduce of %lld %s", (long long)count, dtype_name(dtype_of<X>)));
    }
}
inline void try_parts(Rank& rank, Comm& comm) {
    for (i64 unit : {1, 17, 1000}) {
        for (bool equal : {false, true}) {
            for (bool backwards : {false, true}) {
                Vec<Range> parts = ranges(comm.size, unit, equal);
                if (backwards) { std::reverse(parts.begin(), parts.end()); }
                const i64 count = (unit + 2) * comm.size * comm.size + 5;
                const std::string what =
                    format("parts of %lld%s%s", (long long)unit, equal ? ", equal" : "", backwards ? ", backwards" : "");
                expect_same<float>(
                    rank, comm, count, 50, [&](Comm& c, float* data) { c.reduce_scatter(data, DType::FP32, parts, Traffic::DP); },
                    "reduce-scatter, " + what);
                expect_same<bf16>(
                    rank, comm, count, 51, [&](Comm& c, bf16* data) { c.all_gather_ranges(data, 2, parts, Traffic::DP); },
                    "all-gather, " + what);
                expect_same<bf16>(
                    rank, comm, count, 52,
                    [&](Comm& c, bf16* data) {
                        c.exchange({data, 2, DType::BF16, parts, true, true, Traffic::OTHER});
                    },
                    "all-reduce of " + what);
            }
        }
    }
}
// Four at a time, a blocking one in their midst, waited for in another order.
inline void try_in_flight(Rank& rank, Comm& comm) {
    Vec<Vec<float>> wanted;
    std::deque<Array<float>> found;
    Comm::Ticket tickets[4];
    for (int i = 0; i < 4; i++) {
        const i64 count = i == 2 ? 5 : 3001 + i;
        wanted.push_back(start_values<float>(count, comm.rank, 70 + i));
        found.emplace_back(wanted[i], rank.run);
        tickets[i] = comm.start_all_reduce(found[i].data, count, DType::FP32, Traffic::TP_LAYERS);
        rank.host.all_reduce(wanted[i].data(), count, DType::FP32, Traffic::TP_LAYERS);
        if (i == 1) { comm.barrier(); }
    }
    for (int i : {2, 0, 3, 1}) {
        comm.wait(tickets[i]);
        comm.wait(tickets[i]);  // harmless
        EXPECT_TRUE(same_bits(found[i].values(), wanted[i])) << i;
    }
}
inline void try_all_exchanges(Rank& rank, Comm& comm) {
    try_all_reduce<float>(rank, comm);
    try_all_reduce<bf16>(rank, comm);
    try_parts(rank, comm);
    try_in_flight(rank, comm);
}

}  // namespace device_ranks
