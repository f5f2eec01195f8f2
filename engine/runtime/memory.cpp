// SPDX-License-Identifier: MIT
#include "device_impl.hpp"

#include <bellows/engine/vulkan_interop.hpp>

#include <limits>
#include <utility>

namespace bellows {

Buffer::Buffer(Device& device, BufferDesc desc) : device_(&device) {
    const std::scoped_lock lock(device.impl().mutex);
    resource_ = device.impl().allocator->create_resource(desc, false);
    try {
        device.impl().allocator->bind(*resource_, desc.bytes);
    } catch (...) {
        device.impl().allocator->destroy_resource(*resource_);
        throw;
    }
}

Buffer Buffer::declare(Device& device, BufferDesc desc) {
    Buffer buffer;
    const std::scoped_lock lock(device.impl().mutex);
    buffer.device_ = &device;
    buffer.resource_ = device.impl().allocator->create_resource(desc, true);
    return buffer;
}

Buffer Buffer::import_host(Device& device, std::span<std::byte> memory, std::string name,
                           MemoryCategory category) {
    Buffer buffer;
    const std::scoped_lock lock(device.impl().mutex);
    detail::Allocator& allocator = *device.impl().allocator;
    buffer.device_ = &device;
    buffer.resource_ = allocator.create_resource(
        {.name = std::move(name), .kind = MemoryKind::Readback, .category = category}, false);
    allocator.bind_host(*buffer.resource_, memory); // what it throws leaves an unbound buffer
    return buffer;
}

Buffer Buffer::import_opaque(Device& device, OpaqueMemory memory, std::string name,
                             MemoryCategory category) {
    Buffer buffer;
    const std::scoped_lock lock(device.impl().mutex);
    detail::Allocator& allocator = *device.impl().allocator;
    buffer.device_ = &device;
    buffer.resource_ =
        allocator.create_resource({.name = std::move(name), .category = category}, false);
    allocator.bind_opaque(*buffer.resource_, memory);
    return buffer;
}

Buffer::Buffer(Buffer&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      resource_(std::exchange(other.resource_, nullptr)) {
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(resource_, other.resource_);
    return *this;
}

Buffer::~Buffer() {
    if (resource_ == nullptr)
        return;
    const std::scoped_lock lock(device_->impl().mutex);
    device_->impl().allocator->destroy_resource(*resource_);
}

void Buffer::bind(std::uint64_t bytes) {
    const std::scoped_lock lock(device_->impl().mutex);
    device_->impl().allocator->bind(*resource_, bytes);
}

void Buffer::bind(const Buffer& lender) {
    const std::scoped_lock lock(device_->impl().mutex);
    device_->impl().allocator->bind_lent(*resource_, *lender.resource_);
}

bool Buffer::lent() const noexcept {
    if (resource_ == nullptr)
        return false;
    const std::scoped_lock lock(device_->impl().mutex);
    return resource_->num_borrowers > 0;
}

void Buffer::unbind() {
    const std::scoped_lock lock(device_->impl().mutex);
    device_->impl().allocator->unbind(*resource_);
}

bool Buffer::bound() const noexcept {
    return resource_ != nullptr && resource_->bound;
}

std::uint64_t Buffer::size() const noexcept {
    return resource_ == nullptr ? 0 : resource_->allocation.bytes;
}

BufferView Buffer::view() const noexcept {
    if (resource_ == nullptr)
        return {};
    const bool open = resource_->declared;
    return {resource_, 0, open ? std::numeric_limits<std::uint64_t>::max() : size()};
}

TensorView Buffer::tensor(DType dtype, std::initializer_list<std::uint64_t> extents) const {
    return TensorView::contiguous(view(), dtype, extents);
}

void* Buffer::mapped() const noexcept {
    return resource_ == nullptr ? nullptr : resource_->allocation.mapped;
}

Buffer wrap_buffer(Device& device, VkBuffer buffer, std::uint64_t bytes, std::string name) {
    Buffer wrapped = Buffer::declare(device, {.name = std::move(name), .bytes = bytes});
    const std::scoped_lock lock(device.impl().mutex);
    Resource& resource = *wrapped.view().resource;
    resource.declared = false;
    device.impl().allocator->bind_external(resource, buffer, bytes);
    return wrapped;
}

VulkanRange vulkan_range(BufferView view) {
    if (!view || !view.resource->bound)
        throw Error(ErrorCode::InvalidArgument, "the view has no memory");
    return {view.resource->allocation.buffer, view.offset, view.bytes};
}

} // namespace bellows
