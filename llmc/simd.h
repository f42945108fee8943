// simd.h: what the CPU loops are made of: vectors of floats in the compiler's own notation, exp, a tile product, scratch.
//
// VL floats make one vector; the width follows the target (-march=native). A loop over n elements is written once:
//
//   vector_loop(n, [&](i64 i, auto lanes) { store(y + i, exp(load(x + i, lanes)), lanes); });
//
// where `lanes` is Full for whole vectors and Part for the last, shorter one. load and store convert bf16 on the way.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <type_traits>
#include <utility>

#include "device.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LLMC_MASKED_TAILS 1
constexpr int VL = 16;
#elif defined(__AVX__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

constexpr i64 LINE = 64;  // bytes of a cache line

#define ALWAYS_INLINE inline __attribute__((always_inline))

// ---- vectors --------------------------------------------------------------------------------------------------------
typedef float vfloat __attribute__((vector_size(4 * VL)));
typedef int32_t vint __attribute__((vector_size(4 * VL)));
typedef uint32_t vuint __attribute__((vector_size(4 * VL)));
typedef uint16_t vhalf __attribute__((vector_size(2 * VL)));
typedef double vdouble __attribute__((vector_size(8 * VL)));

// A vector of constants, by(lane). Written as a list: g++ would build the same from a loop at run time, lane by lane.
template <typename F, int... LANES>
ALWAYS_INLINE vint vector_of(const F& by, std::integer_sequence<int, LANES...>) {
    return vint{by(LANES)...};
}
template <typename F>
ALWAYS_INLINE vint vector_of(const F& by) {
    return vector_of(by, std::make_integer_sequence<int, VL>{});
}
ALWAYS_INLINE vint lane_numbers() {
    return vector_of([](int lane) { return lane; });
}

struct Full {
    static constexpr int count = VL;
};
struct Part {
    int count;
};

template <typename F>
ALWAYS_INLINE void vector_loop(i64 n, const F& body) {
    i64 i = 0;
    for (; i + VL <= n; i += VL) { body(i, Full{}); }
    if (i < n) { body(i, Part{(int)(n - i)}); }
}

ALWAYS_INLINE vfloat splat(float x) { return x - vfloat{}; }  // x - 0 keeps -0, infinities and NaN

ALWAYS_INLINE vfloat load(const float* p, Full = {}) {
    vfloat v;
    memcpy(&v, p, sizeof v);
    return v;
}
ALWAYS_INLINE void store(float* p, vfloat v, Full = {}) { memcpy(p, &v, sizeof v); }

// g++ 12 would cut __builtin_convertvector into halves and join them again: three times the instructions.
#ifdef LLMC_MASKED_TAILS
ALWAYS_INLINE vuint to_32_bits(vhalf h) { return (vuint)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)h); }
ALWAYS_INLINE vhalf to_16_bits(vuint u) { return (vhalf)_mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)u); }
#else
ALWAYS_INLINE vuint to_32_bits(vhalf h) { return __builtin_convertvector(h, vuint); }
ALWAYS_INLINE vhalf to_16_bits(vuint u) { return __builtin_convertvector(u, vhalf); }
#endif
ALWAYS_INLINE vfloat widen(vhalf h) { return (vfloat)(to_32_bits(h) << 16); }
ALWAYS_INLINE vhalf narrow_to_nearest(vfloat v) {  // as bf16(float)
#ifdef __AVX512BF16__  // the instruction takes subnormals for zeros
    if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)v, 0x20) == 0, 1)) { return (vhalf)_mm512_cvtneps_pbh((__m512)v); }
#endif
    const vuint u = (vuint)v;
    const vuint rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    return to_16_bits(v != v ? (u >> 16) | 0x40 : rounded);
}
ALWAYS_INLINE vfloat load(const bf16* p, Full = {}) {
    vhalf h;
    memcpy(&h, p, sizeof h);
    return widen(h);
}
ALWAYS_INLINE void store(bf16* p, vfloat v, Full = {}) {
    const vhalf h = narrow_to_nearest(v);
    memcpy((void*)p, &h, sizeof h);
}

