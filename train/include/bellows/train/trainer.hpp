// SPDX-License-Identifier: MIT
#pragma once

// One rank's part of a training run: its stages with their parameters, the schedule, the reductions
// and the optimiser. Ranks stand by the pipeline's: rank = place * dp + d; `ep` neighbours in d
// share the experts of a layer, dp / ep such groups are replicas, and so are ranks of the pipeline
// with the same stages. All ranks make the same calls.

#include <bellows/checkpoint/state.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/schedule/schedule.hpp>
#include <bellows/train/expert_balance.hpp>
#include <bellows/train/optimizer.hpp>
#include <bellows/train/sequence_source.hpp>
#include <bellows/train/train_config.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// What a rank asks of all ranks behind a step.
struct StepAsks {
    bool save = false; ///< a checkpoint
    bool stop = false; ///< the end of the run
};

struct StepResult {
    double loss = 0; ///< nats per token, mean over the global batch
    /// Of each MTP module, mean over the tokens that it predicts.
    std::vector<double> mtp_losses{};
    double grad_norm = 0;        ///< of the whole gradient, before clipping
    std::uint64_t sequences = 0; ///< of the step's batch, over all ranks
    /// With document_mask: how many keys a token of the batch saw on average.
    std::optional<double> visible_keys{};
    bool updated =
        true; ///< false: the gradient was not finite, so the weights were left as they are
    /// Sent by all ranks together in this step; weights that they send each other after the update
    /// count in the next one.
    std::uint64_t bytes_exchanged = 0;
    /// For others, mean over the ranks: what the exchange, the reductions, the pipes and the host's
    /// own collectives had nothing to do but wait, added up (they run side by side).
    double seconds_waited = 0;
    StepAsks asked; ///< by any rank: the same on all
    /// Of all layers with experts, ascending, over the whole batch: the same on all ranks.
    std::vector<LayerLoads> expert_loads;
    /// Experts that came to other ranks before the step (TrainingShape::eplb_every).
    std::vector<MovedExpert> moved_experts{};
};

/// Sets all parameters of a rank, as ParameterStore::load() does, and hands their f32 values to
/// `masters`, too.
using FirstWeights =
    std::function<void(ParameterStore& parameters, const ParameterStore::MasterSink& masters)>;

class Trainer {
public:
    /// Collective. Validates the configuration, the same on all ranks, before anything else; of its
    /// pp, dp and ep the layout's count. kernels: rank 0's count for all; what they leave open is
    /// as rank 0's device takes it by itself. Throws Error{InvalidArgument} naming the value that
    /// is out of range or what does not fit together, Error{Unsupported} when a rank's device lacks
    /// the class of bf16 products, or variants of products that are binding. Where one lacks
    /// others, all decode (fp8::Variant::Decoded; bf16 products are the engine's then).
    /// first_weights, called once, sets the parameters; without it they are random by
    /// config.train.seed. What it throws is thrown.
    Trainer(Device& device, World& world, const RunConfig& config, const RunLayout& layout,
            const KernelChoice& kernels = {}, const FirstWeights& first_weights = {});
    ~Trainer();

    /// Collective: runs step `step` (from 0) on the batch of `source`. Ends when the weights have
    /// been updated on the device's order of work. However slow a rank is, the others wait for it
    /// as long as it lives, up to config.train.step_timeout in each wait; then Error{Timeout}.
    /// Throws Error{Diverged} when the gradient or the loss of several steps in a row is not
    /// finite. What it throws ends the device's work too (Device::abort).
    StepResult step(std::uint64_t step, const SequenceSource& source);

    /// Collective, between steps: the loss of text that is not trained on, nats per token, the mean
    /// over sequences [0, count) of step 0 of `source`. Forwards alone, with the weights as they
    /// are; steps behind it have the same bits as without it. Throws like step().
    double held_out_loss(const SequenceSource& source, std::uint64_t count);

    /// Which token ends a document: needed before the first step where the configuration has
    /// document_mask. The same on all ranks.
    void end_documents_with(std::uint32_t token);

    /// `asks` is called once late in every step, by the thread that runs the step: what this rank
    /// asks then stands in StepResult::asked of all ranks.
    void ask_by(std::function<StepAsks()> asks);

    const RunConfig& config() const noexcept;
    const RunLayout& layout() const noexcept;
    /// Of the last step; before it of the first one.
    const Schedule& schedule() const noexcept;
    /// Whether nodes are to be ordered as measured; the same on all ranks.
    bool measures_nodes() const noexcept;
    /// Collective, with the traces of a step that all ranks have run: interleaves the nodes of
    /// pairs as is best for what they took, the mean of all ranks, and fills what the exchanges of
    /// other backwards leave free (fill_backward()). Bits do not depend on it.
    void order_nodes(std::span<const TraceEvent> events);
    /// The pattern by which this rank's last kind of pairs is, "" where there are none.
    const std::string& pair_pattern() const noexcept;

    Stage& stage(std::uint32_t phase = 0);
    ParameterStore& parameters() noexcept;
    /// KernelChoice::chosen on all ranks: what a checkpoint keeps. Empty where there was no choice.
    std::map<std::string, std::string> chosen_kernels() const;
    /// What a rank lacks of rank 0's choice of products, for which all decode; "" as a rule.
    const std::string& why_decoded() const noexcept;
    /// What links the devices of a host (Transport::device_link_name); "": nothing.
    std::string device_link() const;
    Optimizer& optimizer() noexcept;
    /// Collective: after a step each rank has the summed gradients, the f32 master weights and the
    /// moments of what it updates; afterwards it has the ones asked for of all its parameters that
    /// are trained, in the gradients' place (ParameterStore::download_gradient()). The next step
    /// goes on as it would. Waits.
    void gather(Parted what);
    /// Where experts are that it places (TrainingShape::eplb_every), the same on all ranks; empty
    /// where they stay in their blocks.
    ExpertPlaces expert_places() const;
    /// Collective, after parameters were set from outside: goes on with these places, where the
    /// layout has as many slots, or places the experts anew by these loads; and sends all slots
    /// their weights. Throws Error{InvalidArgument} for places of another model.
    void resume_experts(const ExpertPlaces& places);
    /// Whether this rank is the one that stands for a parameter among those that hold a copy.
    bool stands_for(const Parameter& parameter) const noexcept;
    /// The ranks that stand for some, ascending.
    const std::vector<std::uint64_t>& writers() const noexcept;

    struct Impl;

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
