// SPDX-License-Identifier: MIT
#pragma once

// What a step computes and what it gives, on the host. Used by this room's .cpp files.

#include <bellows/engine/paged_attention.hpp>
#include <bellows/engine/sampling.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace bellows {

struct StepInput {
    /// Of the rows, those of a sequence together. A token may be the name of one that the step
    /// before draws (ops::kDrawnBefore) where that step was started, too.
    std::vector<std::uint32_t> tokens, positions, places;
    /// In the order of the rows; PagedQueries::sequence is an index of `tables`.
    std::vector<ops::PagedQueries> queries;
    std::vector<std::span<const std::uint32_t>> tables; ///< blocks of each sequence
    std::vector<std::uint32_t> sampled_rows;            ///< whose next token is drawn
    std::vector<ops::SampleSettings> settings;          ///< of each of these
    std::vector<ops::SampleHistory> history;
    std::vector<ops::SampleBias> biases;
    std::uint32_t top_log_probs = 0; ///< the most that a row asks for
    /// Where tokens are drafted: of each row the token behind it; ops::kDrawnBefore + j is the j-th
    /// that this step draws. Else empty.
    std::vector<std::uint32_t> next_tokens;
    std::vector<ops::SampleSettings> draft_settings; ///< of each sampled row
};

/// Rows first .. end of a step as a step of their own.
StepInput part_of(const StepInput& input, std::uint64_t first, std::uint64_t end);

/// For each sampled row.
struct StepOutput {
    std::vector<std::uint32_t> tokens; ///< ops::kNoToken: the row's logits are not finite
    std::vector<float> log_probs;
    std::vector<std::uint32_t> top_tokens; ///< [rows, StepInput::top_log_probs]
    std::vector<float> top_log_probs;
    /// Where tokens are drafted: guesses of what follows on `tokens`.
    std::vector<std::uint32_t> drafts;
    /// Of all rows, not of the sampled ones alone: 1 where the row has chosen an expert whose rank
    /// is lost, with all ranks that have a replica. Empty while none is.
    std::vector<std::uint8_t> lacking;
    /// A rank was lost meanwhile, and others have what it would have added: the step's other values
    /// are of no use, and it has to be computed again.
    bool again = false;

    /// The rows that follow.
    void append(const StepOutput& more);
};

} // namespace bellows
