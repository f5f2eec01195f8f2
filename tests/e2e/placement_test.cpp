// SPDX-License-Identifier: MIT
// `train --eplb-every`: experts come to other ranks while a run goes on, and its losses stay what
// they are without that; what has placed them serves a resumed run with other ranks.
#include "e2e/runs.hpp"

#include <bellows/checkpoint/checkpoint.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

struct Layout {
    const char* name;
    Flags flags;
};

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
    return out << layout.name;
}

Flags operator+(Flags flags, const Flags& more) {
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
}

/// Eight experts in each of two layers; a token's sum does not depend on where its experts are.
class Placement : public testing::Test {
protected:
    Placement() {
        std::string config = bellows::content_of(workspace_.config());
        for (const auto& [from, to] :
             {std::pair("routed_experts = 4", "routed_experts = 8"),
              std::pair("[train]\n",
                        "[train]\nexpert_sums = \"per_choice\"\nkeep_checkpoints = 9\n")})
            config.replace(config.find(from), std::string(from).size(), to);
        workspace_.write("small.toml", config);
    }
    Workspace workspace_;
};

class PlacementOf : public Placement, public testing::WithParamInterface<Layout> {};

/// The moves that metrics.jsonl names, by step.
std::vector<std::size_t> moves_of(const fs::path& run, std::uint64_t ranks) {
    std::vector<std::size_t> moves;
    const std::string text = bellows::content_of(run / "metrics.jsonl");
    for (std::size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
        const auto json = nlohmann::json::parse(text.substr(at, end - at));
        moves.push_back(0);
        if (!json.contains("moves"))
            continue;
        for (const auto& move : json.at("moves")) {
            ++moves.back();
            EXPECT_TRUE(move.at("layer") == 1 || move.at("layer") == 2) << move;
            EXPECT_LT(move.at("expert"), 8) << move;
            EXPECT_LT(move.at("from"), ranks) << move;
            EXPECT_LT(move.at("to"), ranks) << move;
            EXPECT_NE(move.at("from"), move.at("to")) << move;
        }
    }
    return moves;
}

} // namespace

TEST_P(PlacementOf, MovesExpertsAndKeepsTheLosses) {
    const Flags flags = GetParam().flags + Flags{"--steps", "4"};
    const fs::path plain = workspace_.train("plain", flags);
    const fs::path placed = workspace_.train("placed", flags + Flags{"--eplb-every", "2"});
    EXPECT_EQ(steps_of(placed).size(), 4u);
    EXPECT_EQ(printed_steps(placed), printed_steps(plain));
    EXPECT_TRUE(same_tensors(placed, plain));
    EXPECT_EQ(moves_of(plain, 4), std::vector<std::size_t>(4, 0));
    const bool all = GetParam().name == std::string("ep4");
    const auto moves = moves_of(placed, all ? 4 : 2);
    EXPECT_TRUE(moves[0] == 0 && moves[1] == 0 && moves[3] == 0) << "not behind a second step";
    EXPECT_GT(moves[2], 0u) << "no test of what it is for";
    const std::string picture = bellows::content_of(placed / "experts.svg");
    EXPECT_NE(picture.find("<svg"), std::string::npos);
    EXPECT_NE(picture, bellows::content_of(plain / "experts.svg")) << "ranks and moves show";
}

INSTANTIATE_TEST_SUITE_P(Layouts, PlacementOf,
                         testing::Values(Layout{"ep4", {"--ranks", "4"}},
                                         Layout{"dualpipe_ep2_fp8",
                                                {"--ranks", "4", "--pp", "2", "--ep", "2",
                                                 "--pipeline", "dualpipe", "--micro-batches", "4",
                                                 "--precision", "fp8"}}),
                         [](const auto& layout) { return std::string(layout.param.name); });

// Two ranks take over from four, at a step with and at one without loads since the placement; one
// rank without slots, too. They place the experts at once by the loads that were saved.
TEST_F(Placement, GoesOnWithOtherRanks) {
    const Flags slots = {"--eplb-every", "2", "--eplb-slots", "12"};
    const fs::path whole = workspace_.train(
        "whole", Flags{"--ranks", "4", "--steps", "7", "--checkpoint-every", "1"} + slots);
    const auto expected = steps_of(whole);
    ASSERT_EQ(expected.size(), 7u);
    struct Case {
        const char* name;
        std::uint64_t from;
        Flags flags;
        std::uint64_t ranks, slots_of_rank; ///< that its checkpoints place experts in; 0: none
    };
    const Case cases[] = {
        {"ep2", 4, {"--ranks", "2"}, 2, 6},
        {"ep2-of-4-plain", 3, {"--ranks", "4", "--ep", "2", "--eplb-slots", "0"}, 2, 4},
        {"one", 4, {"--ranks", "1", "--eplb-every", "0", "--eplb-slots", "0"}, 0, 0},
    };
    for (const Case& c : cases) {
        SCOPED_TRACE(c.name);
        const fs::path from = whole / "checkpoints" / ("step-" + std::to_string(c.from));
        const fs::path out = workspace_.path() / c.name;
        const std::uint64_t steps = c.from + 2;
        const Finished resumed =
            workspace_.bellows(Flags{"train", "--resume", from.string(), "--out", out.string(),
                                     "--steps", std::to_string(steps), "--checkpoint-every", "1"} +
                               c.flags);
        ASSERT_EQ(resumed.exit_code, 0) << resumed.out << resumed.errors;
        const auto got = steps_of(out);
        ASSERT_EQ(got.size(), 2u);
        for (std::size_t i = 0; i < got.size(); ++i) {
            const double reference = expected[c.from + i].loss;
            EXPECT_EQ(got[i].step, c.from + i + 1);
            EXPECT_LE(std::abs(got[i].loss - reference), (i == 0 ? 1e-5 : 1e-3) * reference)
                << got[i].printed << ", the whole run has " << reference;
        }
        const auto saved = bellows::Checkpoint::open(from).state().experts;
        const auto state =
            bellows::Checkpoint::open(out / "checkpoints" / ("step-" + std::to_string(c.from + 1)))
                .state()
                .experts;
        ASSERT_EQ(saved.placements.size(), 2u);
        ASSERT_EQ(state.placements.size(), c.ranks > 0 ? 2u : 0u);
        for (const auto& [layer, placement] : state.placements) {
            EXPECT_EQ(placement.num_ranks, c.ranks);
            EXPECT_EQ(placement.slots_of_rank, c.slots_of_rank);
            EXPECT_NE(placement, bellows::plain_placement(8, c.ranks, c.slots_of_rank));
            if (c.from % 2 == 0) { // no placement since
                EXPECT_EQ(state.placed_by.at(layer), saved.placed_by.at(layer));
            }
        }
    }
}
