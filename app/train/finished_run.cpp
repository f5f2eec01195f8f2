// SPDX-License-Identifier: MIT
#include "app/train/finished_run.hpp"

#include "app/exit_code.hpp"
#include "app/generate/writer.hpp"
#include "app/progress.hpp"
#include "app/run.hpp"
#include "app/train/held_out.hpp"
#include "app/units.hpp"

#include <bellows/comm/launch.hpp>
#include <bellows/comm/phase.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/serve/language_model.hpp>
#include <bellows/text/words.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

namespace {

/// The next piece of work that nobody else waits for: a sequence, a sample.
void begin_trying(const TrainConfig& train) {
    constexpr std::chrono::milliseconds kPatience = std::chrono::minutes(10);
    if (is_launched())
        begin_phase(launched_rank(), "while trying the finished model",
                    std::min(wait_limit(train), kPatience));
}

/// Nats per token.
std::optional<double> held_out_loss(LanguageModel& model, const TrainConfig& train,
                                    const Corpus& corpus) {
    const std::optional<HeldOutText> text = held_out_text(corpus, train);
    if (!text)
        return std::nullopt;
    std::vector<std::uint32_t> line(train.seq + 1);
    double sum = 0;
    for (std::uint64_t i = 0; i < text->count; ++i) {
        begin_trying(train);
        text->lines(i, 0, line);
        sum += model.loss(line);
    }
    return sum / static_cast<double>(text->count);
}

std::string sample_of(const TrainOptions& options, const FinishedRun& run) {
    GenerateOptions generate;
    generate.checkpoint = run.checkpoint;
    generate.config = options.config;
    generate.text.tokens = options.config.train.sample_tokens;
    generate.text.sampling.temperature = 0.7;
    generate.text.ignore_end = true;
    const std::string prompt = "The ";
    const auto engine = open_engine(generate, run.tokenizer, options.config.train.seq, 1);
    const std::vector<std::uint32_t> tokens = prompt_tokens(run.tokenizer, prompt, generate);
    return prompt + Writer(*engine, run.tokenizer).write({&tokens, 1}, generate.text).front().text;
}

std::string way_on(const TrainOptions& options) {
    return "bellows train --resume " + options.out.string();
}

/// Behind the summary of a run that was stopped.
std::string how_it_ended(const TrainOptions& options, const FinishedRun& run, int code) {
    if (code != kExitStopped)
        return "";
    return "stopped by a signal after step " + std::to_string(run.summary.steps) + " of " +
           std::to_string(options.config.train.steps) +
           ", everything is saved; go on with: " + way_on(options) + "\n";
}

std::string not_saved(const TrainOptions& options, const FinishedRun& run) {
    return "the weights of step " + std::to_string(run.summary.steps) +
           " could not be saved (the warning above says why); make room in " +
           options.out.string() + " and go on from the checkpoint before with: " + way_on(options) +
           "\n";
}

} // namespace

void try_model(const TrainOptions& options, FinishedRun& run) {
    try {
        const TrainConfig& train = options.config.train;
        begin_trying(train);
        {
            LanguageModel model(device_options_of_rank(train.device, 0), run.checkpoint,
                                {.timeout = wait_limit(train)});
            run.summary.held_out_loss = held_out_loss(model, train, run.corpus);
        }
        if (train.sample_tokens == 0)
            return;
        begin_trying(train);
        run.summary.sample = sample_of(options, run);
        const WordSet wanted(run.summary.sample);
        run.summary.words =
            check_words(run.summary.sample, words_of(run.corpus, run.tokenizer, wanted));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "warning: the finished model was not tried: %s\n", error.what());
    }
}

void print_finished_run(const TrainOptions& options, FinishedRun& run, int code) {
    run.summary.sample = for_standard_output(run.summary.sample);
    const ProgressReporter::Options screen = ProgressReporter::detect(stdout);
    const std::string text = format_summary(run.summary) + how_it_ended(options, run, code);
    std::fputs((screen.terminal ? folded(text, screen.columns) : text).c_str(), stdout);
    std::fflush(stdout);
    if (code == kExitNotSaved)
        std::fputs(("bellows: " + not_saved(options, run)).c_str(), stderr);
}

} // namespace bellows
