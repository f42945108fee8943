// test_model.cpp: the invariants of CAAT-Net as laws of the whole trainer. Oracles: T = 1, finite differences, the big
// batch, the other recomputation level, the uncached forward, the same run again with other threads.
#define main train_gpt_main
#include "train_gpt.cu"
#undef main

#include <gtest/gtest.h>

namespace {

struct Case {
    bool gpt = false, tie = false, rotary = true;
    int T = 1, D = 1, zero = 0, recompute = 1, threads = 1;
    double p = 1;
    i64 B = 2, G = 2, S = 9;
    std::string private_scale = "forward", dtype = "fp32", reduce = "auto", grad = "fp32";
    i64 heads = 4, kv = 4, V = 37, C = 24, F = 32;
    bool interleave = false;
    i64 overlap_batches = 1;
};

Options options_of(const Case& c) {
    Options o;
    o.shape.arch = c.gpt ? Arch::GPT : Arch::LLAMA;
    o.shape.layers = 2, o.shape.channels = c.C, o.shape.heads = c.heads, o.shape.kv_heads = c.kv, o.shape.ffn = c.F, o.shape.vocab = c.V;
    o.shape.tie = c.tie, o.shape.rotary = c.rotary, o.shape.max_positions = c.S;
    o.arch = c.gpt ? "gpt" : "llama", o.positions = c.rotary ? "rotary" : "learned";
    o.tp = c.T, o.dp = c.D, o.zero = c.zero, o.recompute = c.recompute, o.sync_factor = c.p, o.private_scale = c.private_scale;
    o.micro_batch = c.B, o.global_batch = c.G, o.seq = c.S, o.dtype = c.dtype, o.reduce_dtype = c.reduce, o.grad_dtype = c.grad, o.threads = c.threads * c.T * c.D, o.interleave = c.interleave;
    o.overlap_batches = c.overlap_batches;
    o.lr = 3e-3, o.min_lr = 3e-4, o.warmup = 0, o.schedule = "constant", o.eps = 1e-8, o.steps = 100;
    finish_model(o.shape);
    check_split(o.shape, o.tp, o.sync_factor);
    return o;
}

std::vector<int32_t> random_windows(i64 count, const Options& o, uint32_t seed = 1) {
    std::vector<int32_t> w(count * (o.seq + 1));
    for (int32_t& id : w) { id = (int32_t)((seed = seed * 1664525u + 1013904223u) >> 8) % (int32_t)o.shape.vocab; }
    return w;
}

// Weights away from their symmetric start, so that a forgotten bias, norm or scale shows.
template <typename X>
void load_lively(Trainer<X>& t) {
    const TensorSource source = new_weights(t.o, t.model.tp, nullptr);
    t.load({[&](const Tensor& tensor, Range all, float* values) {
        source.read(tensor, all, values);
        if (tensor.is_vector()) {  // replicated and sharded vectors alike: by Hugging Face index, the same at every T
            for (const Slice& s : tensor.slices) {
                for (i64 i = 0; i < s.rows; i++) { values[s.local_row + i] += 0.3f * std::sin((float)s.hf_index(i, 0) + (float)s.part.name.size()); }
            }
        } else {
            for (i64 i = 0; i < tensor.count(); i++) { values[i] *= 8; }
        }
    }});
}

// Runs body(trainer) on all ranks of a case.
template <typename X = float>
void on_ranks(const Case& c, const std::type_identity_t<std::function<void(Trainer<X>&)>>& body) {
    const Options o = options_of(c);
    ASSERT_EQ(launch(c.T, c.D, [&](Ranks& ranks) {
        Run run(c.threads);
        ranks.connect(run);
        Trainer<X> trainer(o, ranks, run, true);
        trainer.allocate();
        load_lively(trainer);
        body(trainer);
        return 0;
    }), 0);
}

template <typename X>
std::vector<X> host(const X* device, i64 count, Run& run) {
    std::vector<X> values(count);
    copy_to_host(values.data(), device, count, run);
    return values;
}

double rel(double a, double b) { return std::abs(a - b) / std::max({std::abs(a), std::abs(b), 1e-30}); }

// Loss and gradients of one batch, unsharded: what all ranks together computed.
struct Whole {
    double loss = 0;
    std::map<std::string, std::vector<float>> grads;
};
template <typename X = float>
Whole whole_gradients(const Case& c) {
    Whole w;
    std::mutex mutex;
    on_ranks<X>(c, [&](Trainer<X>& t) {
        const i64 local = c.G / c.D;
        const auto windows = random_windows(c.G, t.o);
        double loss = 0;
        for (i64 m = 0; m < local / c.B; m++) {
            t.upload(t.acts[0], windows.data() + (t.ranks.dp->rank * local + m * c.B) * (c.S + 1), c.B);
            complete(t.loss_and_gradients(t.acts[0], m == 0 ? GradMode::WRITE : GradMode::ADD, false), *t.ranks.tp);
            loss += t.sum_of_losses(t.acts[0]);
        }
        t.model.complete_tied_gradient();
        loss = t.sum_over_dp(loss) / (double)(c.G * c.S);
        t.optimizer.reduce_gradients();
        if (t.ranks.dp->rank != 0) { return; }
        const auto g = t.model.grads.to_host(t.run);
        std::lock_guard<std::mutex> lock(mutex);
        w.loss = loss;
        for (const Tensor& tensor : t.model.table.tensors()) {
            for (const Slice& s : tensor.slices) {
                auto& out = w.grads[s.part.name];
                out.resize(s.part.hf_rows * s.hf_cols);
                for (i64 i = 0; i < s.rows; i++) {
                    for (i64 j = 0; j < s.cols; j++) { out[s.hf_index(i, j)] = g[tensor.offset + (s.local_row + i) * tensor.cols + j]; }
                }
            }
        }
    });
    return w;
}
void expect_close(const Whole& a, const Whole& b, double tolerance, const std::string& what) {
    EXPECT_TRUE(rel(a.loss, b.loss) <= tolerance) << what << ": losses " << a.loss << " and " << b.loss;
    ASSERT_EQ(a.grads.size(), b.grads.size());
    for (const auto& [name, g] : a.grads) {
        double d2 = 0, g2 = 0;
        const auto& h = b.grads.at(name);
        for (size_t i = 0; i < g.size(); i++) { d2 += ((double)g[i] - h[i]) * ((double)g[i] - h[i]), g2 += (double)g[i] * g[i]; }
        EXPECT_TRUE(std::sqrt(d2) <= tolerance * std::sqrt(g2) + 1e-9) << what << ": gradient of " << name << ": |d| " << std::sqrt(d2) << " |g| " << std::sqrt(g2);
    }
}
bool same_bits(const Whole& a, const Whole& b) { return a.loss == b.loss && a.grads == b.grads; }

std::vector<Case> architectures() {
    return {{.gpt = false}, {.gpt = false, .tie = true}, {.gpt = true, .tie = true, .rotary = false}, {.gpt = true, .rotary = true}};
}
std::string name_of(const Case& c) { return format("%s%s T=%d D=%d p=%g zero=%d", c.gpt ? "gpt" : "llama", c.tie ? " tied" : "", c.T, c.D, c.p, c.zero); }

}  // namespace

