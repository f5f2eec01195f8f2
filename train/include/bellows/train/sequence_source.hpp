// SPDX-License-Identifier: MIT
#pragma once

// Which tokens stand in which sequence of which step. What a step sees follows from (seed, step)
// alone, not from the number of ranks or from earlier calls, so a resumed run sees what an
// uninterrupted one would. Host only; const members may be called from any thread.

#include <bellows/shape/batch_ramp.hpp>
#include <bellows/text/corpus.hpp>

#include <cstdint>
#include <functional>
#include <span>

namespace bellows {

/// Fills tokens [seq + 1] of sequence `index` (of the global batch) of `step` (from 0).
using SequenceSource =
    std::function<void(std::uint64_t step, std::uint64_t index, std::span<std::uint32_t> tokens)>;

struct SequenceOrder {
    std::uint64_t seed = 0;
    std::uint64_t sequences_per_step = 0; ///< global batch, over all ranks
    std::uint64_t sequence_length = 0;    ///< inputs per sequence; one more token is drawn
    /// Where it has a start, the sequences of each step, instead of sequences_per_step.
    BatchRamp ramp{};
};

/// Deals the sequences of a token range out over the steps. Within an epoch every sequence of the
/// range comes once, in an order drawn anew for each epoch, and the cuts between sequences shift.
/// Is a SequenceSource.
class ShuffledSequences {
public:
    /// The corpus must outlive the source. Throws Error{InvalidArgument} if a value is zero or the
    /// range is shorter than one sequence of sequence_length + 1 tokens.
    ShuffledSequences(const Corpus& corpus, TokenRange range, const SequenceOrder& order);

    std::uint64_t sequences_per_epoch() const noexcept { return num_chunks_; }
    /// Where sequence `index` (below those of the step) of `step` (from 0) starts in the corpus.
    std::uint64_t sequence_start(std::uint64_t step, std::uint64_t index) const;
    /// The same sequence's tokens; out holds sequence_length + 1: inputs are its first, targets
    /// its last sequence_length.
    void operator()(std::uint64_t step, std::uint64_t index, std::span<std::uint32_t> out) const;

private:
    const Corpus* corpus_;
    TokenRange range_;
    SequenceOrder order_;
    std::uint64_t num_chunks_;
    std::uint64_t num_phases_; // how many shifts of the cuts fit
};

} // namespace bellows
