// lab.h: what an experiment with a kernel gives to the bench (lab.cpp): variants of one op, all with the arguments of its launcher.
#pragma once

#include <vector>

#include "llmc/ops.h"

using namespace BACKEND;

namespace lab {

// x (N,C) = a + b;  n (N,C) = x * rstd * weight;  rstd (N) = 1/sqrt(mean over C of x^2 + eps), of x as stored. See llmc/ops/norm.cuh.
template <typename X>
using ResidualNorm = void(X* x, X* n, float* rstd, const X* a, const X* b, const X* weight, float eps, i64 N, i64 C, Run& run);

template <typename Op>
struct Variant {
    const char* name;
    Op* run;
};
template <typename X>
std::vector<Variant<ResidualNorm<X>>> residual_norm_variants();

}  // namespace lab
