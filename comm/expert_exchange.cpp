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

void require(bool good, const std::string& name, const std::string& message) {
    if (!good)
        throw Error(ErrorCode::InvalidArgument, name + ": " + message);
}

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

/// A matrix at the start of `memory` whose rows, of whole 16 bytes, stand row_stride bytes from
/// each other.
TensorView strided(BufferView memory, DType dtype, std::uint64_t rows, std::uint64_t columns,
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

} // namespace

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
    return {.codes = strided(memory, DType::F8E4M3, rows, config.hidden, row_stride),
            .scales = strided(memory.sub(codes, memory.bytes - codes), DType::F32, rows, blocks,
                              row_stride),
            .recipe = recipe(),
            .group_offsets = {}};
}

TensorView ExpertExchange::Impl::plain(BufferView memory, DType dtype, std::uint64_t rows,
                                       std::uint64_t row_stride) const {
    return strided(memory, dtype, rows, config.hidden, row_stride);
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

// ---- Handle ---------------------------------------------------------------------------------

Recording* RecordingCache::find(const std::vector<BufferView>& key) {
    const auto same = [](const BufferView& a, const BufferView& b) {
        return a.resource == b.resource && a.offset == b.offset && a.bytes == b.bytes;
    };
    for (auto& [kept_key, recording] : kept_)
        if (std::equal(key.begin(), key.end(), kept_key.begin(), kept_key.end(), same))
            return recording.get();
    return nullptr;
}

Recording& RecordingCache::keep(std::vector<BufferView> key, std::unique_ptr<Recording> recording) {
    kept_.emplace_back(std::move(key), std::move(recording));
    return *kept_.back().second;
}

std::vector<HandleBuffer> handle_buffers(const ExpertExchange::Impl& exchange) {
    using Handle = ExchangeHandle::Impl;
    const ExchangeConfig& c = exchange.config;
    const std::uint64_t members = exchange.group_size(), routes = exchange.routes();
    const std::uint64_t experts = exchange.own_experts();
    const std::uint64_t most_in = exchange.most_received(), most_sent = exchange.most_sent();
    const std::uint64_t slots_out = c.max_tokens * c.top_k, slots_in = most_in * c.top_k;
    const bool by_tokens = exchange.by_tokens(), low_latency = exchange.low_latency();
    const std::uint64_t placed = ops::moe_capacity(most_in, c.top_k, experts, c.alignment);
    const std::uint64_t capacity = exchange.capacity();
    const Record token = exchange.token_record(), gradient = exchange.gradient_record(),
                 sum = exchange.sum_record();
    std::vector<HandleBuffer> all;
    const auto add = [&](Buffer Handle::* buffer, const char* what, std::uint64_t bytes,
                         MemoryKind kind = MemoryKind::Device) {
        all.push_back({buffer, what, std::max<std::uint64_t>(bytes, 16), kind});
    };
    const auto add_wire = [&](Buffer Handle::* buffer, WireMemory Handle::* memory,
                              const char* what, std::uint64_t bytes, bool receives) {
        all.push_back({buffer, what, bytes, MemoryKind::Device, memory, receives});
    };
    add(&Handle::rank_slot_to_row, "rank slots", slots_out * 4);
    if (!low_latency) {
        add(&Handle::rank_ids, "rank ids", slots_out * 4);
        add(&Handle::rank_counts, "rank counts", routes * 4);
        add(&Handle::rank_offsets, "rank offsets", (routes + 1) * 4);
        add(&Handle::rank_row_to_slot, "rank rows",
            ops::moe_capacity(c.max_tokens, c.top_k, routes, 1) * 4);
        add(&Handle::expert_loads, "expert loads", c.num_experts * 4);
        add(&Handle::host_counts, "counts", (routes + c.num_experts) * 4, MemoryKind::Readback);
        if (exchange.quantizes() && !exchange.before)
            add(&Handle::quantized, "quantised", c.max_tokens * token.row_bytes);
    }
    if (!exchange.before) { // else what the hop before brings
        add_wire(&Handle::send_records, &Handle::send_memory, "records to send",
                 low_latency ? c.max_tokens * token.bytes
                             : most_sent * std::max(token.bytes, gradient.bytes),
                 false);
        add_wire(&Handle::back_records, &Handle::back_memory, "records back",
                 (low_latency ? most_in : most_sent) * sum.bytes, true);
    }
    add(&Handle::record_count, "record count", Handle::kCountsAt + (experts + members) * 4,
        MemoryKind::Upload);
    if (low_latency) {
        add_wire(&Handle::received, &Handle::received_memory, "records received",
                 most_in * token.bytes, true);
        add_wire(&Handle::returned, &Handle::returned_memory, "records to return",
                 most_in * sum.bytes, false);
        if (!by_tokens)
            add(&Handle::rows, "rows", capacity * token.row_bytes);
    }
    add(&Handle::slot_ids, "slot ids", slots_in * 4);
    add(&Handle::slot_weights, "slot weights", slots_in * 4);
    add(&Handle::slot_scalars, "slot scalars", slots_in * 4);
    const std::uint64_t workspace =
        std::max(low_latency ? 0 : ops::moe_layout_workspace_bytes(c.max_tokens, c.top_k, routes),
                 by_tokens ? 0 : ops::moe_layout_workspace_bytes(most_in, c.top_k, experts));
    if (workspace > 0)
        add(&Handle::workspace, "workspace", workspace);
    if (by_tokens)
        return all;
    add(&Handle::counts, "expert counts", experts * 4);
    add(&Handle::offsets, "expert offsets", (experts + 1) * 4);
    add(&Handle::row_to_slot, "rows placed", placed * 4);
    add(&Handle::slot_to_row, "slots", slots_in * 4);
    if (!low_latency)
        add(&Handle::weights_of_rows, "row weights", capacity * 4);
    return all;
}

std::uint64_t ExpertExchange::handle_bytes() const {
    std::uint64_t bytes = 0;
    for (const Impl* hop = impl_.get(); hop != nullptr; hop = hop->before.get())
        for (const HandleBuffer& buffer : handle_buffers(*hop))
            bytes += buffer.bytes;
    return bytes;
}

ExchangeHandle::Impl::Impl(std::shared_ptr<ExpertExchange::Impl> of, std::string handle_name)
    : owner(std::move(of)), exchange(*owner), name(std::move(handle_name)),
      before(exchange.before ? std::make_shared<Impl>(exchange.before, name + " between nodes")
                             : nullptr),
      lane(exchange.thread.add_lane(name)), capacity(exchange.capacity()) {
    const std::uint64_t members = exchange.group_size();
    for (const HandleBuffer& made : handle_buffers(exchange))
        this->*made.buffer =
            made.memory != nullptr
                ? make_wire(made.what, made.bytes, made.receives, this->*made.memory)
                : Buffer(exchange.device, {.name = name + " " + made.what,
                                           .bytes = made.bytes,
                                           .kind = made.kind,
                                           .category = MemoryCategory::Communication});
    blank_received.resize(members);
    blank_back.resize(members);
    // What is as large as what arrives, or as what the hop before brings.
    const auto declare = [&](Buffer& buffer, const char* what, MemoryKind kind,
                             MemoryCategory category) {
        buffer = Buffer::declare(exchange.device,
                                 {.name = name + " " + what, .kind = kind, .category = category});
    };
    const auto declare_wire = [&](Buffer& buffer, const char* what) {
        declare(buffer, what, exchange.zero_copy() ? MemoryKind::Readback : MemoryKind::Device,
                MemoryCategory::Communication);
    };
    const auto declare_rows = [&](Buffer& buffer, const char* what) {
        declare(buffer, what, MemoryKind::Device, MemoryCategory::Activations);
    };
    if (before) {
        declare_wire(send_records, "records to send");
        declare_wire(back_records, "records back");
    }
    if (exchange.low_latency()) {
        const auto words = record_count.mapped_as<std::uint32_t>();
        words[0] = static_cast<std::uint32_t>(exchange.most_received());
        words[kZeroAt / 4] = 0;
        sent_rows.assign(members, exchange.config.max_tokens);
        received_rows = sent_rows;
    } else {
        declare_wire(received, "records received");
        declare_wire(returned, "records to return");
        if (!exchange.by_tokens())
            declare_rows(rows, "rows");
    }
    if (exchange.by_tokens())
        declare_wire(gradients, "result gradients");
    else
        declare_rows(gradients, "result gradients");
}

Buffer ExchangeHandle::Impl::make_staging(const char* what, std::uint64_t bytes) const {
    return Buffer(exchange.device, {.name = name + what,
                                    .bytes = bytes,
                                    .kind = MemoryKind::Readback,
                                    .category = MemoryCategory::Communication});
}

Buffer ExchangeHandle::Impl::make_wire(const std::string& what, std::uint64_t bytes, bool receives,
                                       WireMemory& memory) const {
    const std::string of = name + " " + what;
    if (exchange.link != nullptr) {
        memory.link = exchange.link->allocate(bytes, exchange.gone);
        return memory.link->make_buffer(exchange.device, of);
    }
    // What is sent from memory that the node's ranks share is not copied to be sent.
    if (exchange.zero_copy() && !receives)
        memory.shared = exchange.share(bytes);
    if (memory.shared)
        return Buffer::import_host(exchange.device, memory.shared.bytes(), of);
    return Buffer(exchange.device,
                  {.name = of,
                   .bytes = bytes,
                   .kind = exchange.zero_copy() ? MemoryKind::Readback : MemoryKind::Device,
                   .category = MemoryCategory::Communication});
}

TensorView ExchangeHandle::Impl::sent_slots(std::uint64_t num_tokens) const {
    return rank_slot_to_row.tensor(DType::I32, {num_tokens, exchange.config.top_k});
}

ops::MoeLayout ExchangeHandle::Impl::send_layout(std::uint64_t num_tokens) const {
    const ExchangeConfig& c = exchange.config;
    const std::uint64_t routes = exchange.routes();
    return {.counts = rank_counts.tensor(DType::U32, {routes}),
            .offsets = rank_offsets.tensor(DType::U32, {routes + 1}),
            .row_to_slot = rank_row_to_slot.tensor(
                DType::I32, {ops::moe_capacity(num_tokens, c.top_k, routes, 1)}),
            .slot_to_row = sent_slots(num_tokens),
            .alignment = 1};
}

ops::MoeLayout ExchangeHandle::Impl::receive_layout() const {
    const std::uint64_t local = exchange.own_experts();
    const ExchangeConfig& c = exchange.config;
    const std::uint64_t most_in = exchange.most_received();
    return {.counts = counts.tensor(DType::U32, {local}),
            .offsets = offsets.tensor(DType::U32, {local + 1}),
            .row_to_slot = row_to_slot.tensor(
                DType::I32, {ops::moe_capacity(most_in, c.top_k, local, c.alignment)}),
            .slot_to_row = slot_to_row.tensor(DType::I32, {most_in, c.top_k}),
            .alignment = c.alignment};
}

BufferView ExchangeHandle::Impl::row_count() const {
    if (exchange.masked())
        return {}; // see expert_counts()
    return exchange.by_tokens() ? record_count.view().sub(0, 4) : receive_layout().row_count();
}

BufferView ExchangeHandle::Impl::first_rows() const {
    const std::uint64_t members = exchange.group_size();
    return record_count.view().sub(record_count.size() - members * 4, members * 4);
}

TensorView ExchangeHandle::Impl::tokens_in_records() const {
    const Record record = exchange.token_record();
    const TensorView records =
        record.codes()
            ? strided(received.view(), DType::F8E4M3, capacity, record.row_bytes, record.bytes)
            : exchange.plain(received.view(), record.dtype, capacity, record.bytes);
    return records.with_row_count(row_count());
}

TensorView ExchangeHandle::Impl::row_experts() const {
    return slot_ids.tensor(DType::I32, {capacity, exchange.config.top_k})
        .with_row_count(row_count());
}

TensorView ExchangeHandle::Impl::row_weights() const {
    const TensorView weights =
        exchange.by_tokens() ? slot_weights.tensor(DType::F32, {capacity, exchange.config.top_k})
                             : weights_of_rows.tensor(DType::F32, {capacity});
    return weights.with_row_count(row_count());
}

TensorView ExchangeHandle::Impl::results_in_records() const {
    const Record record = exchange.sum_record();
    return exchange.plain(returned.view(), record.dtype, capacity, record.bytes)
        .with_row_count(row_count());
}

TensorView ExchangeHandle::Impl::d_results() const {
    const Record record = exchange.gradient_record();
    return exchange
        .plain(gradients.view(), record.dtype, capacity,
               exchange.by_tokens() ? record.bytes : record.row_bytes)
        .with_row_count(row_count());
}

void ExchangeHandle::Impl::drop_recordings() {
    if (before)
        before->drop_recordings();
    for (RecordingCache* cache :
         {&pack_dispatch, &pack_backward, &unpack_dispatch, &unpack_backward, &reduce_forward,
          &reduce_backward, &finish_forward, &finish_backward})
        cache->clear();
}

ExchangeHandle::ExchangeHandle(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
}

// The recordings end on this thread, which may wait; the lane's jobs keep the rest.
ExchangeHandle::~ExchangeHandle() {
    impl_->drop_recordings();
}

TensorView ExchangeHandle::add_row_tensor(std::string name, DType dtype, std::uint64_t columns,
                                          MemoryCategory category) {
    require(!impl_->dispatched, impl_->name, "row tensors are added before the first dispatch");
    require(!impl_->exchange.low_latency(), impl_->name,
            "a low-latency handle's rows are there at all times: make a tensor of capacity() rows");
    ExchangeHandle::Impl::RowTensor tensor;
    tensor.buffer = std::make_unique<Buffer>(Buffer::declare(
        impl_->exchange.device, {.name = impl_->name + " " + name, .category = category}));
    tensor.row_bytes = columns * size_of(dtype);
    impl_->row_tensors.push_back(std::move(tensor));
    return impl_->row_tensors.back()
        .buffer->tensor(dtype, {impl_->capacity, columns})
        .with_row_count(impl_->row_count());
}

TensorView ExchangeHandle::rows() const {
    const ExpertExchange::Impl& exchange = impl_->exchange;
    if (exchange.quantizes())
        return quantized_rows().codes;
    const BufferView memory = (exchange.by_tokens() ? impl_->received : impl_->rows).view();
    const Record record = exchange.token_record();
    return exchange
        .plain(memory, record.dtype, impl_->capacity,
               exchange.by_tokens() ? record.bytes : record.row_bytes)
        .with_row_count(impl_->row_count());
}

fp8::Quantized ExchangeHandle::quantized_rows() const {
    const ExpertExchange::Impl& exchange = impl_->exchange;
    require(exchange.quantizes(), impl_->name,
            "tokens travel as they are: set ExchangeConfig::token_wire to F8E4M3 for codes");
    const BufferView memory = (exchange.by_tokens() ? impl_->received : impl_->rows).view();
    const Record record = exchange.token_record();
    fp8::Quantized rows = exchange.quantized(
        memory, impl_->capacity, exchange.by_tokens() ? record.bytes : record.row_bytes);
    rows.codes.row_count = rows.scales.row_count = impl_->row_count();
    return rows;
}

TensorView ExchangeHandle::results() const {
    require(impl_->exchange.by_tokens(), impl_->name,
            "results of ExpertMajor stand wherever the caller wants them");
    return impl_->results_in_records();
}

TensorView ExchangeHandle::d_results() const {
    require(!impl_->exchange.low_latency(), impl_->name, "low-latency mode goes forward only");
    return impl_->d_results();
}

std::uint64_t ExchangeHandle::spacing() const {
    require(impl_->exchange.masked(), impl_->name, "only masked rows have a spacing");
    return impl_->exchange.most_received();
}

TensorView ExchangeHandle::row_weights() const {
    require(!impl_->exchange.masked(), impl_->name,
            "low-latency combine applies the weights itself");
    return impl_->row_weights();
}

TensorView ExchangeHandle::row_experts() const {
    require(impl_->exchange.by_tokens(), impl_->name,
            "rows of ExpertMajor stand by expert: see expert_offsets()");
    return impl_->row_experts();
}

TensorView ExchangeHandle::expert_offsets() const {
    require(!impl_->exchange.by_tokens() && !impl_->exchange.low_latency(), impl_->name,
            impl_->exchange.by_tokens()
                ? "rows of RankMajor do not stand by expert: see row_experts()"
                : "low-latency rows of expert e begin at e * spacing()");
    return impl_->receive_layout().offsets;
}

TensorView ExchangeHandle::expert_counts() const {
    const ExpertExchange::Impl& exchange = impl_->exchange;
    if (!exchange.by_tokens())
        return impl_->receive_layout().counts;
    require(!exchange.low_latency(), impl_->name,
            "nobody has counted low-latency rows by source rank: see row_experts()");
    const std::uint64_t local = exchange.experts_of(static_cast<std::uint64_t>(exchange.position));
    return TensorView::contiguous(
        impl_->record_count.view().sub(ExchangeHandle::Impl::kCountsAt, local * 4), DType::U32,
        {local});
}

std::uint64_t ExchangeHandle::capacity() const {
    return impl_->capacity;
}

} // namespace bellows
