// SPDX-License-Identifier: MIT
#pragma once

// Where a model's weights come from: a checkpoint, a folder of Hugging Face, or a seed. Used by
// this room's .cpp files.

#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/expert_placement.hpp>
#include <bellows/shape/layout.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

class ModelSource {
public:
    using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;

    /// path: as Checkpoint::open() takes it, or a Hugging Face folder. precision: without, as the
    /// run computed; of a folder f32 where its tensors are f32, else bf16. Throws what these throw.
    /// drafts: the model keeps its first MTP module; throws Error{InvalidArgument} where it has
    /// none. Else it is a model without modules.
    ModelSource(const std::filesystem::path& path, std::optional<Precision> precision,
                bool drafts = false);
    /// Random weights of a model of that shape, as a run of the seed begins with.
    ModelSource(const ModelConfig& model, std::uint64_t seed, Precision precision);

    const ModelConfig& model() const noexcept { return model_; }
    const TrainingShape& shape() const noexcept { return shape_; }

    /// Which experts a member of a group has: those of its slots or, without placements, of its
    /// block.
    struct Part {
        std::uint64_t rank = 0, ranks = 1;
        std::span<const ExpertPlacement> placements{}; ///< of each layer with experts
    };
    /// The model's weights on the device, of its experts a part. Sets the device's class of
    /// products, chooses their variants, and waits. any_rows: a row's bits do not depend on how
    /// many rows a product has.
    ParameterStore load(Device& device, bool any_rows, const Progress& on_progress,
                        const Part& part) const;

private:
    std::vector<ParameterInfo> parameters_of(const Part& part) const;

    /// One of these two, or neither.
    std::optional<Checkpoint> checkpoint_;
    std::optional<HfFolder> folder_;
    std::uint64_t seed_ = 0;
    ModelConfig model_;
    TrainingShape shape_; ///< of the run that wrote it, as far as the options do not say otherwise
    KernelNames kernels_; ///< that the run chose; none of a folder
};

} // namespace bellows
