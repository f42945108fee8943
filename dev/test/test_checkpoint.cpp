// test_checkpoint.cpp: state that is saved by some ranks and read by others comes back bit for bit, and a save that fails, is
// killed, or is damaged later never passes for a good one.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <random>
#include <thread>

#include "llmc/checkpoint_load.h"
#include "llmc/checkpoint_save.h"
#include "llmc/comm_local.h"
#include "llmc/init.h"
#include "tiny_models.h"

namespace {

// Calls body(ranks, run) on T * D ranks that are threads. What each rank threw, or "".
template <typename Body>
std::vector<std::string> on_ranks(int T, int D, const Body& body) {
    LocalGroup world(T * D);
    std::vector<std::unique_ptr<LocalGroup>> tp, dp;
    for (int d = 0; d < D; d++) { tp.push_back(std::make_unique<LocalGroup>(T)); }
    for (int t = 0; t < T; t++) { dp.push_back(std::make_unique<LocalGroup>(D)); }
    std::vector<std::string> errors(T * D);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < T * D; rank++) {
        threads.emplace_back([&, rank] {
            LocalComm world_comm(world, rank), tp_comm(*tp[rank / T], rank % T), dp_comm(*dp[rank % T], rank / T);
            Ranks ranks{&world_comm, &tp_comm, &dp_comm, T * D};
            Run run(1);
            errors[rank] = message_of([&] { body(ranks, run); });
        });
    }
    for (std::thread& thread : threads) { thread.join(); }
    return errors;
}
std::vector<std::string> no_errors(int n) { return std::vector<std::string>(n); }

// A rank's state, every element of which tells where it belongs: part, step, and place in the Hugging Face tensor.
struct State {
    ParameterTable table;
    std::vector<float> parts[STATE_ARRAYS];
    std::vector<StateView> views;

    State(const ModelConfig& model, const Ranks& ranks, bool zero) : table(model, tiny_specs(model), ranks.tp->size, ranks.tp->rank) {
        for (auto& part : parts) { part.assign(table.count(), 0.0f); }
        for (const Range segment : {Range{0, table.replicated.end}, table.sharded}) {
            const Range mine = zero ? split_range(segment.size(), ranks.dp->size, ranks.dp->rank, 32) : Range{0, segment.size()};
            const i64 begin = segment.begin + mine.begin;
            const auto master = [this](Range range, float* to) { std::copy_n(parts[0].begin() + range.begin, range.size(), to); };
            views.push_back({{begin, begin + mine.size()}, master, &parts[1][begin], &parts[2][begin]});
        }
    }
    void fill(i64 step) {
        for (int p = 0; p < STATE_ARRAYS; p++) {
            for (const Tensor& t : table.tensors()) {
                fill_from_hf(t, parts[p].data() + t.offset, [&](const Slice& s, i64 first, i64 count, float* to) {
                    fill_normal(step * STATE_ARRAYS + p, fnv1a_64(s.part.name), first, count, 1.0f, to);
                });
            }
        }
    }
    // Elements in this rank's views that differ from `other`.
    i64 differences(const State& other) const {
        i64 n = 0;
        for (const StateView& v : views) {
            for (int p = 0; p < STATE_ARRAYS; p++) {
                n += memcmp(&parts[p][v.range.begin], &other.parts[p][v.range.begin], v.range.size() * sizeof(float)) != 0;
            }
        }
        return n;
    }
};

json meta_of(const ModelConfig& model) { return {{"model", model_to_json(model)}, {"sync_factor", 0.1}, {"note", "é \"quoted\""}}; }

std::vector<std::string> save(const std::string& out, const ModelConfig& model, int T, int D, bool zero, i64 step, i64 keep = 0) {
    return on_ranks(T, D, [&](Ranks& ranks, Run& run) {
        State state(model, ranks, zero);
        state.fill(step);
        const std::string path = save_checkpoint(out, meta_of(model), step, state.views, ranks, keep, run);
        check(path == out + "/" + step_name(step), "saved as %s", path.c_str());
    });
}
// Reads with T * D ranks and compares; `later`: checksums beside it.
std::vector<std::string> load(const std::string& dir, const ModelConfig& model, int T, int D, bool zero, i64 step, bool later = false) {
    return on_ranks(T, D, [&](Ranks& ranks, Run& run) {
        State wanted(model, ranks, zero), got(model, ranks, zero);
        wanted.fill(step);
        for (const StateView& v : got.views) {
            for (auto& part : got.parts) { std::fill_n(&part[v.range.begin], v.range.size(), NAN); }
        }
        Checkpoint checkpoint(dir);
        check(checkpoint.step() == step, "step %lld", (long long)checkpoint.step());
        check(checkpoint.meta() == meta_of(model), "meta differs");
        check(model_to_json(checkpoint.model()) == model_to_json(model), "model differs");
        if (later) { checkpoint.believe_later(); }
        for (const StateView& v : got.views) { checkpoint.read(StateArray::MASTER, got.table, ranks.tp->size, ranks.tp->rank, v.range, &got.parts[0][v.range.begin]); }
        load_moments(checkpoint, got.table, *ranks.tp, got.views, run);
        checkpoint.confirm();
        check(got.differences(wanted) == 0, "state differs");
    });
}

