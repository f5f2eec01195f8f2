// SPDX-License-Identifier: MIT
#include <bellows/serve/engine.hpp>

#include "forward.hpp"
#include "model_source.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/serve/stop_strings.hpp>

#include <algorithm>
#include <deque>
#include <exception>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

namespace bellows {

namespace {

constexpr std::uint64_t kMostDefaultContext = 4096;

EngineOptions completed(EngineOptions options, const ModelConfig& model) {
    if (options.max_context == 0)
        options.max_context = model.max_context > 0
                                  ? std::min(model.max_context, kMostDefaultContext)
                                  : kMostDefaultContext;
    if (model.max_context > 0 && options.max_context > model.max_context)
        throw Error(ErrorCode::InvalidArgument,
                    "a context of " + std::to_string(options.max_context) +
                        " tokens is more than the model has, " + std::to_string(model.max_context));
    options.token_budget = std::max(options.token_budget, options.max_sequences);
    if (options.draft != DraftKind::None)
        options.overlap_steps = false;
    if (options.world != nullptr) {
        const std::uint64_t most = ExpertRanks::kHalves * options.exchange_tokens;
        if (options.max_sequences > most)
            throw Error(ErrorCode::InvalidArgument,
                        std::to_string(options.max_sequences) +
                            " sequences at once are more than " + std::to_string(most) +
                            " tokens, two halves of exchange_tokens, which ranks send in a step: "
                            "raise exchange_tokens or lower max_sequences");
        options.token_budget = std::min(options.token_budget, most);
    }
    // A step has rows for the next power of two, so answers and prompts are to fill one together.
    const std::uint64_t half = div_up(options.token_budget, 2);
    if (options.prefill_beside == 0)
        options.prefill_beside = half - std::min(options.max_sequences, half / 2);
    return options;
}

/// Blocks of a cache that takes at most nine tenths of the free memory, or as many as are asked
/// for.
std::uint64_t blocks_of(const Device& device, const EngineOptions& options,
                        const ModelConfig& model, DType stored) {
    const std::uint64_t per_sequence = div_up(options.max_context, kBlockTokens);
    if (options.cache_tokens > 0)
        return div_up(options.cache_tokens, kBlockTokens);
    const MemoryReport report = device.memory_report();
    const std::uint64_t used = std::max(report.used_bytes, report.held_bytes),
                        room = report.budget_bytes > used ? report.budget_bytes - used : 0,
                        block =
                            model.all_layers() * ops::cache_bytes(cache_shape(model, stored), 1);
    return std::clamp(room / 10 * 9 / block, per_sequence, per_sequence * options.max_sequences);
}

/// Of each layer with experts, checked; empty where every expert is in its plain place.
std::vector<ExpertPlacement> placements_of(const EngineOptions& options, const ModelConfig& model) {
    if (options.placement.empty())
        return {};
    if (options.world == nullptr)
        throw Error(ErrorCode::InvalidArgument,
                    "a placement of experts is for ranks that share them: set EngineOptions::world "
                    "or leave EngineOptions::placement empty");
    if (options.placement.size() != model.moe_layers())
        throw Error(ErrorCode::InvalidArgument,
                    "a placement of experts has tables of " +
                        std::to_string(options.placement.size()) + " layers, but the model has " +
                        std::to_string(model.moe_layers()) + " layers with experts");
    return placements_of_tables(options.placement, model.routed_experts,
                                static_cast<std::uint64_t>(options.world->size()));
}

ParameterStore load_part(const ModelSource& source, Device& device, const EngineOptions& options,
                         const std::vector<ExpertPlacement>& placements) {
    ModelSource::Part part{.placements = placements};
    if (options.world != nullptr) {
        part.rank = static_cast<std::uint64_t>(options.world->rank());
        part.ranks = static_cast<std::uint64_t>(options.world->size());
    }
    return source.load(device, options.exact, options.on_progress, part);
}

ModelConfig with_modules(ModelConfig model, DraftKind draft) {
    model.mtp_depth = draft == DraftKind::Mtp ? 1 : 0;
    return model;
}

/// A short name of a placement, another one of another table.
std::string placement_text(const std::vector<ExpertPlacement>& placements) {
    if (placements.empty())
        return "";
    std::uint64_t hash = 0xcbf29ce484222325u; // FNV-1a
    for (const ExpertPlacement& placement : placements)
        for (const std::int32_t expert : placement.expert_of_slot)
            hash = (hash ^ static_cast<std::uint32_t>(expert)) * 0x100000001b3u;
    return " in " + std::to_string(placements.front().num_slots()) + " slots by placement " +
           std::to_string(hash);
}

/// What all ranks must have in common, as text.
std::string common_text(const ModelConfig& model, const ParameterStore& parameters,
                        const EngineOptions& options,
                        const std::vector<ExpertPlacement>& placements) {
    return std::to_string(options.exchange_tokens) + " exchange tokens" +
           (options.exact ? ", exact" : "") +
           (options.draft == DraftKind::Mtp ? ", drafts by an MTP module" : "") + ", " +
           std::to_string(model.layers) + " layers of " + std::to_string(model.hidden) + ", " +
           std::to_string(model.routed_experts) + " experts" + placement_text(placements) + ", " +
           to_string(parameters.activation()) + ", " +
           (parameters.linear_precision() == LinearPrecision::Fp8 ? "FP8" : "not FP8") +
           ", products " + fp8::describe(parameters.device(), parameters.products());
}

} // namespace

DraftKind draft_kind(std::string_view text) {
    if (text == "none")
        return DraftKind::None;
    if (text == "mtp")
        return DraftKind::Mtp;
    throw Error(ErrorCode::InvalidArgument,
                "there are no drafts of kind " + in_quotes(text) + "; there are: none, mtp");
}

struct Engine::Impl {
    struct Asked {
        std::optional<AnswerText> text;
        /// With penalties: tokens of the text, and how often the answer has each.
        std::map<std::uint32_t, std::uint32_t> counts;
        bool penalised = false;
        AnswerPart news;
        bool log_probs = false;
        bool degraded = false;
        std::uint32_t top = 0;
    };

