// SPDX-License-Identifier: MIT
#pragma once

// The parameters of one rank on the device, as layers read them: weights in the activations' type,
// the matrices of linear layers that compute in FP8 in that, gains and router biases in f32, too,
// and copies where products want them, transposed bf16 or packed FP8; and f32 gradients in one flat
// buffer. What is kept in f32 is its own master weight; other masters are of no use to layers:
// whoever trains keeps them. Parameters that are reduced and updated alike stand side by side, so
// that collectives and the optimiser work on a few long ranges; their order and places are those of
// a ParameterList. One thread at a time.

#include <bellows/engine/device.hpp>
#include <bellows/fp8/choice.hpp>
#include <bellows/fp8/recipe.hpp>
#include <bellows/shape/layout.hpp>
#include <bellows/shape/parameter_list.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows {

struct Parameter {
    ParameterInfo info;
    std::uint64_t first = 0; ///< element in the flat buffers, a multiple of 16
    TensorView weight;       ///< f32; of matrices whose activations are bf16: empty
    /// What products read: bf16, or `weight`; of bf16 matrices that compute in FP8: empty.
    TensorView compute;
    TensorView gradient; ///< f32; of untrained parameters, or without training: empty
    /// Of ParameterInfo::both_ends the head's, where it stands in the flat gradients, and its first
    /// element there; `gradient` is the embedding's. Of others empty.
    TensorView head_gradient{};
    std::uint64_t head_gradient_first = 0;
    /// In 128 x 128 blocks, of linear layers that compute in FP8.
    std::optional<fp8::Quantized> quantized{};
    /// bf16 [in, out], the transposed compute copy, of linear layers whose input gradients are
    /// products nt (fp8::Variant::Direct); of others empty.
    TensorView turned{};
    /// `quantized` packed for forward products and for input gradients, as the variants of these
    /// products read it (fp8::prepack), of matrices that train and whose products go so; of experts
    /// all of a layer and matrix together (experts()).
    std::optional<fp8::Prepacked> packed_nt{}, packed_nn{};
};

/// Elements side by side that all have bf16 weights, or none of them, as what is in f32 or FP8
/// alone.
struct Bf16Run {
    std::uint64_t first = 0, count = 0;
    TensorView weights; ///< [count] bf16, or empty
};

/// A flat tensor that ranks send each other, each a part of it.
struct SentCopy {
    TensorView whole;
    std::vector<std::uint64_t> counts; ///< elements of each rank's part, the first rank's first
};

/// How a store whose linear layers compute in FP8 keeps the matrix of one.
enum class LinearForm : std::uint8_t {
    PowerOfTwo,  ///< codes by kWeightsRecipe
    StoredCodes, ///< codes by kStoredWeightsRecipe: f32 scales, as Hugging Face folders have them
    Plain,       ///< not in FP8 but in the activations' type
};
/// Says it for each linear layer, of all experts of a layer and matrix the same. Outlives the store
/// with what it refers to.
using LinearForms = std::function<LinearForm(const ParameterInfo& info)>;

/// Gives FP8 weights as they are stored. Both are called from several threads at once.
struct CodeSource {
    /// E4M3 codes of rows of a matrix, from first_row on.
    std::function<void(const ParameterInfo& info, std::uint64_t first_row,
                       std::span<std::uint8_t> codes)>
        codes{};
    /// The scales of all its blocks, [ceil(out / 128), ceil(in / 128)].
    std::function<void(const ParameterInfo& info, std::span<float> scales)> scales{};

    explicit operator bool() const noexcept { return codes && scales; }
};

/// Gives memory of the device, which the store does not own and which outlives it.
using MemorySource =
    std::function<BufferView(std::string name, std::uint64_t bytes, MemoryCategory category)>;

class ParameterStore {
public:
    /// mine: this rank's part of parameters(config), in that order. The experts of one layer and
    /// one matrix are stored side by side in ascending order.
    /// training: false for weights alone; gradients are empty views then. memory: of what ranks
    /// send each other, gradients, f32, bf16 and FP8 weights; without, it is the store's. forms: of
    /// FP8 linear layers; without, all are LinearForm::PowerOfTwo. Throws Error{InvalidArgument} as
    /// ParameterList does, when FP8 is wanted for a matrix whose sides are no multiples of 8, when
    /// forms are other than PowerOfTwo for training, and when experts of a layer and matrix differ.
    ParameterStore(Device& device, std::vector<ParameterInfo> mine, DType activation,
                   bool training = true, LinearPrecision linear = LinearPrecision::AsActivations,
                   MemorySource memory = {}, LinearForms forms = {});

    ~ParameterStore();
    ParameterStore(ParameterStore&&) noexcept;
    ParameterStore& operator=(ParameterStore&&) noexcept;

