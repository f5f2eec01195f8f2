// SPDX-License-Identifier: MIT
// Overlapped pairs: small cases by hand, bounds for random ones, and what the search finds.
#include <bellows/base/error.hpp>
#include <bellows/schedule/pair.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <map>
#include <random>
#include <string>

namespace bellows {
namespace {

constexpr auto kCompute = NodeResource::Compute;
constexpr auto kExchange = NodeResource::Exchange;

/// DeepSeek-V3's, each exchange where it can start: DISPATCH(B) is that of the layer below.
constexpr const char* kDeepSeek =
    "DISPATCH(B) ATTN(F) ROUTER(F) DISPATCH(F) SHARED(F) SHARED(B) MLP(B) COMBINE(B) ROUTER(B) "
    "MLP(W) SHARED(W) MLP(F) COMBINE(F) ATTN(B) ATTN(W)";

/// A MoE layer whose router and shared expert take no time.
PairNodes plain_layer(double compute, double exchange) {
    return {.forward = {{"ATTN(F)", kCompute, compute},
                        {"DISPATCH(F)", kExchange, exchange},
                        {"MLP(F)", kCompute, compute},
                        {"COMBINE(F)", kExchange, exchange}},
            .input_gradient = {{"DISPATCH(B)", kExchange, exchange},
                               {"MLP(B)", kCompute, compute},
                               {"COMBINE(B)", kExchange, exchange},
                               {"ATTN(B)", kCompute, compute}},
            .weight_gradient = {{"MLP(W)", kCompute, compute, false, 3},
                                {"ATTN(W)", kCompute, compute, false, 4}}};
}

PairNodes moe_layer(double exchange = 1.5) {
    return {.forward = {{"ATTN(F)", kCompute, 1},
                        {"ROUTER(F)", kCompute, 0.1},
                        {"DISPATCH(F)", kExchange, exchange},
                        {"SHARED(F)", kCompute, 0.3, true},
                        {"MLP(F)", kCompute, 1},
                        {"COMBINE(F)", kExchange, exchange}},
            .input_gradient = {{"DISPATCH(B)", kExchange, exchange},
                               {"SHARED(B)", kCompute, 0.3, true},
                               {"MLP(B)", kCompute, 1},
                               {"COMBINE(B)", kExchange, exchange},
                               {"ROUTER(B)", kCompute, 0.1},
                               {"ATTN(B)", kCompute, 1}},
            .weight_gradient = {{"MLP(W)", kCompute, 1, false, 3},
                                {"SHARED(W)", kCompute, 0.3, false, 5},
                                {"ATTN(W)", kCompute, 1, false, 6}}};
}

PairNodes dense_layer() {
    return {
        .forward = {{"ATTN(F)", kCompute, 1}, {"FFN(F)", kCompute, 2}},
        .input_gradient = {{"FFN(B)", kCompute, 2}, {"ATTN(B)", kCompute, 1}},
        .weight_gradient = {{"FFN(W)", kCompute, 2, false, 1}, {"ATTN(W)", kCompute, 1, false, 2}}};
}

/// The layers one behind the other, in a forward's order.
PairNodes model_of(const std::vector<PairNodes>& layers) {
    PairNodes all;
    for (const PairNodes& layer : layers)
        all.forward.insert(all.forward.end(), layer.forward.begin(), layer.forward.end());
    for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) {
        for (PairNode node : layer->weight_gradient) {
            node.after += all.input_gradient.size();
            all.weight_gradient.push_back(node);
        }
        all.input_gradient.insert(all.input_gradient.end(), layer->input_gradient.begin(),
                                  layer->input_gradient.end());
    }
    return all;
}

/// In the order of handing in.
std::vector<const PairNode*> handed_in(const PairNodes& nodes, const PairOrder& order) {
    std::vector<const PairNode*> all;
    std::map<OpKind, std::size_t> next;
    for (const OpKind kind : order) {
        const auto& part = kind == OpKind::Forward         ? nodes.forward
                           : kind == OpKind::InputGradient ? nodes.input_gradient
                                                           : nodes.weight_gradient;
        all.push_back(&part.at(next[kind]++));
    }
    return all;
}

std::string names_of(const PairNodes& nodes, const PairOrder& order) {
    PairPattern names;
    for (const PairNode* node : handed_in(nodes, order))
        names.push_back(node->name);
    return to_text(names);
}

/// "ATTN(F) 0-1, …" in the order of handing in.
std::string times_of(const PairNodes& nodes, const PairOrder& order) {
    const PairTimes times = simulate_pair(nodes, order);
    std::string text;
    for (std::size_t i = 0; i < order.size(); ++i) {
        char span[64];
        std::snprintf(span, sizeof span, " %g-%g", times.nodes[i].start, times.nodes[i].end);
        text += (i == 0 ? "" : ", ") + handed_in(nodes, order)[i]->name + span;
    }
    return text;
}

PairTimes run(const PairNodes& nodes, const std::string& pattern) {
    return simulate_pair(nodes, interleave(nodes, parse_pattern(pattern)));
}

TEST(Pair, OneAfterTheOtherByHand) {
    const PairNodes nodes = plain_layer(1, 1);
    const PairOrder order = one_after_the_other(nodes);
    // ATTN(B) and MLP(W) can begin at the same time.
    EXPECT_EQ(times_of(nodes, order),
              "ATTN(F) 0-1, DISPATCH(F) 1-2, MLP(F) 2-3, COMBINE(F) 3-4, DISPATCH(B) 4-5, MLP(B) "
              "5-6, COMBINE(B) 6-7, ATTN(B) 7-8, MLP(W) 8-9, ATTN(W) 9-10");
    const PairTimes times = simulate_pair(nodes, order);
    EXPECT_EQ(times.time, 10);
    EXPECT_EQ(times.compute, 6);
    EXPECT_EQ(times.exchange, 4);
    EXPECT_EQ(times.hidden, 0);
}

TEST(Pair, AnInterleavedLayerByHand) {
    const PairNodes nodes = plain_layer(1, 1.5);
    const PairOrder order = interleave(nodes, parse_pattern(kDeepSeek));
    // DISPATCH(F) waits for the exchange before it, MLP(B) for its own alone.
    EXPECT_EQ(times_of(nodes, order),
              "DISPATCH(B) 0-1.5, ATTN(F) 0-1, DISPATCH(F) 1.5-3, MLP(B) 1.5-2.5, COMBINE(B) "
              "3-4.5, MLP(W) 4.5-5.5, MLP(F) 3-4, COMBINE(F) 4.5-6, ATTN(B) 5.5-6.5, ATTN(W) "
              "6.5-7.5");
    EXPECT_EQ(simulate_pair(nodes, order).hidden, 1 + 1 + 1 + 1.5);
}

TEST(Pair, TheFirstThatCouldBeginRunsFirst) {
    // Both wait for LONG(F); what could begin earlier is handed in later.
    const PairNodes nodes{.forward = {{"LONG(F)", kCompute, 5}, {"NEXT(F)", kCompute, 1}},
                          .input_gradient = {{"SEND(B)", kExchange, 2}, {"MLP(B)", kCompute, 1}},
                          .weight_gradient = {}};
    EXPECT_EQ(times_of(nodes, one_after_the_other(nodes)),
              "LONG(F) 0-5, NEXT(F) 6-7, SEND(B) 0-2, MLP(B) 5-6");
}

TEST(Pair, RoundingDecidesNothing) {
    // Two sums that are equal but for rounding: 0.1 + 0.2 and 0.3.
    const PairNodes nodes{
        .forward = {{"A(F)", kCompute, 0.1}, {"B(F)", kCompute, 0.2}, {"C(F)", kCompute, 1}},
        .input_gradient = {{"SEND(B)", kExchange, 0.3}, {"MLP(B)", kCompute, 1}},
        .weight_gradient = {}};
    const PairTimes times = simulate_pair(nodes, one_after_the_other(nodes));
    EXPECT_LT(times.nodes[2].start, times.nodes[4].start);
}

TEST(Pair, BesideAnExchangeNeedsWhatItNeeds) {
    const PairNodes nodes{.forward = {{"ROUTER(F)", kCompute, 1},
                                      {"DISPATCH(F)", kExchange, 2},
                                      {"SHARED(F)", kCompute, 3, true},
                                      {"MLP(F)", kCompute, 1}},
                          .input_gradient = {},
                          .weight_gradient = {}};
    EXPECT_EQ(times_of(nodes, one_after_the_other(nodes)),
              "ROUTER(F) 0-1, DISPATCH(F) 1-3, SHARED(F) 1-4, MLP(F) 4-5");
    PairNodes longer = nodes;
    longer.forward[1].seconds = 5;
    EXPECT_EQ(times_of(longer, one_after_the_other(nodes)),
              "ROUTER(F) 0-1, DISPATCH(F) 1-6, SHARED(F) 1-4, MLP(F) 6-7");
    // Behind a compute node it says nothing.
    PairNodes alone = nodes;
    alone.forward[1].resource = kCompute;
    EXPECT_EQ(times_of(alone, one_after_the_other(nodes)),
              "ROUTER(F) 0-1, DISPATCH(F) 1-3, SHARED(F) 3-6, MLP(F) 6-7");
}

TEST(Pair, RowsByHand) {
    // Both sides of an exchange, beside weight gradients.
    const PairNodes nodes = {
        .forward = {{"MLP(F)", kCompute, 2}, {"COMBINE(F)", kExchange, 3}},
        .input_gradient = {{"DISPATCH(B)", kExchange, 1}, {"MLP(B)", kCompute, 2}},
        .weight_gradient = {{"MLP(W)", kCompute, 1, false, 0}}};
    const PairOrder order = one_after_the_other(nodes);
    const auto ends = [&](double crowding) {
        std::vector<double> all;
        for (const OpTime& time : simulate_pair(nodes, order, crowding).nodes)
            all.push_back(time.end);
        return all;
    };
    // COMBINE(F) was handed in ahead of DISPATCH(B).
    EXPECT_EQ(ends(0), (std::vector<double>{2, 5, 6, 8, 1}));
    // Until 2 two compute at half their speed; one alone until 3.
    EXPECT_EQ(ends(1), (std::vector<double>{3, 6, 7, 9, 2}));
    const PairTimes times = simulate_pair(nodes, order, 0.5);
    EXPECT_EQ(times.nodes[4].end, 1.5);
    EXPECT_EQ(times.nodes[0].end, 2.5);
    EXPECT_EQ(times.time, 8.5);
    EXPECT_EQ(times.hidden, 0); // no row computes while one of the two runs
    EXPECT_EQ(times.compute, 5);
    EXPECT_EQ(times.exchange, 4);
    EXPECT_EQ(simulate_pair({}, {}, 0.5).time, 0);
}

TEST(Pair, CrowdingFollowsFromComputeAlone) {
    const PairNodes nodes = repeated(moe_layer(), 4);
    const PairOrder order = interleave(nodes, parse_pattern(kDeepSeek));
    PairNodes alone = nodes;
    for (auto* part : {&alone.forward, &alone.input_gradient, &alone.weight_gradient})
        for (PairNode& node : *part)
            if (node.resource == kExchange)
                node.seconds = 0;
    double before = 0;
    for (const double crowding : {0.1, 0.5, 0.9}) {
        const double seconds = simulate_pair(alone, order, crowding).time;
        EXPECT_GT(seconds, before);
        before = seconds;
        EXPECT_NEAR(crowding_of(nodes, order, seconds), crowding, 1e-6);
        // Neither faster than compute alone nor than the exchanges.
        const PairTimes times = simulate_pair(nodes, order, crowding);
        EXPECT_GT(times.time, seconds);
        EXPECT_GE(times.time, times.exchange);
        EXPECT_LE(times.hidden, times.exchange);
    }
    EXPECT_NEAR(crowding_of(nodes, order, 1e-3), 0, 1e-6);
    EXPECT_NEAR(crowding_of(nodes, order, 1e3), 1, 1e-6);
}

TEST(Pair, ThePublishedOrderHidesAllExchangesOfEqualNodes) {
    for (const std::size_t layers : {1u, 2u, 4u, 9u}) {
        const PairNodes nodes = repeated(plain_layer(1, 1), layers);
        const PairTimes times = run(nodes, kDeepSeek);
        EXPECT_EQ(times.hidden, times.exchange) << layers;
        EXPECT_EQ(times.time, times.compute) << layers;
        // As published, its exchanges unnamed: at the ends, the first dispatch stands alone.
        const PairTimes short_form = run(nodes, "MLP(B) MLP(W) MLP(F) ATTN(B) ATTN(W) ATTN(F)");
        EXPECT_LE(short_form.exchange - short_form.hidden, 2) << layers;
        EXPECT_LE(short_form.time, times.time + 2) << layers;
    }
    // As much exchange as compute: of each further layer's 6 + 6 half a unit shows.
    for (const std::size_t layers : {1u, 2u, 4u, 9u}) {
        const PairNodes even = repeated(plain_layer(1, 1.5), layers);
        const double n = static_cast<double>(layers);
        EXPECT_EQ(run(even, kDeepSeek).time, 1 + 6.5 * n);
        EXPECT_GT(simulate_pair(even, one_after_the_other(even)).time, 10.5 * n);
    }
}

TEST(Pair, NamesHandInWhatStandsBeforeThem) {
    const PairNodes nodes = repeated(moe_layer(), 2);
    EXPECT_EQ(names_of(nodes, interleave(nodes, parse_pattern("MLP(B) MLP(F) MLP(W)"))),
              // Exchanges are named nowhere and start with what stands before them.
              "DISPATCH(B) SHARED(B) MLP(B) COMBINE(B) ROUTER(B) ATTN(B) DISPATCH(B) "
              "ATTN(F) ROUTER(F) DISPATCH(F) SHARED(F) MLP(F) COMBINE(F) ATTN(F) ROUTER(F) "
              "DISPATCH(F) MLP(W) "
              "SHARED(B) MLP(B) COMBINE(B) SHARED(F) MLP(F) COMBINE(F) SHARED(W) ATTN(W) MLP(W) "
              "ROUTER(B) ATTN(B) SHARED(W) ATTN(W)");
    // MLP(W) takes the input gradients along that it needs.
    EXPECT_EQ(names_of(moe_layer(), interleave(moe_layer(), parse_pattern("MLP(W) ATTN(B)"))),
              "DISPATCH(B) SHARED(B) MLP(B) MLP(W) COMBINE(B) ROUTER(B) ATTN(B) ATTN(F) ROUTER(F) "
              "DISPATCH(F) SHARED(F) MLP(F) COMBINE(F) SHARED(W) ATTN(W)");
    EXPECT_EQ(names_of(dense_layer(), interleave(dense_layer(), parse_pattern("ATTN(B)"))),
              "FFN(B) ATTN(B) ATTN(F) FFN(F) FFN(W) ATTN(W)");
    EXPECT_EQ(interleave(nodes, parse_pattern("NOTHING(F)")), one_after_the_other(nodes));
    EXPECT_EQ(interleave(nodes, parse_pattern("COMBINE(F)")), one_after_the_other(nodes));
}

TEST(Pair, UnevenChunksAreHandedInAsWell) {
    PairNodes nodes = model_of({dense_layer(), dense_layer(), moe_layer(), moe_layer()});
    nodes.forward.insert(nodes.forward.begin(), {"EMBED(F)", kCompute, 0.5});
    const PairNodes more = moe_layer();
    for (int i = 0; i < 3; ++i)
        nodes.forward.insert(nodes.forward.end(), more.forward.begin(), more.forward.end());
    nodes.forward.push_back({"HEAD(F)", kCompute, 2});
    nodes.input_gradient.push_back({"EMBED(B)", kCompute, 0.5});
    for (const std::string& pattern :
         {std::string(kDeepSeek), to_text(choose_pattern(moe_layer())),
          to_text(choose_pattern(dense_layer())), std::string("MLP(W) ATTN(F)")}) {
        const PairOrder order = interleave(nodes, parse_pattern(pattern));
        EXPECT_NO_THROW(verify(nodes, order)) << pattern;
        EXPECT_EQ(order.size(), nodes.forward.size() + nodes.input_gradient.size() +
                                    nodes.weight_gradient.size());
    }
    EXPECT_LT(run(nodes, kDeepSeek).time,
              0.9 * simulate_pair(nodes, one_after_the_other(nodes)).time);
    EXPECT_EQ(interleave({}, parse_pattern(kDeepSeek)), PairOrder{});
    EXPECT_EQ(simulate_pair({}, {}).time, 0);
}

/// Throws with that in its message.
template <class F>
void expect_refused(F&& call, const std::string& part) {
    try {
        (void)call();
        ADD_FAILURE() << "accepted, expected: " << part;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    }
}

TEST(Pair, BadOrdersAndTimesAreRefused) {
    const PairNodes nodes = dense_layer();
    using enum OpKind;
    const auto refused = [&](const PairOrder& order, const std::string& part) {
        expect_refused(
            [&] {
                verify(nodes, order);
                return 0;
            },
            part);
        expect_refused([&] { return simulate_pair(nodes, order).time; }, part);
    };
    refused({}, "lacks ATTN(F)");
    refused({Forward, Forward, InputGradient, InputGradient, WeightGradient}, "lacks ATTN(W)");
    refused({Forward, Forward, Forward}, "more than its 2 nodes that end in (F)");
    refused({WeightGradient}, "FFN(W) after 0 input gradients; it needs 1");
    refused({Forward, InputGradient, WeightGradient, WeightGradient}, "it needs 2");
    refused({Backward}, "is of forwards");
    PairNodes far = nodes;
    far.weight_gradient[0].after = 3;
    expect_refused([&] { return interleave(far, parse_pattern("FFN(W)")).size(); },
                   "FFN(W) needs 3 input gradients of 2");
    for (const double bad : {-1.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN(), 1e308}) {
        PairNodes wrong = nodes;
        wrong.forward[0].seconds = wrong.forward[1].seconds = bad;
        expect_refused([&] { return simulate_pair(wrong, one_after_the_other(wrong)).time; },
                       "no simulation of a pair");
        expect_refused([&] { return choose_pattern(wrong).size(); }, "no simulation of a pair");
    }
    for (const double crowding : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()})
        expect_refused([&] { return simulate_pair({}, {}, crowding).time; }, "crowding");
}

