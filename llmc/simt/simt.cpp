// simt.cpp: how a grid runs. OS threads take blocks; the threads of a block are fibers of one OS thread, in warps of 32.
//
// A fiber starts threads of the block one after another. When the one it runs must wait (for a barrier, for the lanes of its warp), the
// fiber sleeps with it, and another fiber goes on: with a thread that may go on, else with threads not yet started. So a kernel without
// barriers is a plain loop on one stack.
#include "simt.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <thread>

#include "checker.h"
#include "fiber.h"
#include "grid.h"
#include "guarded.h"
#include "symbols.h"

constinit thread_local uint3 threadIdx, blockIdx, blockDim, gridDim;

#if !defined(SIMT_UCONTEXT)
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");
#endif

namespace simt {
namespace {

class Worker;
constinit thread_local Worker* worker = nullptr;

// ---- the order of threads and blocks --------------------------------------------------------------------------------
class Order {
public:
    Order() {
        const char* text = getenv("SIMT_ORDER");
        const std::string order = text ? text : "fwd";
        if (order == "rev") {
            kind_ = REVERSE;
        } else if (order.starts_with("shuf:")) {
            kind_ = SHUFFLED;
            state_ = strtoull(order.c_str() + 5, nullptr, 10);
        } else {
            check(order == "fwd", "SIMT_ORDER is '%s', not fwd, rev or shuf:SEED", order.c_str());
        }
    }
    // Arranges [first, last), which is ascending.
    template <typename I>
    void arrange(I first, I last) {
        if (kind_ == REVERSE) { std::reverse(first, last); }
        if (kind_ == SHUFFLED) {
            for (i64 left = last - first; left > 1; left--) { std::swap(first[left - 1], first[random() % left]); }
        }
    }
    void seed(uint64_t number) { state_ ^= (number + 1) * 0x9E3779B97F4A7C15u; }

private:
    enum { FORWARD, REVERSE, SHUFFLED } kind_ = FORWARD;
    uint64_t state_ = 0;
    uint64_t random() {  // splitmix64
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
};

// A grid on its way through the workers.
struct Running {
    const Grid& grid;
    Order order;
    std::vector<i64> blocks;  // in which order
    std::atomic<i64> next{0};
    std::mutex mutex;
    std::string error;
    std::atomic<bool> failed{false};

    explicit Running(const Grid& g) : grid(g), blocks((i64)g.blocks.x * g.blocks.y * g.blocks.z) {
        std::iota(blocks.begin(), blocks.end(), 0);
        order.arrange(blocks.begin(), blocks.end());
    }
    void fail(const std::string& what) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!failed.exchange(true)) { error = what; }
    }
};

// ---- one OS thread's block ------------------------------------------------------------------------------------------
class Worker {
public:
    Worker() {
        worker = this;
        dl_iterate_phdr(
            [](dl_phdr_info* program, size_t, void* self) {  // the program itself comes first
                for (int i = 0; i < program->dlpi_phnum; i++) {
                    const auto& part = program->dlpi_phdr[i];
                    if (part.p_type == PT_TLS) { ((Worker*)self)->static_shared_ = {(char*)program->dlpi_tls_data, part.p_memsz}; }
                }
                return 1;
            },
            this);
    }

    void run(Running& running) {
        running_ = &running;
        const Grid& grid = running.grid;
        const i64 blocks = (i64)running.blocks.size();
        for (i64 i; !running.failed && (i = running.next++) < blocks;) { run_block(running.blocks[i], grid); }
    }

    int lane_id() const { return (int)(lane_ - lanes_.data()) % 32; }
    void* shared() { return shared_.data(); }
    void kernel_begins() { checker::run_thread((int)(lane_ - lanes_.data()), fiber_->stack()); }

