// checker.cpp: see checker.h. How it works:
//
// Kernels (and the host code of tests) are compiled with -fsanitize=thread, which has g++ call __tsan_read4 and the like before every
// access, but are linked with the functions at the end of this file instead of the sanitizer's own.
//
// Every two bytes of device and shared memory have a Cell: who wrote them last, and up to two who have read them since. "Who" is the number
// of a segment: what one thread does from one barrier to the next. Numbers ascend, so one comparison tells what is older than the grid, or
// than all that is unordered. A task of a library is one segment.
#include "checker.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "symbols.h"
#include "task_order.h"

namespace simt::checker {
namespace {

enum : uint32_t {
    FORBIDDEN,  // not to be touched
    UNWRITTEN,  // never written
    PAST,       // written by whom nobody can race with
    FIRST_SEGMENT,
    IN_FLIGHT = ~0u  // cp.async writes it
};
struct Record {
    uint32_t segment = 0, place = 0;
};
struct Cell {
    Record write, reads[2];
};

// Where an access is in the source: an offset in the program's code, or, with NAMED, an index into a list of sites. ATOMIC: it is one.
constexpr uint32_t ATOMIC = 1, NAMED = 1u << 31;

struct Access {
    const char* p;
    size_t bytes;
    bool write;
    uint32_t place;
    bool atomic() const { return place & ATOMIC; }
    const char* verb() const { return write ? "writes" : "reads"; }
};

// ---- memory ---------------------------------------------------------------------------------------------------------
constexpr size_t PAGE = 4096;
void* reserve(size_t bytes) {  // addresses; memory comes with the first touch
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(p != MAP_FAILED, "simt: no %zu bytes of address space for the checker: %s", bytes, strerror(errno));
    return p;
}
// A range of memory with its cells.
struct Space {
    char* base = nullptr;
    size_t bytes = 0;
    Cell* cells = nullptr;
    bool holds(const void* p) const { return (size_t)((const char*)p - base) < bytes; }
    Cell* cell(const void* p) const { return cells + ((const char*)p - base) / 2; }
};
size_t cell_count(const void* p, size_t bytes) { return ((uintptr_t)p % 2 + bytes + 1) / 2; }

// Device memory, and dynamic shared memory. No address is used twice, so what was freed stays forbidden.
class Arena : public Space {
public:
    Arena() : Space{(char*)reserve(SIZE), SIZE, (Cell*)reserve(SIZE / 2 * sizeof(Cell))} {}
    char* map(size_t size) {
        std::lock_guard lock(mutex_);
        char* memory = base + top_;
        top_ += round_up(size, PAGE);
        check(top_ <= SIZE, "simt: the checker has no more addresses for device memory");
        return memory;
    }
    void unmap(char* memory, size_t size) {
        std::lock_guard lock(mutex_);
        madvise(memory, round_up(size, PAGE), MADV_DONTNEED);
        madvise(cell(memory), round_up(size, PAGE) / 2 * sizeof(Cell), MADV_DONTNEED);
        for (auto a = allocations_.lower_bound(memory); a != allocations_.end() && a->first < memory + size; a++) {
            a->second.freed = true;
        }
    }
    void allow(char* data, size_t size) {
        std::lock_guard lock(mutex_);
        allocations_[data] = {size, false};
        for (size_t i = 0; i < cell_count(data, size); i++) { cell(data)[i] = {{UNWRITTEN}, {}}; }
    }
    // "byte 400 of an allocation of 400 bytes": of the nearest one.
    std::string describe(const char* p) {
        std::lock_guard lock(mutex_);
        auto next = allocations_.upper_bound((char*)p);
        if (next != allocations_.begin()) {
            const auto& [data, allocation] = *std::prev(next);
            const bool nearer =
                next == allocations_.end() || p - data < (i64)allocation.bytes || p - data - (i64)allocation.bytes < next->first - p;
            if (nearer) { next--; }
        }
        if (next == allocations_.end()) { return "no allocation"; }
        const auto& [data, allocation] = *next;
        return format("byte %td of an allocation of %zu%s", p - data, allocation.bytes, allocation.freed ? " that was freed" : "");
    }
    template <typename F>
    void for_cells(const F& change) {
        std::lock_guard lock(mutex_);
        for (auto& [data, allocation] : allocations_) {
            for (size_t i = 0; !allocation.freed && i < cell_count(data, allocation.bytes); i++) { change(cell(data)[i]); }
        }
    }

private:
    static constexpr size_t SIZE = 256ull << 30;
    struct Allocation {
        size_t bytes;
        bool freed;
    };
    std::mutex mutex_;
    size_t top_ = 0;
    std::map<char*, Allocation> allocations_;
};

// The thread-local variables of the OS thread that runs blocks: static shared memory, and a thread's indices.
class ThreadLocals : public Space {
public:
    ThreadLocals() = default;
    explicit ThreadLocals(std::span<char> memory)
        : Space{memory.data(), memory.size(), (Cell*)reserve((memory.size() / 2 + 1) * sizeof(Cell))}, variables_(thread_locals()) {
        std::sort(variables_.begin(), variables_.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
        for (const ThreadLocal& variable : variables_) {
            if (variable.name.starts_with("_ZN4simt")) { continue; }  // the emulator's own
            const bool index = variable.name.ends_with("Idx") || variable.name.ends_with("Dim"), guard = variable.name.starts_with("_ZGV");
            for (size_t i = 0; i < (variable.bytes + 1) / 2; i++) {
                cells[variable.offset / 2 + i].write.segment = index || guard ? PAST : UNWRITTEN;
            }
        }
    }
    std::string describe(const char* p) const {
        const size_t offset = p - base;
        const auto next =
            std::upper_bound(variables_.begin(), variables_.end(), offset, [](size_t o, const auto& v) { return o < v.offset; });
        if (next == variables_.begin()) { return "no variable in shared memory"; }
        const ThreadLocal& variable = *std::prev(next);
        std::string name = demangled(variable.name.c_str());
        name = name.substr(name.rfind("::") == std::string::npos ? 0 : name.rfind("::") + 2);
        return format("byte %zu of '%s' in shared memory, of %zu bytes", offset - variable.offset, name.c_str(), variable.bytes);
    }
    template <typename F>
    void for_cells(const F& change) {
        for (const ThreadLocal& variable : variables_) {
            for (size_t i = 0; i < (variable.bytes + 1) / 2; i++) { change(cells[variable.offset / 2 + i]); }
        }
    }

private:
    std::vector<ThreadLocal> variables_;
};

// ---- who runs here --------------------------------------------------------------------------------------------------
enum class Code { HOST, EMULATOR, KERNEL };
constinit thread_local Code code = Code::HOST;
constinit thread_local Acting* acting = nullptr;  // the task of this OS thread

class Checker {
public:
    std::mutex mutex;  // of everything but the arena's list; held while a grid runs
    TaskOrder order;

