// init.h: the first weights. Every value is a function of (seed, Hugging Face name, index in the unsharded Hugging Face
// tensor), so that any number of ranks draws the same model, each rank only its own part.
//
// The generator is Philox4x32-10 (Salmon 2011, "Parallel random numbers: as easy as 1, 2, 3"), the normals are Box-Muller's.
// No libm: its last bits differ between machines. IEEE +, *, / and sqrt do not, once no result depends on whether the
// compiler fuses a multiply with an add.
#pragma once

#include "tensors.h"

// Fowler-Noll-Vo 1a: which tensor a stream of numbers belongs to.
constexpr uint64_t fnv1a_64(std::string_view text) {
    uint64_t hash = 0xCBF29CE484222325;
    for (const char c : text) { hash = (hash ^ (unsigned char)c) * 0x100000001B3; }
    return hash;
}

// `count` counters at once, word w of counter i in words[w][i]; the key is the seed. Lanes are independent, so this vectorises.
constexpr int PHILOX_LANES = 64;
inline void philox4x32_10(uint32_t words[4][PHILOX_LANES], int count, uint64_t key) {
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < count; i++) {
            const uint64_t a = (uint64_t)words[0][i] * 0xD2511F53, b = (uint64_t)words[2][i] * 0xCD9E8D57;
            words[0][i] = (uint32_t)(b >> 32) ^ words[1][i] ^ key0;
            words[1][i] = (uint32_t)b;
            words[2][i] = (uint32_t)(a >> 32) ^ words[3][i] ^ key1;
            words[3][i] = (uint32_t)a;
        }
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
}

// a * b + c. The product of two floats is exact in double, so a fused multiply-add gives the same bits as two instructions.
inline float mul_add(float a, float b, float c) { return (float)((double)a * b + c); }

// -ln(u), u uniform in (0, 1] from the upper 31 bits: the series of atanh around 1, where |s| < 0.172. Relative error 2e-7.
inline float minus_log_uniform(uint32_t bits) {
    const float x = (float)(int32_t)(bits >> 1 | 1);  // 2^31 u
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint32_t above = u - 0x3F3504F3;  // the mantissa goes to [sqrt(1/2), sqrt(2))
    const int exponent = (int)(above >> 23);
    const uint32_t mantissa = (above & 0x7FFFFF) + 0x3F3504F3;
    float m;
    memcpy(&m, &mantissa, 4);
    const float s = (m - 1) / (m + 1), s2 = s * s;
    const float series = mul_add(mul_add(mul_add(mul_add(1.0f / 9, s2, 1.0f / 7), s2, 1.0f / 5), s2, 1.0f / 3), s2, 1.0f);
    return mul_add(-2 * s, series, (float)(31 - exponent) * 0.693147180559945309f);
}

// A point of the unit circle: an angle in [-pi/4, pi/4) by Taylor's series, then one of four quarter turns.
struct Direction {
    float x, y;
};
inline Direction uniform_direction(uint32_t bits) {
    const float angle = (float)((int32_t)(bits & 0xFFFFFFFC) >> 2) * (0.785398163397448309f / (1 << 29));
    const float t = angle * angle;
    const float sine = angle * mul_add(mul_add(mul_add(mul_add(1.0f / 362880, t, -1.0f / 5040), t, 1.0f / 120), t, -1.0f / 6), t, 1.0f);
    const float cosine = mul_add(mul_add(mul_add(mul_add(1.0f / 40320, t, -1.0f / 720), t, 1.0f / 24), t, -0.5f), t, 1.0f);
    const float sign = bits & 1 ? -1.0f : 1.0f;
    return {sign * (bits & 2 ? sine : cosine), sign * (bits & 2 ? cosine : sine)};
}

// out[i] = value first + i of the stream (seed, name_hash) of N(0, stddev). A counter gives four values.
inline void fill_normal(uint64_t seed, uint64_t name_hash, i64 first, i64 count, float stddev, float* out) {
    uint32_t words[4][PHILOX_LANES];
    float radius[2][PHILOX_LANES], values[PHILOX_LANES][4];
    for (i64 done = 0; done < count;) {
        const i64 quad = (first + done) / 4, skip = (first + done) % 4;
        const int lanes = (int)std::min<i64>(PHILOX_LANES, ceil_div(skip + count - done, 4));
        for (int i = 0; i < lanes; i++) {
            words[0][i] = (uint32_t)(quad + i);
            words[1][i] = (uint32_t)((quad + i) >> 32);
            words[2][i] = (uint32_t)name_hash;
            words[3][i] = (uint32_t)(name_hash >> 32);
        }
        philox4x32_10(words, lanes, seed);
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < lanes; i++) { radius[half][i] = 2 * minus_log_uniform(words[2 * half][i]); }
            for (int i = 0; i < lanes; i++) { radius[half][i] = stddev * std::sqrt(radius[half][i]); }
            for (int i = 0; i < lanes; i++) {
                const Direction d = uniform_direction(words[2 * half + 1][i]);
                values[i][2 * half] = radius[half][i] * d.x;
                values[i][2 * half + 1] = radius[half][i] * d.y;
            }
        }
        const i64 n = std::min(count - done, 4 * lanes - skip);
        memcpy(out + done, &values[0][0] + skip, n * sizeof(float));
        done += n;
    }
}

// A rank's share of a tensor as it is before the first step.
inline void init_tensor(const Tensor& t, const ModelConfig& model, uint64_t seed, float* out) {
    switch (t.spec.init) {
        case Init::ONE:
            std::fill_n(out, t.count(), 1.0f);
            return;
        case Init::ZERO:
            std::fill_n(out, t.count(), 0.0f);
            return;
        case Init::NORMAL:
        case Init::NORMAL_RESIDUAL:
            break;
    }
    const float stddev = (float)(t.spec.init == Init::NORMAL ? 0.02 : 0.02 / std::sqrt(2.0 * (double)model.layers));
    fill_from_hf(t, out, [&](const Slice& s, i64 first, i64 count, float* to) {
        fill_normal(seed, fnv1a_64(s.part.name), first, count, stddev, to);
    });
}
