// SPDX-License-Identifier: MIT
#include <bellows/checkpoint/weights.hpp>

#include <bellows/base/error.hpp>

#include <span>

namespace bellows {

std::vector<float> read_tensor(const Checkpoint& checkpoint, const char* base,
                               const std::string& name, const ParameterInfo& info) {
    const SafetensorsReader& reader = checkpoint.require(base, name);
    const auto* tensor = reader.find(name);
    if (tensor->type != StoredType::F32 || tensor->shape != info.shape)
        throw Error(ErrorCode::Corrupt, reader.path().string() + ": " + name +
                                            " has another type or shape than the model");
    std::vector<float> values(info.size());
    reader.read(name, std::as_writable_bytes(std::span(values)));
    return values;
}

void load_weights(const Checkpoint& checkpoint, ParameterStore& parameters,
                  const ParameterStore::MasterSink& masters) {
    for (const Parameter& parameter : parameters.all()) {
        const auto values = read_tensor(checkpoint, "model", parameter.info.name, parameter.info);
        parameters.upload(parameter.info.name, values);
        if (masters)
            masters(parameter.first, values);
    }
}

LinearForms linear_forms(const HfFolder& folder) {
    return [&folder](const ParameterInfo& info) {
        if (info.name.ends_with(".self_attn.kv_b_proj.weight"))
            return LinearForm::Plain;
        return folder.has_codes(info) ? LinearForm::StoredCodes : LinearForm::PowerOfTwo;
    };
}

void load_weights(const HfFolder& folder, ParameterStore& parameters,
                  const ParameterStore::MasterSink& masters,
                  const std::function<void(std::uint64_t elements)>& on_progress) {
    parameters.load(
        [&](const ParameterInfo& info, std::uint64_t first_row, std::span<float> values) {
            folder.read(info, first_row, values);
        },
        masters, on_progress,
        [&](const ParameterInfo& info, std::uint64_t first_row, std::span<std::uint16_t> values) {
            folder.read(info, first_row, values);
        },
        {.codes = [&](const ParameterInfo& info, std::uint64_t first_row,
                      std::span<std::uint8_t> codes) { folder.read_codes(info, first_row, codes); },
         .scales = [&](const ParameterInfo& info,
                       std::span<float> scales) { folder.read_scales(info, scales); }});
}

} // namespace bellows
