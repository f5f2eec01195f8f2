// SPDX-License-Identifier: MIT
#pragma once

// A model of a Hugging Face folder in FP8 on the ranks of a world, which share its experts; as
// LanguageModel has it on one.

#include "support/test_device.hpp"

#include <bellows/checkpoint/weights.hpp>
#include <bellows/comm/message.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/shape/groups.hpp>
#include <bellows/shape/stages.hpp>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows::testing {

class FolderModel {
public:
    /// gemm_class: of bf16 products; "": the device's own.
    FolderModel(const HfFolder& folder, World& world, std::uint64_t seq, LinearForms forms,
                const std::string& gemm_class = "")
        : vocabulary_(folder.config().model.vocabulary), device_(make_device()),
          transport_(open_transport(world)), thread_(*device_, "exchange"),
          parameters_(*device_,
                      parameters_of_stage(folder.config().model, 0, 1,
                                          static_cast<std::uint64_t>(world.rank()),
                                          static_cast<std::uint64_t>(world.size())),
                      DType::BF16, false, LinearPrecision::Fp8, {}, std::move(forms)) {
        use_gemm_class(*device_, gemm_class);
        const std::string key = products_key(Precision::FP8);
        parameters_.use_products(
            products_of({{key, usual_products(*device_, key)}}, Precision::FP8, *device_));
        load_weights(folder, parameters_);
        if (folder.config().model.moe_layers() > 0) {
            ExchangeConfig config =
                expert_exchange_config(folder.config().model, DType::BF16, LinearPrecision::Fp8);
            config.max_tokens = seq;
            exchange_.emplace(*device_, world, *transport_, thread_, config);
        }
        StageDesc desc;
        desc.config = folder.config().model;
        desc.seq = seq;
        desc.training = false;
        stage_.emplace(desc, parameters_, exchange_ ? &*exchange_ : nullptr);
    }

    Device& device() { return *device_; }
    const ParameterStore& parameters() const { return parameters_; }

    /// [text.size(), vocabulary]. Collective.
    std::vector<float> logits(std::span<const std::uint32_t> text) {
        const auto tokens = stage_->token_buffer(0).mapped_as<std::uint32_t>();
        std::ranges::fill(tokens, 0u);
        std::ranges::copy(text, tokens.begin());
        for (const Node* node : stage_->nodes(0, NodeKind::Forward))
            node->submit({});
        device_->wait_idle(std::chrono::minutes(2));
        const auto all = stage_->logits_buffer(0).mapped_as<const float>();
        return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(text.size() * vocabulary_)};
    }

private:
    std::uint64_t vocabulary_;
    std::unique_ptr<Device> device_;
    std::unique_ptr<Transport> transport_;
    HostThread thread_;
    ParameterStore parameters_;
    std::optional<ExpertExchange> exchange_;
    std::optional<Stage> stage_;
};

} // namespace bellows::testing
