// capture.h: what streams are given between cudaStreamBeginCapture and cudaStreamEndCapture. It is kept, and each launch of the graph gives it
// anew, in the same order: to the stream of the launch what the capture's first stream was given, and to streams of the graph's own what
// those were given that had joined by waiting for one of its events.
#pragma once

#include <thread>

#include "streams.h"

namespace simt {

// A place in a captured stream: after its first `steps` steps.
struct Place {
    int branch = 0;
    size_t steps = 0;
};

class Capture : public std::enable_shared_from_this<Capture> {
public:
    using Again = std::function<cudaError_t(cudaStream_t)>;  // queues it
    struct Step {
        int branch;
        Again again;  // none: a wait
        Place after = {};
    };
    // A captured stream.
    struct Branch {
        std::shared_ptr<Stream> stream;
        std::vector<size_t> seen;  // of every branch: how many steps come before what this one is given next
    };
    // An event that was last recorded in a capture.
    struct Moment {
        std::shared_ptr<Capture> capture;  // none: it was not
        Place place = {};
        std::vector<size_t> seen = {};
    };

    explicit Capture(cudaStreamCaptureMode mode) : mode(mode) {}
    const cudaStreamCaptureMode mode;
    const std::thread::id thread = std::this_thread::get_id();
    std::vector<Branch> branches;  // the first: of the stream that the capture began with
    std::vector<Step> steps;
    std::string invalid;  // the call that has spoilt it
    bool ended = false;

    void join(const std::shared_ptr<Stream>& stream) {
        stream->capture = shared_from_this();
        stream->branch = (int)branches.size();
        branches.push_back({stream, std::vector<size_t>(branches.size() + 1)});
    }
    void add(Step step) {
        branches[step.branch].seen[step.branch]++;
        steps.push_back(std::move(step));
    }
    Moment now(int branch) { return {shared_from_this(), {branch, branches[branch].seen[branch]}, branches[branch].seen}; }
    // The stream, which may not have been captured before, waits.
    void wait(const std::shared_ptr<Stream>& stream, const Moment& moment) {
        if (!stream->capture) { join(stream); }
        std::vector<size_t>& seen = branches[stream->branch].seen;
        seen.resize(branches.size());
        for (size_t b = 0; b < moment.seen.size(); b++) { seen[b] = std::max(seen[b], moment.seen[b]); }
        add({stream->branch, {}, moment.place});
    }
    // Whether all that was given to any stream comes before the first stream's end.
    bool joined() const {
        for (size_t b = 1; b < branches.size(); b++) {
            if (b >= branches[0].seen.size() || branches[0].seen[b] < branches[b].seen[b]) { return false; }
        }
        return true;
    }
    void end() {
        ended = true;
        for (const Branch& branch : branches) { branch.stream->capture.reset(); }
    }
    // The calling thread may make no call that could wait for the captured streams.
    bool forbids_unsafe_calls() const {
        return mode == cudaStreamCaptureModeGlobal || (mode == cudaStreamCaptureModeThreadLocal && thread == std::this_thread::get_id());
    }
};

}  // namespace simt