    void barrier(Site site) {
        if (at_barrier_ > 0 && !(site == barrier_site_)) {
            simt::fail("threads of a block meet at different barriers: %s:%d and %s:%d", barrier_site_.file, barrier_site_.line, site.file,
                       site.line);
        }
        barrier_site_ = site;
        lane_->state = Lane::AT_BARRIER;
        at_barrier_++;
        open_barrier();
        wait();
    }
    void collective(const char* name, unsigned mask, void* mine, Collective all, Site site) {
        const int id = lane_id(), w = (int)(lane_ - lanes_.data()) / 32;
        if (!(mask >> id & 1)) { simt::fail("%s (%s:%d) of lane %d is for the lanes %08x", name, site.file, site.line, id, mask); }
        lane_->state = Lane::IN_WARP;
        lane_->name = name, lane_->mask = mask, lane_->mine = mine, lane_->all = all, lane_->site = site;
        warps_[w].waiting |= 1u << id;
        complete(w, mask);
        wait();
    }
    void copy_async(void* to, const void* from, int bytes, bool valid, Site site) {
        if (((uintptr_t)to | (uintptr_t)from) % bytes != 0) {
            simt::fail("copy_async (%s:%d): a misaligned address", site.file, site.line);
        }
        if (!is_shared(to, bytes)) { simt::fail("copy_async (%s:%d) to what is not shared memory", site.file, site.line); }
        checker::copy_begins(to, from, bytes, valid, site);
        memset(to, POISON, bytes);
        lane_->copies.push_back({to, from, bytes, valid, lane_->groups, site});
    }
    void copies_commit() { lane_->groups++; }
    void copies_wait(int groups) {
        auto& copies = lane_->copies;
        const auto landed = [&](const Copy& copy) { return copy.group < lane_->groups - groups; };
        for (const Copy& copy : copies) {
            if (!landed(copy)) { continue; }
            checker::copy_lands(copy.to, copy.from, copy.bytes, copy.valid, copy.site);
            if (copy.valid) {
                memcpy(copy.to, copy.from, copy.bytes);
            } else {
                memset(copy.to, 0, copy.bytes);
            }
        }
        std::erase_if(copies, landed);
    }
    void report(const std::string& what) {
        running_->fail(format("%s, block (%u,%u,%u) thread (%u,%u,%u): %s", describe(running_->grid).c_str(), blockIdx.x, blockIdx.y,
                              blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, what.c_str()));
    }
    // Ends the block. This stack is given up as it is, so nothing on it may need a destructor.
    [[noreturn]] void give_up() {
        go_to(&own_);
        __builtin_trap();
    }

private:
    struct Copy {
        void* to;
        const void* from;
        int bytes;
        bool valid;
        int group;
        Site site;
    };
    struct Lane {
        enum { RUNS, IN_WARP, AT_BARRIER, ENDED } state;
        uint3 index;
        Fiber* fiber;  // that sleeps with it
        // What it waits for, IN_WARP.
        const char* name;
        unsigned mask;
        void* mine;
        Collective all;
        Site site;
        // Its copies on their way, and how many groups of them it has committed.
        std::vector<Copy> copies;
        int groups;
    };
    struct Warp {
        unsigned alive = 0, waiting = 0;
    };

    void run_block(i64 block, const Grid& grid) {
        const dim3 b = grid.blocks, t = grid.threads;
        prepare_memory(grid);
        blockDim = {t.x, t.y, t.z}, gridDim = {b.x, b.y, b.z};
        blockIdx = {(unsigned)(block % b.x), (unsigned)(block / b.x % b.y), (unsigned)(block / b.x / b.y)};
        order_ = running_->order;
        order_.seed(block);
        const int threads = (int)(t.x * t.y * t.z);
        lanes_.resize(threads), to_start_.resize(threads);
        std::iota(to_start_.begin(), to_start_.end(), 0);
        order_.arrange(to_start_.begin(), to_start_.end());
        warps_.assign(ceil_div(threads, 32), {});
        for (int i = 0; i < threads; i++) {
            lanes_[i].state = Lane::RUNS;
            lanes_[i].index = {i % t.x, i / t.x % t.y, i / t.x / t.y};
            lanes_[i].copies.clear();
            lanes_[i].groups = 0;
            warps_[i / 32].alive |= 1u << i % 32;
        }
        checker::begin_block(blockIdx, threads, {shared_.data(), shared_.size()}, static_shared_);
        ready_.clear();
        started_ = at_barrier_ = 0, alive_ = threads;

        go_to(next());  // comes back when no thread can go on
        if (alive_ > 0) {
            if (!running_->failed) { running_->fail(describe(grid) + ": " + describe_deadlock()); }
            idle_.clear();
            for (auto& fiber : fibers_) {
                fiber->restart();
                idle_.push_back(fiber.get());
            }
        }
        if (const std::string damage = shared_.damage(); !damage.empty()) {
            running_->fail(describe(grid) + ": dynamic shared memory: " + damage);
        }
    }

    // Fills shared memory, static and dynamic, with what reads as NaN. Static shared memory is all of the program's thread-local
    // storage but the emulator's own variables; nothing else of it is alive on a worker.
    void prepare_memory(const Grid& grid) {
        shared_.resize(grid.shared_bytes);
        if (checker::ON && std::exchange(poisoned_, true)) { return; }  // reads of what was not written are seen at once
        Worker* const self = this;
        memset(static_shared_.data(), POISON, static_shared_.size());
        worker = self;
    }

