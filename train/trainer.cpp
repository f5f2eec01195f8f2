// SPDX-License-Identifier: MIT
#include <bellows/train/trainer.hpp>

#include "evaluation.hpp"
#include "expert_balancer.hpp"
#include "expert_counts.hpp"
#include "expert_slots.hpp"
#include "gradient_clearing.hpp"
#include "pair_orders.hpp"
#include "sharded_optimizer.hpp"
#include "step_totals.hpp"
#include "training_chunk.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/collectives.hpp>
#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/message.hpp>
#include <bellows/comm/pipe.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/pipeline/executor.hpp>
#include <bellows/shape/batch_ramp.hpp>
#include <bellows/shape/groups.hpp>
#include <bellows/shape/stages.hpp>
#include <bellows/train/optimizer.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <numeric>
#include <optional>
#include <ranges>
#include <utility>

namespace bellows {

namespace {

/// Steps in a row that may be left out because their gradient was not finite.
constexpr std::uint64_t kMostLeftOut = 10;

} // namespace

struct Trainer::Impl {
    Impl(Device& d, World& w, const RunConfig& c, const RunLayout& l, const KernelChoice& kernels,
         const FirstWeights& first_weights);

    void make_slots();
    void make_stages();
    std::uint64_t slots_of_phase(std::uint32_t phase) const;
    void check_copies(const Schedule& of_steps) const;
    void make_executor();
    void use_batch(std::uint64_t batch);
    std::vector<int> world_ranks() const;
    std::vector<PipelineChunk*> pipeline_chunks() const;
    void make_optimizer();
    void set_parameters(const FirstWeights& first_weights);
    void connect_ends();
    /// Whether this rank is the one for what all ranks that hold a copy update.
    bool stands_for_copies(bool expert) const noexcept {
        return place == copies.front() && d < (expert ? layout.ep : 1);
    }
    bool stands_for(const Parameter& parameter) const noexcept {
        return parameter.info.trainable() ? optimizer->shard().stands_for(parameter)
                                          : stands_for_copies(false);
    }
    /// That sums most gradients: where experts have no replicas the rest is summed.
    Collectives& most_summed() const noexcept {
        return replicas->group().size() > 1 ? *replicas : *dense;
    }
    bool exchanges() const noexcept { return exchange != nullptr && layout.ep > 1; }
    void interleave_pairs(const NodeSeconds& seconds, double otherwise = 0);
    void fill_backwards(const NodeSeconds& seconds);
    void order_nodes();
    NodeSeconds mean_node_seconds(std::span<const TraceEvent> events);
    StepResult run_step(std::uint64_t step, const SequenceSource& sequences);
    std::vector<double> predicted_by_modules(std::uint64_t step,
                                             const SequenceSource& sequences) const;
    double held_out_loss(const SequenceSource& source, std::uint64_t count);
    void check_documents() const;
    void gather(Parted what);
    void place_experts(std::uint64_t step, StepResult& result);
    void count_left_out(std::uint64_t step, const StepResult& result);
    void watch_traffic();
    template <class Call>
    auto whole(Call call);

    Device& device;
    World& world;
    RunConfig config;
    RunLayout layout;
    std::chrono::milliseconds limit;   ///< of every wait
    Schedule schedule;                 ///< of steps with the whole batch
    std::uint64_t place, d;            ///< this rank's: of the pipeline, and among its dp
    std::vector<std::uint64_t> copies; ///< ranks of the pipeline with the same stages
    ControlPlane::Subscription on_failure;

