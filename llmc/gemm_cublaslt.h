// gemm_cublaslt.h: the CUDA side of gemm.h, by cuBLASLt. Host code: any C++ compiler takes it, with CUDA's headers, and links the library,
// or the emulator in its place (simt/cublaslt.cpp).
//
// cuBLASLt is column-major. A row-major matrix is its transpose there, so c = a b is asked for as c^T = b^T a^T: a and b change places, their
// strides stay, and what is transposed here is transposed there.
//
// A kind of product is planned once: descriptors, and the algorithm that the library's heuristic picks. Plans are kept by the run, and depend
// on nothing but shapes, strides and alignments: so the same product has the same bits every time. K may be split only with fp32 partial sums
// in the workspace, added in a pass of their own (REDUCTION_SCHEME_COMPUTE_TYPE): the other schemes round partial sums to c's type.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <map>
#include <memory>

inline void cublas_check(cublasStatus_t status, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    check(status == CUBLAS_STATUS_SUCCESS, "%s:%d: cuBLASLt: %s", file, line, cublasLtGetStatusString(status));
}

template <typename X>
constexpr cudaDataType_t cuda_type = CUDA_R_32F;
template <>
inline constexpr cudaDataType_t cuda_type<bf16> = CUDA_R_16BF;

// Bytes to which a pointer is aligned, as far as algorithms care: they read at most 128 bits at a time.
constexpr uint32_t FULL_ALIGNMENT = 16;
inline uint32_t alignment(const void* p) {
    const auto address = (uintptr_t)p | FULL_ALIGNMENT;
    return (uint32_t)(address & -address);
}

class CublasLt {
public:
    explicit CublasLt(uint64_t most_workspace = 32 << 20) : most_workspace_(most_workspace) {
        cublasLtHandle_t handle;
        cublas_check(cublasLtCreate(&handle));
        handle_.reset(handle);
    }

    // c = or += alpha * a b + bias, as gemm() below, which makes this one's conditions true: no size is 0; a bias is of c's type and aligned.
    template <typename X, typename Y>
    void multiply(Y* c, i64 ldc, Matrix<X> a, Matrix<X> b, const X* bias, i64 M, i64 N, i64 K, float alpha, bool accumulate, Run& run) {
        const Product product{cuda_type<X>, cuda_type<Y>, a.transposed, b.transposed, bias != nullptr, M, N, K, a.ld, b.ld, ldc,
                              alignment(a.data), alignment(b.data), alignment(c)};
        const Plan& plan = plan_for(product);
        if (bias) { set(plan.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias); }
        const float beta = accumulate ? 1.0f : 0.0f;
        cublas_check(cublasLtMatmul(handle_.get(), plan.desc.get(), &alpha, b.data, plan.b.get(), a.data, plan.a.get(), &beta, c, plan.c.get(),
                                    c, plan.c.get(), &plan.algo, run.workspace.get<char>((i64)plan.workspace), plan.workspace, run.stream));
    }

    size_t plans() const { return plans_.size(); }

private:
    // A handle of the library's that is destroyed with its owner.
    template <auto destroy>
    struct Destroy {
        template <typename T>
        void operator()(T* handle) const { destroy(handle); }
    };
    template <typename Handle, auto destroy>
    using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<destroy>>;
    using Desc = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
    using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
    using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

    // All that a plan depends on.
    struct Product {
        cudaDataType_t type, c_type;  // type: of a and b
        bool a_transposed, b_transposed, bias;
        i64 M, N, K, lda, ldb, ldc;
        uint32_t a_alignment, b_alignment, c_alignment;
        auto operator<=>(const Product&) const = default;
    };
    struct Plan {
        Desc desc;
        Layout a, b, c;
        cublasLtMatmulAlgo_t algo;
        size_t workspace;  // bytes
    };
    static constexpr size_t MOST_PLANS = 1024;  // prompts of many lengths

