// SPDX-License-Identifier: MIT
#pragma once

// What bench_grouped_gemm times: the operands of one grouped product, its recording and the check
// of samples of its result against f64.

#include "grouped_gemm/operand.hpp"

#include <bellows/fp8/tiles.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows::bench {

enum class GroupedLayout : std::uint8_t {
    Contiguous, ///< A [rows, K], B [groups, N, K], D [rows, N]
    Dgrad,      ///< the same weights: A [rows, N], D [rows, K]
    Masked,     ///< A [groups, max_m, K], D [groups, max_m, N]
    K,          ///< A [rows, N], B [rows, K], added to D [groups, N, K] f32
};
const char* name_of(GroupedLayout layout);

/// m: rows of a group on average.
struct GroupedShape {
    std::uint64_t groups = 0, m = 0, n = 0, k = 0;
};
/// "8x4096x4096x7168"
std::string name_of(const GroupedShape& shape);

struct GroupedCase {
    GroupedLayout layout = GroupedLayout::Contiguous;
    GroupedShape shape;
    OperandStorage a, b;
    DType d = DType::BF16; ///< but for K
    fp8::Way way{};
    /// All groups have m rows, not 0.7 to 1.3 times as many as routers give them.
    bool even = false;
};

class GroupedProduct {
public:
    GroupedProduct(Device& device, const GroupedCase& c);

    OpData& data() { return data_; }
    Workload workload();
    /// In which the product can be computed by its variant.
    std::vector<fp8::NamedTile> tiles() const;

private:
    void make_groups();
    void make_operands();
    void record(Recording& recording) const;
    std::string check_samples() const;

    GemmForm form() const;

    const GroupedCase case_;
    OpData data_;
    fp8::Variant variant_ = fp8::Variant::Device; ///< that computes it
    std::vector<std::uint64_t> begins_, ends_;
    std::uint64_t rows_ = 0; ///< padding included
    fp8::GroupLayout groups_;
    fp8::Operand a_ = TensorView{}, b_ = TensorView{};
    fp8::Operand read_a_ = TensorView{}, read_b_ = TensorView{}; ///< as the product reads them
    TensorView d_;
    BufferView list_, workspace_;
};

/// ggml's MUL_MAT_ID: every token's row times the matrices of top_k experts, from ids to results in
/// the order of ids: groups found, rows quantised, gathered, multiplied, put back.
struct MulMatIdShape {
    std::uint64_t tokens = 0, experts = 0, top_k = 0, n = 0, k = 0;
};
/// "512x128x8x768x2048"
std::string name_of(const MulMatIdShape& shape);

class MulMatId {
public:
    MulMatId(Device& device, const MulMatIdShape& shape, const OperandStorage& a,
             const OperandStorage& b, const fp8::Way& way);

    OpData& data() { return data_; }
    Workload workload();
    std::vector<fp8::NamedTile> tiles() const;

private:
    void choose();
    fp8::GroupedRows rows() const;
    void record(Recording& recording) const;
    std::string check_samples() const;

    const MulMatIdShape shape_;
    const fp8::Way way_;
    OpData data_;
    std::vector<std::int32_t> chosen_; ///< expert of each slot
    TensorView ids_, x_, results_;
    fp8::Operand a_ = TensorView{}, b_ = TensorView{};
    BufferView workspace_;
};

} // namespace bellows::bench
