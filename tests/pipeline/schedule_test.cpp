// SPDX-License-Identifier: MIT
// The schedules as sequences, and what the verifier makes of others.
#include "pipeline/all_schedules.hpp"

#include <bellows/base/error.hpp>
#include <bellows/schedule/schedule.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

namespace bellows {
namespace {

std::string text(ScheduleKind kind, std::uint64_t ranks, std::uint64_t micro_batches) {
    return to_text(make_schedule({kind, ranks, micro_batches}));
}

TEST(Schedule, SequencesOfTwoRanks) {
    EXPECT_EQ(text(ScheduleKind::GPipe, 2, 2), "F0 F0 B0 B0\n"
                                               "F0 F0 B0 B0\n");
    EXPECT_EQ(text(ScheduleKind::OneFOneB, 2, 3), "F0 F0 B0 F0 B0 B0\n"
                                                  "F0 B0 F0 B0 F0 B0\n");
    EXPECT_EQ(text(ScheduleKind::Interleaved, 2, 2), "F0 F0 F1 F1 B1 B1 B0 B0\n"
                                                     "F0 F0 F1 B1 F1 B1 B0 B0\n");
    EXPECT_EQ(text(ScheduleKind::ZbH1, 2, 3), "F0 F0 I0 W F0 I0 W I0 W\n"
                                              "F0 I0 W F0 I0 F0 I0 W W\n");
    EXPECT_EQ(text(ScheduleKind::ZbH2, 2, 4), "F0 F0 F0 I0 W F0 I0 W I0 W I0 W\n"
                                              "F0 I0 W F0 I0 F0 I0 F0 I0 W W W\n");
    EXPECT_EQ(text(ScheduleKind::ZbV, 2, 4), "F0 F0 F0 F1 I1 W F1 I1 W F0 I0 W F1 I1 W I0 W F1 I1 "
                                             "W I0 W I0 W\n"
                                             "F0 F1 F0 F1 I1 W F0 I0 W F1 I1 W F0 I0 W F1 I1 W I0 "
                                             "I1 I0 W W W\n");
}

TEST(Schedule, SequencesOfDualPipe) {
    // Known answers; the other half of the ranks does the same in its own phases.
    const std::string outer = "F0 F0 F0 F1 I1 W F1 F0&B1 F1&B0 B1 F1&B0 B1 I0 W I0 W\n";
    const std::string inner = "F0 F1 F0 F1 F0 B1 F1&B0 F0&B1 F1&B0 B1 B0 I1 I0 W W\n";
    EXPECT_EQ(text(ScheduleKind::DualPipe, 4, 8), outer + inner + inner + outer);
    const std::string first = text(ScheduleKind::DualPipe, 8, 20);
    EXPECT_EQ(first.substr(0, first.find('\n')),
              "F0 F0 F0 F0 F0 F0 F0 F1 I1 W F1 I1 W F1 I1 W F1 F0&B1 F1&B0 F0&B1 F1&B0 F0&B1 F1&B0 "
              "B1 F1&B0 B1 F1&B0 B1 F1&B0 B1 I0 W I0 W I0 W I0 W");
    EXPECT_EQ(text(ScheduleKind::DualPipeV, 1, 2), "F0 F1 F0 B1 F1&B0 B1 I0 W\n");
}

TEST(Schedule, EveryKindIsVerifiedForAllSizes) {
    std::uint64_t count = 0;
    for (const ScheduleDesc& desc : all_schedules()) {
        const Schedule schedule = make_schedule(desc);
        ASSERT_NO_THROW(verify(schedule)) << name_of(desc);
        ASSERT_EQ(schedule.num_ranks(), desc.ranks);
        for (std::uint64_t rank = 0; rank < desc.ranks; ++rank) {
            std::array<std::uint64_t, 4> of_kind{};
            std::uint64_t pairs = 0;
            for (const ScheduleOp& op : schedule.ops[rank]) {
                ++of_kind[static_cast<std::size_t>(op.kind)];
                pairs += op.with_next ? 1 : 0;
            }
            const std::uint64_t all =
                desc.micro_batches / schedule.num_streams * schedule.chunks[rank].size();
            ASSERT_EQ(of_kind[0], all) << name_of(desc);
            ASSERT_EQ(of_kind[1] + of_kind[2], all) << name_of(desc);
            ASSERT_EQ(of_kind[2], of_kind[3]) << name_of(desc);
            if (desc.kind == ScheduleKind::DualPipe) {
                const std::uint64_t h = std::min(rank, desc.ranks - 1 - rank);
                ASSERT_EQ(of_kind[3], desc.ranks - h - 1) << name_of(desc);
            } else if (desc.kind != ScheduleKind::DualPipeV) {
                ASSERT_EQ(pairs, 0u) << name_of(desc);
            }
        }
        ++count;
    }
    EXPECT_GT(count, 5000u);
}

TEST(Schedule, ForwardsAloneAreASchedule) {
    for (const ScheduleDesc& desc : all_schedules()) {
        if (desc.ranks > 8 || desc.micro_batches > 24)
            continue;
        const Schedule forwards = forwards_of(make_schedule(desc));
        ASSERT_NO_THROW(verify(forwards)) << name_of(desc);
        for (std::uint64_t rank = 0; rank < desc.ranks; ++rank) {
            ASSERT_LE(forwards.high_water(rank).both, 2u) << name_of(desc);
            ASSERT_LE(forwards.peak_in_flight(rank), 2u) << name_of(desc);
        }
    }
    Schedule broken = forwards_of(make_schedule({.ranks = 2, .micro_batches = 3}));
    EXPECT_EQ(to_text(broken), "F0 F0 F0\nF0 F0 F0\n");
    broken.ops[1][2] = {OpKind::InputGradient, 0, 0};
    EXPECT_THROW(verify(broken), Error);
    broken.ops[1].pop_back();
    EXPECT_THROW(verify(broken), Error);
}

TEST(Schedule, DualPipesHalvesMirrorEachOther) {
    for (std::uint64_t ranks = 2; ranks <= 16; ranks += 2) {
        const Schedule schedule = make_schedule({ScheduleKind::DualPipe, ranks, 3 * ranks});
        for (std::uint64_t rank = 0; rank < ranks / 2; ++rank) {
            const std::uint64_t other = ranks - 1 - rank;
            const auto &mine = schedule.ops[rank], &theirs = schedule.ops[other];
            ASSERT_EQ(mine.size(), theirs.size());
            for (std::size_t i = 0; i < mine.size(); ++i) {
                ASSERT_EQ(mine[i].kind, theirs[i].kind);
                ASSERT_EQ(mine[i].phase, theirs[i].phase);
                // The same micro-batch of the other stream.
                const auto mine_of = schedule.chunk_of(rank, mine[i]);
                const auto theirs_of = schedule.chunk_of(other, theirs[i]);
                ASSERT_NE(mine_of.stream, theirs_of.stream);
                ASSERT_EQ(mine[i].micro_batch - schedule.first_of_stream(mine_of.stream),
                          theirs[i].micro_batch - schedule.first_of_stream(theirs_of.stream));
            }
        }
    }
}

TEST(Schedule, HighWaterMarks) {
    for (const ScheduleDesc& desc : all_schedules()) {
        const Schedule schedule = make_schedule(desc);
        const std::uint64_t ranks = desc.ranks, micro_batches = desc.micro_batches;
        for (std::uint64_t rank = 0; rank < ranks; ++rank) {
            const HighWater peak = schedule.high_water(rank);
            const std::uint64_t h = std::min(rank, ranks - 1 - rank);
            const std::string what = name_of(desc) + ", rank " + std::to_string(rank);
            switch (desc.kind) {
            case ScheduleKind::GPipe:
                ASSERT_EQ(peak.both, micro_batches) << what;
                break;
            case ScheduleKind::OneFOneB:
                ASSERT_EQ(peak.both, std::min(micro_batches, ranks - rank)) << what;
                break;
            case ScheduleKind::ZbH1:
                ASSERT_EQ(peak.both, std::min(micro_batches, ranks)) << what;
                break;
            case ScheduleKind::ZbH2:
                ASSERT_EQ(peak.both, std::min(micro_batches, 2 * ranks - 1)) << what;
                break;
            case ScheduleKind::ZbV:
                ASSERT_LE(peak.both, 2 * ranks) << what;
                break;
            case ScheduleKind::DualPipe: // with pairs that hold both halves at once
                ASSERT_LE(peak.activations, ranks + 1) << what;
                ASSERT_EQ(peak.deferred, h + 1) << what;
                break;
            case ScheduleKind::DualPipeV:
                ASSERT_LE(peak.activations, 2 * ranks + 1) << what;
                ASSERT_EQ(peak.deferred, rank + 1) << what;
                break;
            case ScheduleKind::Interleaved:
                ASSERT_LE(peak.both, desc.chunks * ranks + ranks - 1) << what;
                break;
            }
        }
    }
    EXPECT_THROW((void)make_schedule({.ranks = 2, .micro_batches = 2}).high_water(2), Error);
}

void expect_impossible(const ScheduleDesc& desc, const std::string& part) {
    try {
        (void)make_schedule(desc);
        ADD_FAILURE() << "accepted, expected: " << part;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    }
}

TEST(Schedule, ImpossibleNumbersAreRefusedWithTheRule) {
    expect_impossible({ScheduleKind::OneFOneB, 0, 4}, "at least 1 rank and 1 micro-batch");
    expect_impossible({ScheduleKind::GPipe, 4, 0}, "at least 1 rank and 1 micro-batch");
    expect_impossible({ScheduleKind::DualPipe, 3, 8}, "dualpipe needs an even number of ranks");
    expect_impossible({ScheduleKind::DualPipe, 4, 9}, "even number of ranks and of micro-batches");
    expect_impossible({ScheduleKind::DualPipe, 4, 6}, "twice as many micro-batches as ranks");
    expect_impossible({ScheduleKind::DualPipeV, 3, 5}, "dualpipev needs at least twice as many");
    expect_impossible({ScheduleKind::Interleaved, 4, 6}, "a multiple of that of ranks");
    expect_impossible({ScheduleKind::Interleaved, 4, 8, 1}, "at least 2 chunks per rank");
    expect_impossible({ScheduleKind::GPipe, std::uint64_t{1} << 40, 1}, "takes up to 65536");
    expect_impossible({ScheduleKind::GPipe, 1 << 16, 1 << 16}, "more than 2^24 forwards");
    EXPECT_EQ(parse_schedule_kind("zb-h2"), ScheduleKind::ZbH2);
    for (std::size_t kind = 0; kind < kNumScheduleKinds; ++kind)
        EXPECT_EQ(parse_schedule_kind(to_string(static_cast<ScheduleKind>(kind))),
                  static_cast<ScheduleKind>(kind));
    EXPECT_THROW((void)parse_schedule_kind("2f2b"), Error);
}

/// Ranks end with ';'; ops as to_name() writes them for phase 0, without it: "F0" is the forward of
/// micro-batch 0. "X7" is an op of no known kind.
Schedule parse(std::uint64_t micro_batches, const std::string& text) {
    Schedule schedule{
        .name = "parsed", .num_micro_batches = micro_batches, .chunks = {}, .ops = {}};
    std::istringstream ranks(text);
    for (std::string rank; std::getline(ranks, rank, ';'); ++schedule.num_stages) {
        schedule.chunks.push_back({{schedule.num_stages, 0}});
        schedule.ops.emplace_back();
        std::istringstream ops(rank);
        for (std::string op; ops >> op;) {
            const bool with_next = op.back() == '&';
            schedule.ops.back().push_back({static_cast<OpKind>(std::string("FBIW..X").find(op[0])),
                                           0, std::stoull(op.substr(1)), with_next});
        }
    }
    return schedule;
}

void expect_refused(const Schedule& schedule, const std::string& part) {
    try {
        verify(schedule);
        ADD_FAILURE() << "accepted, expected: " << part;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    }
}

TEST(Verifier, TakesWhatIsNotOurs) {
    // Forwards and gradients in another order than ours, on both ranks alike.
    EXPECT_NO_THROW(verify(parse(2, "F1 F0 I1 I0 W0 W1;F1 F0 I1 I0 W0 W1")));
    EXPECT_NO_THROW(verify(parse(3, "F0 I0 F1 I1 W0 W1 F2 B2")));
    EXPECT_NO_THROW(verify(parse(2, "F0 F1& B0 B1")));
}

TEST(Verifier, RefusesSizesAndRangesBeforeItUsesThem) {
    expect_refused(Schedule{}, "at least one stage, one stream and one micro-batch");
    expect_refused(parse(0, "F0 B0"), "at least one stage, one stream and one micro-batch");
    const auto changed = [](auto&& change) {
        Schedule schedule = make_schedule({ScheduleKind::DualPipe, 2, 4});
        change(schedule);
        return schedule;
    };
    expect_refused(changed([](Schedule& s) { s.num_stages = 3; }), "not one of each of 3 stages");
    expect_refused(changed([](Schedule& s) { s.num_streams = 0; }), "one stream");
    expect_refused(changed([](Schedule& s) { s.num_streams = 3; }), "over 3 streams");
    expect_refused(changed([](Schedule& s) { s.chunks.pop_back(); }), "chunks for 1 ranks");
    expect_refused(changed([](Schedule& s) { s.chunks[1].pop_back(); }), "have 3 chunks");
    expect_refused(changed([](Schedule& s) { s.chunks[1][0].stage = 2; }),
                   "rank 1: stage 2 of stream 1 does not exist");
    expect_refused(changed([](Schedule& s) { s.chunks[1][0] = s.chunks[0][0]; }),
                   "rank 1: stage 0 of stream 0 stands on two chunks");
    expect_refused(changed([](Schedule& s) { s.ops[0][0].phase = 2; }),
                   "rank 0, F2.m0: there is no such phase");
    expect_refused(changed([](Schedule& s) { s.ops[0][0].micro_batch = 2; }),
                   "rank 0, F0.m2: there are micro-batches 0 to 1");
    expect_refused(parse(1, "F0 B18446744073709551615"), "micro-batches 0 to 0");
    expect_refused(parse(2, "F0 B0"), "rank 0 has 2 ops, not at least two for each of 2");
    for (const char* ops : {"F0 B0", "F0 B0;F0 B0"}) // 2^63 times two stages wraps around
        expect_refused(parse(std::uint64_t{1} << 63, ops), "rank 0 has 2 ops, not at least two");
    expect_refused(parse(1, "F0 B0 X0"), "rank 0, ?0.m0: no kind of op has the number 6");
    const Schedule two = make_schedule({.ranks = 2, .micro_batches = 2});
    EXPECT_THROW((void)two.peak_in_flight(2), Error);
    EXPECT_THROW((void)two.peak_in_flight(0, 1), Error);
    EXPECT_EQ(parse(1, "W0 F0 B0").peak_in_flight(0), 1u);
}

TEST(Verifier, FindsBrokenOrders) {
    expect_refused(parse(2, "F0 F1 B0 I1"), "rank 0, W0.m1: never runs");
    expect_refused(parse(2, "F0 B0 F1 W0"), "rank 0, W0.m0: runs twice");
    expect_refused(parse(2, "F0 F0 B0 B1"), "rank 0, F0.m0: runs twice");
    expect_refused(parse(1, "F0 B0 I0"), "rank 0, I0.m0: runs twice");
    expect_refused(parse(1, "F0 B0 W0"), "rank 0, W0.m0: runs twice");
    expect_refused(parse(1, "F0 B0;B0 F0"), "waits for an op that never runs before it");
    expect_refused(parse(1, "F0 W0 I0"), "rank 0, W0.m0: waits for an op");
    // Each rank waits for the other.
    expect_refused(parse(2, "F0 B0 F1 B1;F0 F1 B0 B1"), "waits for an op");
    expect_refused(parse(2, "F0 F1 I0 I1 W1 W0"), "W0.m1: a chunk's weight gradients must be");
}

TEST(Verifier, FindsPairsThatCannotBe) {
    expect_refused(parse(1, "F0& B0"), "F0.m0: waits for an op"); // its own
    expect_refused(parse(2, "F0 F1& I0 W0 B1"), "a pair is a forward and, next, a backward");
    expect_refused(parse(2, "F0 F1 B0& B1"), "a pair is a forward and, next, a backward");
    expect_refused(parse(2, "F0 B0 B1 F1&"), "a pair is a forward and, next, a backward");
    // One after the other they would run.
    expect_refused(parse(2, "F0 F1& B0 B1;F0 F1 B0 B1"), "waits for an op");
    EXPECT_NO_THROW(verify(parse(2, "F0 F1 B0 B1;F0 F1 B0 B1")));
}

TEST(Verifier, FindsMessagesInTheWrongOrder) {
    // Every op finds what it needs; but the edges are FIFOs.
    expect_refused(parse(2, "F0 F1 B0 B1;F1 F0 B0 B1"),
                   "rank 1, F0.m1: takes message 0 of rank 0, which is that of F0.m0");
    expect_refused(parse(2, "F0 F1 B0 B1;F0 F1 I1 I0 W0 W1"),
                   "rank 0, B0.m0: takes message 0 of rank 1, which is that of I0.m1");
}

TEST(Verifier, FindsEdgesOfSeveralChunksOutOfOrder) {
    // Two chunks on each rank: what goes from one rank to another goes one after the other.
    Schedule schedule = make_schedule({ScheduleKind::Interleaved, 2, 2});
    EXPECT_NO_THROW(verify(schedule));
    std::swap(schedule.ops[0][1], schedule.ops[0][2]); // rank 1 takes F0.m1 first, then F1.m0
    expect_refused(schedule, "rank 1, F0.m1: takes message 1 of rank 0, which is that of F1.m0");
}

TEST(Verifier, FindsASlotThatIsTakenTwice) {
    // Two micro-batches in flight at most, but 0 and 2 meet in slot 0.
    const Schedule schedule = parse(3, "F0 F2 B0 F1 B1 B2");
    EXPECT_EQ(schedule.peak_in_flight(0), 2u);
    expect_refused(schedule, "rank 0, F0.m2: needs slot 0 of 2, which still holds micro-batch 0");
}

} // namespace
} // namespace bellows
