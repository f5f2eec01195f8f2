// SPDX-License-Identifier: MIT
#pragma once

// Element types of device tensors.

#include <cstdint>

namespace bellows {

enum class DType : std::uint8_t { F32, BF16, F8E4M3, F8E5M2, I32, U32, U8 };

constexpr std::uint64_t size_of(DType dtype) noexcept {
    switch (dtype) {
    case DType::F32:
    case DType::I32:
    case DType::U32:
        return 4;
    case DType::BF16:
        return 2;
    case DType::F8E4M3:
    case DType::F8E5M2:
    case DType::U8:
        return 1;
    }
    return 0;
}

constexpr const char* to_string(DType dtype) noexcept {
    switch (dtype) {
    case DType::F32:
        return "f32";
    case DType::BF16:
        return "bf16";
    case DType::F8E4M3:
        return "f8_e4m3";
    case DType::F8E5M2:
        return "f8_e5m2";
    case DType::I32:
        return "i32";
    case DType::U32:
        return "u32";
    case DType::U8:
        return "u8";
    }
    return "unknown";
}

} // namespace bellows
