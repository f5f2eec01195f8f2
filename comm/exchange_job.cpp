// SPDX-License-Identifier: MIT
// The lane jobs of an exchange: learn the counts, bind what they call for, move the bytes. A job is
// a list of stages; each is asked until it is done.

#include "exchange_impl.hpp"
#include "trace_transfer.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <cstring>
#include <functional>
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
    Exchange(ExchangeHandle::Impl& handle, std::string name, bool outbound, bool learn)
        : handle_(handle), exchange_(handle.exchange), name_(std::move(name)), outbound_(outbound),
          sequence_(exchange_.transport.next_sequence()) {
        if (learn) {
            stages_.push_back([this](LaneContext&) { return send_counts(); });
            stages_.push_back([this](LaneContext& context) { return receive_counts(context); });
        }
        stages_.push_back([this](LaneContext& context) { return copy_out(context); });
        stages_.push_back([this](LaneContext&) { return post_records(); });
        stages_.push_back([this](LaneContext&) { return wait_for_records(); });
        stages_.push_back([this](LaneContext& context) { return copy_in(context); });
    }

    Progress step(LaneContext& context) {
        if (began_ == Clock::time_point{})
            began_ = Clock::now();
        if (Clock::now() - began_ > exchange_.config.timeout)
            throw timeout_error(exchange_.transport, transfers_, name_ + ": " + phase_,
                                exchange_.config.timeout);
        while (stage_ < stages_.size()) {
            if (stages_[stage_](context) == Progress::Again)
                return Progress::Again;
            ++stage_;
            context.phase(phase_);
        }
        return Progress::Done;
    }

