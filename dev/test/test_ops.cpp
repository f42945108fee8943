// The ops but attention and the classifier (test_attention.cpp), and the vectors they are made of.
#include <numeric>

#include "llmc/amx.h"
#include "llmc/gemm.h"
#include "llmc/simd.h"
#include "ops_testing.h"

namespace {

// ---- simd.h ---------------------------------------------------------------------------------------------------------
float exp_of(float x) { return exp(splat(x))[0]; }

TEST(Simd, ExpIsWithinTwoUlp) {
    for (double x = -87.3; x < 88.7; x += 0.00371) {
        const double want = std::exp((double)(float)x), ulp = std::nextafter((float)want, INFINITY) - (double)(float)want;
        ASSERT_TRUE(std::fabs(exp_of((float)x) - want) <= 2 * ulp) << x;
    }
    EXPECT_EQ(exp_of(0.0f), 1.0f);
    EXPECT_EQ(exp_of(-INFINITY), 0.0f);
    EXPECT_EQ(exp_of(-1e30f), 0.0f);
    EXPECT_EQ(exp_of(-88.0f), 0.0f);
    EXPECT_EQ(exp_of(89.0f), INFINITY);
    EXPECT_EQ(exp_of(INFINITY), INFINITY);
    EXPECT_TRUE(std::isnan(exp_of(NAN)));
    const uint32_t payload = 0x7FC00001;
    float nan;
    memcpy(&nan, &payload, 4);
    EXPECT_TRUE(std::isnan(exp_of(nan)));
}
TEST(Simd, Exp2IsWithinThreeRoundings) {
    const auto exp2_of = [](float x) { return exp2(splat(x))[0]; };
    for (double x = -126.0; x < 127.0; x += 0.00371) {
        const double want = std::exp2((double)(float)x);
        ASSERT_TRUE(std::fabs(exp2_of((float)x) - want) <= 2e-7 * want) << x;
    }
    EXPECT_EQ(exp2_of(0.0f), 1.0f);
    for (const float x : {-INFINITY, -1e30f, -5e6f, -126.1f}) { EXPECT_EQ(exp2_of(x), 0.0f); }
    EXPECT_TRUE(std::isnan(exp2_of(NAN)));
}
TEST(Simd, Bf16VectorsRoundAsTheScalarDoes) {
    for (uint32_t i = 0; i < 2000000; i++) {
        uint32_t bits = i * 2654435761u;
        if (i < 70000) { bits = i << 16 | (i % 3 == 0 ? 0x8000 : i % 3 == 1 ? 0x7FFF : 0x8001); }
        float value;
        memcpy(&value, &bits, 4);
        ASSERT_EQ(narrow_to_nearest(splat(value))[0], bf16(value).bits) << bits;
    }
}
TEST(Simd, LanesPastTheEndAreLeftAlone) {
    for (int count = 1; count < VL; count++) {
        Vec<float> from = random_values<float>(count, 1), to(VL, 7.0f);
        store(to.data(), load(from.data(), Part{count}), Part{count});
        for (int l = 0; l < VL; l++) { EXPECT_EQ(to[l], l < count ? from[l] : 7.0f); }
    }
    Vec<float> from = random_values<float>(37 * 41, 2), to(41 * 37);
    transpose_block(to.data(), 37, from.data(), 41, 37, 41);
    for (i64 i = 0; i < 37; i++) {
        for (i64 j = 0; j < 41; j++) { ASSERT_EQ(to[j * 37 + i], from[i * 41 + j]); }
    }
}

// ---- embedding ------------------------------------------------------------------------------------------------------
TEST(Simd, ProductsOfPairsAreThoseOfTheirNumbers) {
    for (auto [rows, depth] : Vec<std::pair<i64, i64>>{{1, 1}, {7, 5}, {16, 24}}) {
        const i64 cols = 5 * VL;
        const auto a = random_values<bf16>(rows * 2 * depth, 1), b = random_values<bf16>(2 * depth * cols, 2);
        Vec<bf16x2> b_pairs(depth * cols);
        for (i64 k = 0; k < depth; k++) {
            for (i64 i = 0; i < cols; i += VL) { store(&b_pairs[k * cols + i], pairs_of(load(&b[2 * k * cols + i]), load(&b[(2 * k + 1) * cols + i]))); }
        }
        Vec<float> c(rows * cols, 1.0f);
        block_product(c.data(), cols, Strided<bf16x2>{(const bf16x2*)a.data(), depth, 1}, b_pairs.data(), cols, rows, cols, depth, true);
        Doubles want(c.size(), 1.0);
        for (i64 i = 0; i < rows * cols; i++) {
            for (i64 k = 0; k < 2 * depth; k++) { want[i] += (double)(float)a[i / cols * 2 * depth + k] * (float)b[k * cols + i % cols]; }
        }
        expect_close(c, want, 1e-6 * (double)depth, "c");
    }
}
// Against the sums in double: every mix of pairs of tiles and single ones, rows apart, into what stands there and not; what lies beside c stays.
TEST(Simd, ProductsOfTilesAreThoseOfTheirNumbers) {
    if (!amx::available()) { GTEST_SKIP() << "no AMX"; }
    for (auto [rows, cols, depth] : Vec<std::tuple<i64, i64, i64>>{{16, 16, 32}, {32, 48, 64}, {48, 32, 96}, {80, 80, 32}, {16, 64, 0}}) {
        const i64 lda = depth + 6, ldb = cols + 3, ldc = cols + 1;
        const auto a = random_values<bf16>(rows * lda, 1), b = random_values<bf16>(depth * ldb, 2);  // b: words of an even and an odd row
        for (const bool accumulate : {false, true}) {
            Vec<float> c(rows * ldc, 3.0f);
            {
                amx::Tiles tiles;
                amx::block_product(c.data(), ldc, a.data(), lda, (const bf16x2*)b.data(), ldb, rows, cols, depth, accumulate);
            }
            Doubles want(c.size(), 3.0);
            for (i64 i = 0; i < rows; i++) {
                for (i64 j = 0; j < cols; j++) {
                    double& sum = want[i * ldc + j] = accumulate ? 3.0 : 0.0;
                    for (i64 k = 0; k < depth; k++) { sum += (double)(float)a[i * lda + k] * (float)b[(k / 2 * ldb + j) * 2 + k % 2]; }
                }
            }
            expect_close(c, want, 1e-7 * (double)(depth + 1), "c");
        }
    }
}
// To nearest, ties to even, as bf16(float); NaN stays NaN.
TEST(Simd, PairsRoundAsTheScalarDoes) {
    for (uint64_t seed = 0; seed < 2000; seed++) {
        const Vec<float> even = random_values<float>(VL, 2 * seed, std::exp2(60 * uniform(seed, 9))), odd = random_values<float>(VL, 2 * seed + 1, 256.0);
        bf16x2 words[VL];
        store(words, pairs_of(load(even.data()), load(odd.data())));
        for (int i = 0; i < VL; i++) { ASSERT_TRUE(words[i].even.bits == bf16(even[i]).bits && words[i].odd.bits == bf16(odd[i]).bits) << even[i] << " " << odd[i]; }
    }
    bf16x2 words[VL];
    store(words, pairs_of(splat(NAN), splat(-INFINITY)));
    EXPECT_TRUE(std::isnan((float)words[0].even) && (float)words[VL - 1].odd == -INFINITY);
}

TYPED_TEST(Ops, Embedding) {
    using X = TypeParam;
    for (auto [B, S, C, V, pos0] : Vec<std::tuple<i64, i64, i64, i64, i64>>{{1, 1, 1, 1, 0}, {2, 7, 33, 11, 3}, {3, 101, 20, 500, 0}}) {
        const i64 N = B * S;
        const Range vocab{V / 3, V - V / 5};
        Vec<int> tokens(N);
        for (i64 n = 0; n < N; n++) { tokens[n] = (int)((uniform(n, 5) + 1) / 2 * V * V) % V; }
        const auto wte = random_values<X>(vocab.size() * C, 1), wpe = random_values<X>((pos0 + S) * C, 2);
        const auto dx = random_values<float>(N * C, 3);
        for (bool positions : {false, true}) {
            const int first = (int)pos0;
            auto [x] = for_any_threads([&, B = B, S = S, C = C, pos0 = pos0](Run& run) {
                Vec<X> x(N * C, X(9.0f));
                embedding_forward(x.data(), tokens.data(), wte.data(), positions ? wpe.data() : nullptr, vocab, B, S, C, pos0 ? &first : nullptr, run);
                return std::tuple(x);
            });
            Doubles want(N * C, 0.0);
            for (i64 n = 0; n < N; n++) {
                if (tokens[n] < vocab.begin || tokens[n] >= vocab.end) { continue; }
                for (i64 c = 0; c < C; c++) {
                    want[n * C + c] =
                        (float)wte[(tokens[n] - vocab.begin) * C + c] + (positions ? (float)wpe[(pos0 + n % S) * C + c] : 0.0);
                }
            }
            expect_close(x, want, 1e-7, "x");
        }
        for (bool add : {false, true}) {
            const i64 P = S + 2;
            const auto before = random_values<float>(vocab.size() * C, 8), before_p = random_values<float>(P * C, 9);
            auto [dwte, dwpe] = for_any_threads([&, B = B, S = S, C = C](Run& run) {
                Vec<float> dwte = before, dwpe = before_p;
                embedding_backward(dwte.data(), dx.data(), tokens.data(), vocab, N, C, grad_mode(add), run);
                position_backward(dwpe.data(), dx.data(), B, S, C, P, grad_mode(add), run);
                return std::tuple(dwte, dwpe);
            });
            Doubles want = add ? doubles(before) : Doubles(before.size()), want_p = add ? doubles(before_p) : Doubles(before_p.size());
            for (i64 i = 0; i < N * C; i++) {
                const i64 n = i / C, c = i % C;
                want_p[n % S * C + c] += dx[i];
                if (tokens[n] >= vocab.begin && tokens[n] < vocab.end) { want[(tokens[n] - vocab.begin) * C + c] += dx[i]; }
            }
            expect_close(dwte, want, 2e-5, "dwte");
            expect_close(dwpe, want_p, 2e-6, "dwpe");
        }
    }
}

// ---- norm -----------------------------------------------------------------------------------------------------------
Doubles norm_reference(const Doubles& x, const Doubles& weight, const Doubles& bias, NormKind kind, i64 N, i64 C) {
    Doubles n(N * C);
    for (i64 r = 0; r < N; r++) {
        double mean = 0.0, variance = 0.0;
        for (i64 c = 0; c < C && !kind.rms; c++) { mean += x[r * C + c] / C; }
        for (i64 c = 0; c < C; c++) { variance += (x[r * C + c] - mean) * (x[r * C + c] - mean) / C; }
        for (i64 c = 0; c < C; c++) {
            n[r * C + c] = (x[r * C + c] - mean) / std::sqrt(variance + kind.eps) * weight[c] + (bias.empty() ? 0.0 : bias[c]);
        }
    }
    return n;
}
// The gradient of dot(norm(x), dn) with respect to x, weight and bias.
std::tuple<Doubles, Doubles, Doubles> norm_gradient(const Doubles& x, const Doubles& weight, const Doubles& dn, NormKind kind, i64 N,
                                                    i64 C) {
    Doubles dx(N * C), dweight(C), dbias(C);
    for (i64 r = 0; r < N; r++) {
        double mean = 0.0, variance = 0.0, along = 0.0, total = 0.0;
        for (i64 c = 0; c < C && !kind.rms; c++) { mean += x[r * C + c] / C; }
        for (i64 c = 0; c < C; c++) { variance += (x[r * C + c] - mean) * (x[r * C + c] - mean) / C; }
        const double sigma = std::sqrt(variance + kind.eps);
        for (i64 c = 0; c < C; c++) {
            const double g = dn[r * C + c] * weight[c], centred = x[r * C + c] - mean;
            along += g * centred;
            total += kind.rms ? 0.0 : g;
            dweight[c] += dn[r * C + c] * centred / sigma;
            dbias[c] += dn[r * C + c];
        }
        for (i64 c = 0; c < C; c++) {
            dx[r * C + c] = (dn[r * C + c] * weight[c] - total / C) / sigma - (x[r * C + c] - mean) * along / (C * sigma * sigma * sigma);
        }
    }
    return {dx, dweight, dbias};
}

TYPED_TEST(Ops, Norm) {
    using X = TypeParam;
    for (auto [N, C] : Vec<std::pair<i64, i64>>{{1, 1}, {3, 7}, {5, 16}, {19, 33}, {2100, 3}, {2, 769}}) {
        for (int variant = 0; variant < 8; variant++) {
            const NormKind kind{(variant & 1) != 0, 1e-2f};
            const bool blocks = variant & 2, residual = variant & 2, add = variant & 4;
            const DType wire = variant & 4 ? DType::BF16 : DType::FP32;
            const i64 Ck = variant & 4 ? C / 2 : C, ld = C + 3, N_ = N, C_ = C;
            const auto x_in = random_values<X>(N * C, 1), out_bias = random_values<X>(C, 2), weight = random_values<X>(C, 3),
                       bias = random_values<X>(C, 4);
            Vec<bf16> shared16 = random_values<bf16>(N * ld, 5);
            Vec<float> shared32 = random_values<float>(N * ld, 5);
            Vec<X> priv = random_values<X>(N * ld, 6);
            const Blocks<X> out{wire == DType::BF16 ? (void*)shared16.data() : (void*)shared32.data(), ld, wire, priv.data(), ld, Ck};
            auto [x, n, mean, rstd, n_again] = for_any_threads([&, N = N_, C = C_](Run& run) {
                Vec<X> x = x_in, n(N * C), n_again(N * C);
                Vec<float> mean(N), rstd(N);
                residual_norm_forward(blocks ? x.data() : nullptr, n.data(), kind.rms ? nullptr : mean.data(), rstd.data(), x_in.data(),
                                      blocks ? &out : nullptr, blocks && add ? out_bias.data() : nullptr, weight.data(),
                                      kind.rms ? nullptr : bias.data(), kind, N, C, run);
                norm_apply(n_again.data(), x.data(), kind.rms ? nullptr : mean.data(), rstd.data(), weight.data(),
                           kind.rms ? nullptr : bias.data(), kind, N, C, run);
                return std::tuple(x, n, mean, rstd, n_again);
            });
            EXPECT_TRUE(same_bits(n, n_again)) << "norm_apply";
            Doubles want = doubles(x_in);
            for (i64 i = 0; i < N * C && blocks; i++) {
                const i64 r = i / C, c = i % C;
                want[i] +=
                    c < Ck ? (wire == DType::BF16 ? (float)shared16[r * ld + c] : shared32[r * ld + c]) : (float)priv[r * ld + c - Ck];
                want[i] += add ? (float)out_bias[c] : 0.0;
            }
            expect_close(x, want, 1e-6, "x");
            const Doubles stored = doubles(x), w = doubles(weight), b = kind.rms ? Doubles() : doubles(bias);
            expect_close(n, norm_reference(stored, w, b, kind, N, C), 1e-5, "n");

            const auto dn = random_values<X>(N * C, 7), dx_before = random_values<X>(N * C, 8);
            const auto dw_before = random_values<float>(C, 9);
            auto [dx, dweight, dbias, sent] = for_any_threads([&, N = N_, C = C_](Run& run) {
                Vec<X> dx = dx_before;
                Vec<float> dweight = dw_before, dbias = dw_before, sent((N * ld + 1) * 2, 0.0f);
                norm_backward(dx.data(), residual, variant & 4 ? sent.data() : nullptr, ld, wire, Ck, dweight.data(),
                              kind.rms ? nullptr : dbias.data(), dn.data(), x.data(), mean.data(), rstd.data(), weight.data(), kind,
                              grad_mode(add), N, C, run);
                return std::tuple(dx, dweight, dbias, sent);
            });
            auto [want_dx, want_dw, want_db] = norm_gradient(stored, w, doubles(dn), kind, N, C);
            for (i64 i = 0; i < N * C && residual; i++) { want_dx[i] += (float)dx_before[i]; }
            for (i64 c = 0; c < C && add; c++) {
                want_dw[c] += dw_before[c];
                want_db[c] += dw_before[c];
            }
            expect_close(dx, want_dx, 3e-5, "dx");
            expect_close(dweight, want_dw, 1e-6 * N + 1e-5, "dweight");
            if (!kind.rms) { expect_close(dbias, want_db, 1e-6 * N, "dbias"); }
            for (i64 i = 0; i < N * Ck && variant & 4; i++) {  // the wire is bf16 here
                const bf16 value = ((const bf16*)sent.data())[i / Ck * ld + i % Ck];
                ASSERT_EQ(value.bits, bf16((float)dx[i / Ck * C + i % Ck]).bits);
            }
            if (!residual && !add && N < 100) {
                const Doubles g = doubles(dn);
                expect_slope([&, N = N_, C = C_](const Doubles& v) { return dot(norm_reference(v, w, b, kind, N, C), g); }, stored, dx,
                             1e-4, "dx");
                expect_slope([&, N = N_, C = C_](const Doubles& v) { return dot(norm_reference(stored, v, b, kind, N, C), g); }, w, dweight,
                             1e-4, "dweight");
            }
        }
    }
}

// ---- matmul ---------------------------------------------------------------------------------------------------------
template <typename X, typename Y, typename G>
void test_products() {
    for (auto [N_, K_, OC_] : Vec<std::tuple<i64, i64, i64>>{
             {1, 1, 1}, {1, 170, 131}, {3, 17, 5}, {1, 65, 401}, {2, 65, 3301}, {7, 33, 65}, {13, 95, 202}, {32, 64, 9}, {67, 300, 67}, {211, 521, 97}, {530, 31, 450}, {2, 0, 3}, {3, 5, 0}}) {
        const i64 N = N_, K = K_, OC = OC_;
        for (bool variant : {false, true}) {
            const float alpha = variant ? 1.4142135f : 1.0f;
            const i64 ld = OC + (variant ? 5 : 0);
            const auto in = random_values<X>(N * K, 1), weight = random_values<X>(OC * K, 2), bias = random_values<X>(OC, 3),
                       dout = random_values<X>(N * ld, 4);
            const auto din_before = random_values<Y>(N * K, 5);
            const auto dw_before = random_values<G>(OC * K, 6), db_before = random_values<G>(OC, 7);
            auto [out, din, dweight, dbias] = for_any_threads([&](Run& run) {
                Vec<Y> out(N * ld, Y(7.0f)), din = din_before;
                Vec<G> dweight = dw_before, dbias = db_before;
                matmul_forward(out.data(), ld, in.data(), weight.data(), variant ? bias.data() : nullptr, N, K, OC, alpha, run);
                matmul_dgrad(din.data(), dout.data(), ld, weight.data(), N, K, OC, alpha, variant, run);
                matmul_wgrad(dweight.data(), variant ? nullptr : dbias.data(), dout.data(), ld, in.data(), N, K, OC, alpha, grad_mode(variant), run);
                if (!variant) { bias_backward(dbias.data(), dout.data(), N, OC, GradMode::ADD, run); }
                return std::tuple(out, din, dweight, dbias);
            });
            Doubles want_out(N * ld, 7.0), want_din = variant ? doubles(din_before) : Doubles(N * K);
            Doubles want_dw = variant ? doubles(dw_before) : Doubles(OC * K), want_db = variant ? doubles(db_before) : Doubles(OC);
            naive_products(want_out, want_din, want_dw, in, weight, dout, ld, N, K, OC, alpha);
            for (i64 n = 0; n < N; n++) {
                for (i64 o = 0; o < OC; o++) {
                    want_out[n * ld + o] += variant ? (float)bias[o] : 0.0;
                    want_db[o] += variant ? 0.0 : 2 * (float)dout[n * ld + o];  // written, then added to
                }
            }
            expect_close(out, want_out, 1e-6 * (4 + std::sqrt(K)), "out");
            expect_close(din, want_din, 1e-6 * (4 + std::sqrt(OC)), "din");
            expect_close(dweight, want_dw, 1e-6 * (4 + std::sqrt(N)), "dweight");
            expect_close(dbias, want_db, 1e-6 * (4 + std::sqrt(N)), "dbias");
        }
    }
}
TEST(Matmul, Float) { test_products<float, float, float>(); }
TEST(Matmul, Bf16) { test_products<bf16, bf16, float>(); }
TEST(Matmul, Bf16ToFloat) { test_products<bf16, float, bf16>(); }
TEST(Matmul, Bf16GradientsBelongToBf16Activations) {
    float activations[1] = {1.0f};
    bf16 gradient[1];
    struct Run run(1);
    EXPECT_THROW(matmul_wgrad(gradient, nullptr, activations, 1, activations, 1, 1, 1, 1.0f, GradMode::WRITE, run), Error);
}
#if defined(__AVX512BF16__) && !defined(LLMC_GEMM_PLAIN)
// Products of pairs against the plain loops: every way in which a and b may lie, ragged and whole, one slab and several.
template <typename Kernel, typename Y>
void test_pair_block(i64 rows, i64 cols, i64 K) {
    constexpr i64 PAD = 7;
    for (int variant = 0; variant < 16; variant++) {
        const bool a_transposed = variant & 1, b_transposed = variant & 2, accumulate = variant & 4;
        const auto operand = [](i64 lines, i64 width, int seed) {
            auto values = random_values<bf16>(lines * (width + PAD), seed);
            for (i64 i = 0; i < lines * PAD; i++) { values[i / PAD * (width + PAD) + width + i % PAD] = bf16(NAN); }  // what lies past the edges is not read
            return values;
        };
        const i64 ldc = cols + 3;
        const auto a = a_transposed ? operand(K, rows, 1) : operand(rows, K, 1), b = b_transposed ? operand(cols, K, 2) : operand(K, cols, 2);
        const auto bias = random_values<bf16>(cols, 3);
        const auto before = random_values<Y>(rows * ldc, 4);
        Vec<Y> plain = before, pairs = before;
        cpu::Block<bf16, Y> block{plain.data(), ldc, {a.data(), (a_transposed ? rows : K) + PAD, a_transposed}, {b.data(), (b_transposed ? K : cols) + PAD, b_transposed}, !accumulate ? bias.data() : nullptr, rows, cols, K, variant & 8 ? 1.5f : 1.0f, accumulate};
        cpu::plain_block(block);
        block.c = pairs.data();
        cpu::pair_block_on<Kernel>(block, cpu::PairCut(rows, cols, K, a_transposed, 1, std::is_same_v<Kernel, cpu::OnTiles>).slabs);
        expect_close(pairs, doubles(plain), 1e-6 * (4 + std::sqrt(K)), "pairs' block");
    }
}
template <typename Kernel>
void test_pair_blocks() {
    for (auto [rows, cols, K] : Vec<std::tuple<i64, i64, i64>>{{37, 53, 129}, {32, 32, 32}, {64, 96, 64}, {33, 16, 700}, {70, 81, 2100}, {128, 40, 1056}, {1, 1, 1}, {64, 64, 0}}) {
        test_pair_block<Kernel, bf16>(rows, cols, K);
        test_pair_block<Kernel, float>(rows, cols, K);
    }
}
TEST(Matmul, PairsOnVectors) { test_pair_blocks<cpu::OnVectors>(); }
TEST(Matmul, PairsOnTiles) {
    if (!amx::available()) { GTEST_SKIP() << "no AMX here"; }
    test_pair_blocks<cpu::OnTiles>();
}
#endif
#ifndef LLMC_GEMM_PLAIN
TEST(Matmul, VendorBlocks) {
    for (int variant = 0; variant < 16; variant++) {
        const i64 rows = 37, cols = 53, K = 129, lda = K + 7, ldb = K + 9, ldc = cols + 3;
        const bool a_transposed = variant & 1, b_transposed = variant & 2, accumulate = variant & 4;
        const auto a = random_values<float>(lda * lda, 1), b = random_values<float>(ldb * ldb, 2), bias = random_values<float>(cols, 3);
        const auto before = random_values<float>(rows * ldc, 4);
        Vec<float> plain = before, vendor = before;
        cpu::Block<float, float> block{plain.data(), ldc, {a.data(), lda, a_transposed}, {b.data(), ldb, b_transposed}, !accumulate ? bias.data() : nullptr, rows, cols, K, variant & 8 ? 1.5f : 1.0f, accumulate};
        cpu::plain_block(block);
        block.c = vendor.data();
        cpu::vendor_block(block);
        expect_close(vendor, doubles(plain), 1e-4, "vendor's block");
    }
}
#endif
TEST(Matmul, PollIsCalledBetweenBlocksOfAtMostOneGflop) {
    const i64 N = 512, K = 768, OC = 2304;
    const auto in = random_values<float>(N * K, 1), weight = random_values<float>(OC * K, 2);
    Vec<float> out(N * OC);
    ::Run run(1);
    int polls = 0;
    run.poll = [&] { polls++; };
    matmul_forward(out.data(), OC, in.data(), weight.data(), (const float*)nullptr, N, K, OC, 1.0f, run);
    EXPECT_GE(polls, 16);
}
TYPED_TEST(Ops, Cast) {
    const i64 count = 70001;
    const auto from = random_values<float>(count, 1);
    auto [to, back] = for_any_threads([&](Run& run) {
        Vec<bf16> to(count);
        Vec<float> back(count);
        cast(to.data(), from.data(), count, run);
        cast(back.data(), to.data(), count, run);
        return std::tuple(to, back);
    });
    for (i64 i = 0; i < count; i++) {
        ASSERT_EQ(to[i].bits, bf16(from[i]).bits);
        ASSERT_EQ(back[i], (float)to[i]);
    }
}

// ---- mlp ------------------------------------------------------------------------------------------------------------
double gelu(double u) { return 0.5 * u * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (u + 0.044715 * u * u * u))); }
Doubles swiglu_reference(const Doubles& gate_up, i64 N, i64 F) {
    Doubles h(N * F);
    for (i64 i = 0; i < N * F; i++) {
        const double g = gate_up[i / F * 2 * F + i % F], u = gate_up[i / F * 2 * F + F + i % F];
        h[i] = g / (1.0 + std::exp(-g)) * u;
    }
    return h;
}
TYPED_TEST(Ops, Mlp) {
    using X = TypeParam;
    for (auto [N_, F_] : Vec<std::pair<i64, i64>>{{1, 1}, {3, 5}, {7, 16}, {5, 257}, {130, 131}}) {
        const i64 N = N_, F = F_;
        const auto gate_up = random_values<X>(N * 2 * F, 1, 6.0), dh = random_values<X>(N * F, 2);
        auto [h, dgate_up, h_gelu, du] = for_any_threads([&](Run& run) {
            Vec<X> h(N * F), dgate_up = gate_up, h_gelu(N * F), du(gate_up.begin(), gate_up.begin() + N * F);  // in place
            swiglu_forward(h.data(), gate_up.data(), N, F, run);
            swiglu_backward(dgate_up.data(), dh.data(), dgate_up.data(), N, F, run);
            gelu_forward(h_gelu.data(), gate_up.data(), N, F, run);
            gelu_backward(du.data(), dh.data(), du.data(), N, F, run);
            return std::tuple(h, dgate_up, h_gelu, du);
        });
        const Doubles in = doubles(gate_up), u(in.begin(), in.begin() + N * F), grad = doubles(dh);
        Doubles want_gelu(N * F);
        for (i64 i = 0; i < N * F; i++) { want_gelu[i] = gelu(u[i]); }
        expect_close(h, swiglu_reference(in, N, F), 1e-5, "swiglu");
        expect_close(h_gelu, want_gelu, 3e-6, "gelu");
        expect_slope([&](const Doubles& v) { return dot(swiglu_reference(v, N, F), grad); }, in, dgate_up, 2e-5, "dgate_up");
        expect_slope(
            [&](const Doubles& v) {
                double sum = 0.0;
                for (i64 i = 0; i < N * F; i++) { sum += gelu(v[i]) * grad[i]; }
                return sum;
            },
            u, du, 2e-5, "du");
    }
    const Vec<X> far{X(100.0f), X(-100.0f), X(0.0f), X(-0.0f)};  // exp overflows or is 0 inside
    Vec<X> h(4), slope(4), ones(4, X(1.0f));
    ::Run run(1);
    gelu_forward(h.data(), far.data(), 1, 4, run);
    gelu_backward(slope.data(), ones.data(), far.data(), 1, 4, run);
    expect_close(h, {100.0, 0.0, 0.0, 0.0}, 1e-30, "gelu far out");
    expect_close(slope, {1.0, 0.0, 0.5, 0.5}, 1e-30, "gelu's slope far out");
}

