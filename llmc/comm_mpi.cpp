// comm_mpi.cpp: the exchange of comm.h as non-blocking point-to-point messages, moved along by poll() and wait().
//
// MPI's own non-blocking all-reduce adds in an order of its own, and makes little progress while the caller computes; this
// one is a few messages for each peer, and every step of it is a look at some requests.
#include "comm_mpi.h"

#ifndef LLMC_MPI
#define LLMC_MPI 1
#endif

#if LLMC_MPI

#define OMPI_SKIP_MPICXX 1  // no C++ bindings
#include <mpi.h>
#include <sched.h>
#include <sys/statvfs.h>
#include <time.h>

#include <cstdlib>
#include <thread>

namespace {

// How often a waiting rank looks before it sleeps: set by init(). Looking longer pays only where nobody else wants the core.
int looks_before_sleep = 0;

// A waiting rank looks, lets others run, then sleeps for longer and longer: ranks may share cores, and MPI's own waits spin.
class Patience {
public:
    void pause() {
        if (looks_++ < looks_before_sleep) {
            sched_yield();
            return;
        }
        const timespec nap = {0, nap_ns_};
        nanosleep(&nap, nullptr);
        nap_ns_ = std::min(2 * nap_ns_, MAX_NAP_NS);
    }

private:
    static constexpr long MAX_NAP_NS = 100'000;
    int looks_ = 0;
    long nap_ns_ = 2'000;
};

// A set of messages under way. Completed when all are.
class Messages {
public:
    void send(MPI_Comm comm, const void* data, i64 bytes, int peer, int tag) {
        MPI_Isend(data, narrow<int>(bytes), MPI_BYTE, peer, tag, comm, &requests_.emplace_back());
    }
    void receive(MPI_Comm comm, void* data, i64 bytes, int peer, int tag) {
        MPI_Irecv(data, narrow<int>(bytes), MPI_BYTE, peer, tag, comm, &requests_.emplace_back());
    }
    bool done() {
        if (requests_.empty()) { return true; }
        int all = 0;
        MPI_Testall((int)requests_.size(), requests_.data(), &all, MPI_STATUSES_IGNORE);
        if (all) { requests_.clear(); }
        return all;
    }

private:
    std::vector<MPI_Request> requests_;
};

// One exchange under way. Each part is cut into pieces, and the n-th pieces of all parts go together, one n after the other:
// so staging is bounded, however large the array, and no message comes near the 2 GiB that MPI can count. A piece goes through
//   1. this rank's values of the others' pieces go to their owners; theirs of its own piece come into staging
//   2. when they are here: the sum, in rank order, in place; it goes to all
//   3. the others' sums come in place, each as soon as the values that were there have left
// An exchange that only reduces ends before 3, one that only gathers starts there.
class Progress {
public:
    void start(MPI_Comm comm, int slot, int rank, i64 piece_bytes, Exchange exchange, CommStats* stats) {
        comm_ = comm;
        slot_ = slot;
        rank_ = rank;
        exchange_ = std::move(exchange);
        stats_ = stats;
        piece_elements_ = std::max<i64>(1, piece_bytes / exchange_.element_bytes);
        pieces_ = piece_ = 0;
        for (const Range& part : exchange_.parts) { pieces_ = std::max(pieces_, ceil_div(part.size(), piece_elements_)); }
        values_out_.resize(exchange_.parts.size());
        start_piece();
        advance();
    }

    bool under_way() const { return piece_ < pieces_; }

    // Does what can be done now.
    void advance() {
        while (under_way() && advance_piece()) {
            piece_++;
            if (under_way()) { start_piece(); }
        }
    }

private:
    int size() const { return (int)exchange_.parts.size(); }
    Range piece(int owner) const {
        const Range part = exchange_.parts[owner];
        const i64 begin = std::min(part.end, part.begin + piece_ * piece_elements_);
        return {begin, std::min(part.end, begin + piece_elements_)};
    }
    i64 piece_bytes(int owner) const { return piece(owner).size() * exchange_.element_bytes; }
    char* piece_data(int owner) const { return exchange_.at(piece(owner).begin); }
    char* staging(int peer) { return staging_.data() + peer * piece_bytes(rank_); }

