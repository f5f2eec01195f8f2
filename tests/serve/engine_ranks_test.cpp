// SPDX-License-Identifier: MIT
// Ranks that share a model's experts, each with requests of its own: with `exact` every answer has
// the bits that one rank gives alone, whoever has nothing to do.
#include "serve/some_requests.hpp"
#include "support/hf_reference.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"

#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/serve/engine.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::Finished;
using testing::hf_model;
using testing::small;
using testing::some_requests;
using testing::world;

/// Steps as often as all ranks do.
std::vector<Finished> run(Engine& engine, const std::vector<Request>& requests) {
    std::vector<RequestId> ids;
    for (const Request& request : requests)
        ids.push_back(engine.submit(request));
    std::vector<Finished> all(ids.size());
    for (int step = 0; engine.step(); ++step) {
        if (step == 10000)
            throw Error(ErrorCode::Internal, "the requests do not end");
        for (std::size_t i = 0; i < ids.size(); ++i)
            if (all[i].reason == FinishReason::None)
                all[i].add(engine.poll(ids[i]));
    }
    return all;
}

/// Those of a rank: every so-many-th of them.
std::vector<Request> share(const std::vector<Request>& all, int rank, int ranks) {
    std::vector<Request> mine;
    for (std::size_t i = 0; i < all.size(); ++i)
        if (static_cast<int>(i) % ranks == rank)
            mine.push_back(all[i]);
    return mine;
}

class EngineRanks : public ::testing::TestWithParam<std::string> {};

TEST_P(EngineRanks, GiveTheBitsOfOneRank) {
    const int rank = world().rank(), size = world().size();
    for (const Precision precision : {Precision::F32, Precision::BF16, Precision::FP8}) {
        SCOPED_TRACE(static_cast<int>(precision));
        EngineOptions options = small(precision);
        Engine alone(testing::test_options(), hf_model(GetParam()), options);
        const std::vector<Request> all = some_requests(alone.model().vocabulary);
        // All of them have some; the last one has none; only the last one has some.
        const std::vector<Request> of_all = share(all, rank, size),
                                   but_last = rank + 1 < size ? share(all, rank, size - 1)
                                                              : std::vector<Request>(),
                                   only_last =
                                       rank + 1 == size ? share(all, 1, 4) : std::vector<Request>();
        options.world = &world();
        options.exchange_tokens = 24; // Of 64 rows there are halves.
        options.token_budget = 48;
        if (GetParam() == "v3-mtp") // drafts change no answer
            options.draft = DraftKind::Mtp;
        Engine shared(testing::test_options(), hf_model(GetParam()), options);
        for (const auto& requests : {of_all, but_last, only_last}) {
            const bool same = run(shared, requests) == run(alone, requests);
            ALL_RANKS_TRUE(same);
        }
        ALL_RANKS_TRUE(shared.counters().blocks.used == 0);
        ALL_RANKS_TRUE((shared.counters().drafted > 0) == (options.draft == DraftKind::Mtp));
    }
}

INSTANTIATE_TEST_SUITE_P(Some, EngineRanks, ::testing::Values("v3-mtp", "v3", "qwen3-moe", "llama"),
                         testing::hf_model_name);

/// Of each layer another permutation of the experts over the ranks, and replicas in two more slots
/// of each rank, where it lacks experts: else these are free.
std::vector<std::vector<std::int32_t>> some_placement(const ModelConfig& model, int ranks) {
    const auto experts = static_cast<std::int32_t>(model.routed_experts);
    const std::int32_t slots = (experts + ranks - 1) / ranks + 2;
    std::vector<std::vector<std::int32_t>> tables;
    for (std::uint64_t layer = 0; layer < model.moe_layers(); ++layer) {
        std::vector<std::int32_t>& table = tables.emplace_back(ranks * slots, -1);
        const auto expert_of = [&](std::int32_t i) {
            return (5 * i + 3 * static_cast<std::int32_t>(layer)) % experts;
        };
        for (std::int32_t i = 0; i < experts; ++i)
            table[static_cast<std::size_t>(i % ranks * slots + i / ranks)] = expert_of(i);
        for (std::int32_t rank = 0; rank < ranks; ++rank) {
            const auto own = std::span(table).subspan(static_cast<std::size_t>(rank * slots),
                                                      static_cast<std::size_t>(slots));
            for (std::int32_t i = rank + 1; i < experts; ++i)
                if (const auto place = std::ranges::find(own, -1);
                    place != own.end() && std::ranges::find(own, expert_of(i)) == own.end())
                    *place = expert_of(i);
        }
    }
    return tables;
}

