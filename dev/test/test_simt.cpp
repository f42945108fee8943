// The emulator: what CUDA promises holds, and each fault planted here is reported, with file and line, or changes a result.
// Oracle: the CUDA programming guide's rules, worked out by hand. Compiled like kernels, with -include llmc/simt/simt.h.
#include "simt_testing.h"

#include <thread>

namespace simt_test {

inline std::string here(int line) { return "test_simt.cpp:" + std::to_string(line); }
// ---- promises -------------------------------------------------------------------------------------------------------
__global__ void indices_kernel(int* out) {
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = block * 1000 + thread;
}
TEST_F(Simt, EveryThreadOfEveryBlockRunsOnce) {
    for (const char* order : ORDERS) {
        setenv("SIMT_ORDER", order, 1);
        Buffer<int> out(3 * 2 * 2 * 5 * 3 * 2, run);
        launch(indices_kernel, {dim3(3, 2, 2), dim3(5, 3, 2)}, run, out.data);
        const Vec<int> found = out.host();
        for (int i = 0; i < (int)found.size(); i++) { ASSERT_EQ(found[i], i / 30 * 1000 + i % 30); }
    }
}

__global__ void reverse_kernel(int* data) {
    __shared__ int fixed[96];
    int* dynamic = gpu::dynamic_shared<int>();
    const int t = threadIdx.x, last = blockDim.x - 1;
    fixed[t] = data[blockIdx.x * blockDim.x + t];
    __syncthreads();
    dynamic[t] = fixed[last - t];
    __syncthreads();
    data[blockIdx.x * blockDim.x + t] = dynamic[last - t] + dynamic[t];
}
TEST_F(Simt, BarriersAndSharedMemory) {
    for (const char* order : ORDERS) {
        for (int threads : {1, 31, 32, 33, 96}) {
            setenv("SIMT_ORDER", order, 1);
            Vec<int> values(7 * threads);
            for (int i = 0; i < (int)values.size(); i++) { values[i] = i; }
            Buffer<int> data(values, run);
            launch(reverse_kernel, {7, (unsigned)threads, threads * sizeof(int)}, run, data.data);
            const Vec<int> found = data.host();
            for (int i = 0; i < (int)values.size(); i++) { ASSERT_EQ(found[i], i + i / threads * threads + threads - 1 - i % threads); }
        }
    }
}

__global__ void warp_kernel(int* out) {
    const int lane = threadIdx.x;
    int* mine = out + lane * 8;
    mine[0] = __shfl_sync(ALL_LANES, lane, lane + 3);
    mine[1] = __shfl_xor_sync(ALL_LANES, lane, 5);
    mine[2] = __shfl_up_sync(ALL_LANES, lane, 3);
    mine[3] = __shfl_down_sync(ALL_LANES, lane, 3);
    mine[4] = __shfl_down_sync(ALL_LANES, lane, 3, 8);
    mine[5] = (int)__ballot_sync(ALL_LANES, lane % 3 == 0);
    const unsigned half = lane < 16 ? 0x0000FFFF : 0xFFFF0000;  // two groups at their own pace
    for (int i = 0; i < (lane < 16 ? 1 : 4); i++) { mine[6] = __any_sync(half, lane == 20); }
    mine[7] = __all_sync(half, lane >= 16);
}
TEST_F(Simt, ShufflesAndVotes) {
    for (const char* order : ORDERS) {
        setenv("SIMT_ORDER", order, 1);
        Buffer<int> out(32 * 8, run);
        launch(warp_kernel, {1, 32}, run, out.data);
        const Vec<int> found = out.host();
        for (int lane = 0; lane < 32; lane++) {
            const Vec<int> want{(lane + 3) % 32,
                                lane ^ 5,
                                lane < 3 ? lane : lane - 3,
                                lane > 28 ? lane : lane + 3,
                                lane % 8 > 4 ? lane : lane + 3,
                                0x49249249,
                                lane >= 16,
                                lane >= 16};
            EXPECT_EQ(Vec<int>(&found[lane * 8], &found[lane * 8] + 8), want) << order << " lane " << lane;
        }
    }
}

__global__ void early_exit_kernel(int* out) {
    if (threadIdx.x >= 40) { return; }
    __syncthreads();
    const bool any = __any_sync(ALL_LANES, threadIdx.x == 39);  // lanes that have ended do not vote
    out[threadIdx.x] = any;
}
TEST_F(Simt, ThreadsThatEndedAreNotWaitedFor) {
    Buffer<int> out(40, run);
    launch(early_exit_kernel, {1, 64}, run, out.data);
    const Vec<int> found = out.host();
    for (int i = 0; i < 40; i++) { EXPECT_EQ(found[i], i >= 32); }
}

__global__ void atomics_kernel(int* integers, float* sum) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&integers[0], n);
    atomicMin(&integers[1], n);
    atomicMax(&integers[2], n);
    atomicExch(&integers[3], 5);
    int seen = 0;
    for (int found; (found = atomicCAS(&integers[4], seen, seen + 2)) != seen;) { seen = found; }
    atomicAdd(sum, 0.5f);
    __threadfence();
}
TEST_F(Simt, Atomics) {
    Buffer<int> integers(Vec<int>{0, 9999, -1, 0, 0}, run);
    Buffer<float> sum(Vec<float>{0.0f}, run);
    launch(atomics_kernel, {40, 50}, run, integers.data, sum.data);
    EXPECT_EQ(integers.host(), (Vec<int>{1999 * 1000, 0, 1999, 5, 4000}));
    EXPECT_EQ(sum.host()[0], 1000.0f);
}

