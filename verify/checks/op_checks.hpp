// SPDX-License-Identifier: MIT
#pragma once

// Every check of the ops that needs one device alone: all dense ops, codecs and FP8 against the
// f64 reference. `bellows selftest` runs the list in short, the tests in full. One thread.

#include "verify/checks/check.hpp"
#include "verify/checks/op_rig.hpp"

#include <functional>
#include <string>
#include <vector>

namespace bellows::checks {

/// How much of the case tables runs.
enum class Depth : std::uint8_t {
    Quick, ///< each kernel, its tails and gaps: what somebody with an unknown device waits for
    Full,  ///< and large, rare and mixed cases
};

struct OpCheck {
    const char* group; ///< "codecs", "ops" or "fp8"
    std::string what;  ///< "rmsnorm bf16"
    std::function<void(Check&, const OpRig&)> body;
    /// It multiplies bf16 matrices, which each numeric class of a device computes in its own way.
    bool depends_on_gemm_class = false;
};

std::vector<OpCheck> op_checks(Depth depth);

/// " f32" or " bf16" behind `name`.
std::string with_storage(const char* name, DType dtype);

} // namespace bellows::checks
