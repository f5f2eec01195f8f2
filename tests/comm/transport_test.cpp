// SPDX-License-Identifier: MIT

// Messages and host collectives, through memory that the ranks of a node share and over MPI: sizes
// around the pieces they are cut into, many in flight, wrong sizes, time limits, messages in place
// and given up, and sums whose bits do not depend on the rank.

#include "comm/transport/device_link.hpp"
#include "support/mpi_test.hpp"

#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

namespace bellows {
namespace {

using namespace std::chrono_literals;
using testing::world;

std::vector<std::byte> pattern(std::size_t size, int seed) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i)
        bytes[i] = static_cast<std::byte>(i * 131 + static_cast<std::size_t>(seed) * 17 + (i >> 7));
    return bytes;
}

/// The parameter: whether the ranks of a node share memory.
class Transports : public ::testing::TestWithParam<bool> {
protected:
    static std::unique_ptr<Transport> open(World& in = world()) {
        TransportOptions options;
        options.share_memory = GetParam();
        options.max_message_bytes = 4096; // so that larger ones go in pieces over MPI
        return open_transport(in, options);
    }
};
INSTANTIATE_TEST_SUITE_P(Memory, Transports, ::testing::Bool(), [](const auto& param) {
    return std::string(param.param ? "Shared" : "Mpi");
});

TEST_P(Transports, EveryoneToEveryoneInAllSizes) {
    const auto transport = open();
    const int n = transport->size(), me = transport->rank();
    for (const std::size_t size :
         {0u, 1u, 4095u, 4096u, 4097u, 8192u, 300'001u, GetParam() ? 3'000'001u : 300'002u}) {
        const std::uint64_t sequence = transport->next_sequence();
        std::vector<std::vector<std::byte>> sent, received;
        for (int peer = 0; peer < n; ++peer) {
            sent.push_back(pattern(size + static_cast<std::size_t>(peer), me * 10 + peer));
            received.emplace_back(size + static_cast<std::size_t>(me));
        }
        std::vector<Transfer> transfers;
        for (int peer = 0; peer < n; ++peer) {
            const auto p = static_cast<std::size_t>(peer);
            transfers.push_back(transport->post_recv(peer, {sequence, 5}, received[p]));
            transfers.push_back(transport->post_send(peer, {sequence, 5}, sent[p]));
        }
        wait_all(*transport, transfers, "all sizes", 30s);
        bool good = true;
        for (int peer = 0; peer < n; ++peer)
            good = good && received[static_cast<std::size_t>(peer)] ==
                               pattern(size + static_cast<std::size_t>(me), peer * 10 + me);
        ALL_RANKS_TRUE(good);
        ALL_RANKS_TRUE(transfers[0].seen_bytes() == size + static_cast<std::size_t>(me));
    }
}

TEST_P(Transports, TwoExchangesInFlightDoNotMix) {
    const auto transport = open();
    const int next = (transport->rank() + 1) % transport->size();
    const int previous = (transport->rank() + transport->size() - 1) % transport->size();
    const std::uint64_t first = transport->next_sequence(), second = transport->next_sequence();
    const auto a = pattern(10'000, 1), b = pattern(10'000, 2);
    std::vector<std::byte> got_a(a.size()), got_b(b.size());
    std::vector<Transfer> transfers;
    // Receives posted in the opposite order of the sends.
    transfers.push_back(transport->post_send(next, {first, 0}, a));
    transfers.push_back(transport->post_send(next, {second, 0}, b));
    transfers.push_back(transport->post_recv(previous, {second, 0}, got_b));
    transfers.push_back(transport->post_recv(previous, {first, 0}, got_a));
    wait_all(*transport, transfers, "two exchanges", 30s);
    ALL_RANKS_TRUE(got_a == a && got_b == b);
}

