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

} // namespace bellows
