// SPDX-License-Identifier: MIT
#pragma once

// A 64-bit fingerprint of a series of values: tells what is the same from what is not, where nobody
// means harm. Pure, any thread.

#include <bellows/base/mix.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace bellows::text {

class Fingerprint {
public:
    Fingerprint& add(std::uint64_t value) noexcept {
        state_ = mix(state_ ^ value);
        return *this;
    }
    Fingerprint& add(std::string_view bytes) noexcept {
        add(std::uint64_t{bytes.size()});
        while (!bytes.empty()) {
            std::uint64_t word = 0;
            const std::size_t taken = std::min(bytes.size(), sizeof word);
            std::memcpy(&word, bytes.data(), taken);
            add(word);
            bytes.remove_prefix(taken);
        }
        return *this;
    }
    std::uint64_t value() const noexcept { return state_; }

private:
    std::uint64_t state_ = 0;
};

} // namespace bellows::text