TEST(Pair, PatternsAreText) {
    EXPECT_EQ(to_text(parse_pattern(kDeepSeek)), kDeepSeek);
    EXPECT_EQ(parse_pattern("  MLP(B)\tATTN(F)\n"), (PairPattern{"MLP(B)", "ATTN(F)"}));
    for (const char* bad : {"MLP", "MLP(B) (F)", "MLP(X)", "MLP(B),MLP(F", "MLP(f)"})
        EXPECT_THROW((void)parse_pattern(bad), Error) << bad;
    EXPECT_THROW((void)interleave(moe_layer(), {}), Error);
    EXPECT_THROW((void)interleave(moe_layer(), {"MLP"}), Error);
}

TEST(Pair, TheSearchIsNoWorseThanWhatItStartsFrom) {
    std::vector<PairNodes> layers = {dense_layer(), plain_layer(1, 1), plain_layer(1, 0)};
    for (const double exchange : {0.1, 0.7, 1.2, 1.775, 4.0})
        layers.push_back(moe_layer(exchange));
    for (const PairNodes& layer : layers)
        for (const std::size_t count : {1u, 2u, 4u, 7u}) {
            const PairNodes nodes = repeated(layer, count);
            const PairPattern pattern = choose_pattern(layer, count);
            const double time = run(nodes, to_text(pattern)).time;
            EXPECT_LE(time, run(nodes, kDeepSeek).time * (1 + 1e-9)) << to_text(pattern);
            EXPECT_LE(time, simulate_pair(nodes, one_after_the_other(nodes)).time * (1 + 1e-9))
                << to_text(pattern);
            EXPECT_EQ(choose_pattern(layer, count), pattern);
        }
    EXPECT_THROW((void)choose_pattern({}), Error);
    EXPECT_THROW((void)choose_pattern(moe_layer(), 0), Error);
    // Of equals, the published one.
    EXPECT_EQ(to_text(choose_pattern(moe_layer(0))), kDeepSeek);
    // Nodes of one part alone.
    const PairNodes forward{moe_layer().forward, {}, {}},
        backward{{}, moe_layer().input_gradient, {}};
    EXPECT_NO_THROW((void)choose_pattern(forward));
    EXPECT_NO_THROW((void)choose_pattern(backward));
}

