// SPDX-License-Identifier: MIT
#include "exchange_sizes.hpp"

#include <bellows/base/memory_sizes.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/comm/sizes.hpp>
#include <bellows/engine/sizes.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <utility>

namespace bellows {

std::uint64_t first_expert(std::uint64_t at, std::uint64_t experts, std::uint64_t ranks) {
    return at * (experts / ranks) + std::min(at, experts % ranks);
}

std::uint64_t ExchangeShape::first_expert_of(std::uint64_t at) const noexcept {
    return first_expert(at * ranks_per_member, config.num_experts, owners());
}

DType ExchangeShape::sum_type() const noexcept {
    return config.sum_wire.value_or(exact() ? DType::F32 : config.dtype);
}

fp8::Recipe ExchangeShape::recipe() const noexcept {
    return {fp8::Blocks::Rows128, fp8::Format::E4M3, config.token_scales};
}

std::uint64_t ExchangeShape::quantized_bytes() const {
    return fp8::quantized_bytes(recipe(), {1, config.hidden});
}

Record ExchangeShape::token_record() const {
    const std::uint64_t row =
        quantizes() ? quantized_bytes() : config.hidden * size_of(config.dtype);
    return {row, round_up(row + config.top_k * 8, 16), quantizes() ? DType::F8E4M3 : config.dtype};
}

Record ExchangeShape::gradient_record() const {
    const bool codes = quantizes_gradients();
    const std::uint64_t row = codes ? quantized_bytes() : config.hidden * size_of(config.dtype);
    return {row, round_up(row + config.top_k * 4, 16), codes ? DType::F8E4M3 : config.dtype};
}

Record ExchangeShape::sum_record() const noexcept {
    const std::uint64_t rows = low_latency() && per_choice() ? config.top_k : 1;
    const std::uint64_t row = config.hidden * size_of(sum_type());
    // Kernels count them in units of the rows that they are sums of.
    const std::uint64_t unit = 16 * size_of(sum_type()) / size_of(config.dtype);
    return {row, round_up(rows * row + config.top_k * 4, unit), sum_type(), rows};
}

std::uint64_t ExchangeShape::own_experts() const noexcept {
    return std::max<std::uint64_t>(local_experts(), 1);
}

std::uint64_t ExchangeShape::capacity() const {
    const std::uint64_t most_in = most_received();
    return by_tokens() ? most_in
           : low_latency()
               ? own_experts() * most_in
               : ops::moe_capacity(most_in, config.top_k, own_experts(), config.alignment);
}

void ExchangeShape::require_addressable(std::uint64_t records, std::uint64_t rows,
                                        std::uint64_t widest) const {
    std::uint64_t bytes = 0, row_bytes = widest;
    for (const Record& record : {token_record(), gradient_record(), sum_record()}) {
        bytes = std::max(bytes, record.bytes);
        row_bytes = std::max(row_bytes, record.row_bytes);
    }
    require(records <= kKernelReach / bytes && rows <= kKernelReach / row_bytes, config.name,
            std::to_string(records) + " tokens of " + std::to_string(bytes) + " bytes and " +
                std::to_string(rows) + " rows of up to " + std::to_string(row_bytes) +
                " bytes are more than kernels reach (4 GiB of each): lower max_tokens");
}

std::uint64_t ExchangeShape::most_sent() const noexcept {
    return config.max_tokens * std::min(config.top_k, group_size() * records_per_member());
}

std::uint64_t ExchangeShape::most_received() const noexcept {
    return config.max_tokens * group_size() * records_per_member();
}

std::uint64_t ExchangeShape::maskable(int rank) const {
    require(low_latency(), config.name, "only low-latency mode goes on without a rank");
    const auto found = std::find(config.ranks.begin(), config.ranks.end(), rank);
    require(found != config.ranks.end() && found - config.ranks.begin() != position, config.name,
            "rank " + std::to_string(rank) + " cannot be masked: it is " +
                (found != config.ranks.end() ? "this one" : "not of the group"));
    return static_cast<std::uint64_t>(found - config.ranks.begin());
}

namespace {

constexpr const char* kTooManySlots =
    "more than 2^31 - 1 slots may arrive at once: lower max_tokens";

/// The group's members, checked; all ranks of the world where none are named.
std::vector<int> group_of(const Topology& topology, const ExchangeConfig& config) {
    std::vector<int> ranks = config.ranks;
    if (ranks.empty()) {
        ranks.resize(static_cast<std::size_t>(topology.size()));
        std::iota(ranks.begin(), ranks.end(), 0);
    }
    for (std::size_t i = 0; i < ranks.size(); ++i)
        require(ranks[i] >= 0 && ranks[i] < topology.size() && (i == 0 || ranks[i - 1] < ranks[i]),
                config.name,
                "the group's ranks must ascend and lie within the world's " +
                    std::to_string(topology.size()));
    return ranks;
}

/// The ranks of a group on each of its nodes; empty unless there are several nodes, one behind the
/// other, with equally many ranks, more than one.
std::vector<std::vector<int>> equal_nodes(const Topology& topology, const std::vector<int>& group) {
    std::vector<std::vector<int>> nodes;
    std::vector<int> known;
    for (const int rank : group) {
        const int node = topology.node(rank);
        if (known.empty() || known.back() != node) {
            if (std::find(known.begin(), known.end(), node) != known.end())
                return {};
            known.push_back(node);
            nodes.emplace_back();
        }
        nodes.back().push_back(rank);
    }
    const bool equal = std::all_of(nodes.begin(), nodes.end(), [&](const auto& ranks) {
        return ranks.size() == nodes.front().size();
    });
    return equal && nodes.size() > 1 && nodes.front().size() > 1 ? nodes
                                                                 : std::vector<std::vector<int>>();
}

/// What the interface foresees and this version does not do.
void require_supported(const ExchangeConfig& c) {
    const auto refuse = [&](const char* field, DType wire, const std::string& instead) {
        throw Error(ErrorCode::Unsupported, c.name + ": " + field + " is " + to_string(wire) +
                                                ", but so far " + to_string(c.dtype) + instead);
    };
    if (c.token_wire && *c.token_wire != c.dtype && *c.token_wire != DType::F8E4M3)
        refuse("token_wire", *c.token_wire, " tokens travel as they are or as f8_e4m3");
    if (c.gradient_wire && *c.gradient_wire != c.dtype && *c.gradient_wire != DType::F8E4M3)
        refuse("gradient_wire", *c.gradient_wire, " gradients travel as they are or as f8_e4m3");
    if (c.sum_wire && *c.sum_wire != c.dtype && *c.sum_wire != DType::F32)
        refuse("sum_wire", *c.sum_wire, " sums travel as they are or as f32");
}

/// What sums of another type than the rows', and exact ones, are not for.
void check_sums(const ExchangeConfig& c) {
    const bool each = c.sums == ExchangeSums::ExactPerChoice,
               exact = c.sums == ExchangeSums::Exact || each;
    require(!each || c.mode == ExchangeMode::LowLatency, c.name,
            "exact sums of each choice are for low latency: choose Exact or PerChoice");
    require(!exact || c.sum_wire.value_or(DType::F32) == DType::F32, c.name,
            "exact sums travel as f32: leave sum_wire unset");
    require(c.layout != ExchangeLayout::RankMajor ||
                (c.sums == ExchangeSums::Ranked && c.sum_wire.value_or(c.dtype) == c.dtype),
            c.name,
            "rows of RankMajor come back as the caller has summed them, in dtype: exact sums, "
            "those of each choice and another sum_wire are for rows by expert");
    require(!exact || c.num_experts <= std::uint64_t{1} << 26, c.name,
            "exact sums are for at most 2^26 experts");
}

/// Exact sums: each owner, a rank or a node, sums what is a subtree.
void check_subtrees(const ExchangeConfig& c, std::uint64_t owners, const char* owner) {
    for (std::uint64_t at = 0; at < owners && c.sums == ExchangeSums::Exact; ++at) {
        const std::uint64_t ranks = c.ranks.size() / owners;
        const std::uint64_t first = first_expert(at * ranks, c.num_experts, c.ranks.size());
        const std::uint64_t end = first_expert((at + 1) * ranks, c.num_experts, c.ranks.size());
        const std::uint64_t block = std::bit_ceil(end - first);
        require(first % block == 0 && (end - first == block || end == c.num_experts), c.name,
                "exact sums need aligned ranges of experts, a power of two each, and " +
                    std::string(owner) + " " + std::to_string(at) + " of " +
                    std::to_string(owners) + " has " + std::to_string(first) + " to " +
                    std::to_string(end) + " (exclusive) of " + std::to_string(c.num_experts) +
                    ": choose another number of ranks or experts, or sums = Ranked or, in low "
                    "latency, ExactPerChoice, as engines with a placement do");
    }
}

/// Refuses what no exchange can be.
void check(int rank, const ExchangeConfig& c) {
    require(std::find(c.ranks.begin(), c.ranks.end(), rank) != c.ranks.end(), c.name,
            "rank " + std::to_string(rank) + " is not in the group");
    require(c.num_experts > 0, c.name, "num_experts is 0");
    require(c.slots_per_rank == 0 || (c.slots_per_rank <= 0x7FFFFFFF / c.ranks.size() &&
                                      c.slots_per_rank * c.ranks.size() >= c.num_experts),
            c.name,
            std::to_string(c.ranks.size()) + " ranks with " + std::to_string(c.slots_per_rank) +
                " slots each do not have room for " + std::to_string(c.num_experts) +
                " experts: raise slots_per_rank");
    require(c.placements > 0, c.name, "placements is 0");
    require(c.top_k > 0 && c.top_k <= 64, c.name,
            "top_k is " + std::to_string(c.top_k) + ", it must be 1 to 64");
    require(c.hidden > 0 && c.hidden % 8 == 0, c.name,
            "hidden is " + std::to_string(c.hidden) + ", it must be a multiple of 8");
    require(c.max_tokens > 0, c.name, "max_tokens is 0");
    require(c.max_tokens <= 0x7FFFFFFF / c.top_k, c.name, kTooManySlots);
    require(c.timeout.count() > 0, c.name, "timeout is not positive");
    require(c.alignment > 0, c.name, "alignment is 0");
    require(
        c.layout != ExchangeLayout::ExpertSlots ||
            (c.alignment == 1 && c.mode == ExchangeMode::HighThroughput),
        c.name,
        "ExpertSlots has no padding and is for high throughput: leave alignment at 1, or choose "
        "another layout");
    require(c.piece_bytes >= 4096 && c.piece_bytes % 16 == 0, c.name,
            "piece_bytes is " + std::to_string(c.piece_bytes) +
                ", it must be a multiple of 16 and at least 4096");
    require(c.dtype == DType::F32 || c.dtype == DType::BF16, c.name,
            std::string("tokens travel as f32 or bf16, not ") + to_string(c.dtype));
    require_supported(c);
    check_sums(c);
}

/// Records that a token may send to one receiver.
std::uint64_t records_of_each(const ExchangeConfig& c) {
    return c.sums == ExchangeSums::PerChoice ? c.top_k : 1;
}

/// Whether tokens travel by these nodes.
bool takes_nodes(const ExchangeConfig& c, const std::vector<std::vector<int>>& nodes) {
    return c.by_node && c.mode == ExchangeMode::HighThroughput && !nodes.empty() &&
           c.num_experts > (nodes.size() - 1) * nodes.front().size() &&
           c.max_tokens * nodes.size() * c.top_k <= ops::kMostMoeSlots / records_of_each(c);
}

/// Refuses what kernels cannot count or address.
void check_sizes(const ExchangeShape& shape) {
    const std::uint64_t most_in = shape.most_received();
    require(most_in * shape.config.top_k <= 0x7FFFFFFF, shape.config.name, kTooManySlots);
    if (!shape.has_before())
        shape.require_addressable(shape.most_sent(), 0);
    if (shape.low_latency())
        shape.require_addressable(most_in, shape.masked() ? most_in * shape.experts_of(0) : 0);
}

int position_in(const std::vector<int>& group, int rank) {
    return static_cast<int>(std::find(group.begin(), group.end(), rank) - group.begin());
}

} // namespace

ExchangeConfig checked(const Topology& topology, int rank, ExchangeConfig config) {
    config.ranks = group_of(topology, config);
    if (config.mode == ExchangeMode::LowLatency)
        config.alignment = 1;
    check(rank, config);
    return config;
}

std::vector<ExchangeShape> plan_hops(const Topology& topology, int rank,
                                     const ExchangeConfig& asked) {
    ExchangeConfig config = asked;
    if (config.slots_per_rank > 0)
        config.num_experts = config.slots_per_rank * config.ranks.size();
    const std::vector<std::vector<int>> nodes = equal_nodes(topology, config.ranks);
    check_subtrees(config, config.ranks.size(), "rank");
    ExchangeShape last{.config = config,
                       .logical_experts = asked.num_experts,
                       .position = position_in(config.ranks, rank)};
    std::vector<ExchangeShape> hops;
    if (takes_nodes(config, nodes)) {
        check_subtrees(config, nodes.size(), "node");
        const std::uint64_t ranks_per_node = nodes.front().size();
        const auto at = static_cast<std::uint64_t>(last.position);
        const std::uint64_t node = at / ranks_per_node, place = at % ranks_per_node;
        ExchangeConfig between = config;
        between.name += " between nodes";
        between.layout = ExchangeLayout::RankMajor;
        between.ranks.clear();
        for (const std::vector<int>& ranks : nodes)
            between.ranks.push_back(ranks[place]);
        hops.push_back({.config = std::move(between),
                        .logical_experts = asked.num_experts,
                        .position = static_cast<int>(node),
                        .ranks_per_member = ranks_per_node});
        check_sizes(hops.front());
        last.config.ranks = nodes[node];
        last.config.num_experts = hops.front().experts_of(node);
        last.config.max_tokens = hops.front().most_received();
        last.position = static_cast<int>(place);
        last.origins = nodes.size();
    }
    check_sizes(last);
    hops.push_back(std::move(last));
    return hops;
}

std::vector<HandleSize> handle_sizes(const ExchangeShape& exchange) {
    const ExchangeConfig& c = exchange.config;
    const std::uint64_t members = exchange.group_size(), routes = exchange.routes();
    const std::uint64_t experts = exchange.own_experts();
    const std::uint64_t most_in = exchange.most_received(), most_sent = exchange.most_sent();
    const std::uint64_t slots_out = c.max_tokens * c.top_k, slots_in = most_in * c.top_k;
    const bool by_tokens = exchange.by_tokens(), low_latency = exchange.low_latency();
    const std::uint64_t capacity = exchange.capacity();
    const Record token = exchange.token_record(), gradient = exchange.gradient_record(),
                 sum = exchange.sum_record();
    std::vector<HandleSize> all;
    const auto add = [&](HandlePart part, std::uint64_t bytes) {
        const bool travels = part == HandlePart::RecordsToSend || part == HandlePart::RecordsBack ||
                             part == HandlePart::Records || part == HandlePart::RecordsToReturn;
        all.push_back({part, travels ? bytes : std::max<std::uint64_t>(bytes, 16)});
    };
    if (exchange.translates())
        add(HandlePart::SlotsChosen, slots_out * 4);
    add(HandlePart::RankSlots, slots_out * 4);
    if (!low_latency) {
        add(HandlePart::RankIds, slots_out * 4);
        add(HandlePart::RankCounts, routes * 4);
        add(HandlePart::RankOffsets, (routes + 1) * 4);
        add(HandlePart::RankRows, ops::moe_capacity(c.max_tokens, c.top_k, routes, 1) * 4);
        const std::uint64_t counts =
            ops::moe_layout_workspace_bytes(c.max_tokens, c.top_k, routes + c.num_experts);
        add(HandlePart::Counts, counts);
        add(HandlePart::HostCounts, counts);
        if ((token.codes() || gradient.codes()) && !exchange.has_before())
            add(HandlePart::Quantized, c.max_tokens * exchange.quantized_bytes());
    }
    if (!exchange.has_before()) { // else what the hop before brings
        if (!low_latency)
            add(HandlePart::RecordsToSend, most_sent * std::max(token.bytes, gradient.bytes));
        add(HandlePart::RecordsBack, (low_latency ? most_in : most_sent) * sum.bytes);
    }
    add(HandlePart::RecordCount, kHandleCountsAt + (experts + members) * 4);
    if (low_latency) {
        add(HandlePart::Records, most_in * token.bytes);
        add(HandlePart::RecordsToReturn, most_in * sum.bytes);
        if (!by_tokens)
            add(HandlePart::Rows, capacity * token.row_bytes);
    }
    add(HandlePart::SlotIds, slots_in * 4);
    add(HandlePart::SlotWeights, slots_in * 4);
    add(HandlePart::SlotScalars, slots_in * 4);
    if (!low_latency && !by_tokens)
        add(HandlePart::Workspace, ops::moe_layout_workspace_bytes(most_in, c.top_k, experts));
    if (by_tokens)
        return all;
    add(HandlePart::ExpertCounts, experts * 4);
    add(HandlePart::Slots, slots_in * 4);
    if (low_latency)
        return all;
    add(HandlePart::ExpertOffsets, (experts + 1) * 4);
    add(HandlePart::RowsPlaced, ops::moe_capacity(most_in, c.top_k, experts, c.alignment) * 4);
    add(HandlePart::RowWeights, capacity * 4);
    return all;
}

std::uint64_t exchange_handle_bytes(const Topology& topology, int rank,
                                    const ExchangeConfig& config) {
    std::uint64_t bytes = 0;
    for (const ExchangeShape& hop : plan_hops(topology, rank, checked(topology, rank, config)))
        for (const HandleSize& size : handle_sizes(hop))
            bytes += size.bytes;
    return bytes;
}

/// See bind_memory() and bind_forwarding() of job.cpp.
std::uint64_t exchange_record_bytes(const Topology& topology, int rank,
                                    const ExchangeConfig& config, double imbalance) {
    const ExchangeConfig whole = checked(topology, rank, config);
    if (whole.mode == ExchangeMode::LowLatency)
        return 0;
    const auto tokens = static_cast<double>(whole.max_tokens);
    // Of so many receivers those that one of a token's choices or more fall to, times tokens.
    const auto arriving = [&](std::uint64_t receivers) {
        const auto all = static_cast<double>(receivers);
        const auto choices = static_cast<double>(whole.top_k);
        if (whole.sums == ExchangeSums::PerChoice)
            return static_cast<std::uint64_t>(tokens * choices * std::min(all, imbalance));
        const double chosen = all * (1 - std::pow(1 - 1 / all, choices));
        return static_cast<std::uint64_t>(tokens * std::min(all, chosen * imbalance));
    };
    std::uint64_t bytes = 0, passed_on = 0;
    for (const ExchangeShape& hop : plan_hops(topology, rank, whole)) {
        const std::uint64_t token = hop.token_record().bytes, sum = hop.sum_record().bytes,
                            gradient = hop.gradient_record().bytes;
        const std::uint64_t in = arriving(hop.has_before() ? whole.ranks.size() : hop.group_size());
        bytes += passed_on * hop.group_size() * (std::max(token, gradient) + sum);
        bytes += in * (sum + (hop.in_records() ? token + gradient : std::max(token, gradient)));
        passed_on = in;
    }
    return bytes;
}

std::uint64_t max_exchange_tokens(const Topology& topology, int rank, ExchangeConfig config,
                                  std::uint64_t bytes) {
    const std::uint64_t wanted = config.max_tokens;
    require(wanted > 0, config.name, "max_tokens is 0");
    config.max_tokens = 1;
    exchange_handle_bytes(topology, rank, config); // throws what no number of tokens mends
    const auto fits = [&](std::uint64_t tokens) {
        config.max_tokens = tokens;
        try {
            return exchange_handle_bytes(topology, rank, config) <= bytes;
        } catch (const Error&) {
            return false; // more than kernels address
        }
    };
    if (fits(wanted))
        return wanted;
    std::uint64_t least = 0, most = wanted; // fits, does not
    while (most - least > 1) {
        const std::uint64_t middle = least + (most - least) / 2;
        (fits(middle) ? least : most) = middle;
    }
    return least;
}

} // namespace bellows
