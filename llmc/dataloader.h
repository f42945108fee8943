// dataloader.h: windows of S+1 tokens out of shards, in an order that depends on the data, the seed and the position only: not on ranks,
// micro-batches or interruptions. Nothing is scanned and no index is kept: an epoch's order is a permutation that is computed.
#pragma once

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "llmc/data_spec.h"
#include "llmc/megatron.h"

// ---------------------------------------------------------------------------------------------------------------
// The order of an epoch

// SplitMix64's finalizer: a bijection of 64-bit words that spreads every bit.
inline uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// A permutation of [0, n) in three words: a Feistel network is a bijection of [0, 4^half_bits), whatever its round function; where it leads
// outside [0, n) it is applied again (cycle walking), which stays a bijection and takes fewer than 4 turns on average.
class Permutation {
public:
    Permutation(i64 n, uint64_t key) : n_(n), key_(key) {
        while ((i64)1 << (2 * half_bits_) < n) { half_bits_++; }
    }
    i64 operator()(i64 i) const {
        do { i = feistel(i); } while (i >= n_);
        return i;
    }

private:
    static constexpr int ROUNDS = 6;

    i64 feistel(i64 x) const {
        const uint64_t mask = ((uint64_t)1 << half_bits_) - 1;
        uint64_t left = (uint64_t)x >> half_bits_, right = x & mask;
        for (int round = 0; round < ROUNDS; round++) {
            const uint64_t next = left ^ (mix64(mix64(key_ + round) ^ right) & mask);
            left = right;
            right = next;
        }
        return (i64)(left << half_bits_ | right);
    }

    i64 n_;
    uint64_t key_;
    int half_bits_ = 1;
};

// ---------------------------------------------------------------------------------------------------------------
// One source: the files of one glob, and their windows

// The tokens [first_token, first_token + tokens) of a file: all, or those of some of a Megatron set's documents.
struct SourceFile {
    std::shared_ptr<const TokenFile> file;
    Range documents;  // of a Megatron set
    i64 first_token, tokens, windows, stride;
};

struct DataSource {
    std::string glob;
    double weight;  // of all sources, adds to 1
    std::vector<SourceFile> files;
    std::vector<i64> first_window;  // of each file; one more entry: all windows
    i64 tokens = 0, left_over = 0;  // left_over: tokens that are in no window
    std::optional<TokenSetInfo> info;
    double text_bytes_per_token = 0;             // 0: not known
    std::shared_ptr<const MegatronOrder> order;  // its own order instead of windows; they are samples then

    i64 windows() const { return order ? order->samples() : first_window.back(); }
    // In Megatron's order an epoch need not end with a window.
    double windows_per_epoch(i64 S) const { return order ? (double)order->tokens_per_epoch() / (double)S : (double)windows(); }
    // "llm.c shard of uint16": each kind of file that is there, once.
    std::string kinds() const {
        std::vector<std::string> seen;
        for (const SourceFile& f : files) {
            const TokenFileKind kind = f.file->kind();
            const char* name = kind == TokenFileKind::llmc     ? "llm.c shard"
                               : kind == TokenFileKind::packed ? "lit-gpt packed shard"
                                                               : "Megatron set";
            seen.push_back(format("%s of %s", name, id_type_name(f.file->id_type())));
        }
        std::sort(seen.begin(), seen.end());
        seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
        std::string text;
        for (const std::string& kind : seen) { text += (text.empty() ? "" : " and ") + kind; }
        return text;
    }
};

// Megatron's split of its sets by documents, such as "969,30,1", and which part of it is meant: 0 training, 1 validation.
struct DocumentSplit {
    std::string text = {};  // empty: all documents
    int part = 0;
    bool names_documents() const { return !text.empty() && megatron_split(text, part, (i64)1 << 40).size() > 0; }
};

// A pattern such as x_*.bin takes x_val_000000.bin along with x_000000.bin: training on the validation set, unseen.
inline void check_not_train_and_val(const std::string& pattern, const std::vector<std::string>& paths) {
    std::vector<std::string> prefixes;
    for (const std::string& path : paths) { prefixes.push_back(shard_prefix(path)); }
    std::sort(prefixes.begin(), prefixes.end());
    for (const std::string& prefix : prefixes) {
        if (!prefix.empty() && std::binary_search(prefixes.begin(), prefixes.end(), prefix + VAL_SUFFIX)) {
            usage_error(
                "data '%s' matches both training shards (%s) and validation shards (%s) of one set\nHINT: '%s_[0-9]*.bin' takes the "
                "training shards only",
                pattern.c_str(), shard_path(prefix, 0).c_str(), shard_path(prefix + VAL_SUFFIX, 0).c_str(), prefix.c_str());
        }
    }
}

