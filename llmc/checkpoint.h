// checkpoint.h: what the state of a run looks like on disk. checkpoint_save.h writes it, checkpoint_load.h reads it.
//
//   OUT/step_00000100/                     appears under this name only when it is whole (written aside, synced, renamed)
//       checkpoint.json                    step, meta (model, sync factor, data position, ...), files with sizes and checksums
//       state_tp0_dp0.bin ...              "CAATCKPT", u64 N, N bytes of JSON, then for each of its ranges: master, m, v (fp32)
//
// The state of tensor-parallel rank t is three fp32 arrays over the elements of its ParameterTable. Each element is in exactly
// one file of t; which data-parallel rank wrote it does not matter to a reader, so D and ZeRO may change between runs. T may
// change where the model allows it (sync factor 1): a reader then looks elements up by their Hugging Face coordinates.
//
// Nothing here depends on locale, backend or launch: the same state gives the same bytes.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <xxhash.h>

#include <bit>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>

#include "json_file.h"
#include "tensors.h"

static_assert(std::endian::native == std::endian::little, "files are little-endian and are written without conversion");

enum class StateArray { MASTER, M, V };
constexpr int STATE_ARRAYS = 3;
constexpr char STATE_MAGIC[8] = {'C', 'A', 'A', 'T', 'C', 'K', 'P', 'T'};

// The elements [begin, end) of a rank's state that this process holds: the moments by pointers to element `begin`, in device memory, the master weights by
// what reads some of them to the host.
struct StateView {
    Range range;
    std::function<void(Range, float* to)> master;
    float *m, *v;
};

// ---------------------------------------------------------------------------------------------------------------
// Checksums

inline std::string hash_text(uint64_t hash) { return format("%016llx", (unsigned long long)hash); }

// XXH3 over pieces.
class Hasher {
public:
    Hasher() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }
    void add(const void* data, size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
    std::string text() const { return hash_text(XXH3_64bits_digest(state_.get())); }

private:
    struct Free {
        void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
    };
    std::unique_ptr<XXH3_state_t, Free> state_;
};

// ---------------------------------------------------------------------------------------------------------------
// The model's configuration as JSON

inline json model_to_json(const ModelConfig& m) {
    return {{"arch", m.is_llama() ? "llama" : "gpt"},
            {"layers", m.layers},
            {"channels", m.channels},
            {"heads", m.heads},
            {"kv_heads", m.kv_heads},
            {"head_size", m.head_size},
            {"ffn", m.ffn},
            {"vocab", m.vocab},
            {"max_positions", m.max_positions},
            {"rotary", m.rotary},
            {"tie", m.tie},
            {"rope_base", m.rope_base},
            {"norm_eps", m.norm_eps},
            {"vocab_multiple", m.vocab_multiple}};
}
inline ModelConfig model_from_json(const json& j, const std::string& path) {
    const std::string arch = json_get<std::string>(j, "arch", path);
    check(arch == "llama" || arch == "gpt", "'%s': 'arch' is '%s', wanted 'llama' or 'gpt'", path.c_str(), arch.c_str());
    ModelConfig m;
    m.arch = arch == "llama" ? Arch::LLAMA : Arch::GPT;
    const std::pair<const char*, i64*> sizes[] = {
        {"layers", &m.layers},     {"channels", &m.channels},           {"heads", &m.heads},
        {"kv_heads", &m.kv_heads}, {"head_size", &m.head_size},         {"ffn", &m.ffn},
        {"vocab", &m.vocab},       {"max_positions", &m.max_positions}, {"vocab_multiple", &m.vocab_multiple}};
    for (const auto& [key, value] : sizes) { *value = json_get<i64>(j, key, path); }
    m.rotary = json_get<bool>(j, "rotary", path);
    m.tie = json_get<bool>(j, "tie", path);
    m.rope_base = json_get<double>(j, "rope_base", path);
    m.norm_eps = json_get<double>(j, "norm_eps", path);
    return m;
}

// ---------------------------------------------------------------------------------------------------------------
// Directories

inline std::string step_name(i64 step) { return format("step_%08lld", (long long)step); }
// The step that a directory's name tells, or -1.
inline i64 step_of_name(const std::string& name) {
    const std::string digits = name.starts_with("step_") ? name.substr(5) : "";
    const bool number = !digits.empty() && digits.size() <= 18 && digits.find_first_not_of("0123456789") == std::string::npos;
    return number ? std::stoll(digits) : -1;
}

inline std::string without_slash(std::string dir) {
    while (dir.size() > 1 && dir.back() == '/') { dir.pop_back(); }
    return dir;
}

// The checkpoints in a directory, by step. One that lacks its checkpoint.json is in the list: no save leaves that behind, so
// it was damaged later, and to pass over it would silently go back, or start anew.
inline std::map<i64, std::string> list_checkpoints(const std::string& dir) {
    std::map<i64, std::string> found;
    std::error_code ec;
    for (const auto& entry : std::filesystem::directory_iterator(dir, ec)) {
        const i64 step = step_of_name(entry.path().filename().string());
        if (step >= 0) { found[step] = entry.path().string(); }
    }
    check(!ec || ec == std::errc::no_such_file_or_directory, "cannot list '%s': %s", dir.c_str(), ec.message().c_str());
    return found;
}

// By what it holds, or by its name: one that lacks its checkpoint.json was damaged later.
inline bool is_checkpoint(const std::string& dir) {
    return path_exists(dir + "/checkpoint.json") || step_of_name(std::filesystem::path(without_slash(dir)).filename()) >= 0;
}

