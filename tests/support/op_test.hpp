// SPDX-License-Identifier: MIT
#pragma once

// What the tests of the dense ops share: one device per test suite and an OpRig on it.

#include "support/compare.hpp"
#include "support/test_device.hpp"
#include "verify/checks/op_rig.hpp"

#include <bellows/engine/ops.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

namespace bellows::testing {

using checks::kUntouched;
using checks::OpRig;
using checks::OpTensor;
using checks::storage_bound;
using checks::untouched;

class OpTest : public ::testing::Test {
protected:
    static void SetUpTestSuite() { set_up(test_options()); }
    static void set_up(const DeviceOptions& options) { device_ = make_device(options); }
    static void TearDownTestSuite() { device_.reset(); }
    static Device& device() { return *device_; }
    static OpRig rig() { return OpRig(*device_); }

    static void run(const std::function<void(Recording&)>& record) { rig().run(record); }
    static OpTensor result(DType dtype, std::initializer_list<std::uint64_t> extents) {
        return rig().result(dtype, extents);
    }
    template <class T>
    static OpTensor tensor(DType dtype, std::initializer_list<std::uint64_t> extents,
                           const std::vector<T>& values) {
        return rig().tensor(dtype, extents, values);
    }
    template <class T>
    static void write(const TensorView& view, const std::vector<T>& values) {
        rig().write(view, values);
    }
    template <class T = float>
    static std::vector<T> read(const TensorView& view) {
        return rig().read<T>(view);
    }
    static Buffer workspace(std::uint64_t bytes) { return rig().workspace(bytes); }
    static std::vector<float> random(DType dtype, std::uint64_t count, std::uint64_t seed,
                                     double low = -1, double high = 1) {
        return OpRig::random(dtype, count, seed, low, high);
    }

private:
    inline static std::unique_ptr<Device> device_;
};

} // namespace bellows::testing
