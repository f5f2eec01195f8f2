// SPDX-License-Identifier: MIT
#include <bellows/engine/matrix_images.hpp>

#include "runtime/device_impl.hpp"

#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <map>
#include <mutex>
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

/// bf16 of an integer up to 256 in magnitude.
std::uint16_t bfloat(int value) {
    return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >>
                                      16);
}

/// Of the matrices of a_value and b_value.
bool is_product(const MatrixShape& shape, const std::vector<float>& d) {
    for (std::uint32_t row = 0; row < shape.m; ++row)
        for (std::uint32_t column = 0; column < shape.n; ++column) {
            int sum = 0;
            for (std::uint32_t k = 0; k < shape.k; ++k)
                sum += a_value(row, k) * b_value(k, column);
            if (d[row * shape.n + column] != static_cast<float>(sum))
                return false;
        }
    return true;
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
    device.upload(a_memory.view(), a);
    device.upload(b_memory.view(), b);
    device.upload(d_memory.view(), d);
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
    device.download(d_memory.view(), d);
    return is_product(shape, d) ? ""
                                : "matrices that invocations save and restore element by element "
                                  "are not the same afterwards";
}

// --- Slots

using Probe = kernels::MatrixSlots;
using Units = GemmClass::Units;
constexpr std::uint32_t kMostElements = 8;

Probe::Variant variant_of(Units units) {
    return units == Units::BF16 ? Probe::Variant::bf16 : Probe::Variant::f16;
}

/// Of A, B and their product: the number of each element that each invocation holds.
struct Numbers {
    Units units = Units::F16;
    std::uint32_t size = 0; ///< invocations
    std::array<std::uint32_t, 3> each{};
    std::vector<std::uint32_t> all;

    std::uint32_t& at(std::uint32_t use, std::uint32_t lane, std::uint32_t e) {
        return all[(use * size + lane) * kMostElements + e];
    }
    std::uint32_t at(std::uint32_t use, std::uint32_t lane, std::uint32_t e) const {
        return all[(use * size + lane) * kMostElements + e];
    }
};

void run(Device& device, const MatrixShape& shape, Numbers& numbers, std::vector<float>* d) {
    const Buffer memory(device, {"elements of matrices", 4 * numbers.all.size()});
    const Buffer d_memory(device, {"matrix D", std::uint64_t{4} * shape.m * shape.n});
    device.upload(memory.view(), numbers.all);
    Recording recording(device, QueueRole::Compute, "elements of matrices");
    recording.dispatch(Probe{.variant = variant_of(numbers.units),
                             .constants = {.local_size = numbers.size,
                                           .mma_m = shape.m,
                                           .mma_n = shape.n,
                                           .mma_k = shape.k,
                                           .restore = d != nullptr ? 1u : 0u},
                             .numbers = memory.view(),
                             .d = d_memory.view()},
                       {});
    device.submit(recording);
    if (d != nullptr)
        device.download(d_memory.view(), *d);
    else
        device.download(memory.view(), numbers.all);
}

/// Nothing when invocations hold no equal shares of few elements.
std::optional<Numbers> numbers_of(Device& device, const MatrixShape& shape, Units units) {
    constexpr std::uint32_t kNone = ~std::uint32_t{0};
    const std::uint32_t most = units == Units::BF16 ? 256 : 2048; // what elements count to
    Numbers result;
    result.units = units;
    result.size = device.info().subgroup_size;
    const std::array<std::uint32_t, 3> counts{shape.m * shape.k, shape.n * shape.k,
                                              shape.m * shape.n};
    if (result.size == 0 || (result.size & (result.size - 1)) != 0 ||
        std::max(counts[0], counts[1]) > most)
        return std::nullopt;
    for (std::size_t use = 0; use < 3; ++use) {
        result.each[use] = counts[use] / result.size;
        if (counts[use] % result.size != 0 || result.each[use] == 0 ||
            result.each[use] > kMostElements || counts[use] % 8 != 0)
            return std::nullopt;
    }
    result.all.assign(std::size_t{3} * result.size * kMostElements, kNone);
    run(device, shape, result, nullptr);
    return result.at(0, 0, 0) == kNone ? std::nullopt : std::optional(std::move(result));
}

