// SPDX-License-Identifier: MIT
// Folders that an export writes, read again.
#include "checkpoint/hf_models.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/base/files.hpp>
#include <bellows/checkpoint/hf_export.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstring>

using namespace bellows;
namespace fs = std::filesystem;
using bellows::testing::hf_model;
using bellows::testing::hf_models;

namespace {

std::vector<float> values_of(const HfFolder& folder, const ParameterInfo& info) {
    std::vector<float> values(info.size());
    folder.read(info, 0, values);
    return values;
}

bool same_bytes(const HfTensor& a, const HfTensor& b) {
    return a.type == b.type && a.shape == b.shape && a.bytes.size() == b.bytes.size() &&
           std::memcmp(a.bytes.data(), b.bytes.data(), a.bytes.size()) == 0;
}

std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder))
        names.push_back(entry.path().filename().string());
    std::ranges::sort(names);
    return names;
}

/// A checkpoint as a run writes it, of some values.
fs::path write_checkpoint(const fs::path& run, const ModelConfig& model,
                          const std::function<std::vector<float>(const ParameterInfo&)>& values) {
    begin_checkpoint(run, 1);
    for (const char* base : {"model", "optimizer"}) {
        std::vector<StoredTensor> tensors;
        if (base == std::string("model"))
            for (const ParameterInfo& info : parameters(model))
                tensors.push_back({info.name, StoredType::F32, info.shape});
        SafetensorsWriter writer(checkpoint_temporary(run, 1) / shard_name(base, 0, 1), tensors);
        for (const ParameterInfo& info : parameters(model)) {
            const std::vector<float> all = values(info);
            if (!tensors.empty())
                writer.write(info.name, std::as_bytes(std::span(all)));
        }
        writer.finish();
    }
    CheckpointState state;
    state.step = 1;
    return commit_checkpoint(run, state, {"model.safetensors", "optimizer.safetensors"},
                             {{kConfigFile, to_toml(model)}});
}

} // namespace

TEST(HfExport, KeepsBytesAsStored) {
    for (const std::string& name : hf_models()) {
        SCOPED_TRACE(name);
        const TemporaryFolder folder;
        const HfFolder source(hf_model(name));
        const ExportReport report = export_model(source, folder.path() / "out", {});
        const HfFolder again(folder.path() / "out");
        EXPECT_EQ(again.config().model, source.config().model);
        ASSERT_EQ(again.tensors().size(), source.tensors().size());
        for (const auto& [tensor, stored] : source.tensors())
            EXPECT_TRUE(same_bytes(stored, again.tensors().at(tensor))) << tensor;
        // Each MTP module has the embedding and the head once more.
        const std::uint64_t modules = source.config().model.mtp_depth;
        const std::uint64_t ends =
            source.tensors().at("model.embed_tokens.weight").bytes.size() * 2;
        EXPECT_EQ(report.bytes, source.bytes() + modules * ends);
        EXPECT_EQ(report.tensors, source.tensors().size() + modules * 2);
        EXPECT_EQ(modules, name == "v3-mtp" ? 2u : 0u);
        EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"out"});
    }
}

TEST(HfExport, ConvertsTypes) {
    const TemporaryFolder folder;
    for (const std::string& name : hf_models()) {
        SCOPED_TRACE(name);
        const HfFolder source(hf_model(name));
        const fs::path wide = folder.path() / name / "f32", out = folder.path() / name / "bf16";
        export_model(source, wide, {.type = ExportType::F32});
        export_model(HfFolder(wide), out, {.type = ExportType::Bf16});
        const HfFolder f32(wide), bf16(out);
        EXPECT_EQ(f32.main_type(), StoredType::F32);
        EXPECT_EQ(f32.config().dtype, "float32");
        EXPECT_FALSE(f32.config().fp8);
        EXPECT_EQ(bf16.config().dtype, "bfloat16");
        for (const ParameterInfo& info : parameters(source.config().model)) {
            const std::vector<float> before = values_of(source, info);
            EXPECT_EQ(values_of(f32, info), before) << info.name;
            const std::vector<float> after = values_of(bf16, info);
            for (std::size_t i = 0; i < before.size(); ++i)
                ASSERT_LE(std::abs(after[i] - before[i]), std::abs(before[i]) / 256) << info.name;
            if (info.kind == ParameterKind::RouterBias) {
                EXPECT_EQ(bf16.tensors().at(info.name).type, StoredType::F32);
            }
        }
        if (name == "v3") { // bf16 before
            for (const auto& [tensor, stored] : source.tensors())
                EXPECT_TRUE(same_bytes(stored, bf16.tensors().at(tensor))) << tensor;
        }
    }
}

