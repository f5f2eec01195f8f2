// SPDX-License-Identifier: MIT
#pragma once

// The JSON header of a safetensors file as text and as values. Parsing is strict: an object of
// tensors, each with exactly dtype, shape and data_offsets, and one optional `__metadata__` of
// strings; a key that stands twice is an error.

#include <bellows/checkpoint/safetensors.hpp>

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// Bytes of the header length in front of the header.
inline constexpr std::uint64_t kLengthBytes = 8;
inline constexpr std::string_view kHeaderChecksumKey = "bellows.header_crc32";
inline constexpr std::string_view kTensorChecksumPrefix = "bellows.crc32.";
/// As in the reference implementation: more is refused.
inline constexpr std::uint64_t kLargestHeader = 100'000'000;

/// Shape × size of the type; false if that is no whole number, or its bits leave 64 bits.
bool checked_bytes_of(const StoredTensor& tensor, std::uint64_t& out) noexcept;

struct SafetensorsHeader {
    struct Entry : StoredTensor {
        std::uint64_t begin = 0; ///< data_offsets, from the end of the header
        std::uint64_t end = 0;
    };
    std::vector<Entry> tensors; ///< as parsed: in the order of the text
    std::map<std::string, std::string> metadata;
};

/// Throws Error{Corrupt}; `file` is named in the message. Offsets and shapes are not yet compared.
SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file);

/// Padded with blanks so that 8 + its size is a multiple of 8.
std::string format_safetensors_header(const SafetensorsHeader& header);

} // namespace bellows
