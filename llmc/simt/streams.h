// streams.h: queues of work, run on demand by the threads that wait for it, for all devices and ranks of the process.
//
// Nothing runs before a host thread waits for it, and then only what it waits for, as late as events allow: so a wait that the host, or
// another stream, forgot shows as a wrong result every time, not once in a thousand runs. Work of several ranks is one more such edge:
// in a Meeting the streams of all of them wait for each other. Who waits runs other ranks' streams too, as far as they are queued; where a
// rank has yet to queue its part, it sleeps until that rank's own thread has done so.
//
// The lock is not held while work runs: ranks queue, and run other streams, meanwhile.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "checker.h"
#include "grid.h"
#include "../base.h"

namespace simt {

struct Stream;
// A place in a stream: after its first `position` tasks. No stream: nothing to wait for.
struct Mark {
    std::shared_ptr<Stream> stream;
    i64 position = 0;
};

// One task in each member's stream. When all are at the front, `work` runs once and all streams go on.
class Meeting {
public:
    Meeting(std::string name, int members, Work work) : name(std::move(name)), work(std::move(work)), members(members) {}
    const std::string name;
    const Work work;
    std::vector<Mark> members;  // the place after its task; no stream: has not come yet
    std::string cancelled;      // why it will not take place
};

struct Task {
    Work work;
    Mark after = {};                        // runs when this is reached
    std::shared_ptr<Meeting> meeting = {};  // in place of `work`
    checker::Ticket ticket = {};
};

class Capture;
struct Stream : std::enable_shared_from_this<Stream> {
    const int device, number = checker::new_stream();
    std::deque<Task> tasks;  // the first may be running
    bool running = false;
    i64 queued = 0, done = 0;
    std::string error;  // of work that failed, or was dropped after a failure, and that nobody was told of
    std::shared_ptr<Capture> capture;  // what it is given is recorded there (capture.h), as that of `branch`; null: it is not
    int branch = 0;

    explicit Stream(int device) : device(device) {}
};

// All functions are called with the lock held; those that run work give it up meanwhile.
class Streams {
public:
    std::mutex mutex;
    using Lock = std::unique_lock<std::mutex>;

    cudaStream_t add(int device) {
        auto stream = std::make_shared<Stream>(device);
        const auto handle = (cudaStream_t)stream.get();
        streams_.emplace(handle, std::move(stream));
        return handle;
    }
    // Null: the default stream of `device`.
    std::shared_ptr<Stream> find(cudaStream_t handle, int device) {
        if (!handle) { handle = default_stream(device); }
        const auto found = streams_.find(handle);
        return found == streams_.end() ? nullptr : found->second;
    }
    void remove(const std::shared_ptr<Stream>& stream) { streams_.erase((cudaStream_t)stream.get()); }
    std::vector<std::shared_ptr<Stream>> of_device(int device) const {
        std::vector<std::shared_ptr<Stream>> all;
        for (const auto& [handle, stream] : streams_) {
            if (stream->device == device) { all.push_back(stream); }
        }
        return all;
    }

    void queue(Stream& stream, Task task) {
        task.ticket = checker::ticket();
        stream.tasks.push_back(std::move(task));
        stream.queued++;
        note_change();
    }
    void cancel(Meeting& meeting, const std::string& why) {
        if (meeting.cancelled.empty()) { meeting.cancelled = why; }
        note_change();
    }

    // Runs what `goal` waits for, and sleeps while others have to act first. What went wrong, or empty.
    std::string wait(const Mark& goal, Lock& lock) {
        while (!reached(goal)) {
            Search search;
            if (Stream* next = runnable(goal, search)) {
                run_front(*next, lock);
            } else if (search.others.empty()) {
                return give_up(*goal.stream, "streams wait for each other for ever:" + search.standstill);
            } else if (!sleep(lock)) {
                return give_up(*goal.stream, "nothing has happened for long: " + search.others);
            }
        }
        if (!goal.stream) { return ""; }
        checker::waited_for(goal.stream->number, goal.position);
        return std::exchange(goal.stream->error, "");
    }
    // Runs what can be run of it without sleeping, for about this long.
    void advance(const Mark& goal, double seconds, Lock& lock) {
        const auto begin = std::chrono::steady_clock::now();
        while (!reached(goal) && std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds) {
            Search search;
            Stream* next = runnable(goal, search);
            if (!next) { return; }
            run_front(*next, lock);
        }
    }
    static bool reached(const Mark& mark) { return !mark.stream || mark.stream->done >= mark.position; }

private:
    struct Search {
        std::set<const Stream*> seen = {};
        std::string others = {};      // what others must do first
        std::string standstill = {};  // the meetings that were passed by
    };