    // ---- tasks and grids
    void begin_work(const std::string& name) {
        const Place place = acting ? acting->places[0] : Place{-1, 0, {}};
        spans_.push_back({next_segment_, place.stream, place.position, name});
        first_ = block_first_ = barrier_first_ = next_segment_;
        oldest_ = order.knows_all(acting) ? first_ : past_;
        knowing_ = acting;
        thread_ = -1;
        segments_.clear();
        thread_segments_.assign(1, 0);
    }
    void begin_grid(const Grid& grid) {
        begin_work(describe(grid));
        grid_ = &grid;
        published_.clear();
    }
    // Copies that a faulty kernel left on their way never land.
    void end_grid() {
        for (const Flight& flight : flights_) {
            each_shared_cell(flight.to, flight.bytes, [](Cell& cell) { cell = {{UNWRITTEN}, {}}; });
        }
        flights_.clear();
    }
    void forget() {
        if (!order.forget()) { return; }
        past_ = next_segment_;
        spans_.clear();
        if (next_segment_ > MANY_SEGMENTS) { renumber(); }
    }
    std::string take_report() {
        std::string& own = acting ? acting->report : report_;
        return std::exchange(own.empty() ? report_ : own, "");
    }

    // ---- a block
    void begin_block(uint3 block, int threads, std::span<char> dynamic_shared, std::span<char> fixed) {
        if (fixed_.base != fixed.data()) { fixed_ = ThreadLocals(fixed); }
        block_ = block.x + grid_->blocks.x * (block.y + grid_->blocks.y * block.z);
        block_first_ = barrier_first_ = next_segment_;
        dynamic_ = {dynamic_shared.data(), dynamic_shared.size()};
        thread_segments_.assign(threads, 0);
        warp_clocks_.assign(threads, {});
        for (int t = 0; t < threads; t++) { warp_clocks_[t][t % 32] = 1; }
        acquired_.clear();
        fenced_ = 0;
    }
    void run_thread(int thread, std::span<const char> stack) {
        thread_ = thread;
        stack_ = stack;
    }
    void barrier_opened() {
        barrier_first_ = next_segment_;
        std::fill(thread_segments_.begin(), thread_segments_.end(), 0);
    }
    void warp_synced(int warp, unsigned lanes) {
        std::array<uint32_t, 32> all{};
        for_members(lanes, [&](int lane) {
            const auto& clock = warp_clocks_[warp * 32 + lane];
            for (int i = 0; i < 32; i++) { all[i] = std::max(all[i], clock[i]); }
        });
        for_members(lanes, [&](int lane) {
            warp_clocks_[warp * 32 + lane] = all;
            warp_clocks_[warp * 32 + lane][lane]++;
            thread_segments_[warp * 32 + lane] = 0;
        });
    }

