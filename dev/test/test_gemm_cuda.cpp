// The products of the CUDA build (gemm_cublaslt.h) against loops in double: at sizes 1, odd, prime, past a block, over nothing; with
// strides and addresses of every alignment; and wrong calls of cuBLASLt, each of which the emulated one refuses.
//
// Linked with the emulator (llmc/simt/cublaslt.cpp). The tests of products are right for cuBLASLt itself as well.
#include "kernels_testing.h"
#include "llmc/gemm.h"

namespace {

// ---- the three products ---------------------------------------------------------------------------------------------
struct Sizes {
    i64 N, K, OC;
    i64 pad;    // elements between rows of out and dout
    i64 shift;  // elements from an aligned address
};

template <typename X, typename Y, typename G>
void test_products(const Sizes& sizes, float alpha, bool accumulate, bool with_bias) {
    const auto [N, K, OC, pad, shift] = sizes;
    SCOPED_TRACE(format("N %lld K %lld OC %lld pad %lld shift %lld, add %d bias %d", (long long)N, (long long)K, (long long)OC,
                        (long long)pad, (long long)shift, accumulate, with_bias));
    const i64 ld = OC + pad;
    const auto in = random_values<X>(N * K, 1), weight = random_values<X>(OC * K, 2), bias = random_values<X>(OC, 3);
    const auto dout = random_values<X>(N * ld, 4);
    const auto din_before = random_values<Y>(N * K, 5);
    const auto dw_before = random_values<G>(OC * K, 6);
    const auto products = [&] {
        Side side{true};
        Memory<X> i(in, side, shift), w(weight, side, shift), b(bias, side, shift), d(dout, side, shift);
        Memory<Y> out(Vec<Y>(N * ld, Y(7.0f)), side, shift), din(accumulate ? din_before : Vec<Y>(N * K, Y(NAN)), side, shift);
        Memory<G> dw(accumulate ? dw_before : Vec<G>(OC * K, G(NAN)), side, shift);
        gpu::matmul_forward(out.data, ld, i.data, w.data, with_bias ? b.data : nullptr, N, K, OC, alpha, side.run);
        gpu::matmul_dgrad(din.data, d.data, ld, w.data, N, K, OC, alpha, accumulate, side.run);
        gpu::matmul_wgrad(dw.data, nullptr, d.data, ld, i.data, N, K, OC, alpha, accumulate ? GradMode::ADD : GradMode::WRITE, side.run);
        return std::tuple(out.values(), din.values(), dw.values());
    };
    const auto [out, din, dweight] = products();
    Doubles want_out(N * ld, 7.0), want_din = accumulate ? doubles(din_before) : Doubles(N * K);
    Doubles want_dw = accumulate ? doubles(dw_before) : Doubles(OC * K);
    naive_products(want_out, want_din, want_dw, in, weight, dout, ld, N, K, OC, alpha);
    for (i64 i = 0; i < N * OC && with_bias; i++) { want_out[i / OC * ld + i % OC] += (float)bias[i % OC]; }
    expect_close(out, want_out, 1e-6 * (4 + std::sqrt(K)), "out");
    expect_close(din, want_din, 1e-6 * (4 + std::sqrt(OC)), "din");
    expect_close(dweight, want_dw, 1e-6 * (4 + std::sqrt(N)), "dweight");
    EXPECT_TRUE(products() == std::tuple(out, din, dweight)) << "other bits the second time";
}

template <typename X, typename Y, typename G>
void test_products() {
    for (const Sizes& sizes : Vec<Sizes>{{1, 1, 1, 0, 0},
                                         {1, 70, 131, 0, 0},  // one token
                                         {3, 17, 5, 0, 1},
                                         {8, 8, 8, 0, 0},    // the three products differ in what is transposed, in nothing else
                                         {8, 32, 16, 8, 0},  // all aligned
                                         {8, 32, 16, 8, 4},
                                         {7, 33, 65, 3, 0},
                                         {67, 300, 67, 5, 3},
                                         {130, 521, 97, 0, 0},
                                         {2, 0, 3, 2, 0},  // nothing to sum over
                                         {3, 5, 0, 0, 0},  // a rank without vocabulary rows
                                         {0, 5, 7, 0, 0}}) {
        test_products<X, Y, G>(sizes, 1.0f, false, false);
        test_products<X, Y, G>(sizes, 1.4142135f, true, true);
    }
}
TEST(GemmCuda, Float) { test_products<float, float, float>(); }
TEST(GemmCuda, Bf16) { test_products<bf16, bf16, float>(); }
TEST(GemmCuda, Bf16ToFloat) { test_products<bf16, float, bf16>(); }

// What is fused with a product, and the same where the library cannot (rows of another alignment, or no such algorithm).
double gelu(double u) { return 0.5 * u * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (u + 0.044715 * u * u * u))); }
template <typename X, typename G>
void test_fused(const Sizes& sizes, bool add, bool with_bias, bool library_fuses) {
    const auto [N, K, OC, pad, shift] = sizes;
    const float alpha = 1.5f;  // of the weight gradient, not of the bias gradient
    const bool fused = library_fuses && K > 0 && OC % 8 == 0 && shift == 0;
    SCOPED_TRACE(format("N %lld K %lld OC %lld shift %lld, add %d bias %d", (long long)N, (long long)K, (long long)OC, (long long)shift,
                        add, with_bias));
    const auto in = random_values<X>(N * K, 1), weight = random_values<X>(OC * K, 2), bias = random_values<X>(OC, 3);
    const auto dout = random_values<X>(N * OC, 4);
    const auto dw_before = random_values<G>(OC * K, 5), db_before = random_values<G>(OC, 6);
    Side side{true};
    Memory<X> i(in, side, shift), w(weight, side, shift), b(bias, side, shift), d(dout, side, shift);
    Memory<X> h(N * OC, side, shift), u(N * OC, side, shift);
    Memory<G> dw(add ? dw_before : Vec<G>(OC * K, G(NAN)), side, shift), db(add ? db_before : Vec<G>(OC, G(NAN)), side, shift);
    gpu::matmul_gelu_forward(h.data, u.data, i.data, w.data, with_bias ? b.data : nullptr, N, K, OC, side.run);
    gpu::matmul_wgrad(dw.data, with_bias ? db.data : nullptr, d.data, OC, i.data, N, K, OC, alpha, add ? GradMode::ADD : GradMode::WRITE,
                      side.run);
    Doubles want_u(N * OC), want_h(N * OC);
    Doubles want_dw = add ? doubles(dw_before) : Doubles(OC * K), want_db = add ? doubles(db_before) : Doubles(OC);
    for (i64 n = 0; n < N; n++) {
        for (i64 o = 0; o < OC; o++) {
            double& sum = want_u[n * OC + o];
            const double slope = (float)dout[n * OC + o];
            for (i64 k = 0; k < K; k++) {
                sum += (double)(float)in[n * K + k] * (float)weight[o * K + k];
                want_dw[o * K + k] += alpha * slope * (float)in[n * K + k];
            }
            sum += with_bias ? (float)bias[o] : 0.0;
            want_h[n * OC + o] = gelu(sum);
            want_db[o] += slope;
        }
    }
    expect_close(u.values(), want_u, 1e-6 * (4 + std::sqrt(K)), "u");
    // Fused, h does not see that u is rounded.
    expect_close(h.values(), want_h, 1e-6 * (4 + std::sqrt(K)) + (fused ? 0.0 : 4 * unit<X>), "h");
    expect_close(dw.values(), want_dw, 1e-6 * (4 + std::sqrt(N)), "dweight");
    if (with_bias) { expect_close(db.values(), want_db, 1e-6 * (4 + std::sqrt(N)), "dbias"); }
}
template <typename X, typename G>
void test_fused(bool library_fuses) {
    for (const Sizes& sizes : Vec<Sizes>{{1, 1, 1, 0, 0},
                                         {3, 17, 5, 0, 0},
                                         {8, 32, 16, 0, 0},
                                         {8, 32, 16, 0, 1},
                                         {67, 70, 24, 0, 0},
                                         {2, 0, 8, 0, 0},
                                         {0, 8, 8, 0, 0}}) {
        for (int variant = 0; variant < 4; variant++) { test_fused<X, G>(sizes, variant & 1, variant & 2, library_fuses); }
    }
}
TEST(GemmCuda, Fused) {
    test_fused<float, float>(true);
    test_fused<bf16, float>(true);
    test_fused<bf16, bf16>(true);
}
TEST(GemmCuda, AProductWithoutAnAlgorithmIsNamed) {
    Side side{true};
    Memory<float> few(8, side);
    const Matrix<float> a{few.data, 8, false};
    try {
        gpu::gemm(few.data, 8, a, a, (const float*)nullptr, (i64)1 << 32, 8, 8, 1.0f, false, side.run);
        ADD_FAILURE() << "taken";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("no algorithm for (4294967296, 8) x (8, 8), strides 8, 8, 8, fp32 to fp32"), std::string::npos) << error.what();
    }
}
TEST(GemmCuda, NothingIsFusedWhereTheLibraryCannot) {
    setenv("SIMT_EPILOGUES", "none", 1);
    test_fused<float, float>(false);
    test_fused<bf16, float>(false);
    test_fused<bf16, bf16>(false);
    test_products<bf16, bf16, float>({8, 32, 16, 0, 0}, 1.0f, false, true);
    unsetenv("SIMT_EPILOGUES");
}

