// filter.h: documents that are left out while reading, as RedPajama-V2 is meant to be used: by conditions on its quality signals and on a
// record's own fields, and by a list of duplicates.
#pragma once

#include <simdjson.h>

#include <charconv>
#include <cmath>
#include <map>

#include "data/line_reader.h"
#include "llmc/shard.h"

struct FilterOptions {
    std::string signals;            // folder of X.signals.json.gz for each X.json.gz
    std::vector<std::string> keep;  // conditions that a document must meet, such as rps_doc_word_count>=50
    std::string drop_ids;           // file of ids, one a line
};

// A number or a text that a record has under a name.
struct FieldValue {
    std::optional<double> number;
    std::string text;
};
using Fields = std::map<std::string, FieldValue, std::less<>>;

struct Condition {
    std::string name, comparison, value, whole, unknown;  // unknown: the reason to drop a document that has no such value
    std::optional<double> number;

    explicit Condition(const std::string& text) : whole(text) {
        constexpr char SIGNS[] = "<>=!";
        const size_t begin = std::min(text.find_first_of(SIGNS), text.size());
        const size_t end = std::min(text.find_first_not_of(SIGNS, begin), text.size());
        name = trimmed(text.substr(0, begin));
        comparison = text.substr(begin, end - begin);
        value = trimmed(text.substr(end));
        unknown = name + " not known";
        double parsed = 0;
        // from_chars: a decimal comma in the locale must not change what 0.5 means.
        const auto [rest, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
        if (error == std::errc() && rest == value.data() + value.size() && std::isfinite(parsed)) { number = parsed; }
        const bool order = comparison == "<" || comparison == "<=" || comparison == ">" || comparison == ">=";
        const bool equality = comparison == "=" || comparison == "==" || comparison == "!=";
        if (name.empty() || value.empty() || !(equality || (order && number))) {
            usage_error(
                "--keep '%s': wanted NAME, then <, <=, > or >= and a number, or = or != and a number or a word\nHINT: --keep "
                "'rps_doc_word_count>=50' --keep 'bucket=head'",
                text.c_str());
        }
    }

    // Nothing if it cannot be told.
    std::optional<bool> holds(const FieldValue& found) const {
        if (number && found.number) {
            if (comparison == "<") { return *found.number < *number; }
            if (comparison == "<=") { return *found.number <= *number; }
            if (comparison == ">") { return *found.number > *number; }
            if (comparison == ">=") { return *found.number >= *number; }
            return (*found.number == *number) == (comparison != "!=");
        }
        if (comparison.front() == '<' || comparison.front() == '>' || found.number) { return {}; }
        return (found.text == value) == (comparison != "!=");
    }

private:
    static std::string trimmed(const std::string& text) {
        const size_t begin = std::min(text.find_first_not_of(' '), text.size());
        return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
    }
};

// Ids as their hashes: 8 bytes each. That one of n ids hits another document by chance has a probability of n / 2^64.
class IdSet {
public:
    IdSet() = default;
    explicit IdSet(const std::string& path) {
        check(path_exists(path), "--drop-ids '%s': %s", path.c_str(), strerror(errno));
        constexpr size_t LONGEST = 1 << 16;
        const InputFile file = input_file(path);
        LineReader reader(file);
        for (std::string line; reader.read_line(line, LONGEST) == LineReader::Line::whole; line.clear()) {
            while (!line.empty() && isspace((unsigned char)line.back())) { line.pop_back(); }
            if (!line.empty()) { hashes_.push_back(XXH3_64bits(line.data(), line.size())); }
            check_stop_signal();
        }
        check(!reader.stream().problem(), "--drop-ids '%s': %s", path.c_str(), reader.stream().problem()->what.c_str());
        std::sort(hashes_.begin(), hashes_.end());
    }
    bool contains(std::string_view id) const {
        return std::binary_search(hashes_.begin(), hashes_.end(), XXH3_64bits(id.data(), id.size()));
    }
    bool empty() const { return hashes_.empty(); }
    uint64_t hash() const { return XXH3_64bits(hashes_.data(), hashes_.size() * sizeof(uint64_t)); }

private:
    std::vector<uint64_t> hashes_;
};

// "2023-06/0003/en_head.json.gz/17": RedPajama-V2's name of the record in line 18 of documents/2023-06/0003/en_head.json.gz.
inline std::string document_id(const std::string& path, i64 line) {
    constexpr int COMPONENTS = 3;
    const std::string whole = std::filesystem::absolute(path).lexically_normal().string();
    size_t begin = whole.size();
    for (int i = 0; i < COMPONENTS && begin != std::string::npos && begin > 0; i++) { begin = whole.rfind('/', begin - 1); }
    return (begin == std::string::npos ? whole : whole.substr(begin + 1)) + "/" + std::to_string(line - 1);
}

class Filter {
public:
    explicit Filter(const FilterOptions& options) : options_(options) {
        for (const std::string& text : options.keep) { conditions_.emplace_back(text); }
        check(options.signals.empty() || is_directory(options.signals),
              "--signals '%s' is no folder\nHINT: the folder that mirrors documents/", options.signals.c_str());
        if (!options.drop_ids.empty()) { drop_ids_ = IdSet(options.drop_ids); }
    }

