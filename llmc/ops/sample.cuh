// sample.cuh: the next token, from the logits of all: the likeliest, or one drawn in proportion to exp(logit / temperature).
//
//   w_i = exp((l_i - max l) / temperature), as an integer of 31 bits        order: from the highest logit on; equal ones by id
//   top-k: the first k of that order        top-p: of those as few of the first as hold top_p of all their w
//   the token: the first at which the sum of w passes coin * total; in that order if any were cut off, else in the order of ids
//
// Integers, because their sums are the same in any order: so a GPU chooses what the CPU chooses, and every rank the same.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>

#include "common.cuh"

namespace sampling {

// SplitMix64: one 64-bit state, good enough for drawing tokens, and easy to keep in a checkpoint. In [0, 1).
constexpr double next_coin(uint64_t& state) {
    uint64_t z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

// Unsigned integers in the order of the floats; what is not a number comes highest.
constexpr uint32_t ordered(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    return value != value ? ~0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

// 2^31 * exp((logit - highest) / temperature), scale being log2(e) / temperature: 2^fraction by a polynomial (to 3e-9), then a shift.
constexpr uint32_t weight(float logit, float highest, float scale) {
    const float exponent = (logit - highest) * scale;
    if (!(exponent > -32.0f)) { return 0; }  // nor where both are infinite
    constexpr int BITS = 26;
    const auto fixed = (int32_t)(exponent * (1 << BITS));
    const uint64_t fraction = fixed & ((1 << BITS) - 1);
    uint64_t power = 464134;
    for (uint64_t coefficient : {2677450u, 20777873u, 119153733u, 515888505u, 1488521944u, 1u << 31}) { power = coefficient + (power * fraction >> BITS); }
    return (uint32_t)(power >> -(fixed >> BITS));
}
inline float scale(double temperature) { return (float)std::min(1.4426950408889634 / temperature, 1e38); }

// Of sums of w: what a sum must exceed to have reached `share` of the total; and to have passed coin * total.
constexpr uint64_t below_share(double share, uint64_t total) {
    const double wanted = share * (double)total;
    const auto whole = (uint64_t)wanted;
    return whole > 0 && (double)whole == wanted ? whole - 1 : whole;
}
constexpr uint64_t tossed(double coin, uint64_t total) {
    const auto passed = (uint64_t)(coin * (double)total);
    return passed < total ? passed : total - 1;
}

}  // namespace sampling

#ifndef LLMC_KERNELS
namespace cpu {

void sample_token(int* token, int* position, i64 rows, uint64_t* random, const float* logits, i64 V, const Sampling& how, Run&) {
    const auto before = [&](int a, int b) {
        const uint32_t first = sampling::ordered(logits[a]), second = sampling::ordered(logits[b]);
        return first != second ? first > second : a < b;
    };
    std::vector<int> order(V);
    std::iota(order.begin(), order.end(), 0);
    const int best = *std::min_element(order.begin(), order.end(), before);
    *position += (int)rows;
    *token = std::isnan(logits[best]) ? -1 - best : best;
    if (*token < 0 || how.temperature == 0) { return; }

    const double coin = sampling::next_coin(*random);
    const float scale = sampling::scale(how.temperature);
    i64 kept = how.top_k > 0 ? std::min(how.top_k, V) : V;
    if (how.cuts(V)) { std::sort(order.begin(), order.end(), before); }
    // The place of the first token at which the sum of w passes `target`; and the sum before it.
    const auto first_past = [&](uint64_t target) {
        uint64_t sum = 0;
        i64 i = 0;
        while (i < kept && (sum += sampling::weight(logits[order[i]], logits[best], scale)) <= target) { i++; }
        return std::pair(i, sum);
    };
    const uint64_t none_passes = ~0ull;
    uint64_t total = first_past(none_passes).second;
    if (how.top_p < 1.0) {
        const auto [last, sum] = first_past(sampling::below_share(how.top_p, total));
        kept = last + 1, total = sum;
    }
    if (total > 0) { *token = order[first_past(sampling::tossed(coin, total)).first]; }  // else logits are infinite
}

}  // namespace cpu

#else
namespace gpu {

constexpr int SAMPLE_THREADS = 1024;

// One block. A token's rank is its logit, and in the lowest bits its id, backwards: ranks differ, and the highest comes first. Where a sum along
// that order passes a target is found bit by bit of the rank, from the highest bit on: all sums of ranks from there on are taken anew for each.
__global__ void __launch_bounds__(SAMPLE_THREADS)
    sample_kernel(int* token, int* position, int rows, uint64_t* random, uint32_t* __restrict__ weights, const float* __restrict__ logits,
                  i64 V, int id_bits, Sampling how, float scale) {
    __shared__ uint64_t parts[2][SAMPLE_THREADS / 32];
    int turn = 0;
    const auto over_block = [&](uint64_t value, auto join) {
        uint64_t* const mine = parts[turn ^= 1];  // the last ones may still be read
        for (int distance = 16; distance > 0; distance /= 2) { value = join(value, __shfl_xor_sync(ALL_LANES, value, distance)); }
        if (threadIdx.x % 32 == 0) { mine[threadIdx.x / 32] = value; }
        __syncthreads();
        value = mine[0];
        for (unsigned warp = 1; warp < blockDim.x / 32; warp++) { value = join(value, mine[warp]); }
        return value;
    };
    const auto each = [&](auto of_token, auto join) {
        uint64_t value = 0;
        for (i64 i = threadIdx.x; i < V; i += blockDim.x) { value = join(value, of_token(i)); }
        return over_block(value, join);
    };
    const auto larger = [](uint64_t a, uint64_t b) { return a > b ? a : b; };
    const auto plus = [](uint64_t a, uint64_t b) { return a + b; };

    const auto by_id = [&](i64 i) { return (uint64_t)(V - 1 - i); };
    const auto by_logit = [&](i64 i) { return (uint64_t)sampling::ordered(logits[i]) << id_bits | by_id(i); };
    const auto id_of = [&](uint64_t rank) { return (int)(V - 1 - (i64)(rank & ((1ull << id_bits) - 1))); };
    const int best = id_of(each(by_logit, larger));
    const float highest = logits[best];
    int chosen = highest != highest ? -1 - best : best;
    if (chosen >= 0 && how.temperature > 0) {
        uint64_t state = *random;
        const double coin = sampling::next_coin(state);
        for (i64 i = threadIdx.x; i < V; i += blockDim.x) { weights[i] = sampling::weight(logits[i], highest, scale); }  // each thread's own
        const auto one = [](i64) { return (uint64_t)1; };
        const auto weight = [&](i64 i) { return (uint64_t)weights[i]; };
        const auto sum_from = [&](uint64_t first, auto rank, auto count) {
            return each([&](i64 i) { return rank(i) >= first ? count(i) : 0; }, plus);
        };
        const auto first_past = [&](uint64_t target, int bits, auto rank, auto count) {
            uint64_t found = 0;
            for (uint64_t bit = 1ull << (bits - 1); bit > 0; bit /= 2) {
                if (sum_from(found | bit, rank, count) > target) { found |= bit; }
            }
            return found;
        };
        const int rank_bits = 32 + id_bits;
        uint64_t last = 0;  // the lowest rank that is kept
        if (how.top_k > 0 && how.top_k < V) { last = first_past(how.top_k - 1, rank_bits, by_logit, one); }
        uint64_t total = sum_from(last, by_logit, weight);
        if (how.top_p < 1.0) {
            last = first_past(sampling::below_share(how.top_p, total), rank_bits, by_logit, weight);
            total = sum_from(last, by_logit, weight);
        }
        if (total > 0) {
            const uint64_t target = sampling::tossed(coin, total);
            chosen = id_of(how.cuts(V) ? first_past(target, rank_bits, by_logit, weight) : first_past(target, id_bits, by_id, weight));
        }
        __syncthreads();  // all have read the state
        if (threadIdx.x == 0) { *random = state; }
    }
    if (threadIdx.x == 0) {
        *token = chosen;
        *position += rows;
    }
}
void sample_token(int* token, int* position, i64 rows, uint64_t* random, const float* logits, i64 V, const Sampling& how, Run& run) {
    const auto threads = (unsigned)std::clamp<i64>(round_up(V, 32), 32, SAMPLE_THREADS);
    launch(sample_kernel, {1, threads}, run, token, position, (int)rows, random, run.workspace.get<uint32_t>(V), logits, V,
           std::bit_width((uint64_t)V), how, sampling::scale(how.temperature));
}

}  // namespace gpu
#endif
