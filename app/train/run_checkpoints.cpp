// SPDX-License-Identifier: MIT
#include "app/train/run_checkpoints.hpp"

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/train/checkpoints.hpp>

#include <map>
#include <optional>
#include <sstream>
#include <utility>

namespace bellows {

namespace {

std::string no_checkpoint(std::uint64_t steps_done) {
    return "no checkpoint at step " + std::to_string(steps_done) + ": ";
}

/// Nothing where it does not say, or cannot be read.
std::optional<double> loss_of(const std::filesystem::path& checkpoint) {
    try {
        return Checkpoint::open(checkpoint).state().loss;
    } catch (const Error&) {
        return std::nullopt;
    }
}

} // namespace

RunCheckpoints::RunCheckpoints(const TrainOptions& options, World& world,
                               std::function<void(const std::string&)> note)
    : options_(options), world_(world), note_(std::move(note)),
      watch_(options.config.model.vocabulary) {
}

void RunCheckpoints::begin(const std::filesystem::path& from,
                           const std::vector<StepMetrics>& before) {
    last_ = from;
    for (const StepMetrics& step : before) {
        exploded_ = watch_.exploded(step.loss);
        watch_.take(step.loss);
    }
    find_good();
    last_try_ = Clock::now();
}

/// Of a resumed run. Later checkpoints must not push it out.
void RunCheckpoints::find_good() {
    if (!exploded_) {
        good_ = last_;
        return;
    }
    for (const std::filesystem::path& folder : list_checkpoints(options_.out)) {
        const std::optional<double> loss = loss_of(folder);
        if (loss && !watch_.exploded(*loss)) {
            good_ = folder;
            return;
        }
    }
}

void RunCheckpoints::watch_loss(std::uint64_t step, double loss) {
    loss_ = loss;
    const bool before = std::exchange(exploded_, watch_.exploded(loss));
    watch_.take(loss);
    if (!exploded_ || before)
        return;
    std::ostringstream text;
    text << "warning: the loss explodes: " << loss << " nats per token in step " << step;
    if (watch_.best())
        text << ", " << *watch_.best() << " at its best";
    text << "; a lower --lr or a longer --warmup helps";
    if (!good_.empty())
        text << "; " << good_.string() << " from before is kept";
    note_(text.str());
}

bool RunCheckpoints::is_due_by_time() const {
    const TrainConfig& train = options_.config.train;
    const double minutes =
        std::chrono::duration<double, std::ratio<60>>(Clock::now() - last_try_).count();
    return train.checkpoint_every == 0 && train.checkpoint_minutes > 0 &&
           minutes >= train.checkpoint_minutes;
}

void RunCheckpoints::save(Trainer& trainer, const Tokenizer& tokenizer, std::uint64_t steps_done) {
    last_try_ = Clock::now();
    world_.enter_phase("while writing the checkpoint of step " + std::to_string(steps_done));
    std::map<std::string, std::string> texts = {{kConfigFile, options_.config_text()}};
    if (!tokenizer.model().empty())
        texts[kTokenizerFile] = tokenizer.model();
    try {
        last_ = save_checkpoint(options_.out, texts, trainer, world_, steps_done, loss_);
        saved_ = true;
    } catch (const Error& error) {
        if (error.code() == ErrorCode::Diverged)
            throw Error(error.code(), no_checkpoint(steps_done) + error.message() + way_back(),
                        error.rank(), error.detail());
        if (error.code() != ErrorCode::Io)
            throw;
        saved_ = false;
        note_("warning: " + no_checkpoint(steps_done) + error.message());
        return;
    }
    if (world_.rank() != 0)
        return;
    if (!exploded_)
        good_ = last_;
    remove_older();
}

std::string RunCheckpoints::way_back() const {
    constexpr const char* kLower = " with a lower --lr or a smaller clip_norm";
    return last_.empty() ? std::string("; start again") + kLower
                         : "; go on" + std::string(kLower) + " from " + last_.string();
}

/// They take room, which is worth a warning; the next checkpoint tries again.
void RunCheckpoints::remove_older() {
    try {
        prune_checkpoints(options_.out, options_.config.train.keep_checkpoints, good_);
    } catch (const Error& error) {
        if (error.code() != ErrorCode::Io)
            throw;
        note_("warning: older checkpoints could not be removed: " + error.message());
    }
}

} // namespace bellows