/// A pair of layers as they could be, and other nodes.
PairNodes random_nodes(std::mt19937& random) {
    const auto below = [&](std::uint32_t end) { return random() % end; };
    const auto part = [&](const char* end) {
        std::vector<PairNode> nodes(below(12));
        for (PairNode& node : nodes) {
            node.name = "N" + std::to_string(below(4)) + end;
            node.resource = below(3) == 0 ? kExchange : kCompute;
            node.seconds = below(6) * 0.25;
            node.beside_exchange = below(3) == 0;
        }
        return nodes;
    };
    PairNodes nodes{part("(F)"), part("(B)"), part("(W)")};
    for (PairNode& node : nodes.weight_gradient) {
        node.after = below(static_cast<std::uint32_t>(nodes.input_gradient.size() + 1));
        node.resource = kCompute;
    }
    return nodes;
}

struct Placed {
    const PairNode* node = nullptr;
    OpTime time;
};

/// When those of a part ran.
std::vector<Placed> placed(const PairNodes& nodes, const PairOrder& order, const PairTimes& times,
                           OpKind kind) {
    std::vector<Placed> all;
    const auto handed = handed_in(nodes, order);
    for (std::size_t i = 0; i < order.size(); ++i)
        if (order[i] == kind)
            all.push_back({handed[i], times.nodes[i]});
    return all;
}

