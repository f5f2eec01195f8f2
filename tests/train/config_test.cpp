// SPDX-License-Identifier: MIT

#include "support/temporary_folder.hpp"

#include <bellows/shape/presets.hpp>
#include <bellows/train/train_config.hpp>

#include <cmath>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

TrainConfig parse(const std::string& text) {
    return parse_train_config(text, "run.toml", "/base");
}

RunConfig with(std::uint64_t pp, std::uint64_t dp, std::uint64_t ep, std::uint64_t batch = 16,
               std::uint64_t micro_batches = 1) {
    RunConfig config = load_run_config("tiny");
    config.train.pp = pp;
    config.train.dp = dp;
    config.train.ep = ep;
    config.train.batch = batch;
    config.train.micro_batches = micro_batches;
    return config;
}

RunLayout layout_of(const RunConfig& config, std::uint64_t ranks) {
    return resolve_layout(config.model, config.train, ranks);
}

} // namespace

TEST(TrainConfig, ReadsAndWritesEveryKey) {
    TrainConfig config;
    config.data = {"/a b", "/c\"d"};
    config.tokenizer = "/x.model";
    config.holdout = 0.05;
    config.steps = 1234567890123;
    config.seed = 77;
    config.lr = 3e-4;
    config.lr_min = 1e-5;
    config.adam_eps = 1e-30;
    config.weight_decay = 0;
    config.precision = Precision::BF16;
    config.device = "0,1";
    config.device_link = DeviceLinkKind::Off;
    config.peak_tflops = 989.5;
    config.lr_schedule = LrSchedule::Wsd;
    config.decay_start = 100;
    config.decay_steps = 200;
    config.lr_steps = {300, 400};
    config.lr_factors = {0.5, 1e-3};
    config.batch_start = 4;
    config.batch_increment = 2;
    config.batch_ramp_steps = 50;
    config.pipeline = parse_schedule_kind("zb-v");
    config.pairs = parse_pair_mode("MLP(B) MLP(F)");
    config.pp = 2;
    config.checkpoint_every = 10;
    config.checkpoint_minutes = 2.5;
    config.sample_tokens = 7;
    config.step_timeout = 12.5;
    const std::string text = to_toml(config);
    EXPECT_EQ(parse(text), config) << text;
    EXPECT_EQ(to_toml(parse(text)), text);
    EXPECT_EQ(parse(""), TrainConfig{});
    EXPECT_EQ(parse("[train]\nlr = 1\n").lr, 1.0) << "whole numbers serve as real ones";
}

TEST(TrainConfig, PathsStartFromTheFile) {
    const TrainConfig config =
        parse("[train]\ndata = [\"text\", \"/abs\", \"../up\"]\ntokenizer = \"t.model\"");
    EXPECT_EQ(config.data, (std::vector<std::string>{"/base/text", "/abs", "/up"}));
    EXPECT_EQ(config.tokenizer, "/base/t.model");
    EXPECT_EQ(parse("[train]\ndata = \"one\"").data, (std::vector<std::string>{"/base/one"}));
}

TEST(TrainConfig, RefusesUnknownKeysAndWrongKinds) {
    EXPECT_BELLOWS_ERROR(parse("[train]\nseq = 3\nstesp = 3"), InvalidArgument,
                         "run.toml:3: unknown key \"stesp\"");
    EXPECT_BELLOWS_ERROR(parse("[train]\nstesp = 3"), InvalidArgument, "\"steps\"?");
    EXPECT_BELLOWS_ERROR(parse("[train]\n\"a\\nb\" = 3"), InvalidArgument, "\\x0a");
    EXPECT_BELLOWS_ERROR(parse("train = 3"), InvalidArgument, "table");
    EXPECT_BELLOWS_ERROR(parse("[train]\nsteps = 3.5"), InvalidArgument, "whole number");
    EXPECT_BELLOWS_ERROR(parse("[train]\nsteps = -1"), InvalidArgument, "steps");
    EXPECT_BELLOWS_ERROR(parse("[train]\nlr = \"fast\""), InvalidArgument, "number");
    EXPECT_BELLOWS_ERROR(parse("[train]\ntokenizer = 1"), InvalidArgument, "quotes");
    EXPECT_BELLOWS_ERROR(parse("[train]\ndata = [1]"), InvalidArgument, "data");
    EXPECT_BELLOWS_ERROR(parse("[train"), InvalidArgument, "run.toml:1: ");
}

