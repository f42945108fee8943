// test_launch.cpp: how jobs start and end.
//
//   test_launch               the tests, with ranks as threads
//   test_launch --fail HOW T  ends a job of T ranks as end_badly() says: for scripts that try it under mpirun -n T
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <map>

#include "llmc/comm_mpi.h"
#include "llmc/launch.h"
#include "tiny_models.h"

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
        if (how == "stop" || how == "stop one") {
            catch_stop_signals();
            if (how == "stop one" && last) { raise(SIGTERM); }
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

static bool ignored(int signal) {
    struct sigaction now;
    sigaction(signal, nullptr, &now);
    return now.sa_handler == SIG_IGN;
}
TEST(LaunchDeathTest, WhatTheShellIgnoresStaysIgnored) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto in_background_under_nohup = [] {
        signal(SIGINT, SIG_IGN), signal(SIGHUP, SIG_IGN);
        catch_stop_signals();
        raise(SIGINT), raise(SIGINT), raise(SIGHUP);
        return ignored(SIGINT) && ignored(SIGHUP) && !ignored(SIGTERM) ? stop_signal() : 1;
    };
    const auto terminal_closes = [] {
        catch_stop_signals();
        raise(SIGHUP);
        return stop_signal();
    };
    EXPECT_EXIT(_exit(in_background_under_nohup()), testing::ExitedWithCode(0), "");
    EXPECT_EXIT(_exit(terminal_closes()), testing::ExitedWithCode(SIGHUP), "");
}

// Under mpirun, one rank that is told to stop stops all.
TEST(Launch, OneRankOfAnMpiJobIsAsked) {
    if (!mpi::BUILT || system("command -v mpirun > /dev/null") != 0) { GTEST_SKIP() << "needs MPI"; }
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1), setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    const std::string self = std::filesystem::read_symlink("/proc/self/exe");
    FILE* job = popen(("mpirun --oversubscribe -n 2 '" + self + "' --fail 'stop one' 2 2>&1").c_str(), "r");
    std::string said;
    for (int c; (c = fgetc(job)) != EOF;) { said += (char)c; }
    EXPECT_EQ(WEXITSTATUS(pclose(job)), 128 + SIGTERM);
    expect_mentions(said, {"rank 0 saved", "rank 1 saved"});
}

// A limit on the user's processes, as ulimit -u and batch systems set: some threads start, one does not.
static void allow_threads(int count) {
    const rlimit limit = {(rlim_t)count, (rlim_t)count};
    check(setrlimit(RLIMIT_NPROC, &limit) == 0, "setrlimit");
    if (geteuid() == 0) { check(setuid(54321) == 0, "setuid"); }  // root has no limit
}
TEST(LaunchDeathTest, SaysWhyThreadsCannotStart) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    const auto wait = [](Ranks& ranks) {
        ranks.world->barrier();
        return 0;
    };
    const auto in_team = [](Ranks& ranks) {
        const ::Run run = make_run(16, ranks.ranks_on_host);
        return 0;
    };
    const char* said = "cannot start a thread: Resource temporarily unavailable\nHINT: lower --threads, --tp or --dp.*ulimit -u\n$";
    EXPECT_EXIT((allow_threads(4), launch(8, 2, wait)), testing::ExitedWithCode(EXIT_FAILED), said);
    EXPECT_EXIT((allow_threads(4), launch(1, 1, in_team)), testing::ExitedWithCode(EXIT_FAILED), said);
}

TEST(LaunchDeathTest, SignalsThatStandForErrorsAreErrors) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    // Files without a name: nobody removes them for a process that ends like this.
    const auto over_the_limit = [](Ranks&) {
        const rlimit limit = {4000, 4000};
        check(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
        write_file(format("/proc/self/fd/%d", memfd_create("log", 0)), std::string(5000, 'x'));
        return 0;
    };
    const auto to_nobody = [](Ranks&) {
        int ends[2];
        check(pipe(ends) == 0, "pipe");
        close(ends[0]);
        check(write(ends[1], "x", 1) == 1, "cannot write: %s", strerror(errno));
        return 0;
    };
    [[maybe_unused]] const auto from_a_cut_file = [](Ranks& ranks) {
        if (ranks.world->rank == 1) {
            const int fd = memfd_create("the weights", 0);
            check(ftruncate(fd, 1 << 20) == 0, "ftruncate");
            const volatile char* data = (const char*)mmap(nullptr, 1 << 20, PROT_READ, MAP_SHARED, fd, 0);
            check(ftruncate(fd, 5000) == 0 && data[4999] == 0, "before the cut");
            return (int)data[1 << 19];
        }
        ranks.world->barrier();
        return 0;
    };
    EXPECT_EXIT(launch(1, 1, over_the_limit), testing::ExitedWithCode(EXIT_FAILED), "^error: cannot write '.*': File too large\n$");
    EXPECT_EXIT(launch(1, 1, to_nobody), testing::ExitedWithCode(EXIT_FAILED), "^error: cannot write: Broken pipe\n$");
#ifndef __SANITIZE_THREAD__  // to it a fault is like any signal, after which nothing may be printed
    EXPECT_EXIT(launch(2, 1, from_a_cut_file), testing::ExitedWithCode(EXIT_FAILED), "^error: '.*the weights.*' was cut.*\nHINT.*\n$");
#endif
}