ALWAYS_INLINE vuint load(const uint16_t* p, Full = {}) {
    vhalf h;
    memcpy(&h, p, sizeof h);
    return to_32_bits(h);
}
ALWAYS_INLINE void store(uint16_t* p, vuint v, Full = {}) {  // the lower halves
    const vhalf h = to_16_bits(v);
    memcpy(p, &h, sizeof h);
}

// The lanes a Part does not have read as zero and are not written.
#ifdef LLMC_MASKED_TAILS
ALWAYS_INLINE vfloat load(const float* p, Part lanes) { return (vfloat)_mm512_maskz_loadu_ps((1u << lanes.count) - 1, p); }
ALWAYS_INLINE void store(float* p, vfloat v, Part lanes) { _mm512_mask_storeu_ps(p, (1u << lanes.count) - 1, (__m512)v); }
ALWAYS_INLINE vfloat load(const bf16* p, Part lanes) { return widen((vhalf)_mm256_maskz_loadu_epi16((1u << lanes.count) - 1, p)); }
ALWAYS_INLINE void store(bf16* p, vfloat v, Part lanes) {
    _mm256_mask_storeu_epi16(p, (1u << lanes.count) - 1, (__m256i)narrow_to_nearest(v));
}
ALWAYS_INLINE vuint load(const uint16_t* p, Part lanes) { return to_32_bits((vhalf)_mm256_maskz_loadu_epi16((1u << lanes.count) - 1, p)); }
ALWAYS_INLINE void store(uint16_t* p, vuint v, Part lanes) { _mm256_mask_storeu_epi16(p, (1u << lanes.count) - 1, (__m256i)to_16_bits(v)); }
#else
template <typename X>
ALWAYS_INLINE auto load(const X* p, Part lanes) {
    if (lanes.count == VL) { return load(p); }
    X copy[VL] = {};
    for (int l = 0; l < lanes.count; l++) { copy[l] = p[l]; }
    return load(copy);
}
template <typename X, typename V>
ALWAYS_INLINE void store(X* p, V v, Part lanes) {
    if (lanes.count == VL) { return store(p, v); }
    X copy[VL];
    store(copy, v);
    for (int l = 0; l < lanes.count; l++) { p[l] = copy[l]; }
}
#endif

// v with the lanes a Part does not have replaced: what a maximum or a sum must not see.
ALWAYS_INLINE vfloat pad(vfloat v, float, Full) { return v; }
ALWAYS_INLINE vfloat pad(vfloat v, float with, Part lanes) { return lane_numbers() < lanes.count ? v : splat(with); }

// p, whose memory comes from afar; what lies `elements` further on is fetched meanwhile. The processor's own prefetcher stops at each page's end.
template <typename X>
ALWAYS_INLINE X* ahead(X* p, i64 elements = 4096 / sizeof(X)) {
    __builtin_prefetch(p + elements, !std::is_const_v<X>);
    return p;
}

// What remains of v after a store to X and a load.
template <typename X>
ALWAYS_INLINE vfloat rounded(vfloat v) {
    if constexpr (std::is_same_v<X, bf16>) { v = widen(narrow_to_nearest(v)); }
    return v;
}

ALWAYS_INLINE vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }
ALWAYS_INLINE bool any(vint truths) {
#ifdef LLMC_MASKED_TAILS
    return _mm512_test_epi32_mask((__m512i)truths, (__m512i)truths) != 0;
#else
    for (int l = 0; l < VL; l++) {
        if (truths[l]) { return true; }
    }
    return false;
#endif
}
ALWAYS_INLINE vfloat sqrt(vfloat v) {
#ifdef LLMC_MASKED_TAILS
    return (vfloat)_mm512_maskz_sqrt_ps(0xFFFF, (__m512)v);  // the unmasked one draws a false warning from g++ 12
#else
    for (int l = 0; l < VL; l++) { v[l] = sqrtf(v[l]); }
    return v;
#endif
}

