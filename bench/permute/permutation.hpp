// SPDX-License-Identifier: MIT
#pragma once

// What bench_permute times: the ops that move tokens to their experts' rows and back. Each workload
// checks samples of its result, which no other step has computed before.

#include "support/op_bench.hpp"

#include <bellows/engine/ops.hpp>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace bellows::bench {

struct PermuteShape {
    std::uint64_t tokens = 0, hidden = 0, experts = 0, top_k = 0;
};
/// "4096x7168x256x8"
std::string name_of(const PermuteShape& shape);

inline constexpr std::uint32_t kRowAlignment = 16; ///< of each expert's rows

/// Tokens and the experts that they chose; a cheap value, whose memory is the OpData's.
struct Permutation {
    Permutation(OpData& data, const PermuteShape& shape, DType act);

    OpData& data;
    PermuteShape shape;
    DType act;
    TensorView x;       ///< [tokens, hidden] act
    TensorView ids;     ///< [tokens, top_k] i32, of each token top_k different ones
    TensorView weights; ///< [tokens, top_k] f32
    std::vector<double> chosen, factors; ///< the elements of ids and weights

    double slot_bytes() const; ///< of a row for each slot
    /// Rows of the layout: of each slot, and of padding, which gathers clear.
    std::uint64_t num_rows(const ops::MoeLayout& layout) const;
    double row_bytes(const ops::MoeLayout& layout) const;
    ops::MoeLayout layout(std::uint64_t tokens, std::uint64_t experts,
                          std::uint32_t alignment) const;
    BufferView layout_scratch(std::uint64_t tokens, std::uint64_t experts) const;
    void run(const std::function<void(Recording&)>& record) const;
    std::vector<double> row(const TensorView& rows, std::uint64_t index) const;
    /// "" when row `index` is factor times token's x.
    std::string compare_row(const char* what, const TensorView& rows, std::uint64_t index,
                            double factor, std::uint64_t token) const;
};

/// An op, and whether it moves tokens, so that their storage counts.
struct PermuteOp {
    const char* name;
    Workload (*make)(const Permutation& p);
    bool by_storage;
};
std::span<const PermuteOp> permute_ops();

// What an expert exchange of kExchangeRanks does on the device (comm/exchange/legs.cpp), without
// sending: a rank receives what it has packed for all, as many records as a rank of an evenly
// loaded group. The backward pass uses the same kernels the other way round. shape.experts is a
// multiple of kExchangeRanks.
inline constexpr std::uint64_t kExchangeRanks = 8;
Workload exchange_pack(const Permutation& p);
Workload exchange_unpack(const Permutation& p);
Workload exchange_gather(const Permutation& p);
Workload exchange_reduce(const Permutation& p);
Workload exchange_combine(const Permutation& p);

} // namespace bellows::bench
