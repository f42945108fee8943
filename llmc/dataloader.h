// dataloader.h: windows of S+1 tokens out of shards, in an order that depends on the data, the seed and the position only: not on ranks,
// micro-batches or interruptions. Nothing is scanned and no index is kept: an epoch's order is a permutation that is computed.
#pragma once

#include <glob.h>
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "llmc/blend.h"
#include "llmc/token_file.h"

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
// SPEC: a glob, or WEIGHT:GLOB,WEIGHT:GLOB,... to mix

struct WeightedGlob {
    double weight;
    std::string glob;
};

inline std::string without_spaces_around(const std::string& text) {
    const size_t begin = std::min(text.find_first_not_of(' '), text.size());
    return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

// It is a mix if a number stands before its first ':'. Write ./0.5:x for a file of that name, and ? for a comma in a mixed path.
inline std::vector<WeightedGlob> parse_data_spec(const std::string& spec) {
    if (spec.empty()) { usage_error("no data given\nHINT: pass a pattern of shards, such as 'data/bible_0*.bin'"); }
    constexpr double MAX_WEIGHT = 1e100;  // their sum must stay finite
    const std::string before_colon = without_spaces_around(spec.substr(0, spec.find(':')));
    const bool is_mix = spec.find(':') != std::string::npos && before_colon.find('/') == std::string::npos && !before_colon.empty() &&
                        std::string_view("0123456789.+-").find(before_colon[0]) != std::string_view::npos;
    if (!is_mix) { return {{1.0, spec}}; }
    std::vector<WeightedGlob> parts;
    for (size_t begin = 0; begin <= spec.size();) {
        const size_t end = std::min(spec.find(',', begin), spec.size());
        const std::string part = without_spaces_around(spec.substr(begin, end - begin));
        const size_t colon = std::min(part.find(':'), part.size());
        const std::string number = without_spaces_around(part.substr(0, colon));
        const std::string glob = without_spaces_around(part.substr(std::min(colon + 1, part.size())));
        double weight = 0;
        // from_chars, not strtod: a decimal comma in the locale must not change what 0.5 means.
        const auto [rest, error] = std::from_chars(number.data(), number.data() + number.size(), weight);
        if (error != std::errc() || rest != number.data() + number.size() || !(weight > 0 && weight <= MAX_WEIGHT) || glob.empty()) {
            usage_error(
                "data '%s': found '%s', wanted WEIGHT:GLOB with a weight above 0, at most %g\nHINT: a mix looks like "
                "'0.7:web/*.bin,0.3:code/*.bin'",
                spec.c_str(), part.c_str(), MAX_WEIGHT);
        }
        parts.push_back({weight, glob});
        begin = end + 1;
    }
    std::vector<double> weights;
    for (const WeightedGlob& p : parts) { weights.push_back(p.weight); }
    weights = normalized(weights);
    for (size_t i = 0; i < parts.size(); i++) { parts[i].weight = weights[i]; }
    return parts;
}

inline bool is_no_such_file(int error) { return error == ENOENT || error == ENOTDIR; }

// Sorted by bytes, so that every rank and every locale sees the same order.
inline std::vector<std::string> expand_glob(const std::string& pattern) {
    errno = 0;
    if (path_exists(pattern)) { return {pattern}; }  // also when the name itself holds a '*' or a '['
    const int stat_error = errno;
    // A folder that cannot be listed hides its shards: no reason to go on without them.
    thread_local std::string unlisted;
    unlisted.clear();
    auto note = [](const char* folder, int error) {
        if (!is_no_such_file(error)) { unlisted = format("cannot list the folder '%s': %s", folder, strerror(error)); }
        return 0;
    };
    glob_t found = {};
    const int status = glob(pattern.c_str(), GLOB_BRACE | GLOB_TILDE | GLOB_NOSORT, note, &found);
    std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    check(unlisted.empty(), "data '%s': %s", pattern.c_str(), unlisted.c_str());
    check(status == 0 || status == GLOB_NOMATCH, "cannot list files that match '%s'", pattern.c_str());
    check(!paths.empty() || is_no_such_file(stat_error), "data '%s': %s", pattern.c_str(), strerror(stat_error));
    if (paths.empty()) {
        usage_error("no file matches '%s'\nHINT: quote the pattern; a relative one starts from the current folder", pattern.c_str());
    }
    std::sort(paths.begin(), paths.end());
    return paths;
}

// ---------------------------------------------------------------------------------------------------------------
// One source: the shards of one glob, and their windows

struct DataSource {
    std::string glob;
    double weight;  // of all sources, adds to 1
    std::vector<std::shared_ptr<const TokenFile>> shards;
    std::vector<i64> first_window;  // of each shard; one more entry: all windows
    i64 tokens = 0, left_over = 0;  // left_over: tokens that are in no window
    std::optional<TokenSetInfo> info;
    double text_bytes_per_token = 0;  // 0: not known

    i64 windows() const { return first_window.back(); }
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

// Fills info and text_bytes_per_token from the side files of the shards' sets, if every set has one.
inline void read_side_files(DataSource& source) {
    std::vector<std::string> seen;
    i64 tokens = 0, text_bytes = 0;
    bool complete = true;
    for (const auto& shard : source.shards) {
        const std::string prefix = shard_prefix(shard->path());
        if (std::find(seen.begin(), seen.end(), prefix) != seen.end()) { continue; }
        seen.push_back(prefix);
        const std::optional<SideFile> side = find_side_file(shard->path(), shard->tokens());
        complete = complete && side;
        if (!side) { continue; }
        if (source.info && source.info->tokenizer_hash != side->info.tokenizer_hash) {
            usage_error(
                "data '%s': '%s' was made with tokenizer '%s' (xxh3 %s), other shards with '%s' (xxh3 %s)\nHINT: one model reads one "
                "tokenizer's ids; tokenize one of them again",
                source.glob.c_str(), side->path.c_str(), side->info.tokenizer_file.c_str(), side->info.tokenizer_hash.c_str(),
                source.info->tokenizer_file.c_str(), source.info->tokenizer_hash.c_str());
        }
        source.info = side->info;
        tokens += side->split().tokens;
        text_bytes += side->split().text_bytes;
    }
    if (complete && tokens > 0) { source.text_bytes_per_token = (double)text_bytes / (double)tokens; }
}

inline DataSource open_source(const WeightedGlob& part, i64 S) {
    DataSource source;
    source.glob = part.glob;
    source.weight = part.weight;
    const std::vector<std::string> paths = expand_glob(part.glob);
    check_not_train_and_val(part.glob, paths);
    source.first_window = {0};
    for (const std::string& path : paths) {
        source.shards.push_back(std::make_shared<TokenFile>(path));
        const TokenFile& file = *source.shards.back();
        const i64 windows = file.windows(S);
        source.first_window.push_back(source.first_window.back() + windows);
        source.tokens += file.tokens();
        source.left_over += file.tokens() - (windows > 0 ? file.window_begin(windows - 1, S) + S + 1 : 0);
    }
    check(source.windows() > 0,
          "data '%s' is too short: a window needs %lld tokens (sequence + 1) in one shard; found %lld tokens in %zu shard(s)\nHINT: "
          "shorten --seq, or add data",
          part.glob.c_str(), (long long)(S + 1), (long long)source.tokens, source.shards.size());
    read_side_files(source);
    return source;
}

// ---------------------------------------------------------------------------------------------------------------

enum class WindowOrder { sequential, shuffled };

// Where a stream stands: all that a checkpoint needs to go on as if there had been no break.
struct StreamState {
    i64 position = 0;        // windows drawn
    std::vector<i64> drawn;  // of which from each source
    bool operator==(const StreamState&) const = default;
};

// Cheap to copy: the copies (one for each rank of a process) share the open shards, each has its own position.
class DataLoader {
public:
    DataLoader(const std::string& spec, i64 S, i64 vocab, uint64_t seed, WindowOrder order)
        : S_(S), vocab_(vocab), seed_(seed), order_(order) {
        if (S < 1) { usage_error("data: windows of %lld tokens, wanted 1 or more\nHINT: --seq", (long long)S); }
        for (const WeightedGlob& part : parse_data_spec(spec)) { sources_.push_back(open_source(part, S)); }
        for (const DataSource& s : sources_) {
            check_same_tokenizer(s);
            weights_.push_back(s.weight);
        }
        weights_ = normalized(weights_);
        state_.drawn.assign(sources_.size(), 0);
    }

    const std::vector<DataSource>& sources() const { return sources_; }
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
        for (const DataSource& s : sources_) {
            if (!(s.text_bytes_per_token > 0)) { return 0; }
            const double weight = order_ == WindowOrder::shuffled ? s.weight : (double)s.windows();
            bytes += weight * s.text_bytes_per_token;
            weights += weight;
        }
        return bytes / weights;
    }

    // The tokenizer and the rule for BOS and EOS, as ./tokenize noted them; nothing if no source has a side file.
    std::optional<TokenSetInfo> token_set() const {
        for (const DataSource& s : sources_) {
            if (s.info) { return s.info; }
        }
        return {};
    }

    // Changes when the stream would: names, sizes, order and fingerprints of the shards, their tokenizer, S, weights, seed. Not the
    // folder: data may be moved.
    uint64_t identity() const {
        std::string text = format("S %lld seed %llu order %d\n", (long long)S_, (unsigned long long)seed_, (int)order_);
        for (const DataSource& s : sources_) {
            uint64_t weight_bits;
            memcpy(&weight_bits, &s.weight, sizeof weight_bits);
            text += format("source %llx %s\n", (unsigned long long)weight_bits, s.info ? s.info->tokenizer_hash.c_str() : "");
            for (const auto& shard : s.shards) {
                text += format("%s %lld %llx\n", base_name(shard->path()).c_str(), (long long)shard->tokens(),
                               (unsigned long long)shard->fingerprint());
            }
        }
        return XXH3_64bits(text.data(), text.size());
    }

    const StreamState& state() const { return state_; }
    void set_state(const StreamState& state) {
        i64 total = 0;
        bool valid = state.position >= 0 && state.drawn.size() == sources_.size();
        for (const i64 drawn : state.drawn) {
            valid = valid && drawn >= 0;
            total += drawn;
        }
        check(
            valid && total == state.position,
            "data position %lld with %zu source(s) does not fit data of %zu source(s)\nHINT: resume with the data the run was started with",
            (long long)state.position, state.drawn.size(), sources_.size());
        state_ = state;
    }
    // How often a source has been gone through, as a number such as 1.25.
    double epochs(size_t source) const { return (double)state_.drawn[source] / (double)sources_[source].windows(); }

    // The next `count` windows of the stream are one global batch. Every caller advances by all of it, and reads its own part of it:
    // windows [begin, end) as (end - begin, S + 1) ids.
    void next(i64 count, i64 begin, i64 end, int32_t* windows) {
        check(0 <= begin && begin <= end && end <= count, "windows [%lld, %lld) of a batch of %lld", (long long)begin, (long long)end,
              (long long)count);
        for (i64 i = 0; i < count; i++) {
            const size_t source = next_source(weights_, state_.drawn, state_.position);
            const i64 index = state_.drawn[source]++;
            state_.position++;
            if (i >= begin && i < end) { read_window(sources_[source], in_order(source, index), windows + (i - begin) * (S_ + 1)); }
        }
    }

    // Window `index` of windows(), source by source and shard by shard, without shuffling or weights: for validation. Does not move the
    // stream.
    void read_sequential(i64 index, int32_t* window) const {
        check(index >= 0 && index < windows(), "window %lld of %lld", (long long)index, (long long)windows());
        size_t source = 0;
        while (index >= sources_[source].windows()) { index -= sources_[source++].windows(); }
        read_window(sources_[source], index, window);
    }

private:
    template <typename Function>
    i64 sum(Function value) const {
        i64 total = 0;
        for (const DataSource& s : sources_) { total += value(s); }
        return total;
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

    // The `index`-th window of a source's endless stream: epoch after epoch, each in its own order.
    i64 in_order(size_t source, i64 index) const {
        const i64 n = sources_[source].windows(), epoch = index / n;
        if (order_ == WindowOrder::sequential) { return index % n; }
        return Permutation(n, mix64(mix64(mix64(seed_) ^ source) ^ epoch))(index % n);
    }

    void read_window(const DataSource& source, i64 window, int32_t* out) const {
        const auto after = std::upper_bound(source.first_window.begin(), source.first_window.end(), window);
        const i64 shard = after - source.first_window.begin() - 1;
        const TokenFile& file = *source.shards[shard];
        file.read(file.window_begin(window - source.first_window[shard], S_), S_ + 1, vocab_, out);
    }

    i64 S_, vocab_;
    uint64_t seed_;
    WindowOrder order_;
    std::vector<DataSource> sources_;
    std::vector<double> weights_;
    StreamState state_;
};
