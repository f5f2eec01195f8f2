// SPDX-License-Identifier: MIT
#include "matmul.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/dlpack.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/engine/recording.hpp>

#include <exception>
#include <memory>
#include <string>
#include <utility>

namespace {

thread_local std::string error;

/// The best device, or BELLOWS_DEVICE. It outlives all tensors: it is never destroyed.
bellows::Device& device() {
    static bellows::Device* const made =
        bellows::Device::create(bellows::DeviceOptions::from_environment({})).release();
    return *made;
}

DLManagedTensor* product(DLManagedTensor* a, DLManagedTensor* b) {
    using bellows::SharedBuffer;
    const auto& shape_a = a->dl_tensor;
    const auto& shape_b = b->dl_tensor;
    if (shape_a.ndim != 2 || shape_b.ndim != 2 || shape_a.shape[1] != shape_b.shape[1])
        throw bellows::Error(bellows::ErrorCode::InvalidArgument,
                             "a must be [M, K] and b [N, K] with the same K");
    const bool on_device = shape_a.device.device_type == kDLCUDA;
    const auto m = static_cast<std::uint64_t>(shape_a.shape[0]);
    const auto n = static_cast<std::uint64_t>(shape_b.shape[0]);

    const bellows::TakenTensor left(device(), a, "a");
    const bellows::TakenTensor right(device(), b, "b");
    const bellows::DType dtype = left.view().dtype;
    const SharedBuffer result(device(),
                              on_device ? SharedBuffer::Place::Device : SharedBuffer::Place::Host,
                              m * n * bellows::size_of(dtype), "a times transpose of b");
    const bellows::TensorView d = result.buffer().tensor(dtype, {m, n});

    bellows::Recording recording(device(), bellows::QueueRole::Compute, "matmul");
    bellows::ops::gemm_nt(recording, left.view(), right.view(), d);
    device().submit(recording).wait();
    return result.hand_out(d);
}

} // namespace

DLManagedTensor* matmul(DLManagedTensor* a, DLManagedTensor* b) {
    try {
        return product(a, b);
    } catch (const std::exception& failure) {
        error = failure.what();
        return nullptr;
    }
}

const char* matmul_error() {
    return error.c_str();
}
