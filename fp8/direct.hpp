// SPDX-License-Identifier: MIT
#pragma once

// Products of two bf16 tensors on matrix units (nt): those of A go straight from memory to the
// registers of matrices, those of B through workgroup memory in the order in which they are read.
// One dispatch, no workspace.

#include "product.hpp"

#include <string>

namespace bellows::fp8 {

/// "" when the device can compute any product so, else what it lacks.
std::string why_not_direct(const Device& device);
/// "" when `product` can be computed so, else what is against it.
std::string why_not_direct(const Device& device, const Product& product);
/// The numeric class of products computed so: "direct-bf16-k16", after the elements and the depth
/// of a matrix product. As coopmat-bf16-k16 (gemm_plan.hpp), but k goes another way in each 64.
std::string direct_class(const Device& device);
void record_direct(Recording& recording, const char* op, const Product& product);

} // namespace bellows::fp8