TEST(HfExport, QuantisesLinearLayers) {
    const TemporaryFolder folder;
    for (const std::string name : {"v3", "moonlight", "v2"}) {
        SCOPED_TRACE(name);
        const HfFolder source(hf_model(name));
        export_model(source, folder.path() / name, {.type = ExportType::Fp8});
        const HfFolder fp8(folder.path() / name);
        EXPECT_TRUE(fp8.config().fp8);
        std::uint64_t quantised = 0;
        for (const ParameterInfo& info : parameters(source.config().model)) {
            const std::vector<float> before = values_of(source, info), after = values_of(fp8, info);
            float greatest = 0;
            for (const float value : before)
                greatest = std::max(greatest, std::abs(value));
            // Half a step of three bits of mantissa, or of the least codes.
            for (std::size_t i = 0; i < before.size(); ++i)
                ASSERT_LE(std::abs(after[i] - before[i]),
                          std::max(std::abs(before[i]) / 15.9f, greatest / 448 / 512))
                    << info.name;
            quantised += is_linear(info) ? info.size() : 0;
        }
        std::uint64_t codes = 0;
        for (const auto& [tensor, stored] : fp8.tensors())
            codes += stored.type == StoredType::F8_E4M3 ? stored.bytes.size() : 0;
        EXPECT_EQ(codes, quantised);
        // Codes that are there already stay, and are worth the same.
        export_model(fp8, folder.path() / name / "again", {.type = ExportType::Fp8});
        const HfFolder again(folder.path() / name / "again");
        for (const auto& [tensor, stored] : fp8.tensors())
            EXPECT_TRUE(same_bytes(stored, again.tensors().at(tensor))) << tensor;
    }
}

/// Of matrices that are written in pieces; blocks of rows differ in size by powers of two.
TEST(HfExport, QuantisesLargeMatrices) {
    const TemporaryFolder folder;
    ModelConfig model = HfFolder(hf_model("llama")).config().model;
    model.hidden = 1032;
    model.dense_ffn = 2200;
    const auto scale = [&](const ParameterInfo& info, std::uint64_t element) {
        const std::uint64_t row = element / info.shape.back() % model.dense_ffn; // of gate or up
        return static_cast<float>(1 << row / 128 % 16);
    };
    const auto values = [&](const ParameterInfo& info) {
        std::vector<float> all = initial_values(info, 3);
        for (std::uint64_t i = 0; i < all.size(); ++i)
            all[i] *= scale(info, i);
        return all;
    };
    const fs::path run = write_checkpoint(folder.path() / "run", model, values);
    export_model(Checkpoint::open(run), model, {}, {}, folder.path() / "out",
                 {.type = ExportType::Fp8});
    const HfFolder fp8(folder.path() / "out");
    for (const ParameterInfo& info : parameters(model)) {
        if (info.kind != ParameterKind::Ffn)
            continue;
        const std::vector<float> before = values(info), after = values_of(fp8, info);
        for (std::size_t i = 0; i < before.size(); ++i)
            ASSERT_LE(std::abs(after[i] - before[i]),
                      std::max(std::abs(before[i]) / 15.9f, 5e-7f * scale(info, i)))
                << info.name << " at " << i;
    }
}

