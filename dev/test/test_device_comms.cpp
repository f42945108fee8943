// Ranks that share a GPU: LocalDeviceComm (threads) and StagedComm (through the host), and what all communicators of GPUs have in common.
// Oracle: the host's communicator (comm_local.h), to the bit.
#include "device_ranks.h"
#include "llmc/comm_device_local.h"
#include "llmc/comm_staged.h"
#include "llmc/device_rank.h"

namespace device_comms_test {

using namespace device_ranks;

class SharedGpu : public testing::TestWithParam<const char*> {
protected:
    void SetUp() override { setenv("SIMT_STREAMS", GetParam(), 1); }
    void TearDown() override { unsetenv("SIMT_STREAMS"); }
};
INSTANTIATE_TEST_SUITE_P(Streams, SharedGpu, testing::Values("late", "eager"), [](const auto& info) { return std::string(info.param); });

template <typename Make>
void expect_sums_of_the_hosts(const Make& make) {
    for (int size : {1, 2, 3, 4}) {
        EXPECT_EQ(run_ranks_on(1, size,
                               [&](Rank& rank) {
                                   const std::unique_ptr<Comm> comm = make(rank);
                                   try_all_exchanges(rank, *comm);
                               }),
                  Vec<std::string>(size));
    }
}
TEST_P(SharedGpu, OneKernelGivesTheSumsOfTheHosts) {
    expect_sums_of_the_hosts([](Rank& rank) { return std::make_unique<LocalDeviceComm>(rank.host, rank.run); });
}
TEST_P(SharedGpu, StagingGivesTheSumsOfTheHosts) {
    for (i64 piece_bytes : {64, 1 << 20}) {  // many pieces, and one
        expect_sums_of_the_hosts([=](Rank& rank) { return std::make_unique<StagedComm>(rank.host, rank.run, piece_bytes); });
    }
}

// A communicator that only notes when its exchange runs.
class NotingComm : public DeviceComm {
public:
    NotingComm(Comm& host, Run& run) : DeviceComm(host, run) {}
    Vec<std::string> notes;
    void note(cudaStream_t stream, const char* what) {
        auto* job = new std::pair(&notes, what);
        const auto run = [](void* p) {
            const std::unique_ptr<std::pair<Vec<std::string>*, const char*>> job((std::pair<Vec<std::string>*, const char*>*)p);
            job->first->push_back(job->second);
        };
        cuda_check(cudaLaunchHostFunc(stream, run, job));
    }
    void wait_for_exchange() { side_.wait(); }

protected:
    void enqueue(int slot, const Exchange&) override {
        note(stream_, "exchange");
        end_[slot].record(stream_);
    }
    cudaEvent_t complete(int slot) override { return end_[slot]; }
};
TEST(DeviceComm, AnExchangeWaitsForWhatCameBeforeAndForNothingElse) {
    EXPECT_EQ(run_ranks_on(1, 2,
                           [](Rank& rank) {
                               NotingComm comm(rank.host, rank.run);
                               float* data = nullptr;
                               comm.note(rank.run.stream, "shared product");
                               const Comm::Ticket ticket = comm.start_all_reduce(data, 8, DType::FP32, Traffic::OTHER);
                               comm.note(rank.run.stream, "private product");
                               comm.wait_for_exchange();  // as early as it may
                               EXPECT_EQ(comm.notes, (Vec<std::string>{"shared product", "exchange"}));
                               comm.wait(ticket);
                               comm.note(rank.run.stream, "norm");
                               rank.run.wait();
                               EXPECT_EQ(comm.notes, (Vec<std::string>{"shared product", "exchange", "private product", "norm"}));
                               comm.notes.clear();
                               comm.wait(comm.start_all_reduce(data, 8, DType::FP32, Traffic::OTHER));
                               comm.note(rank.run.stream, "norm");
                               rank.run.wait();  // as late as it may
                               EXPECT_EQ(comm.notes, (Vec<std::string>{"exchange", "norm"}));
                           }),
              Vec<std::string>(2));
}

// What the run's stream lost to a wait, and no more.
TEST(DeviceComm, ExposedIsWhatTheStreamWaited) {
    EXPECT_EQ(run_ranks_on(1, 2,
                           [](Rank& rank) {
                               LocalDeviceComm comm(rank.host, rank.run);
                               Array<float> a(Vec<float>(64, 1.0f), rank.run);
                               const Comm::Ticket ticket = comm.start_all_reduce(a.data, 64, DType::FP32, Traffic::OTHER);
                               cuda_check(cudaLaunchHostFunc(
                                   rank.run.stream, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }, nullptr));
                               comm.wait(ticket);
                               comm.update_stats();
                               EXPECT_EQ(comm.stats.exposed_seconds, 0);  // not known yet
                               rank.run.wait();
                               comm.update_stats();
                               EXPECT_GT(comm.stats.exposed_seconds, 0);
                               EXPECT_LT(comm.stats.exposed_seconds, 0.2);
                           }),
              Vec<std::string>(2));
}

