// SPDX-License-Identifier: MIT
#pragma once

// Device copies go by words of four bytes; tensors of two- and one-byte elements need not end or
// begin with one. Work that touches such a tensor uses, and declares, the whole words around it.

#include <bellows/engine/tensor.hpp>

#include <cstdint>

namespace bellows {

inline constexpr std::uint64_t kWordBytes = 4;

inline std::uint64_t whole_words(std::uint64_t bytes) noexcept {
    return (bytes + kWordBytes - 1) / kWordBytes * kWordBytes;
}

/// The whole words that hold bytes [first, first + bytes) of a view; nothing of an empty one.
inline BufferView words_around(const BufferView& view, std::uint64_t first,
                               std::uint64_t bytes) noexcept {
    if (!view || bytes == 0)
        return {};
    const std::uint64_t begin = (view.offset + first) / kWordBytes * kWordBytes;
    const std::uint64_t end = whole_words(view.offset + first + bytes);
    return {view.resource, begin, end - begin};
}

} // namespace bellows
