// SPDX-License-Identifier: MIT
// The lane jobs of an exchange: learn the counts, bind what they call for, move the bytes. A leg is
// a list of stages, each asked until it is done, and two jobs: the first ends when all that comes
// is here, the second when what this rank sends has left, which holds up nobody but who would write
// there.

#include "counts.hpp"
#include "moves.hpp"
#include "transport/seal.hpp"
#include "transport/trace_transfer.hpp"
#include "world/fail_together.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

namespace bellows {

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kCountsStream = 0;
constexpr std::uint32_t kRecordsStream = 1;
/// Words of records that nobody has sent: tokens for expert -1, sums of 0.
constexpr std::uint32_t kNobodys = 0xffffffff, kNothing = 0;

class Exchange {
public:
    Exchange(ExchangeHandlePtr handle, LegJob leg, bool outbound)
        : handle_ptr_(std::move(handle)), next_(std::move(leg.next)), handle_(*handle_ptr_),
          exchange_(handle_.exchange), name_(std::move(leg.name)), outbound_(outbound),
          tokens_(outbound && (leg.learn || exchange_.low_latency())),
          record_bytes_(record().bytes), gate_(std::move(leg.gate)), sequence_(leg.sequence),
          blocks_(leg.blocks), without_(exchange_.group_size()) {
        for (std::uint64_t at = 0; at < without_.size(); ++at)
            without_[at] = exchange_.without(at);
        const bool learn = leg.learn;
        const auto then = [this](auto stage) { stages_.push_back(stage); };
        // At once: receives are posted first, so that MPI finds them. With a gate: all that can be
        // done without receiving comes before it.
        if (learn && !gate_)
            then([this](LaneContext&) { return post_counts_in(); });
        if (learn)
            then([this](LaneContext&) { return post_counts_out(); });
        if (learn && !gate_)
            then([this](LaneContext& context) { return take_counts(context); });
        if (outbound && !tokens_ && exchange_.in_records())
            then([this](LaneContext& context) { return bind_gradients(context); });
        if (gate_) {
            then([this](LaneContext& context) { return begin_out(context); });
            if (!learn && exchange_.link != nullptr)
                then([this](LaneContext&) { return begin_in_by_link(); });
            then([this](LaneContext& context) { return post_out(context); });
            then([this](LaneContext& context) { return wait_for_gate(context); });
            if (learn) {
                then([this](LaneContext&) { return post_counts_in(); });
                then([this](LaneContext& context) { return take_counts(context); });
            }
        }
        then([this](LaneContext& context) { return begin_in(context); });
        if (!gate_)
            then([this](LaneContext& context) { return begin_out(context); });
        then([this](LaneContext& context) { return move_records(context); });
    }

    /// Of the first job.
    Progress step(LaneContext& context) {
        if (began_ == Clock::time_point{}) {
            began_ = Clock::now();
            activity_ = exchange_.world.control().begin_activity([this] { return describe(); });
        }
        return explaining([&] {
            require_in_time();
            return advance(context);
        });
    }

    /// Of the second.
    Progress step_rest(LaneContext& context) {
        if (stage_ < stages_.size())
            throw Error(ErrorCode::Aborted, name_ + " has failed");
        return explaining([&] {
            if (late())
                moves().give_up_masked();
            const Progress progress = send_rest(context);
            if (progress != Progress::Done)
                require_in_time();
            return progress;
        });
    }

private:
    using Stage = std::function<Progress(LaneContext&)>;

    bool late() const { return Clock::now() - began_ > exchange_.config.timeout; }
    void require_in_time() const {
        if (late())
            throw timeout_error(exchange_.transport, transfers(), name_ + ": " + phase_,
                                exchange_.config.timeout);
    }

    template <class Part>
    Progress explaining(const Part& part) {
        try {
            const std::scoped_lock lock(mutex_);
            return part();
        } catch (const Error& error) {
            throw explained(error);
        }
    }

