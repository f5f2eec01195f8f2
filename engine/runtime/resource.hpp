// SPDX-License-Identifier: MIT
#pragma once

// A logical allocation: what views name and hazards are tracked on. The memory behind it may be
// bound and replaced. Guarded by Device::Impl::mutex.

#include "ticket.hpp"
#include "vma.hpp"

#include <bellows/engine/kernel_info.hpp>
#include <bellows/engine/memory.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows::detail {

/// One VkBuffer with its memory. Addresses are device addresses.
struct Allocation {
    VkBuffer buffer = VK_NULL_HANDLE;
    VmaAllocation memory = nullptr;           ///< null for a wrapped or imported buffer
    VkDeviceMemory imported = VK_NULL_HANDLE; ///< memory of the caller
    VkDeviceAddress address = 0;
    std::uint64_t bytes = 0;    ///< as asked for
    std::uint64_t capacity = 0; ///< as allocated; reused for requests of the same capacity
    void* mapped = nullptr;
    MemoryKind kind = MemoryKind::Device;
    TicketPtr poisoned; ///< the fill that its users come after; null where there is none
};

/// A half-open byte range.
struct Range {
    std::uint64_t begin = 0, end = 0;

    bool overlaps(const Range& other) const noexcept {
        return begin < other.end && other.begin < end;
    }
    bool contains(const Range& other) const noexcept {
        return begin <= other.begin && other.end <= end;
    }
};

inline Range range_of(const BufferView& view) noexcept {
    const std::uint64_t end = view.offset + view.bytes;
    return {view.offset, end < view.offset ? ~std::uint64_t{0} : end};
}

/// Submitted work that used a range.
struct Use {
    Range range;
    TicketPtr ticket;
};

} // namespace bellows::detail

namespace bellows {

class Resource {
public:
    std::string name;
    MemoryCategory category = MemoryCategory::Scratch;
    MemoryKind kind = MemoryKind::Device;
    bool alive = false;
    bool declared = false; ///< bound later
    bool bound = false;
    detail::Allocation allocation;
    Resource* lender = nullptr;      ///< whose memory `allocation` is, if not its own
    std::uint64_t num_borrowers = 0; ///< resources that have this one as lender
    std::uint64_t epoch = 0;         ///< rises with every bind and unbind
    std::vector<detail::Use> writers, readers;
    /// Earlier users that those come after. Should those fail, these still use the memory.
    std::vector<detail::TicketPtr> covered;
    const detail::Ticket* last_user = nullptr; ///< whose access was the last; only compared

    /// Adds to `waits` the tickets that an access must come after, then registers it as `ticket`.
    void access(detail::Range range, Access kind_of_access, const detail::TicketPtr& ticket,
                std::vector<detail::TicketPtr>& waits);
    /// Every ticket whose work may still use this resource.
    std::vector<detail::TicketPtr> pending_users() const;
};

} // namespace bellows
