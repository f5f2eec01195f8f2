// SPDX-License-Identifier: MIT
#include "sharded_optimizer.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/ops.hpp>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <optional>
#include <ranges>
#include <utility>

namespace bellows {

namespace {

constexpr const char* kFinalNorm = "model.norm.weight"; // ready as the head is

} // namespace

// ---- Sums of gradients -----------------------------------------------------------------------

std::vector<GradientRange> gradient_ranges(const ParameterStore& parameters, const Stage& stage) {
    std::vector<GradientRange> ranges;
    std::optional<GradientRange> of_head;
    const std::vector<Parameter>& all = parameters.all();
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (!all[i].info.trainable() || !stage.has(all[i].info))
            continue;
        const std::uint64_t end =
            i + 1 < all.size() ? all[i + 1].first : parameters.num_elements(); // with the padding
        GradientRange range{all[i].first,
                            end - all[i].first,
                            all[i].info.kind == ParameterKind::Expert,
                            stage.gradient_ready_after(all[i].info),
                            all[i].info.weight_decay,
                            divisible_by(all[i].info),
                            {},
                            all[i].info.tied};
        if (all[i].info.both_ends && stage.last()) {
            of_head = range;
            of_head->first = all[i].head_gradient_first;
            of_head->ready_after = stage.gradient_ready_after(parameters.at(kFinalNorm).info);
        }
        range.counted = !range.tied || all[i].info.both_ends || stage.first();
        if (!all[i].info.both_ends || stage.first())
            ranges.push_back(range);
    }
    if (of_head) // behind all others
        ranges.push_back(*of_head);
    return ranges;
}

GradientReduction::GradientReduction(const ParameterStore& parameters,
                                     std::vector<GradientRange> buckets, Collectives& dense,
                                     Collectives& replicas)
    : flat_(parameters.flat_gradients()), buckets_(std::move(buckets)), dense_(dense),
      replicas_(replicas) {
}

void GradientReduction::sum_slots(const Stage& stage, ExpertSlots& slots) {
    slots_ = &slots;
    for (std::size_t i = 0; i < stage.moe_layers().size(); ++i) {
        ParameterInfo expert;
        expert.kind = ParameterKind::Expert;
        expert.layer = static_cast<std::int64_t>(stage.moe_layer_index(i));
        slot_layers_.push_back({stage.gradient_ready_after(expert), stage.moe_layer_index(i)});
    }
    std::ranges::sort(slot_layers_, {}, &SlotLayer::ready_after);
}

void GradientReduction::node_handed_in(std::size_t index, std::size_t num_nodes) {
    if (until_ == handed_in_.size()) { // a new step
        handed_in_.assign(num_nodes, false);
        until_ = next_ = next_layer_ = 0;
    }
    handed_in_[index] = true;
    while (until_ < num_nodes && handed_in_[until_])
        ++until_;
    for (; next_layer_ < slot_layers_.size() && slot_layers_[next_layer_].ready_after < until_;
         ++next_layer_)
        slots_->sum_gradients(slot_layers_[next_layer_].layer);
    for (; next_ < buckets_.size() && buckets_[next_].ready_after < until_; ++next_) {
        const GradientRange& bucket = buckets_[next_];
        Collectives& ranks = bucket.expert ? replicas_ : dense_;
        if (ranks.group().size() == 1)
            continue;
        const TensorView all = flat_.rows(bucket.first, bucket.count);
        if (bucket.shares.empty()) {
            ranks.all_reduce(all);
            continue;
        }
        const Share own = bucket.share(ranks.position());
        ranks.reduce_scatter(all, flat_.rows(own.first, own.count), bucket.shares);
    }
}

// ---- This rank's share -----------------------------------------------------------------------

namespace {

/// The same elements in fewer, longer ranges.
UpdatePart joined(UpdatePart ranges) {
    std::ranges::sort(ranges, {}, &UpdatedRange::first);
    UpdatePart all;
    for (const UpdatedRange& range : ranges)
        if (!all.empty() && all.back().first + all.back().count == range.first &&
            all.back().weight_decay == range.weight_decay && all.back().counted == range.counted)
            all.back().count += range.count;
        else
            all.push_back(range);
    return all;
}

} // namespace

std::vector<UpdatePart> update_parts(std::span<const GradientRange> buckets, CopyHolder dense,
                                     CopyHolder replica) {
    std::vector<UpdatePart> shared, whole;
    UpdatePart small;
    for (const GradientRange& bucket : buckets) {
        const CopyHolder& rank = bucket.expert ? replica : dense;
        const Share mine = bucket.share(rank.position);
        if (mine.count == 0)
            continue;
        if (!bucket.shares.empty())
            shared.push_back({{mine.first, mine.count, bucket.matrices, bucket.counted, true}});
        else if (mine.count * sizeof(float) >= kGradientBucketBytes)
            whole.push_back(
                {{mine.first, mine.count, bucket.matrices, rank.stands && bucket.counted}});
        else
            small.push_back(
                {mine.first, mine.count, bucket.matrices, rank.stands && bucket.counted});
    }
    std::vector<UpdatePart> parts;
    if (!small.empty())
        parts.push_back(joined(std::move(small)));
    std::ranges::move(shared, std::back_inserter(parts));
    std::ranges::move(whole, std::back_inserter(parts));
    return parts;
}

// ---- Weights of all shares -------------------------------------------------------------------

