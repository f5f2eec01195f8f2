// SPDX-License-Identifier: MIT

// Moves from many to many by a table, and their sums: every bit against the same moves on the
// host, for all kinds of tables, chunkings and ways between the ranks.

#include "support/compare.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"
#include "support/transport_options.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::read_back;
using testing::test_options;
using testing::world;

using Moves = std::vector<MemoryMove>;
using Words = std::vector<float>;

/// Magnitudes far apart, so that another order of a sum shows.
Words values_of(int rank, std::uint64_t count, std::uint64_t seed) {
    Words values = test::random_f32(count, seed * 1000 + static_cast<std::uint64_t>(rank));
    for (std::uint64_t i = 0; i < count; ++i)
        values[i] = std::ldexp(values[i], static_cast<int>((i * 7 + seed) % 13));
    return values;
}

bool same_bits(const Words& actual, const Words& expected) {
    const auto bits = [](float value) { return std::bit_cast<std::uint32_t>(value); };
    for (std::size_t i = 0; i < expected.size() && actual.size() == expected.size(); ++i)
        if (bits(actual[i]) != bits(expected[i])) {
            ADD_FAILURE() << "word " << i << " of " << expected.size() << " is " << actual[i]
                          << ", expected " << expected[i];
            return false;
        }
    EXPECT_EQ(actual.size(), expected.size());
    return actual.size() == expected.size();
}

/// What a member's target holds when the moves have been made one after the other.
Words moved(const Moves& moves, int to, const std::vector<Words>& sources, Words target) {
    std::map<std::uint64_t, bool> begun; // by first byte
    for (const MemoryMove& move : moves) {
        if (move.to != to || move.bytes == 0)
            continue;
        const bool adds = !begun.try_emplace(move.to_byte, true).second;
        const Words& source = sources[static_cast<std::size_t>(move.from)];
        for (std::uint64_t i = 0; i < move.bytes / 4; ++i) {
            float& at = target[move.to_byte / 4 + i];
            const float brought = source[move.from_byte / 4 + i];
            at = adds ? at + brought : brought;
        }
    }
    return target;
}

enum class Way : std::uint8_t { SharedMemory, Mpi, DeviceLink };

class MovesOver : public ::testing::TestWithParam<Way> {
public:
    static std::string name(const ::testing::TestParamInfo<Way>& one) {
        return one.param == Way::SharedMemory ? "SharedMemory"
               : one.param == Way::Mpi        ? "Mpi"
                                              : "DeviceLink";
    }
};

INSTANTIATE_TEST_SUITE_P(Ways, MovesOver,
                         ::testing::Values(Way::SharedMemory, Way::Mpi, Way::DeviceLink),
                         MovesOver::name);

CollectivesOptions chunks_of(std::uint64_t bytes) {
    CollectivesOptions options;
    options.chunk_bytes = options.link_chunk_bytes = bytes;
    options.small_bytes = 64; // more goes over a device link
    return options;
}

struct Rig {
    explicit Rig(Way way, const DeviceOptions& device_options = test_options(), World& in = world())
        : device(make_device(device_options)) {
        TransportOptions options = testing::transport_options(*device, way == Way::DeviceLink);
        options.share_memory = way != Way::Mpi;
        transport = open_transport(in, options);
        if (device->info().is_cpu) {
            EXPECT_EQ(transport->device_link() != nullptr, way == Way::DeviceLink && in.size() > 1);
        }
        thread = std::make_unique<HostThread>(*device, "network");
        set_chunks(chunks_of(4096), in);
    }
    void set_chunks(const CollectivesOptions& options, World& in = world()) {
        collectives.reset();
        collectives = std::make_unique<Collectives>(*device, in, *transport, *thread,
                                                    Group::all(in.size()), options);
    }

    std::unique_ptr<Device> device;
    std::unique_ptr<Transport> transport;
    std::unique_ptr<HostThread> thread;
    std::unique_ptr<Collectives> collectives;
};

