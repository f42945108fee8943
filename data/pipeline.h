// pipeline.h: inputs -> documents as token ids (or as text), on all threads, in order.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <mutex>

#include "data/documents.h"

struct PipelineOptions {
    std::vector<std::string> inputs;
    ReadOptions read;
    FilterOptions filter;
    bool stop_on_error = false;
    int threads = 1;
};

// What became of one document.
struct Work {
    const InputFile* file = nullptr;
    i64 ordinal = 0;
    bool kept = false;         // false: broken, empty or dropped
    std::string_view dropped;  // why
    std::vector<ProblemReport> problems;
    std::vector<int32_t> ids;  // neither BOS nor EOS among them
    std::string text;          // without a tokenizer
    i64 text_bytes = 0;
    InputPosition after;
};

// Starts function in a thread of its own.
template <typename Function>
auto start_thread(Function function) {
    try {
        return std::async(std::launch::async, function);
    } catch (const std::system_error& e) { die("cannot start a thread: %s\nHINT: fewer --threads", e.code().message().c_str()); }
}

// One thread reads batches of raw documents, up to `threads` others turn each into what is wanted, and next() hands them out in the inputs'
// order: so the output does not depend on the number of threads. Reading waits while much is under way; a document larger than that is
// alone.
class Pipeline {
public:
    // files, filter and tokenizer must live as long as this. Without a tokenizer the documents come as text.
    Pipeline(const PipelineOptions& options, const std::vector<InputFile>& files, const Filter& filter, const Tokenizer* tokenizer,
             const InputPosition& from = {})
        : options_(options),
          filter_(filter),
          tokenizer_(tokenizer),
          reader_(files, options.read, filter, from),
          most_bytes_(std::min<size_t>((options.threads + 1) * BYTES_PER_THREAD, MOST_BYTES)) {
        reading_ = start_thread([this] { read_all(); });
    }
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;
    ~Pipeline() {
        const std::lock_guard lock(mutex_);
        stop_ = true;
        wake_all();
    }

    // Bytes of the inputs that are used up.
    i64 packed_done() const { return reader_.packed_done(); }

    // The next document, in order, also broken and dropped ones; nullptr at the end. Valid until the next call. `meanwhile` is called again
    // and again while there is none yet.
    Work* next(const std::function<void()>& meanwhile = [] {}) {
        while (at_ == current_.works.size()) {
            if (!next_batch(meanwhile)) { return nullptr; }
        }
        return &current_.works[at_++];
    }

private:
    static constexpr size_t BATCH_BYTES = 256 << 10, BYTES_PER_THREAD = 2 << 20, MOST_BYTES = 128 << 20;
    static constexpr size_t MUCH_MEMORY = 8 << 20;  // of one document: what it leaves behind is not kept for the next
    static constexpr auto LOOK_UP = std::chrono::milliseconds(100);

    struct Batch {
        std::vector<RawDocument> raw;
        std::vector<Work> works;
        size_t bytes = 0;
        bool done = false;
        std::exception_ptr error;
    };

    void read_all() {
        std::unique_ptr<Batch> batch;
        try {
            for (bool more = true; more; add(std::move(batch))) {
                {
                    std::unique_lock lock(mutex_);
                    room_.wait(lock, [&] { return stop_ || bytes_ < most_bytes_; });
                    if (stop_) { return; }
                }
                batch = std::make_unique<Batch>();
                RawDocument raw;
                while (batch->bytes < BATCH_BYTES && (more = reader_.next(raw))) {
                    batch->bytes += raw.bytes.size() + raw.signals.size() + sizeof raw;
                    batch->raw.push_back(std::move(raw));
                }
            }
        } catch (...) {
            auto failed = std::make_unique<Batch>();
            failed->error = std::current_exception();
            add(std::move(failed));
        }
        const std::lock_guard lock(mutex_);
        all_read_ = true;
        wake_all();
    }
    void wake_all() {
        for (std::condition_variable* c : {&room_, &to_do_, &done_}) { c->notify_all(); }
    }
    void add(std::unique_ptr<Batch> batch) {
        const std::lock_guard lock(mutex_);
        bytes_ += batch->bytes;
        batch->done = batch->raw.empty();
        const bool more_hands = !batch->done && waiting_ == 0 && (int)workers_.size() < options_.threads;
        batches_.push_back(std::move(batch));
        if (more_hands) {
            workers_.push_back(start_thread([this] { work(); }));
        }
        to_do_.notify_one();
        done_.notify_one();
    }

    // The first batch that nobody has taken; nullptr if there is none.
    Batch* take() {
        for (const auto& batch : batches_) {
            if (!batch->done && !batch->raw.empty()) { return batch.get(); }
        }
        return nullptr;
    }
    void work() {
        Parsers parsers;
        std::unique_lock lock(mutex_);
        while (true) {
            Batch* batch = nullptr;
            waiting_++;
            to_do_.wait(lock, [&] { return stop_ || (batch = take()) || all_read_; });
            waiting_--;
            if (stop_ || !batch) { return; }
            std::vector<RawDocument> raw = std::move(batch->raw);
            batch->raw.clear();
            lock.unlock();
            try {
                for (RawDocument& document : raw) { batch->works.push_back(make(document, parsers)); }
            } catch (...) { batch->error = std::current_exception(); }
            lock.lock();
            batch->done = true;
            done_.notify_one();
        }
    }
    Work make(RawDocument& raw, Parsers& parsers) const {
        const bool large = raw.bytes.size() + raw.signals.size() > MUCH_MEMORY;
        Document doc = parse_document(raw, options_.read, filter_, parsers);
        Work work = {raw.file, raw.ordinal, !doc.skipped && doc.dropped.empty(), doc.dropped, std::move(doc.problems), {}, {},
                     0,        raw.after};
        if (raw.json) { raw.bytes = {}; }  // the text is the parser's
        if (work.kept) {
            work.text_bytes = doc.text.size();
            if (tokenizer_) {
                work.ids = tokenizer_->encode(doc.text);
            } else {
                work.text = doc.text;
            }
        }
        raw.bytes = {};
        if (large) { parsers = Parsers(); }
        return work;
    }

    bool next_batch(const std::function<void()>& meanwhile) {
        at_ = 0;
        const size_t handed_out = current_.bytes;
        current_ = {};
        std::unique_lock lock(mutex_);
        bytes_ -= handed_out;
        room_.notify_one();
        while (true) {
            check_stop_signal();
            lock.unlock();
            meanwhile();
            lock.lock();
            const auto ready = [&] { return batches_.empty() ? all_read_ : batches_.front()->done; };
            if (!done_.wait_for(lock, LOOK_UP, ready)) { continue; }
            if (batches_.empty()) { return false; }
            current_ = std::move(*batches_.front());
            batches_.pop_front();
            if (current_.error) { std::rethrow_exception(current_.error); }
            return true;
        }
    }

    const PipelineOptions& options_;
    const Filter& filter_;
    const Tokenizer* tokenizer_;
    DocumentReader reader_;
    const size_t most_bytes_;

    std::mutex mutex_;                             // of what follows, up to the next blank line
    std::condition_variable room_, to_do_, done_;  // for: the reader, the workers, next()
    std::deque<std::unique_ptr<Batch>> batches_;   // in the inputs' order
    size_t bytes_ = 0;                             // of the batches that are not handed out yet
    int waiting_ = 0;                              // workers
    bool all_read_ = false, stop_ = false;

    Batch current_;
    size_t at_ = 0;
    std::vector<std::future<void>> workers_;  // last: their destructors wait for the threads, which use all of the above
    std::future<void> reading_;
};
