// SPDX-License-Identifier: MIT
#pragma once

// The linear layers of attention, FFNs and experts, y = x * transpose(W), and what enters and
// leaves them. In f32 and bf16 they are the engine's products. In FP8 they follow DeepSeek-V3
// (arXiv 2412.19437, 3.3): weights in 128 x 128 blocks, activations and gradients in 1 x 128 blocks
// for the forward product and the input gradient, both operands of a weight gradient in 128 x 1
// blocks; all E4M3 with power-of-two scales; sums f32. Used by the layers' own .cpp files, which
// record nodes with them; products take what they need from the node's scratch.

#include <bellows/engine/arena.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/fp8/groups.hpp>
#include <bellows/fp8/recipe.hpp>
#include <bellows/model/parameter_store.hpp>

#include <optional>

namespace bellows {

/// [rows, features] in the activations' type, as FP8 rows, or both, of which `values` are without
/// memory if left out. What is kept as FP8 rows alone is what weight gradients read.
struct LinearRows {
    LinearRows() = default;
    LinearRows(const TensorView& tensor) : values(tensor) {}
    LinearRows(const fp8::Quantized& quantized) : codes(quantized) {}

    TensorView values;
    std::optional<fp8::Quantized> codes;
};

/// The recipe of FP8 rows.
inline constexpr fp8::Recipe kRowsRecipe{fp8::Blocks::Rows128, fp8::Format::E4M3,
                                         fp8::ScaleRule::PowerOfTwo};

/// y = RMSNorm(x), in the form that y has. inv_rms: [rows] f32, written.
void normalise(Recording& recording, const TensorView& x, const TensorView& gain,
               const LinearRows& y, const TensorView& inv_rms, float eps);
/// hidden = silu(gate) * up (* row_weight), in the form that hidden has.
void swiglu(Recording& recording, const TensorView& gate_up, const TensorView& row_weight,
            const LinearRows& hidden);

/// One matrix [out, in] with all rows. accumulate adds to what the tensor holds.
class Linear {
public:
    explicit Linear(const Parameter& weight) : weight_(weight) {}

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
};

/// The matrices [experts, out, in] of a rank's experts, each with its own rows of the tensors.
/// `rows` lays them out as prefix sums.
class ExpertLinear {
public:
    explicit ExpertLinear(const Parameter& weights) : weights_(weights) {}

    void forward(Recording& recording, Arena::Frame& scratch, const LinearRows& x,
                 const TensorView& y, const fp8::GroupedRows& rows) const;
    void input_gradient(Recording& recording, Arena::Frame& scratch, const LinearRows& dy,
                        const TensorView& dx, const fp8::GroupedRows& rows) const;
    void weight_gradient(Recording& recording, Arena::Frame& scratch, const LinearRows& dy,
                         const LinearRows& x, const fp8::GroupedRows& rows) const;

private:
    Parameter weights_;
};

} // namespace bellows
