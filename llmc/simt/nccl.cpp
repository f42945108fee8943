// nccl.cpp: the calls of NCCL that the project uses, for the emulator. Ranks are threads of this process, each with a device of its own.
//
// A launch (one call, or all calls of a group) is a meeting of the ranks' streams: it runs when every rank's stream has come to it.
// What NCCL leaves to the caller is checked: that all ranks make the same calls in the same order, with the same counts, types and
// roots; that arrays lie in the rank's own device memory and overlap only as "in place" allows. A difference is an error which names
// both ranks, at once for the rank that calls, and an asynchronous one for the others; their streams fail where NCCL's would hang for
// ever. The same where a rank aborts, or its thread ends before it has destroyed its communicator. A rank that never calls shows after
// SIMT_TIMEOUT seconds.
//
// Not NCCL's: sums are in rank order, in fp32, rounded once. NCCL adds in the order of its ring or tree, and rounds to bf16 at every step.
#include "checker.h"
#include "grid.h"
#include "../comm.h"

#include <nccl.h>
#include <unistd.h>

#include <condition_variable>
#include <map>
#include <mutex>

namespace simt {
namespace {

struct Call {
    const char* name;
    const void* send;
    void* receive;
    size_t count;  // as NCCL counts: of one rank's part where there are parts
    ncclDataType_t type;
    int root;  // 0 where there is none
    cudaStream_t stream;

    bool operator==(const Call& other) const {
        return name == other.name && count == other.count && type == other.type && root == other.root;
    }
};
constexpr const char ALL_REDUCE[] = "ncclAllReduce", REDUCE_SCATTER[] = "ncclReduceScatter", ALL_GATHER[] = "ncclAllGather",
                     BROADCAST[] = "ncclBroadcast", REDUCE[] = "ncclReduce";

size_t type_bytes(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
            return 1;
        case ncclBfloat16:
            return 2;
        case ncclFloat32:
            return 4;
        default:
            return 0;  // not used by the project
    }
}
std::string describe(const Call& call) {
    const char* type = call.type == ncclFloat32 ? "fp32" : call.type == ncclBfloat16 ? "bf16" : "bytes";
    const bool rooted = call.name == BROADCAST || call.name == REDUCE;
    return format("%s of %zu %s", call.name, call.count, type) + (rooted ? format(" with root %d", call.root) : "");
}

// ---- what a launch does
using Launches = std::vector<std::vector<Call>>;  // by rank: the calls of its launch

void copy(void* to, const void* from, size_t bytes, const char* who) {
    note_copy(to, from, bytes, who);
    if (to != from) { memcpy(to, from, bytes); }
}
// Elements [begin, begin + count) of all ranks' send buffers, added into each of `to`.
void add(const std::vector<Call>& ranks, size_t begin, const std::vector<void*>& to) {
    const Call& call = ranks[0];
    const size_t size = type_bytes(call.type);
    std::vector<const void*> from;
    for (const Call& rank : ranks) { from.push_back((const char*)rank.send + begin * size); }
    for (const void* p : from) { note_read(p, call.count * size, call.name); }
    sum_in_rank_order(call.type == ncclBfloat16 ? DType::BF16 : DType::FP32, to, from, (i64)call.count);
    for (void* p : to) { note_write(p, call.count * size, call.name); }
}
void run_call(const std::vector<Call>& ranks) {
    const Call& call = ranks[0];
    const size_t bytes = call.count * type_bytes(call.type);
    std::vector<void*> receive;
    for (const Call& rank : ranks) { receive.push_back(rank.receive); }
    if (call.name == ALL_REDUCE) { add(ranks, 0, receive); }
    if (call.name == REDUCE) { add(ranks, 0, {receive[call.root]}); }
    for (size_t r = 0; r < ranks.size(); r++) {
        if (call.name == REDUCE_SCATTER) { add(ranks, r * call.count, {receive[r]}); }
        if (call.name == BROADCAST) { copy(receive[r], ranks[call.root].send, bytes, call.name); }
        if (call.name == ALL_GATHER) {
            for (void* to : receive) { copy((char*)to + r * bytes, ranks[r].send, bytes, call.name); }
        }
    }
}
std::string run_launches(const Launches& launches) {
    for (size_t i = 0; i < launches[0].size(); i++) {
        std::vector<Call> ranks;
        for (const auto& calls : launches) { ranks.push_back(calls[i]); }
        run_call(ranks);
    }
    return "";
}

// ---- communicators
thread_local std::string last_error;  // of this host thread's calls
ncclResult_t fail(ncclResult_t code, const std::string& text) {
    last_error = text;
    return code;
}

// What the ranks of one communicator share.
struct Clique : std::enable_shared_from_this<Clique> {
    struct Round {  // the n-th launch of every rank
        std::shared_ptr<Launches> launches;
        std::shared_ptr<Meeting> meeting;
        int arrived = 0;
    };
    explicit Clique(int size) : size(size), device(size, -1), launched(size, 0), gone(size) {}