TEST(TrainConfig, ValuesOutOfRangeNameTheirKey) {
    const auto check = [](const std::string& line) { validate(parse("[train]\n" + line)); };
    EXPECT_NO_THROW(check(""));
    for (const char* line : {"steps = 0",
                             "batch = 0",
                             "micro_batches = 0",
                             "seq = 0",
                             "lr = -1.0",
                             "lr = nan",
                             "lr = inf",
                             "beta1 = 1.0",
                             "beta2 = 1.0",
                             "adam_eps = 0.0",
                             "weight_decay = -0.1",
                             "clip_norm = -1.0",
                             "precision = \"f16\"",
                             "device = \"tpu\"",
                             "device = \"\"",
                             "device_link = \"maybe\"",
                             "pipeline = \"2f2b\"",
                             "pairs = \"sometimes\"",
                             "pairs = \"\"",
                             "pairs = \"MPL(B) MLP(F)\"",
                             "pp = 0",
                             "holdout = 1.0",
                             "keep_checkpoints = 0",
                             "lr_min = 1.0"}) {
        const std::string key(line, std::string_view(line).find(' '));
        EXPECT_BELLOWS_ERROR((check(line), 0), InvalidArgument, key);
    }
    // Whole numbers that no double equals.
    EXPECT_BELLOWS_ERROR((check("lr = 9007199254740993"), 0), InvalidArgument, "lr = 9.0072e+15");
    EXPECT_BELLOWS_ERROR((check("beta1 = -9223372036854775807"), 0), InvalidArgument, "beta1");
    EXPECT_EQ(parse("[train]\nclip_norm = 9007199254740993").clip_norm, 9007199254740992.0);
    EXPECT_BELLOWS_ERROR((check("step_timeout = 0.0"), 0), InvalidArgument, "step_timeout");
    EXPECT_BELLOWS_ERROR((check("warmup_steps = 5\ndecay_steps = 5"), 0), InvalidArgument,
                         "decay_steps");
}

TEST(TrainConfig, PipelinesGetMicroBatches) {
    TrainConfig config;
    config.batch = 24;
    config.pp = 2;
    EXPECT_EQ(usual_micro_batches(config, 2), 4u);
    EXPECT_EQ(usual_micro_batches(config, 4), 4u); // two replicas with 12 sequences each
    config.pp = 4;
    EXPECT_EQ(usual_micro_batches(config, 4), 8u);
    config.batch = 20; // 10 and 20 divide it; interleaved wants a multiple of 4
    EXPECT_EQ(usual_micro_batches(config, 4), 10u);
    config.pipeline = parse_schedule_kind("interleaved");
    EXPECT_EQ(usual_micro_batches(config, 4), 20u);
    config.batch = 6;
    EXPECT_EQ(usual_micro_batches(config, 4), 1u);
}

TEST(TrainConfig, LearningRateWarmsUpAndDecaysWhateverTheEnd) {
    TrainConfig config;
    config.lr = 1;
    EXPECT_EQ(learning_rate(config, 1), 1);
    EXPECT_EQ(learning_rate(config, 100000), 1);
    config.warmup_steps = 10;
    config.decay_steps = 110;
    config.lr_min = 0.1;
    EXPECT_DOUBLE_EQ(learning_rate(config, 1), 0.1);
    EXPECT_DOUBLE_EQ(learning_rate(config, 10), 1);
    EXPECT_DOUBLE_EQ(learning_rate(config, 60), 0.55);
    EXPECT_DOUBLE_EQ(learning_rate(config, 110), 0.1);
    EXPECT_DOUBLE_EQ(learning_rate(config, 5000), 0.1);
    TrainConfig longer = config;
    longer.steps = 2 * config.steps;
    EXPECT_EQ(learning_rate(config, 37), learning_rate(longer, 37)) << "a resume may add steps";
}

