// line_reader.h: an input's lines one by one, with the place of each in the unpacked text, and from any such place on.
#pragma once

#include "data/input_stream.h"

// Room behind each line, so that simdjson parses it where it lies (its SIMDJSON_PADDING, checked where that is known).
constexpr size_t LINE_PADDING = 64;

class LineReader {
public:
    explicit LineReader(const InputFile& file) : stream_(file) { fill(); }

    // What the input starts with, up to the buffer's size; before the first read_line().
    std::string_view start() const { return {buffer_.data() + begin_, end_ - begin_}; }
    const InputStream& stream() const { return stream_; }
    i64 offset() const { return buffer_offset_ + (i64)begin_; }  // of the next line, in bytes of unpacked text
    i64 lines() const { return lines_; }                         // before it

    // Goes on from a place that offset() and lines() gave. False if the input ends before it.
    bool go_to(i64 offset, i64 lines) {
        lines_ = lines;
        const i64 ahead = offset - (buffer_offset_ + (i64)end_);
        if (ahead <= 0) {
            begin_ = end_ + ahead;
            return true;
        }
        buffer_offset_ = offset;
        begin_ = end_ = 0;
        return stream_.skip(ahead);
    }

    enum class Line { none, whole, too_long };
    // Appends the next line, with its end. Of one that makes `line` longer than `limit` only the start is kept, the rest is passed over.
    Line read_line(std::string& line, size_t limit) {
        Line found = Line::none;
        while (begin_ < end_ || fill()) {
            const char* from = buffer_.data() + begin_;
            const char* newline = (const char*)memchr(from, '\n', end_ - begin_);
            const size_t n = newline ? newline - from + 1 : end_ - begin_;
            if (found == Line::none) { found = Line::whole; }
            if (line.size() + n > limit) { found = Line::too_long; }
            if (found == Line::whole) {
                if (newline) { line.reserve(line.size() + n + LINE_PADDING); }
                line.append(from, n);
            }
            begin_ += n;
            if (newline) { break; }
        }
        lines_ += found != Line::none;
        return found;
    }

private:
    bool fill() {
        buffer_offset_ += end_;
        begin_ = 0;
        end_ = stream_.read(buffer_.data(), buffer_.size());
        return end_ > 0;
    }

    InputStream stream_;
    std::vector<char> buffer_ = std::vector<char>(64 << 10);  // what is read into it is still in the core's cache when lines are copied out
    size_t begin_ = 0, end_ = 0;
    i64 buffer_offset_ = 0, lines_ = 0;  // of the buffer's start
};
