// SPDX-License-Identifier: MIT
// A checkpoint as `generate` opens it: the trained model, forward only.
#include <bellows/serve/language_model.hpp>

#include "support/small_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/train/checkpoints.hpp>

#include <cmath>

namespace bellows {
namespace {

/// A run of one rank and two steps. `before`: the loss of step 2's batch, by the weights after
/// step 1, which the checkpoint holds.
struct Trained {
    TemporaryFolder folder;
    SavedRun options;
    std::filesystem::path checkpoint;
    double before = 0;
    std::uint64_t weight_bytes = 0;
};

void train(Trained& run, const char* precision, const ModelConfig& model = small_run().model) {
    run.options.config = small_run();
    run.options.config.model = model;
    from_text(run.options.config.train.precision, precision);
    run.options.out = run.folder.path();
    const auto device = testing::make_device();
    World world = World::single();
    Trainer trainer(*device, world, run.options.config, run.options.layout);
    trainer.step(0, fill_sequence);
    run.checkpoint = save_checkpoint(run.options.out, {{kConfigFile, run.options.config_text()}},
                                     trainer, world, 1);
    run.before = trainer.step(1, fill_sequence).loss;
    device->wait_idle();
    run.weight_bytes = device->memory_report().of(MemoryCategory::Weights).bytes;
    EXPECT_GT(device->memory_report().of(MemoryCategory::Gradients).bytes, 0u);
    EXPECT_GT(device->memory_report().of(MemoryCategory::DeferredWgrad).bytes, 0u);
}

double loss_of_step(LanguageModel& model, std::uint64_t step, const TrainConfig& train) {
    double sum = 0;
    std::vector<std::uint32_t> line(train.seq + 1);
    for (std::uint64_t i = 0; i < train.batch; ++i) {
        fill_sequence(step, i, line);
        sum += model.loss(line);
    }
    return sum / static_cast<double>(train.batch);
}

TEST(LanguageModel, HasTheTrainersLossAndNoGradients) {
    for (const char* precision : {"f32", "bf16", "fp8"}) {
        SCOPED_TRACE(precision);
        Trained run;
        train(run, precision);
        const RunConfig& config = run.options.config;
        LanguageModel model(testing::test_options(), run.checkpoint);
        // The same products in another order of sums; in bf16 the head's logits are rounded alike.
        EXPECT_NEAR(loss_of_step(model, 1, config.train), run.before, 1e-5 * run.before);
        const MemoryReport report = model.memory_report();
        EXPECT_EQ(report.of(MemoryCategory::Gradients).peak_bytes, 0u)
            << describe_memory(report.peaks());
        EXPECT_EQ(report.of(MemoryCategory::DeferredWgrad).peak_bytes, 0u)
            << describe_memory(report.peaks());
        EXPECT_EQ(report.of(MemoryCategory::Optimizer).peak_bytes, 0u)
            << describe_memory(report.peaks());
        EXPECT_EQ(report.of(MemoryCategory::Weights).bytes, run.weight_bytes)
            << describe_memory(report.peaks());
    }
}

TEST(LanguageModel, HasGroupedQueriesAndTiedEmbeddings) {
    ModelConfig model = small_run().model;
    model.attention = AttentionKind::Gqa;
    model.heads = 4;
    model.kv_heads = 2;
    model.head_dim = 16;
    model.kv_lora_rank = model.qk_nope_head_dim = model.qk_rope_head_dim = model.v_head_dim = 0;
    model.dense_layers = model.layers;
    model.tied_embeddings = true;
    for (const bool norms : {false, true})
        for (const char* precision : {"f32", "fp8"}) {
            SCOPED_TRACE(precision);
            model.qk_norm = norms;
            Trained run;
            train(run, precision, model);
            LanguageModel generates(testing::test_options(), run.checkpoint);
            EXPECT_NEAR(loss_of_step(generates, 1, run.options.config.train), run.before,
                        1e-5 * run.before);
            EXPECT_EQ(generates.memory_report().of(MemoryCategory::Weights).bytes,
                      run.weight_bytes);
        }
}

TEST(LanguageModel, TheLastTokensDecide) {
    Trained run;
    train(run, "f32");
    const RunConfig& config = run.options.config;
    LanguageModel model(testing::test_options(), run.checkpoint);
    std::vector<std::uint32_t> text(3 * config.train.seq);
    fill_sequence(0, 0, text);
    const std::vector<float> logits = model.next(text);
    ASSERT_EQ(logits.size(), config.model.vocabulary);
    EXPECT_EQ(model.next(std::span(text).last(config.train.seq)), logits);
    EXPECT_NE(model.next(std::span(text).last(config.train.seq - 1)), logits);
    // What follows a text is no part of it.
    EXPECT_EQ(model.next(std::span(text).first(2)), model.next(std::span(text).first(2)));
    EXPECT_BELLOWS_ERROR(model.next({}), InvalidArgument, "no text");
    EXPECT_BELLOWS_ERROR(model.loss(text), InvalidArgument, "9 tokens, not 24");
}

} // namespace
} // namespace bellows
