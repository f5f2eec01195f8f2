// SPDX-License-Identifier: MIT
#pragma once

// The flat f32 and bf16 weights and f32 gradients of a ParameterStore on the device, in the order
// of its list. What is made from them for products is in weight_copies.hpp. One thread at a time.

#include <bellows/engine/device.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/layout.hpp>
#include <bellows/shape/parameter_list.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// The forms in which a store keeps weights.
struct WeightForms {
    DType activation;
    LinearPrecision linear;
    bool training; ///< with gradients, and the copies that only training reads
    LinearForms linear_forms{};

    bool in_f32(const ParameterInfo& info) const noexcept {
        return activation == DType::F32 || kept_in_f32(info);
    }
    bool in_fp8(const ParameterInfo& info) const {
        return linear == LinearPrecision::Fp8 && is_linear(info) &&
               form_of(info) != LinearForm::Plain;
    }
    bool in_bf16(const ParameterInfo& info) const {
        return activation == DType::BF16 && !in_fp8(info);
    }
    /// Of a linear layer, if the store has FP8 ones.
    LinearForm form_of(const ParameterInfo& info) const {
        return linear_forms ? linear_forms(info) : LinearForm::PowerOfTwo;
    }
};

/// Gives memory for weights: from the source that the user of the store names, or its own.
class WeightMemory {
public:
    WeightMemory(Device& device, MemorySource source);
    /// At least 16 bytes.
    BufferView make(std::string name, std::uint64_t bytes, MemoryCategory category);

private:
    Device* device_;
    MemorySource source_;
    std::vector<Buffer> own_; ///< what the source did not give
};

/// Adds the part of `flat` that belongs to elements [ends.front(), ends.back()), unless it is
/// empty. Rank i sends what belongs to elements [ends[i], ends[i + 1]). at(e) is the place in
/// `flat` where the part of the elements from e on begins.
void add_sent_copy(std::vector<SentCopy>& copies, const TensorView& flat,
                   std::span<const std::uint64_t> ends,
                   const std::function<std::uint64_t(std::uint64_t)>& at);

class WeightStorage {
public:
    /// Fills the weight, compute and gradient views of `parameters`, which are as in the list.
    WeightStorage(Device& device, const ParameterList& list, const WeightForms& forms,
                  WeightMemory& memory, std::span<Parameter> parameters);

    /// These do what the functions of ParameterStore say.
    TensorView f32_weights(std::uint64_t first, std::uint64_t count) const;
    std::vector<Bf16Run> bf16_runs(std::uint64_t first, std::uint64_t count) const;
    const TensorView& gradients() const noexcept { return gradients_; }
    TimePoint clear_gradients();

    /// Adds the weights that ranks send each other: the bf16 ones where there are some, else those
    /// in f32. ends: see add_sent_copy().
    void add_sent_copies(std::vector<SentCopy>& copies, std::span<const std::uint64_t> ends) const;

private:
    void make_bf16_weights(const ParameterList& list, const WeightForms& forms,
                           WeightMemory& memory);

    Device* device_;
    TensorView f32_;       ///< [f32_count_]
    TensorView bf16_;      ///< of all that has such weights; empty with f32 activations
    TensorView gradients_; ///< as ParameterStore::flat_gradients()
    std::uint64_t f32_first_ = 0, f32_count_ = 0; ///< the elements that are kept in f32
    std::vector<Bf16Run> runs_;                   ///< of all elements
    std::unique_ptr<Recording> clear_;
};

} // namespace bellows