TEST(Model, FullySynchronisedRanksEqualOneRank) {
    for (Case c : architectures()) {
        const Whole one = whole_gradients(c);
        for (int T : {2, 4}) {
            c.T = T;
            expect_close(one, whole_gradients(c), 2e-5, name_of(c));
        }
    }
}

TEST(Model, OneRankIsThePlainModelAtAnySyncFactor) {
    for (Case c : architectures()) {
        const Whole plain = whole_gradients(c);
        for (double p : {0.0, 0.3, 0.5}) {
            c.p = p;
            EXPECT_TRUE(same_bits(plain, whole_gradients(c))) << name_of(c);
        }
    }
}

TEST(Model, PartlySynchronisedRanksAreAnotherModel) {  // the tests above can fail
    Case c{.T = 2, .p = 0.5};
    EXPECT_FALSE(rel(whole_gradients(c).loss, whole_gradients(Case{}).loss) <= 1e-3);
}

TEST(Model, OddRankCountsAndVocabularies) {
    for (i64 V : {5, 37, 64}) {
        Case c{.heads = 6, .kv = 3, .V = V, .C = 36, .F = 33};
        const Whole one = whole_gradients(c);
        c.T = 3;
        expect_close(one, whole_gradients(c), 2e-5, format("T=3 V=%lld", (long long)V));
    }
    Case c{.gpt = true, .tie = true, .heads = 4, .V = 5, .C = 24};  // Vr = 2: 2, 2, 1, 0 rows
    const Whole one = whole_gradients(c);
    c.T = 4;
    expect_close(one, whole_gradients(c), 2e-5, "T=4 V=5");
}

TEST(Model, SharedChannelsAreBitIdenticalAfterEveryLayer) {
    for (Case c : architectures()) {
        c.p = 0.3, c.T = 4;
        std::vector<std::vector<std::vector<float>>> streams(4);
        on_ranks(c, [&](Trainer<float>& t) {
            t.upload(t.acts[0], random_windows(c.B, t.o).data(), c.B);
            complete(t.model.forward(t.acts[0], c.B, c.S, 0), *t.ranks.tp);
            auto& mine = streams[t.ranks.tp->rank];
            for (const auto& a : t.acts[0].layers) { mine.push_back(host(a.x_in, c.B * c.S * c.C, t.run)), mine.push_back(host(a.x_mid, c.B * c.S * c.C, t.run)); }
            mine.push_back(host(t.acts[0].x_out, c.B * c.S * c.C, t.run));
        });
        const i64 Ck = shared_channels(c.C, c.p);
        bool private_differ = false;
        for (int r = 1; r < 4; r++) {
            for (size_t at = 0; at < streams[0].size(); at++) {
                for (i64 i = 0; i < c.B * c.S * c.C; i++) {
                    const bool same = streams[r][at][i] == streams[0][at][i];
                    if (i % c.C < Ck || at == 0) { ASSERT_TRUE(same) << name_of(c) << " stream " << at << " element " << i; }
                    private_differ = private_differ || !same;
                }
            }
        }
        EXPECT_TRUE(private_differ);
    }
}

TEST(Model, ReplicatedParametersAreBitIdenticalAfterFiftySteps) {
    for (Case c : architectures()) {
        c.T = 2, c.p = 0.5;
        std::vector<std::vector<float>> replicated(2), sharded(2);
        on_ranks(c, [&](Trainer<float>& t) {
            for (i64 step = 1; step <= 50; step++) { t.step(random_windows(c.G, t.o, (uint32_t)step).data(), step); }
            replicated[t.ranks.tp->rank] = host(t.model.params, t.model.table.sharded.begin, t.run);
        });
        EXPECT_EQ(replicated[0], replicated[1]) << name_of(c);
        EXPECT_GT(replicated[0].size(), 0u);
    }
}

// Along each tensor's own gradient the derivative is its norm; along a direction of random signs it is their product, so
// that a gradient with some elements missing is noticed too.
TEST(Model, GradientsEqualFiniteDifferences) {
    for (Case c : architectures()) {
        for (int T : {1, 2, 4}) {
            for (double p : {0.0, 0.3, 0.5, 1.0}) {
                if (T == 1 && p != 1.0) { continue; }
                c.T = T, c.p = p;
                on_ranks(c, [&](Trainer<float>& t) {
                    const i64 N = c.B * c.S;
                    t.upload(t.acts[0], random_windows(c.B, t.o).data(), c.B);
                    auto loss = [&](GradMode mode, bool gradient) {
                        complete(t.model.forward(t.acts[0], c.B, c.S, 0), *t.ranks.tp);
                        complete(t.model.head(t.acts[0], N, (float)(1.0 / (double)N), mode, gradient), *t.ranks.tp);
                        return t.sum_of_losses(t.acts[0]) / (double)N;
                    };
                    loss(GradMode::WRITE, true);
                    complete(t.model.backward(t.acts[0], c.B, c.S, GradMode::WRITE), *t.ranks.tp);
                    t.optimizer.reduce_gradients();
                    const auto g = t.model.grads.to_host(t.run), w = host(t.model.params, t.model.table.count(), t.run);
                    for (const Tensor& tensor : t.model.table.tensors()) {
                        double mine = 0;
                        for (i64 i = tensor.offset; i < tensor.offset + tensor.count(); i++) { mine += (double)g[i] * g[i]; }
                        std::vector<double> all(c.T);
                        auto over_ranks = [&](double value) {
                            t.ranks.tp->share(&value, all.data(), sizeof(double));
                            return tensor.spec.split == Split::NONE ? value : std::accumulate(all.begin(), all.end(), 0.0);
                        };
                        const double norm = std::sqrt(over_ranks(mine)), elements = over_ranks((double)tensor.count());
                        if (norm < 1e-6) { continue; }
                        for (bool random : {false, true}) {
                            auto direction = [&](i64 i) {  // of unit length over all ranks; replicated tensors move alike on all of them
                                const uint64_t sign = mix64((uint64_t)i + (tensor.spec.split == Split::NONE ? 0 : 1000003 * (uint64_t)t.ranks.tp->rank)) & 1;
                                return random ? (sign ? 1.0 : -1.0) / std::sqrt(elements) : g[tensor.offset + i] / norm;
                            };
                            double product = 0;
                            for (i64 i = 0; i < tensor.count(); i++) { product += direction(i) * g[tensor.offset + i]; }
                            const double expected = over_ranks(product), h = 4e-3 / std::max(norm, 0.1);
                            auto shifted = [&](double by) {
                                std::vector<float> moved(w.begin() + tensor.offset, w.begin() + tensor.offset + tensor.count());
                                for (i64 i = 0; i < tensor.count(); i++) { moved[i] = (float)(moved[i] + by * direction(i)); }
                                copy_to_device(t.model.params + tensor.offset, moved.data(), tensor.count(), t.run);
                                return loss(GradMode::WRITE, false);
                            };
                            const double slope = (shifted(h) - shifted(-h)) / (2 * h);
                            shifted(0);
                            EXPECT_TRUE(std::abs(slope - expected) <= 1e-2 * norm + 2e-4)
                                << name_of(c) << " " << tensor.spec.name << (random ? " random" : "") << ": difference quotient " << slope << ", gradient " << expected;
                        }
                    }
                });
            }
        }
    }
}

