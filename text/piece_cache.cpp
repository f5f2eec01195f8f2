// SPDX-License-Identifier: MIT
#include "piece_cache.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

namespace bellows::text {

struct PieceCache::Place {
    std::array<char, 40> text;
    std::uint8_t bytes = 0; ///< 0: free
    bool kind = false;
    std::uint8_t tokens = 0;
    std::array<std::uint32_t, 8> ids;
};

PieceCache::PieceCache() = default;
PieceCache::~PieceCache() = default;

bool PieceCache::append(std::string_view piece, bool kind, std::vector<std::uint32_t>& ids) {
    constexpr std::size_t kPlaces = std::size_t{1} << 16; // 5 MiB
    constexpr std::uint32_t kFirstPieces = 256;           // a short text needs no table
    missed_ = nullptr;
    if (piece.size() > sizeof(Place::text)) {
        return false;
    }
    if (places_.empty()) {
        if (++asked_ < kFirstPieces) {
            return false;
        }
        places_.resize(kPlaces);
    }
    Place& place = places_[std::hash<std::string_view>()(piece) % kPlaces];
    if (place.bytes == piece.size() && place.kind == kind &&
        std::memcmp(place.text.data(), piece.data(), piece.size()) == 0) {
        ids.insert(ids.end(), place.ids.begin(), place.ids.begin() + place.tokens);
        return true;
    }
    missed_ = &place;
    return false;
}

void PieceCache::remember(std::string_view piece, bool kind, std::span<const std::uint32_t> ids) {
    if (missed_ == nullptr || ids.size() > sizeof(Place::ids) / sizeof(std::uint32_t)) {
        return;
    }
    std::copy(piece.begin(), piece.end(), missed_->text.begin());
    std::copy(ids.begin(), ids.end(), missed_->ids.begin());
    missed_->bytes = static_cast<std::uint8_t>(piece.size());
    missed_->tokens = static_cast<std::uint8_t>(ids.size());
    missed_->kind = kind;
}

} // namespace bellows::text
