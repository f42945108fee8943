// zero.h: the optimiser's side of the ranks: sums of gradients, the global norm, AdamW, and ZeRO-1 (arXiv 1910.02054).
//
// A family's allocation is [complete | replicated | sharded] (tensors.h). It is cut into buckets:
//
//      complete, replicated | sharded: embedding | layer 0 | layer 1 | ... | what comes behind
//
// The D data-parallel ranks of one tensor-parallel rank hold the same parameters. Under ZeRO-1 each of them owns a part of every bucket: it
// holds master weights and moments for that part only, gets the sum of the gradients for it, updates it, and hands the new parameters to
// the others. A layer's sum travels while backward is in the layers below.
#pragma once

#include <deque>

#include "comm.h"
#include "tensors.h"
#include "timed_ops.h"

// One rank's gradients. What is sharded of the layers may be bf16 (--grad-dtype): one product, or one sum of columns, makes each of those
// once a micro-batch, so that is how often they are rounded. The others are sums over tokens, chunks of logits or ranks, and stay fp32.
struct Gradients {
    Range layers{};            // elements of the family's allocation
    DType dtype = DType::FP32; // theirs
    float* others = nullptr;   // the elements before and behind them; null outside training
    char* of_layers = nullptr;

    void plan(Arena& arena, const ParameterTable& table, DType of_layers_dtype) {
        layers = table.layers, dtype = of_layers_dtype, count_ = table.count();
        arena.add(&others, count_ - layers.size());
        arena.add(&of_layers, layers.size() * dtype_bytes(dtype));
    }
    bool in_layers(i64 element) const { return element >= layers.begin && element < layers.end; }
    // From an element on, as far as the type reaches; an embedding without rows ends where the layers begin.
    float* fp32(i64 element) const {
        check(element == layers.begin || !in_layers(element), "element %lld of the gradients is of a layer's sharded tensors", (long long)element);
        return others + element - (element >= layers.end ? layers.size() : 0);
    }
    Gradient at(i64 element) const {
        if (!in_layers(element)) { return fp32(element); }
        return Gradient(of_layers, dtype) + (element - layers.begin);
    }
    // The sum of squares of each range; none crosses a bound of `layers`.
    std::vector<double> squares(const std::vector<Range>& ranges, Run& run) const {
        std::vector<GradientPiece> pieces;
        for (const Range& r : ranges) { pieces.push_back({at(r.begin), r.size()}); }
        return sums_of_squares(pieces, run);
    }
    std::vector<float> to_host(Run& run) const {
        std::vector<float> values(count_);
        copy_to_host(values.data(), others, layers.begin, run);
        copy_to_host(values.data() + layers.end, others + layers.begin, count_ - layers.end, run);
        at(layers.begin).visit<bf16>([&]<typename G>(const G* from) {
            std::vector<G> own(layers.size());
            copy_to_host(own.data(), from, layers.size(), run);
            std::copy(own.begin(), own.end(), values.begin() + layers.begin);
        });
        return values;
    }

private:
    i64 count_ = 0;
};

template <typename X>
class Optimizer {
public:
    Optimizer(const ParameterTable& table, Ranks& ranks, bool zero) : table_(table), ranks_(ranks), zero_(zero) {
        cut(table);
        for (const Bucket& bucket : buckets_) {
            const Range mine = zero ? part(bucket, ranks.dp->rank) : bucket.range;
            owned_.push_back({mine, count_});
            count_ += mine.size();
        }
    }

    // Master weights are the parameters themselves where those are fp32; else the parameters and what their rounding cut off (rounding.h).
    void plan(Arena& arena) {
        arena.add(&low_, split ? count_ : 0);
        arena.add(&m_, count_);
        arena.add(&v_, count_);
    }
    void bind(X* params, const Gradients& grads) { params_ = params, grads_ = grads; }

