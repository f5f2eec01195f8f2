// SPDX-License-Identifier: MIT
// Ranks that share a model's experts, each with requests of its own: with `exact` every answer has
// the bits that one rank gives alone, whoever has nothing to do.
#include "serve/some_requests.hpp"
#include "support/hf_reference.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"

#include <bellows/serve/engine.hpp>

#include <algorithm>
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
        Engine shared(testing::test_options(), hf_model(GetParam()), options);
        for (const auto& requests : {of_all, but_last, only_last}) {
            const bool same = run(shared, requests) == run(alone, requests);
            ALL_RANKS_TRUE(same);
        }
        ALL_RANKS_TRUE(shared.counters().blocks.used == 0);
    }
}

INSTANTIATE_TEST_SUITE_P(Some, EngineRanks,
                         ::testing::Values("v2-lite", "v3", "qwen3-moe", "llama"),
                         testing::hf_model_name);

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