    bool active() const { return !conditions_.empty() || !options_.drop_ids.empty(); }
    const std::string& signals_folder() const { return options_.signals; }
    bool wants(std::string_view name) const {
        return std::any_of(conditions_.begin(), conditions_.end(), [&](const Condition& c) { return c.name == name; });
    }

    // Why a document is left out; empty: it is kept. The signals come before the record's own fields of the same name.
    std::string_view reason_to_drop(const std::string& path, i64 line, const Fields& fields, const Fields& signals) const {
        if (!drop_ids_.empty() && drop_ids_.contains(document_id(path, line))) { return IN_DROP_IDS; }
        for (const Condition& c : conditions_) {
            const FieldValue* found = nullptr;
            for (const Fields* named : {&fields, &signals}) {
                if (const auto at = named->find(c.name); at != named->end()) { found = &at->second; }
            }
            const std::optional<bool> holds = found ? c.holds(*found) : std::nullopt;
            if (!holds) { return c.unknown; }
            if (!*holds) { return c.whole; }
        }
        return {};
    }
    // Changes when what is kept would.
    nlohmann::ordered_json to_json() const {
        return {{"signals", options_.signals}, {"keep", options_.keep}, {"drop_ids", drop_ids_.empty() ? "" : hex64(drop_ids_.hash())}};
    }

private:
    static constexpr std::string_view IN_DROP_IDS = "in --drop-ids";
    FilterOptions options_;
    std::vector<Condition> conditions_;
    IdSet drop_ids_;
};

// ---------------------------------------------------------------------------------------------------------------
// Quality signals: {"id": ".../LINE", ..., "quality_signals": {NAME: [[begin, end, score], ...]}}, LINE from 0, in order, some missing.

// A value as a field; nothing for null, lists and objects.
inline simdjson::error_code read_field(simdjson::ondemand::value value, std::optional<FieldValue>& field) {
    simdjson::ondemand::json_type type;
    if (const auto error = value.type().get(type)) { return error; }
    if (type == simdjson::ondemand::json_type::number) {
        double number;
        if (const auto error = value.get_double().get(number)) { return error == simdjson::NUMBER_ERROR ? simdjson::SUCCESS : error; }
        field = FieldValue{number, ""};
    } else if (type == simdjson::ondemand::json_type::string) {
        std::string_view text;
        if (const auto error = value.get_string().get(text)) { return error; }
        field = FieldValue{{}, std::string(text)};
    }
    return simdjson::SUCCESS;
}

// The wanted scores of a whole document: the first entry of each list. False if the line is broken.
inline bool read_signals(std::string& line, const Filter& filter, simdjson::ondemand::parser& parser, Fields& signals) {
    line.reserve(line.size() + simdjson::SIMDJSON_PADDING);
    simdjson::ondemand::document doc;
    simdjson::ondemand::object object, scores;
    if (parser.iterate(simdjson::padded_string_view(line.data(), line.size(), line.capacity())).get(doc)) { return false; }
    if (doc.get_object().get(object) || object.find_field_unordered("quality_signals").get_object().get(scores)) { return false; }
    for (auto score : scores) {
        std::string_view name;
        if (score.unescaped_key().get(name)) { return false; }
        if (!filter.wants(name)) { continue; }
        simdjson::ondemand::array entries, entry;
        if (score.value().get_array().get(entries)) { return false; }
        for (auto first : entries) {
            if (first.get_array().get(entry)) { return false; }
            int place = 0;
            for (auto number : entry) {
                simdjson::ondemand::value value;
                std::optional<FieldValue> field;
                if (number.get(value) || (place == 2 && read_field(value, field))) { return false; }
                if (field) { signals[std::string(name)] = *field; }
                place++;
            }
            break;
        }
    }
    return true;
}

// Documents X.json.gz below any folder -> signals X.signals.json.gz below the signals' folder, at the same place as far up as that matches.
// "" if there is none.
inline std::string signals_path(const std::string& folder, const std::string& documents) {
    const size_t extension = documents.rfind(".json");
    if (extension == std::string::npos) { return ""; }
    const std::string name = documents.substr(0, extension) + ".signals" + documents.substr(extension);
    for (size_t begin = 0; begin != std::string::npos; begin = name.find('/', begin + 1)) {
        const std::string path = folder + "/" + name.substr(begin + (begin < name.size() && name[begin] == '/'));
        if (is_regular_file(path)) { return path; }
    }
    return "";
}

class SignalsReader {
public:
    SignalsReader(const std::string& path, const std::string& documents) : file_(input_file(path)), documents_(documents), reader_(file_) {}

