// SPDX-License-Identifier: MIT
// That a step's gradients are cleared piece by piece ahead of the nodes that wait for an exchange,
// and all of them in any case.

#include "train/gradient_clearing.hpp"

#include "support/compare.hpp"
#include "support/small_run.hpp"
#include "support/test_device.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace bellows {
namespace {

/// Of a letter each: c computes, s beside the exchange before it, x exchanges.
std::vector<Node> nodes_of(const std::string& kinds) {
    std::vector<Node> nodes;
    for (const char kind : kinds) {
        Node node;
        node.resource = kind == 'x' ? NodeResource::Exchange : NodeResource::Compute;
        node.beside_exchange = kind == 's';
        nodes.push_back(node);
    }
    return nodes;
}

std::vector<const Node*> pointers_to(const std::vector<Node>& nodes) {
    std::vector<const Node*> pointers;
    for (const Node& node : nodes)
        pointers.push_back(&node);
    return pointers;
}

std::vector<std::size_t> behind(const std::string& kinds) {
    const std::vector<Node> nodes = nodes_of(kinds);
    return nodes_behind_exchanges(pointers_to(nodes));
}

TEST(GradientClearing, FindsWhatWaitsForAnExchange) {
    using Indices = std::vector<std::size_t>;
    EXPECT_EQ(behind("ccxscxccxscxc"), (Indices{4, 6, 10, 12})) << "two layers and the head";
    EXPECT_EQ(behind("ccxsx"), Indices{});
    EXPECT_EQ(behind("sc"), Indices{}) << "beside nothing";
    EXPECT_EQ(behind("xxc"), Indices{2});
    EXPECT_EQ(behind(""), Indices{});
}

TEST(GradientClearing, ClearsAllOfThem) {
    const auto device = testing::make_device(testing::test_options());
    ParameterStore store(*device, parameters(small_run().model), DType::F32);
    const std::vector<float> ones(store.num_elements(), 1);
    for (const std::string kinds : {"ccxscxccxscxc", "ccc"}) {
        const std::vector<Node> nodes = nodes_of(kinds);
        GradientClearing clearing(store, pointers_to(nodes));
        for (const std::size_t until : {std::size_t{0}, kinds.size() / 2, kinds.size()}) {
            device->upload(store.flat_gradients().buffer, std::span<const float>(ones));
            const auto left = [&] {
                device->wait_idle();
                const auto values =
                    testing::read_back<float>(*device, store.flat_gradients().buffer);
                return std::count(values.begin(),
                                  values.begin() + static_cast<std::ptrdiff_t>(ones.size()), 1.0f);
            };
            clearing.begin();
            for (std::size_t node = 0; node < until; ++node)
                clearing.before(node, TimePoint{});
            if (until == kinds.size() / 2 &&
                nodes_behind_exchanges(pointers_to(nodes)).size() > 1) {
                EXPECT_GT(left(), 0) << "a piece at a time";
                EXPECT_LT(left(), static_cast<std::ptrdiff_t>(ones.size()));
            }
            clearing.finish();
            EXPECT_EQ(left(), 0) << kinds << " from node " << until;
        }
    }
}

} // namespace
} // namespace bellows
