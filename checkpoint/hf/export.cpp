// SPDX-License-Identifier: MIT
#include "base/strict_json.hpp"
#include "export_source.hpp"
#include "folder_files.hpp"
#include "names.hpp"
#include "new_folder.hpp"
#include "stored_rows.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/parallel.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/checkpoint/hf_export.hpp>
#include <bellows/fp8/format.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

namespace bellows {

namespace fs = std::filesystem;

namespace {

/// A core makes so much at a time: elements where it converts them, bytes where they stay.
constexpr std::uint64_t kPieceElements = std::uint64_t{1} << 20, kPieceBytes = 8 << 20;

/// What is copied of a folder beside the model.
constexpr std::array kTokenizerFiles = {"tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "added_tokens.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "tokenizer.model",
                                        "tiktoken.model",
                                        "chat_template.jinja",
                                        "chat_template.json"};

/// A tensor of the new files.
struct Planned {
    const ExportTensor* from = nullptr;
    StoredType type = StoredType::F32;
    bool same_bytes = false; ///< as `from` is stored
    StoredTensor tensor() const { return {from->name, type, from->shape}; }
    bool has_scales() const { return type == StoredType::F8_E4M3; }
    StoredTensor scales() const {
        return {scales_name(from->name),
                from->scales != nullptr ? from->scales->type : StoredType::F32,
                {div_up(from->shape[0], kBlock), div_up(from->shape[1], kBlock)}};
    }
    std::uint64_t bytes() const {
        return bytes_of(tensor()) + (has_scales() ? bytes_of(scales()) : 0);
    }
};

StoredType type_of(const ExportTensor& tensor, ExportType wanted) {
    const bool codes = tensor.stored != nullptr && tensor.stored->type == StoredType::F8_E4M3;
    switch (wanted) {
    case ExportType::AsStored:
        return tensor.stored != nullptr ? tensor.stored->type : StoredType::F32;
    case ExportType::F32:
        return StoredType::F32;
    case ExportType::Fp8:
        if (codes || is_linear(tensor.info))
            return StoredType::F8_E4M3;
        [[fallthrough]];
    case ExportType::Bf16:
        return tensor.info.kind == ParameterKind::RouterBias ? StoredType::F32 : StoredType::BF16;
    }
    throw Error(ErrorCode::Internal, "no such type of export");
}

/// In order, so that none but those of one tensor has more than `most` bytes.
std::vector<std::vector<Planned>> plan_shards(const ExportSource& source,
                                              const ExportOptions& options) {
    std::vector<std::vector<Planned>> shards(1);
    std::uint64_t bytes = 0;
    for (const ExportTensor& tensor : source.tensors()) {
        Planned planned{&tensor, type_of(tensor, options.type), false};
        planned.same_bytes = tensor.stored != nullptr && tensor.stored->type == planned.type;
        const std::uint64_t more = planned.bytes();
        if (bytes > 0 && bytes + more > options.shard_bytes) {
            shards.emplace_back();
            bytes = 0;
        }
        bytes += more;
        shards.back().push_back(planned);
    }
    return shards;
}

/// Calls visit(row, block, values) for what each row has of each block of 128 columns.
template <class Visit>
void each_block_row(std::span<const float> values, std::uint64_t columns, Visit visit) {
    for (std::uint64_t row = 0; row * columns < values.size(); ++row)
        for (std::uint64_t begin = 0; begin < columns; begin += kBlock)
            visit(row, begin / kBlock,
                  values.subspan(row * columns + begin, std::min(kBlock, columns - begin)));
}

/// Multipliers of the blocks [ceil(rows / 128), ceil(columns / 128)].
std::vector<float> scales_of(const ExportTensor& tensor, std::span<const float> values) {
    constexpr float kLargest = fp8::largest(fp8::Format::E4M3);
    const std::uint64_t columns = tensor.columns(), across = div_up(columns, kBlock);
    std::vector<float> scales(div_up(values.size() / columns, kBlock) * across, 0);
    const auto raise = [&](std::uint64_t row, std::uint64_t block, std::span<const float> part) {
        float& scale = scales[row / kBlock * across + block];
        for (const float value : part) {
            const float magnitude = std::abs(value);
            if (!std::isfinite(magnitude))
                throw Error(ErrorCode::InvalidArgument,
                            "tensor " + in_quotes(tensor.name) +
                                " has a value that is not finite, which FP8 does not hold");
            scale = std::max(scale, magnitude);
        }
    };
    each_block_row(values, columns, raise);
    for (float& scale : scales)
        scale = scale > 0 ? scale / kLargest : 1;
    return scales;
}

/// Pieces of the tensors of a file, which all cores write at once.
class ShardWriter {
public:
    ShardWriter(const ExportSource& source, const std::vector<Planned>& shard, const fs::path& file)
        : source_(source), writer_(file, tensors_of(shard), {{"format", "pt"}}) {
        for (const Planned& planned : shard) {
            const ExportTensor& from = *planned.from;
            if (planned.same_bytes) {
                add_same_bytes(from.name, from.stored->bytes);
                if (planned.has_scales())
                    add_same_bytes(scales_name(from.name), from.scales->bytes);
            } else {
                add_values(planned);
            }
        }
    }