std::vector<std::string> names_in(const std::string& dir) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(dir)) { names.push_back(entry.path().filename()); }
    std::sort(names.begin(), names.end());
    return names;
}

TEST(Checkpoint, ModelRoundTrip) {
    for (const ModelConfig& m : {tiny_llama(), tiny_gpt()}) {
        const json j = json::parse(model_to_json(m).dump());
        EXPECT_EQ(model_to_json(model_from_json(j, "here")), model_to_json(m));
        json lacking = j;
        lacking.erase("rope_base");
        expect_mentions(message_of([&] { model_from_json(lacking, "here"); }), {"'here'", "rope_base"});
    }
}

// D and ZeRO may change: 1 -> 3 -> 2 -> 4 ranks.
TEST(Checkpoint, DataParallelChanges) {
    const TempDir dir;
    const struct {
        int D;
        bool zero;
    } runs[] = {{1, false}, {3, true}, {3, false}, {2, true}, {4, true}, {2, false}, {1, true}};
    for (const int T : {1, 2}) {
        i64 step = 100 * T;
        for (const auto& from : runs) {
            ASSERT_EQ(save(dir.path, tiny_llama(), T, from.D, from.zero, ++step), no_errors(T * from.D));
            for (const auto& to : runs) {
                ASSERT_EQ(load(dir.path + "/" + step_name(step), tiny_llama(), T, to.D, to.zero, step), no_errors(T * to.D));
            }
        }
    }
}

// T may change where the model does not depend on it; a vocabulary of 53 divides by none of them.
TEST(Checkpoint, TensorParallelChanges) {
    const TempDir dir;
    i64 step = 0;
    for (ModelConfig model : {tiny_llama(), tiny_gpt()}) {
        for (const i64 multiple : {0, 8}) {
            model.vocab_multiple = multiple;
            for (const int from : {1, 2, 4, 3}) {
                ASSERT_EQ(save(dir.path, model, from, 2, true, ++step, 1), no_errors(2 * from));
                for (const int to : {1, 2, 4, 3, 12}) {
                    ASSERT_EQ(load(latest_checkpoint(dir.path), model, to, 1, false, step), no_errors(to)) << from << " to " << to;
                }
                ASSERT_EQ(load(latest_checkpoint(dir.path), model, 6, 2, true, step), no_errors(12));
            }
        }
    }
}

TEST(Checkpoint, SameStateSameBytes) {
    const TempDir a, b;
    save(a.path, tiny_llama(), 2, 2, true, 7);
    save(b.path, tiny_llama(), 2, 2, true, 7);
    const std::string name = "/step_00000007";
    const std::vector<std::string> files = {"checkpoint.json", "state_tp0_dp0.bin", "state_tp0_dp1.bin", "state_tp1_dp0.bin",
                                            "state_tp1_dp1.bin"};
    ASSERT_EQ(names_in(a.path + name), files);
    for (const std::string& file : files) {
        EXPECT_EQ(read_text_file(a.path + name + "/" + file), read_text_file(b.path + name + "/" + file));
    }
    // Without ZeRO both data-parallel ranks hold all and share the writing.
    save(a.path, tiny_llama(), 1, 2, false, 8);
    const auto bytes = [&](const char* file) { return (i64)std::filesystem::file_size(a.path + "/step_00000008/" + file); };
    EXPECT_NEAR(bytes("state_tp0_dp0.bin"), bytes("state_tp0_dp1.bin"), 2000);
}

