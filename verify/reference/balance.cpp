// SPDX-License-Identifier: MIT
#include "verify/reference/balance.hpp"

#include <algorithm>
#include <cmath>
#include <set>

namespace bellows::reference {
namespace {

BalanceCounts counts_of(View scores, std::span<const std::int32_t> choices,
                        const RouterShape& shape, const BalanceShape& balance) {
    BalanceCounts counts;
    counts.tokens = scores.size() / shape.experts;
    counts.choices = count_experts(choices, shape.experts);
    RouterShape free = shape;
    free.n_group = free.topk_group = 1;
    counts.experts = balance.kind == BalanceLossKind::Expert
                         ? counts.choices
                         : count_experts(router_select(scores, {}, free), shape.experts);
    counts.device_tokens.assign(balance.devices, 0);
    for (std::size_t at = 0; at < choices.size(); at += shape.top_k) {
        std::set<std::size_t> sent_to;
        for (const std::int32_t expert : choices.subspan(at, shape.top_k))
            sent_to.insert(static_cast<std::size_t>(expert) / (shape.experts / balance.devices));
        for (const std::size_t device : sent_to)
            ++counts.device_tokens[device];
    }
    return counts;
}

std::vector<std::uint64_t> sum_of(std::vector<std::uint64_t> one,
                                  const std::vector<std::uint64_t>& other) {
    for (std::size_t i = 0; i < one.size(); ++i)
        one[i] += other.at(i);
    return one;
}

/// By expert, what its share of a token's scores is multiplied with.
struct Factors {
    Vector experts, devices, communication;
};

Factors factors_of(const BalanceCounts& counts, const RouterShape& shape,
                   const BalanceShape& balance) {
    const auto tokens = static_cast<double>(counts.tokens);
    const double each = static_cast<double>(shape.experts) /
                        (static_cast<double>(shape.top_k) * tokens); // E / (K T)
    const std::size_t size = shape.experts / balance.devices;
    Factors f;
    for (std::size_t e = 0; e < shape.experts; ++e) {
        const std::size_t device = e / size;
        double mean = 0;
        for (std::size_t i = device * size; i < (device + 1) * size; ++i)
            mean += each * static_cast<double>(counts.choices[i]) / static_cast<double>(size);
        const double tokens_share = static_cast<double>(balance.devices) /
                                    (static_cast<double>(balance.devices_per_token) * tokens) *
                                    static_cast<double>(counts.device_tokens[device]);
        f.experts.push_back(balance.alpha * each * static_cast<double>(counts.experts[e]));
        f.devices.push_back(balance.device_alpha * mean);
        f.communication.push_back(balance.communication_alpha * tokens_share);
    }
    return f;
}

double dot(View x, View y) {
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i)
        sum += x[i] * y[i];
    return sum;
}

} // namespace

BalanceShape balance_shape(const ModelConfig& config) {
    return {config.balance_loss,
            config.balance_loss_alpha,
            config.device_loss_alpha,
            config.communication_loss_alpha,
            config.has_device_losses() ? static_cast<std::size_t>(config.devices_used()) : 1,
            static_cast<std::size_t>(config.devices_per_token())};
}

std::vector<BalanceCounts> balance_counts(View scores, std::span<const std::int32_t> experts,
                                          const RouterShape& shape, const BalanceShape& balance,
                                          std::size_t runs) {
    const std::size_t tokens = scores.size() / shape.experts, length = tokens / runs;
    require_size("balance_counts: tokens", tokens, runs * length);
    std::vector<BalanceCounts> counts;
    for (std::size_t run = 0; run < runs; ++run)
        counts.push_back(counts_of(
            scores.subspan(run * length * shape.experts, length * shape.experts),
            experts.subspan(run * length * shape.top_k, length * shape.top_k), shape, balance));
    return counts;
}

BalanceCounts sum(const BalanceCounts& one, const BalanceCounts& other) {
    return {one.tokens + other.tokens, sum_of(one.experts, other.experts),
            sum_of(one.choices, other.choices), sum_of(one.device_tokens, other.device_tokens)};
}

BalanceLoss balance_loss(View scores, std::span<const BalanceCounts> counts,
                         const RouterShape& shape, const BalanceShape& balance,
                         std::size_t total_tokens) {
    const std::size_t length = scores.size() / shape.experts / counts.size();
    require_size("balance_loss: scores", scores.size(), counts.size() * length * shape.experts);
    BalanceLoss out;
    out.dscores.assign(scores.size(), 0.0);
    for (std::size_t run = 0; run < counts.size(); ++run) {
        const Factors f = factors_of(counts[run], shape, balance);
        for (std::size_t token = run * length; token < (run + 1) * length; ++token) {
            const std::size_t at = token * shape.experts;
            Vector shares(scores.begin() + static_cast<std::ptrdiff_t>(at),
                          scores.begin() + static_cast<std::ptrdiff_t>(at + shape.experts));
            double total = 0;
            for (const double score : shares)
                total += score;
            for (double& share : shares)
                share /= total;
            const double each = 1 / static_cast<double>(total_tokens);
            const double experts = dot(f.experts, shares), devices = dot(f.devices, shares),
                         communication = dot(f.communication, shares);
            out.experts += each * experts;
            out.devices += each * devices;
            out.communication += each * communication;
            const double mean = experts + devices + communication;
            for (std::size_t e = 0; e < shape.experts; ++e)
                out.dscores[at + e] =
                    each * (f.experts[e] + f.devices[e] + f.communication[e] - mean) / total;
        }
    }
    return out;
}

ZLoss router_z_loss(View logits, std::size_t experts, std::size_t total_tokens, double weight) {
    ZLoss out;
    out.dlogits.assign(logits.size(), 0.0);
    const double each = weight / static_cast<double>(total_tokens);
    for (std::size_t at = 0; at < logits.size(); at += experts) {
        const View row = logits.subspan(at, experts);
        const double largest = *std::max_element(row.begin(), row.end());
        double sum = 0;
        for (const double logit : row)
            sum += std::exp(logit - largest);
        const double z = largest + std::log(sum);
        out.loss += each * z * z;
        for (std::size_t e = 0; e < experts; ++e)
            out.dlogits[at + e] = 2 * each * z * std::exp(row[e] - z);
    }
    return out;
}

} // namespace bellows::reference
