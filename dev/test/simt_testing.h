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

// The message of the error that `body` must throw.
template <typename Body>
std::string error_of(const Body& body) {
    try {
        body();
    } catch (const Error& error) { return error.what(); }
    return "no error";
}
template <typename Body>
void expect_error(const Body& body, const Vec<std::string>& parts) {
    const std::string found = error_of(body);
    for (const std::string& part : parts) { EXPECT_NE(found.find(part), std::string::npos) << "no '" << part << "' in: " << found; }
}
inline const Vec<const char*> ORDERS{"fwd", "rev", "shuf:1", "shuf:2", "shuf:3"};
inline void synchronize(::Run& run) { cuda_check(cudaStreamSynchronize(run.stream)); }

}  // namespace simt_test
