// SPDX-License-Identifier: MIT
#pragma once

// A Hugging Face folder of random weights whose linear layers are FP8 codes with f32 scales of
// 128 x 128 blocks, as DeepSeek-V3 and R1 are published.

#include "verify/reference/compare.hpp"

#include <bellows/checkpoint/hf_config.hpp>
#include <bellows/checkpoint/safetensors.hpp>
#include <bellows/fp8/format.hpp>
#include <bellows/shape/parameters.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace bellows::testing {

class CodedFolder {
public:
    /// bf16_scales: the scales of tensors whose names contain this are stored in bf16; "": of none.
    CodedFolder(const std::filesystem::path& folder, const ModelConfig& model,
                const std::string& bf16_scales = "") {
        std::ofstream(folder / kHfConfigFile)
            << format_hf_config(model, {.fp8 = true, .max_context = 512});
        for (const ParameterInfo& info : parameters(model))
            add(info, bf16_scales);
        std::vector<StoredTensor> tensors;
        for (const auto& [name, stored] : tensors_)
            tensors.push_back(stored.tensor);
        SafetensorsWriter writer(folder / "model.safetensors", tensors, {{"format", "pt"}});
        for (const auto& [name, stored] : tensors_)
            writer.write(name, std::as_bytes(std::span(stored.bytes)));
        writer.finish();
    }

    bool has(const std::string& name) const { return tensors_.contains(name); }
    const std::vector<std::uint8_t>& bytes(const std::string& name) const {
        return tensors_.at(name).bytes;
    }
    /// Scales as f32.
    std::vector<float> scales(const std::string& name) const {
        const auto& [tensor, bytes] = tensors_.at(name + "_scale_inv");
        std::vector<float> values;
        for (std::size_t i = 0; i < bytes.size(); i += tensor.type == StoredType::F32 ? 4 : 2) {
            std::uint32_t bits = 0;
            for (std::size_t byte = 0; byte < (tensor.type == StoredType::F32 ? 4u : 2u); ++byte)
                bits |= std::uint32_t{bytes[i + byte]} << 8 * byte;
            values.push_back(
                std::bit_cast<float>(tensor.type == StoredType::F32 ? bits : bits << 16));
        }
        return values;
    }

private:
    struct Stored {
        StoredTensor tensor;
        std::vector<std::uint8_t> bytes;
    };

    void add(const ParameterInfo& info, const std::string& bf16_scales) {
        std::string up = info.name;
        const std::size_t both = up.find("gate_up_proj");
        if (both == std::string::npos)
            return add(info.name, info.shape, info, bf16_scales);
        std::string gate = up;
        gate.replace(both, 12, "gate_proj");
        up.replace(both, 12, "up_proj");
        for (const std::string& name : {gate, up})
            add(name, {info.shape[0] / 2, info.shape[1]}, info, bf16_scales);
    }

    void add(const std::string& name, const std::vector<std::uint64_t>& shape,
             const ParameterInfo& info, const std::string& bf16_scales) {
        const std::uint64_t columns = shape.back(),
                            size = info.shape.size() == 1 ? columns : shape[0] * columns;
        const bool bias = name.ends_with("e_score_correction_bias");
        const double spread = std::sqrt(3.0 / static_cast<double>(columns));
        const auto values = bias ? reference::random_f32(size, ++seed_, -0.1, 0.1)
                            : info.shape.size() == 1
                                ? reference::random_f32(size, ++seed_, 0.8, 1.2)
                                : reference::random_f32(size, ++seed_, -spread, spread);
        if (is_linear(info))
            return add_codes(name, shape, values,
                             !bf16_scales.empty() && name.find(bf16_scales) != std::string::npos);
        Stored& stored = tensors_[name];
        stored.tensor = {name, bias ? StoredType::F32 : StoredType::BF16, shape};
        for (const float value : values)
            append(stored.bytes, value, bias);
    }

    void add_codes(const std::string& name, const std::vector<std::uint64_t>& shape,
                   const std::vector<float>& values, bool in_bf16) {
        const std::uint64_t rows = shape[0], columns = shape[1];
        const std::uint64_t down = (rows + 127) / 128, across = (columns + 127) / 128;
        std::vector<float> scales(down * across, 0);
        const auto block = [&](std::uint64_t i) {
            return i / columns / 128 * across + i % columns / 128;
        };
        for (std::uint64_t i = 0; i < values.size(); ++i)
            scales[block(i)] = std::max(scales[block(i)], std::abs(values[i]) / 448);
        Stored codes{{name, StoredType::F8_E4M3, shape}, {}}, stored;
        stored.tensor = {
            name + "_scale_inv", in_bf16 ? StoredType::BF16 : StoredType::F32, {down, across}};
        for (float& scale : scales) {
            if (in_bf16)
                scale = reference::round_to_bf16(scale);
            append(stored.bytes, scale, !in_bf16);
        }
        for (std::uint64_t i = 0; i < values.size(); ++i)
            codes.bytes.push_back(fp8::encode(fp8::Format::E4M3, values[i] / scales[block(i)]));
        tensors_[stored.tensor.name] = std::move(stored);
        tensors_[name] = std::move(codes);
    }

    static void append(std::vector<std::uint8_t>& bytes, float value, bool in_f32) {
        const auto bits =
            std::bit_cast<std::uint32_t>(in_f32 ? value : reference::round_to_bf16(value));
        for (int shift = in_f32 ? 0 : 16; shift < 32; shift += 8)
            bytes.push_back(static_cast<std::uint8_t>(bits >> shift));
    }

    std::map<std::string, Stored> tensors_;
    std::uint64_t seed_ = 0;
};

} // namespace bellows::testing
