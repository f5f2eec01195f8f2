// SPDX-License-Identifier: MIT
#pragma once

// The variants of kernels that take a gain of RMSNorm. Used by the .cpp files beside it.

#include "arguments.hpp"

namespace bellows::ops {

/// x: act; gain: [size], f32 or, where x is, bf16.
template <class K>
typename K::Variant norm_variant(const Arguments& arguments, const TensorView& x,
                                 const TensorView& gain, std::uint64_t size) {
    arguments.activation("x", x);
    arguments.tensor("gain", gain, gain.dtype == DType::BF16 ? x.dtype : DType::F32, {size});
    return gain.dtype == DType::BF16 ? K::Variant::bf16_bf16 : storage_variant<K>(x.dtype);
}

} // namespace bellows::ops
