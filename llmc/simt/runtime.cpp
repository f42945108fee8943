// runtime.cpp: the CUDA runtime's calls that the project uses, for the emulator: devices and their memory, streams, events, launches. Same
// names, same prototypes (the toolkit's headers check them), so host code is the same with and without a GPU.
//
// SIMT_DEVICES = N (default 1): how many devices there are. They share nothing: a kernel that is given another device's memory is an error.
// Ranks are host threads: the current device, and the last error, are each thread's own.
#include <unistd.h>

#include "guarded.h"
#include "streams.h"

namespace simt {
namespace {

constexpr size_t SHARED_BY_DEFAULT = 48 << 10, SHARED_AT_MOST = 227 << 10;  // of compute capability 9.0

// ---- of this host thread
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_error_text;

// ---- of the process
using Time = std::chrono::steady_clock::time_point;
struct Event {
    int device;
    bool timed;
    Mark mark = {};                   // no stream: never recorded
    std::shared_ptr<Time> time = {};  // when the mark was reached
};

struct Runtime {
    Streams streams;
    std::map<void*, std::pair<int, Guarded>> allocations;  // with their device
    std::set<Event*> events;
    std::map<const void*, size_t> shared_limits;  // of kernels for which more than the default was asked
    std::mutex grids;                             // held while a grid runs: damage is then that grid's

    // Empty if [p, p + bytes) lies in one allocation of the device.
    std::string wrong_memory(const void* p, size_t bytes, int device) const {
        auto next = allocations.upper_bound((void*)p);
        if (next == allocations.begin()) { return format("%p is not in device memory", p); }
        const auto& [owner, memory] = std::prev(next)->second;
        const size_t offset = (const char*)p - memory.data();
        if (offset > memory.size()) { return format("%p is not in device memory", p); }
        if (bytes > memory.size() - offset) {
            return format("%zu bytes at byte %zu of an allocation of %zu", bytes, offset, memory.size());
        }
        return owner == device ? "" : format("%p is in the memory of device %d, not of device %d", p, owner, device);
    }
    std::string damage() {
        std::lock_guard lock(streams.mutex);
        for (const auto& [p, allocation] : allocations) {
            if (const std::string found = allocation.second.damage(); !found.empty()) { return "device allocation: " + found; }
        }
        return "";
    }
};

Runtime& runtime() {
    static Runtime runtime;
    return runtime;
}
// Every call below is one of these: the runtime, locked.
struct Locked {
    Runtime& r = runtime();
    Streams::Lock lock{r.streams.mutex};
    Runtime* operator->() { return &r; }

