// SPDX-License-Identifier: MIT
#include "expert_ranks.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/comm/host_collectives.hpp>
#include <bellows/shape/groups.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace bellows {

namespace {

/// Fewer rows than this on every rank are one half: two would be two times as many dispatches.
constexpr std::uint64_t kRowsWorthHalves = 32;

/// What tells a step's messages apart.
enum class Word : std::uint64_t { Rows, Decision };
std::uint64_t tag_of(std::uint64_t step, Word word) {
    constexpr std::uint64_t kServing = std::uint64_t{0x73} << 56;
    return kServing + 2 * step + static_cast<std::uint64_t>(word);
}

std::span<const std::byte> bytes_of(const std::uint64_t& value) {
    return std::as_bytes(std::span(&value, 1));
}

std::uint64_t number_in(const std::vector<std::byte>& bytes) {
    std::uint64_t value = 0;
    if (bytes.size() != sizeof value)
        throw Error(ErrorCode::Corrupt, "a message between serving ranks has " +
                                            std::to_string(bytes.size()) + " bytes instead of " +
                                            std::to_string(sizeof value));
    std::memcpy(&value, bytes.data(), sizeof value);
    return value;
}

void require_same(World& world, const std::string& mine, std::chrono::milliseconds timeout) {
    HostCollectives everyone(world, Group::all(world.size()), timeout);
    const auto all = everyone.all_gather(std::as_bytes(std::span(mine)));
    for (std::size_t rank = 0; rank < all.size(); ++rank)
        if (!std::ranges::equal(all[rank], all[0]))
            throw Error(
                ErrorCode::InvalidArgument,
                "ranks that serve together must have the same model and options, but rank " +
                    std::to_string(rank) + " has '" +
                    std::string(reinterpret_cast<const char*>(all[rank].data()), all[rank].size()) +
                    "' and rank 0 '" +
                    std::string(reinterpret_cast<const char*>(all[0].data()), all[0].size()) + "'");
}

} // namespace

ExpertRanks::ExpertRanks(Device& device, World& world, const ModelConfig& model,
                         const ParameterStore& parameters, const Config& config)
    : world_(world), max_tokens_(config.max_tokens), top_k_(model.top_k), hidden_(model.hidden),
      timeout_(config.timeout) {
    require_same(world, config.same, config.timeout);
    if (model.moe_layers() == 0)
        return;
    const auto& placements = config.placements;
    if (placements.empty() && model.routed_experts < static_cast<std::uint64_t>(world.size()))
        throw Error(ErrorCode::InvalidArgument,
                    std::to_string(world.size()) + " ranks are more than the model's " +
                        std::to_string(model.routed_experts) + " experts: take fewer");
    transport_ = open_transport(world);
    thread_.emplace(device, "experts");
    ExchangeConfig exchange =
        expert_exchange_config(model, parameters.activation(), parameters.linear_precision());
    exchange.name = "experts";
    exchange.max_tokens = config.max_tokens;
    exchange.mode = ExchangeMode::LowLatency;
    exchange.layout = ExchangeLayout::ExpertMajor;
    exchange.gradient_wire.reset();
    exchange.sums = !config.exact        ? ExchangeSums::Ranked
                    : placements.empty() ? ExchangeSums::Exact
                                         : ExchangeSums::ExactPerChoice;
    exchange.timeout = config.timeout;
    if (!placements.empty()) {
        exchange.slots_per_rank = placements.front().slots_of_rank;
        exchange.placements = placements.size();
    }
    exchange_.emplace(device, world, *transport_, *thread_, exchange);
    for (std::uint64_t layer = 0; layer < placements.size(); ++layer)
        exchange_->set_placement(placements[layer].expert_of_slot, layer);
    owners_.resize(exchange.placements);
    for (std::uint64_t layer = 0; layer < owners_.size(); ++layer)
        for (std::uint64_t expert = 0; expert < model.routed_experts; ++expert)
            owners_[layer].push_back(exchange_->owners(expert, layer));
    for (std::uint64_t i = 0; i < kHalves; ++i) {
        Half& half = halves_[i];
        half.handle = exchange_->create_handle("half " + std::to_string(i));
        const std::uint64_t rows = half.handle->capacity();
        const DType act = parameters.activation();
        half.memory =
            Buffer(device, {.name = "results of experts, half " + std::to_string(i),
                            .bytes = std::max<std::uint64_t>(rows, 1) * model.hidden * size_of(act),
                            .category = MemoryCategory::Activations});
        half.results = half.memory.tensor(act, {rows, model.hidden});
    }
    constexpr std::uint64_t kAny = 256;
    none_ = Buffer(
        device, {.name = "rows of nobody", .bytes = kAny, .category = MemoryCategory::Activations});
}

ExpertRanks::~ExpertRanks() = default;

RankStep ExpertRanks::decide(std::uint64_t most_rows) const {
    return {most_rows > 0, most_rows >= kRowsWorthHalves || most_rows > max_tokens_ ? 2u : 1u};
}

// The lowest rank that lives hears of all and tells all. Where it is lost meanwhile, the next one
// does.
RankStep ExpertRanks::agree(std::uint64_t rows) {
    ControlPlane& control = world_.control();
    const std::uint64_t step = step_++;
    while (true) {
        const int first = control.first_living();
        std::uint64_t most = rows;
        if (first != world_.rank()) {
            const bool told = control.unless_lost(first, [&] {
                control.send(first, tag_of(step, Word::Rows), bytes_of(rows));
                most = number_in(control.recv(first, tag_of(step, Word::Decision), timeout_));
            });
            if (told)
                return decide(most);
            continue;
        }
        const auto with_others = [&](const auto& act) {
            for (int rank = 0; rank < world_.size(); ++rank)
                if (rank != world_.rank() && !control.lost(rank))
                    (void)control.unless_lost(rank, [&] { act(rank); });
        };
        with_others([&](int rank) {
            most =
                std::max(most, number_in(control.recv(rank, tag_of(step, Word::Rows), timeout_)));
        });
        with_others(
            [&](int rank) { control.send(rank, tag_of(step, Word::Decision), bytes_of(most)); });
        return decide(most);
    }
}

TensorView ExpertRanks::no_rows() const {
    return none_.tensor(exchange_->config().dtype, {0, hidden_});
}

void ExpertRanks::dispatch(std::uint64_t layer, std::uint64_t half, const TensorView& rows,
                           const TensorView& ids, const TensorView& weights) {
    if (owners_.size() > 1)
        halves_[half].handle->use_placement(layer);
    if (rows.extent[0] == 0) {
        exchange_->dispatch(*halves_[half].handle, no_rows(), none_.tensor(DType::I32, {0, top_k_}),
                            none_.tensor(DType::F32, {0, top_k_}));
        return;
    }
    exchange_->dispatch(*halves_[half].handle, rows, ids, weights);
}

TimePoint ExpertRanks::combine(std::uint64_t half, const TensorView& out) {
    return exchange_->combine(*halves_[half].handle, halves_[half].results, out,
                              /*accumulate=*/true);
}

std::vector<int> ExpertRanks::lost() const {
    return exchange_ ? exchange_->masked_ranks() : std::vector<int>{};
}

std::span<const std::vector<int>> ExpertRanks::owners(std::uint64_t layer) const {
    return owners_[owners_.size() > 1 ? layer : 0];
}

} // namespace bellows
