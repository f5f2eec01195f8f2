// SPDX-License-Identifier: MIT
#pragma once

// What ranks tell each other before records move — how many, where they stand — decides what memory
// is bound and copied. It ends with a checksum of itself, of the call that it belongs to and of who
// says it, in every build: beside the records it costs nothing.

#include "world/siphash.hpp"

#include <bellows/base/error.hpp>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// As much of the hash as a word holds.
template <class Word>
Word checksum(std::span<const Word> words, std::uint64_t sequence, int sender) noexcept {
    SipKey key{};
    std::memcpy(key.data(), &sequence, sizeof sequence);
    std::memcpy(key.data() + sizeof sequence, &sender, sizeof sender);
    const SipTag tag = siphash_128(key, std::as_bytes(words));
    Word sum = 0;
    std::memcpy(&sum, tag.data(), sizeof sum);
    return sum;
}

template <class Word>
void seal(std::vector<Word>& words, std::uint64_t sequence, int sender) {
    words.push_back(checksum<Word>(words, sequence, sender));
}

/// Of a sealed message without its seal. Throws Error{Corrupt}.
template <class Word>
std::span<const Word> unsealed(std::span<const Word> message, std::uint64_t sequence, int sender) {
    const std::span<const Word> words = message.first(message.size() - 1);
    if (message.back() != checksum(words, sequence, sender))
        throw Error(ErrorCode::Corrupt,
                    "what rank " + std::to_string(sender) + " says of exchange " +
                        std::to_string(sequence) +
                        " has changed on its way, or is of another exchange: look for a defect of "
                        "memory or network, or for ranks that run different versions",
                    sender);
    return words;
}

} // namespace bellows
