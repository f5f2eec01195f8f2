// SPDX-License-Identifier: MIT
#pragma once

// Small collectives on host values for set-up and scalars (losses, norms, counts), over a group of
// ranks. Sums run in ascending rank order on one rank and are then spread, so every rank gets the
// same bits in every run. Every member calls the same functions in the same order; each call polls
// and throws Error{InvalidArgument} on all members if their sizes differ, the job's failure, or
// Error{Timeout} naming who is waited for, which then ends the job. Tensors on the device have
// collectives of their own.

#include <bellows/comm/message.hpp>
#include <bellows/comm/topology.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace bellows {

class HostCollectives {
public:
    using Bytes = std::vector<std::byte>;

    /// Collective over the whole world (it opens a transport); group must contain this rank, and
    /// groups on different ranks must be equal or disjoint. world must outlive it.
    HostCollectives(World& world, Group group,
                    std::chrono::milliseconds timeout = std::chrono::seconds{120});

    const Group& group() const noexcept { return group_; }
    Transport& transport() noexcept { return *transport_; }

    /// Every member's bytes (of any length) by group index.
    std::vector<Bytes> all_gather(std::span<const std::byte> mine);
    /// In place; the same length on every member.
    void all_reduce_sum(std::span<double> values);
    double all_reduce_sum(double value);
    void all_reduce_sum(std::span<std::int64_t> values);
    void all_reduce_max(std::span<std::int64_t> values);
    /// The root's bytes, whatever length the others' had. root: group index.
    void broadcast(int root, Bytes& bytes);

private:
    enum class Status : std::uint8_t { Good, SizesDiffer };

    void wait(std::span<Transfer> transfers, std::string_view phase);
    std::vector<Bytes> gather(std::span<const std::byte> mine, std::uint64_t sequence);
    void spread(int root, std::uint64_t sequence, std::span<std::byte> bytes, std::uint32_t stream,
                std::string_view phase);
    template <typename T, typename Combine>
    void all_reduce(std::span<T> values, Combine combine);

    Group group_;
    int index_;
    std::chrono::milliseconds timeout_;
    std::unique_ptr<Transport> transport_;
};

} // namespace bellows
