// SPDX-License-Identifier: MIT

// The parts of comm/ that need no second rank: topology and groups, the keyed hash against its
// published vectors, and a control plane and transport of one rank.

#include "comm/exchange/exchange_sizes.hpp"
#include "comm/exchange/grid.hpp"
#include "comm/exchange/replicas.hpp"
#include "comm/transport/seal.hpp"
#include "comm/world/siphash.hpp"

#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/world.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>

namespace bellows {
namespace {

using namespace std::chrono_literals;

template <typename Function>
Error error_of(Function function) {
    try {
        function();
    } catch (const Error& error) {
        return error;
    }
    return Error(ErrorCode::Internal, "nothing was thrown");
}

TEST(Seal, AnyFlippedBitAndAnotherCallOrSenderAreFound) {
    const std::vector<std::uint32_t> words{3, 0, 4096, 17};
    std::vector<std::uint32_t> message = words;
    seal(message, 12, 3);
    const auto code_of = [&](std::uint64_t sequence, int sender) {
        return error_of([&] { unsealed<std::uint32_t>(message, sequence, sender); }).code();
    };
    const auto inside = unsealed<std::uint32_t>(message, 12, 3);
    EXPECT_EQ(std::vector<std::uint32_t>(inside.begin(), inside.end()), words);
    EXPECT_EQ(code_of(13, 3), ErrorCode::Corrupt);
    EXPECT_EQ(code_of(12, 2), ErrorCode::Corrupt);
    for (std::uint32_t& word : message)
        for (int bit = 0; bit < 32; ++bit) {
            word ^= 1u << bit;
            EXPECT_EQ(code_of(12, 3), ErrorCode::Corrupt) << bit;
            word ^= 1u << bit;
        }
}

TEST(Topology, NumbersNodesByLowestRank) {
    const int labels[] = {7, 3, 7, 3, 3, 9};
    const Topology topology(labels);
    EXPECT_EQ(topology.num_nodes(), 3);
    const int nodes[] = {0, 1, 0, 1, 1, 2}, locals[] = {0, 0, 1, 1, 2, 0},
              sizes[] = {2, 3, 2, 3, 3, 1};
    for (int rank = 0; rank < 6; ++rank) {
        EXPECT_EQ(topology.node(rank), nodes[rank]);
        EXPECT_EQ(topology.local_rank(rank), locals[rank]);
        EXPECT_EQ(topology.local_size(rank), sizes[rank]);
        EXPECT_EQ(topology.ranks_of_node(nodes[rank])[static_cast<std::size_t>(locals[rank])],
                  rank);
    }
}

TEST(Topology, BlocksMayEndUneven) {
    const Topology topology = Topology::blocks(7, 3);
    EXPECT_EQ(topology.num_nodes(), 3);
    EXPECT_EQ(topology.local_size(6), 1);
    EXPECT_EQ(topology.local_rank(5), 2);
    EXPECT_TRUE(topology.same_node(3, 5));
    EXPECT_FALSE(topology.same_node(2, 3));
}

TEST(Topology, RefusesWhatCannotBe) {
    EXPECT_EQ(error_of([] { Topology::blocks(4, 0); }).code(), ErrorCode::InvalidArgument);
    EXPECT_EQ(error_of([] { Topology{std::span<const int>()}; }).code(),
              ErrorCode::InvalidArgument);
    const Topology topology = Topology::blocks(2, 2);
    EXPECT_EQ(error_of([&] { topology.node(2); }).code(), ErrorCode::InvalidArgument);
    EXPECT_EQ(error_of([&] { topology.ranks_of_node(-1); }).code(), ErrorCode::InvalidArgument);
}

TEST(Group, FindsMembers) {
    const Group group({1, 4, 6});
    EXPECT_EQ(group.index_of(4), 1);
    EXPECT_EQ(group.index_of(5), -1);
    EXPECT_EQ(group.rank_at(2), 6);
    EXPECT_EQ(Group::all(3), Group({0, 1, 2}));
    for (const std::vector<int>& bad : {std::vector<int>{}, {2, 1}, {1, 1}, {-1, 0}})
        EXPECT_EQ(error_of([&] { Group{bad}; }).code(), ErrorCode::InvalidArgument);
}

TEST(SipHash, MatchesPublishedVectors) {
    SipKey key;
    std::iota(key.begin(), key.end(), std::uint8_t{0});
    std::vector<std::byte> message;
    const char* expected[] = {"a3817f04ba25a8e66df67214c7550293",
                              "da87c1d86b99af44347659119b22fc45"};
    for (const char* hex : expected) {
        std::string text;
        for (const std::uint8_t byte : siphash_128(key, message)) {
            char digits[3];
            std::snprintf(digits, sizeof digits, "%02x", byte);
            text += digits;
        }
        EXPECT_EQ(text, hex) << message.size() << " bytes";
        message.push_back(static_cast<std::byte>(message.size()));
    }
}

TEST(SipHash, WordsStandBeforeTheMessage) {
    const SipKey key{1, 2, 3};
    std::vector<std::byte> message(19, std::byte{7}), whole(16 + message.size(), std::byte{7});
    std::fill(whole.begin(), whole.begin() + 16, std::byte{0});
    whole[0] = std::byte{5};
    whole[9] = std::byte{6};
    EXPECT_TRUE(
        equal_constant_time(siphash_128(key, std::array<std::uint64_t, 2>{5, 6 << 8}, message),
                            siphash_128(key, whole)));
}

TEST(SipHash, EveryByteOfMessageAndKeyCounts) {
    SipKey key{};
    std::vector<std::byte> message(37);
    const SipTag base = siphash_128(key, message);
    for (std::byte& byte : message) {
        byte = std::byte{1};
        EXPECT_FALSE(equal_constant_time(siphash_128(key, message), base));
        byte = std::byte{0};
    }
    for (std::uint8_t& byte : key) {
        byte = 1;
        EXPECT_FALSE(equal_constant_time(siphash_128(key, message), base));
        byte = 0;
    }
    EXPECT_TRUE(equal_constant_time(siphash_128(key, message), base));
}

TEST(SingleWorld, HasOneRankOnOneNode) {
    World world = World::single();
    EXPECT_EQ(world.rank(), 0);
    EXPECT_EQ(world.size(), 1);
    EXPECT_EQ(world.node(), 0);
    EXPECT_EQ(world.num_nodes(), 1);
    EXPECT_EQ(world.local_size(), 1);
    world.control().barrier(1s);
    EXPECT_FALSE(world.control().agree(std::nullopt, 1s));
    EXPECT_EQ(world.control().agree(Error(ErrorCode::Io, "disk"), 1s)->rank(), 0);
    world.close();
    world.close();
}

TEST(SingleWorld, RefusesBadOptions) {
    WorldOptions options;
    options.ranks_per_node = 0;
    EXPECT_EQ(error_of([&] { World::single(options); }).code(), ErrorCode::InvalidArgument);
    ::setenv("BELLOWS_RANKS_PER_NODE", "2x", 1);
    EXPECT_EQ(error_of([] { World::single(); }).code(), ErrorCode::InvalidArgument);
    ::unsetenv("BELLOWS_RANKS_PER_NODE");
    ::setenv("BELLOWS_STALL_SECONDS", "-1", 1);
    EXPECT_EQ(error_of([] { World::single(); }).code(), ErrorCode::InvalidArgument);
    ::unsetenv("BELLOWS_STALL_SECONDS");
}

TEST(SingleWorld, CallbacksRunOnceAndEndedOnesNever) {
    World world = World::single();
    std::atomic<int> first{0}, ended{0}, late{0};
    const auto one = world.control().on_failure([&](const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Io);
        EXPECT_EQ(world.control().failure()->code(), ErrorCode::Io);
        ++first;
    });
    world.control().on_failure([&](const Error&) { ++ended; }).reset();
    world.control().abort(Error(ErrorCode::Io, "disk"));
    world.control().abort(Error(ErrorCode::Internal, "too late to matter"));
    const auto two = world.control().on_failure([&](const Error&) { ++late; });
    for (int i = 0; i < 1000 && (first == 0 || late == 0); ++i)
        std::this_thread::sleep_for(1ms);
    EXPECT_EQ(first, 1);
    EXPECT_EQ(ended, 0);
    EXPECT_EQ(late, 1);
    EXPECT_EQ(world.control().failure()->message(), "rank 0: disk");
    EXPECT_EQ(error_of([&] { world.control().throw_if_failed(); }).code(), ErrorCode::Io);
    EXPECT_EQ(error_of([&] { world.close(); }).code(), ErrorCode::Io);
}

TEST(SingleWorld, MessagesToOneself) {
    World world = World::single();
    const std::byte bytes[] = {std::byte{1}, std::byte{2}};
    world.control().send(0, 5, bytes);
    world.control().send(0, 5, std::span(bytes).first(1));
    EXPECT_EQ(world.control().recv(0, 5, 0ms).size(), 2u);
    EXPECT_EQ(world.control().recv(0, 5, 0ms).size(), 1u);
    const Error error = error_of([&] { world.control().recv(0, 5, 10ms); });
    EXPECT_EQ(error.code(), ErrorCode::Timeout);
    EXPECT_NE(error.message().find("waited 10 ms"), std::string::npos) << error.message();
    EXPECT_EQ(error_of([&] { world.control().send(1, 5, bytes); }).code(),
              ErrorCode::InvalidArgument);
}

TEST(SingleTransport, SelfSendsMatchInEitherOrder) {
    World world = World::single();
    const auto transport = open_transport(world);
    const std::uint32_t sent[] = {1, 2};
    std::uint32_t received[] = {0, 0};
    Transfer transfers[4];
    transfers[0] = transport->post_send(0, {3, 0}, std::as_bytes(std::span(&sent[0], 1)));
    EXPECT_FALSE(transfers[0].test());
    transfers[1] =
        transport->post_recv(0, {3, 1}, std::as_writable_bytes(std::span(&received[1], 1)));
    EXPECT_FALSE(transfers[1].test());
    transfers[2] =
        transport->post_recv(0, {3, 0}, std::as_writable_bytes(std::span(&received[0], 1)));
    transfers[3] = transport->post_send(0, {3, 1}, std::as_bytes(std::span(&sent[1], 1)));
    wait_all(*transport, transfers, "self", 1s);
    EXPECT_EQ(received[0], 1u);
    EXPECT_EQ(received[1], 2u);
    EXPECT_EQ(transfers[2].seen_bytes(), 4u);
}

TEST(SingleTransport, TellsSizesApartAndTimesOut) {
    World world = World::single();
    const auto transport = open_transport(world);
    std::byte buffer[8] = {};
    Transfer receive = transport->post_recv(0, {9, 2}, buffer);
    const Error timeout =
        error_of([&] { wait_all(*transport, {&receive, 1}, "a phase of the test", 20ms); });
    EXPECT_EQ(timeout.code(), ErrorCode::Timeout);
    EXPECT_EQ(timeout.rank(), 0);
    for (const char* part : {"rank 0 waited", "a phase of the test", "from rank 0 expected 8 bytes",
                             "saw 0", "exchange 9, stream 2"})
        EXPECT_NE(timeout.message().find(part), std::string::npos) << timeout.message();
    Transfer send = transport->post_send(0, {9, 2}, std::span(buffer).first(3));
    EXPECT_EQ(error_of([&] { receive.test(); }).code(), ErrorCode::Corrupt);
    EXPECT_TRUE(receive.cancel());
    // A cancelled half is not found by the next one.
    EXPECT_TRUE(transport->post_send(0, {10, 0}, buffer).cancel());
    Transfer lonely = transport->post_recv(0, {10, 0}, buffer);
    EXPECT_FALSE(lonely.test());
    EXPECT_EQ(error_of([&] { transport->post_send(1, {0, 0}, buffer); }).code(),
              ErrorCode::InvalidArgument);
    EXPECT_EQ(error_of([&] { transport->post_send(0, {0, Tag::kStreams}, buffer); }).code(),
              ErrorCode::InvalidArgument);
}

// Three ranks of three slots, five experts.
TEST(Replicas, BeginAsContiguousBlocks) {
    const Replicas replicas(5, 3, 3);
    const std::vector<std::int32_t> expected = {0, 1, -1, 2, 3, -1, 4, -1, -1};
    EXPECT_TRUE(std::ranges::equal(replicas.expert_of_slot(), expected));
    EXPECT_EQ(replicas.owners(3), std::vector<int>{1});
}

TEST(Replicas, AreChosenOnTheOwnRankThenOnTheNodeAmongLiveOnes) {
    Replicas replicas(5, 3, 3);
    replicas.set(std::vector<std::int32_t>{0, 1, 4, 2, 0, -1, 3, 4, 0}, "test");
    EXPECT_EQ(replicas.owners(0), (std::vector<int>{0, 1, 2}));
    const auto chosen = [&](std::uint64_t position, std::vector<bool> near,
                            std::vector<bool> live) {
        const std::vector<std::uint32_t> words = replicas.words(position, near, live);
        EXPECT_LE(words.size(), replica_words(5, 9));
        std::vector<std::vector<std::uint32_t>> slots;
        for (std::uint64_t expert = 0; expert < 5; ++expert) {
            const auto first = words.begin() + words[2 * expert];
            slots.emplace_back(first, first + words[2 * expert + 1]);
        }
        return slots;
    };
    using Slots = std::vector<std::vector<std::uint32_t>>;
    const std::vector<bool> all(3, true);
    EXPECT_EQ(chosen(0, all, all), (Slots{{0}, {1}, {3}, {6}, {2}}));
    EXPECT_EQ(chosen(1, all, all), (Slots{{4}, {1}, {3}, {6}, {2, 7}}));
    EXPECT_EQ(chosen(1, {false, true, true}, all), (Slots{{4}, {1}, {3}, {6}, {7}}));
    // Without rank 0: expert 1 has nobody else.
    EXPECT_EQ(chosen(1, {true, true, false}, {false, true, true}),
              (Slots{{4}, {1}, {3}, {6}, {7}}));
    EXPECT_EQ(chosen(2, {false, false, true}, {true, true, false}),
              (Slots{{0, 4}, {1}, {3}, {6}, {2}}));
}

TEST(Replicas, RefuseTablesThatLackOrRepeatAnExpert) {
    const auto refused = [](std::vector<std::int32_t> table) {
        Replicas replicas(3, 2, 2);
        return std::string(error_of([&] { replicas.set(table, "layer 7"); }).message());
    };
    EXPECT_NE(refused({0, 1, 2}).find("3 slots, but there are 4"), std::string::npos);
    EXPECT_NE(refused({0, 1, 1, 0}).find("no slot holds expert 2"), std::string::npos);
    EXPECT_NE(refused({0, 1, 2, 3}).find("experts are 0 to 2"), std::string::npos);
    EXPECT_NE(refused({0, 1, -2, 2}).find("holds expert -2"), std::string::npos);
    EXPECT_NE(refused({2, 2, 0, 1}).find("slot 1 of rank 0 holds expert 2"), std::string::npos);
}

TEST(ExchangeGrid, StaysWithinTheBoundOnWorkgroups) {
    for (const bool cpu : {false, true})
        for (const std::uint64_t count : {0u, 1u, 7u, 8u, 1000u, 1'000'000u}) {
            const ExchangeGrid free{cpu, 0};
            for (const std::uint32_t most : {1u, 3u, 1u << 30}) {
                const ExchangeGrid bounded{cpu, most};
                EXPECT_EQ(bounded.rows(count).x, std::min(most, free.rows(count).x));
                EXPECT_EQ(bounded.items(count).x, std::min(most, free.items(count).x));
            }
        }
    EXPECT_EQ((ExchangeGrid{false, 0}.rows(1000).x), 1000u);
    EXPECT_EQ((ExchangeGrid{false, 24}.rows(1000).x), 24u);
    EXPECT_EQ((ExchangeGrid{true, 2}.items(1000).x), 2u);
}

TEST(SingleCollectives, AreIdentities) {
    World world = World::single();
    HostCollectives collectives(world, Group::all(1));
    EXPECT_EQ(collectives.all_reduce_sum(2.5), 2.5);
    std::vector<std::byte> bytes(3);
    collectives.broadcast(0, bytes);
    EXPECT_EQ(collectives.all_gather(bytes).at(0).size(), 3u);
}

} // namespace
} // namespace bellows
