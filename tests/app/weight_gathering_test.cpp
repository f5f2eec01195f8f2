// SPDX-License-Identifier: MIT
// That an update of which every rank does a part, and the gathering behind it, leave what one rank
// leaves that updates everything: all that layers read, bit by bit, in every precision; and who
// gets which part.

#include "app/update_parts.hpp"
#include "app/weight_gathering.hpp"

#include "small_run.hpp"
#include "support/bf16_products.hpp"
#include "support/compare.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"

#include <bellows/engine/error.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::world;
using Ranges = std::vector<GradientRange>;

TEST(ShareOut, GivesWholeMatricesByTheirMiddles) {
    const Ranges ranges{{0, 100, false, 1, true},  {100, 300, false, 1, true},
                        {400, 50, false, 1, true}, {450, 16, false, 1, false},
                        {466, 80, true, 1, true},  {546, 80, true, 1, true}};
    Ranges buckets{{0, 450, false, 1, true}, {450, 16, false, 1, false}, {466, 160, true, 1, true}};
    share_out(buckets, ranges, 3, 2);
    EXPECT_EQ(buckets[0].shares, (std::vector<std::uint64_t>{100, 300, 50}));
    EXPECT_TRUE(buckets[1].shares.empty()) << "gains";
    EXPECT_EQ(buckets[2].shares, (std::vector<std::uint64_t>{80, 80}));
    EXPECT_EQ(buckets[0].share(1).first, 100u);
    EXPECT_EQ(buckets[0].share(1).count, 300u);
    EXPECT_EQ(buckets[0].share(2).first, 400u);
    EXPECT_EQ(buckets[1].share(1).first, 450u);
    EXPECT_EQ(buckets[1].share(1).count, 16u);
    Ranges alone = buckets;
    for (GradientRange& bucket : alone)
        bucket.shares.clear();
    share_out(alone, ranges, 1, 1);
    EXPECT_TRUE(alone[0].shares.empty()) << "nobody to share with";
    // One matrix for many: nobody else has anything.
    Ranges one{{0, 100, false, 1, true}};
    share_out(one, ranges, 4, 1);
    EXPECT_EQ(one[0].shares, (std::vector<std::uint64_t>{0, 0, 100, 0}));
}

/// Everything that layers read of the weights, and the moments of one's own.
std::vector<std::byte> read_by_layers(Device& device, const ParameterStore& store) {
    std::vector<std::byte> all;
    const auto append = [&](const TensorView& view) {
        const auto bytes = testing::read_back<std::byte>(device, view.buffer);
        all.insert(all.end(), bytes.begin(),
                   bytes.begin() + static_cast<std::ptrdiff_t>(view.num_bytes()));
    };
    for (const Parameter& parameter : store.all()) {
        const bool expert_in_fp8 =
            parameter.quantized && parameter.info.kind == ParameterKind::Expert;
        if (!expert_in_fp8)
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
            precision == "fp8" ? LinearPrecision::Fp8 : LinearPrecision::AsActivations);
        if (const auto choice = testing::direct_choice(*device); choice && precision == "direct")
            store->use_products(*choice);
        store->initialise(3);
        return store;
    };
    const auto whole = make_store(), shared = make_store();
    Ranges ranges, buckets; // as of a stage with a node per layer
    for (std::size_t i = 0; i < shared->all().size(); ++i) {
        const Parameter& parameter = shared->all()[i];
        const std::uint64_t end =
            i + 1 < shared->all().size() ? shared->all()[i + 1].first : shared->num_elements();
        if (parameter.info.trainable())
            ranges.push_back({parameter.first, end - parameter.first,
                              parameter.info.kind == ParameterKind::Expert,
                              static_cast<std::size_t>(parameter.info.layer + 1),
                              parameter.info.weight_decay});
    }
    buckets = gradient_buckets(ranges, 0);
    const auto members = static_cast<std::uint64_t>(world().size());
    share_out(buckets, ranges, members, members);
    const CopyHolder rank{world().rank()};
    Optimizer of_everything(*whole, {}), of_a_part(*shared, update_parts(buckets, rank, rank), {});
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
    // Each matrix has one rank that updates it, which has its moments.
    bool right = true;
    for (const Parameter& parameter : shared->all()) {
        if (!parameter.info.trainable())
            continue;
        if (of_a_part.updates(parameter)) {
            for (const bool second : {false, true})
                right = right && of_a_part.download(parameter, second) ==
                                     of_everything.download(parameter, second);
            right = right && of_a_part.stands_for(parameter);
            continue;
        }
        right = right && parameter.info.weight_decay && members > 1;
        EXPECT_THROW(static_cast<void>(of_a_part.download(parameter, false)), Error);
    }
    ALL_RANKS_TRUE(right);
}

INSTANTIATE_TEST_SUITE_P(Precisions, WeightGatheringOf,
                         ::testing::Values("f32", "bf16", "direct", "fp8"),
                         [](const auto& of) { return std::string(of.param); });

} // namespace
} // namespace bellows
