// runtime.cpp: the CUDA runtime's calls that the project uses, for the emulator: device memory, streams, events, launches. Same names, same
// prototypes (the toolkit's headers check them), so host code is the same with and without a GPU.
//
// A stream is a queue. Unless SIMT_STREAMS is eager, nothing in it runs before somebody waits for it: so a wait that the host, or another
// stream, forgot shows as a wrong result every time, not once in a thousand runs.
#include <unistd.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "grid.h"
#include "guarded.h"

namespace {

constexpr size_t SHARED_BY_DEFAULT = 48 << 10, SHARED_AT_MOST = 227 << 10;  // of compute capability 9.0

struct Stream {
    std::deque<std::function<std::string()>> tasks;  // each returns what went wrong
    i64 queued = 0, done = 0;
};
struct Event {
    std::shared_ptr<Stream> stream;  // none: never recorded
    i64 position = 0;
};

// One device for the process; its ranks share it.
class Device {
public:
    std::mutex mutex;

    // ---- errors: the last one is kept for cudaGetErrorString and cudaGetLastError
    cudaError_t fail(cudaError_t code, const std::string& text) {
        error_ = code;
        error_text_ = text;
        return code;
    }
    cudaError_t take_error() { return std::exchange(error_, cudaSuccess); }
    const std::string& error_text() const { return error_text_; }

    // ---- memory
    void* allocate(size_t bytes) {
        simt::Guarded memory(bytes);
        void* p = memory.data();
        allocations_.emplace(p, std::move(memory));
        return p;
    }
    cudaError_t release(void* p) {
        if (!p) { return cudaSuccess; }
        const cudaError_t error = synchronize();
        return allocations_.erase(p) ? error : fail(cudaErrorInvalidValue, format("cudaFree of %p, which is no allocation", p));
    }
    // Empty if [p, p + bytes) lies in one allocation.
    std::string wrong_memory(const void* p, size_t bytes) const {
        auto next = allocations_.upper_bound((void*)p);
        if (next == allocations_.begin()) { return format("%p is not in device memory", p); }
        const simt::Guarded& memory = std::prev(next)->second;
        const size_t offset = (const char*)p - memory.data();
        if (offset > memory.size()) { return format("%p is not in device memory", p); }
        if (bytes > memory.size() - offset) {
            return format("%zu bytes at byte %zu of an allocation of %zu", bytes, offset, memory.size());
        }
        return "";
    }
    std::string damage() const {
        for (const auto& [p, memory] : allocations_) {
            if (const std::string found = memory.damage(); !found.empty()) { return "device allocation: " + found; }
        }
        return "";
    }

    // ---- streams
    std::shared_ptr<Stream> stream(cudaStream_t handle) const {
        auto found = streams_.find(handle);
        check(found != streams_.end(), "simt: %p is no stream", (void*)handle);
        return found->second;
    }
    cudaStream_t add_stream() {
        auto stream = std::make_shared<Stream>();
        streams_.emplace((cudaStream_t)stream.get(), stream);
        return (cudaStream_t)stream.get();
    }
    cudaError_t remove_stream(cudaStream_t handle) {
        const cudaError_t error = synchronize(*stream(handle));
        streams_.erase(handle);
        return error;
    }
    template <typename Task>
    cudaError_t queue(cudaStream_t handle, const Task& task) {
        const auto s = stream(handle);
        s->tasks.push_back(task);
        s->queued++;
        const char* when = getenv("SIMT_STREAMS");
        return when && strcmp(when, "eager") == 0 ? synchronize(*s) : cudaSuccess;
    }
    std::string run_until(Stream& s, i64 position) {
        while (s.done < position) {
            const auto task = std::move(s.tasks.front());
            s.tasks.pop_front();
            s.done++;
            if (const std::string error = task(); !error.empty()) { return error; }
        }
        return "";
    }
    cudaError_t synchronize(Stream& s, i64 position) {
        const std::string error = run_until(s, position);
        if (error.empty()) { return cudaSuccess; }
        for (auto& [handle, stream] : streams_) {  // as on a GPU, nothing more runs after a failed kernel
            stream->tasks.clear();
            stream->done = stream->queued;
        }
        return fail(cudaErrorLaunchFailure, error);
    }
    cudaError_t synchronize(Stream& s) { return synchronize(s, s.queued); }
    cudaError_t synchronize() {
        for (auto& [handle, stream] : streams_) {
            if (const cudaError_t error = synchronize(*stream)) { return error; }
        }
        return cudaSuccess;
    }