__global__ void sums_kernel(float* out, const float* in) {
    __shared__ float parts[8];
    const float value = in[threadIdx.x];
    out[threadIdx.x] = gpu::block_sum(value, parts);
}
TEST_F(Simt, SumsAreTheSameBitsInAnyOrder) {
    const auto values = random_values<float>(160, 1);
    Vec<float> first;
    for (const char* order : ORDERS) {
        setenv("SIMT_ORDER", order, 1);
        Buffer<float> in(values, run), out(160, run);
        launch(sums_kernel, {1, 160}, run, out.data, in.data);
        const Vec<float> found = out.host();
        double want = 0.0;
        for (float value : values) { want += value; }
        EXPECT_NEAR(found[0], want, 1e-5);
        for (float sum : found) { EXPECT_EQ(sum, found[0]); }
        if (first.empty()) { first = found; }
        EXPECT_EQ(found, first);
    }
}

__global__ void store_kernel(float* p, float value) { p[threadIdx.x] = value; }
__global__ void add_kernel(float* to, const float* from) { to[threadIdx.x] += from[threadIdx.x]; }
TEST_F(Simt, EventsOrderStreams) {
    for (const char* when : {"late", "eager"}) {
        setenv("SIMT_STREAMS", when, 1);
        ::Run other;
        cudaEvent_t ready, read;
        cuda_check(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
        cuda_check(cudaEventCreateWithFlags(&read, cudaEventDisableTiming));
        Buffer<float> a(4, run), b(Vec<float>(4, 1.0f), run);
        cuda_check(cudaStreamWaitEvent(run.stream, read, 0));  // never recorded: nothing to wait for
        launch(store_kernel, {1, 4}, run, a.data, 2.0f);
        cuda_check(cudaEventRecord(ready, run.stream));
        cuda_check(cudaStreamWaitEvent(other.stream, ready, 0));
        launch(add_kernel, {1, 4}, other, b.data, a.data);
        cuda_check(cudaEventRecord(read, other.stream));
        cuda_check(cudaStreamWaitEvent(run.stream, read, 0));
        launch(store_kernel, {1, 4}, run, a.data, 9.0f);
        cuda_check(cudaEventSynchronize(read));
        cuda_check(cudaDeviceSynchronize());
        EXPECT_EQ(b.host(), Vec<float>(4, 3.0f)) << when;
        EXPECT_EQ(a.host(), Vec<float>(4, 9.0f)) << when;
        cuda_check(cudaEventDestroy(ready));
        cuda_check(cudaEventDestroy(read));
    }
}

// ---- graphs ---------------------------------------------------------------------------------------------------------
__global__ void count_kernel(float* sums, int* count) { sums[*count] += 10.0f * threadIdx.x, *count += 1; }
TEST_F(Simt, AGraphDoesAgainWhatWasRecorded) {
    for (const char* when : {"late", "eager"}) {
        setenv("SIMT_STREAMS", when, 1);
        Buffer<float> a(Vec<float>(4, 0.0f), run), b(Vec<float>(6, 0.0f), run);
        Buffer<int> count(Vec<int>{0}, run);
        ::Graph graph;
        int calls = 0;
        float value = 1.0f;
        const auto work = [&] {
            calls++;
            launch(store_kernel, {1, 4}, run, a.data, value);
            value = 7.0f;  // arguments are copied when they are recorded
            launch(add_kernel, {1, 4}, run, b.data, a.data);
            launch(count_kernel, {1, 1}, run, b.data, count.data);  // what lies in memory is read when it is launched
            cuda_check(cudaMemsetAsync(b.data + 5, 0, 4, run.stream));
            cuda_check(cudaMemcpyAsync(b.data + 4, b.data, 4, cudaMemcpyDeviceToDevice, run.stream));
        };
        for (int i = 0; i < 4; i++) {
            run.replay(graph, work);
            EXPECT_EQ(count.host()[0], i + 1) << when;
            EXPECT_EQ(b.host(), (Vec<float>{1.0f + 7 * i, 1.0f + 7 * i, 1.0f + 7 * i, 1.0f + 7 * i, 1.0f + 7 * i, 0.0f})) << when;
        }
        EXPECT_EQ(calls, 2);  // as it is, and recorded
        EXPECT_EQ(run.replays, when == std::string("late") ? 3 : 6);
    }
}
TEST_F(Simt, AGraphOutlivesNoWorkspace) {
    ::Graph graph;
    const auto work = [&] { launch(store_kernel, {1, 4}, run, run.workspace.get<float>(4), 1.0f); };
    run.replay(graph, work), run.replay(graph, work);
    run.workspace.get<float>(4000);
    expect_error([&] { run.replay(graph, work); }, {"a workspace that has grown"});
}

// A capture, begun and ended by hand.
struct Recording {
    ::Run& run;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t instance = nullptr;
    explicit Recording(::Run& r, cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal) : run(r) {
        cuda_check(cudaStreamBeginCapture(run.stream, mode));
    }
    cudaError_t end() { return cudaStreamEndCapture(run.stream, &graph); }
    void launch() {
        if (!instance) { cuda_check(cudaGraphInstantiateWithFlags(&instance, graph, 0)); }
        cuda_check(cudaGraphLaunch(instance, run.stream));
    }
    ~Recording() {
        if (instance) { cudaGraphExecDestroy(instance); }
        if (graph) { cudaGraphDestroy(graph); }
    }
};
struct Event {
    cudaEvent_t event;
    explicit Event(unsigned flags = cudaEventDisableTiming) { cuda_check(cudaEventCreateWithFlags(&event, flags)); }
    ~Event() { cudaEventDestroy(event); }
    operator cudaEvent_t() const { return event; }
};
TEST_F(Simt, AGraphForksAndJoins) {
    for (const char* when : {"late", "eager"}) {
        setenv("SIMT_STREAMS", when, 1);
        ::Run other, elsewhere;
        Event ready, read;
        Buffer<float> a(4, run), b(Vec<float>(4, 1.0f), run);
        Recording recording(run);
        launch(store_kernel, {1, 4}, run, a.data, 2.0f);
        cuda_check(cudaEventRecord(ready, run.stream));
        cuda_check(cudaStreamWaitEvent(other.stream, ready, 0));
        launch(add_kernel, {1, 4}, other, b.data, a.data);
        cuda_check(cudaEventRecord(read, other.stream));
        cudaStreamCaptureStatus status;
        cuda_check(cudaStreamIsCapturing(other.stream, &status));
        EXPECT_EQ(status, cudaStreamCaptureStatusActive);
        cuda_check(cudaStreamWaitEvent(run.stream, read, 0));
        launch(store_kernel, {1, 4}, run, a.data, 9.0f);
        cuda_check(recording.end());
        EXPECT_EQ(b.host(), Vec<float>(4, 1.0f)) << when;  // nothing has run
        for (int i = 0; i < 3; i++) { recording.launch(); }
        EXPECT_EQ(a.host(), Vec<float>(4, 9.0f)) << when;  // who waits for the launch waits for the other stream too
        EXPECT_EQ(b.host(), Vec<float>(4, 7.0f)) << when;
        cuda_check(cudaStreamIsCapturing(other.stream, &status));
        EXPECT_EQ(status, cudaStreamCaptureStatusNone);
        launch(add_kernel, {1, 4}, other, b.data, a.data);  // as before
        synchronize(other);
        EXPECT_EQ(b.host(), Vec<float>(4, 16.0f)) << when;
    }
}
TEST_F(Simt, MissingWaitInAGraphShows) {
    FAULT_WITHOUT_CHECKER();
    ::Run other;
    Event begin, stored;
    Buffer<float> a(Vec<float>(4, 1.0f), run), b(Vec<float>(4, 1.0f), run);
    Recording recording(run);
    cuda_check(cudaEventRecord(begin, run.stream));
    cuda_check(cudaStreamWaitEvent(other.stream, begin, 0));
    launch(store_kernel, {1, 4}, other, a.data, 2.0f);
    cuda_check(cudaEventRecord(stored, other.stream));
    launch(add_kernel, {1, 4}, run, b.data, a.data);  // does not wait for `other`
    cuda_check(cudaStreamWaitEvent(run.stream, stored, 0));
    cuda_check(recording.end());
    recording.launch();
    EXPECT_EQ(b.host(), Vec<float>(4, 2.0f));
}
TEST_F(Simt, WhatACaptureForbids) {
    ::Run other;
    Event before, captured, timed(cudaEventDefault);
    Buffer<float> a(4, run);
    Vec<float> host(4);
    void* memory = nullptr;
    const auto forbidden = [&](const char* what, cudaError_t code, const std::function<cudaError_t()>& call,
                               cudaError_t at_end = cudaErrorStreamCaptureInvalidated) {
        SCOPED_TRACE(what);
        cuda_check(cudaEventRecord(before, other.stream));
        Recording recording(run);
        launch(store_kernel, {1, 4}, run, a.data, 1.0f);
        cuda_check(cudaEventRecord(captured, run.stream));
        EXPECT_EQ(call(), code);
        EXPECT_EQ(recording.end(), at_end);
        launch(store_kernel, {1, 4}, run, a.data, 1.0f);  // the stream is well again
        synchronize(run), synchronize(other);
    };
    forbidden("synchronize", cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamSynchronize(run.stream); });
    forbidden("all", cudaErrorStreamCaptureUnsupported, [&] { return cudaDeviceSynchronize(); });
    forbidden("query", cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamQuery(run.stream); });
    forbidden("malloc", cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&memory, 4); });
    forbidden("free", cudaErrorStreamCaptureUnsupported, [&] { return cudaFree(a.data); });
    forbidden("host memory", cudaErrorStreamCaptureUnsupported, [&] { return cudaMallocHost(&memory, 4); });
    forbidden("copy", cudaErrorStreamCaptureUnsupported, [&] { return cudaMemcpyAsync(host.data(), a.data, 16, cudaMemcpyDeviceToHost, run.stream); });
    forbidden("event of before", cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(run.stream, before, 0); });
    forbidden("event's query", cudaErrorStreamCaptureUnsupported, [&] { return cudaEventQuery(before); });
    forbidden("captured event", cudaErrorCapturedEvent, [&] { return cudaEventSynchronize(captured); });
    forbidden("captured event's query", cudaErrorCapturedEvent, [&] { return cudaEventQuery(captured); });
    forbidden("other stream", cudaErrorStreamCaptureUnsupported, [&] {
        cuda_check(cudaStreamWaitEvent(other.stream, captured, 0));
        return cudaStreamSynchronize(other.stream);
    });
    forbidden("no join", cudaSuccess, [&] { return cudaStreamWaitEvent(other.stream, captured, 0); }, cudaErrorStreamCaptureUnjoined);
    forbidden("the other's end", cudaErrorStreamCaptureUnmatched, [&] {
        cudaGraph_t graph;
        cuda_check(cudaStreamWaitEvent(other.stream, captured, 0));
        const cudaError_t error = cudaStreamEndCapture(other.stream, &graph);
        cuda_check(cudaEventRecord(captured, other.stream));
        cuda_check(cudaStreamWaitEvent(run.stream, captured, 0));
        return error;
    }, cudaSuccess);
    forbidden("begin", cudaErrorIllegalState, [&] { return cudaStreamBeginCapture(run.stream, cudaStreamCaptureModeRelaxed); }, cudaSuccess);
    forbidden("end by another thread", cudaErrorStreamCaptureWrongThread, [&] {
        cudaError_t error;
        cudaGraph_t graph;
        std::thread([&] { error = cudaStreamEndCapture(run.stream, &graph); }).join();
        return error;
    }, cudaSuccess);
    forbidden("nothing: another thread's allocation", cudaSuccess, [&] {
        cudaError_t error;
        std::thread([&] { error = cudaMalloc(&memory, 4); }).join();
        return error;
    }, cudaSuccess);
    cuda_check(cudaFree(memory));
    EXPECT_EQ(cudaEventQuery(captured), cudaErrorCapturedEvent);  // until it is recorded anew
    EXPECT_EQ(cudaStreamWaitEvent(other.stream, captured, 0), cudaErrorCapturedEvent);
    float ms;
    EXPECT_EQ(cudaEventElapsedTime(&ms, captured, timed), cudaErrorCapturedEvent);
    cuda_check(cudaEventRecord(captured, run.stream));
    cuda_check(cudaEventSynchronize(captured));
    EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
    cudaGraph_t graph;
    EXPECT_EQ(cudaStreamEndCapture(run.stream, &graph), cudaErrorIllegalState);
    {
        Recording one(run), two(other);
        cuda_check(cudaEventRecord(captured, run.stream));
        EXPECT_EQ(cudaStreamWaitEvent(other.stream, captured, 0), cudaErrorStreamCaptureMerge);
        EXPECT_EQ(one.end(), cudaErrorStreamCaptureInvalidated);
        EXPECT_EQ(two.end(), cudaErrorStreamCaptureInvalidated);
    }
    {
        Recording global(run, cudaStreamCaptureModeGlobal);
        std::thread([&] { EXPECT_EQ(cudaMalloc(&memory, 4), cudaErrorStreamCaptureUnsupported); }).join();
        EXPECT_EQ(global.end(), cudaErrorStreamCaptureInvalidated);
    }
}

