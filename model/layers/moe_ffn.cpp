// SPDX-License-Identifier: MIT
#include "kept_swiglu.hpp"

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
    ExpertExchange& exchange;
    Buffer loads; ///< [routed_experts] u32
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
        return ExpertLinear(parameters.experts(layer, name), parameters.products());
    }
    ops::RouterOptions router_options() const;
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

ops::RouterOptions MoeFfn::Impl::router_options() const {
    const bool sigmoid = config.score_function == ScoreFunction::Sigmoid;
    ops::RouterOptions options;
    options.score =
        sigmoid ? ops::RouterOptions::Score::Sigmoid : ops::RouterOptions::Score::Softmax;
    options.groups = static_cast<std::uint32_t>(config.n_group);
    options.group_top_k = static_cast<std::uint32_t>(config.topk_group);
    options.group_score_top = sigmoid ? 2 : 1;
    options.normalise = config.normalize_top_k;
    options.route_scale = static_cast<float>(config.route_scale);
    return options;
}

namespace {

class MoeSlot final : public LayerSlot {
public:
    MoeSlot(MoeFfn::Impl& layer, const SlotDesc& desc);

private:
    TensorView make(const char* what, DType dtype, std::initializer_list<std::uint64_t> extents,
                    MemoryCategory category = MemoryCategory::Activations);
    BufferView workspace(const char* what, std::uint64_t bytes);
    void record(Node node, const LayerScratch::Work& work);
    bool fp8() const noexcept {
        return layer_.parameters.linear_precision() == LinearPrecision::Fp8;
    }
    fp8::Quantized make_quantized(const char* what, const fp8::Recipe& recipe,
                                  std::uint64_t columns, MemoryCategory category);
    KeptSwiglu keep_shared();
    KeptSwiglu keep_experts();
    void make_gradients();
    void add_exchange(NodeKind kind, const char* name, std::function<TimePoint()> submit);

    LinearRows outgoing(const TensorView& values) const;
    LinearRows received_tokens() const;
    LinearRows received_gradients() const;
    LinearRows by_slots(const fp8::Quantized& codes) const;

    void router(Recording& r) const;
    void shared(Recording& r, Arena::Frame& scratch) const;
    void experts(Recording& r, Arena::Frame& scratch);
    void shared_gradient(Recording& r, Arena::Frame& scratch) const;
    void experts_gradient(Recording& r, Arena::Frame& scratch) const;
    void router_gradient(Recording& r) const;
    void experts_weight_gradient(Recording& r, Arena::Frame& scratch) const;
    void other_weight_gradients(Recording& r, Arena::Frame& scratch) const;

    MoeFfn::Impl& layer_;
    SlotDesc desc_;
    DType act_;
    bool has_experts_, has_shared_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::unique_ptr<ExchangeHandle> handle_;

