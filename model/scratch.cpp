// SPDX-License-Identifier: MIT
#include <bellows/model/scratch.hpp>

namespace bellows {

namespace {

constexpr std::uint64_t kAlignment = 256; // a tensor's first bytes share no cache line

} // namespace

Scratch::Scratch(Device& device)
    : device_(&device),
      memory_(Buffer::declare(device, {.name = "scratch", .category = MemoryCategory::Scratch})) {
}

BufferView Scratch::Frame::bytes(std::uint64_t size) {
    const BufferView view = all_.sub(used_, size);
    used_ += (size + kAlignment - 1) / kAlignment * kAlignment;
    return view;
}

TensorView Scratch::Frame::tensor(DType dtype, std::initializer_list<std::uint64_t> extents) {
    std::uint64_t size = size_of(dtype);
    for (const std::uint64_t extent : extents)
        size *= extent;
    return TensorView::contiguous(bytes(size), dtype, extents);
}

void Scratch::reserve(std::uint64_t bytes) {
    if (memory_.bound() && memory_.size() >= bytes)
        return;
    if (memory_.bound())
        device_->wait_idle();
    memory_.bind(bytes < kAlignment ? kAlignment : bytes);
}

} // namespace bellows
