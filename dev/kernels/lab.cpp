// lab: the bench of kernel experiments. Checks each variant against the CPU loop, at sizes 1, odd, prime and past a block, then times it.
//
//   make kernels_lab
//   build/simt/lab 64 96      in the emulator: is it right? Times say nothing of a GPU
//   build/cuda/lab [N C]      on a GPU: how fast is it? (default 16384 x 2048)
//
// The yardstick is a device-to-device copy of as many bytes, in the same run. Exit code 1 if a variant is wrong.
#include "lab.h"

#include <cmath>

#include "dev/test/values.h"
#include "llmc/ops/norm.cuh"

namespace {

template <typename X>
struct DeviceArray {
    X* data = nullptr;
    explicit DeviceArray(i64 count) { cuda_check(cudaMalloc((void**)&data, count * sizeof(X))); }
    DeviceArray(const Vec<X>& values, Run& run) : DeviceArray((i64)values.size()) { copy_to_device(data, values.data(), (i64)values.size(), run); }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data); }
    Vec<X> values(i64 count, Run& run) const {
        Vec<X> host(count);
        copy_to_host(host.data(), data, count, run);
        return host;
    }
};

// The largest |got - want| over what is allowed: an fp32 sum's error and the rounding of the result. NaN counts as infinite.
template <typename X>
double worst(const Vec<X>& got, const Vec<X>& want) {
    double most = 0.0;
    for (size_t i = 0; i < want.size(); i++) {
        const double difference = std::fabs((double)(float)got[i] - (double)(float)want[i]) / (2e-6 + 2 * unit<X> * std::fabs((double)(float)want[i]));
        if (!(difference <= most)) { most = std::isnan(difference) ? INFINITY : difference; }
    }
    return most;
}

// The arrays of one size; the oracle's results, and a variant's.
template <typename X>
class Case {
public:
    Case(i64 N, i64 C, Run& run)
        : N_(N), C_(C), run_(run), a_(random_values<X>(N * C, 1)), weight_(random_values<X>(C, 3, 0.5, 1.0)), b_(random_values<X>(N * C, 2)),
          a(a_, run), b(b_, run), weight(weight_, run), x(N * C), n(N * C), rstd(N) {}

    void oracle() {
        want_x_.resize(N_ * C_), want_n_.resize(N_ * C_), want_rstd_.resize(N_);
        const Blocks<X> out{nullptr, 0, dtype_of<X>, b_.data(), C_, 0};
        cpu::residual_norm_forward(want_x_.data(), want_n_.data(), (float*)nullptr, want_rstd_.data(), a_.data(), &out, (const X*)nullptr,
                                   weight_.data(), (const X*)nullptr, {true, EPS}, N_, C_, run_);
    }
    void call(lab::ResidualNorm<X>* variant) { variant(x.data, n.data, rstd.data, a.data, b.data, weight.data, EPS, N_, C_, run_); }
    bool right() const {
        return worst(x.values(N_ * C_, run_), want_x_) <= 1 && worst(n.values(N_ * C_, run_), want_n_) <= 1 && worst(rstd.values(N_, run_), want_rstd_) <= 1;
    }
    double bytes() const { return 4.0 * (double)(N_ * C_) * sizeof(X); }
    void copy() {
        cuda_check(cudaMemcpyAsync(x.data, a.data, N_ * C_ * sizeof(X), cudaMemcpyDeviceToDevice, run_.stream));
        cuda_check(cudaMemcpyAsync(n.data, b.data, N_ * C_ * sizeof(X), cudaMemcpyDeviceToDevice, run_.stream));
    }

private:
    static constexpr float EPS = 1e-5f;
    const i64 N_, C_;
    Run& run_;
    const Vec<X> a_, weight_;
    Vec<X> b_;
    Vec<X> want_x_, want_n_;
    Vec<float> want_rstd_;
    DeviceArray<X> a, b, weight, x, n;
    DeviceArray<float> rstd;
};

// Milliseconds of a call, the median of some, by events.
template <typename Call>
double milliseconds(Run& run, const Call& call) {
    cudaEvent_t begin, end;
    cuda_check(cudaEventCreateWithFlags(&begin, cudaEventDefault));
    cuda_check(cudaEventCreateWithFlags(&end, cudaEventDefault));
    std::vector<float> times(11);
    for (float& time : times) {
        cuda_check(cudaEventRecord(begin, run.stream));
        call();
        cuda_check(cudaEventRecord(end, run.stream));
        cuda_check(cudaEventSynchronize(end));
        cuda_check(cudaEventElapsedTime(&time, begin, end));
    }
    cuda_check(cudaEventDestroy(begin));
    cuda_check(cudaEventDestroy(end));
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

// Returns how many variants are wrong.
template <typename X>
int bench(i64 N, i64 C, Run& run) {
    int wrong = 0;
    Case<X> large(N, C, run);
    const double copy = milliseconds(run, [&] { large.copy(); });
    printf("\nresidual norm, %s, %lld x %lld; a copy of as many bytes: %.4f ms, %.1f GB/s\n", dtype_name(dtype_of<X>), (long long)N, (long long)C, copy, large.bytes() / copy * 1e-6);
    printf("%-24s %-18s %10s %10s %8s\n", "variant", "check", "ms", "GB/s", "of copy");
    for (const auto& variant : lab::residual_norm_variants<X>()) {
        std::string verdict;
        for (const auto& [rows, channels] : std::initializer_list<std::pair<i64, i64>>{{1, 1}, {3, 7}, {5, 32}, {65, 33}, {129, 96}, {7, 1000}, {130, 264}}) {
            Case<X> small(rows, channels, run);
            small.oracle();
            small.call(variant.run);
            if (verdict.empty() && !small.right()) { verdict = format("WRONG at %lld x %lld", (long long)rows, (long long)channels); }
        }
        wrong += !verdict.empty();
        const double time = milliseconds(run, [&] { large.call(variant.run); });
        printf("%-24s %-18s %10.4f %10.1f %7.0f%%\n", variant.name, verdict.empty() ? "right" : verdict.c_str(), time, large.bytes() / time * 1e-6, 100 * copy / time);
    }
    return wrong;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const i64 N = argc > 1 ? atoll(argv[1]) : 16384, C = argc > 2 ? atoll(argv[2]) : 2048;
        check(N > 0 && C > 0, "usage: lab [N C], both from 1");
        Run run;
        const int wrong = bench<float>(N, C, run) + bench<bf16>(N, C, run);
        return wrong > 0;
    } catch (const std::exception& error) {
        fprintf(stderr, "lab: %s\n", error.what());
        return 1;
    }
}
