// SPDX-License-Identifier: MIT
#pragma once

// What bench_moe_layer times: the forward of a layer of experts on one device, from the ids and
// weights of a router to the sum of each token's experts, out of the ops that a model's layer
// takes.

#include "grouped_gemm/operand.hpp"

#include <bellows/fp8/choice.hpp>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace bellows::bench {

struct MoeLayerShape {
    std::uint64_t tokens = 0, hidden = 0, experts = 0, ffn = 0, top_k = 0;

    std::uint64_t slots() const noexcept { return tokens * top_k; }
};
/// "8192x7168x48x3072x6"
std::string name_of(const MoeLayerShape& shape);

struct MoeLayerCase {
    MoeLayerShape shape;
    bool fp8 = true;
    /// Expert e is as likely as (e + 1)^-skew; 0: all alike.
    double skew = 0;
};

/// Which experts the tokens chose, as a router writes it.
struct MoeLayerRouting {
    explicit MoeLayerRouting(const MoeLayerCase& c);

    std::vector<std::int32_t> ids; ///< [tokens, top_k], all different within a token
    std::vector<float> weights;    ///< [tokens, top_k], which add up to 1 within a token
};

/// All that a layer reads and writes; what comes from one part and goes into another is kept.
struct MoeLayerTensors {
    TensorView x, y;                 ///< [tokens, hidden] bf16
    TensorView ids, weights;         ///< [tokens, top_k] i32, f32
    ops::MoeLayout layout;           ///< rows of each expert begin where products are fastest
    std::optional<fp8::Quantized> q; ///< fp8: x in 1 x 128 blocks, which the product reads by slots
    TensorView rows;                 ///< bf16: [capacity, hidden], x gathered
    TensorView gate_up;              ///< [capacity, 2 * ffn] bf16
    fp8::Operand hidden = TensorView{};          ///< [capacity, ffn] in 1 x 128 blocks, or bf16
    TensorView results;                          ///< [capacity, hidden] bf16
    fp8::Operand gate_up_weights = TensorView{}; ///< [experts, 2 * ffn, hidden]
    fp8::Operand down_weights = TensorView{};    ///< [experts, hidden, ffn]
};

class MoeLayer {
public:
    struct Part {
        std::string name;
        std::function<void(Recording&)> record;
        double bytes = 0, flops = 0; ///< each byte of each tensor once
    };

    /// Makes operands, runs the layer once and checks it. choice: of products of the precision.
    MoeLayer(Device& device, const MoeLayerCase& c, const fp8::Choice& choice);
    MoeLayer(const MoeLayer&) = delete;
    MoeLayer& operator=(const MoeLayer&) = delete;

    OpData& data() noexcept { return data_; }
    const MoeLayerTensors& tensors() const noexcept { return t_; }
    /// In the order in which they run.
    const std::vector<Part>& parts() const noexcept { return parts_; }
    /// "gate_up decoded, down packed"
    std::string variants() const;
    /// All parts, each under its name in a trace.
    void record(Recording& recording) const;
    /// "" or what is wrong in what stands in the tensors now.
    std::string check() const;

    /// Of the whole layer, and of one part; verify() says what check() said behind the first run.
    Workload workload() const;
    Workload workload(const Part& part) const;

private:
    /// A product by the matrices of experts, in the way that the choice says.
    struct Product {
        fp8::Way way;
        BufferView workspace;
    };

    void make_tensors();
    void make_weights();
    void make_parts();
    void place(Recording& recording);
    fp8::GroupedRows rows_by_slots() const;
    Product product(const fp8::Operand& a, fp8::Operand& weights, const TensorView& d,
                    const fp8::GroupedRows& rows);
    void record_product(Recording& recording, const Product& product, const fp8::Operand& a,
                        const fp8::Operand& weights, const TensorView& d,
                        const fp8::GroupedRows& rows) const;

    const MoeLayerCase case_;
    const fp8::Choice choice_;
    const MoeLayerRouting routing_;
    OpData data_;
    MoeLayerTensors t_;
    std::uint64_t capacity_ = 0;
    BufferView place_workspace_, list_;
    fp8::GroupedRows rows_; ///< of the last place()
    Product gate_up_, down_;
    std::vector<Part> parts_;
    std::string wrong_;
};

/// Compares all that follows from some tokens, or from all where they are few, with f64 arithmetic
/// on the host: where their slots stand, and then each part's results with what follows from its
/// operands as they stand on the device. "" or what is wrong.
std::string check_moe_layer(Device& device, const MoeLayerCase& c, const MoeLayerRouting& routing,
                            const MoeLayerTensors& tensors);

} // namespace bellows::bench
