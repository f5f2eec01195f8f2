// SPDX-License-Identifier: MIT
#include "ops/workloads.hpp"
#include "verify/checks/sampling_rows.hpp"

#include <bellows/engine/sampling.hpp>

#include <algorithm>
#include <cmath>

namespace bellows::bench {

namespace {

/// Logits as those of a language model: the probability of the r-th likeliest token goes with
/// r^-1.5; the tokens stand in any order.
std::vector<float> zipf(std::uint64_t rows, std::uint64_t vocabulary) {
    std::vector<float> logits(rows * vocabulary);
    reference::Random random(7);
    for (std::uint64_t r = 0; r < rows; ++r) {
        float* row = logits.data() + r * vocabulary;
        for (std::uint64_t t = 0; t < vocabulary; ++t) {
            row[t] = static_cast<float>(12 - 1.5 * std::log(static_cast<double>(t + 1)));
            std::swap(row[t], row[random.below(t + 1)]);
        }
    }
    return logits;
}

reference::SampleRow settings_of(SampleKind kind, std::uint64_t row) {
    reference::SampleRow settings;
    settings.seed = row;
    settings.position = 100;
    settings.temperature = kind == SampleKind::Likeliest ? 0 : 0.8;
    if (kind == SampleKind::Cut) {
        settings.top_p = 0.95;
        settings.min_p = 0.001;
        settings.top_k = 50;
    }
    return settings;
}

} // namespace

Workload sampling(OpData& data, SampleKind kind, std::uint64_t rows, std::uint64_t vocabulary) {
    const std::vector<float> numbers = zipf(rows, vocabulary);
    std::vector<reference::SampleRow> settings;
    for (std::uint64_t r = 0; r < rows; ++r)
        settings.push_back(settings_of(kind, r));
    const TensorView logits = data.values({rows, vocabulary}, numbers);
    const TensorView on_device = data.empty(DType::U32, {rows, sizeof(ops::SampleSettings) / 4});
    const auto words = checks::device_settings(settings);
    data.device().upload(on_device.buffer.sub(0, on_device.num_bytes()),
                         std::as_bytes(std::span(words)));
    const TensorView tokens = data.empty(DType::U32, {rows});
    const TensorView log_probs = data.empty(DType::F32, {rows});
    const BufferView workspace = data.bytes(ops::sample_workspace_bytes(rows, vocabulary));
    const auto verify = [=, &data]() -> std::string {
        const auto drawn = data.read(tokens), logs = data.read(log_probs);
        for (const std::uint64_t r : samples(rows)) {
            const auto first = numbers.begin() + static_cast<std::ptrdiff_t>(r * vocabulary);
            const std::vector<double> row(first, first + static_cast<std::ptrdiff_t>(vocabulary));
            const reference::Sample expected = reference::sample(row, settings[r]);
            if (expected.margin < checks::kSampleError)
                continue;
            std::string wrong =
                compare("token", r, drawn[r], static_cast<double>(expected.token), 0);
            if (wrong.empty())
                wrong = compare("log_prob", r, logs[r], expected.log_prob, 1e-5);
            if (!wrong.empty())
                return wrong;
        }
        return "";
    };
    return {
        [=](Recording& r) {
            ops::sample(
                r,
                {.logits = logits, .settings = on_device, .tokens = tokens, .log_probs = log_probs},
                workspace);
        },
        verify, bytes_of({logits}), 0};
}

} // namespace bellows::bench
