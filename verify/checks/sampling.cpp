// SPDX-License-Identifier: MIT
// The choice of tokens: every setting alone and together, against the reference.
#include "verify/checks/families.hpp"
#include "verify/checks/sampling_rows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bellows::checks {

namespace {

using reference::SampleRow;

struct SampleCase {
    Depth depth;
    const char* name;
    std::uint64_t vocabulary;
    std::uint64_t rows;
    SampleRow settings{};
    std::uint64_t top_n = 0;
    bool history = false, biases = false, mask = false;
    bool steps = false; ///< logits are multiples of 1/4: many are equal
};

const std::vector<SampleCase>& cases() {
    static const std::vector<SampleCase> kCases = [] {
        const SampleRow all{.temperature = 0.8,
                            .top_p = 0.9,
                            .min_p = 0.01,
                            .top_k = 40,
                            .repetition_penalty = 1.2,
                            .frequency_penalty = 0.3,
                            .presence_penalty = 0.2};
        const auto quick = Depth::Quick, full = Depth::Full;
        return std::vector<SampleCase>{
            {quick, "likeliest", 1000, 5, {.temperature = 0}, 5},
            {quick, "plain", 1000, 9, {}, 1},
            {quick, "temperature", 64, 9, {.temperature = 0.5}},
            {quick, "top_k", 1000, 9, {.top_k = 20}},
            {quick, "top_p", 1000, 9, {.top_p = 0.7}},
            {quick, "min_p", 1000, 9, {.min_p = 0.05}},
            {quick, "all", 5000, 9, all, 20, true, true, true},
            {quick, "equal logits", 1000, 9, {.top_k = 7}, 20, false, false, false, true},
            {full, "5 tokens", 5, 20, {.temperature = 1.5, .top_p = 0.8}, 5, true, true},
            {full, "likeliest of many", 102400, 3, {.temperature = 0}, 20, true, true, true},
            {full, "plain of many", 102400, 3, {}},
            {full, "top_k of many", 102400, 3, {.top_k = 5000}},
            {full, "top_p of many", 102400, 3, {.top_p = 0.95}},
            {full, "min_p of many", 102400, 3, {.min_p = 1e-4}},
            {full, "all of many", 102400, 3, all, 20, true, true, true},
            {full, "equal logits of many", 20000, 3, {.top_p = 0.9}, 20, false, false, false, true},
            {full, "hot", 3000, 9, {.temperature = 100, .top_p = 0.5, .top_k = 500}},
            {full, "cold", 3000, 9, {.temperature = 0.01, .top_p = 0.99, .top_k = 50}},
            {full, "tiny top_p", 3000, 9, {.top_p = 1e-30}},
            {full, "top_p of 0", 3000, 9, {.top_p = 0}},
            {full, "min_p of 1", 3000, 9, {.min_p = 1}},
            {full, "top_k of 1", 3000, 9, {.top_k = 1}},
            {full, "top_k above all", 3000, 9, {.top_k = 5000}},
            {full,
             "penalties",
             3000,
             9,
             {.repetition_penalty = 1.5, .frequency_penalty = 0.5, .presence_penalty = 1},
             3,
             true},
            {full, "mask", 3001, 9, {.top_p = 0.9}, 3, false, false, true},
        };
    }();
    return kCases;
}

std::vector<SampleRow> rows_of(const SampleCase& c) {
    std::vector<SampleRow> rows(c.rows, c.settings);
    for (std::uint64_t r = 0; r < c.rows; ++r) {
        SampleRow& row = rows[r];
        row.position = static_cast<std::uint32_t>(17 * r + 3);
        row.seed = 0x9E3779B97F4A7C15u * (r + 1);
        const auto v = static_cast<std::uint32_t>(c.vocabulary);
        const std::uint32_t step = std::max(v / 50, 1u);
        for (std::uint32_t t = static_cast<std::uint32_t>(r) % step; c.history && t < v; t += step)
            row.history.emplace_back(t, t / step % 4);
        for (std::uint32_t t = static_cast<std::uint32_t>(r) % step; c.biases && t < v;
             t += 2 * step)
            row.biases.emplace_back(t, t / step % 6 == 0 ? -std::numeric_limits<double>::infinity()
                                                         : 0.5 * (t % 5));
        for (std::uint32_t t = 0; c.mask && t < v; ++t)
            row.allowed.push_back(t % 3 != 1);
    }
    return rows;
}

/// Of some 4 units' spread, with a few that stand out.
std::vector<float> logits_of(const SampleCase& c) {
    auto logits = reference::random_f32(c.rows * c.vocabulary, c.vocabulary + c.rows, -8, 8);
    for (std::size_t i = 0; i < logits.size(); ++i) {
        logits[i] = c.steps ? std::floor(4 * logits[i]) / 4 : logits[i];
        logits[i] += i % 97 == 5 && !c.steps ? 3.0f : 0.0f;
        if (c.mask && i % 53 == 7)
            logits[i] = -std::numeric_limits<float>::infinity();
    }
    return logits;
}

/// What a row may give on the device: min_p and top_p as they are and moved by f32's error.
struct Expected {
    std::vector<bool> kept; ///< by one of them
    std::uint32_t token;
    bool decided; ///< all agree
};

Expected expect(const std::vector<double>& logits, const SampleRow& row) {
    Expected expected{std::vector<bool>(logits.size()), 0, true};
    for (const double error : {0.0, -kSampleError, kSampleError}) {
        SampleRow moved = row;
        moved.min_p *= 1 - error;
        moved.top_p = row.top_p < 1 ? row.top_p * (1 + error) : 1;
        const reference::Sample sample = reference::sample(logits, moved);
        const auto token = static_cast<std::uint32_t>(sample.token);
        expected.token = error == 0 ? token : expected.token;
        expected.decided =
            expected.decided && token == expected.token && sample.margin > kSampleError;
        for (std::size_t t = 0; t < logits.size(); ++t)
            expected.kept[t] = expected.kept[t] || sample.probabilities[t] > 0;
    }
    return expected;
}

void check_sample(Check& check, const OpRig& rig, const SampleCase& c) {
    check.begin_case(c.name);
    const auto logits = logits_of(c);
    const auto rows = rows_of(c);
    const SampledRows actual = sample_rows(rig, logits, c.vocabulary, rows, c.top_n);
    std::vector<std::uint32_t> decided, decided_expected, tops_expected;
    std::vector<double> log_probs_expected, top_log_probs_expected;
    for (std::uint64_t r = 0; r < c.rows; ++r) {
        const auto first = logits.begin() + static_cast<std::ptrdiff_t>(r * c.vocabulary);
        const std::vector<double> x(first, first + static_cast<std::ptrdiff_t>(c.vocabulary));
        const Expected expected = expect(x, rows[r]);
        const std::uint32_t token = actual.tokens[r];
        const bool known = token < c.vocabulary;
        check.that("kept set", known && expected.kept[token],
                   "row " + std::to_string(r) + " has token " + std::to_string(token) +
                       ", which is cut");
        if (expected.decided) {
            decided.push_back(token);
            decided_expected.push_back(expected.token);
        }
        const auto all = reference::log_probabilities(x);
        log_probs_expected.push_back(known ? all[token] : 0);
        for (const std::uint32_t likely : reference::likeliest(x, c.top_n)) {
            tops_expected.push_back(likely);
            top_log_probs_expected.push_back(all[likely]);
        }
    }
    check.that("tokens", 10 * decided.size() >= 6 * c.rows, "too few rows are decided");
    check.exact("tokens", decided, decided_expected);
    const auto bound = storage_bound(DType::F32, 4, 32);
    check.elements("log probabilities", actual.log_probs, log_probs_expected, {}, bound);
    check.exact("likeliest tokens", actual.top_tokens, tops_expected);
    check.elements("their log probabilities", actual.top_log_probs, top_log_probs_expected, {},
                   bound);
}

} // namespace

void add_sampling_checks(std::vector<OpCheck>& checks, Depth depth) {
    checks.push_back({"ops", "sample", [=](Check& check, const OpRig& rig) {
                          for (const SampleCase& c : cases())
                              if (c.depth <= depth)
                                  check_sample(check, rig, c);
                      }});
}

} // namespace bellows::checks
