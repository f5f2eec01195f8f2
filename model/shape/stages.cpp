// SPDX-License-Identifier: MIT
#include <bellows/shape/stages.hpp>

#include <bellows/base/error.hpp>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

namespace bellows {

LayerRange layers_of_stage(const ModelConfig& config, std::uint64_t stage,
                           std::uint64_t num_stages) {
    const std::uint64_t share = config.layers / num_stages, larger = config.layers % num_stages;
    const std::uint64_t first = stage * share + std::min(stage, larger);
    return {first, first + share + (stage < larger ? 1 : 0)};
}

bool stands_on_stage(const ModelConfig& config, const ParameterInfo& info, std::uint64_t stage,
                     std::uint64_t num_stages) {
    const bool last = stage + 1 == num_stages;
    const auto layer = static_cast<std::uint64_t>(info.layer);
    if (info.layer >= 0 && layer < config.layers) {
        const LayerRange range = layers_of_stage(config, stage, num_stages);
        return layer >= range.first && layer < range.end;
    }
    if (info.kind == ParameterKind::Embedding)
        return stage == 0 || (last && info.tied);
    return last;
}

std::vector<ParameterInfo> parameters_of_stage(const ModelConfig& config, std::uint64_t stage,
                                               std::uint64_t num_stages, std::uint64_t ep_index,
                                               std::uint64_t ep, LayerTable kinds) {
    const std::uint64_t share = config.routed_experts / std::max<std::uint64_t>(ep, 1);
    const std::uint64_t larger = config.routed_experts % std::max<std::uint64_t>(ep, 1);
    const std::uint64_t first = ep_index * share + std::min(ep_index, larger);
    const std::uint64_t end = first + share + (ep_index < larger ? 1 : 0);
    const auto belongs = [&](const ParameterInfo& info) {
        const auto expert = static_cast<std::uint64_t>(info.expert);
        return stands_on_stage(config, info, stage, num_stages) &&
               (info.expert < 0 || (expert >= first && expert < end));
    };
    std::vector<ParameterInfo> mine;
    for (ParameterInfo& info : parameters(config, kinds))
        if (belongs(info)) {
            info.both_ends = info.tied && num_stages == 1;
            mine.push_back(std::move(info));
        }
    return mine;
}

std::vector<std::uint32_t> phases_by_stage(const Schedule& schedule, std::uint64_t rank) {
    const auto& chunks = schedule.chunks[rank];
    std::vector<std::uint32_t> phases(chunks.size());
    std::iota(phases.begin(), phases.end(), 0u);
    std::ranges::sort(phases, {}, [&](std::uint32_t phase) { return chunks[phase].stage; });
    return phases;
}

std::vector<ParameterInfo> parameters_of_rank(const ModelConfig& model, const Schedule& schedule,
                                              std::uint64_t rank, std::uint64_t ep_index,
                                              std::uint64_t ep, LayerTable kinds) {
    std::vector<ParameterInfo> all;
    for (const std::uint32_t phase : phases_by_stage(schedule, rank)) {
        auto some = parameters_of_stage(model, schedule.chunks[rank][phase].stage,
                                        schedule.num_stages, ep_index, ep, kinds);
        for (ParameterInfo& info : some) {
            const auto other = std::ranges::find(all, info.name, &ParameterInfo::name);
            if (info.tied && other != all.end())
                other->both_ends = true;
            else
                all.push_back(std::move(info));
        }
    }
    return all;
}

ParameterInfo of_expert(ParameterInfo info, std::uint64_t expert) {
    const auto word = [](auto number) { return ".experts." + std::to_string(number) + "."; };
    const std::string old = word(info.expert);
    const std::size_t at = info.name.find(old);
    if (info.kind != ParameterKind::Expert || at == std::string::npos)
        throw Error(ErrorCode::InvalidArgument, info.name + " is no matrix of an expert");
    info.name.replace(at, old.size(), word(expert));
    info.expert = static_cast<std::int64_t>(expert);
    return info;
}

std::vector<ParameterInfo> slot_parameters(const ModelConfig& model, const Schedule& schedule,
                                           std::uint64_t rank, std::uint64_t ep_index,
                                           std::uint64_t slots_of_rank, LayerTable kinds) {
    std::vector<ParameterInfo> all;
    for (const ParameterInfo& info : parameters_of_rank(model, schedule, rank, 0, 1, kinds))
        for (std::uint64_t slot = 0; slot < slots_of_rank && info.expert == 0; ++slot)
            all.push_back(of_expert(info, ep_index * slots_of_rank + slot));
    return all;
}

std::optional<EndRanks> ranks_of_ends(const Schedule& schedule) {
    EndRanks ends{schedule.num_ranks(), schedule.num_ranks()};
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank)
        for (const ScheduleChunk& chunk : schedule.chunks[rank]) {
            if (chunk.stage == 0)
                ends.first = std::min(ends.first, rank);
            if (chunk.stage + 1 == schedule.num_stages)
                ends.last = std::min(ends.last, rank);
        }
    if (ends.first == ends.last)
        return std::nullopt;
    return ends;
}

std::vector<std::uint64_t> copies_of_rank(const Schedule& schedule, std::uint64_t rank) {
    const auto stages_of = [&](std::uint64_t of) {
        std::vector<std::uint64_t> stages;
        for (const ScheduleChunk& chunk : schedule.chunks[of])
            stages.push_back(chunk.stage);
        std::ranges::sort(stages);
        return stages;
    };
    std::vector<std::uint64_t> copies;
    for (std::uint64_t other = 0; other < schedule.num_ranks(); ++other)
        if (stages_of(other) == stages_of(rank))
            copies.push_back(other);
    return copies;
}

} // namespace bellows
