// SPDX-License-Identifier: MIT
#pragma once

// How a training run is laid out over ranks and over time: what its memory, its schedule and its
// traffic follow from, beside the model's shape. Plain values, the same on every rank, and pure
// functions.

#include <bellows/base/dtype.hpp>
#include <bellows/schedule/pair.hpp>
#include <bellows/schedule/schedule.hpp>
#include <bellows/shape/config.hpp>

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace bellows {

/// ranks = pp × dp, experts sharded over ep, a divisor of dp.
struct RunLayout {
    std::uint32_t pp = 1;
    std::uint32_t dp = 1;
    std::uint32_t ep = 1;
    bool operator==(const RunLayout&) const = default;
};

enum class Precision : std::uint8_t {
    F32,  ///< activations and products in f32
    BF16, ///< activations and weights in bf16, sums and master weights in f32
    FP8,  ///< as BF16, and FP8 in the linear layers of attention, FFNs and experts
};

/// "f32", "bf16" or "fp8", and back. Throws Error{InvalidArgument}.
const char* to_text(Precision precision) noexcept;
void from_text(Precision& precision, const std::string& text);

/// How the linear layers of attention, FFNs and experts compute.
enum class LinearPrecision : std::uint8_t { AsActivations, Fp8 };

/// Storage of activations.
constexpr DType activation_type(Precision precision) noexcept {
    return precision == Precision::F32 ? DType::F32 : DType::BF16;
}
constexpr LinearPrecision linear_precision(Precision precision) noexcept {
    return precision == Precision::FP8 ? LinearPrecision::Fp8 : LinearPrecision::AsActivations;
}

/// How the results of a token's experts are summed: bellows::ExchangeSums.
enum class ExpertSums : std::uint8_t {
    Ranked,    ///< on each rank first: bits depend on which experts share one
    PerChoice, ///< each result travels alone: the same bits wherever experts live
};

/// "ranked" or "per_choice", and back. Throws Error{InvalidArgument}.
const char* to_text(ExpertSums sums) noexcept;
void from_text(ExpertSums& sums, const std::string& text);

/// Field names are keys of the `[train]` table of a configuration.
struct TrainingShape {
    std::uint64_t batch = 16; ///< sequences per step, over all ranks
    /// The first step's batch, which grows to `batch` in batch_ramp_steps steps, by batch_increment
    /// sequences at a time (batch_ramp.hpp); 0: all steps have `batch`.
    std::uint64_t batch_start = 0;
    std::uint64_t batch_increment = 0;  ///< 0: batch_start
    std::uint64_t batch_ramp_steps = 0; ///< the first steps, which have less than `batch`
    std::uint64_t micro_batches = 1;    ///< per data-parallel rank, in a step of `batch` sequences
    std::uint64_t seq = 128;            ///< tokens per sequence
    bool document_mask = false;         ///< attention does not go beyond the ends of documents
    Precision precision = Precision::F32;
    /// How micro-batches go through the pipeline's ranks.
    ScheduleKind pipeline = ScheduleKind::OneFOneB;
    /// How its pairs run (DualPipe, DualPipeV).
    PairMode pairs{};
    std::uint64_t pp = 1; ///< ranks of the pipeline
    std::uint64_t dp = 0; ///< 0: ranks / pp
    std::uint64_t ep = 0; ///< 0: dp
    /// Steps from one placement of experts by their loads to the next; 0: they stay where they are.
    std::uint64_t eplb_every = 0;
    /// Slots for experts on all ranks of an expert-parallel group together, in each layer: those
    /// beyond the experts' number are for replicas. 0: as many as experts, if they are ever placed.
    std::uint64_t eplb_slots = 0;
    ExpertSums expert_sums = ExpertSums::Ranked;

    bool operator==(const TrainingShape&) const = default;
};

/// Slots of each rank for experts that a table places (expert_placement.hpp); 0: without such.
std::uint64_t expert_slots_of_rank(const ModelConfig& model, const TrainingShape& shape,
                                   const RunLayout& layout) noexcept;

/// Checks every number against its range. Throws Error{InvalidArgument} that names the key.
void validate(const TrainingShape& shape);

/// Reads these keys of the `[train]` table of a TOML text, if it has one, and leaves others.
/// `source` names the text in errors. Throws Error{InvalidArgument} for a value of the wrong kind.
TrainingShape parse_training_shape(std::string_view text, std::string_view source);

/// That of a run. Throws Error{InvalidArgument} naming the rule that the numbers break.
Schedule pipeline_schedule(const ModelConfig& model, const TrainingShape& shape,
                           const RunLayout& layout);

/// For a pipeline that has been given one micro-batch, with which its ranks would take turns: the
/// fewest from twice its ranks on that divide the batch and that the schedule takes; 1 if there are
/// none.
std::uint64_t usual_micro_batches(const TrainingShape& shape, std::uint64_t ranks);

/// ranks = pp × dp with ep a divisor of dp; zeros take their defaults. Also validates the shape,
/// and checks that the batch divides, that the model has a layer for every stage, and that experts
/// have slots enough. Throws Error{InvalidArgument} with the numbers and the way out.
RunLayout resolve_layout(const ModelConfig& model, const TrainingShape& shape, std::uint64_t ranks);

} // namespace bellows
