// SPDX-License-Identifier: MIT
#include "device_link.hpp"

#include "world/mpi_context.hpp"

#include <bellows/engine/device.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace bellows {

namespace {

/// Tags of the control plane for this file, far from small numbers that others choose.
constexpr std::uint64_t kTags = std::uint64_t{0x6c} << 56;
constexpr std::uint64_t kTagsPerLink = std::uint64_t{1} << 40;
constexpr std::uint64_t kGone = kTagsPerLink / 2; ///< beside the tag of a block

/// The driver that serves the device; null, and why, where none does.
std::unique_ptr<LinkDriver> driver_for(const TransportOptions& options, std::string& why_not) {
    if (options.device == nullptr || options.device_link == DeviceLinkKind::Off) {
        why_not = "it is off";
        return nullptr;
    }
    const DeviceInfo& info = options.device->info();
    if (options.device_link == DeviceLinkKind::Host) {
        if (info.host_import_alignment == 0 || info.host_import_alignment > 4096)
            why_not = info.name + " takes no host memory";
        return why_not.empty() ? make_host_link_driver() : nullptr;
    }
    if (info.is_cpu || !info.imports_opaque_memory) {
        why_not = info.name + " takes no memory of another driver";
        return nullptr;
    }
    std::unique_ptr<LinkDriver> driver = make_cuda_link_driver(info.uuid, why_not);
    if (!driver)
        return nullptr;
    try { // whether Vulkan takes its memory
        const LinkBlock block(driver->allocate(1), 0, nullptr);
        static_cast<void>(block.make_buffer(*options.device, "device link probe"));
    } catch (const Error& error) {
        why_not = error.message();
        return nullptr;
    }
    return driver;
}

} // namespace

const char* to_string(DeviceLinkKind kind) noexcept {
    return kind == DeviceLinkKind::Auto ? "auto" : kind == DeviceLinkKind::Off ? "off" : "host";
}

DeviceLinkKind device_link_kind(std::string_view text) {
    for (const DeviceLinkKind kind :
         {DeviceLinkKind::Auto, DeviceLinkKind::Off, DeviceLinkKind::Host})
        if (text == to_string(kind))
            return kind;
    throw Error(ErrorCode::InvalidArgument,
                "device_link is \"auto\", \"off\" or \"host\", not \"" + std::string(text) + "\"");
}

void GoneBlocks::add(int peer, std::uint64_t id) noexcept {
    const std::scoped_lock lock(mutex_);
    ids_[peer].push_back(id);
}

std::vector<std::uint64_t> GoneBlocks::take(int peer) {
    const std::scoped_lock lock(mutex_);
    return std::exchange(ids_[peer], {});
}

LinkBlock::~LinkBlock() {
    for (const int peer : passed_)
        gone_->add(peer, id_);
}

Buffer LinkBlock::make_buffer(Device& device, std::string name, MemoryCategory category) const {
    return allocation_.host.empty()
               ? Buffer::import_opaque(device, opaque(), std::move(name), category)
               : Buffer::import_host(device, allocation_.host, std::move(name), category);
}

void LinkBlock::bind(LaneContext& context, Buffer& buffer) const {
    if (allocation_.host.empty())
        context.bind(buffer, opaque());
    else
        context.bind(buffer, allocation_.host);
}

