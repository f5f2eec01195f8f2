// SPDX-License-Identifier: MIT
#pragma once

// Memory blocks behind resources: VMA for the blocks, a pool of released buffers that are used
// again once the work that used them has been reached, poisoning (poison.hpp) for tests, and the
// sums of the memory report. All members need Device::Impl::mutex.

#include "poison.hpp"
#include "resource.hpp"

#include <bellows/engine/device.hpp>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

namespace bellows::detail {

class Allocator {
public:
    explicit Allocator(Device::Impl& device);
    ~Allocator();

    Resource* create_resource(const BufferDesc& desc, bool declared);
    /// Throws Error{InvalidArgument} while work that uses an earlier binding is pending.
    void bind(Resource& resource, std::uint64_t bytes);
    /// For lane jobs that have ordered themselves after all earlier users: pending users are later
    /// ones and get the new memory.
    void bind_in_order(Resource& resource, std::uint64_t bytes);
    void bind_external(Resource& resource, VkBuffer buffer, std::uint64_t bytes);
    /// As bind(), to the lender's memory.
    void bind_lent(Resource& resource, Resource& lender);
    /// Imports the caller's memory; in order, as bind_in_order().
    void bind_host(Resource& resource, std::span<std::byte> memory);
    /// The same with memory behind a file descriptor.
    void bind_opaque(Resource& resource, OpaqueMemory memory);
    /// Return the memory once all pending users are final, at once where there are none.
    void unbind(Resource& resource);
    void destroy_resource(Resource& resource);
    /// Carries out what had to wait for pending users.
    void collect();
    /// Gives pooled memory back to the driver, except what is being poisoned.
    void trim();
    /// Asks the driver for its budget, too.
    MemoryReport report() const;
    VmaAllocator vma() const noexcept { return vma_; }

private:
    /// A resource that loses its memory when its users are final.
    struct Doomed {
        Resource* resource = nullptr;
        std::uint64_t epoch = 0;
        std::vector<TicketPtr> users;
        bool destroy = false;
    };
    void require_unused(const Resource& resource) const;
    void doom(Resource& resource, bool destroy);
    void release(Resource& resource);
    void retire(Resource& resource);
    Allocation allocate(const BufferDesc& desc);
    VkBufferCreateInfo buffer_info(std::uint64_t bytes) const;
    VkDeviceAddress address_of(VkBuffer buffer) const;
    /// Binds the resource to memory that `import` makes for its buffer, of made.bytes.
    using Import = std::function<VkDeviceMemory(VkBuffer)>;
    void bind_imported(Resource& resource, Allocation made, VkExternalMemoryHandleTypeFlags handle,
                       const Import& import);
    /// Allocates with `source` in the first of these types of memory that takes it, those with
    /// `preferred` before others.
    VkDeviceMemory import(const void* source, std::uint64_t bytes, std::uint32_t types,
                          VkMemoryPropertyFlags needed, VkMemoryPropertyFlags preferred,
                          const std::string& name);
    VkDeviceMemory import_host(std::span<std::byte> memory, VkBuffer buffer,
                               const std::string& name);
    VkDeviceMemory import_opaque(OpaqueMemory memory, VkBuffer buffer, const std::string& name);
    std::uint32_t memory_types_for(VkBuffer buffer) const;
    void free(Allocation& allocation);
    void poison(Allocation& allocation);
    void count(const Resource& resource, bool add);
    [[noreturn]] void fail_out_of_memory(const BufferDesc& wanted, VkResult status) const;

    Device::Impl& device_;
    VmaAllocator vma_ = nullptr;
    std::unique_ptr<Poisoner> poisoner_; ///< where DeviceOptions::poison_freed_memory
    std::deque<Resource> resources_;
    std::vector<Resource*> dead_;
    std::vector<Doomed> doomed_;
    std::multimap<std::pair<MemoryKind, std::uint64_t>, Allocation> pool_;
    std::uint64_t pool_bytes_ = 0;
    std::uint64_t held_bytes_ = 0;
    std::uint64_t most_bytes_ = 0; ///< of one buffer
    std::uint32_t heap_ = 0;       ///< the largest device-local one
    MemoryReport report_;
};

} // namespace bellows::detail