TEST(Checkpoint, KeepsTheNewest) {
    const TempDir dir;
    EXPECT_EQ(latest_checkpoint(dir.path), "");
    EXPECT_EQ(latest_checkpoint(dir.path + "/nowhere"), "");
    const std::string out = dir.path + "/made/on the way";
    for (i64 step : {10, 20, 30, 100000000}) { ASSERT_EQ(save(out, tiny_gpt(), 1, 1, false, step, 2), no_errors(1)); }
    EXPECT_EQ(names_in(out), (std::vector<std::string>{"step_00000030", "step_100000000"}));
    EXPECT_EQ(latest_checkpoint(out), out + "/step_100000000");
    EXPECT_EQ(latest_checkpoint(out + "/step_00000030"), out + "/step_00000030");
    // A run that went back: its save is kept whatever the newer ones of its former self, and replaces what has its name.
    ASSERT_EQ(save(out, tiny_gpt(), 1, 1, false, 20, 1), no_errors(1));
    EXPECT_EQ(names_in(out).size(), 3u);
    ASSERT_EQ(save(out, tiny_gpt(), 2, 1, false, 30, 1), no_errors(2));
    EXPECT_EQ(names_in(out), (std::vector<std::string>{"step_00000030", "step_100000000"}));
    EXPECT_EQ(load(out + "/step_00000030/", tiny_gpt(), 2, 1, false, 30), no_errors(2));
}

TEST(Checkpoint, DamageIsNamed) {
    const TempDir dir;
    save(dir.path, tiny_llama(), 2, 2, true, 50);
    save(dir.path, tiny_llama(), 2, 2, true, 100);
    const std::string good = dir.path + "/step_00000100", old = dir.path + "/step_00000050";
    // Some rank refuses, with the file's name; a rank whose files are whole may not notice, but the job ends.
    const auto expect_refused = [&](const std::string& file, const std::vector<std::string>& words) {
        EXPECT_EQ(latest_checkpoint(dir.path), good);  // no silent step back
        for (bool later : {false, true}) {
            const std::vector<std::string> errors = load(good, tiny_llama(), 2, 2, true, 100, later);
            const std::string& message = *std::max_element(errors.begin(), errors.end());
            expect_mentions(message, {good + "/" + file, "HINT", "step_00000050"});
            expect_mentions(message, words);
        }
    };
    for (const std::string& file : names_in(good)) {
        const std::string path = good + "/" + file, bytes = read_text_file(path);
        const bool manifest = file == "checkpoint.json";
        const auto cut = [&](i64 size, const char* words) {
            write_file(path, bytes.substr(0, size));
            expect_refused(file, {manifest ? "checkpoint.json" : words});
        };
        cut(bytes.size() - 1, "is 1 byte short");
        cut(bytes.size() / 2, "short");
        cut(0, "short");
        if (!manifest) {
            write_file(path, bytes + "x");
            expect_refused(file, {"is 1 byte too long"});
        }
        for (const size_t at : {(size_t)3, bytes.size() / 2, bytes.size() - 5}) {
            std::string flipped = bytes;
            flipped[at] ^= 4;
            write_file(path, flipped);
            const std::vector<std::string> errors = load(good, tiny_llama(), 2, 2, true, 100);
            EXPECT_NE(errors, no_errors(4)) << file << " byte " << at;
            if (!manifest) { expect_refused(file, {"checksum does not match: the file is damaged"}); }
        }
        unlink(path.c_str());
        expect_refused(file, {manifest ? "is missing" : "No such file"});
        if (!manifest) {
            std::filesystem::copy_file(old + "/" + file, path);
            expect_refused(file, {"is from step 50", "from step 100"});
        }
        write_file(path, bytes);
    }
    for (bool later : {false, true}) { EXPECT_EQ(load(good, tiny_llama(), 2, 2, true, 100, later), no_errors(4)); }

    std::filesystem::rename(old, dir.path + "/step_00000200");
    expect_mentions(load(dir.path + "/step_00000200", tiny_llama(), 2, 2, true, 50)[0], {"named for step 200", "step 50"});
    ModelConfig wider = tiny_llama();
    wider.ffn += 12;
    expect_mentions(on_ranks(2, 1,
                             [&](Ranks& ranks, ::Run& run) {
                                 State state(wider, ranks, false);
                                 Checkpoint checkpoint(good);
                                 load_moments(checkpoint, state.table, *ranks.tp, state.views, run);
                             })[0],
                    {"step_00000100", "elements", "the model wants"});
    expect_mentions(message_of([&] { Checkpoint checkpoint(dir.path + "/nowhere"); }), {"nowhere", "no such directory"});
}

// A failed save: the same reason on all ranks, nothing left of it, and what was there still loads.
void expect_failed_save(const std::string& out, const std::vector<std::string>& errors, const char* reason) {
    EXPECT_EQ(errors, std::vector<std::string>(errors.size(), errors[0]));
    expect_mentions(errors[0], {"state_tp", reason});
    EXPECT_EQ(names_in(out), std::vector<std::string>{"step_00000010"});
    EXPECT_EQ(load(latest_checkpoint(out), tiny_llama(), 2, 1, false, 10), no_errors(2));
}

