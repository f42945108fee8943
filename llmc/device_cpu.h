// device_cpu.h: the CPU side of device.h. A rank is a team of threads over one address space; "device" memory is memory.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cinttypes>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <thread>

#include "base.h"

constexpr const char* BACKEND_NAME = "cpu";
constexpr const char* MEMORY_PLACE = "host";
constexpr i64 MICRO_BATCH_TOKENS = 1024;  // of --micro-batch -1: more are no faster (docs/notes.md), and cost memory
constexpr i64 DEVICE_ALIGN = 1;  // rows need no padding here

struct bf16 {
    uint16_t bits;
    bf16() = default;
    bf16(float value) {
        uint32_t u;
        memcpy(&u, &value, 4);
        const uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;  // to nearest, ties to even
        const uint32_t nan = (u >> 16) | 0x40;                          // rounding could turn a NaN into infinity
        bits = (uint16_t)((u & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
    }
    operator float() const {
        const uint32_t u = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &u, 4);
        return value;
    }
};

// One parallel loop after another. Its items are taken one by one by whoever comes: the owner, the threads of its team, and ranks of this process
// that would otherwise wait.
class Loop {
public:
    // By the owner. From here on others may call call(context, item), for every item in [0, items).
    void open(void (*call)(const void*, i64), const void* context, i64 items) {
        call_ = call, context_ = context, items_ = items;
        next_.store(0, std::memory_order_relaxed);
        open_.store(true);
    }
    // By the owner: takes items, between() after each, until none is left; then waits for the others.
    template <typename Between>
    void finish(int spin, const Between& between) {
        while (take_one(between)) {}
        // Here `open` is written, then `joined` read; in join the other way round: one of the two sees the other.
        open_.store(false);
        for (int i = 0; i < spin && joined_.load() != 0; i++) { __builtin_ia32_pause(); }
        for (int joined; (joined = joined_.load()) != 0;) { joined_.wait(joined); }
        if (failure_) { std::rethrow_exception(std::exchange(failure_, nullptr)); }
    }
    // By others: up to `most` items, if a loop is open. Returns how many.
    i64 join(i64 most) {
        i64 done = 0;
        joined_.fetch_add(1);
        while (done < most && open_.load() && take_one([] {})) { done++; }
        if (joined_.fetch_sub(1) == 1 && !open_.load()) { joined_.notify_one(); }
        return done;
    }

private:
    template <typename Between>
    bool take_one(const Between& between) {
        const i64 item = next_.fetch_add(1, std::memory_order_relaxed);
        if (item >= items_) { return false; }
        try {
            call_(context_, item);
            between();
        } catch (...) {
            std::lock_guard<std::mutex> lock(failure_mutex_);
            failure_ = std::current_exception();
            next_.store(items_, std::memory_order_relaxed);  // nobody begins another
        }
        return true;
    }

    void (*call_)(const void*, i64) = nullptr;
    const void* context_ = nullptr;
    i64 items_ = 0;
    alignas(64) std::atomic<i64> next_{0};
    alignas(64) std::atomic<int> joined_{0};
    std::atomic<bool> open_{false};
    std::mutex failure_mutex_;
    std::exception_ptr failure_;
};

// The loops of all ranks of this process.
class Loops {
public:
    static std::shared_ptr<Loop> add() {
        std::lock_guard<std::mutex> lock(mutex_);
        loops_.push_back(std::make_shared<Loop>());
        version_++;
        return loops_.back();
    }
    static void remove(const std::shared_ptr<Loop>& loop) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::erase(loops_, loop);
        version_++;
    }
    // One item of any loop but `mine`; false where there is none.
    static bool help(const std::shared_ptr<Loop>& mine) {
        static thread_local std::vector<std::shared_ptr<Loop>> known;
        static thread_local int version = -1;
        if (version != version_.load(std::memory_order_acquire)) {
            std::lock_guard<std::mutex> lock(mutex_);
            known = loops_, version = version_;
        }
        return std::any_of(known.begin(), known.end(), [&](const auto& loop) { return loop != mine && loop->join(1) > 0; });
    }

private:
    static inline std::mutex mutex_;
    static inline std::vector<std::shared_ptr<Loop>> loops_;
    static inline std::atomic<int> version_{0};
};

