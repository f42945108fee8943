// pipeline.h: inputs -> documents as token ids (or as text), on all threads, in order.
#pragma once

#include <signal.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <nlohmann/json.hpp>

#include "data/documents.h"

// Set by a signal handler; the pipeline stops between two rounds.
inline volatile sig_atomic_t stop_signal = 0;
inline void check_stop_signal() {
    if (stop_signal) { throw Error(128 + stop_signal, "stopped by a signal; nothing was written"); }
}

inline double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// 1234567 -> 1,234,567
inline std::string grouped(i64 n) {
    std::string text = std::to_string(n);
    for (int at = (int)text.size() - 3; at > (n < 0); at -= 3) { text.insert(at, ","); }
    return text;
}

// ---------------------------------------------------------------------------------------------------------------
// What went wrong, counted; the first few in full.

class Problems {
public:
    explicit Problems(bool stop) : stop_(stop) {}

    void add(const std::vector<ProblemReport>& reports) {
        for (const ProblemReport& r : reports) {
            check(!stop_, "%s\nHINT: --on-error skip goes on without what is broken", r.where_and_what.c_str());
            counts_[(int)r.problem]++;
            shown_++;
            if (shown_ <= SHOWN_AT_MOST) { fprintf(stderr, "tokenize: %s\n", r.where_and_what.c_str()); }
            if (shown_ == SHOWN_AT_MOST + 1) { fprintf(stderr, "tokenize: further problems are counted, not shown\n"); }
        }
    }
    void add_empty() { empty_++; }
    void add_unknown_ids(i64 n) { unknown_ids_ += n; }
    void add_encoded_in_parts() { encoded_in_parts_++; }

    // name -> count, those that happened.
    nlohmann::ordered_json to_json() const {
        nlohmann::ordered_json json = nlohmann::ordered_json::object();
        for (size_t i = 0; i < counts_.size(); i++) {
            if (counts_[i] > 0) { json[PROBLEM_NAMES[i]] = counts_[i]; }
        }
        if (empty_ > 0) { json["documents_without_text"] = empty_; }
        if (unknown_ids_ > 0) { json["characters_unknown_to_the_tokenizer"] = unknown_ids_; }
        if (encoded_in_parts_ > 0) { json["documents_encoded_in_parts"] = encoded_in_parts_; }
        return json;
    }

private:
    static constexpr i64 SHOWN_AT_MOST = 20;
    bool stop_;
    i64 shown_ = 0, empty_ = 0, unknown_ids_ = 0, encoded_in_parts_ = 0;
    std::array<i64, (size_t)Problem::COUNT> counts_ = {};
};

// ---------------------------------------------------------------------------------------------------------------
// The pipeline: one thread reads the next round of raw documents while all threads parse and encode this round; the round is handed out in
// order. So the output does not depend on the number of threads.

struct PipelineOptions {
    std::vector<std::string> inputs;
    ReadOptions read;
    bool bos = false, no_eos = false;  // which ids frame a document
    bool stop_on_error = false;
    int threads = 1;
};

struct Work {
    RawDocument raw;
    Document doc;
    std::vector<int32_t> ids;
    size_t text_bytes = 0;
};

inline std::vector<Work> read_round(DocumentReader& reader, size_t bytes) {
    std::vector<Work> round;
    RawDocument raw;
    for (size_t total = 0; total < bytes && reader.next(raw); total += round.back().raw.bytes.size()) {
        round.push_back({std::move(raw), {}, {}, 0});
    }
    return round;
}

// Starts function in a thread of its own.
template <typename Function>
auto start_thread(Function function) {
    try {
        return std::async(std::launch::async, function);
    } catch (const std::system_error& e) { die("cannot start a thread: %s\nHINT: fewer --threads", e.code().message().c_str()); }
}

// Calls function(i) for each i below n, from up to `threads` threads; what one of them throws comes out here.
template <typename Function>
void parallel_for(size_t n, int threads, Function function) {
    std::atomic<size_t> next = 0;
    std::vector<std::future<void>> workers;
    for (size_t t = 0; t < std::min<size_t>(n, threads); t++) {
        workers.push_back(start_thread([&] {
            for (size_t i; (i = next++) < n;) { function(i); }
        }));
    }
    for (auto& w : workers) { w.wait(); }
    for (auto& w : workers) { w.get(); }
}

inline void parse_round(std::vector<Work>& round, const PipelineOptions& options, const Tokenizer* tokenizer) {
    parallel_for(round.size(), options.threads, [&](size_t i) {
        thread_local simdjson::ondemand::parser parser;
        Work& work = round[i];
        work.doc = parse_document(work.raw, options.read, parser);
        work.raw.bytes = {};
        work.text_bytes = work.doc.text.size();
        if (tokenizer == nullptr || work.doc.skipped || work.doc.text.empty()) { return; }
        work.ids = tokenizer->encode(work.doc.text);
        work.doc.text = {};
        if (options.bos) { work.ids.insert(work.ids.begin(), tokenizer->bos_id); }
        if (!options.no_eos) { work.ids.push_back(tokenizer->eos_id); }
    });
}

class Pipeline {
public:
    // Without a tokenizer the documents come as text.
    Pipeline(const PipelineOptions& options, const Tokenizer* tokenizer)
        : options_(options),
          tokenizer_(tokenizer),
          problems_(options.stop_on_error),
          reader_(list_inputs(options.inputs, options.read.input_format), options.read) {
        read_ahead();
    }

    Problems& problems() { return problems_; }

    // The next document, in order, broken and empty ones left out; nullptr at the end.
    Work* next() {
        while (true) {
            if (at_ == round_.size() && !next_round()) { return nullptr; }
            Work& work = round_[at_++];
            problems_.add(work.doc.problems);
            if (work.doc.skipped) { continue; }
            if (work.text_bytes == 0) {
                problems_.add_empty();
                continue;
            }
            if (tokenizer_ && work.text_bytes > tokenizer_->whole_text_bytes) { problems_.add_encoded_in_parts(); }
            documents_++;
            text_bytes_ += work.text_bytes;
            return &work;
        }
    }

private:
    static constexpr size_t ROUND_BYTES_PER_THREAD = 2 << 20;
    static constexpr double SECONDS_BETWEEN_REPORTS = 5;

    void read_ahead() {
        ahead_ = start_thread([this] { return read_round(reader_, options_.threads * ROUND_BYTES_PER_THREAD); });
    }
    bool next_round() {
        check_stop_signal();
        report();
        round_ = ahead_.get();
        at_ = 0;
        if (round_.empty()) {
            ahead_ = std::async(std::launch::deferred, [] { return std::vector<Work>(); });  // the end stays the end
            return false;
        }
        read_ahead();
        parse_round(round_, options_, tokenizer_);
        return true;
    }
    void report() {
        const double now = seconds_now();
        if (now < next_report_) { return; }
        next_report_ = now + SECONDS_BETWEEN_REPORTS;
        fprintf(stderr, "tokenize: %s documents, %.1f MB of text, %.2f MB/s\n", grouped(documents_).c_str(), (double)text_bytes_ / 1e6,
                (double)text_bytes_ / 1e6 / (now - start_));
    }

    const PipelineOptions& options_;
    const Tokenizer* tokenizer_;
    Problems problems_;
    DocumentReader reader_;
    std::vector<Work> round_;
    size_t at_ = 0;
    const double start_ = seconds_now();
    double next_report_ = start_ + SECONDS_BETWEEN_REPORTS;
    i64 text_bytes_ = 0, documents_ = 0;
    std::future<std::vector<Work>> ahead_;  // last: its destructor waits for the thread that uses the reader
};
