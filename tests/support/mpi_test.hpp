// SPDX-License-Identifier: MIT
#pragma once

// Tests that run on several ranks: a main that starts the World (mpi_main.cpp), output of rank 0
// plus the failures of the others, and ALL_RANKS_TRUE, which fails on every rank if it fails on
// one, so that no rank walks into a collective that another one has left.

#include <bellows/comm/world.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>

namespace bellows::testing {

/// The world of this test program; valid while tests run.
inline World*& world_slot() {
    static World* slot = nullptr;
    return slot;
}
inline World& world() {
    return *world_slot();
}

/// Collective: whether value holds on every rank; *where names those on which it does not.
inline bool all_ranks_true(bool value, std::string* where) {
    const auto worst = world().control().agree(
        value ? std::nullopt
              : std::optional(
                    Error(ErrorCode::Internal, "false on rank " + std::to_string(world().rank()))),
        std::chrono::seconds(60), "ALL_RANKS_TRUE");
    if (worst)
        *where = worst->message();
    return !worst;
}

} // namespace bellows::testing

/// Collective; fatal on every rank when the condition is false on any.
#define ALL_RANKS_TRUE(condition)                                                                  \
    do {                                                                                           \
        std::string bellows_where;                                                                 \
        if (!::bellows::testing::all_ranks_true(static_cast<bool>(condition), &bellows_where))     \
            FAIL() << #condition << " is " << bellows_where;                                       \
    } while (false)
