// SPDX-License-Identifier: MIT
#pragma once

// Operands of grouped products on the device, in the storage that a benchmark asks for, and on the
// host what they stand for, to check samples of a product against.

#include "support/op_bench.hpp"

#include <bellows/fp8/gemm.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace bellows::bench {

/// fp8: E4M3 with this rule's scales in the recipe of the operand's part.
struct OperandStorage {
    bool fp8 = true;
    DType dtype = DType::BF16; ///< where it is not fp8
    fp8::ScaleRule rule = fp8::ScaleRule::PowerOfTwo;
    /// fp8 weights that are packed before the clock starts, or, of a weight's gradient on native
    /// units, operands that are transposed before
    bool prepacked = false;

    /// bf16 holds every value exactly: matrix units may multiply it.
    bool fits_bf16() const {
        return fp8 ? rule == fp8::ScaleRule::PowerOfTwo : dtype == DType::BF16;
    }
    bool operator==(const OperandStorage&) const = default;
};
/// "fp8", "prepacked", "bf16", "f32"; nothing for other words.
std::optional<OperandStorage> storage_of(const std::string& word, fp8::ScaleRule rule);
std::string name_of(const OperandStorage& storage);

/// Uniform in [-1, 1), reproducible; columns are a multiple of 8.
TensorView random_tensor(OpData& data, DType dtype, std::initializer_list<std::uint64_t> extents,
                         std::uint64_t seed);
fp8::Operand random_operand(OpData& data, const OperandStorage& storage, fp8::Blocks blocks,
                            std::initializer_list<std::uint64_t> extents, std::uint64_t seed,
                            const TensorView& group_offsets = {});

/// How the product is computed: as `way` names, or as suits the sizes.
fp8::Variant variant_of(const Device& device, const fp8::Way& way, GemmForm form,
                        const fp8::Operand& a, const fp8::Operand& b, const TensorView& d,
                        const fp8::GroupedRows& rows);
/// `b` packed for products of `form`, where its storage says so and the variant reads it packed.
fp8::Operand prepacked(OpData& data, const OperandStorage& storage, const fp8::Operand& b,
                       GemmForm form, fp8::Variant variant);
/// The same values, transposed; columns are quantised in 128x1 blocks.
fp8::Operand transposed(OpData& data, const fp8::Operand& columns);

/// Bytes of codes or values and of scales, of so many rows of each of `batch` matrices.
double operand_bytes(const fp8::Operand& operand, std::uint64_t batch, std::uint64_t rows);

class HostOperand {
public:
    HostOperand(Device& device, const fp8::Operand& operand);
    /// group: of a Columns128 operand with group_offsets, which begins at row `first`.
    double at(std::uint64_t batch, std::uint64_t row, std::uint64_t column, std::uint64_t group = 0,
              std::uint64_t first = 0) const;

private:
    double scale(std::uint64_t batch, std::uint64_t row, std::uint64_t column, std::uint64_t group,
                 std::uint64_t first) const;

    fp8::Operand operand_;
    std::vector<std::uint8_t> values_;
    std::vector<float> scales_;
};

} // namespace bellows::bench