struct Result {
    std::vector<double> losses, norms;
    std::vector<float> params;
    bool operator==(const Result&) const = default;
};
template <typename X = float>
Result train_steps(const Case& c, i64 steps) {
    Result r;
    on_ranks<X>(c, [&](Trainer<X>& t) {
        const i64 local = c.G / c.D;
        std::vector<double> losses, norms;
        for (i64 step = 1; step <= steps; step++) {
            const auto windows = random_windows(c.G, t.o, (uint32_t)step);
            const StepResult result = t.step(windows.data() + t.ranks.dp->rank * local * (c.S + 1), step);
            losses.push_back(result.loss), norms.push_back(result.grad_norm);
        }
        const auto params = host(t.model.params, t.model.table.count(), t.run);
        if (t.ranks.world->rank == 0) { r = {losses, norms, std::vector<float>(params.begin(), params.end())}; }
    });
    return r;
}

TEST(Model, AccumulationDataParallelAndZeroEqualTheBigBatch) {
    for (int T : {1, 2}) {
        Case c{.tie = true, .T = T, .p = 0.5, .B = 12, .G = 12};
        const Result big = train_steps(c, 20);
        for (auto [D, B] : std::vector<std::pair<int, i64>>{{1, 1}, {1, 3}, {2, 6}, {3, 4}, {4, 1}}) {
            c.D = D, c.B = B, c.zero = 0;
            const Result split = train_steps(c, 20);
            for (size_t i = 0; i < 20; i++) {
                EXPECT_TRUE(rel(big.losses[i], split.losses[i]) <= 2e-5) << name_of(c) << " step " << i << ": " << big.losses[i] << " " << split.losses[i];
                EXPECT_TRUE(rel(big.norms[i], split.norms[i]) <= 2e-4) << name_of(c) << " step " << i;
            }
            EXPECT_TRUE(rel(big.losses[0], split.losses[0]) <= 1e-6) << name_of(c);
            EXPECT_TRUE(rel(big.norms[0], split.norms[0]) <= 2e-6) << name_of(c);
            if (D > 1) {
                c.zero = 1;
                const Result zero = train_steps(c, 20);
                EXPECT_EQ(zero.losses, split.losses) << name_of(c);
                EXPECT_EQ(zero.norms, split.norms) << name_of(c);
                EXPECT_EQ(zero.params, split.params) << name_of(c);
            }
        }
    }
}

// --interleave, --overlap-batches: the same sums, in the same order, as from passes that come one after the other.
TEST(Model, PassesAtOnceEqualTheSamePassesInTurn) {
    const auto compare = [](Case c, auto type) {
        using X = decltype(type);
        for (i64 G : {4 * c.D, 12}) {  // one, and several micro-batches of each rank
            c.B = 2, c.G = G, c.interleave = false, c.overlap_batches = 1;
            const Result in_turn = train_steps<X>(c, 2);
            EXPECT_TRUE(std::isfinite(in_turn.losses[1])) << name_of(c);
            c.overlap_batches = 3;
            EXPECT_TRUE(in_turn == train_steps<X>(c, 2)) << name_of(c) << " three micro-batches at once";
            if (G / c.D % 4 != 0) { continue; }
            c.B = 4, c.interleave = true, c.overlap_batches = 2;
            EXPECT_TRUE(in_turn == train_steps<X>(c, 2)) << name_of(c) << " both";
            c.overlap_batches = 1;
            EXPECT_TRUE(in_turn == train_steps<X>(c, 2)) << name_of(c) << " halves interleaved";
        }
    };
    for (Case c : architectures()) {
        for (int T : {1, 2, 4}) {
            for (double p : {0.0, 0.5, 1.0}) {
                if (T == 1 && p != 1.0) { continue; }
                c.T = T, c.p = p;
                compare(c, float());
            }
        }
        c.T = 2, c.p = 0.5;
        for (int recompute : {1, 2}) { c.recompute = recompute, compare(c, float()); }
        c.recompute = 0, c.D = 2;
        for (int zero : {0, 1}) { c.zero = zero, compare(c, float()); }
        c.dtype = "bf16", compare(c, bf16());
    }
}

TEST(Model, InterleavedHalvesHaveTheirSumsUnderWayAtOnce) {
    on_ranks(Case{.T = 2, .p = 0.5, .B = 4, .G = 4, .interleave = true}, [&](Trainer<float>& t) {
        ASSERT_EQ(t.acts.size(), 2u);
        const auto windows = random_windows(4, t.o);
        t.upload(t.acts[0], windows.data(), 2), t.upload(t.acts[1], windows.data() + 2 * 10, 2);
        Pass first = t.loss_and_gradients(t.acts[0], GradMode::WRITE, false), second = t.loss_and_gradients(t.acts[1], GradMode::ADD, true);
        i64 sums = 0;
        bool going = true;
        while (going) {  // what complete() does: the second half starts a sum of its own before the first half waits
            going = first.advance();
            ASSERT_EQ(second.advance(), going);
            if (going && first.ticket() != 0) {
                EXPECT_EQ(second.ticket(), first.ticket() + 1) << "sum " << sums;
                sums++;
            }
            t.ranks.tp->wait(first.ticket()), t.ranks.tp->wait(second.ticket());
        }
        EXPECT_EQ(sums, 2 + 4 * 2 + 1);  // the embedding and its gradient, four sums a layer, the head
        EXPECT_EQ(first.stops(), t.model.stops(t.acts[0], 2 * 9));
    });
}

