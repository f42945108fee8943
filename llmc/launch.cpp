#include "launch.h"

#include <sched.h>
#include <signal.h>

#include <atomic>
#include <cinttypes>
#include <cstdlib>
#include <deque>
#include <system_error>
#include <thread>

#include "comm_local.h"
#include "comm_mpi.h"

// ---------------------------------------------------------------------------------------------------------------
// Who started this process.

static int int_from_environment(const char* name, int otherwise) {
    const char* text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

LaunchedWorld launched_world() {
    // Each launcher has its pair; Slurm's PMIx plugin gives the rank only, and the size is Slurm's.
    static const struct {
        const char *rank, *size;
    } launchers[] = {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, {"PMI_RANK", "PMI_SIZE"}, {"PMIX_RANK", "SLURM_NTASKS"}};
    for (const auto& launcher : launchers) {
        if (!getenv(launcher.rank) || !getenv(launcher.size)) { continue; }
        const int rank = int_from_environment(launcher.rank, 0), size = int_from_environment(launcher.size, 1);
        // srun gives a single task a PMI rank whether the program knows MPI or not: then the ranks are threads.
        const bool alone_under_slurm = size == 1 && getenv("SLURM_JOB_ID") && !getenv("OMPI_COMM_WORLD_SIZE");
        if (!alone_under_slurm) { return {true, rank, size}; }
    }
    return {false, 0, 1};
}

// ---------------------------------------------------------------------------------------------------------------
// Errors.

struct Failure {
    int exit_code;
    std::string message;
};

static Failure describe(const std::exception& exception) {
    if (const auto* error = dynamic_cast<const Error*>(&exception)) { return {error->exit_code, error->what()}; }
    if (dynamic_cast<const std::bad_alloc*>(&exception)) {
        return {EXIT_FAILED, "out of memory on the host\nHINT: lower --micro-batch or --seq, or use more ranks"};
    }
    const auto* system = dynamic_cast<const std::system_error*>(&exception);
    if (system && system->code() == std::errc::resource_unavailable_try_again) {
        return {EXIT_FAILED,
                format("cannot start a thread: %s\nHINT: lower --threads, --tp or --dp, or raise the limit on processes: ulimit -u",
                       system->code().message().c_str())};
    }
    return {EXIT_FAILED, exception.what()};
}

// In one write, so that lines of different ranks do not mix. Wrong usage is no rank's fault.
static void print_failure(const Failure& failure, int rank, int size) {
    const bool name_rank = size > 1 && failure.exit_code != EXIT_USAGE;
    const std::string line = "error: " + (name_rank ? format("rank %d: ", rank) : "") + failure.message + "\n";
    fflush(stdout);
    fwrite(line.data(), 1, line.size(), stderr);
    fflush(stderr);
}

int report_error(const std::exception& error) {
    const Failure failure = describe(error);
    const LaunchedWorld world = launched_world();
    // What is wrong on rank 0 is wrong on all, as a rule, and is said once: mpirun ends the others a second after rank 0 has left.
    // A rank that is still here then is the only one at fault.
    if (world.rank != 0) { std::this_thread::sleep_for(std::chrono::seconds(2)); }
    print_failure(failure, world.rank, world.size);
    return failure.exit_code;
}

// ---------------------------------------------------------------------------------------------------------------
// Ranks as threads.

constexpr int MAX_THREAD_RANKS = 1024;

static int launch_threads(int tp, int dp, const std::function<int(Ranks&)>& body) {
    const int size = tp * dp;
    // A look costs about 40 ns: 8 us, where the next rank is likely to come while this one looks, and nobody else wants its core.
    const int spin = size <= (int)std::thread::hardware_concurrency() ? 200 : 0;
    LocalGroup world_group(size, spin);
    std::deque<LocalGroup> tp_groups, dp_groups;
    for (int d = 0; d < dp; d++) { tp_groups.emplace_back(tp, spin); }
    for (int t = 0; t < tp; t++) { dp_groups.emplace_back(dp, spin); }

    std::mutex failing;  // never released by the one that fails: it speaks for all
    // The others may sleep on a futex for ever, so the process ends here, not main.
    const auto fail = [&](int rank, const std::exception& exception) {
        failing.lock();
        const Failure failure = describe(exception);
        print_failure(failure, rank, size);
        _exit(failure.exit_code);
    };
    std::vector<int> codes(size);
    const auto run_rank = [&](int rank) {
        LocalComm world(world_group, rank), tp_comm(tp_groups[rank / tp], rank % tp), dp_comm(dp_groups[rank % tp], rank / tp);
        Ranks ranks = {&world, &tp_comm, &dp_comm, size, rank};
        try {
            codes[rank] = body(ranks);
        } catch (const std::exception& exception) { fail(rank, exception); }
    };
    std::vector<std::thread> threads;
    for (int rank = 1; rank < size; rank++) {
        try {
            threads.emplace_back(run_rank, rank);
        } catch (const std::exception& exception) { fail(rank, exception); }
    }
    run_rank(0);
    for (std::thread& thread : threads) { thread.join(); }
    return *std::max_element(codes.begin(), codes.end());
}

// ---------------------------------------------------------------------------------------------------------------
// Ranks as processes.

// mpirun binds each rank to one core where there are one or two of them, and to a socket otherwise, unless it is told how to
// bind. A rank here has many threads: unless somebody chose a binding, it may use all that its launcher may.
static void leave_default_binding() {
    for (const char* choice : {"OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_hwloc_base_cpu_set", "OMPI_MCA_rmaps_base_mapping_policy",
                               "OMPI_MCA_rmaps_base_cpus_per_rank", "OMPI_MCA_orte_rankfile"}) {
        if (getenv(choice)) { return; }
    }
    cpu_set_t cpus;
    if (getenv("OMPI_COMM_WORLD_SIZE") && sched_getaffinity(getppid(), sizeof(cpus), &cpus) == 0) {
        sched_setaffinity(0, sizeof(cpus), &cpus);
    }
}

// All ranks leave together where they can: at the end of the run they wait for each other, and an error that all of them hit
// alike (wrong usage, a missing file, a loss that is not a number) is printed once. A rank that fails alone finds that out in a
// second, and aborts the job.
static int leave_together(const Failure& mine, bool failed, const mpi::World& job) {
    constexpr double FOR_EVER = 1e18, SECONDS_FOR_OTHERS = 1;
    const size_t message = std::hash<std::string>()(mine.message);
    std::vector<mpi::Outcome> all;
    if ((failed && !mpi::idle()) || !mpi::exchange_outcomes({mine.exit_code, message}, all, failed ? SECONDS_FOR_OTHERS : FOR_EVER)) {
        print_failure(mine, job.rank, job.size);
        mpi::abort(mine.exit_code);
    }
    const auto first = std::find_if(all.begin(), all.end(), [&](const mpi::Outcome& other) { return other.message == message; });
    if (failed && first - all.begin() == job.rank) { print_failure(mine, job.rank, job.size); }
    if (failed) { alarm(10); }  // a message that nobody will receive must not hold up the end
    mpi::finalize();
    int code = 0;
    for (const mpi::Outcome& outcome : all) { code = std::max(code, (int)outcome.exit_code); }
    return code;
}

static int launch_mpi(int tp, int dp, const std::function<int(Ranks&)>& body) {
    leave_default_binding();
    const mpi::World job = mpi::init(int_from_environment("OMPI_COMM_WORLD_LOCAL_SIZE", tp * dp));
    Failure outcome = {EXIT_OK, ""};
    bool failed = false;
    std::unique_ptr<Comm> world, tp_comm, dp_comm;  // outlive a body that fails: see mpi::idle
    try {
        check(job.size == tp * dp, "MPI counts %d ranks, its launcher %d\nHINT: use the mpirun of the MPI that this program was built with",
              job.size, tp * dp);
        world = mpi::group(0, job.rank);
        tp_comm = mpi::group(job.rank / tp, job.rank);
        dp_comm = mpi::group(job.rank % tp, job.rank);
        Ranks ranks = {world.get(), tp_comm.get(), dp_comm.get(), job.ranks_on_host, job.rank_on_host};
        outcome.exit_code = body(ranks);
    } catch (const std::exception& exception) {
        outcome = describe(exception);
        failed = true;
    }
    const int code = leave_together(outcome, failed, job);
    if (failed) {
        fflush(stdout);
        _exit(code);
    }
    return code;
}

// ---------------------------------------------------------------------------------------------------------------
// Signals that stand for an error.

// Weights and tokens are read through mappings, and a file that is cut meanwhile ends in a bus error. This names the file. The thread
// that comes here was reading in our own code, so it holds no lock of the library, and may print.
static void on_bus_error(int, siginfo_t* info, void*) {
    static std::atomic_flag failing;
    while (failing.test_and_set()) { pause(); }  // another thread speaks
    std::string file;
    if (FILE* maps = fopen("/proc/self/maps", "r")) {
        char line[4200];
        while (fgets(line, sizeof(line), maps)) {  // "7f00-7f10 r--s 00000000 fe:01 42   /path of the file"
            uintptr_t begin = 0, end = 0;
            int path = 0;
            const bool read = sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %*s %*s %*s %*s %n", &begin, &end, &path) == 2 && path > 0;
            if (read && begin <= (uintptr_t)info->si_addr && (uintptr_t)info->si_addr < end) {
                file.assign(line + path, strcspn(line + path, "\n"));
            }
        }
        fclose(maps);
    }
    const LaunchedWorld world = launched_world();
    print_failure({EXIT_FAILED, file.empty() ? "bus error: a file was cut while it was read, or /dev/shm is full"
                                             : format("'%s' was cut while it was read\nHINT: copy or make it again", file.c_str())},
                  world.rank, world.size);
    _exit(EXIT_FAILED);
}

static void make_errors_of_signals() {
    signal(SIGXFSZ, SIG_IGN);  // over ulimit -f: the write fails and says so
    signal(SIGPIPE, SIG_IGN);  // a reader of our output that went away must not end a run
    struct sigaction action = {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGBUS, &action, nullptr);
}

int launch(int tp, int dp, const std::function<int(Ranks&)>& body) {
    make_errors_of_signals();
    if (tp < 1 || dp < 0) { usage_error("--tp %d --dp %d: both count ranks, from 1", tp, dp); }
    const LaunchedWorld world = launched_world();
    if (!world.by_mpi) {
        const i64 threads = (i64)tp * std::max(dp, 1);
        if (threads > MAX_THREAD_RANKS) {
            usage_error("--tp %d --dp %d: %lld ranks as threads of one process, at most %d\nHINT: start them with mpirun", tp,
                        std::max(dp, 1), (long long)threads, MAX_THREAD_RANKS);
        }
        return launch_threads(tp, std::max(dp, 1), body);
    }
    if (!mpi::BUILT) {
        usage_error(
            "mpirun started %d ranks, but this build has no MPI\nHINT: build with MPI=1, or leave mpirun out: the ranks are then threads",
            world.size);
    }
    if ((dp > 0 && (i64)tp * dp != world.size) || world.size % tp != 0) {
        const std::string wanted = dp > 0 ? format("-n %lld", (long long)tp * dp) : format("with a multiple of %d ranks", tp);
        usage_error(
            "mpirun started %d ranks, which is not tp * dp: --tp %d, --dp %s\nHINT: mpirun %s; or no mpirun at all: the ranks are then "
            "threads",
            world.size, tp, dp > 0 ? std::to_string(dp).c_str() : "not given, so ranks / tp", wanted.c_str());
    }
    return launch_mpi(tp, world.size / tp, body);
}

// ---------------------------------------------------------------------------------------------------------------
// Signals.
//
// Open MPI's mpirun (4.1, tried): SIGUSR1 is passed on at once, and mpirun then ends with the ranks' exit code: the way to stop
// a run. On SIGTERM or SIGINT it waits one second, sends SIGTERM, waits another, sends SIGKILL, and ends with exit code 1: a save has
// that one second. `mpirun --mca odls_base_sigkill_timeout S`, or OMPI_MCA_odls_base_sigkill_timeout=S in the environment that mpirun is
// started from, makes both waits S seconds; they are waited in full, whether or not the ranks have left. Only mpirun reads
// this, so a rank cannot ask for it. What a rank could do is stop mpirun while it saves, and then a rank that dies leaves
// everything standing: not done. A save that is cut is no loss but of the steps since the save before.

static std::atomic<int> first_signal = 0;  // set on any thread, read on all; needs no lock

static void on_stop_signal(int signal) {
    int none = 0;
    if (!first_signal.compare_exchange_strong(none, signal) && signal == SIGINT) { _exit(128 + SIGINT); }
}

void catch_stop_signals() {
    struct sigaction action = {};
    action.sa_handler = on_stop_signal;
    action.sa_flags = SA_RESTART;  // a save that is being written goes on
    for (int signal : {SIGINT, SIGTERM, SIGUSR1, SIGHUP}) {
        struct sigaction inherited;
        sigaction(signal, nullptr, &inherited);
        if (inherited.sa_handler != SIG_IGN) { sigaction(signal, &action, nullptr); }  // a job in the background, or under nohup
    }
}

int stop_signal() { return first_signal; }

int agree_on_stop(Ranks& ranks) {
    const int mine = stop_signal();
    std::vector<int> all(ranks.world->size);
    ranks.world->share(&mine, all.data(), sizeof(int));
    return *std::max_element(all.begin(), all.end());
}