    std::map<const void*, size_t> shared_limits;  // of kernels for which more than the default was asked

private:
    cudaError_t error_ = cudaSuccess;
    std::string error_text_;
    std::map<void*, simt::Guarded> allocations_;
    std::map<cudaStream_t, std::shared_ptr<Stream>> streams_{{nullptr, std::make_shared<Stream>()}};
};

Device& device() {
    static Device device;
    return device;
}
// Every call below is one of these: the device, locked.
struct Locked {
    Device& d = device();
    std::lock_guard<std::mutex> lock{d.mutex};
    Device* operator->() { return &d; }
};

}  // namespace

namespace simt {

cudaError_t check_argument(const Grid& grid, int index, const void* p) {
    Locked d;
    const std::string wrong = p ? d->wrong_memory(p, 0) : "";
    return wrong.empty() ? cudaSuccess
                         : d->fail(cudaErrorInvalidValue, format("%s: argument %d: %s", describe(grid).c_str(), index, wrong.c_str()));
}

cudaError_t queue(cudaStream_t stream, std::function<std::string()> work) { return Locked()->queue(stream, work); }
std::string wrong_memory(const void* p, size_t bytes, cudaStream_t) { return Locked()->wrong_memory(p, bytes); }
cudaError_t fail(cudaError_t code, const std::string& text) { return Locked()->fail(code, text); }

cudaError_t launch(Grid grid) {
    Locked d;
    const dim3 b = grid.blocks, t = grid.threads;
    const uint64_t threads = (uint64_t)t.x * t.y * t.z;
    if (b.x == 0 || b.y == 0 || b.z == 0 || b.x > 0x7FFFFFFFu || b.y > 65535 || b.z > 65535 || threads == 0 || threads > 1024 || t.z > 64) {
        return d->fail(cudaErrorInvalidConfiguration, format("%s: a grid of %ux%ux%u blocks of %ux%ux%u threads cannot be launched",
                                                             describe(grid).c_str(), b.x, b.y, b.z, t.x, t.y, t.z));
    }
    const auto asked = d->shared_limits.find(grid.kernel);
    const size_t limit = asked != d->shared_limits.end() ? std::max(asked->second, SHARED_BY_DEFAULT) : SHARED_BY_DEFAULT;
    if (grid.shared_bytes > limit) {
        return d->fail(cudaErrorInvalidValue, format("%s: %zu bytes of dynamic shared memory, where it may have %zu",
                                                     describe(grid).c_str(), grid.shared_bytes, limit));
    }
    return d->queue(grid.stream, [grid] {
        const std::string error = run_grid(grid), damage = device().damage();
        return !error.empty() || damage.empty() ? error : describe(grid) + ": " + damage;
    });
}

}  // namespace simt

extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) {
    Locked d;
    *p = d->allocate(bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* p) { return Locked()->release(p); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    *total = *free = (size_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    Locked d;
    std::string wrong;
    if (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) { wrong = d->wrong_memory(to, bytes); }
    if (wrong.empty() && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice)) { wrong = d->wrong_memory(from, bytes); }
    if (!wrong.empty()) { return d->fail(cudaErrorInvalidValue, "cudaMemcpyAsync: " + wrong); }
    return d->queue(stream, [=] {
        if (bytes > 0) { memcpy(to, from, bytes); }
        return std::string();
    });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    Locked d;
    const std::string wrong = d->wrong_memory(to, bytes);
    if (!wrong.empty()) { return d->fail(cudaErrorInvalidValue, "cudaMemsetAsync: " + wrong); }
    return d->queue(stream, [=] {
        memset(to, value, bytes);
        return std::string();
    });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = Locked()->add_stream();
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return Locked()->remove_stream(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Locked d;
    return d->synchronize(*d->stream(stream));
}
cudaError_t cudaDeviceSynchronize() { return Locked()->synchronize(); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = (cudaEvent_t) new Event;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete (Event*)event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Locked d;
    const auto s = d->stream(stream);
    *(Event*)event = {s, s->queued};
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Locked d;
    const Event e = *(Event*)event;
    return e.stream ? d->synchronize(*e.stream, e.position) : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    Locked d;
    const Event e = *(Event*)event;  // as it is now: a later record does not matter
    if (!e.stream) { return cudaSuccess; }
    return d->queue(stream, [e] { return device().run_until(*e.stream, e.position); });
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    Locked d;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || (size_t)value > SHARED_AT_MOST) {
        return d->fail(cudaErrorInvalidValue, format("cudaFuncSetAttribute: attribute %d, value %d, of at most %zu bytes of shared memory",
                                                     (int)attribute, value, SHARED_AT_MOST));
    }
    d->shared_limits[kernel] = value;
    return cudaSuccess;
}
cudaError_t cudaGetLastError() { return Locked()->take_error(); }
const char* cudaGetErrorString(cudaError_t code) {
    static thread_local std::string text;
    text = format("error %d: %s", (int)code, Locked()->error_text().c_str());
    return text.c_str();
}

}  // extern "C"