/// When the first `count` have ended.
double end_of(const std::vector<Placed>& part, std::size_t count) {
    double end = 0;
    for (std::size_t i = 0; i < count; ++i)
        end = std::max(end, part[i].time.end);
    return end;
}

void expect_in_order(const std::vector<Placed>& part) {
    for (std::size_t i = 0; i < part.size(); ++i) {
        const bool beside = i > 0 && part[i].node->beside_exchange &&
                            part[i].node->resource == kCompute &&
                            part[i - 1].node->resource == kExchange;
        EXPECT_GE(part[i].time.start, end_of(part, beside ? i - 1 : i));
    }
}

/// One at a time, exchanges in the order of handing in; returns how long one of them runs.
double expect_alone(const PairNodes& nodes, const PairOrder& order, const PairTimes& times,
                    NodeResource resource) {
    std::vector<OpTime> runs;
    const auto handed = handed_in(nodes, order);
    for (std::size_t i = 0; i < order.size(); ++i)
        if (handed[i]->resource == resource && handed[i]->seconds > 0)
            runs.push_back(times.nodes[i]);
    EXPECT_TRUE(resource == kCompute || std::ranges::is_sorted(runs, {}, &OpTime::start));
    std::ranges::sort(runs, {}, &OpTime::start);
    double sum = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
        EXPECT_TRUE(i == 0 || runs[i].start >= runs[i - 1].end);
        sum += runs[i].end - runs[i].start;
    }
    return sum;
}

