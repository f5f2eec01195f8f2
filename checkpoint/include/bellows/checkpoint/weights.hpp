// SPDX-License-Identifier: MIT
#pragma once

// Parameters from a checkpoint, whatever the layout of the run that wrote it. Host only, but for
// the store that takes them; the thread that owns it.

#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/model/parameter_store.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// f32 values of a tensor that belongs to a parameter. base: "model" or "optimizer". Throws
/// Error{InvalidArgument} if the checkpoint has no such tensor, Error{Corrupt} if it has another
/// type or shape than the parameter.
std::vector<float> read_tensor(const Checkpoint& checkpoint, const char* base,
                               const std::string& name, const ParameterInfo& info);

/// Returns the model's parameter that a parameter of a store stands for, where that is another one:
/// a slot's matrix is one of the expert that the slot holds. It returns nothing for a slot without
/// an expert, whose matrices are zero. Several threads call it at once.
using ModelParameter = std::function<std::optional<ParameterInfo>(const ParameterInfo& info)>;

/// All weights of a store; `masters` gets their f32 values, too.
void load_weights(const Checkpoint& checkpoint, ParameterStore& parameters,
                  const ParameterStore::MasterSink& masters = {},
                  const ModelParameter& in_model = {});

/// The same from the folder of a Hugging Face model, whose model the store's is: what the store
/// keeps as it is stored (bf16, and FP8 of LinearForm::StoredCodes) is copied unless there are
/// `masters`, all else decoded, and rounded or quantised again as the store wants. on_progress, if
/// any, gets how many of the store's elements have been set. Throws what HfFolder::read() throws.
void load_weights(const HfFolder& folder, ParameterStore& parameters,
                  const ParameterStore::MasterSink& masters = {},
                  const std::function<void(std::uint64_t elements)>& on_progress = {},
                  const ModelParameter& in_model = {});

/// In which form a store that only runs forward keeps the linear layers of a folder where these
/// compute in FP8: those that HfFolder::has_codes() as these codes with their f32 scales, others by
/// codes with power-of-two scales, which more variants of products take. MLA's kv_b_proj is not in
/// FP8, because decoding multiplies queries and sums with parts of it. The result refers to
/// `folder`.
LinearForms linear_forms(const HfFolder& folder);

} // namespace bellows
