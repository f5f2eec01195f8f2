// SPDX-License-Identifier: MIT
#include <bellows/engine/matrix_images.hpp>

#include "device_impl.hpp"

#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
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

// --- Slots

struct Held {
    std::uint32_t x, k;
};

/// What each invocation holds of A, then of B.
std::array<std::vector<Held>, 2> held(Device& device, const MatrixShape& shape,
                                      std::uint32_t size) {
    const std::uint64_t a_count = shape.m * shape.k, b_count = shape.n * shape.k;
    std::vector<std::uint16_t> numbers;
    for (std::uint64_t i = 0; i < std::max(a_count, b_count); ++i)
        numbers.push_back(half(static_cast<int>(i)));
    const Buffer source(device, {"numbers of elements", 2 * numbers.size()});
    const Buffer image(device, {"images of matrices", 2 * (a_count + b_count)});
    device.upload(source.view(), std::span<const std::uint16_t>(numbers));
    Recording recording(device, QueueRole::Compute, "slots of matrices");
    recording.dispatch(
        Kernel{
            .constants = {.local_size = size, .mma_m = shape.m, .mma_n = shape.n, .mma_k = shape.k},
            .a = source.view(),
            .b = source.view(),
            .image = image.view(),
            .d = image.view()},
        {});
    device.submit(recording);
    std::vector<std::uint16_t> found(a_count + b_count);
    device.download(image.view(), std::span<std::uint16_t>(found));
    std::array<std::vector<Held>, 2> result;
    for (std::size_t which = 0; which < 2; ++which) {
        const std::uint64_t count = which == 0 ? a_count : b_count, each = count / size;
        for (std::uint64_t i = 0; i < count; ++i) {
            const std::uint64_t lane = i / each, e = i % each;
            const std::uint16_t code =
                found[(which == 0 ? 0 : a_count) + (e / 8 * size + lane) * 8 + e % 8];
            const auto number = static_cast<std::uint32_t>(
                code == 0 ? 0 : std::ldexp(1024 + (code & 1023), (code >> 10) - 25));
            result[which].push_back({number / shape.k, number % shape.k});
        }
    }
    return result;
}

/// Of one operand: the order, and the k of a slot of each invocation.
struct Regular {
    std::uint32_t per_k = 0, order = 0;
    std::vector<std::vector<std::uint32_t>> k;
};

std::optional<Regular> regular(const std::vector<Held>& all, std::uint32_t size) {
    const std::size_t each = all.size() / size;
    if (each == 0 || each > 8)
        return std::nullopt;
    std::map<std::uint32_t, std::map<std::uint32_t, std::size_t>> slots; // x, k, element
    for (std::size_t e = 0; e < each; ++e)
        slots[all[e].x][all[e].k] = e;
    Regular result;
    std::vector<std::size_t> element_at;
    for (const auto& [x, slot] : slots)
        for (const auto& [k, e] : slot) {
            result.order |= static_cast<std::uint32_t>(element_at.size()) << 4 * e;
            element_at.push_back(e);
        }
    if (element_at.size() != each || each % slots.size() != 0)
        return std::nullopt;
    result.per_k = static_cast<std::uint32_t>(each / slots.size());
    for (std::size_t lane = 0; lane < size; ++lane) {
        const Held* mine = all.data() + lane * each;
        std::vector<std::uint32_t> k;
        for (std::size_t place = 0; place < each; ++place) {
            const Held& h = mine[element_at[place]];
            if (place < result.per_k)
                k.push_back(h.k);
            if (h.k != k[place % result.per_k] ||
                h.x != mine[element_at[place / result.per_k * result.per_k]].x)
                return std::nullopt;
        }
        result.k.push_back(std::move(k));
    }
    return result;
}

std::optional<MatrixSlots> find_slots(Device& device, const MatrixShape& shape) {
    const std::uint32_t size = device.info().subgroup_size;
    if (std::max(shape.m, shape.n) * shape.k > 2048) // what f16 counts to
        return std::nullopt;
    const auto both = held(device, shape, size);
    const auto a = regular(both[0], size), b = regular(both[1], size);
    if (!a || !b || a->per_k != b->per_k || 16 % a->per_k != 0)
        return std::nullopt;
    std::map<std::uint32_t, std::vector<std::uint32_t>> sets; // by their first k
    for (const Regular* operand : {&*a, &*b})
        for (const auto& k : operand->k)
            if (sets.emplace(k[0], k).first->second != k)
                return std::nullopt;
    if (sets.size() != shape.k / a->per_k || sets.begin()->first != 0)
        return std::nullopt;
    const std::uint32_t stride = sets.size() == 1 ? 1 : std::next(sets.begin())->first;
    std::uint32_t expected = 0;
    for (const auto& [first, k] : sets) {
        if (first != expected)
            return std::nullopt;
        expected += stride;
    }
    return MatrixSlots{a->per_k, stride, a->order, b->order};
}

} // namespace

std::optional<MatrixSlots> matrix_slots(const Device& device, const MatrixShape& shape) {
    if (!why_no_matrix_images(device, shape).empty())
        return std::nullopt;
    Device::Impl::MatrixImages& memory = device.impl().matrix_images;
    const std::scoped_lock lock(memory.mutex);
    const std::array<std::uint32_t, 3> key{shape.m, shape.n, shape.k};
    auto found = memory.slots.find(key);
    if (found == memory.slots.end())
        found = memory.slots.emplace(key, find_slots(device.impl().self, shape)).first;
    return found->second;
}

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
