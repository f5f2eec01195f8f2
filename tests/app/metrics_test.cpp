// SPDX-License-Identifier: MIT
#include "app/pictures/loss_plot.hpp"
#include "app/progress.hpp"
#include "app/train/summary.hpp"
#include "app/units.hpp"
#include "support/temporary_folder.hpp"

#include <bellows/base/files.hpp>
#include <bellows/train/metrics.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <limits>

#include <sys/resource.h>
#include <unistd.h>

using namespace bellows;
namespace fs = std::filesystem;

namespace {

StepMetrics step_at(std::uint64_t step, double loss) {
    return {step, loss, 0.5, 1e-3, 1000, 2, 3e9, 4096, 0.25};
}

/// Collects what a reporter writes.
class Output {
public:
    Output() : file_(::open_memstream(&text_, &size_)) {}
    Output(const Output&) = delete;
    Output& operator=(const Output&) = delete;
    ~Output() {
        std::fclose(file_);
        std::free(text_);
    }
    std::FILE* file() const { return file_; }
    std::string text() const {
        std::fflush(file_);
        return {text_, size_};
    }

private:
    char* text_ = nullptr;
    std::size_t size_ = 0;
    std::FILE* file_;
};

std::size_t count(const std::string& text, const std::string& part) {
    std::size_t n = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
        ++n;
    }
    return n;
}

} // namespace

TEST(Metrics, ALinePerStepWithTheNamedKeys) {
    TemporaryFolder folder;
    const fs::path path = folder.path() / "metrics.jsonl";
    MetricsLog log(path, 0);
    log.add(step_at(1, 5.5));
    log.add(step_at(2, std::nan("")));
    EXPECT_EQ(count(content_of(path), "\n"), 2u) << "lines must be there at once";
    std::istringstream lines(content_of(path));
    std::string line;
    std::getline(lines, line);
    const auto json = nlohmann::json::parse(line);
    EXPECT_EQ(json.size(), 10u);
    EXPECT_EQ(json.at("step"), 1);
    EXPECT_EQ(json.at("loss"), 5.5);
    EXPECT_EQ(json.at("loss_nats_per_token"), 5.5);
    EXPECT_EQ(json.at("grad_norm"), 0.5);
    EXPECT_EQ(json.at("lr"), 1e-3);
    EXPECT_EQ(json.at("tokens_per_s"), 1000);
    EXPECT_EQ(json.at("seconds"), 2);
    EXPECT_EQ(json.at("model_flops_per_s"), 3e9);
    EXPECT_EQ(json.at("bytes_exchanged"), 4096);
    EXPECT_EQ(json.at("seconds_waited"), 0.25);
    std::getline(lines, line);
    EXPECT_TRUE(nlohmann::json::parse(line).at("loss").is_null());
}

TEST(Metrics, RatesAndPartsComeBack) {
    TemporaryFolder folder;
    const fs::path path = folder.path() / "metrics.jsonl";
    StepMetrics step = step_at(1, 6);
    step.model_flops_per_s_per_rank = 1.5e9;
    step.mfu = 0.25;
    step.sequences = 24;
    step.parts = StepParts{.attention = 0.5, .experts = 0.25, .optimizer = 1e-9, .device = 0.75};
    MetricsLog(path, 0).add(step);
    const auto json = nlohmann::json::parse(content_of(path));
    EXPECT_EQ(json.at("model_flops_per_s_per_rank"), 1.5e9);
    EXPECT_EQ(json.at("mfu"), 0.25);
    EXPECT_EQ(json.at("sequences"), 24);
    EXPECT_EQ(json.at("parts").size(), 7u);
    EXPECT_EQ(json.at("parts").at("attention"), 0.5);
    const StepMetrics read = read_metrics(path).at(0);
    EXPECT_EQ(read.mfu, step.mfu);
    EXPECT_EQ(read.model_flops_per_s_per_rank, step.model_flops_per_s_per_rank);
    EXPECT_EQ(read.sequences, step.sequences);
    EXPECT_EQ(read.parts, step.parts);
    EXPECT_FALSE(read_metrics(folder.write("old", format_metrics(step_at(1, 6)))).at(0).parts);
}

