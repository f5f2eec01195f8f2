// SPDX-License-Identifier: MIT
#pragma once

// Matrix products D = A * B (+ D) whose operands are fp8 with the scales of a recipe, bf16 or f32,
// in any pairing; names and shapes as DeepGEMM's (its C is D before, `accumulate`). nt reads B as
// [N, K], nn as [K, N], tn A as [K, M]. The thread that owns the recording calls; nothing runs
// before it is submitted.
//
// Numbers. Every product sums in f32 in an order that depends on the variant alone, in Packed and
// Streamed also on how many rows are expected (GroupLayout::expected_rows), not on M, N, the group
// or its rows: the same operands give the same bits from run to run. An fp8 operand stands for its
// values code * scale:
//   power-of-two scales   exact in bf16; by a bf16 operand or another of this kind, the product has
//                         the device's numeric class (gemm_plan.hpp), on matrix units if it has any
//                         or, for two e4m3 operands with scales of 128 along k, that of
//                         Variant::Packed: f16 matrices, exact for codes and scales, f32 sums
//   f32 scales            rounded once to f32; the product is f32 arithmetic ("f32-sequential"), as
//                         it is wherever an operand is f32
// A block with a NaN is NaN, and makes NaN the rows (of A) or columns (of B) of D that it meets; no
// other. D is f32, or bf16 rounded to nearest even; accumulate adds in f32 to what stands in D, and
// rounds once; Variant::Decoded adds rows of D by slots to f32 alone.
//
// Variant::Native has a class of its own, "wgmma-e4m3-k32", for e4m3 operands of either rule: each
// 128 of k is summed on the device's own FP8 units, which keep fewer bits than f32 has (an error
// of 1.2e-4 of the result on an H200), multiplied by its scales and added in f32.
//
// Two bf16 operands have the device's numeric class, or in Variant::Direct, which GPUs with matrix
// units of bf16 take for groups of 256 rows or more on average (nt), "direct-bf16-k16": f32 sums on
// the same matrix units in ascending steps of 64 k, within which k goes another way. Bits of an
// element depend on its row of A and its column of B alone.
//
// Recipes. Scales must be the same along blocks of k: where k runs along columns (A of nt and nn, B
// of nt) that is Rows128, MX32, Blocks128 or PerTensor; where it runs along rows (B of nn, both of
// tn) Columns128, Blocks128 or PerTensor (quantize_rows_and_columns and requantize give those).
//
// Any M, N, K, K = 0 too. Shapes and strides of fp8 operands as recipe.hpp and quantize.hpp say,
// those of bf16 and f32 as engine/gemm.hpp does: the last stride is 1, rows of D begin at multiples
// of 4 bytes. Row counts of views (TensorView::row_count) are not looked at: layouts of groups say
// which rows exist. `workspace`: gemm_workspace_bytes at a multiple of 16 bytes, whose contents
// need not outlive the product. Every function throws Error{InvalidArgument} with the operands'
// shapes when they do not fit together, and says what would.

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/fp8/groups.hpp>
#include <bellows/fp8/recipe.hpp>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows::fp8 {

/// Ways to compute a product, each with its own bits.
enum class Variant : std::uint8_t {
    Device,   ///< what suits the device and the sizes
    Decoded,  ///< operands decoded ahead to bf16 or f32, then the engine's products
    Packed,   ///< e4m3 operands with power-of-two scales along k, on matrix units of f16
    Streamed, ///< few rows: e4m3 weights read once, as they stand in memory (nt)
    Direct,   ///< bf16 by bf16 on matrix units, from memory to registers (nt): rows at multiples of
              ///< 16 bytes and of multiples of 8 elements, not by slots
    Native, ///< e4m3 operands on the device's own FP8 units, by its own code: activations in 1x128
            ///< and weights in 128x128 blocks, of tn both in 128x1 blocks, as Quantized or as
            ///< Transposed, which this variant alone reads; rows of D at multiples of 16 bytes
            ///< and of multiples of 8 elements
};

