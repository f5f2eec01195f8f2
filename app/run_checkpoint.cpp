// SPDX-License-Identifier: MIT
#include "app/run_checkpoint.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

namespace {

std::string moment_name(const Parameter& parameter, bool second) {
    return parameter.info.name + (second ? ".adam_v" : ".adam_m");
}

std::vector<const Parameter*> parameters_to_write(Trainer& trainer) {
    std::vector<const Parameter*> mine;
    for (const Parameter& parameter : trainer.parameters().all())
        if (trainer.stands_for(parameter))
            mine.push_back(&parameter);
    return mine;
}

void write_shards(const std::filesystem::path& folder, Trainer& trainer,
                  const std::string& model_shard, const std::string& optimizer_shard) {
    const auto mine = parameters_to_write(trainer);
    std::vector<StoredTensor> weights, moments;
    for (const Parameter* parameter : mine) {
        weights.push_back({parameter->info.name, StoredType::F32, parameter->info.shape});
        if (parameter->info.trainable())
            for (const bool second : {false, true})
                moments.push_back(
                    {moment_name(*parameter, second), StoredType::F32, parameter->info.shape});
    }
    SafetensorsWriter model(folder / model_shard, weights, {{"format", "pt"}});
    for (const Parameter* parameter : mine) {
        const auto values = trainer.parameters().download(parameter->info.name);
        model.write(parameter->info.name, std::as_bytes(std::span(values)));
    }
    model.finish();
    SafetensorsWriter optimizer(folder / optimizer_shard, moments, {{"format", "pt"}});
    for (const Parameter* parameter : mine) {
        if (!parameter->info.trainable())
            continue;
        for (const bool second : {false, true}) {
            const auto values = trainer.optimizer().download(*parameter, second);
            optimizer.write(moment_name(*parameter, second), std::as_bytes(std::span(values)));
        }
    }
    optimizer.finish();
}

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

std::vector<float> read_tensor(const Checkpoint& checkpoint, const char* base,
                               const std::string& name, const ParameterInfo& info) {
    const SafetensorsReader& reader = checkpoint.require(base, name);
    const auto* tensor = reader.find(name);
    if (tensor->type != StoredType::F32 || tensor->shape != info.shape)
        throw Error(ErrorCode::Corrupt, reader.path().string() + ": " + name +
                                            " has another type or shape than the model");
    std::vector<float> values(info.size());
    reader.read(name, std::as_writable_bytes(std::span(values)));
    return values;
}

void load_moments(const Checkpoint& checkpoint, Trainer& trainer) {
    for (const Parameter& parameter : trainer.parameters().all()) {
        if (!trainer.optimizer().updates(parameter))
            continue;
        for (const bool second : {false, true})
            trainer.optimizer().upload(parameter, second,
                                       read_tensor(checkpoint, "optimizer",
                                                   moment_name(parameter, second), parameter.info));
    }
}

} // namespace

std::filesystem::path save_checkpoint(const TrainOptions& options, Trainer& trainer, World& world,
                                      std::uint64_t steps_done) {
    const bool leads = world.rank() == 0;
    const std::vector<std::uint64_t>& writers = trainer.writers();
    const auto place =
        std::find(writers.begin(), writers.end(), static_cast<std::uint64_t>(world.rank()));
    const auto index = static_cast<std::uint64_t>(place - writers.begin());
    const auto agree = [&](std::optional<Error> mine, const char* what) {
        if (const auto worst = world.control().agree(mine, kDiskPatience, what)) {
            if (leads)
                abandon_checkpoint(options.out, steps_done);
            throw Error(*worst);
        }
    };
    agree(attempt([&] {
              if (leads)
                  begin_checkpoint(options.out, steps_done);
          }),
          "beginning a checkpoint");
    agree(attempt([&] {
              if (place != writers.end())
                  write_shards(checkpoint_temporary(options.out, steps_done), trainer,
                               shard_name("model", index, writers.size()),
                               shard_name("optimizer", index, writers.size()));
          }),
          "writing a checkpoint");
    std::filesystem::path folder;
    agree(attempt([&] {
              if (!leads)
                  return;
              CheckpointState state;
              state.step = steps_done;
              state.seed = options.config.train.seed;
              state.layout = options.layout;
              state.kernels = trainer.chosen_kernels();
              std::vector<std::string> shards;
              for (const char* base : {"model", "optimizer"})
                  for (std::uint64_t i = 0; i < writers.size(); ++i)
                      shards.push_back(shard_name(base, i, writers.size()));
              folder = commit_checkpoint(options.out, state, shards,
                                         {{"config.toml", options.config_text()}});
          }),
          "committing a checkpoint");
    return folder;
}

KernelChoice kept_kernels(const Checkpoint& checkpoint, const DeviceOptions& options) {
    KernelChoice kernels{checkpoint.state().kernels, true};
    // Before there was a choice, bf16 products were the engine's.
    if (kernels.chosen.contains("gemm") && !kernels.chosen.contains("fp8"))
        kernels.chosen.try_emplace("bf16", "decoded");
    if (!options.gemm_class.empty())
        kernels.chosen["gemm"] = options.gemm_class;
    return kernels;
}

void load_weights(const Checkpoint& checkpoint, ParameterStore& parameters) {
    for (const Parameter& parameter : parameters.all())
        parameters.upload(parameter.info.name,
                          read_tensor(checkpoint, "model", parameter.info.name, parameter.info));
}

void load_checkpoint(const Checkpoint& checkpoint, Trainer& trainer, World& world) {
    const std::optional<Error> mine = attempt([&] {
        load_weights(checkpoint, trainer.parameters());
        load_moments(checkpoint, trainer);
    });
    if (const auto worst = world.control().agree(mine, kDiskPatience, "reading a checkpoint"))
        throw Error(*worst);
}

} // namespace bellows