TEST(DeviceComm, TimesAreLookedAtWhereNobodyAsks) {
    EXPECT_EQ(run_ranks_on(1, 2,
                           [](Rank& rank) {
                               LocalDeviceComm comm(rank.host, rank.run);
                               Array<float> a(Vec<float>(1), rank.run);
                               for (int i = 0; i < 300; i++) { comm.all_reduce(a.data, 1, DType::FP32, Traffic::OTHER), rank.run.wait(); }
                               EXPECT_GT(comm.stats.exposed_seconds, 0);
                           }),
              Vec<std::string>(2));
}

TEST(DeviceComm, DifferentCallsAreNamed) {
    const auto errors = run_ranks_on(1, 2, [](Rank& rank) {
        LocalDeviceComm comm(rank.host, rank.run);
        Array<float> a(Vec<float>(64), rank.run);
        comm.start_all_reduce(a.data, rank.host.rank ? 64 : 32, DType::FP32, Traffic::OTHER);  // the last to come finds out
    });
    EXPECT_NE((errors[0] + errors[1]).find("of a group of 2 call different collectives"), std::string::npos) << errors[0] << errors[1];
}

// The emulator's stream begins its work when the host waits for it: a clock of the host's would see nothing pass.
TEST(DeviceRank, MomentsAreInTheOrderOfTheStream) {
    ::Run run;
    constexpr i64 MANY = 1 << 18;
    Array<float> from(Vec<float>(MANY, 1.0f), run);
    Array<bf16> to(Vec<bf16>(MANY), run);
    const Moment begin(run);
    gpu::cast(to.data, from.data, MANY, run);
    const Moment end(run);
    const double seconds = seconds_between(begin, end);
    EXPECT_GT(seconds, 1e-4);
    EXPECT_EQ(seconds_between(end, begin), -seconds);
}

TEST(DeviceRank, ARunSaysWhereAndByWhatItComputes) {
    ::Run run;
    EXPECT_EQ(run.place(), "GPU 0 (emulated)");
    run.collectives = "NCCL";
    EXPECT_EQ(run.place(), "GPU 0 (emulated), collectives: NCCL");
    EXPECT_EQ(::Run(NO_GPU).place(), "no GPU yet");
    EXPECT_EQ(gpu::gemm_library().find("cuBLASLt 1"), 0u) << gpu::gemm_library();
    for (DType dtype : {DType::FP32, DType::BF16}) {  // linked without cuDNN
        const AttentionBy attention = gpu::attention_by(dtype, 2, 300, 4);
        EXPECT_TRUE(attention.library.empty() && attention.workspace == 0);
    }
}

struct NoComm final : Comm {
    using Comm::Comm;
    void start(int, Exchange) override {}
    void finish(int) override {}
};
TEST(DeviceRank, APlanIsForTheFirstGpuIfThereIsOne) {
    NoComm world(0, 4);
    const Ranks ranks = {&world, nullptr, nullptr, 1};
    const auto with_gpus = [&](const char* count) {
        setenv("SIMT_DEVICES", count, 1);
        const PlannedDevice device = planned_device(ranks, {});
        unsetenv("SIMT_DEVICES");
        return device;
    };
    EXPECT_EQ(with_gpus("0").bytes, 0);
    EXPECT_EQ(with_gpus("3").ranks, 4);  // too few: all on the first
    const PlannedDevice own = with_gpus("4");
    EXPECT_EQ(own.ranks, nccl::BUILT ? 1 : 4);
    EXPECT_EQ(own.bytes, available_memory());
    EXPECT_EQ(own.name, "emulated");
}

TEST(DeviceRank, GroupsOnSeveralHostsAreNoted) {
    EXPECT_EQ(note_of_split_groups({"a", "a", "b", "b"}, 2), "");
    EXPECT_EQ(note_of_split_groups({"a", "b"}, 1), "");
    expect_parts(note_of_split_groups({"a", "a", "a", "b", "b", "b", "b", "b"}, 2), {"the 2 tensor-parallel ranks from rank 2 on", "(a, b)", "HINT"});
    expect_parts(note_of_split_groups({"a", "a", "b", "b"}, 4), {"the 4 tensor-parallel ranks from rank 0 on"});
}

}  // namespace device_comms_test
