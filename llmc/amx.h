// amx.h: products of bf16 by a processor's tiles (AMX): eight registers of 16 rows of 64 bytes; one instruction multiplies two of them and adds to a third.
//
//   if (amx::available()) {
//       amx::Tiles tiles;                                                            // from here to the scope's end this thread's tiles are ours
//       amx::block_product(c, ldc, a, lda, b, ldb, rows, cols, depth, accumulate);
//   }
//
// Whole tiles only: who calls pads with zeros. A product is sums over k in fp32, in pairs, in order; subnormals count as zero (Intel's manual, TDPBF16PS).
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
constexpr bool AMX = true;
#else
constexpr bool AMX = false;
#endif

namespace amx {

constexpr i64 ROWS = 16, COLS = 16, DEPTH = 32;  // of a tile: of c (ROWS, COLS) floats, of a (ROWS, DEPTH), of b (DEPTH / 2, COLS) words

// Whether products may be called. The kernel gives a process the registers when asked (Documentation/arch/x86/xstate.rst): all its threads, for good.
inline bool available() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool given = AMX && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return given;
}

// All eight tiles in their full size, while this lives. oneDNN configures tiles of its own in the same threads, so nothing stays between calls.
struct Tiles {
    Tiles() {
        alignas(64) static constexpr struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// One instruction each; strides in bytes. Own asm: g++ 12's tile loads do not tell the compiler that they read memory.
template <int T>
ALWAYS_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// A tile's ends of rows, for the address sanitizer, which does not see what asm touches.
template <typename Touch>
ALWAYS_INLINE void ends_of_rows([[maybe_unused]] const void* tile, [[maybe_unused]] i64 stride, [[maybe_unused]] const Touch& touch) {
#ifdef __SANITIZE_ADDRESS__
    for (i64 r = 0; r < ROWS; r++) { touch((volatile char*)tile + r * stride), touch((volatile char*)tile + r * stride + 63); }
#endif
}
template <int T>
ALWAYS_INLINE void load(const void* from, i64 stride) {
    ends_of_rows(from, stride, [](volatile char* byte) { (void)*byte; });
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
ALWAYS_INLINE void store(void* to, i64 stride) {
    ends_of_rows(to, stride, [](volatile char* byte) { *byte = 0; });
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
ALWAYS_INLINE void multiply_add() {  // C += A B
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// R by C tiles of c, 1 or 2 either way: they stay in registers, and each tile that is loaded of a and b feeds several products.
template <int R, int C>
void tile_product(float* c, i64 ldc, const bf16* a, i64 lda, const bf16x2* b, i64 ldb, i64 depth, bool accumulate) {
    constexpr bool DOWN = R > 1, ACROSS = C > 1, BOTH = DOWN && ACROSS;
    float* below = c + ROWS * ldc;
    if (accumulate) {
        load<0>(c, 4 * ldc);
        if constexpr (ACROSS) { load<1>(c + COLS, 4 * ldc); }
        if constexpr (DOWN) { load<2>(below, 4 * ldc); }
        if constexpr (BOTH) { load<3>(below + COLS, 4 * ldc); }
    } else {
        zero<0>(), zero<1>(), zero<2>(), zero<3>();
    }
    for (i64 k = 0; k < depth; k += DEPTH, a += DEPTH, b += DEPTH / 2 * ldb) {
        load<4>(a, 2 * lda);
        load<6>(b, 4 * ldb);
        multiply_add<0, 4, 6>();
        if constexpr (ACROSS) { load<7>(b + COLS, 4 * ldb), multiply_add<1, 4, 7>(); }
        if constexpr (DOWN) { load<5>(a + ROWS * lda, 2 * lda), multiply_add<2, 5, 6>(); }
        if constexpr (BOTH) { multiply_add<3, 5, 7>(); }
    }
    store<0>(c, 4 * ldc);
    if constexpr (ACROSS) { store<1>(c + COLS, 4 * ldc); }
    if constexpr (DOWN) { store<2>(below, 4 * ldc); }
    if constexpr (BOTH) { store<3>(below + COLS, 4 * ldc); }
}

// c (rows, cols; ldc) = or += a b. a (rows, depth; lda) lies as it is, b (depth / 2, cols; ldb) in words: rows 2k and 2k + 1 of it are one of words.
// rows and cols are multiples of 16, depth of 32.
inline void block_product(float* c, i64 ldc, const bf16* a, i64 lda, const bf16x2* b, i64 ldb, i64 rows, i64 cols, i64 depth, bool accumulate) {
    for (i64 i = 0; i < rows; i += 2 * ROWS) {  // rows of a stay in L1 for all of b, which stays there for all rows
        const bool tall = i + ROWS < rows;
        i64 j = 0;
        for (; j + 2 * COLS <= cols; j += 2 * COLS) {
            (tall ? tile_product<2, 2> : tile_product<1, 2>)(c + i * ldc + j, ldc, a + i * lda, lda, b + j, ldb, depth, accumulate);
        }
        if (j < cols) { (tall ? tile_product<2, 1> : tile_product<1, 1>)(c + i * ldc + j, ldc, a + i * lda, lda, b + j, ldb, depth, accumulate); }
    }
}

}  // namespace amx
