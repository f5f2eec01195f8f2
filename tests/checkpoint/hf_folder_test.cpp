// SPDX-License-Identifier: MIT
// Folders of others: their tensors' values, and what a bad folder gets.
#include "checkpoint/hf_models.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/base/files.hpp>
#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/fp8/format.hpp>

#include <nlohmann/json.hpp>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>

using namespace bellows;
namespace fs = std::filesystem;
using Json = nlohmann::json;
using bellows::testing::hf_model;
using bellows::testing::hf_models;

namespace {

constexpr std::uint64_t kMost = 1 << 24;

/// All tensors of a folder by the reader of single files, decoded one element at a time.
class Plain {
public:
    explicit Plain(const fs::path& folder) {
        for (const auto& entry : fs::directory_iterator(folder)) {
            const std::string name = entry.path().filename().string();
            if (!name.starts_with("model") || entry.path().extension() != ".safetensors")
                continue;
            const SafetensorsReader& reader = readers_.emplace_back(entry.path());
            for (const auto& tensor : reader.tensors())
                raw_[tensor.name] = {tensor, std::vector<std::byte>(tensor.bytes)};
            for (const auto& tensor : reader.tensors())
                reader.read(tensor.name, raw_[tensor.name].second);
        }
    }

    bool has(const std::string& name) const { return raw_.contains(name); }

    double at(const std::string& name, std::uint64_t index) const {
        const auto& [tensor, bytes] = raw_.at(name);
        switch (tensor.type) {
        case StoredType::BF16:
            return std::bit_cast<float>(std::uint32_t{load<std::uint16_t>(bytes, index)} << 16);
        case StoredType::F8_E4M3: {
            const std::uint64_t columns = tensor.shape[1];
            const std::uint64_t block =
                index / columns / 128 * ((columns + 127) / 128) + index % columns / 128;
            return fp8::decode(fp8::Format::E4M3, load<std::uint8_t>(bytes, index)) *
                   at(name + "_scale_inv", block);
        }
        default:
            return load<float>(bytes, index);
        }
    }

private:
    template <class T>
    static T load(const std::vector<std::byte>& bytes, std::uint64_t index) {
        T value;
        std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
        return value;
    }

    std::vector<SafetensorsReader> readers_;
    std::map<std::string, std::pair<StoredTensor, std::vector<std::byte>>> raw_;
};

/// Where element [row, column] of a parameter stands.
double expected(const Plain& plain, const ModelConfig& model, const ParameterInfo& info,
                std::uint64_t row, std::uint64_t column) {
    const std::uint64_t columns = info.shape.size() == 2 ? info.shape[1] : 1;
    std::string name = info.name;
    const std::size_t fused = name.find("gate_up_proj");
    const std::string all = "model.layers." + std::to_string(info.layer) + ".mlp.experts.";
    if (info.expert >= 0 && plain.has(all + "gate_up_proj")) {
        const auto first = static_cast<std::uint64_t>(info.expert) * info.shape[0];
        return plain.at(all + (fused == std::string::npos ? "down_proj" : "gate_up_proj"),
                        (first + row) * columns + column);
    }
    if (fused != std::string::npos) {
        const std::uint64_t half = info.shape[0] / 2;
        name.replace(fused, 12, row < half ? "gate_proj" : "up_proj");
        row %= half;
    }
    const bool rotated =
        name.find("q_proj") != std::string::npos || name.find("k_proj") != std::string::npos ||
        name.find("q_norm") != std::string::npos || name.find("k_norm") != std::string::npos;
    if (!model.is_mla() && rotated) { // element 2i is i there, element 2i + 1 is i + d / 2
        const std::uint64_t within = row % model.head_dim;
        row += (within % 2 == 0 ? within / 2 : within / 2 + model.head_dim / 2) - within;
    }
    return plain.at(name, row * columns + column);
}

/// Parameters that this program's list has: all of those that layers declare.
std::uint64_t compare(const HfFolder& folder, const Plain& plain) {
    std::uint64_t compared = 0;
    const ModelConfig& model = folder.config().model;
    for (const ParameterInfo& info : parameters(model)) {
        const std::uint64_t rows = info.shape[0], columns = info.size() / rows;
        std::vector<float> values(info.size());
        folder.read(info, 0, values);
        for (std::uint64_t i = 0; i < values.size(); ++i)
            if (values[i] !=
                static_cast<float>(expected(plain, model, info, i / columns, i % columns))) {
                ADD_FAILURE() << info.name << " differs at " << i;
                return 0;
            }
        const std::uint64_t from = rows / 3, count = rows / 2; // across the parts
        std::vector<float> some(count * columns);
        folder.read(info, from, some);
        EXPECT_TRUE(std::equal(some.begin(), some.end(), values.data() + from * columns))
            << info.name;
        std::vector<std::uint16_t> rounded(count * columns);
        folder.read(info, from, rounded);
        for (std::uint64_t i = 0; i < some.size(); ++i) {
            const float there = std::bit_cast<float>(std::uint32_t{rounded[i]} << 16);
            EXPECT_LE(std::abs(there - some[i]), std::abs(some[i]) / 256) << info.name;
        }
        compared += info.size();
    }
    return compared;
}

/// A copy of a folder that a test may spoil.
class Copy {
public:
    explicit Copy(const std::string& name) {
        for (const auto& entry : fs::directory_iterator(hf_model(name)))
            fs::copy_file(entry.path(), path() / entry.path().filename());
    }
    const fs::path& path() const { return folder_.path(); }

