// SPDX-License-Identifier: MIT
#include <bellows/engine/matrix_images.hpp>

#include "device_impl.hpp"

#include <bellows/kernels/kernels.hpp>

#include <cmath>
#include <vector>

namespace bellows {

namespace {

using Kernel = kernels::MatrixImage;

/// Small integers, so that products are exact; no two rows or columns alike.
int a_value(std::uint32_t row, std::uint32_t k) {
    return static_cast<int>((row * 37 + k * 11 + row * k) % 31) - 15;
}
int b_value(std::uint32_t k, std::uint32_t column) {
    return static_cast<int>((column * 29 + k * 17 + column * k * 3) % 29) - 14;
}

/// f16 of an integer below 2048 in magnitude.
std::uint16_t half(int value) {
    if (value == 0)
        return 0;
    int exponent = 0;
    const double mantissa = std::frexp(std::abs(value), &exponent); // in [0.5, 1)
    const auto fraction = static_cast<std::uint16_t>(std::lround((mantissa * 2 - 1) * 1024));
    return static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | fraction);
}

std::string check(Device& device, const MatrixShape& shape) {
    const std::string lacking = device.why_not(Kernel::info(), 0);
    if (!lacking.empty())
        return lacking;
    const std::uint32_t size = device.info().subgroup_size;
    if (size == 0 || shape.m * shape.k % (8 * size) != 0 || shape.n * shape.k % (8 * size) != 0)
        return "invocations hold no multiples of eight elements";
    std::vector<std::uint16_t> a, b;
    for (std::uint32_t row = 0; row < shape.m; ++row)
        for (std::uint32_t k = 0; k < shape.k; ++k)
            a.push_back(half(a_value(row, k)));
    for (std::uint32_t column = 0; column < shape.n; ++column)
        for (std::uint32_t k = 0; k < shape.k; ++k)
            b.push_back(half(b_value(k, column)));
    std::vector<float> d(std::size_t{shape.m} * shape.n, NAN);
    const Buffer a_memory(device, {"matrix A", 2 * a.size()});
    const Buffer b_memory(device, {"matrix B", 2 * b.size()});
    const Buffer image(device, {"images of matrices", 2 * (a.size() + b.size())});
    const Buffer d_memory(device, {"matrix D", 4 * d.size()});
    device.upload(a_memory.view(), std::span<const std::uint16_t>(a));
    device.upload(b_memory.view(), std::span<const std::uint16_t>(b));
    device.upload(d_memory.view(), std::span<const float>(d));
    Kernel kernel{
        .constants = {.local_size = size, .mma_m = shape.m, .mma_n = shape.n, .mma_k = shape.k},
        .a = a_memory.view(),
        .b = b_memory.view(),
        .image = image.view(),
        .d = d_memory.view()};
    Recording recording(device, QueueRole::Compute, "check of matrix images");
    recording.dispatch(kernel, {});
    kernel.constants.restore = 1;
    recording.dispatch(kernel, {});
    device.submit(recording);
    device.download(d_memory.view(), std::span<float>(d));
    for (std::uint32_t row = 0; row < shape.m; ++row)
        for (std::uint32_t column = 0; column < shape.n; ++column) {
            int sum = 0;
            for (std::uint32_t k = 0; k < shape.k; ++k)
                sum += a_value(row, k) * b_value(k, column);
            if (d[row * shape.n + column] != static_cast<float>(sum))
                return "matrices that invocations save and restore element by element are not the "
                       "same afterwards";
        }
    return "";
}

} // namespace

std::string why_no_matrix_images(const Device& device, const MatrixShape& shape) {
    Device::Impl::MatrixImages& memory = device.impl().matrix_images;
    const std::scoped_lock lock(memory.mutex);
    const std::array<std::uint32_t, 3> key{shape.m, shape.n, shape.k};
    auto found = memory.why_not.find(key);
    if (found == memory.why_not.end())
        found = memory.why_not.emplace(key, check(device.impl().self, shape)).first;
    return found->second;
}

} // namespace bellows