    // A stream whose first task can run now, and that `goal` waits for, itself or through others. Null: there is none.
    Stream* runnable(const Mark& goal, Search& search) {
        Stream& stream = *goal.stream;
        if (reached(goal) || !search.seen.insert(&stream).second) { return nullptr; }
        if (stream.running) {
            search.others = "work on a stream has not ended";
            return nullptr;
        }
        const Task& task = stream.tasks.front();
        if (!reached(task.after)) { return runnable(task.after, search); }
        if (!task.meeting || !task.meeting->cancelled.empty()) { return &stream; }
        return runnable(stream, *task.meeting, search);
    }
    Stream* runnable(Stream& stream, const Meeting& meeting, Search& search) {
        bool complete = true;
        for (size_t rank = 0; rank < meeting.members.size(); rank++) {
            const Mark& member = meeting.members[rank];
            if (!member.stream) {
                complete = false;
                search.others = format("%s: rank %zu has not called it", meeting.name.c_str(), rank);
            } else if (const Mark before = {member.stream, member.position - 1}; !reached(before)) {
                complete = false;
                search.standstill += format(" %s waits for rank %zu;", meeting.name.c_str(), rank);
                if (Stream* next = runnable(before, search)) { return next; }
            }
        }
        return complete ? &stream : nullptr;
    }
    void run_front(Stream& stream, Lock& lock) {
        const Task task = stream.tasks.front();
        std::vector<std::shared_ptr<Stream>> involved{stream.shared_from_this()};
        std::string error = task.meeting ? task.meeting->cancelled : "";
        if (task.meeting && error.empty()) {
            involved.clear();
            for (const Mark& member : task.meeting->members) { involved.push_back(member.stream); }
        }
        std::vector<checker::Place> places;
        for (const auto& s : involved) {
            s->running = true;
            places.push_back({s->number, s->done + 1, s->tasks.front().ticket});
        }
        lock.unlock();
        if (error.empty()) { error = run(task, std::move(places)); }
        lock.lock();
        for (const auto& s : involved) {
            s->running = false;
            s->tasks.pop_front();
            s->done++;
        }
        if (!error.empty()) {
            for (const auto& s : involved) { s->error = fail(*s, error); }
        }
        note_change();
    }
    static std::string run(const Task& task, std::vector<checker::Place> places) {
        const checker::Task checked(std::move(places));
        if (task.after.stream) { checker::waited_for(task.after.stream->number, task.after.position); }
        const Work& work = task.meeting ? task.meeting->work : task.work;
        try {
            const std::string error = work ? work() : "";
            return error.empty() ? checker::take_report() : error;
        } catch (const std::exception& error) { return error.what(); }
    }

    // As on a GPU, nothing more runs after a failure: the queues of the stream's device are dropped. Returns the error.
    std::string fail(const Stream& failed, const std::string& error) {
        for (const auto& stream : of_device(failed.device)) {
            const size_t kept = stream->running ? 1 : 0;
            if (stream->tasks.size() > kept) { stream->error = error; }
            while (stream->tasks.size() > kept) {
                if (const auto& meeting = stream->tasks.back().meeting) { cancel(*meeting, "a rank failed before it: " + error); }
                stream->tasks.pop_back();
            }
            stream->done = stream->queued - (i64)kept;
        }
        note_change();
        return error;
    }

    std::string give_up(Stream& stream, const std::string& error) {
        fail(stream, error);
        stream.error.clear();  // told now
        return error;
    }

    void note_change() {
        changes_++;
        changed_.notify_all();
    }
    // Until something changes. False: nothing has, for too long.
    bool sleep(Lock& lock) {
        const std::chrono::duration<double> longest(timeout_seconds());
        return changed_.wait_for(lock, longest, [this, before = changes_] { return changes_ != before; });
    }

    cudaStream_t default_stream(int device) {
        const auto [found, is_new] = defaults_.try_emplace(device);
        if (is_new) { found->second = add(device); }
        return found->second;
    }

    std::map<cudaStream_t, std::shared_ptr<Stream>> streams_;
    std::map<int, cudaStream_t> defaults_;  // by device
    std::condition_variable changed_;
    i64 changes_ = 0;  // how often anything was queued, was cancelled, or ran
};

}  // namespace simt