TEST(Model, ALayersGradientsAreSentWhileBackwardIsBelowIt) {
    for (int zero : {0, 1}) {
        on_ranks(Case{.D = 2, .zero = zero, .G = 4}, [&](Trainer<float>& t) {
            t.upload(t.acts[0], random_windows(2, t.o).data(), 2);
            complete(t.model.forward(t.acts[0], 2, 9, 0), *t.ranks.tp);
            complete(t.model.head(t.acts[0], 18, 1, GradMode::WRITE, true), *t.ranks.tp);
            const i64& sent = t.ranks.dp->stats.bytes[(int)Traffic::DP];
            std::vector<i64> before;
            complete(t.model.backward(t.acts[0], 2, 9, GradMode::WRITE, [&](i64 layer) {
                EXPECT_EQ(layer, 1 - (i64)before.size());
                before.push_back(sent);
                t.optimizer.start_reduce(layer);
            }), *t.ranks.tp);
            const i64 under_backward = sent;
            t.optimizer.reduce_gradients();
            EXPECT_EQ(before[0], 0);
            EXPECT_GT(before[1], 0);
            EXPECT_EQ(under_backward, 2 * before[1]);
            EXPECT_GT(sent, under_backward);  // the embedding, the head, what is replicated
        });
    }
}

TEST(Model, BytesOnTheWireAreThoseOfARingAndNoneAtZero) {
    for (double p : {0.0, 0.5, 1.0}) {
        Case c{.T = 4, .p = p};
        std::vector<i64> sent(4), embedding(4);
        on_ranks(c, [&](Trainer<float>& t) {
            t.step(random_windows(c.G, t.o).data(), 1);
            sent[t.ranks.tp->rank] = t.ranks.tp->stats.bytes[(int)Traffic::TP_LAYERS];
            embedding[t.ranks.tp->rank] = t.ranks.tp->stats.bytes[(int)Traffic::EMBEDDING];
        });
        const i64 rows = c.B * c.S, payload = 4 * 2 * rows * shared_channels(c.C, p) * 4;  // 4 reduces a layer, 2 layers, fp32
        EXPECT_EQ(std::accumulate(sent.begin(), sent.end(), (i64)0), 4 * payload * 2 * 3 / 4) << "p " << p;
        EXPECT_EQ(std::accumulate(embedding.begin(), embedding.end(), (i64)0), 4 * (2 * rows * c.C * 4) * 2 * 3 / 4);
    }
}

TEST(Model, RecomputationChangesNoBitAndNoCollective) {
    for (Case c : architectures()) {
        c.T = 2, c.p = 0.5, c.recompute = 0;
        const Whole kept = whole_gradients(c);
        for (int level : {1, 2}) {
            c.recompute = level;
            EXPECT_TRUE(same_bits(kept, whole_gradients(c))) << name_of(c) << " level " << level;
        }
        std::vector<i64> bytes(3);
        for (int level : {0, 1, 2}) {
            c.recompute = level;
            on_ranks(c, [&](Trainer<float>& t) {
                t.step(random_windows(c.G, t.o).data(), 1);
                if (t.ranks.tp->rank == 0) { bytes[level] = t.ranks.tp->stats.bytes[(int)Traffic::TP_LAYERS]; }
            });
        }
        EXPECT_EQ(bytes[0], bytes[1]);
        EXPECT_EQ(bytes[0], bytes[2]);
    }
}

TEST(Model, ThreadsOfARankChangeNoBit) {
    Case c{.T = 2, .p = 0.5, .B = 3, .G = 3, .S = 33, .V = 301};
    const Whole one = whole_gradients(c);
    for (int threads : {2, 3}) {
        c.threads = threads;
        EXPECT_TRUE(same_bits(one, whole_gradients(c))) << threads;
    }
}

TEST(Model, PrivateScaleAtInitialisationEqualsPrivateScaleInForward) {
    Case c{.T = 2, .p = 0.5};
    const Whole forward = whole_gradients(c);
    c.private_scale = "init";
    EXPECT_TRUE(rel(forward.loss, whole_gradients(c).loss) <= 1e-6);
    c.private_scale = "none";
    EXPECT_FALSE(rel(forward.loss, whole_gradients(c).loss) <= 1e-4);
}

TEST(Model, Bf16StaysInABandAroundFp32) {
    for (Case c : architectures()) {
        c.T = 2, c.p = 0.5;
        const Whole exact = whole_gradients(c);
        c.dtype = "bf16";
        for (const char* reduce : {"auto", "fp32"}) {
            c.reduce = reduce;
            for (const char* grad : {"fp32", "bf16"}) {
                c.grad = grad;
                expect_close(exact, whole_gradients<bf16>(c), 0.08, name_of(c) + " bf16, wire " + reduce + ", gradients " + grad);
            }
        }
    }
    Case c{.T = 2, .p = 0.5, .reduce = "bf16"};  // fp32 activations, bf16 on the wire
    expect_close(whole_gradients(Case{.T = 2, .p = 0.5}), whole_gradients(c), 0.02, "fp32, wire bf16");
}

// --grad-dtype bf16 rounds the layers' sharded gradients once a micro-batch, and touches no other.
TEST(Model, Bf16GradientsAreTheFp32OnesRounded) {
    for (Case c : architectures()) {  // no scale on private channels, and few rows: both make a sum of two parts, whose order shows
        c.T = 2, c.p = 0.5, c.S = 7, c.private_scale = "none", c.dtype = "bf16";
        using Gradients = std::vector<std::vector<float>>;  // by rank
        const auto after = [&](const char* dtype, const std::vector<uint32_t>& seeds) {
            Gradients found(2);
            c.grad = dtype;
            on_ranks<bf16>(c, [&](Trainer<bf16>& t) {
                for (size_t m = 0; m < seeds.size(); m++) {
                    t.upload(t.acts[0], random_windows(c.B, t.o, seeds[m]).data(), c.B);
                    complete(t.loss_and_gradients(t.acts[0], m == 0 ? GradMode::WRITE : GradMode::ADD, false), *t.ranks.tp);
                }
                found[t.ranks.tp->rank] = t.model.grads.to_host(t.run);
            });
            return found;
        };
        const Gradients first = after("fp32", {1}), second = after("fp32", {2}), both = after("fp32", {1, 2});
        const Gradients rounded = after("bf16", {1}), rounded_both = after("bf16", {1, 2});
        const Options o = options_of(c);
        for (int rank = 0; rank < 2; rank++) {
            const ParameterTable table(o.shape, parameter_specs(o.shape), 2, rank);
            for (i64 i = 0; i < table.count(); i++) {
                const bool in_layers = i >= table.layers.begin && i < table.layers.end;
                const float once = in_layers ? (float)bf16(first[rank][i]) : first[rank][i];
                ASSERT_EQ(rounded[rank][i], once) << name_of(c) << " element " << i;
                ASSERT_EQ(rounded_both[rank][i], in_layers ? (float)bf16(once + second[rank][i]) : both[rank][i]) << name_of(c) << " element " << i;
            }
        }
    }
}

