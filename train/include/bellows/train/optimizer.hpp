// SPDX-License-Identifier: MIT
#pragma once

// AdamW over those flat ranges of a ParameterStore that this rank updates: moments and, of what the
// store does not keep in f32, master weights in f32, the norm of the gradient for clipping, the
// same recordings for every step. One thread at a time.

#include <bellows/comm/collectives.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/parameter_store.hpp>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace bellows {

/// A run of a ParameterStore's flat buffers: parameters, divided where they are divisible.
struct UpdatedRange {
    std::uint64_t first = 0, count = 0; ///< elements
    bool weight_decay = false;
    bool counted = true; ///< in the norm: this rank stands for them among those that update them
    /// Other ranks' parts of the same matrices are to come: transposed or packed copies are made
    /// when they are there, not by the update.
    bool in_part = false;
};

/// What is handed in at once.
using UpdatePart = std::vector<UpdatedRange>;

/// What a rank has of the parameters that it updates.
enum class Parted : std::uint8_t { Gradients, Masters, FirstMoments, SecondMoments };
inline constexpr std::array kMoments = {Parted::FirstMoments, Parted::SecondMoments};

struct OptimizerOptions {
    ops::AdamwOptions adamw;
    /// Of each wait for the device; a step's whole work comes before the norm.
    std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout;
};

class Optimizer {
public:
    /// Updates all that is trained.
    Optimizer(ParameterStore& parameters, const OptimizerOptions& options);
    /// Updates `parts`, one after another: who waits for one's weights does not for the next's.
    Optimizer(ParameterStore& parameters, std::vector<UpdatePart> parts,
              const OptimizerOptions& options);

    /// What this rank updates of a parameter: elements of it, without padding. Nothing: count 0.
    Share updated(const Parameter& parameter) const noexcept;
    /// Whether it updates a parameter's first element, and stands for that.
    bool stands_for(const Parameter& parameter) const noexcept;

    /// Sum of the squares of the gradients that this rank stands for. Waits for them; throws
    /// Error{Timeout} after options.timeout.
    double local_squares();
    /// Hands step `step` (from 1 on) in: gradients times `clip`, then AdamW with rate `lr`.
    void update(std::uint64_t step, double lr, double clip);

    /// Master weights of the elements from `first` on, of which those are taken that this rank
    /// updates and the store does not keep itself. At first they are the bf16 weights, zero of
    /// what computes in FP8. Waits.
    void upload_masters(std::uint64_t first, std::span<const float> values);
    /// Of updated(parameter), f32; what: of kMoments. They wait.
    std::vector<float> download(const Parameter& parameter, Parted what) const;
    void upload(const Parameter& parameter, Parted what, std::span<const float> values);
    /// The store's gradients of what is updated become its master weights or moments. Waits.
    void replace_gradients(Parted what);

private:
    struct Placed {
        UpdatedRange range;
        std::uint64_t at = 0; ///< element of the moments
    };

    /// The range that holds elements of a parameter, if any: a rank's part is one of its bucket.
    const Placed* find(const Parameter& parameter) const noexcept;
    const Buffer& moments_of(Parted what) const noexcept {
        return what == Parted::FirstMoments ? first_moments_ : second_moments_;
    }
    BufferView moment(const Parameter& parameter, Parted what) const;
    /// f32, if the store has them.
    TensorView stored(const UpdatedRange& range) const {
        return parameters_.f32_weights(range.first, range.count);
    }
    /// f32, the store's or this one's.
    TensorView masters(const Placed& placed) const;
    void record_norm();
    void record(Recording& update, const Placed& placed) const;

    ParameterStore& parameters_;
    OptimizerOptions options_;
    std::vector<std::vector<Placed>> parts_;
    std::uint64_t num_elements_ = 0; ///< that are updated
    Buffer first_moments_, second_moments_;
    Buffer masters_; ///< in their order; none where the store keeps all
    Buffer partials_, sum_, workspace_, host_sum_;
    Buffer scalars_, clip_;                        ///< Upload: read by the update
    std::vector<std::unique_ptr<Recording>> norm_; ///< by part, as gradients are summed; their sum
    std::vector<std::unique_ptr<Recording>> updates_; ///< by part
    std::vector<TimePoint> updated_;                  ///< the last step's, in no order
};

} // namespace bellows