    // Opened in the same order on every rank.
    std::unique_ptr<Transport> exchange_transport, dense_transport, replica_transport,
        activations_transport, gradients_transport, ends_transport, slots_transport;
    HostCollectives everyone, copy_peers;
    StepTotals totals;
    HostThread thread;
    std::unique_ptr<Collectives> dense, replicas; ///< of gradients and weights, in their memory
    /// Of a tied embedding's gradients, on ranks that have but one end of the model.
    std::unique_ptr<Collectives> ends;
    ParameterStore parameters;
    std::string why_decoded; ///< all FP8 products; empty where they are not
    std::unique_ptr<ExpertExchange> exchange;
    ExpertBalancer balancer;
    // Where experts are placed in slots.
    std::unique_ptr<Collectives> slot_ranks;
    std::optional<ParameterStore> slot_weights;
    std::unique_ptr<ExpertSlots> slots;
    std::optional<WeightGradientScratch> deferred; ///< where weight gradients have own queues
    std::vector<std::unique_ptr<Stage>> stages;    ///< by phase
    std::unique_ptr<ShardedOptimizer> optimizer;
    std::unique_ptr<Pipe> activations, gradients;
    RunningStep running;
    std::vector<std::unique_ptr<TrainingChunk>> chunks; ///< by phase
    /// How steps run that have the batch of the last one.
    struct Program {
        std::uint64_t batch = 0; ///< sequences over all ranks
        Schedule schedule;
        std::unique_ptr<PipelineExecutor> executor{};
    };
    std::unique_ptr<Program> program;
    std::optional<NodeSeconds> measured;    ///< once they have been measured
    std::unique_ptr<Evaluation> evaluation; ///< made when it is first asked for
    std::string pair_pattern;               ///< "": no pairs, or nothing to interleave
    std::unique_ptr<GradientClearing> clearing;
    std::vector<std::uint64_t> writers; ///< ranks that stand for a parameter, ascending

