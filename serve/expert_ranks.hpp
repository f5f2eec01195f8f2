// SPDX-License-Identifier: MIT
#pragma once

// The ranks that share a model's experts while they serve requests of their own. Tokens travel to
// the experts' ranks and back by a low-latency exchange with two handles: while the tokens of one
// half of a step travel, the other half computes. Before a step the ranks agree on what it is. Used
// by this room's .cpp files; one thread at a time.

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/expert_placement.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// What all ranks do in a step.
struct RankStep {
    bool work = false;        ///< some rank has rows
    std::uint64_t halves = 1; ///< in which the rows of each rank are computed: 1 or 2
};

class ExpertRanks {
public:
    static constexpr std::uint64_t kHalves = 2;

    struct Config {
        std::uint64_t max_tokens = 0; ///< of a half on each rank
        /// Sums have the bits of one rank.
        bool exact = false;
        /// Of each layer with experts; empty: each expert once, in plain order.
        std::span<const ExpertPlacement> placements{};
        std::chrono::milliseconds timeout{};
        /// What must be the same on all ranks, for the error that says that it is not.
        std::string same;
    };

    /// Collective. All outlive it. Throws Error{InvalidArgument}, on all ranks, where `same`
    /// differs, a rank would have no expert, or exact sums do not go with the number of ranks.
    ExpertRanks(Device& device, World& world, const ModelConfig& model,
                const ParameterStore& parameters, const Config& config);
    ~ExpertRanks();

    World& world() const noexcept { return world_; }
    /// What a half's rows arrive in; nothing of models without experts.
    const ExchangeHandle& handle(std::uint64_t half) const { return *halves_[half].handle; }
    /// The results of what arrived: [capacity, hidden].
    TensorView results(std::uint64_t half) const { return halves_[half].results; }
    /// Rows of a half whose rank has none.
    TensorView no_rows() const;

    /// Collective: what the next step is. rows: that this rank has.
    RankStep agree(std::uint64_t rows);
    /// Collective: rows [tokens, hidden], ids and weights [tokens, top_k] go to the ranks of the
    /// so-manyth layer's experts. They stay as they are until combine().
    void dispatch(std::uint64_t layer, std::uint64_t half, const TensorView& rows,
                  const TensorView& ids, const TensorView& weights);
    /// Collective: the results come back and are added to out [tokens, hidden].
    TimePoint combine(std::uint64_t half, const TensorView& out);

    /// Ranks that are lost, ascending.
    std::vector<int> lost() const;
    /// The ranks that have each expert of the so-manyth layer of experts, ascending.
    std::span<const std::vector<int>> owners(std::uint64_t layer) const;

private:
    struct Half {
        std::unique_ptr<ExchangeHandle> handle;
        Buffer memory;
        TensorView results;
    };

    RankStep decide(std::uint64_t most_rows) const;

    World& world_;
    std::uint64_t max_tokens_, top_k_, hidden_;
    std::vector<std::vector<std::vector<int>>> owners_; ///< by layer or, in plain order, of all
    std::chrono::milliseconds timeout_;
    std::unique_ptr<Transport> transport_;
    std::optional<HostThread> thread_;
    std::optional<ExpertExchange> exchange_;
    std::array<Half, kHalves> halves_;
    Buffer none_; ///< of tensors without rows
    std::uint64_t step_ = 0;
};

} // namespace bellows
