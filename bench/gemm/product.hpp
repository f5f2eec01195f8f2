// SPDX-License-Identifier: MIT
#pragma once

// The operands of one dense or grouped product, the recording that computes it and the check of
// samples of its result against f64.

#include "support/op_bench.hpp"

#include <bellows/engine/gemm.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows::bench {

struct Shape {
    std::uint64_t groups = 0; ///< 0: dense
    std::uint64_t m = 0, n = 0, k = 0;

    bool operator==(const Shape&) const = default;
};

/// "4096x4096x7168", "64x384x2816x2048"
std::string name_of(const Shape& shape);
/// "nt", "nn", "tn"
const char* name_of(GemmForm form);

/// nt, nn: A [M, K], D [M, N]; grouped: rows of group g times B[g]. tn: A [K, M]; grouped, with
/// rows [R, N] and [R, K]: D [groups, N, K] f32.
class Product {
public:
    Product(Device& device, const Shape& shape, GemmForm form, DType dtype);

    const Shape shape;
    const GemmForm form;
    const DType dtype;

    OpData& data() { return data_; }
    Workload workload();

private:
    void make_groups();
    std::string check_samples() const;
    void record(Recording& recording, BufferView list) const;

    OpData data_;
    TensorView a_, b_, d_, offsets_;
    std::vector<std::uint64_t> begins_; ///< first row of each group, and the end
    std::vector<double> a_values_, b_values_;
};

} // namespace bellows::bench
