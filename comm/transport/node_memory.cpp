// SPDX-License-Identifier: MIT
#include "node_memory.hpp"

#include "world/mpi_context.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/memory.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace bellows {

namespace {

/// Tags of the control plane for this file, far from small numbers that others choose.
constexpr std::uint64_t kTags = std::uint64_t{0x6e6f6465} << 24;

/// More than the machine has cannot be used; what is not touched costs nothing.
std::uint64_t segment_bytes() {
    const auto pages = static_cast<std::uint64_t>(std::max(::sysconf(_SC_PHYS_PAGES), 1L));
    const auto page = static_cast<std::uint64_t>(std::max(::sysconf(_SC_PAGESIZE), 4096L));
    return std::bit_ceil(std::max(pages * page, std::uint64_t{1} << 30));
}

std::byte* map(int fd, std::uint64_t bytes) noexcept {
    void* const base =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return base == MAP_FAILED ? nullptr : static_cast<std::byte*>(base);
}

/// What a peer has sent is what it said it is: it cannot shrink under our reads.
bool is_segment(int fd, std::uint64_t bytes) noexcept {
    struct stat status{};
    const int seals = ::fcntl(fd, F_GET_SEALS);
    return ::fstat(fd, &status) == 0 && static_cast<std::uint64_t>(status.st_size) == bytes &&
           seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

} // namespace

FileDescriptor NodeMemory::create(std::uint64_t head_bytes) {
    FileDescriptor file(::memfd_create("bellows", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const std::uint64_t bytes = segment_bytes();
    if (!file || ::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0 ||
        ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return {};
    mine_.base = map(file.get(), bytes);
    if (mine_.base == nullptr)
        return {};
    mine_.bytes = bytes;
    const std::uint64_t head = round_up(head_bytes, kBlockBytes);
    free_.emplace(head, bytes - head);
    return file;
}

NodeMemory::NodeMemory(World& world, std::uint64_t head_bytes, bool offer,
                       std::chrono::milliseconds timeout)
    : peers_(static_cast<std::size_t>(world.size())) {
    const std::uint64_t tag = kTags + world.impl().node_memories++; // collective: alike everywhere
    ControlPlane& control = world.control();
    std::vector<int> others;
    for (const int peer : world.ranks_of_node(world.node()))
        if (peer != world.rank() && control.can_pass_fds(peer))
            others.push_back(peer);
    if (others.empty())
        return;
    if (offer)
        file_ = create(head_bytes);
    for (const int peer : others) {
        control.send(peer, tag, std::as_bytes(std::span(&mine_.bytes, 1)));
        if (file_)
            control.send_fd(peer, tag, file_.get());
    }
    const auto number = [&](int peer) {
        const std::vector<std::byte> bytes = control.recv(peer, tag, timeout);
        std::uint64_t value = 0;
        std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
        return value;
    };
    for (const int peer : others) {
        Segment& theirs = peers_[static_cast<std::size_t>(peer)];
        theirs.bytes = number(peer);
        if (theirs.bytes > 0) {
            const FileDescriptor fd = control.recv_fd(peer, tag, timeout);
            if (file_ && theirs.bytes > head_bytes && is_segment(fd.get(), theirs.bytes))
                theirs.base = map(fd.get(), theirs.bytes);
        }
        const std::uint64_t mapped = theirs.base != nullptr;
        control.send(peer, tag, std::as_bytes(std::span(&mapped, 1)));
    }
    for (const int peer : others) {
        Segment& theirs = peers_[static_cast<std::size_t>(peer)];
        theirs.reached = number(peer) != 0 && theirs.base != nullptr;
    }
}

NodeMemory::~NodeMemory() {
    if (mine_.base != nullptr)
        ::munmap(mine_.base, mine_.bytes);
    for (const Segment& segment : peers_)
        if (segment.base != nullptr)
            ::munmap(segment.base, segment.bytes);
}

bool NodeMemory::reaches(int peer) const noexcept {
    return segment(peer).reached;
}

bool NodeMemory::reaches_any() const noexcept {
    return std::any_of(peers_.begin(), peers_.end(), [](const Segment& s) { return s.reached; });
}

NodeMemory::Block NodeMemory::allocate(std::uint64_t bytes) {
    const std::uint64_t wanted = round_up(std::max<std::uint64_t>(bytes, 1), kBlockBytes);
    const std::scoped_lock lock(mutex_);
    const auto found = std::find_if(free_.begin(), free_.end(),
                                    [&](const auto& range) { return range.second >= wanted; });
    if (found == free_.end())
        throw Error(ErrorCode::OutOfMemory, "no room for " + format_bytes(wanted) +
                                                " in the memory that this node's ranks share: " +
                                                format_bytes(used_bytes_) + " of " +
                                                format_bytes(mine_.bytes) + " are in use");
    const Block block{found->first, wanted, ++last_id_};
    const std::uint64_t left = found->second - wanted;
    free_.erase(found);
    if (left > 0)
        free_.emplace(block.offset + wanted, left);
    blocks_.emplace(block.offset, block);
    used_bytes_ += wanted;
    kept_bytes_ -= std::min(kept_bytes_, wanted);
    return block;
}

void NodeMemory::free(const Block& block) noexcept {
    const std::scoped_lock lock(mutex_);
    blocks_.erase(block.offset);
    used_bytes_ -= block.bytes;
    kept_bytes_ += block.bytes;
    auto range = free_.emplace(block.offset, block.bytes).first;
    if (const auto after = std::next(range);
        after != free_.end() && range->first + range->second == after->first) {
        range->second += after->second;
        free_.erase(after);
    }
    if (range != free_.begin()) {
        const auto before = std::prev(range);
        if (before->first + before->second == range->first) {
            before->second += range->second;
            free_.erase(range);
        }
    }
    // Pages that are used again at once cost nothing, those of a large exchange that is over do.
    constexpr std::uint64_t kKept = std::uint64_t{256} << 20;
    if (kept_bytes_ > kKept + used_bytes_)
        trim(block.offset, block.bytes);
}

void NodeMemory::trim(std::uint64_t offset, std::uint64_t bytes) noexcept {
    if (::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                    static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0)
        kept_bytes_ -= bytes;
}

std::optional<NodeMemory::Block> NodeMemory::holding(std::span<const std::byte> bytes) const {
    const auto offset = reinterpret_cast<std::uintptr_t>(bytes.data()) -
                        reinterpret_cast<std::uintptr_t>(mine_.base);
    if (mine_.base == nullptr || offset >= mine_.bytes || bytes.size() > mine_.bytes - offset)
        return std::nullopt;
    const std::scoped_lock lock(mutex_);
    auto found = blocks_.upper_bound(offset);
    if (found == blocks_.begin())
        return std::nullopt;
    const Block& block = (--found)->second;
    if (offset + bytes.size() > block.offset + block.bytes)
        return std::nullopt;
    return block;
}

} // namespace bellows
