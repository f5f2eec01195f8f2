// SPDX-License-Identifier: MIT
#pragma once

// Where the experts of every layer of the model are, and when they are placed anew: by EPLB, from
// the loads since the last time. Pure; all ranks have the same loads, so they decide alike. Owned
// by the trainer.

#include <bellows/checkpoint/state.hpp>
#include <bellows/shape/eplb.hpp>
#include <bellows/shape/expert_placement.hpp>
#include <bellows/train/expert_balance.hpp>

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace bellows {

class ExpertBalancer {
public:
    struct Desc {
        std::uint64_t dense_layers = 0, layers = 0; ///< of the model; experts are in those behind
        std::uint64_t experts = 0, groups = 1;      ///< of a layer
        std::uint64_t ranks = 1, nodes = 1;         ///< that share a layer's experts
        std::uint64_t slots_of_rank = 0;            ///< 0: experts stay in their blocks
        std::uint64_t replicas = 0;                 ///< slots of all ranks that may be used
        std::uint64_t every = 0;                    ///< steps; 0: never
    };
    explicit ExpertBalancer(const Desc& desc);

    const ExpertPlacement& placement(std::uint64_t layer) const { return placements_.at(layer); }
    /// What each rank computes of the loads.
    std::vector<double> rank_loads(const LayerLoads& layer) const;

    /// Placements that begin behind a step, the `done`th of the run, with these loads; of layers in
    /// which an expert moves alone. They are in force then.
    std::map<std::uint64_t, ExpertPlacement> after_step(std::uint64_t done,
                                                        std::span<const LayerLoads> loads);
    /// The experts that the last placements have brought to ranks.
    const std::vector<MovedExpert>& moved() const noexcept { return moved_; }

    /// What a resumed run needs to go on alike: where experts are, the loads since they were placed
    /// and those that placed them. Empty where there are no slots.
    ExpertPlaces places() const;
    /// Goes on from there. Placements of other sizes than these are made anew from the loads, those
    /// of the last placement included.
    /// Throws Error{InvalidArgument} for layers and experts that the model does not have.
    void resume(const ExpertPlaces& places);
    const std::map<std::uint64_t, ExpertPlacement>& placements() const noexcept {
        return placements_;
    }

private:
    ExpertPlacement balanced(std::span<const double> loads) const;

    Desc desc_;
    std::map<std::uint64_t, ExpertPlacement> placements_;
    std::map<std::uint64_t, std::vector<double>> seen_, placed_by_;
    std::vector<MovedExpert> moved_;
};

} // namespace bellows