TEST(Model, Bf16GradientsWithAndWithoutZeroAndByAnyThreads) {
    for (bool gpt : {false, true}) {
        struct Result {
            std::vector<double> losses, norms;
            std::vector<bf16> params;
        };
        const auto train = [&](const char* grad, int zero, int threads) {
            Result result;
            const Case c{.gpt = gpt, .T = 2, .D = 3, .zero = zero, .threads = threads, .p = 0.5, .B = 1, .G = 6, .dtype = "bf16", .grad = grad};
            on_ranks<bf16>(c, [&](Trainer<bf16>& t) {
                std::vector<double> losses, norms;
                for (i64 step = 1; step <= 10; step++) {
                    const StepResult found = t.step(random_windows(c.G, t.o, (uint32_t)step).data() + t.ranks.dp->rank * 2 * (c.S + 1), step);
                    losses.push_back(found.loss), norms.push_back(found.grad_norm);
                }
                if (t.ranks.world->rank == 0) { result = {losses, norms, host(t.model.params, t.model.table.count(), t.run)}; }
            });
            return result;
        };
        const Result fp32 = train("fp32", 0, 1), plain = train("bf16", 0, 1);
        EXPECT_NE(fp32.norms, plain.norms);
        for (size_t i = 0; i < 10; i++) {
            EXPECT_TRUE(rel(fp32.losses[i], plain.losses[i]) <= 5e-3) << i << ": " << fp32.losses[i] << " " << plain.losses[i];
            EXPECT_TRUE(rel(fp32.norms[i], plain.norms[i]) <= 2e-2) << i << ": " << fp32.norms[i] << " " << plain.norms[i];
        }
        for (auto [zero, threads] : {std::pair{1, 1}, {0, 2}}) {
            const Result other = train("bf16", zero, threads);
            EXPECT_EQ(plain.losses, other.losses);
            EXPECT_EQ(plain.norms, other.norms);
            EXPECT_EQ(memcmp(plain.params.data(), other.params.data(), plain.params.size() * sizeof(bf16)), 0);
        }
    }
}

TEST(Model, Bf16GradientsTakeHalfTheMemoryAndBytes) {
    i64 family[2], sent[2], others = 0, layers = 0;
    for (bool half : {false, true}) {
        on_ranks<bf16>(Case{.D = 2, .G = 4, .dtype = "bf16", .grad = half ? "bf16" : "fp32"}, [&](Trainer<bf16>& t) {
            t.step(random_windows(2, t.o).data(), 1);
            if (t.ranks.world->rank != 0) { return; }
            family[half] = t.model.gradients.bytes(), sent[half] = t.ranks.dp->stats.bytes[(int)Traffic::DP];
            layers = t.model.table.layers.size(), others = t.model.table.count() - layers;
        });
    }
    EXPECT_EQ(family[0], 4 * (others + layers));
    EXPECT_EQ(family[1], 4 * others + 2 * layers);
    EXPECT_EQ(sent[0], 4 * (others + layers));  // 2 (D - 1)/D of the payload
    EXPECT_EQ(sent[1], 4 * others + 2 * layers);
    EXPECT_GT(layers, others);
}

TEST(Model, CachedLogitsEqualUncachedOnes) {
    for (Case c : architectures()) {
        for (int T : {1, 2, 4}) {
            c.T = T, c.p = 0.5, c.S = 21;
            on_ranks(c, [&](Trainer<float>& t) {
                const auto window = random_windows(1, t.o);
                Generator<float> cached(t.model, c.S), whole(t.model, c.S);
                for (i64 n = 1; n <= c.S; n++) {
                    auto logits = [&](Generator<float>& generator, i64 from) {
                        generator.read(std::vector<int>(window.begin() + from, window.begin() + n), (int)from);
                        return host(generator.acts.row_logits, c.V, t.run);
                    };
                    const auto a = n < 5 ? std::vector<float>() : logits(cached, n == 5 ? 0 : n - 1);  // a prompt, then token by token
                    const auto b = logits(whole, 0);
                    float largest = 0;
                    for (float l : b) { largest = std::max(largest, std::abs(l)); }
                    for (size_t i = 0; i < a.size(); i++) { EXPECT_TRUE(std::abs(a[i] - b[i]) <= 1e-5f * largest) << name_of(c) << " position " << n; }
                }
            });
        }
    }
}

TEST(Model, RanksAgreeOnEveryToken) {
    for (int T : {1, 2, 4}) {
        Case c{.T = T, .p = 1, .S = 64};
        std::vector<std::vector<int>> texts(T);
        on_ranks(c, [&](Trainer<float>& t) {
            Generator<float> generator(t.model, c.S);
            Sampler sampler{7, 1.0, 0, 1.0};
            generator.generate({1}, 1000, c.V, sampler, {}, [&](int id) { texts[t.ranks.tp->rank].push_back(id); });
        });
        for (const auto& text : texts) { EXPECT_EQ(text, texts[0]); }
        EXPECT_EQ(texts[0].size(), 64u);  // the context: no overrun
        static const std::vector<int> first = texts[0];
        EXPECT_EQ(texts[0], first) << "p = 1: the same text at T = " << T;
    }
}

TEST(Model, GenerationStopsWhereItShould) {
    on_ranks(Case{.S = 8}, [&](Trainer<float>& t) {
        Generator<float> generator(t.model, 8);
        Sampler greedy{1, 0.0, 0, 1.0};
        int made = 0;
        auto count = [&](int) { made++; };
        EXPECT_EQ(generator.generate({1, 2, 3}, 0, 37, greedy, {}, count), 0);
        for (i64 length : {7, 8}) { EXPECT_EQ(generator.generate(std::vector<int>(length, 1), 100, 37, greedy, {}, count), 9 - length); }
        EXPECT_THROW(generator.generate(std::vector<int>(9, 1), 1, 37, greedy, {}, count), Error);
        std::vector<int> stop;
        for (int id = 0; id < 37; id++) { stop.push_back(id); }
        made = 0;
        EXPECT_EQ(generator.generate({1}, 5, 37, greedy, stop, count), 0);
        EXPECT_EQ(made, 0);
    });
}

TEST(Model, ANotFiniteStepChangesNothing) {
    on_ranks(Case{.T = 2, .p = 0.5}, [&](Trainer<float>& t) {
        float nan = NAN;
        copy_to_device(t.model.params + t.model.table["layers.1.down"].offset, &nan, 1, t.run);
        const auto before = host(t.model.params, t.model.table.count(), t.run);
        EXPECT_FALSE(std::isfinite(t.step(random_windows(2, t.o).data(), 1).loss));
        const auto after = host(t.model.params, t.model.table.count(), t.run);
        EXPECT_EQ(memcmp(before.data(), after.data(), before.size() * sizeof(float)), 0);
    });
}

