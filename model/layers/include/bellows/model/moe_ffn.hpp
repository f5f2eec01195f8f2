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
#include <bellows/shape/groups.hpp>

#include <cstdint>
#include <memory>

namespace bellows {

class MoeFfn final : public Layer {
public:
    /// All must outlive it. The exchange: as expert_exchange_config() has it, or rows by
    /// ExpertMajor, of codes (the same bits in more memory and time) or of tokens as they are.
    /// Throws Error{InvalidArgument} for others. scratch: shared with other layers, or its own if
    /// left out.
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