    const int size;
    std::mutex mutex;
    std::condition_variable joined;
    std::vector<int> device;      // by rank; -1: has not joined
    std::vector<i64> launched;    // by rank
    std::vector<bool> gone;       // by rank: has destroyed its handle
    std::map<i64, Round> rounds;  // by number: those that not all ranks have come to
    ncclResult_t code = ncclSuccess;
    std::string error;  // what is wrong with the communicator, for all its ranks

    bool complete() const { return std::find(device.begin(), device.end(), -1) == device.end(); }
    ncclResult_t break_down(ncclResult_t why, const std::string& text) {
        if (code == ncclSuccess) { code = why, error = text; }
        for (auto& [number, round] : rounds) { cancel(*round.meeting, "NCCL: " + error); }
        rounds.clear();
        joined.notify_all();
        return fail(why, text);
    }
    ncclResult_t launch(int rank, const std::vector<Call>& calls, cudaStream_t stream);
    void destroy(int rank) {
        gone[rank] = true;
        if (!rounds.empty() && rounds.rbegin()->first >= launched[rank]) { break_down(ncclRemoteError, describe_gone(rank)); }
    }

private:
    std::string describe_gone(int rank) const {
        return format("rank %d of a group of %d ranks has destroyed its communicator after %lld launches", rank, size,
                      (long long)launched[rank]);
    }
    std::string difference(int rank, const std::vector<Call>& calls, const Launches& launches) const;
};

// Why this rank's launch is not that of the ranks which came before; empty if it is.
std::string Clique::difference(int rank, const std::vector<Call>& calls, const Launches& launches) const {
    for (int other = 0; other < size; other++) {
        const std::vector<Call>& theirs = launches[other];
        if (theirs.empty() || theirs == calls) { continue; }
        const size_t i = std::mismatch(calls.begin(), calls.end(), theirs.begin(), theirs.end()).first - calls.begin();
        const auto name = [&](const std::vector<Call>& list) {
            return i < list.size() ? describe(list[i]) : "no further call in its group";
        };
        return format("launch %lld of a group of %d ranks: rank %d calls %s, rank %d %s", (long long)launched[rank], size, rank,
                      name(calls).c_str(), other, name(theirs).c_str());
    }
    return "";
}

// On a stream that is being captured: it is the launch of the graph that counts.
ncclResult_t Clique::launch(int rank, const std::vector<Call>& calls, cudaStream_t stream) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(stream, &capturing);
    if (capturing != cudaStreamCaptureStatusNone) {
        const auto again = [self = shared_from_this(), rank, calls](cudaStream_t later) {
            return self->launch(rank, calls, later) == ncclSuccess ? cudaSuccess : simt::fail(cudaErrorLaunchFailure, "NCCL: " + last_error);
        };
        return record(stream, again) == cudaSuccess ? ncclSuccess : fail(ncclUnhandledCudaError, cudaGetErrorString(cudaPeekAtLastError()));
    }
    std::lock_guard lock(mutex);
    if (code != ncclSuccess) { return fail(code, error); }
    for (int other = 0; other < size; other++) {
        if (gone[other] && launched[other] <= launched[rank]) { return break_down(ncclRemoteError, describe_gone(other)); }
    }
    Round& round = rounds[launched[rank]];
    if (!round.meeting) {
        const auto launches = std::make_shared<Launches>(size);
        const std::string name =
            format("%s, launch %lld of a group of %d ranks", describe(calls[0]).c_str(), (long long)launched[rank], size);
        round = {launches, new_meeting(name, size, [launches] { return run_launches(*launches); })};
    }
    if (const std::string wrong = difference(rank, calls, *round.launches); !wrong.empty()) { return break_down(ncclInvalidUsage, wrong); }
    (*round.launches)[rank] = calls;
    const cudaError_t error = queue_meeting(round.meeting, rank, stream);
    if (++round.arrived == size) { rounds.erase(launched[rank]); }
    launched[rank]++;
    return error == cudaSuccess ? ncclSuccess : fail(ncclUnhandledCudaError, cudaGetErrorString(error));
}

}  // namespace
}  // namespace simt

// One rank's handle.
struct ncclComm {
    std::shared_ptr<simt::Clique> clique;
    int rank, device;
};

