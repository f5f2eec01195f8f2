// SPDX-License-Identifier: MIT
#pragma once

// Layers as generation runs them: forward only, over the token rows of many sequences, with keys
// and values in a paged cache. A layer owns its weights' part in the absorbed form of latent
// attention and nothing of a step: whoever records gives it rows, scratch and the residual stream.
// One thread at a time.

#include <bellows/engine/arena.hpp>
#include <bellows/engine/paged_attention.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/model/rope_table.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <memory>

namespace bellows {

/// The token rows of a step. `rows` is what the recording is made for; the device holds how many
/// there are. Rows beyond that have position 0 and no place, and nobody reads what they become.
struct StepRows {
    std::uint64_t rows = 0;
    BufferView count;     ///< u32 on the device: rows that there are
    TensorView positions; ///< [rows] u32, of each token in its text
    TensorView places;    ///< [rows] u32, where its keys and values go (paged_attention.hpp)
    ops::PagedWork work;
    /// A row's bits do not depend on how many rows there are: experts' products are taken as for so
    /// many rows of each. 0: as for the rows of the recording.
    std::uint64_t expected_expert_rows = 0;
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

/// Latent attention is absorbed: queries are multiplied with W_UK and sums with W_UV, so that the
/// cache's latents are keys and values at once. The parameters have been loaded. All arguments
/// outlive the layer. Waits for the device. Throws Error{InvalidArgument} when the store lacks a
/// parameter.
std::unique_ptr<CachedLayer> cached_attention(const ModelConfig& config, std::uint64_t layer,
                                              ParameterStore& parameters,
                                              const RopeTable& positions,
                                              const ops::PagedCache& cache);
/// The dense FFN of a layer, or its experts, all of which this rank has.
std::unique_ptr<CachedLayer> cached_ffn(const ModelConfig& config, std::uint64_t layer,
                                        ParameterStore& parameters);

} // namespace bellows