/// Whether matrices whose elements are set as `numbers` says have the right product.
bool keeps_elements(Device& device, const MatrixShape& shape, const Numbers& numbers) {
    Numbers bits = numbers;
    for (std::uint32_t lane = 0; lane < numbers.size; ++lane)
        for (std::uint32_t use = 0; use < 2; ++use)
            for (std::uint32_t e = 0; e < numbers.each[use]; ++e) {
                const std::uint32_t number = numbers.at(use, lane, e);
                const std::uint32_t x = number / shape.k, k = number % shape.k;
                const int value = use == 0 ? a_value(x, k) : b_value(k, x);
                bits.at(use, lane, e) = numbers.units == Units::BF16 ? bfloat(value) : half(value);
            }
    std::vector<float> d(std::size_t{shape.m} * shape.n, NAN);
    run(device, shape, bits, &d);
    return is_product(shape, d);
}

/// Four bits for each bit of an invocation's number: what they add to f(0). Nothing when they do
/// not.
template <class F>
std::optional<std::uint32_t> lane_weights(std::uint32_t size, const F& f) {
    std::uint32_t weights = 0, shift = 0;
    for (std::uint32_t lane = 1; lane < size; lane *= 2, shift += 4) {
        const std::uint32_t weight = f(lane) - f(0);
        if (weight > 15 || shift > 24)
            return std::nullopt;
        weights |= weight << shift;
    }
    for (std::uint32_t lane = 0; lane < size; ++lane) {
        std::uint32_t sum = f(0);
        for (std::uint32_t bit = 0; lane >> bit != 0; ++bit)
            sum += (lane >> bit & 1) * (weights >> 4 * bit & 15);
        if (f(lane) != sum)
            return std::nullopt;
    }
    return weights;
}

/// Of one operand: its slots, and the k of a slot of each invocation.
struct Regular {
    std::uint32_t per_k = 0;
    MatrixSlots::Operand slots;
    std::vector<std::vector<std::uint32_t>> k;
};

std::optional<Regular> regular(const Numbers& numbers, std::uint32_t use, std::uint32_t depth) {
    const std::uint32_t each = numbers.each[use];
    const auto x_of = [&](std::uint32_t lane, std::uint32_t e) {
        return numbers.at(use, lane, e) / depth;
    };
    std::map<std::uint32_t, std::map<std::uint32_t, std::uint32_t>> slots; // x, k, element
    for (std::uint32_t e = 0; e < each; ++e)
        slots[x_of(0, e)][numbers.at(use, 0, e) % depth] = e;
    Regular result;
    std::vector<std::uint32_t> element_at;
    for (const auto& [x, slot] : slots) {
        if (x > 15 || slot.size() * slots.size() != each)
            return std::nullopt;
        result.slots.slot |= x << 4 * (element_at.size() / slot.size());
        for (const auto& [k, e] : slot) {
            result.slots.place |= static_cast<std::uint32_t>(element_at.size()) << 4 * e;
            element_at.push_back(e);
        }
    }
    result.per_k = each / static_cast<std::uint32_t>(slots.size());
    const auto weights =
        lane_weights(numbers.size, [&](std::uint32_t lane) { return x_of(lane, element_at[0]); });
    if (!weights)
        return std::nullopt;
    result.slots.lane = *weights;
    for (std::uint32_t lane = 0; lane < numbers.size; ++lane) {
        std::vector<std::uint32_t> k;
        for (std::uint32_t place = 0; place < each; ++place) {
            const std::uint32_t e = element_at[place];
            const std::uint32_t mine = numbers.at(use, lane, e) % depth;
            if (place < result.per_k)
                k.push_back(mine);
            if (mine != k[place % result.per_k] ||
                x_of(lane, e) - x_of(0, e) != x_of(lane, element_at[0]) - x_of(0, element_at[0]))
                return std::nullopt;
        }
        result.k.push_back(std::move(k));
    }
    return result;
}

/// The columns of the product that an invocation holds.
bool add_sums(MatrixSlots& slots, const Numbers& numbers, std::uint32_t columns) {
    const auto column = [&](std::uint32_t lane, std::uint32_t e) {
        return numbers.at(2, lane, e) % columns;
    };
    std::map<std::uint32_t, std::uint32_t> order; // column, slot
    for (std::uint32_t e = 0; e < numbers.each[2]; ++e)
        order[column(0, e)] = 0;
    for (auto& [x, slot] : order) {
        slot = slots.sum_slots++;
        if (x > 15)
            return false;
        slots.sum.slot |= x << 4 * slot;
    }
    for (std::uint32_t e = 0; e < numbers.each[2]; ++e) {
        slots.sum.place |= order[column(0, e)] << 4 * e;
        const auto weights =
            lane_weights(numbers.size, [&](std::uint32_t lane) { return column(lane, e); });
        if (!weights || (e > 0 && *weights != slots.sum.lane))
            return false;
        slots.sum.lane = *weights;
    }
    return true;
}

