// checker.h: the checker, what compute-sanitizer is for a GPU. In its build (make simt_check, -DSIMT_CHECK) kernels are compiled so that
// every access calls checker.cpp, which asks: is this memory that a kernel may touch, within bounds, aligned, written before it is read,
// and does it race with another thread, block or stream? A finding ends the grid, or the task, with an error. In the plain build the
// functions below are empty.
//
// What keeps two accesses from being a race:
//   between threads of a block   __syncthreads; within a warp also __syncwarp (shuffles and votes order no memory)
//   between blocks of a grid     nothing, but for __threadfence and an atomic, and an atomic of the other block on the same address later
//   between streams, and host    the order in one stream, events, what the host has waited for. All host threads are taken for one
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "grid.h"

#ifdef SIMT_CHECK
namespace simt {

// ---- for shims of libraries: what a task, running on this OS thread, reads and writes. `who` is a literal: cublasLtMatmul.
void note_read(const void* p, size_t bytes, const char* who);
void note_write(void* p, size_t bytes, const char* who);
// A read and a write where bytes that were never written stay so in the copy.
void note_copy(void* to, const void* from, size_t bytes, const char* who);

namespace checker {

constexpr bool ON = true;

// ---- for the runtime
int new_stream();  // its number
// What the host had waited for when it queued a task.
struct Clock;
using Ticket = std::shared_ptr<const Clock>;
Ticket ticket();
// A task in its stream: the `position`-th, counted from 1.
struct Place {
    int stream;
    long position;
    Ticket ticket;
};
// As long as it lives, this OS thread does the work of that task; of several where it is one work for all of their streams.
class Task {
public:
    explicit Task(std::vector<Place> places);
    ~Task();
    Task(const Task&) = delete;

private:
    struct Acting* acting_;
};
// The task that runs on this OS thread (the host, where none does) has waited for the first `position` tasks of a stream.
void waited_for(int stream, long position);
// What was found since the last call, or empty.
std::string take_report();

// ---- for guarded.h: memory that nobody else has or ever had. Only what is allowed may be touched.
char* map_memory(size_t bytes);
void unmap_memory(char* memory, size_t bytes);
void allow(char* data, size_t bytes);

// ---- for the scheduler
void begin_grid(const Grid& grid);
void end_grid();
// Blocks come one after another, on one OS thread. Shared memory: dynamic, and static ones among the thread-local variables.
void begin_block(uint3 block, int threads, std::span<char> dynamic_shared, std::span<char> thread_local_variables);
// From here on that thread of the block runs, on that stack.
void run_thread(int thread, std::span<const char> stack);
// What runs now is not the kernel's: nothing is checked until the next run_thread.
void pause();
void barrier_opened();
void warp_synced(int warp, unsigned lanes);
// cp.async: from its call to its landing nobody may touch the destination.
void copy_begins(void* to, const void* from, int bytes, bool valid, Site site);
void copy_lands(void* to, const void* from, int bytes, bool valid, Site site);

}  // namespace checker
}  // namespace simt

#else
namespace simt {

inline void note_read(const void*, size_t, const char*) {}
inline void note_write(void*, size_t, const char*) {}
inline void note_copy(void*, const void*, size_t, const char*) {}

namespace checker {

constexpr bool ON = false;
inline int new_stream() { return 0; }
struct Ticket {};
inline Ticket ticket() { return {}; }
struct Place {
    int stream;
    long position;
    Ticket ticket;
};
struct Task {
    explicit Task(const std::vector<Place>&) {}
};
inline void waited_for(int, long) {}
inline std::string take_report() { return ""; }
inline void begin_grid(const Grid&) {}
inline void end_grid() {}
inline void begin_block(uint3, int, std::span<char>, std::span<char>) {}
inline void run_thread(int, std::span<const char>) {}
inline void pause() {}
inline void barrier_opened() {}
inline void warp_synced(int, unsigned) {}
inline void copy_begins(void*, const void*, int, bool, Site) {}
inline void copy_lands(void*, const void*, int, bool, Site) {}

}  // namespace checker
}  // namespace simt
#endif