/// What prepack() made of an operand.
struct Prepacked {
    BufferView memory;
    GemmForm form;
    Variant variant = Variant::Packed; ///< whose products read it
};

/// A matrix or a batch of them: fp8 codes with scales, or bf16 or f32 values.
struct Operand {
    Operand(const TensorView& tensor) : values(tensor) {}
    Operand(const Quantized& q) : values(q.codes), quantized(q) {}
    Operand(const Transposed& t);

    TensorView
        values; ///< the codes, if quantised; of Transposed, what they would be in [rows, columns]
    std::optional<Quantized> quantized;
    std::optional<Transposed> transposed;
    std::optional<Prepacked> prepacked; ///< of b alone: see prepack()
};

/// "bf16 [5, 128]", "e4m3 1x128, power-of-two scales [5, 128]".
std::string describe(const Operand& operand);

/// All but Device.
inline constexpr std::array kVariants = {Variant::Decoded, Variant::Packed, Variant::Streamed,
                                         Variant::Direct, Variant::Native};

/// "decoded"
const char* to_string(Variant variant) noexcept;
/// The variant of that name, Device too.
std::optional<Variant> variant_of(std::string_view name);

/// How Packed, Streamed or Direct cuts a product for the matrix units: constants of its kernel.
struct Tile {
    std::uint32_t fragments_m = 0, fragments_n = 0; ///< matrices of a subgroup; 0: the usual tile
    std::uint32_t warps_m = 1, warps_n = 1;         ///< subgroups along m and n
    std::uint32_t warps_k = 1;                      ///< those that share the sum
    std::uint32_t step_k = 0;                       ///< where k passes through workgroup memory
    std::uint32_t stages = 1;                       ///< steps that workgroup memory holds
    std::uint32_t ahead = 1; ///< steps by which loads run ahead; of Direct, of A by segments

    bool operator==(const Tile&) const = default;
};

/// A variant, and in which tile. Those of tiles() (tiles.hpp) give the bits of the usual one; any
/// other that the variant's kernel can run is taken too, for benchmarks and tests: its warps_k and,
/// of Streamed, whether it has a step_k decide bits. A tile that is named is taken on CPUs as well,
/// where matrices are otherwise left alone.
struct Way {
    Way(Variant v = Variant::Device, const Tile& t = {}) : variant(v), tile(t) {}

    Variant variant;
    Tile tile;

    bool operator==(const Way&) const = default;
};

/// "" when the device and this build have the variant, else why not.
std::string why_not(const Device& device, Variant variant);

/// Device memory that prepack takes, about that of the codes; 0 when the device lacks the variant
/// (Packed or Native), or it has nothing to prepare: Native reads weights of NT as they stand.
std::uint64_t prepacked_bytes(const Device& device, const Quantized& b, GemmForm form,
                              Variant variant = Variant::Packed);
/// Records the packing of weights, once for all products of `form` (NT or NN, dense or grouped)
/// that read the result as their b before the codes change. Variant::Packed then packs a alone, and
/// with few rows streams the weights at the rate of memory; Variant::Native has the codes
/// transposed. b: [N, K] or [groups, N, K] for NT, [K, N] or [groups, K, N] for NN; e4m3 with
/// scales of 128 along k, Packed: powers of two, Native: of 128x128 blocks. `memory`:
/// prepacked_bytes at a multiple of 16 bytes, which the result refers to. Other variants read b's
/// codes as ever.
Operand prepack(Recording& recording, const Quantized& b, GemmForm form, BufferView memory,
                Variant variant = Variant::Packed);
/// The same of groups [first, first + count) of a b of several alone, after their codes have
/// changed; `memory` keeps the others.
Operand prepack(Recording& recording, const Quantized& b, GemmForm form, BufferView memory,
                std::uint64_t first, std::uint64_t count, Variant variant = Variant::Packed);

