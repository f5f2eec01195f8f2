// SPDX-License-Identifier: MIT
#include "siphash.hpp"

#include <bit>

namespace bellows {
namespace {

struct State {
    std::uint64_t v0, v1, v2, v3;

    void round() noexcept {
        v0 += v1;
        v2 += v3;
        v1 = std::rotl(v1, 13) ^ v0;
        v3 = std::rotl(v3, 16) ^ v2;
        v0 = std::rotl(v0, 32);
        v2 += v1;
        v0 += v3;
        v1 = std::rotl(v1, 17) ^ v2;
        v3 = std::rotl(v3, 21) ^ v0;
        v2 = std::rotl(v2, 32);
    }

    void absorb(std::uint64_t word) noexcept {
        v3 ^= word;
        round();
        round();
        v0 ^= word;
    }

    std::uint64_t squeeze() noexcept {
        for (int i = 0; i < 4; ++i)
            round();
        return v0 ^ v1 ^ v2 ^ v3;
    }
};

// Little-endian words whatever the host's order is.
template <typename Byte>
std::uint64_t load(const Byte* bytes, std::size_t count) noexcept {
    std::uint64_t word = 0;
    for (std::size_t i = 0; i < count; ++i)
        word |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
    return word;
}

void store(std::uint64_t word, std::uint8_t* bytes) noexcept {
    for (int i = 0; i < 8; ++i)
        bytes[i] = static_cast<std::uint8_t>(word >> (8 * i));
}

} // namespace

SipTag siphash_128(const SipKey& key, std::span<const std::byte> message) noexcept {
    return siphash_128(key, {}, message);
}

SipTag siphash_128(const SipKey& key, std::span<const std::uint64_t> words,
                   std::span<const std::byte> message) noexcept {
    const std::uint64_t k0 = load(key.data(), 8);
    const std::uint64_t k1 = load(key.data() + 8, 8);
    State state{k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du ^ 0xeeu,
                k0 ^ 0x6c7967656e657261u, k1 ^ 0x7465646279746573u};

    for (const std::uint64_t word : words)
        state.absorb(word);
    const std::size_t whole = message.size() / 8 * 8;
    for (std::size_t at = 0; at < whole; at += 8)
        state.absorb(load(message.data() + at, 8));
    const std::uint64_t length =
        static_cast<std::uint64_t>((8 * words.size() + message.size()) & 0xff) << 56;
    state.absorb(load(message.data() + whole, message.size() - whole) | length);

    SipTag tag{};
    state.v2 ^= 0xee;
    store(state.squeeze(), tag.data());
    state.v1 ^= 0xdd;
    store(state.squeeze(), tag.data() + 8);
    return tag;
}

bool equal_constant_time(const SipTag& a, const SipTag& b) noexcept {
    unsigned difference = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        difference |= static_cast<unsigned>(a[i] ^ b[i]);
    return difference == 0;
}

} // namespace bellows
