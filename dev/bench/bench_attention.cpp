// bench_attention: our attention and cuDNN's, at the shapes of the presets: how fast, and how far apart.
//
//   make build/cuda/bench_attention CUDNN=1 && build/cuda/bench_attention      (without CUDNN=1: ours alone)
//   make build/simt/bench_attention && build/simt/bench_attention tiny         in the emulator: proves this program, says nothing of speed
//
// A line of JSON for each shape: milliseconds and TFLOP/s of forward and backward; for cuDNN also the largest difference of each result
// from ours, as a share of the largest value, and whether it refused. The exit code is 1 where results differ by more than rounding, or
// where cuDNN's backward does not give the same bits twice.
#include "llmc/attention_cudnn.h"
#include "llmc/ops.h"

#include <algorithm>
#include <cmath>
#include <random>

using namespace BACKEND;

namespace {

constexpr double MOST_DIFFERENCE = 0.02;  // bf16 has 8 bits; probabilities are rounded to it before they multiply

template <typename X>
struct Array {
    i64 count;
    X* data;
    explicit Array(i64 n) : count(n), data((X*)device_alloc(n * (i64)sizeof(X), "bench_attention")) {}
    Array(i64 n, uint64_t seed, Run& run) : Array(n) {
        std::mt19937 bits((uint32_t)seed);
        std::vector<X> values(n);
        for (X& value : values) { value = X((float)bits() / 2147483648.0f - 1.0f); }
        copy_to_device(data, values.data(), n, run);
    }
    Array(const Array&) = delete;
    ~Array() { device_free(data, count * (i64)sizeof(X)); }
    std::vector<X> host(Run& run) const {
        std::vector<X> values(count);
        copy_to_host(values.data(), data, count, run);
        return values;
    }
};

struct Inputs {
    Array<bf16> q, k, v, datt;
    Inputs(const AttentionShape& d, Run& run)
        : q(d.B * d.NH * d.S * d.HS, 1, run),
          k(d.B * d.KVH * d.S * d.HS, 2, run),
          v(d.B * d.KVH * d.S * d.HS, 3, run),
          datt(q.count, 4, run) {}
};

// Milliseconds of one call: the median of some.
template <typename Op>
double milliseconds(int calls, Run& run, const Op& op) {
    std::vector<double> times;
    cudaEvent_t begin, end;
    cuda_check(cudaEventCreateWithFlags(&begin, cudaEventDefault));
    cuda_check(cudaEventCreateWithFlags(&end, cudaEventDefault));
    for (int i = 0; i < calls; i++) {
        cuda_check(cudaEventRecord(begin, run.stream));
        op();
        cuda_check(cudaEventRecord(end, run.stream));
        cuda_check(cudaEventSynchronize(end));
        float time = 0;
        cuda_check(cudaEventElapsedTime(&time, begin, end));
        times.push_back(time);
    }
    cuda_check(cudaEventDestroy(begin));
    cuda_check(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

// Attention of the inputs, by whatever the run says.
struct Results {
    Array<bf16> att, dq, dk, dv;
    Array<float> lse;
    double forward_ms, backward_ms;
    bool forward_refused, backward_refused;  // a library was there, and did not do it

    Results(const Inputs& in, const AttentionShape& d, int calls, Run& run)
        : att(in.q.count), dq(in.q.count), dk(in.k.count), dv(in.k.count), lse(d.B * d.NH * d.S) {
        const auto forward = [&] {
            attention_forward(att.data, lse.data, in.q.data, in.k.data, in.v.data, 0, d.S, d.B, d.S, d.NH, d.KVH, d.HS, run);
        };
        const auto backward = [&] {
            attention_backward(dq.data, dk.data, dv.data, in.datt.data, att.data, lse.data, in.q.data, in.k.data, in.v.data, d.B, d.S, d.NH,
                               d.KVH, d.HS, run);
        };
        const auto refused = [&] { return run.attention && !run.attention->why_not().empty(); };
        forward(), forward_refused = refused();  // plans are made, memory is taken
        backward(), backward_refused = refused();
        forward_ms = milliseconds(calls, run, forward), backward_ms = milliseconds(calls, run, backward);
    }
};

// The largest difference, as a share of the largest value; NaN where there is one.
template <typename X>
double difference(const Array<X>& a, const Array<X>& b, Run& run) {
    const std::vector<X> ours = a.host(run), theirs = b.host(run);
    double most = 0, largest = 0;
    for (size_t i = 0; i < ours.size(); i++) {
        const double apart = std::fabs((double)(float)ours[i] - (double)(float)theirs[i]);
        if (!(apart <= most)) { most = apart; }
        if (std::isnan(most)) { return most; }
        largest = std::max(largest, std::fabs((double)(float)ours[i]));
    }
    return most / largest;
}
template <typename X>
bool same_bits(const Array<X>& a, const Array<X>& b, Run& run) {
    const std::vector<X> first = a.host(run), second = b.host(run);
    return memcmp(first.data(), second.data(), first.size() * sizeof(X)) == 0;
}

const char* word(bool value) { return value ? "true" : "false"; }
void print_speed(const char* whose, const AttentionShape& d, const Results& results) {
    const double flops = 2.0 * (double)(d.B * d.NH * d.HS) * (double)d.S * (double)(d.S + 1);  // of two products, causal
    printf(", \"%s\": {\"forward_ms\": %.4f, \"backward_ms\": %.4f, \"forward_tflops\": %.1f, \"backward_tflops\": %.1f}", whose,
           results.forward_ms, results.backward_ms, flops / results.forward_ms / 1e9, 2.5 * flops / results.backward_ms / 1e9);
}

bool compare(const AttentionShape& d, int calls) {
    Run run;
    const Inputs in(d, run);
    const Results ours(in, d, calls, run);
    printf("{\"B\": %lld, \"S\": %lld, \"NH\": %lld, \"KVH\": %lld, \"HS\": %lld", (long long)d.B, (long long)d.S, (long long)d.NH,
           (long long)d.KVH, (long long)d.HS);
    print_speed("ours", d, ours);
    run.attention = cudnn::attention();
    if (!run.attention) {
        printf("}\n");
        return true;
    }
    const Results theirs(in, d, calls, run);
    print_speed("cudnn", d, theirs);
    const double apart[] = {difference(ours.att, theirs.att, run), difference(ours.lse, theirs.lse, run),
                            difference(ours.dq, theirs.dq, run), difference(ours.dk, theirs.dk, run), difference(ours.dv, theirs.dv, run)};
    const Results again(in, d, 1, run);
    const bool same = same_bits(theirs.dq, again.dq, run) && same_bits(theirs.dk, again.dk, run) && same_bits(theirs.dv, again.dv, run);
    printf(
        ", \"att\": %.2e, \"lse\": %.2e, \"dq\": %.2e, \"dk\": %.2e, \"dv\": %.2e, \"same_bits\": %s, \"forward_refused\": %s, "
        "\"backward_refused\": %s}\n",
        apart[0], apart[1], apart[2], apart[3], apart[4], word(same), word(theirs.forward_refused), word(theirs.backward_refused));
    return same && std::all_of(std::begin(apart), std::end(apart), [](double share) { return share <= MOST_DIFFERENCE; });
}

}  // namespace

int main(int argc, char** argv) {
    const bool tiny = argc > 1 && std::string(argv[1]) == "tiny";
    const std::vector<AttentionShape> presets{
        {16, 1024, 16, 16, 48}, {4, 2048, 32, 8, 64}, {4, 2048, 16, 16, 128}, {1, 4096, 32, 32, 128}};
    bool good = true;
    for (const AttentionShape& shape : tiny ? std::vector<AttentionShape>{{1, 9, 2, 1, 16}} : presets) {
        good = compare(shape, tiny ? 1 : 20) && good;
        fflush(stdout);
    }
    return good ? 0 : 1;
}
