// documents.h: files -> documents of clean UTF-8 text. Reading and cutting are sequential (DocumentReader); parsing a document is not
// (parse_document), so that many threads can do it. Whatever is broken is counted and named, never passed on and never fatal by itself.
#pragma once

#include <simdjson.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>

#include "llmc/tokenizer.h"

// ---------------------------------------------------------------------------------------------------------------
// Problems

enum class Problem { bad_json, no_text_key, text_not_string, cut_file, invalid_utf8, lone_surrogate, COUNT };
constexpr const char* PROBLEM_NAMES[] = {"lines_not_json", "lines_without_text_key",      "text_not_a_string",
                                         "files_cut",      "documents_with_invalid_utf8", "documents_with_lone_surrogates"};
constexpr bool PROBLEM_SKIPS[] = {true,  true,  true,
                                  false, false, false};  // false: what is wrong is replaced by U+FFFD, or what came before is kept
static_assert(std::size(PROBLEM_NAMES) == (size_t)Problem::COUNT && std::size(PROBLEM_SKIPS) == (size_t)Problem::COUNT);

// ---------------------------------------------------------------------------------------------------------------
// Bytes: a file or standard input, unpacked if its first bytes are gzip's or zstd's.

class InputStream {
public:
    explicit InputStream(const std::string& path) : path_(path == "-" ? "/dev/stdin" : path), file_(path_, "rb") {
        refill();
        const std::string_view start(packed_.data(), packed_end_);
        kind_ = start.starts_with("\x1f\x8b") ? Kind::gzip : start.starts_with("\x28\xb5\x2f\xfd") ? Kind::zstd : Kind::plain;
        constexpr int WINDOW_BITS_GZIP = 15 + 16;
        if (kind_ == Kind::gzip) { check(inflateInit2(&gzip_, WINDOW_BITS_GZIP) == Z_OK, "zlib cannot start"); }
        if (kind_ == Kind::zstd) { zstd_ = ZSTD_createDStream(); }
        // Archives of web text are packed with `zstd --long`: allow the largest window there is.
        if (kind_ == Kind::zstd) {
            ZSTD_DCtx_setParameter(zstd_, ZSTD_d_windowLogMax, ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound);
        }
    }
    InputStream(const InputStream&) = delete;
    InputStream& operator=(const InputStream&) = delete;
    ~InputStream() {
        if (kind_ == Kind::gzip) { inflateEnd(&gzip_); }
        ZSTD_freeDStream(zstd_);
    }

    // Up to `bytes` bytes; 0 at the end, or where packed data is broken: then problem() says how.
    size_t read(char* out, size_t bytes) {
        while (problem_.empty()) {
            if (packed_begin_ == packed_end_) { refill(); }
            const bool at_end = packed_end_ == 0;
            size_t got = 0;
            switch (kind_) {
                case Kind::plain:
                    got = read_plain(out, bytes);
                    break;
                case Kind::gzip:
                    got = at_end ? 0 : read_gzip(out, bytes);
                    break;
                case Kind::zstd:
                    got = read_zstd(out, bytes);
                    break;
            }
            if (got > 0) { return got; }
            if (at_end) { break; }
        }
        if (problem_.empty() && !at_frame_end_) { problem_ = "the packed file is cut"; }
        return 0;
    }
    const std::string& problem() const { return problem_; }

private:
    enum class Kind { plain, gzip, zstd };