/// How long a part takes on its own at the least.
double path_of(const std::vector<PairNode>& part) {
    std::vector<double> until{0};
    for (std::size_t i = 0; i < part.size(); ++i) {
        const bool beside = i > 0 && part[i].beside_exchange && part[i].resource == kCompute &&
                            part[i - 1].resource == kExchange;
        until.push_back(std::max(until.back(), until[beside ? i - 1 : i] + part[i].seconds));
    }
    return until.back();
}

TEST(Pair, RandomNodesKeepToTheBounds) {
    std::mt19937 random(3);
    for (int i = 0; i < 3000; ++i) {
        const PairNodes nodes = random_nodes(random);
        PairPattern pattern;
        for (std::uint32_t name = 0; name <= random() % 8; ++name)
            pattern.push_back("N" + std::to_string(random() % 5) +
                              std::array{"(F)", "(B)", "(W)"}[random() % 3]);
        const PairOrder order = interleave(nodes, pattern);
        ASSERT_NO_THROW(verify(nodes, order)) << to_text(pattern);
        const PairTimes times = simulate_pair(nodes, order);
        EXPECT_EQ(expect_alone(nodes, order, times, kCompute), times.compute);
        EXPECT_EQ(expect_alone(nodes, order, times, kExchange), times.exchange);
        EXPECT_GE(times.time, std::max({times.compute, times.exchange, path_of(nodes.forward),
                                        path_of(nodes.input_gradient)}));
        EXPECT_LE(times.time, times.compute + times.exchange);
        // Something always runs.
        EXPECT_EQ(times.time, times.compute + times.exchange - times.hidden);
        const auto gradients = placed(nodes, order, times, OpKind::InputGradient);
        expect_in_order(placed(nodes, order, times, OpKind::Forward));
        expect_in_order(gradients);
        for (const Placed& node : placed(nodes, order, times, OpKind::WeightGradient))
            EXPECT_GE(node.time.start, end_of(gradients, node.node->after));
        if (HasFailure())
            FAIL() << to_text(pattern) << " on " << names_of(nodes, order);
    }
}

