// SPDX-License-Identifier: MIT
// What all chunks do, and the job that takes them through the network, several at a time.

#include "collectives_impl.hpp"
#include "transport/trace_transfer.hpp"

#include <bellows/base/error.hpp>

#include <numeric>
#include <utility>

namespace bellows {

using Clock = std::chrono::steady_clock;

// ---- What all chunks do ------------------------------------------------------------------------

void CollectiveChunk::reserve(MessageBuffer& staging, std::uint64_t bytes, LaneContext& lane) {
    if (bytes == 0 || (staging.buffer.bound() && staging.buffer.size() >= bytes))
        return;
    if (!linked_) {
        staging.buffer.bind(bytes);
        return;
    }
    staging.block = context_.link->allocate(bytes, context_.gone);
    staging.block->bind(lane, staging.buffer);
}

void CollectiveChunk::reserve_staging(LaneContext& lane) {
    reserve(slot_.image, image_bytes_, lane);
    reserve(slot_.incoming, incoming_bytes_, lane);
}

TimePoint CollectiveChunk::submit(LaneContext& lane, Recording& recording) {
    return recording.num_operations() > 0 ? lane.submit(recording) : TimePoint{};
}

void CollectiveChunk::post(std::uint64_t member, std::uint32_t stream, const MessageBuffer& at,
                           std::vector<MemoryRun> runs, Direction direction) {
    const std::uint64_t bytes = total_bytes(runs);
    if (bytes == 0)
        return;
    const int peer = context_.group.rank_at(static_cast<int>(member));
    const Tag tag{sequence_, first_stream_ + stream};
    const bool receives = direction == Direction::Receive;
    Transport& transport = context_.transport;
    if (linked_) {
        transfers_.push_back(receives ? post_link_recv(transport, peer, tag, at.block,
                                                       std::move(runs), context_.opened)
                                      : post_link_send(transport, peer, tag, at.block, runs));
    } else {
        const auto message = at.buffer.mapped_as<std::byte>().subspan(runs.front().offset, bytes);
        transfers_.push_back(receives ? transport.post_recv(peer, tag, message)
                                      : transport.post_send(peer, tag, message));
    }
    if (receives) {
        stats_.bytes_received += bytes;
    } else {
        stats_.bytes_sent += bytes;
        ++stats_.messages_sent;
    }
}

bool CollectiveChunk::all_done() {
    bool done = true;
    for (Transfer& transfer : transfers_) {
        const bool known = transfer.done();
        if (!test_and_trace(context_.device, context_.options.name, transfer))
            done = false;
        else if (!known)
            ++num_events_;
    }
    if (done)
        transfers_.clear();
    return done;
}

bool CollectiveChunk::step(LaneContext& lane) {
    while (advance(lane))
        ++num_events_;
    return ended();
}

// ---- The job -----------------------------------------------------------------------------------

CollectiveJob::CollectiveJob(std::shared_ptr<CollectiveContext> context,
                             std::shared_ptr<StagingSlots> slots, bool linked, std::string name,
                             std::size_t num_chunks, const MakeChunk& make)
    : context_(std::move(context)), slots_(std::move(slots)), linked_(linked),
      name_(std::move(name)) {
    const std::uint64_t sequence = context_->transport.next_sequence();
    std::vector<StagingSlot>& in_turn = linked_ ? slots_->linked : slots_->host;
    // A slot's chunks follow one another on all members, so they may share its streams.
    for (std::size_t i = 0; i < num_chunks; ++i) {
        const std::size_t slot = i % in_turn.size();
        chunks_.push_back(make(in_turn[slot], i, sequence, static_cast<std::uint32_t>(2 * slot)));
    }
    next_.resize(in_turn.size());
    std::iota(next_.begin(), next_.end(), std::size_t{0});
}

void CollectiveJob::finish(const CollectiveChunk& chunk) {
    stats_.bytes_sent += chunk.stats().bytes_sent;
    stats_.bytes_received += chunk.stats().bytes_received;
    stats_.messages_sent += chunk.stats().messages_sent;
    events_of_ended_ += chunk.num_events();
}

/// Counts the time in which only the network could go on, and ends a wait that takes too long.
void CollectiveJob::watch(std::uint64_t num_events) {
    const auto now = Clock::now();
    const CollectiveChunk* waiting = nullptr;
    bool only_network = true;
    for (const std::size_t at : next_) {
        if (at >= chunks_.size())
            continue;
        if (chunks_[at]->waits_for_network())
            waiting = waiting ? waiting : chunks_[at].get();
        else
            only_network = false;
    }
    const bool waits = waiting != nullptr && only_network && last_step_ != TimeOfDay{};
    if (waits)
        stats_.seconds_waited += std::chrono::duration<double>(now - last_step_).count();
    if (!waits || num_events != last_events_)
        last_progress_ = now;
    last_step_ = now;
    last_events_ = num_events;
    if (waiting != nullptr && now - last_progress_ > context_->options.timeout)
        throw timeout_error(
            context_->transport, waiting->transfers(), name_ + ": " + waiting->phase_name(),
            std::chrono::duration_cast<std::chrono::milliseconds>(now - last_progress_));
}

/// Whether the slot has work left after all that could be done now.
bool CollectiveJob::step_slot(std::size_t slot, LaneContext& lane) {
    for (; next_[slot] < chunks_.size(); next_[slot] += next_.size()) {
        CollectiveChunk& chunk = *chunks_[next_[slot]];
        if (!chunk.step(lane))
            return true;
        finish(chunk);
        chunks_[next_[slot]].reset();
    }
    return false;
}

Progress CollectiveJob::step(LaneContext& lane) {
    ControlPlane& control = context_->transport.control();
    if (!began_) {
        began_ = true;
        activity_ = control.begin_activity([this] { return describe(); });
    }
    try {
        const std::scoped_lock lock(mutex_);
        return advance(lane);
    } catch (const Error& error) {
        if (control.failed())
            throw control.with_activities(error);
        if (error.code() == ErrorCode::Timeout)
            throw;
        throw Error(error.code(),
                    "rank " + std::to_string(control.rank()) + ": " + describe() + ": " +
                        error.message(),
                    error.rank(), error.detail());
    }
}

/// Any thread. Does not wait for long: a step may stand in a driver.
std::string CollectiveJob::describe() const {
    const std::unique_lock lock(mutex_, std::chrono::seconds(1));
    if (!lock)
        return "'" + name_ + "', within a step";
    const CollectiveChunk* at = nullptr;
    std::size_t open = 0;
    for (const std::size_t next : next_)
        for (std::size_t i = next; i < chunks_.size(); i += next_.size()) {
            ++open;
            if (i == next &&
                (at == nullptr || (chunks_[i]->waits_for_network() && !at->waits_for_network())))
                at = chunks_[i].get();
        }
    std::string text = "'" + name_ + (at ? std::string(": ") + at->phase_name() : "") + "', " +
                       std::to_string(chunks_.size() - open) + " of " +
                       std::to_string(chunks_.size()) + " chunks done";
    if (at != nullptr && at->waits_for_network())
        text += ", " + describe_transfers(at->transfers());
    return text;
}

/// From device to device a nap is as long as a chunk's way; not while others let it wait.
bool CollectiveJob::hurries() const {
    return linked_ && !context_->device.info().is_cpu &&
           last_step_ - last_progress_ < std::chrono::milliseconds(5);
}

Progress CollectiveJob::advance(LaneContext& lane) {
    context_->transport.progress();
    bool any = false;
    std::uint64_t num_events = 0;
    for (std::size_t slot = 0; slot < next_.size(); ++slot)
        if (step_slot(slot, lane)) {
            if (!any) // what the first of the chunks under way is at
                lane.phase(chunks_[next_[slot]]->phase_name());
            any = true;
            num_events += chunks_[next_[slot]]->num_events();
        }
    watch(events_of_ended_ + num_events);
    if (any)
        return hurries() ? Progress::Soon : Progress::Again;
    const std::scoped_lock lock(context_->stats_mutex);
    CollectivesStats& all = context_->stats;
    ++all.collectives;
    all.bytes_sent += stats_.bytes_sent;
    all.bytes_received += stats_.bytes_received;
    all.messages_sent += stats_.messages_sent;
    all.seconds_waited += stats_.seconds_waited;
    return Progress::Done;
}

} // namespace bellows
