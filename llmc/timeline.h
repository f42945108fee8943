// timeline.h: what a rank did when. Ops and collectives leave spans here where Run::timeline is set (--profile, --trace); elsewhere they look at
// one pointer.
#pragma once

#include <optional>
#include <vector>

#include "device.h"

// The least that an op needs: its formula's operations, and its arrays to or from memory once.
struct Cost {
    double flops = 0, bytes = 0;
};

class Timeline {
public:
    enum Row { WORK, SUMS };  // what a rank does, one thing after another; what is on its way meanwhile
    struct Span {
        const char* name;
        Row row;
        Cost cost;
        double begin, end;  // seconds since the timeline began
    };

    explicit Timeline(Run& run) : run_(run), origin_(run) {}

    int open(const char* name, Row row, Cost cost) {
        open_.push_back({name, row, cost, Moment(run_), {}});
        return (int)open_.size() - 1;
    }
    void close(int span) { close(span, run_); }
    void close(int span, Run& where) {  // when `where` comes to this place
        if (!open_[span].end) { open_[span].end.emplace(where); }
    }
    // The spans since the last call, each closed. On a GPU this waits for them.
    std::vector<Span> take() {
        std::vector<Span> spans;
        for (const Open& s : open_) {
            check(s.end.has_value(), "a span of '%s' was not closed", s.name);
            spans.push_back({s.name, s.row, s.cost, seconds_between(origin_, s.begin), seconds_between(origin_, *s.end)});
        }
        open_.clear();
        return spans;
    }

    // A span of work, for as long as it lives. Null: none.
    class Scope {
    public:
        template <typename CostOf>
        Scope(Timeline* timeline, const char* name, const CostOf& cost) : timeline_(timeline), span_(timeline ? timeline->open(name, WORK, cost()) : 0) {}
        Scope(const Scope&) = delete;
        ~Scope() {
            if (timeline_) { timeline_->close(span_); }
        }

    private:
        Timeline* const timeline_;
        const int span_;
    };

private:
    struct Open {
        const char* name;
        Row row;
        Cost cost;
        Moment begin;
        std::optional<Moment> end;
    };
    Run& run_;
    const Moment origin_;
    std::vector<Open> open_;
};
