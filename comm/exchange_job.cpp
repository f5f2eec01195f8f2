// SPDX-License-Identifier: MIT
// The lane jobs of an exchange: learn the counts, bind what they call for, move the bytes. A job is
// a list of stages; each is asked until it is done.

#include "exchange_impl.hpp"
#include "fail_together.hpp"
#include "trace_transfer.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <utility>

namespace bellows {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kCountsStream = 0;
constexpr std::uint32_t kRecordsStream = 1;

/// What one rank tells another before it sends: rows, then rows per expert of the receiver.
std::vector<std::vector<std::uint32_t>> counts_for_ranks(const ExchangeHandle::Impl& handle) {
    const ExpertExchange::Impl& exchange = handle.exchange;
    const auto all = handle.host_counts.mapped_as<const std::uint32_t>();
    const std::uint64_t ranks = exchange.group_size();
    std::vector<std::vector<std::uint32_t>> messages(ranks);
    for (std::uint64_t at = 0; at < ranks; ++at) {
        messages[at].push_back(all[at]);
        const auto loads =
            all.subspan(ranks + exchange.first_expert_of(at), exchange.experts_of(at));
        messages[at].insert(messages[at].end(), loads.begin(), loads.end());
    }
    return messages;
}

class Exchange {
public:
    Exchange(ExchangeHandlePtr handle, std::string name, bool outbound, bool learn,
             std::shared_ptr<ReceiveGate> gate)
        : handle_ptr_(std::move(handle)), handle_(*handle_ptr_), exchange_(handle_.exchange),
          name_(std::move(name)), outbound_(outbound), gate_(std::move(gate)),
          sequence_(exchange_.transport.next_sequence()) {
        const auto then = [this](auto stage) { stages_.push_back(stage); };
        // At once: receives are posted first, so that MPI finds them. With a gate: all that can be
        // done without receiving comes before it.
        if (learn && !gate_)
            then([this](LaneContext&) { return post_counts_in(); });
        if (learn)
            then([this](LaneContext&) { return post_counts_out(); });
        if (learn && !gate_)
            then([this](LaneContext& context) { return take_counts(context); });
        then([this](LaneContext& context) { return copy_out(context); });
        if (gate_) {
            then([this](LaneContext&) { return post_records_out(); });
            then([this](LaneContext&) { return wait_for_gate(); });
            if (learn) {
                then([this](LaneContext&) { return post_counts_in(); });
                then([this](LaneContext& context) { return take_counts(context); });
            }
        }
        then([this](LaneContext&) { return post_records_in(); });
        if (!gate_)
            then([this](LaneContext&) { return post_records_out(); });
        then([this](LaneContext&) { return wait_for_records(); });
        then([this](LaneContext& context) { return copy_in(context); });
    }

    Progress step(LaneContext& context) {
        if (began_ == Clock::time_point{}) {
            began_ = Clock::now();
            activity_ = exchange_.world.control().begin_activity([this] { return describe(); });
        }
        try {
            const std::scoped_lock lock(mutex_);
            return advance(context);
        } catch (const Error& error) {
            throw explained(error);
        }
    }

private:
    using Stage = std::function<Progress(LaneContext&)>;

