// Attention's kernels against the CPU loop: sizes 1, odd, prime, just past a block of rows or of columns, rows that can be read 16 bytes, 8
// bytes or one element at a time, every width of tiles.
#include "llmc/attention_cudnn.h"
#include "llmc/ops/attention.cuh"
#include "kernels_testing.h"

namespace {

struct Case {
    i64 B, S, NH, KVH, HS, pos0 = 0, shift = 0;
    double spread = 1.0;
    i64 spare = pos0 > 0 ? 3 : 0;  // room in the cache after the last position
};

template <typename X>
void test_attention(const Case& d) {
    SCOPED_TRACE(format("B %d S %d NH %d KVH %d HS %d pos0 %d shift %d", (int)d.B, (int)d.S, (int)d.NH, (int)d.KVH, (int)d.HS, (int)d.pos0,
                        (int)d.shift));
    const i64 S_kv = d.pos0 + d.S + d.spare, queries = d.B * d.NH * d.S, keys = d.B * d.KVH * S_kv;
    const auto qs = random_values<X>(queries * d.HS, 1, d.spread), grads = random_values<X>(queries * d.HS, 4);
    auto ks = random_values<X>(keys * d.HS, 2, d.spread), vs = random_values<X>(keys * d.HS, 3);
    for (i64 i = 0; i < keys * d.HS; i++) {  // a cache holds anything after the last position
        if (i / d.HS % S_kv >= d.pos0 + d.S) { ks[i] = vs[i] = X(NAN); }
    }
    const double sharp = d.spread * d.spread * std::sqrt((double)d.HS);  // how large scores are: their error is relative
    const bool half = dtype_of<X> == DType::BF16;                        // probabilities and their gradients are rounded before products
    const double att_error = half ? 2e-3 : 1e-6 + 2e-7 * sharp, lse_error = 1e-6 + 1e-7 * sharp;
    const double grad_error = half ? 4e-3 + 1e-3 * d.spread : 4e-6 + 3e-7 * sharp * (1 + d.spread);
    compare(
        [&](Side& side) {
            Memory<X> q(qs, side, d.shift), k(ks, side, d.shift), v(vs, side, d.shift), att(queries * d.HS, side, d.shift);
            Memory<X> datt(grads, side, d.shift), dq(queries * d.HS, side, d.shift), dk(keys * d.HS, side, d.shift),
                dv(keys * d.HS, side, d.shift);
            Memory<float> lse(queries, side);
            Memory<int> pos0(Vec<int>{(int)d.pos0}, side);
            OP(attention_forward, att.data, lse.data, q.data, k.data, v.data, d.pos0 ? pos0.data : nullptr, S_kv, d.B, d.S, d.NH, d.KVH, d.HS);
            if (S_kv > d.S) { return std::tuple(att.values(), lse.values(), Vec<X>{}, Vec<X>{}, Vec<X>{}); }
            OP(attention_backward, dq.data, dk.data, dv.data, datt.data, att.data, lse.data, q.data, k.data, v.data, d.B, d.S, d.NH, d.KVH,
               d.HS);
            return std::tuple(att.values(), lse.values(), dq.values(), dk.values(), dv.values());
        },
        {{"att", att_error}, {"lse", lse_error}, {"dq", grad_error}, {"dk", grad_error}, {"dv", grad_error}});
}

TYPED_TEST(Kernels, Attention) {
    for (const Case& d : Vec<Case>{{1, 1, 1, 1, 1},
                                   {2, 3, 4, 2, 5},
                                   {1, 17, 2, 1, 20, 0, 4},  // 8 bytes of bf16 at a time
                                   {1, 19, 2, 2, 18, 0, 2},  // 8 bytes of float
                                   {1, 33, 2, 2, 48},
                                   {1, 65, 3, 1, 64},
                                   {2, 37, 1, 1, 80},
                                   {1, 131, 4, 2, 48},  // past a block of rows
                                   {2, 128, 2, 2, 16},  // two blocks of rows, or four, and no more
                                   {1, 35, 2, 1, 100},
                                   {1, 34, 1, 1, 128, 0, 1},
                                   {1, 33, 1, 1, 129},
                                   {1, 18, 2, 1, 256}}) {
        test_attention<TypeParam>(d);
    }
    test_attention<TypeParam>({1, 66, 2, 1, 33, 0, 0, 4.0});  // scores up to 90: a softmax that is nearly one-hot
}
TYPED_TEST(Kernels, AttentionWithCache) {
    for (const Case& d : Vec<Case>{{1, 1, 1, 1, 1, 1},
                                   {2, 1, 4, 2, 48, 130},
                                   {2, 1, 3, 1, 5, 6},
                                   {2, 1, 2, 1, 100, 301},
                                   {1, 1, 2, 2, 33, 701},
                                   {1, 1, 70, 1, 20, 256},
                                   {2, 1, 4, 2, 20, 255, 0, 1.0, 300},  // parts of the cache that hold no keys yet
                                   {1, 1, 2, 1, 48, 0, 0, 1.0, 700},
                                   {2, 5, 4, 2, 20, 63},
                                   {1, 50, 1, 1, 20, 33},  // a block of keys whose first only the last query of a warp sees
                                   {1, 70, 2, 1, 33, 64}}) {
        test_attention<TypeParam>(d);
    }
}

TYPED_TEST(Kernels, AttentionRefuses) {
    Run run;
    TypeParam* none = nullptr;
    EXPECT_THROW(gpu::attention_forward(none, nullptr, none, none, none, 0, 2, 1, 2, 1, 1, 257, run), Error)
        << "a head wider than the tiles";
    EXPECT_THROW(gpu::attention_forward(none, nullptr, none, none, none, 0, 4, 1, 5, 1, 1, 8, run), Error) << "a cache that is too short";
    EXPECT_THROW(gpu::attention_forward(none, nullptr, none, none, none, 0, 2, 1, 2, 3, 2, 8, run), Error) << "heads that make no groups";
}

// A library in the place of cuDNN: counts what it is asked for, and writes one value where it takes a call.
struct CountingLibrary final : AttentionLibrary {
    bool takes = true;
    int forwards = 0, backwards = 0;
    AttentionShape last{};
    bool answer(bf16* out, const AttentionShape& shape, Run& run) {
        last = shape;
        const bf16 value(7.0f);
        if (takes) { copy_to_device(out, &value, 1, run); }
        return takes;
    }
    bool forward(bf16* att, float*, const bf16*, const bf16*, const bf16*, const AttentionShape& shape, Run& run) override {
        return forwards++, answer(att, shape, run);
    }
    bool backward(bf16* dq, bf16*, bf16*, const bf16*, const bf16*, const float*, const bf16*, const bf16*, const bf16*,
                  const AttentionShape& shape, Run& run) override {
        return backwards++, answer(dq, shape, run);
    }
    std::string why_not() const override { return ""; }
};

// Attention of random q, k, v; the first element of its result.
template <typename X>
float first_of_attention(Side& side, i64 S, i64 S_kv, i64 pos0, bool backward) {
    constexpr i64 B = 2, NH = 4, KVH = 2, HS = 8;
    const i64 queries = B * NH * S * HS, keys = B * KVH * S_kv * HS;
    Memory<X> q(random_values<X>(queries, 1), side), k(random_values<X>(keys, 2), side), v(random_values<X>(keys, 3), side);
    Memory<X> att(random_values<X>(queries, 4), side), dq(queries, side), dk(keys, side), dv(keys, side);
    Memory<float> lse(random_values<float>(B * NH * S, 5), side);
    Memory<int> first(Vec<int>{(int)pos0}, side);
    if (backward) {
        OP(attention_backward, dq.data, dk.data, dv.data, att.data, att.data, lse.data, q.data, k.data, v.data, B, S, NH, KVH, HS);
    } else {
        OP(attention_forward, att.data, lse.data, q.data, k.data, v.data, first.data, S_kv, B, S, NH, KVH, HS);
    }
    return (float)(backward ? dq : att).values()[0];
}

TEST(AttentionByALibrary, OnlyBf16WithoutCache) {
    Side side{true};
    const auto library = std::make_shared<CountingLibrary>();
    side.run.attention = library;
    EXPECT_EQ(first_of_attention<bf16>(side, 5, 5, 0, false), 7.0f);
    EXPECT_EQ(first_of_attention<bf16>(side, 5, 5, 0, true), 7.0f);
    EXPECT_EQ(library->last, (AttentionShape{2, 5, 4, 2, 8}));
    EXPECT_NE(first_of_attention<float>(side, 5, 5, 0, false), 7.0f) << "fp32";
    EXPECT_NE(first_of_attention<float>(side, 5, 5, 0, true), 7.0f) << "fp32";
    EXPECT_NE(first_of_attention<bf16>(side, 5, 9, 0, false), 7.0f) << "a prefill";
    EXPECT_NE(first_of_attention<bf16>(side, 5, 9, 2, false), 7.0f) << "a cache";
    EXPECT_NE(first_of_attention<bf16>(side, 1, 1, 0, false), 7.0f) << "one query";
    EXPECT_EQ(library->forwards, 1);
    EXPECT_EQ(library->backwards, 1);
}
TEST(AttentionByALibrary, WhatItRefusesIsOurs) {
    Side side{true}, ours{true};
    const auto library = std::make_shared<CountingLibrary>();
    library->takes = false, side.run.attention = library;
    for (const bool backward : {false, true}) {
        EXPECT_EQ(first_of_attention<bf16>(side, 5, 5, 0, backward), first_of_attention<bf16>(ours, 5, 5, 0, backward));
    }
    EXPECT_EQ(library->forwards + library->backwards, 2);
}

}  // namespace
