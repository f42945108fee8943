// attention_cudnn.cpp: attention as graphs of cuDNN's, by cudnn-frontend. A graph is one node; it names its arrays by number, with sizes
// and strides, and is planned once a shape:
//
//   forward    Q, K, V -> O = softmax(scale Q K^T, causal) V, STATS = log-sum-exp of each row of scale Q K^T
//   backward   Q, K, V, O, dO, STATS -> dQ, dK, dV
//
// Axes are (batch, head, position, channel) for all, in whatever order they lie in memory: att is (B,S,NH,HS) there. Query head h uses
// key-value head h / (NH/KVH). STATS (B,NH,S,1; fp32) = max + ln(sum exp(score - max)): documented as the natural logarithm.
//
// The backward is asked to be deterministic. On Hopper cuDNN then keeps the gradients of all scores: 2 B NH S^2 bytes of workspace.
// From 9.25 on CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=BYTES makes it take a slower way where that would be more.
#include "attention_cudnn.h"

#ifndef LLMC_CUDNN
#define LLMC_CUDNN 0
#endif

#if LLMC_CUDNN

#include <cudnn_frontend.h>

#include <map>
#include <unordered_map>

namespace {

namespace fe = cudnn_frontend;
using Graph = fe::graph::Graph;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using Pointers = std::unordered_map<int64_t, void*>;  // of each array

enum Array : int64_t { Q = 1, K, V, O, STATS, DQ, DK, DV, DO };

void cudnn_check(cudnnStatus_t status, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    check(status == CUDNN_STATUS_SUCCESS, "%s:%d: cuDNN: %s", file, line, cudnnGetErrorString(status));
}

// Sizes and strides in cuDNN's order of axes, (batch, head, position, channel).
struct Layout {
    std::vector<int64_t> sizes, strides;
};
Layout by_heads(const AttentionShape& d, i64 heads, i64 HS) {  // (B,heads,S,HS) in memory
    return {{d.B, heads, d.S, HS}, {heads * d.S * HS, d.S * HS, HS, 1}};
}
Layout by_positions(const AttentionShape& d) {  // (B,S,NH,HS) in memory
    return {{d.B, d.NH, d.S, d.HS}, {d.S * d.NH * d.HS, d.HS, d.NH * d.HS, 1}};
}

Tensor input(Graph& graph, Array array, const Layout& layout, fe::DataType_t type = fe::DataType_t::BFLOAT16) {
    return graph.tensor(fe::graph::Tensor_attributes().set_uid(array).set_dim(layout.sizes).set_stride(layout.strides).set_data_type(type));
}
void output(const Tensor& tensor, Array array, const Layout& layout, fe::DataType_t type = fe::DataType_t::BFLOAT16) {
    tensor->set_output(true).set_uid(array).set_dim(layout.sizes).set_stride(layout.strides).set_data_type(type);
}

// What both nodes are told: key j is seen by query i where j <= i + 0, counted from the top left.
template <typename Node>
Node causal(const char* name, const AttentionShape& d) {
    Node node;
    node.set_name(name).set_attn_scale(1.0f / sqrtf((float)d.HS));
    node.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    return node;
}
std::shared_ptr<Graph> new_graph(int sm) {  // sm: 90 for compute capability 9.0; nodes take it over when they are made
    auto graph = std::make_shared<Graph>();
    graph->set_sm_version(sm);
    graph->set_io_data_type(fe::DataType_t::BFLOAT16);
    graph->set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    return graph;
}

std::shared_ptr<Graph> forward_graph(const AttentionShape& d, int sm) {
    const auto graph = new_graph(sm);
    const Tensor q = input(*graph, Q, by_heads(d, d.NH, d.HS));
    const Tensor k = input(*graph, K, by_heads(d, d.KVH, d.HS)), v = input(*graph, V, by_heads(d, d.KVH, d.HS));
    const auto [o, stats] = graph->sdpa(q, k, v, causal<fe::graph::SDPA_attributes>("attention_forward", d).set_generate_stats(true));
    output(o, O, by_positions(d));
    output(stats, STATS, by_heads(d, d.NH, 1), fe::DataType_t::FLOAT);
    return graph;
}
std::shared_ptr<Graph> backward_graph(const AttentionShape& d, int sm) {
    const auto graph = new_graph(sm);
    const Tensor q = input(*graph, Q, by_heads(d, d.NH, d.HS));
    const Tensor k = input(*graph, K, by_heads(d, d.KVH, d.HS)), v = input(*graph, V, by_heads(d, d.KVH, d.HS));
    const Tensor o = input(*graph, O, by_positions(d)), grad = input(*graph, DO, by_positions(d));
    const Tensor stats = input(*graph, STATS, by_heads(d, d.NH, 1), fe::DataType_t::FLOAT);
    const auto node = causal<fe::graph::SDPA_backward_attributes>("attention_backward", d).set_deterministic_algorithm(true);
    const auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, o, grad, stats, node);
    output(dq, DQ, by_heads(d, d.NH, d.HS));
    output(dk, DK, by_heads(d, d.KVH, d.HS));
    output(dv, DV, by_heads(d, d.KVH, d.HS));
    return graph;
}

