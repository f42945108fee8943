// input_stream.h: the bytes of a file or of standard input, unpacked if its first bytes are gzip's or zstd's; from any offset on.
#pragma once

#include <isa-l/igzip_lib.h>
#include <poll.h>
#include <signal.h>
#include <xxhash.h>
#include <zstd.h>
#include <zstd_errors.h>

#include <algorithm>
#include <memory>

#include "data/problems.h"

// Set by a signal handler: whoever waits or works long looks at it and throws Stopped.
inline volatile sig_atomic_t stop_signal = 0;
struct Stopped : Error {
    using Error::Error;
};
inline void check_stop_signal() {
    if (stop_signal) { throw Stopped(128 + stop_signal, "stopped by a signal"); }
}

struct InputFile {
    std::string path;
    i64 size = -1;  // when the run began; -1: a pipe, it ends when it ends
};
// "-" is standard input.
inline InputFile input_file(const std::string& path) {
    struct stat st;
    const bool regular = path != "-" && stat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode);
    return {path, regular ? (i64)st.st_size : -1};
}

struct InputProblem {
    Problem problem;
    std::string what;
};

// Of a file exactly the bytes are read that it had when the run began: if it grows or is cut meanwhile, problem() says so.
class InputStream {
public:
    explicit InputStream(const InputFile& file)
        : file_(file.path == "-" ? "/dev/stdin" : file.path, "rbe"), path_(file_.path()), fd_(fileno(file_.handle())), size_(file.size) {
        packed_.resize(START_BYTES);
        packed_end_ = read_file(packed_.data(), START_BYTES, START_BYTES);
        const std::string_view start(packed_.data(), packed_end_);
        start_hash_ = XXH3_64bits(start.data(), start.size());
        kind_ = start.starts_with("\x1f\x8b") ? Kind::gzip : start.starts_with("\x28\xb5\x2f\xfd") ? Kind::zstd : Kind::plain;
        if (kind_ != Kind::plain) { packed_.resize(PACKED_BYTES); }
        if (kind_ == Kind::zstd) {
            zstd_ = ZSTD_createDStream();
            ZSTD_DCtx_setParameter(zstd_, ZSTD_d_windowLogMax, ZSTD_WINDOW_LOG);
        }
    }
    InputStream(const InputStream&) = delete;
    InputStream& operator=(const InputStream&) = delete;
    ~InputStream() { ZSTD_freeDStream(zstd_); }

    // Of the first bytes as they lie in the file: tells two inputs of one name and size apart.
    uint64_t start_hash() const { return start_hash_; }
    // Whether it unpacks a file, which does not keep its reader waiting as a pipe may.
    bool unpacks_file() const { return kind_ != Kind::plain && size_ >= 0; }
    // Bytes of the file that are used up: for progress.
    i64 packed_done() const { return file_at_ - (i64)(packed_end_ - packed_begin_); }

    // Up to `bytes` bytes; 0 at the end, or where the data is broken: then problem() says how.
    size_t read(char* out, size_t bytes) {
        while (!broken_) {
            if (packed_begin_ == packed_end_) {
                if (kind_ == Kind::plain) { return read_file(out, bytes); }
                packed_begin_ = 0;
                packed_end_ = read_file(packed_.data(), packed_.size());
            }
            const bool at_end = packed_begin_ == packed_end_;
            size_t got = 0;
            switch (kind_) {
                case Kind::plain:
                    got = take_packed(out, bytes);
                    break;
                case Kind::gzip:
                    got = at_end && at_frame_end_ ? 0 : read_gzip(out, bytes);  // some may be left in the library
                    break;
                case Kind::zstd:
                    got = read_zstd(out, bytes);
                    break;
            }
            if (got > 0) { return got; }
            if (at_end) {
                if (!ended_oddly_ && !at_frame_end_) { broken_ = {Problem::cut_file, "the packed file is cut"}; }
                break;
            }
        }
        return 0;
    }
    const std::optional<InputProblem>& problem() const { return broken_ ? broken_ : ended_oddly_; }