TEST(Model, ClippingScalesOnlyLargeGradients) {
    for (double clip : {0.0, 1e-3, 1e6}) {  // AdamW's first step is sign-like: compare the first moment, which is linear in the gradient
        on_ranks(Case{}, [&](Trainer<float>& t) {
            const_cast<Options&>(t.o).clip = clip;
            const auto result = t.step(random_windows(2, t.o).data(), 1);
            const auto& owned = t.optimizer.owned()[1];
            const auto m = host(t.optimizer.m(owned), owned.range.size(), t.run), g = t.model.grads.to_host(t.run);
            const double scale = clip > 0 ? std::min(1.0, clip / (result.grad_norm + 1e-6)) : 1.0;
            for (size_t i = 0; i < m.size(); i++) {
                const double wanted = 0.1 * scale * g[owned.range.begin + i];
                ASSERT_TRUE(std::abs(m[i] - wanted) <= 1e-6 * std::abs(wanted) + 1e-12);
            }
        });
    }
}

TEST(Model, ASpikeIsSkippedOnRequest) {
    on_ranks(Case{}, [&](Trainer<float>& t) {
        const_cast<Options&>(t.o).skip_spikes = 6;
        for (int i = 0; i < 64; i++) { t.loss_filter.add(0.01 + 1e-4 * (i % 2), 6), t.norm_filter.add(1, 6); }
        const auto before = host(t.model.params, t.model.table.count(), t.run);
        EXPECT_TRUE(t.step(random_windows(2, t.o).data(), 1).skipped);
        EXPECT_EQ(before, host(t.model.params, t.model.table.count(), t.run));
        const_cast<Options&>(t.o).skip_spikes = 0;
        EXPECT_FALSE(t.step(random_windows(2, t.o).data(), 1).skipped);
        EXPECT_NE(before, host(t.model.params, t.model.table.count(), t.run));
    });
}

TEST(Model, PaddedValidationWindowsHaveNoLoss) {
    on_ranks(Case{.T = 2, .p = 0.5, .B = 3, .G = 3}, [&](Trainer<float>& t) {
        const auto windows = random_windows(3, t.o);
        auto loss = [&](i64 valid) {
            t.upload(t.acts[0], windows.data(), valid);
            complete(t.loss(t.acts[0]), *t.ranks.tp);
            return t.sum_of_losses(t.acts[0]);
        };
        const double one = loss(1), three = loss(3);
        const auto each = host(t.acts[0].losses, 27, t.run);
        EXPECT_TRUE(rel(one, std::accumulate(each.begin(), each.begin() + 9, 0.0)) <= 1e-6);
        EXPECT_GT(three, one * 1.5);
    });
}

// The losses of a run: every step the same batches, whatever the ranks.
template <typename X = float>
std::vector<double> losses_of(const Case& c, i64 steps) {
    std::vector<double> losses;
    on_ranks<X>(c, [&](Trainer<X>& t) {
        const i64 local = c.G / c.D;
        for (i64 step = 1; step <= steps; step++) {
            const auto windows = random_windows(c.G, t.o, (uint32_t)(step % 4 + 1));
            const StepResult r = t.step(windows.data() + t.ranks.dp->rank * local * (c.S + 1), step);
            if (t.ranks.world->rank == 0) { losses.push_back(r.loss); }
        }
    });
    return losses;
}

TEST(Model, TensorParallelRanksDoNotDriftFromOneRank) {  // p = 1, 200 steps
    const auto one = losses_of(Case{}, 200), bf16_one = losses_of<bf16>(Case{.dtype = "bf16"}, 200);
    for (int T : {2, 4}) {
        const auto many = losses_of(Case{.T = T}, 200), bf16_many = losses_of<bf16>(Case{.T = T, .dtype = "bf16"}, 200);
        EXPECT_TRUE(rel(one[0], many[0]) <= 1e-6);
        for (size_t i = 0; i < 200; i++) {
            EXPECT_TRUE(std::abs(one[i] - many[i]) <= 2e-3 * one[0]) << "T " << T << " step " << i << ": " << one[i] << " " << many[i];
            EXPECT_TRUE(std::abs(bf16_one[i] - bf16_many[i]) <= 5e-2 * one[0]) << "bf16 T " << T << " step " << i << ": " << bf16_one[i] << " " << bf16_many[i];
        }
    }
    EXPECT_LT(one[199], 0.5 * one[0]);  // it learns the four batches
}

TEST(Model, TiedEmbeddingUnderTensorParallelDataParallelAndZero) {
    Case c{.tie = true, .B = 4, .G = 4};
    const auto one = losses_of(c, 50);
    c.T = 2, c.D = 2, c.zero = 1, c.B = 2;
    const auto many = losses_of(c, 50);
    for (size_t i = 0; i < 50; i++) { EXPECT_TRUE(std::abs(one[i] - many[i]) <= 1e-3 * one[0]) << i << ": " << one[i] << " " << many[i]; }
    for (int D : {7}) {  // parameters do not divide by 7
        Case a{.D = D, .B = 1, .G = 7}, b = a;
        b.zero = 1;
        EXPECT_EQ(losses_of(a, 10), losses_of(b, 10));
    }
}

TEST(Model, VocabulariesThatDoNotDivide) {
    for (i64 V : {257, 50257}) {
        Case c{.heads = 12, .kv = 12, .V = V, .C = 24, .F = 36};
        const Whole one = whole_gradients(c);
        for (int T : {2, 3, 4}) {
            c.T = T;
            expect_close(one, whole_gradients(c), 3e-5, format("V=%lld T=%d", (long long)V, T));
        }
    }
}

TEST(Model, ShardsAddUpToTheWholeAndOnlyMatricesDecay) {
    for (const Case& c : architectures()) {
        const Options o = options_of(c);
        auto counts = [&](int T, int rank, i64& sharded, i64& replicated) {
            const ParameterTable table(o.shape, parameter_specs(o.shape), T, rank);
            for (const Tensor& t : table.tensors()) { (t.spec.split == Split::NONE ? replicated : sharded) += t.count(); }
        };
        i64 whole = 0, same = 0, decayed = 0;
        counts(1, 0, whole, same);
        for (int T : {2, 4}) {
            i64 sharded = 0, replicated = 0;
            for (int r = 0; r < T; r++) { counts(T, r, sharded, replicated); }
            EXPECT_EQ(sharded, whole);
            EXPECT_EQ(replicated, T * same);
        }
        for (const TensorSpec& spec : parameter_specs(o.shape)) {
            EXPECT_EQ(spec.decay, spec.cols > 0) << spec.name;
            for (const HfPart& part : spec.parts) { decayed += spec.decay ? part.rows * spec.cols : 0; }
        }
        EXPECT_GT(decayed, 0);
        EXPECT_LE(decayed, whole + same);
    }
}

