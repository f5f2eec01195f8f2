// SPDX-License-Identifier: MIT
// Checkpoints of a trainer on two ranks whose disks differ in speed, or of which one fails.
#include <bellows/train/checkpoints.hpp>

#include "support/mpi_test.hpp"
#include "support/shared_folder.hpp"
#include "support/small_run.hpp"
#include "support/test_device.hpp"

#include <chrono>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace bellows {
namespace {

using testing::world;
using Clock = std::chrono::steady_clock;

/// A trainer on this rank.
class RunCheckpoint : public ::testing::Test {
protected:
    RunCheckpoint() {
        const auto ranks = static_cast<std::uint32_t>(world().size());
        options_.config = small_run();
        options_.layout = {1, ranks, ranks};
        options_.out = folder_.path();
        trainer_.emplace(*device_, world(), options_.config, options_.layout);
        trainer_->step(0, fill_sequence);
        device_->wait_idle();
    }
    ~RunCheckpoint() override {
        trainer_.reset();
        world().control().barrier(std::chrono::seconds(60)); // before the folder goes
    }

    std::filesystem::path checkpoint_folder() const {
        return options_.out / "checkpoints" / "step-1";
    }

    std::unique_ptr<Device> device_ = testing::make_device();
    SharedFolder folder_;
    SavedRun options_;
    std::optional<Trainer> trainer_;
};

// Whoever has read its part waits for the others: the first exchange after it has a minute.
TEST_F(RunCheckpoint, RanksLeaveTheReadingTogether) {
    constexpr std::chrono::milliseconds kSlower{1500};
    save_checkpoint(options_.out, {{kConfigFile, options_.config_text()}}, *trainer_, world(), 1);
    const Checkpoint checkpoint = Checkpoint::open(checkpoint_folder());
    world().control().barrier(std::chrono::seconds(60));
    const auto start = Clock::now();
    if (world().rank() == 1)
        std::this_thread::sleep_for(kSlower);
    load_checkpoint(checkpoint, *trainer_, world());
    EXPECT_GE(Clock::now() - start, kSlower - std::chrono::milliseconds(100));
    EXPECT_TRUE(std::isfinite(trainer_->step(1, fill_sequence).loss));
    device_->wait_idle();
}

TEST_F(RunCheckpoint, WhatOneRankCannotReadFailsOnAll) {
    save_checkpoint(options_.out, {{kConfigFile, options_.config_text()}}, *trainer_, world(), 1);
    const Checkpoint checkpoint = Checkpoint::open(checkpoint_folder());
    world().control().barrier(std::chrono::seconds(60));
    // Rank 1 reads the second shard alone; its last byte belongs to a tensor of that rank.
    const std::filesystem::path shard = checkpoint_folder() / shard_name("optimizer", 1, 2);
    if (world().rank() == 0) {
        std::string content = content_of(shard);
        content.back() = static_cast<char>(content.back() ^ 1);
        std::ofstream(shard, std::ios::binary) << content;
    }
    world().control().barrier(std::chrono::seconds(60));
    try {
        load_checkpoint(checkpoint, *trainer_, world());
        ADD_FAILURE() << "rank " << world().rank() << " went on";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Corrupt) << error.message();
        EXPECT_NE(error.message().find(shard.string()), std::string::npos) << error.message();
        EXPECT_EQ(error.rank(), 1) << error.message();
    }
}

// A row that no token of the step has used: neither the loss nor the gradient shows it.
TEST_F(RunCheckpoint, WeightsThatAreNotFiniteAreNotWritten) {
    const std::string name = "model.embed_tokens.weight";
    const std::map<std::string, std::string> texts = {{kConfigFile, options_.config_text()}};
    EXPECT_EQ(save_checkpoint(options_.out, texts, *trainer_, world(), 1, 5.5),
              checkpoint_folder());
    world().control().barrier(std::chrono::seconds(60));
    EXPECT_EQ(Checkpoint::open(checkpoint_folder()).state().loss, 5.5);
    std::vector<float> values = trainer_->parameters().download(name);
    values[3] = std::nanf("");
    trainer_->parameters().upload(name, values);
    try {
        save_checkpoint(options_.out, texts, *trainer_, world(), 2);
        ADD_FAILURE() << "rank " << world().rank() << " went on";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Diverged) << error.message();
        EXPECT_NE(error.message().find(in_quotes(name)), std::string::npos) << error.message();
        EXPECT_NE(error.message().find("first at 3"), std::string::npos) << error.message();
    }
    world().control().barrier(std::chrono::seconds(60));
    EXPECT_EQ(latest_checkpoint(options_.out), checkpoint_folder());
    EXPECT_FALSE(std::filesystem::exists(checkpoint_temporary(options_.out, 2)));
    EXPECT_NO_THROW(Checkpoint::open(checkpoint_folder()).verify());
}

