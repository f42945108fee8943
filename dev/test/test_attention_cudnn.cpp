// The graphs that cuDNN is given (attention_cudnn.cpp), on the CPU: each is written out as JSON by cudnn-frontend, read again, computed by
// naive loops over the sizes and strides that it names, and compared with the CPU loop. So layouts, scale, mask, groups of heads and which
// array is which are proven; that cuDNN computes what its documentation says is not. What it takes on which GPU is asked of the frontend.
#include "llmc/attention_cudnn.cpp"
#include "llmc/ops/attention.cuh"
#include "values.h"

namespace {

using Json = nlohmann::json;

// One array of a graph: element (batch, head, position, channel) where the graph says that it lies.
class View {
public:
    std::vector<i64> sizes;
    View(const Json& graph, const Pointers& arrays, const Json& node, const char* side, const char* port) {
        const Json& uid = node.at(side).at(port);
        for (const Json& tensor : graph.at("tensors")) {
            if (tensor.at("uid") != uid) { continue; }
            sizes = tensor.at("dim").get<std::vector<i64>>(), strides_ = tensor.at("stride").get<std::vector<i64>>();
            half_ = tensor.at("data_type") == "BFLOAT16";
            check(half_ || tensor.at("data_type") == "FLOAT", "%s is of another type", port);
            check(!tensor.at("is_virtual").get<bool>(), "%s is not in memory", port);
        }
        data_ = arrays.at(uid.get<int64_t>());
    }
    double operator()(i64 b, i64 h, i64 s, i64 c) const {
        return half_ ? (float)((const bf16*)data_)[at(b, h, s, c)] : ((const float*)data_)[at(b, h, s, c)];
    }
    void set(i64 b, i64 h, i64 s, i64 c, double value) {
        if (half_) {
            ((bf16*)data_)[at(b, h, s, c)] = bf16((float)value);
        } else {
            ((float*)data_)[at(b, h, s, c)] = (float)value;
        }
    }

private:
    i64 at(i64 b, i64 h, i64 s, i64 c) const { return b * strides_[0] + h * strides_[1] + s * strides_[2] + c * strides_[3]; }
    std::vector<i64> strides_;
    bool half_ = false;
    void* data_ = nullptr;
};

// Computes a graph of one node.
class Interpreter {
public:
    Interpreter(Graph& made, const Pointers& arrays) : arrays_(arrays) {
        made.serialize(graph_);
        check(graph_.at("nodes").size() == 1, "one node is expected");
        node_ = graph_["nodes"][0];
        check(node_.at("diagonal_alignment") == "TOP_LEFT", "alignment");
        scale_ = node_.at("attn_scale_value").get<float>(), right_bound_ = node_.at("right_bound").get<i64>();
    }
    void forward() const {
        check(node_.at("tag") == "SDPA" && node_.at("generate_stats").get<bool>(), "a forward with statistics is expected");
        const View q = in("Q"), k = in("K"), v = in("V");
        View o = out("O"), stats = out("Stats");
        const i64 S = q.sizes[2], HS = v.sizes[3];
        each_row(q, [&](i64 b, i64 h, i64 kv, i64 i) {
            double sum = 0;
            Doubles p(S);
            for (i64 j = 0; j <= std::min(S - 1, i + right_bound_); j++) { sum += p[j] = exp(dot(q, b, h, i, k, kv, j) * scale_); }
            for (i64 c = 0; c < HS; c++) {
                double value = 0;
                for (i64 j = 0; j < S; j++) { value += p[j] / sum * v(b, kv, j, c); }
                o.set(b, h, i, c, value);
            }
            stats.set(b, h, i, 0, log(sum));
        });
    }
    void backward() const {
        check(node_.at("tag") == "SDPA_BWD" && node_.at("is_deterministic_algorithm").get<bool>(), "a deterministic backward is expected");
        const View q = in("Q"), k = in("K"), v = in("V"), o = in("O"), grad = in("dO"), stats = in("Stats");
        View dq = out("dQ"), dk = out("dK"), dv = out("dV");
        const i64 B = q.sizes[0], KVH = k.sizes[1], S = q.sizes[2], HS = q.sizes[3];
        Doubles dq_row(HS), dk_sum(B * KVH * S * HS), dv_sum(B * KVH * S * HS);
        each_row(q, [&](i64 b, i64 h, i64 kv, i64 i) {
            std::fill(dq_row.begin(), dq_row.end(), 0.0);
            const double D = dot(grad, b, h, i, o, h, i);
            for (i64 j = 0; j <= std::min(S - 1, i + right_bound_); j++) {
                const double p = exp(dot(q, b, h, i, k, kv, j) * scale_ - stats(b, h, i, 0));
                const double ds = p * (dot(grad, b, h, i, v, kv, j) - D) * scale_;
                for (i64 c = 0; c < HS; c++) {
                    const i64 to = ((b * KVH + kv) * S + j) * HS + c;
                    dq_row[c] += ds * k(b, kv, j, c), dk_sum[to] += ds * q(b, h, i, c), dv_sum[to] += p * grad(b, h, i, c);
                }
            }
            for (i64 c = 0; c < HS; c++) { dq.set(b, h, i, c, dq_row[c]); }
        });
        for (i64 at = 0; at < B * KVH * S * HS; at++) {
            const i64 b = at / HS / S / KVH, h = at / HS / S % KVH, j = at / HS % S, c = at % HS;
            dk.set(b, h, j, c, dk_sum[at]), dv.set(b, h, j, c, dv_sum[at]);
        }
    }

private:
    View in(const char* port) const { return View(graph_, arrays_, node_, "inputs", port); }
    View out(const char* port) const { return View(graph_, arrays_, node_, "outputs", port); }
    // Consecutive query heads share a key-value head.
    template <typename Body>
    void each_row(const View& q, const Body& body) const {
        const i64 NH = q.sizes[1], group = NH / in("K").sizes[1];
        for (i64 row = 0; row < q.sizes[0] * NH * q.sizes[2]; row++) {
            const i64 b = row / q.sizes[2] / NH, h = row / q.sizes[2] % NH;
            body(b, h, h / group, row % q.sizes[2]);
        }
    }
    static double dot(const View& x, i64 b, i64 h, i64 i, const View& y, i64 kv, i64 j) {
        double sum = 0;
        for (i64 c = 0; c < x.sizes[3]; c++) { sum += x(b, h, i, c) * y(b, kv, j, c); }
        return sum;
    }

