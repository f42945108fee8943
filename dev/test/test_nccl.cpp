// Ranks with a device each, in the emulator: its devices and meetings, its NCCL, and NcclComm on top of that. Host code, no kernels.
// Oracle of the collectives: the host's communicator (comm_local.h, itself held against sums written out in test_comm.cpp), to the bit,
// because the emulator's NCCL adds in rank order too.
#include <gtest/gtest.h>
#include <nccl.h>

#include "device_ranks.h"
#include "llmc/comm_nccl.h"

namespace nccl_test {

constexpr double PATIENCE = 60;  // seconds, for a collective

using namespace device_ranks;

class ManyRanks : public testing::Test {
protected:
    void SetUp() override {
        setenv("SIMT_DEVICES", "4", 1);
        setenv("SIMT_TIMEOUT", "20", 1);
        unsetenv("SIMT_STREAMS");
    }
    void TearDown() override {
        for (const char* name : {"SIMT_DEVICES", "SIMT_TIMEOUT", "SIMT_STREAMS"}) { unsetenv(name); }
    }
};

// ---- devices ----------------------------------------------------------------------------------------------------------
TEST_F(ManyRanks, DevicesAreCountedAndChosenByEachThread) {
    int count = 0, device = -1;
    cuda_check(cudaGetDeviceCount(&count));
    EXPECT_EQ(count, 4);
    cuda_check(cudaSetDevice(3));
    std::thread([&] { cuda_check(cudaGetDevice(&device)); }).join();
    EXPECT_EQ(device, 0);
    expect_parts(error_of([] { cuda_check(cudaSetDevice(4)); }), {"cudaSetDevice(4), of 4 devices"});
    cuda_check(cudaGetDevice(&device));
    EXPECT_EQ(device, 3);
    cuda_check(cudaSetDevice(0));
}

TEST_F(ManyRanks, WhatBelongsToAnotherDeviceIsRefused) {
    ::Run zero;
    Array<float> a(Vec<float>(4), zero);
    cuda_check(cudaSetDevice(1));
    ::Run one;
    Array<float> b(Vec<float>(4), one);
    expect_parts(error_of([&] { cuda_check(cudaMemsetAsync(a.data, 0, 16, one.stream)); }), {"memory of device 0, not of device 1"});
    expect_parts(error_of([&] { cuda_check(cudaMemcpyAsync(b.data, a.data, 16, cudaMemcpyDeviceToDevice, one.stream)); }),
                 {"memory of device 0, not of device 1"});
    DeviceEvent event;
    expect_parts(error_of([&] { event.record(zero.stream); }), {"an event of device 1 is recorded on device 0"});
    event.record(one.stream);
    event.hold_back(zero.stream);  // waits may cross
    cuda_check(cudaSetDevice(0));
    cuda_check(cudaStreamSynchronize(zero.stream));
}

TEST_F(ManyRanks, AQueryIsFirstNotReadyAndGetsThere) {
    ::Run run;
    Array<float> a(Vec<float>(4, 1.0f), run);
    EXPECT_EQ(cudaStreamQuery(run.stream), cudaErrorNotReady);
    while (cudaStreamQuery(run.stream) == cudaErrorNotReady) {}
    EXPECT_EQ(cudaStreamQuery(run.stream), cudaSuccess);
    DeviceEvent done;
    EXPECT_EQ(cudaEventQuery(done), cudaSuccess);  // never recorded
    int called = 0;
    cuda_check(cudaLaunchHostFunc(
        run.stream, [](void* p) { ++*(int*)p; }, &called));
    done.record(run.stream);
    EXPECT_EQ(called, 0);
    EXPECT_EQ(cudaEventQuery(done), cudaErrorNotReady);
    while (cudaEventQuery(done) == cudaErrorNotReady) {}
    EXPECT_EQ(called, 1);
}

TEST_F(ManyRanks, TimesOfEvents) {
    ::Run run;
    DeviceEvent begin(cudaEventDefault), end(cudaEventDefault), untimed;
    float ms = -1;
    begin.record(run.stream);
    cuda_check(cudaLaunchHostFunc(
        run.stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr));
    end.record(run.stream);
    EXPECT_EQ(cudaEventElapsedTime(&ms, begin, end), cudaErrorNotReady);
    cuda_check(cudaEventSynchronize(end));
    cuda_check(cudaEventElapsedTime(&ms, begin, end));
    EXPECT_GE(ms, 5);
    EXPECT_EQ(cudaEventElapsedTime(&ms, begin, untimed), cudaErrorInvalidResourceHandle);
}

// ---- NcclComm against the host's communicator ---------------------------------------------------------------------------
TEST_F(ManyRanks, NcclCommGivesTheSumsOfTheHosts) {
    for (const char* when : {"late", "eager"}) {
        setenv("SIMT_STREAMS", when, 1);
        for (int size : {1, 2, 3, 4}) {
            EXPECT_EQ(run_ranks(size,
                                [](Rank& rank) {
                                    const auto comm = nccl::group(rank.host, rank.run, PATIENCE);
                                    try_all_exchanges(rank, *comm);
                                    comm->poll();
                                }),
                      Vec<std::string>(size));
        }
    }
}

// The others' wait for the GPU as the trainer does it: look, poll, look again.
void wait_and_poll(Run& run, Comm& comm) {
    while (cudaStreamQuery(run.stream) == cudaErrorNotReady) { comm.poll(); }
    cuda_check(cudaStreamSynchronize(run.stream));
}
// The exchanges of a step, in flight beside other work, as they are and from a graph.
TEST_F(ManyRanks, RecordedExchanges) {
    for (const char* when : {"late", "eager"}) {
        setenv("SIMT_STREAMS", when, 1);
        for (int size : {1, 2, 3}) {
            EXPECT_EQ(run_ranks(size,
                                [&](Rank& rank) {
                                    const auto comm = nccl::group(rank.host, rank.run, PATIENCE);
                                    EXPECT_TRUE(comm->can_be_recorded());
                                    Vec<float> wanted = start_values<float>(100, rank.host.rank, 3);
                                    Array<float> found(wanted, rank.run), gathered(Vec<float>(4 * size), rank.run);
                                    ::Graph graph;
                                    int calls = 0;
                                    const auto step = [&] {
                                        calls++;
                                        const auto first = comm->start_all_reduce(found.data, 50, DType::FP32, Traffic::TP_LAYERS);
                                        const auto second = comm->start_all_reduce(found.data + 50, 50, DType::FP32, Traffic::TP_LAYERS);
                                        comm->wait(first), comm->wait(second);
                                        comm->all_gather(found.data + 30, gathered.data, 4 * sizeof(float), Traffic::LOSS);
                                        cuda_check(cudaMemcpyAsync(found.data, gathered.data, 4 * sizeof(float), cudaMemcpyDeviceToDevice, rank.run.stream));
                                    };
                                    for (int i = 0; i < 5; i++) {
                                        rank.run.replay(graph, step);
                                        rank.host.all_reduce(wanted.data(), 50, DType::FP32, Traffic::OTHER);
                                        rank.host.all_reduce(wanted.data() + 50, 50, DType::FP32, Traffic::OTHER);
                                        Vec<float> all(4 * size);
                                        rank.host.all_gather(wanted.data() + 30, all.data(), 4 * sizeof(float), Traffic::OTHER);
                                        std::copy(all.begin(), all.begin() + 4, wanted.begin());
                                        if (i % 2) { EXPECT_TRUE(same_bits(found.values(), wanted)) << "step " << i; }  // sometimes two are on their way
                                        if (i == 2) { comm->all_reduce(found.data, 0, DType::FP32, Traffic::OTHER), comm->poll(); }
                                    }
                                    EXPECT_EQ(calls, 2);
                                    EXPECT_TRUE(same_bits(found.values(), wanted));
                                    comm->update_stats();
                                }),
                      Vec<std::string>(size));
        }
    }
}
TEST_F(ManyRanks, ARankThatDoesNotReplayEndsTheOthersWait) {
    const auto errors = run_ranks(2, [](Rank& rank) {
        const auto comm = nccl::group(rank.host, rank.run, /*timeout=*/1);
        Array<float> a(Vec<float>(64, 1.0f), rank.run);
        ::Graph graph;
        const auto step = [&] { comm->all_reduce(a.data, 64, DType::FP32, Traffic::OTHER); };
        for (int i = 0; i < 2; i++) {
            rank.run.replay(graph, step);
            wait_and_poll(rank.run, *comm);
        }
        rank.host.barrier();
        if (rank.host.rank == 0) { rank.run.replay(graph, step); }
        const std::string error = rank.host.rank == 0 ? error_of([&] { wait_and_poll(rank.run, *comm); }) : "";
        rank.host.barrier();
        check(error.empty(), "%s", error.c_str());
    });
    expect_parts(errors[0], {"recorded collectives of rank 0 of 2 have not ended within 1 s", "HINT"});
    EXPECT_EQ(errors[1], "");
}

// Rows and columns of a grid of ranks: two groups for each rank, on streams of their own, in flight together.
TEST_F(ManyRanks, TwoGroupsOfEachRank) {
    std::deque<LocalGroup> rows, columns;
    for (int i = 0; i < 2; i++) { rows.emplace_back(2), columns.emplace_back(2); }
    EXPECT_EQ(run_ranks(4,
                        [&](Rank& rank) {
                            const int r = rank.host.rank;
                            LocalComm row(rows[r / 2], r % 2), column(columns[r % 2], r / 2);
                            const auto tp = nccl::group(row, rank.run, PATIENCE), dp = nccl::group(column, rank.run, PATIENCE);
                            Array<float> a(Vec<float>(100, 1.0f + (float)r), rank.run), b(Vec<float>(100, 10.0f * (float)r), rank.run);
                            const Comm::Ticket first = tp->start_all_reduce(a.data, 100, DType::FP32, Traffic::TP_LAYERS);
                            dp->wait(dp->start_all_reduce(b.data, 100, DType::FP32, Traffic::DP));
                            tp->wait(first);
                            EXPECT_EQ(a.values(), Vec<float>(100, r < 2 ? 3.0f : 7.0f));
                            EXPECT_EQ(b.values(), Vec<float>(100, r % 2 ? 40.0f : 20.0f));
                            tp->all_reduce(b.data, 100, DType::FP32, Traffic::TP_LAYERS);
                            EXPECT_EQ(b.values(), Vec<float>(100, 60.0f));
                        }),
              Vec<std::string>(4));
}

// ---- planted faults -----------------------------------------------------------------------------------------------------
void ok(ncclResult_t result) { check(result == ncclSuccess, "%s: %s", ncclGetErrorString(result), ncclGetLastError(nullptr)); }

// A rank with NCCL itself, without NcclComm's events.
struct Bare {
    Rank& rank;
    Run other;  // the stream of the collectives
    ncclComm_t comm;
    Array<float> a;

