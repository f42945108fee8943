// guarded.h: memory between two red zones, which nobody may touch. The address sanitizer sees every touch; without it, what was written
// is seen by damage(); the checker sees every access too. Memory begins with all bits set: NaN in every type of float, -1 as an integer.
#pragma once

#include <cstdlib>
#include <cstring>
#include <utility>

#include "../base.h"
#include "checker.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace simt {

constexpr unsigned char POISON = 0xFF;

class Guarded {
public:
    explicit Guarded(size_t bytes) { allocate(bytes); }
    Guarded(Guarded&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)), bytes_(other.bytes_) {}
    ~Guarded() { release(); }

    char* data() const { return memory_ + ZONE; }
    size_t size() const { return bytes_; }

    // Anew.
    void resize(size_t bytes) {
        if (bytes == bytes_) {
            memset(data(), POISON, bytes_);
        } else {
            release();
            allocate(bytes);
        }
    }
    // Which byte outside was written, in words; empty if none was.
    std::string damage() const {
#if !defined(__SANITIZE_ADDRESS__)
        for (size_t i = 0; i < ZONE; i++) {
            const size_t after = bytes_ + i, before = ZONE - i;
            if ((unsigned char)data()[after] != POISON) { return format("byte %zu was written, of %zu", after, bytes_); }
            if ((unsigned char)*(data() - before) != POISON) { return format("byte -%zu was written", before); }
        }
#endif
        return "";
    }

private:
    static constexpr size_t ZONE = 1024;  // and the alignment
    void allocate(size_t bytes) {
        bytes_ = bytes;
        const size_t all = round_up(bytes, ZONE) + 2 * ZONE;
#if defined(SIMT_CHECK)
        memory_ = checker::map_memory(all);
        checker::allow(data(), bytes);
#else
        memory_ = (char*)aligned_alloc(ZONE, all);
        check(memory_, "simt: no memory for %zu bytes", all);
#endif
        memset(memory_, POISON, all);
#if defined(__SANITIZE_ADDRESS__)
        __asan_poison_memory_region(memory_, ZONE);
        __asan_poison_memory_region(data() + bytes, ZONE);
#endif
    }
    void release() {
#if defined(__SANITIZE_ADDRESS__)
        if (memory_) { __asan_unpoison_memory_region(memory_, round_up(bytes_, ZONE) + 2 * ZONE); }
#endif
#if defined(SIMT_CHECK)
        if (memory_) { checker::unmap_memory(memory_, round_up(bytes_, ZONE) + 2 * ZONE); }
#else
        free(memory_);
#endif
    }
    char* memory_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace simt