TEST(Metrics, LossesStandInBothUnitsAndComeBack) {
    TemporaryFolder folder;
    const fs::path path = folder.path() / "metrics.jsonl";
    {
        MetricsLog log(path, 0);
        log.add(step_at(1, 6));
        StepMetrics both = step_at(2, 5);
        both.loss_nats_per_byte = 5.0 / 3;
        both.held_out_loss = 5.5;
        both.held_out_loss_nats_per_byte = 5.5 / 3;
        log.add(both);
    }
    const std::string text = content_of(path);
    const auto second = nlohmann::json::parse(text.substr(text.find('\n') + 1));
    EXPECT_EQ(second.at("loss"), second.at("loss_nats_per_token"));
    EXPECT_EQ(second.at("loss_nats_per_byte"), 5.0 / 3);
    EXPECT_EQ(second.at("held_out_loss"), 5.5);
    EXPECT_EQ(second.at("held_out_loss_nats_per_byte"), 5.5 / 3);
    MetricsLog(path, 2);
    EXPECT_EQ(content_of(path), text) << "a resumed run keeps the lines";
    EXPECT_FALSE(read_metrics(path).at(0).held_out_loss.has_value());
}

TEST(Metrics, BalanceOfExpertsComesBack) {
    TemporaryFolder folder;
    const fs::path path = folder.path() / "metrics.jsonl";
    StepMetrics step = step_at(1, 6);
    step.experts = {{3, 1.3125, 1.125, 0.98765, {40, 0, 2}}, {4, 2, {}, 1. / 3}};
    step.moves = {{3, 1, 0, 2}};
    MetricsLog log(path, 0);
    log.add(step);
    log.add(step_at(2, 5));
    EXPECT_TRUE(log.steps().at(0).experts.empty()) << "they would fill the memory";
    const std::string text = content_of(path);
    const auto json = nlohmann::json::parse(text.substr(0, text.find('\n')));
    EXPECT_EQ(
        json.at("experts").at(0),
        nlohmann::json::parse("{\"layer\": 3, \"max_over_mean\": 1.3125, \"entropy\": 0.9877, "
                              "\"ranks_max_over_mean\": 1.125, \"loads\": [40, 0, 2]}"));
    EXPECT_EQ(json.at("experts").at(1), nlohmann::json::parse("{\"layer\": 4, \"max_over_mean\": "
                                                              "2.0, \"entropy\": 0.3333}"));
    EXPECT_EQ(json.at("moves"),
              nlohmann::json::parse("[{\"layer\": 3, \"expert\": 1, \"from\": 0, \"to\": 2}]"));
    EXPECT_EQ(text.find("experts", text.find('\n')), std::string::npos);
    const StepMetrics read = read_metrics(path).at(0);
    EXPECT_EQ(read.moves, step.moves);
    ASSERT_EQ(read.experts.size(), 2u);
    EXPECT_EQ(read.experts[0], (ExpertBalance{3, 1.3125, 1.125, 0.9877, {40, 0, 2}}));
    EXPECT_FALSE(read.experts[1].ranks_max_over_mean.has_value());
    const MetricsLog resumed(path, 2);
    EXPECT_EQ(content_of(path), text) << "a resumed run keeps the lines";
    EXPECT_TRUE(resumed.steps().at(0).experts.empty() && resumed.steps().at(0).moves.empty());
}

TEST(Metrics, LayersAndMovesThatCannotBeAreLeftOut) {
    TemporaryFolder folder;
    const std::string step = format_metrics(step_at(1, 6));
    const auto with = [&](const std::string& more) {
        return step.substr(0, step.size() - 1) + "," + more + "}\n";
    };
    const std::string good = R"({"layer":1,"max_over_mean":2,"entropy":0.5})";
    const fs::path path = folder.write(
        "metrics.jsonl", with(R"("experts":7,"moves":{"layer":1})") +
                             with(R"("experts":[[],null,)" + good + "]") +
                             with(R"("experts":[{"layer":-1,"max_over_mean":2,"entropy":0.5},)"
                                  R"({"layer":1,"max_over_mean":"2","entropy":0.5},{"layer":1.5},)"
                                  R"({"layer":1,"max_over_mean":2,"entropy":0.5,"loads":[1,-2]}],)"
                                  R"("moves":[{"layer":1,"expert":2,"from":0,"to":-1},)"
                                  R"({"layer":1,"expert":2,"from":0,"to":1},4])") +
                             std::string(std::size_t{17} << 20, '[') + "\n" + step);
    const std::vector<StepMetrics> steps = read_metrics(path);
    ASSERT_EQ(steps.size(), 4u) << "too long a line is none";
    EXPECT_TRUE(steps[0].experts.empty() && steps[0].moves.empty());
    ASSERT_EQ(steps[1].experts.size(), 1u);
    EXPECT_EQ(steps[1].experts[0], (ExpertBalance{1, 2, {}, 0.5}));
    EXPECT_TRUE(steps[2].experts.empty());
    EXPECT_EQ(steps[2].moves, (std::vector<MovedExpert>{{1, 2, 0, 1}}));
    EXPECT_EQ(steps[3].step, 1u) << "the last line has no break";
}

