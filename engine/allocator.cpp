// SPDX-License-Identifier: MIT
#include "allocator.hpp"

#include "device_impl.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace bellows {

const char* to_string(MemoryCategory category) noexcept {
    switch (category) {
    case MemoryCategory::Weights:
        return "weights";
    case MemoryCategory::Gradients:
        return "gradients";
    case MemoryCategory::Optimizer:
        return "optimiser";
    case MemoryCategory::Activations:
        return "activations";
    case MemoryCategory::DeferredWgrad:
        return "deferred weight gradients";
    case MemoryCategory::Communication:
        return "communication";
    case MemoryCategory::Scratch:
        return "scratch";
    }
    return "unknown";
}

} // namespace bellows

namespace bellows::detail {

namespace {

constexpr std::uint64_t kMinCapacity = 256;

/// Sizes are rounded up to one of eight steps per power of two, so that released buffers serve
/// requests of about their size; at most 1/8 is lost.
std::uint64_t capacity_for(std::uint64_t bytes) {
    bytes = std::max(bytes, kMinCapacity);
    const std::uint64_t step = std::max<std::uint64_t>(std::bit_floor(bytes) / 8, kMinCapacity);
    return (bytes + step - 1) / step * step;
}

} // namespace

Allocator::Allocator(Device::Impl& device) : device_(device) {
    VmaVulkanFunctions functions{};
    functions.vkGetInstanceProcAddr = device.get_instance_proc;
    functions.vkGetDeviceProcAddr = device.vki.vkGetDeviceProcAddr;
    VmaAllocatorCreateInfo info{};
    info.flags = VMA_ALLOCATOR_CREATE_BUFFER_DEVICE_ADDRESS_BIT;
    info.physicalDevice = device.physical_device;
    info.device = device.device;
    info.instance = device.instance;
    info.pVulkanFunctions = &functions;
    info.vulkanApiVersion = VK_API_VERSION_1_3;
    check(vmaCreateAllocator(&info, &vma_), "creating the memory allocator");
    report_.device_bytes = device.info.memory_bytes;
}

Allocator::~Allocator() {
    trim();
    for (Resource& resource : resources_)
        if (resource.bound)
            free(resource.allocation);
    vmaDestroyAllocator(vma_);
}

Allocation Allocator::allocate(std::uint64_t bytes, MemoryKind kind, const std::string& name) {
    const std::uint64_t capacity = capacity_for(bytes);
    if (const auto found = pool_.find({kind, capacity}); found != pool_.end()) {
        Allocation reused = found->second;
        pool_.erase(found);
        pool_bytes_ -= reused.capacity;
        reused.bytes = bytes;
        return reused;
    }
    VkBufferCreateInfo buffer{};
    buffer.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    buffer.size = capacity;
    buffer.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                   VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT |
                   VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
    if (device_.families.size() > 1) {
        buffer.sharingMode = VK_SHARING_MODE_CONCURRENT;
        buffer.queueFamilyIndexCount = static_cast<std::uint32_t>(device_.families.size());
        buffer.pQueueFamilyIndices = device_.families.data();
    }
    VmaAllocationCreateInfo info{};
    info.usage = VMA_MEMORY_USAGE_AUTO_PREFER_DEVICE;
    if (device_.options.poison_freed_memory) // mapped while poisoned, where that is possible
        info.flags = VMA_ALLOCATION_CREATE_HOST_ACCESS_RANDOM_BIT |
                     VMA_ALLOCATION_CREATE_HOST_ACCESS_ALLOW_TRANSFER_INSTEAD_BIT;
    if (kind == MemoryKind::Upload)
        info.flags = VMA_ALLOCATION_CREATE_HOST_ACCESS_SEQUENTIAL_WRITE_BIT |
                     VMA_ALLOCATION_CREATE_MAPPED_BIT;
    if (kind == MemoryKind::Readback) {
        info.usage = VMA_MEMORY_USAGE_AUTO_PREFER_HOST;
        info.flags =
            VMA_ALLOCATION_CREATE_HOST_ACCESS_RANDOM_BIT | VMA_ALLOCATION_CREATE_MAPPED_BIT;
    }
    if (kind != MemoryKind::Device)
        info.requiredFlags = VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    Allocation result;
    VmaAllocationInfo mapped{};
    VkResult status =
        vmaCreateBuffer(vma_, &buffer, &info, &result.buffer, &result.memory, &mapped);
    if (status == VK_ERROR_OUT_OF_DEVICE_MEMORY || status == VK_ERROR_OUT_OF_HOST_MEMORY) {
        trim();
        status = vmaCreateBuffer(vma_, &buffer, &info, &result.buffer, &result.memory, &mapped);
    }
    if (status != VK_SUCCESS)
        throw Error(ErrorCode::OutOfMemory,
                    "no memory for " + name + " of " + std::to_string(bytes) +
                        " bytes: " + std::to_string(report_.bytes) + " of the device's " +
                        std::to_string(report_.device_bytes) + " bytes are in use (" +
                        result_name(status) + ")",
                    -1, status);
    VkBufferDeviceAddressInfo address{};
    address.sType = VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO;
    address.buffer = result.buffer;
    result.address = device_.vk.vkGetBufferDeviceAddress(device_.device, &address);
    result.bytes = bytes;
    result.capacity = capacity;
    result.kind = kind;
    result.mapped = kind == MemoryKind::Device ? nullptr : mapped.pMappedData;
    poison(result);
    return result;
}

void Allocator::free(Allocation& allocation) {
    if (allocation.memory != nullptr)
        vmaDestroyBuffer(vma_, allocation.buffer, allocation.memory);
    allocation = {};
}

void Allocator::poison(const Allocation& allocation) {
    if (!device_.options.poison_freed_memory || allocation.memory == nullptr)
        return;
    VkMemoryPropertyFlags flags = 0;
    vmaGetAllocationMemoryProperties(vma_, allocation.memory, &flags);
    if ((flags & VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT) == 0)
        return;
    void* data = nullptr;
    if (vmaMapMemory(vma_, allocation.memory, &data) != VK_SUCCESS)
        return;
    std::memset(data, 0xff, allocation.capacity); // NaN as f32 and bf16, a huge count as u32
    vmaFlushAllocation(vma_, allocation.memory, 0, VK_WHOLE_SIZE);
    vmaUnmapMemory(vma_, allocation.memory);
}

void Allocator::count(const Resource& resource, bool add) {
    auto& line = report_.categories[static_cast<std::size_t>(resource.category)];
    const std::uint64_t bytes = resource.allocation.bytes;
    if (add) {
        line.bytes += bytes;
        ++line.num_buffers;
        report_.bytes += bytes;
        line.peak_bytes = std::max(line.peak_bytes, line.bytes);
        report_.peak_bytes = std::max(report_.peak_bytes, report_.bytes);
    } else {
        line.bytes -= bytes;
        --line.num_buffers;
        report_.bytes -= bytes;
    }
}

Resource* Allocator::create_resource(const BufferDesc& desc, bool declared) {
    // A dead resource is used again only after many others, so that a stale view is noticed.
    constexpr std::size_t kQuarantine = 4096;
    Resource* resource = nullptr;
    if (dead_.size() > kQuarantine) {
        resource = dead_.front();
        dead_.erase(dead_.begin());
        *resource = Resource{};
    } else {
        resource = &resources_.emplace_back();
    }
    resource->name = desc.name;
    resource->category = desc.category;
    resource->kind = desc.kind;
    resource->declared = declared;
    resource->alive = true;
    return resource;
}

void Allocator::bind(Resource& resource, std::uint64_t bytes) {
    if (resource.bound && !resource.pending_users().empty())
        throw Error(ErrorCode::InvalidArgument,
                    "buffer " + resource.name +
                        " is bound again while work uses it; wait for that work, or bind it in a "
                        "lane job that declares a write to it");
    bind_in_order(resource, bytes);
}

void Allocator::bind_in_order(Resource& resource, std::uint64_t bytes) {
    if (resource.bound)
        release(resource);
    collect();
    resource.allocation = allocate(bytes, resource.kind, resource.name);
    resource.bound = true;
    ++resource.epoch;
    count(resource, true);
}

void Allocator::bind_external(Resource& resource, VkBuffer buffer, std::uint64_t bytes) {
    VkBufferDeviceAddressInfo address{};
    address.sType = VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO;
    address.buffer = buffer;
    resource.allocation = {};
    resource.allocation.buffer = buffer;
    resource.allocation.address = device_.vk.vkGetBufferDeviceAddress(device_.device, &address);
    resource.allocation.bytes = resource.allocation.capacity = bytes;
    resource.bound = true;
    ++resource.epoch;
    count(resource, true);
}

void Allocator::unbind(Resource& resource) {
    if (resource.bound)
        doom(resource, false);
}

void Allocator::destroy_resource(Resource& resource) {
    resource.alive = false;
    doom(resource, true);
}

void Allocator::doom(Resource& resource, bool destroy) {
    Doomed doomed{&resource, resource.epoch, resource.pending_users(), destroy};
    if (device_.num_releases++ == device_.options.faults.release_too_early)
        doomed.users.clear();
    doomed_.push_back(std::move(doomed));
    collect();
}

void Allocator::collect() {
    for (std::size_t i = 0; i < doomed_.size();) {
        const bool done = std::all_of(doomed_[i].users.begin(), doomed_[i].users.end(),
                                      [](const TicketPtr& t) { return t->final_state(); });
        if (!done) {
            ++i;
            continue;
        }
        const Doomed doomed = std::move(doomed_[i]);
        doomed_.erase(doomed_.begin() + static_cast<std::ptrdiff_t>(i));
        if (doomed.resource->bound && doomed.epoch == doomed.resource->epoch)
            release(*doomed.resource);
        if (doomed.destroy)
            retire(*doomed.resource);
    }
    // Keep what a step may want back, not everything there ever was.
    if (pool_bytes_ > std::max<std::uint64_t>(report_.bytes / 2, std::uint64_t{64} << 20))
        trim();
}

/// Puts the memory of a bound resource into the pool.
void Allocator::release(Resource& resource) {
    count(resource, false);
    resource.bound = false;
    ++resource.epoch;
    const Allocation allocation = resource.allocation;
    resource.allocation = {};
    if (device_.checker && !device_.failure) {
        try {
            device_.checker->released(allocation.address, allocation.address + allocation.capacity,
                                      resource.name);
        } catch (const Error& error) {
            device_.set_failure(error);
        }
    }
    if (allocation.memory == nullptr)
        return; // the caller's buffer
    poison(allocation);
    pool_bytes_ += allocation.capacity;
    pool_.emplace(std::pair{allocation.kind, allocation.capacity}, allocation);
}

void Allocator::retire(Resource& resource) {
    resource.writers.clear();
    resource.readers.clear();
    dead_.push_back(&resource);
}

void Allocator::trim() {
    for (auto& [key, allocation] : pool_)
        free(allocation);
    pool_.clear();
    pool_bytes_ = 0;
}

MemoryReport Allocator::report() const {
    return report_;
}

} // namespace bellows::detail
