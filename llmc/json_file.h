// json_file.h: JSON as files hold it. Errors name the file and the key; values never depend on the locale.
#pragma once

#include <nlohmann/json.hpp>
#include <set>
#include <type_traits>

#include "base.h"

using json = nlohmann::json;

// Stricter than the library: a key that appears twice is refused (keeping either value would hide the other), and so is
// nesting that no file of ours has.
inline json parse_json(std::string_view text, const std::string& path) {
    std::vector<std::set<std::string>> keys;  // of every object that is open
    const auto inspect = [&](int depth, json::parse_event_t event, json& parsed) {
        check(depth < 32, "'%s' is not valid: JSON nested %d levels deep", path.c_str(), depth);
        if (event == json::parse_event_t::object_start) { keys.emplace_back(); }
        if (event == json::parse_event_t::object_end) { keys.pop_back(); }
        if (event == json::parse_event_t::key) {
            const std::string key = parsed.get<std::string>();
            check(keys.back().insert(key).second, "'%s' has the key '%.100s' twice", path.c_str(), key.c_str());
        }
        return true;
    };
    try {
        return json::parse(text.begin(), text.end(), inspect);
    } catch (const json::exception& e) { die("'%s' is not valid JSON: %.200s", path.c_str(), e.what()); }
}
inline json read_json(const std::string& path) { return parse_json(read_text_file(path), path); }

// object[key] as a T, exactly: 2.5 is no integer, 1 is no bool.
template <typename T>
T json_get(const json& object, const char* key, const std::string& path) {
    const auto it = object.is_object() ? object.find(key) : object.end();
    check(object.is_object() && it != object.end(), "'%s' has no '%s'", path.c_str(), key);
    bool fits = false;
    const char* wanted = "a string";
    if constexpr (std::is_same_v<T, bool>) {
        fits = it->is_boolean(), wanted = "true or false";
    } else if constexpr (std::is_same_v<T, i64>) {
        fits = it->is_number_integer() && !(it->is_number_unsigned() && it->template get<uint64_t>() > (uint64_t)INT64_MAX);
        wanted = "an integer";
    } else if constexpr (std::is_same_v<T, double>) {
        fits = it->is_number(), wanted = "a number";
    } else {
        static_assert(std::is_same_v<T, std::string>);
        fits = it->is_string();
    }
    check(fits, "'%s': '%s' is %.100s, wanted %s", path.c_str(), key, it->dump().c_str(), wanted);
    return it->template get<T>();
}

// The same, or `otherwise` where the key is absent or null.
template <typename T>
T json_get(const json& object, const char* key, const std::string& path, const T& otherwise) {
    const auto it = object.find(key);
    return it == object.end() || it->is_null() ? otherwise : json_get<T>(object, key, path);
}