TEST(Model, SmallUpdatesReachBf16Weights) {  // through the fp32 masters: bf16 alone would round them all to nothing
    for (double lr : {1e-5, 0.0}) {
        i64 moved = 0, all = 0;
        double worst = 0;
        std::vector<float> exact;
        on_ranks<float>(Case{}, [&](Trainer<float>& t) {
            const_cast<Options&>(t.o).lr = lr, const_cast<Options&>(t.o).min_lr = lr;
            for (i64 step = 1; step <= 100; step++) { t.step(random_windows(2, t.o).data(), step); }
            exact = host(t.model.params, t.model.table.count(), t.run);
        });
        on_ranks<bf16>(Case{.dtype = "bf16"}, [&](Trainer<bf16>& t) {
            const_cast<Options&>(t.o).lr = lr, const_cast<Options&>(t.o).min_lr = lr;
            const auto before = host(t.model.params, t.model.table.count(), t.run);
            for (i64 step = 1; step <= 100; step++) { t.step(random_windows(2, t.o).data(), step); }
            const auto after = host(t.model.params, t.model.table.count(), t.run);
            for (size_t i = 0; i < after.size(); i++) {
                moved += before[i].bits != after[i].bits, all += (float)before[i] != 0;
                worst = std::max(worst, (double)std::abs((float)after[i] - exact[i]) / (std::abs(exact[i]) + 1e-2));
            }
        });
        if (lr > 0) { EXPECT_GT(moved, all / 4) << moved << " of " << all; }
        else { EXPECT_EQ(moved, 0); }
        EXPECT_LE(worst, 0.1);
    }
}

TEST(Model, PaddedVocabularyRowsAreNeverDrawn) {
    Case c{.T = 2, .p = 0.5, .S = 200, .V = 257};
    on_ranks(c, [&](Trainer<float>& t) {
        Generator<float> generator(t.model, c.S);
        Sampler hot{1, 100.0, 0, 1.0};
        i64 made = 0;
        while (made < 10000) {
            made += generator.generate({1}, 199, 257, hot, {}, [&](int id) { ASSERT_TRUE(id >= 0 && id < 257); });
        }
        generator.generate({1}, 199, 5, hot, {}, [&](int id) { ASSERT_LT(id, 5); });  // a tokenizer smaller than the vocabulary
    });
}

TEST(Schedule, ALastingLevelIsNoSpikeForEver) {
    SpikeFilter filter;
    for (int i = 0; i < 128; i++) { filter.add(2 + 0.01 * (i % 3), 4); }
    EXPECT_FALSE(filter.is_spike(2.03, 4));
    EXPECT_FALSE(filter.is_spike(1e9, 0));
    int skipped = 0;
    while (filter.is_spike(2.5, 4)) { filter.add(2.5, 4), skipped++; }
    EXPECT_GT(skipped, 1);
    EXPECT_LT(skipped, 128);
}

TEST(Schedule, Shapes) {
    Options o;
    o.lr = 1, o.min_lr = 0.1, o.warmup = 10, o.steps = 110;
    EXPECT_DOUBLE_EQ(learning_rate(o, 1), 0.1);
    EXPECT_DOUBLE_EQ(learning_rate(o, 10), 1);
    EXPECT_NEAR(learning_rate(o, 60), 0.55, 1e-12);
    EXPECT_DOUBLE_EQ(learning_rate(o, 110), 0.1);
    EXPECT_DOUBLE_EQ(learning_rate(o, 1000), 0.1);
    o.decay_steps = 500000;
    EXPECT_GT(learning_rate(o, 110), 0.999);
    o.decay_steps = 0, o.schedule = "linear";
    EXPECT_NEAR(learning_rate(o, 35), 1 - 0.25 * 0.9, 1e-12);
    o.schedule = "wsd", o.wsd_decay = 20;
    EXPECT_DOUBLE_EQ(learning_rate(o, 90), 1);
    EXPECT_NEAR(learning_rate(o, 100), 0.55, 1e-12);
    EXPECT_DOUBLE_EQ(learning_rate(o, 110), 0.1);
    o.schedule = "constant";
    EXPECT_DOUBLE_EQ(learning_rate(o, 110), 1);
    o.warmup = 0;
    EXPECT_DOUBLE_EQ(learning_rate(o, 1), 1);
}

