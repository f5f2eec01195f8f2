// SPDX-License-Identifier: MIT
#include "model_source.hpp"

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/weights.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/shape/stages.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace bellows {

ModelSource::ModelSource(const std::filesystem::path& path, std::optional<Precision> precision,
                         bool drafts) {
    if (HfFolder::is_one(path)) {
        constexpr std::uint64_t kMostSeq = 512;
        folder_.emplace(path);
        model_ = folder_->config().model;
        shape_.seq = std::min(model_.max_context > 0 ? model_.max_context : kMostSeq, kMostSeq);
        shape_.precision =
            folder_->main_type() == StoredType::F32 ? Precision::F32 : Precision::BF16;
    } else {
        checkpoint_.emplace(Checkpoint::open(path));
        const std::string config = checkpoint_->text(kConfigFile);
        const std::string name = (checkpoint_->folder() / kConfigFile).string();
        model_ = parse_model_config(config, name);
        shape_ = parse_training_shape(config, name);
        kernels_ = checkpoint_->state().kernels;
    }
    if (drafts && model_.mtp_depth == 0)
        throw Error(ErrorCode::InvalidArgument,
                    "drafts need a model with a module of multi-token prediction, and that in " +
                        path.string() + " has none: train one with model.mtp_depth = 1");
    model_.mtp_depth = drafts ? 1 : 0;
    if (precision && *precision != shape_.precision) {
        shape_.precision = *precision;
        kernels_.clear(); // of another precision
    }
}

ModelSource::ModelSource(const ModelConfig& model, std::uint64_t seed, Precision precision)
    : seed_(seed), model_(model) {
    shape_.precision = precision;
}

std::vector<ParameterInfo> ModelSource::parameters_of(const Part& part) const {
    std::vector<ParameterInfo> mine = parameters_of_stage(model_, 0, 1, part.rank, part.ranks);
    if (part.placements.empty())
        return mine;
    std::erase_if(mine,
                  [](const ParameterInfo& info) { return info.kind == ParameterKind::Expert; });
    const Schedule one_stage = make_schedule({.ranks = 1, .micro_batches = 1});
    const std::vector<ParameterInfo> slots =
        slot_parameters(model_, one_stage, 0, part.rank, part.placements.front().slots_of_rank);
    mine.insert(mine.end(), slots.begin(), slots.end());
    return mine;
}

ParameterStore ModelSource::load(Device& device, bool any_rows, const Progress& on_progress,
                                 const Part& part) const {
    ParameterStore parameters(device, parameters_of(part), activation_type(shape_.precision), false,
                              linear_precision(shape_.precision), {},
                              folder_ ? linear_forms(*folder_) : LinearForms{});
    KernelNames kernels = kernels_;
    // Nobody has chosen them for this precision yet.
    if (const std::string key = products_key(shape_.precision); !key.empty() && kernels.empty())
        kernels[key] = usual_products(device, key);
    if (parameters.activation() == DType::BF16)
        use_gemm_class(device, kept_kernels(kernels, device.options()).chosen["gemm"]);
    parameters.use_products(any_rows && shape_.precision == Precision::FP8
                                ? fp8::choice_for_any_rows(device)
                                : products_of(kernels, shape_.precision, device));
    const ModelParameter in_model = [&](const ParameterInfo& info) -> std::optional<ParameterInfo> {
        if (part.placements.empty() || info.kind != ParameterKind::Expert)
            return info;
        const auto layer = static_cast<std::uint64_t>(info.layer) - model_.dense_layers;
        const std::int32_t expert =
            part.placements[layer].expert_of_slot[static_cast<std::size_t>(info.expert)];
        if (expert == kFreeSlot)
            return std::nullopt;
        return of_expert(info, static_cast<std::uint64_t>(expert));
    };
    if (checkpoint_) {
        load_weights(*checkpoint_, parameters, {}, in_model);
    } else if (folder_) {
        load_weights(
            *folder_, parameters, {},
            [&](std::uint64_t elements) {
                if (on_progress)
                    on_progress(elements, parameters.num_elements());
            },
            in_model);
    } else if (part.placements.empty()) {
        parameters.initialise(seed_);
    } else {
        parameters.load(
            [&](const ParameterInfo& info, std::uint64_t first_row, std::span<float> values) {
                const std::uint64_t columns = info.size() / info.shape.front();
                if (const auto expert = in_model(info))
                    fill_initial_values(*expert, seed_, values, first_row * columns);
                else
                    std::ranges::fill(values, 0.0f);
            });
    }
    return parameters;
}

} // namespace bellows