    void change_json(const std::string& name, const std::function<void(Json&)>& change) const {
        Json json = Json::parse(read_file(path() / name, kMost));
        change(json);
        folder_.write(name, json.dump());
    }

    /// The header and the data of a file of tensors.
    void change_tensors(const std::string& name,
                        const std::function<void(Json&, std::string&)>& change) const {
        const std::string text = read_file(path() / name, kMost);
        std::uint64_t size = 0;
        std::memcpy(&size, text.data(), 8);
        Json header = Json::parse(text.substr(8, size));
        std::string data = text.substr(8 + size);
        change(header, data);
        std::string out = header.dump();
        out.resize((out.size() + 7) / 8 * 8, ' ');
        size = out.size();
        std::string length(8, '\0');
        std::memcpy(length.data(), &size, 8);
        folder_.write(name, length + out + data);
    }

    void expect(ErrorCode code, std::string_view part) const {
        try {
            (void)HfFolder(path());
            ADD_FAILURE() << "nothing was thrown, not \"" << part << '"';
        } catch (const Error& error) {
            expect_error(error, code, part);
        }
    }

private:
    TemporaryFolder folder_;
};

constexpr const char* kFile = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kShard = "model-00001-of-00002.safetensors";

/// Gives a tensor another name; its neighbours stay where they are.
void rename(Json& header, const std::string& from, const std::string& to) {
    header[to] = header[from];
    header.erase(from);
}

std::size_t data_begin(const Json& header, const std::string& name) {
    return header[name]["data_offsets"][0].get<std::size_t>();
}

} // namespace

TEST(HfFolder, HasTheValuesOfTheFile) {
    for (const std::string& name : hf_models()) {
        SCOPED_TRACE(name);
        const HfFolder folder(hf_model(name));
        EXPECT_GT(compare(folder, Plain(hf_model(name))), 10000u);
        EXPECT_EQ(folder.main_type(), name == "llama"    ? StoredType::F32
                                      : name == "v3-fp8" ? StoredType::F8_E4M3
                                                         : StoredType::BF16);
    }
}

TEST(HfFolder, LeavesOutWhatPredictsFurtherTokens) {
    const HfFolder folder(hf_model("v3"));
    EXPECT_EQ(
        folder.unused(),
        (std::vector<std::string>{"model.layers.0.self_attn.rotary_emb.inv_freq",
                                  "model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight"}));
    EXPECT_TRUE(HfFolder(hf_model("v2")).unused().empty());
}

