// gemm_cublaslt.h: the CUDA side of gemm.h, by cuBLASLt. Host code: any C++ compiler takes it, with CUDA's headers, and links the library,
// or the emulator in its place (simt/cublaslt.cpp).
//
// cuBLASLt is column-major. A row-major matrix is its transpose there, so c = a b is asked for as c^T = b^T a^T: a and b change places,
// their strides stay, and what is transposed here is transposed there.
//
// A kind of product is planned once: descriptors, and the algorithm that the library's heuristic picks. Plans are kept by the run, and
// depend on nothing but shapes, strides and alignments: so the same product has the same bits every time. K may be split only with fp32
// partial sums in the workspace, added in a pass of their own (REDUCTION_SCHEME_COMPUTE_TYPE): the other schemes round partial sums to c's
// type.
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

// What a product does besides: it adds a bias, or makes gelu of the sum as well, or sums a's rows as well.
struct Epilogue {
    const void* bias = nullptr;  // (N) of c's type, added to every row
    void* gelu_input = nullptr;  // (M,N; ldc) of c's type = a b + bias; c = gelu of that, before it was rounded
    void* row_sums = nullptr;    // (M) of c's type = sums over K of a

    cublasLtEpilogue_t kind() const {
        if (gelu_input) { return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX; }
        if (row_sums) { return CUBLASLT_EPILOGUE_BGRADB; }
        return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    }
    bool aligned() const {
        for (const void* p : {bias, (const void*)gelu_input, (const void*)row_sums}) {
            if (p && alignment(p) < FULL_ALIGNMENT) { return false; }
        }
        return true;
    }
};

class CublasLt {
public:
    explicit CublasLt(uint64_t most_workspace = 32 << 20) : most_workspace_(most_workspace) {
        cublasLtHandle_t handle;
        cublas_check(cublasLtCreate(&handle));
        handle_.reset(handle);
    }

    // c = or += alpha * a b, and the epilogue. No size is 0, the epilogue's pointers are aligned. False, and nothing is done, where the
    // library has no algorithm for the product with that epilogue.
    template <typename X, typename Y>
    bool multiply(Y* c, i64 ldc, Matrix<X> a, Matrix<X> b, const Epilogue& epilogue, i64 M, i64 N, i64 K, float alpha, bool accumulate,
                  Run& run) {
        const Alignments aligned{alignment(a.data), alignment(b.data), alignment(c)};
        const Product product{cuda_type<X>, cuda_type<Y>, a.transposed, b.transposed, epilogue.kind(), M, N, K, a.ld, b.ld, ldc, aligned};
        const Plan& plan = plan_for(product);
        if (!plan.found) {
            check(product.epilogue != CUBLASLT_EPILOGUE_DEFAULT, "cuBLASLt has no algorithm for %s", in_words(product).c_str());
            return false;
        }
        set_pointers(plan.desc, epilogue);
        const float beta = accumulate ? 1.0f : 0.0f;
        cublas_check(cublasLtMatmul(handle_.get(), plan.desc.get(), &alpha, b.data, plan.b.get(), a.data, plan.a.get(), &beta, c,
                                    plan.c.get(), c, plan.c.get(), &plan.algo, run.workspace.get<char>((i64)plan.workspace), plan.workspace,
                                    run.stream));
        return true;
    }
    size_t plans() const { return plans_.size(); }

private:
    // A handle of the library's that is destroyed with its owner.
    template <auto destroy>
    struct Destroy {
        template <typename T>
        void operator()(T* handle) const {
            destroy(handle);
        }
    };
    template <typename Handle, auto destroy>
    using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy<destroy>>;
    using Desc = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
    using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
    using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

