// SPDX-License-Identifier: MIT
// That an update of which every rank does a part, and the gathering behind it, leave what one rank
// leaves that updates everything: all that layers read, bit by bit, in every precision, and what
// checkpoints keep; and who gets which part.

#include "support/bf16_products.hpp"
#include "support/compare.hpp"
#include "support/mpi_test.hpp"
#include "support/packed_weights.hpp"
#include "support/small_run.hpp"
#include "support/test_device.hpp"
#include "train/sharded_optimizer.hpp"

#include <algorithm>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace bellows {
namespace {

using testing::world;
using Ranges = std::vector<GradientRange>;

using Shares = std::vector<std::uint64_t>;

TEST(Sharing, DividesWhereParametersAreDivisible) {
    const Ranges ranges{{0, 100, false, 1, true, 100}, {100, 300, false, 1, true, 60},
                        {400, 50, false, 1, true, 50}, {450, 16, false, 1, false, 16},
                        {466, 80, true, 1, true, 80},  {546, 80, true, 1, true, 80}};
    Ranges buckets{{0, 450, false, 1, true}, {450, 16, false, 1, false}, {466, 160, true, 1, true}};
    Sharing sharing(3, 2);
    sharing.share_out(buckets, ranges);
    EXPECT_EQ(buckets[0].shares, (Shares{160, 120, 170})) << "by thirds: 150, 300";
    EXPECT_TRUE(buckets[1].shares.empty()) << "gains";
    EXPECT_EQ(buckets[2].shares, (Shares{80, 80}));
    EXPECT_EQ(buckets[0].share(1).first, 160u);
    EXPECT_EQ(buckets[0].share(1).count, 120u);
    EXPECT_EQ(buckets[0].share(2).first, 280u);
    EXPECT_EQ(buckets[1].share(1).first, 450u);
    EXPECT_EQ(buckets[1].share(1).count, 16u);
    EXPECT_EQ(sharing.given(false), (Shares{160, 120, 170}));
    EXPECT_EQ(sharing.given(true), (Shares{80, 80}));
    Ranges alone{{0, 450, false, 1, true}};
    Sharing(1, 1).share_out(alone, ranges);
    EXPECT_TRUE(alone[0].shares.empty()) << "nobody to share with";
}

/// {first, count} of each range of each part.
std::vector<std::vector<std::pair<std::uint64_t, std::uint64_t>>>
ranges_of(std::span<const UpdatePart> parts) {
    std::vector<std::vector<std::pair<std::uint64_t, std::uint64_t>>> all;
    for (const UpdatePart& part : parts) {
        all.emplace_back();
        for (const UpdatedRange& range : part)
            all.back().emplace_back(range.first, range.count);
    }
    return all;
}

TEST(UpdateParts, SmallBucketsTogetherThenSharesThenLargeOnesEachAlone) {
    constexpr std::uint64_t kLarge = kGradientBucketBytes / sizeof(float);
    const Ranges buckets{{0, kLarge, true, 1, true},
                         {kLarge, 16, false, 1, false},
                         {kLarge + 16, 300, false, 1, true, 100, {100, 200, 0}},
                         {kLarge + 316, 16, false, 1, false},
                         {kLarge + 332, 16, false, 1, false},
                         {kLarge + 348, 2 * kLarge, true, 1, true}};
    const auto parts = update_parts(buckets, {1, false}, {0, true});
    EXPECT_EQ(ranges_of(parts), (decltype(ranges_of(parts)){{{kLarge, 16}, {kLarge + 316, 32}},
                                                            {{kLarge + 116, 200}},
                                                            {{0, kLarge}},
                                                            {{kLarge + 348, 2 * kLarge}}}));
    EXPECT_FALSE(parts[0][0].counted) << "another rank stands for what all update";
    EXPECT_TRUE(parts[1][0].counted);
    EXPECT_TRUE(parts[1][0].in_part);
    EXPECT_TRUE(parts[2][0].counted);
    EXPECT_FALSE(parts[2][0].in_part);
    EXPECT_EQ(update_parts(buckets, {2, false}, {0, true}).size(), 3u) << "it has no share";
}

TEST(Sharing, WhatCannotBeDividedGoesToEachInTurn) {
    Ranges ranges;
    for (std::uint64_t i = 0; i < 8; ++i)
        ranges.push_back({100 * i, 100, false, i, true, 100});
    Ranges buckets = ranges;
    Sharing sharing(4, 1);
    sharing.share_out(buckets, ranges);
    EXPECT_EQ(sharing.given(false), (Shares{200, 200, 200, 200}));
    for (const GradientRange& bucket : buckets)
        EXPECT_EQ(std::ranges::count(bucket.shares, 100u), 1);
}

/// A model's matrices over many ranks: of all of them together, and of each layer as it travels.
TEST(Sharing, IsEvenForLargeModels) {
    ModelConfig model = load_run_config("v2-lite").model;
    model.layers = 4;
    std::vector<ParameterInfo> dense = in_stored_order(parameters(model));
    std::erase_if(dense, [](const ParameterInfo& info) {
        return !info.weight_decay || info.kind == ParameterKind::Expert;
    });
    const Ranges ranges = layer_ranges(dense);
    const std::uint64_t all = ranges.back().first + ranges.back().count;
    for (const std::uint64_t members : {2u, 4u, 8u, 32u}) {
        Ranges buckets = gradient_buckets(ranges, 0);
        Sharing sharing(members, 1);
        sharing.share_out(buckets, ranges);
        // Of a matrix 128 rows stay together.
        std::uint64_t together = 0;
        for (const GradientRange& range : ranges)
            together = std::max(together, range.divisible_by);
        const auto is_even = [&](const Shares& shares, std::uint64_t count) {
            EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), std::uint64_t{0}), count);
            EXPECT_LE(std::ranges::max(shares), count / members + together)
                << count << " elements over " << members;
        };
        is_even(sharing.given(false), all);
        for (const GradientRange& bucket : buckets)
            is_even(bucket.shares, bucket.count);
        EXPECT_LT(together * 10, all / 8) << "the bound says something";
    }
}

