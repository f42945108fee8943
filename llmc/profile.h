// profile.h: what people see of a timeline: --profile's table, --trace's file.
#pragma once

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "comm.h"

// --profile: each kind of span, over the steps that were added.
class Profile {
public:
    void add(const std::vector<Timeline::Span>& spans, double step_seconds) {
        steps_++, seconds_ += step_seconds;
        for (const Timeline::Span& s : spans) {
            if (s.row != Timeline::WORK) { continue; }
            Line& line = lines_[s.name];
            line.calls++, line.seconds += s.end - s.begin, line.cost.flops += s.cost.flops, line.cost.bytes += s.cost.bytes;
        }
    }
    // One line a kind, the longest first.
    std::string table() const {
        std::vector<std::pair<std::string, Line>> lines(lines_.begin(), lines_.end());
        Line rest = {1, seconds_, {}};
        for (const auto& [name, line] : lines) { rest.seconds -= line.seconds; }
        lines.emplace_back("everything else", rest);
        std::sort(lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
        std::string text = format("%-24s %7s %10s %7s %10s %9s\n", "op, rank 0", "calls", "ms a step", "share", "GFLOP/s", "GB/s");
        const auto rate = [](double amount, double seconds) { return amount > 0 ? format("%.1f", amount / seconds * 1e-9) : std::string("-"); };
        for (const auto& [name, line] : lines) {
            text += format("%-24s %7.0f %10.2f %6.1f%% %10s %9s\n", name.c_str(), (double)line.calls / steps_, 1e3 * line.seconds / steps_, 100 * line.seconds / seconds_,
                           rate(line.cost.flops, line.seconds).c_str(), rate(line.cost.bytes, line.seconds).c_str());
        }
        return text + format("%-24s %7s %10.2f %6.1f%%   mean of %d step%s", "step", "", 1e3 * seconds_ / steps_, 100.0, steps_, steps_ == 1 ? "" : "s");
    }

private:
    struct Line {
        i64 calls = 0;
        double seconds = 0;
        Cost cost;
    };
    int steps_ = 0;
    double seconds_ = 0;
    std::map<std::string, Line> lines_;
};

// --trace: spans as events of the Chrome trace format, which Perfetto opens: a process for each rank, its work in a thread, its sums as spans that may overlap.
inline nlohmann::json trace_events(const std::vector<Timeline::Span>& spans, int rank) {
    nlohmann::json events = nlohmann::json::array();
    events.push_back({{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", format("rank %d", rank)}}}});
    for (size_t i = 0; i < spans.size(); i++) {
        const Timeline::Span& s = spans[i];
        nlohmann::json event = {{"name", s.name}, {"pid", rank}, {"tid", 0}, {"ts", 1e6 * s.begin}};
        if (s.row == Timeline::WORK) {
            event.update({{"ph", "X"}, {"dur", 1e6 * (s.end - s.begin)}, {"args", {{"GFLOP", 1e-9 * s.cost.flops}, {"MB", 1e-6 * s.cost.bytes}}}});
            events.push_back(event);
        } else {
            event.update({{"ph", "b"}, {"cat", "sums"}, {"id", (size_t)rank << 32 | i}, {"args", {{"MB", 1e-6 * s.cost.bytes}}}});
            events.push_back(event);
            event.update({{"ph", "e"}, {"ts", 1e6 * s.end}});
            event.erase("args");
            events.push_back(event);
        }
    }
    return events;
}

// Records a run's steps for both, where one is asked for.
class StepRecorder {
public:
    StepRecorder(bool profile, std::string trace_file, Ranks& ranks, Run& run) : profiles_(profile), trace_file_(std::move(trace_file)), ranks_(ranks), run_(run) {
        if (!profile && trace_file_.empty()) { return; }
        ranks.world->barrier();  // the ranks' zero of time
        timeline_.emplace(run);
        note_in(&*timeline_);
    }
    StepRecorder(const StepRecorder&) = delete;
    ~StepRecorder() { note_in(nullptr); }

    void step_begins() {
        if (timeline_) { timeline_->take(); }
    }
    void step_ends(double seconds) {
        if (!timeline_) { return; }
        const std::vector<Timeline::Span> spans = timeline_->take();
        steps_++;
        if (steps_ == 2) { profile_ = {}; }  // the first step touches all memory for the first time: not counted where there is another
        profile_.add(spans, seconds);
        if (steps_ <= TRACED_STEPS) { traced_.insert(traced_.end(), spans.begin(), spans.end()); }
        if (steps_ == TRACED_STEPS) { write_trace(); }
    }
    // By all ranks, at the end. Returns the table, or nothing.
    std::string finish() {
        if (steps_ < TRACED_STEPS) { write_trace(); }
        return profiles_ && steps_ > 0 ? profile_.table() : "";
    }

private:
    static constexpr int TRACED_STEPS = 4;

    void note_in(Timeline* timeline) {
        run_.timeline = ranks_.world->timeline = ranks_.tp->timeline = ranks_.dp->timeline = timeline;
    }
    // Every rank's events, in one file.
    void write_trace() {
        if (trace_file_.empty()) { return; }
        Comm& world = *ranks_.world;
        std::string mine = trace_events(traced_, world.rank).dump();
        mine = mine.substr(1, mine.size() - 2);
        std::vector<i64> sizes(world.size);
        const i64 size = (i64)mine.size();
        world.share(&size, sizes.data(), sizeof(i64));
        const i64 most = *std::max_element(sizes.begin(), sizes.end());
        mine.resize(most);
        std::string all(most * world.size, '\0'), text;
        world.share(mine.data(), all.data(), most);
        if (world.rank != 0) { return; }
        for (int r = 0; r < world.size; r++) { text += (r > 0 ? ",\n" : "") + all.substr(r * most, sizes[r]); }
        write_file_atomically(trace_file_, "{\"traceEvents\": [" + text + "]}\n");
    }

    const bool profiles_;
    const std::string trace_file_;
    Ranks& ranks_;
    Run& run_;
    std::optional<Timeline> timeline_;
    Profile profile_;
    std::vector<Timeline::Span> traced_;
    int steps_ = 0;
};