/// Memory on the device with values; a view of none without values.
class Tensor {
public:
    Tensor(Device& device, const Words& values) : device_(&device) {
        if (values.empty())
            return;
        buffer_ = Buffer(device, {.name = "tensor", .bytes = 4 * values.size()});
        view_ = buffer_.tensor(DType::F32, {values.size()});
        device.upload(view_.buffer, std::span<const float>(values));
    }
    const TensorView& view() const { return view_; }
    Words values() const {
        return view_.buffer ? read_back<float>(*device_, view_.buffer) : Words{};
    }

private:
    Device* device_;
    Buffer buffer_;
    TensorView view_;
};

struct Table {
    Moves moves;
    std::vector<std::uint64_t> source_words, target_words; ///< of each member; some have none
};

/// Sizes from nothing and one word to several chunks of 4096 bytes, at any word; one to many, moves
/// of a rank to itself, and with sums up to five terms, also of the rank itself.
Table random_table(std::uint64_t seed, bool sums) {
    std::mt19937_64 random(seed);
    const auto members = static_cast<std::uint64_t>(world().size());
    Table table;
    const std::uint64_t gives_none = random() % (members + 1),
                        takes_none = random() % (members + 1);
    for (std::uint64_t member = 0; member < members; ++member) {
        table.source_words.push_back(member == gives_none && members > 1 ? 0 : 6000);
        table.target_words.push_back(random() % 20);
    }
    for (int i = 0; i < 24; ++i) {
        const std::uint64_t to = random() % members;
        if (to == takes_none && members > 1)
            continue;
        const std::uint64_t kind = random() % 8;
        const std::uint64_t words = kind == 0   ? random() % 2
                                    : kind == 1 ? 1025 + random() % 4000
                                                : 4 * (random() % 150) + random() % 2;
        table.target_words[to] += random() % 2 * (random() % 9);
        const std::uint64_t to_byte = 4 * table.target_words[to];
        table.target_words[to] += words + random() % 3;
        for (std::uint64_t term = 0, terms = sums ? 1 + random() % 5 : 1; term < terms; ++term) {
            std::uint64_t from = random() % members;
            if (table.source_words[from] == 0)
                from = (from + 1) % members;
            const std::uint64_t first = random() % (6000 - words) / 4 * 4 + random() % 2;
            table.moves.push_back({static_cast<int>(from), static_cast<int>(to),
                                   4 * std::min(first, 6000 - words), to_byte, 4 * words});
        }
    }
    if (takes_none < members && members > 1)
        table.target_words[takes_none] = 0;
    std::shuffle(table.moves.begin(), table.moves.end(), random);
    return table;
}

std::vector<Words> sources_of(const Table& table, std::uint64_t seed) {
    std::vector<Words> sources;
    for (int rank = 0; rank < world().size(); ++rank)
        sources.push_back(
            values_of(rank, table.source_words[static_cast<std::size_t>(rank)], seed));
    return sources;
}

std::uint64_t bytes_to_others(const Moves& moves, int from) {
    std::uint64_t bytes = 0;
    for (const MemoryMove& move : moves)
        bytes += move.from == from && move.to != from ? move.bytes : 0;
    return bytes;
}

/// On a device of one queue, too, each role has one of its own in the books: what must wait for
/// what is held to them.
DeviceOptions roles_apart() {
    DeviceOptions options = test_options();
    options.roles_apart = true;
    return options;
}

TEST_P(MovesOver, RandomTablesOfAllSizesInAllChunks) {
    const int self = world().rank();
    Rig rig(GetParam(), roles_apart());
    std::uint64_t seed = 0;
    for (const std::uint64_t chunk : {256u, 4096u, 1u << 20}) {
        rig.set_chunks(chunks_of(chunk));
        std::uint64_t sent = 0;
        for (int i = 0; i < (chunk == 256 ? 1 : 4); ++i)
            for (const bool sums : {false, true}) {
                const Table table = random_table(++seed, sums);
                const auto sources = sources_of(table, seed);
                const auto at = static_cast<std::size_t>(self);
                const Words before = values_of(self, table.target_words[at], 77);
                Tensor source(*rig.device, sources[at]), target(*rig.device, before);
                if (sums)
                    rig.collectives->sum_moves(source.view(), target.view(), table.moves).wait();
                else
                    rig.collectives->move(source.view(), target.view(), table.moves).wait();
                ALL_RANKS_TRUE(
                    same_bits(target.values(), moved(table.moves, self, sources, before)));
                ALL_RANKS_TRUE(same_bits(source.values(), sources[at]));
                sent += bytes_to_others(table.moves, self);
            }
        ALL_RANKS_TRUE(rig.collectives->stats().bytes_sent == sent);
    }
    ALL_RANKS_TRUE(rig.device->num_checked_accesses() > 0);
}