// One value from VL lanes, by halves: the order is fixed.
template <int HALF = VL / 2, typename F>
ALWAYS_INLINE float fold_lanes(vfloat v, const F& combine) {
    v = combine(v, __builtin_shuffle(v, vector_of([](int lane) { return lane ^ HALF; })));
    if constexpr (HALF > 1) {
        return fold_lanes<HALF / 2>(v, combine);
    } else {
        return v[0];
    }
}
ALWAYS_INLINE float sum_lanes(vfloat v) {
    return fold_lanes(v, [](vfloat a, vfloat b) { return a + b; });
}
ALWAYS_INLINE float max_lanes(vfloat v) {
    return fold_lanes(v, [](vfloat a, vfloat b) { return max(a, b); });
}

// The square of VL vectors, transposed in registers: log2(VL) rounds, each exchanging blocks half as large.
template <int BLOCK = VL / 2>
ALWAYS_INLINE void transpose(vfloat (&rows)[VL]) {
    const vint low = vector_of([](int lane) { return lane & BLOCK ? VL + lane - BLOCK : lane; });
    const vint high = vector_of([](int lane) { return lane & BLOCK ? VL + lane : lane + BLOCK; });
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) {
        if (i & BLOCK) { continue; }
        const vfloat a = rows[i], b = rows[i + BLOCK];
        rows[i] = __builtin_shuffle(a, b, low);
        rows[i + BLOCK] = __builtin_shuffle(a, b, high);
    }
    if constexpr (BLOCK > 1) { transpose<BLOCK / 2>(rows); }
}

// The sums of the lanes of COUNT vectors, that of row r in lane r * VL / COUNT: the same exchanges, but what they bring together is added.
template <int COUNT, int BLOCK = VL / 2>
ALWAYS_INLINE vfloat sums_of_lanes(vfloat* rows) {
    constexpr int HALF = COUNT / 2;
    if constexpr (BLOCK == 0) {
        return rows[0];
    } else if constexpr (HALF == 0) {
        rows[0] += __builtin_shuffle(rows[0], vector_of([](int lane) { return lane ^ BLOCK; }));
        return sums_of_lanes<1, BLOCK / 2>(rows);
    } else {
        const vint low = vector_of([](int lane) { return lane & BLOCK ? VL + lane - BLOCK : lane; });
        const vint high = vector_of([](int lane) { return lane & BLOCK ? VL + lane : lane + BLOCK; });
#pragma GCC unroll 8
        for (int i = 0; i < HALF; i++) { rows[i] = __builtin_shuffle(rows[i], rows[i + HALF], low) + __builtin_shuffle(rows[i], rows[i + HALF], high); }
        return sums_of_lanes<HALF, BLOCK / 2>(rows);
    }
}

// to (cols, rows; ld_to) = the transpose of from (rows, cols; ld_from). Not inlined: it is long, and there are many callers.
template <typename To, typename From>
__attribute__((noinline)) void transpose_square(To* to, i64 ld_to, const From* from, i64 ld_from, int rows, int cols) {
    vfloat square[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) { square[i] = load(from + std::min(i, rows - 1) * ld_from, Part{cols}); }
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) {
        if (i < cols) { store(to + i * ld_to, square[i], Part{rows}); }
    }
}
template <typename To, typename From>
void transpose_block(To* to, i64 ld_to, const From* from, i64 ld_from, i64 rows, i64 cols) {
    for (i64 r = 0; r < rows; r += VL) {
        for (i64 c = 0; c < cols; c += VL) {
            transpose_square(to + c * ld_to + r, ld_to, from + r * ld_from + c, ld_from, (int)std::min<i64>(VL, rows - r),
                             (int)std::min<i64>(VL, cols - c));
        }
    }
}

