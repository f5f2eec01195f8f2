// SPDX-License-Identifier: MIT
#include <bellows/serve/sampling.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/mix.hpp>

#include <algorithm>
#include <cmath>
#include <string>

namespace bellows {

std::uint32_t sample_token(std::span<const float> logits, const SamplingParams& params,
                           std::uint64_t position) {
    const auto bad = [](float x) { return std::isnan(x) || (std::isinf(x) && x > 0); };
    const auto greatest = std::max_element(logits.begin(), logits.end());
    if (std::any_of(logits.begin(), logits.end(), bad) || greatest == logits.end() ||
        std::isinf(*greatest)) {
        throw Error(ErrorCode::InvalidArgument, "the model's " + std::to_string(logits.size()) +
                                                    " logits hold no finite maximum");
    }
    if (!(params.temperature >= 0) || std::isinf(params.temperature)) {
        throw Error(ErrorCode::InvalidArgument,
                    "temperature " + std::to_string(params.temperature) + " must be at least 0");
    }
    const auto likeliest = static_cast<std::uint32_t>(greatest - logits.begin());
    if (params.temperature == 0) {
        return likeliest;
    }
    const double top = *greatest;
    const auto weight = [&](float x) { return std::exp((x - top) / params.temperature); };
    double total = 0;
    for (const float x : logits) {
        total += weight(x);
    }
    // 53 bits: a double in [0, 1).
    const double uniform = static_cast<double>(mix(mix(params.seed) ^ position) >> 11) * 0x1.0p-53;
    double left = uniform * total;
    for (std::size_t id = 0; id < logits.size(); ++id) {
        left -= weight(logits[id]);
        if (left < 0) {
            return static_cast<std::uint32_t>(id);
        }
    }
    return likeliest; // rounding left a rest
}

} // namespace bellows
