// SPDX-License-Identifier: MIT
#include <bellows/checkpoint/weights.hpp>

#include <bellows/base/error.hpp>

#include <algorithm>
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
                  const ParameterStore::MasterSink& masters, const ModelParameter& in_model) {
    for (const Parameter& parameter : parameters.all()) {
        const auto info = in_model ? in_model(parameter.info) : parameter.info;
        const auto values = info ? read_tensor(checkpoint, "model", info->name, *info)
                                 : std::vector<float>(parameter.info.size());
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
                  const std::function<void(std::uint64_t elements)>& on_progress,
                  const ModelParameter& in_model) {
    // Calls read(info) of what the parameter is in the model.
    const auto fill = [&](const ParameterInfo& info, auto out, const auto& read) {
        if (!in_model)
            return read(info);
        if (const auto other = in_model(info))
            return read(*other);
        std::ranges::fill(out, typename decltype(out)::value_type{0});
    };
    const auto read_rows = [&](const ParameterInfo& info, std::uint64_t first_row, auto out) {
        fill(info, out, [&](const ParameterInfo& mine) { folder.read(mine, first_row, out); });
    };
    parameters.load(read_rows, masters, on_progress, read_rows,
                    {.codes =
                         [&](const ParameterInfo& info, std::uint64_t first_row,
                             std::span<std::uint8_t> codes) {
                             fill(info, codes, [&](const ParameterInfo& mine) {
                                 folder.read_codes(mine, first_row, codes);
                             });
                         },
                     .scales =
                         [&](const ParameterInfo& info, std::span<float> scales) {
                             fill(info, scales, [&](const ParameterInfo& mine) {
                                 folder.read_scales(mine, scales);
                             });
                         }});
}

} // namespace bellows