// The two blocks of the partial channel reduce, at every Ck: weights begin at any address, the gradient's blocks lie side by side.
TEST(GemmCuda, BlocksOfThePartialReduce) {
    const i64 N = 5, K = 24, C = 20;  // Ck = 10: two products that differ in the result's type, in nothing else
    const auto in = random_values<bf16>(N * K, 1), weight = random_values<bf16>(C * K, 2), dx = random_values<bf16>(N * C, 3);
    for (i64 Ck = 1; Ck < C; Ck++) {
        Side side{true};
        const i64 Cp = C - Ck, ld_shared = round_up(Ck, DEVICE_ALIGN), ld_priv = round_up(Cp, DEVICE_ALIGN);
        Memory<bf16> a(in, side), w(weight, side), d(dx, side), priv(Vec<bf16>(N * ld_priv, bf16(7.0f)), side);
        Memory<float> shared(Vec<float>(N * ld_shared, 7.0f), side), din(N * K, side), dw(C * K, side);
        const bf16* none = nullptr;
        gpu::matmul_forward(shared.data, ld_shared, a.data, w.data, none, N, K, Ck, 1.0f, side.run);
        gpu::matmul_forward(priv.data, ld_priv, a.data, w.data + Ck * K, none, N, K, Cp, 2.0f, side.run);
        gpu::matmul_dgrad(din.data, d.data + Ck, C, w.data + Ck * K, N, K, Cp, 2.0f, false, side.run);
        gpu::matmul_dgrad(din.data, d.data, C, w.data, N, K, Ck, 1.0f, true, side.run);
        gpu::matmul_wgrad(dw.data + Ck * K, nullptr, d.data + Ck, C, a.data, N, K, Cp, 2.0f, GradMode::WRITE, side.run);
        gpu::matmul_wgrad(dw.data, nullptr, d.data, C, a.data, N, K, Ck, 1.0f, GradMode::WRITE, side.run);
        Doubles want_shared(N * ld_shared, 7.0), want_priv(N * ld_priv, 7.0), want_din(N * K), want_dw(C * K);
        for (i64 n = 0; n < N; n++) {
            for (i64 c = 0; c < C; c++) {
                const double alpha = c < Ck ? 1.0 : 2.0;
                double& out = c < Ck ? want_shared[n * ld_shared + c] : want_priv[n * ld_priv + c - Ck];
                out = 0.0;
                for (i64 k = 0; k < K; k++) {
                    out += alpha * (float)in[n * K + k] * (float)weight[c * K + k];
                    want_din[n * K + k] += alpha * (float)dx[n * C + c] * (float)weight[c * K + k];
                    want_dw[c * K + k] += alpha * (float)dx[n * C + c] * (float)in[n * K + k];
                }
            }
        }
        expect_close(shared.values(), want_shared, 1e-5, "shared");
        expect_close(priv.values(), want_priv, 1e-5, "private");
        expect_close(din.values(), want_din, 1e-5, "din");
        expect_close(dw.values(), want_dw, 1e-5, "dweight");
    }
}

