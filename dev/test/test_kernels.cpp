// Every kernel against its oracle, the CPU loop in the same file: at sizes 1, odd, prime, past a block; with rows that can be read 128 bits
// at a time and with rows that cannot; in fp32 and bf16. Results must be the same bits in every order of threads and blocks.
//
// Plain C++ in every build: linked with the emulator, or, where there is a GPU, with nvcc's kernels and CUDA's runtime.
#include "llmc/ops/adamw.cuh"
#include "llmc/ops/classifier.cuh"
#include "llmc/ops/embedding.cuh"
#include "llmc/ops/global_norm.cuh"
#include "llmc/ops/matmul.cuh"
#include "llmc/ops/mlp.cuh"
#include "llmc/ops/norm.cuh"
#include "llmc/ops/rope.cuh"
#include "llmc/ops/sample.cuh"
#include "kernels_testing.h"

namespace gpu {
// dev/test/product.cu: c (M,N) = a (M,K) b (K,N), or a b^T with b (N,K).
void product(bool transposed, float* c, const bf16* a, const bf16* b, int M, int N, int K, Run& run);
}  // namespace gpu
namespace cpu {
void product(bool transposed, float* c, const bf16* a, const bf16* b, int M, int N, int K, Run&) {
    for (int i = 0; i < M * N; i++) {
        double sum = 0.0;
        for (int k = 0; k < K; k++) { sum += (double)(float)a[i / N * K + k] * (float)(transposed ? b[i % N * K + k] : b[k * N + i % N]); }
        c[i] = (float)sum;
    }
}
}  // namespace cpu

