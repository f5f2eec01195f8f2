// SPDX-License-Identifier: MIT
#pragma once

// Which layers and parameters stand on which rank. Pure functions: all ranks get the same.

#include <bellows/schedule/schedule.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/layer.hpp>
#include <bellows/shape/parameters.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace bellows {

/// The layers of each stage: as even as possible, the first stages one more. MTP modules, which
/// are on the last stage, are none of them.
struct LayerRange {
    std::uint64_t first = 0, end = 0;
};
LayerRange layers_of_stage(const ModelConfig& config, std::uint64_t stage,
                           std::uint64_t num_stages);

/// Whether a parameter is of the layers, the ends or the modules of a stage.
bool stands_on_stage(const ModelConfig& config, const ParameterInfo& info, std::uint64_t stage,
                     std::uint64_t num_stages);

/// The parameters that a rank of the stage holds: those of its layers, the routed experts only of
/// its block (member `ep_index` of `ep`), the embedding and the head where they belong.
std::vector<ParameterInfo> parameters_of_stage(const ModelConfig& config, std::uint64_t stage,
                                               std::uint64_t num_stages, std::uint64_t ep_index,
                                               std::uint64_t ep, LayerTable kinds = layer_kinds());

/// The parameters of a rank of the pipeline: those of all its stages, in the model's order, each
/// once; member `ep_index` of `ep`.
std::vector<ParameterInfo> parameters_of_rank(const ModelConfig& model, const Schedule& schedule,
                                              std::uint64_t rank, std::uint64_t ep_index,
                                              std::uint64_t ep, LayerTable kinds = layer_kinds());
/// The same matrix of another expert, or of a slot. Throws Error{InvalidArgument} if it is none.
ParameterInfo of_expert(ParameterInfo info, std::uint64_t expert);
/// What stands in a rank's slots for experts (expert_slots_of_rank): the experts' matrices of its
/// layers; their numbers are those of slots, counted over the ranks that share the experts, of
/// which this is number `ep_index`.
std::vector<ParameterInfo> slot_parameters(const ModelConfig& model, const Schedule& schedule,
                                           std::uint64_t rank, std::uint64_t ep_index,
                                           std::uint64_t slots_of_rank,
                                           LayerTable kinds = layer_kinds());
/// The ranks of the pipeline that have the first and the last stage; nothing where one rank has
/// both.
struct EndRanks {
    std::uint64_t first = 0, last = 0;
};
std::optional<EndRanks> ranks_of_ends(const Schedule& schedule);
/// The phases of a rank's chunks in the order of their stages.
std::vector<std::uint32_t> phases_by_stage(const Schedule& schedule, std::uint64_t rank);
/// The ranks of the pipeline that have the same stages as this one, itself among them, ascending:
/// two where the schedule has two streams.
std::vector<std::uint64_t> copies_of_rank(const Schedule& schedule, std::uint64_t rank);

} // namespace bellows
