// device_cpu.h: the CPU side of device.h. A rank is a team of threads over one address space; "device" memory is memory.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cinttypes>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <thread>

#include "base.h"

constexpr const char* BACKEND_NAME = "cpu";
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
        if (workers_.empty() || items <= 1) {
            for (i64 item = 0; item < items; item++) {
                job(item);
                between();
            }
            return;
        }
        call_ = [](const void* context, i64 item) { (*(const Job*)context)(item); };
        context_ = &job;
        items_ = items;
        next_.store(0, std::memory_order_relaxed);
        busy_.store((int)workers_.size(), std::memory_order_relaxed);
        generation_.fetch_add(1, std::memory_order_release);
        generation_.notify_all();
        take([&] { between(); });
        for (int i = 0; i < spin_ && busy_.load(std::memory_order_acquire) != 0; i++) { __builtin_ia32_pause(); }
        for (int busy; (busy = busy_.load(std::memory_order_acquire)) != 0;) { busy_.wait(busy, std::memory_order_acquire); }
        if (failure_) { std::rethrow_exception(std::exchange(failure_, nullptr)); }
    }

private:
    void stop() {
        stop_ = true;
        generation_.fetch_add(1);
        generation_.notify_all();
        for (std::thread& worker : workers_) { worker.join(); }
    }
    template <typename Between>
    void take(const Between& between) {
        try {
            for (i64 item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) {
                call_(context_, item);
                between();
            }
        } catch (...) {
            std::lock_guard<std::mutex> lock(failure_mutex_);
            failure_ = std::current_exception();
        }
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
            take([] {});
            if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) { busy_.notify_one(); }
        }
    }

    std::vector<std::thread> workers_;
    std::atomic<uint32_t> generation_{0};
    std::atomic<i64> next_{0};
    std::atomic<int> busy_{0};
    std::atomic<bool> stop_{false};
    void (*call_)(const void*, i64) = nullptr;
    const void* context_ = nullptr;
    i64 items_ = 0;
    std::mutex failure_mutex_;
    std::exception_ptr failure_;
    const int spin_;
};

// One rank's execution context.
struct Run {
    Team team;
    std::function<void()> poll;  // what to do between blocks of work: lets a communicator move bytes; may be empty

    explicit Run(int threads, int spin = 0) : team(threads, spin) {}

    // A parallel loop. The split into items must not depend on the number of threads, and items must not depend on each
    // other: then results do not depend on the number of threads either.
    template <typename Job>
    void parallel(i64 items, const Job& job) {
        team.run(items, job, [this] {
            if (poll) { poll(); }
        });
    }
};

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

template <typename X>
void copy_to_device(X* device, const X* host, i64 count, Run&) { memcpy(device, host, count * sizeof(X)); }
template <typename X>
void copy_to_host(X* host, const X* device, i64 count, Run&) { memcpy(host, device, count * sizeof(X)); }

// The type that matrix products are fast in here. Without AMX, bf16 products run at half the speed of fp32.
// For a model of this width. Measured with AMX and oneDNN 2.6: at C = 768 bf16 is 2.5 times as fast as fp32, at 128 fifty times slower.
inline DType fast_dtype(i64 channels) {
    constexpr i64 WIDE = 512;
    if (channels < WIDE) { return DType::FP32; }
    std::string flags;
    if (FILE* cpuinfo = fopen("/proc/cpuinfo", "r")) {
        char line[8192];
        while (flags.empty() && fgets(line, sizeof(line), cpuinfo)) {
            if (strncmp(line, "flags", 5) == 0) { flags = line; }
        }
        fclose(cpuinfo);
    }
    return flags.find(" amx_bf16") != std::string::npos ? DType::BF16 : DType::FP32;
}

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
            left = std::min(left, std::max<i64>(limit - used + std::max<i64>(cache, 0), 0));
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
