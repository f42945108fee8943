// mapped_memory.h: memory that is a file's content, or will be one, or is just memory: arrays larger than one would like to read or keep.
#pragma once

#include <sys/mman.h>

#include <utility>

#include "llmc/base.h"

class MappedMemory {
public:
    MappedMemory() = default;
    MappedMemory(MappedMemory&& other) noexcept { swap(other); }
    MappedMemory& operator=(MappedMemory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~MappedMemory() {
        if (data_ != nullptr) { munmap(data_, bytes_); }
        if (fd_ >= 0) { close(fd_); }
    }

    // A whole file, to be read only. The file must not be cut while it is mapped: the kernel then ends the process (SIGBUS).
    static MappedMemory of_file(const std::string& path) {
        const File file(path, "rbe");
        MappedMemory memory;
        memory.map(file.size(), PROT_READ, MAP_SHARED, fileno(file.handle()), path);
        return memory;
    }
    // A new file of so many bytes, its space on the disk taken before anything is written: a full disk is an error, not a signal.
    static MappedMemory new_file(const std::string& path, i64 bytes) {
        MappedMemory memory;
        memory.fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        check(memory.fd_ >= 0, "cannot make '%s': %s", path.c_str(), strerror(errno));
        const int error = posix_fallocate(memory.fd_, 0, bytes);
        check(error == 0, "cannot make '%s' of %lld bytes: %s", path.c_str(), (long long)bytes, strerror(error));
        memory.map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd_, path);
        return memory;
    }
    static MappedMemory anonymous(i64 bytes, const std::string& what) {
        MappedMemory memory;
        memory.map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, what);
        madvise(memory.data_, bytes, MADV_HUGEPAGE);  // a hint; arrays are read at random places
        return memory;
    }

    char* data() const { return (char*)data_; }
    i64 bytes() const { return bytes_; }

    // A new file is complete: all of it is put on the disk. It stays mapped.
    void sync(const std::string& path) {
        check(msync(data_, bytes_, MS_SYNC) == 0 && fsync(fd_) == 0, "cannot write '%s': %s", path.c_str(), strerror(errno));
        close(std::exchange(fd_, -1));
    }

private:
    void map(i64 bytes, int protection, int flags, int fd, const std::string& what) {
        if (bytes == 0) { return; }
        void* data = mmap(nullptr, bytes, protection, flags, fd, 0);
        check(data != MAP_FAILED, "cannot map %lld bytes for '%s': %s", (long long)bytes, what.c_str(), strerror(errno));
        data_ = data;
        bytes_ = bytes;
    }
    void swap(MappedMemory& other) {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(fd_, other.fd_);
    }

    void* data_ = nullptr;
    i64 bytes_ = 0;
    int fd_ = -1;  // of a new file
};
