// SPDX-License-Identifier: MIT
#pragma once

// A model of a checkpoint that only runs forward: one rank holds all of it on a device of its own,
// without gradients. Owned by its caller; one thread at a time.

#include <bellows/engine/device.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

namespace bellows {

class LanguageModel {
public:
    /// timeout: of every wait for the device. Throws what Checkpoint::open() and Device::create()
    /// throw, Error{Corrupt} where the checkpoint's tensors are not of its config.toml's model.
    LanguageModel(const DeviceOptions& device, const std::filesystem::path& checkpoint,
                  std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout);
    ~LanguageModel();

    /// Logits [vocabulary] of the token after `text`, of which the last seq tokens count.
    std::vector<float> next(std::span<const std::uint32_t> text);
    /// tokens: [seq + 1]; the mean loss in nats of each after those before it.
    double loss(std::span<const std::uint32_t> tokens);

    MemoryReport memory_report() const;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