    std::shared_ptr<Stream> stream(cudaStream_t handle) {
        auto found = r.streams.find(handle, current_device);
        check(found, "simt: %p is no stream", (void*)handle);
        return found;
    }
    Event& event(cudaEvent_t handle) {
        check(r.events.count((Event*)handle), "simt: %p is no event", (void*)handle);
        return *(Event*)handle;
    }
    cudaError_t queue(const std::shared_ptr<Stream>& stream, Task task) {
        r.streams.queue(*stream, std::move(task));
        const char* when = getenv("SIMT_STREAMS");
        if (!when || strcmp(when, "eager") != 0) { return cudaSuccess; }
        const Mark all = {stream, stream->queued};
        r.streams.advance(all, 1e9, lock);  // a meeting that others have yet to come to is not waited for
        return Streams::reached(all) ? result(std::exchange(stream->error, "")) : cudaSuccess;  // which is no wait of the host's
    }
    static cudaError_t result(const std::string& error) { return error.empty() ? cudaSuccess : fail(cudaErrorLaunchFailure, error); }
    cudaError_t wait(const Mark& mark) { return result(r.streams.wait(mark, lock)); }
    cudaError_t wait_for_all(int device) {
        cudaError_t first = cudaSuccess;
        for (const auto& stream : r.streams.of_device(device)) {
            const cudaError_t error = wait({stream, stream->queued});
            if (first == cudaSuccess) { first = error; }
        }
        return first;
    }
    // Who asks again and again gets there; the first answer is that of a GPU which has only just begun.
    cudaError_t query(const Mark& mark) {
        if (Streams::reached(mark)) { return wait(mark); }
        r.streams.advance(mark, 1e-3, lock);
        return cudaErrorNotReady;
    }
};

int device_count() {
    const char* text = getenv("SIMT_DEVICES");
    return text ? atoi(text) : 1;
}

}  // namespace

// ---- what the scheduler and the shims ask (grid.h)
cudaError_t fail(cudaError_t code, const std::string& text) {
    last_error = code;
    last_error_text = text;
    return code;
}
cudaError_t queue(cudaStream_t stream, Work work) {
    Locked locked;
    return locked.queue(locked.stream(stream), {std::move(work)});
}
std::string wrong_memory(const void* p, size_t bytes, cudaStream_t stream) {
    Locked locked;
    return locked->wrong_memory(p, bytes, locked.stream(stream)->device);
}
int stream_device(cudaStream_t stream) { return Locked().stream(stream)->device; }
double timeout_seconds() {
    const char* text = getenv("SIMT_TIMEOUT");
    return text ? atof(text) : 120;
}
std::shared_ptr<Meeting> new_meeting(const std::string& name, int members, Work work) {
    return std::make_shared<Meeting>(name, members, std::move(work));
}
cudaError_t queue_meeting(const std::shared_ptr<Meeting>& meeting, int member, cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    meeting->members[member] = {stream, stream->queued + 1};
    return locked.queue(stream, {{}, {}, meeting});
}
void cancel(Meeting& meeting, const std::string& why) { Locked()->streams.cancel(meeting, why); }

cudaError_t check_argument(const Grid& grid, int index, const void* p) {
    const std::string wrong = p ? wrong_memory(p, 0, grid.stream) : "";
    return wrong.empty() ? cudaSuccess
                         : fail(cudaErrorInvalidValue, format("%s: argument %d: %s", describe(grid).c_str(), index, wrong.c_str()));
}

cudaError_t launch(Grid grid) {
    Locked locked;
    const dim3 b = grid.blocks, t = grid.threads;
    const uint64_t threads = (uint64_t)t.x * t.y * t.z;
    if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > 0x7FFFFFFFu || b.y > 65535 || b.z > 65535 || threads == 0 || threads > 1024 || t.z > 64) {
        return fail(cudaErrorInvalidConfiguration, format("%s: a grid of %ux%ux%u blocks of %ux%ux%u threads cannot be launched",
                                                          describe(grid).c_str(), b.x, b.y, b.z, t.x, t.y, t.z));
    }
    const auto asked = locked->shared_limits.find(grid.kernel);
    const size_t limit = asked != locked->shared_limits.end() ? std::max(asked->second, SHARED_BY_DEFAULT) : SHARED_BY_DEFAULT;
    if (grid.shared_bytes > limit) {
        return fail(cudaErrorInvalidValue, format("%s: %zu bytes of dynamic shared memory, where it may have %zu", describe(grid).c_str(),
                                                  grid.shared_bytes, limit));
    }
    const auto stream = locked.stream(grid.stream);
    if (stream->device != current_device) {
        return fail(cudaErrorInvalidResourceHandle, format("%s: on a stream of device %d, while device %d is current",
                                                           describe(grid).c_str(), stream->device, current_device));
    }
    return locked.queue(stream, {[grid] {
                            std::lock_guard one_at_a_time(runtime().grids);
                            const std::string error = run_grid(grid), damage = runtime().damage();
                            return !error.empty() || damage.empty() ? error : describe(grid) + ": " + damage;
                        }});
}

}  // namespace simt

using namespace simt;

extern "C" {

// ---- devices
cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count();
    return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice, format("SIMT_DEVICES is %d", *count));
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) {
        return fail(cudaErrorInvalidDevice, format("cudaSetDevice(%d), of %d devices", device, device_count()));
    }
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= device_count()) { return fail(cudaErrorInvalidDevice, format("there is no device %d", device)); }
    *properties = {};
    strcpy(properties->name, "emulated");
    properties->uuid.bytes[0] = (char)device;
    properties->major = 9, properties->minor = 0;
    properties->multiProcessorCount = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return Locked().wait_for_all(current_device); }

