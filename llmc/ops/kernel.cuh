// kernel.cuh: what kernels are made of, the same for nvcc and for the emulator: launches, dynamic shared memory, packs of 128 bits,
// sums over a warp and over a block.
//
// Kernels are deterministic: no sum depends on the order in which threads or blocks run, and how a sum is cut follows from shapes alone.
#pragma once

#include <algorithm>
#include <bit>
#include <tuple>
#include <type_traits>

#include "../ops.h"

namespace gpu {

constexpr unsigned ALL_LANES = 0xFFFFFFFF;

// Before a loop: nvcc unrolls it whole (what it indexes must stay in registers), twice, or not at all.
#ifdef LLMC_SIMT
#define UNROLL
#define UNROLL_TWICE
#define NO_UNROLL
#else
#define UNROLL _Pragma("unroll")
#define UNROLL_TWICE _Pragma("unroll 2")
#define NO_UNROLL _Pragma("unroll 1")
#endif

// ---- launches -------------------------------------------------------------------------------------------------------
struct Shape {
    dim3 grid, block;
    size_t shared_bytes = 0;  // dynamic
    const char* file = __builtin_FILE();
    int line = __builtin_LINE();
};

// launch(kernel<X, W>, {grid, block}, run, arguments...): the arguments become the kernel's parameter types. An empty grid is no work.
template <typename... P, typename... A>
void launch(void (*kernel)(P...), const Shape& shape, Run& run, A... arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "the kernel takes another number of arguments");
    if (shape.grid.x == 0 || shape.grid.y == 0) { return; }
    const auto checked = [&](cudaError_t error) { cuda_check(error, shape.file, shape.line); };
    if (shape.shared_bytes > 48 << 10) {  // more must be asked for
        checked(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shape.shared_bytes));
    }
#ifdef LLMC_SIMT
    const simt::Grid grid{shape.grid,
                          shape.block,
                          shape.shared_bytes,
                          run.stream,
                          {shape.file, shape.line},
                          (const void*)kernel,
                          [kernel, parameters = std::tuple<P...>(arguments...)] {
                              const auto thread = [kernel](P... p) { simt::kernel_begins(), kernel(p...); };
                              std::apply(thread, parameters);
                          }};
    [[maybe_unused]] int index = 0;
    [[maybe_unused]] const auto check_pointer = [&](const auto& argument) {
        index++;
        if constexpr (std::is_pointer_v<std::decay_t<decltype(argument)>>) { checked(simt::check_argument(grid, index, argument)); }
    };
    (check_pointer(arguments), ...);
    checked(simt::launch(grid));
#else
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid, config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared_bytes, config.stream = run.stream;
    checked(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...));
#endif
}

// A grid's x has 31 bits.
inline unsigned blocks(i64 count) { return (unsigned)narrow<int>(count); }

template <typename X>
__device__ __forceinline__ X* dynamic_shared() {
#ifdef LLMC_SIMT
    return (X*)simt::shared_arena();
#else
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[];
    return (X*)dynamic_shared_bytes;
#endif
}

// ---- packs ----------------------------------------------------------------------------------------------------------
// A thread reads and writes W neighbours at a time, as floats. Kernels are compiled for W = widest<X>, 128 bits, and for W = 1, which takes
// any address; with_width chooses.
template <typename X>
constexpr int widest = 16 / sizeof(X);

template <int W>
struct Floats {
    float lane[W];
    __device__ __forceinline__ float& operator[](int i) { return lane[i]; }
    __device__ __forceinline__ float operator[](int i) const { return lane[i]; }
    __device__ __forceinline__ Floats& operator+=(const Floats& other) {
        for (int i = 0; i < W; i++) { lane[i] += other[i]; }
        return *this;
    }
};

template <typename X, int W>
struct alignas(W * sizeof(X) < 16 ? W * sizeof(X) : 16) Pack {
    X lane[W];
};

template <int W, typename X>
__device__ __forceinline__ Floats<W> load(const X* p) {
#ifdef LLMC_SIMT
    if ((uintptr_t)p % alignof(Pack<X, W>) != 0) { simt::fail("%d elements are read at a misaligned address", W); }
#endif
    const Pack<X, W> pack = *reinterpret_cast<const Pack<X, W>*>(p);
    Floats<W> values;
    for (int i = 0; i < W; i++) { values[i] = (float)pack.lane[i]; }
    return values;
}
template <int W, typename X>
__device__ __forceinline__ void store(X* p, const Floats<W>& values) {
#ifdef LLMC_SIMT
    if ((uintptr_t)p % alignof(Pack<X, W>) != 0) { simt::fail("%d elements are written at a misaligned address", W); }
#endif
    Pack<X, W> pack;
    for (int i = 0; i < W; i++) { pack.lane[i] = (X)values[i]; }
    *reinterpret_cast<Pack<X, W>*>(p) = pack;
}

