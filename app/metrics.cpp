// SPDX-License-Identifier: MIT
#include "app/metrics.hpp"

#include <bellows/engine/error.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace bellows {

namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLargestMetrics = std::uint64_t{1} << 32;

std::string printed(const char* format, double value) {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), format, value);
    return text.data();
}

double real(const Json& json, const char* key) {
    const Json& value = json.at(key);
    return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

std::optional<StepMetrics> parse_metrics(std::string_view line) {
    const Json json = Json::parse(line, nullptr, false);
    if (!json.is_object()) {
        return std::nullopt;
    }
    try {
        StepMetrics metrics;
        metrics.step = json.at("step").get<std::uint64_t>();
        metrics.loss = real(json, "loss");
        metrics.grad_norm = real(json, "grad_norm");
        metrics.lr = real(json, "lr");
        metrics.tokens_per_s = real(json, "tokens_per_s");
        metrics.seconds = real(json, "seconds");
        metrics.model_flops_per_s = real(json, "model_flops_per_s");
        metrics.bytes_exchanged = json.at("bytes_exchanged").get<std::uint64_t>();
        metrics.seconds_waited = real(json, "seconds_waited");
        return metrics;
    } catch (const Json::exception&) {
        return std::nullopt;
    }
}

} // namespace

std::string format_metrics(const StepMetrics& metrics) {
    const nlohmann::ordered_json json = {{"step", metrics.step},
                                         {"loss", metrics.loss},
                                         {"grad_norm", metrics.grad_norm},
                                         {"lr", metrics.lr},
                                         {"tokens_per_s", metrics.tokens_per_s},
                                         {"seconds", metrics.seconds},
                                         {"model_flops_per_s", metrics.model_flops_per_s},
                                         {"bytes_exchanged", metrics.bytes_exchanged},
                                         {"seconds_waited", metrics.seconds_waited}};
    return json.dump();
}

std::vector<StepMetrics> read_metrics(const std::filesystem::path& path) {
    std::istringstream lines(read_file(path, kLargestMetrics));
    std::vector<StepMetrics> steps;
    for (std::string line; std::getline(lines, line);) {
        if (const std::optional<StepMetrics> metrics = parse_metrics(line)) {
            steps.push_back(*metrics);
        }
    }
    return steps;
}

MetricsLog::MetricsLog(std::filesystem::path path, std::uint64_t steps_done)
    : path_(std::move(path)) {
    std::string kept;
    if (steps_done > 0 && std::filesystem::exists(path_)) {
        for (const StepMetrics& step : read_metrics(path_)) {
            if (step.step <= steps_done) {
                kept += format_metrics(step) + "\n";
                steps_.push_back(step);
            }
        }
    }
    std::filesystem::path temporary = path_;
    temporary += ".tmp";
    write_file_durably(temporary, kept);
    std::error_code error;
    std::filesystem::rename(temporary, path_, error);
    file_ = FileHandle(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
    if (error || file_.get() < 0) {
        throw Error(ErrorCode::Io, errno_message("create", path_, error ? error.value() : errno));
    }
}

void MetricsLog::add(const StepMetrics& metrics) {
    steps_.push_back(metrics);
    const std::string line = format_metrics(metrics) + "\n";
    write_all(file_.get(), line.data(), line.size(), path_);
}

std::string format_count(double value) {
    constexpr std::string_view kSuffixes = " kMGTP";
    std::size_t suffix = 0;
    while (std::abs(value) >= 999.5 && suffix + 1 < kSuffixes.size()) {
        value /= 1000;
        ++suffix;
    }
    const double size = std::abs(value);
    const bool whole = suffix == 0 && value == std::floor(value);
    std::string text = printed(whole || size >= 99.95 ? "%.0f"
                               : size >= 9.995        ? "%.1f"
                                                      : "%.2f",
                               value);
    if (suffix > 0) {
        text += kSuffixes[suffix];
    }
    return text;
}

std::string format_duration(double seconds) {
    constexpr double kLongest = 1e9;
    const auto whole = static_cast<std::uint64_t>(
        std::isfinite(seconds) ? std::clamp(std::round(seconds), 0.0, kLongest) : kLongest);
    std::array<char, 64> text{};
    if (whole >= 3600) {
        std::snprintf(text.data(), text.size(), "%llu:%02llu:%02llu",
                      static_cast<unsigned long long>(whole / 3600),
                      static_cast<unsigned long long>(whole / 60 % 60),
                      static_cast<unsigned long long>(whole % 60));
    } else {
        std::snprintf(text.data(), text.size(), "%llu:%02llu",
                      static_cast<unsigned long long>(whole / 60),
                      static_cast<unsigned long long>(whole % 60));
    }
    return text.data();
}

RunSummary summarize(const std::vector<StepMetrics>& steps) {
    RunSummary summary;
    if (steps.empty()) {
        return summary;
    }
    summary.first_loss = steps.front().loss;
    summary.steps = steps.back().step;
    const std::size_t tail = std::clamp<std::size_t>(steps.size() / 10, 1, 20);
    for (std::size_t i = steps.size() - tail; i < steps.size(); ++i) {
        summary.last_loss += steps[i].loss / static_cast<double>(tail);
    }
    double tokens = 0;
    double seconds = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
        summary.seconds += steps[i].seconds;
        if (i > 0 || steps.size() == 1) {
            tokens += steps[i].tokens_per_s * steps[i].seconds;
            seconds += steps[i].seconds;
        }
    }
    summary.tokens_per_s = seconds > 0 ? tokens / seconds : 0;
    return summary;
}

std::string format_summary(const RunSummary& summary) {
    std::ostringstream out;
    const auto line = [&](const char* what, const std::string& value) {
        if (!value.empty()) {
            out << "  " << what << value << "\n";
        }
    };
    const auto loss = [&](double nats_per_token) {
        return printed("%.4f nats per byte", nats_per_token / summary.bytes_per_token);
    };
    out << "trained " << summary.steps << " steps in " << format_duration(summary.seconds) << "\n";
    line("loss at the start  ", loss(summary.first_loss));
    line("loss at the end    ", loss(summary.last_loss));
    line("speed              ", format_count(summary.tokens_per_s) + " tokens/s");
    line("memory (rank 0)    ", summary.memory);
    line("loss picture       ", summary.loss_picture.string());
    line("trace (Perfetto)   ", summary.trace.string());
    line("checkpoint         ", summary.checkpoint.string());
    if (!summary.sample.empty()) {
        out << "  sample:\n";
        std::istringstream text(summary.sample);
        for (std::string part; std::getline(text, part);) {
            out << "    | " << part << "\n";
        }
        if (summary.words.words > 0) {
            out << "  " << format_word_check(summary.words, "the training text") << "\n";
        }
    }
    return out.str();
}

} // namespace bellows
