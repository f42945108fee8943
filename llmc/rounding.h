// rounding.h: how an fp32 master weight becomes a bf16 parameter, rounded to nearest or stochastically, and how it is found again.
//
// A number below 2^16 is added to the 16 bits that are cut off; a carry out of them rounds up. It is 2^15, which is rounding to nearest, ties away
// from zero; or (arXiv 2010.06192) 16 random bits, so that the mean of what comes out is what went in. Those are a hash of the step and of the
// element's place in the rank's parameters: the same for every number of threads, with and without ZeRO, and after a resume; and the same on all
// ranks for what they all hold.
//
// Who knows that number knows the carry. So a parameter and the 16 bits that were cut off are the master weight, exactly: two bytes beside the
// parameter, not four (split SGD of Intel's extension for PyTorch keeps them so, but cuts the parameter off).
#pragma once

#include <bit>
#include <cstdint>

// The finaliser of MurmurHash3, for a number or a vector of them.
template <typename U>
constexpr U hash_bits(U x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

struct Rounding {
    bool stochastic = false;
    uint32_t key = 0;  // the step's

    // For numbers or vectors of them.
    template <typename U>
    constexpr U added(U index) const {
        return stochastic ? hash_bits(index ^ key) & 0xFFFFu : U{} + 0x8000u;
    }
    // A master weight's bits -> the parameter's, and 16 zeros: bf16 holds them exactly. What is not finite stays.
    template <typename U>
    constexpr U round(U bits, U index) const {
        const U sum = (bits + added(index)) & 0xFFFF0000u;
        return (bits & 0x7F800000u) == 0x7F800000u ? bits : sum;
    }
    // The master weight's bits from the parameter's, followed by 16 zeros, and its own lower half. A NaN is found as some NaN.
    template <typename U>
    constexpr U restore(U param, U low, U index) const {
        return (param | low) - ((low + added(index)) & 0x10000u);
    }
    constexpr float operator()(float master, int64_t index) const {
        return std::bit_cast<float>(round(std::bit_cast<uint32_t>(master), (uint32_t)index));
    }
    constexpr float master(float param, uint16_t low, int64_t index) const {
        return std::bit_cast<float>(restore(std::bit_cast<uint32_t>(param), (uint32_t)low, (uint32_t)index));
    }
};
constexpr uint16_t lower_half(float master) { return (uint16_t)std::bit_cast<uint32_t>(master); }
