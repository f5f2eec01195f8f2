// SPDX-License-Identifier: MIT
#include <bellows/shape/layout.hpp>

#include "base/toml_fields.hpp"
#include "training_fields.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/shape/batch_ramp.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

using toml_fields::refuse;

const char* to_text(Precision precision) noexcept {
    return precision == Precision::F32 ? "f32" : precision == Precision::BF16 ? "bf16" : "fp8";
}

void from_text(Precision& precision, const std::string& text) {
    for (const Precision one : {Precision::F32, Precision::BF16, Precision::FP8})
        if (text == to_text(one)) {
            precision = one;
            return;
        }
    refuse(in_quotes(text) + " must be \"f32\", \"bf16\" or \"fp8\"");
}

const char* to_text(ExpertSums sums) noexcept {
    return sums == ExpertSums::Ranked ? "ranked" : "per_choice";
}

void from_text(ExpertSums& sums, const std::string& text) {
    for (const ExpertSums one : {ExpertSums::Ranked, ExpertSums::PerChoice})
        if (text == to_text(one)) {
            sums = one;
            return;
        }
    refuse(in_quotes(text) + " must be \"ranked\" or \"per_choice\"");
}

void validate(const TrainingShape& shape) {
    for_each_shape_field(shape, [](const char* key, const auto& value, auto least, auto most) {
        toml_fields::check_range(key, value, least, most);
    });
}

TrainingShape parse_training_shape(std::string_view text, std::string_view source) {
    TrainingShape shape;
    const toml::table table = toml_fields::parse(text, source);
    const toml_fields::Place place(source);
    if (const toml::table* train = table["train"].as_table())
        for_each_shape_field(shape, [&](const char* key, auto& field, auto, auto) {
            if (const toml::node* value = train->get(key))
                toml_fields::assign(field, *value, place.of(*value) + key);
        });
    return shape;
}

namespace {

Schedule usual_schedule(const TrainingShape& shape, std::uint64_t ranks) {
    return make_schedule(
        {.kind = shape.pipeline, .ranks = ranks, .micro_batches = shape.micro_batches});
}

} // namespace

Schedule pipeline_schedule(const ModelConfig& model, const TrainingShape& shape,
                           const RunLayout& layout) {
    Schedule schedule = usual_schedule(shape, layout.pp);
    // With nothing to hide the two of a pair compute one after the other.
    const bool exchanges = layout.ep > 1 && model.moe_layers() > 0;
    if (shape.pairs.kind == PairMode::Kind::Apart ||
        (shape.pairs.kind == PairMode::Kind::Auto && !exchanges))
        schedule = decouple_pairs(schedule);
    return split_backwards(std::move(schedule)); // a gradient leaves as soon as it is made
}

std::uint64_t usual_micro_batches(const TrainingShape& shape, std::uint64_t ranks) {
    const std::uint64_t dp = shape.dp == 0 ? ranks / shape.pp : shape.dp;
    TrainingShape tried = shape;
    for (std::uint64_t count = 2 * shape.pp; dp > 0 && count * dp <= shape.batch; ++count) {
        if (shape.batch % (count * dp) != 0) {
            continue;
        }
        tried.micro_batches = count;
        try {
            (void)usual_schedule(tried, shape.pp);
            return count;
        } catch (const Error&) { // another number may do
        }
    }
    return 1;
}

RunLayout resolve_layout(const ModelConfig& model, const TrainingShape& train,
                         std::uint64_t ranks) {
    validate(train);
    const auto text = [](std::uint64_t value) { return std::to_string(value); };
    constexpr std::uint64_t kMostRanks = 1 << 20;
    if (ranks == 0 || ranks > kMostRanks) {
        refuse("ranks = " + text(ranks) + " must be at least 1 and at most " + text(kMostRanks));
    }
    if (ranks % train.pp != 0) {
        refuse(text(ranks) + " ranks cannot be divided into pp = " + text(train.pp) + " stages");
    }
    const std::uint64_t dp = train.dp == 0 ? ranks / train.pp : train.dp;
    if (train.pp * dp != ranks) {
        refuse("pp = " + text(train.pp) + " times dp = " + text(dp) + " makes " +
               text(train.pp * dp) + " ranks, not " + text(ranks));
    }
    const std::uint64_t ep = train.ep == 0 ? dp : train.ep;
    if (dp % ep != 0) {
        refuse("ep = " + text(ep) + " does not divide dp = " + text(dp));
    }
    const std::uint64_t stages = usual_schedule(train, train.pp).num_stages;
    if (stages > model.layers) {
        refuse("pp = " + text(train.pp) + " with pipeline = " +
               in_quotes(to_string(train.pipeline)) + " makes " + text(stages) +
               " stages, which need as many layers; the model has " + text(model.layers));
    }
    if (train.batch % (dp * train.micro_batches) != 0) {
        refuse("a batch of " + text(train.batch) + " sequences does not divide into dp = " +
               text(dp) + " times " + text(train.micro_batches) +
               " micro-batches; make it a multiple of " + text(dp * train.micro_batches));
    }
    if (train.eplb_slots > 0 || train.eplb_every > 0) {
        if (model.moe_layers() == 0) {
            refuse("eplb_every = " + text(train.eplb_every) + " and eplb_slots = " +
                   text(train.eplb_slots) + " place experts, of which the model has none");
        }
        if (train.eplb_slots > 0 && train.eplb_slots < model.routed_experts) {
            refuse("eplb_slots = " + text(train.eplb_slots) + " must be at least the " +
                   text(model.routed_experts) + " experts: they count all slots of a layer");
        }
    }
    const RunLayout layout{static_cast<std::uint32_t>(train.pp), static_cast<std::uint32_t>(dp),
                           static_cast<std::uint32_t>(ep)};
    check_batch_ramp(model, train, layout);
    return layout;
}

std::uint64_t expert_slots_of_rank(const ModelConfig& model, const TrainingShape& shape,
                                   const RunLayout& layout) noexcept {
    if (model.moe_layers() == 0 || (shape.eplb_slots == 0 && shape.eplb_every == 0))
        return 0;
    return div_up(std::max(shape.eplb_slots, model.routed_experts), std::uint64_t{layout.ep});
}

} // namespace bellows
