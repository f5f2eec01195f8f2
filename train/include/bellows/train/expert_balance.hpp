// SPDX-License-Identifier: MIT
#pragma once

// How evenly a step's tokens chose the experts of a layer. Plain values and pure functions, any
// thread.

#include <cstdint>
#include <optional>
#include <vector>

namespace bellows {

/// How often each expert of a layer was chosen in a step, over the whole batch.
struct LayerLoads {
    std::uint64_t layer = 0;          ///< of the model
    std::vector<std::uint64_t> loads; ///< [routed_experts]: tokens, each counted for top_k experts
    /// What each of the ranks that share the experts computes of them; empty where one has all. Of
    /// several such groups of ranks the rows of the same experts are added.
    std::vector<double> rank_loads{};
    /// Choices that the capacity kept, of all loads; nothing where it drops none.
    std::optional<std::uint64_t> kept{};
    bool operator==(const LayerLoads&) const = default;
};

/// What the loads of a layer come to. Where nobody chose anything all is even.
struct ExpertBalance {
    std::uint64_t layer = 0;
    double max_over_mean = 1; ///< over experts
    /// The same over the ranks that share the layer's experts, of LayerLoads::rank_loads.
    std::optional<double> ranks_max_over_mean{};
    double entropy = 1; ///< of the loads' shares, divided by its maximum: 1 is even, 0 one expert
    std::vector<std::uint64_t> loads{}; ///< by expert; empty where they are not told
    std::optional<double> dropped{};    ///< share of choices; nothing without a capacity

    bool operator==(const ExpertBalance&) const = default;
};

/// An expert of a layer went from one rank of its group to another before the step.
struct MovedExpert {
    std::uint64_t layer = 0, expert = 0, from = 0, to = 0;
    bool operator==(const MovedExpert&) const = default;
};

/// The balance of these loads; they go with it where keep_loads says so.
ExpertBalance expert_balance(const LayerLoads& layer, bool keep_loads);

/// Whether the loads of a step (from 1) are kept, of all layers together so many numbers: up to
/// 1024 of every step, more of steps 1, 10, 20 and so on.
bool keeps_loads(std::uint64_t step, std::uint64_t numbers) noexcept;

} // namespace bellows
