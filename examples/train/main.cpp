// SPDX-License-Identifier: MIT
// A training run in code: a model of one's own size, the loop, a checkpoint, and a second trainer
// that goes on from it with the same bits.
//
//   ./train [TEXT_FILE [FOLDER]]                on one rank
//   mpirun -n 2 ./train [TEXT_FILE [FOLDER]]    on 2, 3, 4 or 6
//
// Without a file, or with "", the text is the one below. The checkpoint is kept in FOLDER, from
// where `bellows generate --checkpoint FOLDER --prompt "A bellows"` writes text; without FOLDER it
// is removed at the end.

#include <bellows/base/error.hpp>
#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/train/checkpoints.hpp>
#include <bellows/train/trainer.hpp>

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <span>
#include <string>

namespace {

constexpr std::uint64_t kSteps = 30;
/// Nats per byte by which these steps must lower the loss.
constexpr double kLeastFall = 1.5;

constexpr const char* kText =
    "A bellows is a bag of leather between two boards. Where the boards part, air comes in "
    "through a valve; where they close, it leaves through a pipe. A smith blows air into the fire "
    "with it, so that the coal burns hot and the iron glows. An organ has bellows, too: they fill "
    "a chest with air, and the weight on the chest keeps the air even, so that the pipes speak "
    "with one voice. Two bellows that work in turn give a stream of air that never stops: while "
    "the one fills, the other blows. So the fire burns on, and the iron does not cool while the "
    "smith takes breath.\n";

bellows::RunConfig run_config() {
    bellows::RunConfig run;
    bellows::ModelConfig& model = run.model;
    model.vocabulary = 256; // bytes
    model.hidden = 48;
    model.layers = 2;
    model.dense_layers = 1; // the first has a dense FFN, the second has experts
    model.heads = 2;
    model.kv_lora_rank = 24;
    model.qk_nope_head_dim = 16;
    model.qk_rope_head_dim = 8;
    model.v_head_dim = 16;
    model.dense_ffn = 96;
    model.moe_ffn = 32;
    model.routed_experts = 6;
    model.shared_experts = 1;
    model.top_k = 2;
    run.train.batch = 12; // sequences of each step, over all ranks
    run.train.seq = 32;
    run.train.steps = kSteps;
    run.train.lr = 1e-2;
    run.train.warmup_steps = 5;
    return run;
}

/// The same on every rank, and another one for every other run of this host.
std::filesystem::path temporary_folder(bellows::World& world) {
    std::int64_t process = getpid();
    bellows::HostCollectives(world, bellows::Group::all(world.size()))
        .all_reduce_max(std::span(&process, 1));
    return std::filesystem::temp_directory_path() / ("bellows-train-" + std::to_string(process));
}

int run(bellows::World& world, const std::string& file, const std::string& named) {
    const bellows::RunConfig config = run_config();
    const bellows::RunLayout layout = bellows::resolve_layout(
        config.model, config.train, static_cast<std::uint64_t>(world.size()));

    const auto tokenizer = bellows::Tokenizer::bytes();
    const std::filesystem::path path = file;
    const bellows::Corpus corpus = file.empty()
                                       ? bellows::Corpus::from_text(kText, tokenizer)
                                       : bellows::Corpus::read(std::span(&path, 1), tokenizer);
    // Asked for the sequences of this rank; what they hold depends on the step and index alone.
    const bellows::ShuffledSequences source(
        corpus, {0, corpus.num_tokens()},
        {config.train.seed, config.train.batch, config.train.seq});

    const auto device = bellows::Device::create(
        bellows::device_options_of_rank(config.train.device, world.local_rank()));
    bellows::Trainer trainer(*device, world, config, layout);
    const bool leads = world.rank() == 0;
    double first = 0, last = 0;
    for (std::uint64_t step = 0; step < kSteps; ++step) {
        last = trainer.step(step, source).loss; // of all ranks together, the same on each
        if (step == 0)
            first = last;
        if (leads && step % 5 == 0)
            std::printf("step %2llu: %.3f nats per byte\n", static_cast<unsigned long long>(step),
                        last);
    }

    const auto folder = named.empty() ? temporary_folder(world) : std::filesystem::path(named);
    bellows::save_checkpoint(folder, {{bellows::kConfigFile, bellows::to_toml(config)}}, trainer,
                             world, kSteps);
    const double expected = trainer.step(kSteps, source).loss;

    const auto checkpoint = bellows::Checkpoint::open(folder); // the newest there
    // Which kernels computed is part of the bits; the checkpoint keeps their choice.
    bellows::Trainer second(*device, world, config, layout,
                            bellows::kept_kernels(checkpoint.state().kernels, device->options()));
    bellows::load_checkpoint(checkpoint, second, world);
    const double actual = second.step(checkpoint.state().step, source).loss;

    if (leads && named.empty()) // all ranks have read it
        std::filesystem::remove_all(folder);
    if (leads)
        std::printf(
            "ranks %d, loss after %llu steps %.3f; of the next step %.17g, from the checkpoint "
            "%.17g\n",
            world.size(), static_cast<unsigned long long>(kSteps), last, expected, actual);
    const bool fell = first - last >= kLeastFall, same = actual == expected;
    if (leads && !fell)
        std::fprintf(stderr, "train: the loss fell by %.3f, not %.3f\n", first - last, kLeastFall);
    if (leads && !same)
        std::fprintf(stderr, "train: the checkpoint gives another loss\n");
    return fell && same ? 0 : 1;
}

} // namespace

int main(int argc, char** argv) {
    try {
        return bellows::in_world([&](bellows::World& world) {
            return run(world, argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");
        });
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "train: %s\n", error.what());
        return 3;
    }
}
