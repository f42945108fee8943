// logger.h: one place where a run speaks: readable lines on stdout, JSON Lines in --log. Only world rank 0 speaks.
#pragma once

#include <fcntl.h>
#include <poll.h>

#include <chrono>
#include <csignal>
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
inline std::string human_duration(double seconds) {
    const i64 s = (i64)(seconds + 0.5);
    if (s < 60) { return format("%llds", (long long)s); }
    if (s < 3600) { return format("%lldm%02llds", (long long)(s / 60), (long long)(s % 60)); }
    if (s < 48 * 3600) { return format("%lldh%02lldm", (long long)(s / 3600), (long long)(s / 60 % 60)); }
    return format("%.1f days", seconds / 86400);
}

class Logger {
public:
    Logger(bool speaks, const std::string& path, bool append) : speaks_(speaks), path_(path) {
        signal(SIGPIPE, SIG_IGN);
        // Opened anew, so that only this description of the terminal or pipe does not block.
        screen_ = open("/proc/self/fd/1", O_WRONLY | O_APPEND | O_NONBLOCK);
        if (screen_ < 0) { screen_ = STDOUT_FILENO; }
        if (!speaks || path.empty()) { return; }
        file_ = fopen(path.c_str(), append ? "a" : "w");
        if (!file_) { die("--log is '%s': cannot open it: %s\nHINT: does the folder exist, may you write there?", path.c_str(), strerror(errno)); }
    }
    Logger(const Logger&) = delete;
    ~Logger() {
        if (file_) { fclose(file_); }
        if (screen_ > STDERR_FILENO) { ::close(screen_); }
    }

    // One line for people. A reader that went away (a closed pipe) does not stop a training run.
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
            if (n < 0 && errno != EINTR) { return; }
            done += n > 0 ? n : 0;
        }
    }
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
    int screen_ = STDOUT_FILENO;
};
