// SPDX-License-Identifier: MIT
#pragma once

// What the layers of generation share. Used by the .cpp files beside it.

#include "linear.hpp"

#include <bellows/fp8/few_rows.hpp>
#include <bellows/model/cached_layer.hpp>

#include <initializer_list>
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
    /// y = x * transpose(W) (with what `form` says besides), of few rows.
    void few_rows(Recording& recording, const std::string& name, const TensorView& x,
                  const TensorView& y, const fp8::FewRowsForm& form = {}) const;
    /// Rows up to which products of few rows are the way for all of these matrices.
    std::uint64_t most_few_rows(std::initializer_list<const char*> names) const;

private:
    ParameterStore& store_;
    std::string prefix_;
};

/// Whether a step has at most `most` rows, whose bits may depend on how many there are: then layers
/// read their weights by fp8/few_rows.hpp, each once, with little beside it in few dispatches.
bool has_few_rows(const StepRows& rows, std::uint64_t most);
/// What those products read of a parameter.
fp8::Operand few_rows_operand(const Parameter& weights);
/// With the norm of x ahead of the product.
fp8::FewRowsForm behind_norm(const Parameter& gain, double eps,
                             fp8::FewRowsForm::Result result = fp8::FewRowsForm::Result::Store);

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
