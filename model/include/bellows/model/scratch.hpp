// SPDX-License-Identifier: MIT
#pragma once

// Memory that a node needs only while it runs. One Scratch serves all layers and slots of a stage:
// their nodes use the same bytes one after another, and the derived hazards keep them apart. It
// outlives the slots. One thread at a time.

#include <bellows/engine/device.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>
#include <initializer_list>

namespace bellows {

class Scratch {
public:
    explicit Scratch(Device& device);

    /// One node's share, which begins at the scratch's first byte. Its views are for recording;
    /// they have memory after reserve(frame.bytes()).
    class Frame {
    public:
        /// Contiguous, its elements undefined.
        TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents);
        /// An op's workspace; 0 bytes give an empty one.
        BufferView bytes(std::uint64_t size);
        std::uint64_t bytes() const noexcept { return used_; }

    private:
        friend class Scratch;
        explicit Frame(BufferView all) : all_(all) {}
        BufferView all_;
        std::uint64_t used_ = 0;
    };
    Frame begin() const { return Frame(memory_.view()); }

    /// Makes the memory hold at least so many bytes. Growing waits for all submitted work. Throws
    /// Error{OutOfMemory}.
    void reserve(std::uint64_t bytes);
    std::uint64_t size() const noexcept { return memory_.size(); }

private:
    Device* device_;
    Buffer memory_;
};

} // namespace bellows