TEST(Metrics, LossesComeBackBitwise) {
    TemporaryFolder folder;
    const fs::path path = folder.path() / "metrics.jsonl";
    MetricsLog log(path, 0);
    const double loss = static_cast<double>(5.4321f) / 3;
    log.add(step_at(1, loss));
    EXPECT_EQ(read_metrics(path).at(0).loss, loss);
}

TEST(Metrics, ResumeDropsLaterAndHalfLines) {
    TemporaryFolder folder;
    std::string text;
    for (std::uint64_t step = 1; step <= 12; ++step) {
        text += format_metrics(step_at(step, 5 - 0.1 * static_cast<double>(step))) + "\n";
    }
    const fs::path path = folder.write("metrics.jsonl", "rubbish\n[1]\n{\"step\":1}\n" + text +
                                                            "{\"step\": 13, \"lo");
    MetricsLog log(path, 10);
    EXPECT_EQ(log.steps().size(), 10u);
    log.add(step_at(11, 1));
    const std::vector<StepMetrics> steps = read_metrics(path);
    ASSERT_EQ(steps.size(), 11u);
    EXPECT_EQ(steps[9].step, 10u);
    EXPECT_EQ(steps[10].loss, 1);
    EXPECT_EQ(count(content_of(path), "\n"), 11u);
    EXPECT_TRUE(MetricsLog(path, 0).steps().empty()) << "a fresh run starts a fresh file";
    EXPECT_BELLOWS_ERROR(MetricsLog(folder.path() / "no" / "where", 0), Io, "where");
}

// For this process no file may grow beyond the limit: what a full disk looks like.
TEST(Metrics, AFullDiskLeavesWholeLinesAndTheRestFollows) {
    TemporaryFolder folder;
    const fs::path path = folder.path() / "metrics.jsonl";
    MetricsLog log(path, 0);
    log.add(step_at(1, 5));
    const std::string first = content_of(path);
    std::signal(SIGXFSZ, SIG_IGN);
    rlimit limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
    const rlimit before = limit;
    limit.rlim_cur = first.size() + 20; // amid the second line
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    EXPECT_BELLOWS_ERROR(log.add(step_at(2, 4)), Io, "metrics.jsonl");
    EXPECT_EQ(content_of(path), first);
    EXPECT_BELLOWS_ERROR(log.add(step_at(3, 3)), Io, "metrics.jsonl");
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
    log.add(step_at(4, 2));
    const std::vector<StepMetrics> steps = read_metrics(path);
    ASSERT_EQ(steps.size(), 4u);
    for (std::uint64_t i = 0; i < 4; ++i)
        EXPECT_EQ(steps[i].step, i + 1);
    EXPECT_EQ(count(content_of(path), "\n"), 4u);
}

TEST(Files, AreLockedForOneAtATime) {
    const TemporaryFolder folder;
    const fs::path path = folder.path() / ".lock";
    std::string holder;
    {
        const FileHandle lock = lock_file(path, holder);
        EXPECT_GE(lock.get(), 0);
        EXPECT_EQ(holder, "");
        EXPECT_LT(lock_file(path, holder).get(), 0);
        EXPECT_EQ(holder, std::to_string(::getpid()));
    }
    EXPECT_GE(lock_file(path, holder).get(), 0) << "the first has gone";
    EXPECT_BELLOWS_ERROR(lock_file(folder.path() / "no" / "where", holder), Io, "where");
}

TEST(Metrics, FullDiskGivesIo) {
    EXPECT_BELLOWS_ERROR(write_file_durably("/dev/full", "x"), Io, "/dev/full");
}

