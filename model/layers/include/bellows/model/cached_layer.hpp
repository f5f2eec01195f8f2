// SPDX-License-Identifier: MIT
#pragma once

// Layers as generation runs them: forward only, over the token rows of many sequences, with keys
// and values in a paged cache. A layer owns its weights' part in the absorbed form of latent
// attention and nothing of a step: whoever records gives it rows, scratch and the residual stream.
// One thread at a time.

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/engine/arena.hpp>
#include <bellows/engine/paged_attention.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/fp8/recipe.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/model/rope_table.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <memory>
#include <optional>

namespace bellows {

/// The token rows of a step. `rows` is what the recording is made for; the device holds how many
/// there are. Rows beyond that have position 0 and no place, and nobody reads what they become.
struct StepRows {
    std::uint64_t rows = 0;
    BufferView count;     ///< u32 on the device: rows that there are
    TensorView positions; ///< [rows] u32, of each token in its text
    TensorView places;    ///< [rows] u32, where its keys and values go (paged_attention.hpp)
    ops::PagedWork work;
    /// A row's bits do not depend on how many rows there are, or on how many ranks have the
    /// experts: experts' products are taken as for so many rows of each, and their results are
    /// summed along a tree. 0: products as for the rows of the recording, sums in the order of the
    /// choices.
    std::uint64_t expected_expert_rows = 0;

    bool exact() const noexcept { return expected_expert_rows > 0; }
};

/// What a token's entry in each layer's cache looks like. stored: f32, bf16 or, with latent
/// attention, F8E4M3. Throws Error{InvalidArgument} for other types.
ops::CacheShape cache_shape(const ModelConfig& config, DType stored);

class CachedLayer {
public:
    virtual ~CachedLayer() = default;
    /// stream: [rows, hidden] in the activations' type; the layer's result is added to it.
    virtual void record(Recording& recording, Arena::Frame& scratch, const StepRows& rows,
                        const TensorView& stream) const = 0;
};

/// A layer's experts where the ranks of an exchange have some each. What is recorded comes in three
/// parts: the rows travel behind the first one, and the results behind the last one, which come
/// back onto the stream. record() is for a rank that has all experts.
class CachedExperts : public CachedLayer {
public:
    /// What goes to the experts, and what the shared experts read.
    struct Routed {
        TensorView rows;                     ///< [rows, hidden] in the activations' type
        std::optional<fp8::Quantized> codes; ///< the same where linear layers compute in FP8
        TensorView ids, weights;             ///< [rows, top_k] i32 and f32
    };

    /// `kept` has the tensors until the other parts have run.
    virtual Routed route(Recording& recording, Arena::Frame& kept, const StepRows& rows,
                         const TensorView& stream) const = 0;
    /// Adds the shared experts' results to the stream. Nothing is recorded where there are none.
    virtual void shared(Recording& recording, Arena::Frame& scratch, const Routed& routed,
                        const TensorView& stream) const = 0;
    virtual bool has_shared() const = 0;
    /// results [capacity, hidden]: what this rank's experts make of the rows that arrive in the
    /// handle, which is one of ExchangeMode::LowLatency with rows by expert. expected_rows: of
    /// StepRows, or of each expert.
    virtual void received(Recording& recording, Arena::Frame& scratch, const ExchangeHandle& handle,
                          std::uint64_t expected_rows, const TensorView& results) const = 0;
};

/// Latent attention is absorbed: queries are multiplied with W_UK and sums with W_UV, so that the
/// cache's latents are keys and values at once. The parameters have been loaded. All arguments
/// outlive the layer. Waits for the device. Throws Error{InvalidArgument} when the store lacks a
/// parameter.
std::unique_ptr<CachedLayer> cached_attention(const ModelConfig& config, std::uint64_t layer,
                                              ParameterStore& parameters,
                                              const RopeTable& positions,
                                              const ops::PagedCache& cache);
/// The dense FFN of a layer, or its experts, of which the store has all or a rank's.
std::unique_ptr<CachedLayer> cached_ffn(const ModelConfig& config, std::uint64_t layer,
                                        ParameterStore& parameters);
std::unique_ptr<CachedExperts> cached_experts(const ModelConfig& config, std::uint64_t layer,
                                              ParameterStore& parameters);

} // namespace bellows
