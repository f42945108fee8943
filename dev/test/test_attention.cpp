// Rotary positions, attention and the classifier: the ops in which a token sees more than itself.
#include "llmc/amx.h"
#include "ops_testing.h"

namespace {

// ---- rope -----------------------------------------------------------------------------------------------------------
struct Heads {
    i64 B, S, NH, KVH, HS, pos0;
    i64 S_kv() const { return pos0 + S + (pos0 > 0 ? 3 : 0); }
    i64 width() const { return (NH + 2 * KVH) * HS; }
};

// q, k and v of the split and rotated qkv.
void rope_reference(Doubles* q, Doubles* k, Doubles* v, const Doubles& qkv, const Vec<float>& cos, const Vec<float>& sin, bool rotate,
                    Heads d) {
    q->assign(d.B * d.NH * d.S * d.HS, 0.0);
    for (Doubles* x : {k, v}) { x->assign(d.B * d.KVH * d.S_kv() * d.HS, 0.0); }
    for (i64 b = 0; b < d.B; b++) {
        for (i64 s = 0; s < d.S; s++) {
            for (i64 h = 0; h < d.NH + 2 * d.KVH; h++) {
                const double* from = &qkv[((b * d.S + s) * (d.NH + 2 * d.KVH) + h) * d.HS];
                const i64 t = d.pos0 + s, kv_head = (h - d.NH) % d.KVH;
                double* to = h < d.NH ? &(*q)[((b * d.NH + h) * d.S + s) * d.HS]
                                      : &(*(h < d.NH + d.KVH ? k : v))[((b * d.KVH + kv_head) * d.S_kv() + t) * d.HS];
                for (i64 i = 0; i < d.HS; i++) {
                    const i64 half = d.HS / 2, angle = t * half + (half ? i % half : 0);
                    const double partner = !half ? 0.0 : i < half ? -from[i + half] : from[i - half];
                    to[i] = rotate && h < d.NH + d.KVH ? from[i] * cos[angle] + partner * sin[angle] : from[i];
                }
            }
        }
    }
}

TYPED_TEST(Ops, Rope) {
    using X = TypeParam;
    for (const Heads d : Vec<Heads>{{1, 1, 1, 1, 2, 0},
                                    {2, 5, 4, 2, 6, 0},
                                    {1, 130, 3, 3, 48, 0},
                                    {2, 3, 2, 1, 20, 7},
                                    {1, 4, 2, 2, 5, 0},
                                    {2, 9, 6, 2, 100, 0}}) {
        const bool rotate = d.HS % 2 == 0;
        const i64 positions = d.pos0 + d.S, kv_size = d.B * d.KVH * d.S_kv() * d.HS;
        Vec<float> cos(positions * d.HS / 2 + 1), sin(cos.size());
        for (size_t i = 0; i < cos.size(); i++) {
            cos[i] = (float)std::cos(0.37 * i);
            sin[i] = (float)std::sin(0.37 * i);
        }
        const float *c = rotate ? cos.data() : nullptr, *s = rotate ? sin.data() : nullptr;
        const int first = (int)d.pos0;
        const auto qkv = random_values<X>(d.B * d.S * d.width(), 1);
        auto [q, k, v] = for_any_threads([&](Run& run) {
            Vec<X> q(d.B * d.NH * d.S * d.HS), k(kv_size, X(0.0f)), v(kv_size, X(0.0f));
            rope_split_forward(q.data(), k.data(), v.data(), qkv.data(), c, s, d.pos0 ? &first : nullptr, d.S_kv(), d.B, d.S, d.NH, d.KVH, d.HS, run);
            return std::tuple(q, k, v);
        });
        Doubles want_q, want_k, want_v;
        rope_reference(&want_q, &want_k, &want_v, doubles(qkv), cos, sin, rotate, d);
        expect_close(q, want_q, 2e-7, "q");
        expect_close(k, want_k, 2e-7, "k");  // rows outside [pos0, pos0 + S) stay as they were
        expect_close(v, want_v, 0.0, "v");
        if (d.pos0 > 0) { continue; }
        const auto dq = random_values<X>(q.size(), 2), dk = random_values<X>(k.size(), 3), dv = random_values<X>(v.size(), 4);
        auto [dqkv] = for_any_threads([&](Run& run) {
            Vec<X> dqkv(qkv.size());
            rope_split_backward(dqkv.data(), dq.data(), dk.data(), dv.data(), c, s, d.B, d.S, d.NH, d.KVH, d.HS, run);
            return std::tuple(dqkv);
        });
        const Doubles gq = doubles(dq), gk = doubles(dk), gv = doubles(dv);
        const auto loss = [&](const Doubles& in) {
            Doubles q, k, v;
            rope_reference(&q, &k, &v, in, cos, sin, rotate, d);
            return dot(q, gq) + dot(k, gk) + dot(v, gv);
        };
        expect_slope(loss, doubles(qkv), dqkv, 1e-6, "dqkv");
    }
}

// ---- attention ------------------------------------------------------------------------------------------------------
// Whether probabilities and their gradients are rounded to X before the products that take them.
template <typename X>
bool rounds_probabilities(Heads d) {
    return dtype_of<X> == DType::BF16 && d.S > 1 && (AMX ? amx::available() : FAST_PAIRS && d.HS % 2 == 0);
}

// att and lse; p (B,NH,S,S_kv) the probabilities.
void attention_reference(Doubles* att, Doubles* lse, Doubles* p, const Doubles& q, const Doubles& k, const Doubles& v, Heads d) {
    att->assign(d.B * d.S * d.NH * d.HS, 0.0);
    lse->assign(d.B * d.NH * d.S, 0.0);
    p->assign(d.B * d.NH * d.S * d.S_kv(), 0.0);
    for (i64 row = 0; row < d.B * d.NH * d.S; row++) {
        const i64 s = row % d.S, h = row / d.S % d.NH, b = row / d.S / d.NH, keys = d.pos0 + s + 1;
        const i64 kv = (b * d.KVH + h / (d.NH / d.KVH)) * d.S_kv() * d.HS;
        double* scores = &(*p)[row * d.S_kv()];
        double highest = -INFINITY, sum = 0.0;
        for (i64 j = 0; j < keys; j++) {
            for (i64 i = 0; i < d.HS; i++) { scores[j] += q[row * d.HS + i] * k[kv + j * d.HS + i] / std::sqrt((double)d.HS); }
            highest = std::max(highest, scores[j]);
        }
        for (i64 j = 0; j < keys; j++) { sum += std::exp(scores[j] - highest); }
        (*lse)[row] = highest + std::log(sum);
        for (i64 j = 0; j < keys; j++) {
            scores[j] = std::exp(scores[j] - (*lse)[row]);
            for (i64 i = 0; i < d.HS; i++) { (*att)[((b * d.S + s) * d.NH + h) * d.HS + i] += scores[j] * v[kv + j * d.HS + i]; }
        }
    }
}

template <typename X>
void test_attention(Heads d, double spread) {
    const int first = (int)d.pos0;
    const auto q = random_values<X>(d.B * d.NH * d.S * d.HS, 1, spread), k = random_values<X>(d.B * d.KVH * d.S_kv() * d.HS, 2, spread);
    const auto v = random_values<X>(k.size(), 3);
    auto [att, lse] = for_any_threads([&](Run& run) {
        Vec<X> att(q.size());
        Vec<float> lse(d.B * d.NH * d.S);
        attention_forward(att.data(), lse.data(), q.data(), k.data(), v.data(), d.pos0 ? &first : nullptr, d.S_kv(), d.B, d.S, d.NH, d.KVH, d.HS, run);
        return std::tuple(att, lse);
    });
    const Doubles qd = doubles(q), kd = doubles(k), vd = doubles(v);
    Doubles want, want_lse, p;
    attention_reference(&want, &want_lse, &p, qd, kd, vd, d);
    const double sharp = spread * spread * std::sqrt((double)d.HS);  // how large scores are: their error is relative
    Doubles terms, sizes(v.size());
    for (size_t i = 0; i < v.size(); i++) { sizes[i] = std::fabs(vd[i]); }
    if (rounds_probabilities<X>(d)) {
        Doubles unused_lse, unused_p;
        attention_reference(&terms, &unused_lse, &unused_p, qd, kd, sizes, d);
    }
    expect_close(att, want, 3e-6 * (1 + sharp), "att", terms);
    expect_close(lse, want_lse, 1e-6 * (1 + sharp), "lse");
    if (d.pos0 > 0) { return; }

    // The gradient of dot(att, datt), by the formulas.
    const auto datt = random_values<X>(att.size(), 4);
    auto [dq, dk, dv] = for_any_threads([&](Run& run) {
        Vec<X> dq(q.size()), dk(k.size()), dv(v.size());
        attention_backward(dq.data(), dk.data(), dv.data(), datt.data(), att.data(), lse.data(), q.data(), k.data(), v.data(), d.B, d.S,
                           d.NH, d.KVH, d.HS, run);
        return std::tuple(dq, dk, dv);
    });
    const Doubles grad = doubles(datt);
    Doubles want_dq(q.size()), want_dk(k.size()), want_dv(v.size()), dq_terms(q.size()), dk_terms(k.size()), dv_terms(v.size());
    for (i64 row = 0; row < d.B * d.NH * d.S; row++) {
        const i64 s = row % d.S, h = row / d.S % d.NH, b = row / d.S / d.NH, kv = (b * d.KVH + h / (d.NH / d.KVH)) * d.S * d.HS;
        const i64 out = ((b * d.S + s) * d.NH + h) * d.HS;
        double D = 0.0;
        for (i64 i = 0; i < d.HS; i++) { D += grad[out + i] * (float)att[out + i]; }  // as stored
        for (i64 j = 0; j <= s; j++) {
            double dp = 0.0;
            for (i64 i = 0; i < d.HS; i++) { dp += grad[out + i] * vd[kv + j * d.HS + i]; }
            const double p_ij = p[row * d.S + j], ds = p_ij * (dp - D) / std::sqrt((double)d.HS);
            for (i64 i = 0; i < d.HS; i++) {
                want_dv[kv + j * d.HS + i] += p_ij * grad[out + i];
                want_dq[row * d.HS + i] += ds * kd[kv + j * d.HS + i];
                want_dk[kv + j * d.HS + i] += ds * qd[row * d.HS + i];
                dv_terms[kv + j * d.HS + i] += std::fabs(p_ij * grad[out + i]);
                dq_terms[row * d.HS + i] += std::fabs(ds * kd[kv + j * d.HS + i]);
                dk_terms[kv + j * d.HS + i] += std::fabs(ds * qd[row * d.HS + i]);
            }
        }
    }
    const double error = 2e-5 * (1 + sharp) * (1 + spread);
    if (!rounds_probabilities<X>(d)) { dq_terms = dk_terms = dv_terms = {}; }
    expect_close(dv, want_dv, error, "dv", dv_terms);
    expect_close(dq, want_dq, error, "dq", dq_terms);
    expect_close(dk, want_dk, error, "dk", dk_terms);
    if (d.S > 20 || dtype_of<X> != DType::FP32) { return; }
    const auto loss = [&](const Doubles& q, const Doubles& k, const Doubles& v) {
        Doubles att, lse, p;
        attention_reference(&att, &lse, &p, q, k, v, d);
        return dot(att, grad);
    };
    expect_slope([&](const Doubles& x) { return loss(x, kd, vd); }, qd, dq, 1e-4, "dq");
    expect_slope([&](const Doubles& x) { return loss(qd, x, vd); }, kd, dk, 1e-4, "dk");
    expect_slope([&](const Doubles& x) { return loss(qd, kd, x); }, vd, dv, 1e-4, "dv");
}
TYPED_TEST(Ops, Attention) {
    for (const Heads d : Vec<Heads>{{1, 1, 1, 1, 1, 0},
                                    {2, 3, 4, 2, 5, 0},
                                    {1, 17, 2, 1, 20, 0},
                                    {1, 64, 2, 2, 48, 0},
                                    {2, 65, 3, 3, 16, 0},
                                    {1, 131, 4, 2, 48, 0},
                                    {1, 257, 2, 1, 100, 0},
                                    {30, 70, 1, 1, 7, 0},
                                    {1, 67, 2, 2, 129, 0},
                                    {1, 129, 4, 2, 130, 0}}) {
        test_attention<TypeParam>(d, 1.0);
    }
    test_attention<TypeParam>({1, 600, 2, 1, 48, 0}, 3.0);  // past every block, and scores that outgrow those of the blocks before
    for (const i64 HS : {33, 34}) { test_attention<TypeParam>({1, 90, 2, 1, HS, 0}, 4.0); }  // scores up to 90: a softmax that is nearly one-hot
}
TYPED_TEST(Ops, AttentionWithCache) {
    for (const Heads d : Vec<Heads>{{1, 1, 1, 1, 1, 1},
                                    {3, 1, 4, 2, 48, 130},
                                    {2, 1, 3, 1, 5, 6},
                                    {1, 1, 2, 2, 100, 999},
                                    {2, 5, 4, 2, 20, 63},
                                    {1, 2, 1, 1, 2, 63},
                                    {1, 70, 2, 1, 33, 64},
                                    {1, 40, 2, 1, 64, 530}}) {
        test_attention<TypeParam>(d, 1.0);
    }
}

// ---- classifier -----------------------------------------------------------------------------------------------------
TYPED_TEST(Ops, Classifier) {
    using X = TypeParam;
    for (auto [n_, V_, T_, spread] : Vec<std::tuple<i64, i64, i64, double>>{
             {1, 1, 1, 1.0}, {5, 7, 1, 3.0}, {3, 33, 2, 3.0}, {7, 101, 3, 100.0}, {2, 9001, 2, 5.0}, {3, 4, 3, 1.0}, {2, 50, 2, 1e4}}) {
        const i64 n = n_, V = V_, T = T_, Vr = ceil_div(V, T);  // V 4 over 3 ranks: the last one owns none
        const float scale = 0.37f;
        Vec<int> targets(n);
        for (i64 r = 0; r < n; r++) { targets[r] = r == 2 ? -1 : (int)((uniform(r, 9) + 1) / 2 * V); }
        const auto logits = random_values<X>(n * V, 1, spread);
        const Doubles all = doubles(logits);
        Vec<float> all_stats(T * n * 3);
        const auto range = [&](i64 t) { return Range{std::min(V, t * Vr), std::min(V, (t + 1) * Vr)}; };
        const auto shard = [&](i64 t) {
            Vec<X> part;
            for (i64 r = 0; r < n; r++) {
                part.insert(part.end(), logits.begin() + r * V + range(t).begin, logits.begin() + r * V + range(t).end);
            }
            return part;
        };
        for (i64 t = 0; t < T; t++) {
            const Vec<X> part = shard(t);
            auto [stats] = for_any_threads([&](Run& run) {
                Vec<float> stats(n * 3);
                classifier_stats(stats.data(), part.data(), targets.data(), range(t), n, run);
                return std::tuple(stats);
            });
            if (range(t).size() == 0) { EXPECT_EQ(stats[0], -INFINITY); }
            std::copy(stats.begin(), stats.end(), all_stats.begin() + t * n * 3);
        }
        auto [losses, lse] = for_any_threads([&](Run& run) {
            Vec<float> losses(n), lse(n);
            classifier_loss(losses.data(), lse.data(), all_stats.data(), targets.data(), T, n, run);
            return std::tuple(losses, lse);
        });
        const auto reference = [&](const Doubles& l, Doubles* lse) {
            Doubles losses(n, 0.0);
            for (i64 r = 0; r < n; r++) {
                double highest = -INFINITY, sum = 0.0;
                for (i64 i = 0; i < V; i++) { highest = std::max(highest, l[r * V + i]); }
                for (i64 i = 0; i < V; i++) { sum += std::exp(l[r * V + i] - highest); }
                (*lse)[r] = highest + std::log(sum);
                if (targets[r] >= 0) { losses[r] = (*lse)[r] - l[r * V + targets[r]]; }
            }
            return losses;
        };
        Doubles want_lse(n), unused(n);
        const Doubles want = reference(all, &want_lse);
        expect_close(losses, want, 1e-6 * (1 + spread), "losses");
        expect_close(lse, want_lse, 1e-6 * (1 + spread), "lse");
        Vec<X> dlogits(n * V);
        for (i64 t = 0; t < T; t++) {
            const Vec<X> part = shard(t);
            auto [d] = for_any_threads([&](Run& run) {
                Vec<X> d = part;
                classifier_backward(d.data(), lse.data(), targets.data(), range(t), scale, n, run);
                return std::tuple(d);
            });
            const i64 size = range(t).size();
            for (i64 i = 0; i < n * size; i++) { dlogits[i / size * V + range(t).begin + i % size] = d[i]; }
        }
        Doubles want_d(n * V);
        for (i64 i = 0; i < n * V; i++) {
            const i64 r = i / V, target = targets[r];
            want_d[i] = target < 0 ? 0.0 : scale * (std::exp(all[i] - want_lse[r]) - (i % V == target ? 1.0 : 0.0));
        }
        expect_close(dlogits, want_d, 1e-6 * (1 + spread), "dlogits");
        if (spread > 100) { continue; }
        const auto loss = [&](const Doubles& l) {
            double sum = 0.0;
            for (double value : reference(l, &unused)) { sum += scale * value; }
            return sum;
        };
        expect_slope(loss, all, dlogits, 1e-5 + 1e-6 * spread, "dlogits");
    }
}

}  // namespace
