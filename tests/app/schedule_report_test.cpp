// SPDX-License-Identifier: MIT
// `bellows schedule`: what is typed, and what it says of a schedule in each format.
#include "app/command_line.hpp"
#include "app/pictures/gantt.hpp"
#include "app/pictures/schedule_report.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/base/error.hpp>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bellows {
namespace {

std::size_t count(const std::string& text, const std::string& part) {
    std::size_t found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
        ++found;
    return found;
}

void expect_refused(const ScheduleFlags& flags, const std::string& part) {
    try {
        (void)resolve_schedule(flags);
        ADD_FAILURE() << "accepted, expected: " << part;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    }
}

struct Simulated {
    explicit Simulated(const ScheduleDesc& desc)
        : schedule(make_schedule(desc)), timeline(simulate(schedule)) {}
    Schedule schedule;
    Timeline timeline;
};

TEST(ScheduleCommand, CostsAreOfAllStagesOrOfEach) {
    const SimulationOptions none = parse_costs("");
    ASSERT_EQ(none.stages.size(), 1u);
    EXPECT_EQ(none.stages[0].forward, 1);
    EXPECT_FALSE(none.stages[0].pair);
    const SimulationOptions all = parse_costs("f=1.5,i=2,w=0,fb=3e1,p2p=0.25,transfer=4");
    ASSERT_EQ(all.stages.size(), 1u);
    EXPECT_EQ(all.stages[0].forward, 1.5);
    EXPECT_EQ(all.stages[0].input_gradient, 2);
    EXPECT_EQ(all.stages[0].weight_gradient, 0);
    EXPECT_EQ(all.stages[0].pair, 30);
    EXPECT_EQ(all.p2p_latency, 0.25);
    EXPECT_EQ(all.p2p_transfer, 4);
    const SimulationOptions each = parse_costs("f=1::w=3");
    ASSERT_EQ(each.stages.size(), 3u);
    EXPECT_EQ(each.stages[1].forward, 1);
    EXPECT_EQ(each.stages[2].weight_gradient, 3);
    for (const char* bad : {"g=1", "f", "f=", "f=-1", "f=1x", "f=nan", "f=inf", "=1", "f=1 "})
        EXPECT_THROW((void)parse_costs(bad), Error) << bad;
}

TEST(ScheduleCommand, FlagsThatDoNotGoTogetherAreRefused) {
    expect_refused({}, "--kind names a schedule, or --compare");
    expect_refused({.kind = "1f1b", .compare = true}, "--kind names a schedule, or --compare");
    expect_refused({.kind = "1f2b"}, "there is no schedule \"1f2b\"");
    expect_refused({.kind = "1f1b", .chunks = 3}, "--chunks goes with --kind interleaved");
    expect_refused({.kind = "1f1b", .format = "png"}, "there is no --format \"png\"");
    expect_refused({.format = "svg", .compare = true}, "--compare is shown as text or json");
    expect_refused({.kind = "1f1b", .costs = "f=x"}, "f must be a number of at least 0");
    expect_refused({.kind = "1f1b", .layers = 2}, "--layers and --order go with --pair");
    expect_refused({.order = "MLP(B)", .compare = true}, "--layers and --order go with --pair");
    const ScheduleOptions options = resolve_schedule(
        {.kind = "interleaved", .format = "trace", .ranks = 2, .chunks = 3, .decoupled = true});
    EXPECT_EQ(options.desc.kind, ScheduleKind::Interleaved);
    EXPECT_EQ(options.desc.micro_batches, 8u);
    EXPECT_EQ(options.desc.chunks, 3u);
    EXPECT_EQ(options.format, ScheduleFormat::Trace);
    EXPECT_TRUE(options.decoupled);
    EXPECT_FALSE(options.early_gradients);
}

TEST(PairCommand, CostsAreOfNodes) {
    const PairNodes even = parse_pair_costs("");
    const PairTimes times = simulate_pair(even, one_after_the_other(even));
    EXPECT_DOUBLE_EQ(times.compute, times.exchange);
    const PairNodes layer = parse_pair_costs("attn.f=2,mlp.f=3,attn.b=4,mlp.w=0,combine.f=5");
    std::map<std::string, double> seconds;
    for (const auto* part : {&layer.forward, &layer.input_gradient, &layer.weight_gradient})
        for (const PairNode& node : *part)
            seconds[node.name] = node.seconds;
    EXPECT_EQ(seconds, (std::map<std::string, double>{{"ATTN(F)", 2},
                                                      {"ROUTER(F)", 0.1},
                                                      {"SHARED(F)", 0.3},
                                                      {"MLP(F)", 3},
                                                      {"DISPATCH(F)", 5},
                                                      {"COMBINE(F)", 5},
                                                      {"DISPATCH(B)", 5},
                                                      {"SHARED(B)", 0.3},
                                                      {"MLP(B)", 3},
                                                      {"COMBINE(B)", 5},
                                                      {"ROUTER(B)", 0.1},
                                                      {"ATTN(B)", 4},
                                                      {"MLP(W)", 0},
                                                      {"SHARED(W)", 0.3},
                                                      {"ATTN(W)", 2}}));
    // Without a forward's to go by, the other exchanges make a quarter each.
    EXPECT_DOUBLE_EQ(parse_pair_costs("dispatch.b=1").forward[2].seconds, 7.1 / 4);
    for (const char* bad :
         {"f=1", "router.w=1", "mlp", "mlp.f=", "mlp.f=-1", "MLP(F)=1", "mlp.f=1,,"})
        EXPECT_THROW((void)parse_pair_costs(bad), Error) << bad;
}

TEST(PairCommand, FlagsThatDoNotGoTogetherAreRefused) {
    expect_refused({.kind = "1f1b", .pair = true}, "--kind names a schedule, or --compare");
    expect_refused({.compare = true, .pair = true}, "--kind names a schedule, or --compare");
    expect_refused({.ranks = 4, .pair = true}, "--pair has none");
    expect_refused({.pair = true, .decoupled = true}, "--pair has none");
    expect_refused({.layers = 0, .pair = true}, "--layers must be 1 to 100, not 0");
    expect_refused({.layers = 101, .pair = true}, "--layers must be 1 to 100, not 101");
    expect_refused({.order = "MLP", .pair = true},
                   "\"MLP\", whose end is none of (F), (B) and (W)");
    expect_refused({.format = "png", .pair = true}, "there is no --format \"png\"");
    expect_refused({.costs = "f=1", .pair = true}, "there is no \"f\" in a pair, there are attn.f");
    const ScheduleOptions options =
        resolve_schedule({.format = "trace", .order = "MLP(B) ATTN(F)", .layers = 7, .pair = true});
    ASSERT_TRUE(options.pair);
    EXPECT_EQ(options.pair->layers, 7u);
    EXPECT_EQ(options.pair->order, (PairPattern{"MLP(B)", "ATTN(F)"}));
    EXPECT_EQ(options.format, ScheduleFormat::Trace);
    EXPECT_EQ(resolve_schedule({.pair = true}).pair->layers, 4u);
}

/// One layer whose nodes and exchanges take 1, its router and shared expert nothing.
PairReport simple_pair(std::optional<PairPattern> order = {}) {
    return PairReport({.layer = parse_pair_costs("attn.f=1,mlp.f=1,router.f=0,shared.f=0,"
                                                 "dispatch.f=1"),
                       .layers = 1,
                       .order = std::move(order)});
}

TEST(PairReport, TextHasTheOrderAndWhatItHides) {
    const std::string text = pair_text(simple_pair());
    for (const char* part :
         {"A pair of 1 MoE layer:", "chosen order, round after round:\nDISPATCH(B) ",
          "one after the other          9  exchange hidden: 1 of 4 (25.0 %)\n",
          "overlapped                   6  exchange hidden: 4 of 4 (100.0 %); "
          "1.50 times as fast\n",
          "bound                        6  the longer of compute, 6, and "
          "exchange, 4\n"})
        EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
    const std::string given = pair_text(simple_pair(PairPattern{"COMBINE(F)"}));
    EXPECT_NE(given.find("given order, round after round:\nCOMBINE(F)\n"), std::string::npos);
    EXPECT_NE(given.find("overlapped                   9 "), std::string::npos) << given;
    EXPECT_THROW((void)simple_pair(PairPattern{"MPL(B)"}), Error);
    EXPECT_THROW((void)simple_pair(PairPattern{}), Error);
}

TEST(PairReport, JsonHasAllOfIt) {
    const PairReport report({.layer = parse_pair_costs(""), .layers = 3, .order = {}});
    const auto json = nlohmann::json::parse(pair_json(report));
    EXPECT_EQ(json.at("layers"), 3);
    EXPECT_EQ(json.at("chosen"), true);
    EXPECT_EQ(json.at("order").size(), 15u);
    EXPECT_EQ(json.at("bound"), report.bound());
    EXPECT_EQ(json.at("overlapped").at("time"), report.times.time);
    EXPECT_EQ(json.at("overlapped").at("hidden"), report.times.hidden);
    EXPECT_EQ(json.at("one_after_the_other").at("time"), report.apart.time);
    ASSERT_EQ(json.at("nodes").size(), 45u);
    std::map<std::pair<std::string, int>, int> found;
    std::map<std::string, int> next;
    for (const auto& node : json.at("nodes")) {
        const std::string name = node.at("name");
        ++found[{name, node.at("layer").get<int>()}];
        const int index = next[name]++;
        EXPECT_EQ(node.at("layer"), name.ends_with("(F)") ? index : 2 - index) << node;
        EXPECT_LE(node.at("end"), report.times.time);
    }
    EXPECT_EQ(found.size(), 45u);
}

TEST(PairReport, ThePictureAndTheTraceHaveEveryNode) {
    const PairReport report({.layer = parse_pair_costs(""), .layers = 3, .order = {}});
    const std::string svg = pair_svg(report);
    EXPECT_EQ(count(svg, "<title>"), 45u);
    EXPECT_EQ(count(svg, "<title>MLP(B) of layer 2, "), 1u);
    EXPECT_NE(svg.find(">compute<"), std::string::npos);
    EXPECT_NE(svg.find(">exchange<"), std::string::npos);
    const auto json = nlohmann::json::parse(pair_trace(report));
    std::map<int, std::vector<std::pair<double, double>>> lanes;
    for (const auto& event : json.at("traceEvents"))
        if (event.at("ph") == "X")
            lanes[event.at("tid").get<int>()].emplace_back(event.at("ts"), event.at("dur"));
    ASSERT_EQ(lanes.size(), 2u);
    for (auto& [lane, events] : lanes) {
        std::ranges::sort(events);
        for (std::size_t i = 1; i < events.size(); ++i)
            EXPECT_GE(events[i].first, events[i - 1].first + events[i - 1].second - 1e-2);
    }
}

TEST(ScheduleReport, TextHasTheOpsAndWhatBecomesOfThem) {
    const Simulated s({ScheduleKind::DualPipe, 4, 8});
    const std::string text = schedule_text(s.schedule, s.timeline);
    for (const char* part :
         {"rank 0: F0 F0 F0 F1 I1 W F1 F0&B1 F1&B0 B1 F1&B0 B1 I0 W I0 W\n",
          "step time 26, bubble 2 (7.7 %)", "messages between ranks: 48",
          "  rank 1                    5                          2             5\n"})
        EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
}

TEST(ScheduleReport, JsonHasAllOfIt) {
    const Simulated s({ScheduleKind::DualPipe, 4, 8});
    const auto json = nlohmann::json::parse(schedule_json(s.schedule, s.timeline));
    EXPECT_EQ(json.at("kind"), "dualpipe");
    EXPECT_EQ(json.at("step_time"), 26);
    ASSERT_EQ(json.at("programs").size(), 4u);
    for (std::size_t rank = 0; rank < 4; ++rank) {
        const auto& program = json.at("programs").at(rank);
        ASSERT_EQ(program.at("ops").size(), s.schedule.ops[rank].size());
        for (std::size_t i = 0; i < s.schedule.ops[rank].size(); ++i) {
            const auto& op = program.at("ops").at(i);
            EXPECT_EQ(op.at("name"), to_name(s.schedule.ops[rank][i]));
            EXPECT_EQ(op.at("pair_with_next"), s.schedule.ops[rank][i].with_next);
            EXPECT_EQ(op.at("start"), s.timeline.ops[rank][i].start);
            EXPECT_EQ(op.at("end"), s.timeline.ops[rank][i].end);
        }
    }
    EXPECT_EQ(json.at("programs").at(3).at("chunks").at(0).at("stream"), 1);
}

TEST(ScheduleReport, ThePictureHasABarForEveryOp) {
    const Simulated s({ScheduleKind::DualPipe, 4, 8});
    const std::string svg = schedule_svg(s.schedule, s.timeline);
    std::size_t ops = 0;
    for (const auto& of_rank : s.schedule.ops)
        ops += of_rank.size();
    EXPECT_EQ(count(svg, "<title>"), ops);
    EXPECT_EQ(count(svg, "<title>F0.m0, 0 to 1</title>"), 1u);
    EXPECT_EQ(count(svg, "2 idle"), 4u);
    EXPECT_EQ(count(svg, "<text"), count(svg, "</text>"));
    EXPECT_EQ(count(svg, "<rect"), count(svg, "</rect>") + count(svg, "/>") - count(svg, "<line"));
    EXPECT_NE(svg.find("input gradient, phase 1"), std::string::npos);
    EXPECT_EQ(count(svg, "step time 26, bubble 2 (7.7 %)"), 1u);
    const Simulated plain({ScheduleKind::GPipe, 2, 2});
    const std::string measured =
        schedule_svg(plain.schedule,
                     timeline_of({{{0, 1.23456}, {1.5, 4}, {4, 5}, {5, 320.5}},
                                  {{2, 3}, {3, 4}, {4, 5}, {6, 320.5}}}),
                     "measured", "ms");
    EXPECT_EQ(count(measured, "step time 320 ms, bubble 0.265 to 3 ms (0.9 %)"), 1u) << measured;
    EXPECT_EQ(count(measured, "0.265 ms idle"), 1u);
    EXPECT_EQ(schedule_svg(plain.schedule, plain.timeline).find("phase"), std::string::npos);
}

/// A bar's height.
double height_of(const std::string& svg, const std::string& op) {
    const std::size_t end = svg.find("<title>" + op + ","), at = svg.rfind("height=\"", end);
    return end == std::string::npos ? 0 : std::stod(svg.substr(at + 8));
}

TEST(ScheduleReport, AWeightGradientThatFillsStandsBelowItsInputGradient) {
    const Schedule schedule = split_backwards(make_schedule({ScheduleKind::GPipe, 1, 2}));
    const auto picture = [&](double begin) {
        return schedule_svg(schedule,
                            timeline_of({{{0, 1}, {1, 2}, {2, 4}, {begin, 5}, {5, 6}, {6, 7}}}),
                            "measured", "ms");
    };
    const std::string filled = picture(3), plain = picture(4);
    EXPECT_GT(height_of(plain, "I0.m0"), 0);
    EXPECT_EQ(height_of(plain, "W0.m0"), height_of(plain, "I0.m0"));
    EXPECT_LT(height_of(filled, "W0.m0"), 0.6 * height_of(plain, "W0.m0"));
    EXPECT_LT(height_of(filled, "I0.m0"), 0.6 * height_of(plain, "I0.m0"));
    EXPECT_EQ(height_of(filled, "I0.m1"), height_of(plain, "I0.m1"));
}

/// {top, bottom} of each.
std::vector<std::pair<double, double>> levels_of(const std::vector<GanttBar>& bars) {
    std::vector<std::pair<double, double>> levels;
    for (const GanttBar& bar : bars)
        levels.emplace_back(bar.top, bar.bottom);
    return levels;
}

TEST(Gantt, BarsAtOnceStandAboveEachOtherByLayer) {
    const auto bar = [](double start, double end, int layer) {
        GanttBar made;
        made.start = start;
        made.end = end;
        made.layer = layer;
        return made;
    };
    using Levels = std::vector<std::pair<double, double>>;
    constexpr double kThird = 1.0 / 3;
    std::vector<GanttBar> bars = {bar(0, 2, 1), bar(2, 4, 0), bar(4, 6, 2)};
    EXPECT_EQ(stack_bars(bars), 1u);
    EXPECT_EQ(levels_of(bars), (Levels{{0, 1}, {0, 1}, {0, 1}})) << "one after the other";
    bars = {bar(0, 4, 2), bar(1, 3, 0), bar(3.1, 8, 0), bar(8, 9, 1)};
    EXPECT_EQ(stack_bars(bars), 2u);
    EXPECT_EQ(levels_of(bars), (Levels{{0.5, 1}, {0, 0.5}, {0, 0.5}, {0, 1}})) << "but the last";
    bars = {bar(0, 5, 1), bar(1, 9, 1), bar(4, 7, 2), bar(8, 10, 1)};
    EXPECT_EQ(stack_bars(bars), 3u);
    EXPECT_EQ(levels_of(bars),
              (Levels{{0, kThird}, {kThird, 2 * kThird}, {2 * kThird, 3 * kThird}, {0, kThird}}))
        << "two of a layer";
    bars = {bar(9, 20, 0), bar(19, 19.9, 0), bar(19.5, 40, 0)};
    EXPECT_EQ(stack_bars(bars), 2u) << "the last with the short one alone";
    EXPECT_EQ(levels_of(bars), (Levels{{0, 0.5}, {0.5, 1}, {0, 0.5}}));
    bars = {bar(0, 10, 0), bar(9.95, 11, 2)};
    EXPECT_EQ(stack_bars(bars), 1u) << "hardly at once";
    bars.clear();
    EXPECT_EQ(stack_bars(bars), 0u);
}

TEST(ScheduleReport, TheTraceHasNoTwoOpsAtOnceOnALane) {
    const Simulated s({ScheduleKind::DualPipe, 8, 20});
    const auto json = nlohmann::json::parse(schedule_trace(s.schedule, s.timeline));
    std::map<std::pair<int, int>, double> until;
    std::size_t ops = 0;
    for (const auto& event : json.at("traceEvents")) {
        if (event.at("ph") != "X")
            continue;
        double& end = until[{event.at("pid").get<int>(), event.at("tid").get<int>()}];
        EXPECT_GE(event.at("ts").get<double>(), end) << event;
        end = event.at("ts").get<double>() + event.at("dur").get<double>();
        ++ops;
    }
    std::size_t all = 0;
    for (const auto& of_rank : s.schedule.ops)
        all += of_rank.size();
    EXPECT_EQ(ops, all);
}

TEST(ScheduleReport, TheComparisonIsOfTheSameWork) {
    ScheduleOptions options = resolve_schedule({.ranks = 8, .micro_batches = 32, .compare = true});
    const auto json = nlohmann::json::parse(comparison_json(options)).at("schedules");
    ASSERT_EQ(json.size(), kNumScheduleKinds);
    for (const auto& line : json)
        EXPECT_EQ(line.at("step_time").get<double>() - line.at("bubble").get<double>(), 96) << line;
    EXPECT_EQ(json.at(1).at("bubble"), 21);
    EXPECT_EQ(json.at(6).at("parameter_copies"), 2);
    EXPECT_EQ(json.at(7).at("bubble"), 7);
    EXPECT_EQ(json.at(7).at("activations"), 8.5);
    const std::string text = comparison_text(options);
    for (std::size_t kind = 0; kind < kNumScheduleKinds; ++kind)
        EXPECT_NE(text.find(std::string("\n") + to_string(static_cast<ScheduleKind>(kind)) + " "),
                  std::string::npos)
            << text;
    options.desc.ranks = 3;
    options.desc.micro_batches = 5;
    const std::string few = comparison_text(options);
    EXPECT_NE(few.find("dualpipe needs an even number of ranks"), std::string::npos) << few;
    options.costs.stages.resize(3);
    EXPECT_THROW((void)comparison_text(options), Error);
}

TEST(ScheduleReport, GoesToAFile) {
    const TemporaryFolder folder;
    ScheduleOptions options = resolve_schedule({.kind = "zb-v", .format = "svg"});
    options.out = folder.path() / "zb-v.svg";
    testing::internal::CaptureStdout();
    EXPECT_EQ(print_schedule(options), 0);
    EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
    EXPECT_EQ(content_of(*options.out).substr(0, 4), "<svg");
    options.out = folder.path() / "nowhere" / "zb-v.svg";
    EXPECT_THROW((void)print_schedule(options), Error);
}

} // namespace
} // namespace bellows
