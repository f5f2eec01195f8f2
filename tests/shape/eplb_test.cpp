// SPDX-License-Identifier: MIT
// EPLB: the answers of DeepSeek's README, a second implementation from the definition, exhaustive
// search on small sizes, and what holds for every load.
#include <bellows/shape/eplb.hpp>

#include "shape/refusal.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace bellows {
namespace {

using Loads = std::vector<double>;
using Table = std::vector<std::int32_t>;

const Loads kFirst = {90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86};
const Loads kSecond = {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27};

/// The slots of each expert, in the order of its replicas.
std::vector<std::vector<std::uint64_t>> slots_by_replica(const BalancedExperts& result) {
    std::vector<std::vector<std::uint64_t>> slots;
    for (std::uint64_t expert = 0; expert < result.placement.num_experts; ++expert) {
        slots.push_back(slots_of_expert(result.placement, expert));
        std::ranges::sort(slots.back(), {},
                          [&](std::uint64_t slot) { return result.replica_of_slot[slot]; });
    }
    return slots;
}

double balance(const BalancedExperts& result, const Loads& loads) {
    return max_over_mean(rank_loads(result.placement, loads));
}

// --- known answers
// --------------------------------------------------------------------------------

TEST(Eplb, GivesTheAnswersOfTheOriginalByNodes) {
    const EplbOptions options{.groups = 4, .nodes = 2, .ranks = 8, .replicas = 16};
    const BalancedExperts first = rebalance_experts(kFirst, options);
    EXPECT_EQ(first.placement.expert_of_slot,
              (Table{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1}));
    EXPECT_EQ(replica_counts(first.placement),
              (std::vector<std::uint32_t>{1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1}));
    EXPECT_EQ(slots_by_replica(first),
              (std::vector<std::vector<std::uint64_t>>{
                  {12}, {15, 13}, {11}, {6}, {7, 5}, {0, 2}, {1}, {3}, {4}, {9}, {8, 10}, {14}}));
    EXPECT_NEAR(balance(first, kFirst), 1.2081, 5e-5);

    const BalancedExperts second = rebalance_experts(kSecond, options);
    EXPECT_EQ(second.placement.expert_of_slot,
              (Table{7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}));
    EXPECT_EQ(replica_counts(second.placement),
              (std::vector<std::uint32_t>{1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1}));
    EXPECT_EQ(slots_by_replica(second),
              (std::vector<std::vector<std::uint64_t>>{
                  {13}, {15, 11}, {8}, {14}, {9}, {10, 12}, {2, 4}, {0}, {6, 3}, {7}, {1}, {5}}));
    EXPECT_NEAR(balance(second, kSecond), 1.2422, 5e-5);
}

TEST(Eplb, GivesTheAnswersOfTheOriginalWithoutNodes) {
    // Three nodes do not divide four groups, nor eight ranks, and are left out of account.
    for (const EplbOptions& options : {EplbOptions{.ranks = 8, .replicas = 16},
                                       EplbOptions{4, 3, 8, 16}, EplbOptions{5, 3, 8, 16}}) {
        const BalancedExperts first = rebalance_experts(kFirst, options);
        EXPECT_EQ(first.placement.expert_of_slot,
                  (Table{10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1}));
        EXPECT_NEAR(balance(first, kFirst), 1.0726, 5e-5);
        const BalancedExperts second = rebalance_experts(kSecond, options);
        EXPECT_EQ(second.placement.expert_of_slot,
                  (Table{1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7}));
        EXPECT_NEAR(balance(second, kSecond), 1.1903, 5e-5);
    }
}

TEST(Eplb, GivesTheAnswersOfTheOriginalWithoutReplicas) {
    const EplbOptions options{.groups = 4, .nodes = 2, .ranks = 4, .replicas = 12};
    EXPECT_EQ(rebalance_experts(kFirst, options).placement.expert_of_slot,
              (Table{5, 3, 7, 4, 8, 6, 10, 11, 2, 1, 0, 9}));
    EXPECT_EQ(rebalance_experts(kSecond, options).placement.expert_of_slot,
              (Table{6, 9, 11, 8, 7, 10, 5, 3, 4, 1, 2, 0}));
}

TEST(Eplb, APackForEachItemKeepsTheirOrder) {
    const BalancedPacks packs = balanced_packing(Loads{3, 9, 1}, 3);
    EXPECT_EQ(packs.pack, (std::vector<std::uint32_t>{0, 1, 2}));
    EXPECT_EQ(packs.place, (std::vector<std::uint32_t>{0, 0, 0}));
    for (const bool distinct : {false, true}) {
        const EplbOptions options{.ranks = 5, .replicas = 5, .distinct = distinct};
        EXPECT_EQ(rebalance_experts(Loads{3, 9, 1}, options).placement.expert_of_slot,
                  (Table{0, 1, 2, 1, 1}));
    }
}

TEST(Eplb, PacksByHand) {
    // 9 → 0, 7 → 1, 6 → 1 (13), 5 → 0 (14), 4 → 1 (17, full), 1 → 0.
    const BalancedPacks packs = balanced_packing(Loads{6, 1, 9, 4, 5, 7}, 2);
    EXPECT_EQ(packs.pack, (std::vector<std::uint32_t>{1, 0, 0, 1, 0, 1}));
    EXPECT_EQ(packs.place, (std::vector<std::uint32_t>{1, 2, 0, 2, 1, 0}));
    const ExpertReplicas replicas = replicate_experts(Loads{10, 30, 20}, 6);
    EXPECT_EQ(replicas.expert, (std::vector<std::uint32_t>{0, 1, 2, 1, 2, 1}));
    EXPECT_EQ(replicas.replica, (std::vector<std::uint32_t>{0, 0, 0, 1, 1, 2}));
    EXPECT_EQ(replicas.count, (std::vector<std::uint32_t>{1, 3, 2}));
}

// --- a second implementation
// ----------------------------------------------------------------------

/// Experts of additional replicas: those of the highest load / k, k = 1, 2, 3, ... of all experts.
Table additional(const Loads& loads, std::size_t count) {
    std::vector<std::tuple<double, std::int32_t, std::size_t>> all;
    for (std::size_t expert = 0; expert < loads.size(); ++expert)
        for (std::size_t k = 1; k <= count; ++k)
            all.emplace_back(-loads[expert] / static_cast<double>(k), expert, k);
    std::ranges::sort(all);
    Table out;
    for (std::size_t i = 0; i < count; ++i)
        out.push_back(std::get<1>(all[i]));
    return out;
}

/// Items of each pack.
std::vector<Table> packed(const Loads& weights, std::size_t packs) {
    const std::size_t room = weights.size() / packs;
    std::vector<Table> out(packs);
    std::multimap<double, std::int32_t, std::greater<>> sorted;
    for (std::size_t i = 0; i < weights.size(); ++i)
        sorted.emplace(weights[i], i);
    std::set<std::pair<double, std::size_t>> open;
    for (std::size_t pack = 0; pack < packs; ++pack)
        open.emplace(0.0, pack);
    std::size_t next = 0;
    for (const auto& [weight, item] : sorted) {
        if (room == 1) {
            out[next].push_back(static_cast<std::int32_t>(next));
            ++next;
            continue;
        }
        const auto [load, pack] = *open.begin();
        open.erase(open.begin());
        out[pack].push_back(item);
        if (out[pack].size() < room)
            open.emplace(load + weight, pack);
    }
    return out;
}

/// The original's table from its definition, for sizes that it takes.
Table definition(const Loads& loads, std::size_t replicas, std::size_t groups, std::size_t nodes,
                 std::size_t ranks) {
    if (groups % nodes != 0)
        groups = nodes = 1;
    const std::size_t size = loads.size() / groups;
    Loads sums;
    for (std::size_t group = 0; group < groups; ++group)
        sums.push_back(
            std::accumulate(loads.begin() + static_cast<std::ptrdiff_t>(group * size),
                            loads.begin() + static_cast<std::ptrdiff_t>((group + 1) * size), 0.0));
    Table table;
    for (const Table& groups_here : packed(sums, nodes)) {
        Table experts; // of the node, then of its replicas
        for (const std::int32_t group : groups_here)
            for (std::size_t i = 0; i < size; ++i)
                experts.push_back(
                    static_cast<std::int32_t>(static_cast<std::size_t>(group) * size + i));
        Loads own;
        for (const std::int32_t expert : experts)
            own.push_back(loads[static_cast<std::size_t>(expert)]);
        for (const std::int32_t at : additional(own, replicas / nodes - own.size()))
            experts.push_back(experts[static_cast<std::size_t>(at)]);
        Loads shares;
        for (const std::int32_t expert : experts)
            shares.push_back(loads[static_cast<std::size_t>(expert)] /
                             static_cast<double>(std::ranges::count(experts, expert)));
        for (const Table& rank : packed(shares, ranks / nodes))
            for (const std::int32_t item : rank)
                table.push_back(experts[static_cast<std::size_t>(item)]);
    }
    return table;
}

struct Sizes {
    std::size_t experts, replicas, groups, nodes, ranks;
};
constexpr Sizes kOriginalSizes[] = {
    {8, 8, 1, 1, 4},   {8, 12, 2, 2, 4},  {12, 16, 4, 2, 8}, {12, 16, 3, 2, 8},   {16, 16, 4, 4, 8},
    {16, 24, 8, 2, 4}, {30, 40, 1, 1, 4}, {32, 40, 1, 1, 4}, {32, 40, 8, 4, 4},   {5, 40, 1, 1, 4},
    {24, 72, 6, 3, 9}, {64, 72, 8, 4, 8}, {7, 7, 1, 1, 7},   {256, 320, 8, 4, 32}};

TEST(Eplb, IsItsDefinition) {
    std::mt19937 random(3);
    for (const Sizes& s : kOriginalSizes)
        for (int round = 0; round < 20; ++round) {
            Loads loads(s.experts);
            for (double& load : loads) // whole numbers in half of the rounds: many are equal
                load = round % 2 == 0 ? static_cast<double>(random() % 20)
                                      : std::pow(static_cast<double>(random() % 1000 + 1), 1.7);
            const BalancedExperts result =
                rebalance_experts(loads, {s.groups, s.nodes, s.ranks, s.replicas});
            ASSERT_EQ(result.placement.expert_of_slot,
                      definition(loads, s.replicas, s.groups, s.nodes, s.ranks))
                << s.experts << " experts, " << s.replicas << " slots, round " << round;
        }
}

// --- exhaustive search
// ----------------------------------------------------------------------------

/// The lowest highest share of all ways to have so many replicas, at most `most` of an expert.
double best_share(const Loads& loads, std::size_t expert, std::size_t left, std::size_t most) {
    const std::size_t after = loads.size() - expert - 1;
    double best = std::numeric_limits<double>::infinity();
    for (std::size_t count = 1; count <= std::min(left - after, most); ++count) {
        const double own = loads[expert] / static_cast<double>(count);
        if (after == 0 && count == std::min(left, most))
            best = std::min(best, own);
        if (after > 0)
            best = std::min(best, std::max(own, best_share(loads, expert + 1, left - count, most)));
    }
    return best;
}

TEST(Eplb, ReplicasMakeTheHighestShareAsLowAsItCanBe) {
    std::mt19937 random(5);
    for (int round = 0; round < 400; ++round) {
        Loads loads(2 + random() % 4);
        for (double& load : loads)
            load = static_cast<double>(random() % 50);
        const std::size_t replicas = loads.size() + random() % 6;
        for (const std::size_t most : {std::size_t{99}, std::size_t{3}}) {
            const ExpertReplicas got = replicate_experts(loads, replicas, most);
            EXPECT_EQ(got.expert.size(), std::min(replicas, most * loads.size()));
            EXPECT_LE(*std::ranges::max_element(got.count), most);
            double highest = 0;
            for (std::size_t expert = 0; expert < loads.size(); ++expert)
                highest = std::max(highest, loads[expert] / got.count[expert]);
            EXPECT_DOUBLE_EQ(highest, best_share(loads, 0, replicas, most)) << "round " << round;
        }
    }
}

/// The lowest highest load of a rank over all tables that have every expert.
double best_rank(const Loads& loads, std::uint64_t ranks, std::uint64_t slots, bool distinct) {
    ExpertPlacement placement{loads.size(), ranks, slots, Table(ranks * slots, 0)};
    double best = std::numeric_limits<double>::infinity();
    while (true) {
        const auto counts = replica_counts(placement);
        if (std::ranges::find(counts, 0u) == counts.end() &&
            (!distinct || exchange_obstacle(placement).empty()))
            best = std::min(best, std::ranges::max(rank_loads(placement, loads)));
        std::size_t slot = 0; // the next table
        while (slot < placement.num_slots() &&
               ++placement.expert_of_slot[slot] == static_cast<std::int32_t>(loads.size()))
            placement.expert_of_slot[slot++] = 0;
        if (slot == placement.num_slots())
            return best;
    }
}

TEST(Eplb, IsNearTheBestOfAllTables) {
    std::mt19937 random(9);
    const Sizes sizes[] = {
        {3, 4, 1, 1, 2}, {4, 6, 1, 1, 3}, {4, 6, 1, 1, 2}, {4, 4, 1, 1, 2}, {3, 6, 1, 1, 3}};
    int best_found = 0, cases = 0;
    for (const Sizes& s : sizes)
        for (int round = 0; round < 12; ++round)
            for (const bool distinct : {false, true}) {
                Loads loads(s.experts);
                for (double& load : loads)
                    load = static_cast<double>(1 + random() % 100);
                const BalancedExperts result = rebalance_experts(
                    loads, {.ranks = s.ranks, .replicas = s.replicas, .distinct = distinct});
                const double got = std::ranges::max(rank_loads(result.placement, loads));
                const double best = best_rank(loads, s.ranks, s.replicas / s.ranks, distinct);
                EXPECT_GE(got, best * (1 - 1e-12));
                EXPECT_LE(got, best * 1.5) << s.experts << " experts on " << s.ranks << " ranks";
                best_found += got <= best * (1 + 1e-12);
                ++cases;
            }
    EXPECT_GT(best_found, cases / 2) << "of " << cases;
}

// --- what holds for every load
// --------------------------------------------------------------------

/// Any sizes, also those that the original does not take.
constexpr Sizes kAnySizes[] = {
    {32, 37, 1, 1, 4}, {30, 33, 1, 1, 4}, {30, 30, 1, 1, 4}, {10, 11, 1, 1, 3}, {7, 20, 1, 1, 8},
    {16, 23, 4, 2, 4}, {12, 17, 4, 4, 8}, {3, 5, 1, 1, 8},   {2, 100, 1, 1, 3}, {64, 70, 8, 4, 16},
    {4, 6, 1, 1, 3},   {9, 24, 3, 3, 6},  {6, 18, 1, 1, 4},  {5, 12, 1, 1, 3},  {8, 40, 2, 2, 4}};

Loads some_loads(std::mt19937& random, std::size_t experts, int round) {
    Loads loads(experts);
    for (double& load : loads)
        load = round % 4 == 0   ? 0.0
               : round % 4 == 1 ? static_cast<double>(random() % 10 == 0 ? random() % 9 : 0)
               : round % 4 == 2 ? static_cast<double>(random() % 5)
                                : std::exp(static_cast<double>(random() % 1000) / 150.0);
    return loads;
}

TEST(Eplb, DistinctReplicasWhateverTheSizes) {
    std::mt19937 random(21);
    for (const Sizes& s : kAnySizes)
        for (int round = 0; round < 40; ++round) {
            const Loads loads = some_loads(random, s.experts, round);
            const EplbOptions options{s.groups, s.nodes, s.ranks, s.replicas, true};
            const BalancedExperts result = rebalance_experts(loads, options);
            const ExpertPlacement& placement = result.placement;
            validate_for_exchange(placement);
            EXPECT_EQ(placement.slots_of_rank, (s.replicas + s.ranks - 1) / s.ranks);
            // As many replicas as asked for, but no more than can be distinct.
            std::size_t wanted = 0;
            for (std::size_t node = 0; node < s.nodes; ++node)
                wanted += std::min(s.replicas / s.nodes + (node < s.replicas % s.nodes),
                                   s.experts / s.nodes * (s.ranks / s.nodes));
            const auto counts = replica_counts(placement);
            EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::size_t{0}), wanted);
            // Slots that are used stand ahead of those that are free, replicas have an order.
            std::set<std::pair<std::int32_t, std::int32_t>> replicas;
            for (std::uint64_t slot = 0; slot < placement.num_slots(); ++slot) {
                const std::int32_t expert = placement.expert_of_slot[slot];
                const std::int32_t replica = result.replica_of_slot[slot];
                EXPECT_EQ(expert == kFreeSlot, replica == -1);
                if (expert == kFreeSlot) {
                    EXPECT_TRUE((slot + 1) % placement.slots_of_rank == 0 ||
                                placement.expert_of_slot[slot + 1] == kFreeSlot);
                    continue;
                }
                EXPECT_TRUE(replicas.emplace(expert, replica).second);
                EXPECT_LT(static_cast<std::uint32_t>(replica),
                          counts[static_cast<std::size_t>(expert)]);
            }
            // A group stays on one node.
            std::vector<std::set<std::uint64_t>> nodes_of_group(s.groups);
            for (std::uint64_t slot = 0; slot < placement.num_slots(); ++slot)
                if (placement.expert_of_slot[slot] != kFreeSlot)
                    nodes_of_group[static_cast<std::size_t>(placement.expert_of_slot[slot]) /
                                   (s.experts / s.groups)]
                        .insert(placement.rank_of(slot) / (s.ranks / s.nodes));
            for (const auto& nodes : nodes_of_group)
                EXPECT_EQ(nodes.size(), 1u);
            EXPECT_EQ(rebalance_experts(loads, options).placement, placement) << "deterministic";
        }
}

