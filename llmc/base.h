// base.h: what every other file may lean on: errors that name what is wrong, exact integer helpers, checked files.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

// ---------------------------------------------------------------------------------------------------------------
// Errors. Code throws; the thread that runs a rank catches, prints one line and takes the whole job down.

enum ExitCode { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

// What went wrong, with the exit code it deserves: 1 failed while running, 2 wrong usage.
struct Error : std::runtime_error {
    int exit_code;
    Error(int code, const std::string& message) : std::runtime_error(message), exit_code(code) {}
};

__attribute__((format(printf, 1, 0))) inline std::string vformat(const char* fmt, va_list args) {
    va_list copy;
    va_copy(copy, args);
    const int length = vsnprintf(nullptr, 0, fmt, copy);
    va_end(copy);
    std::string text(length > 0 ? length : 0, '\0');
    if (length > 0) { vsnprintf(text.data(), text.size() + 1, fmt, args); }
    return text;
}

// printf into a string.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    return text;
}

// Stops the job while running (exit code 1). Say the file or flag, the value found, the value wanted, then "\nHINT: ...".
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void die(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    throw Error(EXIT_FAILED, text);
}

// Refuses a flag or a combination of flags (exit code 2).
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void usage_error(const char* fmt, ...) {
    va_list args;
    va_start(args, fmt);
    std::string text = vformat(fmt, args);
    va_end(args);
    throw Error(EXIT_USAGE, text);
}

// Never compiled out, so a condition may do work. check(cond, "message", ...): the message explains it to a user.
#define check(cond, ...)                        \
    do {                                        \
        if (!(cond)) [[unlikely]] {             \
            die(__VA_ARGS__);                   \
        }                                       \
    } while (0)

// ---------------------------------------------------------------------------------------------------------------
// Integers. Sizes in model code are 64-bit; narrowing is checked.

using i64 = int64_t;

constexpr i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
constexpr i64 round_up(i64 a, i64 multiple) { return ceil_div(a, multiple) * multiple; }

template <typename To, typename From>
To narrow(From value) {
    check(value >= std::numeric_limits<To>::min() && value <= std::numeric_limits<To>::max(),
          "value %lld does not fit in %zu bytes", (long long)value, sizeof(To));
    return (To)value;
}

inline i64 div_exact(i64 a, i64 b, const char* what) {
    check(b > 0 && a % b == 0, "%s: %lld is not divisible by %lld", what, (long long)a, (long long)b);
    return a / b;
}

// The part [begin, end) of n things that part `index` of `parts` owns: contiguous, sizes differ by at most one grain.
struct Range {
    i64 begin, end;
    i64 size() const { return end - begin; }
};
inline Range split_range(i64 n, i64 parts, i64 index, i64 grain = 1) {
    const i64 grains = ceil_div(n, grain);
    const i64 begin = grains * index / parts * grain, end = grains * (index + 1) / parts * grain;
    return {begin < n ? begin : n, end < n ? end : n};
}

// ---------------------------------------------------------------------------------------------------------------
// Files. Every call is checked; messages carry the path and the reason. Offsets are 64-bit.

inline bool path_exists(const std::string& path) {
    struct stat st;
    return stat(path.c_str(), &st) == 0;
}
inline bool is_directory(const std::string& path) {
    struct stat st;
    return stat(path.c_str(), &st) == 0 && S_ISDIR(st.st_mode);
}

