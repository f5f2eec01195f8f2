// SPDX-License-Identifier: MIT
#pragma once

// Brings what the layers of a rank counted of their experts' loads to the host, once a step, and
// lets them begin again. Owned by the trainer.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/tensor.hpp>

#include <chrono>
#include <cstdint>
#include <vector>

namespace bellows {

class LoadCollector {
public:
    /// loads: at least one, [experts] u32 of as many experts each (MoeFfn::expert_loads), which
    /// must outlive it.
    LoadCollector(Device& device, const std::vector<TensorView>& loads);

    /// The loads since the last call, [layers, experts]. Waits for the forward passes that have
    /// been handed in, where the device has a queue for what is beside them no longer, up to
    /// `limit`.
    std::vector<std::int64_t> collect(std::chrono::milliseconds limit);

private:
    Device& device_;
    Buffer host_loads_;
    Recording recording_;
};

} // namespace bellows