// A team runs the items of a parallel loop; the caller is its first thread. Idle threads spin briefly (only where every
// thread of the job can have a core: spin > 0), then sleep on a futex, so that 8 ranks run well on 2 cores.
class Team {
public:
    explicit Team(int threads, int spin = 0) : spin_(spin) {
        try {
            for (int i = 1; i < threads; i++) {
                workers_.emplace_back([this] { work(); });
            }
        } catch (...) {  // a limit on processes: a thread that is not joined would end the program without a word
            stop();
            throw;
        }
    }
    ~Team() { stop(); }
    int threads() const { return (int)workers_.size() + 1; }

    // Calls job(item) for every item in [0, items), in any order, on any thread; between(), on the caller only, after each of its items.
    template <typename Job, typename Between>
    void run(i64 items, const Job& job, const Between& between) {
        if (items <= 1) {
            if (items == 1) { job(0), between(); }
            return;
        }
        loop_->open([](const void* context, i64 item) { (*(const Job*)context)(item); }, &job, items);
        if (!workers_.empty()) { wake(); }
        loop_->finish(spin_, between);
    }
    // An item of another rank's loop, for a rank that waits; false where there is none.
    bool help_others() const { return Loops::help(loop_); }

private:
    void stop() {
        stop_ = true;
        wake();
        for (std::thread& worker : workers_) { worker.join(); }
        Loops::remove(loop_);
    }
    void wake() {
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
    }
    void work() {
        for (uint32_t seen = 0;;) {
            uint32_t now = generation_.load(std::memory_order_acquire);
            for (int i = 0; i < spin_ && now == seen; i++) {
                __builtin_ia32_pause();
                now = generation_.load(std::memory_order_acquire);
            }
            while (now == seen) {
                generation_.wait(seen, std::memory_order_acquire);
                now = generation_.load(std::memory_order_acquire);
            }
            seen = now;
            if (stop_) { return; }
            loop_->join(std::numeric_limits<i64>::max());
        }
    }

    const std::shared_ptr<Loop> loop_ = Loops::add();
    std::vector<std::thread> workers_;
    std::atomic<uint32_t> generation_{0};
    std::atomic<bool> stop_{false};
    const int spin_;
};

struct Graph {};  // there is nothing to record here

// One rank's execution context.
struct Run {
    Team team;
    std::function<void()> poll;         // what to do between blocks of work: lets a communicator move bytes; may be empty
    class Timeline* timeline = nullptr;  // where ops note when they ran; null: nowhere

    explicit Run(int threads, int spin = 0) : team(threads, spin) {}

    int threads() const { return team.threads(); }
    std::string place() const { return format("%d thread%s a rank", threads(), threads() == 1 ? "" : "s"); }

    // A parallel loop. The split into items must not depend on the number of threads, and items must not depend on each
    // other: then results do not depend on the number of threads either.
    template <typename Job>
    void parallel(i64 items, const Job& job) {
        team.run(items, job, [this] {
            if (poll) { poll(); }
        });
    }
    static constexpr i64 replays = 0;
    template <typename Work>
    void replay(Graph&, const Work& work) {
        work();
    }
    // Does one item of another rank's loop, where ranks share this process; false where there is none.
    bool help_others() const { return team.help_others(); }
};

struct Moment {
    std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
    explicit Moment(Run&) {}
};
inline double seconds_between(const Moment& a, const Moment& b) { return std::chrono::duration<double>(b.time - a.time).count(); }

inline void* device_alloc(i64 bytes, const char* what) {
    if (bytes == 0) { return nullptr; }
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "out of memory: %s needs %lld bytes (%.2f GiB)\nHINT: lower --micro-batch or --seq, or use more ranks",
          what, (long long)bytes, bytes / 1073741824.0);
    madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}
inline void device_free(void* memory, i64 bytes) {
    if (memory) { munmap(memory, bytes); }
}