    bool is_shared(const void* p, size_t bytes) const {
        const auto within = [&](const char* begin, size_t size) { return p >= begin && (const char*)p + bytes <= begin + size; };
        return within(shared_.data(), shared_.size()) || within(static_shared_.data(), static_shared_.size());
    }

    // ---- who runs
    Fiber* next() {
        if (!ready_.empty()) {
            lane_ = &lanes_[ready_.back()];
            ready_.pop_back();
            return lane_->fiber;
        }
        if (started_ == (int)lanes_.size()) { return &own_; }
        if (idle_.empty()) {
            fibers_.push_back(std::make_unique<Fiber>(start_threads));
            idle_.push_back(fibers_.back().get());
        }
        Fiber* fiber = idle_.back();
        idle_.pop_back();
        return fiber;
    }
    void go_to(Fiber* to) {
        Fiber* from = fiber_;
        if (from == to) { return; }
        fiber_ = to;
        Fiber::change(*from, *to);
    }
    void wait() {
        checker::pause();
        Lane* me = lane_;
        me->fiber = fiber_;
        go_to(next());
        threadIdx = me->index;
        kernel_begins();
    }
    static void start_threads() {
        Worker& w = *worker;
        w.fiber_->arrived();
        for (;;) {
            while (w.started_ < (int)w.lanes_.size() && w.ready_.empty()) {
                w.lane_ = &w.lanes_[w.to_start_[w.started_++]];
                threadIdx = w.lane_->index;
                w.running_->grid.thread();
                w.end_thread();
            }
            w.idle_.push_back(w.fiber_);
            w.go_to(w.next());
        }
    }
    void end_thread() {
        checker::pause();
        if (!lane_->copies.empty()) { simt::fail("the thread ends before its copies to shared memory have landed"); }
        const int id = (int)(lane_ - lanes_.data());
        lane_->state = Lane::ENDED;
        alive_--;
        Warp& warp = warps_[id / 32];
        warp.alive &= ~(1u << id % 32);
        for (unsigned waiting = warp.waiting; waiting; waiting &= waiting - 1) {
            const Lane& other = lanes_[id / 32 * 32 + __builtin_ctz(waiting)];
            if (other.state == Lane::IN_WARP) { complete(id / 32, other.mask); }
        }
        if (at_barrier_ > 0) { open_barrier(); }
    }

    // ---- who may go on
    void open_barrier() {
        if (at_barrier_ < alive_) { return; }
        at_barrier_ = 0;
        checker::barrier_opened();
        release(0, (int)lanes_.size(), [](const Lane& lane) { return lane.state == Lane::AT_BARRIER; });
    }
    void complete(int w, unsigned mask) {
        Warp& warp = warps_[w];
        Lane* lanes = &lanes_[w * 32];
        const unsigned members = mask & warp.alive;
        if (members == 0 || (warp.waiting & members) != members) { return; }
        const Lane& first = lanes[__builtin_ctz(members)];
        void* args[32] = {};
        for (unsigned left = members; left; left &= left - 1) {
            const Lane& lane = lanes[__builtin_ctz(left)];
            if (lane.mask != mask) { return; }
            if (lane.all != first.all || !(lane.site == first.site)) {
                simt::fail("lanes %08x of a warp meet at different places: %s (%s:%d) and %s (%s:%d)", mask, first.name, first.site.file,
                           first.site.line, lane.name, lane.site.file, lane.site.line);
            }
            args[__builtin_ctz(left)] = lane.mine;
        }
        if (first.all) {
            checker::pause();
            first.all(args, members);
        } else {
            checker::warp_synced(w, members);
        }
        warp.waiting &= ~members;
        release(w * 32, std::min(w * 32 + 32, (int)lanes_.size()), [&](const Lane& lane) { return members >> (&lane - lanes) & 1; });
    }
    template <typename Who>
    void release(int begin, int end, const Who& who) {
        const size_t before = ready_.size();
        for (int i = begin; i < end; i++) {
            if (!who(lanes_[i])) { continue; }
            lanes_[i].state = Lane::RUNS;
            ready_.push_back(i);
        }
        order_.arrange(ready_.begin() + before, ready_.end());
        std::reverse(ready_.begin() + before, ready_.end());  // the last is taken first
    }