namespace simt {
namespace {

std::mutex registry;
std::map<i64, std::shared_ptr<Clique>> cliques;  // by number, those that are being joined
std::map<ncclComm_t, std::shared_ptr<ncclComm>> comms;

// Says goodbye to the others: what they have in flight, or start later, with this rank fails.
void leave(ncclComm& comm, const char* how) {
    std::lock_guard lock(comm.clique->mutex);
    comm.clique->break_down(ncclRemoteError, format("rank %d of a group of %d ranks %s", comm.rank, comm.clique->size, how));
}

// The communicators that this thread made. Where it ends and has not destroyed them, its rank has died.
struct MadeHere {
    std::vector<ncclComm_t> made;
    ~MadeHere() {
        for (ncclComm_t handle : made) {
            std::shared_ptr<ncclComm> comm;
            {
                std::lock_guard lock(registry);
                const auto found = comms.find(handle);
                if (found == comms.end()) { continue; }
                comm = found->second;
                comms.erase(found);
            }
            leave(*comm, "has died: its thread has ended");
        }
    }
};
thread_local MadeHere made_here;

std::shared_ptr<ncclComm> find(ncclComm_t handle) {
    std::lock_guard lock(registry);
    const auto found = comms.find(handle);
    check(found != comms.end(), "simt: %p is no communicator", (void*)handle);
    return found->second;
}
std::shared_ptr<ncclComm> take(ncclComm_t handle) {
    auto comm = find(handle);
    std::lock_guard lock(registry);
    comms.erase(handle);
    return comm;
}

// ---- what one rank's call must be
// Whether [a, a + a_bytes) and [b, b + b_bytes) share a byte.
bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
    return (const char*)a < (const char*)b + b_bytes && (const char*)b < (const char*)a + a_bytes;
}
std::string what_is_wrong(const ncclComm& comm, const Call& call, ncclRedOp_t op) {
    const size_t size = type_bytes(call.type), bytes = call.count * size;
    if (size == 0) { return format("type %d is not one that the emulator knows", (int)call.type); }
    const bool adds = call.name == ALL_REDUCE || call.name == REDUCE_SCATTER || call.name == REDUCE;
    if (adds && (size == 1 || op != ncclSum)) { return "the emulator has sums of fp32 and bf16 only"; }
    if (call.root < 0 || call.root >= comm.clique->size) { return format("root %d of %d ranks", call.root, comm.clique->size); }
    const size_t all = bytes * comm.clique->size;
    const size_t send_bytes = call.name == REDUCE_SCATTER ? all : bytes, receive_bytes = call.name == ALL_GATHER ? all : bytes;
    const bool sends = call.name != BROADCAST || comm.rank == call.root, receives = call.name != REDUCE || comm.rank == call.root;
    if (stream_device(call.stream) != comm.device) {
        return format("on a stream of device %d, not of device %d", stream_device(call.stream), comm.device);
    }
    if (sends) {
        if (const std::string wrong = wrong_memory(call.send, send_bytes, call.stream); !wrong.empty()) { return "sends from " + wrong; }
    }
    if (receives) {
        if (const std::string wrong = wrong_memory(call.receive, receive_bytes, call.stream); !wrong.empty()) {
            return "receives in " + wrong;
        }
    }
    const char* in_place = (const char*)call.receive + (call.name == ALL_GATHER ? comm.rank * bytes : 0);
    const char* sent = (const char*)call.send + (call.name == REDUCE_SCATTER ? comm.rank * bytes : 0);
    if (sends && receives && sent != in_place && overlap(call.send, send_bytes, call.receive, receive_bytes)) {
        return "the arrays overlap, and not as in-place calls may";
    }
    return "";
}

// ---- groups of calls
struct Group {
    int depth = 0;
    std::vector<std::pair<std::shared_ptr<ncclComm>, std::vector<Call>>> launches;  // in order of the communicators' first calls
    ncclResult_t error = ncclSuccess;