TEST(Memory, SizesThat64BitsCannotCountAreRefused) {
    constexpr i64 HUGE_COUNT = (i64)3'000'000'000 * 1'000'000'000;
    Arena arena("activations");
    float* pointer;
    const char* said = "activations need more bytes than 64 bits count";
    for (const i64 count : {HUGE_COUNT, (i64)-1, std::numeric_limits<i64>::max() / 4}) {
        expect_mentions(message_of([&] { arena.add(&pointer, count); }), {said, "HINT"});
    }
    Arena many("scratch");
    const auto add_twice = [&] { many.add(&pointer, HUGE_COUNT / 2), many.add(&pointer, HUGE_COUNT / 2); };
    expect_mentions(message_of(add_twice), {"scratch needs more bytes"});

    ModelConfig m = tiny_llama();
    EXPECT_EQ(message_of([&] { ParameterTable(m, tiny_specs(m), 1, 0); }), "");
    m.channels = m.ffn = (i64)1 << 31;
    expect_mentions(message_of([&] { ParameterTable(m, tiny_specs(m), 1, 0); }), {"'layers.0.up' needs more bytes"});
    m.heads = m.head_size = m.kv_heads = (i64)1 << 31;  // the sum of q, k and v is over already
    expect_mentions(message_of([&] { ParameterTable(m, tiny_specs(m), 1, 0); }), {"needs more bytes"});
}

// Limits of a container or a batch job: the tightest counts, and what only caches files is free.
TEST(Memory, ControlGroupsLimitIt) {
    const TempDir dir;
    constexpr i64 NO_LIMIT = std::numeric_limits<i64>::max();
    EXPECT_EQ(cgroup_memory_left(dir.path, "/job/step"), NO_LIMIT);
    std::filesystem::create_directories(dir.path + "/job/step");
    const auto write_all = [&](const std::string& group, const std::map<std::string, std::string>& files) {
        for (const auto& [name, text] : files) { write_file(dir.path + group + "/" + name, text); }
    };
    write_all("/job/step", {{"memory.max", "max\n"}, {"memory.current", "500\n"}, {"memory.stat", "anon 100\nfile 400\n"}});
    EXPECT_EQ(cgroup_memory_left(dir.path, "/job/step"), NO_LIMIT);
    write_all("/job",
              {{"memory.max", "1000\n"}, {"memory.current", "600\n"}, {"memory.stat", "anon 100\ninactive_file 50\nactive_file 7\n"}});
    EXPECT_EQ(cgroup_memory_left(dir.path, "/job/step"), 1000 - 600 + 57);
    EXPECT_EQ(cgroup_memory_left(dir.path, "/elsewhere"), NO_LIMIT);
    write_all("", {{"memory.limit_in_bytes", "900\n"},
                   {"memory.usage_in_bytes", "800\n"},
                   {"memory.stat", "inactive_file 9\ntotal_inactive_file 20\ntotal_active_file 3\n"}});
    EXPECT_EQ(cgroup_memory_left(dir.path, "/job/step"), 900 - 800 + 23);
    EXPECT_EQ(cgroup_memory_left(dir.path, "/"), 123);
    write_all("/job/step", {{"memory.max", "400\n"}});
    EXPECT_EQ(cgroup_memory_left(dir.path, "/job/step"), 0);
    // No limit, as version 1 says it, and a cache that has grown between two reads.
    std::filesystem::create_directories(dir.path + "/other/alone");
    write_all("/other/alone", {{"memory.limit_in_bytes", "9223372036854771712\n"}, {"memory.usage_in_bytes", "500000\n"}, {"memory.stat", "total_inactive_file 300000\ntotal_active_file 300000\n"}});
    EXPECT_EQ(cgroup_memory_left(dir.path + "/other", "/alone"), 9223372036854771712);
    EXPECT_GT(available_memory(), 0);
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
    for (const int number : {SIGINT, SIGHUP}) { signal(number, SIG_DFL); }  // also where the tests run in the background, under nohup
    try {
        if (argc == 4 && argv[1] == std::string("--fail")) { return end_badly(argv[2], atoi(argv[3])); }
    } catch (const std::exception& error) { return report_error(error); }
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
