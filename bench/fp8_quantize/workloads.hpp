// SPDX-License-Identifier: MIT
#pragma once

// What bench_fp8_quantize times: quantisation by every recipe, back, and the ops that quantise what
// they compute. Each workload checks samples of its result against f64.

#include "support/op_bench.hpp"

#include <bellows/fp8/fused.hpp>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace bellows::bench {

/// A matrix, or weights of `batch` experts. columns is a multiple of 128; with a batch, rows too.
struct QuantizeShape {
    std::uint64_t batch = 1, rows = 0, columns = 0;

    std::uint64_t all_rows() const { return batch * rows; }
};
/// "16384x7168", "8x4096x7168"
std::string name_of(const QuantizeShape& shape);

struct QuantizeOp {
    std::string name; ///< "quantize/1x128/bf16"
    std::function<Workload(OpData&)> make;
};
/// Of activations (a batch of one) or of weights. Recipes have this format and rule.
std::vector<QuantizeOp> quantize_ops(const QuantizeShape& shape, fp8::Format format,
                                     fp8::ScaleRule rule, const std::vector<DType>& storage);

// ---- what the workloads stand on -----------------------------------------------------------

/// Uniform in [-4, 4]; few rows are drawn and repeated.
TensorView repeated(OpData& data, DType dtype, const QuantizeShape& shape);
fp8::Quantized empty_codes(OpData& data, const fp8::Recipe& recipe, const QuantizeShape& shape);
/// Of a tensor like repeated()'s.
fp8::Quantized quantized(OpData& data, const fp8::Recipe& recipe, const QuantizeShape& shape);

/// Rows [first, first + count) of a matrix, a batch's behind each other.
using Rows = std::function<std::vector<double>(std::uint64_t first, std::uint64_t count)>;
Rows rows_of(const OpData& data, const TensorView& view);
/// code * scale.
Rows rows_of(const OpData& data, const fp8::Quantized& quantized);

/// "" when the sampled rows, or rows of blocks, are those of `expected` rounded by scales that the
/// blocks' largest magnitudes ask for. amax: of the whole tensor, which PerTensor asks for.
std::string check_quantized(const OpData& data, const fp8::Quantized& quantized,
                            const Rows& expected, double amax = 0);

double bytes_of(const fp8::Quantized& quantized);

Workload rmsnorm_quantized(OpData& data, const QuantizeShape& shape, const fp8::Recipe& recipe,
                           DType act);
/// gate_up is of `act`, or codes.
Workload swiglu_quantized(OpData& data, const QuantizeShape& shape, const fp8::Recipe& recipe,
                          DType act, bool from_codes);
Workload swiglu_dgrad_quantized(OpData& data, const QuantizeShape& shape, const fp8::Recipe& recipe,
                                DType act, bool from_codes);

} // namespace bellows::bench
