// SPDX-License-Identifier: MIT
#include "expert_slots.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

namespace bellows {

namespace {

/// The experts' range of a store; nothing where the rank has none.
ParameterRange expert_range(const ParameterStore& store) {
    for (const ParameterRange& range : store.list().ranges())
        if (range.expert)
            return range;
    return {};
}

/// Elements of the experts' matrices, one by one.
std::vector<std::uint64_t> expert_sizes(const ParameterStore& store) {
    std::vector<std::uint64_t> sizes;
    for (const ListedParameter& parameter : store.list().all())
        if (parameter.info.kind == ParameterKind::Expert)
            sizes.push_back(parameter.info.size());
    return sizes;
}

TensorView bytes_of(const TensorView& tensor) {
    return TensorView::contiguous(tensor.buffer.sub(0, tensor.num_bytes()), DType::U8,
                                  {tensor.num_bytes()});
}

} // namespace

ExpertSlots::ExpertSlots(ParameterStore& home, ParameterStore& slots, Collectives& ranks,
                         ExpertExchange& exchange, const Desc& desc)
    : home_(home), slots_(slots), ranks_(ranks), exchange_(exchange), model_(desc.model),
      num_ranks_(static_cast<std::uint64_t>(ranks.group().size())),
      slots_of_rank_(desc.slots_of_rank), limit_(desc.limit),
      first_home_(expert_range(home).first) {
    const ParameterList& list = slots_.list();
    for (std::size_t i = 0; i < list.size(); i += list.together(i)) {
        const ParameterInfo& info = list[i].info;
        const auto layer = static_cast<std::uint64_t>(info.layer);
        if (layers_.empty() || layers_.back() != layer)
            layers_.push_back(layer);
        matrices_.push_back({layer, matrix_of(info), info.size()});
    }
    for (const std::uint64_t layer : layers_) {
        placements_.push_back(plain_placement(model_.routed_experts, num_ranks_, slots_of_rank_));
        exchange_.set_placement(placements_.back().expert_of_slot, layer - model_.dense_layers);
    }
    // The same tensors in the same order, as both stores are made alike.
    const std::vector<SentCopy> of_slots =
        slots_.sent_copies(expert_range(slots_).first, expert_sizes(slots_));
    const std::vector<SentCopy> of_home = home_.sent_copies(first_home_, expert_sizes(home_));
    for (std::size_t i = 0; i < of_slots.size(); ++i) {
        Spread spread{i < of_home.size() ? bytes_of(of_home[i].whole) : TensorView{},
                      bytes_of(of_slots[i].whole),
                      {}};
        for (std::size_t m = 0; m < matrices_.size(); ++m)
            spread.bytes.push_back(of_slots[i].counts[m * slots_of_rank_] *
                                   size_of(of_slots[i].whole.dtype));
        spreads_.push_back(std::move(spread));
    }
    Device& device = home_.device();
    clear_ = std::make_unique<Recording>(device, QueueRole::ComputeDeferred, "clear slots");
    clear_->fill(slots_.flat_gradients().buffer.sub(0, slots_.flat_gradients().num_bytes()), 0);
    copies_ = std::make_unique<Recording>(device, QueueRole::AsyncCompute, "copies of weights");
    slots_.make_copies(*copies_);
}

const ExpertPlacement& ExpertSlots::placement(std::uint64_t layer) const {
    const auto found = std::ranges::find(layers_, layer);
    if (found == layers_.end())
        throw Error(ErrorCode::InvalidArgument,
                    "this rank has no experts of layer " + std::to_string(layer));
    return placements_[static_cast<std::size_t>(found - layers_.begin())];
}

void ExpertSlots::place(const std::map<std::uint64_t, ExpertPlacement>& placements) {
    const std::vector<ExpertPlacement> before = placements_;
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        const auto next = placements.find(layers_[i]);
        if (next == placements.end())
            continue;
        const ExpertPlacement& now = placements_[i];
        if (next->second.num_experts != now.num_experts ||
            next->second.num_ranks != now.num_ranks ||
            next->second.slots_of_rank != now.slots_of_rank)
            throw Error(ErrorCode::InvalidArgument,
                        "a placement of layer " + std::to_string(layers_[i]) + " must have " +
                            std::to_string(now.num_experts) + " experts in " +
                            std::to_string(now.slots_of_rank) + " slots of each of " +
                            std::to_string(now.num_ranks) + " ranks");
        validate_for_exchange(next->second);
        exchange_.set_placement(next->second.expert_of_slot, layers_[i] - model_.dense_layers);
        placements_[i] = next->second;
    }
    spread([&](std::size_t layer, std::uint64_t slot) {
        return placements_[layer].expert_of_slot[slot] != before[layer].expert_of_slot[slot];
    });
}

