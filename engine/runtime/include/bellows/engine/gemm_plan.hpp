// SPDX-License-Identifier: MIT
#pragma once

// How products are computed on a device: the numeric classes among which a program chooses, and the
// tiles into which kernels on matrix units cut a product. Plain values.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

class Device;
struct DeviceInfo;

/// Which operand is read transposed: D = A B^T, A B, A^T B.
enum class GemmForm : std::uint8_t { NT, NN, TN };

/// Sides of one matrix product of a device's matrix units: A is m x k, B is k x n.
struct MatrixShape {
    std::uint32_t m = 16, n = 16, k = 16;
};

/// What products of two bf16 tensors do with an element of D; two classes give different bits.
///   f32-sequential    f32 fused multiply-adds in ascending k: the same bits on every device
///   coopmat-bf16-kN   matrix units on bf16, f32 sums in ascending steps of N, inside a step as the
///                     device does it
///   wgmma-bf16        Hopper's warpgroup units on bf16, f32 sums in ascending steps of 16. This
///                     holds where the operands begin at multiples of 16 bytes and N and the
///                     distances of rows are multiples of 8; other products as coopmat-bf16-kN
///   coopmat2-bf16     matrix units that a whole workgroup multiplies with, on bf16, f32 sums in
///                     ascending steps of 64, inside a step as the device does it; for the same
///                     operands as wgmma-bf16, other products as coopmat-bf16-kN
///   coopmat-f16-kN    as coopmat-bf16-kN on f16: operands outside 2^-14 .. 65504 are not exact,
///                     so it serves only where it is named
/// Within a class an element's bits depend on its row of A and its column of B alone. Products of
/// f32 tensors are always f32-sequential. Attention of bf16 goes by the class, too, where
/// a tile of it fits the device (attention.hpp).
struct GemmClass {
    enum class Units : std::uint8_t { None, BF16, F16 };

    std::string name = "f32-sequential";
    Units units = Units::None;
    bool native = false;    ///< by code of the GPU's own instruction set
    bool workgroup = false; ///< by matrices of whole workgroups
    MatrixShape shape;      ///< where units are used
    std::string why_not;    ///< "" when this device and build have it
};

/// The tile of a workgroup of kernels on matrix units; fields are constants of
/// shaders/gemm_coopmat_nt.comp.
struct GemmTile {
    MatrixShape shape;
    std::uint32_t fragments_m = 4, fragments_n = 2;
    std::uint32_t warps_m = 2, warps_n = 4;
    std::uint32_t block_k = 32;
    std::uint32_t stages = 2;
    std::uint32_t turn = 0;
    std::uint32_t band = 8;

    std::uint32_t rows() const { return shape.m * fragments_m * warps_m; }
    std::uint32_t columns() const { return shape.n * fragments_n * warps_n; }
    std::uint32_t local_size(const DeviceInfo& info) const;
    /// Workgroup memory of shaders/include/gemm_coopmat.glsl. A kernel that declares more than the
    /// device's limit loses the device, on some drivers without an error.
    std::uint64_t shared_bytes(GemmForm form) const;
    /// "" when the device can run it, else the limit that it breaks.
    std::string why_not(const DeviceInfo& info, GemmForm form) const;
    /// "128x256x32, 1 stage, 2x4 subgroups, turned"
    std::string describe() const;
};

/// Subgroup matrices of the device on units with f32 sums, whose sides are multiples of 8.
std::vector<MatrixShape> matrix_shapes(const DeviceInfo& info, GemmClass::Units units);

/// Tiles that this device can run for `form`; empty when the class has no matrix units. Large
/// products take the first, smaller ones the first of the smaller ones.
std::vector<GemmTile> gemm_tiles(const DeviceInfo& info, const GemmClass& gemm_class,
                                 GemmForm form);

/// Rows of a tile of grouped products on this device, the same for all kernels and classes, so
/// that one work list serves them.
std::uint32_t group_tile_rows(const DeviceInfo& info) noexcept;

/// All classes, the one that a device takes by itself first, with why it lacks the others.
std::vector<GemmClass> gemm_classes(const Device& device);
/// The class of this device: DeviceOptions::gemm_class, or what use_gemm_class set.
const GemmClass& gemm_class(const Device& device);
/// From now on recorded products of bf16 tensors have the class `name`; recordings keep what they
/// have. Ranks that work on one model must all use the same: rank 0 broadcasts its class's name,
/// which belongs into the checkpoint. "" chooses anew. Throws Error{Unsupported} with all classes
/// and the reasons when the device lacks it. Not while another thread records.
void use_gemm_class(Device& device, std::string_view name);
/// For benchmarks and tests: from now on products of that form have this tile, whatever their size,
/// grouped ones where it is as high as theirs (work lists want the same width for NT and NN). Bits
/// stay the same. use_gemm_class undoes it. Throws Error{Unsupported}.
void force_gemm_tile(Device& device, GemmForm form, const GemmTile& tile);

} // namespace bellows
