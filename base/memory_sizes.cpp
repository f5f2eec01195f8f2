// SPDX-License-Identifier: MIT
#include <bellows/base/memory_sizes.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>

namespace bellows {

std::string format_bytes(std::uint64_t bytes) {
    constexpr std::array<const char*, 6> kUnits = {" B", " KiB", " MiB", " GiB", " TiB", " PiB"};
    auto value = static_cast<double>(bytes);
    std::size_t unit = 0;
    for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit)
        value /= 1024;
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f%s" : "%.1f%s", value, kUnits[unit]);
    return text.data();
}

std::string describe_memory(const MemorySizes& bytes) {
    std::array<std::size_t, kNumMemoryCategories> order{};
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return bytes[a] > bytes[b]; });
    std::string text = format_bytes(std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0}));
    const char* between = ": ";
    for (const std::size_t i : order)
        if (bytes[i] > 0) {
            text += between + std::string(to_string(static_cast<MemoryCategory>(i))) + " " +
                    format_bytes(bytes[i]);
            between = ", ";
        }
    return text;
}

const char* to_string(MemoryCategory category) noexcept {
    switch (category) {
    case MemoryCategory::Weights:
        return "weights";
    case MemoryCategory::Gradients:
        return "gradients";
    case MemoryCategory::Optimizer:
        return "optimiser";
    case MemoryCategory::Activations:
        return "activations";
    case MemoryCategory::DeferredWgrad:
        return "deferred weight gradients";
    case MemoryCategory::Communication:
        return "communication";
    case MemoryCategory::Scratch:
        return "scratch";
    case MemoryCategory::Cache:
        return "cache";
    }
    return "unknown";
}

} // namespace bellows
