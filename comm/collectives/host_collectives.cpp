// SPDX-License-Identifier: MIT
#include <bellows/comm/host_collectives.hpp>

#include <algorithm>
#include <cstring>

namespace bellows {
namespace {

// Streams of one collective's messages.
constexpr std::uint32_t kSize = 0, kData = 1, kAnswerSize = 2, kAnswer = 3;

template <typename T>
std::span<std::byte> writable(T& value) {
    return std::as_writable_bytes(std::span(&value, 1));
}

void append(std::vector<std::byte>& bytes, std::span<const std::byte> more) {
    bytes.insert(bytes.end(), more.begin(), more.end());
}

} // namespace

HostCollectives::HostCollectives(World& world, Group group, std::chrono::milliseconds timeout)
    : group_(std::move(group)), index_(group_.index_of(world.rank())), timeout_(timeout),
      transport_(open_transport(world)) {
    if (index_ < 0 || group_.ranks().back() >= world.size())
        throw Error(ErrorCode::InvalidArgument,
                    "rank " + std::to_string(world.rank()) + " of " + std::to_string(world.size()) +
                        " is no member of the group, or the group has ranks beyond the world");
}

// A collective that breaks on one rank cannot be mended on the others: it ends the job.
void HostCollectives::wait(std::span<Transfer> transfers, std::string_view phase) {
    try {
        wait_all(*transport_, transfers, phase, timeout_);
    } catch (const Error& error) {
        transport_->control().abort(error);
        throw;
    }
}

// Returns every member's bytes on the first member, nothing elsewhere.
std::vector<HostCollectives::Bytes> HostCollectives::gather(std::span<const std::byte> mine,
                                                            std::uint64_t sequence) {
    // Transfers stand behind the bytes they use, so that they are cancelled first.
    if (index_ != 0) {
        std::uint64_t size = mine.size();
        std::vector<Transfer> transfers;
        const int root = group_.rank_at(0);
        transfers.push_back(transport_->post_send(root, {sequence, kSize}, writable(size)));
        transfers.push_back(transport_->post_send(root, {sequence, kData}, mine));
        wait(transfers, "gather: sending");
        return {};
    }
    const auto count = static_cast<std::size_t>(group_.size());
    std::vector<std::uint64_t> sizes(count, mine.size());
    std::vector<Bytes> parts(count);
    std::vector<Transfer> transfers;
    for (std::size_t i = 1; i < count; ++i)
        transfers.push_back(transport_->post_recv(group_.rank_at(static_cast<int>(i)),
                                                  {sequence, kSize}, writable(sizes[i])));
    wait(transfers, "gather: sizes");
    transfers.clear();
    parts[0].assign(mine.begin(), mine.end());
    for (std::size_t i = 1; i < count; ++i) {
        parts[i].resize(sizes[i]);
        transfers.push_back(transport_->post_recv(group_.rank_at(static_cast<int>(i)),
                                                  {sequence, kData}, parts[i]));
    }
    wait(transfers, "gather: data");
    return parts;
}

// Copies the root's bytes over everyone's.
void HostCollectives::spread(int root, std::uint64_t sequence, std::span<std::byte> bytes,
                             std::uint32_t stream, std::string_view phase) {
    std::vector<Transfer> transfers;
    if (index_ != root) {
        transfers.push_back(transport_->post_recv(group_.rank_at(root), {sequence, stream}, bytes));
    } else {
        for (const int rank : group_.ranks())
            if (rank != transport_->rank())
                transfers.push_back(transport_->post_send(rank, {sequence, stream}, bytes));
    }
    wait(transfers, phase);
}

void HostCollectives::broadcast(int root, Bytes& bytes) {
    group_.rank_at(root);
    const std::uint64_t sequence = transport_->next_sequence();
    std::uint64_t size = bytes.size();
    spread(root, sequence, writable(size), kAnswerSize, "broadcast: size");
    bytes.resize(size);
    spread(root, sequence, bytes, kAnswer, "broadcast: data");
}

std::vector<HostCollectives::Bytes> HostCollectives::all_gather(std::span<const std::byte> mine) {
    const std::vector<Bytes> parts = gather(mine, transport_->next_sequence());
    Bytes all; // every part behind its length
    for (const Bytes& part : parts) {
        std::uint64_t size = part.size();
        append(all, writable(size));
        append(all, part);
    }
    broadcast(0, all);
    std::vector<Bytes> result;
    std::span<const std::byte> rest = all;
    for (int i = 0; i < group_.size(); ++i) {
        std::uint64_t size = 0;
        std::memcpy(&size, rest.data(), sizeof size);
        const auto part = rest.subspan(sizeof size, size);
        result.emplace_back(part.begin(), part.end());
        rest = rest.subspan(sizeof size + size);
    }
    return result;
}

template <typename T, typename Combine>
void HostCollectives::all_reduce(std::span<T> values, Combine combine) {
    const std::uint64_t sequence = transport_->next_sequence();
    const std::vector<Bytes> parts = gather(std::as_bytes(values), sequence);
    auto status = Status::Good;
    for (std::size_t i = 1; i < parts.size(); ++i)
        if (parts[i].size() != values.size_bytes())
            status = Status::SizesDiffer;
    spread(0, sequence, writable(status), kAnswerSize, "all-reduce: status");
    if (status == Status::SizesDiffer)
        throw Error(ErrorCode::InvalidArgument,
                    "the members of an all-reduce brought different numbers of values; rank " +
                        std::to_string(transport_->rank()) + " brought " +
                        std::to_string(values.size()));
    std::vector<T> other(values.size());
    for (std::size_t i = 1; i < parts.size(); ++i) {
        if (!other.empty())
            std::memcpy(other.data(), parts[i].data(), parts[i].size());
        for (std::size_t k = 0; k < values.size(); ++k)
            values[k] = combine(values[k], other[k]);
    }
    spread(0, sequence, std::as_writable_bytes(values), kAnswer, "all-reduce: result");
}

void HostCollectives::all_reduce_sum(std::span<double> values) {
    all_reduce(values, [](double a, double b) { return a + b; });
}

double HostCollectives::all_reduce_sum(double value) {
    all_reduce_sum(std::span(&value, 1));
    return value;
}

void HostCollectives::all_reduce_sum(std::span<std::int64_t> values) {
    all_reduce(values, [](std::int64_t a, std::int64_t b) { return a + b; });
}

void HostCollectives::all_reduce_max(std::span<std::int64_t> values) {
    all_reduce(values, [](std::int64_t a, std::int64_t b) { return std::max(a, b); });
}

} // namespace bellows
