// SPDX-License-Identifier: MIT

// main() of every test program that runs on several ranks.

#include "mpi_test.hpp"

#include <cstdio>

namespace bellows::testing {
namespace {

/// Prints failures only, each line marked with the rank.
class OtherRankPrinter final : public ::testing::EmptyTestEventListener {
    void OnTestPartResult(const ::testing::TestPartResult& result) override {
        if (result.failed())
            std::fprintf(stderr, "[rank %d] %s:%d: %s\n", world().rank(),
                         result.file_name() ? result.file_name() : "?", result.line_number(),
                         result.message());
    }
};

int run(int argc, char** argv) {
    ::testing::InitGoogleTest(&argc, argv);
    int result = 1;
    try {
        World world = World::init(argc, argv);
        world_slot() = &world;
        if (world.rank() != 0) {
            auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
            delete listeners.Release(listeners.default_result_printer());
            listeners.Append(new OtherRankPrinter);
        }
        result = RUN_ALL_TESTS();
        world.close();
    } catch (const std::exception& error) {
        std::fprintf(stderr, "test main: %s\n", error.what());
        result = 1;
    }
    return result;
}

} // namespace
} // namespace bellows::testing

int main(int argc, char** argv) {
    return bellows::testing::run(argc, argv);
}
