// SPDX-License-Identifier: MIT
#include "byte_alphabet.hpp"

#include "utf8.hpp"

#include <array>

namespace bellows::text {

namespace {

constexpr int kCharacters = 0x100 + 68;

bool stands_for_itself(int byte) {
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/// By code point; -1: none.
std::array<int, kCharacters> make_bytes() {
    std::array<int, kCharacters> bytes;
    bytes.fill(-1);
    int next = 0x100;
    for (int byte = 0; byte < 0x100; ++byte) {
        bytes[static_cast<std::size_t>(stands_for_itself(byte) ? byte : next++)] = byte;
    }
    return bytes;
}

} // namespace

std::optional<std::string> bytes_of_token(std::string_view token) {
    static const std::array<int, kCharacters> kBytes = make_bytes();
    std::string bytes;
    while (!token.empty()) {
        const Utf8Step step = utf8_step(token);
        if (step.character >= kBytes.size() || kBytes[step.character] < 0) {
            return std::nullopt;
        }
        bytes.push_back(static_cast<char>(kBytes[step.character]));
        token.remove_prefix(step.bytes);
    }
    return bytes;
}

} // namespace bellows::text
