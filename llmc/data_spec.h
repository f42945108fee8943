// data_spec.h: what --train and --val may say, and which files that means.
//
//   SPEC is a GLOB, or WEIGHT:GLOB,WEIGHT:GLOB,... to mix, or @FILE: a recipe with one WEIGHT:GLOB a line.
//
// In a recipe blank lines and what follows a '#' at a line's start or after a space are left out. Relative globs start from the current
// folder in all three.
#pragma once

#include <glob.h>

#include <algorithm>
#include <charconv>

#include "llmc/blend.h"

struct WeightedGlob {
    double weight;  // normalised once: shares that add to 1
    std::string glob;
};
struct DataSpec {
    std::vector<WeightedGlob> parts;
    bool is_mix;  // weights were given, if only one
};

inline std::string without_spaces_around(const std::string& text) {
    constexpr char SPACES[] = " \t\r";
    const size_t begin = std::min(text.find_first_not_of(SPACES), text.size());
    return text.substr(begin, text.find_last_not_of(SPACES) + 1 - begin);
}

constexpr char MIX_HINT[] = "a mix looks like '0.7:web/*.bin,0.3:code/*.bin'";

// "WEIGHT:GLOB"; `where` begins the error.
inline WeightedGlob parse_weighted_glob(const std::string& text, const std::string& where) {
    constexpr double MAX_WEIGHT = 1e100;  // their sum must stay finite
    const std::string part = without_spaces_around(text);
    const size_t colon = std::min(part.find(':'), part.size());
    const std::string number = without_spaces_around(part.substr(0, colon));
    const std::string glob = without_spaces_around(part.substr(std::min(colon + 1, part.size())));
    double weight = 0;
    // from_chars, not strtod: a decimal comma in the locale must not change what 0.5 means.
    const auto [rest, error] = std::from_chars(number.data(), number.data() + number.size(), weight);
    if (error != std::errc() || rest != number.data() + number.size() || !(weight > 0 && weight <= MAX_WEIGHT) || glob.empty()) {
        usage_error("%s: found '%s', wanted WEIGHT:GLOB with a weight above 0, at most %g\nHINT: %s", where.c_str(), part.c_str(),
                    MAX_WEIGHT, MIX_HINT);
    }
    return {weight, glob};
}

inline std::vector<WeightedGlob> read_recipe(const std::string& path) {
    if (!is_regular_file(path)) {
        usage_error("data '@%s': there is no such file\nHINT: @FILE is a recipe with one WEIGHT:GLOB a line; data/ holds some",
                    path.c_str());
    }
    constexpr i64 MAX_BYTES = 16 << 20;
    const i64 bytes = File(path, "rb").size();
    check(bytes <= MAX_BYTES, "data '@%s': a recipe of %lld bytes, wanted at most %lld\nHINT: to train on that file itself leave out the @",
          path.c_str(), (long long)bytes, (long long)MAX_BYTES);
    const std::string text = read_text_file(path);
    std::vector<WeightedGlob> parts;
    i64 number = 0;
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        std::string line = text.substr(begin, end - begin);
        number++;
        for (size_t at = line.find('#'); at != std::string::npos; at = line.find('#', at + 1)) {
            if (at == 0 || line[at - 1] == ' ' || line[at - 1] == '\t') { line.resize(at); }
        }
        if (!without_spaces_around(line).empty()) {
            parts.push_back(parse_weighted_glob(line, format("data '@%s', line %lld", path.c_str(), (long long)number)));
        }
        begin = end + 1;
    }
    if (parts.empty()) { usage_error("data '@%s' names no data: no line WEIGHT:GLOB\nHINT: such as 0.7:web/*.bin", path.c_str()); }
    return parts;
}

// It is a mix if a number stands before its first ':'. Write ./0.5:x for a file of that name, and ? for a comma in a mixed path.
inline DataSpec parse_data_spec(const std::string& spec) {
    if (spec.empty()) { usage_error("no data given\nHINT: pass a pattern of shards, such as 'data/bible_0*.bin'"); }
    const std::string before_colon = without_spaces_around(spec.substr(0, spec.find(':')));
    const bool is_inline = spec.find(':') != std::string::npos && before_colon.find('/') == std::string::npos && !before_colon.empty() &&
                           std::string_view("0123456789.+-").find(before_colon[0]) != std::string_view::npos;
    DataSpec found = {{}, true};
    if (spec[0] == '@') {
        found.parts = read_recipe(spec.substr(1));
    } else if (!is_inline) {
        return {{{1.0, spec}}, false};
    } else {
        for (size_t begin = 0; begin <= spec.size();) {
            const size_t end = std::min(spec.find(',', begin), spec.size());
            found.parts.push_back(parse_weighted_glob(spec.substr(begin, end - begin), "data '" + spec + "'"));
            begin = end + 1;
        }
    }
    std::vector<double> weights;
    for (const WeightedGlob& p : found.parts) { weights.push_back(p.weight); }
    weights = normalized(weights);
    for (size_t i = 0; i < weights.size(); i++) { found.parts[i].weight = weights[i]; }
    return found;
}

// ---------------------------------------------------------------------------------------------------------------
// Files

inline bool is_no_such_file(int error) { return error == ENOENT || error == ENOTDIR; }

// Sorted by bytes, so that every rank and every locale sees the same order.
inline std::vector<std::string> expand_glob(const std::string& pattern) {
    errno = 0;
    if (path_exists(pattern)) { return {pattern}; }  // also when the name itself holds a '*' or a '['
    const int stat_error = errno;
    // A folder that cannot be listed hides its shards: no reason to go on without them.
    thread_local std::string unlisted;
    unlisted.clear();
    auto note = [](const char* folder, int error) {
        if (!is_no_such_file(error)) { unlisted = format("cannot list the folder '%s': %s", folder, strerror(error)); }
        return 0;
    };
    glob_t found = {};
    const int status = glob(pattern.c_str(), GLOB_BRACE | GLOB_TILDE | GLOB_NOSORT, note, &found);
    std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    globfree(&found);
    check(unlisted.empty(), "data '%s': %s", pattern.c_str(), unlisted.c_str());
    check(status == 0 || status == GLOB_NOMATCH, "cannot list files that match '%s'", pattern.c_str());
    check(!paths.empty() || is_no_such_file(stat_error), "data '%s': %s", pattern.c_str(), strerror(stat_error));
    if (paths.empty()) {
        usage_error("no file matches '%s'\nHINT: quote the pattern; a relative one starts from the current folder", pattern.c_str());
    }
    std::sort(paths.begin(), paths.end());
    paths.erase(std::unique(paths.begin(), paths.end()), paths.end());  // {a*,*b} may name one twice
    return paths;
}

// The token files that a pattern means. A Megatron set is two files, PREFIX.bin and PREFIX.idx: it may be named by either, by both (a
// pattern that matches both is one set), or by PREFIX.
inline std::vector<std::string> find_token_files(const std::string& pattern) {
    if (!path_exists(pattern) && is_regular_file(pattern + ".idx")) { return {pattern}; }
    const std::vector<std::string> found = expand_glob(pattern);
    std::vector<std::string> paths;
    for (const std::string& path : found) {
        const std::string bin = path.ends_with(".idx") ? path.substr(0, path.size() - 4) + ".bin" : "";
        if (bin.empty() || !std::binary_search(found.begin(), found.end(), bin)) { paths.push_back(path); }
    }
    return paths;
}
