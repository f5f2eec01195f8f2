// SPDX-License-Identifier: MIT
#include "bf16_upload.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/recording.hpp>

#include <algorithm>

namespace bellows {

Bf16Upload::Bf16Upload(Device& device, std::uint64_t most) : device_(&device) {
    const std::uint64_t bytes = std::max<std::uint64_t>(most * size_of(DType::BF16), 16);
    for (Side& side : sides_)
        side.staging = Buffer(
            device, {.name = "weights on their way", .bytes = bytes, .kind = MemoryKind::Upload});
}

Bf16Upload::~Bf16Upload() {
    try {
        wait();
    } catch (const Error&) { // a lost device copies no more
        return;
    }
}

std::span<std::uint16_t> Bf16Upload::next(std::uint64_t count) {
    side_ = (side_ + 1) % sides_.size();
    wait(sides_[side_]);
    count_ = count;
    return sides_[side_].staging.mapped_as<std::uint16_t>().first(count);
}

void Bf16Upload::send(const TensorView& to) {
    Side& side = sides_[side_];
    side.copy = std::make_unique<Recording>(*device_, QueueRole::Compute, "upload of weights");
    side.copy->copy(side.staging.view().sub(0, count_ * size_of(DType::BF16)), to.buffer);
    side.arrived = device_->submit(*side.copy);
}

void Bf16Upload::wait() {
    for (Side& side : sides_)
        wait(side);
}

void Bf16Upload::wait(Side& side) {
    if (!side.copy)
        return;
    side.arrived.wait();
    side.copy.reset();
}

} // namespace bellows
