// SPDX-License-Identifier: MIT
#pragma once

// ops::sample with rows as the reference takes them.

#include "verify/checks/op_rig.hpp"
#include "verify/reference/sampling.hpp"

#include <bellows/engine/sampling.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace bellows::checks {

/// What f32 makes of scores and thresholds: rows of the reference that hang on less may differ.
inline constexpr double kSampleError = 1e-5;

struct SampledRows {
    std::vector<std::uint32_t> tokens;
    std::vector<float> log_probs;
    std::vector<std::uint32_t> top_tokens; ///< [rows, top_n]
    std::vector<float> top_log_probs;
};

/// The rows' settings without their lists.
std::vector<ops::SampleSettings> device_settings(const std::vector<reference::SampleRow>& rows);

using RecordSample = std::function<void(Recording&, const ops::SampleBatch&, BufferView)>;
inline void record_sample(Recording& recording, const ops::SampleBatch& batch,
                          BufferView workspace) {
    ops::sample(recording, batch, workspace);
}

/// The mask is that of the first row. logits [rows, vocabulary], dense; on the device their rows
/// stand further apart.
SampledRows sample_rows(const OpRig& rig, const std::vector<float>& logits,
                        std::uint64_t vocabulary, const std::vector<reference::SampleRow>& rows,
                        std::uint64_t top_n, const RecordSample& record = record_sample);

} // namespace bellows::checks
