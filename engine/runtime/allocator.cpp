// SPDX-License-Identifier: MIT
#include "allocator.hpp"

#include "device_impl.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <unistd.h>
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
    case MemoryCategory::Cache:
        return "give the cache fewer tokens, or keep it in a smaller type (bf16, fp8)";
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
        if (resource.bound && resource.lender == nullptr)
            free(resource.allocation);
    vmaDestroyAllocator(vma_);
}

VkBufferCreateInfo Allocator::buffer_info(std::uint64_t bytes) const {
    VkBufferCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    info.size = bytes;
    info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT |
                 VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
    if (device_.families.size() > 1) {
        info.sharingMode = VK_SHARING_MODE_CONCURRENT;
        info.queueFamilyIndexCount = static_cast<std::uint32_t>(device_.families.size());
        info.pQueueFamilyIndices = device_.families.data();
    }
    return info;
}

VkDeviceAddress Allocator::address_of(VkBuffer buffer) const {
    VkBufferDeviceAddressInfo info{};
    info.sType = VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO;
    info.buffer = buffer;
    return device_.vk.vkGetBufferDeviceAddress(device_.device, &info);
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
    const VkBufferCreateInfo buffer = buffer_info(capacity);
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
    result.address = address_of(result.buffer);
    result.bytes = desc.bytes;
    result.capacity = capacity;
    result.kind = kind;
    result.mapped = kind == MemoryKind::Device ? nullptr : mapped.pMappedData;
    poison(result);
    return result;
}

std::uint32_t Allocator::memory_types_for(VkBuffer buffer) const {
    VkMemoryRequirements needs{};
    device_.vk.vkGetBufferMemoryRequirements(device_.device, buffer, &needs);
    return needs.memoryTypeBits;
}

VkDeviceMemory Allocator::import(const void* source, std::uint64_t bytes, std::uint32_t types,
                                 VkMemoryPropertyFlags needed, VkMemoryPropertyFlags preferred,
                                 const std::string& name) {
    const VkPhysicalDeviceMemoryProperties* memory = nullptr;
    vmaGetMemoryProperties(vma_, &memory);
    VkMemoryAllocateFlagsInfo flags{};
    flags.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO;
    flags.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
    flags.pNext = source;
    VkMemoryAllocateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
    info.pNext = &flags;
    info.allocationSize = bytes;
    VkResult status = VK_ERROR_INVALID_EXTERNAL_HANDLE;
    for (const bool first : {true, false})
        for (std::uint32_t i = 0; i < memory->memoryTypeCount; ++i) {
            const VkMemoryPropertyFlags has = memory->memoryTypes[i].propertyFlags;
            if ((types & (1u << i)) == 0 || (has & needed) != needed ||
                ((has & preferred) == preferred) != first)
                continue;
            info.memoryTypeIndex = i;
            VkDeviceMemory imported = VK_NULL_HANDLE;
            status = device_.vk.vkAllocateMemory(device_.device, &info, nullptr, &imported);
            if (status == VK_SUCCESS)
                return imported;
        }
    throw Error(ErrorCode::OutOfMemory,
                "the driver does not take memory of " + format_bytes(bytes) + " for " + name +
                    " (" + result_name(status) + ")",
                -1, status);
}

VkDeviceMemory Allocator::import_host(std::span<std::byte> memory, VkBuffer buffer,
                                      const std::string& name) {
    constexpr auto kHandle = VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT;
    VkMemoryHostPointerPropertiesEXT host{};
    host.sType = VK_STRUCTURE_TYPE_MEMORY_HOST_POINTER_PROPERTIES_EXT;
    check(device_.vk.vkGetMemoryHostPointerPropertiesEXT(device_.device, kHandle, memory.data(),
                                                         &host),
          "asking what memory " + name + " is");
    VkImportMemoryHostPointerInfoEXT pointer{};
    pointer.sType = VK_STRUCTURE_TYPE_IMPORT_MEMORY_HOST_POINTER_INFO_EXT;
    pointer.handleType = kHandle;
    pointer.pHostPointer = memory.data();
    // Cached: the host reads what the device has written.
    return import(&pointer, memory.size(), host.memoryTypeBits & memory_types_for(buffer),
                  VK_MEMORY_PROPERTY_HOST_COHERENT_BIT, VK_MEMORY_PROPERTY_HOST_CACHED_BIT, name);
}

VkDeviceMemory Allocator::import_opaque(OpaqueMemory memory, VkBuffer buffer,
                                        const std::string& name) {
    VkImportMemoryFdInfoKHR file{};
    file.sType = VK_STRUCTURE_TYPE_IMPORT_MEMORY_FD_INFO_KHR;
    file.handleType = VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT;
    file.fd = ::fcntl(memory.file, F_DUPFD_CLOEXEC, 0); // the driver's, once it has taken it
    if (file.fd < 0)
        throw Error(ErrorCode::InvalidArgument,
                    name + ": " + std::to_string(memory.file) + " is no file descriptor");
    try {
        return import(&file, memory.bytes, memory_types_for(buffer),
                      VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT, 0, name);
    } catch (...) {
        ::close(file.fd);
        throw;
    }
}

