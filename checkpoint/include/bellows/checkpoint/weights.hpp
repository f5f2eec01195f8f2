// SPDX-License-Identifier: MIT
#pragma once

// Parameters from a checkpoint, whatever the layout of the run that wrote it. Host only, but for
// the store that takes them; the thread that owns it.

#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/model/parameter_store.hpp>

#include <string>
#include <vector>

namespace bellows {

/// f32 values of a tensor that belongs to a parameter. base: "model" or "optimizer". Throws
/// Error{InvalidArgument} if the checkpoint has no such tensor, Error{Corrupt} if it has another
/// type or shape than the parameter.
std::vector<float> read_tensor(const Checkpoint& checkpoint, const char* base,
                               const std::string& name, const ParameterInfo& info);

/// All weights of a store; `masters` gets their f32 values, too.
void load_weights(const Checkpoint& checkpoint, ParameterStore& parameters,
                  const ParameterStore::MasterSink& masters = {});

} // namespace bellows
