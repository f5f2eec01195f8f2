// SPDX-License-Identifier: MIT

// Collectives on device tensors: every bit against sums on the host in ascending rank order, for
// all sizes, groups, chunkings and orders of execution.

#include "support/compare.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"
#include "support/transport_options.hpp"

#include <bellows/comm/collectives.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <algorithm>
#include <bit>
#include <numeric>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::read_back;
using testing::test_options;
using testing::world;

/// What a rank brings: magnitudes far apart, so that another order of the sum shows.
std::vector<float> values_of(int rank, std::uint64_t count, std::uint64_t seed = 1) {
    std::vector<float> values =
        test::random_f32(count, seed * 1000 + static_cast<std::uint64_t>(rank));
    for (std::uint64_t i = 0; i < count; ++i)
        values[i] = std::ldexp(values[i], static_cast<int>((i * 7 + seed) % 13));
    return values;
}

std::vector<float> sum_of(std::span<const int> ranks, std::uint64_t count, std::uint64_t seed = 1) {
    std::vector<float> sum = values_of(ranks[0], count, seed);
    for (const int rank : ranks.subspan(1)) {
        const auto values = values_of(rank, count, seed);
        for (std::uint64_t i = 0; i < count; ++i)
            sum[i] += values[i];
    }
    return sum;
}

/// Bit for bit; says which element differs first.
bool same_bits(const std::vector<float>& actual, const std::vector<float>& expected) {
    const auto bits = [](float value) { return std::bit_cast<std::uint32_t>(value); };
    EXPECT_EQ(actual.size(), expected.size());
    for (std::size_t i = 0; i < expected.size() && actual.size() == expected.size(); ++i)
        if (bits(actual[i]) != bits(expected[i])) {
            ADD_FAILURE() << "element " << i << " of " << expected.size() << " is " << actual[i]
                          << ", expected " << expected[i];
            return false;
        }
    return actual.size() == expected.size();
}