    Progress advance(LaneContext& context) {
        if (Clock::now() - began_ > exchange_.config.timeout)
            throw timeout_error(exchange_.transport, transfers(), name_ + ": " + phase_,
                                exchange_.config.timeout);
        while (stage_ < stages_.size()) {
            const Progress progress = stages_[stage_](context);
            context.phase(phase_);
            if (progress == Progress::Again)
                return Progress::Again;
            ++stage_;
        }
        return Progress::Done;
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

    /// Any thread.
    std::string describe() const {
        const std::scoped_lock lock(mutex_);
        std::string text =
            "'" + name_ + ": " + phase_ + "' (exchange " + std::to_string(sequence_) + ")";
        if (!receives_.empty())
            text += ", " + describe_transfers(receives_) + " in";
        if (!sends_.empty())
            text += ", " + describe_transfers(sends_) + " out";
        return text;
    }

    /// Rows that go to, or come from, each member of the group in this direction.
    const std::vector<std::uint64_t>& rows_out() const {
        return outbound_ ? handle_.sent_rows : handle_.received_rows;
    }
    const std::vector<std::uint64_t>& rows_in() const {
        return outbound_ ? handle_.received_rows : handle_.sent_rows;
    }
    Buffer& device_out() const { return outbound_ ? handle_.send_records : handle_.returned; }
    Buffer& device_in() const { return outbound_ ? handle_.received : handle_.back_records; }

    /// Those that are waited for now.
    std::span<const Transfer> transfers() const {
        const bool receives = std::any_of(receives_.begin(), receives_.end(),
                                          [](const Transfer& t) { return !t.done(); });
        return receives ? receives_ : sends_;
    }

    /// True when all of them are done; moves everything that can be moved.
    bool poll(bool with_sends) {
        exchange_.transport.progress();
        bool received = true, sent = true;
        for (Transfer& transfer : receives_)
            received &= moved(transfer);
        for (Transfer& transfer : sends_)
            sent &= moved(transfer);
        return received && (sent || !with_sends);
    }

    bool moved(Transfer& transfer) const {
        if (transfer.done())
            return true;
        if (!transfer.test())
            return false;
        trace_transfer(exchange_.device, exchange_.config.name, transfer);
        return true;
    }

    Progress post_counts_in() {
        phase_ = "counts";
        const std::uint64_t own = static_cast<std::uint64_t>(exchange_.position);
        incoming_counts_.assign(exchange_.group_size(),
                                std::vector<std::uint32_t>(1 + exchange_.experts_of(own)));
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at)
            receives_.push_back(exchange_.transport.post_recv(
                exchange_.config.ranks[at], {sequence_, kCountsStream},
                std::as_writable_bytes(std::span(incoming_counts_[at]))));
        return Progress::Done;
    }

    Progress post_counts_out() {
        phase_ = "counts";
        outgoing_counts_ = counts_for_ranks(handle_);
        handle_.sent_rows.clear();
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at) {
            handle_.sent_rows.push_back(outgoing_counts_[at].front());
            sends_.push_back(exchange_.transport.post_send(
                exchange_.config.ranks[at], {sequence_, kCountsStream},
                std::as_bytes(std::span(outgoing_counts_[at]))));
        }
        return Progress::Done;
    }

