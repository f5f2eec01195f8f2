// SPDX-License-Identifier: MIT
#include "app/pictures/expert_history.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace bellows {

namespace {

constexpr std::uint64_t kMostLayerIndex = 1000000;

/// The largest load divided by the mean is at least 1, and at most the number of experts.
bool can_be(double max_over_mean) {
    return max_over_mean >= 1 && max_over_mean <= static_cast<double>(ExpertHistory::kMostExperts);
}

std::string described(std::uint64_t step, const MovedExpert& move) {
    return "step " + std::to_string(step) + ": expert " + std::to_string(move.expert) +
           " from rank " + std::to_string(move.from) + " to rank " + std::to_string(move.to);
}

} // namespace

void ExpertHistory::Mean::add(double value) noexcept {
    sum += value;
    ++count;
}

void ExpertHistory::Mean::add(const Mean& other) noexcept {
    sum += other.sum;
    count += other.count;
}

void ExpertHistory::Column::add(Column&& other) {
    if (loads.empty())
        loads = std::move(other.loads);
    else
        for (std::size_t row = 0; row < other.loads.size(); ++row)
            loads[row] += other.loads[row];
    steps_with_loads += other.steps_with_loads;
    experts.add(other.experts);
    ranks.add(other.ranks);
    moves += other.moves;
    for (std::string& move : other.told)
        if (told.size() < kMostMovesTold)
            told.push_back(std::move(move));
}

std::size_t ExpertHistory::columns() const noexcept {
    return static_cast<std::size_t>((last_ - first_) / width_) + 1;
}

ExpertHistory::Layer* ExpertHistory::layer_of(std::uint64_t layer) {
    if (layer > kMostLayerIndex)
        return nullptr;
    if (!layers_.contains(layer) && layers_.size() == kMostLayers) {
        left_layers_out_ = true;
        return nullptr;
    }
    return &layers_[layer];
}

ExpertHistory::Column& ExpertHistory::column_of(Layer& layer, std::uint64_t step) const {
    const auto column = static_cast<std::size_t>((step - first_) / width_);
    if (layer.columns.size() <= column)
        layer.columns.resize(column + 1);
    return layer.columns[column];
}

void ExpertHistory::add_loads(Layer& layer, Column& column,
                              const std::vector<std::uint64_t>& loads) {
    if (loads.empty() || loads.size() > kMostExperts ||
        (layer.experts > 0 && loads.size() != layer.experts))
        return;
    const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
    if (!(sum > 0))
        return;
    layer.experts = loads.size();
    layer.experts_per_row = (loads.size() + kMostRows - 1) / kMostRows;
    layer.rows = (loads.size() + layer.experts_per_row - 1) / layer.experts_per_row;
    ++layer.steps_with_loads;
    ++column.steps_with_loads;
    column.loads.resize(layer.rows);
    const double mean = sum / static_cast<double>(loads.size());
    for (std::size_t row = 0; row < layer.rows; ++row) {
        const std::size_t first = row * layer.experts_per_row;
        const std::size_t end = std::min<std::size_t>(first + layer.experts_per_row, loads.size());
        std::uint64_t fullest = 0;
        for (std::size_t expert = first; expert < end; ++expert)
            fullest = std::max(fullest, loads[expert]);
        column.loads[row] += static_cast<double>(fullest) / mean;
    }
}

void ExpertHistory::add(const StepMetrics& step) {
    if (step.experts.empty() && step.moves.empty())
        return;
    if (layers_.empty())
        first_ = last_ = step.step;
    if (step.step < last_)
        return;
    last_ = step.step;
    while ((last_ - first_) / width_ >= kMostColumns)
        halve();
    for (const ExpertBalance& balance : step.experts)
        if (Layer* const layer = layer_of(balance.layer)) {
            Column& column = column_of(*layer, step.step);
            add_loads(*layer, column, balance.loads);
            layer->last = balance;
            layer->last.loads = {};
            if (can_be(balance.max_over_mean))
                column.experts.add(balance.max_over_mean);
            if (balance.ranks_max_over_mean && can_be(*balance.ranks_max_over_mean))
                column.ranks.add(*balance.ranks_max_over_mean);
        }
    for (const MovedExpert& move : step.moves)
        if (Layer* const layer = layer_of(move.layer)) {
            Column& column = column_of(*layer, step.step);
            ++column.moves;
            if (column.told.size() < kMostMovesTold)
                column.told.push_back(described(step.step, move));
        }
}

void ExpertHistory::halve() {
    width_ *= 2;
    for (auto& [index, layer] : layers_) {
        auto& columns = layer.columns;
        for (std::size_t i = 1; i < columns.size(); ++i)
            if (i % 2 == 1)
                columns[i / 2].add(std::move(columns[i]));
            else
                columns[i / 2] = std::exchange(columns[i], {});
        columns.resize((columns.size() + 1) / 2);
    }
}

void ExpertHistory::fit_to_loads() {
    std::uint64_t most = 0;
    for (const auto& [index, layer] : layers_)
        most = std::max(most, layer.steps_with_loads);
    while (most > 0 && columns() > most + most / 4 + 1)
        halve();
}

} // namespace bellows