// Before anything is made, and by itself: the caller need not have validated it.
TEST(TrainerConfig, IsValidated) {
    const auto device = testing::make_device();
    const auto ranks = static_cast<std::uint32_t>(world().size());
    const auto refusal = [&](const std::function<void(RunConfig&, RunLayout&)>& change) {
        RunConfig config = small_run();
        RunLayout layout{1, ranks, ranks};
        change(config, layout);
        try {
            const Trainer trainer(*device, world(), config, layout);
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.message();
            return error.message();
        }
        return std::string("nothing");
    };
    using Config = RunConfig;
    using Layout = RunLayout;
    const std::vector<std::pair<const char*, std::function<void(Config&, Layout&)>>> cases = {
        {"top_k", [](Config& c, Layout&) { c.model.top_k = 99; }},
        {"lr_min", [](Config& c, Layout&) { c.train.lr_min = 2 * c.train.lr; }},
        {"batch", [](Config& c, Layout&) { c.train.batch = 0; }},
        {"micro-batches", [](Config& c, Layout&) { c.train.batch = 5; }},
        {"ranks", [](Config&, Layout& l) { l.dp = 7; }},
        {"dp = 0", [](Config&, Layout& l) { l.dp = 0; }},
        {"pp", [](Config&, Layout& l) { l.pp = 0; }},
        {"ep = 3", [](Config&, Layout& l) { l.ep = 3; }}};
    for (const auto& [word, change] : cases)
        EXPECT_NE(refusal(change).find(word), std::string::npos) << word << ": " << refusal(change);
}

/// What each rank's trainer takes when rank 0 is told `mine` and the others `others`.
std::string products_taken(Device& device, const std::string& mine, const std::string& others,
                           bool binding = false, const char* precision = "fp8") {
    RunConfig config = small_run();
    from_text(config.train.precision, precision);
    const auto ranks = static_cast<std::uint32_t>(world().size());
    Trainer trainer(device, world(), config, {1, ranks, ranks},
                    {{{precision, world().rank() == 0 ? mine : others}}, binding});
    EXPECT_TRUE(std::isfinite(trainer.step(0, fill_sequence).loss));
    device.wait_idle();
    return trainer.chosen_kernels().at(precision);
}

TEST(ChoiceOfProducts, RankZeroChoosesForAll) {
    const auto device = testing::make_device();
    fp8::Choice choice(fp8::Variant::Decoded);
    choice.set(*fp8::product_kind("nt.dense.fp8.127"), fp8::Variant::Packed);
    const std::string text = describe(*device, choice);
    const bool packs = fp8::why_not(*device, fp8::Variant::Packed).empty();
    EXPECT_EQ(products_taken(*device, text, "decoded"), packs ? text : "decoded");
    EXPECT_EQ(products_taken(*device, "decoded", text), "decoded");
    EXPECT_EQ(products_taken(*device, "decoded", "no choice at all", true), "decoded");
    const std::string elsewhere = "decoded; packed [packed-f16-k99]: nt.dense.fp8.127";
    EXPECT_EQ(products_taken(*device, elsewhere, "decoded"), "decoded");
    try {
        products_taken(*device, elsewhere, "decoded", true);
        ADD_FAILURE() << "rank " << world().rank() << " went on";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported) << error.message();
        EXPECT_NE(error.message().find("packed-f16-k99"), std::string::npos) << error.message();
    }
    world().control().barrier(std::chrono::seconds(60));
}

TEST(ChoiceOfProducts, RankZeroChoosesForAllInBf16) {
    const auto device = testing::make_device();
    const std::string direct = describe(*device, fp8::of_bf16(fp8::Variant::Direct));
    const bool can = fp8::why_not(*device, fp8::Variant::Direct).empty();
    const auto taken = [&](const std::string& mine, const std::string& others,
                           bool binding = false) {
        return products_taken(*device, mine, others, binding, "bf16");
    };
    EXPECT_EQ(taken("direct", "decoded"), can ? direct : "decoded");
    EXPECT_EQ(taken("decoded", "direct", true), "decoded");
    const std::string elsewhere = "decoded; direct [direct-bf16-k99]: nt.grouped.bf16.511";
    EXPECT_EQ(taken(elsewhere, "decoded"), "decoded");
    try {
        taken(elsewhere, "decoded", true);
        ADD_FAILURE() << "rank " << world().rank() << " went on";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported) << error.message();
        EXPECT_NE(error.message().find("direct-bf16-k99"), std::string::npos) << error.message();
    }
    world().control().barrier(std::chrono::seconds(60));
}

} // namespace
} // namespace bellows
