// SPDX-License-Identifier: MIT
#pragma once

// bf16 values on their way to the device: while one buffer is copied there, the host fills the
// other. One thread.

#include <bellows/engine/device.hpp>
#include <bellows/engine/tensor.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <span>

namespace bellows {

class Bf16Upload {
public:
    /// most: elements of a part.
    Bf16Upload(Device& device, std::uint64_t most);
    Bf16Upload(const Bf16Upload&) = delete;
    Bf16Upload& operator=(const Bf16Upload&) = delete;
    ~Bf16Upload();

    /// Where the next part's values go. Waits for the part before the last.
    std::span<std::uint16_t> next(std::uint64_t count);
    /// Hands in the copy of what next() has given to a view of as many elements.
    void send(const TensorView& to);
    /// Until all has arrived.
    void wait();

private:
    struct Side {
        Buffer staging;
        std::unique_ptr<Recording> copy; ///< null: nothing is on its way
        TimePoint arrived;
    };
    void wait(Side& side);

    Device* device_;
    std::array<Side, 2> sides_;
    std::size_t side_ = 0;
    std::uint64_t count_ = 0;
};

} // namespace bellows
