// ops_testing.h: what the tests of the ops share. Every op is held against a loop written in the test in double precision,
// in float and bf16, at sizes 1, odd, prime and past a block; gradients also against finite differences of those loops; and
// every op must give the same bits for 1, 2 and 3 threads.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <tuple>

#include "llmc/ops.h"
#include "values.h"

using namespace BACKEND;

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
