// SPDX-License-Identifier: MIT
// The mixture-of-experts FFN of a layer with its norm and its router: the declaration.
#include "declare.hpp"

#include <bellows/engine/sizes.hpp>

#include <algorithm>

namespace bellows {
namespace {

using namespace declare;

std::vector<ParameterInfo> parameters_of(const ModelConfig& c, std::uint64_t layer) {
    const std::string prefix = prefix_of(layer) + "mlp.";
    const auto index = static_cast<std::int64_t>(layer);
    std::vector<ParameterInfo> list = {
        gain(prefix_of(layer) + "post_attention_layernorm.weight", c.hidden, index),
        matrix(c, prefix + "gate.weight", {c.routed_experts, c.hidden}, ParameterKind::Router,
               index)};
    if (c.router_bias)
        list.push_back({prefix + "gate.e_score_correction_bias",
                        {c.routed_experts},
                        ParameterKind::RouterBias,
                        index,
                        -1,
                        0,
                        0,
                        false});
    for (std::uint64_t e = 0; e < c.routed_experts; ++e)
        add_ffn(list, c, prefix + "experts." + std::to_string(e) + ".", c.moe_ffn,
                ParameterKind::Expert, index, static_cast<std::int64_t>(e));
    if (c.shared_experts > 0)
        add_ffn(list, c, prefix + "shared_experts.", c.shared_ffn(), ParameterKind::Ffn, index);
    return list;
}

/// A tensor with a row for each that comes to the rank's experts.
BufferInfo by_row(const SlotShape& s, std::string name, DType dtype, std::uint64_t columns,
                  MemoryCategory category, RowCount rows = RowCount::Arriving) {
    BufferInfo info = plain(std::move(name), dtype, {s.expert_rows, columns}, category);
    info.rows = rows;
    return info;
}

std::vector<BufferInfo> buffers_of(const ModelConfig& c, const SlotShape& s) {
    constexpr auto kKept = MemoryCategory::Activations, kScratch = MemoryCategory::Scratch,
                   kDeferred = MemoryCategory::DeferredWgrad;
    const std::uint64_t tokens = s.tokens, experts = c.routed_experts;
    const DType act = s.activation;
    std::vector<BufferInfo> list = {plain("norm", act, {tokens, c.hidden}),
                                    plain("inverse rms", DType::F32, {tokens}),
                                    plain("router logits", DType::F32, {tokens, experts},
                                          s.training && c.router_z_loss > 0 ? kKept : kScratch),
                                    plain("router scores", DType::F32, {tokens, experts}),
                                    plain("expert ids", DType::I32, {tokens, c.top_k}),
                                    plain("expert weights", DType::F32, {tokens, c.top_k})};
    if (c.shared_experts > 0)
        add_swiglu(list, s, "shared ", c.shared_ffn());
    add_swiglu(list, s, "", c.moe_ffn, RowCount::Arriving);
    list.push_back(by_row(s, "results", act, c.hidden, kScratch));
    if (!s.fp8()) // else they stay in the exchange's records
        list.push_back(by_row(s, "received tokens", act, c.hidden, kKept, RowCount::Received));
    if (!s.training)
        return list;
    if (!s.fp8())
        list.push_back(by_row(s, "received gradients", act, c.hidden, kKept, RowCount::Received));
    list.push_back(plain("expert weight gradients", DType::F32, {tokens, c.top_k}, kScratch));
    list.push_back(plain("router logit gradients", DType::F32, {tokens, experts}, kDeferred));
    list.push_back(plain("norm gradient", act, {tokens, c.hidden}, kDeferred));
    if (c.capacity_factor > 0)
        list.push_back(plain("kept expert ids", DType::I32, {tokens, c.top_k}));
    if (c.has_balance_loss())
        list.push_back(plain("balance counts", DType::U32,
                             {c.balances_sequences() ? tokens / std::max<std::uint64_t>(s.seq, 1)
                                                     : std::min<std::uint64_t>(tokens, 1),
                              c.balance_columns()},
                             c.balance_loss == BalanceLossKind::Global ? kKept : kScratch));
    if (c.shared_experts > 0)
        list.push_back(plain("shared inner gradient", act, {tokens, c.shared_ffn()}, kScratch));
    list.push_back(by_row(s, "inner gradient", act, c.moe_ffn, kScratch));
    list.push_back(by_row(s, "row weight gradients", DType::F32, 1, kScratch));
    return list;
}

std::vector<NodeInfo> nodes_of(const ModelConfig& c, const SlotShape& s) {
    constexpr auto kForward = NodeKind::Forward, kInput = NodeKind::InputGradient,
                   kWeight = NodeKind::WeightGradient;
    const auto of = [&](auto scratch, std::uint64_t rows, std::uint64_t ffn,
                        std::uint64_t matrices) -> std::uint64_t {
        return s.fp8() && ffn > 0 ? scratch(c, s, rows, ffn, matrices) : 0;
    };
    const std::uint64_t shared = of(fp8_ffn_scratch, s.tokens, c.shared_ffn(), 1);
    const std::uint64_t experts = of(fp8_ffn_scratch, s.expert_rows, c.moe_ffn, s.local_experts);
    std::vector<NodeInfo> list = {
        {.name = "ROUTER(F)", .kind = kForward},
        {.name = "DISPATCH(F)", .kind = kForward, .resource = NodeResource::Exchange},
        {.name = "SHARED(F)", .kind = kForward, .beside_exchange = true, .scratch_bytes = shared},
        {.name = "MLP(F)", .kind = kForward, .scratch_bytes = experts},
        {.name = "COMBINE(F)", .kind = kForward, .resource = NodeResource::Exchange}};
    if (!s.training)
        return list;
    constexpr std::size_t kMlpB = 3; // input gradients up to and with MLP(B)
    const std::vector<NodeInfo> gradients = {
        {.name = "DISPATCH(B)", .kind = kInput, .resource = NodeResource::Exchange},
        {.name = "SHARED(B)", .kind = kInput, .beside_exchange = true, .scratch_bytes = shared},
        {.name = "MLP(B)", .kind = kInput, .scratch_bytes = experts},
        {.name = "COMBINE(B)", .kind = kInput, .resource = NodeResource::Exchange},
        {.name = "ROUTER(B)", .kind = kInput},
        {.name = "MLP(W)",
         .kind = kWeight,
         .after = kMlpB,
         .of_experts = true,
         .scratch_bytes =
             of(fp8_ffn_weight_gradient_scratch, s.expert_rows, c.moe_ffn, s.local_experts)},
        {.name = "SHARED(W)",
         .kind = kWeight,
         .scratch_bytes = ops::gemm_tn_tall_workspace_bytes(s.tokens, c.routed_experts, c.hidden) +
                          ops::rmsnorm_wgrad_workspace_bytes(s.tokens, c.hidden) +
                          of(fp8_ffn_weight_gradient_scratch, s.tokens, c.shared_ffn(), 1)}};
    list.insert(list.end(), gradients.begin(), gradients.end());
    return list;
}

} // namespace

LayerKind moe_ffn() noexcept {
    return {.name = "moe_ffn",
            .place = LayerPlace::Body,
            .stands_in = [](const ModelConfig& c, std::uint64_t layer) { return c.is_moe(layer); },
            .parameters = parameters_of,
            .buffers = buffers_of,
            .nodes = nodes_of,
            .other_flops = [](const ModelConfig&, double) { return 0.0; }};
}

} // namespace bellows
