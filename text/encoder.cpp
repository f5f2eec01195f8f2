// SPDX-License-Identifier: MIT
#include "encoder.hpp"

#include "tokenizer_impl.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

namespace bellows::text {

/// One of a table in which each segment has a single place.
struct TextEncoder::Remembered {
    std::array<char, 40> text;
    std::uint8_t bytes = 0; ///< 0: free
    bool prefix = false;
    std::uint8_t tokens = 0;
    std::array<std::int32_t, 8> ids;

    bool is(std::string_view segment, bool with_prefix) const noexcept {
        return bytes == segment.size() && prefix == with_prefix &&
               std::memcmp(text.data(), segment.data(), segment.size()) == 0;
    }
};

TextEncoder::TextEncoder(const Tokenizer& tokenizer) : pieces_(tokenizer.impl_->pieces.get()) {
}

TextEncoder::~TextEncoder() = default;

void TextEncoder::encode(std::string_view text, int before, std::vector<std::uint32_t>& ids) {
    if (pieces_ == nullptr) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
        ids.insert(ids.end(), bytes, bytes + text.size());
        return;
    }
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = segment_end(text, at, cut());
        const std::string_view segment = text.substr(at, end - at);
        encode_segment(segment, pieces_->wants_prefix(before, segment), ids);
        before = static_cast<unsigned char>(segment.back());
        at = end;
    }
}

void TextEncoder::encode_segment(std::string_view segment, bool prefix,
                                 std::vector<std::uint32_t>& ids) {
    constexpr std::size_t kPlaces = std::size_t{1} << 16; // 5 MiB
    Remembered* place = nullptr;
    if (cut() == Cut::Words && segment.size() <= sizeof(Remembered::text)) {
        if (remembered_.empty()) {
            remembered_.resize(kPlaces);
        }
        place = &remembered_[std::hash<std::string_view>()(segment) % kPlaces];
        if (place->is(segment, prefix)) {
            ids.insert(ids.end(), place->ids.begin(), place->ids.begin() + place->tokens);
            return;
        }
    }
    pieces_->encode(segment, prefix, scratch_);
    ids.insert(ids.end(), scratch_.begin(), scratch_.end());
    if (place != nullptr && scratch_.size() <= place->ids.size()) {
        std::copy(segment.begin(), segment.end(), place->text.begin());
        std::copy(scratch_.begin(), scratch_.end(), place->ids.begin());
        place->bytes = static_cast<std::uint8_t>(segment.size());
        place->tokens = static_cast<std::uint8_t>(scratch_.size());
        place->prefix = prefix;
    }
}

} // namespace bellows::text
