// test_comm.cpp: every collective, in every group size, against sums that are written out here again.
//
//   test_comm                    the tests, with ranks as threads
//   test_comm --results T [D]    prints one hash for each result, and fails where one is wrong; the output must be the same
//                                with and without mpirun -n T*D:   test_comm --results 4   against   mpirun -n 4 test_comm --results 4
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "llmc/comm_local.h"
#include "llmc/comm_mpi.h"
#include "llmc/launch.h"

// What one rank found.
struct Findings {
    std::vector<std::string> wrong;
    std::vector<std::pair<std::string, uint64_t>> results;  // name, hash of the bytes

    void record(const std::string& name, const void* data, size_t bytes, bool right) {
        uint64_t hash = 14695981039346656037u;  // FNV-1a
        for (size_t i = 0; i < bytes; i++) { hash = (hash ^ ((const unsigned char*)data)[i]) * 1099511628211u; }
        results.push_back({name, hash});
        if (!right) { wrong.push_back(name); }
    }
    void expect(const std::string& name, i64 got, i64 wanted) {
        if (got != wanted) { wrong.push_back(format("%s: got %lld, wanted %lld", name.c_str(), (long long)got, (long long)wanted)); }
    }
};

// ---------------------------------------------------------------------------------------------------------------
// The oracle: what every rank starts from, and what the sum is, one element at a time.

// Magnitudes from 2^-8 to 2^7, so that a sum in another order, or one that is rounded on the way, has other bits.
static float start_value(int rank, i64 i, int seed) {
    uint32_t x = (uint32_t)(i * 2654435761u) ^ (uint32_t)(rank * 0x9E3779B9u + seed * 0x85EBCA6Bu);
    x = (x ^ (x >> 15)) * 0x2C1B3C6Du;
    x = (x ^ (x >> 12)) * 0x297A2D39u;
    x ^= x >> 15;
    return ldexpf((x & 0xFFFF) / 65536.0f - 0.5f, (int)(x >> 28) - 8);
}

static float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
// The nearer of the two neighbours; the even one of two that are equally near.
static uint16_t nearest_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t below = bits & 0xFFFF0000, above = below + 0x10000;
    const double to_below = std::abs((double)value - as_float(below)), to_above = std::abs((double)as_float(above) - value);
    const bool take_above = to_above < to_below || (to_above == to_below && (below & 0x10000));
    return (uint16_t)((take_above ? above : below) >> 16);
}

// The type on the wire, as raw bits.
template <DType dtype>
struct Wire;
template <>
struct Wire<DType::FP32> {
    using Bits = uint32_t;
    static Bits round(float value) {
        Bits bits;
        memcpy(&bits, &value, 4);
        return bits;
    }
    static float widen(Bits bits) { return as_float(bits); }
};
template <>
struct Wire<DType::BF16> {
    using Bits = uint16_t;
    static Bits round(float value) { return nearest_bf16(value); }
    static float widen(Bits bits) { return as_float((uint32_t)bits << 16); }
};

template <DType dtype>
static std::vector<typename Wire<dtype>::Bits> start_values(int rank, i64 count, int seed) {
    std::vector<typename Wire<dtype>::Bits> data(count);
    for (i64 i = 0; i < count; i++) { data[i] = Wire<dtype>::round(start_value(rank, i, seed)); }
    return data;
}
template <DType dtype>
static typename Wire<dtype>::Bits wanted_sum(int ranks, i64 i, int seed) {
    float sum = Wire<dtype>::widen(Wire<dtype>::round(start_value(0, i, seed)));
    for (int r = 1; r < ranks; r++) { sum += Wire<dtype>::widen(Wire<dtype>::round(start_value(r, i, seed))); }
    return Wire<dtype>::round(sum);
}
template <DType dtype>
static bool is_sum(const std::vector<typename Wire<dtype>::Bits>& data, int ranks, int seed) {
    for (i64 i = 0; i < (i64)data.size(); i++) {
        if (data[i] != wanted_sum<dtype>(ranks, i, seed)) { return false; }
    }
    return true;
}

// ---------------------------------------------------------------------------------------------------------------
// The collectives, as one rank calls them.