    Progress advance(LaneContext& context) {
        while (stage_ < stages_.size()) {
            const Progress progress = stages_[stage_](context);
            context.phase(phase_);
            if (progress != Progress::Done)
                return progress;
            ++stage_;
        }
        return Progress::Done;
    }

    /// What travels.
    Record record() const {
        return tokens_     ? exchange_.token_record()
               : outbound_ ? exchange_.gradient_record()
                           : exchange_.sum_record();
    }

    /// What came from elsewhere says what all lanes of this rank were doing; what went wrong here
    /// says where, for those who hear of it on other ranks.
    Error explained(const Error& error) const {
        ControlPlane& control = exchange_.world.control();
        if (control.failed())
            return control.with_activities(error);
        if (error.code() == ErrorCode::Timeout)
            return error;
        return Error(error.code(),
                     "rank " + std::to_string(control.rank()) + ": " + describe() + ": " +
                         error.message(),
                     error.rank(), error.detail());
    }

    /// Any thread. Does not wait for long: a step may stand in a driver.
    std::string describe() const {
        const std::unique_lock lock(mutex_, 1s);
        if (!lock)
            return "'" + name_ + "' (exchange " + std::to_string(sequence_) + "), within a step";
        std::string text =
            "'" + name_ + ": " + phase_ + "' (exchange " + std::to_string(sequence_) + ")";
        const auto tell = [&](std::span<const Transfer> some, const char* where) {
            if (!some.empty())
                text += ", " + describe_transfers(some) + where;
        };
        tell(counts_in_, " in");
        if (!moves_)
            tell(counts_out_, " out");
        if (moves_) {
            tell(moves_->receives(), " in");
            tell(moves_->sends(), " out");
        }
        return text;
    }

    /// Where the records of each member of the group stand at their source: by destination, then
    /// by origin.
    RecordRuns runs_at_source() const {
        std::uint64_t offset = 0;
        RecordRuns runs(exchange_.group_size());
        for (std::uint64_t at = 0; at < runs.size(); ++at)
            for (std::uint64_t origin = 0; origin < exchange_.origins; ++origin)
                add_run(runs[at], handle_.sent_rows[at * exchange_.origins + origin], offset);
        return runs;
    }
    /// And at the experts: by origin, then by the member that they come from.
    RecordRuns runs_at_experts() const {
        std::uint64_t offset = 0;
        RecordRuns runs(exchange_.group_size());
        for (std::uint64_t origin = 0; origin < exchange_.origins; ++origin)
            for (std::uint64_t at = 0; at < runs.size(); ++at)
                add_run(runs[at], handle_.received_rows[at * exchange_.origins + origin], offset);
        return runs;
    }
    void add_run(std::vector<MemoryRun>& runs, std::uint64_t rows, std::uint64_t& offset) const {
        runs.push_back({offset, rows * record_bytes_});
        offset += runs.back().bytes;
    }
    RecordMoves::Out out() const {
        if (!outbound_)
            return {.place = {handle_.returned, handle_.returned_memory},
                    .runs = runs_at_experts(),
                    .own_there = exchange_.low_latency() || exchange_.sums_own_in_place()};
        if (!exchange_.low_latency())
            return {.place = {handle_.send_records, handle_.send_memory}, .runs = runs_at_source()};
        const BufferView own = handle_.own_records(handle_.received, record());
        return {.place = {handle_.received, handle_.received_memory},
                .runs = RecordRuns(exchange_.group_size(), {{own.offset, own.bytes}}),
                .same = true,
                .own_there = true};
    }
    RecordRuns runs_in() const { return outbound_ ? runs_at_experts() : runs_at_source(); }
    RecordMoves::In in() const {
        if (outbound_)
            return {{handle_.arrivals(tokens_), handle_.memory_of_arrivals(tokens_)},
                    kNobodys,
                    handle_.blank_received};
        return {{handle_.back_records, handle_.back_memory}, kNothing, handle_.blank_back};
    }

