// grid.h: what the emulator's runtime asks of its scheduler.
#pragma once

#include <string>

#include "simt.h"

namespace simt {

// Runs a grid to its end. The error that ended it, or empty.
std::string run_grid(const Grid& grid);
// The kernel's name and where it was launched.
std::string describe(const Grid& grid);

}  // namespace simt