TEST(GemmCuda, OnePlanForAKindOfProduct) {
    Side side{true};
    Memory<float> a(random_values<float>(64, 1), side), b(random_values<float>(64, 2), side), c(Vec<float>(64, 0.0f), side);
    const auto forward = [&](i64 N, i64 shift, i64 ld, bool bias) {
        gpu::matmul_forward(c.data, ld, a.data + shift, b.data, bias ? b.data : nullptr, N, 4, 4, 1.0f, side.run);
        return side.run.cublas_lt->plans();
    };
    EXPECT_EQ(forward(8, 0, 4, false), 1u);
    EXPECT_EQ(forward(8, 0, 4, false), 1u);
    EXPECT_EQ(forward(8, 4, 4, false), 1u);  // another address, as well aligned
    EXPECT_EQ(forward(8, 1, 4, false), 2u);
    EXPECT_EQ(forward(7, 0, 4, false), 3u);
    EXPECT_EQ(forward(8, 0, 5, false), 4u);
    EXPECT_EQ(forward(8, 0, 4, true), 5u);
}

TEST(GemmCuda, NothingRunsBeforeItIsWaitedFor) {
    FAULT_WITHOUT_CHECKER();
    Side side{true};
    Memory<float> a(Vec<float>(4, 1.0f), side), b(Vec<float>(4, 1.0f), side), c(4, side);
    gpu::matmul_forward(c.data, 2, a.data, b.data, (const float*)nullptr, 2, 2, 2, 1.0f, side.run);
    Side other{true};  // copies on a stream of its own, without an event
    Vec<float> early(4), late(4);
    copy_to_host(early.data(), c.data, 4, other.run);
    copy_to_host(late.data(), c.data, 4, side.run);
    for (int i = 0; i < 4; i++) {
        EXPECT_TRUE(std::isnan(early[i]));
        EXPECT_EQ(late[i], 2.0f);
    }
}

