// fiber.h: a stack that can be left and taken up again. The threads of an emulated block are fibers of one OS thread.
//
// On x86-64 a switch is a dozen instructions of our own, ten times faster than ucontext's, which makes a system call for the signal mask.
// Elsewhere, and with -DSIMT_UCONTEXT, it is ucontext. The address sanitizer is told of every switch.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <span>

#include "../base.h"

#if !defined(__x86_64__)
#define SIMT_UCONTEXT
#endif
#if defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {

class Fiber {
public:
    // The stack that the OS gave this thread.
    Fiber() {
        pthread_attr_t attributes;
        check(pthread_getattr_np(pthread_self(), &attributes) == 0 && pthread_attr_getstack(&attributes, (void**)&low_, &size_) == 0,
              "simt: a thread cannot find its stack");
        pthread_attr_destroy(&attributes);
    }
    // A stack of its own, on which entry() will run. It must never return.
    explicit Fiber(void (*entry)()) : entry_(entry), size_(STACK) {
        void* memory = mmap(nullptr, GUARD + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        check(memory != MAP_FAILED && mprotect(memory, GUARD, PROT_NONE) == 0, "simt: no memory for a stack: %s", strerror(errno));
        low_ = (char*)memory + GUARD;
        restart();
    }
    Fiber(const Fiber&) = delete;
    ~Fiber() {
        if (entry_) { munmap(low_ - GUARD, GUARD + STACK); }
    }

    // Forgets where the fiber was: its next run begins with entry().
    void restart() {
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(low_, size_);
        fake_stack_ = nullptr;
#endif
#if defined(SIMT_UCONTEXT)
        getcontext(&context_);
        context_.uc_stack.ss_sp = low_;
        context_.uc_stack.ss_size = size_;
        makecontext(&context_, entry_, 0);
#else
        void** top = (void**)(low_ + size_) - 8;  // 16-byte aligned, as before a call
        *--top = nullptr;                         // entry's return address: none
        *--top = (void*)entry_;
        top_ = top - 6;  // the six registers of simt_switch, whatever they hold
#endif
    }

    std::span<const char> stack() const { return {low_, size_}; }

    // Leaves `from`, which is running on this OS thread, for `to`. Returns when somebody switches back.
    static void change(Fiber& from, Fiber& to);
    // To be called first in entry().
    void arrived() {
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
    }

private:
    static constexpr size_t STACK = 64 << 10, GUARD = 4096;
    void (*entry_)() = nullptr;
    char* low_ = nullptr;
    size_t size_ = 0;
#if defined(SIMT_UCONTEXT)
    ucontext_t context_;
#else
    void* top_ = nullptr;
#endif
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack_ = nullptr;
#endif
};

#if !defined(SIMT_UCONTEXT)
// Saves the registers that a call must keep, and the stack; takes up the other's.
extern "C" void simt_switch(void** from, void* to);
#endif

inline void Fiber::change(Fiber& from, Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.fake_stack_, to.low_, to.size_);
#endif
#if defined(SIMT_UCONTEXT)
    swapcontext(&from.context_, &to.context_);
#else
    simt_switch(&from.top_, to.top_);
#endif
    from.arrived();
}

}  // namespace simt
