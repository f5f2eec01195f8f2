// SPDX-License-Identifier: MIT
#pragma once

// This header says what a layer is without a device. Each kind of layer declares itself once: its
// parameters, the tensors that one micro-batch in flight keeps in it, and its nodes. The list of
// parameters (and so checkpoints and sharding), the layers' slots, the stage and the memory
// estimate read these declarations, and none of them repeats one. A kind is one source in
// model/shape/layers/ and one row of the table there. All functions are pure.

#include <bellows/base/dtype.hpp>
#include <bellows/base/memory_sizes.hpp>
#include <bellows/fp8/sizes.hpp>
#include <bellows/schedule/pair.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/layout.hpp>
#include <bellows/shape/node_kind.hpp>
#include <bellows/shape/parameters.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// A slot is one micro-batch in flight through one layer. Its tensors and nodes follow from the
/// model and from these values.
struct SlotShape {
    std::uint64_t tokens = 0; ///< of the micro-batch
    std::uint64_t seq = 1;    ///< of a sequence; divides tokens
    DType activation = DType::F32;
    LinearPrecision linear = LinearPrecision::AsActivations;
    bool training = true; ///< false: forward nodes alone, and nothing kept for others

    std::uint64_t local_experts = 0; ///< routed experts of this rank
    std::uint64_t expert_rows = 0;   ///< the most rows that may come to them

    /// Of MLA in FP8: whether keys and values are made in FP8, too.
    bool kv_up_in_fp8 = true;

    // Only NodeInfo::scratch_bytes depends on these.
    bool packs_operands = false; ///< FP8 products pack their operands into tiles of 128
    bool weights_packed = false; ///< FP8 weights have packed copies already
    bool f32_scales = false;     ///< FP8 weights may have f32 scales: products decode them to f32

    bool fp8() const noexcept { return linear == LinearPrecision::Fp8; }
};

/// These are the recipes of FP8 rows and FP8 columns of activations and gradients.
inline constexpr fp8::Recipe kRowsRecipe{fp8::Blocks::Rows128, fp8::Format::E4M3,
                                         fp8::ScaleRule::PowerOfTwo};
inline constexpr fp8::Recipe kColumnsRecipe{fp8::Blocks::Columns128, fp8::Format::E4M3,
                                            fp8::ScaleRule::PowerOfTwo};
/// This is the recipe of FP8 weights: each kScaleRows rows of a matrix have scales of their own.
inline constexpr fp8::Recipe kWeightsRecipe{fp8::Blocks::Blocks128, fp8::Format::E4M3,
                                            fp8::ScaleRule::PowerOfTwo};
/// This is the recipe of FP8 weights whose codes and scales come from a Hugging Face folder.
inline constexpr fp8::Recipe kStoredWeightsRecipe{fp8::Blocks::Blocks128, fp8::Format::E4M3,
                                                  fp8::ScaleRule::F32};

/// How a tensor of a slot stands in memory.
enum class Storage : std::uint8_t {
    Plain,      ///< elements of BufferInfo::dtype
    Fp8Rows,    ///< codes and scales by kRowsRecipe
    Fp8Columns, ///< codes and scales by kColumnsRecipe
};

/// How many rows a tensor of a slot has.
enum class RowCount : std::uint8_t {
    Fixed,    ///< extents[0]
    Arriving, ///< those that come to the rank's experts; extents[0]: at most
    Received, ///< the same rows, which the exchange itself keeps: the slot makes no tensor
};

/// A tensor that a slot keeps from one node to another.
struct BufferInfo {
    std::string name;         ///< in its layer, e.g. "inverse rms"
    DType dtype = DType::F32; ///< in FP8: of the values that are quantised
    std::vector<std::uint64_t> extents;
    MemoryCategory category = MemoryCategory::Activations;
    Storage storage = Storage::Plain;
    RowCount rows = RowCount::Fixed;
    std::uint64_t groups = 0; ///< Fp8Columns: of the rows, each with scales of its own; 0: none

