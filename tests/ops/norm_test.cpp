// SPDX-License-Identifier: MIT
// RMSNorm: what a row's bits depend on, no rows, refusals.

#include "support/op_test.hpp"

namespace bellows {
namespace {

using testing::OpTensor;

class OpsNorm : public testing::OpTest {
protected:
    static void expect_bits_of_the_last_row_alone(std::uint64_t rows, std::uint64_t columns,
                                                  DType dtype, DType gain) {
        SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns) + " " +
                     to_string(dtype) + ", gain " + to_string(gain));
        const OpTensor x = tensor(dtype, {rows, columns}, random(dtype, rows * columns, 1, -3, 3));
        const OpTensor gain_t = tensor(gain, {columns}, random(gain, columns, 3));
        const OpTensor all = result(dtype, {rows, columns}), one = result(dtype, {1, columns});
        const OpTensor inv_rms = result(DType::F32, {rows});
        run([&](Recording& recording) {
            ops::rmsnorm_forward(recording, x, gain_t, all, inv_rms, 1e-6f);
            ops::rmsnorm_forward(recording, x.view.rows(rows - 1, 1), gain_t, one,
                                 inv_rms.view.rows(0, 1), 1e-6f);
        });
        EXPECT_EQ(read(all.view.rows(rows - 1, 1)), read(one));
    }
};

TEST_F(OpsNorm, ARowsBitsDoNotDependOnTheOthers) {
    for (const auto& [rows, columns] : {std::pair<std::uint64_t, std::uint64_t>{1, 4},
                                        {7, 12},
                                        {65, 36},
                                        {100, 256},
                                        {3, 2048},
                                        {2, 1540}})
        for (const DType dtype : {DType::F32, DType::BF16}) {
            expect_bits_of_the_last_row_alone(rows, columns, dtype, dtype);
            if (dtype == DType::BF16)
                expect_bits_of_the_last_row_alone(rows, columns, dtype, DType::F32);
        }
}

TEST_F(OpsNorm, NoRowsGiveNoGradient) {
    const OpTensor none = result(DType::F32, {0, 8});
    const OpTensor inv_rms = result(DType::F32, {0});
    const OpTensor d_gain = result(DType::F32, {8});
    run([&](Recording& recording) {
        ops::rmsnorm_wgrad(recording, none, none, inv_rms, d_gain, false, {});
    });
    EXPECT_EQ(read(d_gain), std::vector<float>(8, 0));
}

TEST_F(OpsNorm, SaysWhatDoesNotFit) {
    const OpTensor x = result(DType::F32, {2, 6});
    const OpTensor gain = result(DType::F32, {6});
    const OpTensor inv_rms = result(DType::F32, {2});
    Recording recording(device(), QueueRole::Compute, "refused");
    try {
        ops::rmsnorm_forward(recording, x, gain, x, inv_rms, 1e-6f);
        FAIL() << "6 columns";
    } catch (const Error& error) {
        EXPECT_NE(error.message().find("columns is 6"), std::string::npos) << error.message();
    }
}

} // namespace
} // namespace bellows