void Allocator::free(Allocation& allocation) {
    if (allocation.imported != VK_NULL_HANDLE) {
        device_.vk.vkDestroyBuffer(device_.device, allocation.buffer, nullptr);
        device_.vk.vkFreeMemory(device_.device, allocation.imported, nullptr);
    }
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
    if (resource.lender != nullptr)
        return;
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

void Allocator::require_unused(const Resource& resource) const {
    if (resource.num_borrowers > 0 || (resource.bound && !resource.pending_users().empty()))
        throw Error(ErrorCode::InvalidArgument,
                    "buffer " + resource.name +
                        " is bound again while work uses it; wait for that work, or bind it in a "
                        "lane job that declares a write to it");
}

void Allocator::bind(Resource& resource, std::uint64_t bytes) {
    require_unused(resource);
    bind_in_order(resource, bytes);
}

void Allocator::bind_lent(Resource& resource, Resource& lender) {
    require_unused(resource);
    collect();
    if (!lender.bound || lender.lender != nullptr || lender.num_borrowers > 0)
        throw Error(ErrorCode::InvalidArgument, "buffer " + lender.name +
                                                    " has no memory of its own, or lends it "
                                                    "already: there is none for " +
                                                    resource.name);
    if (resource.bound)
        release(resource);
    resource.allocation = lender.allocation;
    resource.lender = &lender;
    ++lender.num_borrowers;
    resource.bound = true;
    ++resource.epoch;
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
    resource.allocation = {};
    resource.allocation.buffer = buffer;
    resource.allocation.address = address_of(buffer);
    resource.allocation.bytes = resource.allocation.capacity = bytes;
    resource.bound = true;
    ++resource.epoch;
    count(resource, true);
}

void Allocator::bind_host(Resource& resource, std::span<std::byte> memory) {
    const std::uint64_t alignment = device_.info.host_import_alignment;
    if (alignment == 0)
        throw Error(ErrorCode::Unsupported, device_.info.name +
                                                " takes no host memory (it lacks "
                                                "VK_EXT_external_memory_host) for " +
                                                resource.name);
    if (memory.empty() || memory.size() % alignment != 0 ||
        reinterpret_cast<std::uintptr_t>(memory.data()) % alignment != 0)
        throw Error(ErrorCode::InvalidArgument,
                    resource.name + ": host memory must begin at, and measure, a multiple of " +
                        std::to_string(alignment) + " bytes");
    Allocation made;
    made.bytes = memory.size();
    made.mapped = memory.data();
    bind_imported(resource, made, VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT,
                  [&](VkBuffer buffer) { return import_host(memory, buffer, resource.name); });
}

void Allocator::bind_opaque(Resource& resource, OpaqueMemory memory) {
    if (!device_.info.imports_opaque_memory)
        throw Error(ErrorCode::Unsupported, device_.info.name +
                                                " takes no memory behind a file descriptor "
                                                "(VK_KHR_external_memory_fd) for " +
                                                resource.name);
    Allocation made;
    made.bytes = memory.bytes;
    bind_imported(resource, made, VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT,
                  [&](VkBuffer buffer) { return import_opaque(memory, buffer, resource.name); });
}

void Allocator::bind_imported(Resource& resource, Allocation made,
                              VkExternalMemoryHandleTypeFlags handle, const Import& import) {
    if (resource.bound)
        release(resource);
    VkExternalMemoryBufferCreateInfo external{};
    external.sType = VK_STRUCTURE_TYPE_EXTERNAL_MEMORY_BUFFER_CREATE_INFO;
    external.handleTypes = handle;
    VkBufferCreateInfo info = buffer_info(made.bytes);
    info.pNext = &external;
    made.capacity = made.bytes;
    made.kind = resource.kind;
    check(device_.vk.vkCreateBuffer(device_.device, &info, nullptr, &made.buffer),
          "creating a buffer for the memory of " + resource.name);
    try {
        made.imported = import(made.buffer);
        check(device_.vk.vkBindBufferMemory(device_.device, made.buffer, made.imported, 0),
              "binding the memory of " + resource.name);
    } catch (...) {
        device_.vk.vkDestroyBuffer(device_.device, made.buffer, nullptr);
        device_.vk.vkFreeMemory(device_.device, made.imported, nullptr);
        throw;
    }
    made.address = address_of(made.buffer);
    resource.allocation = made;
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
        const bool done = doomed_[i].resource->num_borrowers == 0 &&
                          std::all_of(doomed_[i].users.begin(), doomed_[i].users.end(),
                                      [](const TicketPtr& t) { return t->settled(); });
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
    if (Resource* const lender = std::exchange(resource.lender, nullptr)) {
        --lender->num_borrowers;
        return;
    }
    if (allocation.memory == nullptr) {
        free(allocation); // nothing, or the import of what stays the caller's
        return;
    }
    poison(allocation);
    pool_bytes_ += allocation.capacity;
    pool_.emplace(std::pair{allocation.kind, allocation.capacity}, allocation);
}

void Allocator::retire(Resource& resource) {
    resource.writers.clear();
    resource.readers.clear();
    resource.covered.clear();
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