// ---- times, and faults ----------------------------------------------------------------------------------------------
TEST_F(Simt, EventsTellTheTimeBetweenThem) {
    setenv("SIMT_STREAMS", "late", 1);
    cudaEvent_t begin, end, untimed;
    cuda_check(cudaEventCreateWithFlags(&begin, cudaEventDefault));
    cuda_check(cudaEventCreateWithFlags(&end, cudaEventDefault));
    cuda_check(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    Buffer<float> a(4, run);
    float milliseconds = -1.0f;
    cuda_check(cudaEventRecord(begin, run.stream));
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle) << "never recorded";
    cuda_check(cudaLaunchHostFunc(run.stream, [](void*) { usleep(5000); }, nullptr));
    cuda_check(cudaEventRecord(end, run.stream));
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorNotReady);
    cuda_check(cudaEventSynchronize(end));
    cuda_check(cudaEventElapsedTime(&milliseconds, begin, end));
    EXPECT_GE(milliseconds, 5.0f);
    EXPECT_LT(milliseconds, 5000.0f);
    cuda_check(cudaEventRecord(untimed, run.stream));
    cuda_check(cudaEventSynchronize(untimed));
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, untimed), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    for (cudaEvent_t event : {begin, end, untimed}) { cuda_check(cudaEventDestroy(event)); }
}

