// device_rank.h: one rank of a job on its device: the Run for its kernels, and its groups for arrays where those kernels reach them.
//
//   launch(tp, dp, [&](Ranks& host) {
//       DeviceRank rank(host, threads, comm_timeout);
//       return train(rank.ranks, rank.run);
//   });
//
// On the CPU these are a share of the host's threads and the groups of launch() themselves. On a GPU (comm_device.h):
//
//   the ranks are      each has a GPU of its own        they share GPUs
//   threads            comm_nccl.h, where it is built   comm_device_local.h: all on the first GPU, one kernel adds
//   processes          comm_nccl.h, where it is built   comm_staged.h: through the hosts' memory, by MPI
#pragma once

#include "comm.h"
#include "launch.h"

// Where a plan would run: its memory, and how many of the ranks share it. 0 bytes: not known.
struct PlannedDevice {
    std::string name;
    i64 bytes = 0;
    int ranks = 0;
};

#if !defined(LLMC_CUDA)

inline PlannedDevice planned_device(const Ranks&, const LaunchedWorld&) { return {}; }  // mostly another machine
struct DeviceRank {
    Run run;
    Ranks ranks;
    DeviceRank(const Ranks& host, int threads, double) : run(make_run(threads, host.ranks_on_host)), ranks(host) { ranks.connect(run); }
    DeviceRank(const DeviceRank&) = delete;
};
inline Run planning_run() { return Run(1); }

#else

#include <memory>
#include <set>

#include "attention_cudnn.h"
#include "comm_device_local.h"
#include "comm_nccl.h"
#include "comm_staged.h"

inline bool threads_share_a_gpu(int gpus, int ranks) { return !nccl::BUILT || gpus < ranks; }

// Which GPU a rank takes: one of its own, or one that it shares. Threads that share share the first.
inline int choose_gpu(const Ranks& host) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    check(error == cudaSuccess && count > 0, "no GPU can be used: %s\nHINT: nvidia-smi shows what there is; ./train_gpt runs on the CPU",
          error == cudaSuccess ? "there is none" : cudaGetErrorString(error));
    return !launched_world().by_mpi && threads_share_a_gpu(count, host.ranks_on_host) ? 0 : host.rank_on_host % count;
}

// The first GPU, if there is one.
inline PlannedDevice planned_device(const Ranks& ranks, const LaunchedWorld& launched) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        cudaGetLastError();  // asked, not needed
        return {};
    }
    const cudaDeviceProp gpu = gpu_properties(0);
    const int sharing = launched.by_mpi ? ranks.ranks_on_device : threads_share_a_gpu(count, ranks.world->size) ? ranks.world->size : 1;
    return {gpu.name, (i64)gpu.totalGlobalMem, sharing};
}

// The reduces in every layer want the links within a host. A line for the user where a group of T consecutive ranks is on several; else nothing.
inline std::string note_of_split_groups(const std::vector<std::string>& hosts, int T) {
    for (size_t r = 0; r < hosts.size(); r++) {
        const size_t first = r / T * T;
        if (hosts[r] == hosts[first]) { continue; }
        return format("note: the %d tensor-parallel ranks from rank %zu on are on several hosts (%s, %s): every layer's reduce crosses the network\n"
                      "HINT: mpirun --map-by slot, or srun --distribution=block, puts consecutive ranks on one host\n",
                      T, first, hosts[first].c_str(), hosts[r].c_str());
    }
    return "";
}

class DeviceRank {
public:
    Run run;
    Ranks ranks;

    // A collective of NCCL's that takes longer than comm_timeout seconds ends the run.
    DeviceRank(const Ranks& host, int, double comm_timeout) : run(choose_gpu(host)), ranks(host), comm_timeout_(comm_timeout) {
        run.attention = cudnn::attention();
        const std::vector<Seat> seats = all_seats(*host.world);
        ranks.ranks_on_device = (int)std::count(seats.begin(), seats.end(), seats[host.world->rank]);
        const bool alone = std::set(seats.begin(), seats.end()).size() == seats.size();
        const Kind kind = alone && nccl::BUILT ? NCCL : launched_world().by_mpi ? STAGED : LOCAL;
        ranks.world = add(*host.world, STAGED);  // shares values of the host's, no arrays
        ranks.tp = add(*host.tp, kind), ranks.dp = add(*host.dp, kind);
        if (kind == NCCL) { ranks.connect(run); }  // who waits for the GPU looks for errors
        if (seats.size() > 1) { run.collectives = kind == NCCL ? "NCCL" : kind == LOCAL ? "one kernel for all ranks" : "through the host's memory"; }
        if (host.world->rank == 0) {
            std::vector<std::string> hosts;
            for (const Seat& seat : seats) { hosts.push_back(seat.host); }
            fputs(note_of_split_groups(hosts, host.tp->size).c_str(), stderr);
        }
    }
    DeviceRank(const DeviceRank&) = delete;

private:
    enum Kind { LOCAL, STAGED, NCCL };

    // Where a rank sits.
    struct Seat {
        char host[64];
        cudaUUID_t gpu;
        auto operator<=>(const Seat& other) const { return memcmp(this, &other, sizeof(Seat)) <=> 0; }
        bool operator==(const Seat& other) const { return memcmp(this, &other, sizeof(Seat)) == 0; }
    };
    std::vector<Seat> all_seats(Comm& world) const {
        Seat mine = {};
        snprintf(mine.host, sizeof(mine.host), "%s", host_name().c_str());
        mine.gpu = gpu_properties(run.gpu).uuid;
        std::vector<Seat> all(world.size);
        world.share(&mine, all.data(), sizeof(Seat));
        return all;
    }

    Comm* add(Comm& host, Kind kind) {
        if (kind == NCCL) { comms_.push_back(nccl::group(host, run, comm_timeout_)); }
        else if (kind == LOCAL) { comms_.push_back(std::make_unique<LocalDeviceComm>(host, run)); }
        else { comms_.push_back(std::make_unique<StagedComm>(host, run)); }
        return comms_.back().get();
    }

    const double comm_timeout_;
    std::vector<std::unique_ptr<Comm>> comms_;
};
inline Run planning_run() { return Run(NO_GPU); }

#endif

// A rank whose job is only counted, whatever its size: for a dry run.
class PlannedRank {
    struct Counted : Comm {
        using Comm::Comm;
        void start(int, Exchange) override { die("a dry run sends nothing"); }
        void finish(int) override {}
    };
    Counted world_, tp_, dp_;

public:
    Run run = planning_run();
    Ranks ranks = {&world_, &tp_, &dp_, 1};
    PlannedRank(int tp, int dp) : world_(0, (int)std::min<i64>((i64)tp * dp, INT32_MAX)), tp_(0, tp), dp_(0, dp) {}
};
