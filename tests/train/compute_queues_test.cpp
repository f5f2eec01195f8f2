// SPDX-License-Identifier: MIT
// Which queue computes what in a trainer's step, where a device has one for each role; and that the
// step is the same there.
#include "support/small_run.hpp"
#include "support/test_device.hpp"

#include <bellows/train/trainer.hpp>

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

namespace bellows {
namespace {

/// Queues of the nodes that compute, by the ops' first two letters: "F0", "I1", "W1".
using Queues = std::map<std::string, std::set<std::string>>;

struct Step {
    double loss = 0;
    Queues queues;
    Queues weight_gradients; ///< the same by node
    Queues of_update;        ///< and of what else a step does to gradients and weights
};

Step step_of(const char* pipeline, bool roles_apart) {
    DeviceOptions options = testing::test_options();
    options.roles_apart = roles_apart;
    options.trace = true;
    const auto device = testing::make_device(options);
    World world = World::single();
    RunConfig run = small_run();
    run.train.pipeline = parse_schedule_kind(pipeline);
    run.train.micro_batches = 4;
    Trainer trainer(*device, world, run, {});
    Step step;
    trainer.step(0, fill_sequence);
    device->wait_idle();
    device->take_trace();
    step.loss = trainer.step(1, fill_sequence).loss;
    device->wait_idle();
    for (const TraceEvent& event : device->take_trace()) {
        if (event.category == "AdamW" || event.category == "gradient norm" ||
            event.category == "clear gradients")
            step.of_update[event.category].insert(event.lane);
        if (!event.is_job() && event.op.size() > 2 && event.by.empty() &&
            event.category.ends_with(")") && !event.category.starts_with("DISPATCH") &&
            !event.category.starts_with("COMBINE"))
            step.queues[event.op.substr(0, 2)].insert(event.lane);
        if (event.category.ends_with("(W)"))
            step.weight_gradients[event.category].insert(event.lane);
    }
    return step;
}

/// second: where phase 1 computes.
void expect_queues(const char* pipeline, const char* second) {
    const Step apart = step_of(pipeline, true);
    EXPECT_EQ(apart.queues, (Queues{{"F0", {"compute"}},
                                    {"I0", {"compute"}},
                                    {"F1", {second}},
                                    {"I1", {second}},
                                    {"W0", {"compute_deferred"}}, // of a stage without experts
                                    {"W1", {"compute_deferred", "compute_deferred_beside"}}}));
    // Experts' weight gradients beside all others.
    EXPECT_EQ(apart.weight_gradients.at("MLP(W)"),
              (std::set<std::string>{"compute_deferred_beside"}));
    for (const auto& [node, queues] : apart.weight_gradients) {
        if (node != "MLP(W)") {
            EXPECT_EQ(queues, (std::set<std::string>{"compute_deferred"})) << node;
        }
    }
    const std::set<std::string> deferred = {"compute_deferred"};
    EXPECT_EQ(
        apart.of_update,
        (Queues{{"AdamW", deferred}, {"gradient norm", deferred}, {"clear gradients", deferred}}));
    EXPECT_EQ(apart.loss, step_of(pipeline, false).loss);
}

TEST(ComputeQueues, OneForEachWayAndTwoForWeightGradients) {
    expect_queues("dualpipev", "compute_beside");
}

TEST(ComputeQueues, PhasesOfOneWayShareOne) {
    expect_queues("zb-v", "compute");
}

} // namespace
} // namespace bellows
