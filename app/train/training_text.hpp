// SPDX-License-Identifier: MIT
#pragma once

// The text of a training run: tokenised once, into a file in the run's folder that all ranks of a
// host map and that a resumed run finds again.

#include "app/commands.hpp"

#include <bellows/comm/world.hpp>

#include <cstdint>
#include <functional>

namespace bellows {

inline constexpr const char* kTokensFile = "tokens.bin";

/// Before anything is written or started: throws what is wrong with the text. Of a long one that
/// has not been tokenised yet, only names and sizes are looked at; the rest shows in
/// training_text().
void check_training_text(const TrainOptions& options);

/// Collective. Rank 0 opens the run's tokens, or makes them where they are missing or of another
/// text; after that the first rank of each host that does not see them does, too. progress: rank
/// 0's, see TokeniseOptions. Throws, on every rank, as find_text(), Corpus::make() and check_text()
/// do, and Error{InvalidArgument} if hosts read different texts.
Corpus training_text(const TrainOptions& options, const Tokenizer& tokenizer, World& world,
                     const std::function<void(std::uint64_t, std::uint64_t)>& progress);

} // namespace bellows
