// SPDX-License-Identifier: MIT
#include <bellows/engine/error.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/moe_ffn.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

struct MoeFfn::Impl {
    ModelConfig config;
    std::uint64_t layer;
    ParameterStore& parameters;
    ExpertExchange& exchange;
    Buffer loads; ///< [routed_experts] u32

    const Parameter& parameter(const std::string& name) const {
        return parameters.at("model.layers." + std::to_string(layer) + "." + name);
    }
    ops::RouterOptions router_options() const;
};

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
    Recording recording(const char* what) const;
    void make_gradients();
    void add_exchange(NodeKind kind, const char* name, std::function<TimePoint()> submit);

    void record_router();
    void record_shared();
    void record_experts();
    void record_shared_gradient();
    void record_experts_gradient();
    void record_router_gradient();
    void record_weight_gradients();

    MoeFfn::Impl& layer_;
    SlotDesc desc_;
    DType act_;
    bool has_experts_, has_shared_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::unique_ptr<ExchangeHandle> handle_;

    TensorView norm_, inv_rms_, logits_, scores_, ids_, weights_, d_weights_, d_logits_, d_norm_;
    TensorView sequence_counts_; ///< [sequences, experts] u32; empty without a balance loss
    TensorView shared_gate_up_, shared_hidden_, d_shared_hidden_;
    TensorView gate_up_, hidden_, d_hidden_, results_, d_row_weights_;
    BufferView gain_workspace_, tiles_memory_;
    ops::GroupTiles tiles_;
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
    if (has_shared_) {
        shared_gate_up_ = make("shared gate and up", act_, {tokens, 2 * c.shared_ffn()});
        shared_hidden_ = make("shared hidden", act_, {tokens, c.shared_ffn()});
    }
    handle_ = layer_.exchange.create_handle(desc_.name);
    gate_up_ = handle_->add_row_tensor("gate and up", act_, 2 * c.moe_ffn);
    hidden_ = handle_->add_row_tensor("hidden", act_, c.moe_ffn);
    results_ = handle_->add_row_tensor("results", act_, c.hidden, MemoryCategory::Scratch);
    if (has_experts_)
        tiles_memory_ = workspace(
            "expert tiles", ops::group_tiles_bytes(layer_.parameters.device(), handle_->capacity(),
                                                   layer_.exchange.num_local_experts()));

    record_router();
    add_exchange(NodeKind::Forward, "DISPATCH(F)",
                 [this] { return layer_.exchange.dispatch(*handle_, norm_, ids_, weights_); });
    record_shared();
    record_experts();
    add_exchange(NodeKind::Forward, "COMBINE(F)", [this] {
        return layer_.exchange.combine(*handle_, results_, desc_.tensors.y, true);
    });
    if (!desc_.tensors.training())
        return;
    make_gradients();
    add_exchange(NodeKind::InputGradient, "DISPATCH(B)",
                 [this] { return layer_.exchange.combine_backward(*handle_, desc_.tensors.dy); });
    record_shared_gradient();
    record_experts_gradient();
    add_exchange(NodeKind::InputGradient, "COMBINE(B)", [this] {
        return layer_.exchange.dispatch_backward(*handle_, results_, d_row_weights_, d_norm_,
                                                 has_shared_, d_weights_);
    });
    record_router_gradient();
    record_weight_gradients();
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

Recording MoeSlot::recording(const char* what) const {
    Recording made(layer_.parameters.device(), QueueRole::Compute, desc_.name + " " + what);
    made.label(what);
    return made;
}

void MoeSlot::add_exchange(NodeKind kind, const char* name, std::function<TimePoint()> submit) {
    add_node({name, kind, std::move(submit)});
}

void MoeSlot::record_router() {
    Recording r = recording("ROUTER(F)");
    const float eps = static_cast<float>(layer_.config.norm_eps);
    ops::rmsnorm_forward(r, desc_.tensors.x,
                         layer_.parameter("post_attention_layernorm.weight").weight, norm_,
                         inv_rms_, eps);
    ops::gemm_nt(r, norm_, layer_.parameter("mlp.gate.weight").compute, logits_);
    const TensorView bias = layer_.config.router_bias
                                ? layer_.parameter("mlp.gate.e_score_correction_bias").weight
                                : TensorView{};
    ops::router_forward(r, logits_, bias, scores_, ids_, weights_, layer_.router_options());
    ops::expert_counts(r, ids_, layer_.loads.tensor(DType::U32, {layer_.config.routed_experts}),
                       true);
    add_recording(NodeKind::Forward, "ROUTER(F)", std::move(r));
}

