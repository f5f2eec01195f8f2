// SPDX-License-Identifier: MIT
#include "driver_defects.hpp"

#include <cstdlib>

namespace bellows::detail {

std::optional<int> mesa_version(const DeviceInfo& info) {
    const std::string word = "Mesa ";
    const std::size_t at = info.driver.find(word);
    if (at == std::string::npos)
        return std::nullopt;
    return std::atoi(info.driver.c_str() + at + word.size());
}

std::string known_crash(const DeviceInfo& info) {
    // Mesa 26.2.6 joins pairs of 16-bit values of all lanes through an array for 8 lanes
    // (pack_32_2x16 and pack_64_4x16), which overruns its stack with the 16 lanes of 512 bits.
    // Mesa 22.3 has a larger array. A lane is an invocation of a subgroup.
    constexpr int kFirstMesa = 26;
    constexpr std::uint32_t kMostLanes = 8;
    if (info.is_cpu && info.subgroup_size > kMostLanes &&
        mesa_version(info).value_or(0) >= kFirstMesa)
        return "vectors of at most 256 bits: with wider ones this driver overruns its stack when "
               "it compiles shaders (set LP_NATIVE_VECTOR_WIDTH=256 or unset it)";
    return "";
}

} // namespace bellows::detail
