// SPDX-License-Identifier: MIT
#include <bellows/engine/memory.hpp>

#include <algorithm>

namespace bellows {

MemoryCategory MemoryReport::largest() const noexcept {
    const auto found =
        std::max_element(categories.begin(), categories.end(),
                         [](const Line& a, const Line& b) { return a.bytes < b.bytes; });
    return static_cast<MemoryCategory>(found - categories.begin());
}

MemorySizes MemoryReport::sizes() const noexcept {
    MemorySizes sizes{};
    for (std::size_t i = 0; i < sizes.size(); ++i)
        sizes[i] = categories[i].bytes;
    return sizes;
}

MemorySizes MemoryReport::peaks() const noexcept {
    MemorySizes peaks{};
    for (std::size_t i = 0; i < peaks.size(); ++i)
        peaks[i] = categories[i].peak_bytes;
    return peaks;
}

} // namespace bellows