TEST(Metrics, NumbersForPeople) {
    EXPECT_EQ(format_count(0), "0");
    EXPECT_EQ(format_count(7), "7");
    EXPECT_EQ(format_count(0.5), "0.50");
    EXPECT_EQ(format_count(999), "999");
    EXPECT_EQ(format_count(999.6), "1.00k");
    EXPECT_EQ(format_count(12345), "12.3k");
    EXPECT_EQ(format_count(671026419200.0), "671G");
    EXPECT_EQ(format_duration(0), "0:00");
    EXPECT_EQ(format_duration(75.4), "1:15");
    EXPECT_EQ(format_duration(3675), "1:01:15");
    EXPECT_NO_THROW(format_duration(std::numeric_limits<double>::infinity()));
}

TEST(Metrics, LongLinesFoldAtSpacesUnderTheirColumn) {
    EXPECT_EQ(folded("short\nlines\n", 5), "short\nlines\n");
    EXPECT_EQ(folded("warning: one two three", 12), "warning: one\n  two three");
    EXPECT_EQ(folded("  memory   aaa bbb ccc ddd\n  end\n", 25),
              "  memory   aaa bbb ccc\n           ddd\n  end\n");
    EXPECT_EQ(folded("  memory   aaa bbb ccc", 14), "  memory   aaa\n    bbb ccc");
    EXPECT_EQ(folded("/a/path/without/spaces x", 8), "/a/path/without/spaces\n  x");
    EXPECT_EQ(folded("4 µs µs", 7), "4 µs µs") << "characters, not bytes";
}

TEST(Progress, PlainLinesComeNowAndThen) {
    Output output;
    double now = 0;
    {
        ProgressReporter progress(output.file(), 100, {false, 80, 10, [&] { return now; }});
        for (std::uint64_t step = 1; step <= 100; ++step, now += 1) {
            progress.step(step_at(step, 5));
        }
    }
    // At 0, 10, ..., 90 seconds, and the last step.
    EXPECT_EQ(count(output.text(), "\n"), 11u) << output.text();
    EXPECT_EQ(output.text().find('\x1b'), std::string::npos);
    EXPECT_EQ(output.text().find('\r'), std::string::npos);
    EXPECT_EQ(output.text().find("1.00k tokens/s  3:18 left  step 1/100  loss 5.0000  grad 0.5"),
              0u)
        << output.text();
    EXPECT_NE(output.text().find("step 100/100"), std::string::npos);
}

TEST(Progress, LossesHaveTheirUnit) {
    const auto line = [](double per_token, double per_byte) {
        Output output;
        StepMetrics metrics = step_at(1, per_token);
        metrics.loss_nats_per_byte = per_byte;
        ProgressReporter(output.file(), 2, {false, 80, 10, [] { return 0.0; }}).step(metrics);
        return output.text();
    };
    EXPECT_NE(line(5, 5).find("  loss 5.0000 nats/byte  grad"), std::string::npos) << line(5, 5);
    EXPECT_NE(line(5, 2).find("  loss 2.0000 nats/byte  5.0000 nats/token  grad"),
              std::string::npos)
        << line(5, 2);
}

// On a terminal speed and time left come first; what has no room is left out, not cut.
TEST(Progress, PartsOfTheLineStayWhole) {
    const std::vector<std::string> narrow = {"123k tok/s", " 277:46:39 left", " loss 12.345",
                                             " 1/1000000"};
    const std::vector<std::string> wide = {
        "123k tokens/s",        "  277:46:39 left", "  step 1/1000000", "  loss 12.3450 nats/byte",
        "  33.0000 nats/token", "  grad 0.5",       "  lr 1.00e-03"};
    for (unsigned columns = 20; columns < 140; ++columns) {
        Output output;
        {
            StepMetrics metrics = step_at(1, 33);
            metrics.loss_nats_per_byte = 12.345;
            metrics.seconds = 1;
            metrics.tokens_per_s = 123456;
            ProgressReporter progress(output.file(), 1000000,
                                      {true, columns, 10, [] { return 0.0; }});
            progress.step(metrics);
        }
        const std::string text = output.text();
        const std::string line = text.substr(1, text.find('\x1b') - 1);
        EXPECT_LT(line.size(), columns) << line;
        std::string whole;
        bool found = false;
        for (const std::string& part : columns < 72 ? narrow : wide) {
            whole += part;
            found = found || whole == line;
        }
        EXPECT_TRUE(found) << columns << ": " << line;
        if (columns >= 40) {
            EXPECT_NE(line.find("277:46:39 left"), std::string::npos) << line;
            EXPECT_NE(line.find("loss 12.3"), std::string::npos) << columns << ": " << line;
        }
    }
}