std::uint64_t ExpertSlots::experts_of(std::uint64_t rank) const {
    return share_of(model_.routed_experts, num_ranks_, rank).count;
}

std::uint64_t ExpertSlots::home_of(std::uint64_t expert) const {
    std::uint64_t rank = 0;
    while (expert >= share_of(model_.routed_experts, num_ranks_, rank).first + experts_of(rank))
        ++rank;
    return rank;
}

/// visit(matrix, home rank, which of its experts, slot's rank, which of its slots), for each
/// expert's slots ascending.
template <class Visit>
void ExpertSlots::for_each_copy(std::uint64_t layer, Visit visit) const {
    const ExpertPlacement& placed = placement(layer);
    for (std::size_t m = 0; m < matrices_.size(); ++m) {
        if (matrices_[m].layer != layer)
            continue;
        for (std::uint64_t expert = 0; expert < model_.routed_experts; ++expert) {
            const std::uint64_t rank = home_of(expert);
            const std::uint64_t at =
                expert - share_of(model_.routed_experts, num_ranks_, rank).first;
            for (const std::uint64_t slot : slots_of_expert(placed, expert))
                visit(m, rank, at, placed.rank_of(slot), slot % slots_of_rank_);
        }
    }
}

void ExpertSlots::clear_gradients() {
    home_.device().submit(*clear_);
}

void ExpertSlots::sum_gradients(std::uint64_t layer) {
    // Elements before a layer's matrices, in a store with so many experts of each.
    const auto before = [&](std::size_t m, std::uint64_t experts) {
        std::uint64_t elements = 0;
        for (std::size_t i = 0; i < m; ++i)
            elements += matrices_[i].elements * experts;
        return elements;
    };
    std::vector<MemoryMove> moves;
    for_each_copy(layer, [&](std::size_t m, std::uint64_t home, std::uint64_t at,
                             std::uint64_t rank, std::uint64_t slot) {
        const std::uint64_t size = matrices_[m].elements;
        moves.push_back({.from = static_cast<int>(rank),
                         .to = static_cast<int>(home),
                         .from_byte = 4 * (before(m, slots_of_rank_) + slot * size),
                         .to_byte = 4 * (before(m, experts_of(home)) + at * size),
                         .bytes = 4 * size});
    });
    const TensorView all = home_.flat_gradients();
    const ParameterRange range = expert_range(home_);
    ranks_.sum_moves(slots_.flat_gradients().rows(0, expert_range(slots_).count),
                     all.rows(first_home_, range.count), moves);
}

template <class Wanted>
void ExpertSlots::spread(Wanted wanted) {
    for (const Spread& spread : spreads_) {
        const auto before = [&](std::size_t m, std::uint64_t experts) {
            return experts * std::accumulate(spread.bytes.begin(),
                                             spread.bytes.begin() + static_cast<std::ptrdiff_t>(m),
                                             std::uint64_t{0});
        };
        std::vector<MemoryMove> moves;
        for (std::size_t layer = 0; layer < layers_.size(); ++layer)
            for_each_copy(layers_[layer], [&](std::size_t m, std::uint64_t home, std::uint64_t at,
                                              std::uint64_t rank, std::uint64_t slot) {
                if (!wanted(layer, rank * slots_of_rank_ + slot))
                    return;
                const std::uint64_t bytes = spread.bytes[m];
                moves.push_back({.from = static_cast<int>(home),
                                 .to = static_cast<int>(rank),
                                 .from_byte = before(m, experts_of(home)) + at * bytes,
                                 .to_byte = before(m, slots_of_rank_) + slot * bytes,
                                 .bytes = bytes});
            });
        if (!moves.empty())
            ranks_.move(spread.home, spread.slots, moves);
    }
    if (copies_->num_operations() > 0) {
        copied_.wait(limit_);
        copied_ = home_.device().submit(*copies_);
    }
}

void ExpertSlots::spread_weights() {
    spread([](std::size_t, std::uint64_t) { return true; });
}

} // namespace bellows
