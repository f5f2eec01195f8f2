// SPDX-License-Identifier: MIT
// Which gradients are summed when; that none is summed before it is complete; and that the sums
// over the ranks are those of one sum over all, bit by bit, whatever the buckets and the shares.

#include "support/compare.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"
#include "train/sharded_optimizer.hpp"
#include "verify/reference/compare.hpp"

#include <bellows/train/trainer.hpp>

#include <algorithm>

namespace bellows {
namespace {

using testing::world;
using Ranges = std::vector<GradientRange>;

constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 60;

/// For readable failures.
std::string text_of(const Ranges& ranges) {
    std::string text;
    for (const GradientRange& range : ranges)
        text += std::to_string(range.first) + "+" + std::to_string(range.count) +
                (range.expert ? "x@" : "@") + std::to_string(range.ready_after) + " ";
    return text;
}

TEST(GradientBuckets, JoinNeighboursThatAreReadyOneAfterTheOther) {
    const Ranges ranges{{0, 100, false, 9},                        // embedding
                        {100, 60, false, 7},  {160, 40, false, 7}, // layer 0
                        {200, 100, false, 5},                      // layer 1
                        {300, 20, false, 3},                       // head
                        {320, 10, false, 7},  {330, 10, false, 5}, // gains, then a bias (none)
                        {350, 80, true, 6},   {430, 80, true, 4}}; // experts
    EXPECT_EQ(text_of(gradient_buckets(ranges, 0)),
              "300+20@3 430+80x@4 330+10@5 200+100@5 350+80x@6 320+10@7 100+100@7 0+100@9 ")
        << "what one node completes stays together";
    EXPECT_EQ(text_of(gradient_buckets(ranges, 400)),
              "200+120@5 350+160x@6 320+20@7 100+100@7 0+100@9 ");
    EXPECT_EQ(text_of(gradient_buckets(ranges, kUnlimited)), "350+160x@6 320+20@7 0+320@9 ");
    EXPECT_TRUE(gradient_buckets({}, 400).empty());
}

RunConfig small_run() {
    RunConfig run = load_run_config("tiny");
    run.train.batch = static_cast<std::uint64_t>(world().size()) * 2;
    run.train.micro_batches = 2;
    run.train.seq = 16;
    return run;
}

std::vector<std::vector<float>> gradients_of(const ParameterStore& parameters) {
    std::vector<std::vector<float>> all;
    for (const Parameter& parameter : parameters.all())
        if (parameter.info.trainable())
            all.push_back(parameters.download_gradient(parameter.info.name));
    return all;
}

/// Hands the weight-gradient nodes in one by one: none may add to a gradient that was said to be
/// ready, and every bucket holds what its own node adds to.
TEST(GradientBuckets, AreReadyWhenTheStageSaysSo) {
    const auto device = testing::make_device(testing::test_options());
    const RunConfig run = small_run();
    const auto ranks = static_cast<std::uint32_t>(world().size());
    Trainer trainer(*device, world(), run, {.pp = 1, .dp = ranks, .ep = ranks});
    trainer.step(0, [](std::uint64_t, std::uint64_t index, std::span<std::uint32_t> tokens) {
        for (std::size_t i = 0; i < tokens.size(); ++i)
            tokens[i] = static_cast<std::uint32_t>((index * 37 + i * i) % 250);
    });
    const ParameterStore& parameters = trainer.parameters();
    const Ranges ranges = gradient_ranges(parameters, trainer.stage());
    const auto& nodes = trainer.stage().nodes(0, NodeKind::WeightGradient);
    std::vector<bool> completes(nodes.size(), false);
    auto before = gradients_of(parameters);
    ASSERT_EQ(ranges.size(), before.size());
    for (std::size_t node = 0; node < nodes.size(); ++node) {
        nodes[node]->submit({});
        device->wait_idle();
        auto after = gradients_of(parameters);
        for (std::size_t i = 0; i < ranges.size(); ++i)
            if (after[i] != before[i]) {
                EXPECT_LE(node, ranges[i].ready_after) << nodes[node]->name;
                if (node == ranges[i].ready_after)
                    completes[node] = true;
            }
        before = std::move(after);
    }
    for (const GradientRange& range : ranges)
        EXPECT_TRUE(completes.at(range.ready_after)) << "later than need be: " << range.first;
    for (const Ranges& buckets :
         {gradient_buckets(ranges, 0), gradient_buckets(ranges, kGradientBucketBytes)}) {
        std::uint64_t elements = 0;
        for (const GradientRange& bucket : buckets)
            elements += bucket.count;
        std::uint64_t trained = 0;
        for (const GradientRange& range : ranges) {
            trained += range.count;
            EXPECT_EQ(std::count_if(buckets.begin(), buckets.end(),
                                    [&](const GradientRange& bucket) {
                                        return bucket.first <= range.first &&
                                               range.first + range.count <=
                                                   bucket.first + bucket.count &&
                                               bucket.ready_after >= range.ready_after &&
                                               bucket.expert == range.expert;
                                    }),
                      1);
        }
        EXPECT_EQ(elements, trained) << "biases are not sent";
    }
}

std::vector<float> gradient_of_rank(std::uint64_t elements, int rank) {
    return test::random_f32(elements, 40 + static_cast<std::uint64_t>(rank), -1, 1);
}

TEST(GradientReduction, TheBucketsDoNotChangeTheBits) {
    const auto device = testing::make_device(testing::test_options());
    const auto dense_transport = open_transport(world());
    const auto replica_transport = open_transport(world());
    HostThread thread(*device, "network");
    thread.delay_jobs(std::chrono::microseconds(300), 1 + world().rank());
    const Group everyone = Group::all(world().size());
    Collectives dense(*device, world(), *dense_transport, thread, everyone);
    Collectives replicas(*device, world(), *replica_transport, thread, everyone);
    const ModelConfig model = small_run().model;
    ParameterStore store(*device, parameters(model), DType::F32);
    const std::uint64_t elements = store.num_elements();
    std::vector<float> expected = gradient_of_rank(elements, 0);
    for (int rank = 1; rank < world().size(); ++rank) {
        const std::vector<float> part = gradient_of_rank(elements, rank);
        for (std::size_t i = 0; i < elements; ++i)
            expected[i] += part[i];
    }
    const Ranges ranges = layer_ranges(in_stored_order(parameters(model)));
    const std::vector<float> own = gradient_of_rank(elements, world().rank());
    const auto members = static_cast<std::uint64_t>(world().size());
    for (const auto& [least, shared] :
         {std::pair(std::uint64_t{0}, false), std::pair(std::uint64_t{200'000}, false),
          std::pair(kUnlimited, false), std::pair(std::uint64_t{200'000}, true),
          std::pair(kUnlimited, true)}) {
        device->upload(store.flat_gradients().buffer, std::span<const float>(own));
        Ranges buckets = gradient_buckets(ranges, least);
        if (shared)
            Sharing(members, members).share_out(buckets, ranges);
        GradientReduction reduction(store, buckets, dense, replicas);
        for (const int step : {0, 1}) { // ranks hand nodes in in different orders
            const bool ascending = (world().rank() + step) % 2 == 0;
            if (step == 1)
                device->upload(store.flat_gradients().buffer,
                               std::span<const float>(gradient_of_rank(elements, world().rank())));
            const std::size_t nodes = model.layers + 2;
            for (std::size_t node = 0; node < nodes; ++node)
                reduction.node_handed_in(ascending ? node : nodes - 1 - node, nodes);
            device->wait_idle();
            const auto actual = testing::read_back<float>(*device, store.flat_gradients().buffer);
            bool same = true;
            for (const GradientRange& bucket : buckets) {
                const Share mine = bucket.share(world().rank());
                for (std::uint64_t i = bucket.first; i < bucket.first + bucket.count; ++i) {
                    const bool summed = i >= mine.first && i < mine.first + mine.count;
                    same = same && actual[i] == (summed ? expected : own)[i];
                }
            }
            ALL_RANKS_TRUE(same);
        }
    }
}

} // namespace
} // namespace bellows
