// SPDX-License-Identifier: MIT
// Hugging Face folders on the command line: what is shown, taken and refused.
#include "app/command_line.hpp"
#include "app/commands.hpp"
#include "app/model_folder.hpp"
#include "app/train/initial_model.hpp"
#include "checkpoint/hf_models.hpp"

#include "support/temporary_folder.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>
#include <vector>

using namespace bellows;
namespace fs = std::filesystem;
using bellows::testing::hf_model;

namespace {

struct Result {
    int code = -1;
    std::string out, errors;
    std::optional<TrainOptions> train;
    std::optional<GenerateOptions> generate;
};

Result run(std::vector<std::string> arguments) {
    Result result;
    Commands commands;
    commands.train = [&](const TrainOptions& options) {
        result.train = options;
        return 0;
    };
    commands.generate = [&](const GenerateOptions& options) {
        result.generate = options;
        return 0;
    };
    arguments.insert(arguments.begin(), "bellows");
    std::vector<const char*> argv;
    for (const std::string& argument : arguments)
        argv.push_back(argument.c_str());
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    result.code = run_command_line(static_cast<int>(argv.size()), argv.data(), commands);
    result.out = ::testing::internal::GetCapturedStdout();
    result.errors = ::testing::internal::GetCapturedStderr();
    return result;
}

/// Exit code 2 and one line that holds `part`; nothing ran.
void expect_refused(const Result& result, const std::string& part) {
    EXPECT_EQ(result.code, 2) << result.errors;
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << result.errors;
    EXPECT_NE(result.errors.find(part), std::string::npos) << result.errors;
    EXPECT_EQ(result.out, "");
    EXPECT_FALSE(result.train || result.generate);
}

/// The model v2 with a file changed or added.
class BadFolder {
public:
    BadFolder() {
        for (const char* name : {"config.json", "model.safetensors"})
            fs::copy_file(hf_model("v2") / name, path() / name);
    }
    void change_config(const std::function<void(nlohmann::json&)>& change) const {
        std::ifstream file(path() / "config.json");
        nlohmann::json json = nlohmann::json::parse(file);
        change(json);
        folder_.write("config.json", json.dump());
    }
    const fs::path& path() const { return folder_.path(); }
    std::string text() const { return path().string(); }

private:
    TemporaryFolder folder_;
};

} // namespace

TEST(ModelFolder, IsShown) {
    const Result text = run({"info", "--model", hf_model("v3").string()});
    EXPECT_EQ(text.code, 0) << text.errors;
    for (const char* part : {"deepseek_v3, 2 layers, 1 of them dense; 8 routed experts, top 2, 1",
                             "38904", "BF16 76.0 KiB, F32 32 B, in 2 files", "256 tokens",
                             "tokenizer              none", "ids that end a text    [1]",
                             "without effect         architectures", "tensors not used       3"})
        EXPECT_NE(text.out.find(part), std::string::npos) << part << "\n" << text.out;
    const Result json = run({"info", "--model", hf_model("v3-fp8").string(), "--json"});
    const auto report = nlohmann::json::parse(json.out);
    EXPECT_EQ(report["model_type"], "deepseek_v3");
    EXPECT_EQ(report["bytes_by_type"]["F8_E4M3"], 336192);
    EXPECT_EQ(report["layers"], 2);
    const nlohmann::json counts = {{"stored_codes", 14}, {"quantised_at_load", 6}, {"bf16", 2}};
    EXPECT_EQ(report["fp8_linear_layers"], counts);
}

TEST(ModelFolder, IsRefusedByEveryCommand) {
    const TemporaryFolder folder;
    const std::string out = (folder.path() / "out").string();
    const auto refused = [&](const BadFolder& bad, const std::string& part) {
        SCOPED_TRACE(part);
        expect_refused(run({"info", "--model", bad.text()}), part);
        expect_refused(run({"export", "--checkpoint", bad.text(), "--out", out}), part);
        expect_refused(run({"generate", "--checkpoint", bad.text(), "--prompt", "x", "--tokens",
                            "1", "--tokenizer", "bytes"}),
                       part);
        expect_refused(run({"train", "--init", bad.text(), "--data", "x", "--out", out,
                            "--tokenizer", "bytes"}),
                       part);
        EXPECT_FALSE(fs::exists(out));
    };
    const BadFolder unknown;
    unknown.change_config([](nlohmann::json& json) { json["new_key"] = 1; });
    refused(unknown, "\"new_key\" is a key that Bellows does not know");
    const BadFolder type;
    type.change_config([](nlohmann::json& json) { json["model_type"] = "mixtral"; });
    refused(type, "model_type = \"mixtral\" is not supported");
    const BadFolder shape;
    shape.change_config([](nlohmann::json& json) { json["vocab_size"] = 128; });
    refused(shape, "has the shape [64, 32], config.json wants [128, 32]");
    const BadFolder broken;
    std::ofstream(broken.path() / "config.json") << "{";
    refused(broken, "no sound JSON");
    const BadFolder cut;
    fs::resize_file(cut.path() / "model.safetensors", 50000);
    refused(cut, "the file is truncated");
    const BadFolder pickled;
    fs::rename(pickled.path() / "model.safetensors", pickled.path() / "pytorch_model.bin");
    refused(pickled, "pickled files can run code and are never read");
}

