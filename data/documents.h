// documents.h: files -> documents of clean UTF-8 text. Reading and cutting are sequential (DocumentReader); parsing a document is not
// (parse_document), so that many threads can do it. Whatever is broken is counted and named, never passed on and never fatal by itself.
#pragma once

#include <simdjson.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <memory>

#include "data/filter.h"
#include "llmc/tokenizer.h"

// ---------------------------------------------------------------------------------------------------------------
// Documents as they lie in the files

struct ReadOptions {
    std::string input_format = "auto";  // auto, jsonl, txt
    std::string text_key = "text";
    std::string doc_separator;  // .txt: a line equal to this ends a document; "blank-lines": an empty line does
    i64 split_bytes = 0;        // .txt: a document ends at the first line end from this many bytes on; 0: it does not
};

// Between two documents: all that is needed to go on from there.
struct InputPosition {
    i64 file = 0, offset = 0, line = 0;  // offset in the unpacked text, lines before it
    i64 ordinal = 0;                     // documents before it
    uint64_t start_hash = 0;             // of the file's first bytes
    bool operator==(const InputPosition&) const = default;
};

struct RawDocument {
    size_t begin = 0, size = 0;  // in the text that it was read into
    const InputFile* file = nullptr;
    i64 line = 0;     // where it begins, from 1
    i64 ordinal = 0;  // among all documents of all inputs, broken ones included: skipping one must not move the others
    bool json = false;
    std::string signals;                  // its line of quality signals
    std::optional<InputProblem> broken;   // no document, but this
    std::vector<ProblemReport> problems;  // found while reading
    InputPosition after;

    std::string_view in(const std::string& text) const { return std::string_view(text).substr(begin, size); }
};

// A document is held in memory as a whole, with its text and its ids.
constexpr size_t MAX_DOCUMENT_BYTES = 128 << 20;

inline bool is_json_name(std::string name) {
    for (const char* packed : {".gz", ".zst"}) {
        if (name.ends_with(packed)) { name.resize(name.size() - strlen(packed)); }
    }
    return name.ends_with(".jsonl") || name.ends_with(".json");
}
inline bool is_text_name(const std::string& name) {
    return name.ends_with(".txt") || name.ends_with(".txt.gz") || name.ends_with(".txt.zst");
}

// A side file of token shards or the state of a run, which may lie among the texts: ./tokenize wrote it.
inline bool is_own_json(const std::string& path) {
    if (!path.ends_with(".json")) { return false; }
    const File file(path, "rb");
    std::string start(std::min<i64>(file.size(), 64), '\0');
    file.read_at(start.data(), start.size(), 0);
    std::erase_if(start, [](char c) { return c == ' ' || c == '\n'; });
    return start.starts_with("{\"format\":\"token-set-") || start.starts_with("{\"format\":\"tokenize-resume-");
}

// Adds the text files in a folder and below it. One that cannot be read, such as a link to nothing, is an error: its text would be missed.
inline void list_folder(const std::string& folder, std::vector<InputFile>& files) {
    std::error_code error;
    std::filesystem::recursive_directory_iterator entry(folder, error), end;
    for (; !error && entry != end; entry.increment(error)) {
        const std::string path = entry->path().string();
        if (!is_json_name(path) && !is_text_name(path)) { continue; }
        std::error_code file_error;
        if (entry->is_regular_file(file_error) && !is_own_json(path)) { files.push_back({path, (i64)entry->file_size(file_error)}); }
        check(!file_error, "input '%s': %s\nHINT: remove it, or pass the files one by one", path.c_str(), file_error.message().c_str());
    }
    check(!error, "cannot list the input folder '%s' and those in it: %s", folder.c_str(), error.message().c_str());
}

// A file that comes twice, such as by its name and in its folder, would double its documents.
inline void check_each_once(const std::vector<InputFile>& files) {
    std::map<std::pair<dev_t, ino_t>, const InputFile*> seen;
    for (const InputFile& file : files) {
        struct stat st;
        if ((file.path == "-" ? fstat(STDIN_FILENO, &st) : stat(file.path.c_str(), &st)) != 0) { continue; }
        const auto [first, is_new] = seen.insert({{st.st_dev, st.st_ino}, &file});
        if (!is_new) {
            usage_error(
                "inputs '%s' and '%s' are the same file: its documents would come twice\nHINT: give it once; a weight in training "
                "(--train 2:...) makes a source count more",
                first->second->path.c_str(), file.path.c_str());
        }
    }
}

