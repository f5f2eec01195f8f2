// SPDX-License-Identifier: MIT
#pragma once

// What the layers of generation share. Used by the .cpp files beside it.

#include "linear.hpp"

#include <bellows/model/cached_layer.hpp>

#include <string>

namespace bellows::cached {

std::unique_ptr<CachedLayer> mla(const ModelConfig& config, std::uint64_t layer,
                                 ParameterStore& parameters, const RopeTable& positions,
                                 const ops::PagedCache& cache);
std::unique_ptr<CachedLayer> gqa(const ModelConfig& config, std::uint64_t layer,
                                 ParameterStore& parameters, const RopeTable& positions,
                                 const ops::PagedCache& cache);
std::unique_ptr<CachedLayer> dense(const ModelConfig& config, std::uint64_t layer,
                                   ParameterStore& parameters);
std::unique_ptr<CachedExperts> experts(const ModelConfig& config, std::uint64_t layer,
                                       ParameterStore& parameters);

/// The parameters of one layer, by the names that they have in it.
class LayerParameters {
public:
    LayerParameters(ParameterStore& store, std::uint64_t layer)
        : store_(store), prefix_("model.layers." + std::to_string(layer) + ".") {}

    ParameterStore& store() const noexcept { return store_; }
    const Parameter& at(const std::string& name) const { return store_.at(prefix_ + name); }
    Linear linear(const std::string& name) const {
        return Linear(at(name + ".weight"), store_.products());
    }

private:
    ParameterStore& store_;
    std::string prefix_;
};

/// RMSNorm(x) as FP8 codes where linear layers compute in FP8, else in the activations' type.
/// with_values: both.
LinearRows normalised(Recording& recording, Arena::Frame& scratch, const ParameterStore& parameters,
                      const TensorView& x, const Parameter& gain, double eps,
                      bool with_values = false);
/// The same in the activations' type alone.
TensorView normalised_values(Recording& recording, Arena::Frame& scratch, const TensorView& x,
                             const Parameter& gain, double eps);
/// silu(gate) * up in the form that the next linear layer reads.
LinearRows swiglu(Recording& recording, Arena::Frame& scratch, const ParameterStore& parameters,
                  const TensorView& gate_up);

} // namespace bellows::cached
