// SPDX-License-Identifier: MIT
#pragma once

// The mixture-of-experts FFN of a layer: y = x + routed(n) + shared(n), n = RMSNorm(x). Routed
// experts live on the ranks of the exchange's group; shared ones on every rank, where they run
// while tokens travel. Nodes, in the order of a plain run:
//   forward:         ROUTER(F) DISPATCH(F) SHARED(F) MLP(F) COMBINE(F)
//   input gradient:  DISPATCH(B) SHARED(B) MLP(B) COMBINE(B) ROUTER(B)
//   weight gradient: MLP(W) SHARED(W)
// Weight gradients accumulate onto ParameterStore's gradients. With balance_loss_alpha > 0
// ROUTER(B) adds the gradient of DeepSeek-V3's sequence-wise balance loss
// (verify/reference/router.hpp has the formula), each slot's `seq` tokens being a sequence; its
// value is no part of any reported loss.

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <memory>

namespace bellows {

class MoeFfn final : public Layer {
public:
    /// How tokens of this type go to the experts of linear layers of this precision; name, ranks,
    /// max_tokens (of a micro-batch on any of them) and times are the caller's. In FP8, as in
    /// DeepSeek-V3, tokens and gradients are quantised once, before they travel, and weight
    /// gradients take them from these codes, which stay where they came.
    static ExchangeConfig exchange_config(const ModelConfig& config, DType activations,
                                          LinearPrecision precision);

    /// All must outlive it. The exchange: as exchange_config() has it, or rows by ExpertMajor, of
    /// codes (the same bits in more memory and time) or of tokens as they are. Throws
    /// Error{InvalidArgument} for others. scratch: shared with other layers, or its own if left
    /// out.
    MoeFfn(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
           ExpertExchange& exchange, LayerScratch* scratch = nullptr);
    ~MoeFfn() override;

    /// Throws Error{InvalidArgument} when there is a balance loss and the tokens are not whole
    /// sequences.
    std::unique_ptr<LayerSlot> create_slot(const SlotDesc& desc) override;

    /// Slots of this rank's tokens that chose each expert since the last clear: [routed_experts]
    /// u32, for the balance rule.
    TensorView expert_loads() const noexcept;

    struct Impl; ///< internal

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
