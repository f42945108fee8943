// common.cuh: how the CPU loops of the ops are cut into items, and the sums over rows that several of them need.
//
// Every cut follows from shapes alone, never from the number of threads: that is what makes results independent of it.
//
// An op's file holds both sides. A compiler that takes kernels (nvcc, or g++ with the emulator) sees those, under LLMC_KERNELS; any
// other sees the CPU loops. So the tests of a GPU build, which g++ compiles, have the loops as their oracle.
#pragma once

#include "../ops.h"

// body(a value of type `wire`): for pointers into memory of that type.
template <typename F>
void with_type(DType wire, const F& body) {
    if (wire == DType::BF16) {
        body(bf16{});
    } else {
        body(float{});
    }
}

#if defined(__CUDACC__) || defined(LLMC_SIMT)
#define LLMC_KERNELS
#include "kernel.cuh"
#else
#include "../simd.h"

namespace cpu {

// body(row) for every row; an item is as many rows as make about 16k elements.
template <typename Body>
void parallel_rows(i64 rows, i64 row_elements, Run& run, const Body& body) {
    const i64 per_item = std::max<i64>(16384 / std::max<i64>(row_elements, 1), 1);
    run.parallel(ceil_div(rows, per_item), [&](i64 item) {
        const i64 end = std::min(rows, (item + 1) * per_item);
        for (i64 row = item * per_item; row < end; row++) { body(row); }
    });
}

// body(begin, count) over a flat range, in pieces of `grain` elements.
template <typename Body>
void parallel_pieces(i64 count, i64 grain, Run& run, const Body& body) {
    run.parallel(ceil_div(count, grain), [&](i64 item) { body(item * grain, std::min(grain, count - item * grain)); });
}

template <typename X>
void add_to(float* sum, const X* x, i64 count) {
    vector_loop(count, [&](i64 i, auto lanes) { store(sum + i, load(sum + i, lanes) + load(x + i, lanes), lanes); });
}

// A sum over rows is made of partial sums over at most 128 chunks of at least 16 rows, added in order.
struct RowChunks {
    i64 rows, size, count;
    explicit RowChunks(i64 N) : rows(N), size(std::max<i64>(16, ceil_div(N, 128))), count(ceil_div(N, size)) {}
    Range operator[](i64 chunk) const { return {chunk * size, std::min(rows, (chunk + 1) * size)}; }
};
// to (cols) (+)= sum over chunks of partials (count, cols; ld).
template <typename G>
void combine_partials(G* to, const float* partials, i64 count, i64 ld, i64 cols, GradMode mode, Run& run) {
    constexpr i64 PIECE = 256;
    parallel_pieces(cols, PIECE, run, [&](i64 begin, i64 n) {
        float sum[PIECE] = {};
        if (mode == GradMode::ADD) { add_to(sum, to + begin, n); }
        for (i64 chunk = 0; chunk < count; chunk++) { add_to(sum, partials + chunk * ld + begin, n); }
        vector_loop(n, [&](i64 i, auto lanes) { store(to + begin + i, load(sum + i, lanes), lanes); });
    });
}

}  // namespace cpu
#endif