    // All that a plan depends on.
    struct Alignments {
        uint32_t a, b, c;  // bytes
        auto operator<=>(const Alignments&) const = default;
    };
    struct Product {
        cudaDataType_t type, c_type;  // type: of a and b
        bool a_transposed, b_transposed;
        cublasLtEpilogue_t epilogue;
        i64 M, N, K, lda, ldb, ldc;
        Alignments aligned;
        auto operator<=>(const Product&) const = default;
    };
    struct Plan {
        Desc desc;
        Layout a, b, c;
        bool found;
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
    // The library has one attribute for a bias and for the gradient of one.
    static void set_pointers(const Desc& desc, const Epilogue& epilogue) {
        const void* vector = epilogue.row_sums ? epilogue.row_sums : epilogue.bias;
        if (vector) { set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, vector); }
        if (epilogue.gelu_input) { set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, epilogue.gelu_input); }
    }
    static std::string in_words(const Product& p) {
        const auto name = [](cudaDataType_t type) { return type == CUDA_R_32F ? "fp32" : "bf16"; };
        return format("(%lld, %lld) x (%lld, %lld), strides %lld, %lld, %lld, %s to %s", (long long)p.M, (long long)p.K, (long long)p.K,
                      (long long)p.N, (long long)p.lda, (long long)p.ldb, (long long)p.ldc, name(p.type), name(p.c_type));
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
        set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
        if (p.epilogue == CUBLASLT_EPILOGUE_DEFAULT) { return desc; }
        // The heuristic asks the epilogue's pointers for their alignment, and for nothing else.
        void* const aligned = (void*)(uintptr_t)FULL_ALIGNMENT;
        const bool gelu = p.epilogue == CUBLASLT_EPILOGUE_GELU_AUX || p.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
        set_pointers(desc, {aligned, gelu ? aligned : nullptr});
        if (gelu) { set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)p.ldc); }
        return desc;
    }
    Preference prefer(const Product& p) const {
        cublasLtMatmulPreference_t made;
        cublas_check(cublasLtMatmulPreferenceCreate(&made));
        Preference preference(made);
        set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace_);
        set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.aligned.b);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.aligned.a);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.aligned.c);
        set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.aligned.c);
        return preference;
    }
    Plan make_plan(const Product& p) const {
        Plan plan{describe(p),
                  layout(p.type, p.M, p.K, p.lda, p.a_transposed),
                  layout(p.type, p.K, p.N, p.ldb, p.b_transposed),
                  layout(p.c_type, p.M, p.N, p.ldc, false),
                  false,
                  {},
                  0};
        const Preference preference = prefer(p);
        cublasLtMatmulHeuristicResult_t best{};
        int found = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_.get(), plan.desc.get(), plan.b.get(), plan.a.get(),
                                                                     plan.c.get(), plan.c.get(), preference.get(), 1, &best, &found);
        if (status == CUBLAS_STATUS_NOT_SUPPORTED) { return plan; }
        cublas_check(status);
        plan.found = found > 0 && best.state == CUBLAS_STATUS_SUCCESS;
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

inline CublasLt& cublas_lt(Run& run) {
    if (!run.cublas_lt) { run.cublas_lt = std::make_shared<CublasLt>(); }
    return *run.cublas_lt;
}

template <typename X, typename Y>
void gemm(Y* c, i64 ldc, Matrix<X> a, Matrix<X> b, const X* bias, i64 M, i64 N, i64 K, float alpha, bool accumulate, Run& run) {
    if (M == 0 || N == 0) { return; }
    if (const Epilogue add{bias}; bias && std::is_same_v<X, Y> && K > 0 && add.aligned()) {
        if (cublas_lt(run).multiply(c, ldc, a, b, add, M, N, K, alpha, accumulate, run)) { return; }
    }
    // A bias that the library does not add is written to c first, and so are the zeros of a sum over nothing.
    if (bias || (K == 0 && !accumulate)) {
        check(!accumulate, "gemm: a bias of another type, or not aligned, cannot be added to a sum");
        fill_rows(c, ldc, bias, M, N, run);
        accumulate = true;
    }
    if (K > 0) { cublas_lt(run).multiply(c, ldc, a, b, {}, M, N, K, alpha, accumulate, run); }
}

template <typename X>
bool gemm_gelu(X* h, X* u, Matrix<X> a, Matrix<X> b, const X* bias, i64 M, i64 N, i64 K, Run& run) {
    const Epilogue gelu{bias, u};
    const bool fits = M > 0 && N > 0 && K > 0 && N % 8 == 0 && gelu.aligned();  // the library's condition on u's stride
    return fits && cublas_lt(run).multiply(h, N, a, b, gelu, M, N, K, 1.0f, false, run);
}

template <typename X, typename Y>
bool gemm_row_sums(Y* c, Y* sums, Matrix<X> a, Matrix<X> b, i64 M, i64 N, i64 K, float alpha, Run& run) {
    const Epilogue both{nullptr, nullptr, sums};
    const bool fits = M > 0 && N > 0 && K > 0 && both.aligned();
    return fits && cublas_lt(run).multiply(c, N, a, b, both, M, N, K, alpha, false, run);
}

}  // namespace gpu