    // ---- fences and atomics between blocks: what a block did before its fence is known to whoever sees its atomic after that
    void fence() {
        fenced_ = next_segment_;
        std::fill(thread_segments_.begin(), thread_segments_.end(), 0);
    }
    void atomic_seen(const void* p) {
        auto& seen = published_[p];
        for (const auto& [block, until] : seen) { acquired_[block] = std::max(acquired_[block], until); }
        for (const auto& [block, until] : acquired_) { seen[block] = std::max(seen[block], until); }
        if (fenced_) { seen[block_] = fenced_; }
    }

    // ---- an access. Returns false where it is at fault and the code is no kernel; a kernel's grid ends
    bool access(const Access& a) {
        if ((size_t)(a.p - stack_.data()) < stack_.size() && thread_ >= 0) { return true; }
        const bool shared = is_shared(a.p);
        if (!shared && !arena.holds(a.p)) { return outside(a); }
        if (thread_ >= 0 && std::has_single_bit(a.bytes) && a.bytes <= 16 && (uintptr_t)a.p % a.bytes != 0) {
            return report(a, "at a misaligned address");
        }
        Cell* cell = (arena.holds(a.p) ? (const Space&)arena : fixed_).cell(a.p);
        for (const Cell* end = cell + cell_count(a.p, a.bytes); cell < end; cell++) {
            if (!check_cell(*cell, a, shared)) { return false; }
        }
        return true;
    }
    bool note(const void* p, size_t bytes, bool write, const char* who, bool any = false) {
        begin_work(who);
        copies_unwritten_ = any;
        const bool fine = !arena.holds(p) || bytes == 0 || access({(const char*)p, bytes, write, place({who, 0})});
        copies_unwritten_ = false;
        return fine;
    }
    void note_copy(char* to, const char* from, size_t bytes, const char* who) {
        if (!note(from, bytes, false, who, true) || !note(to, bytes, true, who) || !arena.holds(to) || !arena.holds(from)) { return; }
        for (size_t i = 0; i < bytes; i += 2) {
            if (arena.cell(from + i)->write.segment == UNWRITTEN) { arena.cell(to + i)->write.segment = UNWRITTEN; }
        }
    }
    void host_access(const Access& a) {
        std::lock_guard lock(mutex);
        if (report_.empty()) {
            report_ = format("host code %s %s, in device memory, at %s", a.verb(), arena.describe(a.p).c_str(), where(a.place).c_str());
        }
    }

    void thread_reads(const char* p, size_t bytes, Site site) { access({p, bytes, false, place(site)}); }

    // ---- cp.async
    void copy_begins(char* to, const char* from, size_t bytes, bool valid, Site site) {
        if (valid) { access({from, bytes, false, place(site)}); }
        access({to, bytes, true, place(site)});
        flights_.push_back({to, bytes, thread_, site});
        each_shared_cell(to, bytes, [](Cell& cell) { cell.write.segment = IN_FLIGHT; });
    }
    void copy_lands(char* to, const char* from, size_t bytes, bool valid, Site site) {
        if (valid) { access({from, bytes, false, place(site)}); }
        std::erase_if(flights_, [&](const Flight& flight) { return flight.to == to; });
        each_shared_cell(to, bytes, [&](Cell& cell) { cell = {{segment(), place(site)}, {}}; });
    }