// Files as given; a folder stands for the text files in it and below, sorted by path.
inline std::vector<InputFile> list_inputs(const std::vector<std::string>& inputs, const std::string& input_format) {
    std::vector<InputFile> files;
    for (const std::string& input : inputs) {
        if (!is_directory(input)) {
            check(input == "-" || path_exists(input), "input '%s': %s", input.c_str(), strerror(errno));
            if (input != "-" && input_format == "auto" && !is_json_name(input) && !is_text_name(input)) {
                usage_error(
                    "input '%s': wanted a name that ends in .jsonl or .txt (or that and .gz or .zst)\nHINT: --format jsonl or --format txt "
                    "says what it is",
                    input.c_str());
            }
            files.push_back(input_file(input));
            continue;
        }
        const size_t first = files.size();
        list_folder(input, files);
        check(files.size() > first, "input folder '%s' holds no .jsonl or .txt file", input.c_str());
        std::sort(files.begin() + first, files.end(), [](const InputFile& a, const InputFile& b) { return a.path < b.path; });
    }
    check_each_once(files);
    return files;
}

class DocumentReader {
public:
    // files and filter must live as long as this. Goes on from `from`.
    DocumentReader(const std::vector<InputFile>& files, const ReadOptions& options, const Filter& filter, const InputPosition& from = {})
        : files_(files), options_(options), filter_(filter), position_(from) {
        for (i64 f = 0; f < from.file; f++) { packed_before_ += std::max<i64>(files_[f].size, 0); }
        packed_done_ = packed_before_;
    }

    // Bytes of the files that are used up, as they lie there; for progress, from any thread.
    i64 packed_done() const { return packed_done_; }
    // Whether next() goes on in a packed file; from the thread that calls it.
    bool unpacks_file() const { return lines_ && lines_->stream().unpacks_file(); }

    // The next document, whose bytes are appended to `text`; behind them is room for LINE_PADDING. False at the end of the last file.
    bool next(RawDocument& doc, std::string& text) {
        while (position_.file < (i64)files_.size()) {
            doc = {};
            doc.begin = text.size();
            doc.file = &files_[position_.file];
            doc.ordinal = position_.ordinal;
            if (!lines_) { open_file(doc); }
            doc.json = json_;
            bool found = !doc.broken && read_document(doc, text);
            doc.size = text.size() - doc.begin;
            if (text.capacity() < text.size() + LINE_PADDING) { text.reserve(text.size() + LINE_PADDING); }
            if (found) {
                position_.ordinal++;
                position_.offset = lines_->offset();
                position_.line = lines_->lines();
                packed_done_ = packed_before_ + lines_->stream().packed_done();
                if (signals_) { doc.signals = signals_->of_line(doc.line, doc.problems); }
            } else {
                doc.line = std::max<i64>(lines_->lines(), 1);
                if (!doc.broken) { doc.broken = lines_->stream().problem(); }
                if (!doc.broken && lines_->offset() == 0) { doc.broken = {Problem::empty_file, "it is empty"}; }
                found = doc.broken.has_value();
                close_file();
            }
            doc.after = position_;
            if (found) { return true; }
        }
        return false;
    }

private:
    void open_file(RawDocument& doc) {
        const InputFile& file = files_[position_.file];
        lines_ = std::make_unique<LineReader>(file);
        const std::string_view start = lines_->start();
        if (start.starts_with("\xFF\xFE") || start.starts_with("\xFE\xFF")) {
            doc.broken = {Problem::utf16_file, "it is UTF-16, wanted UTF-8; skipped (iconv -f UTF-16 -t UTF-8 makes it)"};
            return;
        }
        const bool marked = start.starts_with("\xEF\xBB\xBF");  // UTF-8's byte order mark is no text
        const size_t first = start.find_first_not_of(" \t\r\n", marked ? 3 : 0);
        const bool looks_json = first != std::string_view::npos && start[first] == '{';
        json_ = options_.input_format == "jsonl" ||
                (options_.input_format == "auto" && (is_json_name(file.path) || (file.path == "-" && looks_json)));
        const bool resumed = position_.offset > 0;
        check(!resumed || position_.start_hash == lines_->stream().start_hash(),
              "input '%s' is not the one that was read before: it starts otherwise", file.path.c_str());
        if (!resumed) { position_.offset = marked ? 3 : 0; }
        check(lines_->go_to(position_.offset, position_.line),
              "input '%s' ends before byte %lld of its text, up to which it was read before", file.path.c_str(),
              (long long)position_.offset);
        position_.start_hash = lines_->stream().start_hash();
        if (json_ && !filter_.signals_folder().empty()) { open_signals(file, resumed, doc.problems); }
    }
    void open_signals(const InputFile& file, bool resumed, std::vector<ProblemReport>& problems) {
        const std::string path = signals_path(filter_.signals_folder(), file.path);
        if (!path.empty()) {
            signals_ = std::make_unique<SignalsReader>(path, file.path);
            std::vector<ProblemReport> seen_before;
            if (resumed) { signals_->of_line(position_.line, seen_before); }
        } else if (!resumed) {
            problems.push_back(
                {Problem::no_signals, format("%s: no signals of it in '%s'", file.path.c_str(), filter_.signals_folder().c_str())});
        }
    }
    void close_file() {
        packed_before_ += std::max<i64>(files_[position_.file].size, 0);
        packed_done_ = packed_before_;
        lines_.reset();
        signals_.reset();
        position_ = {position_.file + 1, 0, 0, position_.ordinal, 0};
    }

