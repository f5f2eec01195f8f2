// SPDX-License-Identifier: MIT
#include "weight_upload.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/recording.hpp>

#include <algorithm>

namespace bellows {

WeightUpload::WeightUpload(Device& device, std::uint64_t most_bytes) : device_(&device) {
    for (Side& side : sides_)
        side.staging = Buffer(device, {.name = "weights on their way",
                                       .bytes = std::max<std::uint64_t>(most_bytes, 16),
                                       .kind = MemoryKind::Upload});
}

WeightUpload::~WeightUpload() {
    try {
        wait();
    } catch (const Error&) { // a lost device copies no more
        return;
    }
}

Buffer& WeightUpload::next_staging() {
    side_ = (side_ + 1) % sides_.size();
    wait(sides_[side_]);
    return sides_[side_].staging;
}

void WeightUpload::send(const BufferView& to) {
    Side& side = sides_[side_];
    side.copy = std::make_unique<Recording>(*device_, QueueRole::Compute, "upload of weights");
    side.copy->copy(side.staging.view().sub(0, to.bytes), to);
    side.arrived = device_->submit(*side.copy);
}

void WeightUpload::wait() {
    for (Side& side : sides_)
        wait(side);
}

void WeightUpload::wait(Side& side) {
    if (!side.copy)
        return;
    side.arrived.wait();
    side.copy.reset();
}

} // namespace bellows
