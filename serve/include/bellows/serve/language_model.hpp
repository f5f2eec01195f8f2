// SPDX-License-Identifier: MIT
#pragma once

// A model of a checkpoint or of a Hugging Face folder that only runs forward: one rank holds all of
// it on a device of its own, without gradients. Owned by its caller; one thread at a time.

#include <bellows/engine/device.hpp>
#include <bellows/shape/layout.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

struct LanguageModelOptions {
    std::chrono::milliseconds timeout =
        TimePoint::kDefaultTimeout; ///< of every wait for the device
    /// How it computes. Without: as the run did; of a Hugging Face folder f32 where that is f32,
    /// else bf16.
    std::optional<Precision> precision{};
    /// The most tokens that a logit is computed from. 0: those of the run's sequences; of a Hugging
    /// Face folder its context, at most 512.
    std::uint64_t seq = 0;
    /// Elements of the weights that have been read, and all of them.
    std::function<void(std::uint64_t done, std::uint64_t total)> on_progress{};
};

class LanguageModel {
public:
    /// checkpoint: as Checkpoint::open() takes it, or a Hugging Face folder. Throws what
    /// Checkpoint::open(), HfFolder and Device::create() throw, Error{Corrupt} where a checkpoint's
    /// tensors are not of its config.toml's model.
    LanguageModel(const DeviceOptions& device, const std::filesystem::path& checkpoint,
                  const LanguageModelOptions& options = {});
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