static i64 all_reduce_bytes(const Comm& comm, i64 count, i64 element_bytes) {
    const i64 own = split_range(count, comm.size, comm.rank).size();
    return ((count - own) + own * (comm.size - 1)) * element_bytes;
}

template <DType dtype>
static void try_all_reduce(Comm& comm, Findings& findings) {
    const i64 T = comm.size, sent = comm.stats.bytes[(int)Traffic::TP_LAYERS];
    i64 wanted_bytes = 0;
    int seed = 0;
    for (i64 count : {(i64)0, (i64)1, (i64)2, (i64)3, T - 1, T, T + 1, (i64)1023, (i64)1024, (i64)1025, 4097 * T, (i64)100'003}) {
        auto data = start_values<dtype>(comm.rank, count, ++seed);
        comm.all_reduce(data.data(), count, dtype, Traffic::TP_LAYERS);
        findings.record(format("all_reduce %s %lld", dtype_name(dtype), (long long)count), data.data(), count * dtype_bytes(dtype),
                        is_sum<dtype>(data, comm.size, seed));
        wanted_bytes += all_reduce_bytes(comm, count, dtype_bytes(dtype));
    }
    findings.expect("bytes of all_reduce", comm.stats.bytes[(int)Traffic::TP_LAYERS] - sent, wanted_bytes);

    // What the log promises: 2(T-1)/T of the payload, exactly, where the payload divides.
    const i64 before = comm.stats.bytes[(int)Traffic::LOSS], count = 60 * T;
    auto data = start_values<dtype>(comm.rank, count, 99);
    comm.all_reduce(data.data(), count, dtype, Traffic::LOSS);
    findings.expect("2(T-1)/T", (comm.stats.bytes[(int)Traffic::LOSS] - before) * T, 2 * (T - 1) * count * dtype_bytes(dtype));
}

template <DType dtype>
struct InFlight {
    Comm& comm;
    int seed;
    std::vector<typename Wire<dtype>::Bits> data;
    Comm::Ticket ticket;

    InFlight(Comm& comm, i64 count, int seed) : comm(comm), seed(seed), data(start_values<dtype>(comm.rank, count, seed)) {
        ticket = comm.start_all_reduce(data.data(), count, dtype, Traffic::TP_LAYERS);
    }
    void finish(Findings& findings) {
        comm.wait(ticket);
        comm.wait(ticket);  // harmless
        findings.record(format("in flight %d", seed), data.data(), data.size() * dtype_bytes(dtype), is_sum<dtype>(data, comm.size, seed));
    }
};

// Each rank for a time of its own.
static void compute(Comm& comm) {
    volatile float x = 1;
    for (int block = 0; block < 3 + comm.rank; block++) {
        for (int i = 0; i < 5'000; i++) { x = x * 0.999f + 0.5f; }
        comm.poll();
    }
}

// Four at a time, with a blocking call in their midst.
static void try_in_flight(Comm& comm, Findings& findings) {
    for (int seed = 1000; seed < 1024; seed += 4) {
        InFlight<DType::FP32> first(comm, 30'011, seed);
        compute(comm);
        InFlight<DType::BF16> second(comm, 30'012, seed + 1);
        compute(comm);
        comm.barrier();
        InFlight<DType::FP32> third(comm, 5, seed + 2);
        InFlight<DType::BF16> fourth(comm, 60'001, seed + 3);
        compute(comm);
        first.finish(findings);
        second.finish(findings);
        third.finish(findings);
        fourth.finish(findings);
    }
}

// Ranges that leave gaps, are empty, and are odd; in rank order or not.
static std::vector<Range> odd_ranges(int ranks, i64 unit, bool backwards) {
    std::vector<Range> ranges;
    i64 begin = 3;
    for (int r = 0; r < ranks; r++) {
        const i64 size = r % 3 == 1 ? 0 : unit * (r + 1) + r;
        ranges.push_back({begin, begin + size});
        begin += size + r % 2;
    }
    if (backwards) { std::reverse(ranges.begin(), ranges.end()); }
    return ranges;
}

static void try_ranges(Comm& comm, Findings& findings) {
    for (i64 unit : {(i64)0, (i64)1, (i64)17, (i64)5'000}) {
        for (const bool backwards : {false, true}) {
            const std::vector<Range> ranges = odd_ranges(comm.size, unit, backwards);
            const Range own = ranges[comm.rank];
            i64 end = 0, others = 0;
            for (const Range& range : ranges) {
                end = std::max(end, range.end);
                others += range.size();
            }
            others -= own.size();
            const std::string size = format(" %lld%s", (long long)unit, backwards ? " backwards" : "");

            const int seed = 50 + (int)unit;
            const auto before = start_values<DType::FP32>(comm.rank, end + 5, seed);
            auto data = before;
            const i64 sent = comm.stats.bytes[(int)Traffic::DP];
            comm.reduce_scatter(data.data(), DType::FP32, ranges, Traffic::DP);
            findings.expect("bytes of reduce_scatter" + size, comm.stats.bytes[(int)Traffic::DP] - sent, others * 4);
            bool right = true;
            for (i64 i = 0; i < (i64)data.size(); i++) {
                const bool mine = i >= own.begin && i < own.end;
                right &= data[i] == (mine ? wanted_sum<DType::FP32>(comm.size, i, seed) : before[i]);
            }
            findings.record("reduce_scatter" + size, data.data(), data.size() * 4, right);

            // Elements of 2 bytes, and of 3.
            auto half = start_values<DType::BF16>(comm.rank, end + 5, seed);
            const auto half_before = half;
            const i64 sent_2 = comm.stats.bytes[(int)Traffic::EMBEDDING];
            comm.all_gather_ranges(half.data(), 2, ranges, Traffic::EMBEDDING);
            findings.expect("bytes of all_gather_ranges" + size, comm.stats.bytes[(int)Traffic::EMBEDDING] - sent_2,
                            own.size() * 2 * (comm.size - 1));
            auto wanted = half_before;
            for (int r = 0; r < comm.size; r++) {
                const auto theirs = start_values<DType::BF16>(r, end + 5, seed);
                std::copy(theirs.begin() + ranges[r].begin, theirs.begin() + ranges[r].end, wanted.begin() + ranges[r].begin);
            }
            findings.record("all_gather_ranges" + size, half.data(), half.size() * 2, half == wanted);

            std::vector<char> odd(3 * (end + 1), (char)comm.rank), odd_wanted = odd;
            comm.all_gather_ranges(odd.data(), 3, ranges, Traffic::OTHER);
            for (int r = 0; r < comm.size; r++) {
                std::fill(odd_wanted.begin() + 3 * ranges[r].begin, odd_wanted.begin() + 3 * ranges[r].end, (char)r);
            }
            findings.record("all_gather_ranges of 3 bytes" + size, odd.data(), odd.size(), odd == odd_wanted);
        }
    }
}

static void try_all_gather(Comm& comm, Findings& findings) {
    for (i64 bytes : {0, 1, 7, 4096, 100'003}) {
        const auto byte = [&](int rank, i64 i) { return (char)(rank * 31 + i * 7); };
        std::vector<char> mine(bytes), all(comm.size * bytes, 'x'), wanted(comm.size * bytes);
        for (i64 i = 0; i < bytes; i++) { mine[i] = byte(comm.rank, i); }
        for (i64 i = 0; i < comm.size * bytes; i++) { wanted[i] = byte((int)(i / bytes), i % bytes); }
        const i64 sent = comm.stats.bytes[(int)Traffic::LOSS];
        comm.all_gather(mine.data(), all.data(), bytes, Traffic::LOSS);
        findings.expect("bytes of all_gather", comm.stats.bytes[(int)Traffic::LOSS] - sent, bytes * (comm.size - 1));
        findings.record(format("all_gather %lld", (long long)bytes), all.data(), all.size(), all == wanted);

        std::fill(all.begin(), all.end(), 'y');
        std::copy(mine.begin(), mine.end(), all.begin() + comm.rank * bytes);
        comm.all_gather(all.data() + comm.rank * bytes, all.data(), bytes, Traffic::OTHER);  // in place
        findings.record(format("all_gather %lld in place", (long long)bytes), all.data(), all.size(), all == wanted);
    }
}

static void try_all(Comm& comm, Findings& findings) {
    try_all_reduce<DType::FP32>(comm, findings);
    try_all_reduce<DType::BF16>(comm, findings);
    try_in_flight(comm, findings);
    try_ranges(comm, findings);
    try_all_gather(comm, findings);
    if (comm.size == 1) {
        for (i64 bytes : comm.stats.bytes) { findings.expect("bytes sent alone", bytes, 0); }
    } else if (!(comm.stats.exposed_seconds > 0)) {
        findings.wrong.push_back("no waiting was counted");
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The tests.

class Collectives : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, testing::Values(1, 2, 3, 4, 8));

TEST_P(Collectives, GiveTheSumInRankOrderAndCountItsBytes) {
    std::vector<Findings> findings(GetParam());
    launch(GetParam(), 1, [&](Ranks& ranks) {
        try_all(*ranks.tp, findings[ranks.world->rank]);
        return 0;
    });
    for (const Findings& found : findings) { EXPECT_EQ(found.wrong, std::vector<std::string>()); }
}

TEST(Groups, AreRowsAndColumnsOfTheWorld) {
    launch(3, 2, [](Ranks& ranks) {
        const int world = ranks.world->rank;
        check(ranks.world->size == 6 && ranks.tp->size == 3 && ranks.dp->size == 2 && ranks.ranks_on_host == 6, "sizes");
        check(world == ranks.dp->rank * 3 + ranks.tp->rank, "world rank = dp * T + tp");
        std::vector<int> tp(3), dp(2);
        ranks.tp->all_gather(&world, tp.data(), sizeof(int), Traffic::OTHER);
        ranks.dp->all_gather(&world, dp.data(), sizeof(int), Traffic::OTHER);
        for (int t = 0; t < 3; t++) { check(tp[t] == ranks.dp->rank * 3 + t, "tp group"); }
        for (int d = 0; d < 2; d++) { check(dp[d] == d * 3 + ranks.tp->rank, "dp group"); }
        return 0;
    });
}

TEST(Groups, AgreeOrSayWhoDoesNot) {
    const auto said = [](i64 last) {
        std::vector<std::string> messages(3);
        launch(3, 1, [&](Ranks& ranks) {
            try {
                check_ranks_agree(ranks, "the step to resume", ranks.world->rank == 2 ? last : 100);
            } catch (const Error& error) { messages[ranks.world->rank] = error.what(); }
            return 0;
        });
        return messages;
    };
    const std::string wanted = "the step to resume: rank 0 has 100, rank 2 has -1\nHINT: do all hosts see the same files?";
    EXPECT_EQ(said(100), std::vector<std::string>(3));
    EXPECT_EQ(said(-1), std::vector<std::string>(3, wanted));
}

TEST(Misuse, IsOneTooManyInFlight) {
    LocalGroup group(2);
    LocalComm comm(group, 0);
    float data[Comm::MAX_IN_FLIGHT + 1] = {};
    for (int i = 0; i < Comm::MAX_IN_FLIGHT; i++) { comm.start_all_reduce(&data[i], 1, DType::FP32, Traffic::OTHER); }
    EXPECT_THROW(comm.start_all_reduce(&data[Comm::MAX_IN_FLIGHT], 1, DType::FP32, Traffic::OTHER), Error);
}

TEST(Misuse, IsRanksThatDisagree) {
    LocalGroup group(2);
    LocalComm a(group, 0), b(group, 1);
    float data[2][2] = {};
    a.start_all_reduce(data[0], 2, DType::FP32, Traffic::OTHER);
    EXPECT_THROW(b.start_all_reduce(data[1], 1, DType::FP32, Traffic::OTHER), Error);
}

// ---------------------------------------------------------------------------------------------------------------

// Every rank's results, printed by rank 0 in rank order. Under MPI once more in pieces too small for most exchanges.
static int print_results(int tp, int dp) {
    return launch(tp, dp, [&](Ranks& ranks) {
        Findings findings;
        for (Comm* comm : {ranks.tp, ranks.dp, ranks.world}) { try_all(*comm, findings); }
        if (launched_world().by_mpi) {
            Findings in_pieces;
            for (auto [color, key] :
                 {std::pair(ranks.dp->rank, ranks.tp->rank), {ranks.tp->rank, ranks.dp->rank}, {0, ranks.world->rank}}) {
                try_all(*mpi::group(color, key, 1000), in_pieces);
            }
            if (in_pieces.results != findings.results) { findings.wrong.push_back("small pieces give other results"); }
            findings.wrong.insert(findings.wrong.end(), in_pieces.wrong.begin(), in_pieces.wrong.end());
        }
        for (const std::string& wrong : findings.wrong) { fprintf(stderr, "rank %d: wrong: %s\n", ranks.world->rank, wrong.c_str()); }
        const i64 n = (i64)findings.results.size(), size = ranks.world->size;
        std::vector<uint64_t> mine, all(n * size);
        for (const auto& [name, hash] : findings.results) { mine.push_back(hash); }
        ranks.world->all_gather(mine.data(), all.data(), n * sizeof(uint64_t), Traffic::OTHER);
        for (i64 i = 0; ranks.world->rank == 0 && i < n * size; i++) {
            printf("rank %lld %s: %016llx\n", (long long)(i / n), findings.results[i % n].first.c_str(), (unsigned long long)all[i]);
        }
        return findings.wrong.empty() ? EXIT_OK : EXIT_FAILED;
    });
}

// ---------------------------------------------------------------------------------------------------------------
// A rank that waits works on the loops of the others.

// Two ranks as threads: rank 1 runs `items` of a loop, then joins the all-reduce in which rank 0 waits from the first item on.
static void help_while_waiting(i64 items, const std::function<void(i64)>& item) {
    LocalGroup world_group(2), tp_group(2), alone_group(1);
    std::vector<std::thread> threads;
    std::exception_ptr failure;
    std::atomic<bool> begun = false;
    for (int rank = 0; rank < 2; rank++) {
        threads.emplace_back([&, rank] {
            LocalComm world(world_group, rank), tp(tp_group, rank), dp(alone_group, 0);
            Ranks ranks = {&world, &tp, &dp, 2};
            Run run(1);
            ranks.connect(run);
            if (rank == 1) {
                try {
                    run.parallel(items, [&](i64 i) {
                        begun = true;
                        item(i);
                    });
                } catch (...) { failure = std::current_exception(); }
            } else {
                while (!begun) { std::this_thread::yield(); }
            }
            float one = 1;
            tp.all_reduce(&one, 1, DType::FP32, Traffic::OTHER);
            EXPECT_EQ(one, 2);
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    if (failure) { std::rethrow_exception(failure); }
}

TEST(Help, ARankThatWaitsTakesItems) {
    constexpr i64 ITEMS = 4;
    std::mutex mutex;
    std::set<std::thread::id> workers;
    std::vector<int> times(ITEMS);
    // No item ends before both ranks have begun one: the owner alone would not come through.
    help_while_waiting(ITEMS, [&](i64 i) {
        const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        for (bool both = false; !both && std::chrono::steady_clock::now() < give_up;) {
            std::lock_guard<std::mutex> lock(mutex);
            workers.insert(std::this_thread::get_id());
            both = workers.size() == 2;
        }
        std::lock_guard<std::mutex> lock(mutex);
        times[i]++;
    });
    EXPECT_EQ(workers.size(), 2u);
    EXPECT_EQ(times, std::vector<int>(ITEMS, 1));
}
TEST(Help, AnErrorIsTheOwners) {
    EXPECT_THROW(help_while_waiting(100, [](i64 i) { check(i != 7, "item 7 fails"); }), Error);
}

int main(int argc, char** argv) {
    try {
        const std::string mode = argc > 2 ? argv[1] : "";
        if (mode == "--results") { return print_results(atoi(argv[2]), argc > 3 ? atoi(argv[3]) : 0); }
    } catch (const std::exception& error) { return report_error(error); }
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