constexpr std::uint64_t kExpertLayer = 1; // of wide_model

/// Everything that layers read of the weights.
std::vector<std::byte> read_by_layers(Device& device, const ParameterStore& store) {
    std::vector<std::byte> all;
    const auto append = [&](const TensorView& view) {
        const auto bytes = testing::read_back<std::byte>(device, view.buffer);
        all.insert(all.end(), bytes.begin(),
                   bytes.begin() + static_cast<std::ptrdiff_t>(view.num_bytes()));
    };
    for (const Parameter& parameter : store.all()) {
        if (!parameter.quantized)
            append(parameter.compute);
        if (!parameter.info.weight_decay)
            append(parameter.weight); // gains, read as f32
        if (parameter.quantized) {
            append(parameter.quantized->codes);
            append(parameter.quantized->scales);
        }
        if (parameter.turned.buffer)
            append(parameter.turned);
    }
    for (const Parameter& parameter : testing::packable(store, kExpertLayer))
        for (const auto& packed : {parameter.packed_nt, parameter.packed_nn})
            if (packed)
                append(TensorView::contiguous(packed->memory, DType::U8, {packed->memory.bytes}));
    return all;
}

class WeightGatheringOf : public ::testing::TestWithParam<const char*> {};

TEST_P(WeightGatheringOf, LeavesWhatOneUpdateOfEverythingLeaves) {
    const std::string precision = GetParam();
    const auto device = testing::make_device(testing::test_options());
    const auto dense_transport = open_transport(world(), {.device = device.get()});
    const auto replica_transport = open_transport(world(), {.device = device.get()});
    HostThread thread(*device, "network");
    thread.delay_jobs(std::chrono::microseconds(300), 1 + world().rank());
    const Group everyone = Group::all(world().size());
    // Chunks that end within matrices, and within a member's part.
    const CollectivesOptions options{.chunk_bytes = 20'000, .link_chunk_bytes = 20'000};
    Collectives dense(*device, world(), *dense_transport, thread, everyone, options);
    Collectives replicas(*device, world(), *replica_transport, thread, everyone, options);
    const auto make_store = [&] {
        auto store = std::make_unique<ParameterStore>(
            *device, parameters(wide_model()), precision == "f32" ? DType::F32 : DType::BF16, true,
            precision == "fp8" || precision == "packed" ? LinearPrecision::Fp8
                                                        : LinearPrecision::AsActivations);
        if (const auto choice = testing::direct_choice(*device); choice && precision == "direct")
            store->use_products(*choice);
        if (precision == "packed" && fp8::why_not(*device, fp8::Variant::Packed).empty()) {
            store->use_products(testing::packed_choice());
            testing::wipe_packed(*store, kExpertLayer);
        }
        return store;
    };
    const auto whole = make_store(), shared = make_store();
    const Ranges ranges = layer_ranges(in_stored_order(parameters(wide_model())));
    Ranges buckets = gradient_buckets(ranges, 0);
    const auto members = static_cast<std::uint64_t>(world().size());
    Sharing(members, members).share_out(buckets, ranges);
    const CopyHolder rank{world().rank()};
    Optimizer of_everything(*whole, {}), of_a_part(*shared, update_parts(buckets, rank, rank), {});
    for (const auto& [store, optimizer] :
         {std::pair(whole.get(), &of_everything), std::pair(shared.get(), &of_a_part)})
        store->initialise(3, [&](std::uint64_t first, std::span<const float> values) {
            optimizer->upload_masters(first, values);
        });
    WeightGathering gathering(*shared, buckets, dense, replicas);
    for (std::uint64_t step = 1; step <= 2; ++step) {
        const auto gradients = test::random_f32(whole->num_elements(), 4 + step);
        for (const ParameterStore* store : {whole.get(), shared.get()})
            device->upload(store->flat_gradients().buffer, std::span<const float>(gradients));
        of_everything.update(step, 0.1, 1);
        of_a_part.update(step, 0.1, 1);
        gathering.begin(std::chrono::seconds(30));
        device->wait_idle();
        const auto expected = read_by_layers(*device, *whole);
        const auto actual = read_by_layers(*device, *shared);
        ALL_RANKS_TRUE(actual == expected);
    }
    // Moments of what a rank updates; and of all when the parts have been gathered, as masters.
    bool right = true;
    std::uint64_t divided = 0;
    for (const Parameter& parameter : shared->all()) {
        if (!parameter.info.trainable())
            continue;
        const Share mine = of_a_part.updated(parameter);
        divided += mine.count > 0 && mine.count < parameter.info.size() ? 1 : 0;
        for (const Parted what : kMoments) {
            const auto whole_moments = of_everything.download(parameter, what);
            right = right && whole_moments.size() == parameter.info.size() &&
                    std::ranges::equal(of_a_part.download(parameter, what),
                                       std::span(whole_moments).subspan(mine.first, mine.count));
        }
        right = right && (mine.count == parameter.info.size() || members > 1);
        right = right && of_a_part.stands_for(parameter) == (mine.count > 0 && mine.first == 0);
    }
    ALL_RANKS_TRUE(right);
    ALL_RANKS_TRUE(divided > 0 || members != 2); // more: some have whole ones alone
    for (const Parted what : {Parted::Masters, Parted::FirstMoments, Parted::SecondMoments}) {
        of_everything.replace_gradients(what);
        of_a_part.replace_gradients(what);
        gather_parts(shared->flat_gradients(), buckets, dense, replicas);
        device->wait_idle();
        for (const Parameter& parameter : shared->all())
            right = right && (!parameter.info.trainable() ||
                              shared->download_gradient(parameter.info.name) ==
                                  whole->download_gradient(parameter.info.name));
        ALL_RANKS_TRUE(right);
    }
}

INSTANTIATE_TEST_SUITE_P(Precisions, WeightGatheringOf,
                         ::testing::Values("f32", "bf16", "direct", "fp8", "packed"),
                         [](const auto& of) { return std::string(of.param); });

} // namespace
} // namespace bellows