    bool is_separator(std::string_view line) const {
        if (options_.doc_separator.empty()) { return false; }
        while (line.ends_with('\n') || line.ends_with('\r')) { line.remove_suffix(1); }
        return options_.doc_separator == "blank-lines" ? line.empty() : line == options_.doc_separator;
    }

    bool read_document(RawDocument& doc, std::string& text) {
        while (true) {
            const size_t before = text.size();
            const bool is_first = before == doc.begin;
            if (is_first) { doc.line = lines_->lines() + 1; }
            const LineReader::Line found = lines_->read_line(text, doc.begin + MAX_DOCUMENT_BYTES);
            if (found == LineReader::Line::none) { return !is_first; }
            if (found == LineReader::Line::too_long) {
                text.resize(doc.begin);
                doc.broken = {Problem::too_long, format("a %s of more than %zu MiB; skipped%s", json_ ? "line" : "document",
                                                        MAX_DOCUMENT_BYTES >> 20, json_ ? "" : " (--split-documents cuts it)")};
                if (!json_ && options_.split_bytes == 0) { pass_to_separator(); }
                return true;
            }
            const std::string_view line = std::string_view(text).substr(before);
            if (json_) {
                if (line.find_first_not_of(" \t\r\n") != std::string_view::npos) { return true; }
                text.resize(doc.begin);  // a blank line between records means nothing
            } else if (is_separator(line)) {
                text.resize(before);
                if (!is_first) { return true; }
            } else if (options_.split_bytes > 0 && (i64)(text.size() - doc.begin) >= options_.split_bytes) {
                return true;
            }
        }
    }

    void pass_to_separator() {
        std::string line;
        LineReader::Line found;
        do {
            line.clear();
            found = lines_->read_line(line, MAX_DOCUMENT_BYTES);
        } while (found == LineReader::Line::too_long || (found == LineReader::Line::whole && !is_separator(line)));
    }

    const std::vector<InputFile>& files_;
    const ReadOptions options_;
    const Filter& filter_;
    InputPosition position_;
    std::unique_ptr<LineReader> lines_;  // of the file of the position; none: to be opened
    std::unique_ptr<SignalsReader> signals_;
    bool json_ = false;
    i64 packed_before_ = 0;
    std::atomic<i64> packed_done_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------
// Documents as text

struct Document {
    std::string_view text;  // into the raw document or into the parsers, until the next one
    bool skipped = false;
    std::string_view dropped;  // not empty: the filter's reason
    std::vector<ProblemReport> problems;
};

// In JSON, \ud83d\ude00 is one character written as two halves; a half alone is none. Writes \ufffd for it. Returns how many.
inline i64 repair_lone_surrogates(std::string& json) {
    auto unit = [&](size_t at) -> int {  // the value of \uXXXX at `at`, or -1
        if (at + 6 > json.size() || json[at] != '\\' || json[at + 1] != 'u') { return -1; }
        int value = 0;
        for (size_t i = at + 2; i < at + 6; i++) {
            const char c = json[i];
            const int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
            if (digit < 0) { return -1; }
            value = value * 16 + digit;
        }
        return value;
    };
    i64 replaced = 0;
    for (size_t at = json.find('\\'); at != std::string::npos; at = json.find('\\', at)) {
        const int first = unit(at), second = first >= 0 ? unit(at + 6) : -1;
        if (first < 0xD800 || first > 0xDFFF) {
            at += first >= 0 ? 6 : 2;
        } else if (first <= 0xDBFF && second >= 0xDC00 && second <= 0xDFFF) {
            at += 12;
        } else {
            json.replace(at, 6, "\\ufffd");
            replaced++;
            at += 6;
        }
    }
    return replaced;
}

// One for each thread: it keeps its memory, and a document's text lies in it.
struct Parsers {
    simdjson::ondemand::parser documents, signals;
    std::string repaired;
};

// Is a value that nobody asked for JSON? simdjson passes over it with a look at its brackets only. That what looks like a string is UTF-8 and
// has no control characters, it has seen already.
class JsonChecker {
public:
    explicit JsonChecker(std::string_view text) : at_(text.data()), end_(at_ + text.size()) {}

