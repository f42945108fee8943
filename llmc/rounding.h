// rounding.h: how an fp32 master weight becomes a bf16 parameter: rounded to nearest, or stochastically.
//
// Stochastic rounding (arXiv 2010.06192): 16 random bits are added to the 16 that are cut off, so that the mean of what comes out is what went in.
// The bits are a hash of the step and of the element's place in the rank's parameters: the same for every number of threads, with and without
// ZeRO, and after a resume; and the same on all ranks for what they all hold.
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

    // A float's bits, ending in 16 zeros: bf16 holds it exactly. What is not finite stays.
    template <typename U>
    constexpr U dithered(U bits, U index) const {
        const U sum = (bits + (hash_bits(index ^ key) & 0xFFFFu)) & 0xFFFF0000u;
        return (bits & 0x7F800000u) == 0x7F800000u ? bits : sum;
    }
    // What is left to be rounded to nearest.
    constexpr float operator()(float value, int64_t index) const {
        return stochastic ? std::bit_cast<float>(dithered(std::bit_cast<uint32_t>(value), (uint32_t)index)) : value;
    }
};