DeviceLink::DeviceLink(World& world, std::unique_ptr<LinkDriver> driver,
                       std::chrono::milliseconds timeout)
    : control_(world.control()), driver_(std::move(driver)),
      tags_(kTags + kTagsPerLink * world.impl().device_links++), // collective: alike everywhere
      reached_(static_cast<std::size_t>(world.size())) {
    std::vector<int> others;
    for (const int peer : world.ranks_of_node(world.node()))
        if (peer != world.rank() && control_.can_pass_fds(peer))
            others.push_back(peer);
    const auto tell = [&](int peer, std::string_view text) {
        control_.send(peer, tags_, std::as_bytes(std::span(text)));
    };
    const auto hear = [&](int peer) {
        const std::vector<std::byte> bytes = control_.recv(peer, tags_, timeout);
        return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    for (const int peer : others)
        tell(peer, driver_ ? driver_->device_id() : "");
    std::vector<bool> reaches_theirs;
    for (const int peer : others) {
        const std::string theirs = hear(peer);
        reaches_theirs.push_back(driver_ && driver_->reaches(theirs));
        tell(peer, reaches_theirs.back() ? "yes" : "");
    }
    for (std::size_t i = 0; i < others.size(); ++i)
        reached_[static_cast<std::size_t>(others[i])] =
            hear(others[i]) == "yes" && reaches_theirs[i];
    reached_by_[world.rank()] = reached_;
    std::string mine;
    for (const bool reached : reached_)
        mine += reached ? '1' : '0';
    for (const int peer : others)
        tell(peer, mine);
    for (const int peer : others) {
        const std::string theirs = hear(peer);
        std::vector<bool>& row = reached_by_[peer];
        for (const char reached : theirs)
            row.push_back(reached == '1');
        row.resize(reached_.size());
    }
}

bool DeviceLink::connects(std::span<const int> ranks) const noexcept {
    return std::ranges::all_of(ranks, [&](int from) {
        const auto others = reached_by_.find(from);
        return std::ranges::all_of(ranks, [&](int to) {
            const auto at = static_cast<std::size_t>(to);
            return from == to || (others != reached_by_.end() && others->second[at]);
        });
    });
}

bool DeviceLink::reaches_any() const noexcept {
    return std::find(reached_.begin(), reached_.end(), true) != reached_.end();
}

std::shared_ptr<LinkBlock> DeviceLink::allocate(std::uint64_t bytes,
                                                std::shared_ptr<GoneBlocks> gone) {
    return std::make_shared<LinkBlock>(driver_->allocate(bytes), ++last_id_, std::move(gone));
}

std::shared_ptr<LinkBlock> DeviceLink::share(const LinkBlock& block,
                                             std::shared_ptr<GoneBlocks> gone) {
    const LinkAllocation& of = block.allocation_;
    return std::make_shared<LinkBlock>(LinkAllocation{of.memory, of.file.duplicate(), of.host},
                                       ++last_id_, std::move(gone));
}

void DeviceLink::pass(int peer, LinkBlock& block) const {
    const std::scoped_lock lock(block.mutex_);
    if (std::find(block.passed_.begin(), block.passed_.end(), peer) != block.passed_.end())
        return;
    const std::vector<std::uint64_t> gone = block.gone_->take(peer);
    control_.send(peer, tag_of(block.id()) + kGone, std::as_bytes(std::span(gone)));
    control_.send_fd(peer, tag_of(block.id()), block.allocation_.file.get());
    block.passed_.push_back(peer);
}

std::shared_ptr<LinkMemory> DeviceLink::open(int peer, std::uint64_t id, std::uint64_t bytes,
                                             OpenedBlocks& opened) const {
    if (const auto known = opened.find({peer, id}); known != opened.end())
        return known->second;
    std::optional<FileDescriptor> file = control_.try_recv_fd(peer, tag_of(id));
    if (!file)
        return nullptr;
    // It was sent before the descriptor, so it is here.
    const std::vector<std::byte> gone =
        control_.recv(peer, tag_of(id) + kGone, std::chrono::seconds(1));
    for (std::size_t at = 0; at + sizeof id <= gone.size(); at += sizeof id) {
        std::uint64_t closed = 0;
        std::memcpy(&closed, gone.data() + at, sizeof closed);
        opened.erase({peer, closed});
    }
    return opened[{peer, id}] = driver_->open(std::move(*file), bytes);
}

std::unique_ptr<LinkCopy> DeviceLink::copy_from(int peer, std::vector<LinkRange> ranges) const {
    return driver_->copy(static_cast<std::size_t>(peer), std::move(ranges));
}

std::unique_ptr<DeviceLink> make_device_link(World& world, const TransportOptions& options,
                                             std::string& why_not) {
    auto link =
        std::make_unique<DeviceLink>(world, driver_for(options, why_not), options.setup_timeout);
    if (link->reaches_any())
        return link;
    if (why_not.empty())
        why_not = "no other rank of the node can be reached";
    return nullptr;
}

} // namespace bellows
