// resume.h: PREFIX.resume.json, from which a run that was killed, stopped or failed goes on. Written whole and at once, between documents.
#pragma once

#include "data/summary.h"

constexpr char RUN_STATE_FORMAT[] = "tokenize-resume-1";

struct RunState {
    using Json = nlohmann::ordered_json;
    Json options;  // those that shape the set
    const std::vector<InputFile>* inputs = nullptr;
    InputPosition position;  // what is before it is in the shards
    SplitInfo train, val;
    Json sources;                       // Summary::to_json()
    bool publishing = false;            // all is written, it only has to get its names
    std::vector<std::string> replaces;  // publishing: shards of the set that had this name, without folder
};

// Names what to delete to begin anew.
inline std::string begin_anew_hint(const std::string& prefix) {
    return format("to begin anew, delete '%s' and %s_*.bin%s", run_state_path(prefix).c_str(), prefix.c_str(), ASIDE_SUFFIX);
}

// As it comes back from a file: a name that is not UTF-8 has changed.
inline std::string stored_text(const RunState::Json& json, int indent = -1) {
    return json.dump(indent, ' ', false, RunState::Json::error_handler_t::replace);
}
inline RunState::Json stored(const RunState::Json& json) { return RunState::Json::parse(stored_text(json)); }

inline RunState::Json inputs_to_json(const std::vector<InputFile>& inputs) {
    RunState::Json json = RunState::Json::array();
    for (const InputFile& f : inputs) { json.push_back({f.path, f.size}); }
    return json;
}

// A set's name for what made it: equal for equal inputs and options.
inline std::string run_hash(const RunState::Json& options, const std::vector<InputFile>& inputs) {
    const std::string text = stored_text(options) + stored_text(inputs_to_json(inputs));
    return hex64(XXH3_64bits(text.data(), text.size()));
}

inline void write_run_state(const std::string& prefix, const RunState& state) {
    RunState::Json json;
    json["format"] = RUN_STATE_FORMAT;
    json["options"] = state.options;
    const InputPosition& p = state.position;
    json["position"] = {
        {"file", p.file}, {"offset", p.offset}, {"line", p.line}, {"ordinal", p.ordinal}, {"start_xxh3", hex64(p.start_hash)}};
    json["train"] = split_to_json(state.train);
    json["val"] = split_to_json(state.val);
    json["sources"] = state.sources;
    json["publishing"] = state.publishing;
    json["replaces"] = state.replaces;
    json["inputs"] = inputs_to_json(*state.inputs);
    write_file_atomically(run_state_path(prefix), stored_text(json, 1) + "\n");
}

// The state that a run left, checked against what is asked for now (wanted: options and inputs).
inline RunState read_run_state(const std::string& prefix, const RunState& wanted) {
    const std::string path = run_state_path(prefix), hint = "HINT: give what that run was given, or " + begin_anew_hint(prefix);
    RunState state = wanted;
    try {
        const auto json = RunState::Json::parse(read_text_file(path));
        check(json.at("format") == RUN_STATE_FORMAT, "'%s' is of another version of ./tokenize\n%s", path.c_str(), hint.c_str());
        const auto options = stored(wanted.options);
        for (const auto& [name, now] : options.items()) {
            const auto& then = json.at("options").at(name);
            check(then == now, "--resume: %s was %s in the run that '%s' is of, now it is %s\n%s", name.c_str(), then.dump().c_str(),
                  path.c_str(), now.dump().c_str(), hint.c_str());
        }
        const auto then = json.at("inputs"), now = stored(inputs_to_json(*wanted.inputs));
        for (size_t i = 0; i < std::max(then.size(), now.size()); i++) {
            const auto text = [&](const RunState::Json& files) {
                return i < files.size()
                           ? format("'%s' of %lld bytes", files[i].at(0).get<std::string>().c_str(), files[i].at(1).get<long long>())
                           : "none";
            };
            check(text(then) == text(now), "--resume: input %zu was %s in the run that '%s' is of, now it is %s\n%s", i + 1,
                  text(then).c_str(), path.c_str(), text(now).c_str(), hint.c_str());
        }
        const auto& p = json.at("position");
        const std::string start = p.at("start_xxh3");
        state.position = {p.at("file"), p.at("offset"), p.at("line"), p.at("ordinal"), strtoull(start.c_str(), nullptr, 16)};
        state.train = split_from_json(json.at("train"), path);
        state.val = split_from_json(json.at("val"), path);
        state.sources = json.at("sources");
        state.publishing = json.at("publishing");
        for (const auto& name : json.at("replaces")) { state.replaces.push_back(checked_shard_name(name, path)); }
    } catch (const nlohmann::json::exception& e) {
        die("'%s' is not what ./tokenize writes: %s\nHINT: %s", path.c_str(), e.what(), begin_anew_hint(prefix).c_str());
    }
    return state;
}