TEST(ModelFolder, GivesTextWithItsTokenizer) {
    const std::string path = hf_model("v3-fp8").string();
    const Result result = run({"generate", "--checkpoint", path, "--prompt", "x", "--tokens", "5",
                               "--tokenizer", "bytes"});
    ASSERT_TRUE(result.generate) << result.errors;
    EXPECT_EQ(result.generate->tokenizer, "bytes");
    EXPECT_EQ(result.generate->text.ends, std::vector<std::uint32_t>{1});
    EXPECT_EQ(result.generate->config.train.precision, Precision::FP8);
    EXPECT_EQ(result.generate->config.model.hidden, 136u);
    const Result wide = run({"generate", "--checkpoint", path, "--prompt", "x", "--tokens", "5",
                             "--tokenizer", "bytes", "--precision", "f32"});
    EXPECT_EQ(wide.generate->config.train.precision, Precision::F32);
    expect_refused(run({"generate", "--checkpoint", path, "--prompt", "x", "--tokens", "5"}),
                   "has no tokenizer; name one with --tokenizer");
    expect_refused(run({"generate", "--checkpoint", path, "--prompt", "x", "--tokens", "5",
                        "--tokenizer", "bytes", "--precision", "int4"}),
                   "precision");
}

TEST(ModelFolder, GivesARunItsModel) {
    const TemporaryFolder folder;
    // A vocabulary of bytes, which text can have.
    const ModelConfig tiny = load_run_config("tiny").model;
    const fs::path model = folder.path() / "model";
    fs::create_directory(model);
    std::ofstream(model / "config.json") << format_hf_config(tiny, {.max_context = 512});
    std::vector<StoredTensor> tensors;
    for (const ParameterInfo& info : parameters(tiny)) {
        const std::size_t fused = info.name.find("gate_up_proj");
        if (fused == std::string::npos) {
            tensors.push_back({info.name, StoredType::F32, info.shape});
            continue;
        }
        for (const char* part : {"gate_proj", "up_proj"})
            tensors.push_back({std::string(info.name).replace(fused, 12, part),
                               StoredType::F32,
                               {info.shape[0] / 2, info.shape[1]}});
    }
    SafetensorsWriter writer(model / "model.safetensors", tensors, {{"format", "pt"}});
    for (const StoredTensor& tensor : tensors)
        writer.write(tensor.name, std::vector<std::byte>(bytes_of(tensor)));
    writer.finish();

    std::string text;
    for (int i = 0; i < 2000; ++i)
        text += "word " + std::to_string(i) + "\n";
    const std::string data = folder.write("text.txt", text).string();
    const std::string out = (folder.path() / "run").string();
    const auto train = [&](std::vector<std::string> more) {
        more.insert(more.begin(), {"train", "--init", model.string(), "--data", data, "--out", out,
                                   "--steps", "3"});
        return run(more);
    };
    const Result plain = train({});
    ASSERT_TRUE(plain.train) << plain.errors;
    EXPECT_EQ(plain.train->init, fs::canonical(model));
    EXPECT_TRUE(computes_alike(plain.train->config.model, tiny));
    EXPECT_EQ(plain.train->config.model.max_context, 512u);
    const Result with_config = train({"--config", "tiny"});
    ASSERT_TRUE(with_config.train) << with_config.errors;
    EXPECT_EQ(with_config.train->config.train.lr, load_run_config("tiny").train.lr);
    EXPECT_EQ(with_config.train->config.model.bias_update_rate, tiny.bias_update_rate);
    expect_refused(train({"--config", "v2-lite"}), "has a model of another shape than --init");
    expect_refused(train({"--set", "model.layers=3"}), "--set changes the model");
    expect_refused(train({"--resume", out}), "leave one of them out");
    expect_refused(run({"train", "--init", folder.path().string(), "--data", data, "--out", out}),
                   "is no Hugging Face folder: it has no config.json");
}

TEST(ModelFolder, IsExported) {
    const TemporaryFolder folder;
    const std::string out = (folder.path() / "out").string();
    const auto exported = [&](std::vector<std::string> more) {
        more.insert(more.begin(),
                    {"export", "--checkpoint", hf_model("v3").string(), "--out", out});
        return run(more);
    };
    expect_refused(exported({"--dtype", "int4"}), "there are: bf16, f32, fp8");
    expect_refused(exported({"--shard-size", "5XB"}), "--shard-size must be a size");
    expect_refused(exported({"--shard-size", "1"}), "at least 1MB");
    expect_refused(exported({"--shard-size", "99999999999TB"}), "--shard-size must be a size");
    expect_refused(run({"export", "--checkpoint", out, "--out", out}), "no checkpoint in");
    const Result result = exported({"--dtype", "fp8", "--shard-size", "5GB"});
    EXPECT_EQ(result.code, 0) << result.errors;
    EXPECT_NE(result.out.find("in 1 files"), std::string::npos) << result.out;
    EXPECT_EQ(HfFolder(out).main_type(), StoredType::F8_E4M3);
    expect_refused(exported({}), "is there already; name a new folder or an empty one");
    EXPECT_EQ(parse_size("5GB"), 5'000'000'000u);
    EXPECT_EQ(parse_size("3MiB"), 3u << 20);
}