    Impl(const DeviceOptions& device_options, ModelSource from, const EngineOptions& wanted);

    /// Steps that the device has been given, or that could not be given to it.
    struct Started {
        Step step;
        std::exception_ptr error;
    };

    /// Among ranks: a step that is to be computed again (StepOutput::again). What it reads stays.
    struct Unfinished {
        Step step{};
        StepInput input{};
    };

    std::optional<ExpertRanks> join_ranks();
    void start(Step step);
    bool finish_first();
    void fail(const Step& step);
    bool take_all(const Step& step, const StepOutput& output);
    bool step_among_ranks();
    StepInput input_of(const Step& step);
    void add_sampled(const StepSequence& sequence, std::uint64_t row, StepInput& input);
    void add_next_tokens(const StepSequence& sequence, StepInput& input);
    void take(const DrawnToken& result, const StepOutput& output);
    void take_losses(const Step& step, const StepOutput& output);
    void finish(Asked& asked, FinishReason reason, const RequestUsage& usage);

    ModelSource source;
    EngineOptions options;
    std::vector<ExpertPlacement> placements;
    std::unique_ptr<Device> device;
    ParameterStore parameters;
    std::optional<ExpertRanks> ranks;
    DType cache_type;
    std::uint64_t blocks; ///< in what weights and the exchange with the experts leave
    Scheduler scheduler;
    std::optional<Forward> forward;
    std::deque<Started> started; ///< at most Forward::kMostStarted
    std::optional<Unfinished> unfinished;
    std::unordered_map<RequestId, Asked> asked;
    RequestId next_id = 1;
    EngineCounters counted;
};

Engine::Impl::Impl(const DeviceOptions& device_options, ModelSource from,
                   const EngineOptions& wanted)
    : source(std::move(from)), options(completed(wanted, source.model())),
      placements(placements_of(options, source.model())), device(Device::create(device_options)),
      parameters(load_part(source, *device, options, placements)), ranks(join_ranks()),
      cache_type(options.cache_type.value_or(parameters.activation())),
      blocks(blocks_of(*device, options, source.model(), cache_type)),
      scheduler(SchedulerConfig{.blocks = blocks,
                                .max_context = options.max_context,
                                .token_budget = options.token_budget,
                                .max_sequences = options.max_sequences,
                                .prefill_chunk = options.prefill_chunk,
                                .prefill_beside = options.prefill_beside,
                                .prefix_reuse = options.prefix_reuse,
                                .forced_acceptance = options.forced_acceptance}) {
    ForwardConfig config;
    config.max_context = options.max_context;
    config.blocks = blocks;
    config.most_drawn = options.max_sequences * (options.draft == DraftKind::None ? 1 : 2);
    config.cache = cache_type;
    config.exact = options.exact;
    config.overlaps = options.overlap_steps;
    config.timeout = options.timeout;
    if (options.tokenizer != nullptr)
        for (std::uint32_t id = 0; id < source.model().vocabulary; ++id)
            if (id >= options.tokenizer->vocabulary() || !options.tokenizer->has_token(id))
                config.forbidden.push_back(id);
    forward.emplace(source.model(), parameters, config, ranks ? &*ranks : nullptr);
}

std::optional<ExpertRanks> Engine::Impl::join_ranks() {
    if (options.world == nullptr)
        return std::nullopt;
    return std::optional<ExpertRanks>(
        std::in_place, *device, *options.world, source.model(), parameters,
        ExpertRanks::Config{.max_tokens = options.exchange_tokens,
                            .exact = options.exact,
                            .placements = placements,
                            .timeout = options.timeout,
                            .same = common_text(source.model(), parameters, options, placements)});
}

/// Draws the next token of the `row`th of a sequence's tokens, as if those behind it were not
/// there.
void Engine::Impl::add_sampled(const StepSequence& sequence, std::uint64_t row, StepInput& input) {
    const Request& request = scheduler.request(sequence.id);
    const SamplingParams& s = request.sampling;
    const Asked& a = asked.at(sequence.id);
    ops::SampleSettings settings;
    settings.temperature = static_cast<float>(s.temperature);
    settings.top_p = static_cast<float>(s.top_p);
    settings.min_p = static_cast<float>(s.min_p);
    settings.top_k = s.top_k;
    settings.repetition_penalty = static_cast<float>(s.repetition_penalty);
    settings.frequency_penalty = static_cast<float>(s.frequency_penalty);
    settings.presence_penalty = static_cast<float>(s.presence_penalty);
    settings.position = static_cast<std::uint32_t>(sequence.position + row + 1);
    settings.seed_low = static_cast<std::uint32_t>(s.seed);
    settings.seed_high = static_cast<std::uint32_t>(s.seed >> 32);
    std::map<std::uint32_t, std::uint32_t> counts = a.counts;
    for (std::uint64_t draft = sequence.tokens.size() - sequence.drafts;
         a.penalised && draft <= row; ++draft) // what it is drawn behind, if they are accepted
        ++counts[sequence.tokens[draft]];
    settings.history_first = static_cast<std::uint32_t>(input.history.size());
    settings.history_count = static_cast<std::uint32_t>(counts.size());
    for (const auto& [token, count] : counts)
        input.history.push_back({token, count});
    settings.bias_first = static_cast<std::uint32_t>(input.biases.size());
    settings.bias_count = static_cast<std::uint32_t>(s.logit_bias.size());
    for (const LogitBias& bias : s.logit_bias)
        input.biases.push_back({bias.token, static_cast<float>(bias.bias)});
    input.settings.push_back(settings);
    if (options.draft != DraftKind::None) {
        ++settings.position;
        input.draft_settings.push_back(settings);
    }
    input.sampled_rows.push_back(
        static_cast<std::uint32_t>(input.tokens.size() - sequence.tokens.size() + row));
    input.top_log_probs = std::max(input.top_log_probs, a.top);
}

/// Of each row of a sequence, the token behind it: what it draws, or what stands there.
void Engine::Impl::add_next_tokens(const StepSequence& sequence, StepInput& input) {
    const std::uint64_t rows = sequence.tokens.size(), known = rows - sequence.num_sampled();
    for (std::uint64_t row = 0; row < rows; ++row)
        input.next_tokens.push_back(
            row >= known ? ops::kDrawnBefore +
                               static_cast<std::uint32_t>(input.sampled_rows.size() + row - known)
            : row + 1 < rows ? sequence.tokens[row + 1]
                             : sequence.next);
}

StepInput Engine::Impl::input_of(const Step& step) {
    StepInput input;
    for (const StepSequence& sequence : step.sequences()) {
        for (std::uint64_t i = 0; i < sequence.tokens.size(); ++i) {
            const std::uint64_t position = sequence.position + i;
            input.tokens.push_back(sequence.tokens[i]);
            input.positions.push_back(static_cast<std::uint32_t>(position));
            const std::uint64_t place =
                sequence.blocks[position / kBlockTokens] * kBlockTokens + position % kBlockTokens;
            input.places.push_back(position < sequence.written ? ops::kNoPlace
                                                               : static_cast<std::uint32_t>(place));
        }
        input.queries.push_back({.rows = sequence.tokens.size(),
                                 .keys = sequence.position + sequence.tokens.size(),
                                 .sequence = static_cast<std::uint32_t>(input.tables.size())});
        input.tables.push_back(sequence.blocks);
        if (options.draft != DraftKind::None)
            add_next_tokens(sequence, input);
        for (std::uint64_t i = sequence.num_sampled(); i > 0; --i)
            add_sampled(sequence, sequence.tokens.size() - i, input);
    }
    return input;
}

void Engine::Impl::finish(Asked& a, FinishReason reason, const RequestUsage& usage) {
    if (a.text && !a.text->stopped())
        a.news.text += a.text->finish();
    a.news.reason = reason;
    a.news.usage = usage;
}

void Engine::Impl::take(const DrawnToken& result, const StepOutput& output) {
    Asked& a = asked.at(result.id);
    if (a.news.reason != FinishReason::None) // a stop string was complete with the token before
        return;
    const std::size_t row = result.draw;
    a.news.usage = result.usage;
    if (result.reason == FinishReason::Failed)
        return finish(a, result.reason, result.usage);
    a.news.tokens.push_back(result.token);
    ++counted.generated_tokens;
    if (a.penalised)
        ++a.counts[result.token];
    if (a.log_probs) {
        std::vector<TokenLogProb>& of = a.news.log_probs.emplace_back();
        of.push_back({result.token, output.log_probs[row]});
        const std::size_t width =
            output.tokens.empty() ? 0 : output.top_tokens.size() / output.tokens.size();
        for (std::size_t i = 0; i < a.top; ++i)
            of.push_back(
                {output.top_tokens[row * width + i], output.top_log_probs[row * width + i]});
    }
    if (a.text && result.reason != FinishReason::EndToken) {
        a.news.text += a.text->add({&result.token, 1});
        if (a.text->stopped()) {
            if (result.reason == FinishReason::None)
                (void)scheduler.end(result.id);
            return finish(a, FinishReason::StopString, result.usage);
        }
    }
    if (result.reason != FinishReason::None)
        finish(a, result.reason, result.usage);
}

/// A rank is lost: what becomes of the requests whose rows have chosen its experts.
void Engine::Impl::take_losses(const Step& step, const StepOutput& output) {
    if (std::ranges::find(output.lacking, 1) == output.lacking.end())
        return;
    scheduler.stop_reuse();
    auto row = output.lacking.begin();
    for (const StepSequence& sequence : step.sequences()) {
        const auto end = row + static_cast<std::ptrdiff_t>(sequence.tokens.size());
        const bool lacks = std::find(row, end, 1) != end;
        row = end;
        if (!lacks)
            continue;
        Asked& a = asked.at(sequence.id);
        a.degraded = true;
        if (options.allow_degraded)
            continue;
        if (const auto usage = scheduler.end(sequence.id))
            finish(a, FinishReason::Failed, *usage);
    }
}

Engine::Engine(const DeviceOptions& device, const std::filesystem::path& checkpoint,
               const EngineOptions& options)
    : impl_(std::make_unique<Impl>(
          device, ModelSource(checkpoint, options.precision, options.draft == DraftKind::Mtp),
          options)) {
}

Engine::Engine(const DeviceOptions& device, const ModelConfig& model, std::uint64_t seed,
               const EngineOptions& options)
    : impl_(std::make_unique<Impl>(device,
                                   ModelSource(with_modules(model, options.draft), seed,
                                               options.precision.value_or(Precision::BF16)),
                                   options)) {
}

Engine::~Engine() = default;

RequestId Engine::submit(Request request) {
    Impl& e = *impl_;
    validate(request, e.source.model().vocabulary);
    if (!request.stop.empty() && e.options.tokenizer == nullptr)
        throw Error(ErrorCode::InvalidArgument,
                    "stop strings need a tokenizer: give EngineOptions::tokenizer one");
    const RequestId id = e.next_id++;
    Impl::Asked a;
    if (e.options.tokenizer != nullptr)
        a.text.emplace(*e.options.tokenizer, request.stop);
    a.penalised = has_penalties(request.sampling);
    if (a.penalised)
        for (const std::uint32_t token : request.prompt)
            a.counts.emplace(token, 0);
    a.log_probs = request.log_probs;
    a.top = request.log_probs ? request.top_log_probs : 0;
    e.scheduler.submit(id, std::move(request));
    e.asked.emplace(id, std::move(a));
    return id;
}

void Engine::Impl::fail(const Step& step) {
    for (const DrawnToken& result : scheduler.fail(step))
        finish(asked.at(result.id), FinishReason::Failed, result.usage);
}

/// Takes what a step gave. False: all its rows were in vain, as their requests have ended
/// meanwhile.
bool Engine::Impl::take_all(const Step& step, const StepOutput& output) {
    std::uint64_t vain = 0;
    for (const StepSequence& sequence : step.sequences())
        vain += scheduler.has(sequence.id) ? 0 : sequence.tokens.size();
    ++counted.steps;
    counted.computed_tokens += step.num_tokens() - vain;
    counted.vain_tokens += vain;
    take_losses(step, output);
    std::uint64_t drawn = 0; // by requests that have not ended, without accepted drafts
    for (const StepSequence& sequence : step.sequences())
        if (sequence.samples && scheduler.has(sequence.id)) {
            ++drawn;
            counted.drafted += sequence.drafts;
        }
    const std::vector<DrawnToken> results = scheduler.finish(step, output.tokens, output.drafts);
    counted.accepted += results.size() - drawn;
    for (const DrawnToken& result : results)
        take(result, output);
    return vain < step.num_tokens();
}

bool Engine::Impl::step_among_ranks() {
    const bool anew = unfinished.has_value();
    Unfinished current =
        anew ? std::move(*std::exchange(unfinished, std::nullopt)) : Unfinished{scheduler.next()};
    const Step& step = current.step;
    StepOutput output;
    try {
        if (!anew) {
            current.input = input_of(step);
            counted.preemptions += step.preempted().size();
        }
        const RankStep all = ranks->agree(step.num_tokens());
        if (!all.work)
            return false;
        output = forward->run(current.input, all.halves);
    } catch (...) {
        fail(step);
        throw;
    }
    if (output.again)
        unfinished = std::move(current);
    else if (!step.empty()) // else it was for the others
        (void)take_all(step, output);
    return true;
}

/// Hands a step to the device. What goes wrong is thrown when the step's turn comes to be finished:
/// the one before may have results.
void Engine::Impl::start(Step step) {
    if (step.empty())
        return;
    counted.preemptions += step.preempted().size();
    std::exception_ptr error;
    try {
        forward->start(input_of(step));
        counted.overlapped += started.empty() ? 0 : 1;
    } catch (...) {
        error = std::current_exception();
    }
    started.push_back({std::move(step), error});
}

/// Waits for the step that was started first and takes what it gives; as take_all().
bool Engine::Impl::finish_first() {
    const Started first = std::move(started.front());
    started.pop_front();
    StepOutput output;
    try {
        if (first.error)
            std::rethrow_exception(first.error);
        output = forward->finish();
    } catch (...) {
        fail(first.step);
        for (const Started& behind : started) // it reads what the first should have written
            fail(behind.step);
        started.clear();
        forward->drop();
        throw;
    }
    return take_all(first.step, output);
}

bool Engine::step() {
    Impl& e = *impl_;
    if (e.ranks)
        return e.step_among_ranks();
    do {
        if (e.started.empty())
            e.start(e.scheduler.next());
        if (e.started.empty())
            return false;
        if (e.options.overlap_steps && !e.started.front().error)
            e.start(e.scheduler.ahead());
    } while (!e.finish_first());
    return true;
}

AnswerPart Engine::poll(RequestId id) {
    const auto found = impl_->asked.find(id);
    if (found == impl_->asked.end())
        throw Error(ErrorCode::InvalidArgument,
                    "there is no request " + std::to_string(id) + ", or its answer has ended");
    AnswerPart news = std::move(found->second.news);
    news.degraded = found->second.degraded;
    if (news.reason != FinishReason::None) {
        impl_->asked.erase(found);
    } else {
        found->second.news = {};
        news.usage = impl_->scheduler.usage(id);
    }
    return news;
}

void Engine::cancel(RequestId id) {
    const auto found = impl_->asked.find(id);
    if (found == impl_->asked.end() || found->second.news.reason != FinishReason::None)
        return;
    if (const auto usage = impl_->scheduler.end(id))
        impl_->finish(found->second, FinishReason::Cancelled, *usage);
}

const ModelConfig& Engine::model() const noexcept {
    return impl_->source.model();
}
std::uint64_t Engine::max_context() const noexcept {
    return impl_->options.max_context;
}
std::uint64_t Engine::cache_tokens() const noexcept {
    return impl_->blocks * kBlockTokens;
}

EngineCounters Engine::counters() const {
    EngineCounters all = impl_->counted;
    all.blocks = impl_->scheduler.counters();
    all.running = impl_->scheduler.num_running();
    all.waiting = impl_->scheduler.num_waiting();
    all.recordings = impl_->forward->num_recordings();
    return all;
}

MemoryReport Engine::memory_report() const {
    return impl_->device->memory_report();
}
Device& Engine::device() const noexcept {
    return *impl_->device;
}

} // namespace bellows
