// SPDX-License-Identifier: MIT
#include "app/progress.hpp"

#include "app/units.hpp"

#include <bellows/base/memory_sizes.hpp>

#include <bellows/comm/launch.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <utility>

#include <sys/ioctl.h>
#include <unistd.h>

namespace bellows {

namespace {

constexpr double kTerminalInterval = 0.1; // seconds: faster than this nobody reads

double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

} // namespace

std::string ProgressReporter::terminal_of(std::FILE* stream) {
    winsize size{};
    if (::isatty(::fileno(stream)) != 1) {
        return "0";
    }
    const bool known = ::ioctl(::fileno(stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return std::to_string(known ? size.ws_col : 80);
}

ProgressReporter::Options ProgressReporter::detect(std::FILE* stream) {
    constexpr unsigned kFewestColumns = 20;
    // Under a launcher of others the stream is a pipe or a pseudo-terminal; neither tells.
    const char* told = std::getenv(kTerminalVariable);
    const std::string terminal = told != nullptr ? told : is_launched() ? "0" : terminal_of(stream);
    unsigned columns = 0;
    std::from_chars(terminal.data(), terminal.data() + terminal.size(), columns);
    Options options;
    options.terminal = columns > 0;
    options.columns = std::max(columns, kFewestColumns);
    return options;
}

ProgressReporter::ProgressReporter(std::FILE* stream, std::uint64_t total_steps, Options options)
    : stream_(stream), total_steps_(total_steps), options_(std::move(options)) {
    if (!options_.clock) {
        options_.clock = steady_seconds;
    }
}

ProgressReporter::~ProgressReporter() {
    finish();
}

void ProgressReporter::show(const std::string& line, bool always) {
    const double now = options_.clock();
    const double interval = options_.terminal ? kTerminalInterval : options_.plain_interval;
    if (!always && now - last_shown_ < interval) {
        return;
    }
    last_shown_ = now;
    if (options_.terminal) {
        line_ = line.substr(0, options_.columns - 1);
        std::fprintf(stream_, "\r%s\x1b[K", line_.c_str());
    } else {
        std::fprintf(stream_, "%s\n", line.c_str());
    }
    std::fflush(stream_);
}

void ProgressReporter::phase(std::string_view what, std::uint64_t done, std::uint64_t total) {
    const std::string of_all = total > 0 ? "/" + std::to_string(total) : "";
    show(std::string(what) + " " + std::to_string(done) + of_all, done == total);
}

void ProgressReporter::percent(std::string_view what, std::uint64_t done, std::uint64_t total) {
    const auto share =
        static_cast<int>(100 * static_cast<double>(done) / static_cast<double>(total));
    show(std::string(what) + " " + std::to_string(share) + " %", false);
}

void ProgressReporter::bytes(std::string_view what, std::uint64_t done, std::uint64_t total,
                             double seconds) {
    const double per_second = static_cast<double>(done) / std::max(seconds, 1e-9);
    show(std::string(what) + " " + format_bytes(done) + " of " + format_bytes(total) + ", " +
             format_bytes(static_cast<std::uint64_t>(per_second)) + "/s",
         done == total);
}

std::vector<std::string> ProgressReporter::parts_of(const StepMetrics& metrics, bool narrow) const {
    const std::uint64_t left = total_steps_ > metrics.step ? total_steps_ - metrics.step : 0;
    const std::string step = std::to_string(metrics.step) + "/" + std::to_string(total_steps_);
    const std::string time =
        format_duration(static_cast<double>(left) * seconds_per_step_) + " left";
    const double per_byte = metrics.loss_nats_per_byte.value_or(metrics.loss);
    const std::string speed = format_count(metrics.tokens_per_s);
    if (narrow)
        return {speed + " tok/s", time, printed("loss %.3f", per_byte), step};
    std::vector<std::string> parts = {speed + " tokens/s", time, "step " + step,
                                      printed("loss %.4f", per_byte) +
                                          (metrics.loss_nats_per_byte ? " nats/byte" : "")};
    if (per_byte != metrics.loss)
        parts.push_back(printed("%.4f nats/token", metrics.loss));
    if (metrics.held_out_loss)
        parts.push_back(printed(
            "held-out %.4f", metrics.held_out_loss_nats_per_byte.value_or(*metrics.held_out_loss)));
    if (!metrics.mtp_losses_nats_per_token.empty())
        parts.push_back(printed("MTP %.4f", metrics.mtp_losses_nats_per_token.front()));
    parts.push_back(printed("grad %.3g", metrics.grad_norm));
    parts.push_back(printed("lr %.2e", metrics.lr));
    if (metrics.mfu) {
        parts.push_back(format_si(metrics.model_flops_per_s_per_rank.value_or(0), "FLOP/s") +
                        " per rank");
        parts.push_back("MFU " + bellows::percent(*metrics.mfu));
    }
    return parts;
}

void ProgressReporter::step(const StepMetrics& metrics) {
    constexpr double kSmoothing = 0.1;
    constexpr unsigned kNarrow = 72; // columns
    seconds_per_step_ =
        seconds_per_step_ == 0
            ? metrics.seconds
            : seconds_per_step_ + kSmoothing * (metrics.seconds - seconds_per_step_);
    const bool narrow = options_.terminal && options_.columns < kNarrow;
    std::string line;
    for (const std::string& part : parts_of(metrics, narrow)) {
        const std::string gap = line.empty() ? "" : narrow ? " " : "  ";
        if (!line.empty() && options_.terminal &&
            line.size() + gap.size() + part.size() >= options_.columns)
            break;
        line += gap + part;
    }
    show(line, metrics.step >= total_steps_ || metrics.held_out_loss.has_value());
}

void ProgressReporter::note(std::string_view line) {
    const std::string text = options_.terminal ? folded(line, options_.columns) : std::string(line);
    if (options_.terminal) {
        std::fprintf(stream_, "\r%s\x1b[K\n%s", text.c_str(), line_.c_str());
    } else {
        std::fprintf(stream_, "%s\n", text.c_str());
    }
    std::fflush(stream_);
}

void ProgressReporter::finish() {
    if (options_.terminal && !line_.empty()) {
        std::fputc('\n', stream_);
        std::fflush(stream_);
    }
    line_.clear();
}

} // namespace bellows