    /// Returns the bytes that it takes, with `arriving` rows where these are not fixed.
    std::uint64_t bytes(std::uint64_t arriving) const;
};

/// A node of a layer.
struct NodeInfo {
    std::string name; ///< e.g. "ATTN(F)", "DISPATCH(B)", "MLP(W)"
    NodeKind kind = NodeKind::Forward;
    /// How it takes part in an overlapped pair, as PairNode says it; `after` counts the slot's
    /// input gradients, all of them if there are fewer.
    NodeResource resource = NodeResource::Compute;
    bool beside_exchange = false;
    std::size_t after = std::numeric_limits<std::size_t>::max();
    /// Whether a weight gradient is of routed experts, which may have a queue for themselves.
    bool of_experts = false;
    /// The node uses at most so much memory while it runs. Nodes that run one after another share
    /// it.
    std::uint64_t scratch_bytes = 0;
};

/// Where layers of a kind stand in a model.
enum class LayerPlace : std::uint8_t {
    Front,       ///< once, on the first stage
    Body,        ///< in all layers, those of MTP modules among them
    Back,        ///< once, on the last stage
    ModuleFront, ///< in each MTP module, ahead of its layer; modules stand behind the Back
    ModuleBack,  ///< in each MTP module, behind its layer
};

/// A kind of layer. `layer` is an index below ModelConfig::all_layers(), and 0 at the front and the
/// back.
struct LayerKind {
    const char*
        name; ///< "mla", "gqa", "dense_ffn", "moe_ffn", "embedding", "head", "mtp_input", ...
    LayerPlace place;
    /// Whether that layer of the model has it.
    bool (*stands_in)(const ModelConfig& config, std::uint64_t layer);
    /// In the order of the forward pass.
    std::vector<ParameterInfo> (*parameters)(const ModelConfig& config, std::uint64_t layer);
    std::vector<BufferInfo> (*buffers)(const ModelConfig& config, const SlotShape& shape);
    /// In the order of a plain run: forward, input-gradient and weight-gradient nodes.
    std::vector<NodeInfo> (*nodes)(const ModelConfig& config, const SlotShape& shape);
    /// Returns the floating-point operations of the forward pass per token where a token sees so
    /// many keys, without those of the matrices (2 per element).
    double (*other_flops)(const ModelConfig& config, double visible_keys);
};

/// The kinds of layers, in the order in which they stand in a model's layer.
using LayerTable = std::span<const LayerKind>;

/// Returns every kind that Bellows computes. The table lives as long as the program.
LayerTable layer_kinds() noexcept;
/// Returns the row of that name. Throws Error{InvalidArgument} with the names that there are.
const LayerKind& layer_kind(const std::string& name);

/// Where the head keeps a bf16 gradient, its forward node has the f32 logits of so many rows in
/// scratch at a time.
inline constexpr std::uint64_t kLogitRows = 1024;

/// One layer of a model.
struct PlacedLayer {
    const LayerKind* kind;
    std::uint64_t layer;
};

/// Returns the layers of a stage in the order of the forward pass. `kinds` must outlive them.
std::vector<PlacedLayer> placed_layers(const ModelConfig& config, std::uint64_t stage,
                                       std::uint64_t num_stages, LayerTable kinds = layer_kinds());

/// These are the functions of parameters.hpp for a model of these kinds of layers.
std::vector<ParameterInfo> parameters(const ModelConfig& config, LayerTable kinds);
ParameterCount count_parameters(const ModelConfig& config, LayerTable kinds);
double training_flops_per_token(const ModelConfig& config, std::uint64_t sequence,
                                LayerTable kinds);

/// A slot keeps the residual stream and its gradient once before each layer of a stage and once
/// behind the last.
BufferInfo residual_stream(const ModelConfig& config, const SlotShape& shape);
BufferInfo residual_gradient(const ModelConfig& config, const SlotShape& shape);

} // namespace bellows