void MoeSlot::record_shared() {
    Recording r = recording("SHARED(F)");
    ops::copy(r, desc_.tensors.x, desc_.tensors.y);
    if (has_shared_) {
        ops::gemm_nt(r, norm_, layer_.parameter("mlp.shared_experts.gate_up_proj.weight").compute,
                     shared_gate_up_);
        ops::swiglu_forward(r, shared_gate_up_, {}, shared_hidden_);
        ops::gemm_nt(r, shared_hidden_,
                     layer_.parameter("mlp.shared_experts.down_proj.weight").compute,
                     desc_.tensors.y, true);
    }
    add_recording(NodeKind::Forward, "SHARED(F)", std::move(r));
}

void MoeSlot::record_experts() {
    Recording r = recording("MLP(F)");
    if (has_experts_) {
        const ModelConfig& c = layer_.config;
        tiles_ = ops::make_group_tiles(r, handle_->expert_offsets(), handle_->capacity(),
                                       {2 * c.moe_ffn, c.hidden, c.moe_ffn, 0}, tiles_memory_);
        ops::grouped_gemm_nt(r, handle_->rows(),
                             layer_.parameters.experts(layer_.layer, "gate_up_proj").compute,
                             gate_up_, tiles_);
        ops::swiglu_forward(r, gate_up_, handle_->row_weights(), hidden_);
        ops::grouped_gemm_nt(r, hidden_,
                             layer_.parameters.experts(layer_.layer, "down_proj").compute, results_,
                             tiles_);
    }
    add_recording(NodeKind::Forward, "MLP(F)", std::move(r));
}

void MoeSlot::record_shared_gradient() {
    Recording r = recording("SHARED(B)");
    if (has_shared_) {
        ops::gemm_nn(r, desc_.tensors.dy,
                     layer_.parameter("mlp.shared_experts.down_proj.weight").compute,
                     d_shared_hidden_);
        ops::swiglu_dgrad(r, d_shared_hidden_, shared_gate_up_, {}, shared_gate_up_, {});
        ops::gemm_nn(r, shared_gate_up_,
                     layer_.parameter("mlp.shared_experts.gate_up_proj.weight").compute, d_norm_);
    }
    add_recording(NodeKind::InputGradient, "SHARED(B)", std::move(r));
}

void MoeSlot::record_experts_gradient() {
    Recording r = recording("MLP(B)");
    if (has_experts_) {
        ops::grouped_gemm_nn(r, handle_->d_results(),
                             layer_.parameters.experts(layer_.layer, "down_proj").compute,
                             d_hidden_, tiles_);
        ops::swiglu_dgrad(r, d_hidden_, gate_up_, handle_->row_weights(), gate_up_, d_row_weights_);
        ops::grouped_gemm_nn(r, gate_up_,
                             layer_.parameters.experts(layer_.layer, "gate_up_proj").compute,
                             results_, tiles_);
    }
    add_recording(NodeKind::InputGradient, "MLP(B)", std::move(r));
}

void MoeSlot::record_router_gradient() {
    Recording r = recording("ROUTER(B)");
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
    add_recording(NodeKind::InputGradient, "ROUTER(B)", std::move(r));
}

void MoeSlot::record_weight_gradients() {
    Recording experts = recording("MLP(W)");
    if (has_experts_) {
        ops::grouped_gemm_tn(experts, handle_->d_results(), hidden_,
                             layer_.parameters.experts(layer_.layer, "down_proj").gradient,
                             handle_->expert_offsets(), true);
        ops::grouped_gemm_tn(experts, gate_up_, handle_->rows(),
                             layer_.parameters.experts(layer_.layer, "gate_up_proj").gradient,
                             handle_->expert_offsets(), true);
    }
    add_recording(NodeKind::WeightGradient, "MLP(W)", std::move(experts));

    Recording rest = recording("SHARED(W)");
    if (has_shared_) {
        ops::gemm_tn(rest, desc_.tensors.dy, shared_hidden_,
                     layer_.parameter("mlp.shared_experts.down_proj.weight").gradient, true);
        ops::gemm_tn(rest, shared_gate_up_, norm_,
                     layer_.parameter("mlp.shared_experts.gate_up_proj.weight").gradient, true);
    }
    ops::gemm_tn(rest, d_logits_, norm_, layer_.parameter("mlp.gate.weight").gradient, true);
    ops::rmsnorm_wgrad(rest, d_norm_, desc_.tensors.x, inv_rms_,
                       layer_.parameter("post_attention_layernorm.weight").gradient, true,
                       gain_workspace_);
    add_recording(NodeKind::WeightGradient, "SHARED(W)", std::move(rest));
}

} // namespace

MoeFfn::MoeFfn(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters,
               ExpertExchange& exchange)
    : impl_(new Impl{config, layer, parameters, exchange, {}}) {
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
