// SPDX-License-Identifier: MIT
#pragma once

// What rank 0 does when a run is over and the other ranks have been let go: it tries the model and
// prints the summary.

#include "app/commands.hpp"
#include "app/train/summary.hpp"

#include <bellows/text/corpus.hpp>
#include <bellows/text/tokenizer.hpp>

#include <filesystem>

namespace bellows {

struct FinishedRun {
    RunSummary summary;
    Tokenizer tokenizer;
    Corpus corpus;
    std::filesystem::path checkpoint; ///< empty when the last one could not be written
};

/// Held-out loss and text of the finished model go into the summary. They are no part of the run,
/// which is good without them: an error becomes a warning.
void try_model(const TrainOptions& options, FinishedRun& run);

/// The summary on standard output, how the run ended by its exit code, and the way on.
void print_finished_run(const TrainOptions& options, FinishedRun& run, int code);

} // namespace bellows