std::string names_of(const PairNodes& nodes, const std::vector<BackwardNode>& order) {
    PairPattern names;
    for (const BackwardNode& node : order)
        names.push_back(nodes.of(node.kind).at(node.index).name);
    return to_text(names);
}

TEST(Backward, WeightGradientsFillWhatExchangesLeaveFree) {
    const auto filled = [](double exchange) {
        const PairNodes nodes = repeated(moe_layer(exchange), 2);
        return names_of(nodes, fill_backward(nodes));
    };
    // Nothing is as short.
    EXPECT_EQ(filled(0.1), "DISPATCH(B) SHARED(B) MLP(B) COMBINE(B) ROUTER(B) ATTN(B) DISPATCH(B) "
                           "SHARED(B) MLP(B) COMBINE(B) ROUTER(B) ATTN(B) MLP(W) SHARED(W) ATTN(W) "
                           "MLP(W) SHARED(W) ATTN(W)");
    // SHARED(W) of the layer before where MLP(W) would hold up what comes behind; beside
    // DISPATCH(B) SHARED(B) is all there is.
    EXPECT_EQ(filled(0.4), "DISPATCH(B) SHARED(B) MLP(B) COMBINE(B) ROUTER(B) ATTN(B) DISPATCH(B) "
                           "SHARED(B) MLP(B) COMBINE(B) SHARED(W) ROUTER(B) ATTN(B) MLP(W) ATTN(W) "
                           "MLP(W) SHARED(W) ATTN(W)");
    // MLP(W) where half of it holds up at most, then the next one for what is left.
    EXPECT_EQ(filled(0.6), "DISPATCH(B) SHARED(B) MLP(B) COMBINE(B) MLP(W) ROUTER(B) ATTN(B) "
                           "DISPATCH(B) SHARED(B) SHARED(W) MLP(B) COMBINE(B) ATTN(W) ROUTER(B) "
                           "ATTN(B) MLP(W) SHARED(W) ATTN(W)");
}

