// SPDX-License-Identifier: MIT
// experts.svg: what it shows of metrics, that it stays small, and that odd metrics do no harm.
#include "app/pictures/expert_plot.hpp"
#include "app/pictures/svg.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/shape/expert_placement.hpp>
#include <bellows/train/metrics.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <regex>
#include <string>
#include <vector>

namespace bellows {
namespace {

StepMetrics step_of(std::uint64_t step, std::vector<ExpertBalance> experts) {
    StepMetrics metrics;
    metrics.step = step;
    metrics.experts = std::move(experts);
    return metrics;
}

/// Balance of a layer with these loads on two ranks.
ExpertBalance balance(std::uint64_t layer, std::vector<std::uint64_t> loads) {
    const std::vector<double> values(loads.begin(), loads.end());
    return expert_balance(
        {layer, std::move(loads), rank_loads(plain_placement(values.size(), 2), values)}, true);
}

std::size_t count(const std::string& text, const std::string& part) {
    std::size_t n = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
        ++n;
    return n;
}

/// Cells of a color in all strips: the lengths of its strokes.
std::uint64_t cells(const std::string& svg, const std::string& color) {
    std::uint64_t n = 0;
    const std::regex path("<path stroke=\"" + color + "\" d=\"([^\"]*)\""), stroke("h([0-9]+)");
    for (std::sregex_iterator at(svg.begin(), svg.end(), path), end; at != end; ++at) {
        const std::string strokes = (*at)[1];
        for (std::sregex_iterator one(strokes.begin(), strokes.end(), stroke); one != end; ++one)
            n += std::stoull((*one)[1]);
    }
    return n;
}

constexpr const char* kWhite = "#ffffff";
constexpr const char* kMeans = "#8bbddc";
constexpr const char* kDark = "#08306b";

/// No number of the picture is none, and nothing lies beside the document.
void expect_sound(const std::string& svg) {
    EXPECT_EQ(svg.rfind("<svg", 0), 0u);
    EXPECT_EQ(count(svg, "</svg>\n"), 1u);
    EXPECT_LE(svg.size(), kMostExpertPlotBytes);
    for (const char* none : {"nan", "inf", "e+"})
        EXPECT_EQ(svg.find(none), std::string::npos) << none;
    std::smatch size;
    ASSERT_TRUE(std::regex_search(svg, size, std::regex("width=\"([0-9]+)\" height=\"([0-9]+)\"")));
    const double width = std::stod(size[1]), height = std::stod(size[2]);
    const std::regex text("<text x=\"([-0-9.]+)\" y=\"([-0-9.]+)\"( text-anchor=\"[a-z]+\")? "
                          "class=\"(tick|label|subtitle)\"[^>]*>([^<]*)<");
    for (std::sregex_iterator at(svg.begin(), svg.end(), text), end; at != end; ++at) {
        const double x = std::stod((*at)[1]), y = std::stod((*at)[2]);
        EXPECT_TRUE(x >= 0 && y >= 0 && y <= height) << (*at)[0];
        if ((*at)[3].length() == 0)
            EXPECT_LE(x + kTickLetter * static_cast<double>((*at)[5].length()), width) << (*at)[0];
        else
            EXPECT_LE(x, width) << (*at)[0];
    }
}

} // namespace

TEST(ExpertPlot, AColorForEachExpertAndStep) {
    ExpertHistory history;
    for (std::uint64_t step = 1; step <= 5; ++step)
        history.add(step_of(step, {balance(1, {10, 10, 10, 10}), balance(7, {0, 0, 5, 35})}));
    const std::string svg = expert_plot_svg(history, {.subtitle = "a < b"});
    expect_sound(svg);
    EXPECT_NE(svg.find("a &lt; b"), std::string::npos);
    EXPECT_NE(svg.find(">layer 1<"), std::string::npos);
    EXPECT_NE(svg.find(">layer 7<"), std::string::npos);
    EXPECT_NE(svg.find("fullest expert 3.50 times the mean, fullest rank 2.00 times"),
              std::string::npos);
    EXPECT_EQ(count(svg, "class=\"loads\""), 2u);
    EXPECT_EQ(cells(svg, kMeans), 5u * 4);
    EXPECT_EQ(cells(svg, kWhite), 5u * 2);
    EXPECT_EQ(cells(svg, kDark), 5u);
    EXPECT_EQ(count(svg, "class=\"move\""), 0u);
    EXPECT_EQ(svg.find("experts moved"), std::string::npos);
    EXPECT_NE(svg.find("a column for each"), std::string::npos);
}

// As a run leaves them, with the moves that a placement which changes will write.
TEST(ExpertPlot, MovesAreMarkedWithWhatTheyWere) {
    const TemporaryFolder folder;
    std::string lines;
    for (std::uint64_t step = 1; step <= 20; ++step) {
        StepMetrics metrics = step_of(step, {balance(2, {4, 3, 2, 1})});
        if (step == 10)
            metrics.moves = {{2, 0, 0, 1}, {2, 3, 1, 0}};
        if (step == 15)
            for (std::uint64_t expert = 0; expert < 7; ++expert)
                metrics.moves.push_back({2, expert, 1, 2});
        lines += format_metrics(metrics) + "\n";
    }
    ExpertHistory history;
    read_metrics(folder.write("metrics.jsonl", lines + "{\"step\": 21, \"mov"),
                 [&](const StepMetrics& step) { history.add(step); });
    const std::string svg = expert_plot_svg(history);
    expect_sound(svg);
    EXPECT_EQ(count(svg, "class=\"move\""), 2u);
    EXPECT_NE(svg.find("<title>step 10: expert 0 from rank 0 to rank 1; step 10: expert 3 from "
                       "rank 1 to rank 0</title>"),
              std::string::npos);
    EXPECT_NE(svg.find("; and 3 more</title>"), std::string::npos);
    EXPECT_NE(svg.find("experts moved"), std::string::npos);
}

TEST(ExpertPlot, LongRunsOfLargeModelsStaySmall) {
    ExpertHistory history;
    std::uint64_t random = 1;
    for (std::uint64_t step = 1; step <= 3000; step += 10) {
        StepMetrics metrics = step_of(step, {});
        for (std::uint64_t layer = 3; layer < 61; ++layer) {
            std::vector<std::uint64_t> loads(256);
            for (std::uint64_t& load : loads) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                load = random >> 60;
            }
            metrics.experts.push_back(balance(layer, std::move(loads)));
            metrics.moves.push_back({layer, random >> 58, 1, 2});
        }
        history.add(metrics);
    }
    const std::string svg = expert_plot_svg(history);
    expect_sound(svg);
    EXPECT_EQ(count(svg, "class=\"layer\""), 58u);
    EXPECT_NE(svg.find("a row is the fullest of 4 experts"), std::string::npos);
    EXPECT_GT(svg.size(), kMostExpertPlotBytes / 4) << "it shows what there is room for";
}

