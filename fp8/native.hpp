// SPDX-License-Identifier: MIT
#pragma once

// Products of two E4M3 operands on a device's own FP8 units, by its own code
// (shaders/native/nvidia/gemm_fp8.cu): codes are read as they stand, wherever k stands side by
// side. What does not is transposed: weights of nn, and both operands of tn.

#include "product.hpp"

#include <string>

namespace bellows::fp8 {

/// "" when the device can compute any product so, else what it lacks.
std::string why_not_native(const Device& device);
/// "" when `product` can be computed so, else what is against it.
std::string why_not_native(const Device& device, const Product& product);
/// "wgmma-e4m3-k32": sums of 128 of k by the units, which keep fewer bits than f32 has, times their
/// scales, in f32.
std::string native_class();
/// Whether it reads rows by a layout of ids as they stand, without a work list or copies.
bool native_reads_layout(const Product& product);
/// "" when a product of a layout by ids is small enough for that (native_experts.cpp).
std::string why_not_by_ids(const Product& product);
/// Records one that reads its layout as it stands.
void record_native_by_ids(Recording& recording, const char* op, const Product& product);
/// Whether it is also the faster way.
bool better_native(const Device& device, const Product& product);
/// Device memory that weights transposed ahead of products of the form take; 0: none need it.
std::uint64_t native_ahead_bytes(const Quantized& b, GemmForm form);
/// Records this transposition, of entries [first, first + count) of the batch; none of them is
/// empty.
void turn_ahead(Recording& recording, const Operands& operands, const Quantized& b,
                BufferView memory, std::uint64_t first, std::uint64_t count);
/// Device memory that transposing the operands of any product takes at most.
std::uint64_t native_bytes(const Device& device, const Operand& a, const Operand& b);
/// workspace: native_bytes, at a multiple of 16 bytes. why_not_native of the product is "". A
/// stands in the order of groups, D maybe by slots, or native_reads_layout.
void record_native(Recording& recording, const char* op, const Product& product,
                   BufferView workspace);

} // namespace bellows::fp8
