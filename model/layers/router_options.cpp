// SPDX-License-Identifier: MIT
#include "router_options.hpp"

namespace bellows {

ops::RouterOptions router_options(const ModelConfig& config) {
    const bool sigmoid = config.score_function == ScoreFunction::Sigmoid;
    ops::RouterOptions options;
    options.score =
        sigmoid ? ops::RouterOptions::Score::Sigmoid : ops::RouterOptions::Score::Softmax;
    options.groups = static_cast<std::uint32_t>(config.n_group);
    options.group_top_k = static_cast<std::uint32_t>(config.topk_group);
    options.group_score_top = config.group_score_used() == GroupScore::TopTwo ? 2 : 1;
    options.normalise = config.normalize_top_k;
    options.route_scale = static_cast<float>(config.route_scale);
    return options;
}

} // namespace bellows
