// checkpoint_load.h: reads a checkpoint into whatever ranks there are now. A file is believed once its size and checksum agree
// with checkpoint.json, which carries its own.
#pragma once

#include <future>
#include <mutex>

#include "checkpoint.h"
#include "comm.h"

class Checkpoint {
public:
    explicit Checkpoint(const std::string& dir) : dir_(without_slash(dir)), path_(dir_ + "/checkpoint.json") {
        check(is_directory(dir_), "'%s' is not a checkpoint: there is no such directory", dir_.c_str());
        const i64 named = step_ = step_of_name(std::filesystem::path(dir_).filename().string());
        if (!path_exists(path_)) { damaged("checkpoint file '%s' is missing", path_.c_str()); }
        try {
            manifest_ = read_json(path_);
        } catch (const Error& e) { damaged("%s", e.what()); }
        step_ = json_get<i64>(manifest_, "step", path_);
        const i64 version = json_get<i64>(manifest_, "version", path_);
        check(version == 1, "'%s' has version %lld, wanted 1", path_.c_str(), (long long)version);
        const std::string wanted = json_get<std::string>(manifest_, "xxh3", path_);
        json body = manifest_;
        body.erase("xxh3");
        const std::string canonical = body.dump();
        if (hash_text(XXH3_64bits(canonical.data(), canonical.size())) != wanted) {
            damaged("checkpoint file '%s': checksum does not match: the file is damaged", path_.c_str());
        }
        check(named < 0 || named == step_, "'%s' is named for step %lld and holds step %lld", dir_.c_str(), (long long)named,
              (long long)step_);
        tp_ = (int)json_get<i64>(manifest_, "tp", path_);
        model_ = model_from_json(meta().value("model", json()), path_);
        pieces_.resize(tp_);
        for (const json& file : manifest_.at("files")) { add_file(file); }
        for (auto& pieces : pieces_) {
            std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.range.begin < b.range.begin; });
        }
    }

    const std::string& dir() const { return dir_; }
    const json& meta() const { return manifest_.at("meta"); }
    i64 step() const { return step_; }
    int tp() const { return tp_; }
    const ModelConfig& model() const { return model_; }

    // From here on a file is read while its checksum is computed beside it; confirm() then waits for all of them, and must be called before
    // anything is believed.
    void believe_later() { believe_later_ = true; }
    void confirm() {
        for (StateFile& file : files_) {
            if (file.verified.valid()) { file.verified.get(); }
        }
    }

    // out[0, range.size()) = those elements of the state that `table` lays out for rank `rank` of `tp`. At another T than the
    // checkpoint's, elements are moved to their new places: meaningful only where T is no part of the model. Safe from several threads.
    void read(StateArray array, const ParameterTable& table, int tp, int rank, Range range, float* out) {
        if (tp == tp_) {
            const i64 have = pieces_[rank].empty() ? 0 : pieces_[rank].back().range.end;
            check(have == table.count(), "'%s' has %lld elements on rank %d, the model wants %lld", dir_.c_str(), (long long)have, rank,
                  (long long)table.count());
            read_elements(array, rank, range, out);
            return;
        }
        std::fill_n(out, range.size(), 0.0f);  // the gaps between tensors
        for (const Tensor& t : table.tensors()) {
            if (t.offset < range.end && range.begin < t.offset + t.count()) { read_tensor(array, table, t, range, out); }
        }
    }

