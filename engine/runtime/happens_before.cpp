// SPDX-License-Identifier: MIT
#include "happens_before.hpp"

#include <algorithm>
#include <utility>

namespace bellows {

using detail::VectorClock;

std::uint32_t HappensBefore::add_actor(std::string name) {
    actors_.push_back({std::move(name), 0, {}});
    return static_cast<std::uint32_t>(actors_.size() - 1);
}

void HappensBefore::join(VectorClock& into, const VectorClock& from) {
    if (into.size() < from.size())
        into.resize(from.size(), 0);
    for (std::size_t i = 0; i < from.size(); ++i)
        into[i] = std::max(into[i], from[i]);
}

bool HappensBefore::ordered(const VectorClock& clock, const Point& point) const noexcept {
    return point.actor < clock.size() && point.index <= clock[point.actor];
}

void HappensBefore::submit(std::uint32_t actor_index, detail::Ticket& ticket,
                           std::span<const detail::TicketPtr> waits, bool barrier_first,
                           const VectorClock* job_clock, std::span<const Operation> operations) {
    Actor& actor = actors_[actor_index];
    if (actor.known.size() <= actor_index)
        actor.known.resize(actor_index + 1, 0);
    if (barrier_first)
        actor.known[actor_index] = actor.count;
    for (const auto& wait : waits)
        join(actor.known, wait->clock);
    if (job_clock != nullptr)
        join(actor.known, *job_clock);
    for (const Operation& operation : operations) {
        if (operation.barrier_before)
            actor.known[actor_index] = actor.count;
        ++actor.count;
        for (const AddressRange& range : operation.ranges)
            check_and_record(actor, actor_index, operation.name, range);
    }
    // A semaphore signal covers everything before it in submission order.
    ticket.clock = actor.known;
    ticket.clock[actor_index] = actor.count;
}

VectorClock HappensBefore::begin_job(std::uint32_t actor_index,
                                     std::span<const detail::TicketPtr> waits,
                                     const Operation& operation) {
    Actor& actor = actors_[actor_index];
    if (actor.known.size() <= actor_index)
        actor.known.resize(actor_index + 1, 0);
    for (const auto& wait : waits)
        join(actor.known, wait->clock);
    actor.known[actor_index] = actor.count; // jobs of a lane follow one another
    ++actor.count;
    for (const AddressRange& range : operation.ranges)
        check_and_record(actor, actor_index, operation.name, range);
    VectorClock known = actor.known;
    known[actor_index] = actor.count;
    return known;
}

void HappensBefore::end_job(std::uint32_t actor_index, detail::Ticket& ticket,
                            const Operation& late) {
    Actor& actor = actors_[actor_index];
    for (const auto& inner : ticket.inner)
        join(actor.known, inner->clock);
    actor.known[actor_index] = actor.count;
    ++actor.count;
    for (const AddressRange& range : late.ranges)
        check_and_record(actor, actor_index, late.name, range);
    ticket.clock = actor.known;
    ticket.clock[actor_index] = actor.count;
}

void HappensBefore::observed(const detail::Ticket& ticket) {
    join(observed_, ticket.clock);
}

void HappensBefore::split(std::uint64_t address) {
    auto after = segments_.upper_bound(address);
    if (after == segments_.begin())
        return;
    auto segment = std::prev(after);
    if (segment->first >= address || segment->second.end <= address)
        return;
    Segment tail = segment->second;
    segment->second.end = address;
    segments_.emplace_hint(after, address, std::move(tail));
}

void HappensBefore::check_and_record(const Actor& actor, std::uint32_t actor_index,
                                     const char* name, const AddressRange& range) {
    if (range.begin >= range.end)
        return;
    ++num_checked_;
    split(range.begin);
    split(range.end);
    const Point self{actor_index, actor.count, name};
    const auto same = [&](const Point& point) {
        return point.actor == self.actor && point.index == self.index;
    };
    std::uint64_t covered = range.begin;
    auto it = segments_.lower_bound(range.begin);
    while (covered < range.end) {
        if (it == segments_.end() || it->first > covered) {
            const std::uint64_t end =
                it == segments_.end() ? range.end : std::min(range.end, it->first);
            it = segments_.emplace_hint(it, covered, Segment{end, false, {}, {}});
        }
        Segment& segment = it->second;
        if (segment.written && !same(segment.writer) && !ordered(actor.known, segment.writer))
            report(segment.writer, true, actor, name, range);
        if (range.write) {
            for (const Point& reader : segment.readers)
                if (!same(reader) && !ordered(actor.known, reader) && !ordered(observed_, reader))
                    report(reader, false, actor, name, range);
            segment.readers.clear();
            segment.written = true;
            segment.writer = self;
        } else {
            // Of one actor only the newest read matters.
            auto mine = std::find_if(segment.readers.begin(), segment.readers.end(),
                                     [&](const Point& p) { return p.actor == self.actor; });
            if (mine == segment.readers.end())
                segment.readers.push_back(self);
            else
                *mine = self;
        }
        covered = segment.end;
        ++it;
    }
}

void HappensBefore::released(std::uint64_t begin, std::uint64_t end, const std::string& name) {
    split(begin);
    split(end);
    const auto first = segments_.lower_bound(begin);
    const auto last = segments_.lower_bound(end);
    for (auto it = first; it != last; ++it) {
        const Segment& segment = it->second;
        std::vector<Point> points = segment.readers;
        if (segment.written)
            points.push_back(segment.writer);
        for (const Point& point : points)
            if (!ordered(observed_, point)) {
                Error error(ErrorCode::Internal,
                            "memory of " + name + " was released while " + point.name + " on " +
                                actors_[point.actor].name + " may still use it");
                segments_.erase(first, last);
                throw error;
            }
    }
    segments_.erase(first, last);
}

void HappensBefore::report(const Point& before, bool before_writes, const Actor& actor,
                           const char* name, const AddressRange& range) const {
    throw Error(ErrorCode::Internal, std::string("race: ") + name + " on " + actor.name +
                                         (range.write ? " writes " : " reads ") +
                                         std::to_string(range.end - range.begin) + " bytes that " +
                                         before.name + " on " + actors_[before.actor].name +
                                         (before_writes ? " wrote" : " reads") +
                                         ", with no order between them");
}

} // namespace bellows