/// Device memory that any product of these operands takes as its workspace; Device: in whichever
/// variant. A b that is prepacked is for products of its form.
std::uint64_t gemm_workspace_bytes(const Device& device, const Operand& a, const Operand& b,
                                   Variant variant = Variant::Device);
/// The same for m_grouped contiguous products whose operands stand by slots (GroupedRows::slots),
/// of a layout of so many rows.
std::uint64_t gemm_workspace_bytes(const Device& device, const Operand& a, const Operand& b,
                                   std::uint64_t rows, Variant variant = Variant::Device);

/// The same for m_grouped products over `rows`, which may have slots or lack a work list.
std::uint64_t gemm_workspace_bytes(const Device& device, const Operand& a, const Operand& b,
                                   const GroupedRows& rows, Variant variant = Variant::Device);

/// a: [M, K] or [batch, M, K]; b: [N, K]; d: [M, N]; batched alike. D overlaps neither.
void gemm_nt(Recording& recording, const Operand& a, const Operand& b, const TensorView& d,
             bool accumulate, BufferView workspace, Way way = {});
/// a: [M, K], b: [K, N].
void gemm_nn(Recording& recording, const Operand& a, const Operand& b, const TensorView& d,
             bool accumulate, BufferView workspace, Way way = {});
/// a: [K, M], b: [K, N].
void gemm_tn(Recording& recording, const Operand& a, const Operand& b, const TensorView& d,
             bool accumulate, BufferView workspace, Way way = {});

/// Whether an m_grouped_gemm_nt_contiguous of these takes rows without a work list as their layout
/// has them: no copy, one dispatch.
bool reads_layout(const Device& device, const Operand& a, const Operand& b, const TensorView& d,
                  const GroupedRows& rows, const Way& way);

/// The forward product of experts: d[r] = a[r] * transpose(b[g]) for the rows r of each group g.
/// a: [rows, K], b: [groups, N, K], d: [rows, N]. Other rows are neither read nor written. With
/// rows.slots a and d may have their rows in other places, and another number of them: what the
/// layout's slots say must exist. No copy is made of them by Variant::Streamed. Of a layout by ids
/// (GroupLayout::by_ids) a row of d is a slot, and a has one row for each slots_per_a_row of them:
/// ggml's MUL_MAT_ID; rows of d whose ids are of no group are left as they are.
void m_grouped_gemm_nt_contiguous(Recording& recording, const Operand& a, const Operand& b,
                                  const TensorView& d, const GroupedRows& rows, bool accumulate,
                                  BufferView workspace, Way way = {});
/// The input gradient from the same weights: d[r] = a[r] * b[g]. a: [rows, K], b: [groups, K, N].
void m_grouped_gemm_nn_contiguous(Recording& recording, const Operand& a, const Operand& b,
                                  const TensorView& d, const GroupedRows& rows, bool accumulate,
                                  BufferView workspace, Way way = {});
/// Decoding: a: [groups, max_m, K], d: [groups, max_m, N], groups without gaps in between, so many
/// rows of each as rows.layout, a GroupLayout::masked of max_m, counts; b: [groups, N, K].
void m_grouped_gemm_nt_masked(Recording& recording, const Operand& a, const Operand& b,
                              const TensorView& d, const GroupedRows& rows, bool accumulate,
                              BufferView workspace, Way way = {});

/// The weight gradient: d[g] = transpose(a) * b summed over the rows of group g. a: [rows, M], b:
/// [rows, N], d: [groups, M, N] f32. An empty group leaves d[g] when accumulating and clears it
/// otherwise. Columns128 operands need group_offsets, the same tensor as a layout of prefix sums.
void k_grouped_gemm_tn(Recording& recording, const Operand& a, const Operand& b,
                       const TensorView& d, const GroupedRows& rows, bool accumulate,
                       BufferView workspace, Way way = {});

} // namespace bellows::fp8