Pointers forward_arrays(bf16* att, float* lse, const bf16* q, const bf16* k, const bf16* v) {
    return {{Q, (void*)q}, {K, (void*)k}, {V, (void*)v}, {O, att}, {STATS, lse}};
}
Pointers backward_arrays(bf16* dq, bf16* dk, bf16* dv, const bf16* datt, const bf16* att, const float* lse, const bf16* q, const bf16* k,
                         const bf16* v) {
    return {{Q, (void*)q},       {K, (void*)k}, {V, (void*)v}, {O, (void*)att}, {DO, (void*)datt},
            {STATS, (void*)lse}, {DQ, dq},      {DK, dk},      {DV, dv}};
}

// cuDNN reads and writes 16 bytes at a time, and does not look where.
bool aligned(const Pointers& pointers) {
    return std::all_of(pointers.begin(), pointers.end(), [](const auto& array) { return (uintptr_t)array.second % 16 == 0; });
}

class CudnnAttention final : public AttentionLibrary {
public:
    CudnnAttention() : sm_(compute_capability()) { cudnn_check(cudnnCreate(&handle_)); }
    ~CudnnAttention() override {
        cudnnSetStream(handle_, nullptr);  // the run's is gone by now
        cudnnDestroy(handle_);
    }

    bool forward(bf16* att, float* lse, const bf16* q, const bf16* k, const bf16* v, const AttentionShape& shape, Run& run) override {
        return execute(forward_, forward_graph, shape, forward_arrays(att, lse, q, k, v), run);
    }
    bool backward(bf16* dq, bf16* dk, bf16* dv, const bf16* datt, const bf16* att, const float* lse, const bf16* q, const bf16* k,
                  const bf16* v, const AttentionShape& shape, Run& run) override {
        return execute(backward_, backward_graph, shape, backward_arrays(dq, dk, dv, datt, att, lse, q, k, v), run);
    }
    std::string why_not() const override { return why_not_; }

private:
    struct Plan {
        std::shared_ptr<Graph> graph;  // null: refused
        i64 workspace = 0;             // bytes
        std::string why_not;
    };
    using Plans = std::map<AttentionShape, Plan>;

    template <typename MakeGraph>
    bool execute(Plans& plans, const MakeGraph& make_graph, const AttentionShape& shape, Pointers pointers, Run& run) {
        auto found = plans.find(shape);
        if (found == plans.end()) { found = plans.emplace(shape, plan(make_graph(shape, sm_), shape)).first; }
        const Plan& plan = found->second;
        why_not_ = !plan.graph ? plan.why_not : !aligned(pointers) ? "an array does not begin at a multiple of 16 bytes" : "";
        if (!why_not_.empty()) { return false; }
        cudnn_check(cudnnSetStream(handle_, run.stream));
        auto status = plan.graph->execute(handle_, pointers, run.workspace.get<char>(plan.workspace));
        check(status.is_good(), "cuDNN: %s", status.get_message().c_str());
        return true;
    }
    Plan plan(std::shared_ptr<Graph> graph, const AttentionShape& d) {
        Plan plan;
        auto status = graph->build(handle_, {fe::HeurMode_t::A});
        if (status.is_good()) {
            plan.graph = graph, plan.workspace = graph->get_workspace_size();
        } else {
            plan.why_not = "cuDNN: " + status.get_message();
            fprintf(stderr, "note: attention B %lld S %lld heads %lld (%lld KV) of %lld by our own kernels: %s\n", (long long)d.B,
                    (long long)d.S, (long long)d.NH, (long long)d.KVH, (long long)d.HS, plan.why_not.c_str());
        }
        return plan;
    }

    static int compute_capability() {
        const cudaDeviceProp gpu = gpu_properties(current_gpu());
        return 10 * gpu.major + gpu.minor;
    }

    const int sm_;
    cudnnHandle_t handle_ = nullptr;
    Plans forward_, backward_;
    std::string why_not_;
};

}  // namespace

namespace cudnn {

std::shared_ptr<AttentionLibrary> attention() { return std::make_shared<CudnnAttention>(); }
std::string version() {
    const size_t version = cudnnGetVersion();
    return format("cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
}
i64 backward_workspace(i64 B, i64 S, i64 NH) { return cudnnGetVersion() < 92500 ? 2 * B * NH * S * S : 0; }

}  // namespace cudnn

#else

namespace cudnn {

std::shared_ptr<AttentionLibrary> attention() { return nullptr; }
std::string version() { return ""; }
i64 backward_workspace(i64, i64, i64) { return 0; }

}  // namespace cudnn

#endif