TEST(Progress, TerminalLineIsRewrittenAndCut) {
    Output output;
    double now = 0;
    {
        ProgressReporter progress(output.file(), 10, {true, 30, 10, [&] { return now; }});
        progress.phase("compiling shaders", 1, 2);
        now += 1;
        progress.step(step_at(1, 5));
        progress.note("warning: the disk is full");
        now += 1;
        progress.step(step_at(10, 4));
    }
    const std::string text = output.text();
    EXPECT_EQ(count(text, "\n"), 2u) << "one for the note, one at the end";
    EXPECT_NE(text.find("\rcompiling shaders 1/2\x1b[K"), std::string::npos);
    EXPECT_NE(text.find("\rwarning: the disk is full\x1b[K\n1.00k tok/s 0:18 left"),
              std::string::npos)
        << text;
    std::size_t longest = 0;
    std::size_t begin = 0;
    while (begin < text.size()) {
        const std::size_t end = std::min(text.find_first_of("\r\n", begin), text.size());
        std::string piece = text.substr(begin, end - begin);
        piece = piece.substr(0, piece.find('\x1b'));
        longest = std::max(longest, piece.size());
        begin = end + 1;
    }
    EXPECT_LT(longest, 30u);
}

TEST(Progress, TheLauncherHasTheLastWordOnTheTerminal) {
    ::setenv("BELLOWS_TERMINAL", "132", 1);
    EXPECT_TRUE(ProgressReporter::detect(stdout).terminal);
    EXPECT_EQ(ProgressReporter::detect(stdout).columns, 132u);
    ::setenv("BELLOWS_TERMINAL", "0", 1);
    EXPECT_FALSE(ProgressReporter::detect(stdout).terminal);
    ::unsetenv("BELLOWS_TERMINAL");
    ::setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    EXPECT_FALSE(ProgressReporter::detect(stdout).terminal);
    ::unsetenv("OMPI_COMM_WORLD_RANK");
}

TEST(Summary, SaysWhatTheRunDid) {
    std::vector<StepMetrics> steps;
    for (std::uint64_t step = 1; step <= 100; ++step) {
        steps.push_back(step_at(step, step == 1 ? 5.5 : step > 90 ? 2.2 : 4));
        steps.back().seconds = step == 1 ? 60 : 1;
    }
    RunSummary summary = summarize(steps);
    EXPECT_EQ(summary.first_loss, 5.5);
    EXPECT_NEAR(summary.last_loss, 2.2, 1e-12);
    EXPECT_NEAR(summary.tokens_per_s, 1000, 1e-9);
    EXPECT_EQ(summary.seconds, 159);
    summary.trace = "out/trace.json";
    summary.sample = "one\ntwo";
    const std::string text = format_summary(summary);
    EXPECT_NE(text.find("trained 100 steps in 2:39"), std::string::npos) << text;
    EXPECT_NE(text.find("start  5.5000 nats per byte"), std::string::npos) << text;
    EXPECT_NE(text.find("out/trace.json"), std::string::npos) << text;
    EXPECT_NE(text.find("    | two\n"), std::string::npos) << text;
    EXPECT_EQ(text.find("checkpoint"), std::string::npos) << text;
    EXPECT_EQ(text.find("held-out"), std::string::npos) << text;
    summary.bytes_per_token = 2;
    summary.held_out_loss = 3;
    EXPECT_NE(format_summary(summary).find(
                  "held-out loss      1.5000 nats per byte (3.0000 per token)\n"),
              std::string::npos);
    EXPECT_EQ(summarize({}).steps, 0u);
}