    Arena arena;
    const Program program;

private:
    // What one task of a stream, or one grid, did: segments from `first` on.
    struct Span {
        uint32_t first;
        int stream;  // -1: the host itself
        long position;
        std::string name;
    };
    // Of the running grid.
    struct Segment {
        unsigned block;
        int thread;
        uint32_t clock;  // its lane's own, in its warp
    };
    struct Flight {
        const char* to;
        size_t bytes;
        int thread;
        Site site;
    };

    bool is_shared(const void* p) const { return thread_ >= 0 && (dynamic_.holds(p) || fixed_.holds(p)); }
    template <typename F>
    void each_shared_cell(const char* p, size_t bytes, const F& change) {
        Cell* cell = (arena.holds(p) ? (const Space&)arena : fixed_).cell(p);
        for (size_t i = 0; i < cell_count(p, bytes); i++) { change(cell[i]); }
    }

    uint32_t segment() {
        uint32_t& mine = thread_segments_[std::max(thread_, 0)];
        if (mine == 0) {
            check(next_segment_ < IN_FLIGHT, "simt: the checker has counted too much without all streams having been waited for");
            mine = next_segment_++;
            segments_.push_back({block_, thread_, thread_ < 0 ? 0 : warp_clocks_[thread_][thread_ % 32]});
        }
        return mine;
    }
    // Is what that segment did over for the one that runs?
    bool ordered(uint32_t other) const {
        if (other < first_) { return waited_for(other); }
        if (other >= block_first_ && other < barrier_first_) { return true; }
        const Segment& s = segments_[other - first_];
        if (s.block != block_) {
            const auto known = acquired_.find(s.block);
            return known != acquired_.end() && other < known->second;
        }
        return s.thread == thread_ || (s.thread / 32 == thread_ / 32 && warp_clocks_[thread_][s.thread % 32] >= s.clock);
    }
    bool waited_for(uint32_t other) const {
        const Span& span = span_of(other);
        return span.stream < 0 || !knowing_ || knowing_->clock.knows(span.stream, span.position);
    }
    const Span& span_of(uint32_t segment) const {
        return *std::prev(
            std::upper_bound(spans_.begin(), spans_.end(), segment, [](uint32_t s, const Span& span) { return s < span.first; }));
    }

    bool check_cell(Cell& cell, const Access& a, bool shared) {
        const uint32_t me = segment(), last = cell.write.segment;
        const bool again = a.write ? last == me && cell.reads[0].segment == 0 && !(cell.write.place & ATOMIC)
                                   : cell.reads[0].segment == me || cell.reads[1].segment == me;
        if (again) { return true; }
        const uint32_t oldest = shared ? barrier_first_ : oldest_;  // what came before cannot be part of a race
        const uint32_t valid = shared ? block_first_ : PAST;
        if (last == FORBIDDEN) { return report(a, "out of bounds"); }
        if (last == IN_FLIGHT) { return report(a, flight(a.p)); }
        if (!a.write && last < valid && last != PAST && !copies_unwritten_) { return report(a, "never written"); }
        if (last == PAST && shared) { return !a.write || report(a, "that are not to be written"); }
        const bool races = a.bytes > 1;  // two threads may write the two bytes of a cell
        const auto race = [&](const Record& r) {
            return races && r.segment >= oldest && r.segment != me && !(a.atomic() && r.place & ATOMIC) && !ordered(r.segment);
        };
        if (race(cell.write)) { return report(a, other_side(cell.write, "written")); }
        if (!a.write) {
            remember_read(cell, {me, a.place}, oldest);
            return true;
        }
        for (const Record& read : cell.reads) {
            if (race(read)) { return report(a, other_side(read, "read")); }
        }
        cell = {{me, a.place}, {}};
        return true;
    }
    // Two readers are kept, as far apart as can be, so that no writer has waited for both where there is one that it has not waited for.
    void remember_read(Cell& cell, Record mine, uint32_t oldest) {
        auto& [a, b] = cell.reads;
        if (a.segment >= barrier_first_ && b.segment >= barrier_first_ && distance(a, b) > 0) { return; }
        const auto over = [&](const Record& r) { return r.segment < oldest || ordered(r.segment); };
        if (over(a)) {
            a = mine;
        } else if (over(b) || distance(a, mine) > distance(a, b)) {
            b = mine;
        }
    }
    int distance(const Record& a, const Record& b) const {  // 3: of two tasks; 2: of two blocks; 1: of two warps
        if (a.segment < first_ || b.segment < first_) { return 3; }
        const Segment &s = segments_[a.segment - first_], &t = segments_[b.segment - first_];
        return s.block != t.block ? 2 : s.thread / 32 != t.thread / 32;
    }

