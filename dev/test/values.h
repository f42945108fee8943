// values.h: random vectors, what they must give, how they are compared; the words of errors.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "llmc/device.h"
#include "llmc/rounding.h"

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
// Master weights as parameters and lower halves (rounding.h), and back; `first`: the first one's place. fp32 parameters are their own.
template <typename X>
Vec<X> params_of(const Vec<float>& masters, Rounding by, i64 first) {
    Vec<X> params(masters.size());
    for (size_t i = 0; i < masters.size(); i++) { params[i] = dtype_of<X> == DType::FP32 ? X(masters[i]) : X(by(masters[i], first + (i64)i)); }
    return params;
}
inline Vec<uint16_t> lower_halves(const Vec<float>& masters) {
    Vec<uint16_t> low(masters.size());
    std::transform(masters.begin(), masters.end(), low.begin(), lower_half);
    return low;
}
template <typename X>
Vec<float> masters_of(const Vec<X>& params, const Vec<uint16_t>& low, Rounding by, i64 first) {
    Vec<float> masters(params.size());
    for (size_t i = 0; i < params.size(); i++) { masters[i] = dtype_of<X> == DType::FP32 ? (float)params[i] : by.master((float)params[i], low[i], first + (i64)i); }
    return masters;
}
template <typename X>
constexpr double unit = dtype_of<X> == DType::BF16 ? 1.0 / 256 : 1.0 / (1 << 24);  // half an ulp, relative

// body(a value of the type) for each type of gradients that belongs to activations of type X.
template <typename X, typename Body>
void for_gradient_types(const Body& body) {
    body(float{});
    if constexpr (dtype_of<X> == DType::BF16) { body(bf16{}); }
}

// |got - want| <= fp32 error of a sum of that size + the rounding of the result + that of what was summed: `terms` are the sums of its terms' sizes.
// Written so that NaN fails.
template <typename X>
void expect_close(const Vec<X>& got, const Doubles& want, double sum_error, const char* what, const Doubles& terms = {}) {
    ASSERT_EQ(got.size(), want.size()) << what;
    for (size_t i = 0; i < want.size(); i++) {
        const double difference = std::fabs((double)(float)got[i] - want[i]);
        const double allowed = sum_error + 2 * unit<X> * std::fabs(want[i]) + (terms.empty() ? 0.0 : unit<X> * terms[i]);
        ASSERT_TRUE(difference <= allowed) << what << "[" << i << "] is " << (float)got[i] << ", not " << want[i];
    }
}

// The oracle of a linear layer's products, in double. out (N, OC; ld) = alpha * in W^T; din (N, K) and dweight (OC, K) are added to.
template <typename X>
void naive_products(Doubles& out, Doubles& din, Doubles& dweight, const Vec<X>& in, const Vec<X>& weight, const Vec<X>& dout, i64 ld, i64 N, i64 K,
                    i64 OC, float alpha) {
    for (i64 n = 0; n < N; n++) {
        for (i64 o = 0; o < OC; o++) {
            double sum = 0.0;
            const double d = (float)dout[n * ld + o] * (double)alpha;
            for (i64 k = 0; k < K; k++) {
                sum += (double)(float)in[n * K + k] * (float)weight[o * K + k];
                din[n * K + k] += d * (float)weight[o * K + k];
                dweight[o * K + k] += d * (float)in[n * K + k];
            }
            out[n * ld + o] = alpha * sum;
        }
    }
}

template <typename X>
bool same_bits(const Vec<X>& a, const Vec<X>& b) {
    return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0);
}

// The message of the error that `body` must throw.
template <typename Body>
std::string error_of(const Body& body) {
    try {
        body();
    } catch (const Error& error) { return error.what(); }
    return "no error";
}
inline void expect_parts(const std::string& found, const Vec<std::string>& parts) {
    for (const std::string& part : parts) { EXPECT_NE(found.find(part), std::string::npos) << "no '" << part << "' in: " << found; }
}

// First in a test of the emulator where a fault is planted that shows in results: the checker ends the grid before (test_checker.cpp).
#ifdef SIMT_CHECK
#define FAULT_WITHOUT_CHECKER() GTEST_SKIP()
#else
#define FAULT_WITHOUT_CHECKER()
#endif