    const Pointers& arrays_;
    Json graph_, node_;
    double scale_;
    i64 right_bound_;
};

TEST(CudnnAttention, NamesItselfAndWhatItTakes) {
    EXPECT_EQ(cudnn::version().find("cuDNN 9."), 0u) << cudnn::version();
    const i64 scores = 3 * 5 * 7 * 7;
    EXPECT_EQ(cudnn::backward_workspace(3, 7, 5), cudnnGetVersion() < 92500 ? 2 * scores : 0);
}

TEST(CudnnAttention, GraphsComputeWhatTheCpuLoopDoes) {
    for (const AttentionShape& d : Vec<AttentionShape>{{1, 2, 1, 1, 8}, {2, 37, 4, 2, 48}, {2, 65, 6, 1, 16}, {3, 19, 3, 3, 80}}) {
        SCOPED_TRACE(format("B %d S %d NH %d KVH %d HS %d", (int)d.B, (int)d.S, (int)d.NH, (int)d.KVH, (int)d.HS));
        const i64 queries = d.B * d.NH * d.S, keys = d.B * d.KVH * d.S;
        const auto q = random_values<bf16>(queries * d.HS, 1), k = random_values<bf16>(keys * d.HS, 2),
                   v = random_values<bf16>(keys * d.HS, 3);
        const auto grad = random_values<bf16>(queries * d.HS, 4);
        ::Run run(NO_GPU);
        Vec<bf16> want_att(queries * d.HS), att(queries * d.HS, bf16(NAN));
        Vec<float> want_lse(queries), lse(queries, NAN);
        cpu::attention_forward(want_att.data(), want_lse.data(), q.data(), k.data(), v.data(), 0, d.S, d.B, d.S, d.NH, d.KVH, d.HS, run);
        Interpreter(*forward_graph(d, 90), forward_arrays(att.data(), lse.data(), q.data(), k.data(), v.data())).forward();
        const double rounding = 4e-3;  // of probabilities and their gradients, where the loop multiplies pairs of bf16
        expect_close(att, doubles(want_att), rounding, "att");
        expect_close(lse, doubles(want_lse), 1e-5, "lse");

        Vec<bf16> want_dq(queries * d.HS), want_dk(keys * d.HS), want_dv(keys * d.HS);
        cpu::attention_backward(want_dq.data(), want_dk.data(), want_dv.data(), grad.data(), want_att.data(), want_lse.data(), q.data(),
                                k.data(), v.data(), d.B, d.S, d.NH, d.KVH, d.HS, run);
        Vec<bf16> dq(queries * d.HS, bf16(NAN)), dk(keys * d.HS, bf16(NAN)), dv(keys * d.HS, bf16(NAN));
        Interpreter(*backward_graph(d, 90), backward_arrays(dq.data(), dk.data(), dv.data(), grad.data(), want_att.data(), want_lse.data(),
                                                            q.data(), k.data(), v.data()))
            .backward();
        expect_close(dq, doubles(want_dq), rounding, "dq");
        expect_close(dk, doubles(want_dk), rounding, "dk");
        expect_close(dv, doubles(want_dv), rounding, "dv");
    }
}

// What the frontend says of a graph for a GPU; nothing where it takes it.
template <typename MakeGraph>
std::string refusal(const MakeGraph& make_graph, const AttentionShape& d, int sm) {
    return make_graph(d, sm)->validate().get_message();
}

TEST(CudnnAttention, TakesThePresetsOnEveryGpu) {
    for (const AttentionShape& d : Vec<AttentionShape>{
             {64, 1024, 16, 16, 48}, {16, 2048, 32, 8, 64}, {4, 4096, 32, 32, 128}, {8, 2048, 3, 1, 80}, {1, 131, 2, 2, 96}}) {
        for (const int sm : {80, 86, 89, 90, 100, 120}) {
            EXPECT_EQ(refusal(forward_graph, d, sm), "") << "forward, HS " << d.HS << ", sm_" << sm;
            EXPECT_EQ(refusal(backward_graph, d, sm), "") << "backward, HS " << d.HS << ", sm_" << sm;
        }
    }
}
TEST(CudnnAttention, SaysWhatItRefuses) {
    const AttentionShape odd_head{2, 64, 2, 2, 20}, wide_head{2, 64, 2, 2, 192};
    EXPECT_NE(refusal(forward_graph, odd_head, 90).find("multiple of 8"), std::string::npos);
    EXPECT_NE(refusal(backward_graph, odd_head, 90).find("multiple of 8"), std::string::npos);
    EXPECT_NE(refusal(backward_graph, wide_head, 80).find("128"), std::string::npos);
}
TEST(CudnnAttention, ArraysThatAreNotAligned) {
    alignas(16) bf16 memory[16] = {};
    float* lse = (float*)memory;
    EXPECT_TRUE(aligned(forward_arrays(memory, lse, memory, memory, memory + 8)));
    EXPECT_FALSE(aligned(forward_arrays(memory, lse, memory, memory, memory + 4)));
}

}  // namespace
