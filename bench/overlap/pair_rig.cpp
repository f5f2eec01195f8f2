// SPDX-License-Identifier: MIT
#include "overlap/pair_rig.hpp"

#include <bellows/base/error.hpp>
#include <bellows/fp8/choice.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/pipeline/measure.hpp>
#include <bellows/train/train_config.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

namespace bellows::bench {

namespace {

using Clock = std::chrono::steady_clock;

ModelConfig model_of(const PairShape& shape) {
    ModelConfig model;
    model.vocabulary = 256;
    model.hidden = shape.hidden;
    model.layers = 2 * shape.layers;
    model.dense_layers = 0;
    model.heads = 1; // there is no attention
    model.kv_lora_rank = model.qk_nope_head_dim = model.v_head_dim = 128;
    model.qk_rope_head_dim = 64;
    model.dense_ffn = shape.ffn;
    model.moe_ffn = shape.ffn;
    model.routed_experts = shape.experts;
    model.shared_experts = 1;
    model.top_k = shape.top_k;
    validate(model);
    return model;
}

/// Those of expert blocks.
std::vector<ParameterInfo> parameters_of(const ModelConfig& model, std::uint64_t rank,
                                         std::uint64_t ranks) {
    std::vector<ParameterInfo> all = parameters_of_stage(model, 0, 1, rank, ranks);
    std::erase_if(all, [](const ParameterInfo& info) {
        return info.name.find(".mlp.") == std::string::npos &&
               info.name.find("post_attention_layernorm") == std::string::npos;
    });
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
      thread_(device, "network"), of_weight_gradients_(device),
      scratch_{LayerScratch(device),
               LayerScratch(device, QueueRole::ComputeBeside, &of_weight_gradients_)} {
    World& world = watch.world();
    const ModelConfig model = model_of(shape);
    const auto rank = static_cast<std::uint64_t>(world.rank());
    const auto ranks = static_cast<std::uint64_t>(world.size());
    parameters_ = std::make_unique<ParameterStore>(
        device, parameters_of(model, rank, ranks), DType::BF16, true,
        shape.fp8 ? LinearPrecision::Fp8 : LinearPrecision::AsActivations);
    parameters_->use_products(shape.fp8 ? fp8::usual_choice(device)
                                        : fp8::usual_choice_of_bf16(device));
    ExchangeConfig of = expert_exchange_config(
        model, DType::BF16, shape.fp8 ? LinearPrecision::Fp8 : LinearPrecision::AsActivations);
    of.name = "experts";
    of.ranks.resize(ranks);
    std::iota(of.ranks.begin(), of.ranks.end(), 0);
    of.max_tokens = shape.tokens;
    of.timeout = kTimeLimit;
    exchange_ = std::make_unique<ExpertExchange>(device, world, *transport_, thread_, of);
    forward_ = make_chain(model, 0, shape);
    backward_ = make_chain(model, shape.layers, shape);
    for (const Chain* chain : {&forward_, &backward_}) {
        upload(chain->streams.front(), 10 * rank + (chain == &forward_ ? 1 : 2));
        upload(chain->gradients.back(), 10 * rank + 3);
    }
    parameters_->initialise(1);
    nodes_ = {forward_.nodes.pair_nodes(NodeKind::Forward),
              backward_.nodes.pair_nodes(NodeKind::InputGradient),
              backward_.nodes.pair_nodes(NodeKind::WeightGradient)};
    one_by_one(); // gives rows their memory
}

PairRig::Chain PairRig::make_chain(const ModelConfig& model, std::uint64_t first,
                                   const PairShape& shape) {
    Chain chain;
    for (std::uint64_t i = 0; i <= shape.layers; ++i)
        for (auto* buffers : {&chain.streams, &chain.gradients})
            buffers->emplace_back(
                device_, BufferDesc{.name = "stream", .bytes = shape.tokens * shape.hidden * 2});
    const auto tensor = [&](const Buffer& buffer) {
        return buffer.tensor(DType::BF16, {shape.tokens, shape.hidden});
    };
    for (std::uint64_t i = 0; i < shape.layers; ++i) {
        chain.blocks.push_back(std::make_unique<MoeFfn>(model, first + i, *parameters_, *exchange_,
                                                        &scratch_[first == 0 ? 0 : 1]));
        SlotDesc slot;
        slot.name = "block " + std::to_string(first + i);
        slot.tokens = slot.seq = shape.tokens;
        slot.loss_scale = 1.0f / static_cast<float>(shape.tokens);
        slot.tensors = {tensor(chain.streams[i]), tensor(chain.streams[i + 1]),
                        tensor(chain.gradients[i + 1]), tensor(chain.gradients[i])};
        chain.slots.push_back(chain.blocks.back()->create_slot(slot));
    }
    chain.nodes = NodeLists(chain.slots);
    return chain;
}

void PairRig::upload(const Buffer& buffer, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::uint16_t> values(buffer.view().bytes / 2);
    for (std::uint16_t& value : values) {
        const float number = normal(random);
        std::uint32_t bits = 0;
        std::memcpy(&bits, &number, sizeof bits);
        value = static_cast<std::uint16_t>(bits >> 16);
    }
    device_.upload(buffer.view(), std::as_bytes(std::span(values)));
}

std::vector<PairRig::HandIn> PairRig::handed_in(const PairOrder& order) {
    std::map<OpKind, std::size_t> next;
    std::vector<HandIn> all;
    for (const OpKind kind : order) {
        const Chain& chain = kind == OpKind::Forward ? forward_ : backward_;
        const std::size_t node = next[kind]++;
        all.push_back({chain.nodes.of(node_kind(kind)).at(node), &nodes_.of(kind).at(node), kind});
    }
    return all;
}

/// The backward takes what its forward has kept, some of it in place.
void PairRig::prepare() {
    for (const Node* node : backward_.nodes.of(NodeKind::Forward))
        node->submit({});
    device_.wait_idle(kTimeLimit);
    device_.take_trace();
    watch_.meet();
}

TimePoint PairRig::submit(const HandIn& at) {
    const TracedAs as(device_, to_name({at.kind, 0, 0}));
    return at.node->submit({});
}

PairRun PairRig::from_trace(double seconds) {
    PairRun run;
    run.seconds = seconds;
    kernels_.clear();
    events_ = device_.take_trace();
    std::vector<TraceEvent> of_pair; // but for what packs and unpacks
    for (const TraceEvent& event : events_) {
        if (event.op.empty())
            continue;
        const bool moves =
            event.category.starts_with("DISPATCH") || event.category.starts_with("COMBINE");
        if (event.is_job() || (event.by.empty() && !moves))
            of_pair.push_back(event);
        if (event.is_job())
            continue;
        const double time = 1e-9 * static_cast<double>(event.end_ns - event.begin_ns);
        auto& [sum, count] = kernels_[{event.by.empty() ? event.category : kExchange, event.name}];
        sum += time;
        ++count;
        if (!event.by.empty())
            continue;
        (moves ? run.moves : run.kernels) += time;
        if (event.name.find("gemm") != std::string::npos && !event.name.ends_with("_tiles"))
            run.products += time;
    }
    // The pair's ops, as a pipeline of one rank has them.
    const RankTimes times =
        times_of_rank(make_schedule({.ranks = 1, .micro_batches = 1}), 0, of_pair);
    const double travel = length_of(times.exchange);
    run.bare = travel > 0 ? 1 - times.hidden / travel : 0;
    return run;
}

PairRun PairRig::one_by_one() {
    prepare();
    double exchange = 0;
    const auto start = Clock::now();
    for (const HandIn& at : handed_in(one_after_the_other(nodes_))) {
        const auto begin = Clock::now();
        submit(at).wait(kTimeLimit);
        at.pair->seconds = seconds_since(begin);
        if (at.pair->resource == NodeResource::Exchange)
            exchange += at.pair->seconds;
    }
    PairRun run = from_trace(seconds_since(start));
    run.exchange = exchange;
    return run;
}

PairRun PairRig::run(const std::vector<HandIn>& nodes) {
    prepare();
    std::vector<TimePoint> ends;
    const auto start = Clock::now();
    {
        const Gathering together(device_);
        for (const HandIn& at : nodes)
            ends.push_back(submit(at));
    }
    for (const TimePoint& end : ends)
        end.wait(kTimeLimit);
    const PairRun run = from_trace(seconds_since(start));
    return run;
}

/// What they compute from is what the runs before have left.
PairRun PairRig::compute_alone(const PairOrder& order) {
    std::vector<HandIn> nodes = handed_in(order);
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
    for (const BufferView& view :
         {forward_.streams.back().view(), backward_.gradients.front().view(),
          parameters_->flat_gradients().buffer}) {
        std::vector<std::byte> bytes(view.bytes);
        device_.download(view, std::span(bytes));
        all.insert(all.end(), bytes.begin(), bytes.end());
    }
    return all;
}

} // namespace bellows::bench