    /// Those that are waited for now.
    std::span<const Transfer> transfers() const {
        const auto waits = [](std::span<const Transfer> some) {
            return std::any_of(some.begin(), some.end(),
                               [](const Transfer& t) { return !t.done(); });
        };
        if (!moves_ || waits(counts_in_))
            return counts_in_;
        return waits(moves_->receives()) ? moves_->receives() : moves_->sends();
    }

    /// Whether all of them are done.
    bool test(std::vector<Transfer>& some) const {
        bool all = true;
        for (Transfer& transfer : some)
            all &= test_and_trace(exchange_.device, exchange_.config.name, transfer);
        return all;
    }

    Progress post_counts_in() {
        phase_ = "counts";
        counts_posted_ = Clock::now();
        const std::uint64_t own = static_cast<std::uint64_t>(exchange_.position);
        incoming_counts_.assign(
            exchange_.group_size(),
            std::vector<std::uint32_t>(exchange_.origins + exchange_.experts_of(own) + 1));
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at)
            counts_in_.push_back(exchange_.transport.post_recv(
                exchange_.config.ranks[at], {sequence_, kCountsStream},
                std::as_writable_bytes(std::span(incoming_counts_[at]))));
        return Progress::Done;
    }

    Progress post_counts_out() {
        phase_ = "counts";
        outgoing_counts_ = counts_for_members(handle_, blocks_);
        handle_.sent_rows.clear();
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at) {
            for (std::uint64_t origin = 0; origin < exchange_.origins; ++origin)
                handle_.sent_rows.push_back(outgoing_counts_[at][origin]);
            seal(outgoing_counts_[at], sequence_, exchange_.world.rank());
            counts_out_.push_back(exchange_.transport.post_send(
                exchange_.config.ranks[at], {sequence_, kCountsStream},
                std::as_bytes(std::span(outgoing_counts_[at]))));
        }
        return Progress::Done;
    }

    Progress take_counts(LaneContext& context) {
        exchange_.transport.progress();
        test(counts_out_);
        if (!test(counts_in_))
            return waiting(counts_posted_);
        counts_in_.clear();
        handle_.received_rows.clear();
        const std::uint64_t origins = exchange_.origins;
        std::vector<std::uint64_t> per_expert(incoming_counts_.front().size() - 1 - origins);
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at) {
            unsealed<std::uint32_t>(incoming_counts_[at], sequence_, exchange_.config.ranks[at]);
            incoming_counts_[at].pop_back();
            check_plausible(at);
            for (std::uint64_t origin = 0; origin < origins; ++origin)
                handle_.received_rows.push_back(incoming_counts_[at][origin]);
            for (std::size_t e = 0; e < per_expert.size(); ++e)
                per_expert[e] += incoming_counts_[at][origins + e];
        }
        const std::uint64_t records = total(handle_.received_rows);
        handle_.num_rows = exchange_.by_tokens() ? records : 0;
        for (std::size_t e = 0; e < per_expert.size() && !exchange_.by_tokens(); ++e)
            handle_.num_rows += round_up(per_expert[e], exchange_.config.alignment);
        exchange_.require_addressable(records, handle_.num_rows);
        const auto counted = Clock::now();
        exchange_.nanoseconds_for_counts += nanoseconds(counted - counts_posted_);
        tell_device(records, per_expert);
        bind_memory(context, records);
        if (next_)
            bind_forwarding(
                context, records,
                std::accumulate(per_expert.begin(), per_expert.end(), std::uint64_t{0}));
        exchange_.nanoseconds_for_memory += nanoseconds(Clock::now() - counted);
        return Progress::Done;
    }

    void tell_device(std::uint64_t records, const std::vector<std::uint64_t>& per_expert) const {
        const auto words = handle_.record_count.mapped_as<std::uint32_t>();
        words[0] = static_cast<std::uint32_t>(records);
        if (exchange_.sums_own_in_place()) {
            const auto own = static_cast<std::size_t>(exchange_.position);
            const MemoryRun here = runs_at_experts()[own].front(),
                            back = runs_at_source()[own].front();
            const auto range = words.subspan(handle_.own_range().offset / 4, 3);
            range[0] = static_cast<std::uint32_t>(here.offset / record_bytes_);
            range[1] = static_cast<std::uint32_t>(here.bytes / record_bytes_);
            range[2] = static_cast<std::uint32_t>(back.offset / record_bytes_);
        }
        for (std::size_t e = 0; e < per_expert.size(); ++e)
            words[kHandleCountsAt / 4 + e] = static_cast<std::uint32_t>(per_expert[e]);
        if (!next_)
            return;
        const auto firsts = handle_.first_rows().offset / 4;
        std::uint64_t first = 0;
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at) {
            words[firsts + at] = static_cast<std::uint32_t>(first);
            first += handle_.received_rows[at];
        }
    }

    void bind_memory(LaneContext& context, std::uint64_t records) {
        phase_ = "memory for " + std::to_string(records) + " tokens, " +
                 std::to_string(handle_.num_rows) + " rows";
        const auto bind = [&](Buffer& buffer, std::uint64_t rows, std::uint64_t row_bytes) {
            context.bind(buffer, std::max<std::uint64_t>(rows, 1) * row_bytes);
        };
        const Record token = exchange_.token_record(), gradient = exchange_.gradient_record();
        bind_wire(context, exchange_, handle_.returned, handle_.returned_memory,
                  std::max<std::uint64_t>(records, 1) * exchange_.sum_record().bytes);
        const std::uint64_t in =
            exchange_.in_records() ? token.bytes : std::max(token.bytes, gradient.bytes);
        bind_arrivals(context, handle_.received, handle_.received_memory, records * in,
                      token.bytes);
        if (!exchange_.in_records()) {
            bind(handle_.rows, handle_.num_rows, token.row_bytes);
            bind(handle_.gradients, handle_.num_rows, gradient.row_bytes);
        }
        for (auto& tensor : handle_.row_tensors) {
            bind(*tensor.buffer, handle_.num_rows, tensor.row_bytes);
            exchange_.require_addressable(records, handle_.num_rows, tensor.row_bytes);
        }
    }

    /// What is sent from or received in is kept from one dispatch to the next, as staging memory
    /// is.
    static void bind_wire(LaneContext& context, const ExpertExchange::Impl& hop, Buffer& buffer,
                          WireMemory& memory, std::uint64_t bytes) {
        if (buffer.bound() && buffer.size() >= bytes)
            return;
        WireMemory made;
        if (hop.link != nullptr)
            made.link = hop.link->allocate(bytes + bytes / 4, hop.gone); // seldom again
        else if (hop.zero_copy())
            made.shared = hop.share(bytes);
        if (made.link)
            made.link->bind(context, buffer);
        else if (made.shared)
            context.bind(buffer, made.shared.bytes());
        else
            context.bind(buffer, bytes);
        memory = std::move(made);
    }

    /// Where records arrive: memory of the link is kept, other is as large as they are.
    void bind_arrivals(LaneContext& context, Buffer& buffer, WireMemory& memory,
                       std::uint64_t bytes, std::uint64_t least) const {
        if (exchange_.link != nullptr)
            bind_wire(context, exchange_, buffer, memory, std::max(bytes, least));
        else
            context.bind(buffer, std::max(bytes, least));
    }

    /// What the next hop sends of these records, and gets back for them.
    void bind_forwarding(LaneContext& context, std::uint64_t records, std::uint64_t slots) {
        const std::uint64_t members = next_->exchange.group_size();
        const std::uint64_t most = std::max<std::uint64_t>(1, std::min(slots, records * members));
        const Record token = exchange_.token_record(), gradient = exchange_.gradient_record();
        next_->exchange.require_addressable(most, 0);
        bind_wire(context, next_->exchange, next_->send_records, next_->send_memory,
                  most * std::max(token.bytes, gradient.bytes));
        bind_wire(context, next_->exchange, next_->back_records, next_->back_memory,
                  most * exchange_.sum_record().bytes);
    }

    /// Gradients that stay in the records they arrive in.
    Progress bind_gradients(LaneContext& context) {
        phase_ = "memory for gradients";
        bind_arrivals(context, handle_.gradients, handle_.gradient_memory,
                      total(handle_.received_rows) * record_bytes_, record_bytes_);
        return Progress::Done;
    }

    /// A rank sends each of its tokens once at most, for 1 to top_k experts, or once for each
    /// choice.
    void check_plausible(std::uint64_t at) const {
        const auto& counts = incoming_counts_[at];
        const auto experts = counts.begin() + static_cast<std::ptrdiff_t>(exchange_.origins);
        const std::uint64_t rows = std::accumulate(counts.begin(), experts, std::uint64_t{0});
        const std::string peer = "rank " + std::to_string(exchange_.config.ranks[at]);
        const auto refuse = [&](const std::string& what) {
            throw Error(ErrorCode::InvalidArgument,
                        peer + " sends " + std::to_string(rows) + " rows" + what,
                        exchange_.config.ranks[at]);
        };
        if (rows > exchange_.config.max_tokens * exchange_.records_per_member())
            refuse(", max_tokens is " + std::to_string(exchange_.config.max_tokens) +
                   " here: set it alike on every rank");
        const std::uint64_t slots = std::accumulate(experts, counts.end(), std::uint64_t{0});
        if (slots < rows || slots > rows * exchange_.config.top_k)
            refuse(" to " + std::to_string(slots) + " slots with top_k " +
                   std::to_string(exchange_.config.top_k) + ": set it alike on every rank");
    }

    static std::uint64_t total(const std::vector<std::uint64_t>& rows) {
        return std::accumulate(rows.begin(), rows.end(), std::uint64_t{0});
    }

    RecordMoves& moves() {
        if (!moves_)
            moves_.emplace(handle_, name_, Tag{sequence_, kRecordsStream}, out(), in(), without_,
                           gate_ != nullptr);
        return *moves_;
    }

    Progress begin_out(LaneContext& context) {
        phase_ = "records";
        moves().begin_out(context);
        ++exchange_.exchanges;
        posted_ = Clock::now();
        return Progress::Done;
    }

    /// The first half in the hook form.
    Progress post_out(LaneContext& context) {
        moves().step(context);
        return moves().all_posted() ? Progress::Done : waiting(posted_);
    }

    /// A link's copies take nothing from anybody, so they need not wait for the hook where it is
    /// known what comes.
    Progress begin_in_by_link() {
        moves().begin_in_by_link(runs_in());
        return Progress::Done;
    }

    Progress wait_for_gate(LaneContext& context) {
        phase_ = "waiting for its hook";
        began_ = Clock::now();
        moves().step(context);
        test(counts_out_);
        return gate_->open ? Progress::Done : Progress::Again;
    }

    /// Hurry does not last long.
    Progress waiting(Clock::time_point since) const {
        const bool soon = exchange_.hurries() && Clock::now() - since < 5ms;
        return soon ? Progress::Soon : Progress::Again;
    }

    Progress begin_in(LaneContext& context) {
        phase_ = "records";
        moves().begin_in(context, runs_in());
        if (gate_)
            posted_ = Clock::now();
        return Progress::Done;
    }

    Progress move_records(LaneContext& context) {
        const Progress progress = moves().step(context);
        if (!moves().here())
            return progress == Progress::Again ? waiting(posted_) : progress;
        exchange_.nanoseconds_waited += nanoseconds(Clock::now() - posted_);
        return Progress::Done;
    }

    Progress send_rest(LaneContext& context) {
        const bool told = test(counts_out_);
        const Progress progress = moves().step(context);
        if (progress == Progress::Done && told)
            return progress;
        return progress == Progress::Moved ? progress : waiting(posted_); // others wait for it
    }

    ExchangeHandlePtr handle_ptr_, next_; // first: their memory outlives everything here
    ExchangeHandle::Impl& handle_;
    ExpertExchange::Impl& exchange_;
    std::string name_;
    bool outbound_;
    bool tokens_; ///< not sums or gradients
    std::uint64_t record_bytes_;
    std::shared_ptr<ReceiveGate> gate_;
    std::uint64_t sequence_, blocks_;
    std::vector<bool> without_; ///< members that were masked or lost when it was called
    std::vector<Stage> stages_;
    mutable std::timed_mutex mutex_; ///< of what describe() reads; held by steps
    std::size_t stage_ = 0;
    std::string phase_ = "start";
    Clock::time_point began_{}, counts_posted_{}, posted_{};
    std::vector<std::vector<std::uint32_t>> outgoing_counts_, incoming_counts_;
    std::vector<Transfer> counts_in_, counts_out_; // after the counts, whose memory they use
    std::optional<RecordMoves> moves_;
    ControlPlane::Activity activity_; // last: it calls describe()
};