private:
    /// Rows that go to, or come from, each member of the group in this direction.
    const std::vector<std::uint64_t>& rows_out() const {
        return outbound_ ? handle_.sent_rows : handle_.received_rows;
    }
    const std::vector<std::uint64_t>& rows_in() const {
        return outbound_ ? handle_.received_rows : handle_.sent_rows;
    }
    Buffer& device_out() const { return outbound_ ? handle_.send_records : handle_.returned; }
    Buffer& device_in() const { return outbound_ ? handle_.received : handle_.back_records; }

    bool all_done() {
        exchange_.transport.progress();
        bool done = true;
        for (Transfer& transfer : transfers_)
            if (transfer.done() || !transfer.test())
                done &= transfer.done();
            else
                trace_transfer(exchange_.device, exchange_.config.name, transfer);
        return done;
    }

    Progress send_counts() {
        phase_ = "counts";
        outgoing_counts_ = counts_for_ranks(handle_);
        const std::uint64_t ranks = exchange_.group_size();
        incoming_counts_.assign(
            ranks, std::vector<std::uint32_t>(
                       1 + exchange_.experts_of(static_cast<std::uint64_t>(exchange_.position))));
        for (std::uint64_t at = 0; at < ranks; ++at) {
            const int peer = exchange_.config.ranks[at];
            const Tag tag{sequence_, kCountsStream};
            transfers_.push_back(exchange_.transport.post_recv(
                peer, tag, std::as_writable_bytes(std::span(incoming_counts_[at]))));
            transfers_.push_back(exchange_.transport.post_send(
                peer, tag, std::as_bytes(std::span(outgoing_counts_[at]))));
        }
        return Progress::Done;
    }

    Progress receive_counts(LaneContext& context) {
        if (!all_done())
            return Progress::Again;
        transfers_.clear();
        const std::uint64_t ranks = exchange_.group_size();
        handle_.sent_rows.resize(ranks);
        handle_.received_rows.resize(ranks);
        std::vector<std::uint64_t> per_expert(incoming_counts_.front().size() - 1);
        for (std::uint64_t at = 0; at < ranks; ++at) {
            handle_.sent_rows[at] = outgoing_counts_[at].front();
            handle_.received_rows[at] = incoming_counts_[at].front();
            for (std::size_t e = 0; e < per_expert.size(); ++e)
                per_expert[e] += incoming_counts_[at][e + 1];
        }
        check_plausible();
        const std::uint64_t alignment = exchange_.config.alignment;
        handle_.num_rows = 0;
        for (std::uint64_t rows : per_expert)
            handle_.num_rows += (rows + alignment - 1) / alignment * alignment;
        const std::uint64_t records = total(handle_.received_rows);
        handle_.record_count.mapped_as<std::uint32_t>()[0] = static_cast<std::uint32_t>(records);
        const std::uint64_t bytes = std::max<std::uint64_t>(records, 1) * exchange_.record_bytes();
        context.bind(handle_.received, bytes);
        context.bind(handle_.returned, bytes);
        for (auto& tensor : handle_.row_tensors)
            context.bind(*tensor.buffer,
                         std::max<std::uint64_t>(handle_.num_rows, 1) * tensor.row_bytes);
        return Progress::Done;
    }

    void check_plausible() const {
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at)
            if (handle_.received_rows[at] > exchange_.config.max_tokens)
                throw Error(ErrorCode::InvalidArgument,
                            name_ + ": rank " + std::to_string(exchange_.config.ranks[at]) +
                                " sends " + std::to_string(handle_.received_rows[at]) +
                                " rows, max_tokens is " +
                                std::to_string(exchange_.config.max_tokens),
                            exchange_.config.ranks[at]);
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
            context.phase(phase_);
        }
        return copied_.reached() ? Progress::Done : Progress::Again;
    }

    Progress post_records() {
        phase_ = "records";
        const std::uint64_t record = exchange_.record_bytes();
        const std::uint64_t bytes_in = total(rows_in()) * record;
        Buffer* from = &device_out();
        Buffer* to = &device_in();
        if (!exchange_.zero_copy()) {
            if (bytes_in > 0)
                reserve(handle_.staging_in, bytes_in, " staging in");
            from = &handle_.staging_out;
            to = &handle_.staging_in;
        }
        const Tag tag{sequence_, kRecordsStream};
        std::uint64_t first_in = 0, first_out = 0;
        for (std::uint64_t at = 0; at < exchange_.group_size(); ++at) {
            const int peer = exchange_.config.ranks[at];
            const bool other = peer != exchange_.world.rank();
            if (const std::uint64_t bytes = rows_in()[at] * record; bytes > 0) {
                transfers_.push_back(exchange_.transport.post_recv(
                    peer, tag, to->mapped_as<std::byte>().subspan(first_in, bytes)));
                first_in += bytes;
                exchange_.bytes_received += other ? bytes : 0;
            }
            if (const std::uint64_t bytes = rows_out()[at] * record; bytes > 0) {
                transfers_.push_back(exchange_.transport.post_send(
                    peer, tag, from->mapped_as<const std::byte>().subspan(first_out, bytes)));
                first_out += bytes;
                exchange_.bytes_sent += other ? bytes : 0;
                exchange_.messages_sent += other ? 1 : 0;
            }
        }
        ++exchange_.exchanges;
        posted_ = Clock::now();
        return Progress::Done;
    }

    Progress wait_for_records() {
        if (!all_done())
            return Progress::Again;
        exchange_.nanoseconds_waited +=
            static_cast<std::uint64_t>(std::chrono::nanoseconds(Clock::now() - posted_).count());
        transfers_.clear();
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

    ExchangeHandle::Impl& handle_;
    ExpertExchange::Impl& exchange_;
    std::string name_;
    bool outbound_;
    std::uint64_t sequence_;
    std::vector<std::function<Progress(LaneContext&)>> stages_;
    std::size_t stage_ = 0;
    std::string phase_ = "start";
    Clock::time_point began_{}, posted_{};
    std::vector<std::vector<std::uint32_t>> outgoing_counts_, incoming_counts_;
    std::vector<Transfer> transfers_; // after the counts, whose memory they use
    std::unique_ptr<Recording> out_, in_;
    TimePoint copied_;
};

LaneJob make_job(ExchangeHandle::Impl& handle, std::string name, bool outbound, bool learn) {
    auto exchange = std::make_shared<Exchange>(handle, name, outbound, learn);
    LaneJob job;
    job.name = std::move(name);
    job.step = [exchange](LaneContext& context) { return exchange->step(context); };
    // The exchange's own limit comes first and says more.
    job.timeout = handle.exchange.config.timeout + std::chrono::seconds(10);
    return job;
}

} // namespace

LaneJob make_outbound_job(ExchangeHandle::Impl& handle, std::string name, bool learn) {
    LaneJob job = make_job(handle, std::move(name), true, learn);
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

LaneJob make_inbound_job(ExchangeHandle::Impl& handle, std::string name) {
    LaneJob job = make_job(handle, std::move(name), false, false);
    job.accesses = {{handle.returned.view(), Access::Read},
                    {handle.back_records.view(), Access::Write}};
    return job;
}

} // namespace bellows
