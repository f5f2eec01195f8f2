// SPDX-License-Identifier: MIT
#include "expert_counts.hpp"

#include <bellows/engine/device.hpp>

#include <numeric>
#include <string>

namespace bellows {

ExpertCounts::ExpertCounts(Device& device, const ModelConfig& model,
                           const ParameterStore& parameters,
                           std::span<const std::unique_ptr<Stage>> stages,
                           std::span<const std::uint32_t> phases)
    : device_(device), model_(model) {
    std::vector<TensorView> loads, kept, biases;
    std::vector<BufferView> global;
    const bool updates = model.router_bias && model.bias_update_rate != 0;
    for (const std::uint32_t phase : phases)
        for (std::size_t i = 0; i < stages[phase]->moe_layers().size(); ++i) {
            const auto& experts = stages[phase]->moe_layers()[i];
            const std::uint64_t layer = stages[phase]->moe_layer_index(i);
            layers_.push_back(layer);
            loads.push_back(experts->expert_loads());
            if (const auto of_capacity = experts->kept_loads())
                kept.push_back(*of_capacity);
            if (const auto of_step = experts->accumulated_counts())
                global.push_back(*of_step);
            if (updates)
                biases.push_back(parameters
                                     .at("model.layers." + std::to_string(layer) +
                                         ".mlp.gate.e_score_correction_bias")
                                     .weight);
        }
    loads.insert(loads.end(), kept.begin(), kept.end());
    if (!loads.empty())
        collector_.emplace(device, loads);
    if (!biases.empty())
        biases_.emplace(device, biases, model.bias_update_rate);
    if (!global.empty()) {
        clear_.emplace(device, QueueRole::Compute, "clear balance counts");
        for (const BufferView& counts : global)
            clear_->fill(counts, 0);
    }
}

void ExpertCounts::begin_step() {
    if (clear_)
        device_.submit(*clear_);
}

std::vector<std::int64_t> ExpertCounts::collect(std::chrono::milliseconds limit) {
    return collector_ ? collector_->collect(limit) : std::vector<std::int64_t>{};
}

std::vector<LayerLoads> ExpertCounts::by_layer(std::span<const std::int64_t> loads) const {
    std::vector<LayerLoads> layers;
    const std::uint64_t experts = model_.routed_experts;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        const auto of_layer = loads.subspan(i * experts, experts);
        layers.push_back({layers_[i], {of_layer.begin(), of_layer.end()}});
        const std::size_t kept_at = (layers_.size() + i) * experts;
        if (kept_at < loads.size()) {
            const auto kept = loads.subspan(kept_at, experts);
            layers.back().kept = std::accumulate(kept.begin(), kept.end(), std::uint64_t{0});
        }
    }
    return layers;
}

void ExpertCounts::update_biases(std::span<const std::int64_t> loads, std::uint64_t step) {
    if (biases_ && (model_.bias_update_steps == 0 || step < model_.bias_update_steps))
        biases_->update(loads.first(layers_.size() * model_.routed_experts));
}

} // namespace bellows