    Device& device() const noexcept;
    DType activation() const noexcept;
    LinearPrecision linear_precision() const noexcept;
    bool training() const noexcept; ///< whether there are gradients
    /// Whether FP8 matrices are here whose scales are no powers of two (LinearForm::StoredCodes).
    bool has_f32_scales() const noexcept;
    /// How layers that are made from now on compute their FP8 products, or those of two bf16
    /// tensors; at first Decoded. The same on all ranks. Makes the copies that these want, so that
    /// layers and optimisers are made afterwards. Waits.
    void use_products(const fp8::Choice& choice);
    const fp8::Choice& products() const noexcept;

    /// Where the parameters stand, their ranges, and which of them this rank has.
    const ParameterList& list() const noexcept;
    /// In flat order, as in list().
    const std::vector<Parameter>& all() const noexcept;
    /// Throws Error{InvalidArgument} naming the parameter that this rank does not have.
    const Parameter& at(const std::string& name) const;
    /// The matrices `matrix` ("gate_up_proj" or "down_proj") of all experts of a layer that live
    /// here, as one tensor [local experts, out, in].
    Parameter experts(std::uint64_t layer, const std::string& matrix) const;

    std::uint64_t num_elements() const noexcept { return list().num_elements(); }
    /// [count] f32: elements [first, first + count) if all of them are kept in f32, else an empty
    /// view.
    TensorView f32_weights(std::uint64_t first, std::uint64_t count) const;
    /// Elements [first, first + count), in ascending runs as long as can be.
    std::vector<Bf16Run> bf16_runs(std::uint64_t first, std::uint64_t count) const;
    /// [>= num_elements] f32, behind these elements those of head gradients; empty view without
    /// training.
    const TensorView& flat_gradients() const noexcept;

    /// Gets f32 values of the elements from `first` on.
    using MasterSink = std::function<void(std::uint64_t first, std::span<const float> values)>;
    /// Sets every parameter to initial_values(info, seed), gradients to zero; `masters` gets all of
    /// these values, some parameters at a time. Waits.
    void initialise(std::uint64_t seed, const MasterSink& masters = {});
    /// Gives values of rows of a parameter, from first_row on; of a gain or bias elements. Called
    /// from several threads at once.
    using RowSource = std::function<void(const ParameterInfo& info, std::uint64_t first_row,
                                         std::span<float> values)>;
    /// The same values, rounded to bf16 to nearest even.
    using Bf16RowSource = std::function<void(const ParameterInfo& info, std::uint64_t first_row,
                                             std::span<std::uint16_t> values)>;
    /// Sets what layers read of every parameter, some rows at a time, so that the host needs no
    /// more than twice 4 * kInitialisedAtOnce bytes; `masters` gets all of these values.
    /// on_progress, if any, gets how many elements have been set. bf16, if any, is asked instead
    /// for parameters that are kept in bf16 alone, and codes for those of LinearForm::StoredCodes
    /// (which are else quantised from values, with f32 scales), both without training and masters.
    /// Waits. Throws what the source throws; the parameters' values are undefined then.
    void load(const RowSource& source, const MasterSink& masters = {},
              const std::function<void(std::uint64_t elements)>& on_progress = {},
              const Bf16RowSource& bf16 = {}, const CodeSource& codes = {});
    /// Records the making of the FP8 copies of the matrices in the elements from `first` on, which
    /// begin and end where a parameter is divisible, from their master weights [elements] f32.
    void quantize(Recording& recording, std::uint64_t first, const TensorView& masters) const;
    /// Records the making of the transposed or packed copies of all matrices, after the bf16 or FP8
    /// ones have changed; or of those in elements [first, first + count), whole parameters.
    void make_copies(Recording& recording) const { make_copies(recording, 0, num_elements()); }
    void make_copies(Recording& recording, std::uint64_t first, std::uint64_t count) const;
    /// What ranks send each other that update the elements from `first` on in turn, each as many as
    /// `shares` says: all that layers read of them and that is not made of each other. The elements
    /// are whole parameters, divided where these are divisible.
    std::vector<SentCopy> sent_copies(std::uint64_t first,
                                      std::span<const std::uint64_t> shares) const;
    /// Sets what layers read of a parameter from f32 values, but no master weight that somebody
    /// else keeps. Waits.
    void upload(const std::string& name, std::span<const float> values);
    /// What is kept in f32 of a parameter. Waits. Throws Error{InvalidArgument} for others.
    std::vector<float> download(const std::string& name) const;
    std::vector<float> download_gradient(const std::string& name) const;
    /// Sets all gradients to zero: the first use of a step. Throws Error{InvalidArgument} without
    /// training, as download_gradient() does.
    TimePoint clear_gradients();

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