// ---- wrong calls ----------------------------------------------------------------------------------------------------
// d (m,n) = a (m,k) b (k,n) + bias, column-major, as it should be asked for; a fault changes one thing.
class Cublas : public testing::Test {
protected:
    static constexpr i64 m = 24, n = 16, k = 80;
    Side side{true};
    Memory<float> a{random_values<float>(m * k, 1), side}, b{random_values<float>(k * n, 2), side}, d{m * n, side};
    Memory<float> bias{random_values<float>(m, 3), side}, workspace{Vec<float>(1 << 14, 0.0f), side};

    struct Operand {
        cudaDataType_t type;
        i64 rows, cols, ld;
        const void* data;
        uint32_t promised;  // alignment
    };
    Operand A{CUDA_R_32F, m, k, m, a.data, 16}, B{CUDA_R_32F, k, n, k, b.data, 16}, D{CUDA_R_32F, m, n, m, d.data, 16};
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    cublasOperation_t transpose_a = CUBLAS_OP_N;
    int epilogue = CUBLASLT_EPILOGUE_BIAS;
    const void *bias_at_first = bias.data, *bias_then = bias.data, *gelu_input = nullptr;
    i64 ld_gelu = 0;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    uint64_t most_workspace = 1 << 16;
    void* workspace_at = workspace.data;
    i64 workspace_less = 0;
    std::function<void()> between = [] {};  // the heuristic and the product