    // ---- reports
    uint32_t place(Site site) {
        const auto found = std::find(sites_.begin(), sites_.end(), site);
        const size_t index = found - sites_.begin();
        if (found == sites_.end()) { sites_.push_back(site); }
        return NAMED | (uint32_t)index << 1;
    }
    std::string where(uint32_t place) const {
        if (!(place & NAMED)) { return source_lines((place >> 1) - 1); }
        const Site& site = sites_[(place & ~NAMED) >> 1];
        return site.line ? format("%s:%d", site.file, site.line) : site.file;
    }
    std::string describe_memory(const char* p) {
        if (fixed_.holds(p)) { return fixed_.describe(p); }
        return arena.describe(p) + (dynamic_.holds(p) ? ", dynamic shared memory" : "");
    }
    std::string flight(const char* p) const {
        for (const Flight& flight : flights_) {
            if (p + 16 > flight.to && p < flight.to + flight.bytes) {
                return format("to which the copy at %s:%d by thread %s is on its way: it must be waited for", flight.site.file,
                              flight.site.line, thread_name(flight.thread).c_str());
            }
        }
        return "to which a copy is on its way";
    }
    std::string thread_name(int thread) const {
        const dim3& t = grid_->threads;
        return format("(%u,%u,%u)", thread % t.x, thread / t.x % t.y, thread / t.x / t.y);
    }
    std::string other_side(const Record& other, const char* done) const {
        const std::string at = where(other.place);
        if (other.segment < first_) {
            return format("a race: %s at %s in %s, which has not been waited for", done, at.c_str(), span_of(other.segment).name.c_str());
        }
        const Segment& s = segments_[other.segment - first_];
        const dim3& b = grid_->blocks;
        const std::string thread = thread_name(s.thread);
        if (s.block == block_) { return format("a race: %s at %s by thread %s, and no barrier between", done, at.c_str(), thread.c_str()); }
        return format("a race: %s at %s by thread %s of block (%u,%u,%u)", done, at.c_str(), thread.c_str(), s.block % b.x,
                      s.block / b.x % b.y, s.block / b.x / b.y);
    }
    bool outside(const Access& a) {
        if (!a.write && program.holds(a.p)) { return true; }  // a table of constants
        return report(a, "", format("%p, which is not in device memory", (const void*)a.p));
    }
    bool report(const Access& a, const std::string& what) { return report(a, what, describe_memory(a.p)); }
    bool report(const Access& a, const std::string& what, const std::string& memory) {
        const std::string text = format("%s: %s %zu bytes at %s%s%s", where(a.place).c_str(), a.verb(), a.bytes, memory.c_str(),
                                        what.empty() ? "" : ", ", what.c_str());
        if (thread_ >= 0) {
            pause();
            simt::fail("%s", text.c_str());
        }
        std::string& report = acting ? acting->report : report_;
        if (report.empty()) { report = text; }
        return false;
    }

    // Segments are 32-bit numbers: before they run out, all of the past becomes one.
    static constexpr uint32_t MANY_SEGMENTS = 1u << 24;
    void renumber() {
        arena.for_cells([](Cell& cell) { cell = {{std::min<uint32_t>(cell.write.segment, PAST)}, {}}; });
        fixed_.for_cells([](Cell& cell) { cell = {{cell.write.segment == PAST ? PAST : UNWRITTEN}, {}}; });
        past_ = next_segment_ = FIRST_SEGMENT;
    }

