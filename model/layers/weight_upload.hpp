// SPDX-License-Identifier: MIT
#pragma once

// Weights on their way to the device as they are stored there: while one buffer is copied, the host
// fills the other. One thread.

#include <bellows/engine/device.hpp>
#include <bellows/engine/tensor.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <span>

namespace bellows {

class WeightUpload {
public:
    WeightUpload(Device& device, std::uint64_t most_bytes);
    WeightUpload(const WeightUpload&) = delete;
    WeightUpload& operator=(const WeightUpload&) = delete;
    ~WeightUpload();

    /// Where the next part goes, of at most most_bytes. Waits for the part before the last.
    template <class T>
    std::span<T> next(std::uint64_t count) {
        return next_staging().mapped_as<T>().first(count);
    }
    /// Hands in the copy of what next() has given to a view of as many bytes.
    void send(const BufferView& to);
    /// Until all has arrived.
    void wait();

private:
    struct Side {
        Buffer staging;
        std::unique_ptr<Recording> copy; ///< null: nothing is on its way
        TimePoint arrived;
    };
    Buffer& next_staging();
    void wait(Side& side);

    Device* device_;
    std::array<Side, 2> sides_;
    std::size_t side_ = 0;
};

} // namespace bellows