    // A contiguous piece of the family that this rank keeps state for.
    struct Owned {
        Range range;   // of the allocation
        i64 offset;    // where its state starts in low_, m_, v_
    };
    const std::vector<Owned>& owned() const { return owned_; }
    // Calls job(owned, begin, end) for the elements [begin, end) of the allocation that are a tensor's and this rank's.
    template <typename Job>
    void for_each_owned(const Tensor& t, const Job& job) const {
        for (const Owned& o : owned_) {
            const i64 begin = std::max(o.range.begin, t.offset), end = std::min(o.range.end, t.offset + t.count());
            if (begin < end) { job(o, begin, end); }
        }
    }
    // Master weights `range` of the allocation, which lie in o: to the host, given how the parameters were rounded; and from there, where the parameters
    // themselves were made of them.
    void master_to_host(float* to, const Owned& o, Range range, Rounding rounded_by, Run& run) const {
        const i64 n = range.size();
        if constexpr (split) {
            std::vector<X> params(n);
            std::vector<uint16_t> low(n);
            copy_to_host(params.data(), params_ + range.begin, n, run);
            copy_to_host(low.data(), low_ + o.offset + (range.begin - o.range.begin), n, run);
            for (i64 i = 0; i < n; i++) { to[i] = rounded_by.master((float)params[i], low[i], range.begin + i); }
        } else {
            copy_to_host(to, params_ + range.begin, n, run);
        }
    }
    void master_from_host(const float* from, const Owned& o, Range range, Run& run) {
        if constexpr (split) {
            std::vector<uint16_t> low(range.size());
            for (i64 i = 0; i < range.size(); i++) { low[i] = lower_half(from[i]); }
            copy_to_device(low_ + o.offset + (range.begin - o.range.begin), low.data(), range.size(), run);
        }
    }
    float* m(const Owned& o) { return m_ + o.offset; }
    float* v(const Owned& o) { return v_ + o.offset; }

    // The data-parallel sum of a layer's sharded tensors, once backward has done with them: nobody touches them until it is complete.
    void start_reduce(i64 layer) { start_reduce(buckets_[first_layer_ + layer]); }

    // After the last micro-batch. What is left of the data-parallel sum; then the sum over TP ranks of what is replicated but was computed
    // from each rank's own residual stream (norms, row-parallel biases): forgetting it would let the copies drift apart.
    void reduce_gradients() {
        for (Bucket& bucket : buckets_) {
            if (!bucket.started) { start_reduce(bucket); }
        }
        for (Bucket& bucket : buckets_) { bucket.started = false; }
        wait_until_in_flight(0);
        const Range mine = owned_[0].range;
        const i64 begin = std::max(mine.begin, table_.replicated.begin), end = std::min(mine.end, table_.replicated.end);
        if (end > begin) { ranks_.tp->all_reduce(grads_.fp32(begin), end - begin, DType::FP32, Traffic::OTHER); }
    }

    // The global gradient norm: squares in double, bucket by bucket, parts in DP order, then TP ranks in order; sharded tensors from every
    // TP rank, replicated ones once. The same bits on every rank, with and without ZeRO.
    double gradient_norm(Run& run) {
        const int D = ranks_.dp->size, T = ranks_.tp->size;
        const i64 n = (i64)buckets_.size();
        std::vector<Range> ranges;  // those of rank 0, bucket by bucket, then those of rank 1, ...
        for (int d = zero_ ? ranks_.dp->rank : 0; d < (zero_ ? ranks_.dp->rank + 1 : D); d++) {
            for (const Bucket& bucket : buckets_) { ranges.push_back(part(bucket, d)); }
        }
        const std::vector<double> mine = grads_.squares(ranges, run);
        std::vector<double> squares(D * n);
        if (zero_) { ranks_.dp->share(mine.data(), squares.data(), n * (i64)sizeof(double)); }
        else { squares = mine; }
        double replicated = 0, sharded = 0;
        for (i64 b = 0; b < n; b++) {
            for (int d = 0; d < D; d++) { (b == 0 ? replicated : sharded) += squares[d * n + b]; }
        }
        std::vector<double> all(T);
        ranks_.tp->share(&sharded, all.data(), sizeof(double));
        double total = replicated;
        for (double square : all) { total += square; }
        return std::sqrt(total);
    }