    // Leaves out the next `bytes` bytes: a plain file is not even read. False if it ends before.
    bool skip(i64 bytes) {
        if (kind_ == Kind::plain && size_ >= 0) {
            const i64 target = packed_done() + bytes;
            packed_begin_ = packed_end_ = 0;
            check(lseek(fd_, target, SEEK_SET) == target, "cannot seek in '%s': %s", path_.c_str(), strerror(errno));
            file_at_ = target;
            return target <= size_;
        }
        std::vector<char> waste(1 << 20);
        while (bytes > 0) {
            check_stop_signal();
            const size_t got = read(waste.data(), std::min<i64>(bytes, waste.size()));
            if (got == 0) { return false; }
            bytes -= got;
        }
        return true;
    }

private:
    enum class Kind { plain, gzip, zstd };

    static constexpr size_t START_BYTES = 64 << 10, PACKED_BYTES = 256 << 10;
    // What `zstd --long` makes by default has 2^27; its --long=31 would take 2 GiB to unpack.
    static constexpr int ZSTD_WINDOW_LOG = 29;
    static constexpr size_t ZSTD_FRAME_START = 5;  // bytes that tell how many the frame's header has

    // A pipe may keep us waiting for ever: look up for a signal.
    void wait_for_input() const {
        constexpr int MILLISECONDS = 100;
        pollfd poll_fd = {fd_, POLLIN, 0};
        while (size_ < 0 && poll(&poll_fd, 1, MILLISECONDS) <= 0) { check_stop_signal(); }
    }
    // Whoever feeds a pipe may have ended from the signal (Ctrl-C) that is about to reach us: then this is not the input's end.
    void wait_at_end_of_pipe() const {
        if (size_ >= 0) { return; }
        constexpr int MICROSECONDS = 50'000;
        usleep(MICROSECONDS);
        check_stop_signal();
    }
    // The next bytes of the file itself, up to `bytes`; fewer than `least` (of a pipe; of a file all) only at its end.
    size_t read_file(char* out, size_t bytes, size_t least = 1) {
        const i64 wanted = size_ < 0 ? bytes : std::min<i64>(bytes, size_ - file_at_);
        i64 done = 0;
        while (done < (size_ < 0 ? (i64)least : wanted)) {
            wait_for_input();
            const ssize_t n = ::read(fd_, out + done, wanted - done);
            if (n < 0 && errno == EINTR) { continue; }
            check(n >= 0, "cannot read '%s' at byte %lld: %s", path_.c_str(), (long long)(file_at_ + done), strerror(errno));
            if (n == 0) {
                wait_at_end_of_pipe();
                break;
            }
            done += n;
        }
        file_at_ += done;
        if (size_ >= 0 && done < wanted) {
            ended_oddly_ = {Problem::cut_file, format("it ended at byte %lld while it was read; it had %lld bytes when the run began",
                                                      (long long)file_at_, (long long)size_)};
        } else if (size_ >= 0 && file_at_ == size_ && file_.size() > size_) {
            ended_oddly_ = {Problem::grown_file, format("it grew from %lld to %lld bytes while it was read; only the first are used",
                                                        (long long)size_, (long long)file_.size())};
        }
        return done;
    }
    size_t take_packed(char* out, size_t bytes) {
        const size_t n = std::min(bytes, packed_end_ - packed_begin_);
        memcpy(out, packed_.data() + packed_begin_, n);
        packed_begin_ += n;
        return n;
    }
    // A checksum comes after the data that it is of: those have been handed out.
    static InputProblem broken_data(const char* kind, const std::string& reason, bool wrong_checksum) {
        if (!wrong_checksum) { return {Problem::cut_file, format("the %s data is broken (%s)", kind, reason.c_str())}; }
        return {Problem::wrong_checksum, format("the %s data is not what was packed (%s): its text is damaged somewhere", kind, reason.c_str())};
    }
    size_t read_gzip(char* out, size_t bytes) {
        if (at_frame_end_) {
            while (packed_begin_ < packed_end_ && packed_[packed_begin_] == 0) { packed_begin_++; }  // tapes pad with zeros, as gzip knows
            if (packed_begin_ == packed_end_) { return 0; }
            if (packed_[packed_begin_] != '\x1f') {
                broken_ = broken_data("gzip", gzip_reason(ISAL_INVALID_WRAPPER), false);
                return 0;
            }
            isal_inflate_init(gzip_.get());  // the next member of a file that was packed in parts
            gzip_->crc_flag = ISAL_GZIP;
        }
        gzip_->next_in = (uint8_t*)packed_.data() + packed_begin_;
        gzip_->avail_in = packed_end_ - packed_begin_;
        gzip_->next_out = (uint8_t*)out;
        gzip_->avail_out = bytes;
        const int status = isal_inflate(gzip_.get());
        packed_begin_ = packed_end_ - gzip_->avail_in;
        at_frame_end_ = gzip_->block_state == ISAL_BLOCK_FINISH;
        if (status != ISAL_DECOMP_OK) { broken_ = broken_data("gzip", gzip_reason(status), status == ISAL_INCORRECT_CHECKSUM); }
        return bytes - gzip_->avail_out;
    }
    static const char* gzip_reason(int status) {
        switch (status) {
            case ISAL_INVALID_BLOCK:
                return "invalid block";
            case ISAL_INVALID_SYMBOL:
                return "invalid symbol";
            case ISAL_INVALID_LOOKBACK:
                return "invalid distance too far back";
            case ISAL_INVALID_WRAPPER:
                return "incorrect header";
            case ISAL_UNSUPPORTED_METHOD:
                return "unknown compression method";
            case ISAL_INCORRECT_CHECKSUM:
                return "incorrect checksum or length";
            default:
                return "?";
        }
    }
    // Of a call that fails, libzstd does not tell how much text it has written. So it gets a block at a time, and the checksum when the text
    // is out.
    size_t read_zstd(char* out, size_t bytes) {
        const size_t wanted = zstd_may_hold_text_ ? 0 : zstd_wants_;
        ZSTD_inBuffer in = {packed_.data(), std::min(packed_end_, packed_begin_ + wanted), packed_begin_};
        ZSTD_outBuffer to = {out, bytes, 0};
        const size_t status = ZSTD_decompressStream(zstd_, &to, &in);  // goes on to the next frame by itself
        check(ZSTD_getErrorCode(status) != ZSTD_error_frameParameter_windowTooLarge,
              "input '%s' was packed with a window of more than %d MiB, which takes that much memory to unpack\nHINT: unpack it outside: "
              "zstd "
              "-dc --long=31 FILE | ./tokenize ... -",
              path_.c_str(), 1 << (ZSTD_WINDOW_LOG - 20));
        if (ZSTD_isError(status)) {
            broken_ = broken_data("zstd", ZSTD_getErrorName(status), ZSTD_getErrorCode(status) == ZSTD_error_checksum_wrong);
        }
        if (in.pos > packed_begin_ || to.pos > 0) { at_frame_end_ = status == 0; }
        zstd_wants_ = status == 0 ? ZSTD_FRAME_START : status;
        zstd_may_hold_text_ = to.pos == bytes;
        packed_begin_ = in.pos;
        return to.pos;
    }

    File file_;
    const std::string& path_;
    int fd_;
    i64 size_, file_at_ = 0;  // file_at_: bytes taken from the file
    uint64_t start_hash_ = 0;
    Kind kind_;
    std::vector<char> packed_;
    size_t packed_begin_ = 0, packed_end_ = 0;
    bool at_frame_end_ = true;
    std::unique_ptr<inflate_state> gzip_ = std::make_unique<inflate_state>();
    ZSTD_DStream* zstd_ = nullptr;
    size_t zstd_wants_ = ZSTD_FRAME_START;
    bool zstd_may_hold_text_ = false;
    std::optional<InputProblem> broken_, ended_oddly_;  // the packed data is; the file did
};