// Shards that have their names while their set is not complete: ./tokenize ended in the moment of publishing.
inline void check_complete(const std::string& shard) {
    std::string prefix = shard_prefix(shard);
    if (prefix.ends_with(VAL_SUFFIX) && !path_exists(run_state_path(prefix))) { prefix.resize(prefix.size() - strlen(VAL_SUFFIX)); }
    check(prefix.empty() || !path_exists(run_state_path(prefix)),
          "data '%s': its set is not complete: there is '%s'\nHINT: ./tokenize --resume", shard.c_str(), run_state_path(prefix).c_str());
}

// Fills info and text_bytes_per_token from the side files of the shards' sets, if every set has one.
inline void read_side_files(DataSource& source) {
    std::vector<std::string> seen;
    i64 tokens = 0, text_bytes = 0;
    bool complete = true;
    for (const SourceFile& f : source.files) {
        const std::string& path = f.file->path();
        const std::string prefix = f.file->megatron() ? "" : shard_prefix(path), &set = prefix.empty() ? path : prefix;
        if (std::find(seen.begin(), seen.end(), set) != seen.end()) { continue; }
        seen.push_back(set);
        const std::optional<SideFile> side = find_side_file(path, f.file->tokens());
        if (!side) { check_complete(path); }
        if (!side || side->info->tokenizer_hash.empty()) {  // or converted ids of a tokenizer that nobody named
            complete = false;
            continue;
        }
        complete = complete && side->split().text_bytes > 0;
        if (source.info && source.info->tokenizer_hash != side->info->tokenizer_hash) {
            usage_error(
                "data '%s': '%s' was made with tokenizer '%s' (xxh3 %s), other shards with '%s' (xxh3 %s)\nHINT: one model reads one "
                "tokenizer's ids; tokenize one of them again",
                source.glob.c_str(), side->path.c_str(), side->info->tokenizer_file.c_str(), side->info->tokenizer_hash.c_str(),
                source.info->tokenizer_file.c_str(), source.info->tokenizer_hash.c_str());
        }
        source.info = *side->info;
        tokens += side->split().tokens;
        text_bytes += side->split().text_bytes;
    }
    if (complete && tokens > 0) { source.text_bytes_per_token = (double)text_bytes / (double)tokens; }
}

// The part of a file that is used: all of it, or, where a split is given, that part of a Megatron set's documents.
inline SourceFile open_source_file(const std::string& path, i64 S, const DocumentSplit& split) {
    SourceFile f = {std::make_shared<TokenFile>(path), {0, 0}, 0, 0, 0, 0};
    f.stride = f.file->window_begin(1, S);
    const MegatronIndex* index = f.file->megatron();
    if (index == nullptr) {
        if (!split.text.empty()) {
            usage_error(
                "--split is '%s', but '%s' is no Megatron set: %s\nHINT: --split divides the documents of Megatron sets; give other data a "
                "--val of its own",
                split.text.c_str(), path.c_str(), f.file->describe().c_str());
        }
        f.tokens = f.file->tokens();
        f.windows = f.file->windows(S);
        return f;
    }
    f.documents = split.text.empty() ? Range{0, index->sequences()} : megatron_split(split.text, split.part, index->sequences());
    f.first_token = index->lengths(0, f.documents.begin).tokens;
    f.tokens = index->lengths(f.documents.begin, f.documents.end).tokens;
    f.windows = std::max<i64>(f.tokens - 1, 0) / S;
    return f;
}

inline DataSource open_source(const WeightedGlob& part, i64 S, const DocumentSplit& split) {
    DataSource source;
    source.glob = part.glob;
    source.weight = part.weight;
    const std::vector<std::string> paths = find_token_files(part.glob);
    check_not_train_and_val(part.glob, paths);
    source.first_window = {0};
    for (const std::string& path : paths) {
        source.files.push_back(open_source_file(path, S, split));
        const SourceFile& f = source.files.back();
        source.first_window.push_back(source.first_window.back() + f.windows);
        source.tokens += f.tokens;
        source.left_over += f.tokens - (f.windows > 0 ? (f.windows - 1) * f.stride + S + 1 : 0);
    }
    check(source.windows() > 0,
          "data '%s' is too short: a window needs %lld tokens (sequence + 1) in one shard; found %lld tokens in %zu shard(s)\nHINT: "
          "shorten --seq, or add data",
          part.glob.c_str(), (long long)(S + 1), (long long)source.tokens, source.files.size());
    read_side_files(source);
    return source;
}

