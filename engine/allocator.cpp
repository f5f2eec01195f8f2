// SPDX-License-Identifier: MIT
#include "allocator.hpp"

#include "device_impl.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

namespace bellows::detail {

namespace {

constexpr std::uint64_t kMinCapacity = 256;

/// What makes memory of a category smaller.
const char* way_out(MemoryCategory category) {
    switch (category) {
    case MemoryCategory::Weights:
    case MemoryCategory::Gradients:
    case MemoryCategory::Optimizer:
        return "take a smaller model, or spread it over more devices (expert or pipeline "
               "parallel)";
    case MemoryCategory::Activations:
    case MemoryCategory::DeferredWgrad:
        return "make micro-batches smaller (more of them, or shorter sequences), or have fewer in "
               "flight";
    case MemoryCategory::Communication:
        return "make micro-batches smaller, so that an exchange carries fewer tokens";
    case MemoryCategory::Scratch:
        return "make micro-batches smaller: workspaces grow with their tokens";
    }
    return "ask for less";
}

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
    if (device.options.poison_freed_memory)
        poisoner_ = std::make_unique<Poisoner>(device);
    VkPhysicalDeviceVulkan13Properties v13{};
    v13.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_PROPERTIES;
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &v13;
    device.vki.vkGetPhysicalDeviceProperties2(device.physical_device, &properties);
    constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60; // rounding up stays in 64 bits
    most_bytes_ = std::min<std::uint64_t>(kMostBytes, v13.maxBufferSize) / 256 * 256;
    report_.device_bytes = device.info.memory_bytes;
    const VkPhysicalDeviceMemoryProperties* memory = nullptr;
    vmaGetMemoryProperties(vma_, &memory);
    for (std::uint32_t i = 0; i < memory->memoryHeapCount; ++i)
        if ((memory->memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT) &&
            memory->memoryHeaps[i].size == report_.device_bytes)
            heap_ = i;
}

Allocator::~Allocator() {
    poisoner_.reset(); // ends what still writes
    trim();
    for (Resource& resource : resources_)
        if (resource.bound)
            free(resource.allocation);
    vmaDestroyAllocator(vma_);
}

Allocation Allocator::allocate(const BufferDesc& desc) {
    if (desc.bytes > most_bytes_)
        fail_out_of_memory(desc, VK_ERROR_OUT_OF_DEVICE_MEMORY);
    const MemoryKind kind = desc.kind;
    const std::uint64_t capacity = std::min(capacity_for(desc.bytes), most_bytes_);
    if (const auto found = pool_.find({kind, capacity}); found != pool_.end()) {
        Allocation reused = found->second;
        pool_.erase(found);
        pool_bytes_ -= reused.capacity;
        reused.bytes = desc.bytes;
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
        fail_out_of_memory(desc, status);
    held_bytes_ += capacity;
    VkBufferDeviceAddressInfo address{};
    address.sType = VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO;
    address.buffer = result.buffer;
    result.address = device_.vk.vkGetBufferDeviceAddress(device_.device, &address);
    result.bytes = desc.bytes;
    result.capacity = capacity;
    result.kind = kind;
    result.mapped = kind == MemoryKind::Device ? nullptr : mapped.pMappedData;
    poison(result);
    return result;
}

void Allocator::free(Allocation& allocation) {
    if (allocation.memory != nullptr) {
        vmaDestroyBuffer(vma_, allocation.buffer, allocation.memory);
        held_bytes_ -= allocation.capacity;
    }
    allocation = {};
}

void Allocator::poison(Allocation& allocation) {
    if (!poisoner_ || allocation.memory == nullptr)
        return;
    if (allocation.mapped == nullptr) {
        allocation.poisoned = poisoner_->fill(allocation.buffer);
        return;
    }
    std::memset(allocation.mapped, Poisoner::kWord & 0xff, allocation.capacity);
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
    resource.allocation = allocate({.name = resource.name,
                                    .bytes = bytes,
                                    .kind = resource.kind,
                                    .category = resource.category});
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
    Allocation allocation = std::exchange(resource.allocation, {});
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
    if (poisoner_)
        poisoner_->collect();
    for (auto at = pool_.begin(); at != pool_.end();) {
        if (at->second.poisoned != nullptr && !at->second.poisoned->final_state()) {
            ++at;
            continue;
        }
        pool_bytes_ -= at->second.capacity;
        free(at->second);
        at = pool_.erase(at);
    }
}

MemoryReport Allocator::report() const {
    MemoryReport report = report_;
    report.held_bytes = report.used_bytes = held_bytes_;
    report.pooled_bytes = pool_bytes_;
    report.budget_bytes = report.device_bytes;
    report.has_budget = device_.has_memory_budget;
    if (report.has_budget) {
        VkPhysicalDeviceMemoryBudgetPropertiesEXT budget{};
        budget.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_BUDGET_PROPERTIES_EXT;
        VkPhysicalDeviceMemoryProperties2 properties{};
        properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_MEMORY_PROPERTIES_2;
        properties.pNext = &budget;
        device_.vki.vkGetPhysicalDeviceMemoryProperties2(device_.physical_device, &properties);
        report.budget_bytes = budget.heapBudget[heap_];
        report.used_bytes = budget.heapUsage[heap_];
    }
    return report;
}

void Allocator::fail_out_of_memory(const BufferDesc& wanted, VkResult status) const {
    const MemoryReport now = report();
    std::string text = "no memory for " + wanted.name + " (" + to_string(wanted.category) +
                       ") of " + format_bytes(wanted.bytes) + ": Bellows holds " +
                       format_bytes(now.held_bytes) + " and the device has " +
                       format_bytes(now.device_bytes);
    if (now.has_budget)
        text += ", of which the driver grants this process " + format_bytes(now.budget_bytes) +
                " (" + format_bytes(now.used_bytes) + " used)";
    text += std::string(" (") + result_name(status) + ").";
    if (wanted.bytes > most_bytes_)
        text += " One buffer may have at most " + format_bytes(most_bytes_) + " there.";
    MemoryCategory to_shrink = wanted.category;
    if (now.bytes > 0) {
        text += " In use are " + describe_memory(now.sizes()) + ".";
        if (now.of(now.largest()).bytes > wanted.bytes)
            to_shrink = now.largest();
    }
    text += std::string(" The largest part is ") + to_string(to_shrink) + "; " +
            way_out(to_shrink) + ".";
    throw Error(ErrorCode::OutOfMemory, text, -1, status);
}

} // namespace bellows::detail