TEST(TrainConfig, LearningRateStaysUntilItDecays) {
    TrainConfig config;
    config.lr = 1;
    config.lr_min = 0.1;
    config.warmup_steps = 10;
    config.decay_start = 110;
    config.decay_steps = 210;
    EXPECT_EQ(learning_rate(config, 110), 1);
    EXPECT_DOUBLE_EQ(learning_rate(config, 160), 0.55) << "half a cosine";
    EXPECT_DOUBLE_EQ(learning_rate(config, 210), 0.1);

    config.lr_schedule = LrSchedule::Wsd;
    EXPECT_NO_THROW(validate(config));
    EXPECT_DOUBLE_EQ(learning_rate(config, 5), 0.5);
    EXPECT_EQ(learning_rate(config, 11), 1);
    EXPECT_EQ(learning_rate(config, 110), 1);
    EXPECT_DOUBLE_EQ(learning_rate(config, 135), 0.55) << "1 - sqrt(1/4)";
    EXPECT_DOUBLE_EQ(learning_rate(config, 174), 0.1 + 0.9 * (1 - 0.8));
    EXPECT_DOUBLE_EQ(learning_rate(config, 210), 0.1);
    EXPECT_DOUBLE_EQ(learning_rate(config, 9999), 0.1);
    // While it is stable the end is open; a resumed run that decays has had the same rates.
    TrainConfig stable = config;
    stable.decay_start = stable.decay_steps = 0;
    EXPECT_NO_THROW(validate(stable));
    for (const std::uint64_t step : {3, 10, 60, 110})
        EXPECT_EQ(learning_rate(stable, step), learning_rate(config, step));
    EXPECT_EQ(learning_rate(stable, 5000), 1);
}

TEST(TrainConfig, LearningRateFallsInSteps) {
    TrainConfig config = parse("[train]\nlr = 2.4e-4\nwarmup_steps = 10\nlr_schedule = \"step\"\n"
                               "lr_steps = [600, 900]\nlr_factors = [0.316]\n");
    EXPECT_NO_THROW(validate(config));
    EXPECT_EQ(parse(to_toml(config)), config);
    EXPECT_DOUBLE_EQ(learning_rate(config, 600), 2.4e-4);
    EXPECT_DOUBLE_EQ(learning_rate(config, 601), 2.4e-4 * 0.316);
    EXPECT_DOUBLE_EQ(learning_rate(config, 900), 2.4e-4 * 0.316);
    EXPECT_DOUBLE_EQ(learning_rate(config, 1000), 2.4e-4 * 0.316 * 0.316);
    config.lr_factors = {0.5, 0.1};
    EXPECT_DOUBLE_EQ(learning_rate(config, 901), 2.4e-4 * 0.05);
    // DeepSeek-V3's: a cosine that begins late, and a last phase with a third of where it ends.
    config.lr_schedule = LrSchedule::Cosine;
    config.lr = 2.2e-4;
    config.lr_min = 2.2e-5;
    config.decay_start = 670;
    config.decay_steps = 960;
    config.lr_steps = {989};
    config.lr_factors = {7.3 / 22};
    EXPECT_NO_THROW(validate(config));
    EXPECT_DOUBLE_EQ(learning_rate(config, 670), 2.2e-4);
    EXPECT_DOUBLE_EQ(learning_rate(config, 989), 2.2e-5);
    EXPECT_DOUBLE_EQ(learning_rate(config, 990), 7.3e-6);
}

