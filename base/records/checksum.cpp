// SPDX-License-Identifier: MIT
#include "checksum.hpp"

#include <zlib.h>

namespace bellows {

std::uint32_t crc32_of(const void* data, std::uint64_t bytes, std::uint32_t start) noexcept {
    if (bytes == 0) {
        return start; // zlib answers a null pointer with the initial value
    }
    return static_cast<std::uint32_t>(
        ::crc32_z(start, static_cast<const unsigned char*>(data), bytes));
}

std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second,
                           std::uint64_t second_bytes) noexcept {
    return static_cast<std::uint32_t>(
        ::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

std::string hex32(std::uint32_t value) {
    std::string out(8, '0');
    for (int i = 7; i >= 0; --i, value >>= 4) {
        out[static_cast<std::size_t>(i)] = "0123456789abcdef"[value & 15];
    }
    return out;
}

} // namespace bellows
