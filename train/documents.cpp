// SPDX-License-Identifier: MIT
#include "documents.hpp"

namespace bellows {

std::vector<std::uint32_t> documents_of(std::span<const std::uint32_t> tokens, std::uint64_t seq,
                                        std::uint32_t end_of_document) {
    std::vector<std::uint32_t> ends;
    ends.reserve(2 * tokens.size());
    for (std::uint64_t first = 0; first < tokens.size(); first += seq)
        for (std::uint64_t begin = 0; begin < seq;) {
            std::uint64_t end = begin + 1;
            while (end < seq && tokens[first + end - 1] != end_of_document)
                ++end;
            for (std::uint64_t token = begin; token < end; ++token) {
                ends.push_back(static_cast<std::uint32_t>(begin));
                ends.push_back(static_cast<std::uint32_t>(end));
            }
            begin = end;
        }
    return ends;
}

std::uint64_t visible_keys(std::span<const std::uint32_t> documents) noexcept {
    std::uint64_t keys = 0;
    for (std::size_t i = 0; i < documents.size();) {
        const std::uint64_t length = documents[i + 1] - documents[i];
        keys += length * (length + 1) / 2;
        i += 2 * length;
    }
    return keys;
}

} // namespace bellows
