// SPDX-License-Identifier: MIT
#pragma once

// Remembers the tokens of short pieces of text: most words of a text have stood in it before. One
// thread.

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace bellows::text {

class PieceCache {
public:
    PieceCache();
    ~PieceCache();

    /// Appends the tokens of a piece that is remembered. kind: pieces of another are others.
    bool append(std::string_view piece, bool kind, std::vector<std::uint32_t>& ids);
    /// After append() of the same piece has failed, before it is called again.
    void remember(std::string_view piece, bool kind, std::span<const std::uint32_t> ids);

private:
    struct Place;
    std::vector<Place> places_; ///< each piece has a single one
    Place* missed_ = nullptr;
    std::uint32_t asked_ = 0;
};

} // namespace bellows::text