// ---- optimiser ------------------------------------------------------------------------------------------------------
TYPED_TEST(Ops, AdamW) {
    using X = TypeParam;
    const AdamW hyper{3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f - 0.9f * 0.9f, 1.0f - 0.95f * 0.95f, 0.7f};
    for_gradient_types<X>([&](auto type) {
        for (i64 count : {1, 17, 70001}) {
            auto grad = random_values<decltype(type)>(count, 2);
            const auto start = random_values<float>(count, 1), m0 = random_values<float>(count, 3, 0.1);
            const auto v0 = random_values<float>(count, 4, 0.01, 0.011);
            auto [param, master, m, v] = for_any_threads([&](Run& run) {
                Vec<X> param = params_of<X>(start, {}, 0);
                Vec<uint16_t> low = lower_halves(start);
                Vec<float> m = m0, v = v0;
                adamw_update(param.data(), dtype_of<X> == DType::FP32 ? nullptr : low.data(), m.data(), v.data(), grad.data(), count, hyper, run);
                return std::tuple(param, masters_of(param, low, {}, 0), m, v);
            });
            Doubles want(count), want_m(count), want_v(count);
            for (i64 i = 0; i < count; i++) {
                const double g = (double)hyper.grad_scale * (float)grad[i];
                want_m[i] = hyper.beta1 * (double)m0[i] + (1.0 - hyper.beta1) * g;
                want_v[i] = hyper.beta2 * (double)v0[i] + (1.0 - hyper.beta2) * g * g;
                const double step = want_m[i] / hyper.correction1 / (std::sqrt(want_v[i] / hyper.correction2) + hyper.eps);
                want[i] = start[i] - hyper.lr * (step + hyper.weight_decay * (double)start[i]);
            }
            expect_close(m, want_m, 1e-7, "m");
            expect_close(v, want_v, 1e-7, "v");
            expect_close(master, want, 1e-7, "master");
            for (i64 i = 0; i < count; i++) { ASSERT_EQ((float)param[i], (float)X(master[i])) << i; }  // no ties among these
        }
    });
}
// Every sign, exponent and mantissa of bf16 before every kind of lower half: the parameter is that of bf16(float), ties apart, or its neighbour; with
// the lower half it is the master weight again.
TEST(AdamWRounding, ParameterAndLowerHalfAreTheMasterWeight) {
    for (const Rounding by : {Rounding{}, Rounding{true, 99}, Rounding{true, 7}}) {
        for (uint32_t high = 0; high < 0x10000; high++) {
            for (uint32_t low : {0u, 1u, 0x1234u, 0x7FFFu, 0x8000u, 0x8001u, 0xABCDu, 0xFFFFu}) {
                const uint32_t bits = high << 16 | low;
                const float master = std::bit_cast<float>(bits);
                const bf16 param(by(master, bits));
                const float again = by.master((float)param, lower_half(master), bits);
                if (std::isnan(master)) { ASSERT_TRUE(std::isnan((float)param) && std::isnan(again)) << std::hex << bits; }
                else { ASSERT_EQ(std::bit_cast<uint32_t>(again), bits) << std::hex << bits; }
                if (!by.stochastic) { ASSERT_EQ(param.bits, low == 0x8000 && !std::isnan(master) ? high + 1 : bf16(master).bits) << std::hex << bits; }
            }
        }
    }
}
// What AdamW does not move stays as it is, to the bit, whatever its parameter is rounded to from step to step.
TEST(AdamWRounding, MasterWeightsStay) {
    constexpr i64 COUNT = 1001;
    const auto start = random_values<float>(COUNT, 1);
    Vec<bf16> param = params_of<bf16>(start, {}, 5), before = param;
    Vec<uint16_t> low = lower_halves(start);
    Vec<float> zeros(COUNT), m = zeros, v = zeros;
    AdamW hyper{0, 0.9f, 0.95f, 1e-8f, 0, 0.1f, 0.05f, 1};
    hyper.first = 5;
    struct Run run(2);
    for (uint32_t key = 1; key <= 20; key++) {
        hyper.rounded_by = hyper.rounding, hyper.rounding = {key % 3 > 0, key};
        adamw_update(param.data(), low.data(), m.data(), v.data(), zeros.data(), COUNT, hyper, run);
        ASSERT_TRUE(same_bits(masters_of(param, low, hyper.rounding, 5), start)) << key;
    }
    EXPECT_FALSE(same_bits(param, before));
}
// Each parameter is a neighbour of its master weight, by a hash that is written here again; the mean error is that of fair coins.
TEST(AdamWRounding, Stochastic) {
    constexpr i64 COUNT = 70001, FIRST = 12345;
    Vec<float> zeros(COUNT);
    const Vec<float> start = random_values<float>(COUNT, 1);
    AdamW hyper{0, 0.9f, 0.95f, 1e-8f, 0, 0.1f, 0.05f, 1};
    hyper.rounding = {true, 99}, hyper.first = FIRST;
    const Vec<float>& master = start;
    Vec<float> m = zeros, v = zeros;
    Vec<bf16> param = params_of<bf16>(start, {}, 0), second = param;
    Vec<uint16_t> low = lower_halves(start), second_low = low;
    struct Run run(2);
    adamw_update(param.data(), low.data(), m.data(), v.data(), zeros.data(), COUNT, hyper, run);
    double error = 0, fair = 0;
    for (i64 i = 0; i < COUNT; i++) {
        uint32_t bits = std::bit_cast<uint32_t>(master[i]), h = (uint32_t)(FIRST + i) ^ 99;
        h = (h ^ (h >> 16)) * 0x85EBCA6B, h = (h ^ (h >> 13)) * 0xC2B2AE35, h ^= h >> 16;
        const uint32_t low = bits & 0xFFFF, up = low + (h & 0xFFFF) > 0xFFFF;
        ASSERT_EQ(std::bit_cast<uint32_t>((float)param[i]), (bits & 0xFFFF0000) + (up << 16)) << i;
        error += up - low / 65536.0, fair += low / 65536.0 * (1 - low / 65536.0);
    }
    EXPECT_LT(std::abs(error), 4 * std::sqrt(fair));
    // In two parts, as ZeRO's owners do it: the same bits.
    for (const Range part : {Range{0, 333}, Range{333, COUNT}}) {
        hyper.first = FIRST + part.begin;
        adamw_update(second.data() + part.begin, second_low.data() + part.begin, m.data() + part.begin, v.data() + part.begin, zeros.data(), part.size(), hyper, run);
    }
    EXPECT_EQ(memcmp(second.data(), param.data(), COUNT * sizeof(bf16)), 0);
    EXPECT_TRUE(std::isnan(Rounding{true, 1}(NAN, 0)));
    EXPECT_EQ((Rounding{true, 1}(INFINITY, 0)), INFINITY);
}
TYPED_TEST(Ops, SumsOfSquares) {
    using X = TypeParam;
    for (auto [N_, cols_] : Vec<std::pair<i64, i64>>{{1, 1}, {3, 37}, {1100, 131}, {0, 5}}) {
        const i64 N = N_, cols = cols_, ld = cols + 2;
        const float scale = 0.3f;
        auto a = random_values<X>(N * ld, 1);
        const auto b = random_values<float>(N * ld, 2);
        auto [sums] = for_any_threads([&](Run& run) {
            return std::tuple(
                Doubles{sums_of_squares({{a.data(), N * ld}}, run)[0], sum_of_squared_differences(a.data(), b.data(), scale, ld, N, cols, run)});
        });
        double squares = 0.0, differences = 0.0;
        for (i64 i = 0; i < N * ld; i++) {
            squares += (double)(float)a[i] * (float)a[i];
            if (i % ld < cols) { differences += std::pow((double)(float)a[i] - (double)scale * b[i], 2); }
        }
        EXPECT_TRUE(std::fabs(sums[0] - squares) <= 1e-12 * squares);
        EXPECT_TRUE(std::fabs(sums[1] - differences) <= 1e-6 * differences);  // a - scale * b is rounded to fp32
    }
}

