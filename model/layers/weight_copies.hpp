// SPDX-License-Identifier: MIT
#pragma once

// What products read of matrices beside bf16 weights, made from them or from master weights: FP8
// codes with their scales, transposed bf16 copies, and packed or transposed FP8 ones. Part of a
// ParameterStore, whose functions of the same names say more. One thread at a time.

#include "weight_storage.hpp"

#include <bellows/fp8/choice.hpp>
#include <bellows/fp8/gemm.hpp>
#include <bellows/fp8/recipe.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/parameter_list.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

class WeightCopies {
public:
    /// Makes the memory of FP8 codes and scales for matrices that compute in FP8. `parameters` are
    /// as in the list; the constructor and use_products() fill their views of copies. The list and
    /// the parameters must outlive this object.
    WeightCopies(Device& device, const ParameterList& list, const WeightForms& forms,
                 WeightMemory& memory, std::span<Parameter> parameters);

    void use_products(const fp8::Choice& choice);
    const fp8::Choice& products() const noexcept { return products_; }
    bool has_f32_scales() const noexcept { return has_f32_scales_; }

    /// All experts' matrices that stand together from parameter `first` on, as one of
    /// [local experts, out, in].
    Parameter experts(std::size_t first) const;

    void quantize(Recording& recording, std::uint64_t first, const TensorView& masters) const;
    void make_copies(Recording& recording, std::uint64_t first, std::uint64_t count) const;
    /// Adds the FP8 codes and scales that ranks send each other. ends: see add_sent_copy().
    void add_sent_copies(std::vector<SentCopy>& copies, std::span<const std::uint64_t> ends) const;

private:
    /// Matrices that are packed together.
    struct PackedWeights {
        std::size_t first, count; ///< parameters
        fp8::Quantized codes;
        std::optional<fp8::Prepacked> nt, nn;
    };
    /// The variants that read copies of a matrix in products of either form.
    struct WantedCopies {
        std::optional<fp8::Variant> nt, nn;
    };

    void check_forms() const;
    void make_quantized(WeightMemory& memory);
    void make_turned();
    void make_packed();
    bool wants_turned(const ParameterInfo& info) const;
    WantedCopies wanted_copies(std::size_t index) const;
    /// The views of a part: several experts are one tensor [count, out, in]; a piece of a matrix
    /// has the FP8 codes and scales of its rows.
    Parameter view_of(const ParameterPart& part) const;

    Device* device_;
    const ParameterList* list_;
    WeightForms forms_;
    std::span<Parameter> parameters_;
    fp8::Choice products_{fp8::Variant::Decoded};
    bool has_f32_scales_ = false;
    BufferView codes_, scales_;                 ///< of the FP8 copies, in the order of the list
    Buffer turned_;                             ///< the transposed copies, likewise
    std::vector<PackedWeights> packed_weights_; ///< in the order of the list
    Buffer packed_;
};

} // namespace bellows
