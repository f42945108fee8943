// runtime.cpp: the CUDA runtime's calls that the project uses, for the emulator: devices and their memory, streams, events, launches. Same
// names, same prototypes (the toolkit's headers check them), so host code is the same with and without a GPU.
//
// SIMT_DEVICES = N (default 1): how many devices there are. They share nothing: a kernel that is given another device's memory is an error.
// Ranks are host threads: the current device, and the last error, are each thread's own.
#include <unistd.h>

#include "capture.h"
#include "guarded.h"

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
    Capture::Moment captured = {};    // in place of the mark
};
struct Graph {
    std::shared_ptr<const Capture> recorded;
    std::vector<cudaStream_t> streams = {};  // once instantiated: for all branches but the first
};

struct Runtime {
    Streams streams;
    std::map<void*, std::pair<int, Guarded>> allocations;  // with their device
    std::map<void*, size_t> host_allocations;
    std::set<Event*> events;
    std::set<Graph*> graphs;  // and those that are instantiated
    std::set<std::shared_ptr<Capture>> captures;
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
    // Whether [p, p + bytes) was allocated by cudaHostAlloc.
    bool is_pinned(const void* p, size_t bytes) const {
        const auto next = host_allocations.upper_bound((void*)p);
        return next != host_allocations.begin() && (const char*)p + bytes <= (const char*)std::prev(next)->first + std::prev(next)->second;
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
    Graph* graph(void* handle) {
        check(r.graphs.count((Graph*)handle), "simt: %p is no graph", handle);
        return (Graph*)handle;
    }
    // Queues work, or records it.
    cudaError_t give(const std::shared_ptr<Stream>& stream, Work work) {
        if (!stream->capture) { return queue(stream, {std::move(work)}); }
        return record(stream, [work = std::move(work)](cudaStream_t again) { return simt::queue(again, work); });
    }
    cudaError_t record(const std::shared_ptr<Stream>& stream, Capture::Again again) {
        if (const cudaError_t error = usable(*stream->capture)) { return error; }
        stream->capture->add({stream->branch, std::move(again)});
        return cudaSuccess;
    }
    static cudaError_t usable(const Capture& capture) {
        return capture.invalid.empty() ? cudaSuccess : fail(cudaErrorStreamCaptureInvalidated, "the capture was spoilt by " + capture.invalid);
    }
    static cudaError_t spoil(Capture& capture, cudaError_t code, const std::string& call) {
        if (capture.invalid.empty()) { capture.invalid = call; }
        return fail(code, call + " while a stream is being captured");
    }
    // What a captured stream may not be asked.
    static cudaError_t forbid(const Stream& stream, const std::string& call) {
        return stream.capture ? spoil(*stream.capture, cudaErrorStreamCaptureUnsupported, call) : cudaSuccess;
    }
    // What may wait for any stream.
    cudaError_t forbid_unsafe(const std::string& call) {
        for (const auto& capture : r.captures) {
            if (capture->forbids_unsafe_calls()) { return spoil(*capture, cudaErrorStreamCaptureUnsupported, call); }
        }
        return cudaSuccess;
    }
    static cudaError_t forbid_captured(const Event& event, const std::string& call) {
        if (!event.captured.capture) { return cudaSuccess; }
        if (!event.captured.capture->ended) { return spoil(*event.captured.capture, cudaErrorCapturedEvent, call); }
        return fail(cudaErrorCapturedEvent, call + " of an event that was recorded in a capture");
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

size_t host_memory() { return (size_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE); }  // stands for a GPU's
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
    return locked.give(locked.stream(stream), std::move(work));
}
cudaError_t record(cudaStream_t stream, Capture::Again again) {
    Locked locked;
    return locked.record(locked.stream(stream), std::move(again));
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
    return locked.give(stream, [grid] {
        std::lock_guard one_at_a_time(runtime().grids);
        const std::string error = run_grid(grid), damage = runtime().damage();
        return !error.empty() || damage.empty() ? error : describe(grid) + ": " + damage;
    });
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
    properties->totalGlobalMem = host_memory();
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    Locked locked;
    if (const cudaError_t error = locked.forbid_unsafe("cudaDeviceSynchronize")) { return error; }
    return locked.wait_for_all(current_device);
}

// ---- memory
cudaError_t cudaMalloc(void** p, size_t bytes) {
    if (const cudaError_t error = Locked().forbid_unsafe("cudaMalloc")) { return error; }
    Guarded memory(bytes);
    *p = memory.data();
    Locked()->allocations.emplace(*p, std::pair(current_device, std::move(memory)));
    return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
    if (!p) { return cudaSuccess; }
    Locked locked;
    if (const cudaError_t error = locked.forbid_unsafe("cudaFree")) { return error; }
    const auto found = locked->allocations.find(p);
    if (found == locked->allocations.end()) { return fail(cudaErrorInvalidValue, format("cudaFree of %p, which is no allocation", p)); }
    const cudaError_t error = locked.wait_for_all(found->second.first);
    locked->allocations.erase(p);
    return error;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) {
    Locked locked;
    if (const cudaError_t error = locked.forbid_unsafe("cudaHostAlloc")) { return error; }
    *p = malloc(std::max<size_t>(bytes, 1));
    if (!*p) { return fail(cudaErrorMemoryAllocation, format("no memory for %zu bytes", bytes)); }
    locked->host_allocations[*p] = bytes;
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void** p, size_t bytes) { return cudaHostAlloc(p, bytes, 0); }
cudaError_t cudaFreeHost(void* p) {
    Locked locked;
    if (const cudaError_t error = locked.forbid_unsafe("cudaFreeHost")) { return error; }
    locked->host_allocations.erase(p);
    free(p);
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = *free = host_memory();
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
    const void* const host = kind == cudaMemcpyHostToDevice ? from : kind == cudaMemcpyDeviceToHost ? to : nullptr;
    if (host && !locked->is_pinned(host, bytes)) {  // the host waits for such a copy
        if (const cudaError_t error = locked.forbid(*stream, "cudaMemcpyAsync with memory that is not pinned")) { return error; }
    }
    return locked.give(stream, [=] {
        note_copy(to, from, bytes, "cudaMemcpyAsync");
        if (bytes > 0) { memcpy(to, from, bytes); }
        return std::string();
    });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    const std::string wrong = locked->wrong_memory(to, bytes, stream->device);
    if (!wrong.empty()) { return fail(cudaErrorInvalidValue, "cudaMemsetAsync: " + wrong); }
    return locked.give(stream, [=] {
        note_write(to, bytes, "cudaMemsetAsync");
        memset(to, value, bytes);
        return std::string();
    });
}

// ---- streams
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = Locked()->streams.add(current_device);
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    if (const cudaError_t error = locked.forbid(*stream, "cudaStreamDestroy")) { return error; }
    const cudaError_t error = locked.wait({stream, stream->queued});
    locked->streams.remove(stream);
    return error;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    if (const cudaError_t error = locked.forbid(*stream, "cudaStreamSynchronize")) { return error; }
    return locked.wait({stream, stream->queued});
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Locked locked;
    const auto stream = locked.stream(handle);
    if (const cudaError_t error = locked.forbid(*stream, "cudaStreamQuery")) { return error; }
    return locked.query({stream, stream->queued});
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
    Locked locked;
    return locked.give(locked.stream(handle), [=] {
        function(argument);
        return std::string();
    });
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
    if (stream->capture) {
        if (const cudaError_t error = locked.usable(*stream->capture)) { return error; }
        event.captured = stream->capture->now(stream->branch);
        return cudaSuccess;
    }
    event.captured = {};
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
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Locked locked;
    const Event& event = locked.event(handle);
    if (const cudaError_t error = locked.forbid_captured(event, "cudaEventSynchronize")) { return error; }
    const Mark mark = event.mark;  // the event may be gone before
    return locked.wait(mark);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Locked locked;
    const Event& event = locked.event(handle);
    if (const cudaError_t error = locked.forbid_captured(event, "cudaEventQuery")) { return error; }
    if (const cudaError_t error = locked.forbid_unsafe("cudaEventQuery")) { return error; }
    const Mark mark = event.mark;
    return locked.query(mark);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
    Locked locked;
    const Event &begin = locked.event(first), &end = locked.event(second);
    for (const Event* event : {&begin, &end}) {
        if (const cudaError_t error = locked.forbid_captured(*event, "cudaEventElapsedTime")) { return error; }
    }
    if (!begin.time || !end.time) { return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event that has no time"); }
    if (!Streams::reached(begin.mark) || !Streams::reached(end.mark)) { return cudaErrorNotReady; }
    *milliseconds = std::chrono::duration<float, std::milli>(*end.time - *begin.time).count();
    return cudaSuccess;
}
// For the event as it is now: a later record does not matter.
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
    Locked locked;
    const auto stream = locked.stream(handle);
    const Event& event = locked.event(event_handle);
    const Capture::Moment& captured = event.captured;
    if (captured.capture) {
        if (captured.capture->ended) { return locked.forbid_captured(event, "cudaStreamWaitEvent"); }
        if (const cudaError_t error = locked.usable(*captured.capture)) { return error; }
        if (stream->capture && stream->capture != captured.capture) {
            locked.spoil(*captured.capture, cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent");
            return locked.spoil(*stream->capture, cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent for another capture's event");
        }
        captured.capture->wait(stream, captured);
        return cudaSuccess;
    }
    if (!event.mark.stream) { return cudaSuccess; }
    if (stream->capture) {
        return locked.spoil(*stream->capture, cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent for an event from before the capture");
    }
    return locked.queue(stream, {{}, event.mark});
}

// ---- graphs
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    if (!handle) { return fail(cudaErrorStreamCaptureUnsupported, "the default stream cannot be captured"); }
    Locked locked;
    const auto stream = locked.stream(handle);
    if (stream->capture) { return fail(cudaErrorIllegalState, "the stream is being captured already"); }
    const auto capture = std::make_shared<Capture>(mode);
    capture->join(stream);
    locked->captures.insert(capture);
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    Locked locked;
    const auto& capture = locked.stream(handle)->capture;
    *status = !capture                 ? cudaStreamCaptureStatusNone
              : capture->invalid.empty() ? cudaStreamCaptureStatusActive
                                         : cudaStreamCaptureStatusInvalidated;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    *graph = nullptr;
    Locked locked;
    const auto stream = locked.stream(handle);
    const auto capture = stream->capture;
    if (!capture) { return fail(cudaErrorIllegalState, "the stream is not being captured"); }
    if (capture->branches[0].stream != stream) { return fail(cudaErrorStreamCaptureUnmatched, "the capture did not begin with this stream"); }
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
        return fail(cudaErrorStreamCaptureWrongThread, "another thread has begun this capture");
    }
    capture->end();
    locked->captures.erase(capture);
    if (const cudaError_t error = locked.usable(*capture)) { return error; }
    if (!capture->joined()) {
        return fail(cudaErrorStreamCaptureUnjoined, "the first stream of the capture does not wait for all that another was given");
    }
    const auto made = new Graph{capture};
    locked->graphs.insert(made);
    *graph = (cudaGraph_t)made;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t handle, unsigned long long) {
    Locked locked;
    const auto made = new Graph{locked.graph(handle)->recorded};
    for (size_t b = 1; b < made->recorded->branches.size(); b++) {
        made->streams.push_back(locked->streams.add(made->recorded->branches[b].stream->device));
    }
    locked->graphs.insert(made);
    *instance = (cudaGraphExec_t)made;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t first) {
    std::shared_ptr<const Capture> recorded;
    std::vector<cudaStream_t> streams{first};
    std::vector<std::vector<Mark>> reached;  // of every branch: where each of its steps ends
    {
        Locked locked;
        const Graph& graph = *locked.graph(handle);
        recorded = graph.recorded;
        streams.insert(streams.end(), graph.streams.begin(), graph.streams.end());
        const auto stream = locked.stream(first);
        if (const cudaError_t error = locked.forbid(*stream, "cudaGraphLaunch")) { return error; }
        if (stream->device != recorded->branches[0].stream->device) {
            return fail(cudaErrorInvalidResourceHandle, format("cudaGraphLaunch on a stream of device %d", stream->device));
        }
        reached.resize(streams.size());
        reached[0].push_back({stream, stream->queued});
    }
    for (const Capture::Step& step : recorded->steps) {
        const cudaStream_t stream = streams[step.branch];
        if (const cudaError_t error = step.again ? step.again(stream) : cudaSuccess) { return error; }
        Locked locked;
        const auto found = locked.stream(stream);
        if (!step.again) { locked.queue(found, {{}, reached[step.after.branch][step.after.steps]}); }
        if (reached[step.branch].empty()) { reached[step.branch].push_back({}); }  // nobody waits for what precedes its first wait
        reached[step.branch].push_back({found, found->queued});
    }
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    Locked locked;
    Graph* const graph = locked.graph(handle);
    locked->graphs.erase(graph);
    delete graph;
    return cudaSuccess;
}
// What was launched goes on.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    Locked locked;
    Graph* const graph = locked.graph(handle);
    for (const cudaStream_t stream : graph->streams) { locked->streams.remove(locked.stream(stream)); }
    locked->graphs.erase(graph);
    delete graph;
    return cudaSuccess;
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
