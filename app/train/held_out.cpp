// SPDX-License-Identifier: MIT
#include "app/train/held_out.hpp"

#include <algorithm>

namespace bellows {

std::optional<HeldOutText> held_out_text(const Corpus& corpus, const TrainConfig& train) {
    constexpr std::uint64_t kMostSequences = 64;
    const TokenRange range = split_corpus(corpus, train.holdout).holdout;
    if (range.count == 0)
        return std::nullopt;
    HeldOutText text{ShuffledSequences(corpus, range, {train.seed, 1, train.seq})};
    text.count = std::min(kMostSequences, text.lines.sequences_per_epoch());
    return text;
}

} // namespace bellows
