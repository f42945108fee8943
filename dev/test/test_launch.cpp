// test_launch.cpp: how jobs start and end.
//
//   test_launch               the tests, with ranks as threads
//   test_launch --fail HOW T  ends a job of T ranks as end_badly() says: for scripts that try it under mpirun -n T
#include <gtest/gtest.h>
#include <signal.h>

#include <map>

#include "llmc/comm_mpi.h"
#include "llmc/launch.h"

TEST(Launch, ReturnsTheLargestExitCode) {
    EXPECT_EQ(launch(2, 2, [](Ranks& ranks) { return ranks.world->rank == 2 ? 143 : 0; }), 143);
    EXPECT_EQ(launch(1, 0, [](Ranks& ranks) { return ranks.world->size; }), 1);
}

// A rank that fails while the others wait for it takes the job down, says who it was, and keeps its exit code.
static int end_badly(const std::string& how, int tp) {
    return launch(tp, 0, [&](Ranks& ranks) {
        const bool last = ranks.world->rank == ranks.world->size - 1;
        if (how == "one" && last) { die("shard is cut"); }
        if (how == "usage of one" && last) { usage_error("--heads 3 does not divide here"); }
        if (how == "in flight") {
            std::vector<float> data(1 << 20);
            ranks.tp->start_all_reduce(data.data(), data.size(), DType::FP32, Traffic::OTHER);
            die("failed while messages are under way");
        }
        if (how == "usage") { usage_error("--heads 3 does not divide"); }
        if (how == "alike") { die("loss is not a number"); }
        if (how == "memory" && last) { throw std::bad_alloc(); }
        if (how == "killed" && last) { raise(SIGKILL); }
        if (how == "stop") {
            catch_stop_signals();
            for (int signal = 0; !signal; signal = agree_on_stop(ranks)) { usleep(100'000); }
            usleep(500'000);  // a save
            printf("rank %d saved\n", ranks.world->rank);
            fflush(stdout);
            return 128 + agree_on_stop(ranks);
        }
        ranks.world->barrier();
        return 0;
    });
}
TEST(LaunchDeathTest, AFailingRankEndsTheJob) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EXIT(end_badly("one", 4), testing::ExitedWithCode(EXIT_FAILED), "^error: rank 3: shard is cut\n$");
    EXPECT_EXIT(end_badly("usage", 4), testing::ExitedWithCode(EXIT_USAGE), "^error: --heads 3 does not divide\n$");
    EXPECT_EXIT(end_badly("memory", 2), testing::ExitedWithCode(EXIT_FAILED), "^error: rank 1: out of memory.*\nHINT");
}

TEST(LaunchDeathTest, StopsWhenAskedAndAtOnceWhenAskedTwice) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    EXPECT_EQ(stop_signal(), 0);
    const auto one_rank_is_asked = [] {
        catch_stop_signals();
        return launch(3, 1, [](Ranks& ranks) {
            if (ranks.world->rank == 1) { raise(SIGUSR1); }
            return 128 + agree_on_stop(ranks);
        });
    };
    const auto asked_twice = [] {
        catch_stop_signals();
        raise(SIGINT);
        raise(SIGINT);
    };
    EXPECT_EXIT(_exit(one_rank_is_asked()), testing::ExitedWithCode(128 + SIGUSR1), "");
    EXPECT_EXIT(asked_twice(), testing::ExitedWithCode(128 + SIGINT), "");
}

TEST(Launch, ReadsTheEnvironment) {
    const auto world_of = [](const std::map<std::string, std::string>& environment) {
        for (const auto& [name, value] : environment) { setenv(name.c_str(), value.c_str(), 1); }
        const LaunchedWorld world = launched_world();
        std::string error;
        try {
            if (world.by_mpi) {
                launch(2, 3, [](Ranks&) { return 0; });
            }
        } catch (const Error& usage) { error = usage.what(); }
        for (const auto& [name, value] : environment) { unsetenv(name.c_str()); }
        return format("%d %d/%d ", world.by_mpi, world.rank, world.size) + error.substr(0, error.find('\n'));
    };
    EXPECT_EQ(world_of({}), "0 0/1 ");
    EXPECT_EQ(world_of({{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "8"}}), "0 0/1 ");
    EXPECT_EQ(world_of({{"SLURM_JOB_ID", "7"}, {"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}), "0 0/1 ");
    if (!mpi::BUILT) { return; }
    EXPECT_EQ(world_of({{"OMPI_COMM_WORLD_RANK", "2"}, {"OMPI_COMM_WORLD_SIZE", "4"}}),
              "1 2/4 mpirun started 4 ranks, which is not tp * dp: --tp 2, --dp 3");
    EXPECT_EQ(world_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "5"}}), "1 1/5 mpirun started 5 ranks, which is not tp * dp: --tp 2, --dp 3");
    EXPECT_EQ(world_of({{"PMIX_RANK", "1"}, {"SLURM_NTASKS", "8"}}), "1 1/8 mpirun started 8 ranks, which is not tp * dp: --tp 2, --dp 3");
}

int main(int argc, char** argv) {
    try {
        if (argc == 4 && argv[1] == std::string("--fail")) { return end_badly(argv[2], atoi(argv[3])); }
    } catch (const std::exception& error) { return report_error(error); }
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