// The kernel clears a page at the first write to it: here by all threads, a huge page by one. In loops over rows threads often write to the same one first, and each clears one.
inline void device_touch(char* memory, i64 bytes, Run& run) {
    constexpr i64 HUGE = 2 << 20, PAGE = 4096;
    const i64 begin = (i64)memory, end = begin + bytes;
    run.parallel(end / HUGE - begin / HUGE + 1, [&](i64 item) {
        const i64 from = std::max(begin, (begin / HUGE + item) * HUGE), to = std::min(end, (begin / HUGE + item + 1) * HUGE);
        for (i64 at = from; at < to; at += PAGE) { *(char*)at = 0; }
    });
}

template <typename X>
void copy_to_device(X* device, const X* host, i64 count, Run&) { memcpy(device, host, count * sizeof(X)); }
template <typename X>
void copy_to_host(X* host, const X* device, i64 count, Run&) { memcpy(host, device, count * sizeof(X)); }

// The number that follows `key` in a file of lines, or -1: in /proc, and in the files of control groups.
inline i64 number_after(const std::string& path, const std::string& key) {
    i64 number = -1;
    if (FILE* file = fopen(path.c_str(), "r")) {
        char line[256];
        while (number < 0 && fgets(line, sizeof(line), file)) {
            if (strncmp(line, key.c_str(), key.size()) == 0) { sscanf(line + key.size(), "%" SCNd64, &number); }
        }
        fclose(file);
    }
    return number;
}

// What the limits on the control group `group` and on those around it, up to `mount`, leave. As in MemAvailable, the cache of files counts
// as free: the kernel drops it when asked. Version 2 and version 1 of control groups have their own names for the same.
inline i64 cgroup_memory_left(const std::string& mount, std::string group) {
    i64 left = std::numeric_limits<i64>::max();
    for (;; group.resize(group.rfind('/'))) {
        const std::string dir = mount + group, stat = dir + "/memory.stat";
        const bool v1 = access((dir + "/memory.limit_in_bytes").c_str(), F_OK) == 0;
        const i64 limit = number_after(dir + (v1 ? "/memory.limit_in_bytes" : "/memory.max"), "");  // -1: "max"
        const i64 used = number_after(dir + (v1 ? "/memory.usage_in_bytes" : "/memory.current"), "");
        if (limit >= 0 && used >= 0) {
            const std::string total = v1 ? "total_" : "";
            const i64 cache = number_after(stat, total + "inactive_file ") + number_after(stat, total + "active_file ");
            // The figures are not of one moment: the cache may be more than what is used. "No limit" is near the largest number.
            left = std::min(left, std::max<i64>(limit - std::max<i64>(used - std::max<i64>(cache, 0), 0), 0));
        }
        if (group.rfind('/') == std::string::npos) { return left; }
    }
}

// Bytes that this host can still give to this process: a container or a batch job may have less than its host.
inline i64 available_memory() {
    const i64 kib = number_after("/proc/meminfo", "MemAvailable:");
    i64 bytes = kib > 0 ? kib * 1024 : std::numeric_limits<i64>::max();
    if (FILE* groups = fopen("/proc/self/cgroup", "r")) {
        char line[4096];
        while (fgets(line, sizeof(line), groups)) {  // "0::/a/b" or "4:memory:/a/b"
            line[strcspn(line, "\n")] = 0;
            const char *v2 = strstr(line, "0::/"), *v1 = strstr(line, "memory:/");
            if (v2 == line) { bytes = std::min(bytes, cgroup_memory_left("/sys/fs/cgroup", line + 3)); }
            if (v1) { bytes = std::min(bytes, cgroup_memory_left("/sys/fs/cgroup/memory", v1 + 7)); }
        }
        fclose(groups);
    }
    return bytes;
}

// The execution context of one of `ranks_here` ranks that divide `threads` (0: one per core) of this host among them.
inline Run make_run(int threads, int ranks_here) {
    const int cores = std::max(1, (int)std::thread::hardware_concurrency());
    const int all = threads > 0 ? threads : cores, mine = std::max(1, all / ranks_here);
    return Run(mine, mine * ranks_here <= cores ? 2000 : 0);
}