    // AdamW on what this rank owns, then the new parameters to the other DP ranks.
    void update(AdamW hyper, Run& run) {
        const float decay = hyper.weight_decay;
        for (const Tensor& t : table_.tensors()) {
            hyper.weight_decay = t.spec.decay ? decay : 0.0f;
            for_each_owned(t, [&](const Owned& o, i64 begin, i64 end) {
                const i64 at = begin - o.range.begin;
                hyper.first = begin;
                adamw_update(params_ + begin, split ? low_ + o.offset + at : nullptr, m(o) + at, v(o) + at, grads_.at(begin), end - begin, hyper, run);
            });
        }
        if (zero_) { gather_parameters(); }
    }
    void gather_parameters() {
        for (const Bucket& bucket : buckets_) {
            wait_until_in_flight(Comm::MAX_IN_FLIGHT - 1);
            in_flight_.push_back(ranks_.dp->start_all_gather_ranges(params_ + bucket.range.begin, sizeof(X), parts(bucket), Traffic::DP));
        }
        wait_until_in_flight(0);
    }

private:
    struct Bucket {
        std::string name;      // of its tensors, up to their last dot: layers.3
        Range range;           // of the allocation
        bool started = false;  // the sum of its gradients
    };
    void cut(const ParameterTable& table) {
        buckets_ = {{"replicated", {0, table.sharded.begin}}};
        for (const Tensor& t : table.tensors()) {
            if (t.offset < table.sharded.begin || t.count() == 0) { continue; }
            const std::string name = t.spec.name.substr(0, t.spec.name.rfind('.'));
            if (name == "layers.0" && first_layer_ == 0) { first_layer_ = buckets_.size(); }
            if (name != buckets_.back().name) { buckets_.push_back({name, {buckets_.back().range.end, 0}}); }
            buckets_.back().range.end = round_up(t.offset + t.count(), 32);
        }
        check(buckets_.back().range.end == table.count(), "the buckets of the optimiser do not cover the parameters");
    }
    void start_reduce(Bucket& bucket) {
        const Gradient grads = grads_.at(bucket.range.begin);
        wait_until_in_flight(Comm::MAX_IN_FLIGHT - 1);
        in_flight_.push_back(zero_ ? ranks_.dp->start_reduce_scatter(grads.data, grads.dtype, parts(bucket), Traffic::DP)
                                   : ranks_.dp->start_all_reduce(grads.data, bucket.range.size(), grads.dtype, Traffic::DP));
        bucket.started = true;
    }
    // Waits for the oldest, until no more than that many are.
    void wait_until_in_flight(size_t most) {
        for (; in_flight_.size() > most; in_flight_.pop_front()) { ranks_.dp->wait(in_flight_.front()); }
    }

    // The part of a bucket that DP rank d owns under ZeRO-1, and whose squares it sums in any case.
    Range part(const Bucket& bucket, int d) const {
        const Range r = split_range(bucket.range.size(), ranks_.dp->size, d, 32);
        return {bucket.range.begin + r.begin, bucket.range.begin + r.end};
    }
    // All ranks' parts, from the bucket's first element.
    std::vector<Range> parts(const Bucket& bucket) const {
        std::vector<Range> all;
        for (int d = 0; d < ranks_.dp->size; d++) { all.push_back(split_range(bucket.range.size(), ranks_.dp->size, d, 32)); }
        return all;
    }

    const ParameterTable& table_;
    Ranks& ranks_;
    const bool zero_;
    std::vector<Bucket> buckets_;  // they cover the allocation
    size_t first_layer_ = 0;
    std::deque<Comm::Ticket> in_flight_;
    std::vector<Owned> owned_;
    i64 count_ = 0;
    X* params_ = nullptr;
    Gradients grads_;
    static constexpr bool split = dtype_of<X> != DType::FP32;
    uint16_t* low_ = nullptr;
    float *m_ = nullptr, *v_ = nullptr;
};