    uint32_t next_segment_ = FIRST_SEGMENT, past_ = FIRST_SEGMENT;
    std::vector<Span> spans_;
    std::vector<Site> sites_;
    std::string report_;  // of what no task did
    // The work at hand.
    const Acting* knowing_ = nullptr;
    const Grid* grid_ = nullptr;
    uint32_t first_ = 0, oldest_ = 0;
    std::vector<Segment> segments_;
    bool copies_unwritten_ = false;
    // Its block.
    unsigned block_ = 0;
    uint32_t block_first_ = 0, barrier_first_ = 0;  // segments since it began, since its last barrier
    Space dynamic_;
    ThreadLocals fixed_;
    std::vector<uint32_t> thread_segments_;              // 0: none yet since the last barrier
    std::vector<std::array<uint32_t, 32>> warp_clocks_;  // of each thread: how far it has seen each lane of its warp
    std::vector<Flight> flights_;
    uint32_t fenced_ = 0;                                                      // all of the block's segments before are fenced
    std::map<unsigned, uint32_t> acquired_;                                    // of other blocks: up to which segment
    std::unordered_map<const void*, std::map<unsigned, uint32_t>> published_;  // by the address of an atomic
    // Its thread. -1: no kernel.
    int thread_ = -1;
    std::span<const char> stack_;
};
Checker checker;

void access(const void* p, size_t bytes, bool write, void* from, bool atomic = false) {
    if (code == Code::EMULATOR || (code == Code::HOST && (acting || !checker.arena.holds(p)))) { return; }  // a task is the device's work
    const auto offset = (uint32_t)((uintptr_t)from - checker.program.base);
    const Access a{(const char*)p, bytes, write, offset << 1 | (atomic ? ATOMIC : 0)};
    if (code == Code::HOST) { return checker.host_access(a); }
    checker.access(a);
    if (atomic) { checker.atomic_seen(p); }
}

template <typename F>
void note(const F& what) {
    std::lock_guard lock(checker.mutex);
    what(checker);
}
void fence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (code == Code::KERNEL) { checker.fence(); }
}

}  // namespace

// ---- checker.h ------------------------------------------------------------------------------------------------------
int new_stream() {
    static std::atomic<int> streams{0};
    return streams++;
}
Ticket ticket() {
    std::lock_guard lock(checker.mutex);
    return checker.order.ticket();
}
Task::Task(std::vector<Place> places) : acting_(new Acting{std::move(places), {}}) {
    std::lock_guard lock(checker.mutex);
    checker.order.begin(*acting_);
    acting = acting_;
}
Task::~Task() {
    std::lock_guard lock(checker.mutex);
    checker.order.end(*acting_);
    acting = nullptr;
    delete acting_;
}
void waited_for(int stream, long position) {
    std::lock_guard lock(checker.mutex);
    checker.order.waited_for(acting, stream, position);
    if (!acting) { checker.forget(); }
}
std::string take_report() {
    std::lock_guard lock(checker.mutex);
    return checker.take_report();
}

char* map_memory(size_t bytes) { return checker.arena.map(bytes); }
void unmap_memory(char* memory, size_t bytes) { checker.arena.unmap(memory, bytes); }
void allow(char* data, size_t bytes) { checker.arena.allow(data, bytes); }

void begin_grid(const Grid& grid) {
    checker.mutex.lock();
    checker.begin_grid(grid);
}
void end_grid() {
    checker.end_grid();
    checker.mutex.unlock();
}
void begin_block(uint3 block, int threads, std::span<char> dynamic_shared, std::span<char> thread_local_variables) {
    code = Code::EMULATOR;
    checker.begin_block(block, threads, dynamic_shared, thread_local_variables);
}
void run_thread(int thread, std::span<const char> stack) {
    checker.run_thread(thread, stack);
    code = Code::KERNEL;
}
void pause() { code = Code::EMULATOR; }
void barrier_opened() { checker.barrier_opened(); }
void warp_synced(int warp, unsigned lanes) { checker.warp_synced(warp, lanes); }
void copy_begins(void* to, const void* from, int bytes, bool valid, Site site) {
    checker.copy_begins((char*)to, (const char*)from, bytes, valid, site);
}
void copy_lands(void* to, const void* from, int bytes, bool valid, Site site) {
    checker.copy_lands((char*)to, (const char*)from, bytes, valid, site);
}

}  // namespace simt::checker