template <bool TRANSPOSED, gpu::Fault FAULT>
Vec<float> product(const Vec<bf16>& a, const Vec<bf16>& b, int M, int N, int K, ::Run& run) {
    Buffer<bf16> da(a, run), db(b, run);
    Buffer<float> c(M * N, run);
    gpu::product<TRANSPOSED, FAULT>(c.data, da.data, db.data, M, N, K, run);
    return c.host();
}
TEST_F(Simt, CopiesThatAreNotWaitedForShow) {
    FAULT_WITHOUT_CHECKER();
    const int M = 21, N = 40, K = 80;  // right results: test_kernels.cpp
    const auto a = random_values<bf16>(M * K, 1), b = random_values<bf16>(K * N, 2);
    for (float value : product<false, gpu::NONE>(a, b, M, N, K, run)) { EXPECT_FALSE(std::isnan(value)); }
    EXPECT_TRUE(std::isnan((product<false, gpu::NO_WAIT>(a, b, M, N, K, run)[0])));
    setenv("SIMT_ORDER", "rev", 1);  // the warp that multiplies first has not seen the other's tile
    EXPECT_TRUE(std::isnan((product<false, gpu::NO_BARRIER>(a, b, M, N, K, run)[8])));
}
__global__ void copy_kernel(float* global, int offset, bool wait) {
    __shared__ __align__(16) float tile[8];
    gpu::copy_async(tile + offset, global, true);
    gpu::copies_commit();
    if (wait) { gpu::copies_wait<0>(); }
}
__global__ void copy_out_kernel(float* global) { gpu::copy_async(global, global + 4, true); }
__global__ void half_a_warp_kernel() {
    float d[4];
    const uint32_t a[4] = {}, b[2] = {};
    if (threadIdx.x < 16) { gpu::mma(d, a, b); }
}
TEST_F(Simt, WrongCopiesAndProducts) {
    Buffer<float> global(Vec<float>(8), run);
    launch(copy_kernel, {1, 1}, run, global.data, 4, true);
    synchronize(run);
    launch(copy_kernel, {1, 1}, run, global.data, 4, false);
    expect_error([&] { synchronize(run); }, {"copy_kernel", "ends before its copies to shared memory have landed"});
    launch(copy_kernel, {1, 1}, run, global.data, 1, true);
    expect_error([&] { synchronize(run); }, {"copy_async (", "a misaligned address"});
    launch(copy_out_kernel, {1, 1}, run, global.data);
    expect_error([&] { synchronize(run); }, {"copy_async (", "to what is not shared memory"});
    launch(half_a_warp_kernel, {1, 32}, run);
    expect_error([&] { synchronize(run); }, {"mma of the lanes 0000ffff: all 32 must take part"});
}