TEST(HfExport, WritesShards) {
    const TemporaryFolder folder;
    const HfFolder source(hf_model("v3-fp8"));
    std::uint64_t last = 0;
    ExportOptions options;
    options.shard_bytes = 100000;
    options.on_progress = [&](std::uint64_t done, std::uint64_t total) {
        EXPECT_GT(done, last);
        EXPECT_LE(done, total);
        last = done;
    };
    const fs::path out = folder.path() / "deep" / "out";
    const ExportReport report = export_model(source, out, options);
    EXPECT_EQ(last, report.bytes);
    EXPECT_GT(report.files, 2u);
    const std::string first = shard_name("model", 0, report.files);
    EXPECT_LT(fs::file_size(out / first), 120000u);
    const HfFolder again(out);
    for (const auto& [tensor, stored] : source.tensors())
        EXPECT_TRUE(same_bytes(stored, again.tensors().at(tensor))) << tensor;
    for (const auto& [tensor, stored] : again.tensors()) // of one matrix, in one file
        if (stored.type == StoredType::F8_E4M3) {
            EXPECT_EQ(stored.file, again.tensors().at(tensor + "_scale_inv").file);
        }
}

TEST(HfExport, WritesCheckpointsOfRuns) {
    for (const std::string& name : hf_models()) {
        SCOPED_TRACE(name);
        const TemporaryFolder folder;
        const HfFolder source(hf_model(name));
        const ModelConfig& model = source.config().model;
        const fs::path run =
            write_checkpoint(folder.path() / "run", model,
                             [&](const ParameterInfo& info) { return values_of(source, info); });
        const Checkpoint checkpoint = Checkpoint::open(run);
        HfOutput output;
        output.eos = {3};
        const fs::path out = folder.path() / "out";
        export_model(checkpoint, model, output, {{"tokenizer.model", "x"}}, out, {});
        const HfFolder f32(out);
        EXPECT_EQ(f32.config().model, model);
        EXPECT_EQ(f32.config().eos, std::vector<std::uint64_t>{3});
        EXPECT_EQ(read_file(out / "tokenizer.model", 10), "x");
        for (const ParameterInfo& info : parameters(model))
            EXPECT_EQ(values_of(f32, info), values_of(source, info)) << info.name;
        // What was bf16 before has the same bytes again, each expert's apart.
        export_model(checkpoint, model, output, {}, folder.path() / "bf16",
                     {.type = ExportType::Bf16});
        const HfFolder bf16(folder.path() / "bf16");
        for (const auto& [tensor, stored] : source.tensors())
            if (stored.type == StoredType::BF16 && stored.shape.size() < 3) {
                EXPECT_TRUE(same_bytes(stored, bf16.tensors().at(tensor))) << tensor;
            }
    }
}

TEST(HfExport, LeavesNothingBehind) {
    const TemporaryFolder folder;
    const HfFolder source(hf_model("v2"));
    folder.write("file", "x");
    EXPECT_BELLOWS_ERROR(export_model(source, folder.path() / "file", {}), InvalidArgument,
                         "is there already");
    EXPECT_BELLOWS_ERROR(export_model(source, folder.path(), {}), InvalidArgument,
                         "is there already; name a new folder or an empty one");
    fs::create_directory(folder.path() / "empty");
    export_model(source, folder.path() / "empty" / "", {});
    EXPECT_TRUE(HfFolder::is_one(folder.path() / "empty"));
    ExportOptions failing;
    failing.on_progress = [](std::uint64_t, std::uint64_t) {
        throw Error(ErrorCode::Io, "the disk is full");
    };
    EXPECT_BELLOWS_ERROR(export_model(source, folder.path() / "failed", failing), Io, "full");
    EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"empty", "file"}));
    EXPECT_BELLOWS_ERROR(parse_export_type("int4"), InvalidArgument, "there are: bf16, f32, fp8");
}

TEST(HfExport, TakesTheTokenizerAlong) {
    const TemporaryFolder source, target;
    for (const char* name : {"config.json", "model.safetensors"})
        fs::copy_file(hf_model("v2") / name, source.path() / name);
    source.write("tokenizer.json", "{}");
    source.write("generation_config.json", "{\"eos_token_id\": 5}");
    source.write("modeling.py", "import os");
    export_model(HfFolder(source.path()), target.path() / "out", {});
    EXPECT_EQ(names_in(target.path() / "out"),
              (std::vector<std::string>{"config.json", "generation_config.json",
                                        "model.safetensors", "tokenizer.json"}));
    EXPECT_EQ(read_file(target.path() / "out" / "generation_config.json", 100),
              "{\"eos_token_id\": 5}");
}