namespace {

constexpr GradMode MODES[] = {GradMode::WRITE, GradMode::ADD};

TYPED_TEST(Kernels, Mlp) {
    using X = TypeParam;
    for (auto [N_, F_, shift_] : Vec<std::array<i64, 3>>{
             {1, 1, 0}, {3, 7, 0}, {5, 8, 0}, {5, 8, 1}, {2, 257, 0}, {3, 2056, 0}, {2, 2063, 0}, {7, 48, 4}, {0, 5, 0}}) {
        const i64 N = N_, F = F_, shift = shift_;
        const auto gate_up = random_values<X>(N * 2 * F, 1, 6.0), dh = random_values<X>(N * F, 2);
        compare(
            [&](Side& side) {
                Memory<X> in(gate_up, side, shift), grad(dh, side, shift), h(N * F, side, shift), dgate_up(N * 2 * F, side, shift);
                Memory<X> h_gelu(N * F, side, shift), du(N * F, side, shift);
                OP(swiglu_forward, h.data, in.data, N, F);
                OP(swiglu_backward, dgate_up.data, grad.data, in.data, N, F);
                OP(gelu_forward, h_gelu.data, in.data, N, F);
                OP(gelu_backward, du.data, grad.data, in.data, N, F);
                return std::tuple(h.values(), dgate_up.values(), h_gelu.values(), du.values());
            },
            {{"swiglu", 2e-6}, {"dgate_up", 2e-6}, {"gelu", 2e-6}, {"du", 2e-6}});
    }
    const Vec<X> far{X(100.0f), X(-100.0f), X(0.0f), X(-0.0f)};  // exp overflows or is 0 inside
    compare(
        [&](Side& side) {
            Memory<X> in(far, side), h(4, side), slope(4, side), ones(Vec<X>(4, X(1.0f)), side);
            OP(gelu_forward, h.data, in.data, 1, 4);
            OP(gelu_backward, slope.data, ones.data, in.data, 1, 4);
            return std::tuple(h.values(), slope.values());
        },
        {{"gelu far out", 1e-30}, {"gelu's slope far out", 1e-30}});
}

TYPED_TEST(Kernels, Norm) {
    using X = TypeParam;
    struct Case {
        i64 N, C, Ck, pad, shift;
    };
    for (const auto [N_, C_, Ck_, pad, shift_] : Vec<Case>{{1, 1, 1, 0, 0},
                                                           {3, 7, 3, 3, 0},
                                                           {5, 16, 8, 8, 0},
                                                           {5, 16, 8, 0, 1},
                                                           {17, 40, 13, 3, 0},  // a second chunk of rows; the blocks meet within a pack
                                                           {17, 40, 13, 0, 0},
                                                           {17, 40, 0, 0, 0},
                                                           {6, 40, 40, 8, 0},
                                                           {33, 257, 131, 5, 0},
                                                           {2, 2064, 1037, 0, 0},    // past a block's threads
                                                           {2, 12504, 16, 0, 0}}) {  // more shared memory than a kernel has by default
        const i64 N = N_, C = C_, Ck = Ck_, shift = shift_;
        const i64 ld_shared = round_up(Ck, DEVICE_ALIGN) + pad, ld_priv = round_up(C - Ck, DEVICE_ALIGN) + pad;
        const auto x_in = random_values<X>(N * C, 1), out_bias = random_values<X>(C, 2), weight = random_values<X>(C, 3);
        const auto bias = random_values<X>(C, 4), priv = random_values<X>(N * ld_priv, 6), dn = random_values<X>(N * C, 7);
        const auto dx_before = random_values<X>(N * C, 8);
        const auto shared16 = random_values<bf16>(N * ld_shared, 5);
        const auto shared32 = random_values<float>(N * ld_shared, 5), grad_before = random_values<float>(C, 9);
        for (int variant = 0; variant<16; variant += N * C> 10000 ? 15 : 1) {
            const NormKind kind{(variant & 1) != 0, 1e-2f};
            const bool blocks = !(variant & 2), residual = variant & 2, half = variant & 4, add = variant & 8;
            const auto outputs = compare(
                [&](Side& side) {
                    Memory<X> in(x_in, side, shift), ob(out_bias, side, shift), w(weight, side, shift), b(bias, side, shift);
                    Memory<X> p(priv, side, shift), x(blocks ? Vec<X>(N * C, X(NAN)) : x_in, side, shift), n(N * C, side, shift);
                    Memory<X> n_again(N * C, side, shift), g(dn, side, shift),
                        dx(residual ? dx_before : Vec<X>(N * C, X(NAN)), side, shift);
                    Memory<float> mean(Vec<float>(N, 7.0f), side), rstd(N, side), dw(grad_before, side), db(grad_before, side);
                    Memory<bf16> s16(shared16, side, shift), sent16(shared16, side, shift);
                    Memory<float> s32(shared32, side, shift), sent32(shared32, side, shift);
                    const auto wire = [&](auto& narrow, auto& wide) { return half ? (void*)narrow.data : (void*)wide.data; };
                    const DType type = half ? DType::BF16 : DType::FP32;
                    const Blocks<X> out{wire(s16, s32), ld_shared, type, p.data, ld_priv, Ck};
                    float* means = kind.rms ? nullptr : mean.data;
                    const X* biases = kind.rms ? nullptr : b.data;
                    OP(residual_norm_forward, blocks ? x.data : nullptr, n.data, means, rstd.data, in.data, blocks ? &out : nullptr,
                       blocks && add ? ob.data : nullptr, w.data, biases, kind, N, C);
                    OP(norm_apply, n_again.data, x.data, means, rstd.data, w.data, biases, kind, N, C);
                    OP(norm_backward, dx.data, residual, variant == 1 ? nullptr : wire(sent16, sent32), ld_shared, type, Ck, dw.data,
                       kind.rms ? nullptr : db.data, g.data, x.data, means, rstd.data, w.data, kind, MODES[add], N, C);
                    return std::tuple(x.values(), n.values(), n_again.values(), mean.values(), rstd.values(), dx.values(), dw.values(),
                                      db.values(), sent16.values(), sent32.values());
                },
                {{"x", 1e-6},
                 {"n", 1e-5},
                 {"n again", 1e-5},
                 {"mean", 1e-6},
                 {"rstd", 1e-5},
                 {"dx", 3e-5},
                 {"dweight", 1e-6 * (double)N + 1e-5},
                 {"dbias", 1e-6 * (double)N + 1e-6},
                 {"shared_out, bf16", 2.0 / 256},
                 {"shared_out, fp32", 3e-5}});
            EXPECT_TRUE(same_bits(std::get<1>(outputs), std::get<2>(outputs))) << "norm_apply";
            if (variant == 1) { continue; }
            const Vec<X>& dx = std::get<5>(outputs);
            for (i64 i = 0; i < N * Ck; i++) {  // what is sent is dx as stored
                const float value = dx[i / Ck * C + i % Ck];
                const i64 at = i / Ck * ld_shared + i % Ck;
                ASSERT_EQ(half ? (float)std::get<8>(outputs)[at] : std::get<9>(outputs)[at], half ? (float)bf16(value) : value);
            }
        }
    }
}

TYPED_TEST(Kernels, NormManyRows) {  // so many that a chunk has 17
    using X = TypeParam;
    const i64 N = 8210, C = 3;
    const auto normed = random_values<X>(N * C, 1), dn = random_values<X>(N * C, 2), weight = random_values<X>(C, 3);
    const auto rstd_values = random_values<float>(N, 4, 0.1, 1.0), before = random_values<float>(C, 5);
    compare(
        [&](Side& side) {
            Memory<X> x(normed, side), g(dn, side), w(weight, side), dx(N * C, side);
            Memory<float> rstd(rstd_values, side), dw(before, side);
            OP(norm_backward, dx.data, false, nullptr, 0, DType::FP32, 0, dw.data, nullptr, g.data, x.data, nullptr, rstd.data, w.data,
               NormKind{true, 0.0f}, GradMode::ADD, N, C);
            return std::tuple(dx.values(), dw.values());
        },
        {{"dx", 3e-5}, {"dweight", 1e-6 * (double)N}});
}

TYPED_TEST(Kernels, Rope) {
    using X = TypeParam;
    struct Case {
        i64 B, S, NH, KVH, HS, pos0, shift;
    };
    for (const Case& d : Vec<Case>{{1, 1, 1, 1, 2, 0, 0},
                                   {2, 5, 4, 2, 6, 0, 0},
                                   {1, 13, 3, 3, 48, 0, 0},
                                   {1, 13, 3, 3, 48, 0, 1},
                                   {2, 3, 2, 1, 20, 7, 0},
                                   {1, 4, 2, 2, 5, 0, 0},     // odd: nothing is rotated
                                   {2, 3, 12, 4, 100, 0, 0},  // past a block's threads
                                   {1, 2, 40, 8, 128, 3, 0},
                                   {3, 2, 2, 1, 64, 0, 0}}) {
        const bool rotate = d.HS % 2 == 0;
        const i64 S_kv = d.pos0 + d.S + 2, width = (d.NH + 2 * d.KVH) * d.HS, kv_size = d.B * d.KVH * S_kv * d.HS;
        const auto qkv = random_values<X>(d.B * d.S * width, 1), kv_before = random_values<X>(kv_size, 2);
        const auto dq = random_values<X>(d.B * d.NH * d.S * d.HS, 3), dk = random_values<X>(d.B * d.KVH * d.S * d.HS, 4),
                   dv = random_values<X>(d.B * d.KVH * d.S * d.HS, 5);
        Vec<float> cosines(S_kv * (d.HS / 2)), sines(cosines.size());
        for (size_t i = 0; i < sines.size(); i++) {
            cosines[i] = (float)std::cos(0.37 * (double)i);
            sines[i] = (float)std::sin(0.37 * (double)i);
        }
        compare(
            [&](Side& side) {
                Memory<X> in(qkv, side, d.shift), q((i64)dq.size(), side, d.shift), k(kv_before, side, d.shift),
                    v(kv_before, side, d.shift);
                Memory<X> q_grad(dq, side, d.shift), k_grad(dk, side, d.shift), v_grad(dv, side, d.shift);
                Memory<X> dqkv((i64)qkv.size(), side, d.shift);
                Memory<float> cos_table(cosines, side), sin_table(sines, side);
                const float *c = rotate ? cos_table.data : nullptr, *s = rotate ? sin_table.data : nullptr;
                Memory<int> pos0(Vec<int>{(int)d.pos0}, side);
                OP(rope_split_forward, q.data, k.data, v.data, in.data, c, s, d.pos0 ? pos0.data : nullptr, S_kv, d.B, d.S, d.NH, d.KVH, d.HS);
                OP(rope_split_backward, dqkv.data, q_grad.data, k_grad.data, v_grad.data, c, s, d.B, d.S, d.NH, d.KVH, d.HS);
                return std::tuple(q.values(), k.values(), v.values(), dqkv.values());
            },
            {{"q", 5e-7}, {"k", 5e-7}, {"v", 0.0}, {"dqkv", 5e-7}});
    }
}

TYPED_TEST(Kernels, AdamW) {
    using X = TypeParam;
    AdamW hyper{3e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.0f - 0.9f * 0.9f, 1.0f - 0.95f * 0.95f, 0.7f};
    for (auto [count_, shift_, key] : Vec<std::array<i64, 3>>{{1, 0, 0}, {17, 0, 0}, {1024, 0, 0}, {1025, 0, 7}, {4099, 0, 0}, {4099, 1, 7}, {0, 0, 0}}) {
        const i64 count = count_, shift = shift_;
        if (dtype_of<X> == DType::BF16 && key > 0) { hyper.rounded_by = {true, 5}, hyper.rounding = {true, (uint32_t)key}, hyper.first = 1000; }
        else { hyper.rounded_by = hyper.rounding = {}; }
        const auto start = random_values<float>(count, 1);
        const auto m_before = random_values<float>(count, 3, 0.1), v_before = random_values<float>(count, 4, 0.01, 0.011);
        for_gradient_types<X>([&](auto type) {
            const auto gradient = random_values<decltype(type)>(count, 2);
            const auto outputs = compare(
                [&](Side& side) {
                    Memory<float> m(m_before, side, shift), v(v_before, side, shift);
                    Memory<decltype(type)> grad(gradient, side, shift);
                    Memory<X> param(params_of<X>(start, hyper.rounded_by, hyper.first), side, shift);
                    Memory<uint16_t> low(lower_halves(start), side, shift);
                    OP(adamw_update, param.data, dtype_of<X> == DType::FP32 ? nullptr : low.data, m.data, v.data, grad.data, count, hyper);
                    return std::tuple(param.values(), masters_of(param.values(), low.values(), hyper.rounding, hyper.first), m.values(), v.values());
                },
                {{"param", 1e-7}, {"master", 1e-7}, {"m", 1e-8}, {"v", 1e-8}});
            EXPECT_TRUE(same_bits(std::get<0>(outputs), params_of<X>(std::get<1>(outputs), hyper.rounding, hyper.first)));
        });
    }
}

TYPED_TEST(Kernels, SumsOfSquares) {
    using X = TypeParam;
    for (auto [N_, cols_, ld_, shift_] : Vec<std::array<i64, 4>>{{1, 1, 3, 0},
                                                                 {3, 37, 39, 0},
                                                                 {110, 131, 140, 1},
                                                                 {1, 65536, 65536, 0},
                                                                 {1, 65537, 65539, 0},
                                                                 {3, 300, 66000, 0},
                                                                 {0, 5, 5, 0}}) {
        const i64 N = N_, cols = cols_, ld = ld_, shift = shift_;
        const auto values = random_values<X>(N * ld, 1);
        const auto others = random_values<float>(N * ld, 2);
        compare(
            [&](Side& side) {
                Memory<X> a(values, side, shift);
                Memory<float> b(others, side);
                const i64 n = N * ld;
                return std::tuple(OP(sums_of_squares, std::vector<GradientPiece>{{a.data, n}, {b.data, n / 2}, {a.data + n / 3, n - n / 3}, {a.data + n / 2, 0}, {a.data + n - n / 5, n / 5}}),
                                  Doubles{OP(sum_of_squared_differences, a.data, b.data, 0.3f, ld, N, cols)});
            },
            {{"squares", 1e-12 * (double)(N * ld)}, {"differences", 1e-8 * (double)(N * cols)}});
    }
}

TYPED_TEST(Kernels, Embedding) {
    using X = TypeParam;
    struct Case {
        i64 B, S, C, V, pos0, shift;
    };
    for (const Case& d : Vec<Case>{{1, 1, 1, 3, 0, 0},
                                   {2, 7, 33, 11, 3, 0},
                                   {2, 7, 40, 11, 3, 0},
                                   {2, 7, 40, 11, 3, 1},
                                   {3, 301, 20, 500, 0, 0},  // tokens that lie more than a block of rows apart
                                   {3, 301, 5, 4, 0, 0},     // tokens with many rows
                                   {1, 3, 2052, 3, 0, 0}}) {
        const i64 N = d.B * d.S, P = d.S + 2;
        const Range vocab{d.V / 3, d.V - d.V / 5};
        Vec<int> token_values(N);
        for (i64 n = 0; n < N; n++) { token_values[n] = (int)((uniform(n, 5) + 1) / 2 * (double)d.V) % (int)d.V; }
        const auto wte = random_values<X>(vocab.size() * d.C, 1), wpe = random_values<X>((d.pos0 + d.S) * d.C, 2);
        const auto dx = random_values<float>(N * d.C, 3), before = random_values<float>(vocab.size() * d.C, 8),
                   before_p = random_values<float>(P * d.C, 9);
        for (bool second : {false, true}) {
            compare(
                [&](Side& side) {
                    Memory<int> tokens(token_values, side), pos0(Vec<int>{(int)d.pos0}, side);
                    Memory<X> x(N * d.C, side, d.shift), table(wte, side, d.shift), positions(wpe, side, d.shift);
                    Memory<float> grad(dx, side, d.shift), dwte(before, side, d.shift), dwpe(before_p, side, d.shift);
                    const X* p = second ? positions.data : nullptr;
                    OP(embedding_forward, x.data, tokens.data, table.data, p, vocab, d.B, d.S, d.C, d.pos0 ? pos0.data : nullptr);
                    OP(embedding_backward, dwte.data, grad.data, tokens.data, vocab, N, d.C, MODES[second]);
                    OP(position_backward, dwpe.data, grad.data, d.B, d.S, d.C, P, MODES[second]);
                    return std::tuple(x.values(), dwte.values(), dwpe.values());
                },
                {{"x", 1e-7}, {"dwte", 0.0}, {"dwpe", 0.0}});  // the gradients: the same sums in the same order
        }
    }
}

TYPED_TEST(Kernels, BiasAndCast) {
    using X = TypeParam;
    for (auto [N_, OC_, shift_] : Vec<std::array<i64, 3>>{
             {1, 1, 0}, {3, 7, 0}, {17, 40, 0}, {17, 40, 1}, {33, 257, 0}, {5, 264, 0}, {2, 2056, 0}, {700, 3, 0}, {0, 5, 0}}) {
        const i64 N = N_, OC = OC_, shift = shift_, count = N * OC;
        const auto values = random_values<X>(count, 1);
        const auto floats = random_values<float>(count, 2);
        for (GradMode mode : MODES) {
            for_gradient_types<X>([&](auto type) {
                using G = decltype(type);
                const auto before = random_values<G>(OC, 3);
                compare(
                    [&](Side& side) {
                        Memory<X> dout(values, side, shift), same    (count, side, shift), narrow(count, side, shift);
                        Memory<G> dbias(before, side);
                        Memory<float> wide(count, side, shift), from(floats, side, shift);
                        OP(bias_backward, dbias.data, dout.data, N, OC, mode);
                        OP(cast, same.data, dout.data, count);
                        OP(cast, wide.data, dout.data, count);
                        OP(cast, narrow.data, from.data, count);
                        return std::tuple(dbias.values(), same.values(), wide.values(), narrow.values());
                    },
                    {{"dbias", 1e-6 * (double)(N + 1)}, {"copy", 0.0}, {"widened", 0.0}, {"narrowed", 0.0}});
            });
        }
    }
}

TYPED_TEST(Kernels, Classifier) {
    using X = TypeParam;
    struct Case {
        i64 n, V, T, shift;
    };
    for (const Case& d : Vec<Case>{
             {1, 1, 1, 0}, {5, 7, 2, 0}, {3, 8, 1, 1}, {11, 129, 3, 0}, {3, 2063, 2, 0}, {2, 4096, 1, 0}, {300, 5, 1, 0}, {4, 0, 1, 0}}) {
        const Range vocab{d.V, 2 * d.V};  // the second rank's
        Vec<int> target_values(d.n);
        for (i64 r = 0; r < d.n; r++) {
            target_values[r] = r % 4 == 3 ? -1 : (int)(r * 7919 % (3 * d.V + 1));
        }  // owned, another's, ignored
        const auto scores = random_values<X>(d.n * d.V, 1, 9.0);
        auto gathered = random_values<float>(d.T * d.n * 3, 2, 3.0);
        for (i64 i = 0; i < d.T * d.n; i++) { gathered[i * 3 + 1] = 1.0f + std::fabs(gathered[i * 3 + 1]); }
        if (d.T > 1) { gathered[0] = -INFINITY, gathered[1] = gathered[2] = 0.0f; }  // a rank without vocabulary
        compare(
            [&](Side& side) {
                Memory<X> logits(scores, side, d.shift);
                Memory<int> targets(target_values, side);
                Memory<float> stats(d.n * 3, side), all(gathered, side), losses(d.n, side), lse(d.n, side);
                OP(classifier_stats, stats.data, logits.data, targets.data, vocab, d.n);
                OP(classifier_loss, losses.data, lse.data, all.data, targets.data, d.T, d.n);
                OP(classifier_backward, logits.data, lse.data, targets.data, vocab, 0.25f, d.n);
                Vec<float> highest, sums, scored;
                for (i64 r = 0; r < d.n; r++) {
                    const Vec<float> s = stats.values();
                    highest.push_back(std::isinf(s[r * 3]) ? -1e9f : s[r * 3]);  // -inf: no difference can be taken
                    sums.push_back(s[r * 3 + 1]);
                    scored.push_back(s[r * 3 + 2]);
                }
                return std::tuple(highest, sums, scored, losses.values(), lse.values(), logits.values());
            },
            {{"maximum", 0.0}, {"sum", 1e-6 * (double)d.V}, {"target", 0.0}, {"losses", 2e-6}, {"lse", 2e-6}, {"dlogits", 1e-6}});
    }
}

TEST(Kernels, ProductOnTensorCores) {  // the wrappers of ptx.cuh
    for (auto [M_, N_, K_] : Vec<std::array<int, 3>>{{1, 8, 16}, {16, 16, 16}, {21, 40, 80}, {33, 24, 48}}) {
        const int M = M_, N = N_, K = K_;
        const auto a_values = random_values<bf16>(M * K, 1), b_values = random_values<bf16>(K * N, 2);
        for (bool transposed : {false, true}) {
            compare(
                [&](Side& side) {
                    Memory<bf16> a(a_values, side), b(b_values, side);
                    Memory<float> c(M * N, side);
                    OP(product, transposed, c.data, a.data, b.data, M, N, K);
                    return std::tuple(c.values());
                },
                {{"c", 1e-5}});
        }
    }
}

TEST(SampleKernel, ChoosesAsTheLoop) {
    const Vec<Sampling> settings{{0.0, 0, 1.0}, {}, {0.6, 40, 1.0}, {1.5, 0, 0.9}, {100.0, 30, 0.999}, {1e-9, 2, 0.1}, {3.0, 50, 0.5}};
    for (i64 V : {1, 2, 31, 33, 257, 1025, 2600}) {  // one thread's, a warp's, a block's, several for each thread
        for (i64 kind = 0; kind < (V < 100 ? 3 : 1); kind++) {
            auto logits = random_values<float>(V, V, 5.0);
            for (i64 i = 3; i < V; i += 5) { logits[i] = logits[i - 1]; }  // equal ones
            logits[V / 2] = -INFINITY;
            if (kind == 1) { logits[V - 1] = logits[V / 3] = -0.0f, logits[V / 2] = 0.0f; }
            if (kind == 2) { logits[V - 1] = logits[V / 3] = NAN; }
            for (size_t i = V < 1000 ? 0 : settings.size() - 1; i < settings.size(); i++) {
                const auto chosen = compare(
                    [&](Side& side) {
                        Memory<float> l(logits, side);
                        Memory<int> token(2, side), position(Vec<int>{7}, side);
                        Memory<uint64_t> random(Vec<uint64_t>{12345 + i}, side);
                        for (int rows : {2, 3}) { OP(sample_token, token.data + rows - 2, position.data, rows, random.data, l.data, V, settings[i]); }
                        const uint64_t state = random.values()[0];
                        return std::tuple(token.values(), position.values(), Vec<int>{(int)(state >> 40), (int)(state >> 20 & 0xFFFFF), (int)(state & 0xFFFFF)});
                    },
                    {{"token", 0.0}, {"position", 0.0}, {"random state", 0.0}});
                for (int token : std::get<0>(chosen)) { EXPECT_EQ(token < 0, kind == 2) << token; }
            }
        }
    }
}

}  // namespace
