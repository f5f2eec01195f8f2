// SPDX-License-Identifier: MIT
#include "grouped_gemm/operand.hpp"

#include <bellows/fp8/choice.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace bellows::bench {

namespace {

/// Two values of [-1, 1) from 64 random bits.
std::array<float, 2> two_values(std::uint64_t bits) {
    return {static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-31f,
            static_cast<float>(static_cast<std::int32_t>(bits >> 32)) * 0x1p-31f};
}

/// So many words are drawn and then repeated: a prime, so that neither rows nor tiles repeat.
constexpr std::uint64_t kDrawnWords = 4194301;

} // namespace

std::optional<OperandStorage> storage_of(const std::string& word, fp8::ScaleRule rule) {
    if (word == "fp8")
        return OperandStorage{true, DType::BF16, rule};
    if (word == "prepacked")
        return OperandStorage{.rule = rule, .prepacked = true};
    if (word == "bf16" || word == "f32")
        return OperandStorage{false, word == "f32" ? DType::F32 : DType::BF16, rule};
    return std::nullopt;
}

std::string name_of(const OperandStorage& storage) {
    if (!storage.fp8)
        return to_string(storage.dtype);
    return storage.rule == fp8::ScaleRule::F32 ? "fp8_f32"
           : storage.prepacked                 ? "prepacked"
                                               : "fp8";
}

TensorView random_tensor(OpData& data, DType dtype, std::initializer_list<std::uint64_t> extents,
                         std::uint64_t seed) {
    const TensorView view = data.empty(dtype, extents);
    const std::uint64_t count = view.num_bytes() / 4;
    std::vector<std::uint32_t> words(count);
    reference::Random random(seed);
    const std::uint64_t drawn = std::min<std::uint64_t>(count, kDrawnWords);
    for (std::uint64_t i = 0; i < drawn; ++i) {
        const auto [first, second] = two_values(random.bits());
        words[i] = dtype == DType::BF16 ? reference::bf16_bits(first) |
                                              std::uint32_t{reference::bf16_bits(second)} << 16
                                        : std::bit_cast<std::uint32_t>(first);
    }
    for (std::uint64_t i = drawn; i < count; i += drawn)
        std::copy_n(words.begin(), std::min(drawn, count - i),
                    words.begin() + static_cast<std::ptrdiff_t>(i));
    data.device().upload(view.buffer.sub(0, count * 4), std::span<const std::uint32_t>(words));
    return view;
}

fp8::Operand random_operand(OpData& data, const OperandStorage& storage, fp8::Blocks blocks,
                            std::initializer_list<std::uint64_t> extents, std::uint64_t seed,
                            const TensorView& group_offsets) {
    if (!storage.fp8)
        return random_tensor(data, storage.dtype, extents, seed);
    const fp8::Recipe recipe{.blocks = blocks, .rule = storage.rule};
    const std::uint64_t groups = group_offsets.buffer ? group_offsets.extent[0] - 1 : 0;
    const fp8::Quantized q = fp8::make_quantized(
        data.bytes(fp8::quantized_bytes(recipe, extents, groups)), recipe, extents, group_offsets);
    OpData source(data.device());
    const TensorView x = random_tensor(source, DType::BF16, extents, seed);
    Recording recording(data.device(), QueueRole::Compute, "quantise");
    fp8::quantize(recording, x, q);
    data.device().submit(recording).wait();
    return q;
}

fp8::Variant variant_of(const Device& device, const fp8::Way& way, GemmForm form,
                        const fp8::Operand& a, const fp8::Operand& b, const TensorView& d,
                        const fp8::GroupedRows& rows) {
    return way.variant != fp8::Variant::Device
               ? way.variant
               : fp8::Choice().way(device, form, a, b, d, &rows).variant;
}

fp8::Operand prepacked(OpData& data, const OperandStorage& storage, const fp8::Operand& b,
                       GemmForm form, fp8::Variant variant) {
    const bool native = variant == fp8::Variant::Native;
    if (!storage.prepacked || (native && form == GemmForm::NT)) // codes are read as they stand
        return b;
    variant = native ? variant : fp8::Variant::Packed;
    Recording recording(data.device(), QueueRole::Compute, "prepack");
    fp8::Operand result = fp8::prepack(
        recording, *b.quantized, form,
        data.bytes(fp8::prepacked_bytes(data.device(), *b.quantized, form, variant)), variant);
    data.device().submit(recording).wait();
    return result;
}

fp8::Operand transposed(OpData& data, const fp8::Operand& columns) {
    const fp8::Quantized& q = *columns.quantized;
    const std::uint64_t blocks = q.scales.extent[0];
    fp8::Transposed t;
    t.codes = data.empty(q.codes.dtype, {q.codes.extent[1], 128 * blocks});
    t.scales = q.scales;
    t.recipe = q.recipe;
    t.group_offsets = q.group_offsets;
    t.rows = q.codes.extent[0];
    Recording recording(data.device(), QueueRole::Compute, "transpose");
    fp8::transpose_codes(recording, q, t.codes);
    data.device().submit(recording).wait();
    return t;
}

double operand_bytes(const fp8::Operand& operand, std::uint64_t batch, std::uint64_t rows) {
    const TensorView& v = operand.values;
    const auto share = [&](const TensorView& part, double scale) {
        return static_cast<double>(part.num_bytes()) * scale;
    };
    const double all =
        static_cast<double>(v.num_elements()) / static_cast<double>(v.extent[v.rank - 1]);
    const double part = static_cast<double>(batch * rows) / all;
    return share(v, part) + (operand.quantized ? share(operand.quantized->scales, part) : 0);
}

HostOperand::HostOperand(Device& device, const fp8::Operand& operand)
    : operand_(operand), values_(operand.values.buffer.bytes) {
    device.download(operand.values.buffer, std::span<std::uint8_t>(values_));
    if (!operand.quantized)
        return;
    const BufferView scales = operand.quantized->scales.buffer;
    scales_.resize(scales.bytes / 4);
    device.download(scales, std::span<float>(scales_));
}

double HostOperand::scale(std::uint64_t batch, std::uint64_t row, std::uint64_t column,
                          std::uint64_t group, std::uint64_t first) const {
    const TensorView& s = operand_.quantized->scales;
    const std::uint64_t base = s.rank == 3 ? batch * s.stride[0] : 0, stride = s.stride[s.rank - 2];
    switch (operand_.quantized->recipe.blocks) {
    case fp8::Blocks::Rows128:
        return scales_[base + row * stride + column / 128];
    case fp8::Blocks::Columns128:
        return scales_[base + (first / 128 + group + (row - first) / 128) * stride + column];
    default:
        return scales_[base + row / 128 * stride + column / 128];
    }
}

double HostOperand::at(std::uint64_t batch, std::uint64_t row, std::uint64_t column,
                       std::uint64_t group, std::uint64_t first) const {
    const TensorView& v = operand_.values;
    const std::uint64_t index =
        (v.rank == 3 ? batch * v.stride[0] : 0) + row * v.stride[v.rank - 2] + column;
    if (operand_.quantized)
        return fp8::decode(operand_.quantized->recipe.format, values_[index]) *
               scale(batch, row, column, group, first);
    if (v.dtype == DType::BF16) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, &values_[2 * index], 2);
        return reference::from_bf16(bits);
    }
    float value = 0;
    std::memcpy(&value, &values_[4 * index], 4);
    return value;
}

} // namespace bellows::bench
