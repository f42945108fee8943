// simt_testing.h: what tests of the emulator share. Sources that include it are compiled like kernels.
#pragma once

#include <gtest/gtest.h>

#include "product.cuh"
#include "values.h"

using gpu::ALL_LANES;
using gpu::launch;

namespace simt_test {  // not anonymous: reports name kernels

class Simt : public testing::Test {
protected:
    void SetUp() override {
        unsetenv("SIMT_ORDER");
        unsetenv("SIMT_STREAMS");
    }
    void TearDown() override { SetUp(); }
    ::Run run;
};

// Device memory, all bits set to begin with.
template <typename X>
struct Buffer {
    X* data = nullptr;
    i64 count;
    ::Run& run;
    Buffer(i64 n, ::Run& r) : count(n), run(r) { cuda_check(cudaMalloc((void**)&data, n * sizeof(X))); }
    Buffer(const Vec<X>& values, ::Run& r) : Buffer((i64)values.size(), r) { copy_to_device(data, values.data(), count, run); }
    Buffer(const Buffer&) = delete;
    ~Buffer() { cudaFree(data); }
    Vec<X> host() const {
        Vec<X> values(count);
        copy_to_host(values.data(), data, count, run);
        return values;
    }
};

template <typename Body>
void expect_error(const Body& body, const Vec<std::string>& parts) {
    expect_parts(error_of(body), parts);
}
inline const Vec<const char*> ORDERS{"fwd", "rev", "shuf:1", "shuf:2", "shuf:3"};
inline void synchronize(::Run& run) { cuda_check(cudaStreamSynchronize(run.stream)); }

}  // namespace simt_test
