// SPDX-License-Identifier: MIT
#pragma once

// Memory for what lives a short while: a node's workspace, a micro-batch's or a step's tensors. All
// frames of an arena use the same bytes one after another; the derived hazards keep work on them
// apart, and their contents do not outlive the next frame's work. Going back to the start costs
// nothing. It outlives the recordings that name it. One thread at a time.

#include <bellows/engine/device.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/engine/tensor.hpp>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace bellows {

class Arena {
public:
    /// queue: where work on its frames goes; one, as they follow one another.
    explicit Arena(Device& device, std::string name = "scratch",
                   MemoryCategory category = MemoryCategory::Scratch,
                   QueueRole queue = QueueRole::Compute);

    /// One use of the arena, which begins at its first byte. Its views are for recording; they have
    /// memory after reserve(frame.bytes()).
    class Frame {
    public:
        /// Contiguous, at a multiple of 256 bytes, its elements undefined.
        TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents);
        /// An op's workspace; 0 bytes give an empty one.
        BufferView bytes(std::uint64_t size);
        std::uint64_t bytes() const noexcept { return std::max(used_, most_); }

        /// A frame that begins where this one stands. What this one hands out after cover(part)
        /// shares its bytes: for a step's own workspace.
        Frame nested() const { return Frame(all_, used_); }
        /// bytes() reaches to the end of `part`.
        void cover(const Frame& part) noexcept { most_ = std::max(most_, part.bytes()); }

    private:
        friend class Arena;
        explicit Frame(BufferView all, std::uint64_t used = 0) : all_(all), used_(used) {}
        BufferView all_;
        std::uint64_t used_, most_ = 0;
    };
    Frame begin() const { return Frame(memory_.view()); }

    /// Makes the memory hold at least so many bytes; never shrinks. Growing waits for all submitted
    /// work, so reserve what the largest frame needs before the first step. Throws
    /// Error{OutOfMemory}.
    void reserve(std::uint64_t bytes);
    std::uint64_t size() const noexcept { return memory_.size(); }
    QueueRole queue() const noexcept { return queue_; }

private:
    Device* device_;
    QueueRole queue_;
    Buffer memory_;
};

} // namespace bellows
