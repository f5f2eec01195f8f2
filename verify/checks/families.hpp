// SPDX-License-Identifier: MIT
#pragma once

// The list of checks by families of ops, each in its own file, and what they share.

#include "verify/checks/op_checks.hpp"

#include <array>
#include <span>

namespace bellows::checks {

/// Each appends its checks at a depth.
void add_codec_checks(std::vector<OpCheck>& checks, Depth depth);
void add_fp8_checks(std::vector<OpCheck>& checks, Depth depth);      ///< recipes, products
void add_few_rows_checks(std::vector<OpCheck>& checks, Depth depth); ///< products of generation
void add_few_rows_attention_checks(std::vector<OpCheck>& checks, Depth depth);
void add_gemm_checks(std::vector<OpCheck>& checks, Depth depth);
void add_grouped_gemm_checks(std::vector<OpCheck>& checks, Depth depth);
void add_layer_checks(std::vector<OpCheck>& checks, Depth depth);          ///< RMSNorm, SwiGLU
void add_embedding_checks(std::vector<OpCheck>& checks, Depth depth);      ///< and the loss
void add_attention_part_checks(std::vector<OpCheck>& checks, Depth depth); ///< RoPE, keys, copy
void add_attention_checks(std::vector<OpCheck>& checks, Depth depth);
void add_paged_attention_checks(std::vector<OpCheck>& checks, Depth depth); ///< and its cache
void add_router_checks(std::vector<OpCheck>& checks, Depth depth);          ///< and counts, balance
void add_router_form_checks(std::vector<OpCheck>& checks, Depth depth);
void add_sampling_checks(std::vector<OpCheck>& checks, Depth depth); ///< choice of tokens
void add_moe_checks(std::vector<OpCheck>& checks, Depth depth); ///< placement, movement of rows
/// Element-wise ops, sums, transposition.
void add_flat_checks(std::vector<OpCheck>& checks, Depth depth);
void add_optimizer_checks(std::vector<OpCheck>& checks, Depth depth); ///< clip, AdamW

/// One row for f32 and one for bf16: `body` on each case of the table that belongs to the depth.
template <class Case, std::size_t kCases>
void add_table(std::vector<OpCheck>& checks, Depth depth, const char* name,
               const std::array<Case, kCases>& table,
               void (*body)(Check&, const OpRig&, DType, const Case&)) {
    for (const DType dtype : {DType::F32, DType::BF16})
        checks.push_back({.group = "ops",
                          .what = with_storage(name, dtype),
                          .body = [=, cases = std::span(table)](Check& check, const OpRig& rig) {
                              for (const Case& c : cases)
                                  if (c.depth <= depth)
                                      body(check, rig, dtype, c);
                          }});
}

/// "7 x 12".
inline std::string by(std::uint64_t rows, std::uint64_t columns) {
    return std::to_string(rows) + " x " + std::to_string(columns);
}

} // namespace bellows::checks
