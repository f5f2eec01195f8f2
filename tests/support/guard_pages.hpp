// SPDX-License-Identifier: MIT
#pragma once

// A fixture for ops on memory that ends at a page which may not be touched. On a CPU driver a
// kernel that touches it ends the program; on a GPU the tests only run the ops.

#include "support/own_vulkan.hpp"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>

namespace bellows::testing {

class GuardPagesTest : public ::testing::Test {
protected:
    struct Guarded {
        BufferView view;
        std::byte* bytes; ///< of the memory that is there
    };

    GuardPagesTest() : device_(Device::adopt(own_.external(), test_options())) {}

    /// A view of `size` bytes at the start of memory of `there` bytes, which the guard page
    /// follows. The view may reach into it; on a GPU, which does not see guard pages but other
    /// memory there, all of it is there.
    Guarded guarded(std::uint64_t size, std::uint64_t there) {
        const std::uint64_t claimed = std::max(size, there);
        there = device_->info().is_cpu ? there : claimed;
        const auto memory = own_.guarded(there, claimed - there);
        buffers_.push_back(
            wrap_buffer(*device_, memory.buffer, memory.offset + claimed, "guarded"));
        return {buffers_.back().view().sub(memory.offset, size), memory.bytes};
    }

    void run(const std::function<void(Recording&)>& record) {
        Recording recording(*device_, QueueRole::Compute, "guarded");
        record(recording);
        device_->submit(recording).wait();
    }

    OwnVulkan own_;
    std::unique_ptr<Device> device_;
    std::uint64_t seed_ = 0;

private:
    std::deque<Buffer> buffers_;
};

} // namespace bellows::testing
