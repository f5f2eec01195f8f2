// SPDX-License-Identifier: MIT
// What a trainer makes before its first step, and the order of a step's nodes.
#include "trainer_impl.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/message.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/shape/batch_ramp.hpp>
#include <bellows/shape/groups.hpp>
#include <bellows/shape/stages.hpp>

#include <algorithm>
#include <iterator>
#include <map>
#include <ranges>
#include <utility>

namespace bellows {

std::uint64_t sequences_per_micro_batch(const RunConfig& config, const RunLayout& layout) {
    return config.train.batch / (layout.dp * config.train.micro_batches);
}

namespace {

const RunConfig& validated(const RunConfig& config, const RunLayout& layout, const World& world) {
    validate(config.model);
    validate(config.train);
    TrainingShape shape = config.train; // the layout counts, whatever the configuration asks for
    shape.pp = layout.pp;
    shape.dp = layout.dp;
    shape.ep = layout.ep;
    validate(shape);
    const auto ranks = static_cast<std::uint64_t>(world.size());
    if (resolve_layout(config.model, shape, ranks) != layout)
        throw Error(ErrorCode::InvalidArgument, "the layout has dp = " + std::to_string(layout.dp) +
                                                    " and ep = " + std::to_string(layout.ep) +
                                                    "; resolve_layout() fills in what is 0");
    if (config.model.mtp_depth >= config.train.seq)
        throw Error(ErrorCode::InvalidArgument,
                    "mtp_depth = " + std::to_string(config.model.mtp_depth) +
                        " MTP modules need sequences of more tokens than seq = " +
                        std::to_string(config.train.seq));
    return config;
}

/// Nodes that the ranks of a group stand on, if on each as many, one node's behind the other's;
/// else 1.
std::uint64_t even_nodes(const Topology& topology, const Group& group) {
    std::vector<int> nodes;
    for (const int rank : group.ranks())
        nodes.push_back(topology.node(rank));
    const auto count =
        static_cast<std::size_t>(std::ranges::count(nodes, nodes.front())); // of the first
    for (std::size_t i = 0; i < nodes.size(); ++i)
        if (nodes.size() % count != 0 || nodes[i] != nodes[i / count * count] ||
            (i >= count && nodes[i] == nodes[i - count]))
            return 1;
    return nodes.size() / count;
}

ExpertBalancer::Desc balance_of(const RunConfig& config, const RunLayout& layout,
                                const Topology& topology, const Group& group) {
    const ModelConfig& model = config.model;
    const std::uint64_t nodes = even_nodes(topology, group);
    return {.dense_layers = model.dense_layers,
            .layers = model.all_layers(),
            .experts = model.routed_experts,
            .groups = model.n_group,
            .ranks = layout.ep,
            .nodes = nodes,
            .slots_of_rank = expert_slots_of_rank(model, config.train, layout),
            .replicas = std::max(config.train.eplb_slots, model.routed_experts),
            .every = config.train.eplb_every};
}

std::unique_ptr<Transport> transport_of(World& world, Device& device, const RunConfig& config) {
    return open_transport(world, {.device = &device, .device_link = config.train.device_link});
}

} // namespace

Trainer::Impl::Impl(Device& dev, World& w, const RunConfig& c, const RunLayout& l,
                    const KernelChoice& kernels, const FirstWeights& first_weights)
    : device(dev), world(w), config(validated(c, l, w)), layout(l), limit(wait_limit(c.train)),
      schedule(pipeline_schedule(c.model, c.train, l)),
      place(static_cast<std::uint64_t>(w.rank()) / l.dp),
      d(static_cast<std::uint64_t>(w.rank()) % l.dp), copies(copies_of_rank(schedule, place)),
      on_failure(w.control().on_failure([&dev](const Error& error) { dev.abort(error); })),
      exchange_transport(transport_of(w, dev, c)), dense_transport(transport_of(w, dev, c)),
      replica_transport(transport_of(w, dev, c)), activations_transport(transport_of(w, dev, c)),
      gradients_transport(transport_of(w, dev, c)), everyone(w, Group::all(w.size()), limit),
      copy_peers(w, dp_group(l, copies), limit), totals(everyone), thread(dev, "network"),
      dense(
          std::make_unique<Collectives>(dev, w, *dense_transport, thread, dp_group(l, copies),
                                        CollectivesOptions{.name = "gradients", .timeout = limit})),
      replicas(std::make_unique<Collectives>(
          dev, w, *replica_transport, thread, replica_group(l, copies, d),
          CollectivesOptions{.name = "expert gradients", .timeout = limit})),
      parameters(dev, parameters_of_rank(c.model, schedule, place, d % l.ep, l.ep),
                 activation_type(c.train.precision), true, linear_precision(c.train.precision),
                 [this](std::string name, std::uint64_t bytes, MemoryCategory category) {
                     return most_summed().make_memory(std::move(name), bytes, category);
                 }),
      balancer(balance_of(c, l, w.topology(), ep_group(l, place, d))),
      running{.device = dev,
              .limit = limit,
              .seq = c.train.seq,
              .first_micro_batch = d * c.train.micro_batches,
              .batch = c.train.batch,
              .totals = totals} {
    if (&most_summed() == replicas.get()) // else it has nobody to sum with
        dense->use_memory_of(*replicas);
    AgreedKernels agreed =
        agree_on_kernels(device, everyone, world.rank() == 0, config.train.precision, kernels);
    why_decoded = std::move(agreed.why_decoded);
    if (agreed.products)
        parameters.use_products(*agreed.products);
    make_slots();
    make_stages();
    connect_ends();
    make_optimizer();
    make_executor();
    set_parameters(first_weights);
    counts.emplace(device, config.model, parameters, stages, phases_by_stage(schedule, place));
    watch_traffic();
}

/// The exchange of the experts, and where these are placed in slots what the slots hold.
void Trainer::Impl::make_slots() {
    if (config.model.moe_layers() == 0)
        return;
    const std::uint64_t tokens = sequences_per_micro_batch(config, layout) * config.train.seq;
    ExchangeConfig of = exchange_config(config.model, config.train, layout, place, d, tokens);
    of.timeout = limit;
    const std::uint64_t slots_of_rank = of.slots_per_rank;
    exchange =
        std::make_unique<ExpertExchange>(device, world, *exchange_transport, thread, std::move(of));
    if (slots_of_rank == 0)
        return;
    slots_transport = transport_of(world, device, config); // all ranks open it
    slot_ranks = std::make_unique<Collectives>(
        device, world, *slots_transport, thread, ep_group(layout, place, d),
        CollectivesOptions{.name = "experts in slots", .timeout = limit});
    slot_weights.emplace(
        device, slot_parameters(config.model, schedule, place, d % layout.ep, slots_of_rank),
        activation_type(config.train.precision), true, linear_precision(config.train.precision),
        [this](std::string name, std::uint64_t bytes, MemoryCategory category) {
            return slot_ranks->make_memory(std::move(name), bytes, category);
        });
    slot_weights->use_products(parameters.products());
    slots = std::make_unique<ExpertSlots>(
        parameters, *slot_weights, *slot_ranks, *exchange,
        ExpertSlots::Desc{.model = config.model, .slots_of_rank = slots_of_rank, .limit = limit});
}

/// Micro-batches in flight of a phase, in steps of any batch.
std::uint64_t Trainer::Impl::slots_of_phase(std::uint32_t phase) const {
    std::uint64_t most = 0;
    for (const std::uint64_t size : batch_ramp(config.train).sizes()) {
        TrainingShape shape = config.train;
        shape.micro_batches = micro_batches_of(config.train, size);
        most = std::max(
            most, pipeline_schedule(config.model, shape, layout).peak_in_flight(place, phase));
    }
    return most;
}

void Trainer::Impl::make_stages() {
    const std::uint64_t sequences = sequences_per_micro_batch(config, layout);
    // A forward of one phase stands beside a backward of the other, as a pair or behind it.
    const ScheduleKind kind = config.train.pipeline;
    const bool both_ways = kind == ScheduleKind::DualPipe || kind == ScheduleKind::DualPipeV;
    if (device.distinct_queues(QueueRole::Compute, QueueRole::ComputeDeferred))
        deferred.emplace(device);
    for (std::uint32_t phase = 0; phase < schedule.chunks[place].size(); ++phase) {
        StageDesc desc;
        desc.config = config.model;
        desc.stage = schedule.chunks[place][phase].stage;
        desc.num_stages = schedule.num_stages;
        desc.sequences = sequences;
        desc.seq = config.train.seq;
        desc.num_slots = slots_of_phase(phase);
        desc.document_mask = config.train.document_mask;
        desc.loss_scale =
            static_cast<float>(1.0 / static_cast<double>(config.train.batch * config.train.seq));
        if (both_ways && phase % 2 == 1)
            desc.queue = QueueRole::ComputeBeside;
        if (deferred)
            desc.weight_gradients = &*deferred;
        stages.push_back(std::make_unique<Stage>(desc, parameters, exchange.get(),
                                                 slot_weights ? &*slot_weights : nullptr));
    }
}

void Trainer::Impl::check_copies(const Schedule& of_steps) const {
    // Copies post the same sums in the same order, as they do the same in each phase.
    const auto ops_of = [&of_steps](std::uint64_t rank) {
        std::vector<std::pair<OpKind, std::uint64_t>> ops;
        for (const ScheduleOp& op : of_steps.ops[rank])
            ops.emplace_back(op.kind, of_steps.chunk_of(rank, op).stage);
        return ops;
    };
    for (const std::uint64_t copy : copies)
        if (ops_of(copy) != ops_of(place))
            throw Error(ErrorCode::Internal, "copies of the parameters with different schedules");
}

void Trainer::Impl::connect_ends() {
    const auto pair = ranks_of_ends(schedule);
    if (!config.model.embedding_at_both_ends() || !pair)
        return;
    ends_transport = transport_of(world, device, config); // all ranks open it
    if (place != pair->first && place != pair->last)
        return;
    ends = std::make_unique<Collectives>( // each data-parallel copy has a partner of its own
        device, world, *ends_transport, thread,
        Group({static_cast<int>(pair->first * layout.dp + d),
               static_cast<int>(pair->last * layout.dp + d)}),
        CollectivesOptions{.name = "tied embedding", .timeout = limit});
    ends->use_memory_of(most_summed());
}

void Trainer::Impl::make_optimizer() {
    OptimizerOptions options;
    options.adamw.beta1 = static_cast<float>(config.train.beta1);
    options.adamw.beta2 = static_cast<float>(config.train.beta2);
    options.adamw.eps = static_cast<float>(config.train.adam_eps);
    options.adamw.weight_decay = static_cast<float>(config.train.weight_decay);
    options.timeout = limit;
    const std::vector<std::uint32_t> in_order = phases_by_stage(schedule, place);
    optimizer = std::make_unique<ShardedOptimizer>(
        parameters, stages, in_order, CopyGroup{*dense, stands_for_copies(false)},
        CopyGroup{*replicas, stands_for_copies(true)}, ends.get(), slots.get(), options);
    const bool writes = std::ranges::any_of(
        parameters.all(), [this](const Parameter& parameter) { return stands_for(parameter); });
    const auto all = everyone.all_gather(std::as_bytes(std::span(&writes, 1)));
    for (std::size_t rank = 0; rank < all.size(); ++rank)
        if (all[rank].front() != std::byte{0})
            writers.push_back(rank);
}

void Trainer::Impl::set_parameters(const FirstWeights& first_weights) {
    const auto masters = [this](std::uint64_t first, std::span<const float> values) {
        optimizer->shard().upload_masters(first, values);
    };
    if (first_weights) {
        first_weights(parameters, masters);
        parameters.clear_gradients().wait(limit);
    } else {
        parameters.initialise(config.train.seed, masters);
    }
    if (slots)
        slots->spread_weights();
}

void Trainer::Impl::make_executor() {
    if (schedule.num_stages > 1) {
        activations = std::make_unique<Pipe>(device, world, *activations_transport, thread,
                                             PipeOptions{.name = "activations", .timeout = limit});
        gradients = std::make_unique<Pipe>(device, world, *gradients_transport, thread,
                                           PipeOptions{.name = "gradients", .timeout = limit});
    }
    for (std::uint32_t phase = 0; phase < stages.size(); ++phase)
        chunks.push_back(std::make_unique<TrainingChunk>(
            running, thread, *stages[phase], *optimizer,
            TrainingChunk::Desc{.phase = phase, .stage = schedule.chunks[place][phase].stage}));
    use_batch(batch_ramp(config.train).batch(0));
    clearing = std::make_unique<GradientClearing>(
        parameters, stages[schedule.ops[place].front().phase]->nodes(0, NodeKind::Forward));
    running.clearing = clearing.get();
}

/// Steps have so many sequences from now on. A micro-batch has as many as ever, so what is recorded
/// stays valid, and a batch of another size is another number of them.
void Trainer::Impl::use_batch(std::uint64_t sequences) {
    if (program && program->batch == sequences)
        return;
    if (program)
        device.wait_idle(limit); // what goes now orders what it has handed in
    TrainingShape shape = config.train;
    shape.micro_batches = micro_batches_of(config.train, sequences);
    program = std::make_unique<Program>(
        Program{sequences, pipeline_schedule(config.model, shape, layout)});
    const Schedule& of_steps = program->schedule;
    check_copies(of_steps);
    running.first_micro_batch = d * shape.micro_batches;
    totals.forget_losses();
    const std::uint64_t of_stream = of_steps.num_micro_batches / of_steps.num_streams;
    const ScheduleOp& first_op = of_steps.ops[place].front();
    for (std::uint32_t phase = 0; phase < chunks.size(); ++phase) {
        const std::uint64_t first = of_steps.first_of_stream(of_steps.chunks[place][phase].stream);
        chunks[phase]->begin_batch({.last_micro_batch = first + of_stream - 1,
                                    .opening = first_op.phase == phase
                                                   ? std::optional(first_op.micro_batch)
                                                   : std::nullopt});
    }
    program->executor = std::make_unique<PipelineExecutor>(
        device, of_steps, place, world_ranks(), pipeline_chunks(),
        PipelinePipes{activations.get(), gradients.get()}, limit);
    order_nodes();
}

/// Of the pipeline that this rank is one of.
std::vector<int> Trainer::Impl::world_ranks() const {
    std::vector<int> ranks;
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank)
        ranks.push_back(static_cast<int>(rank * layout.dp + d));
    return ranks;
}

