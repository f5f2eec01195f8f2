// SPDX-License-Identifier: MIT
#include "forward_step.hpp"

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
/// A device begins with the first recording of a step while the host hands in the others. So many
/// layers make one: handing a layer in takes some 20 us (measured on an H200 with its driver).
constexpr std::uint64_t kLayersOfPart = 3;
/// Sections begin at multiples of so many words.
constexpr std::uint64_t kSection = 64;

} // namespace

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
      layers_of_part_(forward.overlaps || parameters.device().info().is_cpu ? config.layers
                                                                            : kLayersOfPart),
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
                                                .bytes = bucket_size(forward_.most_drawn) * kWord,
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
    b.rows = bucket_size(input.tokens.size());
    b.sequences = bucket_size(input.tables.size());
    b.sampled = bucket_size(input.sampled_rows.size());
    b.items = bucket_size(plan.num_items());
    b.partials = bucket_size(plan.partials);
    b.history = bucket_size(input.history.size());
    b.biases = bucket_size(input.biases.size());
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
    for (const Step::Part& part : running.step->parts)
        half->done = parameters_.device().submit(*part.before);
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