/// Hands both jobs in. first: its accesses; source: what is sent from.
void post(const ExchangeHandlePtr& handle, LegJob leg, bool outbound,
          std::vector<DeclaredAccess> first, BufferView source) {
    LaneJob job;
    job.name = leg.name;
    // The exchange's own limit comes first and says more; with a gate it begins when that opens.
    job.timeout = handle->exchange.config.timeout + std::chrono::seconds(10);
    if (leg.gate)
        job.timeout += std::chrono::hours(24);
    const auto exchange = std::make_shared<Exchange>(handle, std::move(leg), outbound);
    job.step = [exchange](LaneContext& context) { return exchange->step(context); };
    job.on_failure = tell_all(handle->exchange.world.control());
    job.prompt = handle->exchange.hurries();
    LaneJob rest = job;
    rest.name += ", the rest that is sent";
    rest.step = [exchange](LaneContext& context) { return exchange->step_rest(context); };
    job.accesses = std::move(first);
    job.accesses.push_back({source, Access::Read});
    rest.accesses = {job.accesses.back()};
    handle->last_leg = handle->lane.post(std::move(job));
    handle->last_sent = handle->lane.post(std::move(rest));
}

} // namespace

void post_outbound(const ExchangeHandlePtr& handle_ptr, LegJob leg) {
    const ExchangeHandle::Impl& handle = *handle_ptr;
    std::vector<DeclaredAccess> all;
    if (handle.exchange.low_latency()) {
        const BufferView records = handle.received.view();
        const BufferView own = handle.own_records(handle.received, handle.exchange.token_record());
        const std::uint64_t end = own.offset + own.bytes;
        for (const BufferView& others :
             {records.sub(0, own.offset), records.sub(end, records.bytes - end)})
            if (others.bytes > 0)
                all.push_back({others, Access::Write});
        return post(handle_ptr, std::move(leg), true, std::move(all), own);
    }
    const auto accesses = [&](const Buffer& buffer, Access access) {
        all.push_back({buffer.view(), access});
    };
    accesses(handle.arrivals(leg.learn), Access::Write);
    if (leg.learn) {
        accesses(handle.host_counts, Access::Read);
        accesses(handle.record_count, Access::Write);
        accesses(handle.returned, Access::Write);
        if (!handle.exchange.in_records()) {
            accesses(handle.rows, Access::Write);
            accesses(handle.gradients, Access::Write);
        }
        for (const auto& tensor : handle.row_tensors)
            accesses(*tensor.buffer, Access::Write);
        if (leg.next) {
            accesses(leg.next->send_records, Access::Write);
            accesses(leg.next->back_records, Access::Write);
        }
    }
    post(handle_ptr, std::move(leg), true, std::move(all), handle.send_records.view());
}

void post_inbound(const ExchangeHandlePtr& handle, LegJob leg) {
    post(handle, std::move(leg), false, {{handle->back_records.view(), Access::Write}},
         handle->returned.view());
}

} // namespace bellows