    // A value of an object, and behind it its end or a comma.
    bool field_value() { return value(0) && (next() == ',' || next() == '}'); }

private:
    bool value(int depth) {
        constexpr int MAX_DEPTH = 1000;  // each takes some of the stack
        if (depth > MAX_DEPTH) { return false; }
        switch (next()) {
            case '{':
                return list('}', [&] { return next() == '"' && string() && take(':') && value(depth + 1); });
            case '[':
                return list(']', [&] { return value(depth + 1); });
            case '"':
                return string();
            case 't':
                return literal("true");
            case 'f':
                return literal("false");
            case 'n':
                return literal("null");
            default:
                return number();
        }
    }
    char peek() const { return at_ < end_ ? *at_ : '\0'; }
    char next() {
        while (peek() == ' ' || peek() == '\t' || peek() == '\r' || peek() == '\n') { at_++; }
        return peek();
    }
    bool take(char c) {
        const bool found = next() == c;
        at_ += found;
        return found;
    }
    template <typename Item>
    bool list(char close, Item item) {
        at_++;
        if (take(close)) { return true; }
        do {
            if (!item()) { return false; }
        } while (take(','));
        return take(close);
    }
    bool literal(std::string_view word) {
        const bool found = std::string_view(at_, end_ - at_).starts_with(word);
        at_ += found ? word.size() : 0;
        return found;
    }
    bool string() {
        for (at_++; at_ < end_ && *at_ != '"'; at_++) {
            if (*at_ != '\\') { continue; }
            at_++;
            if (peek() == 'u') {
                for (int i = 0; i < 4; i++) {
                    at_++;
                    if (!isxdigit((unsigned char)peek())) { return false; }
                }
            } else if (peek() == '\0' || strchr("\"\\/bfnrt", peek()) == nullptr) {
                return false;
            }
        }
        return take('"');
    }
    bool digits() {
        const char* first = at_;
        while (isdigit((unsigned char)peek())) { at_++; }
        return at_ > first;
    }
    bool number() {
        const auto one_of = [&](std::string_view any) {
            const bool found = at_ < end_ && any.find(*at_) != std::string_view::npos;
            at_ += found;
            return found;
        };
        one_of("-");
        if (!one_of("0") && !digits()) { return false; }
        if (one_of(".") && !digits()) { return false; }
        if (!one_of("eE")) { return true; }
        one_of("+-");
        return digits();
    }