// Codes of a folder, and random weights: a replica has those of its expert.
TEST(EngineRanks, GiveTheBitsOfOneRankInAnyPlacement) {
    struct Case {
        Precision precision;
        const char* model; ///< null: random weights
    };
    for (const Case& c : {Case{Precision::FP8, "v3-fp8"}, Case{Precision::F32, nullptr}}) {
        SCOPED_TRACE(c.model == nullptr ? "random" : c.model);
        EngineOptions options = small(c.precision);
        ModelConfig shape = HfFolder(hf_model(c.model == nullptr ? "v3" : c.model)).config().model;
        if (c.model == nullptr)
            shape.layers = shape.dense_layers + 3;
        const auto make = [&] {
            return c.model == nullptr ? Engine(testing::test_options(), shape, 3, options)
                                      : Engine(testing::test_options(), hf_model(c.model), options);
        };
        Engine alone = make();
        options.world = &world();
        options.exchange_tokens = 24;
        options.placement = some_placement(shape, world().size());
        Engine shared = make();
        std::vector<Request> some = some_requests(shape.vocabulary);
        some.erase(some.begin() + 1, some.end() - 3);
        const std::vector<Request> mine = share(some, world().rank(), world().size());
        const std::vector<Finished> expected = run(alone, mine);
        const bool same = run(shared, mine) == expected;
        ALL_RANKS_TRUE(same);
        if (c.precision != Precision::F32)
            continue;
        // Sums in the order of ranks round otherwise.
        options.exact = false;
        Engine rounding = make();
        const std::vector<Finished> near = run(rounding, mine);
        bool close = true;
        for (std::size_t i = 0; i < mine.size(); ++i)
            close = close && near[i].tokens.front() == expected[i].tokens.front() &&
                    std::abs(near[i].log_probs.front() - expected[i].log_probs.front()) < 1e-3f;
        ALL_RANKS_TRUE(close);
    }
}

TEST(EngineRanks, RefusePlacementsThatCannotBe) {
    ModelConfig model = HfFolder(hf_model("v3")).config().model;
    model.layers = model.dense_layers + 2;
    const int ranks = world().size();
    const auto message_of = [&](const EngineOptions& options) {
        try {
            const Engine engine(testing::test_options(), model, 1, options);
        } catch (const Error& error) {
            return error.message();
        }
        return std::string();
    };
    EngineOptions good = small(Precision::F32);
    good.placement = some_placement(model, ranks);
    EXPECT_NE(message_of(good).find("set EngineOptions::world"), std::string::npos);
    good.world = &world();
    const auto refused = [&](const char* why, const auto& spoil) {
        EngineOptions bad = good;
        spoil(bad.placement);
        const std::string message = message_of(bad);
        EXPECT_NE(message.find(why), std::string::npos) << message;
    };
    refused("layers with experts", [](auto& tables) { tables.push_back(tables[0]); });
    refused("table 1 has", [](auto& tables) { tables[1].pop_back(); });
    refused("table 1 of placement of experts: expert 2 has no slot",
            [](auto& tables) { std::ranges::replace(tables[1], 2, -1); });
    refused("twice", [&](auto& tables) {
        const std::size_t of_last =
            tables[0].size() - tables[0].size() / static_cast<std::size_t>(ranks);
        tables[0].back() = tables[0][of_last];
    });
    if (ranks == 1)
        return;
    refused("do not divide", [](auto& tables) {
        for (auto& table : tables)
            table.push_back(-1);
    });
    // The last rank has another table.
    if (world().rank() + 1 == ranks)
        std::swap(good.placement[0][0], good.placement[0][1]);
    const std::string message = message_of(good);
    EXPECT_NE(message.find("must have the same model and options"), std::string::npos) << message;
}

TEST(EngineRanks, SayWhoHasOtherOptions) {
    if (world().size() == 1)
        GTEST_SKIP() << "for several ranks";
    EngineOptions options = small(Precision::F32);
    options.world = &world();
    options.exchange_tokens = world().rank() == 1 ? 32 : 16;
    std::string message;
    try {
        const Engine engine(testing::test_options(), hf_model("v3"), options);
    } catch (const Error& error) {
        message = error.message();
    }
    ALL_RANKS_TRUE(message.find("rank 1 has") != std::string::npos);
}

} // namespace
} // namespace bellows
