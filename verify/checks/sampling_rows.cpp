// SPDX-License-Identifier: MIT
#include "verify/checks/sampling_rows.hpp"

#include <bellows/base/rounding.hpp>

#include <bit>

namespace bellows::checks {

namespace {

/// The words of `entries` on the device, or no tensor where there are none.
template <class T>
OpTensor entry_tensor(const OpRig& rig, std::uint64_t columns, const std::vector<T>& entries) {
    if (entries.empty())
        return {};
    OpTensor tensor = rig.result(DType::U32, {entries.size(), columns});
    rig.device().upload(tensor.view.buffer, std::as_bytes(std::span(entries)));
    return tensor;
}

ops::SampleSettings settings_of(const reference::SampleRow& row) {
    ops::SampleSettings s;
    s.temperature = static_cast<float>(row.temperature);
    s.top_p = static_cast<float>(row.top_p);
    s.min_p = static_cast<float>(row.min_p);
    s.top_k = row.top_k;
    s.repetition_penalty = static_cast<float>(row.repetition_penalty);
    s.frequency_penalty = static_cast<float>(row.frequency_penalty);
    s.presence_penalty = static_cast<float>(row.presence_penalty);
    s.position = row.position;
    s.seed_low = static_cast<std::uint32_t>(row.seed);
    s.seed_high = static_cast<std::uint32_t>(row.seed >> 32);
    return s;
}

std::vector<std::uint32_t> mask_of(const std::vector<bool>& allowed) {
    std::vector<std::uint32_t> words(div_up(allowed.size(), 32));
    for (std::size_t t = 0; t < allowed.size(); ++t)
        words[t / 32] |= allowed[t] ? 1u << t % 32 : 0u;
    return words;
}

} // namespace

std::vector<ops::SampleSettings> device_settings(const std::vector<reference::SampleRow>& rows) {
    std::vector<ops::SampleSettings> settings;
    for (const reference::SampleRow& row : rows)
        settings.push_back(settings_of(row));
    return settings;
}

SampledRows sample_rows(const OpRig& rig, const std::vector<float>& logits,
                        std::uint64_t vocabulary, const std::vector<reference::SampleRow>& rows,
                        std::uint64_t top_n, const RecordSample& record) {
    std::vector<ops::SampleSettings> settings = device_settings(rows);
    std::vector<ops::SampleHistory> history;
    std::vector<ops::SampleBias> biases;
    for (std::size_t r = 0; r < rows.size(); ++r) {
        const reference::SampleRow& row = rows[r];
        ops::SampleSettings& s = settings[r];
        s.history_first = static_cast<std::uint32_t>(history.size());
        s.history_count = static_cast<std::uint32_t>(row.history.size());
        s.bias_first = static_cast<std::uint32_t>(biases.size());
        s.bias_count = static_cast<std::uint32_t>(row.biases.size());
        for (const auto& [token, times] : row.history)
            history.push_back({token, times});
        for (const auto& [token, bias] : row.biases)
            biases.push_back({token, static_cast<float>(bias)});
    }
    const std::uint64_t count = rows.size();
    const OpTensor logits_t =
        rig.head(DType::F32, {count, div_up(vocabulary, 4) * 4 + 8}, vocabulary);
    rig.write(logits_t.view, logits);
    const OpTensor settings_t = entry_tensor(rig, sizeof(ops::SampleSettings) / 4, settings);
    const OpTensor history_t = entry_tensor(rig, 2, history);
    const OpTensor biases_t = entry_tensor(rig, 2, biases);
    const auto mask = mask_of(rows.front().allowed);
    OpTensor mask_t = entry_tensor(rig, 1, mask);
    if (mask_t.view.buffer)
        mask_t.view = mask_t.view.reshaped({mask.size()});
    const OpTensor tokens = rig.result(DType::U32, {count});
    const OpTensor log_probs = rig.result(DType::F32, {count});
    const OpTensor top_tokens = rig.result(DType::U32, {count, top_n});
    const OpTensor top_log_probs = rig.result(DType::F32, {count, top_n});
    const Buffer workspace = rig.workspace(ops::sample_workspace_bytes(count, vocabulary));
    rig.run([&](Recording& recording) {
        record(recording,
               {.logits = logits_t,
                .settings = settings_t,
                .history = history_t,
                .biases = biases_t,
                .allowed = mask_t,
                .tokens = tokens,
                .log_probs = log_probs,
                .top_tokens = top_tokens,
                .top_log_probs = top_log_probs},
               workspace.view());
    });
    return {rig.read<std::uint32_t>(tokens), rig.read(log_probs),
            rig.read<std::uint32_t>(top_tokens), rig.read(top_log_probs)};
}

} // namespace bellows::checks
