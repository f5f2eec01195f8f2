// SPDX-License-Identifier: MIT
// A rank is killed while four of them serve: the others go on. What needs its experts fails, or
// goes on without them and says so; what was written before has the bits of one rank.
#include "comm/launched.hpp"
#include "serve/some_requests.hpp"
#include "support/hf_reference.hpp"
#include "support/test_device.hpp"

#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/serve/engine.hpp>

#include <csignal>
#include <fstream>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::Finished;
using testing::hf_model;

constexpr int kRanks = 4, kCulprit = 1;
constexpr int kStepsBefore = 6; ///< that all ranks compute together
constexpr std::uint64_t kTokens = 20;

/// Two slots for each expert's share of a rank: what is a rank's in plain order stands on the next
/// one, too, but for the culprit's first expert of each layer where `lacks` says so. By layers in
/// another order.
std::vector<std::vector<std::int32_t>> placement_of_test(const ModelConfig& model, bool lacks) {
    const std::uint64_t experts = model.routed_experts, share = experts / kRanks;
    std::vector<std::vector<std::int32_t>> tables;
    for (std::uint64_t layer = 0; layer < model.moe_layers(); ++layer)
        for (std::uint64_t rank = 0; rank < kRanks; ++rank)
            for (std::uint64_t slot = 0; slot < 2 * share; ++slot) {
                const std::uint64_t of = (rank + kRanks - slot / share) % kRanks;
                const bool absent =
                    lacks && of == kCulprit && rank != kCulprit && slot % share == 0;
                if (rank + slot == 0)
                    tables.emplace_back();
                tables.back().push_back(
                    absent
                        ? -1
                        : static_cast<std::int32_t>((of * share + slot % share + layer) % experts));
            }
    return tables;
}

EngineOptions options_of_test() {
    EngineOptions options;
    options.precision = Precision::F32;
    options.max_context = 128;
    options.max_sequences = 4;
    options.token_budget = 32;
    options.exact = true;
    return options;
}

std::vector<Request> requests_of(int rank, std::uint64_t vocabulary) {
    std::vector<Request> requests;
    for (std::uint64_t i = 0; i < 2; ++i) {
        Request request;
        for (std::uint64_t t = 0; t < 5 + i; ++t)
            request.prompt.push_back(static_cast<std::uint32_t>(
                (7 * t + 3 * i + 11 * static_cast<std::uint64_t>(rank) + 1) % vocabulary));
        request.max_tokens = kTokens;
        requests.push_back(request);
    }
    return requests;
}

/// What a rank writes down of an answer: how it ended, and how many tokens came before it was
/// degraded, then the tokens.
void write_answers(const std::string& file, const std::vector<Finished>& answers,
                   const std::vector<std::size_t>& whole) {
    std::ofstream out(file);
    for (std::size_t i = 0; i < answers.size(); ++i) {
        out << static_cast<int>(answers[i].reason) << ' ' << whole[i] << ' '
            << answers[i].tokens.size();
        for (const std::uint32_t token : answers[i].tokens)
            out << ' ' << token;
        out << '\n';
    }
}

int serve(const std::string& model, const std::string& what, const std::string& folder) {
    int argc = 0;
    char** argv = nullptr;
    WorldOptions of_world;
    of_world.control.outlive_lost_ranks = true;
    World world = World::init(argc, argv, of_world);
    EngineOptions options = options_of_test();
    options.world = &world;
    options.allow_degraded = what == "degrade";
    if (what == "replicas" || what == "some replicas")
        options.placement =
            placement_of_test(HfFolder(hf_model(model)).config().model, what == "some replicas");
    Engine engine(testing::test_options(), hf_model(model), options);
    std::vector<RequestId> ids;
    // Once after the loss, too: a rank that is gone serves nobody.
    for (const Request& request : requests_of(world.rank(), engine.model().vocabulary))
        ids.push_back(engine.submit(request));
    std::vector<Finished> answers(ids.size());
    std::vector<std::size_t> whole(ids.size());
    for (int step = 0; step < 200; ++step) {
        if (step == kStepsBefore && world.rank() == kCulprit)
            ::raise(SIGKILL);
        if (!engine.step())
            break;
        for (std::size_t i = 0; i < ids.size(); ++i) {
            if (answers[i].reason != FinishReason::None)
                continue;
            const AnswerPart part = engine.poll(ids[i]);
            answers[i].add(part);
            if (!part.degraded)
                whole[i] = answers[i].tokens.size();
        }
    }
    write_answers(folder + "/answers" + std::to_string(world.rank()), answers, whole);
    const bool clean = engine.counters().blocks.used == 0;
    report_exit(world.rank(), clean ? 0 : 3, "blocks are left");
    return clean ? 0 : 3;
}

