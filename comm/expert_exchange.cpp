// SPDX-License-Identifier: MIT
#include "exchange_impl.hpp"
#include "fail_together.hpp"
#include "round_up.hpp"

#include <bellows/engine/error.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace bellows {

namespace {

/// The group's members, checked; all ranks of the world where none are named.
std::vector<int> group_of(const World& world, const ExchangeConfig& config) {
    std::vector<int> ranks = config.ranks;
    if (ranks.empty()) {
        ranks.resize(static_cast<std::size_t>(world.size()));
        std::iota(ranks.begin(), ranks.end(), 0);
    }
    for (std::size_t i = 0; i < ranks.size(); ++i)
        require(ranks[i] >= 0 && ranks[i] < world.size() && (i == 0 || ranks[i - 1] < ranks[i]),
                config.name,
                "the group's ranks must ascend and lie within the world's " +
                    std::to_string(world.size()));
    return ranks;
}

/// Of the rank at a position: contiguous blocks, as even as can be, the first ones larger.
std::uint64_t first_expert(std::uint64_t at, std::uint64_t experts, std::uint64_t ranks) {
    return at * (experts / ranks) + std::min(at, experts % ranks);
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

} // namespace

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

std::uint64_t ExpertExchange::Impl::first_expert_of(std::uint64_t at) const noexcept {
    return first_expert(at * ranks_per_member, config.num_experts, owners());
}

DType ExpertExchange::Impl::sum_type() const noexcept {
    return config.sum_wire.value_or(exact() ? DType::F32 : config.dtype);
}

fp8::Recipe ExpertExchange::Impl::recipe() const noexcept {
    return {fp8::Blocks::Rows128, fp8::Format::E4M3, config.token_scales};
}

Record ExpertExchange::Impl::token_record() const {
    const std::uint64_t row = quantizes() ? fp8::quantized_bytes(recipe(), {1, config.hidden})
                                          : config.hidden * size_of(config.dtype);
    return {row, round_up(row + config.top_k * 8, 16), quantizes() ? DType::F8E4M3 : config.dtype};
}

Record ExpertExchange::Impl::gradient_record() const noexcept {
    const std::uint64_t row = config.hidden * size_of(config.dtype);
    return {row, round_up(row + config.top_k * 4, 16), config.dtype};
}

Record ExpertExchange::Impl::sum_record() const noexcept {
    const std::uint64_t row = config.hidden * size_of(sum_type());
    // Kernels count them in units of the rows that they are sums of.
    const std::uint64_t unit = 16 * size_of(sum_type()) / size_of(config.dtype);
    return {row, round_up(row + config.top_k * 4, unit), sum_type()};
}

fp8::Quantized ExpertExchange::Impl::quantized(BufferView memory, std::uint64_t rows,
                                               std::uint64_t row_stride) const {
    const std::uint64_t codes = fp8::codes_bytes({1, config.hidden});
    const std::uint64_t blocks = fp8::scales_shape(recipe(), {1, config.hidden}).extent[1];
    return {.codes = strided_rows(memory, DType::F8E4M3, rows, config.hidden, row_stride),
            .scales = strided_rows(memory.sub(codes, memory.bytes - codes), DType::F32, rows,
                                   blocks, row_stride),
            .recipe = recipe(),
            .group_offsets = {}};
}

TensorView ExpertExchange::Impl::plain(BufferView memory, DType dtype, std::uint64_t rows,
                                       std::uint64_t row_stride) const {
    return strided_rows(memory, dtype, rows, config.hidden, row_stride);
}

std::uint64_t ExpertExchange::Impl::own_experts() const noexcept {
    return std::max<std::uint64_t>(experts_of(static_cast<std::uint64_t>(position)), 1);
}

std::uint64_t ExpertExchange::Impl::capacity() const {
    const std::uint64_t most_in = most_received();
    return by_tokens() ? most_in
           : low_latency()
               ? own_experts() * most_in
               : ops::moe_capacity(most_in, config.top_k, own_experts(), config.alignment);
}

void ExpertExchange::Impl::require_addressable(std::uint64_t records, std::uint64_t rows) const {
    constexpr std::uint64_t kWords = std::uint64_t{1} << 32;
    std::uint64_t bytes = 0, row_bytes = 0;
    for (const Record& record : {token_record(), gradient_record(), sum_record()}) {
        bytes = std::max(bytes, record.bytes);
        row_bytes = std::max(row_bytes, record.row_bytes);
    }
    require(records <= kWords / (bytes / 4) && rows <= kWords / (row_bytes / 8), config.name,
            std::to_string(records) + " tokens of " + std::to_string(bytes) + " bytes and " +
                std::to_string(rows) +
                " rows are more than kernels address (16 GiB and 32 GiB): lower max_tokens");
}

void ExpertExchange::Impl::try_import() {
    const std::uint64_t alignment = device.info().host_import_alignment;
    if (alignment == 0 || alignment > 4096) // mappings begin at pages
        return;
    const SharedMemory memory = transport.share(1);
    if (!memory)
        return;
    try {
        static_cast<void>(Buffer::import_host(device, memory.bytes(), config.name + " probe"));
        imports = true;
    } catch (const Error&) {
        // Some drivers take no memory that stands in a file: it is copied to be sent, then.
    }
}

SharedMemory ExpertExchange::Impl::share(std::uint64_t bytes) const {
    return imports ? transport.share(bytes) : SharedMemory();
}

std::uint64_t ExpertExchange::Impl::maskable(int rank) const {
    require(low_latency(), config.name, "only low-latency mode goes on without a rank");
    const auto found = std::find(config.ranks.begin(), config.ranks.end(), rank);
    require(found != config.ranks.end() && rank != world.rank(), config.name,
            "rank " + std::to_string(rank) + " cannot be masked: it is " +
                (rank == world.rank() ? "this one" : "not of the group"));
    return static_cast<std::uint64_t>(found - config.ranks.begin());
}

BufferView ExpertExchange::Impl::view_of(int peer, const InPlace& message) {
    const auto offset = static_cast<std::uint64_t>(message.bytes.data() - message.block.data());
    for (const Import& known : imported)
        if (known.peer == peer && known.where.block_id == message.block_id)
            return known.memory.view().sub(offset, message.bytes.size());
    // A block where others have been: the peer has given those up.
    std::erase_if(imported, [&](const Import& known) {
        const std::span<std::byte> a = known.where.block, b = message.block;
        return known.peer == peer && a.data() < b.data() + b.size() &&
               b.data() < a.data() + a.size();
    });
    // What has not been seen for long: the copies from it hold what they need.
    constexpr std::size_t kMost = 64;
    if (imported.size() >= kMost)
        imported.erase(imported.begin());
    imported.push_back(
        {peer, message,
         Buffer::import_host(device, message.block,
                             config.name + " memory of rank " + std::to_string(peer))});
    return imported.back().memory.view().sub(offset, message.bytes.size());
}

std::uint64_t ExpertExchange::Impl::most_sent() const noexcept {
    return config.max_tokens * std::min(config.top_k, group_size());
}

std::uint64_t ExpertExchange::Impl::most_received() const noexcept {
    return config.max_tokens * group_size();
}

namespace {

/// Refuses what no exchange can be.
void check(const World& world, const ExchangeConfig& c) {
    require(std::find(c.ranks.begin(), c.ranks.end(), world.rank()) != c.ranks.end(), c.name,
            "rank " + std::to_string(world.rank()) + " is not in the group");
    require(c.num_experts > 0, c.name, "num_experts is 0");
    require(c.top_k > 0 && c.top_k <= 64, c.name,
            "top_k is " + std::to_string(c.top_k) + ", it must be 1 to 64");
    require(c.hidden > 0 && c.hidden % 8 == 0, c.name,
            "hidden is " + std::to_string(c.hidden) + ", it must be a multiple of 8");
    require(c.max_tokens > 0, c.name, "max_tokens is 0");
    require(c.timeout.count() > 0, c.name, "timeout is not positive");
    require(c.alignment > 0, c.name, "alignment is 0");
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

} // namespace

void ExpertExchange::Impl::prepare() {
    position = static_cast<int>(std::find(config.ranks.begin(), config.ranks.end(), world.rank()) -
                                config.ranks.begin());
    workgroups = config.workgroups;
    mask = std::make_unique<std::atomic<bool>[]>(group_size());
    peers = std::make_unique<PeerCounters[]>(group_size());
    const std::uint64_t most_in = most_received();
    require(most_in * config.top_k <= 0x7FFFFFFF, config.name,
            "more than 2^31 - 1 slots may arrive at once: lower max_tokens");
    if (!before)
        require_addressable(most_sent(), 0);
    if (low_latency())
        require_addressable(most_in, masked() ? most_in * experts_of(0) : 0);
    try_import();
    link = transport.device_link();
    if (link != nullptr && std::none_of(config.ranks.begin(), config.ranks.end(),
                                        [this](int rank) { return link->reaches(rank); }))
        link = nullptr;
}

ExpertExchange::ExpertExchange(Device& device, World& world, Transport& transport,
                               HostThread& thread, ExchangeConfig config) {
    config.ranks = group_of(world, config);
    if (config.mode == ExchangeMode::LowLatency)
        config.alignment = 1;
    check(world, config);
    const auto hop = [&](ExchangeConfig of_hop) {
        return std::shared_ptr<Impl>(new Impl{.device = device,
                                              .world = world,
                                              .transport = transport,
                                              .thread = thread,
                                              .config = std::move(of_hop),
                                              .whole = config});
    };
    const std::vector<std::vector<int>> nodes = equal_nodes(world.topology(), config.ranks);
    check_subtrees(config, config.ranks.size(), "rank");
    if (!takes_nodes(config, nodes)) {
        impl_ = hop(config);
    } else {
        const auto mine = std::find_if(nodes.begin(), nodes.end(), [&](const auto& ranks) {
            return std::find(ranks.begin(), ranks.end(), world.rank()) != ranks.end();
        });
        const auto place = std::find(mine->begin(), mine->end(), world.rank()) - mine->begin();
        check_subtrees(config, nodes.size(), "node");
        ExchangeConfig between = config, inside = config;
        between.name += " between nodes";
        between.layout = ExchangeLayout::RankMajor;
        between.ranks.clear();
        for (const std::vector<int>& ranks : nodes)
            between.ranks.push_back(ranks[static_cast<std::size_t>(place)]);
        std::shared_ptr<Impl> first = hop(between);
        first->ranks_per_member = mine->size();
        first->prepare();
        inside.ranks = *mine;
        inside.num_experts = first->experts_of(static_cast<std::uint64_t>(first->position));
        inside.max_tokens = first->most_received();
        impl_ = hop(inside);
        impl_->before = std::move(first);
    }
    impl_->prepare();
    impl_->on_failure = abort_on_failure(world.control(), device);
}

ExpertExchange::~ExpertExchange() {
    impl_->on_failure.reset();
}

void ExpertExchange::set_workgroups(std::uint32_t most) noexcept {
    impl_->workgroups = most;
    if (impl_->before)
        impl_->before->workgroups = most;
}

void ExpertExchange::mask_rank(int rank) {
    impl_->mask[impl_->maskable(rank)] = true;
}

void ExpertExchange::unmask_rank(int rank) {
    impl_->mask[impl_->maskable(rank)] = false;
}

std::vector<int> ExpertExchange::masked_ranks() const {
    std::vector<int> ranks;
    for (std::uint64_t at = 0; at < impl_->group_size(); ++at)
        if (impl_->without(at))
            ranks.push_back(impl_->config.ranks[at]);
    return ranks;
}

const ExchangeConfig& ExpertExchange::config() const noexcept {
    return impl_->whole;
}

std::uint64_t ExpertExchange::num_local_experts() const noexcept {
    return impl_->experts_of(static_cast<std::uint64_t>(impl_->position));
}

std::uint64_t ExpertExchange::first_local_expert() const noexcept {
    const auto first = [](const Impl& hop) {
        return hop.first_expert_of(static_cast<std::uint64_t>(hop.position));
    };
    return first(*impl_) + (impl_->before ? first(*impl_->before) : 0);
}

int ExpertExchange::owner(std::uint64_t expert) const noexcept {
    const std::uint64_t ranks = impl_->whole.ranks.size();
    std::uint64_t at = 0;
    while (at + 1 < ranks && first_expert(at + 1, impl_->whole.num_experts, ranks) <= expert)
        ++at;
    return static_cast<int>(at);
}

bool ExpertExchange::by_node() const noexcept {
    return impl_->before != nullptr;
}

ExchangeStats ExpertExchange::stats() const noexcept {
    ExchangeStats stats;
    for (const Impl* hop = impl_.get(); hop != nullptr; hop = hop->before.get()) {
        stats.exchanges = hop->exchanges; // of the first hop
        for (std::uint64_t at = 0; at < hop->group_size(); ++at) {
            const Impl::PeerCounters& peer = hop->peers[at];
            const bool same_node =
                hop->world.topology().same_node(hop->world.rank(), hop->config.ranks[at]);
            stats.bytes_sent += peer.bytes_sent;
            stats.bytes_sent_to_nodes += same_node ? 0 : peer.bytes_sent.load();
            stats.bytes_sent_by_link += hop->linked(at) ? peer.bytes_sent.load() : 0;
            stats.bytes_received += peer.bytes_received;
            stats.messages_sent += peer.messages_sent;
        }
        stats.seconds_waited += static_cast<double>(hop->nanoseconds_waited) * 1e-9;
        stats.seconds_for_counts += static_cast<double>(hop->nanoseconds_for_counts) * 1e-9;
        stats.seconds_for_memory += static_cast<double>(hop->nanoseconds_for_memory) * 1e-9;
        stats.seconds_moving += static_cast<double>(hop->nanoseconds_moving) * 1e-9;
    }
    return stats;
}

std::vector<ExchangePeerStats> ExpertExchange::peer_stats() const {
    std::vector<ExchangePeerStats> stats;
    for (const Impl* hop = impl_.get(); hop != nullptr; hop = hop->before.get())
        for (std::uint64_t at = 0; at < hop->group_size(); ++at)
            if (at != static_cast<std::uint64_t>(hop->position)) { // in one hop only
                const Impl::PeerCounters& peer = hop->peers[at];
                stats.push_back({hop->config.ranks[at], peer.bytes_sent, peer.bytes_received,
                                 peer.messages_sent,
                                 static_cast<double>(peer.nanoseconds_waited) * 1e-9});
            }
    std::sort(stats.begin(), stats.end(),
              [](const auto& a, const auto& b) { return a.rank < b.rank; });
    return stats;
}

std::unique_ptr<ExchangeHandle> ExpertExchange::create_handle(std::string name) {
    auto impl = std::make_shared<ExchangeHandle::Impl>(impl_, std::move(name));
    return std::unique_ptr<ExchangeHandle>(new ExchangeHandle(std::move(impl)));
}

} // namespace bellows