    void refill() {
        packed_begin_ = 0;
        packed_end_ = fread(packed_.data(), 1, packed_.size(), file_.handle());
        check(!ferror(file_.handle()), "cannot read '%s': %s", path_.c_str(), strerror(errno));
    }
    size_t read_plain(char* out, size_t bytes) {
        const size_t n = std::min(bytes, packed_end_ - packed_begin_);
        memcpy(out, packed_.data() + packed_begin_, n);
        packed_begin_ += n;
        return n;
    }
    size_t read_gzip(char* out, size_t bytes) {
        if (at_frame_end_) {
            while (packed_begin_ < packed_end_ && packed_[packed_begin_] == 0) { packed_begin_++; }  // tapes pad with zeros, as gzip knows
            if (packed_begin_ == packed_end_) { return 0; }
            inflateReset(&gzip_);  // the next member of a file that was packed in parts
        }
        gzip_.next_in = (Bytef*)packed_.data() + packed_begin_;
        gzip_.avail_in = packed_end_ - packed_begin_;
        gzip_.next_out = (Bytef*)out;
        gzip_.avail_out = bytes;
        const int status = inflate(&gzip_, Z_NO_FLUSH);
        packed_begin_ = packed_end_ - gzip_.avail_in;
        at_frame_end_ = status == Z_STREAM_END;
        if (status != Z_OK && status != Z_STREAM_END && status != Z_BUF_ERROR) {
            problem_ = format("the gzip data is broken (%s)", gzip_.msg ? gzip_.msg : "?");
        }
        return bytes - gzip_.avail_out;
    }
    size_t read_zstd(char* out, size_t bytes) {
        ZSTD_inBuffer in = {packed_.data(), packed_end_, packed_begin_};
        ZSTD_outBuffer to = {out, bytes, 0};
        const size_t status = ZSTD_decompressStream(zstd_, &to, &in);  // goes on to the next frame by itself
        if (ZSTD_isError(status)) { problem_ = format("the zstd data is broken (%s)", ZSTD_getErrorName(status)); }
        if (in.pos > packed_begin_ || to.pos > 0) { at_frame_end_ = status == 0; }
        packed_begin_ = in.pos;
        return to.pos;
    }

    std::string path_;
    File file_;
    Kind kind_;
    std::vector<char> packed_ = std::vector<char>(1 << 20);
    size_t packed_begin_ = 0, packed_end_ = 0;
    bool at_frame_end_ = true;
    z_stream gzip_ = {};
    ZSTD_DStream* zstd_ = nullptr;
    std::string problem_;
};

// ---------------------------------------------------------------------------------------------------------------
// Documents as they lie in the files

struct ReadOptions {
    std::string input_format = "auto";  // auto, jsonl, txt
    std::string text_key = "text";
    std::string doc_separator;  // .txt: a line equal to this ends a document; "blank-lines": an empty line does
    i64 split_bytes = 0;        // .txt: a document ends at the first line end from this many bytes on; 0: it does not
};

struct RawDocument {
    std::string bytes;
    std::string file;
    i64 line = 0;     // where it begins, from 1
    i64 ordinal = 0;  // among all documents of all inputs, broken ones included: skipping one must not move the others
    bool json = false;
    std::string cut;  // not empty: no document, but why `file` ended too early
};

// SentencePiece takes some 30 times a text's size in memory, and one document is one text.
constexpr size_t MAX_DOCUMENT_BYTES = 256 << 20;

inline bool is_json_name(std::string name) {
    for (const char* packed : {".gz", ".zst"}) {
        if (name.ends_with(packed)) { name.resize(name.size() - strlen(packed)); }
    }
    return name.ends_with(".jsonl") || name.ends_with(".json");
}
inline bool is_text_name(const std::string& name) {
    return name.ends_with(".txt") || name.ends_with(".txt.gz") || name.ends_with(".txt.zst");
}

// Adds the text files in a folder and below it. One that cannot be read, such as a link to nothing, is an error: its text would be missed.
inline void list_folder(const std::string& folder, std::vector<std::string>& files) {
    std::error_code error;
    std::filesystem::recursive_directory_iterator entry(folder, error), end;
    for (; !error && entry != end; entry.increment(error)) {
        const std::string path = entry->path().string();
        if (!is_json_name(path) && !is_text_name(path)) { continue; }
        std::error_code file_error;
        if (entry->is_regular_file(file_error)) { files.push_back(path); }
        check(!file_error, "input '%s': %s\nHINT: remove it, or pass the files one by one", path.c_str(), file_error.message().c_str());
    }
    check(!error, "cannot list the input folder '%s' and those in it: %s", folder.c_str(), error.message().c_str());
}