// ---- planted faults -------------------------------------------------------------------------------------------------
template <bool BARRIER>
__global__ void neighbour_kernel(int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = (int)threadIdx.x;
    if (BARRIER) { __syncthreads(); }
    out[threadIdx.x] = threadIdx.x == 0 ? 0 : values[threadIdx.x - 1];
}
TEST_F(Simt, MissingBarrierShowsInAnotherOrder) {
    FAULT_WITHOUT_CHECKER();
    const auto result = [&](const char* order, bool barrier) {
        setenv("SIMT_ORDER", order, 1);
        Buffer<int> out(64, run);
        launch(barrier ? neighbour_kernel<true> : neighbour_kernel<false>, {1, 64}, run, out.data);
        return out.host();
    };
    const Vec<int> right = result("fwd", true);
    EXPECT_EQ(result("fwd", false), right) << "the fault hides";
    for (const char* order : {"rev", "shuf:1", "shuf:2"}) {
        EXPECT_EQ(result(order, true), right);
        EXPECT_NE(result(order, false), right) << order;
    }
}

template <bool BARRIER>
__global__ void warp_neighbour_kernel(int* out) {
    __shared__ int values[32];
    values[threadIdx.x] = (int)threadIdx.x;
    if (BARRIER) { __syncwarp(); }
    out[threadIdx.x] = values[threadIdx.x ^ 1];
}
TEST_F(Simt, MissingSyncwarpShows) {
    FAULT_WITHOUT_CHECKER();
    Buffer<int> right(32, run), wrong(32, run);
    launch(warp_neighbour_kernel<true>, {1, 32}, run, right.data);
    launch(warp_neighbour_kernel<false>, {1, 32}, run, wrong.data);
    for (int i = 0; i < 32; i++) {
        EXPECT_EQ(right.host()[i], i ^ 1);
        EXPECT_EQ(wrong.host()[i], i % 2 ? i ^ 1 : -1);  // the odd lane had not written
    }
}

