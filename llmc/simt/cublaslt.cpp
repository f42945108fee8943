// cublaslt.cpp: the calls of cuBLASLt that the project uses, for the emulator. Same names, same prototypes (the toolkit's header checks
// them).
//
// It is stricter than the library. An algorithm takes all that the heuristic was promised for granted: it may be given no other product, no
// pointer less aligned than the preference said, no smaller workspace. What is wrong is an error before anything is queued, and
// cublasLtGetStatusString says what. A product that splits K, as the library does where there are few tiles, spoils its whole workspace.
//
// Environment: SIMT_EPILOGUES=none, a library that has no algorithm with an epilogue, so that what is done then is tested.
//
// Sums are made in fp32 in a fixed order (gemm_cpu.h's plain loops), another one than a GPU's.
#include "grid.h"

#ifndef LLMC_GEMM_PLAIN
#define LLMC_GEMM_PLAIN
#endif
#include <cublasLt.h>

#include <vector>

#include "../gemm.h"
#include "../gemm_cpu.h"
#include "checker.h"
#include "guarded.h"

namespace {

// ---- errors ---------------------------------------------------------------------------------------------------------
thread_local std::string reason;  // of this thread's last error

cublasStatus_t fail(cublasStatus_t status, const std::string& text) {
    reason = text;
    return status;
}
// Thrown and caught within one call.
struct Wrong {
    cublasStatus_t status;
    std::string text;
};
#define require(condition, status, ...)                                                 \
    do {                                                                                \
        if (!(condition)) { throw Wrong{CUBLAS_STATUS_##status, format(__VA_ARGS__)}; } \
    } while (0)
template <typename Body>
cublasStatus_t checked(const char* call, const Body& body) {
    try {
        body();
        return CUBLAS_STATUS_SUCCESS;
    } catch (const Wrong& wrong) { return fail(wrong.status, std::string(call) + ": " + wrong.text); }
}

// ---- descriptors ----------------------------------------------------------------------------------------------------
struct Desc {
    int32_t compute, scale;
    int32_t transposed[2] = {CUBLAS_OP_N, CUBLAS_OP_N};  // A, B
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void* bias = nullptr;  // or its gradient
    void* gelu_input = nullptr;
    int64_t ld_gelu = 0;
};
struct Layout {  // column-major
    cudaDataType_t type;
    uint64_t rows, cols;
    int64_t ld;
    bool operator==(const Layout&) const = default;
    size_t element() const { return type == CUDA_R_16BF ? 2 : 4; }
    size_t bytes() const { return ((cols - 1) * ld + rows) * element(); }
};
enum Operand { A, B, C, D };
constexpr const char* NAMES[] = {"A", "B", "C", "D"};
struct Preference {
    uint64_t workspace = 0;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t alignment[4] = {256, 256, 256, 256};
};

// What cublasLtMatmul is asked for, but for the pointers to its operands.
struct Problem {
    Desc desc;
    Layout layouts[4];
    i64 m() const { return (i64)layouts[D].rows; }
    i64 n() const { return (i64)layouts[D].cols; }
    i64 k() const { return (i64)(desc.transposed[A] == CUBLAS_OP_T ? layouts[A].rows : layouts[A].cols); }
    bool has_bias() const { return desc.epilogue == CUBLASLT_EPILOGUE_BIAS || desc.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }
    bool has_gelu() const { return desc.epilogue == CUBLASLT_EPILOGUE_GELU_AUX || desc.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS; }
    bool has_bias_gradient() const { return desc.epilogue == CUBLASLT_EPILOGUE_BGRADB; }
    size_t bias_bytes() const { return (size_t)(has_bias_gradient() ? n() : m()) * layouts[D].element(); }
    Layout gelu_layout() const { return {layouts[D].type, layouts[D].rows, layouts[D].cols, desc.ld_gelu}; }
    // Of all but addresses (FNV-1a over words).
    uint64_t fingerprint() const {
        uint64_t hash = 14695981039346656037u;
        const auto add = [&](uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
        for (int32_t value : {desc.compute, desc.scale, desc.transposed[A], desc.transposed[B], (int32_t)desc.epilogue}) {
            add((uint64_t)value);
        }
        add((uint64_t)desc.ld_gelu);
        for (const Layout& l : layouts) { add(l.type), add(l.rows), add(l.cols), add((uint64_t)l.ld); }
        return hash;
    }
};
// The heuristic's answer: the words of cublasLtMatmulAlgo_t.
struct Algo {
    uint64_t problem;  // fingerprint
    uint64_t workspace;
    uint32_t alignment[4], bias_alignment, gelu_alignment;
};
static_assert(sizeof(Algo) <= sizeof(cublasLtMatmulAlgo_t));

// ---- rules of cublasLtMatmul ----------------------------------------------------------------------------------------
void check_layout(const Layout& l, Operand which) {
    require(l.type == CUDA_R_32F || l.type == CUDA_R_16BF, NOT_SUPPORTED, "%s is of type %d", NAMES[which], (int)l.type);
    require(l.rows > 0 && l.cols > 0, INVALID_VALUE, "%s is empty: %zu x %zu", NAMES[which], (size_t)l.rows, (size_t)l.cols);
    require(l.ld >= (int64_t)l.rows, INVALID_VALUE, "%s has leading dimension %lld and %zu rows", NAMES[which], (long long)l.ld,
            (size_t)l.rows);
    require(l.rows <= INT32_MAX && l.cols <= INT32_MAX, NOT_SUPPORTED, "%s is %zu x %zu", NAMES[which], (size_t)l.rows, (size_t)l.cols);
}
void check_problem(const Problem& p) {
    const Layout &a = p.layouts[A], &b = p.layouts[B], &c = p.layouts[C], &d = p.layouts[D];
    for (Operand which : {A, B, C, D}) { check_layout(p.layouts[which], which); }
    require(p.desc.compute == CUBLAS_COMPUTE_32F && p.desc.scale == CUDA_R_32F, NOT_SUPPORTED, "compute type %d, scale type %d",
            p.desc.compute, p.desc.scale);
    require(a.type == b.type && c.type == d.type, NOT_SUPPORTED, "A and B, or C and D, are of two types");
    require(a.type == CUDA_R_16BF || d.type == CUDA_R_32F, NOT_SUPPORTED, "fp32 operands, a bf16 result");
    const auto [am, ak] = p.desc.transposed[A] == CUBLAS_OP_T ? std::pair(a.cols, a.rows) : std::pair(a.rows, a.cols);
    const auto [bk, bn] = p.desc.transposed[B] == CUBLAS_OP_T ? std::pair(b.cols, b.rows) : std::pair(b.rows, b.cols);
    require(am == d.rows && bn == d.cols && ak == bk, INVALID_VALUE, "(%zu x %zu) (%zu x %zu) is not %zu x %zu", (size_t)am, (size_t)ak,
            (size_t)bk, (size_t)bn, (size_t)d.rows, (size_t)d.cols);
    require(c == d, NOT_SUPPORTED, "C and D have different layouts");
    require(p.desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT || p.has_bias() || p.has_gelu() || p.has_bias_gradient(), NOT_SUPPORTED,
            "epilogue %u", p.desc.epilogue);
    require(!p.has_gelu() || (p.desc.ld_gelu % 8 == 0 && p.desc.ld_gelu >= p.m()), INVALID_VALUE,
            "GELU's input has leading dimension %lld, D has %zu rows: wanted a multiple of 8, no less", (long long)p.desc.ld_gelu,
            (size_t)d.rows);
}

uint32_t alignment_of(const void* p, uint32_t most) {
    const uintptr_t address = (uintptr_t)p | most;
    return (uint32_t)(address & -address);
}
void check_memory(const void* p, size_t bytes, uint32_t alignment, const char* name, cudaStream_t stream) {
    const std::string wrong = simt::wrong_memory(p, bytes, stream);
    require(p && wrong.empty(), INVALID_VALUE, "%s: %s", name, p ? wrong.c_str() : "a null pointer");
    require((uintptr_t)p % alignment == 0, INVALID_VALUE, "%s: %p is not aligned to the %u bytes that the heuristic was promised", name, p,
            alignment);
}
bool overlap(const void* p, size_t bytes, const void* q, size_t q_bytes) {
    return (const char*)p < (const char*)q + q_bytes && (const char*)q < (const char*)p + bytes;
}

void check_operands(const Problem& p, const Algo& algo, const void* a, const void* b, const void* c, const void* d, cudaStream_t stream) {
    const void* pointers[] = {a, b, c, d};
    for (Operand which : {A, B, D, C}) {
        const size_t bytes = p.layouts[which].bytes();
        check_memory(pointers[which], bytes, algo.alignment[which], NAMES[which], stream);
        require(which == C || which == D || !overlap(pointers[which], bytes, d, p.layouts[D].bytes()), INVALID_VALUE, "D overlaps %s",
                NAMES[which]);
    }
    const auto check_vector = [&](const void* vector, size_t vector_bytes, uint32_t alignment, const char* name) {
        check_memory(vector, vector_bytes, alignment, name, stream);
        require(!overlap(vector, vector_bytes, d, p.layouts[D].bytes()), INVALID_VALUE, "D overlaps %s", name);
    };
    if (p.has_bias() || p.has_bias_gradient()) {
        check_vector(p.desc.bias, p.bias_bytes(), algo.bias_alignment, p.has_bias() ? "the bias" : "the bias gradient");
    }
    if (p.has_gelu()) { check_vector(p.desc.gelu_input, p.gelu_layout().bytes(), algo.gelu_alignment, "GELU's input"); }
}
void check_workspace(const Problem& p, const Algo& algo, const void* workspace, size_t bytes, const void* d, cudaStream_t stream) {
    require(bytes >= algo.workspace, INVALID_VALUE, "a workspace of %zu bytes, where the algorithm needs %zu", bytes,
            (size_t)algo.workspace);
    if (algo.workspace == 0) { return; }
    check_memory(workspace, bytes, 256, "the workspace", stream);
    require(!overlap(workspace, bytes, d, p.layouts[D].bytes()), INVALID_VALUE, "D overlaps the workspace");
}

// ---- the heuristic --------------------------------------------------------------------------------------------------
// Few tiles and a long sum: K is split, if there is room for partial sums of the compute type.
size_t wanted_workspace(const Problem& p, const Preference& preference) {
    constexpr size_t PARTS = 4;
    const size_t bytes = PARTS * (size_t)p.m() * (size_t)p.n() * sizeof(float);
    const bool split = p.k() >= 64 && p.m() * p.n() <= 128 * 128 && (preference.schemes & CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    return split && bytes <= preference.workspace ? bytes : 0;
}
Algo choose(const Problem& p, const Preference& preference) {
    check_problem(p);
    const char* epilogues = getenv("SIMT_EPILOGUES");
    require(p.desc.epilogue == CUBLASLT_EPILOGUE_DEFAULT || !epilogues || strcmp(epilogues, "none") != 0, NOT_SUPPORTED,
            "epilogues, as SIMT_EPILOGUES says");
    // The project's own rule: sums are rounded once.
    require(!(preference.schemes & (CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE)) ||
                p.layouts[D].type == CUDA_R_32F,
            NOT_SUPPORTED, "reduction schemes 0x%x round partial sums to bf16", preference.schemes);
    Algo algo{p.fingerprint(), wanted_workspace(p, preference), {}, 0, 0};
    for (Operand which : {A, B, C, D}) {
        const uint32_t promised = preference.alignment[which];
        require(std::has_single_bit(promised) && promised % p.layouts[which].element() == 0, INVALID_VALUE,
                "the preference promises that %s is aligned to %u bytes", NAMES[which], promised);
        algo.alignment[which] = promised;
    }
    // Of epilogues' pointers the heuristic takes the alignment from the pointer itself.
    algo.bias_alignment = alignment_of(p.desc.bias, 256);
    algo.gelu_alignment = alignment_of(p.desc.gelu_input, 256);
    return algo;
}

// ---- the product ----------------------------------------------------------------------------------------------------
float gelu(float x) {
    return 0.5f * x * (1.0f + std::tanh(0.7978845608f * x * (1.0f + 0.044715f * x * x)));
}  // the tanh form, as the library's

template <typename X, typename Y>
void multiply(const Problem& p, float alpha, const X* a, const X* b, float beta, const Y* c, Y* d) {
    const i64 m = p.m(), n = p.n(), ld = p.layouts[D].ld;
    // A column-major product is the row-major one of the transposes: d^T (n, m) = b^T (n, k) a^T (k, m).
    const Matrix<X> left{b, p.layouts[B].ld, p.desc.transposed[B] == CUBLAS_OP_T};
    const Matrix<X> right{a, p.layouts[A].ld, p.desc.transposed[A] == CUBLAS_OP_T};
    std::vector<float> sums(n * m);
    cpu::plain_block(cpu::Block<X, float>{sums.data(), m, left, right, nullptr, n, m, p.k(), alpha, false});
    const Y* bias = p.has_bias() ? (const Y*)p.desc.bias : nullptr;
    Y* gelu_input = p.has_gelu() ? (Y*)p.desc.gelu_input : nullptr;
    for (i64 j = 0; j < n; j++) {
        for (i64 i = 0; i < m; i++) {
            float value = sums[j * m + i];
            if (beta != 0.0f) { value += beta * (float)c[j * ld + i]; }
            if (bias) { value += (float)bias[i]; }
            if (gelu_input) {
                gelu_input[j * p.desc.ld_gelu + i] = Y(value);
                value = gelu(value);
            }
            d[j * ld + i] = Y(value);
        }
    }
    for (i64 j = 0; j < n && p.has_bias_gradient(); j++) {
        float sum = 0.0f;
        for (i64 l = 0; l < p.k(); l++) { sum += (float)left.data[left.transposed ? l * left.ld + j : j * left.ld + l]; }
        ((Y*)p.desc.bias)[j] = Y(sum);
    }
}
void multiply(const Problem& p, float alpha, const void* a, const void* b, float beta, const void* c, void* d) {
    if (p.layouts[A].type == CUDA_R_32F) {
        multiply(p, alpha, (const float*)a, (const float*)b, beta, (const float*)c, (float*)d);
    } else if (p.layouts[D].type == CUDA_R_32F) {
        multiply(p, alpha, (const bf16*)a, (const bf16*)b, beta, (const float*)c, (float*)d);
    } else {
        multiply(p, alpha, (const bf16*)a, (const bf16*)b, beta, (const bf16*)c, (bf16*)d);
    }
}

// For the checker: bytes that the product reads and writes, a matrix column by column.
void note_matrix(const Layout& l, const void* p, void (*note)(const void*, size_t, const char*)) {
    for (uint64_t column = 0; column < l.cols; column++) {
        note((const char*)p + column * l.ld * l.element(), l.rows * l.element(), "cublasLtMatmul");
    }
}
void note_written(const void* p, size_t bytes, const char* who) { simt::note_write((void*)p, bytes, who); }

void run(const Problem& p, const Algo& algo, float alpha, const void* a, const void* b, float beta, const void* c, void* d,
         void* workspace) {
    note_matrix(p.layouts[A], a, simt::note_read);
    note_matrix(p.layouts[B], b, simt::note_read);
    if (beta != 0.0f) { note_matrix(p.layouts[C], c, simt::note_read); }
    if (p.has_bias()) { simt::note_read(p.desc.bias, p.bias_bytes(), "cublasLtMatmul"); }
    if (algo.workspace > 0) {
        memset(workspace, simt::POISON, algo.workspace);
        simt::note_write(workspace, algo.workspace, "cublasLtMatmul");
    }
    multiply(p, alpha, a, b, beta, c, d);
    note_matrix(p.layouts[D], d, note_written);
    if (p.has_gelu()) { note_matrix(p.gelu_layout(), p.desc.gelu_input, note_written); }
    if (p.has_bias_gradient()) { simt::note_write(p.desc.bias, p.bias_bytes(), "cublasLtMatmul"); }
}

template <typename T>
void read_value(T& to, const void* value, size_t bytes, int attribute) {
    require(bytes == sizeof(T), INVALID_VALUE, "attribute %d has %zu bytes, not %zu", attribute, sizeof(T), bytes);
    memcpy(&to, value, sizeof(T));
}

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = (cublasLtHandle_t) new char;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete (char*)handle;
    return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
const char* cublasLtGetStatusString(cublasStatus_t status) {
    static thread_local std::string text;
    text = format("status %d: %s", (int)status, reason.c_str());
    return text.c_str();
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t scale) {
    *desc = (cublasLtMatmulDesc_t) new Desc{compute, scale};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    delete (Desc*)desc;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
    return checked(__func__, [&] {
        Desc& desc = *(Desc*)handle;
        switch (attribute) {
            case CUBLASLT_MATMUL_DESC_TRANSA:
                return read_value(desc.transposed[A], value, bytes, attribute);
            case CUBLASLT_MATMUL_DESC_TRANSB:
                return read_value(desc.transposed[B], value, bytes, attribute);
            case CUBLASLT_MATMUL_DESC_EPILOGUE:
                return read_value(desc.epilogue, value, bytes, attribute);
            case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
                return read_value(desc.bias, value, bytes, attribute);
            case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
                return read_value(desc.gelu_input, value, bytes, attribute);
            case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
                return read_value(desc.ld_gelu, value, bytes, attribute);
            default:
                require(false, NOT_SUPPORTED, "attribute %d is not emulated", (int)attribute);
        }
    });
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type, uint64_t rows, uint64_t cols, int64_t ld) {
    *layout = (cublasLtMatrixLayout_t) new Layout{type, rows, cols, ld};
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete (Layout*)layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    *preference = (cublasLtMatmulPreference_t) new Preference;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete (Preference*)preference;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle, cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
    return checked(__func__, [&] {
        Preference& p = *(Preference*)handle;
        switch (attribute) {
            case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
                return read_value(p.workspace, value, bytes, attribute);
            case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
                return read_value(p.schemes, value, bytes, attribute);
            case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
                return read_value(p.alignment[A], value, bytes, attribute);
            case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
                return read_value(p.alignment[B], value, bytes, attribute);
            case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
                return read_value(p.alignment[C], value, bytes, attribute);
            case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
                return read_value(p.alignment[D], value, bytes, attribute);
            default:
                require(false, NOT_SUPPORTED, "attribute %d is not emulated", (int)attribute);
        }
    });
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t* results,
                                              int* found) {
    return checked(__func__, [&] {
        require(wanted > 0, INVALID_VALUE, "%d algorithms are asked for", wanted);
        const Problem problem{*(const Desc*)desc, {*(const Layout*)a, *(const Layout*)b, *(const Layout*)c, *(const Layout*)d}};
        const Algo algo = choose(problem, *(const Preference*)preference);
        results[0] = {};
        memcpy(&results[0].algo, &algo, sizeof(algo));
        results[0].workspaceSize = algo.workspace;
        results[0].state = CUBLAS_STATUS_SUCCESS;
        *found = 1;
    });
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* chosen, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
    return checked(__func__, [&] {
        const Problem p{*(const Desc*)desc,
                        {*(const Layout*)a_layout, *(const Layout*)b_layout, *(const Layout*)c_layout, *(const Layout*)d_layout}};
        require(chosen, NOT_SUPPORTED, "no algorithm: the emulator wants the heuristic's");
        Algo algo;
        memcpy(&algo, chosen, sizeof(algo));
        check_problem(p);
        require(algo.problem == p.fingerprint(), INVALID_VALUE, "the algorithm was chosen for another product");
        const float scale = *(const float*)alpha, add = *(const float*)beta;
        check_operands(p, algo, a, b, add != 0.0f ? c : d, d, stream);
        check_workspace(p, algo, workspace, workspace_bytes, d, stream);
        const cudaError_t error = simt::queue(stream, [=] {
            run(p, algo, scale, a, b, add, c, d, workspace);
            return std::string();
        });
        require(error == cudaSuccess, EXECUTION_FAILED, "%s", cudaGetErrorString(error));
    });
}

}  // extern "C"