// The choice, in double precision: the coin lies in the token's part of the kept tokens' probabilities, to 1e-6 of all.
TEST(Sampling, ChoosesByProbability) {
    ::Run run(1);
    for (i64 V : {1, 2, 7, 100, 1001}) {
        auto logits = random_values<float>(V, V, 6.0);
        for (i64 i = 3; i < V; i += 5) { logits[i] = logits[i - 1]; }  // equal ones
        for (const Sampling& how : Vec<Sampling>{{}, {0.7, 0, 1.0}, {1.0, 5, 1.0}, {1.5, 0, 0.8}, {3.0, 50, 0.5}, {1e4, 3, 1.0}, {0.5, 1, 1e-9}}) {
            Vec<int> order(V);
            std::iota(order.begin(), order.end(), 0);
            const auto p = [&](int i) { return std::exp(((double)logits[i] - *std::max_element(logits.begin(), logits.end())) / how.temperature); };
            const bool cut = (how.top_k > 0 && how.top_k < V) || how.top_p < 1;
            if (cut) { std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; }); }
            if (how.top_k > 0 && how.top_k < V) { order.resize(how.top_k); }
            double total = 0;
            for (int i : order) { total += p(i); }
            double nucleus = 0;
            size_t kept = 0;
            while (kept < order.size() && (how.top_p == 1 || kept == 0 || nucleus < how.top_p * total)) { nucleus += p(order[kept++]); }
            order.resize(kept), total = nucleus;
            for (uint64_t seed = 0; seed < 300; seed++) {
                uint64_t state = seed * 77, z = state + 0x9E3779B97F4A7C15u;  // SplitMix64, as published
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u, z = (z ^ (z >> 27)) * 0x94D049BB133111EBu, z ^= z >> 31;
                const double coin = std::ldexp((double)(z >> 11), -53);
                int token = -1, position = 5;
                sample_token(&token, &position, 3, &state, logits.data(), V, how, run);
                EXPECT_EQ(position, 8);
                EXPECT_EQ(state, seed * 77 + 0x9E3779B97F4A7C15u);
                const auto place = std::find(order.begin(), order.end(), token);
                ASSERT_TRUE(place != order.end()) << "token " << token << " of " << V << " is not kept";
                double before = 0;
                for (auto i = order.begin(); i != place; ++i) { before += p(*i); }
                const double low = before / total - 1e-6, high = (before + p(token)) / total + 1e-6;
                EXPECT_TRUE(low <= coin && coin <= high) << "V " << V << ": " << coin << " of token " << token << " in [" << low << ", " << high << "]";
            }
        }
    }
}
TEST(Sampling, WhatIsNotDrawn) {
    ::Run run(1);
    const float inf = INFINITY;
    uint64_t state = 3;
    int position = 0;
    const auto token = [&](Vec<float> logits, double temperature) {
        int token;
        sample_token(&token, &position, 1, &state, logits.data(), (i64)logits.size(), {temperature, 0, 1.0}, run);
        return token;
    };
    EXPECT_EQ(token({1, 4, 4, 2}, 0), 1);
    EXPECT_EQ(token({1, NAN, 4, -NAN}, 0), -1 - 1);
    EXPECT_EQ(token({1, 5, 4, -NAN}, 1), -1 - 3);
    EXPECT_EQ(state, 3u);
    EXPECT_EQ(token({1, inf, 4, inf}, 1), 1);
    EXPECT_EQ(token({-inf, -inf, -inf}, 1), 0);
    EXPECT_EQ(token({-inf, -1e30f, -inf}, 1), 1);
    EXPECT_NE(state, 3u);
}

}  // namespace
