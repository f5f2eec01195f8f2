// SPDX-License-Identifier: MIT
#pragma once

// The text that `holdout` keeps out of training, as sequences: always the same ones.

#include <bellows/text/corpus.hpp>
#include <bellows/train/sequence_source.hpp>
#include <bellows/train/train_config.hpp>

#include <cstdint>
#include <optional>

namespace bellows {

struct HeldOutText {
    ShuffledSequences lines; ///< sequence i is that of step i
    std::uint64_t count = 0;

    /// Sequence i is that of index i, whatever the step.
    SequenceSource by_index() const {
        return [this](std::uint64_t, std::uint64_t index, std::span<std::uint32_t> tokens) {
            lines(index, 0, tokens);
        };
    }
};

/// Its first sequences, at most 64; nothing where none is held out. The corpus must outlive it.
std::optional<HeldOutText> held_out_text(const Corpus& corpus, const TrainConfig& train);

} // namespace bellows
