// weights.h: where a model's weights come from (drawn by init.h, imported by huggingface.h, or saved) and how they get to the device.
#pragma once

#include "checkpoint_load.h"
#include "flags.h"
#include "huggingface.h"
#include "init.h"
#include "rounding.h"
#include "tp.h"

// Of this rank's share of a tensor the fp32 values of elements [begin, end). All of them at once, unless it says `in_pieces`.
struct TensorSource {
    std::function<void(const Tensor&, Range, float* values)> read;
    bool in_pieces = false;
};

// New ones: drawn, or imported. --private-scale init puts the factor sqrt(T) into the private rows of the row-parallel weights here, once, instead of into
// every pass.
inline TensorSource new_weights(const Options& o, const TensorParallel& tp, const HfWeights* imported) {
    return {[&o, &tp, imported](const Tensor& t, Range, float* values) {
        if (imported) { imported->read(t, values); }
        else { init_tensor(t, o.shape, o.seed, values); }
        if (o.private_scale == "init" && t.spec.split == Split::COLS) {
            const float scale = (float)std::sqrt((double)tp.comm.size);
            for (i64 i = tp.Ck * t.cols; i < t.count(); i++) { values[i] *= scale; }
        }
    }};
}
inline TensorSource saved_weights(Checkpoint& checkpoint, const ParameterTable& table, const Comm& tp) {
    return {[&checkpoint, &table, &tp](const Tensor& t, Range part, float* values) {
        checkpoint.read(StateArray::MASTER, table, tp.size, tp.rank, {t.offset + part.begin, t.offset + part.end}, values);
    }, true};
}

// Fills the parameters; also(tensor, part, values) sees what they were rounded from.
template <typename X>
void load_parameters(X* params, const ParameterTable& table, const TensorSource& source, Rounding rounding,
                     const std::function<void(const Tensor&, Range, const float* values)>& also, Run& run) {
    static thread_local std::vector<float> values;
    static thread_local std::vector<X> rounded;
    for (const Tensor& t : table.tensors()) {
        const i64 piece = source.in_pieces ? LOAD_PIECE : std::max<i64>(t.count(), 1);
        run.parallel(ceil_div(t.count(), piece), [&](i64 item) {
            const Range part{item * piece, std::min(t.count(), (item + 1) * piece)};
            const i64 first = t.offset + part.begin;
            values.resize(part.size());
            source.read(t, part, values.data());
            if constexpr (std::is_same_v<X, float>) { copy_to_device(params + first, values.data(), part.size(), run); }
            else {
                rounded.resize(part.size());
                for (i64 i = 0; i < part.size(); i++) { rounded[i] = (X)rounding(values[i], first + i); }
                copy_to_device(params + first, rounded.data(), part.size(), run);
            }
            also(t, part, values.data());
        });
    }
    values = std::vector<float>(), rounded = std::vector<X>();  // = {} would keep their memory
}