    std::optional<ExpertCounts> counts;
    std::function<StepAsks()> asks;   ///< what this rank asks of all
    std::uint64_t steps_left_out = 0; ///< in a row, for gradients that were not finite
};

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

std::uint64_t sequences_per_micro_batch(const RunConfig& config, const RunLayout& layout) {
    return config.train.batch / (layout.dp * config.train.micro_batches);
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

// ---- A step ---------------------------------------------------------------------------------

void Trainer::Impl::gather(Parted what) {
    device.wait_idle(limit); // weights that still travel are the last step's
    totals.leave_out([&] { optimizer->gather(what); });
}

void Trainer::Impl::check_documents() const {
    if (config.train.document_mask && !running.end_of_document)
        throw Error(ErrorCode::InvalidArgument,
                    "document_mask is set, but nothing says which token ends a document "
                    "(Trainer::end_documents_with())");
}

double Trainer::Impl::held_out_loss(const SequenceSource& source, std::uint64_t count) {
    check_documents();
    if (!evaluation)
        evaluation = std::make_unique<Evaluation>(
            running, everyone,
            Evaluation::Desc{.training = schedule,
                             .place = place,
                             .d = d,
                             .dp = layout.dp,
                             .sequences = sequences_per_micro_batch(config, layout),
                             .world_ranks = world_ranks(),
                             .chunks = pipeline_chunks(),
                             .pipes = {activations.get(), gradients.get()}});
    double loss = 0;
    totals.leave_out([&] { loss = evaluation->loss(source, count); });
    counts->collect(limit); // what chose experts there is no step's load
    return loss;
}

// ---- The trainer ----------------------------------------------------------------------------

/// Half of what it calls is of no use: what is left of that must not go on.
template <class Call>
auto Trainer::Impl::whole(Call call) {
    try {
        return call();
    } catch (const Error& error) {
        device.abort(error);
        throw;
    } catch (const std::exception& error) {
        device.abort(Error(ErrorCode::Internal, error.what()));
        throw;
    }
}

Trainer::Trainer(Device& device, World& world, const RunConfig& config, const RunLayout& layout,
                 const KernelChoice& kernels, const FirstWeights& first_weights)
    : impl_(std::make_unique<Impl>(device, world, config, layout, kernels, first_weights)) {
}
Trainer::~Trainer() {
    try { // jobs and recordings use what goes now
        impl_->device.wait_idle(impl_->limit);
    } catch (const Error&) {
        // Whoever waits for the work learns of it; here it only has to be over.
    }
}

Stage& Trainer::stage(std::uint32_t phase) {
    return *impl_->stages.at(phase);
}
ParameterStore& Trainer::parameters() noexcept {
    return impl_->parameters;
}
const std::string& Trainer::why_decoded() const noexcept {
    return impl_->why_decoded;
}
std::string Trainer::device_link() const {
    return std::string(impl_->exchange_transport->device_link_name());
}

std::map<std::string, std::string> Trainer::chosen_kernels() const {
    if (impl_->config.train.precision == Precision::F32)
        return {};
    return {{"gemm", gemm_class(impl_->device).name},
            {products_key(impl_->config.train.precision),
             describe(impl_->device, impl_->parameters.products())}};
}
const RunConfig& Trainer::config() const noexcept {
    return impl_->config;
}
const RunLayout& Trainer::layout() const noexcept {
    return impl_->layout;
}
const Schedule& Trainer::schedule() const noexcept {
    return impl_->program->schedule;
}
bool Trainer::measures_nodes() const noexcept {
    return impl_->exchanges() ||
           (impl_->config.train.pairs.kind == PairMode::Kind::Auto && impl_->schedule.has_pairs());
}
void Trainer::order_nodes(std::span<const TraceEvent> events) {
    impl_->measured = impl_->mean_node_seconds(events);
    impl_->order_nodes();
}
const std::string& Trainer::pair_pattern() const noexcept {
    return impl_->pair_pattern;
}
Optimizer& Trainer::optimizer() noexcept {
    return impl_->optimizer->shard();
}

bool Trainer::stands_for(const Parameter& parameter) const noexcept {
    return impl_->stands_for(parameter);
}
const std::vector<std::uint64_t>& Trainer::writers() const noexcept {
    return impl_->writers;
}

StepResult Trainer::step(std::uint64_t step, const SequenceSource& source) {
    return impl_->whole([&] { return impl_->run_step(step, source); });
}
double Trainer::held_out_loss(const SequenceSource& source, std::uint64_t count) {
    if (count == 0)
        throw Error(ErrorCode::InvalidArgument, "there are no sequences to look at");
    return impl_->whole([&] { return impl_->held_out_loss(source, count); });
}
void Trainer::end_documents_with(std::uint32_t token) {
    if (impl_->config.train.document_mask)
        impl_->running.end_of_document = token;
}
void Trainer::ask_by(std::function<StepAsks()> asks) {
    impl_->asks = std::move(asks);
}
ExpertPlaces Trainer::expert_places() const {
    return impl_->balancer.places();
}
void Trainer::resume_experts(const ExpertPlaces& places) {
    impl_->whole([&] {
        impl_->balancer.resume(places);
        if (!impl_->slots)
            return;
        impl_->slots->place(impl_->balancer.placements());
        impl_->slots->spread_weights();
    });
}
void Trainer::gather(Parted what) {
    impl_->whole([&] { impl_->gather(what); });
}

StepResult Trainer::Impl::run_step(std::uint64_t step, const SequenceSource& sequences) {
    check_documents();
    use_batch(batch_ramp(config.train).batch(step));
    clearing->begin();
    if (slots)
        slots->clear_gradients();
    counts->begin_step();
    running.index = step;
    running.mtp_weight = mtp_weight(config.train, step + 1);
    running.source = &sequences;
    const std::vector<double> predicted = predicted_by_modules(step, sequences);
    running.predicted = predicted;
    for (double& count : running.predicted)
        count *= static_cast<double>(config.train.batch) / static_cast<double>(program->batch);
    program->executor->run();
    optimizer->finish_gradients();
    std::vector<std::int64_t> loads = counts->collect(limit);
    if (!loads.empty()) // where the device has a queue beside its passes, backward ones go on
        totals.in_collective([&] { copy_peers.all_reduce_sum(std::span(loads)); });
    // The update waits for what all ranks agree on of its gradient; what else they sum up does not
    // hold it up.
    const StepTotals::Sums squares = totals.sum_with_bytes(optimizer->shard().local_squares());
    StepResult result;
    // What is recorded divides by the tokens of the whole batch: 1 unless the step has fewer.
    const double of_batch =
        static_cast<double>(config.train.batch) / static_cast<double>(program->batch);
    result.grad_norm = of_batch * std::sqrt(squares.value);
    result.bytes_exchanged = squares.bytes;
    const double most = config.train.clip_norm;
    const double clip = most > 0 && result.grad_norm > most ? most / result.grad_norm : 1.0;
    result.updated = std::isfinite(result.grad_norm); // the same on all ranks
    if (result.updated) {
        counts->update_biases(loads, step); // ahead of AdamW, which takes the device's memory
        optimizer->update(step + 1, learning_rate(config.train, step + 1), clip * of_batch);
    }
    running.last_loss.wait(limit);
    StepTotals::Losses losses =
        totals.sum_losses(asks ? asks() : StepAsks{}, stands_for_copies(false) // one rank tells
                                                          ? counts->by_layer(loads)
                                                          : std::vector<LayerLoads>{});
    result.asked = losses.asked;
    result.expert_loads = std::move(losses.expert_loads);
    place_experts(step, result);
    result.loss = losses.sum / static_cast<double>(program->batch * config.train.seq);
    for (std::size_t k = 0; k < losses.of_modules.size(); ++k)
        result.mtp_losses.push_back(predicted[k] > 0 ? losses.of_modules[k] / predicted[k] : 0);
    result.sequences = program->batch;
    if (config.train.document_mask)
        result.visible_keys =
            losses.visible_keys / static_cast<double>(program->batch * config.train.seq);
    result.seconds_waited = losses.seconds_waited;
    count_left_out(step, result);
    return result;
}

/// Tokens that each MTP module predicts in the step's batch. Only where documents end is that more
/// than a multiplication: then every rank looks at all sequences.
std::vector<double> Trainer::Impl::predicted_by_modules(std::uint64_t step,
                                                        const SequenceSource& sequences) const {
    const std::uint64_t seq = config.train.seq;
    std::vector<double> predicted(config.model.mtp_depth);
    if (!running.end_of_document) {
        for (std::size_t k = 0; k < predicted.size(); ++k)
            predicted[k] = static_cast<double>(program->batch * (seq - k - 1));
        return predicted;
    }
    std::vector<std::uint32_t> line(seq + 1);
    for (std::uint64_t i = 0; !predicted.empty() && i < program->batch; ++i) {
        sequences(step, i, line);
        for (std::size_t k = 0; k < predicted.size(); ++k)
            predicted[k] +=
                static_cast<double>(predicted_by_module(line, k, running.end_of_document));
    }
    return predicted;
}

/// Says what each rank computed, and places experts anew when it is time.
void Trainer::Impl::place_experts(std::uint64_t step, StepResult& result) {
    for (LayerLoads& layer : result.expert_loads)
        if (layout.ep > 1)
            layer.rank_loads = balancer.rank_loads(layer);
    result.moved_experts = balancer.moved();
    const auto changed = balancer.after_step(step + 1, result.expert_loads);
    if (!changed.empty())
        slots->place(changed);
}

void Trainer::Impl::count_left_out(std::uint64_t step, const StepResult& result) {
    const bool finite = result.updated && std::isfinite(result.loss);
    steps_left_out = finite ? 0 : steps_left_out + 1;
    if (steps_left_out < kMostLeftOut)
        return;
    char loss[32];
    std::snprintf(loss, sizeof loss, "%g", result.loss);
    throw Error(ErrorCode::Diverged,
                "the gradient or the loss of step " + std::to_string(step + 1) + " and of the " +
                    std::to_string(kMostLeftOut - 1) + " steps before is not finite (loss " + loss +
                    "); go on from an earlier checkpoint with a lower lr or a smaller clip_norm");
}

} // namespace bellows
