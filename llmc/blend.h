// blend.h: which source the next window comes from, and how many windows of each a run takes: Megatron-LM's rules
// (megatron/core/datasets: helpers.cpp build_blending_indices, blended_megatron_dataset_builder.py), bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "llmc/base.h"

// NumPy's sum: the order of the additions decides the last bit.
inline double numpy_sum(const double* x, i64 n) {
    constexpr i64 LANES = 8, BLOCK = 128;
    if (n < LANES) {
        double sum = 0;
        for (i64 i = 0; i < n; i++) { sum += x[i]; }
        return sum;
    }
    if (n <= BLOCK) {
        double s[LANES];
        std::copy(x, x + LANES, s);
        i64 i = LANES;
        for (; i + LANES <= n; i += LANES) {
            for (i64 lane = 0; lane < LANES; lane++) { s[lane] += x[i + lane]; }
        }
        double sum = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
        for (; i < n; i++) { sum += x[i]; }
        return sum;
    }
    const i64 half = n / 2 / LANES * LANES;
    return numpy_sum(x, half) + numpy_sum(x + half, n - half);
}

// Weights that add to 1. Megatron does this twice before it blends, and once before it asks each set for its samples.
inline std::vector<double> normalized(std::vector<double> weights) {
    const double sum = numpy_sum(weights.data(), (i64)weights.size());
    for (double& w : weights) { w /= sum; }
    return weights;
}

// How many samples each set is asked for, of a blend of `samples`: its share and a little more, as the blend may overdraw a set.
inline std::vector<i64> blend_requests(i64 samples, const std::vector<double>& weights) {
    constexpr double SURPLUS = 0.005;
    std::vector<i64> requests;
    for (const double w : weights) { requests.push_back((i64)std::ceil(std::ceil((double)samples * w) * (1 + SURPLUS))); }
    return requests;
}

// The source that is furthest behind its share when `position` windows have been drawn, drawn[s] of them from source s; the first of
// equals.
inline size_t next_source(const std::vector<double>& weights, const std::vector<i64>& drawn, i64 position) {
    size_t best = 0;
    double best_behind = 0;
    for (size_t s = 0; s < weights.size(); s++) {
        // volatile: a compiler that fuses the product with the subtraction breaks ties differently.
        const volatile double due = weights[s] * (double)std::max<i64>(position, 1);
        const double behind = due - (double)drawn[s];
        if (s == 0 || behind > best_behind) {
            best = s;
            best_behind = behind;
        }
    }
    return best;
}
