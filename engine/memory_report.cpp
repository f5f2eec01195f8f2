// SPDX-License-Identifier: MIT
#include "allocator.hpp"

#include <bellows/engine/memory.hpp>

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace bellows {

namespace detail {

std::string in_units(std::uint64_t bytes) {
    static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024)
        return std::to_string(bytes) + " bytes";
    double value = static_cast<double>(bytes) / 1024;
    std::size_t unit = 0;
    for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit)
        value /= 1024;
    char text[32];
    std::snprintf(text, sizeof text, "%.2f %s", value, kUnits[unit]);
    return text;
}

} // namespace detail

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
    }
    return "unknown";
}

MemoryCategory MemoryReport::largest() const noexcept {
    const auto found =
        std::max_element(categories.begin(), categories.end(),
                         [](const Line& a, const Line& b) { return a.bytes < b.bytes; });
    return static_cast<MemoryCategory>(found - categories.begin());
}

std::string MemoryReport::describe() const {
    std::array<std::size_t, kNumMemoryCategories> order{};
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [this](std::size_t a, std::size_t b) {
        return categories[a].bytes > categories[b].bytes;
    });
    std::string text;
    for (const std::size_t i : order) {
        const Line& line = categories[i];
        if (line.num_buffers == 0 && line.bytes == 0)
            continue;
        text += text.empty() ? "" : ", ";
        text += to_string(static_cast<MemoryCategory>(i));
        text += " " + detail::in_units(line.bytes);
        if (line.num_buffers > 0) // an estimate has none
            text += " in " + std::to_string(line.num_buffers) +
                    (line.num_buffers == 1 ? " buffer" : " buffers");
    }
    return text.empty() ? "nothing" : text;
}

} // namespace bellows
