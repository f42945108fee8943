// sampler.h: from logits to a token. Host code, the same on every rank: equal logits and equal state give equal tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base.h"

struct Sampler {
    uint64_t state;
    double temperature = 1.0;  // 0: the likeliest token
    i64 top_k = 0;             // 0, or at least V: off
    double top_p = 1.0;        // 1: off. At least one token is always kept

    // SplitMix64: one 64-bit state, good enough for drawing tokens, and easy to keep in a checkpoint.
    double uniform() {
        uint64_t z = (state += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return (double)((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
    }

    // Ties go to the lowest id. Draws one number whatever the settings but temperature 0, which draws none.
    int sample(const float* logits, i64 V) {
        for (i64 i = 0; i < V; i++) {
            check(!std::isnan(logits[i]), "the logit of token %lld is not a number\nHINT: the weights are damaged, or the run that made them diverged", (long long)i);
        }
        const i64 best = std::max_element(logits, logits + V) - logits;
        if (temperature == 0) { return (int)best; }
        const double coin = uniform();
        std::vector<std::pair<double, int>> p(V);
        for (i64 i = 0; i < V; i++) { p[i] = {std::exp(((double)logits[i] - (double)logits[best]) / temperature), (int)i}; }
        size_t keep = V;
        const bool cut = (top_k > 0 && top_k < V) || top_p < 1.0;
        if (cut) {
            auto likelier = [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; };
            std::sort(p.begin(), p.end(), likelier);
            if (top_k > 0 && top_k < V) { keep = top_k; }
        }
        double total = 0;
        for (size_t i = 0; i < keep; i++) { total += p[i].first; }
        if (top_p < 1.0) {
            double nucleus = 0;
            size_t n = 0;
            while (n < keep && (n == 0 || nucleus < top_p * total)) { nucleus += p[n++].first; }
            keep = n;
            total = nucleus;
        }
        double reached = 0;
        for (size_t i = 0; i < keep; i++) {
            reached += p[i].first;
            if (coin * total < reached) { return p[i].second; }
        }
        return cut ? p[keep - 1].second : (int)best;  // rounding left a sliver at the top
    }
};