    explicit Bare(Rank& r) : rank(r), a(Vec<float>(64, 1.0f), other) {
        Vec<ncclUniqueId> ids(rank.host.size);
        ncclUniqueId mine;
        ok(ncclGetUniqueId(&mine));
        rank.host.share(&mine, ids.data(), sizeof(mine));
        ok(ncclCommInitRank(&comm, rank.host.size, ids[0], rank.host.rank));
    }
    void all_reduce(size_t count) { ok(ncclAllReduce(a.data, a.data, count, ncclFloat32, ncclSum, comm, other.stream)); }
    void broadcast(size_t count, int root) { ok(ncclBroadcast(a.data, a.data, count, ncclFloat32, root, comm, other.stream)); }
    void synchronize() { cuda_check(cudaStreamSynchronize(other.stream)); }
    ncclResult_t async_error() {
        ncclResult_t state;
        ok(ncclCommGetAsyncError(comm, &state));
        return state;
    }
};

TEST_F(ManyRanks, AMissingWaitShows) {
    FAULT_WITHOUT_CHECKER();
    const auto sum = [](bool ready, bool end) {
        Vec<float> found(2);
        EXPECT_EQ(run_ranks(2,
                            [&](Rank& rank) {
                                Bare bare(rank);
                                Array<float> a(Vec<float>(4, 1.0f), rank.run);
                                DeviceEvent uploaded, summed;
                                uploaded.record(rank.run.stream);
                                if (ready) { uploaded.hold_back(bare.other.stream); }
                                ok(ncclAllReduce(a.data, a.data, 4, ncclFloat32, ncclSum, bare.comm, bare.other.stream));
                                summed.record(bare.other.stream);
                                if (!ready) { bare.synchronize(); }
                                if (end) { summed.hold_back(rank.run.stream); }
                                if (ready) { found[rank.host.rank] = a.values()[0]; }
                                rank.host.barrier();  // or the other rank's wait runs the sum
                                bare.synchronize();
                                if (!ready) { found[rank.host.rank] = a.values()[0]; }
                                ok(ncclCommDestroy(bare.comm));
                            }),
                  Vec<std::string>(2));
        return found;
    };
    EXPECT_EQ(sum(true, true), Vec<float>(2, 2.0f));
    EXPECT_EQ(sum(true, false), Vec<float>(2, 1.0f));  // reads before the sum is there
    EXPECT_EQ(sum(false, true), Vec<float>(2, 1.0f));  // the upload comes after the sum, and over it
}

// Runs two ranks that make different calls. Both must hear of it, in words.
void expect_mismatch(const std::function<void(Bare&)>& zero, const std::function<void(Bare&)>& one, const Vec<std::string>& parts) {
    const Vec<std::string> errors = run_ranks(2, [&](Rank& rank) {
        Bare bare(rank);
        (rank.host.rank == 0 ? zero : one)(bare);
        bare.synchronize();
    });
    for (const std::string& error : errors) { expect_parts(error, parts); }
}
TEST_F(ManyRanks, DifferentCallsAreNamed) {
    expect_mismatch([](Bare& r) { r.all_reduce(4); }, [](Bare& r) { r.all_reduce(5); },
                    {"launch 0", "ncclAllReduce of 4 fp32", "ncclAllReduce of 5 fp32"});
    expect_mismatch([](Bare& r) { r.all_reduce(4); },
                    [](Bare& r) { ok(ncclAllReduce(r.a.data, r.a.data, 4, ncclBfloat16, ncclSum, r.comm, r.other.stream)); },
                    {"ncclAllReduce of 4 fp32", "ncclAllReduce of 4 bf16"});
    expect_mismatch([](Bare& r) { r.broadcast(4, 0); }, [](Bare& r) { r.broadcast(4, 1); }, {"with root 0", "with root 1"});
    const auto in_order = [](Bare& r) { r.all_reduce(8), r.all_reduce(4), r.broadcast(4, 0); };
    const auto swapped = [](Bare& r) { r.all_reduce(8), r.broadcast(4, 0), r.all_reduce(4); };
    expect_mismatch(in_order, swapped, {"launch 1", "ncclAllReduce of 4 fp32", "ncclBroadcast of 4 fp32 with root 0"});
    const auto group_of = [](int calls) {
        return [calls](Bare& r) {
            ok(ncclGroupStart());
            for (int i = 0; i < calls; i++) { r.broadcast(4, 0); }
            ok(ncclGroupEnd());
        };
    };
    expect_mismatch(group_of(1), group_of(2), {"no further call in its group"});
}

TEST_F(ManyRanks, WrongArraysAreRefused) {
    EXPECT_EQ(
        run_ranks(
            2,
            [](Rank& rank) {
                Bare bare(rank);
                const auto wrong = [&](auto* send, auto* receive, size_t count, const char* words) {
                    expect_parts(
                        error_of([&] { ok(ncclAllReduce(send, receive, count, ncclFloat32, ncclSum, bare.comm, bare.other.stream)); }),
                        {format("rank %d of a group of 2 ranks: ncclAllReduce", rank.host.rank), words});
                };
                float host[4];
                float* data = bare.a.data;
                wrong(host, data, 4, "sends from");
                wrong(data, host, 4, "is not in device memory");
                wrong(data, data, 65, "260 bytes at byte 0 of an allocation of 256");
                wrong(data, data + 3, 4, "overlap");
                const auto words = [&](ncclResult_t result) { return error_of([&] { ok(result); }); };
                expect_parts(words(ncclReduceScatter(data, data, 33, ncclFloat32, ncclSum, bare.comm, bare.other.stream)), {"264 bytes"});
                expect_parts(words(ncclAllGather(data + (1 - rank.host.rank) * 4, data, 4, ncclFloat32, bare.comm, bare.other.stream)),
                             {"overlap"});
                expect_parts(words(ncclAllReduce(data, data, 4, ncclFloat32, ncclMax, bare.comm, bare.other.stream)),
                             {"sums of fp32 and bf16"});
                expect_parts(words(ncclBroadcast(data, data, 4, ncclFloat32, 2, bare.comm, bare.other.stream)), {"root 2 of 2 ranks"});
                std::vector<float*> arrays(2);
                rank.host.share(&data, arrays.data(), sizeof(data));
                wrong(data, arrays[1 - rank.host.rank], 4, "is in the memory of device");
                EXPECT_EQ(bare.async_error(), ncclSuccess);
                bare.all_reduce(4);  // and the communicator is well
                bare.synchronize();
                rank.host.barrier();
                ok(ncclCommDestroy(bare.comm));
            }),
        Vec<std::string>(2));
}

TEST_F(ManyRanks, ARankThatNeverComes) {
    setenv("SIMT_TIMEOUT", "0.3", 1);
    const auto errors = run_ranks(3, [](Rank& rank) {
        Bare bare(rank);
        if (rank.host.rank != 1) { bare.all_reduce(4); }
        const std::string error = rank.host.rank != 1 ? error_of([&] { bare.synchronize(); }) : "";
        rank.host.barrier();
        check(error.empty(), "%s", error.c_str());
    });
    for (int r : {0, 2}) { expect_parts(errors[r], {"ncclAllReduce of 4 fp32, launch 0 of a group of 3 ranks: rank 1 has not called it"}); }
    const auto never_joins = run_ranks(2, [](Rank& rank) {
        if (rank.host.rank == 0) { nccl::group(rank.host, rank.run, PATIENCE); }
        Vec<ncclUniqueId> ids(2);
        if (rank.host.rank == 1) { rank.host.share(&ids[1], ids.data(), sizeof(ids[0])); }
    });
    expect_parts(never_joins[0], {"rank 1 of a group of 2 ranks has not joined"});
}

TEST_F(ManyRanks, ALostRankEndsTheOthersWait) {
    for (const bool dies : {false, true}) {
        const auto begin = std::chrono::steady_clock::now();
        const auto errors = run_ranks(3, [&](Rank& rank) {
            if (dies && rank.host.rank == 1) {
                Bare(rank).all_reduce(64);  // its thread ends
                return;
            }
            const auto comm = nccl::group(rank.host, rank.run, PATIENCE);
            Array<float> a(Vec<float>(64, 1.0f), rank.run);
            comm->all_reduce(a.data, 64, DType::FP32, Traffic::OTHER);
            if (!dies && rank.host.rank == 1) { die("out of luck"); }
            comm->all_reduce(a.data, 64, DType::FP32, Traffic::OTHER);
            wait_and_poll(rank.run, *comm);
        });
        EXPECT_EQ(errors[1], dies ? "" : "out of luck");
        for (int r : {0, 2}) { expect_parts(errors[r], {"NCCL: ", "of a group of 3 ranks has ", dies ? "died" : "aborted"}); }
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    }
}

TEST_F(ManyRanks, ARankThatHangsEndsTheOthersWait) {
    const auto errors = run_ranks(2, [](Rank& rank) {
        const auto comm = nccl::group(rank.host, rank.run, /*timeout=*/0.2);
        Array<float> a(Vec<float>(64, 1.0f), rank.run);
        comm->all_reduce(a.data, 64, DType::FP32, Traffic::OTHER);
        wait_and_poll(rank.run, *comm);
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        comm->poll();  // late, but done
        rank.host.barrier();
        if (rank.host.rank == 0) { comm->all_reduce(a.data, 64, DType::FP32, Traffic::OTHER); }
        const std::string error = rank.host.rank == 0 ? error_of([&] { wait_and_poll(rank.run, *comm); }) : "";
        rank.host.barrier();
        check(error.empty(), "%s", error.c_str());
    });
    expect_parts(errors[0], {"a collective of rank 0 of 2 has not ended within 0.2 s"});
    EXPECT_EQ(errors[1], "");
}

TEST_F(ManyRanks, ARankMayLeaveWhenItsPartIsDone) {
    EXPECT_EQ(run_ranks(2,
                        [](Rank& rank) {
                            Bare bare(rank);
                            bare.all_reduce(64);
                            if (rank.host.rank == 0) {
                                bare.synchronize();
                                ok(ncclCommDestroy(bare.comm));
                            }
                            rank.host.barrier();
                            if (rank.host.rank == 1) {
                                EXPECT_EQ(bare.async_error(), ncclSuccess);
                                bare.synchronize();
                                EXPECT_EQ(bare.a.values(), Vec<float>(64, 2.0f));
                                expect_parts(error_of([&] { bare.all_reduce(4); }),
                                             {"rank 0 of a group of 2 ranks has destroyed its communicator after 1 launches"});
                                EXPECT_EQ(bare.async_error(), ncclRemoteError);
                            }
                        }),
              Vec<std::string>(2));
}

TEST_F(ManyRanks, TwoGroupsInOppositeOrderStandStill) {
    const auto errors = run_ranks(2, [](Rank& rank) {
        Bare first(rank), second(rank);
        const auto in = [&](Bare& group) {
            ok(ncclAllReduce(group.a.data, group.a.data, 4, ncclFloat32, ncclSum, group.comm, first.other.stream));
        };
        rank.host.rank == 0 ? (in(first), in(second)) : (in(second), in(first));
        rank.host.barrier();
        const std::string error = error_of([&] { first.synchronize(); });
        rank.host.barrier();
        check(false, "%s", error.c_str());
    });
    EXPECT_NE((errors[0] + errors[1]).find("streams wait for each other for ever: ncclAllReduce of 4 fp32"), std::string::npos)
        << errors[0] << errors[1];
    for (const std::string& error : errors) { EXPECT_NE(error, "no error"); }
}

TEST_F(ManyRanks, TwoRanksOnOneDevice) {
    const auto errors = run_ranks_on(1, 2, [](Rank& rank) { nccl::group(rank.host, rank.run, PATIENCE); });
    for (const std::string& error : errors) { expect_parts(error, {"are both on device 0: NCCL wants one each"}); }
}

}  // namespace nccl_test