class LosingARank : public testing::Launched {
protected:
    struct Answer {
        Finished given;
        std::size_t whole = 0;
    };
    std::vector<Answer> answers_of(int rank) const {
        std::ifstream in(folder_ + "/answers" + std::to_string(rank));
        std::vector<Answer> answers;
        int reason = 0;
        for (Answer a; in >> reason >> a.whole; answers.push_back(a)) {
            a.given.reason = static_cast<FinishReason>(reason);
            std::size_t count = 0;
            in >> count;
            a.given.tokens.resize(count);
            for (std::uint32_t& token : a.given.tokens)
                in >> token;
        }
        return answers;
    }

    /// check(answer, the tokens of one rank) of every survivor's answers.
    template <class Check>
    void run_test(const std::string& model, const std::string& what, const Check& check) {
        (void)launch(kRanks, model, what, std::chrono::seconds(60));
        Engine alone(testing::test_options(), hf_model(model), options_of_test());
        for (int rank = 0; rank < kRanks; ++rank) {
            if (rank == kCulprit)
                continue;
            SCOPED_TRACE("rank " + std::to_string(rank));
            const std::vector<Answer> answers = answers_of(rank);
            const std::vector<Request> requests = requests_of(rank, alone.model().vocabulary);
            ASSERT_EQ(answers.size(), requests.size());
            for (std::size_t i = 0; i < requests.size(); ++i) {
                Finished expected;
                const RequestId id = alone.submit(requests[i]);
                while (alone.step())
                    expected.add(alone.poll(id));
                const Answer& a = answers[i];
                ASSERT_LE(a.whole, a.given.tokens.size());
                EXPECT_GE(a.whole, std::size_t{kStepsBefore - 2});
                for (std::size_t t = 0; t < a.whole; ++t)
                    EXPECT_EQ(a.given.tokens[t], expected.tokens[t]) << "token " << t;
                check(a, expected);
            }
        }
    }
};

TEST_F(LosingARank, FailsWhatNeedsItsExperts) {
    run_test("v3", "fail", [](const Answer& a, const Finished&) {
        EXPECT_EQ(a.given.reason, FinishReason::Failed);
        EXPECT_EQ(a.given.tokens.size(), a.whole) << "no token of a layer that lacked experts";
        EXPECT_LT(a.whole, kTokens);
    });
}

TEST_F(LosingARank, GoesOnDegradedAndSaysSo) {
    run_test("v3", "degrade", [](const Answer& a, const Finished&) {
        EXPECT_EQ(a.given.reason, FinishReason::Length);
        EXPECT_EQ(a.given.tokens.size(), kTokens);
        EXPECT_LT(a.whole, kTokens);
    });
}

TEST_F(LosingARank, LosesNothingThatOthersHaveReplicasOf) {
    run_test("v3", "replicas", [](const Answer& a, const Finished& expected) {
        EXPECT_EQ(a.given.reason, FinishReason::Length);
        EXPECT_EQ(a.whole, kTokens);
        EXPECT_EQ(a.given.tokens, expected.tokens);
    });
}

TEST_F(LosingARank, FailsWhatNeedsExpertsWithoutReplicas) {
    std::size_t failed = 0;
    run_test("v3", "some replicas", [&](const Answer& a, const Finished& expected) {
        failed += a.given.reason == FinishReason::Failed ? 1 : 0;
        if (a.given.reason == FinishReason::Failed)
            EXPECT_EQ(a.given.tokens.size(), a.whole);
        else
            EXPECT_EQ(a.given.tokens, expected.tokens);
    });
    EXPECT_GT(failed, 0u);
}

TEST_F(LosingARank, TouchesNothingOfModelsWithoutExperts) {
    run_test("llama", "fail", [](const Answer& a, const Finished& expected) {
        EXPECT_EQ(a.given.reason, FinishReason::Length);
        EXPECT_EQ(a.given.tokens, expected.tokens);
    });
}

} // namespace

int run_rank(const std::string& model, const std::string& what, const std::string& folder) {
    try {
        return serve(model, what, folder);
    } catch (const Error& error) {
        std::ofstream(folder + "/error") << error.message() << '\n';
        report_exit(launched_rank(), 1, error.message());
        return 1;
    }
}

} // namespace bellows

int main(int argc, char** argv) {
    if (argc == 5 && std::string(argv[1]) == "--rank")
        return bellows::run_rank(argv[2], argv[3], argv[4]);
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