/// The way of a training step: home weights to all slots, the slots' gradients back in the order of
/// the list. Calls follow each other without a wait, and what they read is overwritten behind them.
TEST_P(MovesOver, HomeWeightsGoToAllSlotsAndGradientsComeBack) {
    const int self = world().rank(), members = world().size();
    const auto at = static_cast<std::size_t>(self);
    constexpr std::uint64_t kWords = 1500, kBytes = 4 * kWords, kSlots = 3;
    // Expert e lives on rank e; slot s of rank r has a copy of expert (r + s * s) % members.
    Moves out, back;
    for (int rank = members; rank-- > 0;)
        for (int slot = 0; slot < static_cast<int>(kSlots); ++slot) {
            const int expert = (rank + slot * slot) % members;
            const auto slot_byte = static_cast<std::uint64_t>(slot) * kBytes;
            out.push_back({expert, rank, 0, slot_byte, kBytes});
            back.push_back({rank, expert, slot_byte, 0, kBytes});
        }
    DeviceOptions traced = roles_apart();
    traced.trace = true;
    for (const bool in_their_memory : {false, true}) {
        Rig rig(GetParam(), traced);
        rig.thread->delay_jobs(std::chrono::microseconds(1000),
                               31 + static_cast<std::uint64_t>(self));
        // One memory for all: home weights, then slots.
        const std::uint64_t all_bytes = kBytes * (1 + kSlots);
        Buffer own;
        BufferView memory;
        if (in_their_memory) {
            memory = rig.collectives->make_memory("memory", 36 + all_bytes, MemoryCategory::Weights)
                         .sub(36, all_bytes);
        } else {
            own = Buffer(*rig.device, {.name = "memory", .bytes = all_bytes});
            memory = own.view();
        }
        const auto home = TensorView::contiguous(memory.sub(0, kBytes), DType::F32, {kWords});
        const auto slots = TensorView::contiguous(memory.sub(kBytes, kSlots * kBytes), DType::F32,
                                                  {kSlots * kWords});
        for (std::uint64_t step = 0; step < 3; ++step) {
            std::vector<Words> weights, gradients;
            for (int rank = 0; rank < members; ++rank) {
                weights.push_back(values_of(rank, kWords, 10 + step));
                gradients.push_back(values_of(rank, kSlots * kWords, 20 + step));
            }
            rig.device->upload(home.buffer, std::span<const float>(weights[at]));
            rig.collectives->move(home, slots, out);
            const Words copies = read_back<float>(*rig.device, slots.buffer);
            rig.device->upload(slots.buffer, std::span<const float>(gradients[at]));
            rig.collectives->sum_moves(slots, home, back);
            rig.device->upload(slots.buffer, std::span<const float>(copies));
            const Words sum = read_back<float>(*rig.device, home.buffer);
            ALL_RANKS_TRUE(same_bits(copies, moved(out, self, weights, Words(kSlots * kWords))));
            const Words expected = moved(back, self, gradients, Words(kWords));
            ALL_RANKS_TRUE(same_bits(sum, expected));
            Moves other_order = back;
            std::ranges::reverse(other_order);
            ALL_RANKS_TRUE(moved(other_order, self, gradients, Words(kWords)) != expected);
        }
        if (members == 1)
            continue;
        rig.device->wait_idle();
        const std::vector<TraceEvent> events = rig.device->take_trace();
        const bool copied = std::ranges::any_of(
            events, [](const TraceEvent& event) { return event.category == "collectives out"; });
        ALL_RANKS_TRUE(copied == !(in_their_memory && rig.transport->device_link() != nullptr));
    }
}