    void start_piece() {
        summed_ = !exchange_.reduce;
        receives_sum_.assign(size(), false);
        if (exchange_.reduce) {
            if ((i64)staging_.size() < size() * piece_bytes(rank_)) { staging_.resize(size() * piece_bytes(rank_)); }
            for (int peer = 0; peer < size(); peer++) {
                if (peer != rank_ && piece(rank_).size() > 0) {
                    values_in_.receive(comm_, staging(peer), piece_bytes(rank_), peer, tag(1));
                }
            }
            for (int i = 1; i < size(); i++) {
                const int peer = (rank_ + i) % size();  // not all ranks to rank 0 first
                send(values_out_[peer], peer, peer, tag(1));
            }
        } else {
            send_sum();
        }
    }
    // True when the piece is complete.
    bool advance_piece() {
        if (!summed_ && values_in_.done()) {
            sum();
            if (exchange_.gather) { send_sum(); }
            summed_ = true;
        }
        bool complete = summed_;
        for (int peer = 0; peer < size(); peer++) {
            if (peer == rank_ || receives_sum_[peer]) { continue; }
            if (values_out_[peer].done()) {
                if (exchange_.gather) { receive_sum(peer); }
                receives_sum_[peer] = true;
            } else {
                complete = false;
            }
        }
        return complete && sums_.done();
    }
    void sum() {
        std::vector<const void*> in;
        for (int r = 0; r < size(); r++) { in.push_back(r == rank_ ? piece_data(rank_) : staging(r)); }
        sum_in_rank_order(exchange_.dtype, {piece_data(rank_)}, in, piece(rank_).size());
    }
    void send_sum() {
        for (int i = 1; i < size(); i++) { send(sums_, rank_, (rank_ + i) % size(), tag(2)); }
    }
    void receive_sum(int owner) {
        if (piece(owner).size() > 0) { sums_.receive(comm_, piece_data(owner), piece_bytes(owner), owner, tag(2)); }
    }
    void send(Messages& messages, int owner, int to, int tag) {
        if (piece(owner).size() == 0) { return; }
        messages.send(comm_, piece_data(owner), piece_bytes(owner), to, tag);
        stats_->bytes[(int)exchange_.traffic] += piece_bytes(owner);
    }
    // Messages of one slot and phase between two ranks arrive in the order in which they were sent, so these need no number.
    int tag(int phase) const { return slot_ * 2 + phase; }

    MPI_Comm comm_ = MPI_COMM_NULL;
    int slot_ = 0, rank_ = 0;
    Exchange exchange_ = {};
    CommStats* stats_ = nullptr;
    i64 piece_elements_ = 0, pieces_ = 0, piece_ = 0;

    Messages values_in_;                // 1, from all peers
    std::vector<Messages> values_out_;  // 1, by peer
    bool summed_ = true;
    std::vector<bool> receives_sum_;  // by peer
    Messages sums_;                   // 2 and 3
    std::vector<char> staging_;       // kept for the next exchange
};

class MpiComm final : public Comm {
public:
    MpiComm(MPI_Comm comm, int rank, int size, i64 piece_bytes) : Comm(rank, size), comm_(comm), piece_bytes_(piece_bytes) {
        all().push_back(this);
    }
    ~MpiComm() override { std::erase(all(), this); }  // the communicator itself lives until MPI_Finalize

    void poll() override {
        for (int slot = 0; slot < SLOTS; slot++) {
            if (!slots_[slot].under_way()) { continue; }
            slots_[slot].advance();
            if (!slots_[slot].under_way()) { completed(slot); }
        }
    }
    static bool all_idle() {
        for (MpiComm* comm : all()) {
            for (const Progress& progress : comm->slots_) {
                if (progress.under_way()) { return false; }
            }
        }
        return true;
    }

private:
    void start(int slot, Exchange exchange) override { slots_[slot].start(comm_, slot, rank, piece_bytes_, std::move(exchange), &stats); }

    // Everything moves along, in all groups of this rank, not what it waits for alone: a peer may be waiting for another.
    void finish(int slot) override {
        const ExposedTimer timer(stats);
        for (Patience patience;; patience.pause()) {
            for (MpiComm* comm : all()) { comm->poll(); }
            if (!slots_[slot].under_way()) { return; }
        }
    }