// Files as given; a folder stands for the text files in it and below, sorted by path.
inline std::vector<std::string> list_inputs(const std::vector<std::string>& inputs, const std::string& input_format) {
    std::vector<std::string> files;
    for (const std::string& input : inputs) {
        if (!is_directory(input)) {
            check(input == "-" || path_exists(input), "input '%s': %s", input.c_str(), strerror(errno));
            if (input != "-" && input_format == "auto" && !is_json_name(input) && !is_text_name(input)) {
                usage_error(
                    "input '%s': wanted a name that ends in .jsonl or .txt (or that and .gz or .zst)\nHINT: --format jsonl or --format txt "
                    "says what it is",
                    input.c_str());
            }
            files.push_back(input);
            continue;
        }
        const size_t first = files.size();
        list_folder(input, files);
        check(files.size() > first, "input folder '%s' holds no .jsonl or .txt file", input.c_str());
        std::sort(files.begin() + first, files.end());
    }
    return files;
}

class DocumentReader {
public:
    DocumentReader(std::vector<std::string> files, ReadOptions options) : files_(std::move(files)), options_(std::move(options)) {}

    // False at the end of the last file.
    bool next(RawDocument& doc) {
        while (stream_ || next_file_ < files_.size()) {
            if (!stream_) { open_next(); }
            if (read_document(doc)) {
                doc.ordinal = ordinal_++;
                return true;
            }
            const std::string problem = stream_->problem();
            stream_.reset();
            if (!problem.empty()) {
                doc = {"", files_[next_file_ - 1], line_, ordinal_, json_, problem};
                return true;
            }
        }
        return false;
    }

private:
    void open_next() {
        const std::string& file = files_[next_file_++];
        stream_ = std::make_unique<InputStream>(file);
        line_ = 0;
        begin_ = end_ = 0;
        fill();
        const std::string_view start(buffer_.data(), end_);
        check(!start.starts_with("\xFF\xFE") && !start.starts_with("\xFE\xFF"),
              "input '%s' is UTF-16; wanted UTF-8\nHINT: iconv -f UTF-16 -t UTF-8", file.c_str());
        if (start.starts_with("\xEF\xBB\xBF")) { begin_ = 3; }  // UTF-8's byte order mark is no text
        const size_t first = start.find_first_not_of(" \t\r\n", begin_);
        const bool looks_json = first != std::string_view::npos && start[first] == '{';
        json_ =
            options_.input_format == "jsonl" || (options_.input_format == "auto" && (is_json_name(file) || (file == "-" && looks_json)));
    }

    bool fill() {
        begin_ = 0;
        end_ = stream_->read(buffer_.data(), buffer_.size());
        return end_ > 0;
    }

    // Appends the next line, with its end. False if there is none.
    bool read_line(std::string& line) {
        const size_t before = line.size();
        while (begin_ < end_ || fill()) {
            const char* from = buffer_.data() + begin_;
            const char* newline = (const char*)memchr(from, '\n', end_ - begin_);
            const size_t n = newline ? newline - from + 1 : end_ - begin_;
            line.append(from, n);
            begin_ += n;
            check(line.size() <= MAX_DOCUMENT_BYTES,
                  "input '%s': a document from line %lld on has more than %zu MiB\nHINT: cut it with --split-documents or --doc-separator",
                  files_[next_file_ - 1].c_str(), (long long)first_line_, MAX_DOCUMENT_BYTES >> 20);
            if (newline) { break; }
        }
        line_ += line.size() > before;
        return line.size() > before;
    }

    bool is_separator(std::string_view line) const {
        if (options_.doc_separator.empty()) { return false; }
        while (line.ends_with('\n') || line.ends_with('\r')) { line.remove_suffix(1); }
        return options_.doc_separator == "blank-lines" ? line.empty() : line == options_.doc_separator;
    }

