// SPDX-License-Identifier: MIT
#pragma once

// AdamW and the global gradient norm in f64.

#include "verify/reference/gemm.hpp"

#include <cstdint>

namespace bellows::reference {

struct AdamW {
    double lr = 1e-3;
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double weight_decay = 0.1; ///< decoupled: parameter -= lr · weight_decay · parameter
};

/// One step on a parameter and its moments, in place. step counts from 1. m and v are divided by
/// 1 - beta^step; eps is added to sqrt(v) after that; the decay uses the parameter before the step.
void adamw_step(Vector& parameter, View gradient, Vector& m, Vector& v, const AdamW& config,
                std::uint64_t step);

/// sqrt of the sum of all squares.
double global_norm(const std::vector<View>& gradients);
/// What gradients are multiplied with: max_norm / norm if norm > max_norm > 0, else 1.
double clip_factor(double norm, double max_norm);

} // namespace bellows::reference
