// comm_staged.h: collectives of ranks that cannot reach each other's memory (processes that share a GPU, or a build without NCCL): arrays
// are copied to the host, exchanged there by the host's communicator, and copied back.
//
// What the rank's run was given before wait() goes on meanwhile; the host itself waits.
#pragma once

#include "comm_device.h"

class StagedComm final : public DeviceComm {
public:
    StagedComm(Comm& host, Run& run, i64 piece_bytes = 8 << 20) : DeviceComm(host, run), piece_bytes_(piece_bytes) {}
    ~StagedComm() override { cudaFreeHost(staging_); }

private:
    void enqueue(int slot, const Exchange& exchange) override { exchanges_[slot] = exchange; }

    // The n-th pieces of all parts go together, one n after the other: so staging is bounded, however large the array.
    cudaEvent_t complete(int slot) override {
        const Exchange& whole = exchanges_[slot];
        const i64 elements = std::max<i64>(piece_bytes_ / whole.element_bytes, 1);
        i64 pieces = 0;
        for (const Range& part : whole.parts) { pieces = std::max(pieces, ceil_div(part.size(), elements)); }
        for (i64 n = 0; n < pieces; n++) { exchange_piece(whole, n * elements, elements); }
        record_end(slot);
        return end_[slot];
    }

    // Elements [at, at + elements) of every part. On the host they lie one part after the other.
    void exchange_piece(const Exchange& whole, i64 at, i64 elements) {
        std::vector<i64> from;  // of the array, by rank
        Exchange piece = whole;
        i64 count = 0;
        for (Range& part : piece.parts) {
            const i64 n = std::clamp<i64>(part.size() - at, 0, elements);
            from.push_back(part.begin + at);
            part = {count, count + n};
            count += n;
        }
        piece.data = staging(count * whole.element_bytes);
        const auto copy_parts = [&](cudaMemcpyKind kind, const auto& wanted) {
            for (int r = 0; r < size; r++) {
                const i64 bytes = piece.parts[r].size() * whole.element_bytes;
                if (bytes == 0 || !wanted(r)) { continue; }
                void *device = whole.at(from[r]), *host = piece.at(piece.parts[r].begin);
                cuda_check(kind == cudaMemcpyDeviceToHost ? cudaMemcpyAsync(host, device, bytes, kind, stream_)
                                                          : cudaMemcpyAsync(device, host, bytes, kind, stream_));
            }
        };
        copy_parts(cudaMemcpyDeviceToHost, [&](int r) { return whole.reduce || r == rank; });
        side_.wait();
        host_.exchange(piece);
        copy_parts(cudaMemcpyHostToDevice, [&](int r) { return r == rank ? whole.reduce : whole.gather; });
    }

    // Page-locked, so that copies run beside kernels. What was there before has been read: all of it goes through one stream.
    void* staging(i64 bytes) {
        if (bytes > staging_bytes_) {
            side_.wait();
            cuda_check(cudaFreeHost(std::exchange(staging_, nullptr)));
            staging_bytes_ = 0;
            cuda_check(cudaMallocHost(&staging_, bytes));
            staging_bytes_ = bytes;
        }
        return staging_;
    }

    const i64 piece_bytes_;
    Exchange exchanges_[SLOTS];
    void* staging_ = nullptr;
    i64 staging_bytes_ = 0;
};
