// SPDX-License-Identifier: MIT
#include "exchange_impl.hpp"
#include "world/fail_together.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

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

std::uint64_t ExpertExchange::Impl::source_position() const noexcept {
    const std::vector<int>& ranks = whole.ranks;
    return static_cast<std::uint64_t>(std::find(ranks.begin(), ranks.end(), world.rank()) -
                                      ranks.begin());
}

void ExpertExchange::Impl::require_placement(std::uint64_t number) const {
    require(number < replicas.size(), whole.name,
            whole.slots_per_rank == 0
                ? std::string("there are no slots to place experts in: set "
                              "ExchangeConfig::slots_per_rank")
                : "placement " + std::to_string(number) + ", but ExchangeConfig::placements is " +
                      std::to_string(whole.placements));
}

std::vector<bool> ExpertExchange::Impl::living() const {
    std::vector<bool> lives(whole.ranks.size(), true);
    for (std::uint64_t at = 0; at < lives.size() && low_latency(); ++at)
        lives[at] = !without(at);
    return lives;
}

void ExpertExchange::Impl::make_placements() {
    live = living();
    for (std::uint64_t number = 0; number < whole.placements; ++number) {
        replicas.emplace_back(logical_experts, whole.ranks.size(), whole.slots_per_rank);
        replica_tables.emplace_back(
            device, BufferDesc{.name = whole.name + " replicas",
                               .bytes = 4 * replica_words(logical_experts, whole.slots_per_rank *
                                                                               whole.ranks.size()),
                               .category = MemoryCategory::Communication});
        write_table(number);
    }
}

void ExpertExchange::Impl::write_table(std::uint64_t number) {
    std::vector<bool> near;
    for (const int rank : whole.ranks)
        near.push_back(world.topology().same_node(world.rank(), rank));
    const std::vector<std::uint32_t> words = replicas[number].words(source_position(), near, live);
    device.upload(replica_tables[number].view().sub(0, 4 * words.size()), std::span(words));
}

void ExpertExchange::Impl::heed_masks() {
    if (std::vector<bool> lives = living(); lives != live) {
        live = std::move(lives);
        for (std::uint64_t number = 0; number < replicas.size(); ++number)
            write_table(number);
    }
}

void ExpertExchange::Impl::prepare() {
    workgroups = config.workgroups;
    mask = std::make_unique<std::atomic<bool>[]>(group_size());
    peers = std::make_unique<PeerCounters[]>(group_size());
    try_import();
    link = transport.device_link();
    if (link != nullptr && std::none_of(config.ranks.begin(), config.ranks.end(),
                                        [this](int rank) { return link->reaches(rank); }))
        link = nullptr;
}

ExpertExchange::ExpertExchange(Device& device, World& world, Transport& transport,
                               HostThread& thread, ExchangeConfig config) {
    const Topology& topology = world.topology();
    const ExchangeConfig whole = checked(topology, world.rank(), std::move(config));
    for (ExchangeShape& shape : plan_hops(topology, world.rank(), whole)) {
        std::shared_ptr<Impl> before = std::move(impl_);
        impl_.reset(
            new Impl{std::move(shape), device, world, transport, thread, whole, std::move(before)});
        impl_->prepare();
    }
    if (impl_->whole.slots_per_rank > 0)
        impl_->first().make_placements();
    impl_->on_failure = abort_on_failure(world.control(), device);
}

void ExpertExchange::set_placement(std::span<const std::int32_t> expert_of_slot,
                                   std::uint64_t number) {
    fail_together(impl_->world.control(), impl_->whole.ranks.size(), [&] {
        Impl& first = impl_->first();
        first.require_placement(number);
        first.replicas[number].set(expert_of_slot, impl_->whole.name);
        first.write_table(number);
    });
}

std::span<const std::int32_t> ExpertExchange::placement(std::uint64_t number) const {
    if (impl_->whole.slots_per_rank == 0)
        return {};
    impl_->first().require_placement(number);
    return impl_->first().replicas[number].expert_of_slot();
}

std::vector<int> ExpertExchange::owners(std::uint64_t expert, std::uint64_t number) const {
    if (impl_->whole.slots_per_rank > 0) {
        impl_->first().require_placement(number);
        return impl_->first().replicas[number].owners(expert);
    }
    const std::uint64_t ranks = impl_->whole.ranks.size();
    std::uint64_t at = 0;
    while (at + 1 < ranks && first_expert(at + 1, impl_->whole.num_experts, ranks) <= expert)
        ++at;
    return {static_cast<int>(at)};
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
    return impl_->local_experts();
}

std::uint64_t ExpertExchange::first_local_expert() const noexcept {
    const auto first = [](const Impl& hop) {
        return hop.first_expert_of(static_cast<std::uint64_t>(hop.position));
    };
    return first(*impl_) + (impl_->before ? first(*impl_->before) : 0);
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
