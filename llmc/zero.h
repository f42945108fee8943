// zero.h: the optimiser's side of the ranks: sums of gradients, the global norm, AdamW, and ZeRO-1 (arXiv 1910.02054).
//
// A family's allocation is [complete | replicated | sharded] (tensors.h). The D data-parallel ranks of one tensor-parallel
// rank hold the same parameters. Under ZeRO-1 each of them owns a part of both segments, [complete | replicated] and
// [sharded]: it holds master weights and moments for that part only, gets the sum of the gradients for it, updates it, and
// hands the new parameters to the others.
#pragma once

#include "comm.h"
#include "ops.h"
#include "tensors.h"

template <typename X>
class Optimizer {
public:
    Optimizer(const ParameterTable& table, Ranks& ranks, bool zero) : table_(table), ranks_(ranks), zero_(zero) {
        for (const Range& segment : segments()) {
            const Range mine = zero ? part(segment, ranks.dp->rank) : segment;
            owned_.push_back({mine, count_});
            count_ += mine.size();
        }
    }

    // Master weights live in the parameters themselves where those are fp32.
    void plan(Arena& arena) {
        constexpr bool own_master = dtype_of<X> != DType::FP32;
        arena.add(&master_, own_master ? count_ : 0);
        arena.add(&m_, count_);
        arena.add(&v_, count_);
    }
    void bind(X* params, float* grads) { params_ = params, grads_ = grads; }

    // A contiguous piece of the family that this rank keeps state for.
    struct Owned {
        Range range;   // of the allocation
        i64 offset;    // where its state starts in master_, m_, v_
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
    float* master(const Owned& o) {
        if constexpr (dtype_of<X> == DType::FP32) { return params_ + o.range.begin; }
        else { return master_ + o.offset; }
    }
    float* m(const Owned& o) { return m_ + o.offset; }
    float* v(const Owned& o) { return v_ + o.offset; }

    // After the last micro-batch. Data-parallel sum; then the sum over TP ranks of what is replicated but was computed from
    // each rank's own residual stream (norms, row-parallel biases): forgetting it would let the copies drift apart.
    void reduce_gradients() {
        for (const Range& segment : segments()) {
            if (zero_) { ranks_.dp->reduce_scatter(grads_, parts(segment), Traffic::DP); }
            else { ranks_.dp->all_reduce(grads_ + segment.begin, segment.size(), DType::FP32, Traffic::DP); }
        }
        const Range mine = owned_[0].range;
        const i64 begin = std::max(mine.begin, table_.replicated.begin), end = std::min(mine.end, table_.replicated.end);
        if (end > begin) { ranks_.tp->all_reduce(grads_ + begin, end - begin, DType::FP32, Traffic::OTHER); }
    }

    // The global gradient norm: squares in double, parts in DP order, then TP ranks in order; sharded tensors from every TP
    // rank, replicated ones once. The same bits on every rank, with and without ZeRO.
    double gradient_norm(Run& run) {
        const int D = ranks_.dp->size, T = ranks_.tp->size;
        std::vector<double> squares(2 * D);
        for (int s = 0; s < 2; s++) {
            for (int d = 0; d < D; d++) {
                if (zero_ && d != ranks_.dp->rank) { continue; }
                const Range range = part(segments()[s], d);
                squares[2 * d + s] = sum_of_squares(grads_ + range.begin, range.size(), run);
            }
        }
        if (zero_) {
            const double mine[2] = {squares[2 * ranks_.dp->rank], squares[2 * ranks_.dp->rank + 1]};
            ranks_.dp->share(mine, squares.data(), sizeof(mine));
        }
        double replicated = 0, sharded = 0;
        for (int d = 0; d < D; d++) { replicated += squares[2 * d], sharded += squares[2 * d + 1]; }
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
                adamw_update(params_ + begin, master(o) + at, m(o) + at, v(o) + at, grads_ + begin, end - begin, hyper, run);
            });
        }
        if (zero_) { gather_parameters(); }
    }
    void gather_parameters() {
        for (const Range& segment : segments()) { ranks_.dp->all_gather_ranges(params_, sizeof(X), parts(segment), Traffic::DP); }
    }

private:
    // The part of a segment that DP rank d owns under ZeRO-1, and whose squares it sums in any case.
    Range part(const Range& segment, int d) const {
        const Range r = split_range(segment.size(), ranks_.dp->size, d, 32);
        return {segment.begin + r.begin, segment.begin + r.end};
    }
    std::vector<Range> segments() const { return {{0, table_.sharded.begin}, table_.sharded}; }
    std::vector<Range> parts(const Range& segment) const {
        std::vector<Range> all;
        for (int d = 0; d < ranks_.dp->size; d++) { all.push_back(part(segment, d)); }
        return all;
    }

    const ParameterTable& table_;
    Ranks& ranks_;
    const bool zero_;
    std::vector<Owned> owned_;
    i64 count_ = 0;
    X* params_ = nullptr;
    float *grads_ = nullptr, *master_ = nullptr, *m_ = nullptr, *v_ = nullptr;
};