constexpr std::uint64_t kSizes[] = {0, 1, 3, 4, 5, 17, 255, 256, 257, 4095, 4097, 30'001};

class Tensor {
public:
    Tensor(Device& device, std::uint64_t count, DType dtype = DType::F32)
        : device_(&device), count_(count),
          buffer_(device,
                  {.name = "tensor",
                   .bytes = std::max<std::uint64_t>((count * size_of(dtype) + 3) / 4 * 4, 16)}),
          view_(buffer_.tensor(dtype, {count})) {}
    Tensor(Device& device, const std::vector<float>& values) : Tensor(device, values.size()) {
        if (!values.empty())
            device.upload(view_.buffer, std::span<const float>(values));
    }
    const TensorView& view() const { return view_; }
    BufferView memory() const { return buffer_.view(); }
    std::vector<float> values() const {
        return count_ == 0 ? std::vector<float>{} : read_back<float>(*device_, view_.buffer);
    }

private:
    Device* device_;
    std::uint64_t count_;
    Buffer buffer_;
    TensorView view_;
};

CollectivesOptions small_chunks() {
    CollectivesOptions options;
    options.chunk_bytes = options.link_chunk_bytes = 4096;
    options.small_bytes = 256;
    return options;
}

class CollectivesOver : public testing::OverEitherMemory {};

INSTANTIATE_TEST_SUITE_P(Memory, CollectivesOver, ::testing::Bool(), CollectivesOver::name);

struct Rig {
    explicit Rig(CollectivesOptions options = small_chunks(),
                 const DeviceOptions& device_options = test_options(),
                 Group group = Group::all(world().size()), std::uint64_t delay_seed = 0,
                 World& in = world())
        : device(make_device(device_options)),
          transport(
              open_transport(in, testing::transport_options(*device, CollectivesOver::linked()))),
          thread(std::make_unique<HostThread>(*device, "network")) {
        if (device->info().is_cpu) {
            EXPECT_EQ(transport->device_link() != nullptr,
                      CollectivesOver::linked() && in.size() > 1);
        }
        if (delay_seed != 0)
            thread->delay_jobs(std::chrono::microseconds(2000),
                               delay_seed * 31 + static_cast<std::uint64_t>(world().rank()));
        if (group.contains(world().rank()))
            collectives = std::make_unique<Collectives>(*device, in, *transport, *thread,
                                                        std::move(group), std::move(options));
    }
    std::unique_ptr<Device> device;
    std::unique_ptr<Transport> transport;
    std::unique_ptr<HostThread> thread;
    std::unique_ptr<Collectives> collectives;
};

std::vector<int> everyone() {
    std::vector<int> ranks(static_cast<std::size_t>(world().size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
}

TEST_P(CollectivesOver, AllReduceSumsInRankOrderForEverySizeAndChunking) {
    const auto ranks = everyone();
    for (const std::uint64_t chunk : {64u, 4096u, 1u << 20}) {
        CollectivesOptions options = small_chunks();
        options.chunk_bytes = options.link_chunk_bytes = chunk;
        Rig rig(options);
        for (const std::uint64_t count : kSizes) {
            if (chunk == 64 && count > 5000)
                continue;
            Tensor x(*rig.device, values_of(world().rank(), count));
            rig.collectives->all_reduce(x.view());
            ALL_RANKS_TRUE(same_bits(x.values(), sum_of(ranks, count)));
        }
        ALL_RANKS_TRUE(rig.device->num_checked_accesses() > 0);
        ALL_RANKS_TRUE(rig.collectives->stats().collectives > 0);
        ALL_RANKS_TRUE(world().size() == 1 || rig.collectives->stats().bytes_sent > 0);
    }
}

TEST_P(CollectivesOver, ReduceScatterAndAllGatherAreTheHalvesOfAllReduce) {
    const auto ranks = everyone();
    const auto members = static_cast<std::uint64_t>(world().size());
    const auto self = static_cast<std::uint64_t>(world().rank());
    Rig rig;
    for (const std::uint64_t count : kSizes) {
        const Share share = share_of(count, members, self);
        const auto expected = sum_of(ranks, count);
        const auto brought = values_of(world().rank(), count);
        Tensor x(*rig.device, brought), mine(*rig.device, share.count), all(*rig.device, count);
        rig.collectives->reduce_scatter(x.view(), mine.view());
        rig.collectives->all_gather(mine.view(), all.view());
        const auto part = std::span(expected).subspan(share.first, share.count);
        ALL_RANKS_TRUE(same_bits(mine.values(), {part.begin(), part.end()}));
        ALL_RANKS_TRUE(same_bits(all.values(), expected));
        ALL_RANKS_TRUE(same_bits(x.values(), brought)); // left as it was
    }
}

TEST_P(CollectivesOver, SharesMayBeUnevenEmptyAndInPlace) {
    const auto ranks = everyone();
    const auto members = static_cast<std::uint64_t>(world().size());
    const auto self = static_cast<std::uint64_t>(world().rank());
    Rig rig;
    for (std::uint64_t variant = 0; variant < 4; ++variant) {
        std::vector<std::uint64_t> counts;
        std::uint64_t total = 0, first = 0;
        for (std::uint64_t member = 0; member < members; ++member) {
            counts.push_back((member + variant) % 3 == 0 ? 0 : 1000 * member + 7 + variant);
            first += member < self ? counts.back() : 0;
            total += counts.back();
        }
        const auto expected = sum_of(ranks, total, variant);
        Tensor x(*rig.device, values_of(world().rank(), total, variant));
        const TensorView mine = x.view().rows(first, counts[self]);
        rig.collectives->reduce_scatter(x.view(), mine, counts);
        rig.collectives->all_gather(mine, x.view(), counts);
        ALL_RANKS_TRUE(same_bits(x.values(), expected));
    }
}

/// Each sum's tensor is overwritten right behind the call, while others may still read it.
TEST_P(CollectivesOver, OfTheirMemoryNoCopyIsTaken) {
    const auto ranks = everyone();
    const auto members = static_cast<std::uint64_t>(world().size());
    const auto self = static_cast<std::uint64_t>(world().rank());
    DeviceOptions traced = test_options();
    traced.trace = true;
    for (const std::uint64_t delay_seed : {0, 7, 8}) {
        Rig rig(small_chunks(), traced, Group::all(world().size()), delay_seed);
        constexpr std::uint64_t kMost = 30'001, kAhead = 36; // bytes, not at a multiple of 16
        const BufferView memory =
            rig.collectives->make_memory("memory", kAhead + 4 * kMost, MemoryCategory::Gradients);
        // Makes half of the calls.
        const auto transport = open_transport(
            world(), testing::transport_options(*rig.device, CollectivesOver::linked()));
        Collectives other(*rig.device, world(), *transport, *rig.thread, Group::all(world().size()),
                          small_chunks());
        other.use_memory_of(*rig.collectives);
        for (const std::uint64_t count : {257, 4097, 30'001}) {
            const auto x =
                TensorView::contiguous(memory.sub(kAhead, 4 * count), DType::F32, {count});
            const auto bring = [&](std::uint64_t seed) {
                const auto values = values_of(world().rank(), count, seed);
                rig.device->upload(x.buffer, std::span<const float>(values));
            };
            const Share share = share_of(count, members, self);
            const auto part_of = [&](const std::vector<float>& all) {
                const auto part = std::span(all).subspan(share.first, share.count);
                return std::vector<float>(part.begin(), part.end());
            };
            Tensor first(*rig.device, share.count), second(*rig.device, share.count);
            bring(1);
            rig.collectives->reduce_scatter(x, first.view());
            bring(2);
            other.reduce_scatter(x, second.view());
            bring(3);
            const TensorView mine = x.rows(share.first, share.count);
            rig.collectives->reduce_scatter(x, mine); // in place
            const auto third = read_back<float>(*rig.device, mine.buffer);
            other.all_gather(mine, x);
            const auto gathered = read_back<float>(*rig.device, x.buffer);
            bring(4);
            rig.collectives->all_reduce(x);
            const auto reduced = read_back<float>(*rig.device, x.buffer);
            bring(5);
            rig.collectives->broadcast(0, x);
            ALL_RANKS_TRUE(same_bits(first.values(), part_of(sum_of(ranks, count, 1))));
            ALL_RANKS_TRUE(same_bits(second.values(), part_of(sum_of(ranks, count, 2))));
            ALL_RANKS_TRUE(same_bits(third, part_of(sum_of(ranks, count, 3))));
            ALL_RANKS_TRUE(same_bits(gathered, sum_of(ranks, count, 3)));
            ALL_RANKS_TRUE(same_bits(reduced, sum_of(ranks, count, 4)));
            ALL_RANKS_TRUE(
                same_bits(read_back<float>(*rig.device, x.buffer), values_of(0, count, 5)));
        }
        rig.device->wait_idle();
        const std::vector<TraceEvent> events = rig.device->take_trace();
        for (const char* const copies : {"collectives out", "collectives in"}) {
            const bool copied = std::ranges::any_of(
                events, [&](const TraceEvent& event) { return event.category == copies; });
            if (members > 1)
                ALL_RANKS_TRUE(copied == (rig.transport->device_link() == nullptr));
        }
    }
}

/// Halves at odd places; what stands around them is kept.
TEST_P(CollectivesOver, GatheredHalvesGoStraightToTheirMemory) {
    const auto members = static_cast<std::uint64_t>(world().size());
    const auto self = static_cast<std::uint64_t>(world().rank());
    Rig rig;
    std::vector<std::uint64_t> counts;
    std::vector<std::uint16_t> expected{0xABCD, 0xABCE}; // ahead of the whole
    std::uint64_t first = 0;
    for (std::uint64_t member = 0; member < members; ++member) {
        counts.push_back(10'001 + member % 2 * 1'000);
        first += member < self ? counts.back() : 0;
        for (std::uint64_t i = 0; i < counts.back(); ++i)
            expected.push_back(static_cast<std::uint16_t>(member * 4099 + i * 3 + 1));
    }
    const std::uint64_t total = expected.size() - 2;
    expected.resize((expected.size() + 1) / 2 * 2, 0xABCF);
    const BufferView memory =
        rig.collectives->make_memory("memory", expected.size() * 2, MemoryCategory::Weights);
    std::vector<std::uint16_t> values = expected; // of the others zeros
    std::fill(values.begin() + 2, values.begin() + 2 + static_cast<std::ptrdiff_t>(first), 0);
    std::fill(values.begin() + 2 + static_cast<std::ptrdiff_t>(first + counts[self]),
              values.begin() + 2 + static_cast<std::ptrdiff_t>(total), 0);
    rig.device->upload(memory, std::span<const std::uint16_t>(values));
    const auto all = TensorView::contiguous(memory.sub(4, total * 2), DType::BF16, {total});
    rig.collectives->all_gather(all.rows(first, counts[self]), all, counts);
    ALL_RANKS_TRUE(read_back<std::uint16_t>(*rig.device, memory) == expected);
}

TEST_P(CollectivesOver, AllGatherOfHalvesKeepsEveryBitAround) {
    const auto members = static_cast<std::uint64_t>(world().size());
    const auto self = static_cast<std::uint64_t>(world().rank());
    for (const std::uint64_t chunk : {16u, 4096u}) {
        CollectivesOptions options = small_chunks();
        options.chunk_bytes = options.link_chunk_bytes = chunk;
        Rig rig(options);
        for (const std::uint64_t base : {0u, 1u, 2u, 5u, 64u, 1001u}) {
            if (chunk == 16 && base > 100)
                continue;
            std::vector<std::uint64_t> counts;
            std::vector<std::uint16_t> expected;
            for (std::uint64_t member = 0; member < members; ++member) {
                counts.push_back(base + member % 2);
                for (std::uint64_t i = 0; i < counts.back(); ++i)
                    expected.push_back(static_cast<std::uint16_t>(member * 4099 + i * 3 + 1));
            }
            const std::uint64_t total = expected.size(), words = (total + 1) / 2;
            const std::uint64_t own = counts[self];
            Tensor mine(*rig.device, own, DType::BF16), all(*rig.device, total, DType::BF16);
            const std::uint64_t first =
                std::accumulate(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(self),
                                std::uint64_t{0});
            std::vector<std::uint16_t> own_values(
                expected.begin() + static_cast<std::ptrdiff_t>(first),
                expected.begin() + static_cast<std::ptrdiff_t>(first + own));
            own_values.resize((own + 1) / 2 * 2, 0xBEEF);
            std::vector<std::uint16_t> blank(words * 2, 0xABCD);
            if (own > 0)
                rig.device->upload(mine.memory().sub(0, own_values.size() * 2),
                                   std::span<const std::uint16_t>(own_values));
            if (total > 0)
                rig.device->upload(all.memory().sub(0, words * 4),
                                   std::span<const std::uint16_t>(blank));
            rig.collectives->all_gather(mine.view(), all.view(), counts);
            expected.resize(words * 2, 0xABCD); // what shares the last word stays
            std::vector<std::uint16_t> actual;
            if (total > 0)
                actual = read_back<std::uint16_t>(*rig.device, all.memory().sub(0, words * 4));
            ALL_RANKS_TRUE(actual == expected);
        }
    }
}

TEST_P(CollectivesOver, BroadcastFromEveryMember) {
    Rig rig;
    for (int root = 0; root < world().size(); ++root)
        for (const std::uint64_t count : kSizes) {
            Tensor x(*rig.device, values_of(world().rank(), count));
            rig.collectives->broadcast(root, x.view());
            ALL_RANKS_TRUE(same_bits(x.values(), values_of(root, count)));
        }
}

TEST_P(CollectivesOver, GroupsOfSomeRanksWorkSideBySide) {
    std::vector<int> members;
    for (int rank = world().rank() % 2; rank < world().size(); rank += 2)
        members.push_back(rank);
    Rig rig(small_chunks(), test_options(), Group(members));
    // Odd ranks make more calls: groups that draw independently have a transport each.
    for (int round = 0; round < 2 + world().rank() % 2; ++round) {
        Tensor x(*rig.device, values_of(world().rank(), 5001));
        rig.collectives->all_reduce(x.view());
        EXPECT_TRUE(same_bits(x.values(), sum_of(members, 5001)));
    }
    ALL_RANKS_TRUE(!::testing::Test::HasFailure());
}

TEST_P(CollectivesOver, ManyInFlightKeepTheirOrderUnderRandomDelays) {
    const auto ranks = everyone();
    const auto members = static_cast<std::uint64_t>(world().size());
    const auto self = static_cast<std::uint64_t>(world().rank());
    CollectivesOptions options = small_chunks();
    options.collectives_in_flight = 3;
    Rig rig(options, test_options(), Group::all(world().size()), 5);
    std::vector<std::unique_ptr<Tensor>> reduced, shares, gathered;
    std::vector<TimePoint> points;
    for (std::uint64_t i = 0; i < 12; ++i) {
        const std::uint64_t count = 1 + i * 977;
        reduced.push_back(
            std::make_unique<Tensor>(*rig.device, values_of(world().rank(), count, i)));
        shares.push_back(
            std::make_unique<Tensor>(*rig.device, share_of(count, members, self).count));
        gathered.push_back(std::make_unique<Tensor>(*rig.device, count));
    }
    for (std::size_t i = 0; i < reduced.size(); ++i) {
        rig.collectives->reduce_scatter(reduced[i]->view(), shares[i]->view());
        rig.collectives->all_gather(shares[i]->view(), gathered[i]->view());
        points.push_back(rig.collectives->all_reduce(reduced[i]->view()));
    }
    for (const TimePoint& point : points)
        point.wait();
    bool good = true;
    for (std::uint64_t i = 0; i < reduced.size(); ++i) {
        const auto expected = sum_of(ranks, 1 + i * 977, i);
        good = good && same_bits(reduced[i]->values(), expected) &&
               same_bits(gathered[i]->values(), expected);
    }
    ALL_RANKS_TRUE(good);
}

/// A program of collectives between device work; what its tensors hold in the end.
std::vector<float> run_program(const DeviceOptions& device_options, std::uint64_t delay_seed) {
    const auto members = static_cast<std::uint64_t>(world().size());
    const auto self = static_cast<std::uint64_t>(world().rank());
    Rig rig(small_chunks(), device_options, Group::all(world().size()), delay_seed);
    constexpr std::uint64_t kCount = 3001;
    Tensor a(*rig.device, values_of(world().rank(), kCount, 1));
    Tensor b(*rig.device, values_of(world().rank(), kCount, 2));
    Tensor share(*rig.device, share_of(kCount, members, self).count);
    Recording swap(*rig.device, QueueRole::Compute, "swap");
    swap.copy(a.view().buffer.sub(0, 4000), b.view().buffer.sub(4000, 4000));
    for (int round = 0; round < 3; ++round) {
        rig.collectives->all_reduce(a.view());
        rig.collectives->reduce_scatter(b.view(), share.view());
        rig.device->submit(swap);
        rig.collectives->all_gather(share.view(), a.view());
        rig.collectives->broadcast(round % world().size(), b.view());
    }
    auto values = a.values();
    const auto more = b.values();
    values.insert(values.end(), more.begin(), more.end());
    return values;
}

TEST_P(CollectivesOver, SerialOverlapAndShuffleGiveTheSameBits) {
    DeviceOptions options = test_options();
    options.sync = SyncMode::Serial;
    const auto serial = run_program(options, 0);
    options.sync = SyncMode::Overlap;
    ALL_RANKS_TRUE(same_bits(run_program(options, 3), serial));
    options.sync = SyncMode::Shuffle;
    for (options.shuffle_seed = 1; options.shuffle_seed <= 3; ++options.shuffle_seed)
        ALL_RANKS_TRUE(same_bits(run_program(options, options.shuffle_seed), serial));
}

TEST_P(CollectivesOver, TwentyRunsGiveTheSameBits) {
    const auto ranks = everyone();
    Rig rig(small_chunks(), test_options(), Group::all(world().size()), 9);
    const auto expected = sum_of(ranks, 7777);
    for (int run = 0; run < 20; ++run) {
        Tensor x(*rig.device, values_of(world().rank(), 7777));
        rig.collectives->all_reduce(x.view()).wait();
        ALL_RANKS_TRUE(same_bits(x.values(), expected));
    }
}

TEST_P(CollectivesOver, TensorsMayBeDestroyedRightAfterTheCall) {
    const auto ranks = everyone();
    Rig rig(small_chunks(), test_options(), Group::all(world().size()), 4);
    constexpr std::uint64_t kCount = 9001;
    Tensor kept(*rig.device, kCount);
    {
        Tensor x(*rig.device, values_of(world().rank(), kCount));
        Recording keep(*rig.device, QueueRole::Compute, "keep");
        keep.copy(x.view().buffer, kept.view().buffer);
        rig.collectives->all_reduce(x.view());
        rig.device->submit(keep);
    }
    ALL_RANKS_TRUE(same_bits(kept.values(), sum_of(ranks, kCount)));
}

/// Whether a call on 64 floats and halves is refused; with more than one rank that ends the job for
/// all, with one nothing has happened and work goes on.
template <class Call>
bool refused(const Call& call) {
    World inner = join_world(MPI_COMM_WORLD);
    Rig rig(small_chunks(), test_options(), Group::all(inner.size()), 0, inner);
    Tensor x(*rig.device, 64), halves(*rig.device, 64, DType::BF16);
    world().control().barrier(std::chrono::seconds(30)); // nobody is ended while it prepares
    bool good = false;
    try {
        call(rig, x.view(), halves.view());
    } catch (const Error& error) {
        good = error.code() == ErrorCode::InvalidArgument;
    }
    const auto failure = inner.control().failure();
    if (inner.size() > 1)
        return good && failure && failure->code() == ErrorCode::InvalidArgument;
    rig.collectives->all_reduce(x.view()).wait();
    return good && !failure;
}

TEST_P(CollectivesOver, WrongArgumentsAreRefusedBeforeAnythingHappens) {
    const std::vector<std::uint64_t> counts(static_cast<std::size_t>(world().size()), 1000);
    ALL_RANKS_TRUE(refused([](Rig& rig, const TensorView&, const TensorView& halves) {
        rig.collectives->all_reduce(halves);
    }));
    ALL_RANKS_TRUE(refused([&](Rig& rig, const TensorView& x, const TensorView&) {
        rig.collectives->all_gather(x, x, counts);
    }));
    ALL_RANKS_TRUE(refused([](Rig& rig, const TensorView& x, const TensorView& halves) {
        rig.collectives->all_gather(halves, x);
    }));
    ALL_RANKS_TRUE(refused([](Rig& rig, const TensorView& x, const TensorView&) {
        rig.collectives->broadcast(world().size(), x);
    }));
    ALL_RANKS_TRUE(refused([](Rig& rig, const TensorView&, const TensorView&) {
        rig.collectives->broadcast(-1, {});
    }));
    bool outside = false; // not collective: nobody else hears of it
    try {
        Rig other(small_chunks(), test_options(), Group({world().rank(), world().size()}));
    } catch (const Error& error) {
        outside = error.code() == ErrorCode::InvalidArgument;
    }
    ALL_RANKS_TRUE(outside && !world().control().failed());
}

} // namespace
} // namespace bellows