TEST(LossPlot, TicksAreRoundAndInside) {
    EXPECT_EQ(nice_ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
    EXPECT_EQ(nice_ticks(0, 400, 9),
              (std::vector<double>{0, 50, 100, 150, 200, 250, 300, 350, 400}));
    EXPECT_TRUE(nice_ticks(1, 1, 5).empty());
    EXPECT_TRUE(nice_ticks(0, std::numeric_limits<double>::infinity(), 5).empty());
    for (const auto& [low, high] :
         {std::pair(1.9, 5.7), std::pair(-3.0, 0.01), std::pair(1e-9, 2e-9), std::pair(7.0, 1e9)}) {
        const std::vector<double> ticks = nice_ticks(low, high, 7);
        ASSERT_GE(ticks.size(), 2u);
        EXPECT_LE(ticks.size(), 8u);
        EXPECT_GE(ticks.front(), low - 1e-6 * (high - low));
        EXPECT_LE(ticks.back(), high + 1e-6 * (high - low));
    }
}

TEST(LossPlot, SmoothingIsAMean) {
    std::vector<LossPoint> points;
    for (std::uint64_t step = 1; step <= 50; ++step) {
        points.push_back({step, 3});
    }
    points[20].loss = std::nan("");
    const std::vector<LossPoint> curve = smoothed(points, 9);
    ASSERT_EQ(curve.size(), 49u);
    for (const LossPoint& point : curve) {
        EXPECT_NEAR(point.loss, 3, 1e-12);
    }
    // Weight 2/(3 + 1) for the newest: (0.5 * 1 + 0.5 * 0.5 * 4) / 0.75
    EXPECT_NEAR(smoothed({{1, 4}, {2, 1}}, 3)[1].loss, 2, 1e-12);
}

TEST(LossPlot, CurvesStayInsideTheFrame) {
    std::vector<LossPoint> points;
    for (std::uint64_t step = 1; step <= 20000; ++step) {
        const double x = static_cast<double>(step);
        points.push_back({step, 2 + 3.5 * std::exp(-x / 3000) + 0.2 * std::sin(x * 1.7)});
    }
    points[77].loss = std::numeric_limits<double>::infinity();
    const std::string svg = loss_plot_svg(points, {"a < b & \"c\"", "line\nbreak"});
    EXPECT_LT(svg.size(), 120000u) << "long runs must be thinned";
    EXPECT_NE(svg.find("a &lt; b &amp; &quot;c&quot;"), std::string::npos);
    EXPECT_NE(svg.find("line break"), std::string::npos);
    EXPECT_EQ(svg.find("nan"), std::string::npos);
    EXPECT_EQ(svg.find("inf"), std::string::npos);
    EXPECT_EQ(count(svg, "<path"), 2u);
    for (std::size_t at = svg.find_first_of("ML", svg.find("<path")); at < svg.rfind("</svg>");
         at = svg.find_first_of("ML", at + 1)) {
        double x = 0;
        double y = 0;
        if (std::sscanf(svg.c_str() + at + 1, "%lf,%lf", &x, &y) == 2) {
            ASSERT_GE(x, 75);
            ASSERT_LE(x, 853);
            ASSERT_GE(y, 73);
            ASSERT_LE(y, 439);
        }
    }
}

TEST(LossPlot, ShowsHeldOutTextAndBothUnits) {
    const std::vector<LossPoint> points = {{1, 5}, {2, 4}, {3, 3}, {4, 2}};
    const std::string plain = loss_plot_svg(points);
    EXPECT_EQ(plain.find("nats per token"), std::string::npos);
    EXPECT_EQ(plain.find("held-out"), std::string::npos);
    LossPlotOptions options;
    options.tokens_scale = 3.5;
    const std::string both = loss_plot_svg(points, options, {{2, 4.5}, {4, 2.25}});
    EXPECT_NE(both.find(">loss (nats per byte)<"), std::string::npos);
    EXPECT_NE(both.find(">nats per token<"), std::string::npos);
    EXPECT_NE(both.find(">16<"), std::string::npos) << "a tick of the right axis, of 7 to 17.5";
    EXPECT_NE(both.find(">held-out text: 2.250<"), std::string::npos);
    EXPECT_EQ(count(both, "<path"), 3u);
    EXPECT_EQ(count(both, "<circle"), 2u);
}

TEST(LossPlot, FewPointsDrawToo) {
    EXPECT_NE(loss_plot_svg({}).find("no steps yet"), std::string::npos);
    EXPECT_EQ(count(loss_plot_svg({{1, 5}}), "<path"), 2u);
    EXPECT_EQ(loss_plot_svg({{1, 5}, {2, 5}}).find("nan"), std::string::npos);
    EXPECT_NE(loss_plot_svg({{1, std::nan("")}}).find("no steps yet"), std::string::npos);
}
