// task_order.h: which tasks of which streams one has waited for: vector clocks. All functions are called with the checker's lock held.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "checker.h"

namespace simt::checker {

// Of each stream, the last task that has been waited for.
struct Clock {
    std::map<int, long> last;

    bool knows(int stream, long position) const {
        const auto found = last.find(stream);
        return position == 0 || (found != last.end() && found->second >= position);
    }
    void learn(int stream, long position) {
        long& mine = last[stream];
        mine = std::max(mine, position);
    }
    void learn(const Clock& other) {
        for (const auto& [stream, position] : other.last) { learn(stream, position); }
    }
};

// A task at work.
struct Acting {
    std::vector<Place> places;
    Clock clock;
    std::string report = {};
};

class TaskOrder {
public:
    Ticket ticket() {
        if (!ticket_) {
            ticket_ = std::make_shared<const Clock>(host_);
            tickets_.push_back(ticket_);
        }
        return ticket_;
    }
    void begin(Acting& task) {
        for (const Place& place : task.places) {
            Stream& stream = streams_[place.stream];
            if (!stream.done.empty()) { task.clock.learn(stream.done.back().second); }
            if (place.ticket) { task.clock.learn(*place.ticket); }
            task.clock.learn(place.stream, place.position);
            stream.begun = place.position;
        }
    }
    void end(Acting& task) {
        for (Place& place : task.places) {
            streams_[place.stream].done.push_back({place.position, task.clock});
            place.ticket.reset();
        }
    }
    // `task`: null for the host.
    void waited_for(Acting* task, int stream, long position) {
        Clock& mine = task ? task->clock : host_;
        mine.learn(stream, position);
        const auto& done = streams_[stream].done;
        const auto after = std::partition_point(done.begin(), done.end(), [&](const auto& entry) { return entry.first <= position; });
        if (after != done.begin()) { mine.learn(std::prev(after)->second); }
        if (!task) { ticket_.reset(); }
    }

    // Has `task` waited for everything that has been run?
    bool knows_all(const Acting* task) const {
        const Clock& mine = task ? task->clock : host_;
        return std::all_of(streams_.begin(), streams_.end(), [&](const auto& s) { return mine.knows(s.first, s.second.begun); });
    }
    // The host has, and no task is queued or runs: nothing before can ever be part of a race. Forgets it all.
    bool forget() {
        std::erase_if(tickets_, [](const auto& ticket) { return ticket.expired(); });
        if (!knows_all(nullptr) || !tickets_.empty()) { return false; }
        streams_.clear();
        host_.last.clear();
        return true;
    }

private:
    struct Stream {
        long begun = 0;
        std::vector<std::pair<long, Clock>> done;  // positions, and what the stream had waited for after them
    };
    std::map<int, Stream> streams_;
    Clock host_;
    Ticket ticket_;  // of what the host knows now
    std::vector<std::weak_ptr<const Clock>> tickets_;
};

}  // namespace simt::checker
