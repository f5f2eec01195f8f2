// SPDX-License-Identifier: MIT
// Pictures: texts stay within the document, and bars stay visible however many there are.
#include "app/pictures/gantt.hpp"
#include "app/pictures/loss_plot.hpp"
#include "app/pictures/svg.hpp"

#include <gtest/gtest.h>

#include <regex>
#include <string>
#include <vector>

namespace bellows {
namespace {

std::vector<std::smatch> all_of(const std::string& text, const std::regex& pattern) {
    std::vector<std::smatch> found;
    for (auto at = std::sregex_iterator(text.begin(), text.end(), pattern);
         at != std::sregex_iterator(); ++at)
        found.push_back(*at);
    return found;
}

double width_of(const std::string& svg) {
    std::smatch match;
    return std::regex_search(svg, match, std::regex("<svg[^>]* width=\"([0-9]+)\""))
               ? std::stod(match[1])
               : 0;
}

/// Texts that begin at their x end before the document does.
void expect_texts_inside(const std::string& svg) {
    const double width = width_of(svg);
    const auto texts = all_of(svg, std::regex("<text x=\"([0-9.]+)\" y=\"[0-9.]+\" "
                                              "class=\"(title|subtitle|tick)\">([^<]*)</text>"));
    EXPECT_FALSE(texts.empty());
    for (const std::smatch& text : texts) {
        const double letter = text[2] == "title" ? kTitleLetter : kTickLetter;
        EXPECT_LE(std::stod(text[1]) + letter * static_cast<double>(text[3].length()), width)
            << text[0];
    }
}

TEST(Pictures, TextIsWrapped) {
    EXPECT_EQ(wrapped("one two three", 80, 10), (std::vector<std::string>{"one two", "three"}));
    EXPECT_EQ(wrapped("abcdefgh", 30, 10), (std::vector<std::string>{"abc", "def", "gh"}));
    EXPECT_EQ(wrapped("", 30, 10), std::vector<std::string>{});
    EXPECT_EQ(wrapped("\u00e4\u00e4\u00e4", 30, 10),
              (std::vector<std::string>{"\u00e4\u00e4", "\u00e4"}));
}

TEST(Pictures, ThousandsOfBarsStayVisible) {
    GanttChart chart;
    chart.rows.resize(1);
    constexpr int kBars = 5000;
    for (int i = 0; i < kBars; ++i)
        chart.rows[0].bars.push_back({double(i), i + 0.9, "1", "bar", "#123456"});
    const std::string svg = gantt_svg(chart);
    const auto bars = all_of(
        svg, std::regex("<rect [^>]*width=\"([0-9.]+)\"[^>]*fill=\"#123456\"([^>]*)><title>"));
    ASSERT_EQ(bars.size(), kBars);
    for (const std::smatch& bar : bars) {
        EXPECT_GT(std::stod(bar[1]), 0);
        std::smatch stroke;
        const std::string rest = bar[2];
        if (std::regex_search(rest, stroke, std::regex("stroke-width=\"([0-9.]+)\""))) {
            EXPECT_LE(2 * std::stod(stroke[1]), std::stod(bar[1])) << "the border hides the bar";
        }
    }
}

TEST(Pictures, LongNamesAreNotCutOff) {
    std::string name = "configuration";
    for (int i = 0; i < 12; ++i)
        name += "_of_an_experiment_" + std::to_string(i);
    GanttChart chart;
    chart.title = name;
    chart.subtitle = name + " " + name;
    chart.rows = {{"a row with quite a long name", "12345678.9 ms idle in all", {}}};
    chart.rows[0].bars = {{0, 1, "1", "bar", "#123456"}};
    for (int i = 0; i < 20; ++i)
        chart.legend.emplace_back("meaning " + std::to_string(i), "#123456");
    expect_texts_inside(gantt_svg(chart));
    LossPlotOptions options;
    options.title = "Training loss of " + name;
    options.subtitle = name;
    expect_texts_inside(loss_plot_svg({{1, 5}, {2, 4}, {3, 3}}, options));
}

} // namespace
} // namespace bellows