// ---- exp ------------------------------------------------------------------------------------------------------------
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2, with Cephes' polynomial for exp(r): below 2 ulp (test_ops).
// Results that would be subnormal are 0, -inf gives 0, overflow gives inf, NaN stays NaN.
ALWAYS_INLINE vfloat exp(vfloat x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits of the sum
    const vfloat shifted = x * 1.44269504088896341f + ROUND;
    const vfloat n = shifted - ROUND;
    vfloat r = x - n * 0.693359375f;  // ln 2 in two parts, the first exact in few bits
    r = r + n * 2.12194440e-4f;
    vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    const vfloat y = (vfloat)((vuint)p + ((vuint)shifted << 23));  // times 2^n, by the exponent's bits
    const vfloat low = x < -87.3365448f ? vfloat{} : y;
    return x <= 88.7228394f ? low : x + splat(INFINITY);
}
constexpr float LOG2_E = 1.44269504f;
// 2^x for x < 127, in less than two thirds of the instructions: for a softmax. Relative error below 2e-7; results that would be subnormal are 0, -inf gives 0, NaN stays NaN.
ALWAYS_INLINE vfloat exp2(vfloat x) {
#ifdef LLMC_MASKED_TAILS  // the same bits with three instructions less
    const vfloat r = (vfloat)_mm512_maskz_reduce_ps(0xFFFF, (__m512)x, 0);
#else
    constexpr float ROUND = 12582912.0f;
    const vfloat shifted = x + ROUND, r = x - (shifted - ROUND);
#endif
    vfloat p = r * 1.326472730e-3f + 9.671512729e-3f;  // minimax, relative, 1 at 0
    p = p * r + 5.550733744e-2f;
    p = p * r + 2.402224208e-1f;
    p = p * r + 6.931469776e-1f;
    p = p * r + 1.0f;
#ifdef LLMC_MASKED_TAILS
    return (vfloat)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ), (__m512)p, (__m512)(x - r));
#else
    const vfloat y = (vfloat)((vuint)p + ((vuint)shifted << 23));
    return x < -126.0f ? vfloat{} : y;
#endif
}
ALWAYS_INLINE vfloat sigmoid(vfloat x) { return 1.0f / (1.0f + exp(-x)); }

// ---- pairs of bf16 --------------------------------------------------------------------------------------------------
// Two steps of a product's depth in one word. AVX512_BF16 multiplies pairs and adds both products to a float, as fast as one float elsewhere.
struct bf16x2 {
    bf16 even, odd;
};
#ifdef __AVX512BF16__
constexpr bool FAST_PAIRS = true;
#else
constexpr bool FAST_PAIRS = false;
#endif

ALWAYS_INLINE vuint load(const bf16x2* p, Full = {}) {
    vuint v;
    memcpy(&v, p, sizeof v);
    return v;
}
ALWAYS_INLINE void store(bf16x2* p, vuint v, Full = {}) { memcpy((void*)p, &v, sizeof v); }
ALWAYS_INLINE vuint splat(bf16x2 pair) {
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word - vuint{};
}
// Both rounded to nearest. Words of an even and an odd row:
ALWAYS_INLINE vuint pairs_of(vfloat even, vfloat odd) {
#ifdef __AVX512BF16__
    const __m512i order = (__m512i)(vector_of([](int lane) { return lane | (lane + VL) << 16; }));
    return (vuint)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
#else
    return to_32_bits(narrow_to_nearest(even)) | to_32_bits(narrow_to_nearest(odd)) << 16;
#endif
}

ALWAYS_INLINE vfloat multiply_add(vfloat sum, vfloat a, vfloat b) { return sum + a * b; }
ALWAYS_INLINE vfloat multiply_add(vfloat sum, vuint a, vuint b) {
#ifdef __AVX512BF16__
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const auto even = [](vuint v) { return (vfloat)(v << 16); };
    const auto odd = [](vuint v) { return (vfloat)(v & 0xFFFF0000u); };
    return sum + odd(a) * odd(b) + even(a) * even(b);
#endif
}

