// SPDX-License-Identifier: MIT
#include "recorded_slot.hpp"
#include "router_options.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/model/moe_ffn.hpp>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

namespace bellows {

struct MoeFfn::Impl {
    ModelConfig config;
    std::uint64_t layer;
    ParameterStore& parameters;
    ParameterStore& of_experts;
    ExpertExchange& exchange;
    Buffer loads;       ///< [routed_experts] u32
    Buffer kept;        ///< [routed_experts] u32; without a capacity there is none
    Buffer accumulated; ///< [1, balance_columns] u32; without a loss of kind Global there is none
    std::optional<LayerScratch> own_scratch;
    LayerScratch* scratch;

    const Parameter& parameter(const std::string& name) const {
        return parameters.at("model.layers." + std::to_string(layer) + "." + name);
    }
    Linear shared(const char* name) const {
        return Linear(parameter("mlp.shared_experts." + std::string(name) + ".weight"),
                      parameters.products());
    }
    ExpertLinear experts(const char* name) const {
        return ExpertLinear(of_experts.experts(layer, name), of_experts.products());
    }
    /// Whether tokens and gradients come as codes.
    bool sends_codes() const noexcept { return exchange.config().token_wire == DType::F8E4M3; }
    /// Throws Error{InvalidArgument} unless products take what the exchange brings.
    void check() const;
};

void MoeFfn::Impl::check() const {
    const ExchangeConfig& c = exchange.config();
    const auto require = [&](bool good, const char* message) {
        if (!good)
            throw Error(ErrorCode::InvalidArgument, c.name + message);
    };
    require((c.slots_per_rank > 0) == (&of_experts != &parameters),
            ": experts that are placed in slots have a store of their own, others have none");
    require(sends_codes() == (c.gradient_wire == DType::F8E4M3),
            ": tokens and gradients must both travel as f8_e4m3 codes, or neither: set "
            "gradient_wire as token_wire");
    require(!sends_codes() || parameters.linear_precision() == LinearPrecision::Fp8,
            ": rows come as f8_e4m3 codes, which only linear layers in FP8 take: leave token_wire "
            "and gradient_wire unset");
    require(!sends_codes() || c.token_scales == fp8::ScaleRule::PowerOfTwo,
            ": products take codes with power-of-two scales: leave token_scales at PowerOfTwo");
    require(c.layout == ExchangeLayout::ExpertMajor ||
                (c.layout == ExchangeLayout::ExpertSlots && sends_codes()),
            ": experts take rows by expert, and by slots only where they are codes: choose "
            "ExpertMajor");
}

namespace {

SlotShape shape_of(const MoeFfn::Impl& layer, const SlotDesc& desc, const ExchangeHandle& handle) {
    SlotShape shape = slot_shape(layer.parameters, desc);
    shape.local_experts = layer.exchange.num_local_experts();
    shape.expert_rows = handle.capacity();
    return shape;
}

ops::BalanceCounts counted(const ModelConfig& c) {
    return {.of_scores = c.balance_loss != BalanceLossKind::Expert && c.limits_choices(),
            .devices = c.has_device_losses() ? static_cast<std::uint32_t>(c.devices_used()) : 0,
            .tokens = c.balance_loss == BalanceLossKind::Global};
}

class MoeSlot final : public RecordedSlot {
public:
    MoeSlot(MoeFfn::Impl& layer, const SlotDesc& desc, std::unique_ptr<ExchangeHandle> handle);

private:
    void record_forward();
    void record_gradients();

    bool drops() const noexcept {
        return layer_.config.capacity_factor > 0 && desc_.tensors.training();
    }
    LinearRows outgoing(const TensorView& values) const;
    LinearRows received_tokens() const;
    LinearRows received_gradients() const;
    LinearRows by_slots(const fp8::Quantized& codes) const;

    void router(Recording& r) const;
    void shared(Recording& r, Arena::Frame& scratch) const;
    void experts(Recording& r, Arena::Frame& scratch);
    void shared_gradient(Recording& r, Arena::Frame& scratch) const;
    void experts_gradient(Recording& r, Arena::Frame& scratch) const;
    void accumulate_counts(Recording& r) const;
    ops::RouterBalance balance_of(Recording& r) const;
    void router_gradient(Recording& r) const;
    void experts_weight_gradient(Recording& r, Arena::Frame& scratch) const;
    void other_weight_gradients(Recording& r, Arena::Frame& scratch) const;