TEST(TrainConfig, SchedulesOfTheRateThatDoNotFitTogetherAreRefused) {
    const auto refused = [](const std::string& lines, const char* word) {
        EXPECT_BELLOWS_ERROR((validate(parse("[train]\n" + lines)), 0), InvalidArgument, word);
    };
    refused("lr_schedule = \"sine\"", "\"cosine\", \"wsd\"");
    refused("lr_schedule = \"wsd\"\ndecay_steps = 100", "needs decay_start");
    refused("lr_schedule = \"constant\"\ndecay_steps = 100", "decay_steps = 100 is of no use");
    refused("lr_schedule = \"constant\"\nlr_steps = [5]\nlr_factors = [0.5]", "take \"step\"");
    refused("lr_schedule = \"step\"", "needs lr_steps");
    refused("decay_start = 5", "decay_start = 5");
    refused("decay_start = 100\ndecay_steps = 100", "decay_start = 100");
    refused("warmup_steps = 10\ndecay_start = 5\ndecay_steps = 100", "decay_start = 5");
    refused("lr_steps = [5, 5]\nlr_factors = [0.5]", "ascend");
    refused("lr_steps = [5, 6, 7]\nlr_factors = [0.5, 0.5]", "2 factors for 3");
    refused("lr_steps = [5]", "0 factors for 1");
    refused("lr_factors = [0.5]", "1 factors for 0");
    refused("lr_steps = [5]\nlr_factors = [0.0]", "lr_factors = 0");
    refused("lr_steps = 5", "square brackets");
    refused("lr_steps = [0.5]", "whole number");
}

TEST(RunConfig, EveryPresetLoads) {
    ASSERT_GE(preset_names().size(), 3u);
    for (const std::string& preset : preset_names()) {
        const RunConfig config = load_run_config(preset);
        EXPECT_NO_THROW(validate(config.train));
        const RunConfig again = parse_run_config(to_toml(config), "again", "/");
        EXPECT_TRUE(again.model == config.model);
        EXPECT_TRUE(again.train == config.train) << to_toml(config);
    }
}

TEST(RunConfig, FilesAndWhatIsNeither) {
    TemporaryFolder folder;
    const std::string text = std::string(preset_text("v2-lite")) + "\n[train]\ndata = [\"x\"]\n";
    const fs::path file = folder.write("my.toml", text);
    EXPECT_EQ(load_run_config(file.string()).train.data.back(), (folder.path() / "x").string());
    EXPECT_BELLOWS_ERROR(load_run_config("tinny"), InvalidArgument, "tiny");
    EXPECT_BELLOWS_ERROR(load_run_config(folder.path().string()), Io, "regular file");
    folder.write("extra.toml", text + "[other]\nx = 1\n");
    EXPECT_BELLOWS_ERROR(load_run_config((folder.path() / "extra.toml").string()), InvalidArgument,
                         "other");
}

TEST(Layout, RanksFactorAndDefaultsFollow) {
    EXPECT_EQ(layout_of(with(1, 0, 0), 1), (RunLayout{1, 1, 1}));
    EXPECT_EQ(layout_of(with(1, 0, 0), 4), (RunLayout{1, 4, 4}));
    EXPECT_EQ(layout_of(with(2, 0, 0), 4), (RunLayout{2, 2, 2}));
    EXPECT_EQ(layout_of(with(1, 2, 1), 2), (RunLayout{1, 2, 1}));
    EXPECT_BELLOWS_ERROR(layout_of(with(3, 0, 0), 4), InvalidArgument, "3 stages");
    EXPECT_BELLOWS_ERROR(layout_of(with(2, 4, 0), 4), InvalidArgument, "8 ranks, not 4");
    EXPECT_BELLOWS_ERROR(layout_of(with(1, 4, 3), 4), InvalidArgument, "ep = 3");
    EXPECT_BELLOWS_ERROR(layout_of(with(0, 0, 0), 4), InvalidArgument, "pp = 0");
    EXPECT_BELLOWS_ERROR(layout_of(with(8, 0, 0), 8), InvalidArgument, "layers");
    EXPECT_BELLOWS_ERROR(layout_of(with(1, 0, 0), 0), InvalidArgument, "ranks = 0");
    EXPECT_BELLOWS_ERROR(layout_of(with(1, 0, 0), 1ull << 60), InvalidArgument, "ranks");
    EXPECT_BELLOWS_ERROR(layout_of(with(1, 0, 0, 16), 3), InvalidArgument, "multiple of 3");
    EXPECT_BELLOWS_ERROR(layout_of(with(1, 0, 0, 16, 5), 2), InvalidArgument, "multiple of 10");
}
