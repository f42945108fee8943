// grid.h: what the emulator's runtime asks of its scheduler, and what the shims of CUDA's libraries ask of the runtime.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "simt.h"

namespace simt {

// Runs a grid to its end. The error that ended it, or empty.
std::string run_grid(const Grid& grid);
// The kernel's name and where it was launched.
std::string describe(const Grid& grid);

// ---- for the shims of CUDA's libraries
// What a stream does when its turn comes; returns what went wrong, or empty.
using Work = std::function<std::string()>;
// Queues work as if it were a kernel: it runs as late as events allow.
cudaError_t queue(cudaStream_t stream, Work work);
// Of a stream that is being captured: what each launch of the graph does, with the stream that then stands for it.
cudaError_t record(cudaStream_t stream, std::function<cudaError_t(cudaStream_t)> again);
// Empty where [p, p + bytes) lies in one allocation of the stream's device; else what is wrong with it.
std::string wrong_memory(const void* p, size_t bytes, cudaStream_t stream);
int stream_device(cudaStream_t stream);
// Keeps an error's text for cudaGetErrorString, of this host thread.
cudaError_t fail(cudaError_t code, const std::string& text);

// SIMT_TIMEOUT: how long a host thread sleeps for others (default 120).
double timeout_seconds();

// A task that `members` ranks queue, each in a stream of its own: when all of these have come to it, `work` runs once, and all go on.
class Meeting;
std::shared_ptr<Meeting> new_meeting(const std::string& name, int members, Work work);
cudaError_t queue_meeting(const std::shared_ptr<Meeting>& meeting, int member, cudaStream_t stream);
// It will not take place: streams that wait for it fail with this text.
void cancel(Meeting& meeting, const std::string& why);

}  // namespace simt
