// ops_testing.h: what the tests of the ops share. Every op is held against a loop written in the test in double precision,
// in float and bf16, at sizes 1, odd, prime and past a block; gradients also against finite differences of those loops; and
// every op must give the same bits for 1, 2 and 3 threads.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <tuple>
#include <vector>

#include "llmc/ops.h"

template <typename X>
using Vec = std::vector<X>;
using Doubles = std::vector<double>;

// ---- helpers --------------------------------------------------------------------------------------------------------
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
// The op's outputs (a tuple of vectors), which must be the same bits for any number of threads.
template <typename Op>
auto for_any_threads(const Op& op) {
    Run one(1), two(2), three(3);
    const auto expected = op(one);
    for (Run* run : {&two, &three}) {
        const auto found = op(*run);
        std::apply(
            [&](const auto&... a) {
                std::apply([&](const auto&... b) { EXPECT_TRUE((same_bits(a, b) && ...)) << "threads change bits"; }, found);
            },
            expected);
    }
    return expected;
}

// d loss / d input by central differences, against a gradient that an op gave.
template <typename X>
void expect_slope(const std::function<double(const Doubles&)>& loss, const Doubles& input, const Vec<X>& grad, double error,
                  const char* what) {
    const double h = 1e-5;
    for (size_t i = 0; i < input.size(); i += 1 + input.size() / 40) {
        Doubles up = input, down = input;
        up[i] += h;
        down[i] -= h;
        const double slope = (loss(up) - loss(down)) / (2 * h), difference = std::fabs(slope - (double)(float)grad[i]);
        ASSERT_TRUE(difference <= error + 2 * unit<X> * std::fabs(slope))
            << what << "[" << i << "] " << (float)grad[i] << ", slope " << slope;
    }
}
inline double dot(const Doubles& a, const Doubles& b) {
    double sum = 0.0;
    for (size_t i = 0; i < a.size(); i++) { sum += a[i] * b[i]; }
    return sum;
}
inline GradMode grad_mode(bool add) { return add ? GradMode::ADD : GradMode::WRITE; }

template <typename X>
class Ops : public testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Ops, Types);
