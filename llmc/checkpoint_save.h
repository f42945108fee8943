// checkpoint_save.h: writes a checkpoint, all ranks together, so that a kill or a full disk at any moment leaves the older ones
// as they were and nothing that looks like a new one.
#pragma once

#include "checkpoint.h"
#include "comm.h"

// Every rank's text, by rank.
inline std::vector<std::string> gather_texts(const std::string& mine, Comm& comm) {
    const i64 size = (i64)mine.size();
    std::vector<i64> sizes(comm.size);
    comm.share(&size, sizes.data(), sizeof(i64));
    const i64 longest = *std::max_element(sizes.begin(), sizes.end());
    std::vector<std::string> texts(comm.size);
    if (longest == 0) { return texts; }
    std::string padded = mine, all(longest * comm.size, '\0');
    padded.resize(longest);
    comm.share(padded.data(), all.data(), longest);
    for (int r = 0; r < comm.size; r++) { texts[r] = all.substr(r * longest, sizes[r]); }
    return texts;
}

// Does work() on every rank and returns every rank's result. If it fails anywhere, rank 0 calls undo() and all ranks throw
// the first rank's reason.
template <typename Work, typename Undo>
std::vector<std::string> on_every_rank(Comm& comm, const Work& work, const Undo& undo) {
    std::string result;
    try {
        result = "+" + work();
    } catch (const std::exception& e) { result = std::string("-") + e.what(); }
    std::vector<std::string> results = gather_texts(result, comm);
    for (const std::string& r : results) {
        if (r[0] == '+') { continue; }
        if (comm.rank == 0) { undo(); }
        comm.barrier();  // nobody ends the job before the undoing is done
        throw Error(EXIT_FAILED, r.substr(1));
    }
    for (std::string& r : results) { r.erase(0, 1); }
    return results;
}

// The elements that this rank writes. What several data-parallel ranks hold (no ZeRO) is divided among them, so that they
// save in parallel.
inline std::vector<Range> ranges_to_write(const std::vector<StateView>& mine, Comm& dp) {
    json held = json::array();
    for (const StateView& view : mine) { held.push_back({view.range.begin, view.range.end}); }
    std::vector<std::vector<std::pair<i64, i64>>> all;
    std::set<i64> cuts = {0};
    for (const std::string& text : gather_texts(held.dump(), dp)) {
        all.push_back(json::parse(text));
        for (const auto& [begin, end] : all.back()) { cuts.insert({begin, end}); }
    }
    std::vector<Range> ranges;
    for (auto cut = cuts.begin(); std::next(cut) != cuts.end(); ++cut) {
        const i64 begin = *cut, end = *std::next(cut);
        i64 holders = 0, place = -1;
        for (int r = 0; r < dp.size; r++) {
            const bool holds =
                std::any_of(all[r].begin(), all[r].end(), [&](const auto& x) { return x.first <= begin && end <= x.second; });
            if (holds && r == dp.rank) { place = holders; }
            holders += holds;
        }
        check(holders > 0, "no rank holds the elements [%lld, %lld) of the state", (long long)begin, (long long)end);
        const Range share = place < 0 ? Range{0, 0} : split_range(end - begin, holders, place, 32);
        if (share.size() > 0) { ranges.push_back({begin + share.begin, begin + share.end}); }
    }
    return ranges;
}

// Infinities and NaNs have an exponent of ones. Written without an early end, so that it vectorises.
inline bool all_finite(const float* x, i64 n) {
    uint32_t found = 0;
    for (i64 i = 0; i < n; i++) { found |= (std::bit_cast<uint32_t>(x[i]) & 0x7F800000) == 0x7F800000; }
    return !found;
}