// Whether rows that begin at p, p + ld, p + 2 ld, ... can be read W at a time (a null pointer can).
template <typename X>
bool rows_aligned(int W, const X* p, i64 ld) {
    const size_t bytes = W * sizeof(X) < 16 ? W * sizeof(X) : 16;
    return (uintptr_t)p % bytes == 0 && ld * sizeof(X) % bytes == 0;
}

template <int W>
using Width = std::integral_constant<int, W>;

// body(Width<W>): W = widest<X> where `wide` holds, else 1.
template <typename X, typename Body>
void with_width(bool wide, const Body& body) {
    if (wide) {
        body(Width<widest<X>>{});
    } else {
        body(Width<1>{});
    }
}

// ---- loops ----------------------------------------------------------------------------------------------------------
constexpr int THREADS = 256;  // of a block, at most

// Threads that share a row of `count` elements: whole warps, no more than there is work for.
inline unsigned row_threads(i64 count, int W) { return (unsigned)std::clamp<i64>(round_up(ceil_div(count, W), 32), 32, THREADS); }

// One pack a thread over a flat range: body(i, Width<W>), and body(i, Width<1>) for the elements after the last whole pack.
template <int W, typename Body>
__device__ __forceinline__ void flat_loop(i64 count, const Body& body) {
    const i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (i + W <= count) {
        body(i, Width<W>{});
    } else {
        for (i64 j = i; j < count; j++) { body(j, Width<1>{}); }
    }
}
inline Shape flat_shape(i64 count, int W, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {blocks(ceil_div(count, THREADS * W)), THREADS, 0, file, line};
}

// A block's loop over a row at any address: body(i, Width<W>) where packs are aligned, body(i, Width<1>) before and after.
template <int W, typename X, typename Body>
__device__ __forceinline__ void row_loop(const X* row, i64 count, const Body& body) {
    const i64 before = (0 - (uintptr_t)row / sizeof(X)) % W, head = before < count ? before : count;
    const i64 tail = head + (count - head) / W * W;
    if (threadIdx.x < head) { body((i64)threadIdx.x, Width<1>{}); }
    for (i64 i = head + threadIdx.x * W; i < tail; i += blockDim.x * W) { body(i, Width<W>{}); }
    if (tail + threadIdx.x < count) { body(tail + threadIdx.x, Width<1>{}); }
}

// ---- sums -----------------------------------------------------------------------------------------------------------
// The same bits on every lane.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
    for (int distance = 16; distance > 0; distance /= 2) { value += __shfl_xor_sync(ALL_LANES, value, distance); }
    return value;
}
template <int W>
__device__ __forceinline__ Floats<W> warp_sum(Floats<W> value) {
    for (int i = 0; i < W; i++) { value[i] = warp_sum(value[i]); }
    return value;
}

// Of the block; the compiler sees that it is the same on every lane.
__device__ __forceinline__ int warp_index() { return __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0); }

// Over a block of a whole number of warps: the warps' sums in order, the same bits on every thread. `parts` is shared memory for one value
// a warp; it is free again after the block's next barrier.
template <typename T>
__device__ __forceinline__ T block_sum(T value, T* parts) {
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) { parts[threadIdx.x / 32] = value; }
    __syncthreads();
    T sum = parts[0];
    for (unsigned warp = 1; warp < blockDim.x / 32; warp++) { sum += parts[warp]; }
    return sum;
}

// ---- sums over rows -------------------------------------------------------------------------------------------------
// As partial sums over at most 512 chunks of at least 16 rows.
struct RowChunks {
    i64 size, count;
    explicit RowChunks(i64 N) : size(std::max<i64>(16, ceil_div(N, 512))), count(ceil_div(N, size)) {}
};
// to (cols) (+)= sum over chunks of partials (count, cols; ld). 32 columns a block, WARPS warps that each take every WARPS-th chunk.
template <typename G, int WARPS>
__global__ void combine_partials_kernel(G* to, const float* __restrict__ partials, i64 count, i64 ld, i64 cols, bool add) {
    __shared__ float sums[WARPS][32];
    const i64 c = (i64)blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (c < cols) {
        for (i64 i = threadIdx.y; i < count; i += WARPS) { sum += partials[i * ld + c]; }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < cols) {
        sum = add ? (float)to[c] : 0.0f;
        for (int i = 0; i < WARPS; i++) { sum += sums[i][threadIdx.x]; }
        to[c] = (G)sum;
    }
}
template <typename G>
void combine_partials(G* to, const float* partials, i64 count, i64 ld, i64 cols, GradMode mode, Run& run) {
    launch(combine_partials_kernel<G, 16>, {blocks(ceil_div(cols, 32)), dim3(32, 16)}, run, to, partials, count, ld, cols,
           mode == GradMode::ADD);
}

}  // namespace gpu