/// Source and target may be one tensor; bytes keep their bits, whatever they mean.
TEST_P(MovesOver, WithinOneTensorAndOfAnyBits) {
    const int self = world().rank(), members = world().size();
    Rig rig(GetParam());
    constexpr std::uint64_t kWords = 4000;
    const auto bits_of = [](int rank) {
        std::vector<std::uint32_t> bits(kWords);
        for (std::uint32_t i = 0; i < kWords; ++i) // among them numbers that are none
            bits[i] = (i % 3 == 0   ? 0x7F800001u
                       : i % 3 == 1 ? 0xFFC00000u
                                    : 0x00000001u) +
                      (static_cast<std::uint32_t>(rank) << 12) + i;
        return bits;
    };
    Buffer memory(*rig.device, {.name = "memory", .bytes = 4 * kWords});
    rig.device->upload(memory.view(), std::span<const std::uint32_t>(bits_of(self)));
    const TensorView x = memory.tensor(DType::BF16, {2 * kWords});
    // Everybody's second quarter to the next one's last half, and a word to itself.
    Moves moves;
    for (int rank = 0; rank < members; ++rank) {
        const int next = (rank + 1) % members;
        moves.push_back({rank, next, kWords, 2 * kWords, kWords});
        moves.push_back({rank, next, kWords, 3 * kWords, kWords});
        moves.push_back({rank, rank, 2 * kWords - 4, 0, 4});
    }
    rig.collectives->move(x, x, moves);
    const auto expected_of = [&](int rank) {
        std::vector<std::uint32_t> expected = bits_of(rank);
        const auto before = bits_of((rank + members - 1) % members);
        expected[0] = expected[kWords / 2 - 1];
        for (std::uint64_t i = 0; i < kWords / 4; ++i)
            expected[kWords / 2 + i] = expected[3 * kWords / 4 + i] = before[kWords / 4 + i];
        return expected;
    };
    ALL_RANKS_TRUE(read_back<std::uint32_t>(*rig.device, memory.view()) == expected_of(self));
    // A sum of one term is a copy.
    Buffer target(*rig.device, {.name = "target", .bytes = 4 * kWords});
    const Moves alone{{members - 1, 0, 0, 0, 4 * kWords}};
    rig.collectives
        ->sum_moves(memory.tensor(DType::F32, {kWords}), target.tensor(DType::F32, {kWords}), alone)
        .wait();
    ALL_RANKS_TRUE(self != 0 || read_back<std::uint32_t>(*rig.device, target.view()) ==
                                    expected_of(members - 1));
}

TEST_P(MovesOver, ListsOfNothingEnd) {
    Rig rig(GetParam());
    rig.collectives->move({}, {}, {}).wait();
    rig.collectives->sum_moves({}, {}, Moves{{0, 0, 0, 0, 0}}).wait();
    ALL_RANKS_TRUE(rig.collectives->stats().collectives == 2);
}

/// Failures are not tried over MPI: a receive that was posted for a job that fails may still be
/// under way when its memory goes, and this process lives on. (comm_transport_test has messages of
/// wrong sizes, comm_failing_together_test has processes that end.)
constexpr Way kWaysToFail[]{Way::SharedMemory, Way::DeviceLink};

/// Whether a call with 64 words of source and 64 of target ends with this error; with more than one
/// rank that ends the job for all, with one nothing has happened and work goes on.
template <class Call>
bool fails(Way way, ErrorCode code, const Call& call) {
    World inner = join_world(MPI_COMM_WORLD);
    Rig rig(way, test_options(), inner);
    Tensor source(*rig.device, Words(64)), target(*rig.device, Words(64));
    world().control().barrier(std::chrono::seconds(30)); // nobody is ended while it prepares
    bool good = false;
    try {
        call(*rig.collectives, source.view(), target.view());
        // Whoever has no part in what failed hears of it, too.
        rig.collectives->all_reduce(source.view()).wait();
    } catch (const Error& error) {
        good = error.code() == code;
    }
    const auto failure = inner.control().failure();
    if (inner.size() > 1)
        return good && failure && failure->code() == code;
    rig.collectives->move(source.view(), target.view(), Moves{{0, 0, 0, 0, 256}}).wait();
    return good && !failure;
}

