// SPDX-License-Identifier: MIT

// Every form in which rows travel and arrive (all layouts; as they are, or quantised with either
// kind of scales; f32 and bf16; from device memory, or through the host in pieces as on GPUs; once
// per rank or once per node), to the bit: what is received, where, for whom; what comes back from
// the experts' own memory and from the caller's; both gradients.

#include "exchange_rig.hpp"

#include <atomic>
#include <chrono>
#include <thread>

namespace bellows {
namespace {

using testing::check_there_and_back;
using testing::world;
using Case = testing::ExchangeCase;
using Rig = testing::ExchangeRig;

class ExchangeForms : public ::testing::TestWithParam<Case> {};
class ExactSums : public ::testing::TestWithParam<Case> {};
class LowLatencyForms : public ::testing::TestWithParam<Case> {};

TEST_P(ExchangeForms, ThereAndBackAndBothGradients) {
    Rig rig(GetParam());
    for (int round = 0; round < 2; ++round)
        check_there_and_back(rig);
}

// What comes back is, to the bit, the sum along the tree over all experts, which knows no ranks.
TEST_P(ExactSums, DoNotDependOnWhoOwnsTheExperts) {
    Case c = GetParam();
    if (world().size() % 3 == 0)
        c.experts = 12; // aligned ranges of four or two
    Rig rig(c);
    const TensorView results = rig.caller_rows(GetParam().dtype, GetParam().hidden);
    const TensorView d_row_weights = rig.caller_rows(DType::F32, 1);
    for (int round = 0; round < 2; ++round) {
        rig.dispatch();
        ALL_RANKS_TRUE(rig.rows_arrived());
        ALL_RANKS_TRUE(rig.came_back(results, false));
        ALL_RANKS_TRUE(rig.came_back(results, true));
        ALL_RANKS_TRUE(rig.combined(results, true, 2));
        if (GetParam().low_latency)
            continue;
        ALL_RANKS_TRUE(rig.gradients_arrived());
        ALL_RANKS_TRUE(
            rig.gradients_came_back(results, d_row_weights.reshaped({rig.handle().capacity()})));
    }
}

// Two handles: while one's tokens are with their experts, the other's are on their way.
TEST_P(LowLatencyForms, StepsFlyUnderEachOther) {
    Rig rig(GetParam());
    const std::unique_ptr<ExchangeHandle> other = rig.exchange().create_handle("other");
    const TensorView results = rig.by_tokens()
                                   ? rig.handle().results()
                                   : rig.caller_rows(GetParam().dtype, GetParam().hidden);
    const TensorView other_results = rig.by_tokens() ? other->results() : results;
    rig.dispatch();
    ALL_RANKS_TRUE(rig.rows_arrived());
    ALL_RANKS_TRUE(rig.told());
    ALL_RANKS_TRUE(rig.came_back(results, false));
    const auto send = [&](ExchangeHandle& handle) {
        return rig.exchange().dispatch_send(handle, rig.x(), rig.ids(), rig.weights());
    };
    for (int round = 0; round < 3; ++round) {
        ExchangeHook first = send(rig.handle()), second = send(*other);
        first().wait();
        ALL_RANKS_TRUE(rig.rows_arrived());
        ExchangeHook back = rig.exchange().combine_send(rig.handle(), results, rig.out());
        second();
        back().wait();
        ALL_RANKS_TRUE(rig.summed(1));
        rig.write_results(other_results);
        rig.exchange().combine(*other, other_results, rig.out()).wait();
        ALL_RANKS_TRUE(rig.summed(1));
    }
}

TEST_P(LowLatencyForms, GoesOnWithoutAMaskedRank) {
    if (world().size() == 1)
        return;
    Rig rig(GetParam());
    check_there_and_back(rig);
    const std::set<int> without = Rig::others_than_0();
    rig.do_without(without);
    const std::vector<int> masked = rig.exchange().masked_ranks();
    ALL_RANKS_TRUE(std::set<int>(masked.begin(), masked.end()) == without);
    for (int round = 0; round < 2; ++round)
        check_there_and_back(rig);
    rig.do_without({});
    check_there_and_back(rig);
}

TEST_P(LowLatencyForms, UnmaskingLeavesEarlierCallsAsTheyAre) {
    if (world().size() == 1)
        return;
    Rig rig(GetParam());
    check_there_and_back(rig);
    rig.do_without(Rig::others_than_0());
    // The call is made, and its tokens are not there yet.
    std::atomic<bool> there{false};
    HostThread thread(rig.device(), "tokens");
    Lane lane = thread.add_lane("tokens");
    lane.post({.name = "tokens",
               .waits = {},
               .accesses = {{rig.x().buffer, Access::Write}},
               .step = [&](LaneContext&) { return there ? Progress::Done : Progress::Again; }});
    ExchangeHook hook =
        rig.exchange().dispatch_send(rig.handle(), rig.x(), rig.ids(), rig.weights());
    for (const int rank : Rig::others_than_0())
        rig.exchange().unmask_rank(rank);
    there = true;
    hook().wait();
    ALL_RANKS_TRUE(rig.rows_arrived());
    ALL_RANKS_TRUE(rig.told());
    rig.do_without({});
    check_there_and_back(rig);
}

// The others have not taken what rank 0 owes them when it has all that it waits for.
TEST_P(LowLatencyForms, AMaskThatFollowsAResultTakesNothingBack) {
    if (world().size() == 1)
        return;
    Case c = GetParam();
    c.hidden = 264; // records are not so small that they leave at once
    Rig rig(c);
    rig.dispatch();
    const TensorView results =
        rig.by_tokens() ? rig.handle().results() : rig.caller_rows(c.dtype, c.hidden);
    rig.write_results(results);
    ALL_RANKS_TRUE(rig.rows_arrived());
    ExchangeHook back = rig.exchange().combine_send(rig.handle(), results, rig.out());
    if (world().rank() != 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
    back().wait();
    for (int rank = 1; world().rank() == 0 && rank < world().size(); ++rank)
        rig.exchange().mask_rank(rank);
    ALL_RANKS_TRUE(rig.summed(1));
    for (int rank = 1; world().rank() == 0 && rank < world().size(); ++rank)
        rig.exchange().unmask_rank(rank);
    check_there_and_back(rig);
}

std::vector<Case> all_cases() {
    std::vector<Case> cases;
    for (const ExchangeLayout layout : {ExchangeLayout::ExpertMajor, ExchangeLayout::RankMajor})
        for (const DType dtype : {DType::F32, DType::BF16}) {
            cases.push_back({layout, dtype, false, fp8::ScaleRule::PowerOfTwo, 40});
            cases.push_back({layout, dtype, true, fp8::ScaleRule::PowerOfTwo, 264});
            cases.push_back({layout, dtype, true, fp8::ScaleRule::F32, 40});
            const bool codes = layout == ExchangeLayout::RankMajor;
            for (const bool over_mpi : {false, true})
                cases.push_back(
                    {layout, dtype, codes, fp8::ScaleRule::PowerOfTwo, 264, true, over_mpi});
            for (const bool staged : {false, true})
                cases.push_back({.layout = layout,
                                 .dtype = dtype,
                                 .codes = staged,
                                 .hidden = 264,
                                 .staged = staged,
                                 .ranks_per_node = 2});
            for (const bool staged : {false, true})
                cases.push_back({.layout = layout,
                                 .dtype = dtype,
                                 .codes = !staged,
                                 .hidden = 264,
                                 .staged = staged,
                                 .linked = true,
                                 .ranks_per_node = staged ? 2 : 0});
        }
    for (const bool staged : {false, true})
        cases.push_back({.dtype = DType::BF16,
                         .hidden = 264,
                         .staged = staged,
                         .ranks_per_node = staged ? 0 : 2,
                         .wide_sums = true});
    for (const DType dtype : {DType::F32, DType::BF16})
        for (const bool staged : {false, true})
            cases.push_back({.layout = ExchangeLayout::ExpertSlots,
                             .dtype = dtype,
                             .codes = staged == (dtype == DType::BF16),
                             .hidden = 264,
                             .staged = staged,
                             .linked = !staged,
                             .ranks_per_node = dtype == DType::BF16 ? 2 : 0,
                             .alignment = 1});
    cases.push_back({.layout = ExchangeLayout::ExpertSlots,
                     .dtype = DType::BF16,
                     .codes = true,
                     .scales = fp8::ScaleRule::F32,
                     .hidden = 264,
                     .staged = true,
                     .over_mpi = true,
                     .alignment = 1});
    // Records of some megabytes, in pieces that get smaller in the end.
    cases.push_back({.layout = ExchangeLayout::RankMajor,
                     .dtype = DType::BF16,
                     .hidden = 8192,
                     .staged = true,
                     .max_tokens = 400,
                     .piece_bytes = std::uint64_t{2} << 20});
    return cases;
}

std::vector<Case> exact_cases() {
    std::vector<Case> cases;
    for (const DType dtype : {DType::F32, DType::BF16})
        for (const bool staged : {false, true}) {
            const Case c{.dtype = dtype,
                         .hidden = staged ? 40u : 264u,
                         .staged = staged,
                         .experts = 16,
                         .top_k = 6,
                         .wide_sums = true,
                         .exact = true};
            for (const int ranks_per_node : {0, 2}) {
                cases.push_back(c);
                cases.back().ranks_per_node = ranks_per_node;
                cases.back().linked = staged && ranks_per_node == 0;
            }
            cases.push_back(c);
            cases.back().low_latency = true;
        }
    return cases;
}

std::vector<Case> low_latency_cases() {
    std::vector<Case> cases;
    for (const ExchangeLayout layout : {ExchangeLayout::ExpertMajor, ExchangeLayout::RankMajor})
        for (const DType dtype : {DType::F32, DType::BF16})
            for (const bool codes : {false, true})
                for (const bool staged : {false, true})
                    cases.push_back({.layout = layout,
                                     .dtype = dtype,
                                     .codes = codes,
                                     .hidden = 264,
                                     .staged = staged,
                                     .linked = codes == staged,
                                     .low_latency = true});
    return cases;
}

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
    const Case& c = info.param;
    std::string name = c.layout == ExchangeLayout::RankMajor     ? "RankMajor"
                       : c.layout == ExchangeLayout::ExpertSlots ? "ExpertSlots"
                                                                 : "ExpertMajor";
    if (c.low_latency)
        name += "LowLatency";
    name += c.dtype == DType::BF16 ? "Bf16" : "F32";
    if (c.codes)
        name += c.scales == fp8::ScaleRule::F32 ? "CodesF32Scales" : "Codes";
    if (c.ranks_per_node > 0)
        name += "ByNode";
    if (c.staged)
        name += c.over_mpi ? "StagedOverMpi" : "Staged";
    if (c.wide_sums)
        name += "WideSums";
    if (c.max_tokens > Case().max_tokens)
        name += "LargePieces";
    return name + (c.linked ? "Linked" : "");
}

INSTANTIATE_TEST_SUITE_P(All, ExchangeForms, ::testing::ValuesIn(all_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(All, ExactSums, ::testing::ValuesIn(exact_cases()), name_of);
INSTANTIATE_TEST_SUITE_P(All, LowLatencyForms, ::testing::ValuesIn(low_latency_cases()), name_of);

TEST(ExchangeByNode, ATokenTravelsOncePerNode) {
    Rig rig({.layout = ExchangeLayout::ExpertMajor,
             .dtype = DType::BF16,
             .codes = false,
             .hidden = 512,
             .ranks_per_node = 2,
             .experts = 16,
             .top_k = 6,
             .absent = 10});
    const std::uint64_t before = rig.exchange().stats().bytes_sent_to_nodes;
    rig.dispatch();
    ALL_RANKS_TRUE(rig.rows_arrived());
    const std::uint64_t sent = rig.exchange().stats().bytes_sent_to_nodes - before;
    const std::uint64_t records = rig.tokens_to_other_nodes();
    const std::uint64_t row = 512 * 2 + 6 * 8; // elements, ids and weights
    ALL_RANKS_TRUE(rig.exchange().by_node() == (world().size() == 4));
    if (rig.exchange().by_node())
        ALL_RANKS_TRUE(sent >= records * row && sent <= records * (row + 15));
}

TEST(ExchangeSmall, OneTokenForOneExpertPerRank) {
    Rig rig({.experts = static_cast<std::uint64_t>(world().size()),
             .top_k = 1,
             .alignment = 1,
             .max_tokens = 1,
             .absent = 0});
    check_there_and_back(rig);
}

TEST(ExchangeByLink, AllRecordsGoFromDeviceToDevice) {
    for (const bool low_latency : {false, true}) {
        Rig rig({.dtype = DType::BF16,
                 .hidden = 512,
                 .linked = true,
                 .low_latency = low_latency,
                 .experts = 16,
                 .top_k = 6});
        rig.dispatch();
        ALL_RANKS_TRUE(rig.rows_arrived());
        const ExchangeStats stats = rig.exchange().stats();
        if (world().size() > 1 && !rig.transport().device_link_name().empty()) {
            ALL_RANKS_TRUE(stats.bytes_sent_by_link == stats.bytes_sent);
            ALL_RANKS_TRUE(stats.bytes_sent > 0 || world().rank() == 1);
        }
    }
}

TEST(ExchangeByLink, TwoHandlesOfARankMeetOneOfAnother) {
    for (const bool low_latency : {false, true}) {
        Rig rig({.dtype = DType::BF16, .hidden = 512, .linked = true, .low_latency = low_latency});
        const TensorView results = rig.caller_rows(DType::BF16, 512);
        const std::unique_ptr<ExchangeHandle> other = rig.exchange().create_handle("other");
        for (int round = 0; round < 4; ++round) {
            const bool first = round % 2 == 1 || world().rank() != 0;
            ExchangeHandle& handle = first ? rig.handle() : *other;
            rig.exchange().dispatch(handle, rig.x(), rig.ids(), rig.weights()).wait();
            rig.exchange().combine(handle, results, rig.out()).wait();
        }
        ALL_RANKS_TRUE(rig.rows_arrived());
        ALL_RANKS_TRUE(rig.came_back(results, false));
    }
}

TEST(ExchangeByLink, LowLatencyRecordsComeBeforeTheHook) {
    Rig rig({.dtype = DType::BF16, .hidden = 512, .linked = true, .low_latency = true});
    if (world().size() == 1 || rig.transport().device_link_name().empty())
        return;
    const auto received = [&] { return rig.exchange().stats().bytes_received; };
    const auto send = [&] {
        return rig.exchange().dispatch_send(rig.handle(), rig.x(), rig.ids(), rig.weights());
    };
    send()().wait();
    const std::uint64_t all = received(); // of such a dispatch, from all ranks
    const TensorView results = rig.caller_rows(DType::BF16, 512);
    rig.exchange().combine(rig.handle(), results, rig.out()).wait();
    const std::uint64_t start = received();
    ExchangeHook hook = send();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (received() < start + all && std::chrono::steady_clock::now() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::uint64_t before = received();
    hook().wait();
    ALL_RANKS_TRUE(all > 0 && before == start + all && received() == before);
    ALL_RANKS_TRUE(rig.rows_arrived());
}

// Its offsets and counts are as long as it has experts (ExchangeRig::told).
TEST(ExchangeFormsAlone, ARankMayHaveNoExperts) {
    const auto ranks = static_cast<std::uint64_t>(world().size());
    for (const bool low_latency : {false, true})
        for (const int ranks_per_node : {0, 2}) {
            Rig rig({.low_latency = low_latency,
                     .ranks_per_node = ranks_per_node,
                     .experts = std::max<std::uint64_t>(ranks - 1, 1),
                     .top_k = 1});
            std::string empty;
            const bool has_some = rig.exchange().num_local_experts() > 0;
            EXPECT_EQ(testing::all_ranks_true(has_some, &empty), ranks == 1) << empty;
            check_there_and_back(rig);
        }
}

ErrorCode code_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const Error& error) {
        return error.code();
    }
    return ErrorCode::Internal;
}

TEST(ExactSumsAlone, RefuseRangesOfExpertsThatAreNoSubtrees) {
    const auto code = [](std::uint64_t experts, const ExchangeLayout layout, int ranks_per_node) {
        return code_of([&] {
            const Rig rig({.layout = layout,
                           .ranks_per_node = ranks_per_node,
                           .experts = experts,
                           .exact = true});
        });
    };
    const auto size = static_cast<std::uint64_t>(world().size());
    const ErrorCode none = ErrorCode::Internal;
    EXPECT_EQ(code(4 * size, ExchangeLayout::ExpertMajor, 0), none);
    EXPECT_EQ(code(4 * size - 1, ExchangeLayout::ExpertMajor, 0), none);
    EXPECT_EQ(code(3 * size, ExchangeLayout::ExpertMajor, 0),
              size == 1 ? none : ErrorCode::InvalidArgument);
    EXPECT_EQ(code(4 * size, ExchangeLayout::RankMajor, 0), ErrorCode::InvalidArgument);
}

TEST(ExchangeFormsAlone, WhatALayoutDoesNotHaveIsRefused) {
    const Case expert{ExchangeLayout::ExpertMajor, DType::F32, false, {}, 40};
    const Case rank{ExchangeLayout::RankMajor, DType::F32, true, {}, 40};
    Rig by_expert(expert), by_rank(rank);
    const auto refused = [](const auto& call) {
        return code_of([&] { static_cast<void>(call()); }) == ErrorCode::InvalidArgument;
    };
    EXPECT_TRUE(refused([&] { return by_expert.handle().row_experts(); }));
    EXPECT_TRUE(refused([&] { return by_expert.handle().quantized_rows(); }));
    EXPECT_TRUE(refused([&] { return by_expert.handle().quantized_d_results(); }));
    EXPECT_TRUE(refused([&] { return by_expert.handle().row_slots(); }));
    EXPECT_TRUE(refused([&] { return by_expert.handle().outgoing_codes(1); }));
    EXPECT_TRUE(refused([&] { return by_rank.handle().outgoing_codes(rank.max_tokens + 1); }));
    EXPECT_TRUE(refused([&] { return by_rank.handle().expert_offsets(); }));
    EXPECT_TRUE(refused([&] { return by_rank.handle().spacing(); }));
    Case fast = expert;
    fast.low_latency = true;
    Rig low_latency(fast);
    EXPECT_TRUE(refused([&] { return low_latency.handle().row_weights(); }));
    EXPECT_TRUE(refused([&] { return low_latency.handle().d_results(); }));
    EXPECT_TRUE(refused([&] { return low_latency.handle().expert_offsets(); }));
    const auto unmaskable = [](Rig& rig, int other) {
        return code_of([&] { rig.exchange().mask_rank(other); }) == ErrorCode::InvalidArgument;
    };
    Recording recording(by_rank.device(), QueueRole::Compute, "sums"),
        fast_sums(low_latency.device(), QueueRole::Compute, "sums");
    const auto refuses = [](const auto& call) {
        return code_of(call) == ErrorCode::InvalidArgument;
    };
    EXPECT_TRUE(refuses([&] { // its caller sums itself
        by_rank.handle().sum_results(recording, by_rank.caller_rows(DType::F32, 40));
    }));
    EXPECT_TRUE(refuses([&] { // forward only
        low_latency.handle().sum_row_gradients(fast_sums, low_latency.caller_rows(DType::F32, 40),
                                               {});
    }));
    EXPECT_TRUE(unmaskable(low_latency, world().rank()));
    EXPECT_TRUE(unmaskable(low_latency, world().size()));
    EXPECT_TRUE(unmaskable(by_expert, (world().rank() + 1) % world().size()));
    EXPECT_TRUE(
        refused([&] { return low_latency.handle().add_row_tensor("more", DType::F32, 8); }));
    const auto combined = [](Rig& rig, const CombineOptions& options) {
        rig.dispatch();
        return rig.exchange().combine(rig.handle(), rig.caller_rows(DType::F32, 40), rig.out(),
                                      options);
    };
    if (world().size() == 1) { // else all would hear of it
        EXPECT_TRUE(refused([&] { return combined(by_rank, {.weighted = true}); }));
        EXPECT_TRUE(refused([&] { return combined(by_expert, {.second_bias = by_expert.x()}); }));
        EXPECT_TRUE(refused([&] { return combined(by_expert, {.bias = by_expert.ids()}); }));
        EXPECT_TRUE(refused([&] { // sums, which nobody can weigh any more
            return by_expert.exchange().combine(by_expert.handle(), by_expert.handle().results(),
                                                by_expert.out(), {.weighted = true});
        }));
        EXPECT_TRUE(refused([&] { // what the sums hold already
            return by_expert.exchange().dispatch_backward(
                by_expert.handle(), by_expert.handle().results(),
                by_expert.caller_rows(DType::F32, 1).reshaped({by_expert.handle().capacity()}),
                by_expert.out(), false, by_expert.weights());
        }));
    }
    EXPECT_EQ(by_rank.handle().rows().dtype, DType::F8E4M3);
    EXPECT_EQ(by_rank.handle().quantized_rows().recipe.rule, fp8::ScaleRule::PowerOfTwo);
}

} // namespace
} // namespace bellows