TEST(Checkpoint, FileSizeLimit) {
    const TempDir dir;
    save(dir.path, tiny_llama(), 2, 1, false, 10);
    signal(SIGXFSZ, SIG_IGN);  // as launch() does
    rlimit before;
    getrlimit(RLIMIT_FSIZE, &before);
    const rlimit small = {40000, before.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    const std::vector<std::string> errors = save(dir.path, tiny_llama(), 2, 2, false, 20);
    setrlimit(RLIMIT_FSIZE, &before);
    expect_failed_save(dir.path, errors, "File too large");
}

TEST(Checkpoint, FullDisk) {
    const TempDir dir;
    if (mount("tmpfs", dir.path.c_str(), "tmpfs", 0, "size=360k") != 0) { GTEST_SKIP() << "needs root, to mount a small tmpfs"; }
    save(dir.path, tiny_llama(), 2, 1, false, 10);
    const std::vector<std::string> errors = save(dir.path, tiny_llama(), 2, 1, false, 20);
    expect_failed_save(dir.path, errors, "No space left on device");
    umount2(dir.path.c_str(), MNT_DETACH);
}

TEST(Checkpoint, UnwritableFolder) {
    const TempDir dir;
    write_file(dir.path + "/file", "");
    const std::vector<std::string> errors = save(dir.path + "/file", tiny_llama(), 2, 1, false, 1);
    EXPECT_EQ(errors, std::vector<std::string>(2, errors[0]));
    expect_mentions(errors[0], {dir.path + "/file"});
}

// While one is alive, root is somebody who may not do everything.
struct Unprivileged {
    const bool was_root = geteuid() == 0;
    Unprivileged() { check(!was_root || seteuid(65534) == 0, "seteuid: %s", strerror(errno)); }
    ~Unprivileged() { check(!was_root || seteuid(0) == 0, "seteuid: %s", strerror(errno)); }
};

// What cannot be removed stays and is warned of; the save itself is none the worse.
TEST(Checkpoint, WhatCannotBeRemovedFailsNoSave) {
    const TempDir dir;
    chmod(dir.path.c_str(), 0777);
    const Unprivileged unprivileged;
    const std::string theirs = dir.path + "/.step_00000003.tmp", old = dir.path + "/.step_00000004.old",
                      locked = dir.path + "/step_00000010";
    ASSERT_EQ(save(dir.path, tiny_gpt(), 1, 1, false, 10), no_errors(1));
    for (const std::string& path : {theirs, old}) {
        std::filesystem::create_directory(path);
        write_file(path + "/file", "");
    }
    for (const std::string& path : {theirs, old, locked}) { chmod(path.c_str(), 0555); }
    testing::internal::CaptureStderr();
    EXPECT_EQ(save(dir.path, tiny_gpt(), 1, 2, true, 20, 1), no_errors(2));
    expect_mentions(testing::internal::GetCapturedStderr(), {"warning: cannot remove '" + theirs + "'", "00000004.old'", "00000010.old'"});
    EXPECT_EQ(names_in(dir.path), (std::vector<std::string>{".step_00000003.tmp", ".step_00000004.old", "step_00000010", "step_00000020"}));
    EXPECT_EQ(load(locked, tiny_gpt(), 1, 1, false, 10), no_errors(1));  // under its own name again, and whole
    // Only a save's own leftover is in its way.
    expect_mentions(save(dir.path, tiny_gpt(), 1, 1, false, 3)[0], {theirs, "HINT"});
    for (const std::string& path : {theirs, old, locked}) { chmod(path.c_str(), 0755); }
    EXPECT_EQ(save(dir.path, tiny_gpt(), 1, 1, false, 30, 1), no_errors(1));
    EXPECT_EQ(names_in(dir.path), std::vector<std::string>{"step_00000030"});
}

TEST(Checkpoint, WeightsThatAreNotFiniteAreNotSaved) {
    const TempDir dir;
    save(dir.path, tiny_llama(), 2, 1, false, 10);
    for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
        for (const int array : {0, 1}) {
            const std::vector<std::string> errors = on_ranks(2, 1, [&](Ranks& ranks, ::Run& run) {
                State state(tiny_llama(), ranks, false);
                state.fill(20);
                if (ranks.tp->rank == 1) { state.parts[array][state.views.back().range.begin + 5] = bad; }
                save_checkpoint(dir.path, meta_of(tiny_llama()), 20, state.views, ranks, 1, run);
            });
            if (array == 0) {
                expect_failed_save(dir.path, errors, "state_tp1_dp0.bin' of step 20 is not saved: the weights are not finite");
            } else {  // moments heal
                EXPECT_EQ(errors, no_errors(2));
                save(dir.path, tiny_llama(), 2, 1, false, 10);
                std::filesystem::remove_all(dir.path + "/step_00000020");
            }
        }
    }
    const std::vector<float> fine = {0, -0.0f, 3e38f, -3e38f, 1e-45f};
    EXPECT_TRUE(all_finite(fine.data(), fine.size()));
}

