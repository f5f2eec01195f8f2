// SPDX-License-Identifier: MIT
#include "app/train/summary.hpp"

#include "app/units.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <sstream>

namespace bellows {

namespace {

/// Returns the shares of the steps that have parts. The first step also compiles, so it is left out
/// where there are more.
std::optional<StepParts> part_shares(const std::vector<StepMetrics>& steps) {
    StepParts sum;
    double seconds = 0;
    for (std::size_t i = steps.size() > 1 ? 1 : 0; i < steps.size(); ++i) {
        if (!steps[i].parts)
            continue;
        for (double StepParts::* const part : kStepParts)
            sum.*part += steps[i].parts.value().*part;
        seconds += steps[i].seconds;
    }
    if (seconds <= 0)
        return std::nullopt;
    for (double StepParts::* const part : kStepParts)
        sum.*part /= seconds;
    return sum;
}

std::string format_flops(const RunSummary& summary) {
    if (!summary.model_flops_per_s_per_rank)
        return "";
    return format_si(summary.model_flops_per_s, "FLOP/s") + " by the model's formula, " +
           format_si(*summary.model_flops_per_s_per_rank, "FLOP/s") + " per rank" +
           (summary.mfu ? ", MFU " + percent(*summary.mfu) : "");
}

std::string format_parts(const RunSummary& summary) {
    if (!summary.part_shares)
        return "";
    const StepParts& of = *summary.part_shares;
    std::string text;
    const auto add = [&text](const char* part, double share) {
        if (share > 0)
            text += (text.empty() ? "" : ", ") + std::string(part) + " " + percent(share);
    };
    add("attention", of.attention);
    add("experts", of.experts);
    add("exchange", of.exchange);
    add("reductions", of.reductions);
    add("optimizer", of.optimizer);
    add("rest", of.rest);
    add("device at work", of.device);
    return text;
}

} // namespace

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
    double tokens = 0, flops = 0;
    double seconds = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
        summary.seconds += steps[i].seconds;
        if (i > 0 || steps.size() == 1) {
            tokens += steps[i].tokens_per_s * steps[i].seconds;
            flops += steps[i].model_flops_per_s * steps[i].seconds;
            seconds += steps[i].seconds;
        }
    }
    const StepMetrics& last = steps.back();
    if (seconds > 0) {
        summary.model_flops_per_s = flops / seconds;
        // Both are the same share in every step of a run.
        const double of_last = summary.model_flops_per_s / last.model_flops_per_s;
        if (last.model_flops_per_s_per_rank)
            summary.model_flops_per_s_per_rank = *last.model_flops_per_s_per_rank * of_last;
        if (last.mfu)
            summary.mfu = *last.mfu * of_last;
        summary.part_shares = part_shares(steps);
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
        std::array<char, 64> text{};
        std::snprintf(text.data(), text.size(), "%.4f nats per byte",
                      nats_per_token / summary.bytes_per_token);
        return text.data() + (summary.bytes_per_token == 1
                                  ? std::string()
                                  : printed(" (%.4f per token)", nats_per_token));
    };
    out << "trained " << summary.steps << " steps in " << format_duration(summary.seconds) << "\n";
    line("loss at the start  ", loss(summary.first_loss));
    line("loss at the end    ", loss(summary.last_loss));
    line("held-out loss      ", summary.held_out_loss ? loss(*summary.held_out_loss) : "");
    line("speed              ", format_count(summary.tokens_per_s) + " tokens/s");
    line("model FLOPs        ", format_flops(summary));
    line("time (rank 0)      ", format_parts(summary));
    line("memory (rank 0)    ", summary.memory);
    out << summary.pipeline;
    line("  pairs            ", summary.pairs);
    line("  pipeline picture ", summary.pipeline_picture.string());
    line("loss picture       ", summary.loss_picture.string());
    line("expert picture     ", summary.expert_picture.string());
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