// Writes one rank's file and returns its line of the manifest.
inline json write_state_file(const std::string& dir, i64 step, int tp, int dp, const std::vector<Range>& ranges,
                             const std::vector<StateView>& mine, Run& run) {
    json info = {{"version", 1}, {"step", step}, {"tp", tp}, {"dp", dp}, {"ranges", json::array()}};
    for (const Range& range : ranges) { info["ranges"].push_back({range.begin, range.end}); }
    const std::string name = format("state_tp%d_dp%d.bin", tp, dp);
    File file(dir + "/" + name, "wb");
    Hasher hasher;
    i64 bytes = 0;
    const auto write = [&](const void* data, i64 n) {
        hasher.add(data, n);
        file.write(data, n);
        bytes += n;
    };
    std::string header = info.dump();
    header.resize(round_up(16 + (i64)header.size(), 64) - 16, ' ');
    const uint64_t length = header.size();
    write(STATE_MAGIC, 8);
    write(&length, 8);
    write(header.data(), (i64)length);

    for (const Range& range : ranges) {
        std::vector<float> chunk(std::min<i64>(range.size(), 1 << 20));
        const auto view = std::find_if(mine.begin(), mine.end(),
                                       [&](const StateView& v) { return v.range.begin <= range.begin && range.end <= v.range.end; });
        for (int p = 0; p < STATE_ARRAYS; p++) {
            for (i64 at = range.begin; at < range.end; at += (i64)chunk.size()) {
                const i64 n = std::min<i64>((i64)chunk.size(), range.end - at);
                if ((StateArray)p == StateArray::MASTER) { view->master({at, at + n}, chunk.data()); }
                else { copy_to_host(chunk.data(), ((StateArray)p == StateArray::M ? view->m : view->v) + (at - view->range.begin), n, run); }
                // A checkpoint like that would resume to nothing, and push the good ones out.
                check((StateArray)p != StateArray::MASTER || all_finite(chunk.data(), n),
                      "'%s' of step %lld is not saved: the weights are not finite\nHINT: resume the checkpoint before, with a lower --lr",
                      name.c_str(), (long long)step);
                write(chunk.data(), n * (i64)sizeof(float));
            }
        }
    }
    file.sync_and_close();
    info["name"] = name;
    info["bytes"] = bytes;
    info["xxh3"] = hasher.text();
    return info;
}

// Saves the state of all ranks as out_dir/step_XXXXXXXX and returns that path. `meta` must hold "model" (model_to_json).
// Afterwards the newest `keep` checkpoints remain. If any rank fails, all throw its Error and what was there before stays.
inline std::string save_checkpoint(const std::string& out_dir, json meta, i64 step, const std::vector<StateView>& mine, Ranks& ranks,
                                   i64 keep, Run& run) {
    const std::string name = out_dir + "/" + step_name(step), aside = out_dir + "/." + step_name(step) + ".tmp";
    Comm& world = *ranks.world;
    const auto undo = [&] {
        std::error_code ignored;
        std::filesystem::remove_all(aside, ignored);
    };
    const auto on_first_rank = [&](const auto& work) {
        const auto on_rank = [&] {
            if (world.rank == 0) { work(); }
            return std::string();
        };
        on_every_rank(world, on_rank, undo);
    };
    const std::vector<Range> ranges = ranges_to_write(mine, *ranks.dp);
    on_first_rank([&] {
        std::filesystem::create_directories(out_dir);
        remove_leftovers(out_dir);
        check(std::filesystem::create_directory(aside), "'%s' is in the way of a save\nHINT: remove it by hand", aside.c_str());
    });
    const std::vector<std::string> files = on_every_rank(
        world, [&] { return write_state_file(aside, step, ranks.tp->rank, ranks.dp->rank, ranges, mine, run).dump(); }, undo);
    on_first_rank([&] {
        json manifest = {{"version", 1}, {"step", step}, {"tp", ranks.tp->size}, {"dp", ranks.dp->size}, {"meta", std::move(meta)}};
        for (const std::string& text : files) { manifest["files"].push_back(json::parse(text)); }
        const std::string canonical = manifest.dump();
        manifest["xxh3"] = hash_text(XXH3_64bits(canonical.data(), canonical.size()));
        const std::string text = manifest.dump(1);  // no newline: a file cut by one byte must not look whole
        File file(aside + "/checkpoint.json", "wb");
        file.write(text.data(), text.size());
        file.sync_and_close();
        sync_folder(aside);
        publish_directory(aside, name);
        sync_folder(out_dir);
        remove_old_checkpoints(out_dir, step, keep);
    });
    return name;
}
