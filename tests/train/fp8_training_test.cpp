// SPDX-License-Identifier: MIT
// Training with FP8 linear layers: the loss goes the way of bf16's, and a run repeats and resumes
// bit by bit, also where it computes products otherwise than the device usually does.
#include "support/small_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <bellows/train/checkpoints.hpp>
#include <bellows/train/trainer.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace bellows {
namespace {

RunConfig run_with(const char* precision) {
    RunConfig run = small_run();
    from_text(run.train.precision, precision);
    run.train.lr = 3e-3;
    return run;
}

std::vector<double> losses(const char* precision, std::uint64_t steps) {
    const auto device = testing::make_device();
    World world = World::single();
    Trainer trainer(*device, world, run_with(precision), {});
    std::vector<double> all;
    for (std::uint64_t step = 0; step < steps; ++step)
        all.push_back(trainer.step(step, fill_sequence).loss);
    device->wait_idle();
    return all;
}

/// Moving averages, each with a tenth of the newest.
std::vector<double> smoothed(std::vector<double> values) {
    for (std::size_t i = 1; i < values.size(); ++i)
        values[i] = 0.9 * values[i - 1] + 0.1 * values[i];
    return values;
}

TEST(Fp8Training, TheLossFollowsBf16) {
    constexpr std::uint64_t kSteps = 60;
    const std::vector<double> fp8 = losses("fp8", kSteps), bf16 = losses("bf16", kSteps);
    EXPECT_NE(fp8, bf16) << "nothing was computed in FP8";
    const std::vector<double> a = smoothed(fp8), b = smoothed(bf16);
    EXPECT_LT(b.back(), 0.9 * b.front()) << "too little is learnt to compare";
    double worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        worst = std::max(worst, std::abs(a[i] / b[i] - 1));
    RecordProperty("largest_difference", std::to_string(worst));
    // FP8 rounds what enters a product by up to 6 %; a wrong gradient is off by far more.
    EXPECT_LE(worst, 0.005);
}

TEST(Fp8Training, ARunRepeatsAndResumesBitByBit) {
    TemporaryFolder folder;
    SavedRun options;
    options.config = run_with("fp8");
    options.out = folder.path();
    const auto device = testing::make_device();
    World world = World::single();
    std::vector<double> whole;
    std::filesystem::path saved;
    {
        Trainer trainer(*device, world, options.config, options.layout);
        for (std::uint64_t step = 0; step < 4; ++step) {
            whole.push_back(trainer.step(step, fill_sequence).loss);
            if (step == 1)
                saved = save_checkpoint(options.out, {{kConfigFile, options.config_text()}},
                                        trainer, world, 2);
        }
        device->wait_idle();
    }
    EXPECT_EQ(losses("fp8", 4), whole);
    Trainer trainer(*device, world, options.config, options.layout);
    load_checkpoint(Checkpoint::open(saved), trainer, world);
    for (std::uint64_t step = 2; step < 4; ++step)
        EXPECT_EQ(trainer.step(step, fill_sequence).loss, whole[step]) << "step " << step;
    device->wait_idle();
}

/// Matrices of 128 and more columns, which products on tiles are for, and 64 tokens.
RunConfig wide_run() {
    RunConfig run = run_with("fp8");
    run.model.hidden = 128;
    run.model.dense_ffn = 128;
    run.train.seq = 16;
    return run;
}

constexpr std::uint64_t kWideSteps = 3;

struct Outcome {
    std::vector<float> moments; ///< of some matrices' gradients at the end
    std::map<std::string, std::string> kernels;
    std::filesystem::path saved; ///< after the first step
};

/// AdamW's, which show the gradients' last bits.
std::vector<float> moments_of(Trainer& trainer) {
    std::vector<float> all;
    for (const char* name :
         {"0.self_attn.kv_a_proj_with_mqa", "0.mlp.gate_up_proj", "1.mlp.experts.0.down_proj"}) {
        const std::vector<float> some = trainer.optimizer().download(
            trainer.parameters().at("model.layers." + std::string(name) + ".weight"),
            Parted::FirstMoments);
        all.insert(all.end(), some.begin(), some.end());
    }
    return all;
}

Outcome run_of(Device& device, const KernelChoice& kernels, const std::filesystem::path& folder) {
    World world = World::single();
    SavedRun options;
    options.config = wide_run();
    options.out = folder;
    Trainer trainer(device, world, options.config, options.layout, kernels);
    Outcome outcome;
    for (std::uint64_t step = 0; step < kWideSteps; ++step) {
        trainer.step(step, fill_sequence);
        device.wait_idle();
        if (step == 0)
            outcome.saved = save_checkpoint(options.out, {{kConfigFile, options.config_text()}},
                                            trainer, world, 1);
    }
    outcome.moments = moments_of(trainer);
    outcome.kernels = trainer.chosen_kernels();
    return outcome;
}

TEST(Fp8Training, TheChoiceOfProductsStaysWithTheRun) {
    TemporaryFolder usual_folder, other_folder;
    const auto device = testing::make_device();
    const Outcome usual = run_of(*device, {}, usual_folder.path());
    EXPECT_EQ(usual.kernels.at("fp8"),
              describe(*device, fp8::choose(fp8::measure(*device, {.timed = fp8::Timed::None}),
                                            fp8::Bits::Usual)));
    // Weight gradients on matrix units, where that is not usual.
    fp8::Choice choice(fp8::Variant::Decoded);
    choice.set(*fp8::product_kind("tn.dense.fp8.127"), fp8::Variant::Packed);
    const std::string text = describe(*device, choice);
    const bool packs = fp8::why_not(*device, fp8::Variant::Packed).empty();
    const Outcome other = run_of(*device, {{{"fp8", text}}, false}, other_folder.path());
    EXPECT_EQ(other.kernels.at("fp8"), packs ? text : "decoded");
    const fp8::ProductKind kind = *fp8::product_kind("tn.dense.fp8.127");
    // A GPU's units may well sum in the same order both ways.
    if (device->info().is_cpu &&
        fp8::parse_choice(*device, usual.kernels.at("fp8")).at(kind) == fp8::Variant::Decoded) {
        EXPECT_EQ(other.moments != usual.moments, packs) << "nothing was computed otherwise";
    }

    // Goes on with its own choice, whatever is usual.
    const Checkpoint checkpoint = Checkpoint::open(other.saved);
    const KernelChoice kept = kept_kernels(checkpoint.state().kernels, device->options());
    EXPECT_TRUE(kept.binding);
    EXPECT_EQ(kept.chosen, other.kernels);
    World world = World::single();
    {
        Trainer trainer(*device, world, wide_run(), {}, kept);
        load_checkpoint(checkpoint, trainer, world);
        for (std::uint64_t step = 1; step < kWideSteps; ++step)
            trainer.step(step, fill_sequence);
        device->wait_idle();
        EXPECT_EQ(moments_of(trainer), other.moments);
    }
    // What the device lacks is not replaced then.
    const std::string elsewhere = "decoded; packed [packed-f16-k99]: tn.dense.fp8.127";
    EXPECT_EQ(Trainer(*device, world, wide_run(), {}, {{{"fp8", elsewhere}}, false})
                  .chosen_kernels()
                  .at("fp8"),
              "decoded");
    try {
        Trainer(*device, world, wide_run(), {}, {{{"fp8", elsewhere}}, true});
        ADD_FAILURE() << "computed otherwise";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported);
        for (const char* part : {"packed-f16-k99", "BELLOWS_FP8_VARIANTS=decoded"})
            EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    }
}

/// Whether operands of weight gradients are quantised to codes, which the product decodes, or to
/// their values is all the same.
TEST(Fp8Training, WeightGradientsOfCodesAndOfTheirValuesHaveTheSameBits) {
    TemporaryFolder of_values, of_codes;
    const auto device = testing::make_device();
    fp8::Choice usual_weight_gradients(fp8::Variant::Device);
    for (const fp8::ProductKind& kind : fp8::product_kinds())
        if (kind.form != GemmForm::TN)
            usual_weight_gradients.set(kind, fp8::Variant::Decoded);
    const Outcome values = run_of(*device, {{{"fp8", "decoded"}}, true}, of_values.path());
    const Outcome codes = run_of(
        *device, {{{"fp8", describe(*device, usual_weight_gradients)}}, true}, of_codes.path());
    EXPECT_NE(codes.kernels, values.kernels);
    EXPECT_EQ(codes.moments, values.moments);
    EXPECT_TRUE(std::any_of(values.moments.begin(), values.moments.end(),
                            [](float moment) { return moment != 0; }));
}

} // namespace
} // namespace bellows
