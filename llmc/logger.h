// logger.h: one place where a run speaks: readable lines on stdout, JSON Lines in --log. Only world rank 0 speaks.
#pragma once

#include <fcntl.h>
#include <poll.h>

#include <chrono>
#include <nlohmann/json.hpp>

#include "base.h"
#include "launch.h"

inline double now_seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// 12345678 -> "12.3M"
inline std::string human_count(double n) {
    const char* units[] = {"", "K", "M", "B", "T"};
    int u = 0;
    while (std::abs(n) >= 1000 && u < 4) { n /= 1000, u++; }
    return u == 0 ? format("%.0f", n) : format("%.*f%s", n < 10 ? 2 : n < 100 ? 1 : 0, n, units[u]);
}
// 12345678 -> "12.3 MB", in powers of ten as wires are sold.
inline std::string human_bytes(double n) {
    const char* units[] = {"B", "kB", "MB", "GB", "TB"};
    int u = 0;
    while (n >= 1000 && u < 4) { n /= 1000, u++; }
    return u == 0 ? format("%.0f B", n) : format("%.*f %s", n < 10 ? 2 : n < 100 ? 1 : 0, n, units[u]);
}
inline std::string human_duration(double seconds) {
    const i64 s = (i64)(seconds + 0.5);
    if (s < 60) { return format("%llds", (long long)s); }
    if (s < 3600) { return format("%lldm%02llds", (long long)(s / 60), (long long)(s % 60)); }
    if (s < 48 * 3600) { return format("%lldh%02lldm", (long long)(s / 3600), (long long)(s / 60 % 60)); }
    return format("%.1f days", seconds / 86400);
}

class Logger {
public:
    explicit Logger(bool speaks) : speaks_(speaks) {
        // A terminal or a pipe is opened anew, so that only this description of it does not block. A file is not: its position
        // is shared with stderr and with whoever else writes there.
        struct stat out;
        if (fstat(STDOUT_FILENO, &out) == 0 && (S_ISFIFO(out.st_mode) || isatty(STDOUT_FILENO))) {
            const int anew = ::open("/proc/self/fd/1", O_WRONLY | O_NONBLOCK);
            if (anew >= 0) { screen_ = anew; }
        }
    }
    // Once nothing else can be refused: a wrong flag must not cost an old log.
    void open(const std::string& path, bool append) {
        if (!speaks_ || path.empty()) { return; }
        path_ = path;
        file_ = fopen(path.c_str(), "a+");
        if (!file_) { die("--log is '%s': cannot open it: %s\nHINT: does the folder exist, may you write there?", path.c_str(), strerror(errno)); }
        char first = '{', last = '\n';
        if (fseek(file_, 0, SEEK_END) == 0 && ftell(file_) > 0) {
            rewind(file_), first = (char)fgetc(file_);
            fseek(file_, -1, SEEK_END), last = (char)fgetc(file_);
        }
        if (first != '{') { die("--log is '%s': that file is no log of this program\nHINT: another name, or remove it first", path.c_str()); }
        if (!append) { check(ftruncate(fileno(file_), 0) == 0 || errno == EINVAL, "--log is '%s': %s", path.c_str(), strerror(errno)); }
        else if (last != '\n') { fputc('\n', file_); }  // a killed run left half a line
    }
    Logger(const Logger&) = delete;
    ~Logger() {
        if (file_) { fclose(file_); }
        if (screen_ > STDERR_FILENO) { ::close(screen_); }
    }

    // One line for people. A reader that went away (a closed pipe) does not stop a training run; whoever prints results checks.
    __attribute__((format(printf, 2, 3))) void line(const char* fmt, ...) {
        if (!speaks_) { return; }
        va_list args;
        va_start(args, fmt);
        const std::string text = vformat(fmt, args) + "\n";
        va_end(args);
        fflush(stdout);
        for (size_t done = 0; done < text.size();) {
            const ssize_t n = write(screen_, text.data() + done, text.size() - done);
            if (n < 0 && errno == EAGAIN) {
                // An mpirun that was told to end reads no more: a rank that has to save must not wait for its reader.
                pollfd out = {screen_, POLLOUT, 0};
                poll(&out, 1, 200);
                if (stop_signal()) { return; }
                continue;
            }
            if (n < 0 && errno != EINTR) {
                lost_ = errno;
                return;
            }
            done += n > 0 ? n : 0;
        }
    }
    void check_said() const { check(lost_ == 0, "cannot write to standard output: %s", strerror(lost_)); }
    // One record for programs. Not-a-number becomes null. A full disk loses records, not the run: it is said once.
    void record(const nlohmann::json& j) {
        if (!file_) { return; }
        const std::string text = j.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
        if (fwrite(text.data(), 1, text.size(), file_) != text.size() || fflush(file_) != 0) {
            fprintf(stderr, "warning: cannot write --log '%s': %s; the run goes on without it\n", path_.c_str(), strerror(errno));
            fclose(file_);
            file_ = nullptr;
        }
    }

private:
    const bool speaks_;
    std::string path_;
    FILE* file_ = nullptr;
    int lost_ = 0;
    int screen_ = STDOUT_FILENO;
};
