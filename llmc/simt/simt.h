// simt.h: CUDA kernels on a CPU. Included before anything else (-include llmc/simt/simt.h) where g++ compiles kernels.
//
// Types and prototypes are those of the CUDA toolkit's own headers. What they lack for a host compiler is here: the thread's
// indices, shared memory, barriers, warp intrinsics, atomics. Threads of a block are fibers of one OS thread (simt.cpp); the part of
// the runtime that the project calls is defined anew in runtime.cpp, so that nothing of CUDA is linked.
//
// Environment, read at every launch:
//   SIMT_ORDER = fwd | rev | shuf:SEED   in which order threads of a block, and blocks, run; results must not depend on it
//   SIMT_STREAMS = late | eager          late: work runs only when something waits for it, as far as events allow
//   SIMT_THREADS = N                     OS threads that run blocks (read once; default: one per core)
//
// A kernel's error ends its grid. The next call that waits for it returns an error, and cudaGetErrorString says what happened where:
// divergent barriers and shuffles, writes next to a device allocation or past dynamic shared memory, misaligned packs, host pointers,
// copies to shared memory that nobody waited for, wrong launches. Memory begins as NaN (all bits set): device allocations, and shared
// memory before every block.
//
// What kernels may use: docs/notes.md, "Rules for kernels".
#pragma once

#ifdef __CUDACC__
#error "simt.h is for g++: nvcc compiles kernels for a GPU"
#endif

// A block runs on one OS thread at a time, so its shared memory is that thread's; thread_local in a function implies static. For the
// checker far apart, so that an access past an array's end is not one to the next.
#ifdef SIMT_CHECK
#define __shared__ thread_local __attribute__((aligned(16384)))
#else
#define __shared__ thread_local __attribute__((aligned(256)))
#endif
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#undef __launch_bounds__
#define __launch_bounds__(...)

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#define LLMC_SIMT

extern constinit thread_local uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

struct Site {
    const char* file;
    int line;
    bool operator==(const Site& other) const { return line == other.line && (file == other.file || strcmp(file, other.file) == 0); }
};
// The last parameters of an intrinsic: where it was called.
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// Ends the grid with an error. Only in kernels.
[[noreturn]] void fail(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

int lane_id();
void* shared_arena();  // dynamic shared memory
void barrier(Site site);

// A warp intrinsic. The lanes of `mask` leave `mine` and sleep; the last to arrive computes everybody's result: all(args, members), where
// args[lane] is that lane's `mine`. Lanes that have ended are no members.
using Collective = void (*)(void* const* args, unsigned members);
void collective(const char* name, unsigned mask, void* mine, Collective all, Site site);

// The thread's own work begins: what comes before, in the grid's `thread`, unpacks parameters.
void kernel_begins();
// The checker (checker.h) hears of an access that is made for a thread by other means than C++'s.
#ifdef SIMT_CHECK
void thread_reads(const void* p, int bytes, Site site);
#else
inline void thread_reads(const void*, int, Site) {}
#endif

// cp.async: the destination is poisoned now, the bytes (zeros where not `valid`) land when copies_wait lets them: what reads too early
// reads NaN.
void copy_async(void* to, const void* from, int bytes, bool valid, Site site);
void copies_commit();
void copies_wait(int groups);  // until at most `groups` committed groups of this thread have not landed

template <typename Body>
void for_members(unsigned members, const Body& body) {
    for (; members; members &= members - 1) { body(__builtin_ctz(members)); }
}

template <typename T>
T shuffle(const char* name, unsigned mask, T value, int source, Site site) {
    struct Lane {
        T in, out;
        int source;
    } mine{value, value, source};
    collective(
        name, mask, &mine,
        [](void* const* args, unsigned members) {
            for_members(members, [&](int lane) {
                Lane& to = *(Lane*)args[lane];
                if (!(members >> to.source & 1)) { fail("lane %d reads lane %d, which does not take part", lane, to.source); }
                to.out = ((const Lane*)args[to.source])->in;
            });
        },
        site);
    return mine.out;
}

struct Ballot {
    unsigned bits, members;  // bits: the members whose predicate holds
};
inline Ballot ballot(const char* name, unsigned mask, bool predicate, Site site) {
    struct Lane {
        bool in;
        Ballot out;
    } mine{predicate, {}};
    collective(
        name, mask, &mine,
        [](void* const* args, unsigned members) {
            Ballot result{0, members};
            for_members(members, [&](int lane) { result.bits |= (unsigned)((const Lane*)args[lane])->in << lane; });
            for_members(members, [&](int lane) { ((Lane*)args[lane])->out = result; });
        },
        site);
    return mine.out;
}

// Blocks may run on several OS threads: atomics are atomic.
template <typename T, typename F>
__forceinline__ T read_modify_write(T* p, const F& next) {
    T old, desired;
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
    do { desired = next(old); } while (!__atomic_compare_exchange(p, &old, &desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

struct Grid {
    dim3 blocks, threads;
    size_t shared_bytes;  // dynamic
    cudaStream_t stream;
    Site site;
    const void* kernel;
    std::function<void()> thread;  // the kernel with its arguments
};
// Queues a grid. A wrong shape is an error at once.
cudaError_t launch(Grid grid);
// An error where p is neither null nor in device memory.
cudaError_t check_argument(const Grid& grid, int index, const void* p);

}  // namespace simt

inline void __syncthreads(SIMT_SITE) { simt::barrier({file, line}); }
inline void __syncwarp(unsigned mask = ~0u, SIMT_SITE) { simt::collective("__syncwarp", mask, nullptr, nullptr, {file, line}); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_SITE) {
    const int first = simt::lane_id() & ~(width - 1);
    return simt::shuffle("__shfl_sync", mask, value, first + (source & (width - 1)), {file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, SIMT_SITE) {
    const int lane = simt::lane_id(), source = lane ^ flip;
    return simt::shuffle("__shfl_xor_sync", mask, value, source / width > lane / width ? lane : source, {file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32, SIMT_SITE) {
    const int lane = simt::lane_id(), source = lane + delta;
    return simt::shuffle("__shfl_down_sync", mask, value, source / width != lane / width ? lane : source, {file, line});
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32, SIMT_SITE) {
    const int lane = simt::lane_id(), source = lane - delta;
    return simt::shuffle("__shfl_up_sync", mask, value, source < lane / width * width ? lane : source, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
    return simt::ballot("__ballot_sync", mask, predicate, {file, line}).bits;
}
inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) {
    return simt::ballot("__any_sync", mask, predicate, {file, line}).bits != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMT_SITE) {
    const simt::Ballot ballot = simt::ballot("__all_sync", mask, predicate, {file, line});
    return ballot.bits == ballot.members;
}

template <typename T>
__forceinline__ T atomicAdd(T* p, std::type_identity_t<T> value) {
    return simt::read_modify_write(p, [=](T old) -> T { return old + value; });
}
template <typename T>
__forceinline__ T atomicMin(T* p, std::type_identity_t<T> value) {
    return simt::read_modify_write(p, [=](T old) { return value < old ? value : old; });
}
template <typename T>
__forceinline__ T atomicMax(T* p, std::type_identity_t<T> value) {
    return simt::read_modify_write(p, [=](T old) { return old < value ? value : old; });
}
template <typename T>
__forceinline__ T atomicExch(T* p, std::type_identity_t<T> value) {
    return simt::read_modify_write(p, [=](T) { return value; });
}
template <typename T>
__forceinline__ T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
    return simt::read_modify_write(p, [=](T old) { return old == expected ? value : old; });
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