TEST(Eplb, AreDistinctUnaskedWhereTheOriginalHasNoAnswer) {
    std::mt19937 random(2);
    for (const Sizes& s : kAnySizes)
        for (int round = 0; round < 8 && s.replicas % s.ranks != 0; ++round) {
            const Loads loads = some_loads(random, s.experts, round);
            EplbOptions options{s.groups, s.nodes, s.ranks, s.replicas};
            const BalancedExperts result = rebalance_experts(loads, options);
            options.distinct = true;
            EXPECT_EQ(rebalance_experts(loads, options).placement, result.placement);
        }
    // The original puts both replicas of expert 1 on the last rank.
    const EplbOptions plain{.ranks = 8, .replicas = 16};
    EXPECT_NE(exchange_obstacle(rebalance_experts(kFirst, plain).placement), "");
    const EplbOptions distinct{.ranks = 8, .replicas = 16, .distinct = true};
    const BalancedExperts result = rebalance_experts(kFirst, distinct);
    EXPECT_EQ(exchange_obstacle(result.placement), "");
    EXPECT_LE(balance(result, kFirst), 1.15);
}

// Without loads the lightest rank is always the first one with room, which ends in a corner:
// {0, 1}, {2, 3}, {0} has room for the third replica of expert 0 only where there is one. Expert 2
// makes place.
TEST(Eplb, AnExpertMakesPlaceWhereTwoReplicasWouldMeet) {
    const BalancedExperts result =
        rebalance_experts(Loads(4, 0.0), {.ranks = 3, .replicas = 6, .distinct = true});
    EXPECT_EQ(result.placement.expert_of_slot, (Table{0, 1, 0, 3, 0, 2}));
    // With loads there is a choice: if the first expert that can move did so, the highest load
    // would be 4.5.
    const Loads loads = {2, 2, 2, 2, 3};
    const BalancedExperts loaded =
        rebalance_experts(loads, {.ranks = 3, .replicas = 9, .distinct = true});
    EXPECT_EQ(loaded.placement.expert_of_slot, (Table{3, 2, 0, 4, 2, 1, 4, 1, 0}));
    EXPECT_EQ(rank_loads(loaded.placement, loads), (std::vector<double>{4, 3.5, 3.5}));
}

