// SPDX-License-Identifier: MIT
#pragma once

// Products of up to eight rows of activations by weights of any storage, for generation: the
// weights are read once, as they stand, and what else a layer does with the rows is part of the
// same dispatch (RMSNorm before, SwiGLU or the residual sum behind, the sum of a token's experts).
// Activations are not quantised; sums are f32 and of one order on a device, whatever else is in the
// batch of the same number of rows. The thread that owns the recording calls; each function records
// one dispatch.
//
// Common to all. Activations (x, and y where nothing else is said) are f32 or bf16, strided with a
// last stride of 1, row and batch strides that are multiples of 4 elements, from a multiple of four
// elements on; their features a multiple of 4. Weights are [n, k], [batch, n, k] or [experts, n,
// k]: E4M3 codes in 128x128 blocks (recipe.hpp), by either kind of activation; or values of the
// activations' own type with k a multiple of 16 bytes and rows at multiples of 8 elements, from
// multiples of 16 bytes on. A NaN code makes NaN the results that it meets. Every function throws
// Error{InvalidArgument} with the shapes when operands do not fit together.

#include <bellows/engine/paged_attention.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/engine/router.hpp>
#include <bellows/fp8/gemm.hpp>

#include <cstdint>

namespace bellows::fp8 {

inline constexpr std::uint64_t kMostFewRows = 8;

/// Whether these functions take such weights by activations of type `act`.
bool takes_few_rows(const Operand& weights, DType act);
/// Rows up to which that is a device's fastest way: all eight where it has no matrix units, and
/// fewer where these have more to do with the same bytes. 0: they do not take such weights.
std::uint64_t few_rows_that_pay(const Device& device, const Operand& weights, DType act);

/// How a dispatch is cut: how many invocations share a sum, how many rows of weights they have, and
/// how many such groups a workgroup has. Zeros: what suits the device. Lanes decide bits, and so
/// does the size of a workgroup whose x is staged.
struct FewRowsCut {
    std::uint32_t lanes = 0, columns = 0, groups = 0;
    /// Whether a workgroup first puts x with the norm's gain in its memory, of which its groups
    /// then read. Other devices than those that convert codes as f16 never do.
    enum class Staged : std::uint8_t { AsSuits, Yes, No };
    Staged staged = Staged::AsSuits;
};

/// This says what a product does before and after its sum.
struct FewRowsForm {
    enum class Result : std::uint8_t {
        Store, ///< y = sum
        Add,   ///< y += sum
        Swiglu ///< y = silu(gate) * up; the matrix has the rows of gate, then as many of up
    };
    Result result = Result::Store;
    /// x stands for x * gain / sqrt(mean(x^2) + eps). gain: [k] f32, or bf16 where x is, at a
    /// multiple of 16 bytes; without memory: x itself.
    TensorView gain = {};
    float eps = 0;
    /// With memory: x [heads, rows, v_dim] is o of ops::paged_attention_parts, and its parts are
    /// put together here; the weights are a batch of the heads', and there is no gain.
    ops::PagedParts parts = {};
    FewRowsCut cut = {};
};

/// Whether parts of attention are best put together by the product that reads them.
bool few_rows_combine(const Device& device, std::uint64_t rows, std::uint64_t v_dim);

/// y = x * transpose(weights). x: [rows, k], y: [rows, n] like x or f32, with SwiGLU n half the
/// matrix's rows; or with a batch first, of weights as well. An odd n is possible: of bf16 y then
/// the word of a row's last element has one more that is kept.
void few_rows_nt(Recording& recording, const TensorView& x, const Operand& weights,
                 const TensorView& y, const FewRowsForm& form = {});

/// y[s] = x[s / top_k] * transpose(weights of expert ids[s]) for each slot s of ids, [rows, top_k]
/// i32. y: [rows * top_k, n]. Slots of rows from ids.row_count on, and those with other ids than
/// 0..experts-1, are left alone.
void few_rows_by_ids(Recording& recording, const TensorView& x, const Operand& weights,
                     const TensorView& ids, const TensorView& y, const FewRowsForm& form = {});

/// A router's choice that the experts' product makes itself: what ops::router_forward makes of the
/// same operands, with the bits that it has on a GPU (on CPUs scores of Softmax are summed up in
/// another order). All of RouterOptions is possible.
struct FewRowsRouter {
    TensorView logits; ///< [rows, experts] f32
    TensorView bias;   ///< [experts] f32, optional
    ops::RouterOptions options;
    TensorView ids;     ///< [rows, top_k] i32, written; its row_count says how many rows there are
    TensorView weights; ///< [rows, top_k] f32, written
};

/// few_rows_by_ids of the ids that the router chooses; ids and weights are there for what comes
/// next. At most ops::kMostSharedExperts experts and ops::kMostSharedTopK choices.
void few_rows_routed(Recording& recording, const TensorView& x, const Operand& weights,
                     const FewRowsRouter& router, const TensorView& y,
                     const FewRowsForm& form = {});
/// Whether that is better than ops::router_forward and few_rows_by_ids: every workgroup makes the
/// whole choice, which on a CPU costs more than a dispatch.
bool few_rows_choose(const Device& device, std::uint64_t experts, std::uint64_t top_k);

/// A token's experts and its shared ones are summed: y[r] += the sum over its choices c of
/// choice_weights[r, c] * hidden[r * top_k + c] * transpose(weights of expert ids[r, c]), in their
/// order, and shared[r] * transpose(shared_weights) where `shared` has memory. hidden: [rows *
/// top_k, k], shared: [rows, shared_k], choice_weights: [rows, top_k] f32; ids as above. y: [rows,
/// n] like hidden.
struct FewRowsExperts {
    TensorView hidden;
    Operand weights;
    TensorView ids, choice_weights;
    TensorView shared = {};
    Operand shared_weights = TensorView{};
    FewRowsCut cut = {};
};
void few_rows_experts(Recording& recording, const FewRowsExperts& experts, const TensorView& y);

} // namespace bellows::fp8