    ncclResult_t add(const std::shared_ptr<ncclComm>& comm, const Call& call) {
        const auto mine = std::find_if(launches.begin(), launches.end(), [&](const auto& launch) { return launch.first == comm; });
        if (mine == launches.end()) {
            launches.push_back({comm, {call}});
        } else if (mine->second[0].stream != call.stream) {
            return error =
                       fail(ncclInvalidUsage, "the calls of a group are on several streams: the emulator has groups on one stream only");
        } else {
            mine->second.push_back(call);
        }
        return ncclSuccess;
    }
    ncclResult_t end() {
        ncclResult_t result = std::exchange(error, ncclSuccess);
        for (const auto& [comm, calls] : std::exchange(launches, {})) {
            if (result == ncclSuccess) { result = comm->clique->launch(comm->rank, calls, calls[0].stream); }
        }
        return result;
    }
};
thread_local Group group;

ncclResult_t call(ncclComm_t handle, const Call& call, ncclRedOp_t op) {
    const auto comm = find(handle);
    if (const std::string wrong = what_is_wrong(*comm, call, op); !wrong.empty()) {
        if (group.depth > 0) { group.error = ncclInvalidArgument; }
        return fail(ncclInvalidArgument,
                    format("rank %d of a group of %d ranks: %s: ", comm->rank, comm->clique->size, describe(call).c_str()) + wrong);
    }
    if (call.count == 0) { return ncclSuccess; }  // as NCCL does: no launch
    group.depth++;
    const ncclResult_t added = group.add(comm, call);
    const ncclResult_t ended = ncclGroupEnd();
    return added == ncclSuccess ? ended : added;
}

// ---- joining
struct Id {  // what lies in an ncclUniqueId
    char magic[8];
    pid_t process;
    i64 number;
};

ncclResult_t join(Clique& clique, int rank, int device) {
    std::unique_lock lock(clique.mutex);
    if (clique.device[rank] != -1) { return clique.break_down(ncclInvalidUsage, format("two ranks %d of %d join", rank, clique.size)); }
    const auto twin = std::find(clique.device.begin(), clique.device.end(), device);
    if (twin != clique.device.end()) {
        return clique.break_down(ncclInvalidUsage,
                                 format("ranks %d and %d of a group of %d ranks are both on device %d: NCCL wants one each", rank,
                                        (int)(twin - clique.device.begin()), clique.size, device));
    }
    clique.device[rank] = device;
    clique.joined.notify_all();
    const auto met = [&] { return clique.complete() || clique.code != ncclSuccess; };
    if (!clique.joined.wait_for(lock, std::chrono::duration<double>(timeout_seconds()), met)) {
        const auto missing = std::find(clique.device.begin(), clique.device.end(), -1) - clique.device.begin();
        return clique.break_down(ncclSystemError, format("rank %d of a group of %d ranks has not joined", (int)missing, clique.size));
    }
    return clique.code == ncclSuccess ? ncclSuccess : fail(clique.code, clique.error);
}

}  // namespace
}  // namespace simt

using namespace simt;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t code) {
    static const char* const names[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return code < std::size(names) ? names[code] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t handle) {
    if (handle) {
        const auto comm = find(handle);
        std::lock_guard lock(comm->clique->mutex);
        if (comm->clique->code != ncclSuccess) { last_error = comm->clique->error; }
    }
    return last_error.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<i64> made = 0;
    const Id mine = {"simt", getpid(), ++made};
    *id = {};
    memcpy(id, &mine, sizeof(mine));
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
    Id given;
    memcpy(&given, &id, sizeof(given));
    if (strcmp(given.magic, "simt") != 0) { return fail(ncclInvalidArgument, "no id of ncclGetUniqueId's"); }
    if (given.process != getpid()) { return fail(ncclInvalidUsage, "the emulator's NCCL is for ranks of one process"); }
    if (size < 1 || rank < 0 || rank >= size) { return fail(ncclInvalidArgument, format("rank %d of %d", rank, size)); }
    if (group.depth > 0) { return fail(ncclInvalidUsage, "the emulator has no ncclCommInitRank in a group"); }
    auto comm = std::make_shared<ncclComm>();
    comm->rank = rank;
    cudaGetDevice(&comm->device);
    {
        std::lock_guard lock(registry);
        std::shared_ptr<Clique>& clique = cliques[given.number];
        if (!clique) { clique = std::make_shared<Clique>(size); }
        comm->clique = clique;
    }
    if (comm->clique->size != size) {
        return fail(ncclInvalidArgument, format("rank %d joins a group of %d ranks, others one of %d", rank, size, comm->clique->size));
    }
    if (const ncclResult_t error = join(*comm->clique, rank, comm->device)) { return error; }
    std::lock_guard lock(registry);
    cliques.erase(given.number);
    comms.emplace(comm.get(), comm);
    made_here.made.push_back(comm.get());
    *handle = comm.get();
    return ncclSuccess;
}
// Others may still be busy with what this rank has had its part in; what they call beyond that fails.
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    const auto comm = take(handle);
    std::lock_guard lock(comm->clique->mutex);
    comm->clique->destroy(comm->rank);
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {
    leave(*take(handle), "has aborted");
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
    const auto comm = find(handle);
    std::lock_guard lock(comm->clique->mutex);
    *error = comm->clique->code;
    return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
    group.depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) { return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart"); }
    return --group.depth == 0 ? group.end() : ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
    return call(comm, {ALL_REDUCE, send, receive, count, type, 0, stream}, op);
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
    return call(comm, {REDUCE_SCATTER, send, receive, count, type, 0, stream}, op);
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return call(comm, {ALL_GATHER, send, receive, count, type, 0, stream}, ncclSum);
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return call(comm, {BROADCAST, send, receive, count, type, root, stream}, ncclSum);
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream) {
    return call(comm, {REDUCE, send, receive, count, type, root, stream}, op);
}

}  // extern "C"