TEST(HfFolder, HasModulesWhoseEndsAreTheModels) {
    const HfFolder folder(hf_model("v3-mtp"));
    EXPECT_EQ(folder.config().model.mtp_depth, 2u);
    EXPECT_EQ(folder.unused(),
              (std::vector<std::string>{
                  "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight",
                  "model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}));
    Copy copy("v3-mtp");
    copy.change_tensors(kFile, [](Json& header, std::string& data) {
        const Json& head = header["model.layers.3.shared_head.head.weight"];
        data[head["data_offsets"][0].get<std::size_t>()] ^= 1;
    });
    const HfFolder other(copy.path());
    EXPECT_EQ(other.config().model.mtp_depth, 0u);
    EXPECT_GT(other.unused().size(), 40u) << "all of both modules";
}

TEST(HfFolder, KnowsAFolderFromARun) {
    const Copy copy("v2");
    EXPECT_TRUE(HfFolder::is_one(copy.path()));
    EXPECT_FALSE(HfFolder::is_one(copy.path() / "absent"));
    std::ofstream(copy.path() / "state.json") << "{}";
    EXPECT_FALSE(HfFolder::is_one(copy.path()));
    EXPECT_BELLOWS_ERROR(HfFolder(copy.path() / "absent"), Io, "absent");
}

TEST(HfFolder, TakesATiedHeadThatIsTheEmbedding) {
    const auto with_head = [](bool same) {
        auto copy = std::make_unique<Copy>("llama3-tied");
        copy->change_tensors(kFile, [&](Json& header, std::string& data) {
            const Json embedding = header["model.embed_tokens.weight"];
            const std::size_t begin = embedding["data_offsets"][0];
            const std::size_t bytes = embedding["data_offsets"][1].get<std::size_t>() - begin;
            header["lm_head.weight"] = embedding;
            header["lm_head.weight"]["data_offsets"] = {data.size(), data.size() + bytes};
            data += data.substr(begin, bytes);
            data.back() = same ? data.back() : static_cast<char>(data.back() + 1);
        });
        return copy;
    };
    EXPECT_EQ(HfFolder(with_head(true)->path()).unused(),
              std::vector<std::string>{"lm_head.weight"});
    with_head(false)->expect(ErrorCode::InvalidArgument,
                             "lm_head.weight differs from model.embed_tokens.weight");
}

TEST(HfFolder, RefusesBadTensors) {
    const std::string norm = "model.norm.weight", down = "model.layers.0.mlp.down_proj.weight";
    struct Case {
        const char* message;
        ErrorCode code;
        std::function<void(Json&, std::string&)> change;
    };
    const std::vector<Case> cases = {
        {"lacks the tensor \"model.norm.weight\" [32]", ErrorCode::InvalidArgument,
         [&](Json& header, std::string&) {
             rename(header, norm, "model.layers.0.rotary_emb.inv_freq");
         }},
        {"\"model.other.weight\" is no part of a deepseek_v2 model", ErrorCode::InvalidArgument,
         [&](Json& header, std::string& data) {
             header["model.other.weight"] = {{"dtype", "F32"},
                                             {"shape", {1}},
                                             {"data_offsets", {data.size(), data.size() + 4}}};
             data += std::string(4, '\0');
         }},
        {"has the shape [48, 32], config.json wants [32, 48]", ErrorCode::InvalidArgument,
         [&](Json& header, std::string&) { header[down]["shape"] = {48, 32}; }},
        {"has the unsupported dtype I16", ErrorCode::InvalidArgument,
         [&](Json& header, std::string&) { header[down]["dtype"] = "I16"; }},
        {"has the unsupported dtype F4", ErrorCode::InvalidArgument,
         [&](Json& header, std::string& data) {
             const std::size_t begin = data_begin(header, norm);
             header[norm] = {
                 {"dtype", "F4"}, {"shape", {32}}, {"data_offsets", {begin, begin + 16}}};
             header["model.layers.0.rotary_emb.inv_freq"] = {
                 {"dtype", "U8"}, {"shape", {48}}, {"data_offsets", {begin + 16, begin + 64}}};
             (void)data;
         }},
        {"is F8_E4M3, but config.json has no quantization_config", ErrorCode::InvalidArgument,
         [&](Json& header, std::string&) {
             const std::size_t begin = data_begin(header, down), end = begin + 32 * 48;
             header[down] = {
                 {"dtype", "F8_E4M3"}, {"shape", {32, 48}}, {"data_offsets", {begin, end}}};
             header["rest.rotary_emb.inv_freq"] = {
                 {"dtype", "U8"}, {"shape", {32 * 48}}, {"data_offsets", {end, end + 32 * 48}}};
         }},
        {"has the unknown dtype \"F7\"", ErrorCode::Corrupt,
         [&](Json& header, std::string&) { header[down]["dtype"] = "F7"; }},
        {"should begin at", ErrorCode::Corrupt,
         [&](Json& header, std::string&) {
             header[down]["data_offsets"][0] = data_begin(header, down) + 4;
         }},
        {"more than 64 bits count", ErrorCode::Corrupt,
         [&](Json& header, std::string&) {
             header[down]["shape"] = {std::uint64_t{1} << 40, std::uint64_t{1} << 40};
         }},
        {"the file is truncated", ErrorCode::Corrupt,
         [&](Json&, std::string& data) { data.resize(data.size() - 1); }},
        {"bytes behind its last tensor", ErrorCode::Corrupt,
         [&](Json&, std::string& data) { data += "x"; }},
        {"has the format \"tf\"", ErrorCode::InvalidArgument,
         [&](Json& header, std::string&) { header["__metadata__"]["format"] = "tf"; }},
    };
    for (const Case& bad : cases) {
        SCOPED_TRACE(bad.message);
        const Copy copy("v2");
        copy.change_tensors(kFile, bad.change);
        copy.expect(bad.code, bad.message);
    }
}

TEST(HfFolder, RefusesBadIndexes) {
    struct Case {
        const char* message;
        ErrorCode code;
        std::function<void(Json&)> change;
    };
    const std::string norm = "model.norm.weight";
    const auto put = [&](const std::string& file) {
        return [=](Json& index) { index["weight_map"][norm] = file; };
    };
    const std::vector<Case> cases = {
        {"has no weight_map", ErrorCode::Corrupt, [](Json& index) { index.erase("weight_map"); }},
        {"has no weight_map", ErrorCode::Corrupt,
         [](Json& index) { index["weight_map"] = Json::array({1}); }},
        {"stands in no file", ErrorCode::Corrupt,
         [&](Json& index) { index["weight_map"][norm] = 7; }},
        {"which is no plain file name", ErrorCode::InvalidArgument, put("../x.safetensors")},
        {"which is no plain file name", ErrorCode::InvalidArgument, put("/etc/passwd")},
        {"which is no plain file name", ErrorCode::InvalidArgument, put("a\\b.safetensors")},
        {"which is no plain file name", ErrorCode::InvalidArgument, put("")},
        {"which is no plain file name", ErrorCode::InvalidArgument, put(std::string("a\0b", 3))},
        {"which is no safetensors file", ErrorCode::InvalidArgument, put("pytorch_model.bin")},
        {"absent.safetensors", ErrorCode::Io, put("absent.safetensors")},
        {"is not in model.safetensors.index.json", ErrorCode::Corrupt,
         [&](Json& index) { index["weight_map"].erase(norm); }},
        {"does not stand in", ErrorCode::Corrupt,
         [&](Json& index) { index["weight_map"]["more"] = kShard; }},
    };
    for (const Case& bad : cases) {
        SCOPED_TRACE(bad.message);
        const Copy copy("v3");
        copy.change_json(kIndex, bad.change);
        copy.expect(bad.code, bad.message);
    }
    const Copy moved("v3");
    moved.change_json(kIndex, [&](Json& index) {
        Json& file = index["weight_map"][norm];
        file = file == kShard ? "model-00002-of-00002.safetensors" : kShard;
    });
    moved.expect(ErrorCode::Corrupt, "stands here, but in");
    const Copy twice("v3");
    std::string text = read_file(twice.path() / kIndex, kMost);
    text.insert(text.find("\"model.norm.weight\""), "\"model.norm.weight\": \"x\", ");
    std::ofstream(twice.path() / kIndex) << text;
    twice.expect(ErrorCode::Corrupt, "has the key \"model.norm.weight\" twice");
}

TEST(HfFolder, RefusesBadFolders) {
    const Copy both("v2");
    std::ofstream(both.path() / kIndex) << "{}";
    both.expect(ErrorCode::InvalidArgument, "has both model.safetensors and");
    const Copy none("v2");
    fs::remove(none.path() / kFile);
    fs::remove(none.path() / "reference.safetensors");
    none.expect(ErrorCode::InvalidArgument, "has neither model.safetensors nor");
    std::ofstream(none.path() / "pytorch_model.bin") << "x";
    none.expect(ErrorCode::InvalidArgument, "pickled files can run code and are never read");
    const Copy linked("v2");
    const TemporaryFolder elsewhere;
    fs::rename(linked.path() / kFile, elsewhere.path() / "blob");
    fs::create_symlink(elsewhere.path() / "blob", linked.path() / kFile);
    linked.expect(ErrorCode::InvalidArgument, "is a link that leaves the folder");
    fs::remove(linked.path() / kFile);
    fs::rename(elsewhere.path() / "blob", linked.path() / "blob");
    fs::create_symlink("blob", linked.path() / kFile);
    EXPECT_NO_THROW(HfFolder{linked.path()});
    const Copy no_file("v2");
    fs::remove(no_file.path() / kFile);
    fs::create_directory(no_file.path() / kFile);
    no_file.expect(ErrorCode::Io, "is not a regular file");
    const Copy huge("v2");
    std::ofstream(huge.path() / "config.json") << std::string((1 << 20) + 1, ' ');
    huge.expect(ErrorCode::Io, "config.json");
}

TEST(HfFolder, ReadsSnapshotsOfTheHubsCache) {
    const TemporaryFolder cache;
    const fs::path snapshot = cache.path() / "snapshots" / "0123", blobs = cache.path() / "blobs";
    fs::create_directories(snapshot);
    fs::create_directories(blobs);
    for (const char* name : {"config.json", kFile}) {
        fs::copy_file(hf_model("v2") / name, blobs / name);
        fs::create_symlink(fs::path("../../blobs") / name, snapshot / name);
    }
    EXPECT_NO_THROW(HfFolder{snapshot});
}

TEST(HfFolder, NamesTensorsWithoutNumbers) {
    const std::string down = "model.layers.0.mlp.down_proj.weight";
    const auto info_of = [&](const HfFolder& folder) {
        for (const ParameterInfo& info : parameters(folder.config().model))
            if (info.name == down)
                return info;
        throw std::runtime_error("no such parameter");
    };
    const auto read = [&](const Copy& copy) {
        const HfFolder folder(copy.path());
        const ParameterInfo info = info_of(folder);
        std::vector<float> values(info.size());
        folder.read(info, 0, values);
    };
    const auto take = [&](const Copy& copy) { // as they are
        const HfFolder folder(copy.path());
        const ParameterInfo info = info_of(folder);
        ASSERT_TRUE(folder.has_codes(info));
        std::vector<float> scales(2);
        folder.read_scales(info, scales);
        std::vector<std::uint8_t> codes(info.size());
        folder.read_codes(info, 0, codes);
    };
    take(Copy("v3-fp8"));
    const Copy code("v3-fp8");
    code.change_tensors(kFile, [&](Json& header, std::string& data) {
        data[data_begin(header, down) + 5] = '\x7f';
    });
    EXPECT_BELLOWS_ERROR(read(code), Corrupt, "\"model.layers.0.mlp.down_proj.weight\" has an FP8");
    EXPECT_BELLOWS_ERROR(take(code), Corrupt, "\"model.layers.0.mlp.down_proj.weight\" has an FP8");
    const Copy scale("v3-fp8");
    scale.change_tensors(kFile, [&](Json& header, std::string& data) {
        const std::size_t at = data_begin(header, down + "_scale_inv");
        data.replace(at, 4, std::string("\0\0\xc0\x7f", 4)); // NaN
    });
    EXPECT_BELLOWS_ERROR(read(scale), Corrupt,
                         "\"model.layers.0.mlp.down_proj.weight\" has an FP8");
    EXPECT_BELLOWS_ERROR(take(scale), Corrupt,
                         "\"model.layers.0.mlp.down_proj.weight\" has an FP8");
    const Copy lost("v3-fp8");
    lost.change_tensors(kFile, [&](Json& header, std::string&) {
        rename(header, down + "_scale_inv", "x.rotary_emb.inv_freq");
    });
    lost.expect(ErrorCode::InvalidArgument, "is F8_E4M3 and lacks its scales");
    const Copy shape("v3-fp8");
    shape.change_tensors(
        kFile, [&](Json& header, std::string&) { header[down + "_scale_inv"]["shape"] = {1, 2}; });
    shape.expect(ErrorCode::InvalidArgument, "codes want [2, 1]");
}