// The newest checkpoint in a directory, or the directory itself where it is one; "" where there is none.
inline std::string latest_checkpoint(const std::string& dir) {
    if (is_checkpoint(dir) && is_directory(dir)) { return dir; }
    const std::map<i64, std::string> found = list_checkpoints(dir);
    return found.empty() ? "" : found.rbegin()->second;
}

// For --out, the folder around checkpoints: a run would put its own inside of one.
inline void check_not_a_checkpoint(const std::string& out) {
    const std::string whole = without_slash(std::filesystem::absolute(out).lexically_normal());  // "." has a name and a parent too
    if (!is_checkpoint(whole)) { return; }
    usage_error("--out '%s' is a checkpoint, or has the name of one: --out is the folder around them\nHINT: --out '%s'", out.c_str(),
                std::filesystem::path(whole).parent_path().c_str());
}

// Held by a run on its --out, by world rank 0 alone, for as long as it saves there. The kernel frees it with the process, however that
// ends; the file .lock stays, and tells who has it.
class FolderLock {
public:
    explicit FolderLock(int fd) : fd_(fd) {}
    FolderLock(FolderLock&& other) : fd_(std::exchange(other.fd_, -1)) {}
    ~FolderLock() {
        if (fd_ >= 0) { close(fd_); }
    }

private:
    int fd_;
};

// Two runs would take each other's files for leftovers.
inline FolderLock lock_folder(const std::string& dir) {
    const std::string path = dir + "/.lock";
    int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) { fd = open(path.c_str(), O_RDONLY | O_CLOEXEC); }  // another user's
    check(fd >= 0, "cannot open '%s': %s", path.c_str(), strerror(errno));
    FolderLock lock(fd);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        const int failed = errno;
        if (failed == EWOULDBLOCK) {
            char holder[300] = "";
            const bool told = pread(fd, holder, sizeof(holder) - 1, 0) > 0;
            die("--out '%s' is in use: another run is using it%s%s\nHINT: wait for that run or stop it, or give this one another --out",
                dir.c_str(), told ? ": " : "", holder);
        }
        fprintf(stderr, "warning: cannot lock '%s': %s; see to it that no other run saves there\n", path.c_str(), strerror(failed));
        return lock;
    }
    const std::string me = format("process %d on %s", (int)getpid(), host_name().c_str());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, me.data(), me.size(), 0) < 0) {}  // only for that message
    return lock;
}

// Whether that worked. What cannot be removed (another user's) is worth a warning: it must not fail a save.
inline bool remove_or_warn(const std::filesystem::path& path) {
    std::error_code ec;
    std::filesystem::remove_all(path, ec);
    if (ec) { fprintf(stderr, "warning: cannot remove '%s': %s\n", path.c_str(), ec.message().c_str()); }
    return !ec;
}

// Removes what a killed save left behind.
inline void remove_leftovers(const std::string& dir) {
    std::vector<std::filesystem::path> leftovers;
    for (const auto& entry : std::filesystem::directory_iterator(dir)) {
        const std::string name = entry.path().filename().string(), extension = entry.path().extension().string();
        if (name[0] == '.' && (extension == ".tmp" || extension == ".old") && step_of_name(entry.path().stem().string().substr(1)) >= 0) {
            leftovers.push_back(entry.path());
        }
    }
    for (const auto& path : leftovers) { remove_or_warn(path); }
}

// Removes the checkpoints before `step` that are beyond `keep`; 0 keeps all. A name is taken away first, so that a kill
// in the middle leaves no torso under it, and given back where nothing could be removed. The new checkpoint is safe by now: a
// failure here is only worth a warning.
inline void remove_old_checkpoints(const std::string& dir, i64 step, i64 keep) {
    const auto files_in = [](const std::string& path) {
        std::error_code ignored;
        return std::distance(std::filesystem::directory_iterator(path, ignored), {});
    };
    std::map<i64, std::string> found = list_checkpoints(dir);
    std::erase_if(found, [&](const auto& each) { return each.first >= step || !path_exists(each.second + "/checkpoint.json"); });
    for (; keep > 0 && (i64)found.size() > keep - 1; found.erase(found.begin())) {
        const std::string name = found.begin()->second, aside = dir + "/." + step_name(found.begin()->first) + ".old";
        const auto files = files_in(name);
        if (rename(name.c_str(), aside.c_str()) != 0) {
            fprintf(stderr, "warning: cannot remove '%s': %s\n", name.c_str(), strerror(errno));
        } else if (!remove_or_warn(aside) && files_in(aside) == files && rename(aside.c_str(), name.c_str()) != 0) {
            fprintf(stderr, "warning: the checkpoint '%s' is now '%s'\n", name.c_str(), aside.c_str());
        }
    }
}

// Gives a finished directory its name. Where a run that went back to an older step meets its former self, the two change
// places in one step, so that there is always one under the name.
inline void publish_directory(const std::string& aside, const std::string& name) {
    if (rename(aside.c_str(), name.c_str()) == 0) { return; }
    check(is_directory(name), "cannot rename '%s' to '%s': %s", aside.c_str(), name.c_str(), strerror(errno));
    if (renameat2(AT_FDCWD, aside.c_str(), AT_FDCWD, name.c_str(), RENAME_EXCHANGE) == 0) {
        remove_or_warn(aside);
        return;
    }
    const std::string former = std::filesystem::path(aside).replace_extension(".old");  // a file system that cannot exchange
    std::filesystem::rename(name, former);
    std::filesystem::rename(aside, name);
    remove_or_warn(former);
}
