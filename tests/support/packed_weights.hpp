// SPDX-License-Identifier: MIT
#pragma once

// The packed copies of a store's FP8 weights, in tests.

#include <bellows/model/parameter_store.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows::testing {

inline fp8::Choice packed_choice() {
    return fp8::Choice(fp8::Variant::Packed);
}

/// The parameters that may have some: each that is no expert's, and all experts' of `layer`
/// together.
inline std::vector<Parameter> packable(const ParameterStore& store, std::uint64_t layer) {
    std::vector<Parameter> all = store.all();
    for (const char* matrix : {"gate_up_proj", "down_proj"})
        all.push_back(store.experts(layer, matrix));
    return all;
}

/// Zeros to where nothing is packed, so that the whole memory can be compared.
inline void wipe_packed(const ParameterStore& store, std::uint64_t layer) {
    for (const Parameter& parameter : packable(store, layer))
        for (const auto& packed : {parameter.packed_nt, parameter.packed_nn})
            if (packed)
                store.device().upload(
                    packed->memory,
                    std::span<const std::uint8_t>(std::vector<std::uint8_t>(packed->memory.bytes)));
}

} // namespace bellows::testing
