// SPDX-License-Identifier: MIT
#include <bellows/model/rope_table.hpp>

#include <bellows/engine/attention.hpp>
#include <bellows/shape/rope.hpp>

#include <span>
#include <vector>

namespace bellows {

RopeTable::RopeTable(Device& device, const ModelConfig& config, std::uint64_t positions) {
    const std::vector<float> table =
        ops::rope_table(positions, rope_frequencies(config), rope_amplitude(config));
    buffer_ = Buffer(device, {.name = "rotary table",
                              .bytes = table.size() * sizeof(float),
                              .category = MemoryCategory::Weights});
    view_ = buffer_.tensor(DType::F32, {positions, config.rope_head_dim() / 2, 2});
    device.upload(buffer_.view(), std::span<const float>(table));
}

} // namespace bellows