TEST_P(Transports, SequenceNumbersMayBeHuge) {
    const auto transport = open();
    const int next = (transport->rank() + 1) % transport->size();
    const int previous = (transport->rank() + transport->size() - 1) % transport->size();
    const Tag tag{std::numeric_limits<std::uint64_t>::max() - 1, Tag::kStreams - 1};
    const auto sent = pattern(100, 3);
    std::vector<std::byte> received(sent.size());
    Transfer transfers[] = {transport->post_recv(previous, tag, received),
                            transport->post_send(next, tag, sent)};
    wait_all(*transport, transfers, "huge tags", 30s);
    ALL_RANKS_TRUE(received == sent);
}

TEST_P(Transports, AnotherSizeThanExpectedIsFound) {
    for (const int difference : {-1, 1}) {
        const auto transport = open();
        const int next = (transport->rank() + 1) % transport->size();
        const int previous = (transport->rank() + transport->size() - 1) % transport->size();
        const std::vector<std::byte> sent = pattern(static_cast<std::size_t>(64 + difference), 0);
        std::vector<std::byte> received(64);
        Transfer receive = transport->post_recv(previous, {0, 0}, received);
        Transfer send = transport->post_send(next, {0, 0}, sent);
        ErrorCode code = ErrorCode::Internal;
        std::string text;
        try {
            wait_all(*transport, {&receive, 1}, "wrong size", 30s);
        } catch (const Error& error) {
            code = error.code();
            text = error.message();
        }
        ALL_RANKS_TRUE(code == ErrorCode::Corrupt && text.find("expected") != std::string::npos);
        ALL_RANKS_TRUE(receive.cancel());
    }
}

TEST_P(Transports, TimeLimitNamesTheSilentPeer) {
    const auto transport = open();
    const int previous = (transport->rank() + transport->size() - 1) % transport->size();
    std::vector<std::byte> buffer(77);
    Transfer receive = transport->post_recv(previous, {4, 1}, buffer);
    Error timeout(ErrorCode::Internal, "none");
    const auto start = std::chrono::steady_clock::now();
    try {
        wait_all(*transport, {&receive, 1}, "dispatch counts", 100ms);
    } catch (const Error& error) {
        timeout = error;
    }
    ALL_RANKS_TRUE(timeout.code() == ErrorCode::Timeout && timeout.rank() == previous);
    ALL_RANKS_TRUE(std::chrono::steady_clock::now() - start < 5s);
    const std::string expected =
        "from rank " + std::to_string(previous) + " expected 77 bytes, saw 0";
    ALL_RANKS_TRUE(timeout.message().find(expected) != std::string::npos);
    ALL_RANKS_TRUE(timeout.message().find("'dispatch counts'") != std::string::npos);
    ALL_RANKS_TRUE(receive.cancel());
}

TEST_P(Transports, AFailedJobEndsEveryWait) {
    World inner = join_world(MPI_COMM_WORLD);
    {
        const auto transport = open(inner);
        std::vector<std::byte> buffer(8);
        const int previous = (inner.rank() + inner.size() - 1) % inner.size();
        Transfer receive = transport->post_recv(previous, {0, 0}, buffer);
        inner.control().barrier(30s);
        world().control().barrier(30s); // nobody is still in the barrier before
        if (inner.rank() == inner.size() - 1)
            inner.control().abort(Error(ErrorCode::Io, "disk"));
        ErrorCode code = ErrorCode::Internal;
        try {
            wait_all(*transport, {&receive, 1}, "a wait without end", 30s);
        } catch (const Error& error) {
            code = error.code();
        }
        ALL_RANKS_TRUE(code == ErrorCode::Io);
        code = ErrorCode::Internal;
        try {
            transport->post_send(previous, {0, 0}, buffer);
        } catch (const Error& error) {
            code = error.code();
        }
        ALL_RANKS_TRUE(code == ErrorCode::Io);
    }
}

TEST_P(Transports, MoreMessagesThanThereIsRoomForComeInOrder) {
    const auto transport = open();
    const int next = (transport->rank() + 1) % transport->size();
    const int previous = (transport->rank() + transport->size() - 1) % transport->size();
    constexpr std::uint32_t kMany = 9000;
    std::vector<std::uint32_t> sent(kMany), received(kMany);
    std::iota(sent.begin(), sent.end(), 0u);
    std::vector<Transfer> transfers;
    for (std::uint32_t i = 0; i < kMany; ++i)
        transfers.push_back(
            transport->post_send(next, {1, 0}, std::as_bytes(std::span(&sent[i], 1))));
    world().control().barrier(30s); // they have all been posted before the first is received
    for (std::uint32_t i = 0; i < kMany; ++i)
        transfers.push_back(transport->post_recv(
            previous, {1, 0}, std::as_writable_bytes(std::span(&received[i], 1))));
    wait_all(*transport, transfers, "many", 30s);
    ALL_RANKS_TRUE(received == sent);
}

