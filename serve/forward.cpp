// SPDX-License-Identifier: MIT
#include "forward.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/few_rows.hpp>
#include <bellows/shape/parameters.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

namespace bellows {

namespace {

/// Blocks of a part of a sequence in the exact mode: fewer give a device more to do at once where
/// one sequence is decoded, more have less to combine where a long prompt is read.
constexpr std::uint64_t kExactSplit = 16;
/// Rows of each expert that products are taken for in the exact mode.
constexpr std::uint64_t kExactExpertRows = 64;
constexpr std::uint64_t kWord = sizeof(std::uint32_t);
/// Sections begin at multiples of so many words.
constexpr std::uint64_t kSection = 64;

std::uint64_t up(std::uint64_t count) {
    return count == 0 ? 0 : std::bit_ceil(count);
}

} // namespace

/// Where the parts of a step's input and output stand, in words.
struct Forward::Layout {
    /// choices: of each row, which the host is told.
    Layout(const Bucket& b, std::uint64_t table_blocks, std::uint64_t choices, bool drafts);

    struct Part {
        std::uint64_t first = 0, words = 0;
        BufferView of(const Buffer& buffer) const {
            return buffer.view().sub(first * kWord, words * kWord);
        }
    };
    Part count, tokens, positions, places, items, row_parts, tables, sampled_rows, settings,
        history, biases, next_tokens, draft_settings;
    std::uint64_t input_words = 0;
    Part out_log_probs, out_top, out_top_log_probs, out_drafts;
    Part out_choices; ///< [layers of experts, rows, top_k] i32
    std::uint64_t output_words = 0;
};

Forward::Layout::Layout(const Bucket& b, std::uint64_t table_blocks, std::uint64_t choices,
                        bool drafts) {
    const auto place = [](std::uint64_t& end, Part& part, std::uint64_t words) {
        part = {end, words};
        end += round_up(words, kSection);
    };
    place(input_words, count, 1);
    place(input_words, tokens, b.rows);
    place(input_words, positions, b.rows);
    place(input_words, places, b.rows);
    place(input_words, items, (b.items + 1) * ops::PagedPlan::kItemWords);
    place(input_words, row_parts, b.rows * ops::PagedPlan::kRowWords);
    place(input_words, tables, b.sequences * table_blocks);
    place(input_words, sampled_rows, b.sampled);
    place(input_words, settings, b.sampled * (sizeof(ops::SampleSettings) / kWord));
    place(input_words, history, b.history * 2);
    place(input_words, biases, b.biases * 2);
    place(input_words, next_tokens, drafts ? b.rows : 0);
    place(input_words, draft_settings,
          drafts ? b.sampled * (sizeof(ops::SampleSettings) / kWord) : 0);
    place(output_words, out_log_probs, b.sampled);
    place(output_words, out_top, b.sampled * b.top);
    place(output_words, out_top_log_probs, b.sampled * b.top);
    place(output_words, out_choices, b.rows * choices);
    place(output_words, out_drafts, drafts ? b.sampled : 0);
}

struct Forward::Step {
    Bucket bucket;
    Layout layout;
    /// Up to what goes to the ranks of a layer's experts, and what the shared experts make
    /// meanwhile; last, up to the sampled tokens.
    struct Part {
        std::unique_ptr<Recording> before, shared;
    };
    std::vector<Part> parts;
    std::vector<CachedExperts::Routed> routed; ///< of each part but the last
    std::vector<TensorView> streams;           ///< that the experts of each of these add to
    TensorView stream;                         ///< of the model, without the module
    std::uint64_t last_used = 0;               ///< a step's number

    BufferView choices_of(std::uint64_t layer, const Half& half) const;
};

/// Memory of the rows that are computed together, and the recordings that name it.
struct Forward::Half {
    explicit Half(Arena& scratch) : arena(scratch) {}

    Arena& arena;
    /// What the host writes, and its copy on the device.
    Buffer upload, input;
    Buffer drawn; ///< tokens, which the host reads, and the step behind this one
    Buffer output;
    const Half* before = nullptr; ///< of the step before, which may be running still
    TimePoint done;               ///< of the last step that was started with it
    std::map<Bucket, std::unique_ptr<Step>> recordings;
};

/// A half of a step that is computed; without rows it has no recordings.
struct Forward::Running {
    StepInput input;
    Half* half = nullptr;
    Step* step = nullptr;
    TimePoint done;

