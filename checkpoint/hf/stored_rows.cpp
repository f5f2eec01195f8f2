// SPDX-License-Identifier: MIT
#include "stored_rows.hpp"

#include <bellows/fp8/format.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

namespace bellows {

namespace {

float from_f16(std::uint16_t half) noexcept {
    constexpr std::uint32_t kSign = 0x8000, kMagnitude = 0x7fff, kInfinity = 0x7c00;
    const std::uint32_t sign = std::uint32_t{half & kSign} << 16, magnitude = half & kMagnitude;
    if (magnitude >= kInfinity) // or NaN
        return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // The exponents' biases differ by 112, which a product makes up for, subnormals included.
    const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

template <class T>
T load(const std::byte* from, std::uint64_t index) noexcept {
    T value;
    std::memcpy(&value, from + index * sizeof(T), sizeof(T));
    return value;
}

void store(float value, float& out) noexcept {
    out = value;
}
void store(float value, std::uint16_t& out) noexcept {
    out = to_bf16(value);
}

const std::array<float, 256>& e4m3_values() {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> all{};
        for (std::size_t code = 0; code < all.size(); ++code)
            all[code] = fp8::decode(fp8::Format::E4M3, static_cast<std::uint8_t>(code));
        return all;
    }();
    return values;
}

template <class Out>
bool read_fp8(const StoredRows& from, std::uint64_t first, std::span<Out> out) noexcept {
    const auto& values = e4m3_values();
    bool good = true;
    for (std::uint64_t row = 0; row * from.columns < out.size(); ++row) {
        const std::uint64_t at = (first + row) * from.columns;
        for (std::uint64_t begin = 0; begin < from.columns; begin += kBlock) {
            const std::uint64_t end = std::min(begin + kBlock, from.columns);
            const float scale = from.scale((first + row) / kBlock, begin / kBlock);
            good = good && std::isfinite(scale);
            for (std::uint64_t column = begin; column < end; ++column) {
                const auto code = std::to_integer<std::uint8_t>(from.data[at + column]);
                good = good && (code & 0x7f) != fp8::kNanCode;
                store(values[code] * scale, out[row * from.columns + column]);
            }
        }
    }
    return good;
}

template <class Out>
bool read(const StoredRows& from, std::uint64_t first, std::span<Out> out) noexcept {
    const std::uint64_t at = first * from.columns;
    switch (from.type) {
    case StoredType::BF16:
        if constexpr (sizeof(Out) == 2)
            std::memcpy(out.data(), from.data + at * 2, out.size_bytes());
        else
            for (std::uint64_t i = 0; i < out.size(); ++i)
                out[i] = from_bf16(load<std::uint16_t>(from.data, at + i));
        return true;
    case StoredType::F16:
        for (std::uint64_t i = 0; i < out.size(); ++i)
            store(from_f16(load<std::uint16_t>(from.data, at + i)), out[i]);
        return true;
    case StoredType::F8_E4M3:
        return read_fp8(from, first, out);
    default:
        for (std::uint64_t i = 0; i < out.size(); ++i)
            store(load<float>(from.data, at + i), out[i]);
        return true;
    }
}

} // namespace

float StoredRows::scale(std::uint64_t block_row, std::uint64_t block_column) const noexcept {
    const std::uint64_t index = block_row * ((columns + kBlock - 1) / kBlock) + block_column;
    return scale_type == StoredType::BF16 ? from_bf16(load<std::uint16_t>(scales, index))
                                          : load<float>(scales, index);
}

bool are_numbers(std::span<const std::uint8_t> e4m3) noexcept {
    unsigned found = 0; // without a branch, so that many codes go at once
    for (const std::uint8_t code : e4m3)
        found |= unsigned{(code & 0x7fu) == fp8::kNanCode};
    return found == 0;
}

std::uint16_t to_bf16(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) // NaN: quiet, as rounding could make it infinity
        return static_cast<std::uint16_t>(bits >> 16 | ((bits & 0x7f0000u) == 0 ? 0x40u : 0u));
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float from_bf16(std::uint16_t bits) noexcept {
    return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

bool read_rows(const StoredRows& from, std::uint64_t first, std::span<float> out) noexcept {
    return read(from, first, out);
}

bool read_rows(const StoredRows& from, std::uint64_t first, std::span<std::uint16_t> out) noexcept {
    return read(from, first, out);
}

} // namespace bellows
