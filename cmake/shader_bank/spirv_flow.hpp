// SPDX-License-Identifier: MIT
#pragma once

// Which operands a shader's loads and stores through addresses can reach.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace shader_bank {

/// Sets of operands, bit i for operand i.
struct Accesses {
    std::uint64_t read = 0;
    std::uint64_t written = 0;
};

/// operand_block: id of the struct type that holds the operands' references. The module's
/// instructions have been walked through before and end where it ends. Throws std::runtime_error
/// on an access through an address that comes from no operand.
Accesses trace_accesses(std::span<const std::uint32_t> words, std::uint32_t operand_block,
                        std::size_t num_operands);

} // namespace shader_bank