    // The signals of the record in line `line` (from 1), "" if there are none. Lines must not go back. What is wrong is added to problems.
    std::string of_line(i64 line, std::vector<ProblemReport>& problems) {
        while (!ended_ && (!pending_ || pending_line_ < line)) { advance(problems); }
        if (!pending_ || pending_line_ != line) { return ""; }
        pending_ = false;
        return std::move(text_);
    }

private:
    static constexpr size_t LONGEST = 64 << 20;

    void advance(std::vector<ProblemReport>& problems) {
        text_.clear();
        pending_ = false;
        auto report = [&](const std::string& what) {
            problems.push_back({Problem::bad_signals, format("%s:%lld: %s", file_.path.c_str(), (long long)reader_.lines(), what.c_str())});
        };
        switch (reader_.read_line(text_, LONGEST)) {
            case LineReader::Line::none:
                ended_ = true;
                if (reader_.stream().problem()) { report(reader_.stream().problem()->what); }
                return;
            case LineReader::Line::too_long:
                return report("a line of more than 64 MiB; no signals from it");
            case LineReader::Line::whole:
                break;
        }
        std::string_view id;
        simdjson::ondemand::document doc;
        text_.reserve(text_.size() + simdjson::SIMDJSON_PADDING);
        if (parser_.iterate(simdjson::padded_string_view(text_.data(), text_.size(), text_.capacity())).get(doc) ||
            doc.find_field_unordered("id").get_string().get(id)) {
            return report("not a JSON object with an id; no signals from it");
        }
        const size_t slash = id.rfind('/');
        i64 number = -1;
        if (slash != std::string_view::npos) { std::from_chars(id.data() + slash + 1, id.data() + id.size(), number); }
        if (number < 0) { return report("its id does not end in /LINE; no signals from it"); }
        check(is_same_file(id.substr(0, slash)),
              "'%s' holds signals of '%.*s', not of '%s'\nHINT: --signals wants the folder that mirrors documents/", file_.path.c_str(),
              (int)slash, id.data(), documents_.c_str());
        if (number + 1 <= pending_line_) { return report("its id goes back; no signals from it"); }
        pending_line_ = number + 1;
        pending_ = true;
    }

    // Whether the shorter of the two paths is the end of the other.
    bool is_same_file(std::string_view named) const {
        const std::string a = "/" + documents_, b = "/" + std::string(named);
        return a.ends_with(b) || b.ends_with(a);
    }

    InputFile file_;
    std::string documents_;
    LineReader reader_;
    simdjson::ondemand::parser parser_;
    std::string text_;
    i64 pending_line_ = 0;  // of the last record that was read
    bool pending_ = false, ended_ = false;
};