    Progress take_counts(LaneContext& context) {
        if (!poll(false))
            return Progress::Again;
        receives_.clear();
        handle_.received_rows.clear();
        std::vector<std::uint64_t> per_expert(incoming_counts_.front().size() - 1);
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at) {
            check_plausible(at);
            handle_.received_rows.push_back(incoming_counts_[at].front());
            for (std::size_t e = 0; e < per_expert.size(); ++e)
                per_expert[e] += incoming_counts_[at][e + 1];
        }
        const std::uint64_t alignment = exchange_.config.alignment;
        handle_.num_rows = 0;
        for (std::uint64_t rows : per_expert)
            handle_.num_rows += (rows + alignment - 1) / alignment * alignment;
        const std::uint64_t records = total(handle_.received_rows);
        handle_.record_count.mapped_as<std::uint32_t>()[0] = static_cast<std::uint32_t>(records);
        bind_memory(context, records);
        return Progress::Done;
    }

    void bind_memory(LaneContext& context, std::uint64_t records) {
        phase_ = "memory for " + std::to_string(records) + " tokens, " +
                 std::to_string(handle_.num_rows) + " rows";
        const std::uint64_t bytes = std::max<std::uint64_t>(records, 1) * exchange_.record_bytes();
        context.bind(handle_.received, bytes);
        context.bind(handle_.returned, bytes);
        for (auto& tensor : handle_.row_tensors)
            context.bind(*tensor.buffer,
                         std::max<std::uint64_t>(handle_.num_rows, 1) * tensor.row_bytes);
    }

    /// A rank sends each of its tokens once at most, for 1 to top_k experts.
    void check_plausible(std::uint64_t at) const {
        const auto& counts = incoming_counts_[at];
        const std::uint64_t rows = counts.front();
        const std::string peer = "rank " + std::to_string(exchange_.config.ranks[at]);
        const auto refuse = [&](const std::string& what) {
            throw Error(ErrorCode::InvalidArgument,
                        peer + " sends " + std::to_string(rows) + " rows" + what,
                        exchange_.config.ranks[at]);
        };
        if (rows > exchange_.config.max_tokens)
            refuse(", max_tokens is " + std::to_string(exchange_.config.max_tokens) +
                   " here: set it alike on every rank");
        std::uint64_t slots = 0;
        for (std::size_t e = 1; e < counts.size(); ++e)
            slots += counts[e];
        if (slots < rows || slots > rows * exchange_.config.top_k)
            refuse(" to " + std::to_string(slots) + " slots with top_k " +
                   std::to_string(exchange_.config.top_k) + ": set it alike on every rank");
    }

    static std::uint64_t total(const std::vector<std::uint64_t>& rows) {
        return std::accumulate(rows.begin(), rows.end(), std::uint64_t{0});
    }

    /// Host memory of at least so many bytes, kept by the handle from one leg to the next.
    void reserve(Buffer& staging, std::uint64_t bytes, const char* what) {
        if (staging.size() < bytes)
            staging = Buffer(exchange_.device, {.name = handle_.name + what,
                                                .bytes = bytes,
                                                .kind = MemoryKind::Readback,
                                                .category = MemoryCategory::Communication});
    }

    Progress copy_out(LaneContext& context) {
        phase_ = "copy from the device";
        const std::uint64_t bytes = total(rows_out()) * exchange_.record_bytes();
        if (exchange_.zero_copy() || bytes == 0)
            return Progress::Done;
        if (!out_) {
            reserve(handle_.staging_out, bytes, " staging out");
            out_ = std::make_unique<Recording>(exchange_.device, QueueRole::TransferOut,
                                               name_ + " out");
            out_->copy(device_out().view().sub(0, bytes), handle_.staging_out.view().sub(0, bytes));
            copied_ = context.submit(*out_);
        }
        return copied_.reached() ? Progress::Done : Progress::Again;
    }

    Progress wait_for_gate() {
        phase_ = "waiting for its hook";
        began_ = Clock::now();
        poll(false);
        return gate_->open ? Progress::Done : Progress::Again;
    }

    Progress post_records_out() {
        phase_ = "records";
        const Buffer& from = exchange_.zero_copy() ? device_out() : handle_.staging_out;
        std::uint64_t first = 0;
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at) {
            const std::uint64_t bytes = rows_out()[at] * exchange_.record_bytes();
            if (bytes == 0)
                continue;
            const int peer = exchange_.config.ranks[at];
            sends_.push_back(exchange_.transport.post_send(
                peer, {sequence_, kRecordsStream},
                from.mapped_as<const std::byte>().subspan(first, bytes)));
            first += bytes;
            if (peer != exchange_.world.rank()) {
                exchange_.bytes_sent += bytes;
                ++exchange_.messages_sent;
            }
        }
        ++exchange_.exchanges;
        posted_ = Clock::now();
        return Progress::Done;
    }

    Progress post_records_in() {
        phase_ = "records";
        const std::uint64_t all = total(rows_in()) * exchange_.record_bytes();
        if (!exchange_.zero_copy() && all > 0)
            reserve(handle_.staging_in, all, " staging in");
        const Buffer& to = exchange_.zero_copy() ? device_in() : handle_.staging_in;
        std::uint64_t first = 0;
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at) {
            const std::uint64_t bytes = rows_in()[at] * exchange_.record_bytes();
            if (bytes == 0)
                continue;
            const int peer = exchange_.config.ranks[at];
            receives_.push_back(
                exchange_.transport.post_recv(peer, {sequence_, kRecordsStream},
                                              to.mapped_as<std::byte>().subspan(first, bytes)));
            first += bytes;
            if (peer != exchange_.world.rank())
                exchange_.bytes_received += bytes;
        }
        if (gate_)
            posted_ = Clock::now();
        return Progress::Done;
    }

    Progress wait_for_records() {
        if (!poll(true))
            return Progress::Again;
        exchange_.nanoseconds_waited +=
            static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - posted_).count());
        receives_.clear();
        sends_.clear();
        return Progress::Done;
    }

    Progress copy_in(LaneContext& context) {
        phase_ = "copy to the device";
        const std::uint64_t bytes = total(rows_in()) * exchange_.record_bytes();
        if (exchange_.zero_copy() || bytes == 0)
            return Progress::Done;
        in_ = std::make_unique<Recording>(exchange_.device, QueueRole::TransferIn, name_ + " in");
        in_->copy(handle_.staging_in.view().sub(0, bytes), device_in().view().sub(0, bytes));
        context.submit(*in_);
        return Progress::Done;
    }

    ExchangeHandlePtr handle_ptr_; // first: its memory outlives everything here
    ExchangeHandle::Impl& handle_;
    ExpertExchange::Impl& exchange_;
    std::string name_;
    bool outbound_;
    std::shared_ptr<ReceiveGate> gate_;
    std::uint64_t sequence_;
    std::vector<Stage> stages_;
    mutable std::mutex mutex_; ///< of what describe() reads; held by steps
    std::size_t stage_ = 0;
    std::string phase_ = "start";
    Clock::time_point began_{}, posted_{};
    std::vector<std::vector<std::uint32_t>> outgoing_counts_, incoming_counts_;
    std::vector<Transfer> receives_, sends_; // after the counts, whose memory they use
    std::unique_ptr<Recording> out_, in_;
    TimePoint copied_;
    ControlPlane::Activity activity_; // last: it calls describe()
};

