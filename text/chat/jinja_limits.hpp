// SPDX-License-Identifier: MIT
#pragma once

// What a template may use up.

#include <cstddef>
#include <cstdint>

namespace bellows::text::jinja {

class Limits {
public:
    /// Throw Error{Unsupported} beyond a bound.
    void step(int line);
    void bytes(std::size_t count, int line);
    void enter_call(int line);
    void leave_call() noexcept { --calls_; }

private:
    std::uint64_t steps_ = 0;
    std::uint64_t bytes_ = 0;
    int calls_ = 0;
};

} // namespace bellows::text::jinja