    /// wrote(bytes): one call at a time.
    void write(std::function<void(std::uint64_t)> wrote) {
        wrote_ = std::move(wrote);
        parallel_for(pieces_.size(), [&](std::size_t i) { pieces_[i](); });
        writer_.finish();
    }

private:
    /// By alignment, so that none stands at an odd place, then by name.
    static std::vector<StoredTensor> tensors_of(const std::vector<Planned>& shard) {
        std::vector<StoredTensor> tensors;
        for (const Planned& planned : shard) {
            tensors.push_back(planned.tensor());
            if (planned.has_scales())
                tensors.push_back(planned.scales());
        }
        std::ranges::sort(tensors, [](const StoredTensor& a, const StoredTensor& b) {
            const std::uint64_t bits_a = bits_of(a.type), bits_b = bits_of(b.type);
            return bits_a != bits_b ? bits_a > bits_b : a.name < b.name;
        });
        return tensors;
    }

    void add_same_bytes(const std::string& name, std::span<const std::byte> bytes) {
        for (std::uint64_t at = 0; at < bytes.size(); at += kPieceBytes)
            pieces_.emplace_back([this, name, at, bytes] {
                put(name, at, bytes.subspan(at, std::min(kPieceBytes, bytes.size() - at)));
            });
    }

    /// Whole rows, of FP8 tensors whole blocks.
    void add_values(const Planned& planned) {
        const ExportTensor& from = *planned.from;
        const std::uint64_t columns = from.columns(), rows = from.rows();
        const std::uint64_t step =
            std::max<std::uint64_t>(kPieceElements / columns / kBlock, 1) * kBlock;
        for (std::uint64_t first = 0; first < rows; first += step)
            pieces_.emplace_back([this, planned, first, count = std::min(step, rows - first)] {
                std::vector<float> values(count * planned.from->columns());
                source_.read(*planned.from, first, values);
                put_values(planned, first, values);
            });
    }

    void put(const std::string& name, std::uint64_t at, std::span<const std::byte> bytes) {
        writer_.write_piece(name, at, bytes);
        const std::lock_guard lock(mutex_);
        wrote_(bytes.size());
    }

    void put_values(const Planned& planned, std::uint64_t first, std::span<const float> values) {
        const ExportTensor& from = *planned.from;
        const std::uint64_t at = first * from.columns() * bits_of(planned.type) / 8;
        if (planned.type == StoredType::F32)
            return put(from.name, at, std::as_bytes(values));
        if (planned.type == StoredType::BF16) {
            std::vector<std::uint16_t> rounded(values.size());
            std::ranges::transform(values, rounded.begin(), to_bf16);
            return put(from.name, at, std::as_bytes(std::span(rounded)));
        }
        const std::uint64_t across = div_up(from.columns(), kBlock);
        const std::vector<float> scales = scales_of(from, values);
        put(scales_name(from.name), first / kBlock * across * sizeof(float),
            std::as_bytes(std::span(scales)));
        std::vector<std::uint8_t> codes(values.size());
        const auto encode = [&](std::uint64_t row, std::uint64_t block,
                                std::span<const float> part) {
            const float scale = scales[row / kBlock * across + block];
            const std::uint64_t begin = row * from.columns() + block * kBlock;
            for (std::uint64_t i = 0; i < part.size(); ++i)
                codes[begin + i] = fp8::encode(fp8::Format::E4M3, part[i] / scale);
        };
        each_block_row(values, from.columns(), encode);
        put(from.name, at, std::as_bytes(std::span(codes)));
    }

