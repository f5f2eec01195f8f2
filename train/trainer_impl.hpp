// SPDX-License-Identifier: MIT
#pragma once

// What a Trainer consists of. Used by trainer.cpp, which runs steps, and trainer_setup.cpp, which
// makes what these need.

#include "evaluation.hpp"
#include "expert_balancer.hpp"
#include "expert_counts.hpp"
#include "expert_slots.hpp"
#include "gradient_clearing.hpp"
#include "pair_orders.hpp"
#include "sharded_optimizer.hpp"
#include "step_totals.hpp"
#include "training_chunk.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/pipe.hpp>
#include <bellows/pipeline/executor.hpp>
#include <bellows/train/optimizer.hpp>
#include <bellows/train/trainer.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows {

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

/// Sequences of a micro-batch of one rank.
std::uint64_t sequences_per_micro_batch(const RunConfig& config, const RunLayout& layout);

} // namespace bellows