TEST(Backward, RandomNodesAreHandedInOnceAndBehindWhatTheyNeed) {
    std::mt19937 random(4);
    std::size_t filling = 0;
    for (int i = 0; i < 3000; ++i) {
        const PairNodes nodes = random_nodes(random);
        const std::vector<BackwardNode> order = fill_backward(nodes);
        std::size_t inputs = 0;
        std::vector<int> weights(nodes.weight_gradient.size());
        for (const BackwardNode& node : order) {
            if (node.kind == OpKind::InputGradient) {
                ASSERT_EQ(node.index, inputs++);
                continue;
            }
            ASSERT_EQ(node.kind, OpKind::WeightGradient);
            ++weights.at(node.index);
            ASSERT_LE(nodes.weight_gradient[node.index].after, inputs);
            filling += inputs < nodes.input_gradient.size();
        }
        EXPECT_EQ(inputs, nodes.input_gradient.size());
        EXPECT_TRUE(std::ranges::all_of(weights, [](int count) { return count == 1; }));
    }
    EXPECT_GT(filling, 100u);
}

TEST(Backward, WhatCannotBeOrderedIsRefused) {
    PairNodes wrong = moe_layer();
    wrong.weight_gradient[0].after = 9;
    EXPECT_THROW((void)fill_backward(wrong), Error);
    wrong = moe_layer(-1);
    EXPECT_THROW((void)fill_backward(wrong), Error);
    EXPECT_TRUE(fill_backward({}).empty());
}

} // namespace
} // namespace bellows