__global__ void race_kernel(int* out) { out[0] = blockIdx.x; }
TEST_F(Simt, RaceBetweenBlocksShowsInAnotherOrder) {
    FAULT_WITHOUT_CHECKER();
    Vec<int> found;
    for (const char* order : {"fwd", "rev"}) {
        setenv("SIMT_ORDER", order, 1);
        Buffer<int> out(1, run);
        launch(race_kernel, {50, 1}, run, out.data);
        found.push_back(out.host()[0]);
    }
    EXPECT_NE(found[0], found[1]);
}

__global__ void store_at_kernel(float* p, int i) { p[i] = 1.0f; }
#ifndef __SANITIZE_ADDRESS__  // which stops the program at the very access
TEST_F(Simt, WriteBesideAnAllocation) {
    FAULT_WITHOUT_CHECKER();
    for (const auto& [i, words] : Vec<std::pair<int, const char*>>{{100, "byte 400 was written, of 400"}, {-1, "byte -4 was written"}}) {
        Buffer<float> out(100, run);
        const int line = __LINE__ + 1;
        launch(store_at_kernel, {1, 1}, run, out.data, i);
        expect_error([&] { synchronize(run); }, {"store_at_kernel", here(line), "device allocation", words});
    }
}
__global__ void shared_overrun_kernel() { gpu::dynamic_shared<char>()[threadIdx.x] = 1; }
TEST_F(Simt, WritePastDynamicSharedMemory) {
    FAULT_WITHOUT_CHECKER();
    launch(shared_overrun_kernel, {1, 65, 64}, run);
    expect_error([&] { synchronize(run); }, {"shared_overrun_kernel", "dynamic shared memory: byte 64 was written, of 64"});
}
#else
__global__ void read_at_kernel(float* to, const float* from, int i) { to[0] = from[i]; }
__global__ void shared_read_kernel(char* to) { to[0] = gpu::dynamic_shared<char>()[64]; }
TEST_F(Simt, SanitizerSeesEveryAccessBesideMemory) {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    Buffer<float> out(100, run);
    const auto dies = [&](const auto& faulty, const char* kernel) {
        EXPECT_DEATH(
            {
                faulty();
                synchronize(run);
            },
            std::string("use-after-poison(.|\n)*") + kernel);
    };
    dies([&] { launch(store_at_kernel, {1, 1}, run, out.data, 100); }, "store_at_kernel");
    dies([&] { launch(store_at_kernel, {1, 1}, run, out.data, -1); }, "store_at_kernel");
    dies([&] { launch(read_at_kernel, {1, 1}, run, out.data, out.data, 100); }, "read_at_kernel");
    dies([&] { launch(shared_read_kernel, {1, 1, 64}, run, (char*)out.data); }, "shared_read_kernel");
}
#endif

