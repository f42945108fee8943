// read_ahead.h: while a step computes, a thread reads the next step's windows.
#pragma once

#include <chrono>
#include <future>
#include <utility>
#include <vector>

#include "llmc/base.h"

// Loader: cheap to copy, with next(count, begin, end, out), seq() and state() as DataLoader has them. The stream is the loader's own,
// to the window: what is read ahead is the batch that next() would read then, and loader() stands where the handed-out batches end.
template <typename Loader>
class ReadAhead {
public:
    // Reads nothing past the stream's first `windows` windows: the run ends there.
    ReadAhead(Loader loader, i64 windows) : loader_(std::move(loader)), windows_(windows) {}

    // As it stands after the last batch that was handed out.
    const Loader& loader() const { return loader_; }

    // The part [begin, end) of the next `count` windows, (end - begin, S + 1) ids, valid until the next call. Then starts to read the same
    // part of the batch after it. What went wrong while reading ahead is thrown here, once that batch is asked for.
    const int32_t* next(i64 count, i64 begin, i64 end) {
        const Part part = {count, begin, end};
        const auto start = std::chrono::steady_clock::now();
        std::future<Batch> ahead = std::exchange(ahead_, {});
        if (part != ahead_part_) { ahead = {}; }
        Batch batch = ahead.valid() ? ahead.get() : read(loader_, part, std::exchange(spare_, {}));
        loader_ = std::move(batch.after);
        spare_ = std::exchange(current_, std::move(batch.windows));
        waited_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (loader_.state().position + count <= windows_) {
            ahead_part_ = part;
            // Where no thread can be started, the batch is read when it is asked for.
            ahead_ = std::async(std::launch::async | std::launch::deferred, read, loader_, part, std::exchange(spare_, {}));
        }
        return current_.data();
    }
    // Seconds that the last next() took: what reading cost the step.
    double waited() const { return waited_; }

private:
    struct Part {
        i64 count, begin, end;
        bool operator==(const Part&) const = default;
    };
    struct Batch {
        Loader after;
        std::vector<int32_t> windows;
    };
    static Batch read(Loader loader, const Part& part, std::vector<int32_t> room) {
        room.resize((part.end - part.begin) * (loader.seq() + 1));
        loader.next(part.count, part.begin, part.end, room.data());
        return {std::move(loader), std::move(room)};
    }

    Loader loader_;
    i64 windows_;
    std::vector<int32_t> current_, spare_;
    Part ahead_part_ = {};
    double waited_ = 0;
    std::future<Batch> ahead_;  // last: its destructor waits for the thread
};
