// SPDX-License-Identifier: MIT
#pragma once

// What the fp8 ops share: checks of matrices, codes and scales, and their strides as kernels want
// them. All throw Error{InvalidArgument}.

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/fp8/recipe.hpp>

#include <cstdint>
#include <string>

namespace bellows::fp8 {

/// Rows that a scale of blocks along the columns stands for, as a shift.
inline std::uint32_t scale_shift(const Quantized& q) {
    return q.recipe.blocks == Blocks::Blocks128 ? 7 : 0;
}

/// Workgroups that every device can start along an axis.
inline constexpr std::uint64_t kMaxGroups = 65535;

/// A matrix or a batch of them: sizes as kernels want them.
struct Matrix {
    BufferView memory = {}; ///< to the end of the last row's padding
    std::uint64_t batch = 1, rows = 0, columns = 0;
    std::uint32_t stride8 = 0, batch8 = 0; ///< in eights of elements

    bool empty() const noexcept { return batch == 0 || rows == 0 || columns == 0; }
};

/// Scales by the recipe; strides in elements, for MX32 the batch stride in words.
struct Scales {
    BufferView memory;
    std::uint32_t stride = 0, batch = 0;
};

/// Where rows of D begin, in elements.
struct Destination {
    std::uint32_t ld = 0, batch = 0;
    bool aligned = false; ///< at multiples of four elements, of which they have a multiple too
};

class Operands {
public:
    explicit Operands(const char* op) : op_(op) {}

    [[noreturn]] void fail(const std::string& message) const;
    void require(bool condition, const std::string& message) const {
        if (!condition)
            fail(message);
    }
    std::uint32_t u32(const char* what, std::uint64_t value) const;

    /// f32 or bf16, rank 2 (3 where `batched`), strided.
    Matrix activation(const char* name, const TensorView& view, bool batched) const;
    /// The codes of `quantized`, of these extents.
    Matrix codes(const char* name, const Quantized& quantized, const Matrix& like) const;
    /// The codes of `quantized`, whose own extents count.
    Matrix codes(const char* name, const Quantized& quantized, bool batched) const;
    Scales scales(const char* name, const Quantized& quantized, const Matrix& codes) const;
    /// Rows that begin at multiples of 4 bytes, with less than 2^32 elements of a matrix.
    Destination destination(const TensorView& d) const;
    /// Groups of `quantized`; 0 without offsets.
    std::uint32_t groups(const Quantized& quantized) const;
    /// The offsets, or `otherwise`.
    BufferView group_offsets_or(const Quantized& quantized, BufferView otherwise) const;
    BufferView row_count_or(const TensorView& view, BufferView otherwise) const;
    /// At least so many bytes, from a multiple of 16 on.
    void workspace(BufferView workspace, std::uint64_t bytes) const;
    /// A contiguous vector whose memory begins at a multiple of `alignment` bytes.
    BufferView vector(const char* name, const TensorView& view, DType dtype, std::uint64_t elements,
                      std::uint64_t alignment = 4) const;
    /// A row stride in fours of elements, for kernels that go by those.
    std::uint32_t stride4(const Matrix& m) const;
    void require_blocks(const char* name, const Recipe& recipe, Blocks blocks) const;
    /// A grid axis.
    std::uint32_t grid(const char* what, std::uint64_t groups) const;

private:
    Matrix matrix(const char* name, const TensorView& view, std::uint64_t padding) const;
    const char* op_;
};

std::string describe(const TensorView& view);
/// "8 x 256", with a batch "3 x 8 x 256".
std::string describe(const Matrix& matrix);

} // namespace bellows::fp8
