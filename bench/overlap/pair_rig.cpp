// SPDX-License-Identifier: MIT
#include "overlap/pair_rig.hpp"

#include "app/train_config.hpp"

#include <bellows/engine/error.hpp>
#include <bellows/fp8/choice.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

namespace bellows::bench {

namespace {

using Clock = std::chrono::steady_clock;

/// Four times as many layers as a pair's half: the stages in the middle have neither embedding nor
/// head.
ModelConfig model_of(const PairShape& shape) {
    ModelConfig model;
    model.vocabulary = 256;
    model.hidden = shape.hidden;
    model.layers = 4 * shape.layers;
    model.dense_layers = 0;
    model.heads = shape.hidden / 128;
    model.q_lora_rank = 3 * shape.hidden / 8;
    model.kv_lora_rank = shape.hidden / 4;
    model.qk_nope_head_dim = 128;
    model.qk_rope_head_dim = 64;
    model.v_head_dim = 128;
    model.dense_ffn = 4 * shape.hidden;
    model.moe_ffn = shape.ffn;
    model.routed_experts = shape.experts;
    model.shared_experts = 1;
    model.top_k = shape.top_k;
    model.n_group = model.topk_group = 1;
    validate(model);
    return model;
}

std::vector<ParameterInfo> parameters_of(const ModelConfig& model, std::uint64_t rank,
                                         std::uint64_t ranks) {
    std::vector<ParameterInfo> all = parameters_of_stage(model, 1, 4, rank, ranks);
    for (ParameterInfo& info : parameters_of_stage(model, 2, 4, rank, ranks))
        all.push_back(std::move(info));
    return all;
}

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

} // namespace

PairRig::PairRig(Device& device, Stopwatch& watch, const PairShape& shape)
    : device_(device), watch_(watch),
      transport_(open_transport(
          watch.world(), {.device = &device, .device_link = device_link_kind(shape.device_link)})),
      thread_(device, "network") {
    World& world = watch.world();
    const ModelConfig model = model_of(shape);
    const auto rank = static_cast<std::uint64_t>(world.rank());
    const auto ranks = static_cast<std::uint64_t>(world.size());
    parameters_ = std::make_unique<ParameterStore>(
        device, parameters_of(model, rank, ranks), DType::BF16, true,
        shape.fp8 ? LinearPrecision::Fp8 : LinearPrecision::AsActivations);
    if (shape.fp8)
        parameters_->use_products(
            fp8::choose(fp8::measure(device, {.timed = fp8::Timed::None}), fp8::Bits::Usual));
    ExchangeConfig of;
    of.name = "experts";
    of.ranks.resize(ranks);
    std::iota(of.ranks.begin(), of.ranks.end(), 0);
    of.num_experts = shape.experts;
    of.top_k = shape.top_k;
    of.hidden = shape.hidden;
    of.max_tokens = shape.tokens;
    of.dtype = DType::BF16;
    of.timeout = kTimeLimit;
    exchange_ = std::make_unique<ExpertExchange>(device, world, *transport_, thread_, of);
    StageDesc desc;
    desc.config = model;
    desc.num_stages = 4;
    desc.seq = shape.seq;
    desc.sequences = shape.tokens / desc.seq;
    desc.loss_scale = 1.0f / static_cast<float>(shape.tokens);
    for (auto* stage : {&forward_, &backward_}) {
        ++desc.stage;
        *stage = std::make_unique<Stage>(desc, *parameters_, exchange_.get());
        upload((*stage)->input(0), 100 * desc.stage + rank);
        upload((*stage)->output_gradient(0), 1000 * desc.stage + rank);
    }
    parameters_->initialise(1);
    nodes_ = pair_of(*forward_, *backward_, {});
    one_by_one(); // gives rows their memory
}

void PairRig::upload(const TensorView& tensor, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> values(tensor.extent[0] * tensor.extent[1]);
    for (std::uint16_t& value : values) {
        const float number = normal(random);
        std::uint32_t bits = 0;
        std::memcpy(&bits, &number, sizeof bits);
        value = static_cast<std::uint16_t>(bits >> 16);
    }
    device_.upload(tensor.buffer, std::as_bytes(std::span(values)));
}

std::vector<PairRig::HandIn> PairRig::handed_in(const PairOrder& order) {
    struct Part {
        const std::vector<const Node*>& nodes;
        std::vector<PairNode>& pair;
        std::size_t next = 0;
    };
    Part forward{forward_->nodes(0, NodeKind::Forward), nodes_.forward};
    Part input{backward_->nodes(0, NodeKind::InputGradient), nodes_.input_gradient};
    Part weight{backward_->nodes(0, NodeKind::WeightGradient), nodes_.weight_gradient};
    std::vector<HandIn> all;
    for (const OpKind kind : order) {
        Part& part = kind == OpKind::Forward         ? forward
                     : kind == OpKind::InputGradient ? input
                                                     : weight;
        all.push_back({part.nodes.at(part.next), &part.pair.at(part.next)});
        ++part.next;
    }
    return all;
}

/// The backward takes what its forward has kept, some of it in place.
void PairRig::prepare() {
    for (const Node* node : backward_->nodes(0, NodeKind::Forward))
        node->submit({});
    device_.wait_idle(kTimeLimit);
    device_.take_trace();
    watch_.meet();
}

PairRun PairRig::from_trace(double seconds) {
    PairRun run;
    run.seconds = seconds;
    for (const TraceEvent& event : device_.take_trace()) {
        if (event.op.empty() || event.category == "lane" || !event.by.empty())
            continue;
        const double time = 1e-9 * static_cast<double>(event.end_ns - event.begin_ns);
        run.kernels += time;
        if (event.category.starts_with("MLP("))
            run.products += time;
    }
    return run;
}

PairRun PairRig::one_by_one() {
    prepare();
    const std::string before = device_.trace_as("pair");
    double exchange = 0;
    const auto start = Clock::now();
    for (const HandIn& at : handed_in(one_after_the_other(nodes_))) {
        const auto begin = Clock::now();
        at.node->submit({}).wait(kTimeLimit);
        at.pair->seconds = seconds_since(begin);
        if (at.pair->resource == NodeResource::Exchange)
            exchange += at.pair->seconds;
    }
    PairRun run = from_trace(seconds_since(start));
    run.exchange = exchange;
    device_.trace_as(before);
    return run;
}

PairRun PairRig::run(const std::vector<HandIn>& nodes) {
    prepare();
    const std::string before = device_.trace_as("pair");
    std::vector<TimePoint> ends;
    const auto start = Clock::now();
    for (const HandIn& at : nodes)
        ends.push_back(at.node->submit({}));
    for (const TimePoint& end : ends)
        end.wait(kTimeLimit);
    const PairRun run = from_trace(seconds_since(start));
    device_.trace_as(before);
    return run;
}

/// What they compute from is what the runs before have left.
PairRun PairRig::compute_alone() {
    std::vector<HandIn> nodes = handed_in(one_after_the_other(nodes_));
    std::erase_if(nodes,
                  [](const HandIn& at) { return at.pair->resource != NodeResource::Compute; });
    return run(nodes);
}

PairRun PairRig::interleaved(const PairOrder& order) {
    return run(handed_in(order));
}

std::vector<std::byte> PairRig::results_of(const PairOrder& order) {
    parameters_->clear_gradients();
    interleaved(order);
    std::vector<std::byte> all;
    for (const TensorView& tensor :
         {forward_->output(0), backward_->input_gradient(0), parameters_->flat_gradients()}) {
        std::vector<std::byte> bytes(tensor.buffer.bytes);
        device_.download(tensor.buffer, std::span(bytes));
        all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
}

} // namespace bellows::bench
