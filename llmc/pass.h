// pass.h: a pass of the model over one micro-batch, as a coroutine. It stops wherever it needs a collective to be complete:
//
//      Pass forward(...) { ...; co_yield start_all_reduce(...); what needs the sum; ... }
//
// Who drives it waits for the ticket and resumes it. Two passes are interleaved by driving them in turn: while the sum that one of them
// needs is on its way, the other one computes (batch halves, as in Domino, arXiv 2409.15241).
#pragma once

#include <coroutine>
#include <exception>

#include "comm.h"

class [[nodiscard]] Pass {
public:
    struct promise_type {
        Comm::Ticket ticket = 0;
        i64 stops = 0;
        std::exception_ptr failure;

        Pass get_return_object() { return Pass(std::coroutine_handle<promise_type>::from_promise(*this)); }
        std::suspend_always initial_suspend() noexcept { return {}; }
        std::suspend_always final_suspend() noexcept { return {}; }
        std::suspend_always yield_value(Comm::Ticket needed) noexcept {
            ticket = needed;
            stops++;
            return {};
        }
        void return_void() {}
        void unhandled_exception() { failure = std::current_exception(); }
    };

    Pass(Pass&& other) noexcept : coroutine_(std::exchange(other.coroutine_, nullptr)) {}
    Pass& operator=(Pass&& other) noexcept {
        std::swap(coroutine_, other.coroutine_);
        return *this;
    }
    ~Pass() {
        if (coroutine_) { coroutine_.destroy(); }
    }

    // Goes on to the next collective that it needs; false where it has come to its end.
    bool advance() {
        coroutine_.resume();
        if (std::exception_ptr failure = std::exchange(coroutine_.promise().failure, nullptr)) { std::rethrow_exception(failure); }
        return !coroutine_.done();
    }
    // What must be complete before it is advanced.
    Comm::Ticket ticket() const { return coroutine_.promise().ticket; }
    // How often it has stopped.
    i64 stops() const { return coroutine_.promise().stops; }

    // A pass within a pass:  for (Comm::Ticket ticket : forward(...)) { co_yield ticket; }
    struct Iterator {
        Pass* pass;  // null at the end
        Comm::Ticket operator*() const { return pass->ticket(); }
        void operator++() { pass = pass->advance() ? pass : nullptr; }
        bool operator==(std::default_sentinel_t) const { return !pass; }
    };
    Iterator begin() { return {advance() ? this : nullptr}; }
    std::default_sentinel_t end() const { return {}; }

private:
    explicit Pass(std::coroutine_handle<promise_type> coroutine) : coroutine_(coroutine) {}

    std::coroutine_handle<promise_type> coroutine_;
};

// Passes that are driven in turn: in a turn each goes on to the next collective that it needs. What they do in the same place, the one that began first
// does first. All ranks take the same turns, so their collectives come in one order.
class Turns {
public:
    explicit Turns(Comm& comm) : comm_(comm) {}
    void begin(Pass pass) { under_way_.push_back(std::move(pass)); }
    size_t under_way() const { return under_way_.size(); }
    const Pass& youngest() const { return under_way_.back(); }
    // Returns how many came to their ends; those are the first ones.
    size_t turn() {
        const size_t before = under_way_.size();
        std::erase_if(under_way_, [&](Pass& pass) {
            comm_.wait(pass.ticket());
            return !pass.advance();
        });
        return before - under_way_.size();
    }

private:
    Comm& comm_;
    std::vector<Pass> under_way_;
};

inline void complete(std::vector<Pass> passes, Comm& comm) {
    Turns turns(comm);
    for (Pass& pass : passes) { turns.begin(std::move(pass)); }
    while (turns.under_way() > 0) { turns.turn(); }
}
inline void complete(Pass pass, Comm& comm) {
    for (Comm::Ticket ticket : pass) { comm.wait(ticket); }
}