// ---- memory
cudaError_t cudaMalloc(void** p, size_t bytes) {
    Guarded memory(bytes);
    *p = memory.data();
    Locked()->allocations.emplace(*p, std::pair(current_device, std::move(memory)));
    return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
    if (!p) { return cudaSuccess; }
    Locked locked;
    const auto found = locked->allocations.find(p);
    if (found == locked->allocations.end()) { return fail(cudaErrorInvalidValue, format("cudaFree of %p, which is no allocation", p)); }
    const cudaError_t error = locked.wait_for_all(found->second.first);
    locked->allocations.erase(p);
    return error;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
    *p = malloc(std::max<size_t>(bytes, 1));
    return *p ? cudaSuccess : fail(cudaErrorMemoryAllocation, format("no memory for %zu bytes", bytes));
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
cudaError_t cudaFreeHost(void* p) {
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = *free = (size_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    std::string wrong;
    if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) { wrong = locked->wrong_memory(to, bytes, stream->device); }
    if (wrong.empty() && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)) {
        wrong = locked->wrong_memory(from, bytes, stream->device);
    }
    if (!wrong.empty()) { return fail(cudaErrorInvalidValue, "cudaMemcpyAsync: " + wrong); }
    return locked.queue(stream, {[=] {
                            note_copy(to, from, bytes, "cudaMemcpyAsync");
                            if (bytes > 0) { memcpy(to, from, bytes); }
                            return std::string();
                        }});
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    const std::string wrong = locked->wrong_memory(to, bytes, stream->device);
    if (!wrong.empty()) { return fail(cudaErrorInvalidValue, "cudaMemsetAsync: " + wrong); }
    return locked.queue(stream, {[=] {
                            note_write(to, bytes, "cudaMemsetAsync");
                            memset(to, value, bytes);
                            return std::string();
                        }});
}

// ---- streams
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = Locked()->streams.add(current_device);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    const cudaError_t error = locked.wait({stream, stream->queued});
    locked->streams.remove(stream);
    return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    return locked.wait({stream, stream->queued});
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    return locked.query({stream, stream->queued});
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
    Locked locked;
    return locked.queue(locked.stream(handle), {[=] {
                            function(argument);
                            return std::string();
                        }});
}

// ---- events
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    auto* made = new Event{current_device, !(flags & cudaEventDisableTiming)};
    Locked()->events.insert(made);
    *event = (cudaEvent_t)made;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    Locked locked;
    Event* event = &locked.event(handle);
    locked->events.erase(event);
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    Locked locked;
    Event& event = locked.event(handle);
    const auto stream = locked.stream(stream_handle);
    if (event.device != stream->device) {
        return fail(cudaErrorInvalidResourceHandle, format("an event of device %d is recorded on device %d", event.device, stream->device));
    }
    cudaError_t error = cudaSuccess;
    if (event.timed) {
        event.time = std::make_shared<Time>();
        error = locked.queue(stream, {[time = event.time] {
                                 *time = std::chrono::steady_clock::now();
                                 return std::string();
                             }});
    }
    event.mark = {stream, stream->queued};
    return error;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Locked locked;
    const Mark mark = locked.event(event).mark;
    return locked.wait(mark);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    Locked locked;
    const Mark mark = locked.event(event).mark;
    return locked.query(mark);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
    Locked locked;
    const Event &begin = locked.event(first), &end = locked.event(second);
    if (!begin.time || !end.time) { return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event that has no time"); }
    if (!Streams::reached(begin.mark) || !Streams::reached(end.mark)) { return cudaErrorNotReady; }
    *milliseconds = std::chrono::duration<float, std::milli>(*end.time - *begin.time).count();
    return cudaSuccess;
}
// For the event as it is now: a later record does not matter.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Locked locked;
    const Mark mark = locked.event(event).mark;
    return mark.stream ? locked.queue(locked.stream(stream), {{}, mark}) : cudaSuccess;
}

// ---- kernels and errors
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || (size_t)value > SHARED_AT_MOST) {
        return fail(cudaErrorInvalidValue, format("cudaFuncSetAttribute: attribute %d, value %d, of at most %zu bytes of shared memory",
                                                  (int)attribute, value, SHARED_AT_MOST));
    }
    Locked()->shared_limits[kernel] = value;
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t code) {
    static thread_local std::string text;
    text = format("error %d: %s", (int)code, last_error_text.c_str());
    return text.c_str();
}

}  // extern "C"
