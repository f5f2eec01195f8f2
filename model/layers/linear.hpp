// SPDX-License-Identifier: MIT
#pragma once

// The linear layers of attention, FFNs and experts, y = x * transpose(W), and what enters and
// leaves them. In f32 and bf16 they are the engine's products, but that forward products and input
// gradients of bf16 go Direct where the table says so and the shapes allow it (gemm.hpp); an input
// gradient then reads the transposed copy of W. In FP8 they follow DeepSeek-V3
// (arXiv 2412.19437, 3.3): weights in 128 x 128 blocks, activations and gradients in 1 x 128 blocks
// for the forward product and the input gradient, both operands of a weight gradient in 128 x 1
// blocks; all E4M3 with power-of-two scales; sums f32. Which variant computes a product, and with
// it the bits, the run's table says, whose ranks agree on it and whose checkpoints keep it. Where
// it has weight gradients Decoded, their operands are quantised straight to the values of their
// codes. Weights with f32 scales (LinearForm::StoredCodes) are read as they stand by products of
// few rows; others decode them, to f32 or, for matrix units, rounded to bf16. Used by the layers'
// own .cpp files, which record nodes with them; products take what they need from the node's
// scratch.

#include <bellows/engine/arena.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/fp8/choice.hpp>
#include <bellows/fp8/gemm.hpp>
#include <bellows/fp8/groups.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/fp8/recipe.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/layer.hpp>

#include <optional>

namespace bellows {

/// [rows, features] in any of three forms; `values` without memory are left out. A product takes
/// the form that it needs, or makes it from `values`, or else from `codes`.
struct LinearRows {
    LinearRows() = default;
    LinearRows(const TensorView& tensor) : values(tensor) {}
    LinearRows(const fp8::Quantized& quantized) : codes(quantized) {}

    TensorView values;                   ///< in the activations' type
    std::optional<fp8::Quantized> codes; ///< kRowsRecipe: forward products, input gradients
    /// Of experts' rows alone: how these stand in `codes`.
    std::optional<fp8::RowsBySlots> slots;
    std::optional<fp8::Operand> columns; ///< kColumnsRecipe: weight gradients; codes or values
};

/// FP8 rows that live within a node.
fp8::Quantized rows_in(Arena::Frame& scratch, std::uint64_t rows, std::uint64_t columns);
/// A gradient that enters FP8 products now, and a weight gradient later: `columns` are kept.
LinearRows quantise_gradient(Recording& recording, Arena::Frame& scratch, const TensorView& values,
                             const fp8::Quantized& columns);
/// x with `columns`, which live within a node: for one whose weight gradients read x more than
/// once. As it is where it has no codes.
LinearRows with_columns(Recording& recording, Arena::Frame& scratch, LinearRows x,
                        const fp8::Choice& products);

/// y = RMSNorm(x), in the form that y has. inv_rms: [rows] f32, written.
void normalise(Recording& recording, const TensorView& x, const TensorView& gain,
               const LinearRows& y, const TensorView& inv_rms, float eps);

/// Adds to the gradient of a norm's gain, of dy [rows, columns].
void gain_gradient(Recording& recording, Arena::Frame& scratch, const TensorView& dy,
                   const TensorView& x, const TensorView& inv_rms, const Parameter& gain);

/// One matrix [out, in] with all rows. accumulate adds to what the tensor holds.
class Linear {
public:
    Linear(const Parameter& weight, const fp8::Choice& products)
        : weight_(weight), products_(products) {}

    /// x: [rows, in], y: [rows, out].
    void forward(Recording& recording, Arena::Frame& scratch, const LinearRows& x,
                 const TensorView& y, bool accumulate = false) const;
    /// dy: [rows, out], dx: [rows, in].
    void input_gradient(Recording& recording, Arena::Frame& scratch, const LinearRows& dy,
                        const TensorView& dx, bool accumulate = false) const;
    /// Adds transpose(dy) * x to the parameter's gradient.
    void weight_gradient(Recording& recording, Arena::Frame& scratch, const LinearRows& dy,
                         const LinearRows& x) const;

private:
    Parameter weight_;
    fp8::Choice products_;
};

/// The matrices [experts, out, in] of a rank's experts, each with its own rows of the tensors.
/// `rows` lays them out as prefix sums.
class ExpertLinear {
public:
    ExpertLinear(const Parameter& weights, const fp8::Choice& products)
        : weights_(weights), products_(products) {}

    void forward(Recording& recording, Arena::Frame& scratch, const LinearRows& x,
                 const TensorView& y, const fp8::GroupedRows& rows) const;
    /// The variant by which forward() of such codes takes rows as a router's ids lay them out;
    /// nothing where it would copy them.
    std::optional<fp8::Variant> streams(const Recording& recording, const fp8::Quantized& x,
                                        const TensorView& y, const fp8::GroupedRows& by_ids) const;
    void input_gradient(Recording& recording, Arena::Frame& scratch, const LinearRows& dy,
                        const TensorView& dx, const fp8::GroupedRows& rows) const;
    void weight_gradient(Recording& recording, Arena::Frame& scratch, const LinearRows& dy,
                         const LinearRows& x, const fp8::GroupedRows& rows) const;

private:
    Parameter weights_;
    fp8::Choice products_;
};

} // namespace bellows