    template <typename T>
    static void set(const Desc& desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
        cublas_check(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)));
    }
    template <typename T>
    static void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
        cublas_check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)));
    }
    // A row-major (rows, cols) matrix, or the transpose of one.
    static Layout layout(cudaDataType_t type, i64 rows, i64 cols, i64 ld, bool transposed) {
        cublasLtMatrixLayout_t layout;
        if (transposed) { std::swap(rows, cols); }
        cublas_check(cublasLtMatrixLayoutCreate(&layout, type, cols, rows, ld));
        return Layout(layout);
    }
    static Desc describe(const Product& p) {
        cublasLtMatmulDesc_t made;
        cublas_check(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F));  // fp32 products are not done in TF32
        Desc desc(made);
        set(desc, CUBLASLT_MATMUL_DESC_TRANSA, p.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
        set(desc, CUBLASLT_MATMUL_DESC_TRANSB, p.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
        if (p.bias) {
            set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
            set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void*)(uintptr_t)FULL_ALIGNMENT);  // the heuristic asks for its alignment
        }
        return desc;
    }
    Preference prefer(const Product& p) const {
        cublasLtMatmulPreference_t made;
        cublas_check(cublasLtMatmulPreferenceCreate(&made));
        Preference preference(made);
        set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace_);
        set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.b_alignment);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.a_alignment);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.c_alignment);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.c_alignment);
        return preference;
    }
    Plan make_plan(const Product& p) const {
        Plan plan{describe(p), layout(p.type, p.M, p.K, p.lda, p.a_transposed), layout(p.type, p.K, p.N, p.ldb, p.b_transposed),
                  layout(p.c_type, p.M, p.N, p.ldc, false), {}, 0};
        const Preference preference = prefer(p);
        cublasLtMatmulHeuristicResult_t best{};
        int found = 0;
        cublas_check(cublasLtMatmulAlgoGetHeuristic(handle_.get(), plan.desc.get(), plan.b.get(), plan.a.get(), plan.c.get(), plan.c.get(),
                                                    preference.get(), 1, &best, &found));
        check(found > 0, "cuBLASLt has no algorithm for (%lld, %lld) x (%lld, %lld), strides %lld, %lld, %lld, %s to %s", (long long)p.M,
              (long long)p.K, (long long)p.K, (long long)p.N, (long long)p.lda, (long long)p.ldb, (long long)p.ldc,
              p.type == CUDA_R_32F ? "fp32" : "bf16", p.c_type == CUDA_R_32F ? "fp32" : "bf16");
        cublas_check(best.state);
        plan.algo = best.algo, plan.workspace = best.workspaceSize;
        return plan;
    }
    const Plan& plan_for(const Product& product) {
        if (const auto found = plans_.find(product); found != plans_.end()) { return found->second; }
        if (plans_.size() >= MOST_PLANS) { plans_.clear(); }
        return plans_.emplace(product, make_plan(product)).first->second;
    }

    Owned<cublasLtHandle_t, cublasLtDestroy> handle_;
    uint64_t most_workspace_;  // bytes
    std::map<Product, Plan> plans_;
};

namespace gpu {

// ops/matmul.cuh: c (M,N; ldc) = bias in every row, or zeros where there is none.
template <typename X, typename Y>
void fill_rows(Y* c, i64 ldc, const X* bias, i64 M, i64 N, Run& run);

template <typename X, typename Y>
void gemm(Y* c, i64 ldc, Matrix<X> a, Matrix<X> b, const X* bias, i64 M, i64 N, i64 K, float alpha, bool accumulate, Run& run) {
    if (M == 0 || N == 0) { return; }
    // The library adds a bias of c's type, aligned. Any other is written to c first, and so are the zeros of a sum over nothing.
    const bool fused = bias && K > 0 && std::is_same_v<X, Y> && alignment(bias) == FULL_ALIGNMENT;
    if (!fused && (bias || (K == 0 && !accumulate))) {
        check(!accumulate, "gemm: a bias of another type, or not aligned, cannot be added to a sum");
        fill_rows(c, ldc, bias, M, N, run);
        accumulate = true;
    }
    if (K == 0) { return; }
    if (!run.cublas_lt) { run.cublas_lt = std::make_shared<CublasLt>(); }
    run.cublas_lt->multiply(c, ldc, a, b, fused ? bias : nullptr, M, N, K, alpha, accumulate, run);
}

}  // namespace gpu
