// SPDX-License-Identifier: MIT
#include "verify/reference/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace bellows::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

bool is_bad(double x) {
    return std::isnan(x) || x == kInfinity;
}

Vector changed_logits(View logits, const SampleRow& row) {
    Vector x(logits.begin(), logits.end());
    for (std::size_t t = 0; t < row.allowed.size() && t < x.size(); ++t)
        x[t] = row.allowed[t] ? x[t] : -kInfinity;
    for (const auto& [token, times] : row.history) {
        double& logit = x.at(token);
        logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
        logit -= times * row.frequency_penalty + (times > 0 ? row.presence_penalty : 0);
    }
    for (const auto& [token, bias] : row.biases)
        x.at(token) += bias;
    return x;
}

/// Tokens from the likeliest on, of which the first `kept` are left.
struct Kept {
    std::vector<std::uint32_t> order;
    std::size_t kept = 0;
    bool exact = true; ///< nothing was changed: f32 has the same logits
    double margin = kInfinity;
};

/// Keeps the first `count` and all that equal the last of them.
void cut(Kept& kept, const Vector& x, std::size_t count) {
    while (count < kept.kept && x[kept.order[count]] == x[kept.order[count - 1]])
        ++count;
    if (count < kept.kept && !kept.exact) {
        const double last = x[kept.order[count - 1]];
        kept.margin =
            std::min(kept.margin, (last - x[kept.order[count]]) / std::max(1.0, std::abs(last)));
    }
    kept.kept = count;
}

void keep_min_p(Kept& kept, const Vector& x, const SampleRow& row) {
    if (row.min_p <= 0)
        return;
    const double least = std::log(std::min(row.min_p, 1.0));
    const double most = x[kept.order[0]];
    std::size_t count = 0;
    while (count < kept.kept && (x[kept.order[count]] - most) / row.temperature >= least)
        ++count;
    kept.kept = std::max<std::size_t>(count, 1);
}

double weight(const Kept& kept, const Vector& x, const SampleRow& row, std::size_t i) {
    return std::exp((x[kept.order[i]] - x[kept.order[0]]) / row.temperature);
}

double mass(const Kept& kept, const Vector& x, const SampleRow& row) {
    double sum = 0;
    for (std::size_t i = 0; i < kept.kept; ++i)
        sum += weight(kept, x, row, i);
    return sum;
}

void keep_top_p(Kept& kept, const Vector& x, const SampleRow& row) {
    if (row.top_p >= 1)
        return;
    const double wanted = row.top_p * mass(kept, x, row);
    double sum = 0;
    std::size_t count = 0;
    do
        sum += weight(kept, x, row, count++);
    while (sum < wanted && count < kept.kept);
    cut(kept, x, count);
}

/// -ln(1 - n / 2^64) of 64 random bits.
double exponential(const SampleRow& row, std::uint32_t token) {
    const auto words =
        philox({token, row.position, 0, 0},
               {static_cast<std::uint32_t>(row.seed), static_cast<std::uint32_t>(row.seed >> 32)});
    const std::uint64_t n = (std::uint64_t{words[1]} << 32) | words[0] | 1;
    if (words[1] >= 0x40000000u) // 24 bits of 1 - n / 2^64
        return -std::log(static_cast<double>(0x1000000u - (words[1] >> 8)) * 0x1p-24);
    return -std::log1p(-static_cast<double>(n) * 0x1p-64);
}

void draw(Sample& sample, const Kept& kept, const Vector& x, const SampleRow& row) {
    const double total = mass(kept, x, row);
    double best = -kInfinity, second = -kInfinity;
    for (std::size_t i = 0; i < kept.kept; ++i) {
        const std::uint32_t token = kept.order[i];
        sample.probabilities[token] = weight(kept, x, row, i) / total;
        const double score = x[token] / row.temperature - std::log(exponential(row, token));
        second = std::max(second, std::min(score, best));
        if (score > best) {
            best = score;
            sample.token = token;
        }
    }
    sample.margin = std::min(kept.margin, (best - second) / std::max(1.0, std::abs(best)));
}

} // namespace

Sample sample(View logits, const SampleRow& row) {
    Sample sample{Vector(logits.size(), 0.0), -1, kNan, kInfinity};
    const Vector x = changed_logits(logits, row);
    if (std::any_of(logits.begin(), logits.end(), is_bad) ||
        std::any_of(x.begin(), x.end(), is_bad))
        return sample;
    Kept kept{likeliest(x, x.size()), x.size(), row.history.empty() && row.biases.empty()};
    while (kept.kept > 0 && x[kept.order[kept.kept - 1]] == -kInfinity)
        --kept.kept;
    if (kept.kept == 0)
        return sample;
    if (row.temperature < 1e-5) {
        sample.token = kept.order[0];
        sample.probabilities[kept.order[0]] = 1;
        if (kept.kept > 1 && !kept.exact && x[kept.order[0]] != x[kept.order[1]])
            sample.margin =
                (x[kept.order[0]] - x[kept.order[1]]) / std::max(1.0, std::abs(x[kept.order[0]]));
    } else {
        keep_min_p(kept, x, row);
        if (row.top_k > 0 && row.top_k < kept.kept)
            cut(kept, x, row.top_k);
        keep_top_p(kept, x, row);
        draw(sample, kept, x, row);
    }
    sample.log_prob = log_probabilities(logits)[static_cast<std::size_t>(sample.token)];
    return sample;
}

std::vector<std::uint32_t> likeliest(View logits, std::size_t n) {
    std::vector<std::uint32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0u);
    const auto before = [&](std::uint32_t a, std::uint32_t b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    };
    std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n), order.end(),
                      before);
    order.resize(n);
    return order;
}

Vector log_probabilities(View logits) {
    const double most = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (const double x : logits)
        sum += std::exp(x - most);
    Vector result(logits.size());
    for (std::size_t i = 0; i < result.size(); ++i)
        result[i] = logits[i] - most - std::log(sum);
    return result;
}

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                    std::array<std::uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
        const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
        counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0],
                   static_cast<std::uint32_t>(b),
                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1],
                   static_cast<std::uint32_t>(a)};
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return counter;
}

} // namespace bellows::reference
