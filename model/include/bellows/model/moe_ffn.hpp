// SPDX-License-Identifier: MIT
#pragma once

// The mixture-of-experts FFN of a layer: y = x + routed(n) + shared(n), n = RMSNorm(x). Routed
// experts live on the ranks of the exchange's group; shared ones on every rank, where they run
// while tokens travel. Nodes, in the order of a plain run:
//   forward:         ROUTER(F) DISPATCH(F) SHARED(F) MLP(F) COMBINE(F)
//   input gradient:  DISPATCH(B) SHARED(B) MLP(B) COMBINE(B) ROUTER(B)
//   weight gradient: MLP(W) SHARED(W)
// Weight gradients accumulate onto ParameterStore's gradients. With balance_loss_alpha > 0
// ROUTER(B) adds the gradient of DeepSeek-V3's sequence-wise balance loss (reference/router.hpp has
// the formula), each slot's `seq` tokens being a sequence; its value is no part of any reported
// loss.

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/engine/arena.hpp>
#include <bellows/model/config.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>

#include <cstdint>
#include <memory>

namespace bellows {

class MoeFfn final : public Layer {
public:
    /// All must outlive it. The exchange's max_tokens: of a micro-batch on any rank of its group;
    /// its token_wire and gradient_wire may both be F8E4M3 where linear layers compute in FP8, as
    /// in DeepSeek-V3: tokens and gradients are quantised once, before they travel, and weight
    /// gradients take them from these codes. Its layout: ExpertMajor, or, with codes, ExpertSlots,
    /// which gives the same bits in less memory and time. Throws Error{InvalidArgument} for others.
    /// scratch: shared with other layers, or its own if left out.
    MoeFfn(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
           ExpertExchange& exchange, Arena* scratch = nullptr);
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
