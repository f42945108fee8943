// kernels_testing.h: what the tests of the kernels share: the same lines run on both sides, in every order of threads and blocks.
#pragma once

#include <array>
#include <tuple>

#include "llmc/ops.h"
#include "values.h"

using namespace BACKEND;

// A test runs the same lines on both sides: the kernels in device memory, the CPU loops in the host's.
struct Side {
    bool kernels;
    ::Run run{};
};
#define OP(op, ...) (side.kernels ? gpu::op(__VA_ARGS__, side.run) : cpu::op(__VA_ARGS__, side.run))

// Values on one side, `shift` elements past an aligned address. An allocation each, so that an overrun is seen.
template <typename X>
class Memory {
public:
    X* data;
    Memory(const Vec<X>& values, Side& side, i64 shift = 0, bool written = true) : side_(side), host_(values), count_((i64)values.size()) {
        if (side.kernels) {
            cuda_check(cudaMalloc((void**)&device_, (count_ + shift) * sizeof(X)));
            if (written) { copy_to_device(device_ + shift, values.data(), count_, side.run); }
        }
        data = side.kernels ? device_ + shift : host_.data();
    }
    // What an op must overwrite: NaN, and for the checker never written.
#ifdef SIMT_CHECK
    static constexpr bool FILLED = false;
#else
    static constexpr bool FILLED = true;
#endif
    Memory(i64 count, Side& side, i64 shift = 0) : Memory(Vec<X>(count, X(NAN)), side, shift, FILLED) {}
    Memory(const Memory&) = delete;
    ~Memory() { cudaFree(device_); }
    Vec<X> values() const {
        Vec<X> copy = host_;
        if (side_.kernels) { copy_to_host(copy.data(), data, count_, side_.run); }
        return copy;
    }

private:
    Side& side_;
    Vec<X> host_;
    X* device_ = nullptr;
    i64 count_;
};

// What an output is called, and how far a kernel may be from its oracle beyond the rounding of the result.
struct Allowed {
    const char* name;
    double error;
};

// body(side) gives a tuple of vectors, the op's outputs. Compares the kernels' with the oracle's; returns the kernels'.
template <typename Body, size_t N>
auto compare(const Body& body, const Allowed (&allowed)[N]) {
    const auto on_side = [&](bool kernels, const char* order) {
        setenv("SIMT_ORDER", order, 1);
        Side side{kernels};
        return body(side);
    };
    const auto got = on_side(true, "fwd"), want = on_side(false, "fwd");
    static_assert(std::tuple_size_v<decltype(got)> == N);
    const auto each = [&](const auto& a, const auto& b, const auto& action) {
        [&]<size_t... I>(std::index_sequence<I...>) { (action(std::get<I>(a), std::get<I>(b), allowed[I]), ...); }
        (std::make_index_sequence<N>{});
    };
    each(got, want, [](const auto& a, const auto& b, const Allowed& most) { expect_close(a, doubles(b), most.error, most.name); });
    for (const char* order : {"rev", "shuf:1", "shuf:2", "shuf:3"}) {
        each(on_side(true, order), got, [&](const auto& a, const auto& b, const Allowed& most) {
            EXPECT_TRUE(same_bits(a, b)) << most.name << ": other bits in order " << order;
        });
    }
    return got;
}

template <typename X>
class Kernels : public testing::Test {};
using Types = testing::Types<float, bf16>;
TYPED_TEST_SUITE(Kernels, Types);