    std::uint64_t rows() const { return input.tokens.size(); }
};

/// Where the host is told what rows have chosen in the so-manyth layer of experts.
BufferView Forward::Step::choices_of(std::uint64_t layer, const Half& half) const {
    const std::uint64_t words = routed[layer].ids.num_elements();
    return half.output.view().sub((layout.out_choices.first + layer * words) * kWord,
                                  words * kWord);
}

Forward::Forward(const ModelConfig& config, ParameterStore& parameters,
                 const ForwardConfig& forward, ExpertRanks* ranks)
    : config_(config), parameters_(parameters), forward_(forward), ranks_(ranks),
      keep_choices_(ranks != nullptr && ranks->world().control().outlives_lost_ranks()),
      table_blocks_(div_up(forward.max_context, ops::kCacheBlock)),
      rows_per_item_(ops::paged_rows_per_item(parameters.device(),
                                              cache_shape(config, forward.cache),
                                              parameters.activation(), config.heads)),
      positions_(parameters.device(), config, forward.max_context),
      arrived_(parameters.device(), "experts") {
    Device& device = parameters.device();
    const ops::CacheShape shape = cache_shape(config, forward.cache);
    caches_.reserve(config.all_layers());
    paged_.reserve(config.all_layers());
    for (std::uint64_t layer = 0; layer < config.all_layers(); ++layer) {
        caches_.emplace_back(device, BufferDesc{.name = "cache of layer " + std::to_string(layer),
                                                .bytes = ops::cache_bytes(shape, forward.blocks),
                                                .category = MemoryCategory::Cache});
        paged_.push_back({shape, forward.blocks, caches_.back().view()});
    }
    for (std::uint64_t layer = 0; layer < config.all_layers(); ++layer) {
        attention_.push_back(
            cached_attention(config_, layer, parameters_, positions_, paged_[layer]));
        if (ranks_ != nullptr && config_.is_moe(layer)) {
            auto experts = cached_experts(config_, layer, parameters_);
            experts_.push_back(experts.get());
            ffn_.push_back(std::move(experts));
        } else {
            ffn_.push_back(cached_ffn(config_, layer, parameters_));
        }
    }
    received_.resize(experts_.size());
    static_assert(ExpertRanks::kHalves == kMostStarted);
    for (std::uint64_t i = 0; i < kMostStarted; ++i) {
        if (i == 0 || ranks_ != nullptr) // halves run at the same time, steps one after another
            arenas_.emplace_back(device, "step");
        halves_.push_back(std::make_unique<Half>(arenas_.back()));
        halves_.back()->drawn = Buffer(device, {.name = "tokens that a step draws",
                                                .bytes = up(forward_.most_drawn) * kWord,
                                                .kind = MemoryKind::Readback,
                                                .category = MemoryCategory::Activations});
    }
    if (ranks_ == nullptr)
        for (std::uint64_t i = 0; i < kMostStarted; ++i)
            halves_[i]->before = halves_[1 - i].get();
    std::vector<std::uint32_t> allowed(div_up(config.vocabulary, 32), ~std::uint32_t{0});
    for (const std::uint32_t token : forward_.forbidden)
        if (token < config.vocabulary)
            allowed[token / 32] &= ~(std::uint32_t{1} << token % 32);
    allowed_ = Buffer(device, {.name = "tokens that may be drawn",
                               .bytes = allowed.size() * kWord,
                               .category = MemoryCategory::Weights});
    device.upload(allowed_.view(), std::span<const std::uint32_t>(allowed));
}

Forward::~Forward() = default;

std::uint64_t Forward::split_blocks(const StepInput& input) const {
    // On a CPU parts cost more than they bring.
    if (forward_.exact || parameters_.device().info().is_cpu)
        return kExactSplit;
    // A workgroup for each part: so many blocks that all of them together take least time, where a
    // processor has one workgroup after another, and each takes a block's time and a third to begin
    // and end (measured on an H200). Many more parts than processors would only cost memory.
    constexpr std::uint64_t kUsualProcessors = 132, kBlockCost = 3, kPartCost = 4, kMostTurns = 4;
    const std::uint64_t known = parameters_.device().info().processors,
                        processors = known != 0 ? known : kUsualProcessors;
    std::uint64_t best = 1, least = ~std::uint64_t{0};
    for (std::uint64_t split = 1;; split += std::max<std::uint64_t>(split / 4, 1)) {
        std::uint64_t parts = 0, longest = 0;
        for (const ops::PagedQueries& q : input.queries) {
            const std::uint64_t blocks = div_up(q.keys, ops::kCacheBlock);
            parts += div_up(blocks, split) * div_up(q.rows, rows_per_item_);
            longest = std::max(longest, std::min(blocks, split));
        }
        const std::uint64_t turns = div_up(parts, processors);
        const std::uint64_t cost = turns * (longest * kBlockCost + kPartCost);
        const bool whole = longest < split;
        if (cost < least && (turns <= kMostTurns || whole)) {
            least = cost;
            best = split;
        }
        if (whole || turns <= 1) // larger ones do not end sooner
            return best;
    }
}

Forward::Bucket Forward::bucket_of(const StepInput& input, const ops::PagedPlan& plan) const {
    Bucket b;
    b.rows = up(input.tokens.size());
    b.sequences = up(input.tables.size());
    b.sampled = up(input.sampled_rows.size());
    b.items = up(plan.num_items());
    b.partials = up(plan.partials);
    b.history = up(input.history.size());
    b.biases = up(input.biases.size());
    b.top = b.sampled > 0 ? input.top_log_probs : 0;
    return b;
}

Forward::Layout Forward::layout_of(const Bucket& bucket) const {
    return Layout(bucket, table_blocks_, keep_choices_ ? experts_.size() * config_.top_k : 0,
                  drafts());
}

void Forward::write(const StepInput& input, const ops::PagedPlan& plan, const Layout& layout,
                    Half& half) {
    const auto words = half.upload.mapped_as<std::uint32_t>();
    const auto put = [&](const Layout::Part& part, const auto& values, std::uint32_t rest = 0) {
        using Value = typename std::remove_cvref_t<decltype(values)>::value_type;
        static_assert(sizeof(Value) % kWord == 0);
        const std::uint64_t count = values.size() * (sizeof(Value) / kWord);
        if (count > 0)
            std::memcpy(words.data() + part.first, values.data(), count * kWord);
        std::fill_n(words.data() + part.first + count, part.words - count, rest);
    };
    words[layout.count.first] = static_cast<std::uint32_t>(input.tokens.size());
    put(layout.tokens, input.tokens);
    put(layout.positions, input.positions);
    put(layout.places, input.places, ops::kNoPlace);
    put(layout.items, plan.items);
    put(layout.row_parts, plan.rows);
    for (std::uint64_t i = 0; i < input.tables.size(); ++i)
        std::memcpy(words.data() + layout.tables.first + i * table_blocks_, input.tables[i].data(),
                    input.tables[i].size_bytes());
    put(layout.sampled_rows, input.sampled_rows);
    put(layout.settings, input.settings);
    put(layout.history, input.history);
    put(layout.biases, input.biases);
    put(layout.next_tokens, input.next_tokens);
    put(layout.draft_settings, input.draft_settings);
}

void Forward::reserve(const Layout& layout, Half& half) {
    const auto grow = [&](Buffer& buffer, std::uint64_t words, const char* name, MemoryKind kind) {
        const std::uint64_t bytes = round_up(words * kWord, 4096);
        if (buffer && buffer.size() >= bytes)
            return;
        half.recordings.clear(); // they name the old memory
        buffer = Buffer(parameters_.device(), {.name = name,
                                               .bytes = std::bit_ceil(bytes),
                                               .kind = kind,
                                               .category = MemoryCategory::Activations});
    };
    grow(half.upload, layout.input_words, "input of a step, on the host", MemoryKind::Upload);
    grow(half.input, layout.input_words, "input of a step", MemoryKind::Device);
    grow(half.output, layout.output_words, "output of a step", MemoryKind::Readback);
}

TensorView Forward::drawn(const Half& half, std::uint64_t count) const {
    return TensorView::contiguous(half.drawn.view().sub(0, count * kWord), DType::U32, {count});
}

namespace {

TensorView u32(BufferView memory, std::initializer_list<std::uint64_t> extents) {
    return TensorView::contiguous(memory, DType::U32, extents);
}
TensorView f32(BufferView memory, std::initializer_list<std::uint64_t> extents) {
    return TensorView::contiguous(memory, DType::F32, extents);
}

} // namespace

/// The logits of the sampled rows of a stream, [sampled, vocabulary].
TensorView Forward::record_logits(Recording& r, Arena::Frame& scratch, const Step& step,
                                  const Half& half, const TensorView& stream,
                                  const TensorView& gain) const {
    const std::uint64_t sampled = step.bucket.sampled;
    const TensorView x = scratch.tensor(stream.dtype, {sampled, config_.hidden}),
                     // Kernels read four at once.
        padded = scratch.tensor(DType::F32, {sampled, round_up(config_.vocabulary, 4)}),
                     logits = ops::slice(padded, 1, 0, config_.vocabulary);
    ops::embedding_forward(r, u32(step.layout.sampled_rows.of(half.input), {sampled}), stream, x);
    const TensorView weights =
        parameters_.at(config_.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight")
            .compute;
    const auto eps = static_cast<float>(config_.norm_eps);
    if (!forward_.exact && sampled <= fp8::few_rows_that_pay(r.device(), weights, stream.dtype)) {
        fp8::few_rows_nt(r, x, weights, logits, {.gain = gain, .eps = eps});
    } else {
        const TensorView norm = scratch.tensor(stream.dtype, {sampled, config_.hidden});
        ops::rmsnorm_forward(r, x, gain, norm, scratch.tensor(DType::F32, {sampled}), eps);
        ops::gemm_nt(r, norm, weights, logits);
    }
    return logits;
}

/// Without what comes out.
ops::SampleBatch Forward::sample_batch(const Step& step, const Half& half, const TensorView& logits,
                                       BufferView settings) const {
    const Bucket& b = step.bucket;
    const Layout& at = step.layout;
    ops::SampleBatch batch;
    batch.logits = logits;
    batch.settings = u32(settings, {b.sampled, sizeof(ops::SampleSettings) / kWord});
    if (b.history > 0)
        batch.history = u32(at.history.of(half.input), {b.history, 2});
    if (b.biases > 0)
        batch.biases = u32(at.biases.of(half.input), {b.biases, 2});
    batch.allowed = allowed_.tensor(DType::U32, {div_up(config_.vocabulary, 32)});
    return batch;
}

void Forward::record_head(Recording& r, Arena::Frame& scratch, const Step& step, const Half& half) {
    const Bucket& b = step.bucket;
    const Layout& at = step.layout;
    const TensorView logits = record_logits(r, scratch, step, half, step.stream,
                                            parameters_.at("model.norm.weight").weight);
    ops::SampleBatch batch = sample_batch(step, half, logits, at.settings.of(half.input));
    batch.tokens = drawn(half, b.sampled);
    batch.log_probs = f32(at.out_log_probs.of(half.output), {b.sampled});
    if (b.top > 0) {
        batch.top_tokens = u32(at.out_top.of(half.output), {b.sampled, b.top});
        batch.top_log_probs = f32(at.out_top_log_probs.of(half.output), {b.sampled, b.top});
    }
    ops::sample(r, batch,
                scratch.bytes(ops::sample_workspace_bytes(b.sampled, config_.vocabulary)));
}

/// A draft is drawn as the next step will draw the token in its place: by the same seed and
/// position, so that the two are the same as often as their logits allow it.
void Forward::record_draft(Recording& r, Arena::Frame& scratch, const Step& step, const Half& half,
                           const TensorView& stream) {
    const Bucket& b = step.bucket;
    const Layout& at = step.layout;
    const TensorView logits =
        record_logits(r, scratch, step, half, stream, of_module("shared_head.norm.weight").weight);
    ops::SampleBatch batch = sample_batch(step, half, logits, at.draft_settings.of(half.input));
    batch.tokens = u32(at.out_drafts.of(half.output), {b.sampled});
    batch.log_probs = scratch.tensor(DType::F32, {b.sampled});
    ops::sample(r, batch,
                scratch.bytes(ops::sample_workspace_bytes(b.sampled, config_.vocabulary)));
}

/// What enters the module's layer: of each row the state behind the model's last norm, and the
/// embedding of the token behind it.
void Forward::record_module_input(Recording& r, Arena::Frame& scratch, const Step& step,
                                  const Half& half, const TensorView& out) const {
    const std::uint64_t rows = step.bucket.rows, hidden = config_.hidden;
    const auto eps = static_cast<float>(config_.norm_eps);
    const auto norm = [&](const TensorView& x, const TensorView& gain, const TensorView& y) {
        ops::rmsnorm_forward(r, x, gain, y, scratch.tensor(DType::F32, {rows}), eps);
    };
    const TensorView tokens = u32(step.layout.next_tokens.of(half.input), {rows});
    if (step.bucket.sampled > 0)
        ops::take_drawn(r, drawn(half, step.bucket.sampled), tokens);
    const TensorView embedding = scratch.tensor(out.dtype, {rows, hidden}),
                     state = scratch.tensor(out.dtype, {rows, hidden}),
                     both = scratch.tensor(out.dtype, {rows, 2 * hidden});
    ops::embedding_forward(r, tokens, parameters_.at("model.embed_tokens.weight").compute,
                           embedding);
    norm(embedding, of_module("enorm.weight").weight, ops::slice(both, 1, 0, hidden));
    norm(step.stream, parameters_.at("model.norm.weight").weight, state);
    norm(state, of_module("hnorm.weight").weight, ops::slice(both, 1, hidden, hidden));
    const TensorView& weights = of_module("eh_proj.weight").compute;
    if (!forward_.exact && rows <= fp8::few_rows_that_pay(r.device(), weights, out.dtype))
        fp8::few_rows_nt(r, both, weights, out, {});
    else
        ops::gemm_nt(r, both, weights, out);
}

void Forward::record_module(Step& step, Arena::Frame& scratch, const StepRows& rows,
                            const Half& half) {
    const TensorView stream = scratch.tensor(step.stream.dtype, {step.bucket.rows, config_.hidden});
    Recording& first = *step.parts.back().before;
    first.label("MTP module");
    Arena::Frame input = scratch.nested();
    record_module_input(first, input, step, half, stream);
    scratch.cover(input);
    record_layer(config_.layers, step, scratch, rows, stream, half);
    if (step.bucket.sampled == 0)
        return;
    Recording& last = *step.parts.back().before;
    last.label("MTP head");
    Arena::Frame head = scratch.nested();
    record_draft(last, head, step, half, stream);
    scratch.cover(head);
}

// Parts share scratch: what one keeps for the next stands before it.
void Forward::record_layer(std::uint64_t layer, Step& step, Arena::Frame& scratch,
                           const StepRows& rows, const TensorView& stream, const Half& half) {
    Device& device = parameters_.device();
    const auto begin = [&](const std::string& what) {
        return std::make_unique<Recording>(
            device, QueueRole::Compute, what + " of " + std::to_string(step.bucket.rows) + " rows");
    };
    Recording& r = *step.parts.back().before;
    r.label("attention");
    Arena::Frame part = scratch.nested();
    attention_[layer]->record(r, part, rows, stream);
    scratch.cover(part);
    Arena::Frame ffn = scratch.nested();
    if (ranks_ == nullptr || !config_.is_moe(layer)) {
        r.label("FFN");
        ffn_[layer]->record(r, ffn, rows, stream);
        scratch.cover(ffn);
        return;
    }
    const CachedExperts& experts = *experts_[step.routed.size()];
    r.label("router");
    step.routed.push_back(experts.route(r, ffn, rows, stream));
    step.streams.push_back(stream);
    if (keep_choices_)
        r.copy(step.routed.back().ids.buffer, step.choices_of(step.routed.size() - 1, half));
    if (experts.has_shared()) {
        step.parts.back().shared = begin("shared experts");
        Arena::Frame shared = ffn.nested();
        experts.shared(*step.parts.back().shared, shared, step.routed.back(), stream);
        ffn.cover(shared);
    }
    scratch.cover(ffn);
    step.parts.push_back({begin("layer after " + std::to_string(layer)), nullptr});
}

std::unique_ptr<Forward::Step> Forward::record(const Bucket& bucket, Half& half) {
    const Layout at = layout_of(bucket);
    auto step = std::make_unique<Step>(Step{bucket, at, {}, {}, {}, {}, 0});
    step->parts.push_back(
        {std::make_unique<Recording>(parameters_.device(), QueueRole::Compute,
                                     "step of " + std::to_string(bucket.rows) + " rows, " +
                                         std::to_string(bucket.sequences) + " sequences"),
         nullptr});
    Recording& r = *step->parts.back().before;
    const auto input = [&](const Layout::Part& part, std::initializer_list<std::uint64_t> extents) {
        return u32(part.of(half.input), extents);
    };
    r.copy(half.upload.view().sub(0, at.input_words * kWord),
           half.input.view().sub(0, at.input_words * kWord));
    Arena::Frame scratch = half.arena.begin();
    StepRows rows;
    rows.rows = bucket.rows;
    rows.count = at.count.of(half.input);
    rows.positions = input(at.positions, {bucket.rows});
    rows.places = input(at.places, {bucket.rows});
    rows.work.capacity = {bucket.rows, bucket.items, bucket.partials};
    rows.work.items = input(at.items, {at.items.words});
    rows.work.rows = input(at.row_parts, {bucket.rows, ops::PagedPlan::kRowWords});
    rows.work.tables = input(at.tables, {bucket.sequences, table_blocks_});
    if (forward_.exact)
        rows.expected_expert_rows = kExactExpertRows;
    if (half.before != nullptr)
        ops::take_drawn(r, drawn(*half.before, up(forward_.most_drawn)),
                        input(at.tokens, {bucket.rows}));
    step->stream = scratch.tensor(parameters_.activation(), {bucket.rows, config_.hidden});
    ops::embedding_forward(r, input(at.tokens, {bucket.rows}),
                           parameters_.at("model.embed_tokens.weight").compute, step->stream);
    for (std::uint64_t layer = 0; layer < config_.layers; ++layer)
        record_layer(layer, *step, scratch, rows, step->stream, half);
    if (bucket.sampled > 0) {
        Recording& last = *step->parts.back().before;
        last.label("head");
        Arena::Frame part = scratch.nested();
        record_head(last, part, *step, half);
        scratch.cover(part);
    }
    if (drafts())
        record_module(*step, scratch, rows, half);
    half.arena.reserve(scratch.bytes());
    return step;
}

Forward::Step& Forward::recorded(const Bucket& bucket, Half& half) {
    constexpr std::size_t kMostRecordings = 128;
    auto found = half.recordings.find(bucket);
    if (found == half.recordings.end()) {
        reserve(layout_of(bucket), half);
        if (half.recordings.size() == kMostRecordings) // none is pending: begin() has waited
            half.recordings.erase(std::ranges::min_element(
                half.recordings, {}, [](const auto& entry) { return entry.second->last_used; }));
        found = half.recordings.emplace(bucket, record(bucket, half)).first;
    }
    found->second->last_used = ++steps_;
    return *found->second;
}

std::uint64_t Forward::num_recordings() const noexcept {
    std::uint64_t all = 0;
    for (const auto& half : halves_)
        all += half->recordings.size();
    return all;
}

StepOutput Forward::output_of(const StepInput& input, const Step& step, const Half& half) const {
    const Layout& at = step.layout;
    const auto words = half.output.mapped_as<const std::uint32_t>();
    const std::uint64_t sampled = input.sampled_rows.size();
    const auto take = [&](auto& values, const Layout::Part& part, std::uint64_t count) {
        values.resize(count);
        if (count > 0)
            std::memcpy(values.data(), words.data() + part.first, count * kWord);
    };
    StepOutput out;
    const auto tokens = half.drawn.mapped_as<const std::uint32_t>().first(sampled);
    out.tokens.assign(tokens.begin(), tokens.end());
    take(out.log_probs, at.out_log_probs, sampled);
    take(out.top_tokens, at.out_top, sampled * step.bucket.top);
    take(out.top_log_probs, at.out_top_log_probs, sampled * step.bucket.top);
    take(out.drafts, at.out_drafts, drafts() ? sampled : 0);
    return out;
}

/// Says which rows have lacked an expert, and whether one may have been sent to a rank that was
/// lost meanwhile though another has the expert.
void Forward::note_losses(const Running& half, const std::vector<int>& lost_before,
                          const std::vector<int>& lost, StepOutput& output) const {
    const auto choices = half.half->output.mapped_as<const std::int32_t>().subspan(
        half.step->layout.out_choices.first);
    const auto among = [](const std::vector<int>& ranks) {
        return [&ranks](int rank) { return std::ranges::binary_search(ranks, rank); };
    };
    output.lacking.assign(half.rows(), 0);
    for (std::uint64_t layer = 0; layer < layers_of_answers(); ++layer)
        for (std::uint64_t row = 0; row < half.rows(); ++row)
            for (std::uint64_t k = 0; k < config_.top_k; ++k) {
                const std::int32_t expert =
                    choices[(layer * half.step->bucket.rows + row) * config_.top_k + k];
                const std::vector<int>& owners =
                    ranks_->owners(layer)[static_cast<std::size_t>(expert)];
                const auto gone = std::ranges::count_if(owners, among(lost));
                if (gone == std::ssize(owners))
                    output.lacking[row] = 1;
                else if (gone > std::ranges::count_if(owners, among(lost_before)))
                    output.again = true;
            }
}

Forward::Running Forward::begin(StepInput input, Half& half) {
    Running running{std::move(input), &half, nullptr, {}};
    if (running.rows() == 0)
        return running;
    half.done.wait(forward_.timeout); // as usual it has: an error may have come between
    const ops::PagedPlan plan = ops::plan_paged_attention(
        running.input.queries, split_blocks(running.input), rows_per_item_);
    running.step = &recorded(bucket_of(running.input, plan), half);
    write(running.input, plan, running.step->layout, half);
    return running;
}

/// What this rank's experts of a layer make of what arrives for a half.
Recording& Forward::received(std::uint64_t layer, std::uint64_t half) {
    std::unique_ptr<Recording>& r = received_[layer][half];
    if (!r) {
        r = std::make_unique<Recording>(parameters_.device(), QueueRole::Compute, "experts");
        r->label("experts");
        Arena::Frame scratch = arrived_.begin();
        experts_[layer]->received(*r, scratch, ranks_->handle(half),
                                  forward_.exact ? kExactExpertRows : 0, ranks_->results(half));
        arrived_.reserve(scratch.bytes());
    }
    return *r;
}

// While the rows of one half travel, the other half's attention and router run, or its experts.
void Forward::run_experts(std::uint64_t layer, std::span<Running> halves) {
    Device& device = parameters_.device();
    for (std::uint64_t i = 0; i < halves.size(); ++i) {
        Running& half = halves[i];
        if (half.step == nullptr) {
            ranks_->dispatch(layer, i, {}, {}, {});
            continue;
        }
        device.submit(*half.step->parts[layer].before);
        const CachedExperts::Routed& routed = half.step->routed[layer];
        ranks_->dispatch(layer, i, routed.rows.rows(0, half.rows()),
                         routed.ids.rows(0, half.rows()), routed.weights.rows(0, half.rows()));
        if (half.step->parts[layer].shared)
            device.submit(*half.step->parts[layer].shared);
    }
    for (std::uint64_t i = 0; i < halves.size(); ++i) {
        device.submit(received(layer, i));
        halves[i].done =
            ranks_->combine(i, halves[i].step == nullptr
                                   ? ranks_->no_rows()
                                   : halves[i].step->streams[layer].rows(0, halves[i].rows()));
    }
}

void Forward::start(const StepInput& input) {
    if (started_.size() == kMostStarted)
        throw Error(ErrorCode::Internal, "a third step is started");
    Half* const half =
        halves_[!started_.empty() && started_.back().half == halves_[0].get() ? 1 : 0].get();
    Running running = begin(input, *half);
    half->done = parameters_.device().submit(*running.step->parts.back().before);
    running.done = half->done;
    started_.push_back(std::move(running));
}

StepOutput Forward::finish() {
    const Running first = std::move(started_.front());
    started_.erase(started_.begin());
    first.done.wait(forward_.timeout);
    return output_of(first.input, *first.step, *first.half);
}

void Forward::drop() noexcept {
    started_.clear();
}

StepOutput Forward::run(const StepInput& input, std::uint64_t halves) {
    const auto lost_now = [&] { return ranks_ == nullptr ? std::vector<int>() : ranks_->lost(); };
    const std::vector<int> lost_before = lost_now();
    std::vector<Running> running;
    const std::uint64_t rows = input.tokens.size(), each = div_up(rows, halves);
    for (std::uint64_t i = 0; i < halves; ++i)
        running.push_back(begin(
            halves == 1 ? input
                        : part_of(input, std::min(i * each, rows), std::min((i + 1) * each, rows)),
            *halves_[i]));
    for (std::uint64_t layer = 0; layer < experts_.size(); ++layer)
        run_experts(layer, running);
    for (Running& half : running)
        if (half.step != nullptr)
            half.done = parameters_.device().submit(*half.step->parts.back().before);
    for (const Running& half : running)
        if (half.step != nullptr || !experts_.empty())
            half.done.wait(forward_.timeout);
    const std::vector<int> lost = lost_now();
    StepOutput output;
    for (const Running& half : running) {
        if (half.step == nullptr)
            continue;
        StepOutput part = output_of(half.input, *half.step, *half.half);
        if (!lost.empty())
            note_losses(half, lost_before, lost, part);
        output.append(part);
    }
    return output;
}

} // namespace bellows
