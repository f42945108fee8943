// summary.h: what came of the inputs, counted for each of them; and progress, told every few seconds.
#pragma once

#include <chrono>
#include <set>

#include "data/pipeline.h"

// 1234567 -> 1,234,567
inline std::string grouped(i64 n) {
    std::string text = std::to_string(n);
    for (int at = (int)text.size() - 3; at > (n < 0); at -= 3) { text.insert(at, ","); }
    return text;
}

using Counts = std::map<std::string, i64, std::less<>>;

struct SourceCounts {
    i64 documents = 0, tokens = 0, text_bytes = 0;  // of those kept
    Counts problems, dropped;
};

class Summary {
public:
    using Json = nlohmann::ordered_json;

    Summary(const std::vector<InputFile>& files, bool stop_on_error) : files_(files), stop_(stop_on_error) {
        // So many sources at most, so that a set's side file stays small: of more files, their folders are counted, or the folders of
        // those.
        constexpr size_t MOST_SOURCES = 1000;
        std::vector<std::string> names;
        for (const InputFile& f : files) { names.push_back(f.path); }
        while (std::set<std::string>(names.begin(), names.end()).size() > MOST_SOURCES) {
            for (std::string& name : names) { name = parent_folder(name); }
        }
        for (const std::string& name : names) {
            const auto [at, is_new] = index_of_.insert({name, names_.size()});
            if (is_new) { names_.push_back(name); }
            source_of_.push_back(at->second);
        }
        sources_.resize(names_.size());
    }

    // Counts a document's problems and shows the first of each kind. Returns whether it is kept.
    bool add(const Work& work) {
        SourceCounts& source = sources_[source_of_[work.file - files_.data()]];
        for (const ProblemReport& r : work.problems) {
            check(!stop_, "%s\nHINT: --on-error skip goes on without what is broken", r.where_and_what.c_str());
            const char* name = PROBLEM_KINDS[(int)r.problem].name;
            source.problems[name]++;
            const i64 shown = ++shown_[name];
            if (shown <= SHOWN_AT_MOST) { fprintf(stderr, "tokenize: %s\n", r.where_and_what.c_str()); }
            if (shown == SHOWN_AT_MOST + 1) { fprintf(stderr, "tokenize: further %s are counted, not shown\n", name); }
        }
        if (!work.dropped.empty()) { source.dropped[std::string(work.dropped)]++; }
        source.documents += work.kept;
        source.text_bytes += work.text_bytes;
        return work.kept;
    }
    // Of a document that is kept: tokens as they go into the set, and what is not wrong with it, but worth knowing.
    void add_tokens(const Work& work, i64 tokens, const Tokenizer& tokenizer) {
        SourceCounts& source = sources_[source_of_[work.file - files_.data()]];
        source.tokens += tokens;
        const i64 unknown = std::count(work.ids.begin(), work.ids.end(), tokenizer.unknown_id);
        if (unknown > 0) { source.problems["characters_unknown_to_the_tokenizer"] += unknown; }
        if ((size_t)work.text_bytes > tokenizer.whole_text_bytes) { source.problems["documents_encoded_in_parts"]++; }
    }

    // Of all sources.
    SourceCounts total() const {
        SourceCounts all;
        for (const SourceCounts& s : sources_) {
            all.documents += s.documents;
            all.tokens += s.tokens;
            all.text_bytes += s.text_bytes;
            for (const auto& [name, n] : s.problems) { all.problems[name] += n; }
            for (const auto& [name, n] : s.dropped) { all.dropped[name] += n; }
        }
        return all;
    }
    Json to_json() const {
        Json json = Json::array();
        for (size_t i = 0; i < sources_.size(); i++) {
            const SourceCounts& s = sources_[i];
            constexpr double PLACES = 1e4;
            const double ratio = s.tokens > 0 ? std::round((double)s.text_bytes / (double)s.tokens * PLACES) / PLACES : 0;
            json.push_back({{"source", names_[i]},
                            {"documents", s.documents},
                            {"tokens", s.tokens},
                            {"text_bytes", s.text_bytes},
                            {"bytes_per_token", ratio},
                            {"problems", s.problems},
                            {"dropped", s.dropped}});
        }
        return json;
    }
    void set_from_json(const Json& json) {
        check(json.size() == sources_.size(), "counts of %zu sources, wanted %zu", json.size(), sources_.size());
        for (size_t i = 0; i < sources_.size(); i++) {
            const Json& s = json[i];
            sources_[i] = {s.at("documents"), s.at("tokens"), s.at("text_bytes"), s.at("problems"), s.at("dropped")};
        }
    }

private:
    static constexpr i64 SHOWN_AT_MOST = 20;
    const std::vector<InputFile>& files_;
    bool stop_;
    std::vector<std::string> names_;
    std::map<std::string, size_t> index_of_;
    std::vector<size_t> source_of_;  // of each file
    std::vector<SourceCounts> sources_;
    Counts shown_;
};

inline std::string counts_text(const Summary::Json& counts) { return counts.empty() ? "none" : counts.dump(); }

inline double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// True once in so many seconds.
class Every {
public:
    explicit Every(double seconds) : seconds_(seconds) {}
    bool due() {
        const double now = seconds_now();
        if (now < next_) { return false; }
        next_ = now + seconds_;
        return true;
    }

private:
    double seconds_, next_ = seconds_now() + seconds_;
};

// 7384 s -> 2 h 3 min
inline std::string duration_text(double seconds) {
    const i64 s = (i64)seconds;
    if (s >= 86400) { return format("%lld d %lld h", (long long)(s / 86400), (long long)(s % 86400 / 3600)); }
    if (s >= 3600) { return format("%lld h %lld min", (long long)(s / 3600), (long long)(s % 3600 / 60)); }
    return s >= 60 ? format("%lld min", (long long)(s / 60)) : format("%lld s", (long long)s);
}

class Progress {
public:
    // done: bytes of the files that earlier runs used up.
    Progress(const std::vector<InputFile>& files, i64 done, i64 text_bytes) : done_before_(done), text_before_(text_bytes) {
        for (const InputFile& f : files) { total_ = f.size < 0 || total_ < 0 ? -1 : total_ + f.size; }
    }
    bool due() { return every_.due(); }
    // packed_done: bytes of the files that are used up, as they lie on the disk.
    void show(const SourceCounts& all, i64 packed_done) const {
        const double seconds = std::max(seconds_now() - start_, 1e-3), speed = (double)(all.text_bytes - text_before_) / 1e6 / seconds;
        std::string left;
        if (total_ > 0) {
            left = format(", %.1f%% done", 100 * (double)packed_done / (double)total_);
            const double rate = (double)(packed_done - done_before_) / seconds;
            if (rate > 0) { left += ", " + duration_text((double)(total_ - packed_done) / rate) + " left"; }
        }
        fprintf(stderr, "tokenize: %s documents, %.1f MB of text, %.2f MB/s, %s tokens%s\n", grouped(all.documents).c_str(),
                (double)all.text_bytes / 1e6, speed, grouped(all.tokens).c_str(), left.c_str());
    }

private:
    static constexpr double SECONDS = 5;
    Every every_{SECONDS};
    const double start_ = seconds_now();
    i64 total_ = 0, done_before_, text_before_;
};
