// SPDX-License-Identifier: MIT
#include <bellows/shape/rope.hpp>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace bellows {
namespace {

double amplitude_of(double mscale, double factor) noexcept {
    return factor <= 1 ? 1 : 0.1 * mscale * std::log(factor) + 1;
}

/// The pair, as a real number, that turns so often within the original context.
double pair_of_turns(const ModelConfig& c, double turns) {
    const auto context = static_cast<double>(c.rope_original_context);
    return static_cast<double>(c.rope_head_dim()) *
           std::log(context / (2 * std::numbers::pi * turns)) / (2 * std::log(c.rope_theta));
}

/// Slow pairs are stretched, quick ones are not, and between them lies a ramp.
void stretch_yarn(const ModelConfig& c, std::vector<double>& frequencies) {
    double low = pair_of_turns(c, c.rope_beta_fast), high = pair_of_turns(c, c.rope_beta_slow);
    if (c.rope_truncate) {
        low = std::floor(low);
        high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, static_cast<double>(c.rope_head_dim()) - 1);
    if (low == high)
        high += 0.001;
    for (std::size_t i = 0; i < frequencies.size(); ++i) {
        const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
        frequencies[i] *= ramp / c.rope_factor + (1 - ramp);
    }
}

/// Long waves are stretched, short ones are not, and those between them are mixed.
void stretch_llama3(const ModelConfig& c, std::vector<double>& frequencies) {
    const auto context = static_cast<double>(c.rope_original_context);
    const double low = c.rope_low_freq_factor, high = c.rope_high_freq_factor;
    for (double& frequency : frequencies) {
        const double turns = context * frequency / (2 * std::numbers::pi);
        const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
        frequency *= (1 - kept) / c.rope_factor + kept;
    }
}

} // namespace

std::vector<double> rope_frequencies(const ModelConfig& config) {
    const std::uint64_t elements = config.rope_head_dim();
    std::vector<double> frequencies(elements / 2);
    for (std::size_t i = 0; i < frequencies.size(); ++i)
        frequencies[i] = std::pow(config.rope_theta,
                                  -2.0 * static_cast<double>(i) / static_cast<double>(elements));
    if (config.rope_scaling == RopeScaling::Yarn)
        stretch_yarn(config, frequencies);
    else if (config.rope_scaling == RopeScaling::Llama3)
        stretch_llama3(config, frequencies);
    return frequencies;
}

double rope_amplitude(const ModelConfig& config) noexcept {
    if (config.rope_scaling != RopeScaling::Yarn)
        return 1;
    if (config.rope_mscale > 0 && config.rope_mscale_all_dim > 0)
        return amplitude_of(config.rope_mscale, config.rope_factor) /
               amplitude_of(config.rope_mscale_all_dim, config.rope_factor);
    return config.rope_attention_factor > 0 ? config.rope_attention_factor
                                            : amplitude_of(1, config.rope_factor);
}

double rope_scale_amplitude(const ModelConfig& config) noexcept {
    if (config.rope_scaling != RopeScaling::Yarn || config.rope_mscale_all_dim <= 0)
        return 1;
    return amplitude_of(config.rope_mscale_all_dim, config.rope_factor);
}

} // namespace bellows