    static std::vector<MpiComm*>& all() {
        static std::vector<MpiComm*> comms;
        return comms;
    }

    MPI_Comm comm_;
    i64 piece_bytes_;
    Progress slots_[SLOTS];
};

MPI_Comm world_of_outcomes = MPI_COMM_NULL;

// What Open MPI should do unless its own environment says otherwise; MPI_Init reads it there. Other MPIs ignore it.
void advise_open_mpi(int ranks_on_host) {
    const auto advise = [](const char* parameter, const std::string& value) { setenv(parameter, value.c_str(), /*overwrite=*/0); };
    // Over TCP a message leaves whole: by default the sender waits for the receiver's answer before nearly all of it, and both
    // are computing. Overlap wants this: of an 8 MB all-reduce over 663 Mbit/s, half hides behind computing instead of a third (2 ranks
    // that share 2 busy cores, Xeon 2.8 GHz, 2026-11). It costs a copy.
    advise("OMPI_MCA_btl_tcp_flags", "send");
    for (const char* limit : {"eager_limit", "rndv_eager_limit", "max_send_size"}) {
        advise((std::string("OMPI_MCA_btl_tcp_") + limit).c_str(), std::to_string(2 * mpi::PIECE_BYTES));
    }
    // Each rank maps a segment of 4 MiB. Where a container's /dev/shm has no room for them, Open MPI ends in a bus error or uses TCP.
    struct statvfs shm;
    const bool room = statvfs("/dev/shm", &shm) == 0 && (i64)shm.f_bavail * (i64)shm.f_frsize >= ranks_on_host * (i64)(5 << 20);
    if (!room || access("/dev/shm", W_OK) != 0) { advise("OMPI_MCA_btl_vader_backing_directory", "/tmp"); }
}

}  // namespace

namespace mpi {

const bool BUILT = true;

World init(int expected_ranks_on_host) {
    advise_open_mpi(expected_ranks_on_host);
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
    check(provided >= MPI_THREAD_FUNNELED, "this MPI library does not allow programs with threads (MPI_THREAD_FUNNELED)");
    World world;
    MPI_Comm_rank(MPI_COMM_WORLD, &world.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world.size);
    MPI_Comm host;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, world.rank, MPI_INFO_NULL, &host);
    MPI_Comm_size(host, &world.ranks_on_host);
    MPI_Comm_rank(host, &world.rank_on_host);
    MPI_Comm_free(&host);
    MPI_Comm_dup(MPI_COMM_WORLD, &world_of_outcomes);
    looks_before_sleep = world.ranks_on_host <= (int)std::thread::hardware_concurrency() ? 200 : 20;
    return world;
}

bool idle() { return MpiComm::all_idle(); }

std::unique_ptr<Comm> group(int color, int key, i64 piece_bytes) {
    MPI_Comm comm;
    int rank, size;
    MPI_Comm_split(MPI_COMM_WORLD, color, key, &comm);
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    return std::make_unique<MpiComm>(comm, rank, size, piece_bytes);
}

bool exchange_outcomes(const Outcome& mine, std::vector<Outcome>& all, double seconds) {
    int size = 0;
    MPI_Comm_size(world_of_outcomes, &size);
    all.resize(size);
    MPI_Request request;
    MPI_Iallgather(&mine, sizeof(Outcome), MPI_BYTE, all.data(), sizeof(Outcome), MPI_BYTE, world_of_outcomes, &request);
    const auto begin = std::chrono::steady_clock::now();
    for (Patience patience;; patience.pause()) {
        int done = 0;
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done) { return true; }
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() > seconds) { return false; }
    }
}

void finalize() { MPI_Finalize(); }

void abort(int exit_code) {
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    _exit(exit_code);
}

}  // namespace mpi

#else

namespace mpi {

const bool BUILT = false;

[[noreturn]] static void refuse() {
    die("this build has no MPI\nHINT: build with MPI=1, or run without mpirun: the ranks are then threads");
}

World init(int) { refuse(); }
bool idle() { return true; }
std::unique_ptr<Comm> group(int, int, i64) { refuse(); }
bool exchange_outcomes(const Outcome&, std::vector<Outcome>&, double) { refuse(); }
void finalize() { refuse(); }
void abort(int exit_code) { _exit(exit_code); }

}  // namespace mpi

#endif