    const ExportSource& source_;
    SafetensorsWriter writer_;
    std::vector<std::function<void()>> pieces_;
    std::mutex mutex_; ///< of wrote_
    std::function<void(std::uint64_t)> wrote_;
};

ExportReport write_tensors(const ExportSource& source, const fs::path& folder,
                           const ExportOptions& options) {
    const auto shards = plan_shards(source, options);
    ExportReport report;
    report.files = shards.size();
    nlohmann::json map = nlohmann::json::object();
    for (std::size_t i = 0; i < shards.size(); ++i)
        for (const Planned& planned : shards[i]) {
            const std::string file = shard_name("model", i, shards.size());
            report.bytes += planned.bytes();
            report.tensors += planned.has_scales() ? 2 : 1;
            map[planned.from->name] = file;
            if (planned.has_scales())
                map[scales_name(planned.from->name)] = file;
        }
    std::uint64_t done = 0;
    for (std::size_t i = 0; i < shards.size(); ++i)
        ShardWriter(source, shards[i], folder / shard_name("model", i, shards.size()))
            .write([&](std::uint64_t bytes) {
                done += bytes;
                if (options.on_progress)
                    options.on_progress(done, report.bytes);
            });
    if (shards.size() > 1) {
        const nlohmann::json index = {{"metadata", {{"total_size", report.bytes}}},
                                      {"weight_map", map}};
        write_file_durably(folder / kHfIndexFile, index.dump(1) + "\n");
    }
    return report;
}

const char* dtype_name(StoredType type) {
    return type == StoredType::F32 ? "float32" : type == StoredType::F16 ? "float16" : "bfloat16";
}

/// The folder's own config.json, with what the export changes.
std::string changed_config(const HfFolder& source, const HfOutput& output) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 20;
    auto json = nlohmann::ordered_json::parse(read_file(source.folder() / kHfConfigFile, kMost));
    json[json.contains("dtype") ? "dtype" : "torch_dtype"] = output.dtype;
    json.erase("auto_map"); // code that is not copied
    for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers"})
        if (json.contains(key))
            json[key] = source.config().model.mtp_depth;
    if (!output.fp8)
        json.erase("quantization_config");
    else if (!source.config().fp8)
        json["quantization_config"] =
            nlohmann::ordered_json::parse(format_hf_config(source.config().model, output))
                .at("quantization_config");
    return json.dump(2) + "\n";
}

void copy_files(const HfFolder& source, const fs::path& to) {
    constexpr std::uint64_t kMost = std::uint64_t{256} << 20;
    std::error_code none;
    std::vector<std::string> names(kTokenizerFiles.begin(), kTokenizerFiles.end());
    names.emplace_back(kHfGenerationFile);
    for (const std::string& name : names)
        if (fs::exists(source.folder() / name, none))
            write_file_durably(to / name, read_file(file_in(source.folder(), name), kMost));
}

} // namespace

ExportType parse_export_type(std::string_view text) {
    if (text == "bf16")
        return ExportType::Bf16;
    if (text == "f32")
        return ExportType::F32;
    if (text == "fp8")
        return ExportType::Fp8;
    throw Error(ErrorCode::InvalidArgument,
                "there is no type " + in_quotes(text) + ", there are: bf16, f32, fp8");
}

ExportReport export_model(const HfFolder& source, const fs::path& out,
                          const ExportOptions& options) {
    const HfConfig& config = source.config();
    const StoredType main = source.main_type();
    HfOutput output;
    output.bos = config.bos;
    output.eos = config.eos;
    output.fp8 =
        options.type == ExportType::Fp8 || (options.type == ExportType::AsStored && config.fp8);
    output.dtype = options.type == ExportType::F32        ? "float32"
                   : options.type == ExportType::AsStored ? dtype_name(main)
                                                          : "bfloat16";
    NewFolder folder(out);
    std::unique_ptr<ExportSource> tensors = std::make_unique<FolderSource>(source);
    const bool fused = std::ranges::any_of(
        tensors->tensors(), [](const ExportTensor& tensor) { return tensor.shape.size() == 3; });
    if (fused && options.type == ExportType::Fp8) // scales belong to matrices
        tensors = std::make_unique<ParameterSource>(
            config.model, [&](const ParameterInfo& info, std::uint64_t row, std::span<float> to) {
                source.read(info, row, to);
            });
    write_file_durably(folder.path() / kHfConfigFile, changed_config(source, output));
    copy_files(source, folder.path());
    std::error_code none;
    if (!fs::exists(folder.path() / kHfGenerationFile, none))
        write_file_durably(folder.path() / kHfGenerationFile, format_hf_generation_config(output));
    const ExportReport report = write_tensors(*tensors, folder.path(), options);
    folder.commit();
    return report;
}

ExportReport export_model(const Checkpoint& source, const ModelConfig& model, HfOutput output,
                          const std::map<std::string, std::string>& texts, const fs::path& out,
                          const ExportOptions& options) {
    output.fp8 = options.type == ExportType::Fp8;
    output.dtype = options.type == ExportType::F32 || options.type == ExportType::AsStored
                       ? "float32"
                       : "bfloat16";
    const std::string config = format_hf_config(model, output);
    source.verify();
    NewFolder folder(out);
    CheckpointValues values(source);
    const ParameterSource tensors(model, [&](const ParameterInfo& info, std::uint64_t row,
                                             std::span<float> to) { values.read(info, row, to); });
    write_file_durably(folder.path() / kHfConfigFile, config);
    write_file_durably(folder.path() / kHfGenerationFile, format_hf_generation_config(output));
    for (const auto& [name, text] : texts)
        write_file_durably(folder.path() / name, text);
    const ExportReport report = write_tensors(tensors, folder.path(), options);
    folder.commit();
    return report;
}

} // namespace bellows
