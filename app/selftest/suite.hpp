// SPDX-License-Identifier: MIT
#pragma once

// The rows of `bellows selftest` by group. Each op check gets a rig on a device with the
// happens-before checker on; the groups that need ranks get a world. One thread.

#include "app/selftest/check.hpp"
#include "app/selftest/op_rig.hpp"

#include <bellows/comm/world.hpp>

#include <functional>
#include <string>
#include <vector>

namespace bellows::selftest {

/// A row that needs a device alone.
struct OpCheck {
    const char* group;
    std::string what;
    std::function<void(Check&, const OpRig&)> body;
};

/// Each appends its rows; those with two storages once for f32 and once for bf16.
void add_codec_checks(std::vector<OpCheck>& checks);
void add_gemm_checks(std::vector<OpCheck>& checks);
void add_grouped_gemm_checks(std::vector<OpCheck>& checks);
void add_layer_checks(std::vector<OpCheck>& checks);     ///< RMSNorm, SwiGLU, embedding, loss
void add_attention_checks(std::vector<OpCheck>& checks); ///< RoPE, keys, copy, attention
void add_moe_checks(std::vector<OpCheck>& checks);       ///< router, placement, movement of rows
void add_flat_checks(std::vector<OpCheck>& checks);      ///< element-wise, sums, clip, AdamW

/// " f32" or " bf16" behind `name`.
std::string with_storage(const char* name, DType dtype);

/// The expert exchange among the world's ranks against what each rank works out on the host.
/// Collective; every rank returns the same rows: the worst of all.
std::vector<Row> check_exchange(World& world, const DeviceOptions& options,
                                const std::string& fault);

/// Two steps of a small model among the world's ranks: the loss and the gradients of the first
/// against the f64 reference model, and bitwise equal results however work is ordered. Collective;
/// every rank returns the same rows.
std::vector<Row> check_training(World& world, const DeviceOptions& options,
                                const std::string& fault);

} // namespace bellows::selftest
