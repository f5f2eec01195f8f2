// SPDX-License-Identifier: MIT
#pragma once

// A whole model's forward pass over the token rows of a step: embedding, layers with a paged cache,
// head and sampling; of a model with a module of multi-token prediction (MTP) then the module,
// which drafts the token behind each one that was drawn. On a rank that has all experts that is one
// recording; among several it is cut where rows travel to the experts, and a step may be computed
// in two halves, of which one computes while the rows of the other travel. On one rank a step may
// be started while the one before runs: the two have memory for input and output and recordings of
// their own, share scratch, and the second reads the tokens that the first draws on the device.
// Recordings serve all steps of their sizes, which are rounded up to powers of two, and are made
// when a step first needs them; those that have not been used for longest give way to new ones. One
// thread at a time; used by this room's .cpp files.

#include "expert_ranks.hpp"
#include "step_input.hpp"

#include <bellows/engine/arena.hpp>
#include <bellows/model/cached_layer.hpp>

#include <array>
#include <chrono>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace bellows {

struct ForwardConfig {
    std::uint64_t max_context = 0; ///< tokens of the longest sequence
    std::uint64_t blocks = 0;      ///< of each layer's cache
    std::uint64_t most_drawn = 0;  ///< tokens that a step draws
    DType cache = DType::BF16;
    /// A row's bits depend on its own sequence alone.
    bool exact = true;
    /// Steps are handed in while others run, each whole; else in parts.
    bool overlaps = false;
    std::vector<std::uint32_t> forbidden; ///< tokens that are never drawn
    std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout;
};

class Forward {
public:
    /// All must outlive it. config.mtp_depth: 1, to draft, or 0. ranks: those that share the
    /// experts; null: this one has all. Throws Error{OutOfMemory}, Error{InvalidArgument}.
    Forward(const ModelConfig& config, ParameterStore& parameters, const ForwardConfig& forward,
            ExpertRanks* ranks = nullptr);
    ~Forward();

    /// Among ranks: computes a step and waits for it. Collective, each with rows or without; halves
    /// is the same on all. Throws Error{Timeout} and what device and exchange throw.
    StepOutput run(const StepInput& input, std::uint64_t halves);

    /// On one rank: hands a step to the device, behind the one that may be running; at most two at
    /// a time. Waits only where recordings need more scratch memory than there was. Throws what the
    /// device throws; then the step was not started.
    static constexpr std::size_t kMostStarted = 2;
    void start(const StepInput& input);
    /// Waits for the step that was started first, and returns what it gives. Throws Error{Timeout}
    /// and what the device throws.
    StepOutput finish();
    /// Forgets what was started: its results are of no use.
    void drop() noexcept;

    /// Steps of so many sizes have been recorded and are kept.
    std::uint64_t num_recordings() const noexcept;

private:
    /// Sizes that a recording is made for.
    struct Bucket {
        std::uint64_t rows = 0, sequences = 0, sampled = 0, items = 0, partials = 0, history = 0,
                      biases = 0, top = 0;
        auto operator<=>(const Bucket&) const = default;
    };
    struct Layout;
    struct Step;
    struct Half;
    struct Running;

    Bucket bucket_of(const StepInput& input, const ops::PagedPlan& plan) const;
    std::uint64_t split_blocks(const StepInput& input) const;
    Layout layout_of(const Bucket& bucket) const;
    void write(const StepInput& input, const ops::PagedPlan& plan, const Layout& layout,
               Half& half);
    Step& recorded(const Bucket& bucket, Half& half);
    std::unique_ptr<Step> record(const Bucket& bucket, Half& half);
    void record_layer(std::uint64_t layer, Step& step, Arena::Frame& scratch, const StepRows& rows,
                      const TensorView& stream, const Half& half);
    TensorView record_logits(Recording& r, Arena::Frame& scratch, const Step& step,
                             const Half& half, const TensorView& stream,
                             const TensorView& gain) const;
    ops::SampleBatch sample_batch(const Step& step, const Half& half, const TensorView& logits,
                                  BufferView settings) const;
    void record_head(Recording& r, Arena::Frame& scratch, const Step& step, const Half& half);
    void record_module(Step& step, Arena::Frame& scratch, const StepRows& rows, const Half& half);
    void record_module_input(Recording& r, Arena::Frame& scratch, const Step& step,
                             const Half& half, const TensorView& out) const;
    void record_draft(Recording& r, Arena::Frame& scratch, const Step& step, const Half& half,
                      const TensorView& stream);
    const Parameter& of_module(const char* name) const {
        return parameters_.at("model.layers." + std::to_string(config_.layers) + "." + name);
    }
    bool drafts() const noexcept { return config_.mtp_depth > 0; }
    /// Layers of experts without the module's, on which no answer depends.
    std::uint64_t layers_of_answers() const noexcept {
        return experts_.size() - (drafts() && !experts_.empty() ? 1 : 0);
    }
    std::unique_ptr<Recording> begin_part(const Bucket& bucket, std::uint64_t layer) const;
    TensorView drawn(const Half& half, std::uint64_t count) const;
    void reserve(const Layout& layout, Half& half);
    StepOutput output_of(const StepInput& input, const Step& step, const Half& half) const;
    void note_losses(const Running& half, const std::vector<int>& lost_before,
                     const std::vector<int>& lost, StepOutput& output) const;

    Running begin(StepInput input, Half& half);
    Recording& received(std::uint64_t layer, std::uint64_t half);
    void run_experts(std::uint64_t layer, std::span<Running> halves);

    const ModelConfig config_;
    ParameterStore& parameters_;
    ForwardConfig forward_;
    ExpertRanks* ranks_;
    bool keep_choices_; ///< ranks may be lost: the host is told which experts rows have chosen
    std::uint64_t table_blocks_, rows_per_item_;
    std::uint64_t layers_of_part_; ///< of a step on one rank
    RopeTable positions_;
    std::vector<Buffer> caches_;
    std::vector<ops::PagedCache> paged_;
    std::vector<std::unique_ptr<CachedLayer>> attention_, ffn_;
    std::vector<const CachedExperts*> experts_; ///< layers of ffn_, among ranks
    Buffer allowed_;
    std::deque<Arena> arenas_; ///< scratch of a step; among ranks of each half
    /// Among ranks these are the halves of a step; on one rank they are a step and the one behind
    /// it.
    std::vector<std::unique_ptr<Half>> halves_;
    std::vector<Running> started_; ///< and not finished, in their order
    Arena arrived_;                ///< scratch of received()
    /// Of each layer of experts and each half, made when first needed.
    std::vector<std::array<std::unique_ptr<Recording>, ExpertRanks::kHalves>> received_;
    std::uint64_t steps_ = 0;
};

} // namespace bellows