namespace simt {

void note_read(const void* p, size_t bytes, const char* who) {
    checker::note([&](auto& c) { c.note(p, bytes, false, who); });
}
void note_write(void* p, size_t bytes, const char* who) {
    checker::note([&](auto& c) { c.note(p, bytes, true, who); });
}
void note_copy(void* to, const void* from, size_t bytes, const char* who) {
    checker::note([&](auto& c) { c.note_copy((char*)to, (const char*)from, bytes, who); });
}
void thread_reads(const void* p, int bytes, Site site) { checker::checker.thread_reads((const char*)p, bytes, site); }

}  // namespace simt

// ---- what g++ calls -------------------------------------------------------------------------------------------------
extern "C" {

#define FROM __builtin_return_address(0)
#define ACCESS(name, bytes)                                                           \
    void __tsan_read##name(void* p) { simt::checker::access(p, bytes, false, FROM); } \
    void __tsan_write##name(void* p) { simt::checker::access(p, bytes, true, FROM); }
ACCESS(1, 1)
ACCESS(2, 2)
ACCESS(4, 4)
ACCESS(8, 8)
ACCESS(16, 16)
// By type aligned to less than its size.
#define UNALIGNED(bytes)                                                                         \
    void __tsan_unaligned_read##bytes(void* p) { simt::checker::access(p, bytes, false, FROM); } \
    void __tsan_unaligned_write##bytes(void* p) { simt::checker::access(p, bytes, true, FROM); }
UNALIGNED(2)
UNALIGNED(4)
UNALIGNED(8)
UNALIGNED(16)
void __tsan_read_range(void* p, size_t bytes) { simt::checker::access(p, bytes, false, FROM); }
void __tsan_write_range(void* p, size_t bytes) { simt::checker::access(p, bytes, true, FROM); }
void __tsan_init() {}
void __tsan_vptr_update(void*, void*) {}

#define ATOMIC_ACCESS(bits, write) simt::checker::access((const void*)p, bits / 8, write, FROM, true)
#define ATOMIC_UPDATE(bits, name, builtin)                                                               \
    uint##bits##_t __tsan_atomic##bits##_##name(volatile uint##bits##_t* p, uint##bits##_t value, int) { \
        ATOMIC_ACCESS(bits, true);                                                                       \
        return __atomic_##builtin(p, value, __ATOMIC_SEQ_CST);                                           \
    }
#define ATOMIC_EXCHANGE(bits, name, weak)                                                                                     \
    bool __tsan_atomic##bits##_##name(volatile uint##bits##_t* p, uint##bits##_t* expected, uint##bits##_t value, int, int) { \
        ATOMIC_ACCESS(bits, true);                                                                                            \
        return __atomic_compare_exchange_n(p, expected, value, weak, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                     \
    }
#define ATOMIC_OPERATIONS(bits)                                                               \
    uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* p, int) {        \
        ATOMIC_ACCESS(bits, false);                                                           \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                          \
    }                                                                                         \
    void __tsan_atomic##bits##_store(volatile uint##bits##_t* p, uint##bits##_t value, int) { \
        ATOMIC_ACCESS(bits, true);                                                            \
        __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                         \
    }                                                                                         \
    ATOMIC_UPDATE(bits, exchange, exchange_n)                                                 \
    ATOMIC_UPDATE(bits, fetch_add, fetch_add)                                                 \
    ATOMIC_UPDATE(bits, fetch_sub, fetch_sub)                                                 \
    ATOMIC_UPDATE(bits, fetch_and, fetch_and)                                                 \
    ATOMIC_UPDATE(bits, fetch_or, fetch_or)                                                   \
    ATOMIC_EXCHANGE(bits, compare_exchange_strong, false)                                     \
    ATOMIC_EXCHANGE(bits, compare_exchange_weak, true)
ATOMIC_OPERATIONS(8)
ATOMIC_OPERATIONS(16)
ATOMIC_OPERATIONS(32)
ATOMIC_OPERATIONS(64)
void __tsan_atomic_thread_fence(int) { simt::checker::fence(); }

}  // extern "C"