// ---------------------------------------------------------------------------------------------------------------

enum class WindowOrder {
    sequential,  // as they lie
    shuffled,    // every window once an epoch, each epoch shuffled anew
    megatron,    // the samples of Megatron's GPTDataset, in its order
    automatic,   // megatron where every source is one Megatron set, else shuffled
};

struct DataRequest {
    std::string spec;
    i64 S, vocab;
    uint64_t seed;
    WindowOrder order;
    DocumentSplit split = {};
    i64 windows = 0;         // that the run will draw: Megatron's order depends on it
    std::string cache = {};  // folder for the indices of Megatron's order; empty: they are made in memory
};

// Where a stream stands: all that a checkpoint needs to go on as if there had been no break.
struct StreamState {
    i64 position = 0;        // windows drawn
    std::vector<i64> drawn;  // of which from each source
    bool operator==(const StreamState&) const = default;
};

// Cheap to copy: the copies (one for each rank of a process, one to read ahead) share the open files, each has its own position.
class DataLoader {
public:
    DataLoader(const std::string& spec, i64 S, i64 vocab, uint64_t seed, WindowOrder order)
        : DataLoader(DataRequest{spec, S, vocab, seed, order}) {}
    explicit DataLoader(const DataRequest& r) : S_(r.S), vocab_(r.vocab), seed_(r.seed), order_(r.order) {
        if (S_ < 1) { usage_error("data: windows of %lld tokens, wanted 1 or more\nHINT: --seq", (long long)S_); }
        const DataSpec spec = parse_data_spec(r.spec);
        std::vector<DataSource> sources;
        for (const WeightedGlob& part : spec.parts) { sources.push_back(open_source(part, S_, r.split)); }
        std::vector<double> shares;
        for (const DataSource& s : sources) { shares.push_back(s.weight); }
        choose_order(sources);
        if (order_ == WindowOrder::megatron) { put_in_megatrons_order(sources, r, spec.is_mix ? shares : std::vector<double>()); }
        state_.drawn.assign(sources.size(), 0);
        epoch_orders_.resize(sources.size());
        shares_ = std::make_shared<const std::vector<double>>(normalized(shares));
        sources_ = std::make_shared<const std::vector<DataSource>>(std::move(sources));
        for (const DataSource& s : *sources_) { check_same_tokenizer(s); }
    }

    const std::vector<DataSource>& sources() const { return *sources_; }
    WindowOrder order() const { return order_; }
    i64 seq() const { return S_; }
    i64 windows() const {
        return sum([](const DataSource& s) { return s.windows(); });
    }
    i64 tokens() const {
        return sum([](const DataSource& s) { return s.tokens; });
    }
    i64 left_over() const {
        return sum([](const DataSource& s) { return s.left_over; });
    }

    // Bytes of text that a token of the stream stands for: loss / ln(2) / this = bits per byte. 0: not known.
    double text_bytes_per_token() const {
        double bytes = 0, weights = 0;
        for (const DataSource& s : sources()) {
            if (!(s.text_bytes_per_token > 0)) { return 0; }
            const double weight = order_ == WindowOrder::sequential ? (double)s.windows() : s.weight;
            bytes += weight * s.text_bytes_per_token;
            weights += weight;
        }
        return bytes / weights;
    }

    // The tokenizer and the rule for BOS and EOS, as ./tokenize noted them; nothing if no source has a side file.
    std::optional<TokenSetInfo> token_set() const {
        for (const DataSource& s : sources()) {
            if (s.info) { return s.info; }
        }
        return {};
    }

    // What the first document begins with.
    int32_t first_id() const {
        const SourceFile& f = sources()[0].files[0];
        int32_t id;
        f.file->read(f.first_token, 1, vocab_, &id);
        return id;
    }

