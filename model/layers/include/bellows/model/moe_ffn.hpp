// SPDX-License-Identifier: MIT
#pragma once

// The mixture-of-experts FFN of a layer: y = x + routed(n) + shared(n), n = RMSNorm(x). Routed
// experts live on the ranks of the exchange's group; shared ones on every rank, where they run
// while tokens travel. Nodes, in the order of a plain run:
//   forward:         ROUTER(F) DISPATCH(F) SHARED(F) MLP(F) COMBINE(F)
//   input gradient:  DISPATCH(B) SHARED(B) MLP(B) COMBINE(B) ROUTER(B)
//   weight gradient: MLP(W) SHARED(W)
// Weight gradients accumulate onto ParameterStore's gradients. ROUTER(B) adds the gradients of the
// configuration's balance losses and of its z loss (verify/reference/balance.hpp has the formulas),
// each slot's `seq` tokens being a sequence; their values are no part of any reported loss. With a
// capacity_factor, slots that train send no token for the choices beyond the capacity; weights,
// loads and losses are those of all choices.

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/groups.hpp>

#include <cstdint>
#include <memory>
#include <optional>

namespace bellows {

class MoeFfn final : public Layer {
public:
    /// All must outlive it. The exchange: as expert_exchange_config() has it, or rows by
    /// ExpertMajor, of codes (the same bits in more memory and time) or of tokens as they are.
    /// Throws Error{InvalidArgument} for others. scratch: shared with other layers, or its own if
    /// left out. slots: where the exchange has slots for experts, the store whose experts of this
    /// layer are what its slots hold; else null, and experts are those of `parameters`.
    MoeFfn(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
           ExpertExchange& exchange, LayerScratch* scratch = nullptr,
           ParameterStore* slots = nullptr);
    ~MoeFfn() override;

    /// Throws Error{InvalidArgument} when there is a balance loss and the tokens are not whole
    /// sequences.
    std::unique_ptr<LayerSlot> create_slot(const SlotDesc& desc) override;

    /// Slots of this rank's tokens that chose each expert since the last clear: [routed_experts]
    /// u32, for the balance rule.
    TensorView expert_loads() const noexcept;

    /// The same of the choices that a capacity has kept; nothing where none is dropped.
    std::optional<TensorView> kept_loads() const noexcept;

    /// With a balance loss of kind Global: what its counts are of since the last clear, u32. Slots
    /// that train add to them in ROUTER(F), in the order of these; who runs steps clears them
    /// before each.
    std::optional<BufferView> accumulated_counts() const noexcept;

    struct Impl; ///< internal

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