TEST(Eplb, FollowsNamesOnlyWhereLoadsAreEqual) {
    std::mt19937 random(13);
    for (const Sizes& s : {Sizes{12, 16, 1, 1, 4}, Sizes{30, 37, 1, 1, 4}}) {
        Loads loads = some_loads(random, s.experts, 3);
        for (double& load : loads)
            load += static_cast<double>(random()) * 1e-12; // all differ
        std::vector<std::size_t> order(s.experts);
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::ranges::shuffle(order, random);
        Loads permuted;
        for (const std::size_t expert : order)
            permuted.push_back(loads[expert]);
        const EplbOptions options{.ranks = s.ranks, .replicas = s.replicas};
        Table renamed = rebalance_experts(permuted, options).placement.expert_of_slot;
        for (std::int32_t& expert : renamed)
            if (expert != kFreeSlot)
                expert = static_cast<std::int32_t>(order[static_cast<std::size_t>(expert)]);
        EXPECT_EQ(renamed, rebalance_experts(loads, options).placement.expert_of_slot);
    }
    // Equal loads: the experts in turn.
    EXPECT_EQ(
        rebalance_experts(Loads(6, 2.5), {.ranks = 3, .replicas = 6}).placement.expert_of_slot,
        (Table{0, 3, 1, 4, 2, 5}));
    const Loads equal(32, 7.0);
    for (const bool distinct : {false, true})
        EXPECT_EQ(balance(rebalance_experts(equal, {8, 4, 8, 32, distinct}), equal), 1.0);
}

