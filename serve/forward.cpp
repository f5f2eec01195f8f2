// SPDX-License-Identifier: MIT
#include "forward.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/ops.hpp>
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
    Layout(const Bucket& b, std::uint64_t table_blocks);

    struct Part {
        std::uint64_t first = 0, words = 0;
        BufferView of(const Buffer& buffer) const {
            return buffer.view().sub(first * kWord, words * kWord);
        }
    };
    Part count, tokens, positions, places, items, row_parts, tables, sampled_rows, settings,
        history, biases;
    std::uint64_t input_words = 0;
    Part out_tokens, out_log_probs, out_top, out_top_log_probs;
    std::uint64_t output_words = 0;
};

Forward::Layout::Layout(const Bucket& b, std::uint64_t table_blocks) {
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
    place(output_words, out_tokens, b.sampled);
    place(output_words, out_log_probs, b.sampled);
    place(output_words, out_top, b.sampled * b.top);
    place(output_words, out_top_log_probs, b.sampled * b.top);
}

struct Forward::Step {
    Bucket bucket;
    Layout layout;
    std::optional<Recording> recording;
    std::uint64_t last_used = 0; ///< a step's number
};

Forward::Forward(const ModelConfig& config, ParameterStore& parameters,
                 const ForwardConfig& forward)
    : config_(config), parameters_(parameters), forward_(forward),
      table_blocks_(div_up(forward.max_context, ops::kCacheBlock)),
      rows_per_item_(ops::paged_rows_per_item(parameters.device(),
                                              cache_shape(config, forward.cache),
                                              parameters.activation(), config.heads)),
      positions_(parameters.device(), config, forward.max_context),
      arena_(parameters.device(), "scratch of generation") {
    Device& device = parameters.device();
    const ops::CacheShape shape = cache_shape(config, forward.cache);
    caches_.reserve(config.layers);
    paged_.reserve(config.layers);
    for (std::uint64_t layer = 0; layer < config.layers; ++layer) {
        caches_.emplace_back(device, BufferDesc{.name = "cache of layer " + std::to_string(layer),
                                                .bytes = ops::cache_bytes(shape, forward.blocks),
                                                .category = MemoryCategory::Cache});
        paged_.push_back({shape, forward.blocks, caches_.back().view()});
    }
    for (std::uint64_t layer = 0; layer < config.layers; ++layer) {
        layers_.push_back(cached_attention(config_, layer, parameters_, positions_, paged_[layer]));
        layers_.push_back(cached_ffn(config_, layer, parameters_));
    }
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
    if (forward_.exact)
        return kExactSplit;
    // As many parts as fill a device where few sequences are decoded, few where many are.
    constexpr std::uint64_t kParts = 256;
    std::uint64_t blocks = 0;
    for (const ops::PagedQueries& q : input.queries)
        blocks += div_up(q.keys, ops::kCacheBlock) * div_up(q.rows, rows_per_item_);
    return std::bit_ceil(std::max<std::uint64_t>(div_up(blocks, kParts), 1));
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

void Forward::write(const StepInput& input, const ops::PagedPlan& plan, const Layout& layout) {
    const auto words = upload_.mapped_as<std::uint32_t>();
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
}

void Forward::reserve(const Layout& layout) {
    const auto grow = [&](Buffer& buffer, std::uint64_t words, const char* name, MemoryKind kind) {
        const std::uint64_t bytes = round_up(words * kWord, 4096);
        if (buffer && buffer.size() >= bytes)
            return;
        recordings_.clear(); // they name the old memory
        buffer = Buffer(parameters_.device(), {.name = name,
                                               .bytes = std::bit_ceil(bytes),
                                               .kind = kind,
                                               .category = MemoryCategory::Activations});
    };
    grow(upload_, layout.input_words, "input of a step, on the host", MemoryKind::Upload);
    grow(input_, layout.input_words, "input of a step", MemoryKind::Device);
    grow(output_, layout.output_words, "output of a step", MemoryKind::Readback);
}

void Forward::record_head(Recording& r, Arena::Frame& scratch, const Step& step,
                          const TensorView& stream) {
    const Bucket& b = step.bucket;
    const Layout& at = step.layout;
    const auto u32 = [](BufferView memory, std::initializer_list<std::uint64_t> extents) {
        return TensorView::contiguous(memory, DType::U32, extents);
    };
    const auto f32 = [](BufferView memory, std::initializer_list<std::uint64_t> extents) {
        return TensorView::contiguous(memory, DType::F32, extents);
    };
    const TensorView x = scratch.tensor(stream.dtype, {b.sampled, config_.hidden}),
                     norm = scratch.tensor(stream.dtype, {b.sampled, config_.hidden}),
                     // Kernels read four at once.
        padded = scratch.tensor(DType::F32, {b.sampled, round_up(config_.vocabulary, 4)}),
                     logits = ops::slice(padded, 1, 0, config_.vocabulary);
    ops::embedding_forward(r, u32(at.sampled_rows.of(input_), {b.sampled}), stream, x);
    ops::rmsnorm_forward(r, x, parameters_.at("model.norm.weight").weight, norm,
                         scratch.tensor(DType::F32, {b.sampled}),
                         static_cast<float>(config_.norm_eps));
    ops::gemm_nt(
        r, norm,
        parameters_.at(config_.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight")
            .compute,
        logits);
    ops::SampleBatch batch;
    batch.logits = logits;
    batch.settings = u32(at.settings.of(input_), {b.sampled, sizeof(ops::SampleSettings) / kWord});
    if (b.history > 0)
        batch.history = u32(at.history.of(input_), {b.history, 2});
    if (b.biases > 0)
        batch.biases = u32(at.biases.of(input_), {b.biases, 2});
    batch.allowed = allowed_.tensor(DType::U32, {div_up(config_.vocabulary, 32)});
    batch.tokens = u32(at.out_tokens.of(output_), {b.sampled});
    batch.log_probs = f32(at.out_log_probs.of(output_), {b.sampled});
    if (b.top > 0) {
        batch.top_tokens = u32(at.out_top.of(output_), {b.sampled, b.top});
        batch.top_log_probs = f32(at.out_top_log_probs.of(output_), {b.sampled, b.top});
    }
    ops::sample(r, batch,
                scratch.bytes(ops::sample_workspace_bytes(b.sampled, config_.vocabulary)));
}

std::unique_ptr<Forward::Step> Forward::record(const Bucket& bucket) {
    const Layout at(bucket, table_blocks_);
    auto step = std::make_unique<Step>(Step{bucket, at, {}, 0});
    Recording& r = step->recording.emplace(parameters_.device(), QueueRole::Compute,
                                           "step of " + std::to_string(bucket.rows) + " rows, " +
                                               std::to_string(bucket.sequences) + " sequences");
    const auto u32 = [&](const Layout::Part& part, std::initializer_list<std::uint64_t> extents) {
        return TensorView::contiguous(part.of(input_), DType::U32, extents);
    };
    r.copy(upload_.view().sub(0, at.input_words * kWord),
           input_.view().sub(0, at.input_words * kWord));
    Arena::Frame scratch = arena_.begin();
    StepRows rows;
    rows.rows = bucket.rows;
    rows.count = at.count.of(input_);
    rows.positions = u32(at.positions, {bucket.rows});
    rows.places = u32(at.places, {bucket.rows});
    rows.work.capacity = {bucket.rows, bucket.items, bucket.partials};
    rows.work.items = u32(at.items, {at.items.words});
    rows.work.rows = u32(at.row_parts, {bucket.rows, ops::PagedPlan::kRowWords});
    rows.work.tables = u32(at.tables, {bucket.sequences, table_blocks_});
    if (forward_.exact)
        rows.expected_expert_rows = kExactExpertRows;
    const TensorView stream =
        scratch.tensor(parameters_.activation(), {bucket.rows, config_.hidden});
    ops::embedding_forward(r, u32(at.tokens, {bucket.rows}),
                           parameters_.at("model.embed_tokens.weight").compute, stream);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        r.label(i % 2 == 0 ? "attention" : "FFN");
        Arena::Frame part = scratch.nested();
        layers_[i]->record(r, part, rows, stream);
        scratch.cover(part);
    }
    if (bucket.sampled > 0) {
        r.label("head");
        Arena::Frame part = scratch.nested();
        record_head(r, part, *step, stream);
        scratch.cover(part);
    }
    arena_.reserve(scratch.bytes());
    return step;
}

Forward::Step& Forward::recorded(const Bucket& bucket) {
    constexpr std::size_t kMostRecordings = 128;
    auto found = recordings_.find(bucket);
    if (found == recordings_.end()) {
        reserve(Layout(bucket, table_blocks_));
        if (recordings_.size() == kMostRecordings) // none is pending: run() waits
            recordings_.erase(std::ranges::min_element(
                recordings_, {}, [](const auto& entry) { return entry.second->last_used; }));
        found = recordings_.emplace(bucket, record(bucket)).first;
    }
    found->second->last_used = ++steps_;
    return *found->second;
}

StepOutput Forward::run(const StepInput& input) {
    const ops::PagedPlan plan =
        ops::plan_paged_attention(input.queries, split_blocks(input), rows_per_item_);
    Step& step = recorded(bucket_of(input, plan));
    const Layout& at = step.layout;
    write(input, plan, at);
    parameters_.device().submit(*step.recording).wait(forward_.timeout);
    const auto words = output_.mapped_as<const std::uint32_t>();
    const std::uint64_t sampled = input.sampled_rows.size();
    const auto take = [&](auto& values, const Layout::Part& part, std::uint64_t count) {
        values.resize(count);
        if (count > 0)
            std::memcpy(values.data(), words.data() + part.first, count * kWord);
    };
    StepOutput out;
    take(out.tokens, at.out_tokens, sampled);
    take(out.log_probs, at.out_log_probs, sampled);
    take(out.top_tokens, at.out_top, sampled * step.bucket.top);
    take(out.top_log_probs, at.out_top_log_probs, sampled * step.bucket.top);
    return out;
}

} // namespace bellows