// An open file, closed at the end of its scope; use close() after writing so that a late error is seen.
class File {
public:
    File(const std::string& path, const char* mode) : path_(path), file_(fopen(path.c_str(), mode)) {
        check(file_ != nullptr, "cannot open '%s' for %s: %s", path.c_str(), mode[0] == 'r' ? "reading" : "writing", strerror(errno));
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() {
        if (file_) { fclose(file_); }
    }

    const std::string& path() const { return path_; }
    FILE* handle() const { return file_; }

    i64 size() const {
        struct stat st;
        check(fstat(fileno(file_), &st) == 0, "cannot stat '%s': %s", path_.c_str(), strerror(errno));
        return st.st_size;
    }
    void read(void* data, size_t bytes) {
        const size_t got = fread(data, 1, bytes, file_);
        check(got == bytes, "'%s' ends too early: wanted %zu bytes, got %zu\nHINT: the file is cut; copy or make it again", path_.c_str(), bytes, got);
    }
    // Reads at a byte offset without moving a shared position; safe from several threads.
    void read_at(void* data, size_t bytes, i64 offset) const {
        char* out = (char*)data;
        size_t done = 0;
        while (done < bytes) {
            const ssize_t n = pread(fileno(file_), out + done, bytes - done, offset + (i64)done);
            if (n < 0 && errno == EINTR) { continue; }
            check(n >= 0, "cannot read '%s' at byte %lld: %s", path_.c_str(), (long long)(offset + done), strerror(errno));
            check(n > 0, "'%s' ends at byte %lld: wanted %zu bytes from byte %lld\nHINT: the file is cut; copy or make it again",
                  path_.c_str(), (long long)(offset + done), bytes, (long long)offset);
            done += n;
        }
    }
    void write(const void* data, size_t bytes) {
        const size_t put = fwrite(data, 1, bytes, file_);
        check(put == bytes, "cannot write '%s': %s", path_.c_str(), strerror(errno));
    }
    // What was written is on the disk itself.
    void sync() { check(fflush(file_) == 0 && fsync(fileno(file_)) == 0, "cannot write '%s': %s", path_.c_str(), strerror(errno)); }
    void sync_and_close() {
        sync();
        close();
    }
    void close() {
        FILE* file = file_;
        file_ = nullptr;
        check(fclose(file) == 0, "cannot write '%s': %s", path_.c_str(), strerror(errno));
    }

private:
    std::string path_;
    FILE* file_;
};

inline std::string read_text_file(const std::string& path) {
    File file(path, "rb");
    std::string text(file.size(), '\0');
    file.read(text.data(), text.size());
    return text;
}

// Makes a folder and its parents, and proves that a file can be written there: before a run, not after its first hours.
inline void prepare_folder(const std::string& path) {
    for (size_t at = 1; at <= path.size(); at++) {
        if (at < path.size() && path[at] != '/') { continue; }
        const std::string parent = path.substr(0, at);
        const int failed = mkdir(parent.c_str(), 0777) == 0 ? 0 : errno;  // before a stat sets errno anew
        if (failed && !is_directory(parent)) {
            die("cannot make the folder '%s': '%s': %s\nHINT: is a file of that name in the way? may you write there?", path.c_str(), parent.c_str(), strerror(failed));
        }
    }
    const std::string probe = path + "/.writable";
    FILE* file = fopen(probe.c_str(), "w");
    check(file != nullptr, "cannot write in the folder '%s': %s", path.c_str(), strerror(errno));
    fclose(file);
    unlink(probe.c_str());
}

inline std::string host_name() {
    char name[256] = "";
    gethostname(name, sizeof(name) - 1);
    return name;
}

// ---------------------------------------------------------------------------------------------------------------
// Files that appear at once: written aside, renamed, and the rename made to last.

// A pipe or a device is none: to open one may wait for ever.
inline bool is_regular_file(const std::string& path) {
    struct stat st;
    return stat(path.c_str(), &st) == 0 && S_ISREG(st.st_mode);
}

inline void rename_file(const std::string& from, const std::string& to) {
    check(rename(from.c_str(), to.c_str()) == 0, "cannot rename '%s' to '%s': %s", from.c_str(), to.c_str(), strerror(errno));
}

inline std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }
inline std::string parent_folder(const std::string& path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

// A rename is on the disk only when its folder is.
inline void sync_folder(const std::string& folder) {
    const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(fd >= 0, "cannot open the folder '%s': %s", folder.c_str(), strerror(errno));
    const int error = fsync(fd) == 0 ? 0 : errno;
    close(fd);
    const bool unknown_here = error == EINVAL || error == EOPNOTSUPP;  // some network file systems have no such thing
    check(error == 0 || unknown_here, "cannot sync the folder '%s': %s", folder.c_str(), strerror(error));
}

constexpr char ASIDE_SUFFIX[] = ".tmp";  // of what is not complete yet

// Writes aside and syncs; rename_file() then makes it appear at once. Returns the name aside.
inline std::string write_file_aside(const std::string& path, std::string_view content) {
    const std::string aside = path + ASIDE_SUFFIX;
    try {
        File file(aside, "wb");
        file.write(content.data(), content.size());
        file.sync_and_close();
    } catch (...) {
        unlink(aside.c_str());
        throw;
    }
    return aside;
}
// A reader sees the old file or the new one.
inline void write_file_atomically(const std::string& path, std::string_view content) {
    const std::string aside = write_file_aside(path, content);
    try {
        rename_file(aside, path);
    } catch (...) {
        unlink(aside.c_str());
        throw;
    }
    sync_folder(parent_folder(path));
}