std::vector<PipelineChunk*> Trainer::Impl::pipeline_chunks() const {
    std::vector<PipelineChunk*> of_rank;
    for (const auto& chunk : chunks)
        of_rank.push_back(chunk.get());
    return of_rank;
}

void Trainer::Impl::watch_traffic() {
    const auto watch = [this](const auto* connection) {
        if (connection != nullptr)
            totals.watch([connection] {
                const auto stats = connection->stats();
                return Traffic{stats.bytes_sent, stats.seconds_waited};
            });
    };
    watch(dense.get());
    watch(replicas.get());
    watch(ends.get());
    watch(exchange.get());
    watch(slot_ranks.get());
    watch(activations.get());
    watch(gradients.get());
}

// ---- What exchanges leave free --------------------------------------------------------------

/// The same on all ranks that share an exchange, whose stages are the same.
void Trainer::Impl::interleave_pairs(const NodeSeconds& seconds, double otherwise) {
    const PairMode& pairs = config.train.pairs;
    std::map<std::pair<std::uint32_t, std::uint32_t>, PairPattern> patterns; // by phases
    const auto& ops = program->schedule.ops[place];
    for (std::size_t i = 0; i < ops.size(); ++i) {
        const auto phases = std::pair(ops[i].phase, ops[i].with_next ? ops[i + 1].phase : 0);
        if (!ops[i].with_next || patterns.contains(phases))
            continue;
        const PairNodes nodes =
            pair_of(*stages[phases.first], *stages[phases.second], seconds, otherwise);
        PairPattern pattern;
        if (pairs.kind == PairMode::Kind::Pattern)
            pattern = pairs.pattern;
        else if (const PairNodes layer = layer_with_experts(nodes); !layer.forward.empty())
            pattern = choose_pattern(layer);
        if (!pattern.empty()) {
            program->executor->interleave(phases.first, phases.second,
                                          bellows::interleave(nodes, pattern));
            pair_pattern = to_text(pattern);
        }
        patterns.emplace(phases, std::move(pattern));
    }
}

void Trainer::Impl::fill_backwards(const NodeSeconds& seconds) {
    for (std::uint32_t phase = 0; phase < stages.size(); ++phase)
        program->executor->fill(phase,
                                fill_backward(pair_of(*stages[phase], *stages[phase], seconds)));
}

void Trainer::Impl::order_nodes() {
    if (!measured) {
        interleave_pairs({}, 1);
        return;
    }
    interleave_pairs(*measured);
    if (exchanges())
        fill_backwards(*measured);
}

NodeSeconds Trainer::Impl::mean_node_seconds(std::span<const TraceEvent> events) {
    std::map<std::string, std::size_t> runs;
    for (const ScheduleOp& op : program->schedule.ops[place])
        for (const NodeKind kind :
             {NodeKind::Forward, NodeKind::InputGradient, NodeKind::WeightGradient})
            if (op.kind == OpKind::Backward ? kind != NodeKind::Forward
                                            : kind == node_kind(op.kind))
                for (const PairNode& node : stages[op.phase]->pair_nodes(kind))
                    ++runs[node.name];
    return mean_of_ranks(everyone, node_seconds(events, runs));
}

} // namespace bellows
