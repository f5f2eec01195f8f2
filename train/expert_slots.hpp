// SPDX-License-Identifier: MIT
#pragma once

// Experts in slots while training, as SYMI has it: each rank keeps the weights, gradients and
// optimiser state of its own block of experts, its home experts, where they always are, whatever
// the slots hold. What changes with a placement is only where a step's new weights go to, and where
// its gradients come from: behind every update the ranks of an expert-parallel group send each
// slot the weights of the expert that it holds, and before it each expert's gradients are summed
// over its slots, ascending. So a new placement costs no traffic of its own. Owned by the trainer;
// all ranks of a group make the same calls in the same order.

#include <bellows/comm/collectives.hpp>
#include <bellows/comm/expert_exchange.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/expert_placement.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bellows {

class ExpertSlots {
public:
    struct Desc {
        const ModelConfig& model;
        std::uint64_t slots_of_rank = 0; ///< not 0
        std::chrono::milliseconds limit{};
    };
    /// home: with the experts of this rank's block. slots: made of slot_parameters() (stages.hpp).
    /// ranks: of the expert-parallel group, in the exchange's order. All must outlive it. Every
    /// expert is in its plain place at first.
    ExpertSlots(ParameterStore& home, ParameterStore& slots, Collectives& ranks,
                ExpertExchange& exchange, const Desc& desc);

    /// Layers with experts on this rank, ascending.
    std::span<const std::uint64_t> layers() const noexcept { return layers_; }
    const ExpertPlacement& placement(std::uint64_t layer) const;
    /// What the slots of some layers hold from the next dispatch on: those whose expert changes get
    /// its weights. Layers of other ranks are passed by. Collective, between steps. Throws
    /// Error{InvalidArgument}.
    void place(const std::map<std::uint64_t, ExpertPlacement>& placements);

    /// Hands in what makes the slots' gradients zero, ahead of a step.
    void clear_gradients();
    /// Collective: the gradients of a layer's home experts become the sums over their slots.
    void sum_gradients(std::uint64_t layer);
    /// Collective: all slots get the weights of their experts, as products read them. Waits for the
    /// copies of the time before.
    void spread_weights();

private:
    /// A layer's matrices of one name.
    struct Matrices {
        std::uint64_t layer;
        std::string name;
        std::uint64_t elements; ///< of one expert's
    };
    /// A tensor with a part of what layers read of experts' weights, here and in the slots.
    struct Spread {
        TensorView home, slots;
        std::vector<std::uint64_t> bytes; ///< of one expert's, by Matrices
    };

    std::uint64_t home_of(std::uint64_t expert) const;
    std::uint64_t experts_of(std::uint64_t rank) const;
    template <class Visit>
    void for_each_copy(std::uint64_t layer, Visit visit) const;
    /// Slots of those layers that `wanted(layer, slot)` says.
    template <class Wanted>
    void spread(Wanted wanted);

    ParameterStore& home_;
    ParameterStore& slots_;
    Collectives& ranks_;
    ExpertExchange& exchange_;
    const ModelConfig& model_;
    std::uint64_t num_ranks_, slots_of_rank_;
    std::chrono::milliseconds limit_;
    std::vector<std::uint64_t> layers_;
    std::vector<ExpertPlacement> placements_; ///< by layers_
    std::vector<Matrices> matrices_;          ///< as stores have them
    std::uint64_t first_home_ = 0;            ///< element of the first home expert
    std::vector<Spread> spreads_;
    std::unique_ptr<Recording> clear_, copies_;
    TimePoint copied_;
};

} // namespace bellows