    bool read_document(RawDocument& doc) {
        doc = {"", files_[next_file_ - 1], 0, 0, json_, ""};
        while (true) {
            const size_t before = doc.bytes.size();
            if (before == 0) { first_line_ = line_ + 1; }
            doc.line = first_line_;
            if (!read_line(doc.bytes)) { return before > 0; }
            const std::string_view line = std::string_view(doc.bytes).substr(before);
            if (json_) {
                if (line.find_first_not_of(" \t\r\n") != std::string_view::npos) { return true; }
                doc.bytes.clear();  // a blank line between records means nothing
            } else if (is_separator(line)) {
                doc.bytes.resize(before);
                if (before > 0) { return true; }
            } else if (options_.split_bytes > 0 && (i64)doc.bytes.size() >= options_.split_bytes) {
                return true;
            }
        }
    }

    std::vector<std::string> files_;
    ReadOptions options_;
    size_t next_file_ = 0;
    std::unique_ptr<InputStream> stream_;
    std::vector<char> buffer_ = std::vector<char>(1 << 20);
    size_t begin_ = 0, end_ = 0;
    i64 line_ = 0, first_line_ = 1, ordinal_ = 0;
    bool json_ = false;
};

// ---------------------------------------------------------------------------------------------------------------
// Documents as text

struct ProblemReport {
    Problem problem;
    std::string where_and_what;
};
struct Document {
    std::string text;
    bool skipped = false;
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

// The text under `key` of a JSON object, wherever it stands in it.
inline std::optional<Problem> extract_text(const std::string& line, const std::string& key, simdjson::ondemand::parser& parser,
                                           std::string& text) {
    const simdjson::padded_string padded(line);
    simdjson::ondemand::document doc;
    simdjson::ondemand::object object;
    if (parser.iterate(padded).get(doc) || doc.get_object().get(object)) { return Problem::bad_json; }
    bool found = false, is_string = false;
    // To the end of the object, not only to the key: a line that is cut after it is broken all the same.
    for (auto field : object) {
        std::string_view name, value;
        if (field.unescaped_key().get(name)) { return Problem::bad_json; }
        if (name != key) { continue; }
        found = true;
        simdjson::ondemand::json_type type;
        if (field.value().type().get(type)) { return Problem::bad_json; }
        is_string = type == simdjson::ondemand::json_type::string;
        if (!is_string) { continue; }
        if (field.value().get_string().get(value)) { return Problem::bad_json; }
        text = value;
    }
    if (doc.current_location().error() != simdjson::OUT_OF_BOUNDS) { return Problem::bad_json; }  // something follows the object
    if (!found) { return Problem::no_text_key; }
    if (!is_string) { return Problem::text_not_string; }
    return {};
}

inline Document parse_document(RawDocument& raw, const ReadOptions& options, simdjson::ondemand::parser& parser) {
    Document doc;
    auto report = [&](Problem problem, const std::string& what) {
        doc.problems.push_back(
            {problem, format("%s:%lld: %s", raw.file == "-" ? "(standard input)" : raw.file.c_str(), (long long)raw.line, what.c_str())});
        doc.skipped = doc.skipped || PROBLEM_SKIPS[(int)problem];
    };
    if (!raw.cut.empty()) {
        report(Problem::cut_file, raw.cut + "; what came before is kept");
        doc.skipped = true;
        return doc;
    }
    const bool valid = simdjson::validate_utf8(raw.bytes.data(), raw.bytes.size());
    if (const i64 bytes = valid ? 0 : repair_utf8(raw.bytes)) {
        report(Problem::invalid_utf8, format("%lld byte(s) are not UTF-8; each became U+FFFD", (long long)bytes));
    }
    if (!raw.json) {
        doc.text = std::move(raw.bytes);
        return doc;
    }
    if (const i64 halves = repair_lone_surrogates(raw.bytes)) {
        report(Problem::lone_surrogate, format("%lld half character(s) (\\ud800 to \\udfff alone); each became U+FFFD", (long long)halves));
    }
    const std::optional<Problem> problem = extract_text(raw.bytes, options.text_key, parser, doc.text);
    if (problem == Problem::bad_json) { report(*problem, "not a whole JSON object; skipped"); }
    if (problem == Problem::no_text_key) { report(*problem, "no key '" + options.text_key + "'; skipped (--text-key names another)"); }
    if (problem == Problem::text_not_string) { report(*problem, "the value of '" + options.text_key + "' is not a string; skipped"); }
    return doc;
}
