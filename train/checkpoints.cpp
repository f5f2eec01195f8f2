// SPDX-License-Identifier: MIT
#include <bellows/train/checkpoints.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

namespace {

std::string moment_name(const Parameter& parameter, Parted what) {
    return parameter.info.name + (what == Parted::FirstMoments ? ".adam_m" : ".adam_v");
}

/// Throws Error{Diverged} that names the tensor and the first value that is not finite.
void require_finite(const std::string& tensor, std::span<const float> values) {
    const auto is_bad = [](float value) { return !std::isfinite(value); };
    const auto first = std::ranges::find_if(values, is_bad);
    if (first == values.end())
        return;
    throw Error(ErrorCode::Diverged, in_quotes(tensor) + " has " +
                                         std::to_string(std::ranges::count_if(values, is_bad)) +
                                         " values of " + std::to_string(values.size()) +
                                         " that are not finite, the first at " +
                                         std::to_string(first - values.begin()));
}

/// This rank's shards of a checkpoint, written one kind of tensor after the other, as the ranks
/// send each other their parts. Without what it stands for: nothing.
class Shards {
public:
    Shards(Trainer& trainer, std::filesystem::path folder, std::uint64_t index)
        : trainer_(trainer), folder_(std::move(folder)), index_(index) {
        for (const Parameter& parameter : trainer.parameters().all())
            if (trainer.stands_for(parameter))
                mine_.push_back(&parameter);
    }

    void write_weights() {
        if (mine_.empty())
            return;
        std::vector<StoredTensor> tensors;
        for (const Parameter* parameter : mine_)
            tensors.push_back({parameter->info.name, StoredType::F32, parameter->info.shape});
        SafetensorsWriter model(path("model"), tensors, {{"format", "pt"}});
        for (const Parameter* parameter : mine_) {
            const std::string& name = parameter->info.name;
            const auto values = parameter->info.trainable()
                                    ? trainer_.parameters().download_gradient(name)
                                    : trainer_.parameters().download(name);
            require_finite(name, values);
            model.write(name, std::as_bytes(std::span(values)));
        }
        model.finish();
    }

    /// In the order of kMoments.
    void write_moments(Parted what) {
        if (mine_.empty())
            return;
        if (what == kMoments.front())
            begin_moments();
        for (const Parameter* parameter : mine_) {
            if (!parameter->info.trainable())
                continue;
            const auto values = trainer_.parameters().download_gradient(parameter->info.name);
            const std::string name = moment_name(*parameter, what);
            require_finite(name, values);
            optimizer_->write(name, std::as_bytes(std::span(values)));
        }
        if (what == kMoments.back())
            optimizer_->finish();
    }

private:
    std::filesystem::path path(const char* base) const {
        return folder_ / shard_name(base, index_, trainer_.writers().size());
    }

    void begin_moments() {
        std::vector<StoredTensor> tensors;
        for (const Parted what : kMoments)
            for (const Parameter* parameter : mine_)
                if (parameter->info.trainable())
                    tensors.push_back(
                        {moment_name(*parameter, what), StoredType::F32, parameter->info.shape});
        optimizer_.emplace(path("optimizer"), tensors,
                           std::map<std::string, std::string>{{"format", "pt"}});
    }

    Trainer& trainer_;
    std::filesystem::path folder_;
    std::uint64_t index_; ///< among the writers
    std::vector<const Parameter*> mine_;
    std::optional<SafetensorsWriter> optimizer_;
};

/// Runs `work`; what it throws becomes this rank's vote.
template <class Work>
std::optional<Error> attempt(Work work) {
    try {
        work();
        return std::nullopt;
    } catch (const Error& error) {
        return error;
    }
}

void load_moments(const Checkpoint& checkpoint, Trainer& trainer) {
    for (const Parameter& parameter : trainer.parameters().all()) {
        const Share mine = trainer.optimizer().updated(parameter);
        if (mine.count == 0)
            continue;
        for (const Parted what : kMoments) {
            const auto values =
                read_tensor(checkpoint, "optimizer", moment_name(parameter, what), parameter.info);
            trainer.optimizer().upload(parameter, what,
                                       std::span(values).subspan(mine.first, mine.count));
        }
    }
}

} // namespace

std::filesystem::path save_checkpoint(const std::filesystem::path& run,
                                      const std::map<std::string, std::string>& texts,
                                      Trainer& trainer, World& world, std::uint64_t steps_done,
                                      std::optional<double> loss) {
    const bool leads = world.rank() == 0;
    const std::vector<std::uint64_t>& writers = trainer.writers();
    const auto place =
        std::find(writers.begin(), writers.end(), static_cast<std::uint64_t>(world.rank()));
    const auto index = static_cast<std::uint64_t>(place - writers.begin());
    const auto agree = [&](std::optional<Error> mine, const char* what) {
        if (const auto worst = world.control().agree(mine, kDiskPatience, what)) {
            if (leads)
                abandon_checkpoint(run, steps_done);
            throw Error(*worst);
        }
    };
    agree(attempt([&] {
              if (leads)
                  begin_checkpoint(run, steps_done);
          }),
          "beginning a checkpoint");
    Shards shards(trainer, checkpoint_temporary(run, steps_done), index);
    const auto write = [&](Parted what, const auto& tensors) {
        try {
            trainer.gather(what);
        } catch (const Error&) { // which ends the run
            if (leads)
                abandon_checkpoint(run, steps_done);
            throw;
        }
        agree(attempt(tensors), "writing a checkpoint");
    };
    write(Parted::Masters, [&] { shards.write_weights(); });
    for (const Parted what : kMoments)
        write(what, [&] { shards.write_moments(what); });
    agree(attempt([&] {
              if (!leads)
                  return;
              CheckpointState state;
              state.step = steps_done;
              state.seed = trainer.config().train.seed;
              state.layout = trainer.layout();
              state.loss = loss;
              state.kernels = trainer.chosen_kernels();
              state.experts = trainer.expert_places();
              std::vector<std::string> names;
              for (const char* base : {"model", "optimizer"})
                  for (std::uint64_t i = 0; i < writers.size(); ++i)
                      names.push_back(shard_name(base, i, writers.size()));
              commit_checkpoint(run, state, names, texts);
          }),
          "committing a checkpoint");
    return checkpoint_folder(run, steps_done);
}

void load_checkpoint(const Checkpoint& checkpoint, Trainer& trainer, World& world) {
    const std::optional<Error> mine = attempt([&] {
        load_weights(checkpoint, trainer.parameters(),
                     [&](std::uint64_t first, std::span<const float> values) {
                         trainer.optimizer().upload_masters(first, values);
                     });
        load_moments(checkpoint, trainer);
    });
    if (const auto worst = world.control().agree(mine, kDiskPatience, "reading a checkpoint"))
        throw Error(*worst);
    trainer.resume_experts(checkpoint.state().experts);
}

FirstWeights weights_of(const HfFolder& folder, World& world,
                        std::function<void(std::uint64_t done, std::uint64_t total)> on_progress) {
    return [&folder, &world, on_progress = std::move(on_progress)](
               ParameterStore& parameters, const ParameterStore::MasterSink& masters) {
        const auto show = [&](std::uint64_t done) {
            if (on_progress)
                on_progress(done, parameters.num_elements());
        };
        const std::optional<Error> mine =
            attempt([&] { load_weights(folder, parameters, masters, show); });
        if (const auto worst = world.control().agree(mine, kDiskPatience, "reading a model"))
            throw Error(*worst);
    };
}

} // namespace bellows
