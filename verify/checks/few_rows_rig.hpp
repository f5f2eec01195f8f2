// SPDX-License-Identifier: MIT
#pragma once

// What the checks of products of few rows share: weights of every storage, and sums with what they
// may err by.

#include "verify/checks/families.hpp"
#include "verify/reference/ops.hpp"

#include <bellows/fp8/few_rows.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace bellows::checks::few_rows {

/// Matrices [count, n, k] on the device, and their values.
struct FewRowsWeights {
    Buffer codes, scales;
    OpTensor stored;
    fp8::Operand operand = TensorView{};
    reference::Vector values;
};

enum class Kind : std::uint8_t { Values, PowersOfTwo, F32Scales };

/// Codes are all but NaN, zeros and subnormal ones among them; `nan`: the element of the first
/// matrix that is NaN. count 0: one matrix without a batch.
FewRowsWeights make_weights(const OpRig& rig, DType act, Kind kind, std::uint64_t count,
                            std::uint64_t n, std::uint64_t k,
                            std::optional<std::uint64_t> nan = {});

/// A sum and what it may err by.
struct Bounded {
    double value = 0, error = 0;
};

Bounded dot(const reference::Vector& x, std::uint64_t x_at, const reference::Vector& w,
            std::uint64_t w_at, std::uint64_t k);

void compare(Check& check, const char* part, const std::vector<float>& actual,
             const std::vector<Bounded>& expected, DType storage);

} // namespace bellows::checks::few_rows
