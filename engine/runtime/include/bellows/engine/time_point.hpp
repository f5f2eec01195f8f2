// SPDX-License-Identifier: MIT
#pragma once

// Time points: where a piece of submitted work ends. A ticket that is pending, reached, or failed
// with an Error. Copies share the ticket. Any thread.

#include <bellows/base/error.hpp>

#include <chrono>
#include <cstdint>
#include <memory>

namespace bellows {

namespace detail {
struct Ticket;
}

class TimePoint {
public:
    enum class State { Pending, Reached, Failed };

    static constexpr std::chrono::milliseconds kDefaultTimeout{120'000};

    /// Already reached.
    TimePoint() = default;
    explicit TimePoint(std::shared_ptr<detail::Ticket> ticket) noexcept;

    State state() const;
    /// True when reached; false while pending. Throws the Error of failed work.
    bool reached() const;
    /// Waits for the end of the work. Throws its Error when it failed, Error{Timeout} that names
    /// the work when `timeout` runs out first.
    void wait(std::chrono::milliseconds timeout = kDefaultTimeout) const;

    const std::shared_ptr<detail::Ticket>& ticket() const noexcept { return ticket_; }

private:
    std::shared_ptr<detail::Ticket> ticket_;
};

} // namespace bellows