// Those that are asked for late are in nobody's way.
TEST_P(Transports, AMessageMayWaitWhileOthersPass) {
    const auto transport = open();
    const int next = (transport->rank() + 1) % transport->size();
    const int previous = (transport->rank() + transport->size() - 1) % transport->size();
    const auto first = pattern(100, 7), each = pattern(10, 8);
    std::vector<std::byte> received_first(first.size()), received(each.size());
    Transfer waits = transport->post_send(next, {1, 0}, first);
    for (int i = 0; i < 10'000; ++i) {
        Transfer transfers[] = {transport->post_send(next, {2, 0}, each),
                                transport->post_recv(previous, {2, 0}, received)};
        wait_all(*transport, transfers, "those that pass", 30s);
    }
    Transfer transfers[] = {transport->post_recv(previous, {1, 0}, received_first),
                            std::move(waits)};
    wait_all(*transport, transfers, "the first", 30s);
    ALL_RANKS_TRUE(received_first == first && received == each);
}

// What is given up leaves no trace, whether or not its receiver has looked.
TEST_P(Transports, MessagesMayBeGivenUp) {
    const auto transport = open();
    const int next = (transport->rank() + 1) % transport->size();
    const int previous = (transport->rank() + transport->size() - 1) % transport->size();
    const auto bytes = pattern(100'000, 1);
    std::vector<std::byte> received(bytes.size());
    {
        std::vector<std::byte> never(10);
        Transfer receive = transport->post_recv(previous, {0, 1}, never);
        ALL_RANKS_TRUE(receive.cancel());
    }
    // MPI cannot take back what has left; shared memory can.
    for (int i = 0; GetParam() && transport->size() > 1 && i < 600; ++i) {
        Transfer send = transport->post_send(next, {0, 2}, bytes);
        ASSERT_TRUE(send.cancel());
        transport->progress();
    }
    world().control().barrier(30s); // nobody asks for what is about to be given up
    if (!GetParam() || transport->size() > 1) {
        Transfer transfers[] = {transport->post_send(next, {0, 2}, bytes),
                                transport->post_recv(previous, {0, 2}, received)};
        wait_all(*transport, transfers, "what was not given up", 30s);
        ALL_RANKS_TRUE(received == bytes);
    }
}

TEST(SharedTransport, MessagesAreReadWhereTheyStand) {
    const auto transport = open_transport(world());
    const int next = (transport->rank() + 1) % transport->size();
    const int previous = (transport->rank() + transport->size() - 1) % transport->size();
    ALL_RANKS_TRUE(transport->reads_in_place(previous) == (transport->size() > 1));
    if (transport->size() == 1) {
        EXPECT_FALSE(transport->share(100));
        EXPECT_THROW(static_cast<void>(transport->post_recv_in_place(0, {0, 0}, 1)), Error);
        return;
    }
    const SharedMemory memory = transport->share(200'000);
    ALL_RANKS_TRUE(memory.bytes().size() >= 200'000);
    std::vector<std::uint64_t> ids;
    for (const std::size_t first : {0u, 70'000u}) {
        const auto expected = pattern(100'000, previous + static_cast<int>(first));
        const auto mine = pattern(100'000, transport->rank() + static_cast<int>(first));
        const std::span<std::byte> place = memory.bytes().subspan(first, mine.size());
        std::copy(mine.begin(), mine.end(), place.begin());
        Transfer send = transport->post_send(next, {3, 0}, place);
        Transfer receive = transport->post_recv_in_place(previous, {3, 0}, expected.size());
        wait_all(*transport, {&receive, 1}, "in place", 30s);
        const InPlace there = receive.in_place();
        ALL_RANKS_TRUE(std::ranges::equal(there.bytes, expected));
        ALL_RANKS_TRUE(there.bytes.data() - there.block.data() ==
                       static_cast<std::ptrdiff_t>(first));
        ALL_RANKS_TRUE(there.block.size() == memory.bytes().size());
        ids.push_back(there.block_id);
        ALL_RANKS_TRUE(!send.test()); // for as long as its receiver holds it
        receive = Transfer();
        wait_all(*transport, {&send, 1}, "given back", 30s);
    }
    ALL_RANKS_TRUE(ids[0] == ids[1]);
}

TEST(SharedTransport, MemoryThatIsGivenBackIsUsedAgain) {
    const auto transport = open_transport(world());
    if (transport->size() == 1)
        return;
    constexpr std::uint64_t kBytes = std::uint64_t{100} << 20;
    std::byte* first = nullptr;
    for (int i = 0; i < 2000; ++i) { // 200 GB in all
        const SharedMemory a = transport->share(kBytes), b = transport->share(kBytes);
        ASSERT_TRUE(a.bytes().data() != b.bytes().data());
        if (first == nullptr)
            first = a.bytes().data();
        ASSERT_EQ(a.bytes().data(), first);
        a.bytes()[0] = b.bytes()[kBytes - 1] = std::byte{1};
    }
    SharedMemory outlives = transport->share(1);
    std::unique_ptr<Transport> gone = open_transport(world());
    outlives = gone->share(77);
    gone.reset();
    outlives.bytes()[76] = std::byte{1};
    try {
        static_cast<void>(transport->share(std::uint64_t{1} << 60));
        FAIL() << "an exabyte was given out";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::OutOfMemory) << error.message();
    }
}

// Simulated nodes do not share memory: what leaves one goes over MPI.
TEST(SharedTransport, OnlyRanksOfANodeShareMemory) {
    WorldOptions options;
    options.ranks_per_node = 2;
    World pairs = join_world(MPI_COMM_WORLD, options);
    {
        const auto transport = open_transport(pairs);
        for (int peer = 0; peer < pairs.size(); ++peer)
            EXPECT_EQ(transport->reads_in_place(peer),
                      peer != pairs.rank() && pairs.topology().same_node(peer, pairs.rank()));
        std::vector<std::vector<std::byte>> received;
        std::vector<Transfer> transfers;
        const auto bytes = pattern(10'000, 0);
        for (int peer = 0; peer < pairs.size(); ++peer) {
            received.emplace_back(bytes.size());
            transfers.push_back(transport->post_send(peer, {0, 0}, bytes));
        }
        for (int peer = 0; peer < pairs.size(); ++peer)
            transfers.push_back(
                transport->post_recv(peer, {0, 0}, received[static_cast<std::size_t>(peer)]));
        wait_all(*transport, transfers, "pairs", 30s);
        ALL_RANKS_TRUE(std::ranges::all_of(received, [&](const auto& r) { return r == bytes; }));
    }
    pairs.close();
}

TEST(HostCollectives, SumsHaveTheSameBitsEverywhereInRankOrder) {
    HostCollectives collectives(world(), Group::all(world().size()));
    const int n = world().size();
    std::vector<double> values, expected;
    for (int k = 0; k < 1000; ++k) {
        const auto value = [&](int rank) {
            return std::ldexp(1.0 + rank / 3.0, (k * 7 + rank * 13) % 60);
        };
        values.push_back(value(world().rank()));
        double sum = value(0);
        for (int rank = 1; rank < n; ++rank)
            sum += value(rank);
        expected.push_back(sum);
    }
    collectives.all_reduce_sum(values);
    ALL_RANKS_TRUE(std::memcmp(values.data(), expected.data(), values.size() * sizeof(double)) ==
                   0);
    ALL_RANKS_TRUE(collectives.all_reduce_sum(1.0) == n);
    std::int64_t limits[] = {world().rank(), -world().rank()};
    collectives.all_reduce_max(limits);
    ALL_RANKS_TRUE(limits[0] == n - 1 && limits[1] == 0);
    std::int64_t counts[] = {std::int64_t{1} << 40};
    collectives.all_reduce_sum(counts);
    ALL_RANKS_TRUE(counts[0] == n * (std::int64_t{1} << 40));
}

TEST(HostCollectives, GatherAndBroadcastAnyLength) {
    HostCollectives collectives(world(), Group::all(world().size()));
    const int n = world().size(), me = world().rank();
    const auto mine = pattern(static_cast<std::size_t>(me * 1000), me); // rank 0 brings nothing
    const auto all = collectives.all_gather(mine);
    bool good = all.size() == static_cast<std::size_t>(n);
    for (int r = 0; good && r < n; ++r)
        good = all[static_cast<std::size_t>(r)] == pattern(static_cast<std::size_t>(r * 1000), r);
    ALL_RANKS_TRUE(good);
    for (int root = 0; root < n; ++root) {
        std::vector<std::byte> bytes = pattern(static_cast<std::size_t>(me + 3), me);
        collectives.broadcast(root, bytes);
        ALL_RANKS_TRUE(bytes == pattern(static_cast<std::size_t>(root + 3), root));
    }
}

TEST(HostCollectives, DisjointGroupsWorkSideBySide) {
    const int n = world().size(), me = world().rank();
    std::vector<int> members;
    for (int r = me % 2; r < n; r += 2)
        members.push_back(r);
    HostCollectives collectives(world(), Group(members));
    // Odd ranks reduce more often: their numbers must not disturb the even ones.
    double sum = 0;
    for (int i = 0; i <= me % 2; ++i)
        sum = collectives.all_reduce_sum(me + 1.0);
    double expected = 0;
    for (const int r : members)
        expected += r + 1.0;
    ALL_RANKS_TRUE(sum == expected);
}

TEST(HostCollectives, DifferentLengthsFailOnEveryRank) {
    HostCollectives collectives(world(), Group::all(world().size()));
    std::vector<double> values(static_cast<std::size_t>(world().rank()) + 1);
    ErrorCode code = ErrorCode::Internal;
    try {
        collectives.all_reduce_sum(values);
    } catch (const Error& error) {
        code = error.code();
    }
    ALL_RANKS_TRUE(world().size() == 1 || code == ErrorCode::InvalidArgument);
    ALL_RANKS_TRUE(collectives.all_reduce_sum(1.0) == world().size()); // and work goes on
}

TEST(DeviceLinks, BlocksStayOpenUntilTheirOwnersAreDoneWithThem) {
    DeviceLink link(world(), make_host_link_driver(), 20s);
    const auto gone = std::make_shared<GoneBlocks>();
    const int me = world().rank(), n = world().size();
    const int next = (me + 1) % n, previous = (me + n - 1) % n;
    ALL_RANKS_TRUE(n == 1 || (link.reaches(next) && !link.reaches(me)));
    if (n == 1)
        return;
    OpenedBlocks opened;
    const auto open = [&](std::uint64_t id, std::uint64_t bytes) {
        std::shared_ptr<LinkMemory> memory;
        for (int i = 0; i < 2000 && !memory; ++i) {
            memory = link.open(previous, id, bytes, opened);
            if (!memory)
                std::this_thread::sleep_for(10ms);
        }
        return memory;
    };
    const std::shared_ptr<LinkBlock> first = link.allocate(100, gone);
    std::shared_ptr<LinkBlock> last; // ids and bytes are alike on all ranks
    for (int round = 0; round < 3; ++round) {
        link.pass(next, *first); // goes out once
        last = link.allocate(8192, gone);
        link.pass(next, *last);
        const auto memory = open(last->id(), last->bytes());
        ALL_RANKS_TRUE(memory && memory->bytes() == last->bytes());
        ALL_RANKS_TRUE(open(first->id(), first->bytes()) != nullptr);
        ALL_RANKS_TRUE(opened.size() == 2u); // the one before has gone
        last.reset();
    }
    ALL_RANKS_TRUE(link.open(previous, 1000, 1, opened) == nullptr);
}

} // namespace
} // namespace bellows