// ---- block product --------------------------------------------------------------------------------------------------
// c (rows, cols; ldc) = or += sum over k < depth of a(r, k) * b[k, :], with a(r, k) = a[r*ar + k*ak], b (depth, cols; ldb), both of floats or both of
// pairs. cols is a multiple of VL: whoever packs b pads it. The heart of the matrix product and of attention: a tile of
// accumulators stays in registers while elements of `a`, in either order, are broadcast against vectors of b.
template <typename E>
struct Strided {
    const E* data;
    i64 row, depth;  // strides
};

constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = VL == 16 ? 4 : 2;  // 24 accumulators of 32 registers, or 12 of 16
constexpr int TILE_COLS = TILE_VECTORS * VL;

template <int R, int NV, typename E>
__attribute__((noinline)) void tile_product(float* c, i64 ldc, Strided<E> a, const E* b, i64 ldb, i64 depth, bool accumulate) {
    vfloat acc[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) { acc[r][v] = vfloat{}; }
    }
    for (i64 k = 0; k < depth; k++) {
        decltype(load(b)) bk[NV];
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) { bk[v] = load(b + k * ldb + v * VL); }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const auto x = splat(a.data[r * a.row + k * a.depth]);
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) { acc[r][v] = multiply_add(acc[r][v], x, bk[v]); }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            float* p = c + r * ldc + v * VL;
            store(p, accumulate ? load(p) + acc[r][v] : acc[r][v]);
        }
    }
}

template <int NV, typename E>
void panel_product(float* c, i64 ldc, Strided<E> a, const E* b, i64 ldb, i64 rows, i64 depth, bool accumulate) {
    i64 r = 0;
    const auto tiles = [&](auto height) {
        constexpr int R = decltype(height)::value;
        for (; r + R <= rows; r += R) {
            tile_product<R, NV>(c + r * ldc, ldc, Strided<E>{a.data + r * a.row, a.row, a.depth}, b, ldb, depth, accumulate);
        }
    };
    tiles(std::integral_constant<int, TILE_ROWS>{});
    tiles(std::integral_constant<int, 4>{});
    tiles(std::integral_constant<int, 2>{});
    tiles(std::integral_constant<int, 1>{});
}

template <typename E>
void block_product(float* c, i64 ldc, Strided<E> a, const E* b, i64 ldb, i64 rows, i64 cols, i64 depth, bool accumulate) {
    for (i64 j = 0; j < cols; j += TILE_COLS) {
        const i64 vectors = std::min<i64>(cols - j, TILE_COLS) / VL;
        switch (vectors) {
            case 1:
                panel_product<1>(c + j, ldc, a, b + j, ldb, rows, depth, accumulate);
                break;
            case 2:
                panel_product<2>(c + j, ldc, a, b + j, ldb, rows, depth, accumulate);
                break;
            case 3:
                panel_product<3>(c + j, ldc, a, b + j, ldb, rows, depth, accumulate);
                break;
            default:
                panel_product<TILE_VECTORS>(c + j, ldc, a, b + j, ldb, rows, depth, accumulate);
        }
    }
}

// ---- scratch --------------------------------------------------------------------------------------------------------
// A thread's memory for one purpose, kept between calls: thread_local Scratch<float> scratch; float* p = scratch.get(count);
template <typename X>
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { release(); }

    X* get(i64 count) {
        if (count > capacity_) {
            release();
            data_ = (X*)operator new(count * sizeof(X), ALIGN);
            capacity_ = count;
        }
        return data_;
    }

private:
    static constexpr std::align_val_t ALIGN{64};
    void release() { operator delete(data_, ALIGN); }
    X* data_ = nullptr;
    i64 capacity_ = 0;
};
