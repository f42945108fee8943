// device_cuda.h: the GPU side of device.h. Plain host code: any C++ compiler takes it, with CUDA's headers, and links the CUDA runtime or
// the emulator (simt/simt.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <thread>

#include "base.h"

constexpr const char* BACKEND_NAME = "cuda";
constexpr const char* MEMORY_PLACE = "GPU";
constexpr i64 MICRO_BATCH_TOKENS = 8192;  // of --micro-batch -1
constexpr i64 DEVICE_ALIGN = 8;  // 16 bytes of the narrowest type: each row can then be read 128 bits at a time

using bf16 = __nv_bfloat16;

// Every call of CUDA's is wrapped in this.
inline void cuda_check(cudaError_t error, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    if (error == cudaSuccess) [[likely]] { return; }
    const std::string reason = cudaGetErrorString(error);
    cudaGetLastError();  // reported; what was wrong with one call is not wrong with the next
    die("%s:%d: CUDA: %s", file, line, reason.c_str());
}

inline cudaDeviceProp gpu_properties(int gpu) {
    cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, gpu));
    return properties;
}

// Device memory for work within one op, kept from call to call and grown where it is too small.
class Workspace {
public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    ~Workspace() { cudaFree(memory_); }
    template <typename X>
    X* get(i64 count) {
        const i64 bytes = count * (i64)sizeof(X);
        if (bytes > bytes_) {
            cuda_check(cudaFree(std::exchange(memory_, nullptr)));  // waits for those who use it
            bytes_ = 0;
            cuda_check(cudaMalloc(&memory_, bytes));
            bytes_ = bytes;
        }
        return (X*)memory_;
    }

    const void* place() const { return memory_; }

private:
    void* memory_ = nullptr;
    i64 bytes_ = 0;
};

// What Run::replay has recorded, for the Run that it was recorded with.
class Graph {
public:
    Graph() = default;
    Graph(const Graph&) = delete;
    ~Graph() {
        if (recorded_) { cudaGraphExecDestroy(recorded_); }
    }

private:
    friend struct Run;
    bool ran_ = false;  // once, plainly
    cudaGraphExec_t recorded_ = nullptr;
    const void* workspace_ = nullptr;
};

constexpr int NO_GPU = -1;  // for a Run that only plans
inline int current_gpu() {
    int gpu = 0;
    cuda_check(cudaGetDevice(&gpu));
    return gpu;
}

// One rank's execution context: a GPU, which other ranks may share, and a stream of its own there. For the thread that made it.
struct Run {
    const int gpu;
    cudaStream_t stream = nullptr;
    Workspace workspace;
    std::shared_ptr<class CublasLt> cublas_lt;           // gemm_cublaslt.h: made for the first product
    std::shared_ptr<struct AttentionLibrary> attention;  // attention_cudnn.h: in place of our kernels where it can; null: never
    std::string collectives;                             // how arrays are exchanged, in words; empty for one rank
    std::function<void()> poll;  // what to do while the host waits: lets a communicator look for errors; may be empty
    class Timeline* timeline = nullptr;  // where ops note when they ran; null: nowhere
    bool recording = false;      // what the stream is given is not done now, but by each launch of a graph
    i64 replays = 0;             // launches of graphs

