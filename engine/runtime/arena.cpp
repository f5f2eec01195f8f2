// SPDX-License-Identifier: MIT
#include <bellows/engine/arena.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

namespace {

constexpr std::uint64_t kAlignment = 256; // a tensor's first bytes share no cache line

} // namespace

Arena::Arena(Device& device, std::string name, MemoryCategory category, QueueRole queue)
    : device_(&device), queue_(queue),
      memory_(Buffer::declare(device, {.name = std::move(name), .category = category})) {
}

BufferView Arena::Frame::bytes(std::uint64_t size) {
    const BufferView view = all_.sub(used_, size);
    used_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return view;
}

TensorView Arena::Frame::tensor(DType dtype, std::initializer_list<std::uint64_t> extents) {
    std::uint64_t size = size_of(dtype);
    for (const std::uint64_t extent : extents)
        size *= extent;
    return TensorView::contiguous(bytes(size), dtype, extents);
}

void Arena::reserve(std::uint64_t bytes) {
    if (memory_.bound() && memory_.size() >= bytes)
        return;
    if (memory_.bound())
        device_->wait_idle();
    memory_.bind(std::max(bytes, kAlignment));
}

} // namespace bellows