TEST(Moves, WrongArgumentsAreRefusedBeforeAnythingHappens) {
    const int last = world().size() - 1;
    const Moves refused[]{
        {{0, last + 1, 0, 0, 4}},                     // nobody
        {{0, last, 0, 2, 4}},                         // not at a word
        {{0, last, 0, 8, 252}},                       // beyond the target
        {{0, last, 256, 0, 4}},                       // beyond the source
        {{0, last, 0, 0, 8}, {last, last, 0, 4, 16}}, // overlapping targets
    };
    for (const Moves& moves : refused)
        ALL_RANKS_TRUE(
            fails(Way::SharedMemory, ErrorCode::InvalidArgument,
                  [&](Collectives& of, const TensorView& source, const TensorView& target) {
                      of.sum_moves(source, target, moves).wait();
                  }));
    // Several to one place without sums, and a rank that gives what it gets.
    ALL_RANKS_TRUE(
        fails(Way::SharedMemory, ErrorCode::InvalidArgument,
              [&](Collectives& of, const TensorView& source, const TensorView& target) {
                  of.move(source, target, Moves{{0, 0, 0, 0, 8}, {last, 0, 8, 0, 8}}).wait();
              }));
    ALL_RANKS_TRUE(
        fails(Way::SharedMemory, ErrorCode::InvalidArgument,
              [&](Collectives& of, const TensorView& source, const TensorView&) {
                  of.move(source, source, Moves{{last, 0, 0, 0, 8}, {0, last, 4, 16, 8}}).wait();
              }));
}

TEST(Moves, ListsThatDifferAreNoticed) {
    if (world().size() == 1)
        return;
    for (const Way way : kWaysToFail)
        ALL_RANKS_TRUE(
            fails(way, ErrorCode::Corrupt,
                  [](Collectives& of, const TensorView& source, const TensorView& target) {
                      const std::uint64_t bytes = world().rank() == 0 ? 128 : 132;
                      of.move(source, target, Moves{{0, 1, 0, 0, bytes}}).wait();
                  }));
}

/// Rank 1 never comes to a call in which rank 0 waits for it.
void expect_time_limit(Way way) {
    World inner = join_world(MPI_COMM_WORLD);
    Rig rig(way, test_options(), inner);
    CollectivesOptions options = chunks_of(4096);
    options.timeout = std::chrono::milliseconds(inner.rank() == 0 ? 200 : 60'000);
    rig.set_chunks(options, inner);
    Tensor source(*rig.device, Words(64)), target(*rig.device, Words(64));
    world().control().barrier(std::chrono::seconds(30));
    std::string text;
    bool good = false;
    try {
        if (inner.rank() == 1) // never comes to the call
            inner.control().recv(0, 1, std::chrono::seconds(60));
        rig.collectives->move(source.view(), target.view(), Moves{{1, 0, 0, 0, 252}}).wait();
        rig.collectives->all_reduce(source.view()).wait();
    } catch (const Error& error) {
        good = error.code() == ErrorCode::Timeout;
        text = error.message();
    }
    ALL_RANKS_TRUE(good);
    for (const char* const part : {"MOVE: moving", "rank 1", "252"})
        EXPECT_NE(text.find(part), std::string::npos) << text;
    ALL_RANKS_TRUE(!::testing::Test::HasFailure());
}

TEST(Moves, TimeLimitsNameWhoIsWaitedForAndHowMuchIsMissing) {
    if (world().size() == 1)
        return;
    for (const Way way : kWaysToFail)
        expect_time_limit(way);
}

} // namespace
} // namespace bellows
