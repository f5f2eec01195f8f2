// SPDX-License-Identifier: MIT
#pragma once

// What the attention layers of all kinds know. Used by the layers' own .cpp files.

#include "linear.hpp"

#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/model/rope_table.hpp>
#include <bellows/shape/config.hpp>

#include <string>

namespace bellows {

struct AttentionParts {
    /// Throws Error{InvalidArgument} when the store lacks the layer's norm.
    AttentionParts(const ModelConfig& config_, std::uint64_t layer, ParameterStore& parameters_,
                   const RopeTable& positions_, LayerScratch& scratch_)
        : config(config_), parameters(parameters_), scratch(scratch_), positions(positions_.view()),
          prefix("model.layers." + std::to_string(layer) + ".") {
        parameter("input_layernorm.weight");
    }

    const Parameter& parameter(const char* name) const { return parameters.at(prefix + name); }
    const Parameter& projection(const char* name) const {
        return parameters.at(prefix + "self_attn." + name + ".weight");
    }
    Linear linear(const char* name) const {
        return Linear(projection(name), parameters.products());
    }

    const ModelConfig config;
    ParameterStore& parameters;
    LayerScratch& scratch;
    TensorView positions;
    std::string prefix; ///< "model.layers.3."
};

} // namespace bellows