int sample(Sampler sampler, const std::vector<float>& logits) {
    ::Run run(1);
    int token = -1, position = 0;
    sample_token(&token, &position, 1, &sampler.state, logits.data(), (i64)logits.size(), sampler.how, run);
    return token;
}
TEST(Sampler, Settings) {
    const std::vector<float> logits = {0.f, 3.f, 1.f, 3.f, -INFINITY};
    for (double temperature : {0.0, 1e-6, 1e-38}) {
        for (uint64_t seed = 0; seed < 20; seed++) {
            Sampler s{seed, temperature, 0, 1.0};
            const int id = sample(s, logits);
            EXPECT_TRUE(temperature == 0 ? id == 1 : id == 1 || id == 3);
        }
    }
    std::map<int, int> seen;
    for (uint64_t seed = 0; seed < 4000; seed++) {
        for (i64 k : {1, 2}) {
            Sampler s{seed, 1.0, k, 1.0};
            const int id = sample(s, logits);
            EXPECT_TRUE(id == 1 || (k == 2 && id == 3));
        }
        Sampler tiny{seed, 1.0, 0, 1e-9};
        EXPECT_EQ(sample(tiny, logits), 1);
        Sampler all{seed * 7919 + 13, 1.0, 99, 1.0}, hot{seed, 1e9, 0, 1.0};
        seen[sample(all, logits)]++;
        EXPECT_NE(sample(hot, logits), 4);
    }
    const double e = 2 * std::exp(3.0) + std::exp(1.0) + 1;
    EXPECT_NEAR(seen[1] / 4000.0, std::exp(3.0) / e, 0.03);
    EXPECT_NEAR(seen[2] / 4000.0, std::exp(1.0) / e, 0.02);
    EXPECT_EQ(seen[4], 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Flags

namespace {
// "" if the words parse, else the message.
std::string refuse(std::vector<std::string> words, Options* out = nullptr) {
    words.insert(words.begin(), "train_gpt");
    std::vector<char*> argv;
    for (std::string& word : words) { argv.push_back(word.data()); }
    Options o;
    try {
        parse_options((int)argv.size(), argv.data(), false, o);
    } catch (const Error& error) {
        EXPECT_EQ(error.exit_code, EXIT_USAGE) << error.what();
        return error.what();
    }
    if (out) { *out = o; }
    return "";
}
}  // namespace

TEST(Flags, PresetsAndOverrides) {
    Options o;
    EXPECT_EQ(refuse({"--model", "130m", "--dry-run"}, &o), "");
    EXPECT_EQ(o.shape.channels, 768);
    EXPECT_EQ(o.shape.head_size, 48);
    EXPECT_EQ(o.seq, 1024);
    EXPECT_DOUBLE_EQ(o.lr, 6e-4);
    EXPECT_DOUBLE_EQ(o.min_lr, 6e-5);
    EXPECT_EQ(refuse({"--model=1.1b", "--lr", "0.001", "--channels", "1280", "--dry-run", "--tp", "8"}, &o), "");
    EXPECT_EQ(o.shape.channels, 1280);
    EXPECT_EQ(o.shape.head_size, 40);
    EXPECT_DOUBLE_EQ(o.lr, 0.001);
    EXPECT_DOUBLE_EQ(o.shape.rope_base, 5e5);
    for (const Preset& preset : presets()) { EXPECT_EQ(refuse({"--model", preset.name, "--dry-run"}), "") << preset.name; }
}

// --overlap-batches was a switch once: checkpoints have true and false.
TEST(Flags, OptionsOfAnotherVersion) {
    Options o;
    options_from_json(o, R"({"overlap_batches": true, "tp": 2, "unheard_of": 3})");
    EXPECT_EQ(o.overlap_batches, 2);
    EXPECT_EQ(o.tp, 2);
    options_from_json(o, R"({"overlap_batches": false})");
    EXPECT_EQ(o.overlap_batches, 1);
    try {
        options_from_json(o, R"({"tp": "two"})");
        ADD_FAILURE() << "a word for a number";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("\"two\" for --tp"), std::string::npos) << error.what();
    }
    Options same;
    options_from_json(same, options_to_json(o));
    EXPECT_EQ(options_to_json(same), options_to_json(o));
}

// --micro-batch -1. {tokens, sequences of a step, D, --overlap-batches, --interleave} -> sequences
TEST(Flags, DefaultMicroBatch) {
    const i64 full = MICRO_BATCH_TOKENS;
    const std::vector<std::tuple<i64, i64, int, i64, bool, i64>> cases = {
        {full, 4, 1, 1, false, 1}, {4 * full, 4, 1, 1, false, 1}, {full / 8, 32, 1, 1, false, 8}, {full / 8, 12, 1, 1, false, 6}, {full / 8, 14, 2, 1, false, 7}, {full / 8, 13, 1, 1, false, 1},
        {full / 8, 3, 1, 1, false, 3}, {full / 8, 32, 1, 8, false, 4}, {full / 8, 4, 1, 8, false, 1}, {full, 4, 1, 1, true, 2}, {full / 8, 32, 1, 1, true, 16}, {full / 8, 12, 2, 1, true, 6}};
    for (const auto& [S, G, D, at_once, interleave, want] : cases) {
        Options o;
        o.seq = S, o.global_batch = G, o.overlap_batches = at_once, o.interleave = interleave;
        EXPECT_EQ(on_ranks(o, D).micro_batch, want) << S << " " << G << " " << D << " " << at_once << " " << interleave;
        o.micro_batch = 3;
        EXPECT_EQ(on_ranks(o, D).micro_batch, 3);
    }
}

TEST(Flags, RefusalsNameTheFlag) {
    const std::vector<std::pair<std::vector<std::string>, const char*>> cases = {
        {{"--lr", "abc"}, "--lr"}, {{"--lr", "nan"}, "--lr"}, {{"--lr", "-1"}, "--lr"}, {{"--sync-factor", "1.5"}, "--sync-factor"},
        {{"--sync-factor", "nan"}, "--sync-factor"}, {{"--tp", "0"}, "--tp"}, {{"--tp", "-2"}, "--tp"}, {{"--tp", "3", "--heads", "4", "--channels", "768"}, "--tp"},
        {{"--heads", "32", "--kv-heads", "5"}, "--kv-heads"}, {{"--kv-heads", "0"}, "--kv-heads"}, {{"--layers", "0"}, "--layers"}, {{"--layers", "-1"}, "--layers"},
        {{"--micro-batch", "0"}, "--micro-batch"}, {{"--seq", "0"}, "--seq"}, {{"--vocab", "0"}, "--vocab"}, {{"--temperature", "-1"}, "--temperature"},
        {{"--temperature", "nan"}, "--temperature"}, {{"--top-p", "0"}, "--top-p"}, {{"--top-p", "1.1"}, "--top-p"}, {{"--top-k", "-1"}, "--top-k"},
        {{"--zero", "2"}, "--zero"}, {{"--dtype", "fp16"}, "--dtype"}, {{"--grad-dtype", "fp16"}, "--grad-dtype"}, {{"--grad-dtype", "bf16"}, "HINT: --dtype bf16"},
        {{"--grad-dtype", "bf16", "--dtype", "fp32"}, "--grad-dtype"}, {{"--schedule", "step"}, "--schedule"}, {{"--model", "13b"}, "--model"},
        {{"--learning-rate", "1"}, "--learning-rate"}, {{"--seqq", "1"}, "--seq"}, {{"stray"}, "stray"}, {{"--channels", "770"}, "--channels"}, {{"--warmup", "-1"}, "--warmup"},
        {{"--beta1", "1"}, "--beta1"}, {{"--eps", "0"}, "--eps"}, {{"--private-scale", "sometimes"}, "--private-scale"}, {{"--positions", "alibi"}, "--positions"},
        {{"--arch", "mamba"}, "--arch"}, {{"--recompute", "3"}, "--recompute"}, {{"--clip", "-1"}, "--clip"}, {{"--norm-eps", "0"}, "--norm-eps"},
        {{"--min-lr", "1"}, "--min-lr"}, {{"--save-every", "5"}, "--out"}, {{"--resume"}, "--out"}, {{"--head-size", "47"}, "--head"}, {{"--steps"}, "--steps"}};
    for (auto [words, flag] : cases) {
        std::string line;
        for (const auto& word : words) { line += word + " "; }
        words.push_back("--dry-run");
        const std::string message = refuse(words);
        EXPECT_NE(message.find(flag), std::string::npos) << line << "-> '" << message << "'";
    }
    EXPECT_NE(refuse({"--tp", "3", "--dry-run"}).find("1, 2, 4, 8, 16"), std::string::npos);
    for (const char* flag : {"--seq", "--micro-batch", "--global-batch", "--layers", "--channels", "--vocab", "--head-size", "--ffn", "--vocab-multiple", "--heads", "--dp", "--tp"}) {
        for (const char* value : {"4611686018427387904", "9223372036854775807", "-2", ""}) {
            EXPECT_NE(refuse({flag, value, "--dry-run"}).find("--"), std::string::npos) << flag << " " << value;
        }
    }
    EXPECT_NE(refuse({"--eps", "1e-50", "--dry-run"}).find("--eps"), std::string::npos);
    EXPECT_NE(refuse({"--resume=true", "--out", "x", "--dry-run"}).find("--resume"), std::string::npos);
    EXPECT_NE(refuse({"--generate", "5"}).find("--checkpoint"), std::string::npos);
    EXPECT_NE(refuse({}).find("--train"), std::string::npos);
}
