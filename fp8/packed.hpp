// SPDX-License-Identifier: MIT
#pragma once

// Products of two E4M3 operands with power-of-two scales on matrix units: both are packed into
// tiles (shaders/include/fp8_packed.glsl) in the order in which the product reads them, then one
// kernel serves every form. Packing reads and writes each code once.

#include "tiles.hpp"

#include <string>
#include <vector>

namespace bellows::fp8 {

/// "" when the device can compute any product so, else what it lacks.
std::string why_not_packed(const Device& device);
/// "" when `product` can be computed so, else what is against it.
std::string why_not_packed(const Device& device, const Product& product, const Tile& tile = {});
/// The numeric class of products computed so: "packed-f16-k16", after the depth of a matrix
/// product.
std::string packed_class(const Device& device, const Product& product);
/// Whether it is also the faster way.
bool better_packed(const Device& device, const Product& product);
/// Whether record_packed takes a product's rows from its layout, without a work list.
bool packed_reads_layout(const Product& product);
/// Device memory that packing the operands of any product takes at most.
std::uint64_t packed_bytes(const Operand& a, const Operand& b);
/// Whether b has been packed ahead of its products.
bool packed_ahead(const Operand& b);
/// Device memory that this takes; 0 when the device lacks what packed products need.
std::uint64_t packed_ahead_bytes(const Device& device, const Quantized& b);
/// Records it, of entries [first, first + count) of the batch; none of them is empty.
void pack_ahead(Recording& recording, const Operands& operands, const Quantized& b, GemmForm form,
                BufferView memory, std::uint64_t first, std::uint64_t count);
/// workspace: packed_bytes, at a multiple of 16 bytes.
/// why_not_packed of the product in the tile is "".
void record_packed(Recording& recording, const char* op, const Product& product, const Tile& tile,
                   BufferView workspace);
/// tiles_of; why_not_packed of the product is "".
std::vector<NamedTile> packed_tiles(const Device& device, const Product& product);

} // namespace bellows::fp8
