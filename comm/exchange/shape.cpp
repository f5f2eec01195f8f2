// SPDX-License-Identifier: MIT
#include "shape.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/ops.hpp>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace bellows {

std::uint64_t first_expert(std::uint64_t at, std::uint64_t experts, std::uint64_t ranks) {
    return at * (experts / ranks) + std::min(at, experts % ranks);
}

TensorView strided_rows(BufferView memory, DType dtype, std::uint64_t rows, std::uint64_t columns,
                        std::uint64_t row_stride) {
    TensorView view;
    const std::uint64_t row_bytes = round_up(columns * size_of(dtype), 16);
    view.buffer = memory.sub(0, rows == 0 ? 0 : (rows - 1) * row_stride + row_bytes);
    view.dtype = dtype;
    view.rank = 2;
    view.extent = {rows, columns};
    view.stride = {row_stride / size_of(dtype), 1};
    return view;
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
    const std::uint64_t row = config.hidden * size_of(sum_type());
    // Kernels count them in units of the rows that they are sums of.
    const std::uint64_t unit = 16 * size_of(sum_type()) / size_of(config.dtype);
    return {row, round_up(row + config.top_k * 4, unit), sum_type()};
}

fp8::Quantized ExchangeShape::quantized(BufferView memory, std::uint64_t rows,
                                        std::uint64_t row_stride) const {
    const std::uint64_t codes = fp8::codes_bytes({1, config.hidden});
    const std::uint64_t blocks = fp8::scales_shape(recipe(), {1, config.hidden}).extent[1];
    return {.codes = strided_rows(memory, DType::F8E4M3, rows, config.hidden, row_stride),
            .scales = strided_rows(memory.sub(codes, memory.bytes - codes), DType::F32, rows,
                                   blocks, row_stride),
            .recipe = recipe(),
            .group_offsets = {}};
}

TensorView ExchangeShape::plain(BufferView memory, DType dtype, std::uint64_t rows,
                                std::uint64_t row_stride) const {
    return strided_rows(memory, dtype, rows, config.hidden, row_stride);
}

std::uint64_t ExchangeShape::own_experts() const noexcept {
    return std::max<std::uint64_t>(experts_of(static_cast<std::uint64_t>(position)), 1);
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
    return config.max_tokens * std::min(config.top_k, group_size());
}

std::uint64_t ExchangeShape::most_received() const noexcept {
    return config.max_tokens * group_size();
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
    const bool exact = c.sums == ExchangeSums::Exact;
    require(!exact || c.sum_wire.value_or(DType::F32) == DType::F32, c.name,
            "exact sums travel as f32: leave sum_wire unset");
    require(c.layout != ExchangeLayout::RankMajor ||
                (!exact && c.sum_wire.value_or(c.dtype) == c.dtype),
            c.name,
            "rows of RankMajor come back as the caller has summed them, in dtype: exact sums and "
            "another sum_wire are for rows by expert");
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
                    ": choose another number of ranks or experts, or sums = Ranked");
    }
}

/// Refuses what no exchange can be.
void check(int rank, const ExchangeConfig& c) {
    require(std::find(c.ranks.begin(), c.ranks.end(), rank) != c.ranks.end(), c.name,
            "rank " + std::to_string(rank) + " is not in the group");
    require(c.num_experts > 0, c.name, "num_experts is 0");
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

/// Whether tokens travel by these nodes.
bool takes_nodes(const ExchangeConfig& c, const std::vector<std::vector<int>>& nodes) {
    return c.by_node && c.mode == ExchangeMode::HighThroughput && !nodes.empty() &&
           c.num_experts > (nodes.size() - 1) * nodes.front().size() &&
           c.max_tokens * nodes.size() * c.top_k <= ops::kMostMoeSlots;
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
                                     const ExchangeConfig& config) {
    const std::vector<std::vector<int>> nodes = equal_nodes(topology, config.ranks);
    check_subtrees(config, config.ranks.size(), "rank");
    ExchangeShape last{.config = config, .position = position_in(config.ranks, rank)};
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

} // namespace bellows
