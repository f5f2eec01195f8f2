// SPDX-License-Identifier: MIT
#include "export_source.hpp"

#include "names.hpp"
#include "stored_rows.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace bellows {

std::uint64_t ExportTensor::rows() const {
    std::uint64_t rows = 1;
    for (std::size_t i = 0; i + (shape.size() > 1 ? 1 : 0) < shape.size(); ++i)
        rows *= shape[i];
    return rows;
}

FolderSource::FolderSource(const HfFolder& folder) {
    std::set<std::string> added;
    for (const ParameterInfo& info : parameters(folder.config().model)) {
        std::vector<HfPart> parts = parts_of(info);
        if (info.kind == ParameterKind::Expert)
            if (const HfPart fused = fused_part_of(folder.config().model, info);
                folder.tensors().contains(fused.tensor))
                parts = {fused};
        for (const HfPart& part : parts)
            if (added.insert(part.tensor).second)
                tensors_.push_back({part.tensor, part.shape, info, 0, 0,
                                    &folder.tensors().find(part.tensor)->second});
    }
    repeat_ends(folder.config().model);
    for (ExportTensor& tensor : tensors_)
        if (tensor.stored->type == StoredType::F8_E4M3)
            tensor.scales = &folder.tensors().find(scales_name(tensor.name))->second;
}

void FolderSource::read(const ExportTensor& tensor, std::uint64_t first,
                        std::span<float> out) const {
    StoredRows rows;
    rows.type = tensor.stored->type;
    rows.data = tensor.stored->bytes.data();
    rows.rows = tensor.rows();
    rows.columns = tensor.columns();
    if (tensor.scales != nullptr) {
        rows.scales = tensor.scales->bytes.data();
        rows.scale_type = tensor.scales->type;
    }
    if (!read_rows(rows, first, out))
        throw Error(ErrorCode::Corrupt, in_quotes(tensor.stored->file) + ": tensor " +
                                            in_quotes(tensor.name) +
                                            " has an FP8 code or a scale that is no finite number");
}

void ExportSource::repeat_ends(const ModelConfig& model) {
    const auto of_model = [this](const char* name) {
        return *std::ranges::find(tensors_, name, &ExportTensor::name);
    };
    for (std::uint64_t layer = model.layers; layer < model.all_layers(); ++layer) {
        const std::string prefix = "model.layers." + std::to_string(layer) + ".";
        ExportTensor embedding = of_model("model.embed_tokens.weight");
        ExportTensor head = model.tied_embeddings ? embedding : of_model("lm_head.weight");
        embedding.name = prefix + "embed_tokens.weight";
        head.name = prefix + "shared_head.head.weight";
        tensors_.push_back(std::move(embedding));
        tensors_.push_back(std::move(head));
    }
}

ParameterSource::ParameterSource(const ModelConfig& model, Read read) : read_(std::move(read)) {
    for (const ParameterInfo& info : parameters(model)) {
        std::uint64_t first_row = 0;
        for (const HfPart& part : parts_of(info)) {
            tensors_.push_back(
                {part.tensor, part.shape, info, first_row, reordered_rows(model, info)});
            first_row += part.rows;
        }
    }
    repeat_ends(model);
}

void ParameterSource::read(const ExportTensor& tensor, std::uint64_t first,
                           std::span<float> out) const {
    if (tensor.head == 0)
        return read_(tensor.info, tensor.first_row + first, out);
    const std::uint64_t columns = tensor.columns(), count = out.size() / columns;
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t row = first + i, within = row % tensor.head, half = tensor.head / 2;
        const std::uint64_t here = row - within + 2 * (within % half) + within / half;
        read_(tensor.info, here, out.subspan(i * columns, columns));
    }
}

std::span<const std::byte> CheckpointValues::mapped(const std::filesystem::path& file) {
    const std::lock_guard lock(mutex_);
    auto map = maps_.find(file.string());
    if (map == maps_.end())
        map = maps_.emplace(file.string(), MappedFile(file)).first;
    return map->second.bytes();
}

void CheckpointValues::read(const ParameterInfo& info, std::uint64_t first_row,
                            std::span<float> out) {
    const SafetensorsReader& reader = checkpoint_->require("model", info.name);
    const SafetensorsReader::Tensor& tensor = *reader.find(info.name);
    if (tensor.type != StoredType::F32 || tensor.shape != info.shape)
        throw Error(ErrorCode::Corrupt, reader.path().string() + ": " + info.name +
                                            " has another type or shape than the model");
    const std::uint64_t columns = info.shape.size() == 2 ? info.shape[1] : 1;
    const auto bytes = mapped(reader.path()).subspan(tensor.offset, tensor.bytes);
    std::memcpy(out.data(), bytes.data() + first_row * columns * sizeof(float), out.size_bytes());
}

} // namespace bellows
