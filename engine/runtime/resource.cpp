// SPDX-License-Identifier: MIT
#include "resource.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace bellows {

namespace {

using detail::Range;
using detail::TicketPtr;
using detail::Use;

/// Work that has been reached and whose writes were made available needs no further wait; keep
/// writers all the same while another queue may have to make them visible: they are dropped when
/// overwritten. Readers that have ended order nothing.
void drop_finished_readers(std::vector<Use>& readers) {
    std::erase_if(readers, [](const Use& use) { return use.ticket->settled(); });
}

/// Whether one of the last entries says so already: a recording of a whole model reads hundreds of
/// parts of one buffer of weights, and looking at all for each would take longer than the rest.
bool has_read_just_now(const std::vector<Use>& readers, const Range& range,
                       const TicketPtr& ticket) {
    constexpr std::ptrdiff_t kMost = 16;
    const auto few = std::min<std::ptrdiff_t>(kMost, std::ssize(readers));
    return std::any_of(readers.end() - few, readers.end(), [&](const Use& use) {
        return use.ticket == ticket && use.range.contains(range);
    });
}

void add_overlapping(const std::vector<Use>& uses, const Range& range, const TicketPtr& self,
                     std::vector<TicketPtr>& waits) {
    for (const Use& use : uses)
        if (use.range.overlaps(range) && use.ticket != self &&
            std::find(waits.begin(), waits.end(), use.ticket) == waits.end())
            waits.push_back(use.ticket);
}

/// Moves what is still under way to `covered`, each ticket once. What `self` overwrites of its own
/// has a new entry.
void drop_covered(std::vector<Use>& uses, const Range& range, const TicketPtr& self,
                  std::vector<TicketPtr>& covered) {
    std::erase_if(uses, [&](const Use& use) {
        const bool drop = range.contains(use.range);
        if (drop && use.ticket != self && !use.ticket->settled() &&
            std::find(covered.begin(), covered.end(), use.ticket) == covered.end())
            covered.push_back(use.ticket);
        return drop;
    });
}

} // namespace

void Resource::access(Range range, Access kind_of_access, const TicketPtr& ticket,
                      std::vector<TicketPtr>& waits) {
    if (std::exchange(last_user, ticket.get()) != ticket.get()) // once for all that it accesses
        drop_finished_readers(readers);
    add_overlapping(writers, range, ticket, waits);
    if (kind_of_access == Access::Read) {
        if (!has_read_just_now(readers, range, ticket))
            readers.push_back({range, ticket});
        return;
    }
    add_overlapping(readers, range, ticket, waits);
    std::erase_if(covered, [](const TicketPtr& user) { return user->settled(); });
    drop_covered(readers, range, ticket, covered);
    drop_covered(writers, range, ticket, covered);
    writers.push_back({range, ticket});
}

std::vector<TicketPtr> Resource::pending_users() const {
    std::vector<TicketPtr> users;
    const auto add = [&users](const TicketPtr& user) {
        if (!user->settled() && std::find(users.begin(), users.end(), user) == users.end())
            users.push_back(user);
    };
    for (const auto* uses : {&writers, &readers})
        for (const Use& use : *uses)
            add(use.ticket);
    for (const TicketPtr& user : covered)
        add(user);
    return users;
}

} // namespace bellows
