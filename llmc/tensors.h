// tensors.h: one table names everything once: a tensor's shape, how tensor parallelism splits it, how it starts, whether it
// decays, and which Hugging Face tensors it is made of. Allocation, initialisation, checkpoints, import and the optimiser
// all walk this table; nothing else knows an offset.
#pragma once

#include <map>

#include "config.h"

enum class Split {
    NONE,   // replicated on every rank
    ROWS,   // column-parallel product: output rows split evenly (heads, FFN channels)
    COLS,   // row-parallel product: input columns split evenly
    VOCAB,  // rows split by vocab_range(): the last ranks may own fewer, or none
};
enum class Init { ONE, ZERO, NORMAL, NORMAL_RESIDUAL };  // NORMAL: N(0, 0.02); NORMAL_RESIDUAL: 0.02 / sqrt(2 L)

// One Hugging Face tensor, or a band of its rows, stacked into ours: rows [0, rows) here are rows [hf_row, hf_row + rows)
// there. `transposed`: the Hugging Face tensor is [in, out] (GPT-2's Conv1D), so rows here are its columns.
struct HfPart {
    std::string name;
    i64 rows;
    i64 hf_row, hf_rows;
    bool transposed;
};

struct TensorSpec {
    std::string name;           // for example "layers.3.qkv"
    i64 cols;                   // 0: a vector of `rows` elements (1-D: norms and biases)
    std::vector<HfPart> parts;  // stacked by rows
    Split split;
    Init init;
    bool decay;
    bool complete_gradient;     // replicated, and its gradient needs no sum over TP ranks (the position embedding)
};

// A rectangle that this rank's tensor and one Hugging Face tensor have in common.
struct Slice {
    HfPart part;
    i64 local_row, rows;   // rows [local_row, local_row + rows) of the local tensor
    i64 hf_row;            // the first of them in the Hugging Face tensor's rows
    i64 hf_col, cols;      // columns [hf_col, hf_col + cols) of the unsharded tensor
    i64 hf_cols;           // all its columns
    // Where element (i, j) of the slice lies in the Hugging Face tensor as stored.
    i64 hf_index(i64 i, i64 j) const {
        return part.transposed ? (hf_col + j) * part.hf_rows + hf_row + i : (hf_row + i) * hf_cols + hf_col + j;
    }
};

// One rank's share of a tensor: rows x cols elements at `offset` of the family's allocation.
struct Tensor {
    TensorSpec spec;
    i64 rows, cols;  // local; cols 1 for a vector
    i64 offset;
    std::vector<Slice> slices;
    i64 count() const { return rows * cols; }
    bool is_vector() const { return spec.cols == 0; }
};

// Fills a rank's tensor from its Hugging Face tensors: read(slice, first, count, to) is asked for runs of consecutive
// elements [first, first + count) of slice.part, as long as the layout allows.
template <typename Read>
void fill_from_hf(const Tensor& t, float* out, const Read& read) {
    std::vector<float> tile;
    for (const Slice& s : t.slices) {
        float* rows = out + s.local_row * t.cols;
        if (s.rows * s.cols == 0) { continue; }
        if (s.part.transposed) {
            constexpr i64 TILE = 16;  // our rows are their columns: a row of the tile is a cache line of ours
            tile.resize(TILE * s.rows);
            for (i64 j0 = 0; j0 < s.cols; j0 += TILE) {
                const i64 width = std::min(TILE, s.cols - j0);
                for (i64 j = 0; j < width; j++) { read(s, s.hf_index(0, j0 + j), s.rows, tile.data() + j * s.rows); }
                for (i64 i = 0; i < s.rows; i++) {
                    for (i64 j = 0; j < width; j++) { rows[i * t.cols + j0 + j] = tile[j * s.rows + i]; }
                }
            }
        } else if (s.cols == s.hf_cols) {
            read(s, s.hf_index(0, 0), s.rows * s.cols, rows);
        } else {
            for (i64 i = 0; i < s.rows; i++) { read(s, s.hf_index(i, 0), s.cols, rows + i * t.cols); }
        }
    }
}

// One rank's parameters. Order in the allocation: [complete | replicated | sharded], so that the sum of the replicated
// gradients over TP ranks is one contiguous range, at the same place on every rank. What is sharded of the layers is contiguous too.
class ParameterTable {
public:
    ParameterTable() = default;
    ParameterTable(const ModelConfig& model, std::vector<TensorSpec> specs, int tp, int rank) {
        auto group = [](const TensorSpec& s) { return s.split != Split::NONE ? 2 : s.complete_gradient ? 0 : 1; };
        i64 ends[3] = {};
        for (int g = 0; g < 3; g++) {
            for (TensorSpec& spec : specs) {
                if (group(spec) != g) { continue; }
                const bool in_layers = g == 2 && spec.name.starts_with("layers.");
                if (in_layers && layers.size() == 0) { layers.begin = count_; }
                add(model, std::move(spec), tp, rank);
                if (in_layers) { layers.end = count_; }
            }
            ends[g] = count_;
        }
        complete = {0, ends[0]};
        replicated = {ends[0], ends[1]};
        sharded = {ends[1], ends[2]};
    }

    const std::vector<Tensor>& tensors() const { return tensors_; }
    i64 count() const { return count_; }  // elements of the allocation, a little padding included
    const Tensor& operator[](const std::string& name) const {
        const auto it = by_name_.find(name);
        check(it != by_name_.end(), "no tensor is named '%s'", name.c_str());
        return tensors_[it->second];
    }
    bool has(const std::string& name) const { return by_name_.count(name) > 0; }

    Range complete{}, replicated{}, sharded{};  // of the allocation
    Range layers{};                             // what is sharded of the layers

private:
    void add(const ModelConfig& model, TensorSpec spec, int tp, int rank) {
        Tensor t;
        t.spec = std::move(spec);
        const TensorSpec& s = t.spec;
        const i64 all_cols = s.cols == 0 ? 1 : s.cols;
        Range cols{0, all_cols};
        if (s.split == Split::COLS) {
            const i64 share = div_exact(all_cols, tp, s.name.c_str());
            cols = {rank * share, (rank + 1) * share};
        }
        t.cols = cols.size();
        t.rows = 0;
        bool too_many = all_cols < 0;
        for (const HfPart& part : t.spec.parts) {
            Range rows{0, part.rows};
            if (s.split == Split::ROWS) {
                const i64 share = div_exact(part.rows, tp, part.name.c_str());
                rows = {rank * share, (rank + 1) * share};
            } else if (s.split == Split::VOCAB) {
                rows = vocab_range(model, tp, rank);
            }
            t.slices.push_back({part, t.rows, rows.size(), part.hf_row + rows.begin, cols.begin, cols.size(), all_cols});
            too_many = too_many || part.rows < 0 || __builtin_add_overflow(t.rows, rows.size(), &t.rows);
        }
        t.offset = count_;
        i64 count = 0, bytes = 0;
        too_many = too_many || __builtin_mul_overflow(t.rows, t.cols, &count) || __builtin_add_overflow(count, 31, &count) ||
                   __builtin_add_overflow(count_, count / 32 * 32, &count_) ||  // every tensor starts on a cache line; the gap stays zero
                   __builtin_mul_overflow(count_, (i64)sizeof(float), &bytes);
        check(!too_many, "'%s' needs more bytes than 64 bits count\nHINT: lower the model's sizes", s.name.c_str());
        by_name_[s.name] = tensors_.size();
        tensors_.push_back(std::move(t));
    }

    std::vector<Tensor> tensors_;
    std::map<std::string, size_t> by_name_;
    i64 count_ = 0;
};
