// SPDX-License-Identifier: MIT
#pragma once

// AdamW over the flat ranges of a ParameterStore: moments in f32, the norm of the gradient for
// clipping, one recording for every step. One thread at a time.

#include <bellows/engine/ops.hpp>
#include <bellows/model/parameter_store.hpp>

#include <chrono>
#include <cstdint>
#include <memory>

namespace bellows {

struct OptimizerOptions {
    ops::AdamwOptions adamw;
    bool count_replicated = true; ///< this rank stands for its copy of what several ranks hold
    bool count_experts = true;    ///< likewise for its routed experts
    /// Of each wait for the device; a step's whole work comes before the norm.
    std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout;
};

class Optimizer {
public:
    Optimizer(ParameterStore& parameters, const OptimizerOptions& options);

    /// Sum of the squares of the gradients that this rank stands for. Waits for them; throws
    /// Error{Timeout} after options.timeout.
    double local_squares();
    /// Hands step `step` (from 1 on) in: gradients times `clip`, then AdamW with rate `lr`.
    TimePoint update(std::uint64_t step, double lr, double clip);

    /// Moments of a parameter, f32 in its shape. They wait.
    std::vector<float> download(const Parameter& parameter, bool second_moment) const;
    void upload(const Parameter& parameter, bool second_moment, std::span<const float> values);

private:
    BufferView moment(const Parameter& parameter, bool second) const;
    void record_norm();
    void record_update();

    ParameterStore& parameters_;
    OptimizerOptions options_;
    Buffer first_moments_, second_moments_;
    Buffer partials_, sum_, workspace_, host_sum_;
    Buffer scalars_, clip_; ///< Upload: read by the update
    std::unique_ptr<Recording> norm_, update_;
    TimePoint last_update_;
};

} // namespace bellows
