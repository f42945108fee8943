// values.h: random vectors, and how they are compared.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "llmc/device.h"

template <typename X>
using Vec = std::vector<X>;
using Doubles = std::vector<double>;

inline double uniform(uint64_t index, uint64_t seed) {  // splitmix64, in [-1, 1)
    uint64_t z = index * 0x9E3779B97F4A7C15u + seed * 0xD1B54A32D192ED03u + 0x632BE59BD9B4E019u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) / (1ull << 52) - 1.0;
}
template <typename X>
Vec<X> random_values(i64 count, uint64_t seed, double scale = 1.0, double shift = 0.0) {
    Vec<X> values(count);
    for (i64 i = 0; i < count; i++) { values[i] = X((float)(scale * uniform(i, seed) + shift)); }
    return values;
}
template <typename X>
Doubles doubles(const Vec<X>& values) {
    Doubles out(values.size());
    for (size_t i = 0; i < values.size(); i++) { out[i] = (double)(float)values[i]; }
    return out;
}
template <typename X>
constexpr double unit = dtype_of<X> == DType::BF16 ? 1.0 / 256 : 1.0 / (1 << 24);  // half an ulp, relative

// |got - want| <= fp32 error of a sum of that size + the rounding of the result. Written so that NaN fails.
template <typename X>
void expect_close(const Vec<X>& got, const Doubles& want, double sum_error, const char* what) {
    ASSERT_EQ(got.size(), want.size()) << what;
    for (size_t i = 0; i < want.size(); i++) {
        const double difference = std::fabs((double)(float)got[i] - want[i]), allowed = sum_error + 2 * unit<X> * std::fabs(want[i]);
        ASSERT_TRUE(difference <= allowed) << what << "[" << i << "] is " << (float)got[i] << ", not " << want[i];
    }
}

template <typename X>
bool same_bits(const Vec<X>& a, const Vec<X>& b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0);
}

// First in a test of the emulator where a fault is planted that shows in results: the checker ends the grid before (test_checker.cpp).
#ifdef SIMT_CHECK
#define FAULT_WITHOUT_CHECKER() GTEST_SKIP()
#else
#define FAULT_WITHOUT_CHECKER()
#endif
