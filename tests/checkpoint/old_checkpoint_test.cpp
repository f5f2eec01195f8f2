// SPDX-License-Identifier: MIT
// A checkpoint that an earlier program wrote (fixture-229285b/README.md says how): its state, its
// tensors to the byte, its loss, and a run that goes on from it. Every later program must read it.
#include "base/records/checksum.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/serve/language_model.hpp>
#include <bellows/train/checkpoints.hpp>
#include <bellows/train/sequence_source.hpp>
#include <bellows/train/trainer.hpp>

#include <array>
#include <cmath>

namespace bellows {
namespace {

namespace fs = std::filesystem;

/// Losses of the uninterrupted run that the fixture is the beginning of, from step 5 on.
constexpr std::array<double, 4> kLossesAfter = {4.906056299805641, 4.715946536511183,
                                                4.561961229890585, 4.385753499343991};

class OldCheckpoint : public ::testing::Test {
protected:
    const fs::path fixture_ = BELLOWS_OLD_CHECKPOINT;
    const Checkpoint checkpoint_ = Checkpoint::open(fixture_ / "run");
    const RunConfig config_ =
        parse_run_config(checkpoint_.text(kConfigFile), kConfigFile, fixture_);
    const Corpus corpus_ =
        Corpus::from_text(content_of(fixture_ / "corpus.txt"), Tokenizer::from_name("bytes"));
    const ShuffledSequences sequences_{
        corpus_,
        split_corpus(corpus_, 0).train,
        {config_.train.seed, config_.train.batch, config_.train.seq}};
};

/// Of names, shapes and bytes, in the order of the names.
std::uint32_t checksum_of(const Checkpoint& checkpoint, const char* base) {
    std::uint32_t sum = 0;
    const auto add = [&](const void* data, std::size_t bytes) { sum = crc32_of(data, bytes, sum); };
    for (const StoredTensor& tensor : checkpoint.tensors(base)) {
        std::vector<std::byte> bytes(bytes_of(tensor));
        checkpoint.require(base, tensor.name).read(tensor.name, bytes);
        add(tensor.name.data(), tensor.name.size());
        add(tensor.shape.data(), tensor.shape.size() * sizeof(std::uint64_t));
        add(bytes.data(), bytes.size());
    }
    return sum;
}

TEST_F(OldCheckpoint, SaysWhatItIs) {
    const CheckpointState& state = checkpoint_.state();
    EXPECT_EQ(state.step, 4u);
    EXPECT_EQ(state.seed, 7u);
    EXPECT_EQ(state.layout, (RunLayout{2, 2, 2}));
    ASSERT_EQ(state.kernels.size(), 2u);
    EXPECT_EQ(state.kernels.at("gemm"), "f32-sequential");
    const std::string& fp8 = state.kernels.at("fp8");
    EXPECT_TRUE(fp8.starts_with("decoded; streamed [f32-sequential]: nt.dense.fp8.8 ")) << fp8;
    EXPECT_TRUE(fp8.ends_with(" nt.masked.bf16_fp8.32")) << fp8;
    EXPECT_EQ(config_.model.hidden, 16u);
    EXPECT_EQ(config_.model.moe_layers(), 1u);
    EXPECT_EQ(config_.train.precision, Precision::FP8);
    EXPECT_EQ(config_.train.steps, 4u);
    EXPECT_EQ(config_.train.pp, 2u);
    EXPECT_EQ(config_.train.ep, 2u);
}

TEST_F(OldCheckpoint, HasItsTensorsToTheByte) {
    EXPECT_NO_THROW(checkpoint_.verify());
    EXPECT_EQ(checkpoint_.tensors("model").size(), 35u);
    EXPECT_EQ(checkpoint_.tensors("optimizer").size(), 68u); // two for each but the router's bias
    EXPECT_EQ(checksum_of(checkpoint_, "model"), 0xa9d9f48au);
    EXPECT_EQ(checksum_of(checkpoint_, "optimizer"), 0x3f8a7601u);
}

TEST_F(OldCheckpoint, HasTheLossThatTheRunHadNext) {
    LanguageModel model(testing::test_options(), checkpoint_.folder());
    double sum = 0;
    std::vector<std::uint32_t> line(config_.train.seq + 1);
    for (std::uint64_t i = 0; i < config_.train.batch; ++i) {
        sequences_(checkpoint_.state().step, i, line);
        sum += model.loss(line);
    }
    const double loss = sum / static_cast<double>(config_.train.batch);
    // One rank sums in another order than four: 6e-6 on lavapipe 22.3 and 26.2.
    EXPECT_NEAR(loss, kLossesAfter[0], 1e-4 * kLossesAfter[0]);
}

TEST_F(OldCheckpoint, IsGoneOnFrom) {
    const auto device = testing::make_device();
    World world = World::single();
    Trainer trainer(*device, world, config_, RunLayout{},
                    kept_kernels(checkpoint_.state().kernels, device->options()));
    load_checkpoint(checkpoint_, trainer, world);
    std::uint64_t step = checkpoint_.state().step;
    for (const double expected : kLossesAfter) {
        const StepResult result = trainer.step(step++, sequences_);
        // As above, growing from step to step: 6e-5 on lavapipe. Without the moments it is 1.6e-2.
        EXPECT_NEAR(result.loss, expected, 1e-3 * expected) << "step " << step;
    }
    device->wait_idle();
}

} // namespace
} // namespace bellows
