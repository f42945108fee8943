// exchange.cuh: a collective among ranks whose arrays lie in one GPU's memory. Element i of rank r's part:
//
//   sum    data[q][i] = data[0][i] + data[1][i] + ...   in rank order, in fp32, rounded once; for all q, or for q = r alone
//   copy   data[q][i] = data[r][i]                      for all q
//
// Its oracle is the host's sum (sum_in_rank_order in comm.h), bit for bit.
#pragma once

#include "common.cuh"

#ifdef LLMC_KERNELS
namespace gpu {

// A grid's row of blocks is one part.
template <typename X, int W>
__global__ void __launch_bounds__(THREADS) sum_over_ranks_kernel(const __grid_constant__ RankArrays arrays, bool to_all) {
    const int owner = blockIdx.y;
    const Range part = arrays.parts[owner];
    const auto at = [&](int r, i64 i) { return (X*)arrays.data[r] + part.begin + i; };
    flat_loop<W>(part.end - part.begin, [&](i64 i, auto width) {
        Floats<width> sum = load<width>(at(0, i));
        for (int r = 1; r < arrays.ranks; r++) { sum += load<width>(at(r, i)); }
        for (int r = to_all ? 0 : owner; r < (to_all ? arrays.ranks : owner + 1); r++) { store(at(r, i), sum); }
    });
}
// Of units that are copied whole.
template <typename Unit>
__global__ void __launch_bounds__(THREADS) copy_over_ranks_kernel(const __grid_constant__ RankArrays arrays) {
    const int owner = blockIdx.y;
    const Range part = arrays.parts[owner];
    flat_loop<1>(part.end - part.begin, [&](i64 i, auto) {
        const Unit unit = ((const Unit*)arrays.data[owner])[part.begin + i];
        for (int r = 0; r < arrays.ranks; r++) {
            if (r != owner) { ((Unit*)arrays.data[r])[part.begin + i] = unit; }
        }
    });
}

inline Shape parts_shape(const RankArrays& arrays, int W, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    i64 largest = 0;
    int rows = 0;
    for (int r = 0; r < arrays.ranks; r++) {
        if (arrays.parts[r].size() == 0) { continue; }
        largest = std::max(largest, arrays.parts[r].size());
        rows = r + 1;
    }
    const Shape flat = flat_shape(largest, W, file, line);
    return {dim3(flat.grid.x, rows), flat.block, 0, file, line};
}
// Whether every part of every array begins at a multiple of `bytes`.
inline bool parts_aligned(const RankArrays& arrays, i64 element_bytes, i64 bytes) {
    for (int r = 0; r < arrays.ranks; r++) {
        const bool aligned = (uintptr_t)arrays.data[r] % bytes == 0 && arrays.parts[r].begin * element_bytes % bytes == 0;
        if (!aligned) { return false; }
    }
    return true;
}

// Parts that follow each other and are summed for all are one: only then do they begin where packs do.
inline RankArrays joined(RankArrays arrays) {
    for (int r = 1; r < arrays.ranks; r++) {
        if (arrays.parts[r].begin != arrays.parts[r - 1].end) { return arrays; }
    }
    arrays.parts[0].end = arrays.parts[arrays.ranks - 1].end;
    for (int r = 1; r < arrays.ranks; r++) { arrays.parts[r] = {0, 0}; }
    return arrays;
}

void sum_over_ranks(RankArrays arrays, DType dtype, bool to_all, Run& run) {
    if (to_all) { arrays = joined(arrays); }
    with_type(dtype, [&](auto value) {
        using X = decltype(value);
        with_width<X>(parts_aligned(arrays, sizeof(X), 16), [&](auto width) {
            launch(sum_over_ranks_kernel<X, width>, parts_shape(arrays, width), run, arrays, to_all);
        });
    });
}

void copy_over_ranks(RankArrays arrays, i64 element_bytes, Run& run) {
    const auto copy = [&](auto unit) {
        for (int r = 0; r < arrays.ranks; r++) {
            Range& part = arrays.parts[r];
            part = {part.begin * element_bytes / (i64)sizeof(unit), part.end * element_bytes / (i64)sizeof(unit)};
        }
        launch(copy_over_ranks_kernel<decltype(unit)>, parts_shape(arrays, 1), run, arrays);
    };
    const auto whole = [&](i64 bytes) {
        for (int r = 0; r < arrays.ranks; r++) {
            if (arrays.parts[r].size() * element_bytes % bytes != 0) { return false; }
        }
        return parts_aligned(arrays, element_bytes, bytes);
    };
    if (whole(16)) { copy(uint4{}); }
    else if (whole(4)) { copy(0u); }
    else { copy((unsigned char)0); }
}

}  // namespace gpu
#endif
