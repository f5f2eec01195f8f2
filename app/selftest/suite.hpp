// SPDX-License-Identifier: MIT
#pragma once

// The rows of `bellows selftest` that need ranks; those of the ops are checks::op_checks(). One
// thread.

#include "verify/checks/op_checks.hpp"

#include <bellows/comm/world.hpp>

#include <string>
#include <vector>

namespace bellows::selftest {

using checks::Check;
using checks::Row;

/// The expert exchange among the world's ranks against what each rank works out on the host, rows
/// as they are and as FP8 codes with scales.
/// Collective; every rank returns the same rows: the worst of all.
std::vector<Row> check_exchange(World& world, const DeviceOptions& options,
                                const std::string& fault);

/// Two steps of a small model among the world's ranks: the loss and the gradients of the first
/// against the f64 reference model, and bitwise equal results however work is ordered; some steps
/// in FP8 beside the same in bf16. Collective; every rank returns the same rows.
std::vector<Row> check_training(World& world, const DeviceOptions& options,
                                const std::string& fault);

/// What no row of the self-test covers on this device, each with the reason.
std::vector<std::string> not_covered(const Device& device);

} // namespace bellows::selftest