    TensorView norm_, inv_rms_, logits_, scores_, ids_, weights_, d_weights_, d_logits_, d_norm_;
    TensorView sequence_counts_; ///< [sequences, experts] u32; empty without a balance loss
    KeptSwiglu shared_swiglu_, swiglu_;
    TensorView d_shared_hidden_;
    TensorView d_hidden_, results_, d_row_weights_;
    BufferView gain_workspace_, tiles_memory_;
    fp8::GroupedRows rows_; ///< the received ones by expert
};

MoeSlot::MoeSlot(MoeFfn::Impl& layer, const SlotDesc& desc)
    : layer_(layer), desc_(desc), act_(layer.parameters.activation()),
      has_experts_(layer.exchange.num_local_experts() > 0),
      has_shared_(layer.config.shared_experts > 0) {
    const ModelConfig& c = layer_.config;
    const std::uint64_t tokens = desc_.tokens, experts = c.routed_experts;
    norm_ = make("norm", act_, {tokens, c.hidden});
    inv_rms_ = make("inverse rms", DType::F32, {tokens});
    logits_ = make("router logits", DType::F32, {tokens, experts}, MemoryCategory::Scratch);
    scores_ = make("router scores", DType::F32, {tokens, experts});
    ids_ = make("expert ids", DType::I32, {tokens, c.top_k});
    weights_ = make("expert weights", DType::F32, {tokens, c.top_k});
    if (has_shared_)
        shared_swiglu_ = keep_shared();
    handle_ = layer_.exchange.create_handle(desc_.name);
    swiglu_ = keep_experts();
    results_ = handle_->add_row_tensor("results", act_, c.hidden, MemoryCategory::Scratch);
    if (has_experts_)
        tiles_memory_ = workspace(
            "expert tiles", ops::group_tiles_bytes(layer_.parameters.device(), handle_->capacity(),
                                                   layer_.exchange.num_local_experts()));

    const auto node = [this](auto member) {
        return [this, member](Recording& r, Arena::Frame& scratch) { (this->*member)(r, scratch); };
    };
    record({.name = "ROUTER(F)", .kind = NodeKind::Forward},
           [&](Recording& r, Arena::Frame&) { router(r); });
    add_exchange(NodeKind::Forward, "DISPATCH(F)", [this] {
        const LinearRows norm = outgoing(norm_);
        return layer_.exchange.dispatch(*handle_, norm.codes ? norm.codes->codes : norm.values,
                                        ids_, weights_);
    });
    record({.name = "SHARED(F)", .kind = NodeKind::Forward, .beside_exchange = true},
           node(&MoeSlot::shared));
    record({.name = "MLP(F)", .kind = NodeKind::Forward}, node(&MoeSlot::experts));
    add_exchange(NodeKind::Forward, "COMBINE(F)", [this] {
        return layer_.exchange.combine(*handle_, handle_->results(), desc_.tensors.y, true);
    });
    if (!desc_.tensors.training())
        return;
    make_gradients();
    add_exchange(NodeKind::InputGradient, "DISPATCH(B)",
                 [this] { return layer_.exchange.combine_backward(*handle_, desc_.tensors.dy); });
    record({.name = "SHARED(B)", .kind = NodeKind::InputGradient, .beside_exchange = true},
           node(&MoeSlot::shared_gradient));
    record({.name = "MLP(B)", .kind = NodeKind::InputGradient}, node(&MoeSlot::experts_gradient));
    add_exchange(NodeKind::InputGradient, "COMBINE(B)", [this] {
        return layer_.exchange.dispatch_backward(*handle_, handle_->results(), {}, d_norm_,
                                                 has_shared_, d_weights_);
    });
    record({.name = "ROUTER(B)", .kind = NodeKind::InputGradient},
           [&](Recording& r, Arena::Frame&) { router_gradient(r); });
    constexpr std::size_t kMlpB = 3; // what stands up to and with MLP(B)
    record({.name = "MLP(W)", .kind = NodeKind::WeightGradient, .of_experts = true, .after = kMlpB},
           node(&MoeSlot::experts_weight_gradient));
    record({.name = "SHARED(W)", .kind = NodeKind::WeightGradient},
           node(&MoeSlot::other_weight_gradients));
}

TensorView MoeSlot::make(const char* what, DType dtype,
                         std::initializer_list<std::uint64_t> extents, MemoryCategory category) {
    std::uint64_t bytes = size_of(dtype);
    for (std::uint64_t extent : extents)
        bytes *= extent;
    buffers_.push_back(std::make_unique<Buffer>(
        layer_.parameters.device(), BufferDesc{.name = desc_.name + " " + what,
                                               .bytes = std::max<std::uint64_t>(bytes, 16),
                                               .category = category}));
    return buffers_.back()->tensor(dtype, extents);
}

BufferView MoeSlot::workspace(const char* what, std::uint64_t bytes) {
    return make(what, DType::U8, {std::max<std::uint64_t>(bytes, 16)}, MemoryCategory::Scratch)
        .buffer;
}

/// What the backward nodes need beside what the forward ones keep.
void MoeSlot::make_gradients() {
    const ModelConfig& c = layer_.config;
    const std::uint64_t tokens = desc_.tokens;
    d_weights_ =
        make("expert weight gradients", DType::F32, {tokens, c.top_k}, MemoryCategory::Scratch);
    d_logits_ = make("router logit gradients", DType::F32, {tokens, c.routed_experts},
                     MemoryCategory::DeferredWgrad);
    d_norm_ = make("norm gradients", act_, {tokens, c.hidden}, MemoryCategory::DeferredWgrad);
    if (c.balance_loss_alpha > 0 && tokens > 0) {
        if (desc_.seq == 0 || tokens % desc_.seq != 0)
            throw Error(ErrorCode::InvalidArgument, desc_.name + ": " + std::to_string(tokens) +
                                                        " tokens are no whole sequences of " +
                                                        std::to_string(desc_.seq) +
                                                        ", which the balance loss counts");
        sequence_counts_ = make("expert counts of sequences", DType::U32,
                                {tokens / desc_.seq, c.routed_experts}, MemoryCategory::Scratch);
    }
    if (has_shared_)
        d_shared_hidden_ = make("shared hidden gradients", act_, {tokens, c.shared_ffn()},
                                MemoryCategory::Scratch);
    d_hidden_ =
        handle_->add_row_tensor("hidden gradients", act_, c.moe_ffn, MemoryCategory::Scratch);
    d_row_weights_ =
        handle_->add_row_tensor("row weight gradients", DType::F32, 1, MemoryCategory::Scratch)
            .reshaped({handle_->capacity()});
    gain_workspace_ =
        workspace("gain gradient workspace", ops::rmsnorm_wgrad_workspace_bytes(tokens, c.hidden));
}

/// Of this rank's tokens.
fp8::Quantized MoeSlot::make_quantized(const char* what, const fp8::Recipe& recipe,
                                       std::uint64_t columns, MemoryCategory category) {
    const std::uint64_t bytes = fp8::quantized_bytes(recipe, {desc_.tokens, columns});
    return fp8::make_quantized(make(what, DType::U8, {bytes}, category).buffer, recipe,
                               {desc_.tokens, columns});
}

KeptSwiglu MoeSlot::keep_shared() {
    const std::uint64_t tokens = desc_.tokens, ffn = layer_.config.shared_ffn();
    if (!fp8())
        return {make("shared gate and up", act_, {tokens, 2 * ffn}),
                make("shared hidden", act_, {tokens, ffn})};
    KeptSwiglu kept(act_, make_quantized("shared gate and up", kRowsRecipe, 2 * ffn,
                                         MemoryCategory::Activations));
    if (desc_.tensors.training())
        kept.keep_gradient(make_quantized("shared gate and up gradient", kColumnsRecipe, 2 * ffn,
                                          MemoryCategory::DeferredWgrad));
    return kept;
}

/// Codes have memory for the rows that arrive, as have the scales of rows; those of columns for
/// all that could.
KeptSwiglu MoeSlot::keep_experts() {
    const std::uint64_t ffn = layer_.config.moe_ffn, capacity = handle_->capacity();
    if (!fp8()) {
        const TensorView gate_up = handle_->add_row_tensor("gate and up", act_, 2 * ffn);
        return {gate_up, handle_->add_row_tensor("hidden", act_, ffn)};
    }
    const std::uint64_t pitch = fp8::codes_shape({1, 2 * ffn}).stride[0];
    const DType code = fp8::dtype_of(kRowsRecipe.format);
    fp8::Quantized rows;
    rows.recipe = kRowsRecipe;
    rows.codes = handle_->add_row_tensor("gate and up", code, pitch);
    rows.codes.extent[1] = 2 * ffn;
    rows.scales = handle_->add_row_tensor("gate and up scales", DType::F32,
                                          fp8::scales_shape(kRowsRecipe, {1, 2 * ffn}).extent[1]);
    KeptSwiglu kept(act_, rows);
    if (!desc_.tensors.training() || !has_experts_)
        return kept;
    const std::uint64_t scales =
        fp8::scales_bytes(kColumnsRecipe, {capacity, 2 * ffn}, layer_.exchange.num_local_experts());
    kept.keep_gradient(fp8::make_quantized(
        handle_->add_row_tensor("gate and up gradient", code, pitch, MemoryCategory::DeferredWgrad)
            .buffer,
        make("gate and up gradient scales", DType::U8, {scales}, MemoryCategory::DeferredWgrad)
            .buffer,
        kColumnsRecipe, {capacity, 2 * ffn}, handle_->expert_offsets()));
    return kept;
}

void MoeSlot::record(Node node, const LayerScratch::Work& work) {
    Recording made = layer_.scratch->record(node, desc_.name + " " + node.name, work);
    add_recording(std::move(node), std::move(made));
}

void MoeSlot::add_exchange(NodeKind kind, const char* name, std::function<TimePoint()> submit) {
    add_node({.name = name,
              .kind = kind,
              .submit = [submit = std::move(submit)](auto) { return submit(); },
              .resource = NodeResource::Exchange});
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
    ops::router_forward(r, logits_, bias, scores_, ids_, weights_, layer_.router_options());
    ops::expert_counts(r, ids_, layer_.loads.tensor(DType::U32, {layer_.config.routed_experts}),
                       true);
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
        .input_gradient(r, scratch, outgoing(desc_.tensors.dy), d_shared_hidden_);
    const LinearRows d_gate_up =
        shared_swiglu_.input_gradient(r, scratch, d_shared_hidden_, {}, {});
    layer_.shared("gate_up_proj").input_gradient(r, scratch, d_gate_up, d_norm_);
}

void MoeSlot::experts_gradient(Recording& r, Arena::Frame& scratch) const {
    if (!has_experts_)
        return;
    layer_.experts("down_proj").input_gradient(r, scratch, received_gradients(), d_hidden_, rows_);
    const LinearRows d_gate_up =
        swiglu_.input_gradient(r, scratch, d_hidden_, handle_->row_weights(), d_row_weights_);
    layer_.experts("gate_up_proj").input_gradient(r, scratch, d_gate_up, results_, rows_);
    handle_->sum_row_gradients(r, results_, d_row_weights_);
}

void MoeSlot::router_gradient(Recording& r) const {
    ops::RouterBalance balance;
    if (sequence_counts_.buffer) {
        const ModelConfig& c = layer_.config;
        ops::expert_counts(r, ids_, sequence_counts_, false);
        balance.counts = sequence_counts_;
        balance.weight = static_cast<float>(
            c.balance_loss_alpha * static_cast<double>(c.routed_experts) /
            static_cast<double>(c.top_k * desc_.seq) * static_cast<double>(desc_.loss_scale));
    }
    ops::router_dgrad(r, d_weights_, ids_, scores_, d_logits_, layer_.router_options(), balance);
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
    ops::rmsnorm_wgrad(r, d_norm_, desc_.tensors.x, inv_rms_,
                       layer_.parameter("post_attention_layernorm.weight").gradient, true,
                       gain_workspace_);
}

} // namespace

MoeFfn::MoeFfn(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
               ExpertExchange& exchange, LayerScratch* scratch)
    : impl_(new Impl{config, layer, parameters, exchange, {}, {}, scratch}) {
    impl_->check();
    if (scratch == nullptr)
        impl_->scratch = &impl_->own_scratch.emplace(parameters.device());
    impl_->loads = Buffer(parameters.device(), {.name = "expert loads",
                                                .bytes = config.routed_experts * 4,
                                                .category = MemoryCategory::Scratch});
    Recording clear(parameters.device(), QueueRole::Compute, "clear expert loads");
    clear.fill(impl_->loads.view(), 0);
    parameters.device().submit(clear).wait();
}

MoeFfn::~MoeFfn() = default;

std::unique_ptr<LayerSlot> MoeFfn::create_slot(const SlotDesc& desc) {
    return std::make_unique<MoeSlot>(*impl_, desc);
}

TensorView MoeFfn::expert_loads() const noexcept {
    return impl_->loads.tensor(DType::U32, {impl_->config.routed_experts});
}

} // namespace bellows
