// SPDX-License-Identifier: MIT
#pragma once

// Memory for what lives a short while: a node's workspace, a micro-batch's or a step's tensors. All
// frames of an arena use the same bytes one after another; the derived hazards keep work on them
// apart, and their contents do not outlive the next frame's work. Going back to the start costs
// nothing. It outlives the recordings that name it. One thread at a time.

#include <bellows/engine/device.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>
#include <initializer_list>
#include <string>

namespace bellows {

class Arena {
public:
    explicit Arena(Device& device, std::string name = "scratch",
                   MemoryCategory category = MemoryCategory::Scratch);

    /// One use of the arena, which begins at its first byte. Its views are for recording; they have
    /// memory after reserve(frame.bytes()).
    class Frame {
    public:
        /// Contiguous, at a multiple of 256 bytes, its elements undefined.
        TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents);
        /// An op's workspace; 0 bytes give an empty one.
        BufferView bytes(std::uint64_t size);
        std::uint64_t bytes() const noexcept { return used_; }

    private:
        friend class Arena;
        explicit Frame(BufferView all) : all_(all) {}
        BufferView all_;
        std::uint64_t used_ = 0;
    };
    Frame begin() const { return Frame(memory_.view()); }

    /// Makes the memory hold at least so many bytes; never shrinks. Growing waits for all submitted
    /// work, so reserve what the largest frame needs before the first step. Throws
    /// Error{OutOfMemory}.
    void reserve(std::uint64_t bytes);
    std::uint64_t size() const noexcept { return memory_.size(); }

private:
    Device* device_;
    Buffer memory_;
};

} // namespace bellows
