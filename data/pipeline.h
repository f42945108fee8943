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
    std::span<const int32_t> ids;  // neither BOS nor EOS among them
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

// Up to `threads` threads read a batch of raw documents, one at a time, and each turns its own into what is wanted while the text is in its
// core's cache; next() hands them out in the inputs' order: so the output does not depend on the number of threads. Reading waits while
// much is under way; a document larger than that is alone.
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
        const std::lock_guard lock(mutex_);
        start_worker();
    }
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;
    ~Pipeline() {
        const std::lock_guard lock(mutex_);
        stop_ = true;
        changed_.notify_all();
    }

    // Bytes of the inputs that are used up.
    i64 packed_done() const { return reader_.packed_done(); }

    // The next document, in order, also broken and dropped ones; nullptr at the end. Valid until the next call. `meanwhile` is called again
    // and again while there is none yet.
    Work* next(const std::function<void()>& meanwhile = [] {}) {
        while (!current_ || at_ == current_->works.size()) {
            if (!next_batch(meanwhile)) { return nullptr; }
        }
        return &current_->works[at_++];
    }

private:
    static constexpr int PACKED_BATCHES_AT_ONCE = 16;
    static constexpr size_t BATCH_BYTES = 512 << 10, BYTES_PER_THREAD = 6 << 20, MOST_BYTES = 128 << 20;
    static constexpr size_t MUCH_MEMORY = 8 << 20;  // of one document: the room that it took is not kept for the next
    static constexpr auto LOOK_UP = std::chrono::milliseconds(100);

    struct Batch {
        std::string text;  // of all raw documents
        std::vector<RawDocument> raw;
        std::vector<Work> works;
        std::vector<int32_t> ids;  // of all works
        size_t bytes = 0;
        bool done = false;
        std::exception_ptr error;
    };

    void start_worker() {
        workers_.push_back(start_thread([this] { work(); }));
    }
    void work() {
        Parsers parsers;
        std::unique_lock lock(mutex_);
        while (Batch* batch = take_batch(lock)) {
            lock.unlock();
            try {
                if (!batch->error) { make_all(*batch, parsers); }
            } catch (...) { batch->error = std::current_exception(); }
            lock.lock();
            if (batch->text.capacity() <= MUCH_MEMORY) { texts_.push_back(std::move(batch->text)); }
            batch->text = {};
            batch->done = true;
            if (batches_.front().get() == batch) { done_.notify_one(); }
        }
    }
    // The next batch to work on; nullptr at the end. Whoever finds none reads one, if nobody does, and works on it while it is in the core's
    // cache. Of a packed file many are read at once: the library's window and tables, which tokenizing evicts, are fetched as seldom.
    Batch* take_batch(std::unique_lock<std::mutex>& lock) {
        while (!stop_) {
            if (!reading_ && !all_read_ && raw_.empty() && bytes_ < most_bytes_) {
                reading_ = true;
                int read = 0;
                do {
                    read_batch(lock);
                } while (++read < PACKED_BATCHES_AT_ONCE && reader_.unpacks_file() && !stop_ && !all_read_ && bytes_ < most_bytes_);
                reading_ = false;
                changed_.notify_all();
            } else if (!raw_.empty()) {
                Batch* batch = raw_.front();
                raw_.pop_front();
                return batch;
            } else if (all_read_) {
                return nullptr;
            } else {
                changed_.wait(lock);
            }
        }
        return nullptr;
    }
    void read_batch(std::unique_lock<std::mutex>& lock) {
        std::unique_ptr<Batch> batch = empty_batch();
        lock.unlock();
        bool more = true;
        try {
            RawDocument raw;
            while (batch->bytes < BATCH_BYTES && (more = reader_.next(raw, batch->text))) {
                batch->bytes += raw.size + raw.signals.size() + sizeof raw;
                batch->raw.push_back(std::move(raw));
            }
        } catch (...) { batch->error = std::current_exception(); }
        lock.lock();
        all_read_ = !more || batch->error;
        bytes_ += batch->bytes;
        raw_.push_back(batch.get());
        batches_.push_back(std::move(batch));
        changed_.notify_one();
        if (!all_read_ && !stop_ && (int)workers_.size() < options_.threads) { start_worker(); }
    }
    // One that has been handed out gives its memory to the next: neither allocation nor new pages for each.
    std::unique_ptr<Batch> empty_batch() {
        std::unique_ptr<Batch> batch = take_last(used_);
        if (!batch) { batch = std::make_unique<Batch>(); }
        batch->text = take_last(texts_);  // tokenized just now: most of it is still in a core's cache
        batch->text.clear();
        batch->text.reserve(2 * BATCH_BYTES);  // the last document may go beyond
        batch->raw.clear();
        batch->works.clear();
        batch->ids.clear();
        batch->ids.reserve(BATCH_BYTES / 2);
        batch->bytes = 0;
        batch->done = false;
        return batch;
    }
    template <typename T>
    static T take_last(std::vector<T>& from) {
        if (from.empty()) { return {}; }
        T last = std::move(from.back());
        from.pop_back();
        return last;
    }
    void make_all(Batch& batch, Parsers& parsers) const {
        for (RawDocument& raw : batch.raw) { batch.works.push_back(make(raw, batch, parsers)); }
        size_t at = 0;  // the ids lie still now
        for (Work& work : batch.works) {
            work.ids = {batch.ids.data() + at, work.ids.size()};
            at += work.ids.size();
        }
    }
    Work make(RawDocument& raw, Batch& batch, Parsers& parsers) const {
        const bool large = raw.size + raw.signals.size() > MUCH_MEMORY;
        Document doc = parse_document(raw, raw.in(batch.text), options_.read, filter_, parsers);
        Work work = {raw.file, raw.ordinal, !doc.skipped && doc.dropped.empty(), doc.dropped, std::move(doc.problems), {}, {},
                     0,        raw.after};
        if (large && raw.json) { batch.text = {}; }  // it is the batch's last, and its text is the parser's
        if (work.kept) {
            work.text_bytes = doc.text.size();
            if (tokenizer_) {
                const size_t first = batch.ids.size();
                tokenizer_->encode(doc.text, batch.ids);
                work.ids = std::span(batch.ids).subspan(first);
            } else {
                work.text = doc.text;
            }
        }
        if (large) { parsers = Parsers(); }
        return work;
    }
    bool next_batch(const std::function<void()>& meanwhile) {
        at_ = 0;
        std::unique_lock lock(mutex_);
        if (current_) {
            bytes_ -= current_->bytes;
            if (current_->ids.capacity() * sizeof(int32_t) <= MUCH_MEMORY) { used_.push_back(std::move(current_)); }
            current_.reset();
            changed_.notify_one();
        }
        while (true) {
            check_stop_signal();
            lock.unlock();
            meanwhile();
            lock.lock();
            const auto ready = [&] { return batches_.empty() ? all_read_ : batches_.front()->done; };
            if (!done_.wait_for(lock, LOOK_UP, ready)) { continue; }
            if (batches_.empty()) { return false; }
            current_ = std::move(batches_.front());
            batches_.pop_front();
            if (current_->error) { std::rethrow_exception(current_->error); }
            return true;
        }
    }

    const PipelineOptions& options_;
    const Filter& filter_;
    const Tokenizer* tokenizer_;
    DocumentReader reader_;
    const size_t most_bytes_;

    std::mutex mutex_;                            // of what follows
    std::condition_variable changed_, done_;      // for: workers, next()
    std::deque<std::unique_ptr<Batch>> batches_;  // in the inputs' order
    std::deque<Batch*> raw_;                      // those that nobody works on yet
    bool reading_ = false;                        // a worker uses reader_
    std::vector<std::unique_ptr<Batch>> used_;
    std::vector<std::string> texts_;  // of batches that are done
    size_t bytes_ = 0;  // of the batches that are not handed out yet
    bool all_read_ = false, stop_ = false;
    std::unique_ptr<Batch> current_;  // next()'s own
    size_t at_ = 0;
    std::vector<std::future<void>> workers_;  // last: their destructors wait for the threads, which use all of the above
};