namespace {

/// This rank's part of `all` is sent; the others' come.
void gather(Collectives& ranks, const TensorView& all, std::span<const std::uint64_t> counts) {
    const auto own = counts.begin() + ranks.position();
    ranks.all_gather(all.rows(std::accumulate(counts.begin(), own, std::uint64_t{0}), *own), all,
                     counts);
}

} // namespace

void gather_parts(const TensorView& flat, std::span<const GradientRange> buckets,
                  Collectives& dense, Collectives& replicas) {
    for (const GradientRange& bucket : buckets)
        if (!bucket.shares.empty())
            gather(bucket.expert ? replicas : dense, flat.rows(bucket.first, bucket.count),
                   bucket.shares);
}

WeightGathering::WeightGathering(const ParameterStore& parameters,
                                 std::span<const GradientRange> buckets, Collectives& dense,
                                 Collectives& replicas)
    : device_(parameters.device()) {
    for (const GradientRange& bucket : buckets) {
        if (bucket.shares.empty())
            continue;
        for (SentCopy& copy : parameters.sent_copies(bucket.first, bucket.shares))
            gathers_.push_back({bucket.expert ? &replicas : &dense, std::move(copy)});
        // Beside the compute queue: first forward passes need none, but for packed FP8 weights.
        auto copies =
            std::make_unique<Recording>(device_, QueueRole::AsyncCompute, "copies of weights");
        parameters.make_copies(*copies, bucket.first, bucket.count);
        if (copies->num_operations() > 0)
            copies_.push_back({std::move(copies), {}});
    }
}

void WeightGathering::begin(std::chrono::milliseconds limit) {
    for (const Gather& of : gathers_)
        gather(*of.ranks, of.copy.whole, of.copy.counts);
    for (Copies& copies : copies_) {
        copies.last.wait(limit);
        copies.last = device_.submit(*copies.recording);
    }
}

// ---- All of it -------------------------------------------------------------------------------

ShardedOptimizer::ShardedOptimizer(ParameterStore& parameters,
                                   std::span<const std::unique_ptr<Stage>> stages,
                                   std::span<const std::uint32_t> in_order, const CopyGroup& dense,
                                   const CopyGroup& replicas, Collectives* other_end,
                                   ExpertSlots* slots, const OptimizerOptions& options)
    : parameters_(parameters), dense_(dense.ranks), replicas_(replicas.ranks),
      other_end_(other_end), slots_(slots), timeout_(options.timeout) {
    Sharing sharing(static_cast<std::uint64_t>(dense_.group().size()),
                    static_cast<std::uint64_t>(replicas_.group().size()));
    std::vector<std::vector<GradientRange>> buckets; // by phase
    for (const auto& stage : stages) {
        const auto ranges = gradient_ranges(parameters, *stage);
        buckets.push_back(gradient_buckets(ranges, kGradientBucketBytes));
        sharing.share_out(buckets.back(), ranges);
    }
    for (const std::uint32_t phase : in_order)
        std::ranges::copy_if(buckets[phase] | std::views::reverse, std::back_inserter(buckets_),
                             [&](const GradientRange& bucket) { // weights alone are updated
                                 return bucket.first < parameters.num_elements();
                             });
    tie_ends();
    shard_ = std::make_unique<Optimizer>(parameters,
                                         update_parts(buckets_, {dense_.position(), dense.stands},
                                                      {replicas_.position(), replicas.stands}),
                                         options);
    gathering_ = std::make_unique<WeightGathering>(parameters, buckets_, dense_, replicas_);
    for (std::size_t phase = 0; phase < buckets.size(); ++phase) {
        reductions_.emplace_back(parameters, std::move(buckets[phase]), dense_, replicas_);
        if (slots_ != nullptr)
            reductions_.back().sum_slots(*stages[phase], *slots_);
    }
}

/// What adds the head's gradient to the embedding's where one matrix is both.
void ShardedOptimizer::tie_ends() {
    const auto tied = std::ranges::find_if(buckets_, &GradientRange::tied);
    if (tied == buckets_.end())
        return;
    tied_share_ = tied->share(dense_.position());
    const auto both = std::ranges::find_if(
        parameters_.all(), [](const Parameter& parameter) { return parameter.info.both_ends; });
    if (both == parameters_.all().end() || tied_share_.count == 0)
        return;
    const TensorView& flat = parameters_.flat_gradients();
    const std::uint64_t begin = tied_share_.first - both->first;
    tie_ = std::make_unique<Recording>(parameters_.device(), QueueRole::Compute, "tied gradient");
    ops::copy(*tie_, flat.rows(both->head_gradient_first + begin, tied_share_.count),
              flat.rows(tied_share_.first, tied_share_.count), /*accumulate=*/true);
}

void ShardedOptimizer::finish_gradients() {
    if (tie_)
        parameters_.device().submit(*tie_);
    else if (other_end_ != nullptr && tied_share_.count > 0)
        other_end_->all_reduce(
            parameters_.flat_gradients().rows(tied_share_.first, tied_share_.count));
}

void ShardedOptimizer::update(std::uint64_t step, double lr, double clip) {
    shard_->update(step, lr, clip);
    gathering_->begin(timeout_);
    if (slots_ != nullptr)
        slots_->spread_weights();
}

void ShardedOptimizer::gather(Parted what) {
    shard_->replace_gradients(what);
    gather_parts(parameters_.flat_gradients(), buckets_, dense_, replicas_);
    parameters_.device().wait_idle(timeout_);
}

} // namespace bellows
