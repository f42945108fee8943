// device.h: where tensors live and where kernels run. The model, tp.h, zero.h and checkpoint.h know only these names:
//
//   bf16                               a 16-bit brain float that converts to and from float (round to nearest even)
//   Run                                one rank's execution context (threads here; streams and handles on a GPU)
//   device_alloc, device_free          zeroed memory where kernels can reach it
//   device_touch                       memory that was not written to yet: its pages are there afterwards
//   Run::replay, Graph                 does work that is the same every time but for what lies in memory: on a GPU by one launch
//   copy_to_device, copy_to_host       ordered after what `run` was given before; complete on return
//   DEVICE_ALIGN                       elements to which a padded stride is rounded
//   DType                              FP32 or BF16
//   make_run, available_memory         one rank's share of the host; bytes left
//   Moment, seconds_between            a place in the order of a rank's work, and the time between two of them (waits for the later one)
//
// The build picks one side. cpu: this machine's threads. gpu (LLMC_CUDA): CUDA, or the emulator in its place (simt/simt.h).
#pragma once

#include "base.h"

enum class DType { FP32, BF16 };

#if defined(LLMC_CUDA)
#define BACKEND gpu
#include "device_cuda.h"
#else
#define BACKEND cpu
#include "device_cpu.h"
#endif

template <typename X>
constexpr DType dtype_of = DType::FP32;
template <>
inline constexpr DType dtype_of<bf16> = DType::BF16;

constexpr i64 dtype_bytes(DType dtype) { return dtype == DType::BF16 ? 2 : 4; }
constexpr const char* dtype_name(DType dtype) { return dtype == DType::BF16 ? "bf16" : "fp32"; }

// One allocation for one family of tensors (parameters, gradients, ...). Plan with add(), then allocate() sets every pointer.
// A plan that is never allocated still knows its bytes: that is how --dry-run describes a model larger than the machine.
class Arena {
public:
    explicit Arena(std::string name) : name_(std::move(name)) {}
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() { device_free(base_, bytes_); }

    template <typename X>
    void add(X** pointer, i64 count) {
        *pointer = nullptr;
        slots_.push_back({(void**)pointer, end_});
        i64 bytes = 0;
        const bool too_many = count < 0 || __builtin_mul_overflow(count, (i64)sizeof(X), &bytes) ||
                              __builtin_add_overflow(bytes, 63, &bytes) || __builtin_add_overflow(end_, bytes / 64 * 64, &end_);
        check(!too_many, "%s need%s more bytes than 64 bits count\nHINT: lower --micro-batch or --seq, or the model's sizes", name_.c_str(),
              name_.ends_with('s') ? "" : "s");
        bytes_ = std::max(bytes_, end_);
    }
    // back_to(an earlier end()): what is added next shares memory with what was added since then. They must not be in use at the same time.
    i64 end() const { return end_; }
    void back_to(i64 end) { end_ = end; }
    void allocate() {
        check(base_ == nullptr, "arena '%s' is allocated twice", name_.c_str());
        base_ = (char*)device_alloc(bytes_, name_.c_str());
        for (const Slot& slot : slots_) { *slot.pointer = base_ + slot.offset; }
    }
    void touch(Run& run) { device_touch(base_, bytes_, run); }
    const std::string& name() const { return name_; }
    i64 bytes() const { return bytes_; }

private:
    struct Slot {
        void** pointer;
        i64 offset;
    };
    std::string name_;
    std::vector<Slot> slots_;
    i64 end_ = 0, bytes_ = 0;
    char* base_ = nullptr;
};

// What this program was built from, for logs.
inline std::string build_description() {
    return format("%s, compiler %s, %s", BACKEND_NAME, __VERSION__, __DATE__);
}