private:
    struct StateFile {
        std::string path, hash;
        i64 bytes;
        std::unique_ptr<File> open;
        std::shared_future<void> verified;
    };
    struct Piece {  // consecutive elements in one file
        Range range;
        size_t file;
        i64 offset;  // of the master's first element; m and v follow
    };

    [[noreturn]] __attribute__((format(printf, 2, 3))) void damaged(const char* fmt, ...) const {
        va_list args;
        va_start(args, fmt);
        const std::string text = vformat(fmt, args);
        va_end(args);
        const std::string parent = std::filesystem::absolute(dir_).parent_path().string();
        std::map<i64, std::string> others = list_checkpoints(parent);
        std::erase_if(others, [&](const auto& each) { return each.first >= step_ || !path_exists(each.second + "/checkpoint.json"); });
        die("%s\nHINT: %s", text.c_str(),
            others.empty() ? "copy it again; no older checkpoint is beside it"
                           : format("move '%s' away to go back to '%s'", dir_.c_str(), others.rbegin()->second.c_str()).c_str());
    }

    // Notes what a file should hold. Size is checked at once, for all ranks' files; the checksum only by who reads it.
    void add_file(const json& file) {
        StateFile f;
        f.path = dir_ + "/" + json_get<std::string>(file, "name", path_);
        f.hash = json_get<std::string>(file, "xxh3", path_);
        f.bytes = json_get<i64>(file, "bytes", path_);
        const i64 tp = json_get<i64>(file, "tp", path_);
        check(tp >= 0 && tp < tp_, "'%s': '%s' is of rank %lld of %d", path_.c_str(), f.path.c_str(), (long long)tp, tp_);
        std::error_code ec;
        const i64 found = (i64)std::filesystem::file_size(f.path, ec);
        if (ec) { damaged("checkpoint file '%s' cannot be read: %s", f.path.c_str(), ec.message().c_str()); }
        if (found != f.bytes) {
            damaged("checkpoint file '%s' is %lld byte%s %s: it has %lld, wanted %lld", f.path.c_str(),
                    (long long)std::abs(found - f.bytes), std::abs(found - f.bytes) == 1 ? "" : "s", found < f.bytes ? "short" : "too long",
                    (long long)found, (long long)f.bytes);
        }
        i64 elements = 0;
        for (const json& range : file.at("ranges")) { elements += range.at(1).get<i64>() - range.at(0).get<i64>(); }
        i64 offset = f.bytes - elements * STATE_ARRAYS * (i64)sizeof(float);
        for (const json& range : file.at("ranges")) {
            const Range r{range.at(0), range.at(1)};
            pieces_[tp].push_back({r, files_.size(), offset});
            offset += r.size() * STATE_ARRAYS * (i64)sizeof(float);
        }
        files_.push_back(std::move(f));
    }

    // A file to read from: its checksum was compared before its first element is believed.
    const File& open(size_t index) {
        std::lock_guard<std::mutex> lock(mutex_);
        StateFile& f = files_[index];
        if (!f.open) {
            f.open = std::make_unique<File>(f.path, "rb");
            f.verified = std::async(std::launch::async, [this, &f] { verify(f); });
        }
        if (!believe_later_) { f.verified.get(); }
        return *f.open;
    }
    void verify(const StateFile& f) const {
        Hasher hasher;
        std::vector<char> chunk(std::min<i64>(f.bytes, 1 << 20));  // stays in cache between the copy and the sum
        for (i64 at = 0; at < f.bytes; at += (i64)chunk.size()) {
            const i64 n = std::min<i64>((i64)chunk.size(), f.bytes - at);
            f.open->read_at(chunk.data(), n, at);
            hasher.add(chunk.data(), n);
        }
        if (hasher.text() != f.hash) {
            const i64 step = step_in_header(*f.open, f.bytes);
            if (step >= 0 && step != step_) {
                damaged("checkpoint file '%s' is from step %lld, its checkpoint.json from step %lld", f.path.c_str(), (long long)step,
                        (long long)step_);
            }
            damaged("checkpoint file '%s': checksum does not match: the file is damaged", f.path.c_str());
        }
    }
    // Only to explain a wrong file; -1 where it cannot.
    static i64 step_in_header(const File& file, i64 bytes) {
        try {
            char magic[8];
            uint64_t length;
            file.read_at(magic, 8, 0);
            file.read_at(&length, 8, 8);
            if (memcmp(magic, STATE_MAGIC, 8) != 0 || length > (uint64_t)bytes - 16) { return -1; }
            std::string header(length, '\0');
            file.read_at(header.data(), length, 16);
            return json_get<i64>(parse_json(header, file.path()), "step", file.path());
        } catch (const Error&) { return -1; }
    }

    // By flat position in the state of the checkpoint's own rank.
    void read_elements(StateArray array, int rank, Range range, float* out) {
        const std::vector<Piece>& pieces = pieces_[rank];
        auto piece = std::upper_bound(pieces.begin(), pieces.end(), range.begin, [](i64 at, const Piece& p) { return at < p.range.end; });
        for (i64 at = range.begin; at < range.end; ++piece) {
            check(piece != pieces.end() && piece->range.begin <= at, "'%s' does not hold element %lld of rank %d", dir_.c_str(),
                  (long long)at, rank);
            const i64 n = std::min(piece->range.end, range.end) - at;
            const i64 index = (i64)array * piece->range.size() + at - piece->range.begin;
            open(piece->file).read_at(out + (at - range.begin), n * sizeof(float), piece->offset + index * (i64)sizeof(float));
            at += n;
        }
    }

    // The part of tensor t that is in `range`, from the ranks that the checkpoint has: the rectangles that a slice of theirs
    // and a slice of ours have in common.
    void read_tensor(StateArray array, const ParameterTable& table, const Tensor& t, Range range, float* out) {
        if (std::lock_guard<std::mutex> lock(mutex_); old_tables_.empty()) {
            std::vector<TensorSpec> specs;
            for (const Tensor& each : table.tensors()) { specs.push_back(each.spec); }
            for (int r = 0; r < tp_; r++) { old_tables_.emplace_back(model_, specs, tp_, r); }
        }
        const int owners = t.spec.split == Split::NONE ? 1 : tp_;  // replicated: all have the same
        for (int r = 0; r < owners; r++) {
            const Tensor& old = old_tables_[r][t.spec.name];
            for (size_t i = 0; i < t.slices.size(); i++) {
                const Slice &a = t.slices[i], &b = old.slices[i];
                const i64 row0 = std::max(a.hf_row, b.hf_row), row1 = std::min(a.hf_row + a.rows, b.hf_row + b.rows);
                const i64 col0 = std::max(a.hf_col, b.hf_col), col1 = std::min(a.hf_col + a.cols, b.hf_col + b.cols);
                const bool whole_rows = col1 - col0 == t.cols && col1 - col0 == old.cols;  // then they lie one after the other in both
                const i64 rows = whole_rows ? std::max<i64>(row1 - row0, 0) : 1;
                for (i64 row = row0; row < row1 && col0 < col1; row += rows) {
                    const i64 to = t.offset + (a.local_row + row - a.hf_row) * t.cols + col0 - a.hf_col;
                    const i64 from = old.offset + (b.local_row + row - b.hf_row) * old.cols + col0 - b.hf_col;
                    const i64 begin = std::max(to, range.begin), end = std::min(to + rows * (col1 - col0), range.end);
                    if (begin < end) { read_elements(array, r, {from + begin - to, from + end - to}, out + (begin - range.begin)); }
                }
            }
        }
    }

    std::string dir_, path_;
    json manifest_;
    i64 step_ = -1;
    int tp_ = 0;
    ModelConfig model_;
    std::vector<std::vector<Piece>> pieces_;  // by rank, in order
    std::vector<ParameterTable> old_tables_;
    std::mutex mutex_;  // of old_tables_, and of what is open
    bool believe_later_ = false;
    std::vector<StateFile> files_;  // the last: threads that verify end with it
};

// Elements that are read at a time: they stay in cache on their way.
constexpr i64 LOAD_PIECE = 1 << 17;

// Fills this rank's moments.
inline void load_moments(Checkpoint& checkpoint, const ParameterTable& table, const Comm& tp, const std::vector<StateView>& mine, Run& run) {
    for (const StateView& view : mine) {
        for (const auto& [array, to] : {std::pair{StateArray::M, view.m}, {StateArray::V, view.v}}) {
            run.parallel(ceil_div(view.range.size(), LOAD_PIECE), [&, array = array, to = to](i64 item) {
                static thread_local std::vector<float> piece(LOAD_PIECE);
                const i64 begin = view.range.begin + item * LOAD_PIECE, n = std::min(LOAD_PIECE, view.range.end - begin);
                checkpoint.read(array, table, tp.size, tp.rank, {begin, begin + n}, piece.data());
                copy_to_device(to + item * LOAD_PIECE, piece.data(), n, run);
            });
        }
    }
}
