// SPDX-License-Identifier: MIT
// Records the steps of Forward.
#include "forward_step.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/few_rows.hpp>

#include <initializer_list>
#include <string>

namespace bellows {

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

std::unique_ptr<Recording> Forward::begin_part(const Bucket& bucket, std::uint64_t layer) const {
    return std::make_unique<Recording>(parameters_.device(), QueueRole::Compute,
                                       "layers from " + std::to_string(layer) + " of " +
                                           std::to_string(bucket.rows) + " rows");
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
        ops::take_drawn(r, drawn(*half.before, bucket_size(forward_.most_drawn)),
                        input(at.tokens, {bucket.rows}));
    step->stream = scratch.tensor(parameters_.activation(), {bucket.rows, config_.hidden});
    ops::embedding_forward(r, input(at.tokens, {bucket.rows}),
                           parameters_.at("model.embed_tokens.weight").compute, step->stream);
    for (std::uint64_t layer = 0; layer < config_.layers; ++layer) {
        if (ranks_ == nullptr && layer > 0 && layer % layers_of_part_ == 0)
            step->parts.push_back({begin_part(bucket, layer), nullptr});
        record_layer(layer, *step, scratch, rows, step->stream, half);
    }
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

} // namespace bellows
