// launch.h: from one command line to tp * dp ranks: threads of this process, or the processes of an MPI job.
//
//   int main(int argc, char** argv) {
//       try {
//           const Flags flags = parse(argc, argv);                                    // on every rank
//           return launch(flags.tp, flags.dp, [&](Ranks& ranks) { return train(flags, ranks); });
//       } catch (const std::exception& error) {
//           return report_error(error);                                               // printed once
//       }
//   }
#pragma once

#include <functional>

#include "comm.h"

// What the environment says about this process: started by mpirun or srun as one rank of an MPI job, or alone. No MPI is called.
struct LaunchedWorld {
    bool by_mpi;
    int rank, size;  // 0, 1 when alone
};
LaunchedWorld launched_world();

// Runs body as every rank of this process and returns its exit code (the largest, where ranks differ). dp = 0 means what is
// left of the MPI job's ranks (1 when alone). Throws a usage error where tp * dp is not the job's size, alike on all ranks,
// before anything is started. From then on a write over ulimit -f or to a closed pipe fails (EFBIG, EPIPE) and kills nobody: check writes.
// A body that throws ends the whole job within seconds: its reason is printed once, and launch does not return.
int launch(int tp, int dp, const std::function<int(Ranks&)>& body);

// For errors before launch: prints on rank 0 of the job only, and returns the exit code.
int report_error(const std::exception& error);

// SIGINT, SIGTERM, SIGUSR1 and SIGHUP ask for a stop: the trainer looks between steps, saves and returns 128 + the signal. A second
// SIGINT leaves at once. Until catch_stop_signals() they do what they always do, and one that whoever started this process ignores (a
// shell that started it in the background, nohup) stays ignored. To stop an mpirun job send SIGUSR1 to
// mpirun, which passes it on; with SIGTERM it gives its ranks one second (see launch.cpp).
void catch_stop_signals();
int stop_signal();                // the first signal that came, or 0
int agree_on_stop(Ranks& ranks);  // the largest stop_signal() of any rank: the same on all. One small all-gather
