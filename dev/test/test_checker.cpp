// The checker finds each fault planted here and says where it is: the kernel, its thread, file and line of the access, and of the other
// access where it is a race. In the same code without the fault it finds nothing. Compiled like kernels, for the checker's build only.
#include "llmc/simt/checker.h"
#include "simt_testing.h"

namespace checker_test {
using namespace simt_test;

class Checker : public Simt {
protected:
    void finish() { cuda_check(cudaDeviceSynchronize()); }
    void expect_clean(const char* what) {
        EXPECT_EQ(error_of([&] { finish(); }), "no error") << what;
    }
    void expect_found(const Vec<std::string>& parts) {
        expect_error([&] { finish(); }, parts);
    }
};
inline std::string at(int line) { return "test_checker.cpp:" + std::to_string(line); }
inline Vec<float> zeros(i64 count) { return Vec<float>(count, 0.0f); }

// ---- threads of a block ---------------------------------------------------------------------------------------------
constexpr int NEIGHBOUR = __LINE__;
template <bool BARRIER, bool SECOND>
__global__ void neighbour_kernel(int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = (int)threadIdx.x;
    if (BARRIER) { __syncthreads(); }
    out[threadIdx.x] = values[63 - threadIdx.x];
    if (SECOND) { __syncthreads(); }
    values[threadIdx.x] = 0;
}
TEST_F(Checker, MissingBarrier) {
    Buffer<int> out(64, run);
    for (const char* order : ORDERS) {
        setenv("SIMT_ORDER", order, 1);
        launch(neighbour_kernel<true, true>, {1, 64}, run, out.data);
        expect_clean(order);
        launch(neighbour_kernel<false, true>, {1, 64}, run, out.data);
        expect_found({"neighbour_kernel<false", "block (0,0,0) thread (", at(NEIGHBOUR + 6) + ": reads 4 bytes at byte ", "of 'values'"});
        launch(neighbour_kernel<true, false>, {1, 64}, run, out.data);
        expect_found({"a race: ", at(NEIGHBOUR + 6), at(NEIGHBOUR + 8), " by thread ("});
    }
}

constexpr int WARP = __LINE__;
enum class Order { SYNCWARP, SHUFFLE, NONE };
template <Order ORDER>
__global__ void warp_kernel(int* out) {
    __shared__ int values[32];
    out[threadIdx.x] = 0;
    values[threadIdx.x] = 1;
    if (ORDER == Order::SYNCWARP) { __syncwarp(); }
    if (ORDER == Order::SHUFFLE) { __shfl_xor_sync(ALL_LANES, 1, 1); }
    if (threadIdx.x % 4 == 1) { out[threadIdx.x] = values[threadIdx.x ^ 1]; }
    const unsigned halves = threadIdx.x < 16 ? 0x0000FFFF : 0xFFFF0000;
    __syncwarp(halves);
    values[(threadIdx.x + 4) % 16 + threadIdx.x / 16 * 16] = 2;  // of the same half
}
TEST_F(Checker, MissingSyncwarp) {
    Buffer<int> out(32, run);
    for (const char* order : ORDERS) {
        setenv("SIMT_ORDER", order, 1);
        launch(warp_kernel<Order::SYNCWARP>, {1, 32}, run, out.data);
        expect_clean(order);
        launch(warp_kernel<Order::NONE>, {1, 32}, run, out.data);
        expect_found({"warp_kernel<", at(WARP + 9)});
        launch(warp_kernel<Order::SHUFFLE>, {1, 32}, run, out.data);  // which lets everybody's write come first, in this emulator
        expect_found({at(WARP + 9) + ": reads 4 bytes", "a race: written at " + at(WARP + 6) + " by thread ("});
    }
}

constexpr int HALVES = __LINE__;
__global__ void wrong_half_kernel(int* values) {
    values[threadIdx.x] = 1;
    __syncwarp(threadIdx.x < 16 ? 0x0000FFFF : 0xFFFF0000);
    values[threadIdx.x ^ 16] = 2;
}
TEST_F(Checker, SyncwarpOfOtherLanes) {
    Buffer<int> values(32, run);
    launch(wrong_half_kernel, {1, 32}, run, values.data);
    expect_found({"a race: ", at(HALVES + 4), at(HALVES + 2)});
}

constexpr int DIVERGENT = __LINE__;
__global__ void divergent_kernel() {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}
TEST_F(Checker, DivergentBarrier) {
    launch(divergent_kernel, {1, 64}, run);
    expect_found({"divergent_kernel", "different barriers", at(DIVERGENT + 3), at(DIVERGENT + 5)});
}

constexpr int LOCAL = __LINE__;
__global__ void others_stack_kernel(int* out) {
    __shared__ int* pointers[2];
    int mine[4] = {1, 2, 3, (int)threadIdx.x};
    pointers[threadIdx.x] = mine;
    __syncthreads();
    out[threadIdx.x] = pointers[1 - threadIdx.x][threadIdx.x];
    __syncthreads();
}
TEST_F(Checker, AnotherThreadsLocalMemory) {
    Buffer<int> out(2, run);
    launch(others_stack_kernel, {1, 2}, run, out.data);
    expect_found({at(LOCAL + 6) + ": reads 4 bytes at ", "which is not in device memory"});
}

// ---- blocks ---------------------------------------------------------------------------------------------------------
constexpr int BLOCKS = __LINE__;
__global__ void same_place_kernel(int* out) { out[threadIdx.x] = (int)blockIdx.x; }
TEST_F(Checker, RaceBetweenBlocks) {
    Buffer<int> out(40, run);
    launch(same_place_kernel, {1, 40}, run, out.data);
    launch(same_place_kernel, {1, 40}, run, out.data);
    expect_clean("one after the other");
    launch(same_place_kernel, {dim3(2, 3), 40}, run, out.data);
    expect_found({"block (1,0,0) thread (0,0,0): " + at(BLOCKS + 1) + ": writes 4 bytes at byte 0 of an allocation of 160",
                  "a race: written at " + at(BLOCKS + 1) + " by thread (0,0,0) of block (0,0,0)"});
}

__global__ void count_kernel(int* counters) {
    atomicAdd(&counters[0], 1);
    atomicMax(&counters[1], (int)blockIdx.x);
}
constexpr int LAST = __LINE__;
template <bool FENCE>
__global__ void last_block_kernel(float* sum, float* parts, unsigned* arrived) {
    __shared__ bool last;
    parts[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
    if (FENCE) { __threadfence(); }
    __syncthreads();
    if (threadIdx.x == 0) { last = atomicAdd(arrived, 1u) == gridDim.x - 1; }
    __syncthreads();
    if (!last || threadIdx.x > 0) { return; }
    float total = 0.0f;
    for (unsigned i = 0; i < gridDim.x * blockDim.x; i++) { total += parts[i]; }
    *sum = total;
}
constexpr int PLAIN = __LINE__;
__global__ void plain_and_atomic_kernel(int* counter) {
    if (blockIdx.x == 0) {
        *counter = 0;
    } else {
        atomicAdd(counter, 1);
    }
}
TEST_F(Checker, AtomicsAndFences) {
    for (const char* order : ORDERS) {
        setenv("SIMT_ORDER", order, 1);
        Buffer<int> counters(Vec<int>{0, 0}, run);
        launch(count_kernel, {5, 33}, run, counters.data);
        expect_clean(order);
        Buffer<float> sum(1, run), parts(4 * 40, run);
        Buffer<unsigned> arrived(Vec<unsigned>{0}, run), arrived_too(Vec<unsigned>{0}, run);
        launch(last_block_kernel<true>, {4, 40}, run, sum.data, parts.data, arrived.data);
        expect_clean(order);
        EXPECT_EQ(sum.host()[0], 160.0f);
        launch(last_block_kernel<false>, {4, 40}, run, sum.data, parts.data, arrived_too.data);
        expect_found({at(LAST + 11) + ": reads 4 bytes", "a race: written at " + at(LAST + 4)});
        launch(plain_and_atomic_kernel, {2, 1}, run, counters.data);
        expect_found({"a race", at(PLAIN + 3), at(PLAIN + 5)});
    }
}

// ---- bounds, alignment, what memory it is ---------------------------------------------------------------------------
constexpr int GLOBAL = __LINE__;
__global__ void store_at_kernel(float* p, i64 i) { p[i] = 1.0f; }
__global__ void load_at_kernel(float* to, const float* p, i64 i) { *to = p[i]; }
TEST_F(Checker, OverrunOfGlobalMemory) {
    Buffer<float> out(1, run), p(zeros(100), run), other(zeros(5000), run);
    for (i64 i : {-1, -5, 100, 101, 300}) {
        launch(store_at_kernel, {1, 1}, run, p.data, i);
        expect_found({"store_at_kernel", at(GLOBAL + 1) + ": writes 4 bytes at byte " + std::to_string(i * 4), "of 400, out of bounds"});
        launch(load_at_kernel, {1, 1}, run, out.data, p.data, i);
        expect_found({"load_at_kernel", at(GLOBAL + 2) + ": reads 4 bytes at byte " + std::to_string(i * 4), "of 400, out of bounds"});
    }
    launch(store_at_kernel, {1, 1}, run, p.data, i64(1) << 24);  // far from everything
    expect_found({"out of bounds"});
}
TEST_F(Checker, MemoryThatWasFreed) {
    struct Hidden {  // no argument that the launch could check
        const float* p;
    };
    Buffer<float> out(1, run);
    Hidden hidden;
    {
        Buffer<float> p(zeros(10), run);
        hidden.p = p.data;
    }
    Buffer<float> next(zeros(10), run);
    launch(load_at_kernel, {1, 1}, run, out.data, next.data, hidden.p - next.data);
    expect_found({"reads 4 bytes at byte 0 of an allocation of 40 that was freed, out of bounds"});
}

constexpr int SHARED = __LINE__;
__global__ void static_overrun_kernel(float* out, int i, bool write) {
    __shared__ float before[64], values[64], after[64];
    before[threadIdx.x] = after[threadIdx.x] = 0.0f;
    if (write) {
        values[i] = 1.0f;
    } else {
        *out = values[i] + before[0] + after[0];
    }
}
__global__ void dynamic_overrun_kernel(int i, bool write) {
    float* values = gpu::dynamic_shared<float>();
    if (write) {
        values[i] = 1.0f;
    } else {
        values[0] = values[i];
    }
}
TEST_F(Checker, OverrunOfSharedMemory) {
    Buffer<float> out(1, run);
    for (int i : {64, -1, 70}) {
        launch(static_overrun_kernel, {1, 1}, run, out.data, i, true);
        expect_found({at(SHARED + 5) + ": writes 4 bytes at byte ", "in shared memory", "out of bounds"});
        launch(static_overrun_kernel, {1, 1}, run, out.data, i, false);
        expect_found({at(SHARED + 7), ": reads 4 bytes at byte ", "in shared memory", "out of bounds"});
        launch(dynamic_overrun_kernel, {1, 1, 256}, run, i, true);
        expect_found({at(SHARED + 13) + ": writes 4 bytes at byte " + std::to_string(i * 4) + " of an allocation of 256", "out of bounds"});
        launch(dynamic_overrun_kernel, {1, 1, 256}, run, i, false);
        expect_found({at(SHARED + 15) + ": reads 4 bytes", "out of bounds"});
    }
    launch(static_overrun_kernel, {1, 1}, run, out.data, 63, true);
    launch(dynamic_overrun_kernel, {1, 1, 256}, run, 63, true);
    expect_clean("the last element");
}

constexpr int ALIGNED = __LINE__;
__global__ void misaligned_kernel(char* p) { *reinterpret_cast<float*>(p) = 1.0f; }
__global__ void pack_kernel(float* p) { *reinterpret_cast<float4*>(p) = {}; }
TEST_F(Checker, Misaligned) {
    Buffer<char> p(16, run);
    launch(misaligned_kernel, {1, 1}, run, p.data + 4);
    expect_clean("aligned");
    launch(misaligned_kernel, {1, 1}, run, p.data + 2);
    expect_found({"misaligned_kernel", at(ALIGNED + 1) + ": writes 4 bytes at byte 2 of an allocation of 16, at a misaligned address"});
    Buffer<float> floats(8, run);
    launch(pack_kernel, {1, 1}, run, floats.data + 2);
    expect_found({at(ALIGNED + 2), "at byte 8 of an allocation of 32, at a misaligned address"});
}

struct Parameters {
    const float* p;
    float scale;
};
constexpr float TABLE[4] = {1.0f, 2.0f, 3.0f, 4.0f};
constexpr int HOST = __LINE__;
__global__ void through_struct_kernel(float* out, Parameters parameters) {
    out[threadIdx.x] = parameters.scale * TABLE[threadIdx.x] * parameters.p[threadIdx.x];
}
TEST_F(Checker, HostPointer) {
    Buffer<float> out(4, run), p(zeros(4), run);
    const Vec<float> host(4);
    launch(through_struct_kernel, {1, 4}, run, out.data, Parameters{p.data, 2.0f});
    expect_clean("parameters and constants may be read");
    launch(through_struct_kernel, {1, 4}, run, out.data, Parameters{host.data(), 2.0f});
    expect_found({"through_struct_kernel", at(HOST + 2) + ": reads 4 bytes at ", "which is not in device memory"});
    float on_stack[4] = {};
    launch(through_struct_kernel, {1, 4}, run, out.data, Parameters{on_stack, 2.0f});
    expect_found({at(HOST + 2), "which is not in device memory"});
}
TEST_F(Checker, HostCodeTouchesDeviceMemory) {
    Buffer<float> p(zeros(4), run);
    const int line = __LINE__ + 1;
    const float value = *p.data;
    launch(store_at_kernel, {1, 1}, run, p.data, 0);
    expect_found({"host code reads byte 0 of an allocation of 16, in device memory, at " + at(line)});
    EXPECT_EQ(value, 0.0f);
}

// ---- reads of what was never written --------------------------------------------------------------------------------
constexpr int UNWRITTEN = __LINE__;
__global__ void fill_kernel(bf16* p) { p[threadIdx.x * 2] = bf16(1.0f); }
__global__ void copy_kernel(bf16* to, const bf16* from) { to[threadIdx.x] = from[threadIdx.x]; }
__global__ void shared_left_kernel(float* out) {
    __shared__ float values[2];
    if (blockIdx.x == 0) { values[threadIdx.x] = 1.0f; }
    __syncthreads();
    out[blockIdx.x * 2 + threadIdx.x] = values[threadIdx.x];
}
__global__ void dynamic_left_kernel(float* out) {
    float* values = gpu::dynamic_shared<float>();
    if (blockIdx.x == 0) { values[threadIdx.x] = 1.0f; }
    out[blockIdx.x * 2 + threadIdx.x] = values[threadIdx.x];
}
TEST_F(Checker, Uninitialised) {
    Buffer<bf16> from(8, run), to(8, run), copy(8, run);
    launch(fill_kernel, {1, 4}, run, from.data);
    launch(copy_kernel, {1, 8}, run, to.data, from.data);  // every second one
    expect_found({"thread (1,0,0): " + at(UNWRITTEN + 2) + ": reads 2 bytes at byte 2 of an allocation of 16, never written"});
    cuda_check(cudaMemcpyAsync(copy.data, from.data, 16, cudaMemcpyDeviceToDevice, run.stream));
    launch(copy_kernel, {1, 1}, run, to.data, copy.data);
    expect_clean("a copy of what was written");
    launch(copy_kernel, {1, 2}, run, to.data, copy.data);
    expect_found({"thread (1,0,0)", "never written"});
    cuda_check(cudaMemsetAsync(copy.data, 0, 16, run.stream));
    launch(copy_kernel, {1, 8}, run, to.data, copy.data);
    expect_clean("zeroed");

    Buffer<float> out(4, run);
    launch(shared_left_kernel, {2, 2}, run, out.data);  // the second block reads what the first one left
    expect_found(
        {"block (1,0,0)", at(UNWRITTEN + 7) + ": reads 4 bytes at byte 0 of 'values' in shared memory, of 8 bytes, never written"});
    launch(dynamic_left_kernel, {2, 2, 8}, run, out.data);
    expect_found({"block (1,0,0)", at(UNWRITTEN + 12), "dynamic shared memory, never written"});
}

// ---- copies to shared memory, and tensor cores ----------------------------------------------------------------------
constexpr int COPY = __LINE__;
enum class Fault { NONE, NO_WAIT, NO_BARRIER, OVERWRITTEN };
template <Fault FAULT>
__global__ void async_kernel(float* out, const float* in) {
    __shared__ __align__(16) float tile[64 * 4];
    gpu::copy_async(&tile[threadIdx.x * 4], &in[threadIdx.x * 4], true);
    gpu::copies_commit();
    if (FAULT == Fault::OVERWRITTEN) { tile[threadIdx.x * 4] = 0.0f; }
    if (FAULT != Fault::NO_WAIT) { gpu::copies_wait<0>(); }
    if (FAULT != Fault::NO_BARRIER) { __syncthreads(); }
    out[threadIdx.x] = tile[(63 - threadIdx.x) * 4];
    gpu::copies_wait<0>();
}
TEST_F(Checker, CopiesToSharedMemory) {
    Buffer<float> in(zeros(256), run), out(64, run), unwritten(256, run);
    for (const char* order : ORDERS) {
        setenv("SIMT_ORDER", order, 1);
        const auto run_with = [&](auto* kernel, const float* from) { launch(kernel, {1, 64}, run, out.data, from); };
        run_with(async_kernel<Fault::NONE>, in.data);
        expect_clean(order);
        run_with(async_kernel<Fault::NO_WAIT>, in.data);
        expect_found({at(COPY + 10) + ": reads 4 bytes at byte ", "'tile'", "to which the copy at", at(COPY + 5), "it must be waited for"});
        run_with(async_kernel<Fault::NO_BARRIER>, in.data);
        expect_found({at(COPY + 10) + ": reads 4 bytes at byte "});
        run_with(async_kernel<Fault::OVERWRITTEN>, in.data);
        expect_found({at(COPY + 7) + ": writes 4 bytes at byte ", "it must be waited for"});
        run_with(async_kernel<Fault::NONE>, unwritten.data);
        expect_found({at(COPY + 5) + ": reads 16 bytes at byte ", "of an allocation of 1024, never written"});
    }
}

constexpr int MATRICES = __LINE__;
template <bool BARRIER>
__global__ void matrices_kernel(uint32_t* out) {
    __shared__ __align__(16) bf16 rows[16][8];
    for (int i = 0; i < 4; i++) { rows[threadIdx.x / 2][threadIdx.x % 2 * 4 + i] = bf16(1.0f); }
    if (BARRIER) { __syncwarp(); }
    uint32_t r[2];
    gpu::load_matrices<2, false>(r, rows[threadIdx.x % 16]);
    out[threadIdx.x] = r[0] + r[1];
}
TEST_F(Checker, MatricesReadTooEarly) {
    Buffer<uint32_t> out(32, run);
    launch(matrices_kernel<true>, {1, 32}, run, out.data);
    expect_clean("with a barrier");
    launch(matrices_kernel<false>, {1, 32}, run, out.data);
    expect_found({at(MATRICES + 7) + ": reads 16 bytes at byte 0 of 'rows'"});
}
template <gpu::Fault FAULT>
void run_product(::Run& run) {
    const int M = 21, N = 40, K = 80;
    Buffer<bf16> a(random_values<bf16>(M * K, 1), run), b(random_values<bf16>(K * N, 2), run);
    Buffer<float> c(M * N, run);
    gpu::product<false, FAULT>(c.data, a.data, b.data, M, N, K, run);
    cuda_check(cudaDeviceSynchronize());
}
TEST_F(Checker, ProductWithAFault) {
    EXPECT_EQ(error_of([&] { run_product<gpu::NONE>(run); }), "no error");
    expect_error([&] { run_product<gpu::NO_WAIT>(run); }, {"product_kernel", "product.cuh", "it must be waited for"});
    expect_error([&] { run_product<gpu::NO_BARRIER>(run); }, {"product_kernel", "product.cuh"});
}

// ---- streams --------------------------------------------------------------------------------------------------------
constexpr int STREAMS = __LINE__;
__global__ void write_kernel(float* p) { p[threadIdx.x] = 2.0f; }
__global__ void read_kernel(float* to, const float* from) { to[threadIdx.x] = from[threadIdx.x]; }
class CheckerOfStreams : public Checker {
protected:
    ::Run other;
    cudaEvent_t event;
    Buffer<float> a{zeros(40), run}, b{zeros(40), run}, c{zeros(40), run};
    CheckerOfStreams() { cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming)); }
    ~CheckerOfStreams() { cudaEventDestroy(event); }
    void wait(::Run& waits, ::Run& for_this) {
        cuda_check(cudaEventRecord(event, for_this.stream));
        cuda_check(cudaStreamWaitEvent(waits.stream, event, 0));
    }
};
TEST_F(CheckerOfStreams, MissingWaitInAGraph) {
    for (const bool waits : {true, false}) {
        cudaGraph_t graph;
        cudaGraphExec_t instance;
        cuda_check(cudaStreamBeginCapture(run.stream, cudaStreamCaptureModeThreadLocal));
        wait(other, run);
        launch(write_kernel, {1, 40}, other, a.data);
        if (waits) { wait(run, other); }
        launch(read_kernel, {1, 40}, run, b.data, a.data);
        wait(run, other);
        cuda_check(cudaStreamEndCapture(run.stream, &graph));
        cuda_check(cudaGraphInstantiateWithFlags(&instance, graph, 0));
        const auto replay = [&] {
            for (int i = 0; i < 2; i++) { cuda_check(cudaGraphLaunch(instance, run.stream)); }
            finish();
        };
        if (waits) { replay(); }
        else { expect_error(replay, {"_kernel", "a race: ", at(STREAMS + 1), at(STREAMS + 2), "which has not been waited for"}); }
        cuda_check(cudaGraphExecDestroy(instance));
        cuda_check(cudaGraphDestroy(graph));
    }
}
TEST_F(CheckerOfStreams, MissingWait) {
    for (const char* when : {"late", "eager"}) {
        setenv("SIMT_STREAMS", when, 1);
        launch(write_kernel, {1, 40}, other, a.data);
        wait(run, other);
        launch(read_kernel, {1, 40}, run, b.data, a.data);
        expect_clean("waited for");
        const auto faulty = [&] {
            launch(write_kernel, {1, 40}, other, a.data);
            launch(read_kernel, {1, 40}, run, b.data, a.data);
            finish();
        };
        expect_error(faulty, {"_kernel", "a race: ", at(STREAMS + 1), at(STREAMS + 2), "which has not been waited for"});
        const auto overwritten = [&] {  // a wait for the write, but not for the read
            launch(write_kernel, {1, 40}, other, a.data);
            wait(run, other);
            launch(read_kernel, {1, 40}, run, b.data, a.data);
            launch(write_kernel, {1, 40}, other, a.data);
            finish();
        };
        expect_error(overwritten, {"a race: ", at(STREAMS + 1), at(STREAMS + 2), "which has not been waited for"});
    }
}
TEST_F(CheckerOfStreams, TwoReadersAndWaitsOfWaits) {
    ::Run third;
    launch(read_kernel, {1, 40}, other, b.data, a.data);
    launch(read_kernel, {1, 40}, run, c.data, a.data);
    expect_clean("two may read");
    launch(write_kernel, {1, 40}, run, a.data);
    wait(other, run);
    launch(read_kernel, {1, 40}, other, b.data, a.data);
    wait(third, other);
    launch(write_kernel, {1, 40}, third, a.data);
    expect_clean("an event carries what its stream has waited for");
    launch(write_kernel, {1, 40}, other, a.data);
    cuda_check(cudaStreamSynchronize(other.stream));
    launch(write_kernel, {1, 40}, run, a.data);
    expect_clean("the host has waited");
    launch(read_kernel, {1, 40}, run, b.data, a.data);
    launch(read_kernel, {1, 40}, other, c.data, a.data);
    wait(third, run);  // but not for `other`
    launch(write_kernel, {1, 40}, third, a.data);
    expect_found({"a race: ", at(STREAMS + 1), at(STREAMS + 2)});
}
TEST_F(CheckerOfStreams, CopiesAreTasksToo) {
    const auto faulty = [&] {
        launch(write_kernel, {1, 40}, other, a.data);
        cuda_check(cudaMemcpyAsync(b.data, a.data, 160, cudaMemcpyDeviceToDevice, run.stream));
        finish();
    };
    expect_error(faulty, {"a race: ", "cudaMemcpyAsync", at(STREAMS + 1)});
    cuda_check(cudaMemsetAsync(a.data, 0, 160, other.stream));
    launch(read_kernel, {1, 40}, run, b.data, a.data);
    expect_found({"a race: ", "cudaMemsetAsync", at(STREAMS + 2)});
}
TEST_F(CheckerOfStreams, ShimsOfLibraries) {
    const auto library = [&](const auto& work) {
        cuda_check(simt::queue(run.stream, [=] {
            work();
            return std::string();
        }));
    };
    Buffer<float> unwritten(10, run);
    float* p = unwritten.data;
    library([=] { simt::note_write(p, 20, "library"); });
    library([=] { simt::note_read(p, 20, "library"); });
    expect_clean("written, then read");
    library([=] { simt::note_read(p, 24, "library"); });
    expect_found({"library: reads 24 bytes at byte 0 of an allocation of 40, never written"});
    library([=] { simt::note_write(p, 44, "library"); });
    expect_found({"library: writes 44 bytes at byte 0 of an allocation of 40, out of bounds"});
    launch(write_kernel, {1, 5}, other, p);
    library([=] { simt::note_read(p, 20, "library"); });
    expect_found({"a race: ", "library", "which has not been waited for"});
}

}  // namespace checker_test