    // Changes when the stream would, but for what order_text() says: names, sizes, order and fingerprints of the files, the documents
    // used, their tokenizer, S, weights, seed, which order. Not the folder: data may be moved.
    uint64_t identity() const {
        std::string text = format("S %lld seed %llu order %d\n", (long long)S_, (unsigned long long)seed_, (int)order_);
        for (const DataSource& s : sources()) {
            uint64_t weight_bits;
            memcpy(&weight_bits, &s.weight, sizeof weight_bits);
            text += format("source %llx %s\n", (unsigned long long)weight_bits, s.info ? s.info->tokenizer_hash.c_str() : "");
            for (const SourceFile& f : s.files) {
                text += format("%s %lld %lld %llx\n", base_name(f.file->path()).c_str(), (long long)f.first_token, (long long)f.tokens,
                               (unsigned long long)f.file->fingerprint());
            }
        }
        return XXH3_64bits(text.data(), text.size());
    }
    // The order in words. In Megatron's order the number of epochs, which follows from how many windows the run draws, is part of it: so
    // a run may be lengthened as long as this stays the same.
    std::string order_text() const {
        if (order_ == WindowOrder::sequential) { return "as the data lies"; }
        if (order_ == WindowOrder::shuffled) { return "windows, each once an epoch, every epoch shuffled anew"; }
        std::string text;
        for (const DataSource& s : sources()) {
            const i64 together = s.order->epochs() - s.order->separate_final_epoch();
            text += format("%s%lld epoch%s shuffled together%s", text.empty() ? "Megatron's samples: " : "; ", (long long)together,
                           together == 1 ? "" : "s", s.order->separate_final_epoch() ? ", then 1 apart" : "");
        }
        return text;
    }

    const StreamState& state() const { return state_; }
    void set_state(const StreamState& state) {
        i64 total = 0;
        bool valid = state.position >= 0 && state.drawn.size() == sources().size();
        for (const i64 drawn : state.drawn) {
            valid = valid && drawn >= 0;
            total += drawn;
        }
        check(
            valid && total == state.position,
            "data position %lld with %zu source(s) does not fit data of %zu source(s)\nHINT: resume with the data the run was started with",
            (long long)state.position, state.drawn.size(), sources().size());
        state_ = state;
    }
    // How often a source has been gone through, as a number such as 1.25.
    double epochs(size_t source) const { return (double)state_.drawn[source] / sources()[source].windows_per_epoch(S_); }
    // The epoch from which its latest window came, from 1 on; 0 before the first.
    i64 epochs_begun(size_t source, const StreamState& state) const {
        const DataSource& s = sources()[source];
        return s.order ? ceil_div(state.drawn[source] * S_, s.order->tokens_per_epoch()) : ceil_div(state.drawn[source], s.windows());
    }
    double share_drawn(size_t source) const { return (double)state_.drawn[source] / (double)std::max<i64>(state_.position, 1); }

    // The next `count` windows of the stream are one global batch. Every caller advances by all of it, and reads its own part of it:
    // windows [begin, end) as (end - begin, S + 1) ids.
    void next(i64 count, i64 begin, i64 end, int32_t* windows) {
        check(0 <= begin && begin <= end && end <= count, "windows [%lld, %lld) of a batch of %lld", (long long)begin, (long long)end,
              (long long)count);
        constexpr i64 BLOCK = 64;  // windows that are looked up together
        Drawn drawn[BLOCK];
        for (i64 i = 0; i < count;) {
            i64 n = 0;
            for (; i < count && n < BLOCK; i++) {
                const size_t source = next_source(*shares_, state_.drawn, state_.position);
                const i64 index = state_.drawn[source]++;
                state_.position++;
                if (i >= begin && i < end) { drawn[n++] = {source, index}; }
            }
            read_in_order({drawn, (size_t)n}, windows);
            windows += n * (S_ + 1);
        }
    }

    // Window `index` of windows(), source by source and file by file, without shuffling or weights: for validation. Does not move the
    // stream.
    void read_sequential(i64 index, int32_t* window) const {
        check(index >= 0 && index < windows(), "window %lld of %lld", (long long)index, (long long)windows());
        size_t source = 0;
        while (index >= sources()[source].windows()) { index -= sources()[source++].windows(); }
        read_window(sources()[source], index, window);
    }

private:
    template <typename Function>
    i64 sum(Function value) const {
        i64 total = 0;
        for (const DataSource& s : sources()) { total += value(s); }
        return total;
    }

    void choose_order(const std::vector<DataSource>& sources) {
        const bool asked = order_ == WindowOrder::megatron;
        if (!asked && order_ != WindowOrder::automatic) { return; }
        order_ = WindowOrder::megatron;
        for (const DataSource& s : sources) {
            if (s.files.size() == 1 && s.files[0].file->megatron() != nullptr) { continue; }
            if (asked) {
                usage_error(
                    "--order megatron: '%s' is %zu file(s): %s\nHINT: it needs one Megatron set for each source; give several a weight "
                    "each, "
                    "or take --order windows",
                    s.glob.c_str(), s.files.size(), s.kinds().c_str());
            }
            order_ = WindowOrder::shuffled;
            return;
        }
    }