TEST(Checkpoint, OneRunInAFolder) {
    const TempDir dir;
    {
        const FolderLock lock = lock_folder(dir.path);
        expect_mentions(message_of([&] { lock_folder(dir.path); }),
                        {"'" + dir.path + "'", "another run is using it", format("process %d", getpid()), "HINT"});
    }
    std::optional<FolderLock> kept;
    kept.emplace(lock_folder(dir.path));
    EXPECT_NE(message_of([&] { lock_folder(dir.path); }), "");
    kept.reset();
    EXPECT_EQ(message_of([&] { lock_folder(dir.path); }), "");
    chmod(dir.path.c_str(), 0777);
    const Unprivileged unprivileged;  // the file .lock of another user
    EXPECT_EQ(message_of([&] { lock_folder(dir.path); }), "");
}

TEST(Checkpoint, OutIsTheFolderAround) {
    const TempDir dir;
    const std::string one = dir.path + "/step_00000010", renamed = dir.path + "/best";
    save(dir.path, tiny_gpt(), 1, 1, false, 10);
    check_not_a_checkpoint(dir.path);
    check_not_a_checkpoint(dir.path + "/new");
    for (const std::string& out : {one, one + "//", one + "/.", dir.path + "/step_7"}) {
        expect_mentions(message_of([&] { check_not_a_checkpoint(out); }), {"'" + out + "'", "HINT: --out '" + dir.path + "'"});
    }
    std::filesystem::rename(one, renamed);
    expect_mentions(message_of([&] { check_not_a_checkpoint(renamed); }), {"is a checkpoint", "HINT: --out '" + dir.path + "'"});
}

TEST(Folders, SayWhyTheyCannotBeMade) {
    const TempDir dir;
    prepare_folder(dir.path + "/a/b");
    EXPECT_TRUE(is_directory(dir.path + "/a/b"));
    chmod(dir.path.c_str(), 0555);
    {
        const Unprivileged unprivileged;
        expect_mentions(message_of([&] { prepare_folder(dir.path + "/c/d"); }), {dir.path + "/c'", "Permission denied", "HINT"});
    }
    chmod(dir.path.c_str(), 0755);
    write_file(dir.path + "/file", "");
    expect_mentions(message_of([&] { prepare_folder(dir.path + "/file/d"); }), {dir.path + "/file'", "File exists"});
}

// A process that saves over and over is killed at any moment, 50 times: what it had reported saved is there, and whole.
TEST(Checkpoint, KilledWhileSaving) {
    const TempDir dir;
    const ModelConfig model = tiny_llama();
    LocalGroup alone(1);
    LocalComm comm(alone, 0);
    Ranks ranks{&comm, &comm, &comm, 1};
    ::Run run(1);
    State state(model, ranks, false);
    std::mt19937 random(1);
    i64 done = 0;
    for (int round = 0; round < 50; round++) {
        int pipe_ends[2];
        ASSERT_EQ(pipe(pipe_ends), 0);
        const pid_t child = fork();
        if (child == 0) {
            for (i64 step = done + 10;; step += 10) {
                state.fill(step);
                save_checkpoint(dir.path, meta_of(model), step, state.views, ranks, 2, run);
                if (write(pipe_ends[1], &step, sizeof(step)) != sizeof(step)) { _exit(1); }
            }
        }
        close(pipe_ends[1]);
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 60000));
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
        for (i64 step; read(pipe_ends[0], &step, sizeof(step)) == sizeof(step);) { done = step; }
        close(pipe_ends[0]);
        const std::string latest = latest_checkpoint(dir.path);
        if (latest.empty() && done == 0) { continue; }
        const i64 step = Checkpoint(latest).step();
        ASSERT_TRUE(step == done || step == done + 10) << step << " after " << done;
        ASSERT_EQ(load(latest, model, 1, 1, false, step), no_errors(1));
        done = step;
    }
    EXPECT_GT(done, 100);
    ASSERT_EQ(save(dir.path, model, 1, 1, false, done + 10, 2), no_errors(1));
    EXPECT_EQ(names_in(dir.path), (std::vector<std::string>{step_name(done), step_name(done + 10)}));
}

}  // namespace
