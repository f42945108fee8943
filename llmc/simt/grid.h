// grid.h: what the emulator's runtime asks of its scheduler, and what the shims of CUDA's libraries ask of the runtime.
#pragma once

#include <string>

#include "simt.h"

namespace simt {

// Runs a grid to its end. The error that ended it, or empty.
std::string run_grid(const Grid& grid);
// The kernel's name and where it was launched.
std::string describe(const Grid& grid);

// Queues a library's work on a stream, as if it were a kernel: it runs as late as events allow, and returns what went wrong, or empty.
cudaError_t queue(cudaStream_t stream, std::function<std::string()> work);
// Empty where [p, p + bytes) lies in one allocation of the stream's device; else what is wrong with it.
std::string wrong_memory(const void* p, size_t bytes, cudaStream_t stream);
// Keeps an error's text for cudaGetErrorString.
cudaError_t fail(cudaError_t code, const std::string& text);

}  // namespace simt