// Every tenth step has loads; the steps between show the last ones, longer gaps stay empty.
TEST(ExpertPlot, StepsWithoutLoadsLeaveNoHoles) {
    ExpertHistory history;
    for (std::uint64_t step = 1; step <= 1000; ++step) {
        ExpertBalance one = balance(1, {1, 1});
        if (!(step == 1 || step % 10 == 0))
            one.loads.clear();
        history.add(step_of(step, {one}));
    }
    history.fit_to_loads();
    EXPECT_GE(history.columns(), 50u);
    const std::string svg = expert_plot_svg(history);
    expect_sound(svg);
    EXPECT_EQ(cells(svg, kMeans), 2 * history.columns());
    ExpertHistory gap;
    for (const std::uint64_t step : {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 51, 52, 53, 54, 55,
                                     56, 57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70})
        gap.add(step_of(step, {balance(1, {1, 1})}));
    const std::string with_gap = expert_plot_svg(gap);
    gap.fit_to_loads();
    EXPECT_LT(cells(with_gap, kMeans), 2 * gap.columns());
}

TEST(ExpertPlot, RanksWithAllExpertsHaveNoLineOfRanks) {
    ExpertHistory with, without;
    for (std::uint64_t step = 1; step <= 4; ++step) {
        with.add(step_of(step, {balance(1, {3, 1})}));
        without.add(step_of(step, {expert_balance({1, {3, 1}}, true)}));
    }
    const std::string svg = expert_plot_svg(without);
    expect_sound(svg);
    EXPECT_EQ(svg.find("fullest rank"), std::string::npos);
    EXPECT_EQ(count(expert_plot_svg(with), "stroke-width=\"1.6\""), 2u);
    EXPECT_EQ(count(svg, "stroke-width=\"1.6\""), 1u);
}

TEST(ExpertPlot, OddMetricsDoNoHarm) {
    constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();
    const double inf = std::numeric_limits<double>::infinity();
    ExpertHistory history;
    EXPECT_NE(expert_plot_svg(history).find("no steps yet"), std::string::npos);
    history.add(step_of(4, {}));
    EXPECT_TRUE(history.empty());
    history.add(step_of(5, {{1, inf, -inf, std::nan(""), {1, 2}},
                            {1, -1, 1e300, 0, {kHuge, kHuge}},
                            {1, 2, 2, 0, {1, 2, 3}}, // not as many experts as before
                            {1, 2, {}, 0, std::vector<std::uint64_t>(70000, 1)},
                            {2, 1, 1, 1, {0, 0}},
                            {kHuge, 1, 1, 1, {kHuge}}}));
    history.add(step_of(3, {balance(1, {9, 1})})); // sooner than the one before
    expect_sound(expert_plot_svg(history));
    StepMetrics late = step_of(kHuge, {balance(1, {2, 0})});
    late.moves = {{kHuge, kHuge, kHuge, kHuge}, {9, 1, 1, 1}};
    history.add(late);
    const std::string svg = expert_plot_svg(history);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_LE(history.columns(), ExpertHistory::kMostColumns);
    for (std::uint64_t layer = 0; layer < 1000; ++layer)
        history.add(step_of(kHuge, {balance(layer, {1, 1})}));
    EXPECT_EQ(history.layers().size(), ExpertHistory::kMostLayers);
    EXPECT_NE(expert_plot_svg(history).find("further layers are left out"), std::string::npos);
}

} // namespace bellows