// Loads of which few are above what a rank should have: no order of experts helps, replicas do.
TEST(Eplb, BalancesBetterThanBlocks) {
    std::mt19937 random(17);
    for (int round = 0; round < 20; ++round) {
        Loads loads = some_loads(random, 256, 3);
        const double mean = std::accumulate(loads.begin(), loads.end(), 0.0) / 32;
        for (int hot = 0; hot < 3; ++hot)
            loads[random() % 256] = 2 * mean;
        const auto balance_of = [&](const EplbOptions& options) {
            return balance(rebalance_experts(loads, options), loads);
        };
        const double plain = max_over_mean(rank_loads(plain_placement(256, 32), loads));
        const double placed = balance_of({.ranks = 32, .replicas = 256});
        EXPECT_GT(placed, 1.5);
        EXPECT_LT(placed, plain);
        EXPECT_LT(balance_of({.ranks = 32, .replicas = 288}), 1.02);
        EXPECT_LT(balance_of({.ranks = 32, .replicas = 288, .distinct = true}), 1.02);
        EXPECT_LT(balance_of({.ranks = 32, .replicas = 273}), 1.1) << "17 more, not one a rank";
    }
}

TEST(Eplb, SaysWhatDoesNotFit) {
    const auto of = [](const Loads& loads, const EplbOptions& options) {
        return refusal([&] { rebalance_experts(loads, options); });
    };
    const auto expect = [](const std::string& message, const std::string& part) {
        EXPECT_NE(message.find(part), std::string::npos) << message;
    };
    expect(of({}, {.replicas = 4}), "not of 0");
    expect(of({1, -1}, {.replicas = 2}), "expert 1 is -1");
    expect(of({1, std::nan("")}, {.replicas = 2}), "finite and at least 0");
    expect(of({1, 1e308, 1e308}, {.replicas = 3}), "divide them by their largest");
    expect(of({1, 2}, {.replicas = 1}), "2 experts need at least as many slots, not 1");
    expect(of({1, 2}, {.ranks = 0, .replicas = 2}), "at least 1, not 1, 1 and 0");
    expect(of({1, 2}, {.groups = 0, .replicas = 2}), "at least 1, not 0, 1 and 1");
    expect(of({1, 2}, {.nodes = 0, .replicas = 2}), "at least 1, not 1, 0 and 1");
    expect(of({1, 2}, {.ranks = 1u << 20, .replicas = (1u << 20) + 1}), "go beyond");
    expect(of({1, 2}, {.replicas = ~std::uint64_t{0}}), "go beyond");
    expect(of({1, 2, 3}, {.groups = 2, .nodes = 2, .ranks = 2, .replicas = 4}),
           "2 groups do not divide 3 experts");
    expect(of({1, 2, 3, 4}, {.groups = 2, .nodes = 2, .ranks = 3, .replicas = 6}),
           "2 nodes do not divide 3 ranks");
    EXPECT_NE(refusal([] { balanced_packing(Loads{1, 2, 3}, 2); }), "");
    EXPECT_NE(refusal([] { balanced_packing(Loads{1, 2, 3}, 0); }), "");
    EXPECT_NE(refusal([] { replicate_experts(Loads{1, 2, 3}, 2); }), "");
    EXPECT_NE(refusal([] { replicate_experts(Loads{1, 2, 3}, 3, 0); }), "");
}

} // namespace
} // namespace bellows
