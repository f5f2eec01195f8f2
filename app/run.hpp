// SPDX-License-Identifier: MIT
#pragma once

// The bodies of the subcommands: each runs on this rank and returns an exit code or throws.

#include "app/commands.hpp"

#include <bellows/text/corpus.hpp>
#include <bellows/text/words.hpp>

#include <string>
#include <vector>

namespace bellows {

int run_train(const TrainOptions& options);
int run_generate(const GenerateOptions& options);
int run_chat(const GenerateOptions& options);
int run_info(const InfoOptions& options);
int run_selftest(const SelftestOptions& options);

/// What a model wrote: control characters as \xNN where standard output is a terminal, else as it
/// is.
std::string for_standard_output(const std::string& text);

/// The words of `wanted` that stand in a text, in its first 16 Mi tokens if it is longer.
WordSet words_of(const Corpus& corpus, const Tokenizer& tokenizer, const WordSet& wanted);

} // namespace bellows