    cublasLtMatmulHeuristicResult_t best{};
    // The error's words; empty where there was none.
    std::string multiply() {
        try {
            ask();
            return "";
        } catch (const Error& error) { return error.what(); }
    }
    void expect_error(const Vec<std::string>& words) {
        const std::string text = multiply();
        for (const std::string& word : words) {
            EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in '" << text << "'";
        }
    }

private:
    struct Objects {
        cublasLtHandle_t handle;
        cublasLtMatmulDesc_t desc;
        cublasLtMatmulPreference_t preference;
        explicit Objects(cublasComputeType_t compute) {
            cublas_check(cublasLtCreate(&handle));
            cublas_check(cublasLtMatmulDescCreate(&desc, compute, CUDA_R_32F));
            cublas_check(cublasLtMatmulPreferenceCreate(&preference));
        }
        ~Objects() { cublasLtMatmulPreferenceDestroy(preference), cublasLtMatmulDescDestroy(desc), cublasLtDestroy(handle); }
    };
    void ask() {
        const Objects o(compute);
        const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
            cublas_check(cublasLtMatmulDescSetAttribute(o.desc, attribute, &value, sizeof(value)));
        };
        set(CUBLASLT_MATMUL_DESC_TRANSA, transpose_a);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_at_first);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, gelu_input);
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld_gelu);
        const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
            cublas_check(cublasLtMatmulPreferenceSetAttribute(o.preference, attribute, &value, sizeof(value)));
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace);
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
        const auto promise = [&](cublasLtMatmulPreferenceAttributes_t attribute, uint32_t bytes) {
            if (bytes > 0) { prefer(attribute, bytes); }
        };
        promise(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, A.promised);
        promise(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, B.promised);
        promise(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, D.promised);
        promise(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, D.promised);
        int found = 0;
        {
            const Layouts l(*this);
            cublas_check(cublasLtMatmulAlgoGetHeuristic(o.handle, o.desc, l.a, l.b, l.d, l.d, o.preference, 1, &best, &found));
        }
        between();
        const Layouts l(*this);
        set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_then);
        const float one = 1.0f, zero = 0.0f;
        cublas_check(cublasLtMatmul(o.handle, o.desc, &one, A.data, l.a, B.data, l.b, &zero, D.data, l.d, (void*)D.data, l.d, &best.algo,
                                    workspace_at, best.workspaceSize - workspace_less, side.run.stream));
    }
    struct Layouts {
        cublasLtMatrixLayout_t a, b, d;
        explicit Layouts(const Cublas& c) {
            const auto make = [](cublasLtMatrixLayout_t& to, const Operand& o) {
                cublas_check(cublasLtMatrixLayoutCreate(&to, o.type, o.rows, o.cols, o.ld));
            };
            make(a, c.A), make(b, c.B), make(d, c.D);
        }
        ~Layouts() {
            for (auto layout : {a, b, d}) { cublasLtMatrixLayoutDestroy(layout); }
        }
    };
};
TEST_F(Cublas, RightCall) {
    EXPECT_EQ(multiply(), "");
    EXPECT_GT(best.workspaceSize, 0u);
    const auto got = d.values(), a_values = a.values(), b_values = b.values(), bias_values = bias.values();
    Doubles want(m * n);
    for (i64 i = 0; i < m * n; i++) {
        for (i64 l = 0; l < k; l++) { want[i] += (double)a_values[l * m + i % m] * b_values[i / m * k + l]; }
        want[i] += bias_values[i % m];
    }
    expect_close(got, want, 2e-5, "d");
    const auto spoilt = workspace.values();
    for (size_t i = 0; i < spoilt.size(); i++) { ASSERT_EQ(std::isnan(spoilt[i]), i * 4 < best.workspaceSize) << i; }
}
TEST_F(Cublas, LeadingDimension) {
    A.ld = m - 1;
    expect_error({"A has leading dimension 23 and 24 rows"});
    A.ld = m + 1;
    expect_error({"A: ", "bytes at byte 0 of an allocation"});
    A.ld = m;
    D.ld = m + 1;
    expect_error({"D: ", "bytes at byte 0 of an allocation"});
}
TEST_F(Cublas, LeadingDimensionOfAnotherPlan) {
    between = [&] { B.ld = k + 1; };
    expect_error({"cublasLtMatmul: the algorithm was chosen for another product"});
}
TEST_F(Cublas, Shapes) {
    B.rows = k - 1;
    expect_error({"(24 x 80) (79 x 16) is not 24 x 16"});
    B.rows = k;
    transpose_a = CUBLAS_OP_T;
    expect_error({"(80 x 24) (80 x 16)"});
    transpose_a = CUBLAS_OP_N;
    D.cols = 0;
    expect_error({"C is empty"});
}
TEST_F(Cublas, Types) {
    B.type = CUDA_R_16BF;
    expect_error({"A and B, or C and D, are of two types"});
    B.type = CUDA_R_32F, D.type = CUDA_R_16BF, schemes = CUBLASLT_REDUCTION_SCHEME_NONE;
    expect_error({"fp32 operands, a bf16 result"});
    A.type = B.type = D.type = CUDA_R_64F;
    expect_error({"A is of type 1"});
}
TEST_F(Cublas, TypeOfAnotherPlan) {  // fp32 memory read as bf16: in bounds, and still wrong
    between = [&] { A.type = B.type = CUDA_R_16BF; };
    expect_error({"another product"});
}
TEST_F(Cublas, ComputeType) {
    compute = CUBLAS_COMPUTE_32F_FAST_TF32;
    expect_error({"compute type"});
}
TEST_F(Cublas, AlignmentNotPromised) {  // the default promises 256 bytes
    A.promised = 0, A.data = a.data + 4, A.cols = B.rows = k - 1;
    expect_error({"A: ", "is not aligned to the 256 bytes that the heuristic was promised"});
    A.promised = 16;
    EXPECT_EQ(multiply(), "");
    B.data = b.data + 1, B.cols = D.cols = n - 1;
    expect_error({"B: ", "is not aligned to the 16 bytes"});
    B.promised = 4;
    EXPECT_EQ(multiply(), "");
    D.data = d.data + 2;
    expect_error({"is not aligned to the 16 bytes"});
}
TEST_F(Cublas, Workspace) {
    workspace_less = 1;
    expect_error({"the algorithm needs"});
    workspace_less = 0, workspace_at = nullptr;
    expect_error({"the workspace: a null pointer"});
    Vec<float> host(1 << 14);
    workspace_at = host.data();
    expect_error({"the workspace: ", "is not in device memory"});
    workspace_at = workspace.data + (1 << 14) - 64;
    expect_error({"the workspace: ", "of an allocation"});
    workspace_at = d.data;
    expect_error({"workspace"});
    most_workspace = 0, workspace_at = nullptr;
    EXPECT_EQ(multiply(), "");  // K is not split
}
TEST_F(Cublas, MemoryOfTheHost) {
    const Vec<float> host(m * k);
    A.data = host.data();
    expect_error({"A: ", "is not in device memory"});
    A.data = nullptr;
    expect_error({"A: a null pointer"});
}
TEST_F(Cublas, Bias) {
    Memory<float> short_bias(m - 1, side);
    bias_then = short_bias.data;
    expect_error({"the bias: 96 bytes at byte 0 of an allocation of 92"});
    bias_then = nullptr;
    expect_error({"the bias: a null pointer"});
    Memory<float> shifted(Vec<float>(m + 1), side);
    bias_then = shifted.data + 1;
    expect_error({"the bias: ", "is not aligned"});
    bias_at_first = bias_then;
    EXPECT_EQ(multiply(), "");
    bias_then = bias.values().data();
    expect_error({"the bias: ", "is not in device memory"});
}
TEST_F(Cublas, Overlap) {
    D.data = a.data;
    expect_error({"D overlaps A"});
}
TEST_F(Cublas, InputOfGelu) {
    Memory<float> input(m * n, side), small(m * n - 1, side);
    epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    expect_error({"GELU's input has leading dimension 0, D has 24 rows"});
    ld_gelu = m;
    expect_error({"GELU's input: a null pointer"});
    gelu_input = small.data;
    expect_error({"GELU's input: 1536 bytes at byte 0 of an allocation of 1532"});
    gelu_input = d.data;
    expect_error({"D overlaps GELU's input"});
    gelu_input = input.data;
    EXPECT_EQ(multiply(), "");
    ld_gelu = m + 4;
    expect_error({"GELU's input has leading dimension 28"});
}
TEST_F(Cublas, BiasGradient) {
    epilogue = CUBLASLT_EPILOGUE_BGRADB;  // n long
    EXPECT_EQ(multiply(), "");
    Memory<float> short_gradient(n - 1, side);
    bias_then = short_gradient.data;
    expect_error({"the bias gradient: 64 bytes at byte 0 of an allocation of 60"});
    bias_then = d.data;
    expect_error({"D overlaps the bias gradient"});
}
TEST_F(Cublas, Epilogue) {
    epilogue = CUBLASLT_EPILOGUE_RELU;
    expect_error({"epilogue 2"});
}
TEST_F(Cublas, RoundingWhereKIsSplit) {
    A.type = B.type = D.type = CUDA_R_16BF, schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    expect_error({"reduction schemes 0x7 round partial sums to bf16"});
}

}  // namespace