    MoeFfn::Impl& layer_;
    SlotDesc desc_;
    bool has_experts_, has_shared_;
    std::unique_ptr<ExchangeHandle> handle_;

    TensorView norm_, inv_rms_, logits_, scores_, ids_, weights_, d_weights_, d_logits_, d_norm_;
    TensorView sent_ids_; ///< ids_, or without those that are dropped
    TensorView counts_;   ///< [runs, balance_columns] u32; empty without a balance loss
    KeptSwiglu shared_swiglu_, swiglu_;
    TensorView d_shared_inner_;
    TensorView d_inner_, results_, d_row_weights_;
    BufferView tiles_memory_;
    fp8::GroupedRows rows_; ///< the received ones by expert
};

MoeSlot::MoeSlot(MoeFfn::Impl& layer, const SlotDesc& desc, std::unique_ptr<ExchangeHandle> handle)
    : RecordedSlot("moe_ffn", layer.config, shape_of(layer, desc, *handle),
                   layer.parameters.device(), *layer.scratch, desc.name, handle.get()),
      layer_(layer), desc_(desc), has_experts_(layer.exchange.num_local_experts() > 0),
      has_shared_(layer.config.shared_experts > 0), handle_(std::move(handle)),
      norm_(tensor("norm")), inv_rms_(tensor("inverse rms")), logits_(tensor("router logits")),
      scores_(tensor("router scores")), ids_(tensor("expert ids")),
      weights_(tensor("expert weights")), swiglu_(swiglu("")), results_(tensor("results")) {
    if (has_shared_)
        shared_swiglu_ = swiglu("shared ");
    sent_ids_ = drops() ? tensor("kept expert ids") : ids_;
    if (layer_.config.has_balance_loss() && desc_.tensors.training() && desc_.tokens > 0)
        counts_ = tensor("balance counts");
    if (has_experts_)
        tiles_memory_ = workspace(
            "expert tiles", ops::group_tiles_bytes(layer_.parameters.device(), handle_->capacity(),
                                                   layer_.exchange.num_local_experts()));
    record_forward();
    if (desc_.tensors.training())
        record_gradients();
}

void MoeSlot::record_forward() {
    using Frame = Arena::Frame;
    record("ROUTER(F)", [&](Recording& r, Frame&) { router(r); });
    add_exchange("DISPATCH(F)", [this] {
        const LinearRows norm = outgoing(norm_);
        return layer_.exchange.dispatch(*handle_, norm.codes ? norm.codes->codes : norm.values,
                                        sent_ids_, weights_);
    });
    record("SHARED(F)", [&](Recording& r, Frame& scratch) { shared(r, scratch); });
    record("MLP(F)", [&](Recording& r, Frame& scratch) { experts(r, scratch); });
    add_exchange("COMBINE(F)", [this] {
        return layer_.exchange.combine(*handle_, handle_->results(), desc_.tensors.y, true);
    });
}

void MoeSlot::record_gradients() {
    using Frame = Arena::Frame;
    d_weights_ = tensor("expert weight gradients");
    d_logits_ = tensor("router logit gradients");
    d_norm_ = tensor("norm gradient");
    if (has_shared_)
        d_shared_inner_ = tensor("shared inner gradient");
    d_inner_ = tensor("inner gradient");
    d_row_weights_ = tensor("row weight gradients").reshaped({handle_->capacity()});

    add_exchange("DISPATCH(B)",
                 [this] { return layer_.exchange.combine_backward(*handle_, desc_.tensors.dy); });
    record("SHARED(B)", [&](Recording& r, Frame& scratch) { shared_gradient(r, scratch); });
    record("MLP(B)", [&](Recording& r, Frame& scratch) { experts_gradient(r, scratch); });
    add_exchange("COMBINE(B)", [this] {
        return layer_.exchange.dispatch_backward(*handle_, handle_->results(), {}, d_norm_,
                                                 has_shared_, d_weights_);
    });
    record("ROUTER(B)", [&](Recording& r, Frame&) { router_gradient(r); });
    record("MLP(W)", [&](Recording& r, Frame& scratch) { experts_weight_gradient(r, scratch); });
    record("SHARED(W)", [&](Recording& r, Frame& scratch) { other_weight_gradients(r, scratch); });
}

/// What goes to the experts, `values`, with their codes, if these do: quantised once for all that
/// takes them.
LinearRows MoeSlot::outgoing(const TensorView& values) const {
    LinearRows rows(values);
    if (layer_.sends_codes())
        rows.codes = handle_->outgoing_codes(desc_.tokens);
    return rows;
}

LinearRows MoeSlot::received_tokens() const {
    return layer_.sends_codes() ? by_slots(handle_->quantized_rows()) : LinearRows(handle_->rows());
}

LinearRows MoeSlot::received_gradients() const {
    return layer_.sends_codes() ? by_slots(handle_->quantized_d_results())
                                : LinearRows(handle_->d_results());
}

/// Where they stand once for each token.
LinearRows MoeSlot::by_slots(const fp8::Quantized& codes) const {
    LinearRows rows(codes);
    if (layer_.exchange.config().layout == ExchangeLayout::ExpertSlots)
        rows.slots = {handle_->row_slots(),
                      static_cast<std::uint32_t>(layer_.exchange.config().top_k)};
    return rows;
}

void MoeSlot::router(Recording& r) const {
    const float eps = static_cast<float>(layer_.config.norm_eps);
    ops::rmsnorm_forward(r, desc_.tensors.x,
                         layer_.parameter("post_attention_layernorm.weight").weight, norm_,
                         inv_rms_, eps);
    if (const LinearRows norm = outgoing(norm_); norm.codes)
        fp8::quantize(r, norm.values, *norm.codes); // of what is stored, as a dispatch does
    ops::gemm_nt(r, norm_, layer_.parameter("mlp.gate.weight").compute, logits_);
    const TensorView bias = layer_.config.router_bias
                                ? layer_.parameter("mlp.gate.e_score_correction_bias").weight
                                : TensorView{};
    ops::router_forward(r, logits_, bias, scores_, ids_, weights_, router_options(layer_.config));
    ops::expert_counts(r, ids_, layer_.loads.tensor(DType::U32, {layer_.config.routed_experts}),
                       true);
    if (drops())
        ops::router_capacity(r, scores_, ids_, sent_ids_,
                             static_cast<std::uint32_t>(layer_.config.capacity_groups()),
                             layer_.config.capacity(desc_.tokens), desc_.spared);
    if (drops())
        ops::expert_counts(r, sent_ids_,
                           layer_.kept.tensor(DType::U32, {layer_.config.routed_experts}), true);
    if (counts_.buffer && counted(layer_.config).tokens)
        accumulate_counts(r);
}

/// Adds this micro-batch's counts to the step's and keeps what these are now: its gradients may
/// come after other micro-batches.
void MoeSlot::accumulate_counts(Recording& r) const {
    const TensorView sum = layer_.accumulated.tensor(DType::U32, {1, counts_.extent[1]});
    ops::balance_counts(r, scores_, ids_, sum, counted(layer_.config));
    r.copy(sum.buffer, counts_.buffer.sub(0, sum.num_bytes()));
}

void MoeSlot::shared(Recording& r, Arena::Frame& scratch) const {
    ops::copy(r, desc_.tensors.x, desc_.tensors.y);
    if (!has_shared_)
        return;
    const TensorView gate_up = shared_swiglu_.input(scratch);
    layer_.shared("gate_up_proj").forward(r, scratch, outgoing(norm_), gate_up);
    const LinearRows hidden = shared_swiglu_.forward(r, scratch, gate_up, {});
    layer_.shared("down_proj").forward(r, scratch, hidden, desc_.tensors.y, true);
}

void MoeSlot::experts(Recording& r, Arena::Frame& scratch) {
    if (!has_experts_)
        return;
    const ModelConfig& c = layer_.config;
    rows_.layout = fp8::GroupLayout::prefix_sums(handle_->expert_offsets(), handle_->capacity());
    rows_.layout.expected_rows = // all ranks have as many tokens
        desc_.tokens * c.top_k / layer_.exchange.num_local_experts();
    rows_.tiles = ops::make_group_tiles(r, handle_->expert_offsets(), handle_->capacity(),
                                        {2 * c.moe_ffn, c.hidden, c.moe_ffn, 0}, tiles_memory_);
    const TensorView gate_up = swiglu_.input(scratch);
    layer_.experts("gate_up_proj").forward(r, scratch, received_tokens(), gate_up, rows_);
    const LinearRows hidden = swiglu_.forward(r, scratch, gate_up, handle_->row_weights());
    layer_.experts("down_proj").forward(r, scratch, hidden, results_, rows_);
    handle_->sum_results(r, results_);
}

void MoeSlot::shared_gradient(Recording& r, Arena::Frame& scratch) const {
    if (!has_shared_)
        return;
    layer_.shared("down_proj")
        .input_gradient(r, scratch, outgoing(desc_.tensors.dy), d_shared_inner_);
    const LinearRows d_gate_up = shared_swiglu_.input_gradient(r, scratch, d_shared_inner_, {}, {});
    layer_.shared("gate_up_proj").input_gradient(r, scratch, d_gate_up, d_norm_);
}

void MoeSlot::experts_gradient(Recording& r, Arena::Frame& scratch) const {
    if (!has_experts_)
        return;
    layer_.experts("down_proj").input_gradient(r, scratch, received_gradients(), d_inner_, rows_);
    const LinearRows d_gate_up =
        swiglu_.input_gradient(r, scratch, d_inner_, handle_->row_weights(), d_row_weights_);
    layer_.experts("gate_up_proj").input_gradient(r, scratch, d_gate_up, results_, rows_);
    handle_->sum_row_gradients(r, results_, d_row_weights_);
}

/// Records the counts of its runs of tokens, unless the forward pass did.
ops::RouterBalance MoeSlot::balance_of(Recording& r) const {
    const ModelConfig& c = layer_.config;
    ops::RouterBalance balance;
    if (!counts_.buffer)
        return balance;
    balance.counts = counts_;
    balance.counted = counted(c);
    if (balance.counted.of_scores || balance.counted.devices > 0) {
        if (!balance.counted.tokens) {
            r.fill(counts_.buffer, 0);
            ops::balance_counts(r, scores_, ids_, counts_, balance.counted);
        }
    } else if (!balance.counted.tokens) {
        ops::expert_counts(r, ids_, counts_, false);
    }
    const std::uint64_t run = desc_.tokens / counts_.extent[0];
    const auto weight = [&](double alpha, std::uint64_t parts, std::uint64_t of_token) {
        return static_cast<float>(alpha * static_cast<double>(parts) /
                                  static_cast<double>(of_token * run) *
                                  static_cast<double>(desc_.loss_scale));
    };
    balance.weight = weight(c.balance_loss_alpha, c.routed_experts, c.top_k);
    balance.device_weight = weight(c.device_loss_alpha, c.devices_used(), c.top_k);
    balance.communication_weight =
        weight(c.communication_loss_alpha, c.devices_used(), c.devices_per_token());
    return balance;
}

void MoeSlot::router_gradient(Recording& r) const {
    const ops::RouterBalance balance = balance_of(r);
    ops::RouterZLoss z_loss;
    if (layer_.config.router_z_loss > 0)
        z_loss = {logits_, static_cast<float>(layer_.config.router_z_loss *
                                              static_cast<double>(desc_.loss_scale))};
    ops::router_dgrad(r, d_weights_, ids_, scores_, d_logits_, router_options(layer_.config),
                      balance, z_loss);
    ops::gemm_nn(r, d_logits_, layer_.parameter("mlp.gate.weight").compute, d_norm_, true);
    ops::copy(r, desc_.tensors.dy, desc_.tensors.dx);
    ops::rmsnorm_dgrad(r, d_norm_, desc_.tensors.x,
                       layer_.parameter("post_attention_layernorm.weight").weight, inv_rms_,
                       desc_.tensors.dx, true);
}

void MoeSlot::experts_weight_gradient(Recording& r, Arena::Frame& scratch) const {
    if (!has_experts_)
        return;
    layer_.experts("down_proj")
        .weight_gradient(r, scratch, received_gradients(),
                         swiglu_.output_again(r, scratch, handle_->row_weights()), rows_);
    layer_.experts("gate_up_proj")
        .weight_gradient(r, scratch, swiglu_.gradient_again(), received_tokens(), rows_);
}

void MoeSlot::other_weight_gradients(Recording& r, Arena::Frame& scratch) const {
    if (has_shared_) {
        layer_.shared("down_proj")
            .weight_gradient(r, scratch, desc_.tensors.dy,
                             shared_swiglu_.output_again(r, scratch, {}));
        layer_.shared("gate_up_proj")
            .weight_gradient(r, scratch, shared_swiglu_.gradient_again(), norm_);
    }
    const TensorView& gate = layer_.parameter("mlp.gate.weight").gradient;
    ops::gemm_tn_tall(r, d_logits_, norm_, gate, true,
                      scratch.bytes(ops::gemm_tn_tall_workspace_bytes(desc_.tokens, gate.extent[0],
                                                                      gate.extent[1])));
    ops::rmsnorm_wgrad(
        r, d_norm_, desc_.tensors.x, inv_rms_,
        layer_.parameter("post_attention_layernorm.weight").gradient, true,
        scratch.bytes(ops::rmsnorm_wgrad_workspace_bytes(desc_.tokens, layer_.config.hidden)));
}

} // namespace

MoeFfn::MoeFfn(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
               ExpertExchange& exchange, LayerScratch* scratch, ParameterStore* slots)
    : impl_(new Impl{config,
                     layer,
                     parameters,
                     slots != nullptr ? *slots : parameters,
                     exchange,
                     {},
                     {},
                     {},
                     {},
                     scratch}) {
    impl_->check();
    if (scratch == nullptr)
        impl_->scratch = &impl_->own_scratch.emplace(parameters.device());
    impl_->loads = Buffer(parameters.device(), {.name = "expert loads",
                                                .bytes = config.routed_experts * 4,
                                                .category = MemoryCategory::Scratch});
    Recording clear(parameters.device(), QueueRole::Compute, "clear expert loads");
    clear.fill(impl_->loads.view(), 0);
    if (config.capacity_factor > 0) {
        impl_->kept = Buffer(parameters.device(), {.name = "expert loads kept",
                                                   .bytes = config.routed_experts * 4,
                                                   .category = MemoryCategory::Scratch});
        clear.fill(impl_->kept.view(), 0);
    }
    if (config.has_balance_loss() && config.balance_loss == BalanceLossKind::Global) {
        impl_->accumulated = Buffer(parameters.device(), {.name = "balance counts of the step",
                                                          .bytes = config.balance_columns() * 4,
                                                          .category = MemoryCategory::Scratch});
        clear.fill(impl_->accumulated.view(), 0);
    }
    parameters.device().submit(clear).wait();
}

MoeFfn::~MoeFfn() = default;

std::unique_ptr<LayerSlot> MoeFfn::create_slot(const SlotDesc& desc) {
    if (impl_->config.has_balance_loss() && impl_->config.balances_sequences() &&
        desc.tensors.training() && desc.tokens > 0 &&
        (desc.seq == 0 || desc.tokens % desc.seq != 0))
        throw Error(ErrorCode::InvalidArgument, desc.name + ": " + std::to_string(desc.tokens) +
                                                    " tokens are no whole sequences of " +
                                                    std::to_string(desc.seq) +
                                                    ", which the balance loss counts");
    std::unique_ptr<ExchangeHandle> handle = impl_->exchange.create_handle(desc.name);
    if (impl_->exchange.config().slots_per_rank > 0)
        handle->use_placement(impl_->layer - impl_->config.dense_layers);
    return std::make_unique<MoeSlot>(*impl_, desc, std::move(handle));
}

TensorView MoeFfn::expert_loads() const noexcept {
    return impl_->loads.tensor(DType::U32, {impl_->config.routed_experts});
}

std::optional<TensorView> MoeFfn::kept_loads() const noexcept {
    if (!impl_->kept)
        return {};
    return impl_->kept.tensor(DType::U32, {impl_->config.routed_experts});
}

std::optional<BufferView> MoeFfn::accumulated_counts() const noexcept {
    if (!impl_->accumulated)
        return {};
    return impl_->accumulated.view();
}

} // namespace bellows