    // Of a mix each source is asked for its share of the run's windows, and a little more, as Megatron's blending does.
    void put_in_megatrons_order(std::vector<DataSource>& sources, const DataRequest& r, const std::vector<double>& shares) const {
        constexpr i64 MAX_WINDOWS = (i64)1 << 50;
        check(r.windows <= MAX_WINDOWS, "Megatron's order of %lld windows: wanted at most %lld\nHINT: fewer --steps, or --order windows",
              (long long)r.windows, (long long)MAX_WINDOWS);
        const i64 windows = std::max<i64>(r.windows, 1);
        const std::vector<i64> requests = shares.empty() ? std::vector<i64>{windows} : blend_requests(windows, shares);
        for (size_t i = 0; i < sources.size(); i++) {
            const SourceFile& f = sources[i].files[0];
            sources[i].order = std::make_shared<const MegatronOrder>(f.file, f.documents, S_, requests[i], (i64)seed_, r.cache);
            sources[i].left_over = 0;
        }
    }

    void check_same_tokenizer(const DataSource& source) const {
        const std::optional<TokenSetInfo> first = token_set();
        if (source.info && source.info->tokenizer_hash != first->tokenizer_hash) {
            usage_error(
                "data: '%s' was made with tokenizer '%s' (xxh3 %s), other sources with '%s' (xxh3 %s)\nHINT: one model reads one "
                "tokenizer's ids; tokenize one of them again",
                source.glob.c_str(), source.info->tokenizer_file.c_str(), source.info->tokenizer_hash.c_str(),
                first->tokenizer_file.c_str(), first->tokenizer_hash.c_str());
        }
    }

    struct Drawn {
        size_t source;
        i64 index;  // in the source's stream
    };
    void read_in_order(std::span<const Drawn> drawn, int32_t* out) {
        for (int step = 0; order_ == WindowOrder::megatron && step < MegatronOrder::PREFETCH_STEPS; step++) {
            for (const Drawn& d : drawn) { sources()[d.source].order->prefetch(d.index, step); }
        }
        for (const Drawn& d : drawn) {
            read_in_order(d.source, d.index, out);
            out += S_ + 1;
        }
    }
    // The `index`-th window of a source's endless stream: epoch after epoch, each in its own order. Megatron's ends with its samples.
    void read_in_order(size_t source, i64 index, int32_t* out) {
        const DataSource& s = sources()[source];
        if (s.order) {
            check(index < s.order->samples(),
                  "data '%s': sample %lld of %lld\nHINT: Megatron's order is made for --steps; it does not go on after them",
                  s.glob.c_str(), (long long)index, (long long)s.order->samples());
            s.order->read(index, vocab_, out);
            return;
        }
        const i64 n = s.windows(), epoch = index / n;
        if (order_ == WindowOrder::sequential) { return read_window(s, index % n, out); }
        std::optional<EpochOrder>& now = epoch_orders_[source];
        if (!now || now->epoch != epoch) { now = EpochOrder{epoch, Permutation(n, mix64(mix64(mix64(seed_) ^ source) ^ epoch))}; }
        read_window(s, now->permutation(index % n), out);
    }

    void read_window(const DataSource& source, i64 window, int32_t* out) const {
        const auto after = std::upper_bound(source.first_window.begin(), source.first_window.end(), window);
        const i64 i = after - source.first_window.begin() - 1;
        const SourceFile& f = source.files[i];
        f.file->read(f.first_token + (window - source.first_window[i]) * f.stride, S_ + 1, vocab_, out);
    }

    i64 S_, vocab_;
    uint64_t seed_;
    WindowOrder order_;
    std::shared_ptr<const std::vector<double>> shares_;
    std::shared_ptr<const std::vector<DataSource>> sources_;
    StreamState state_;
    struct EpochOrder {
        i64 epoch;
        Permutation permutation;
    };
    std::vector<std::optional<EpochOrder>> epoch_orders_;  // of each source: where it was last
};

// A loader that the first of this process's ranks to ask opens, and all others copy: an index of Megatron's order can be large.
class SharedLoader {
public:
    DataLoader open(const DataRequest& request) {
        const std::lock_guard lock(mutex_);
        if (!loader_) { loader_.emplace(request); }
        return *loader_;
    }

private:
    std::mutex mutex_;
    std::optional<DataLoader> loader_;
};
