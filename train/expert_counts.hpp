// SPDX-License-Identifier: MIT
#pragma once

// What a step counts of the experts of a rank's layers, and what follows from the counts on the
// rank alone: the loads that all ranks hear of, and the routers' biases. Owned by the trainer.

#include "load_collector.hpp"
#include "router_biases.hpp"

#include <bellows/engine/recording.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/train/expert_balance.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

class ExpertCounts {
public:
    /// phases: of `stages`, in an order that is the same on all ranks that hold the same layers.
    /// All must outlive it.
    ExpertCounts(Device& device, const ModelConfig& model, const ParameterStore& parameters,
                 std::span<const std::unique_ptr<Stage>> stages,
                 std::span<const std::uint32_t> phases);

    /// Hands in what lets the counts of a global balance loss begin again, ahead of a step.
    void begin_step();
    /// The loads of this rank's layers since the last call, [layers, experts]; with a capacity,
    /// behind them the same of what it kept. Empty without experts. Waits for the forward passes
    /// that have been handed in, where the device has a queue for what is beside them no longer, up
    /// to `limit`.
    std::vector<std::int64_t> collect(std::chrono::milliseconds limit);
    /// The same loads, summed over the ranks that hold the layers, of each layer.
    std::vector<LayerLoads> by_layer(std::span<const std::int64_t> loads) const;
    /// Moves the routers' biases behind step `step` (from 0), where the model has such biases and
    /// they still move. loads: as collect() returns them, summed over the ranks that hold the
    /// layers.
    void update_biases(std::span<const std::int64_t> loads, std::uint64_t step);

private:
    Device& device_;
    const ModelConfig& model_;
    std::vector<std::uint64_t> layers_; ///< with experts, in the loads' order
    std::optional<LoadCollector> collector_;
    std::optional<RouterBiases> biases_;
    std::optional<Recording> clear_;
};

} // namespace bellows