/// Nothing where an invocation holds other places of the product than of A, or where those that
/// share a row are not all whose numbers differ in bits that rows do not depend on.
std::optional<SumLikeA> like_a(const MatrixSlots& slots, const Numbers& numbers,
                               const MatrixShape& shape) {
    std::uint32_t rows = numbers.each[0] / slots.per_k; // that differ in invocations and slots
    for (std::uint32_t weights = slots.a.lane; weights != 0; weights >>= 4)
        rows *= (weights & 15) != 0 ? 2 : 1;
    if (shape.n != shape.k || rows != shape.m)
        return std::nullopt;
    SumLikeA result;
    for (std::uint32_t e = 0; e < numbers.each[0]; ++e) {
        std::uint32_t in_sum = 0;
        while (in_sum < numbers.each[2] && numbers.at(2, 0, in_sum) != numbers.at(0, 0, e))
            ++in_sum;
        for (std::uint32_t lane = 0; lane < numbers.size; ++lane)
            if (in_sum == numbers.each[2] || numbers.at(2, lane, in_sum) != numbers.at(0, lane, e))
                return std::nullopt;
        result.sum_of_a |= in_sum << 4 * e;
        result.row |= (slots.a.place >> 4 * e & 15) / slots.per_k << 4 * in_sum;
    }
    return result;
}

std::optional<MatrixSlots> find_slots(Device& device, const MatrixShape& shape, Units units) {
    if (!device.why_not(Probe::info(), static_cast<std::uint32_t>(variant_of(units))).empty())
        return std::nullopt;
    const auto numbers = numbers_of(device, shape, units);
    if (!numbers)
        return std::nullopt;
    const auto a = regular(*numbers, 0, shape.k), b = regular(*numbers, 1, shape.k);
    if (!a || !b || a->per_k != b->per_k || 16 % a->per_k != 0)
        return std::nullopt;
    std::map<std::uint32_t, std::vector<std::uint32_t>> sets; // by their first k
    for (const Regular* operand : {&*a, &*b})
        for (const auto& k : operand->k)
            if (sets.emplace(k[0], k).first->second != k)
                return std::nullopt;
    if (sets.size() != shape.k / a->per_k)
        return std::nullopt;
    MatrixSlots result;
    result.per_k = a->per_k;
    result.a = a->slots;
    result.b = b->slots;
    for (const auto& [operand, slots] : {std::pair{&*a, &result.a}, {&*b, &result.b}}) {
        const auto number = [&](std::uint32_t lane) {
            return static_cast<std::uint32_t>(
                std::distance(sets.begin(), sets.find(operand->k[lane][0])));
        };
        const auto weights = lane_weights(numbers->size, number);
        if (!weights || number(0) != 0)
            return std::nullopt;
        slots->chunk = *weights;
    }
    if (!add_sums(result, *numbers, shape.n) || !keeps_elements(device, shape, *numbers))
        return std::nullopt;
    result.like_a = like_a(result, *numbers, shape);
    return result;
}

/// What the checks found, by m, n, k (and units).
struct Found {
    std::mutex mutex;
    std::map<std::array<std::uint32_t, 3>, std::string> why_not;
    std::map<std::array<std::uint32_t, 4>, std::optional<MatrixSlots>> slots;
};

} // namespace

std::optional<MatrixSlots> matrix_slots(const Device& device, const MatrixShape& shape,
                                        GemmClass::Units units) {
    auto& memory = device.impl().memory_of<Found>();
    const std::scoped_lock lock(memory.mutex);
    const std::array<std::uint32_t, 4> key{shape.m, shape.n, shape.k,
                                           static_cast<std::uint32_t>(units)};
    auto found = memory.slots.find(key);
    if (found == memory.slots.end())
        found = memory.slots.emplace(key, find_slots(device.impl().self, shape, units)).first;
    return found->second;
}

std::string why_no_matrix_images(const Device& device, const MatrixShape& shape) {
    auto& memory = device.impl().memory_of<Found>();
    const std::scoped_lock lock(memory.mutex);
    const std::array<std::uint32_t, 3> key{shape.m, shape.n, shape.k};
    auto found = memory.why_not.find(key);
    if (found == memory.why_not.end())
        found = memory.why_not.emplace(key, check(device.impl().self, shape)).first;
    return found->second;
}

} // namespace bellows
