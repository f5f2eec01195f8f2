// SPDX-License-Identifier: MIT
#pragma once

// A model that answers many requests at once: submit requests, call step() as long as it returns
// true, and poll each request for what is new of its answer. A step computes tokens of all requests
// that run, within a budget, and draws their next tokens on the device; keys and values stay in a
// paged cache, whose blocks requests with the same beginning share. One rank holds all of the model
// on a device of its own; or several share its experts (EngineOptions::world): each has a whole
// copy of all else, requests of its own, and calls step() as often as the others. One thread at a
// time.

#include <bellows/comm/world.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/serve/scheduler.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/layout.hpp>
#include <bellows/text/tokenizer.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// What guesses the token behind the next one, so that a step may compute two tokens of an answer.
/// Mtp: the model's first module of multi-token prediction (MTP).
enum class DraftKind : std::uint8_t { None, Mtp };

/// "none" or "mtp". Throws Error{InvalidArgument} for another text.
DraftKind draft_kind(std::string_view text);

struct EngineOptions {
    /// How it computes. Without: as the run did; of a Hugging Face folder f32 where that is f32,
    /// else bf16.
    std::optional<Precision> precision{};
    /// How keys and values are kept: f32, bf16 or, of models with latent attention, F8E4M3.
    /// Without: as activations.
    std::optional<DType> cache_type{};
    /// The most tokens of a request, prompt and answer. 0: the model's context, at most 4096.
    std::uint64_t max_context = 0;
    std::uint64_t max_sequences = 64;  ///< requests that run at the same time
    std::uint64_t token_budget = 2048; ///< tokens of a step, at least max_sequences
    std::uint64_t prefill_chunk = 0;   ///< tokens of one request in a step; 0: the budget
    /// Tokens of all prompts in a step that has tokens of answers, too, which then come sooner; 0:
    /// so many that the step has half of the budget when max_sequences answers go on.
    std::uint64_t prefill_beside = 0;
    /// Tokens that the cache has room for. 0: max_sequences of max_context tokens each, or what
    /// fits in nine tenths of the device's free memory.
    std::uint64_t cache_tokens = 0;
    bool prefix_reuse = true; ///< requests share blocks of the same beginning
    /// A request's tokens and log-probabilities have the same bits whatever else is in the batch,
    /// however its prompt is chunked, preempted or found in the cache, and on any number of ranks,
    /// each of which must own an aligned range of a power of two of experts, or the last ones. With
    /// a placement every table has these bits; results then come back one by one for each choice,
    /// not one for each rank.
    bool exact = false;
    /// The ranks that share the experts, for as long as the engine lives; all have the same model
    /// and options. Null: this rank has all experts.
    World* world = nullptr;
    /// Which expert each slot of the ranks holds, a table for each layer with experts, as `bellows
    /// plan experts --distinct --json` prints them (physical_to_logical): [ranks * slots of a
    /// rank], the slots of rank 0 first, -1 for a free one. Replicas of an expert share its tokens.
    /// Empty: each expert once, contiguous blocks in the order of the ranks. The same on all ranks.
    /// Throws Error{InvalidArgument} unless each expert has a slot, and at most one of a rank, the
    /// ranks divide the slots, and all layers have as many.
    std::vector<std::vector<std::int32_t>> placement{};
    /// A step is handed to the device while the one before it runs, so that the device does not
    /// wait for the host. Not among ranks, nor in steps with penalties, which need the token that
    /// is being drawn. With `exact` the answers have the same bits with and without.
    bool overlap_steps = true;
    /// Among ranks: the most tokens of a rank that travel to the experts at once. A step of more is
    /// computed in two halves, so token_budget is at most twice as much.
    std::uint64_t exchange_tokens = 256;
    /// Where a rank is lost (World with ControlOptions::outlive_lost_ranks), requests that need one
    /// of its experts go on without it, and AnswerPart::degraded says so. false: they fail. Experts
    /// of which another rank has a replica are not missed; with `exact` not a bit changes then.
    bool allow_degraded = false;
    /// With drafts, a step computes the last token of each answer and the token that is expected
    /// behind it. That one is accepted where it is what is drawn in its place: answers are drawn as
    /// without drafts, and with `exact` they are the same, whatever the drafts are. Steps with
    /// drafts are not started ahead (overlap_steps).
    DraftKind draft = DraftKind::None;
    /// For measurements, as SchedulerConfig::forced_acceptance: answers are of no use.
    std::optional<double> forced_acceptance{};
    /// Gives answers as text and finds stop strings; must outlive the engine. Null: tokens alone.
    const Tokenizer* tokenizer = nullptr;
    std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout; ///< of every wait
    /// Elements of the weights that have been read, and all of them.
    std::function<void(std::uint64_t done, std::uint64_t total)> on_progress{};
};