    const char *at_, *end_;
};

constexpr char RAW_CONTENT[] = "raw_content";  // RedPajama-V2's key of the text

// The text under `key` of a JSON object, wherever it stands in it, and the fields that the filter wants.
struct Extracted {
    std::optional<Problem> problem;
    std::string_view text;
    Fields fields;
    bool has_raw_content = false;
};
// LINE_PADDING bytes behind the line are there to be read, whatever they are.
inline Extracted extract_text(std::string_view line, const std::string& key, const Filter& filter, simdjson::ondemand::parser& parser) {
    static_assert(LINE_PADDING >= simdjson::SIMDJSON_PADDING);
    Extracted out = {Problem::bad_json, {}, {}, false};
    simdjson::ondemand::document doc;
    simdjson::ondemand::object object;
    if (parser.iterate(simdjson::padded_string_view(line.data(), line.size(), line.size() + LINE_PADDING)).get(doc)) { return out; }
    if (doc.get_object().get(object)) { return out; }
    bool found = false, is_string = false;
    const auto is_whole = [&](simdjson::ondemand::value value) {
        return JsonChecker(line.substr(value.raw_json_token().data() - line.data())).field_value();
    };
    // To the end of the object, not only to the key: a line that is cut after it is broken all the same.
    for (auto field : object) {
        std::string_view name;
        if (field.unescaped_key().get(name)) { return out; }
        simdjson::ondemand::value value = field.value();
        if (name == key) {
            found = true;
            simdjson::ondemand::json_type type;
            if (value.type().get(type)) { return out; }
            is_string = type == simdjson::ondemand::json_type::string;
            const bool whole = is_string ? !value.get_string().get(out.text) : is_whole(value);
            if (!whole) { return out; }
            continue;
        }
        if (filter.wants(name)) {
            std::optional<FieldValue> read;
            if (read_field(value, read)) { return out; }
            if (read) { out.fields[std::string(name)] = *read; }
        }
        out.has_raw_content = out.has_raw_content || name == RAW_CONTENT;
        if (!is_whole(value)) { return out; }
    }
    if (doc.current_location().error() != simdjson::OUT_OF_BOUNDS) { return out; }  // something follows the object
    out.problem = !found ? std::optional(Problem::no_text_key) : !is_string ? std::optional(Problem::text_not_string) : std::nullopt;
    return out;
}

// Each says what it replaced. Returns whether there was anything.
template <typename Report>
bool repair_bytes(std::string& text, Report report) {
    const i64 bytes = repair_utf8(text);
    if (bytes > 0) { report(Problem::invalid_utf8, format("%lld byte(s) are not UTF-8; each became U+FFFD", (long long)bytes)); }
    return bytes > 0;
}
template <typename Report>
bool repair_json(std::string& line, Report report) {
    const bool repaired = repair_bytes(line, report);
    const i64 halves = repair_lone_surrogates(line);
    if (halves > 0) {
        report(Problem::lone_surrogate, format("%lld half character(s) (\\ud800 to \\udfff alone); each became U+FFFD", (long long)halves));
    }
    return repaired || halves > 0;
}

// `bytes`: those of raw, with LINE_PADDING behind them.
inline Document parse_document(RawDocument& raw, std::string_view bytes, const ReadOptions& options, const Filter& filter, Parsers& parsers) {
    Document doc;
    doc.problems = std::move(raw.problems);
    auto report = [&](Problem problem, const std::string& what) {
        const char* name = raw.file->path == "-" ? "(standard input)" : raw.file->path.c_str();
        doc.problems.push_back({problem, format("%s:%lld: %s", name, (long long)raw.line, what.c_str())});
        doc.skipped = doc.skipped || PROBLEM_KINDS[(int)problem].skips;
    };
    if (raw.broken) {
        const bool file_ends = !PROBLEM_KINDS[(int)raw.broken->problem].skips;
        report(raw.broken->problem, raw.broken->what + (file_ends ? "; what came before is kept" : ""));
        doc.skipped = true;
        return doc;
    }
    Fields fields, signals;
    if (raw.json) {
        Extracted found = extract_text(bytes, options.text_key, filter, parsers.documents);
        // simdjson refuses bytes that are not UTF-8, and most halves; this version of it lets some halves through. Whole documents, nearly
        // all, need no search for either.
        const bool odd = found.problem == Problem::bad_json || !simdjson::validate_utf8(found.text.data(), found.text.size());
        if (odd && repair_json(parsers.repaired.assign(bytes), report)) {
            parsers.repaired.reserve(parsers.repaired.size() + LINE_PADDING);
            found = extract_text(parsers.repaired, options.text_key, filter, parsers.documents);
        }
        doc.text = found.text;
        fields = std::move(found.fields);
        if (found.problem == Problem::bad_json) { report(Problem::bad_json, "not a whole JSON object; skipped"); }
        if (found.problem == Problem::no_text_key) {
            report(Problem::no_text_key, format("no key '%s'; skipped (%s)", options.text_key.c_str(),
                                                found.has_raw_content ? "it has 'raw_content', as RedPajama-V2: --text-key raw_content"
                                                                      : "--text-key names another"));
        }
        if (found.problem == Problem::text_not_string) {
            report(Problem::text_not_string, "the value of '" + options.text_key + "' is not a string; skipped");
        }
    } else {
        const bool valid = simdjson::validate_utf8(bytes.data(), bytes.size());
        if (!valid) { repair_bytes(parsers.repaired.assign(bytes), report); }
        doc.text = valid ? bytes : parsers.repaired;
    }
    if (!raw.signals.empty() && !read_signals(raw.signals, filter, parsers.signals, signals)) {
        report(Problem::bad_signals, "its signals are not a whole JSON object; none are used");
    }
    if (!doc.skipped && filter.active()) { doc.dropped = filter.reason_to_drop(raw.file->path, raw.line, fields, signals); }
    if (!doc.skipped && doc.dropped.empty() && doc.text.empty()) { report(Problem::no_text, "no text; skipped"); }
    return doc;
}