LaneJob make_job(const ExchangeHandlePtr& handle, std::string name, bool outbound, bool learn,
                 std::shared_ptr<ReceiveGate> gate) {
    LaneJob job;
    job.name = name;
    // The exchange's own limit comes first and says more; with a gate it begins when that opens.
    job.timeout = handle->exchange.config.timeout + std::chrono::seconds(10);
    if (gate)
        job.timeout += std::chrono::hours(24);
    auto exchange =
        std::make_shared<Exchange>(handle, std::move(name), outbound, learn, std::move(gate));
    job.step = [exchange](LaneContext& context) { return exchange->step(context); };
    job.on_failure = tell_all(handle->exchange.world.control());
    return job;
}

} // namespace

LaneJob make_outbound_job(const ExchangeHandlePtr& handle_ptr, std::string name, bool learn,
                          std::shared_ptr<ReceiveGate> gate) {
    const ExchangeHandle::Impl& handle = *handle_ptr;
    LaneJob job = make_job(handle_ptr, std::move(name), true, learn, std::move(gate));
    job.accesses = {{handle.send_records.view(), Access::Read},
                    {handle.received.view(), Access::Write}};
    if (learn) {
        job.accesses.push_back({handle.host_counts.view(), Access::Read});
        job.accesses.push_back({handle.record_count.view(), Access::Write});
        job.accesses.push_back({handle.returned.view(), Access::Write});
        for (const auto& tensor : handle.row_tensors)
            job.accesses.push_back({tensor.buffer->view(), Access::Write});
    }
    return job;
}

LaneJob make_inbound_job(const ExchangeHandlePtr& handle_ptr, std::string name,
                         std::shared_ptr<ReceiveGate> gate) {
    const ExchangeHandle::Impl& handle = *handle_ptr;
    LaneJob job = make_job(handle_ptr, std::move(name), false, false, std::move(gate));
    job.accesses = {{handle.returned.view(), Access::Read},
                    {handle.back_records.view(), Access::Write}};
    return job;
}

} // namespace bellows