struct TokenLogProb {
    std::uint32_t token = 0;
    float log_prob = 0; ///< natural log, by the logits before penalties, bias and temperature
};

/// What is new of an answer since the last poll.
struct AnswerPart {
    std::vector<std::uint32_t> tokens;
    /// With a tokenizer: complete characters, without what may begin a stop string.
    std::string text;
    /// With Request::log_probs: of each token, its own first, then the likeliest ones.
    std::vector<std::vector<TokenLogProb>> log_probs;
    FinishReason reason = FinishReason::None; ///< not None: there will be no more
    /// Since then the answer lacks what experts of lost ranks would have added.
    bool degraded = false;
    RequestUsage usage;
};

struct EngineCounters {
    BlockPoolCounters blocks;
    std::uint64_t running = 0, waiting = 0;
    std::uint64_t steps = 0;
    std::uint64_t overlapped = 0;       ///< steps that were started while the one before ran
    std::uint64_t computed_tokens = 0;  ///< rows of all steps, without those in vain
    std::uint64_t vain_tokens = 0;      ///< rows of requests that had ended when they were computed
    std::uint64_t generated_tokens = 0; ///< that were drawn
    std::uint64_t preemptions = 0;
    std::uint64_t drafted = 0, accepted = 0; ///< drafts that were checked, and of them accepted
    /// Of the sizes that steps have had; two of a size where steps of it overlap.
    std::uint64_t recordings = 0;
};

class Engine {
public:
    /// A checkpoint, as Checkpoint::open() takes it, or a Hugging Face folder. Throws what
    /// Checkpoint::open(), HfFolder and Device::create() throw, Error{InvalidArgument} for options,
    /// Error{OutOfMemory} where the cache does not fit. Among ranks, all of these are collective:
    /// so is step(), and so is the destructor.
    Engine(const DeviceOptions& device, const std::filesystem::path& checkpoint,
           const EngineOptions& options);
    /// Random weights of that shape, for measurements; with an MTP module where there are drafts.
    Engine(const DeviceOptions& device, const ModelConfig& model, std::uint64_t seed,
           const EngineOptions& options);
    ~Engine();

    /// Queues a request. Throws Error{InvalidArgument} that names the field, and for stop strings
    /// without a tokenizer.
    RequestId submit(Request request);
    /// Computes one step and takes what it gives. False: no request runs or waits, on any rank.
    /// Waits for the device, and among ranks for the others. On return the next step may be running
    /// already (EngineOptions::overlap_steps): requests that are submitted now come into the one
    /// behind it, and one that ends now may have a row in it, which nobody hears of. After an error
    /// the requests of the step, and of the one that was running behind it, have failed. Where the
    /// world outlives lost ranks, one is no error: see EngineOptions::allow_degraded; once a
    /// request lacked an expert, beginnings of texts are not shared any more. A step that had sent
    /// rows to a rank that was lost meanwhile, and that another rank can compute, gives nothing:
    /// the next call computes it anew.
    bool step();
    /// What is new; may be empty. After FinishReason other than None the id is forgotten. Throws
    /// Error{InvalidArgument} for an id that is not known.
    AnswerPart poll(RequestId id);
    /// Ends a request; the next poll says Cancelled. Nothing happens where it has ended already.
    void cancel(RequestId id);

    const ModelConfig& model() const noexcept;
    std::uint64_t max_context() const noexcept;
    std::uint64_t cache_tokens() const noexcept;
    EngineCounters counters() const;
    MemoryReport memory_report() const;
    Device& device() const noexcept;

    struct Impl; ///< internal

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
