// global_norm.cuh: sums of squares in double, over pieces of fixed size added in order: the same bits on every rank and for
// any number of threads, which is what clipping needs.
//
//   sum of data[i]^2, i < count        sum of (a[n,c] - scale b[n,c])^2, n < N, c < cols
#pragma once

#include "common.cuh"

namespace cpu {

ALWAYS_INLINE void add_squares(vdouble& sum, vfloat v) {  // by reference: how a wide vector is returned depends on the target
    const vdouble d = __builtin_convertvector(v, vdouble);
    sum += d * d;
}
ALWAYS_INLINE double sum_in_order(const vdouble& v) {
    double sum = 0.0;
    for (int l = 0; l < VL; l++) { sum += v[l]; }
    return sum;
}
inline double sum_in_order(const std::vector<double>& parts) {
    double sum = 0.0;
    for (double part : parts) { sum += part; }
    return sum;
}

template <typename X>
double sum_of_squares(const X* data, i64 count, Run& run) {
    const i64 grain = 65536;
    std::vector<double> parts(ceil_div(count, grain));
    parallel_pieces(count, grain, run, [&](i64 begin, i64 n) {
        vdouble sum{};
        vector_loop(n, [&](i64 i, auto lanes) { add_squares(sum, load(data + begin + i, lanes)); });
        parts[begin / grain] = sum_in_order(sum);
    });
    return sum_in_order(parts);
}

template <typename X>
double sum_of_squared_differences(const X* a, const float* b, float scale, i64 ld, i64 N, i64 cols, Run& run) {
    std::vector<double> parts(N);
    parallel_rows(N, cols, run, [&](i64 r) {
        vdouble sum{};
        vector_loop(cols, [&](i64 i, auto lanes) { add_squares(sum, load(a + r * ld + i, lanes) - scale * load(b + r * ld + i, lanes)); });
        parts[r] = sum_in_order(sum);
    });
    return sum_in_order(parts);
}

}  // namespace cpu

template <typename X>
double sum_of_squares(const X* data, i64 count, Run& run) {
    return cpu::sum_of_squares(data, count, run);
}
template <typename X>
double sum_of_squared_differences(const X* a, const float* b, float scale, i64 ld, i64 N, i64 cols, Run& run) {
    return cpu::sum_of_squared_differences(a, b, scale, ld, N, cols, run);
}