    explicit Run(int gpu = current_gpu()) : gpu(gpu) {
        if (gpu == NO_GPU) { return; }
        cuda_check(cudaSetDevice(gpu));
        cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    Run(const Run&) = delete;
    ~Run() {
        if (stream) { cudaStreamDestroy(stream); }
    }

    int threads() const { return 1; }
    std::string place() const {
        if (gpu == NO_GPU) { return "no GPU yet"; }
        return format("GPU %d (%s)%s%s", gpu, gpu_properties(gpu).name, collectives.empty() ? "" : ", collectives: ", collectives.c_str());
    }
    // Until all that the stream was given is done.
    void wait() {
        while (poll && cudaStreamQuery(stream) == cudaErrorNotReady) {
            poll();
            std::this_thread::yield();
        }
        cuda_check(cudaStreamSynchronize(stream));
    }

    // Does `work`, which gives the stream the same kernels with the same arguments every time: the first time as it is, so that workspaces grow
    // and plans are made; then it is recorded, and from there on all of it is one launch. What changes from time to time lies in device memory.
    template <typename Work>
    void replay(Graph& graph, const Work& work) {
        if (!graph.ran_ || timeline) {  // which looks at each op
            work();
            graph.ran_ = true;
            return;
        }
        if (!graph.recorded_) {
            cudaGraph_t recorded;
            cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));  // other threads may allocate meanwhile
            recording = true;
            work();
            recording = false;
            cuda_check(cudaStreamEndCapture(stream, &recorded));
            cuda_check(cudaGraphInstantiateWithFlags(&graph.recorded_, recorded, 0));
            cuda_check(cudaGraphDestroy(recorded));
            graph.workspace_ = workspace.place();
        }
        check(graph.workspace_ == workspace.place(), "a graph was recorded with a workspace that has grown since");
        cuda_check(cudaGraphLaunch(graph.recorded_, stream));
        replays++;
    }

    // The host's own loops, for the CPU loops of the ops: the oracle of the kernels in tests.
    template <typename Job>
    void parallel(i64 items, const Job& job) {
        for (i64 item = 0; item < items; item++) { job(item); }
    }
    bool help_others() const { return false; }  // on the CPU a rank that waits works for others
};

inline Run make_run(int, int) { return Run(); }  // alone on the current GPU; device_rank.h makes a rank's

class Moment {
public:
    explicit Moment(Run& run) {
        cudaEvent_t event;
        cuda_check(cudaEventCreateWithFlags(&event, cudaEventDefault));
        event_ = {event, [](cudaEvent_t made) { cudaEventDestroy(made); }};
        cuda_check(cudaEventRecord(event, run.stream));
    }
    friend double seconds_between(const Moment& a, const Moment& b) {
        cuda_check(cudaEventSynchronize(b.event_.get()));
        float milliseconds = 0;
        cuda_check(cudaEventElapsedTime(&milliseconds, a.event_.get(), b.event_.get()));
        return milliseconds * 1e-3;
    }

private:
    std::shared_ptr<std::remove_pointer_t<cudaEvent_t>> event_;
};

inline void* device_alloc(i64 bytes, const char* what) {
    if (bytes == 0) { return nullptr; }
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    check(error != cudaErrorMemoryAllocation,
          "out of GPU memory: %s needs %lld bytes (%.2f GiB)\nHINT: lower --micro-batch or --seq, or use more ranks", what,
          (long long)bytes, bytes / 1073741824.0);
    cuda_check(error);
    cuda_check(cudaMemsetAsync(memory, 0, bytes, nullptr));
    cuda_check(cudaStreamSynchronize(nullptr));
    return memory;
}
inline void device_touch(char*, i64, Run&) {}  // device_alloc has cleared it
inline void device_free(void* memory, i64) { cudaFree(memory); }  // where it fails, an error has been told before

template <typename X>
void copy_to_device(X* device, const X* host, i64 count, Run& run) {
    if (count == 0) { return; }
    cuda_check(cudaMemcpyAsync(device, host, count * sizeof(X), cudaMemcpyHostToDevice, run.stream));
    run.wait();
}
template <typename X>
void copy_to_host(X* host, const X* device, i64 count, Run& run) {
    if (count == 0) { return; }
    cuda_check(cudaMemcpyAsync(host, device, count * sizeof(X), cudaMemcpyDeviceToHost, run.stream));
    run.wait();
}

inline i64 available_memory() {
    size_t free = 0, total = 0;
    cuda_check(cudaMemGetInfo(&free, &total));
    return (i64)free;
}