    std::string describe_deadlock() const {
        std::vector<std::pair<std::string, int>> groups;  // of threads that wait for the same
        for (size_t i = 0; i < lanes_.size(); i++) {
            const Lane& lane = lanes_[i];
            if (lane.state == Lane::ENDED) { continue; }
            const std::string wait =
                lane.state == Lane::AT_BARRIER
                    ? format("at __syncthreads (%s:%d)", barrier_site_.file, barrier_site_.line)
                    : format("of warp %zu at %s for the lanes %08x (%s:%d)", i / 32, lane.name, lane.mask, lane.site.file, lane.site.line);
            if (groups.empty() || groups.back().first != wait) { groups.push_back({wait, 0}); }
            groups.back().second++;
        }
        std::string text = format("no thread can go on; %zu of %zu have ended, and there wait", lanes_.size() - alive_, lanes_.size());
        for (size_t g = 0; g < std::min<size_t>(groups.size(), 8); g++) {
            text += format("%s %d %s", g ? ";" : "", groups[g].second, groups[g].first.c_str());
        }
        return text;
    }

    Guarded shared_{0};
    Running* running_ = nullptr;
    Order order_;
    std::vector<Lane> lanes_;
    std::vector<Warp> warps_;
    std::vector<int> to_start_, ready_;
    int started_ = 0, alive_ = 0, at_barrier_ = 0;
    Site barrier_site_{};
    std::span<char> static_shared_;
    bool poisoned_ = false;

    std::vector<std::unique_ptr<Fiber>> fibers_;
    std::vector<Fiber*> idle_;
    Fiber own_;
    Fiber* fiber_ = &own_;
    Lane* lane_ = nullptr;
};

// ---- the OS threads -------------------------------------------------------------------------------------------------
// Kernels never run on the caller's thread: it has thread-local variables that are not shared memory.
class Workers {
public:
    Workers() {
        const char* text = getenv("SIMT_THREADS");
        const int threads = checker::ON ? 1 : std::max(1, text ? atoi(text) : (int)std::thread::hardware_concurrency());
        for (int i = 0; i < threads; i++) {
            threads_.emplace_back([this] { work(); });
        }
    }
    ~Workers() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
        }
        start_.notify_all();
        for (std::thread& thread : threads_) { thread.join(); }
    }
    void run(Running& running) {
        std::lock_guard<std::mutex> one_grid(grid_mutex_);
        std::unique_lock<std::mutex> lock(mutex_);
        running_ = &running;
        busy_ = (int)std::min((i64)threads_.size(), (i64)running.blocks.size());
        to_join_ = busy_;
        busy_ == 1 ? start_.notify_one() : start_.notify_all();
        end_.wait(lock, [this] { return busy_ == 0; });
    }

private:
    void work() {
        Worker self;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            start_.wait(lock, [this] { return to_join_ > 0 || stop_; });
            if (stop_) { return; }
            to_join_--;
            lock.unlock();
            self.run(*running_);
            lock.lock();
            if (--busy_ == 0) { end_.notify_one(); }
        }
    }
    std::mutex grid_mutex_, mutex_;
    std::condition_variable start_, end_;
    Running* running_ = nullptr;
    int busy_ = 0, to_join_ = 0;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

void fail(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    worker->report(vformat(fmt, args));
    va_end(args);
    worker->give_up();
}
int lane_id() { return worker->lane_id(); }
void copy_async(void* to, const void* from, int bytes, bool valid, Site site) { worker->copy_async(to, from, bytes, valid, site); }
void copies_commit() { worker->copies_commit(); }
void copies_wait(int groups) { worker->copies_wait(groups); }
void kernel_begins() { worker->kernel_begins(); }
void* shared_arena() { return worker->shared(); }
void barrier(Site site) { worker->barrier(site); }
void collective(const char* name, unsigned mask, void* mine, Collective all, Site site) { worker->collective(name, mask, mine, all, site); }

std::string describe(const Grid& grid) {
    std::string name = "a kernel";
    Dl_info info;
    if (dladdr(grid.kernel, &info) && info.dli_sname) {
        name = demangled(info.dli_sname);
        if (const size_t parameters = name.find(">("); parameters != name.npos) {
            name.resize(parameters + 1);
        } else {
            name.resize(std::min(name.size(), name.find('(')));
        }
        if (name.starts_with("void ")) { name.erase(0, 5); }
    }
    return format("%s (launched at %s:%d)", name.c_str(), grid.site.file, grid.site.line);
}

std::string run_grid(const Grid& grid) {
    static Workers workers;
    Running running(grid);
    checker::begin_grid(grid);
    workers.run(running);
    checker::end_grid();
    return running.error;
}

}  // namespace simt
