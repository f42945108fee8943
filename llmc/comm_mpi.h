// comm_mpi.h: ranks that are processes started by mpirun or srun. MPI itself is seen by comm_mpi.cpp alone; a build with
// -DLLMC_MPI=0 needs no MPI at all, and launch() then refuses to run under mpirun.
#pragma once

#include <memory>

#include "comm.h"

namespace mpi {

extern const bool BUILT;  // false: every function below dies

// Joins the job. Called once, by the thread that then makes all calls. Only room in /dev/shm is planned for the number expected.
struct World {
    int rank, size, ranks_on_host, rank_on_host;
};
World init(int expected_ranks_on_host);

// The group of all ranks that give the same color, in the order of their keys. All ranks of the job call it. A group owns its
// duplicated communicator until MPI_Finalize. Exchanges go in pieces of this many bytes of each rank's part.
constexpr i64 PIECE_BYTES = 8 << 20;
std::unique_ptr<Comm> group(int color, int key, i64 piece_bytes = PIECE_BYTES);

// Whether no exchange of this rank is under way: none may write to memory that a failed rank has given up.
bool idle();

// Tells all ranks how this one ended; true when all of them have told, within the time given. `all` gets everyone's outcome.
struct Outcome {
    i64 exit_code;
    size_t message;  // a hash: equal for equal messages
};
bool exchange_outcomes(const Outcome& mine, std::vector<Outcome>& all, double seconds);

void finalize();
[[noreturn]] void abort(int exit_code);  // takes all ranks of the job down

}  // namespace mpi
