// SPDX-License-Identifier: MIT
#pragma once

// The happens-before checker: vector clocks over queues and lanes against declared accesses. It
// sees what is really submitted (command order, barriers, semaphore waits, job starts) and physical
// addresses, not what the hazard tracker meant, so it proves the tracker. Needs
// Device::Impl::mutex.

#include "ticket.hpp"

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace bellows {

class HappensBefore {
public:
    struct AddressRange {
        std::uint64_t begin = 0, end = 0;
        bool write = false;
    };
    struct Operation {
        const char* name = "";
        bool barrier_before = false;
        std::vector<AddressRange> ranges;
    };

    std::uint32_t add_actor(std::string name);

    /// A batch reaches a VkQueue. waits: what its semaphores wait for; barrier_first: it
    /// is derived to come after what the queue was given before, whose last barrier orders it;
    /// job_clock: what the lane job that submits it knows, if one does. Throws Error{Internal} that
    /// names both sides of a race.
    void submit(std::uint32_t actor, detail::Ticket& ticket,
                std::span<const detail::TicketPtr> waits, bool barrier_first,
                const detail::VectorClock* job_clock, std::span<const Operation> operations);

    /// A lane job starts, having seen its waits reached; returns what it knows.
    detail::VectorClock begin_job(std::uint32_t actor, std::span<const detail::TicketPtr> waits,
                                  const Operation& operation);
    /// The job has ended and has seen what it submitted (ticket.inner) reached. `late` are its
    /// accesses to memory that it may have bound itself.
    void end_job(std::uint32_t actor, detail::Ticket& ticket, const Operation& late);

    /// The host has seen that the work is done.
    void observed(const detail::Ticket& ticket);
    /// Memory goes back to the allocator: all work on it must have been observed.
    void released(std::uint64_t begin, std::uint64_t end, const std::string& name);

    std::uint64_t num_checked() const noexcept { return num_checked_; }

private:
    struct Point {
        std::uint32_t actor = 0;
        std::uint64_t index = 0;
        std::string name;
    };
    struct Segment {
        std::uint64_t end = 0;
        bool written = false;
        Point writer;
        std::vector<Point> readers;
    };
    struct Actor {
        std::string name;
        std::uint64_t count = 0;   ///< operations so far
        detail::VectorClock known; ///< own entry: own operations before the last barrier
    };

    void check_and_record(const Actor& actor, std::uint32_t actor_index, const char* name,
                          const AddressRange& range);
    void split(std::uint64_t address);
    bool ordered(const detail::VectorClock& clock, const Point& point) const noexcept;
    [[noreturn]] void report(const Point& before, bool before_writes, const Actor& actor,
                             const char* name, const AddressRange& range) const;
    static void join(detail::VectorClock& into, const detail::VectorClock& from);

    std::vector<Actor> actors_;
    std::map<std::uint64_t, Segment> segments_;
    detail::VectorClock observed_;
    std::uint64_t num_checked_ = 0;
};

} // namespace bellows