__global__ void unwritten_kernel(float* out) {
    __shared__ float fixed[4];
    float* dynamic = gpu::dynamic_shared<float>();
    out[blockIdx.x * 2] = fixed[1];
    out[blockIdx.x * 2 + 1] = dynamic[1];
    fixed[1] = dynamic[1] = 0.0f;
}
TEST_F(Simt, MemoryBeginsAsNaN) {
    FAULT_WITHOUT_CHECKER();
    Buffer<float> unwritten(8, run), out(80, run);
    Buffer<bf16> narrow(4, run);
    launch(unwritten_kernel, {40, 1, 16}, run, out.data);
    for (float value : out.host()) { EXPECT_TRUE(std::isnan(value)); }  // in every block, whatever an earlier one left
    for (float value : unwritten.host()) { EXPECT_TRUE(std::isnan(value)); }
    for (bf16 value : narrow.host()) { EXPECT_TRUE(std::isnan((float)value)); }
}

constexpr int BARRIERS = __LINE__;
__global__ void two_barriers_kernel() {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
__global__ void barrier_and_shuffle_kernel() {
    if (threadIdx.x < 16) { __syncthreads(); }
    __shfl_sync(ALL_LANES, 1, 0);
}
__global__ void barrier_in_part_kernel() {
    if (threadIdx.x % 32 < 16) {
        __syncwarp(0x00FFFFFF);
    } else {
        __syncthreads();
    }
}
TEST_F(Simt, DivergentBarriers) {
    for (const char* order : {"fwd", "rev"}) {
        setenv("SIMT_ORDER", order, 1);
        launch(two_barriers_kernel, {1, 64}, run);
        expect_error([&] { synchronize(run); }, {"two_barriers_kernel", "different barriers", here(BARRIERS + 3), here(BARRIERS + 5)});
        launch(barrier_and_shuffle_kernel, {3, 32}, run);
        expect_error([&] { synchronize(run); }, {"no thread can go on", "16 at __syncthreads (", here(BARRIERS + 9),
                                                 "16 of warp 0 at __shfl_sync for the lanes ffffffff", here(BARRIERS + 10)});
        launch(barrier_in_part_kernel, {1, 64}, run);
        expect_error([&] { synchronize(run); },
                     {"no thread can go on; 0 of 64 have ended", "of warp 1 at __syncwarp for the lanes 00ffffff"});
    }
    Buffer<int> out(64, run);  // and the next grid is well
    launch(neighbour_kernel<true>, {1, 64}, run, out.data);
    EXPECT_EQ(out.host()[63], 62);
}

__global__ void wrong_mask_kernel() { __syncwarp(threadIdx.x < 5 ? 0x1F : 0x1F); }
__global__ void absent_lane_kernel(int* out) {
    if (threadIdx.x < 31) { out[threadIdx.x] = __shfl_sync(0x7FFFFFFF, (int)threadIdx.x, 31); }
}
__global__ void different_places_kernel(int* out) {
    if (threadIdx.x < 16) {
        out[threadIdx.x] = __shfl_xor_sync(ALL_LANES, 1, 1);
    } else {
        out[threadIdx.x] = (int)__ballot_sync(ALL_LANES, 1);
    }
}
TEST_F(Simt, WrongShuffles) {
    Buffer<int> out(32, run);
    launch(wrong_mask_kernel, {1, 32}, run);
    expect_error([&] { synchronize(run); }, {"wrong_mask_kernel", "thread (5,0,0)", "of lane 5 is for the lanes 0000001f"});
    launch(absent_lane_kernel, {1, 32}, run, out.data);
    expect_error([&] { synchronize(run); }, {"lane 0 reads lane 31, which does not take part"});
    launch(different_places_kernel, {1, 32}, run, out.data);
    expect_error([&] { synchronize(run); }, {"meet at different places", "__shfl_xor_sync", "__ballot_sync"});
}

__global__ void pack_kernel(float* p) { gpu::store(p, gpu::load<4>(p)); }
TEST_F(Simt, MisalignedPack) {
    Buffer<float> data(8, run);
    launch(pack_kernel, {1, 1}, run, data.data + 4);
    synchronize(run);
    launch(pack_kernel, {1, 1}, run, data.data + 1);
    expect_error([&] { synchronize(run); }, {"pack_kernel", "4 elements are read at a misaligned address"});
}

TEST_F(Simt, MissingWaitBetweenStreamsShows) {
    FAULT_WITHOUT_CHECKER();
    ::Run other;
    Buffer<float> a(4, run), b(Vec<float>(4, 1.0f), run);
    launch(store_kernel, {1, 4}, other, a.data, 2.0f);
    launch(add_kernel, {1, 4}, run, b.data, a.data);  // does not wait for `other`
    for (float value : b.host()) { EXPECT_TRUE(std::isnan(value)); }
}
TEST_F(Simt, MissingWaitOfTheHostShows) {
    Vec<float> values(4, 1.0f), found(4, -1.0f);
    Buffer<float> a(4, run);
    cuda_check(cudaMemcpyAsync(a.data, values.data(), 16, cudaMemcpyHostToDevice, run.stream));
    values.assign(4, 5.0f);  // too early
    cuda_check(cudaMemcpyAsync(found.data(), a.data, 16, cudaMemcpyDeviceToHost, run.stream));
    EXPECT_EQ(found[0], -1.0f);
    synchronize(run);
    EXPECT_EQ(found[0], 5.0f);
}

TEST_F(Simt, HostPointers) {
    Buffer<float> a(4, run);
    Vec<float> host(4);
    const int line = __LINE__ + 1;
    const auto wrong = [&] { launch(add_kernel, {1, 4}, run, a.data, host.data()); };
    expect_error(wrong, {here(line), "add_kernel", "argument 2", "is not in device memory"});
    expect_error([&] { copy_to_device(host.data(), host.data(), 4, run); }, {"cudaMemcpyAsync", "is not in device memory"});
    expect_error([&] { copy_to_host(host.data(), a.data, 5, run); }, {"20 bytes at byte 0 of an allocation of 16"});
}

__global__ void empty_kernel() {}
TEST_F(Simt, WrongLaunches) {
    const int line = __LINE__ + 1;
    const auto too_wide = [&] { launch(empty_kernel, {1, 1025}, run); };
    expect_error(too_wide, {"empty_kernel", here(line), "a grid of 1x1x1 blocks of 1025x1x1 threads"});
    expect_error([&] { launch(empty_kernel, {dim3(1, 65536), 1}, run); }, {"1x65536x1 blocks"});
    expect_error([&] { launch(empty_kernel, {1, 32, 228 << 10}, run); }, {"shared memory"});
    launch(empty_kernel, {1, 32, 227 << 10}, run);  // asks for more than the default
    const simt::Grid grid{1, 32, 49153, run.stream, {"file", 1}, (const void*)synchronize, [] {}};
    expect_error([&] { cuda_check(simt::launch(grid)); }, {"49153 bytes of dynamic shared memory, where it may have 49152"});
    launch(empty_kernel, {0, 32}, run);  // no work
    synchronize(run);
    setenv("SIMT_ORDER", "backwards", 1);
    launch(empty_kernel, {1, 1}, run);
    expect_error([&] { synchronize(run); }, {"SIMT_ORDER is 'backwards'"});
}

}  // namespace simt_test
