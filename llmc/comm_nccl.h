// comm_nccl.h: collectives between GPUs by NCCL, for ranks that have a GPU each. NCCL itself is seen by comm_nccl.cpp alone; a build with
// -DLLMC_NCCL=0 needs none of it.
#pragma once

#include <memory>

#include "comm_device.h"

namespace nccl {

extern const bool BUILT;  // false: group() dies

// The group of the ranks of `host`. All of them call it, each with its device current. Both arguments outlive the group.
// poll() throws where NCCL has lost a rank or its network, or where an exchange has not ended `timeout` seconds after its start: nothing
// that is under way would ever end then.
std::unique_ptr<DeviceComm> group(Comm& host, Run& run, double timeout);

}  // namespace nccl
