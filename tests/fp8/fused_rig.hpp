// SPDX-License-Identifier: MIT
#pragma once

// What the tests of the fused ops share: whole buffers compared with those of the op in f32
// followed by quantisation on the same device; absent rows and padding keep the pattern on both
// ways.

#include "fp8/rig.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/fp8/fused.hpp>

namespace bellows::testing {

class Fp8Fused : public Fp8Test {
protected:
    struct Sizes {
        std::uint64_t rows, columns, present;
    };

    /// Absent rows keep the pattern on both ways, so whole buffers are compared.
    static void expect_same(const Buffer& actual, const Buffer& expected, DType dtype,
                            const std::string& what) {
        const auto a = read_back<std::uint8_t>(device(), actual.view()),
                   e = read_back<std::uint8_t>(device(), expected.view());
        ASSERT_EQ(a.size(), e.size()) << what;
        std::uint64_t wrong = 0, first = 0;
        for (std::uint64_t i = 0; i + size_of(dtype) <= a.size(); i += size_of(dtype))
            if (!same(&a[i], &e[i], dtype) && wrong++ == 0)
                first = i / size_of(dtype);
        EXPECT_EQ(wrong, 0u) << what << ": first at element " << first;
    }

    /// What a tensor of `dtype` holds of it.
    static HostMatrix rounded(const HostMatrix& m, DType dtype) {
        HostMatrix r = m;
        if (dtype == DType::BF16)
            for (float& value : r.values)
                value = test::round_to_bf16(value);
        return r;
    }

    /// The bf16 of a result in f32, whose padding and absent rows keep the pattern.
    static Tensor to_bf16(const Tensor& f32, std::uint64_t present) {
        const TensorView& v = f32.view;
        Tensor t = matrix(DType::BF16, 1, v.extent[0], v.extent[1],
                          v.stride[0] - round_up(v.extent[1], 8));
        const auto values = read_back<float>(device(), f32.buffer.view());
        for (std::uint64_t row = 0; row < present; ++row)
            for (std::uint64_t i = row * v.stride[0]; i < row * v.stride[0] + v.extent[1]; ++i) {
                const std::uint16_t half = test::bf16_bits(values[i]);
                std::memcpy(&t.bytes[2 * i], &half, 2);
            }
        device().upload(t.buffer.view(), std::span<const std::uint8_t>(t.bytes));
        return t;
    }

    /// As the engine's ops want it.
    static Tensor contiguous(std::uint64_t rows, std::uint64_t columns) {
        return empty(DType::F32, 2, {rows, columns}, {columns, 1});
    }
    static Tensor contiguous(const HostMatrix& m) {
        Tensor t = contiguous(m.rows, m.columns);
        device().upload(t.buffer.view().sub(0, 4 * m.values.size()),
                        std::span<const float>(m.values));
        return t;
    }
    /// The same matrix as quantize() wants it.
    static Tensor strided(const Tensor& t) {
        HostMatrix m{1, t.view.extent[0], t.view.extent[1],
                     read_back<float>(device(), t.buffer.view())};
        return upload(DType::F32, m, 0);
    }

    /// A vector of f32 that ends in bytes of the pattern.
    static Tensor vector(std::uint64_t elements) { return empty(DType::F32, 1, {elements}, {1}); }
    static Tensor vector(DType dtype, const std::vector<float>& values) {
        Tensor t = empty(dtype, 1, {values.size()}, {1});
        rig().write(t.view, values);
        return t;
    }

    static HostMatrix matrix_of(std::uint64_t rows, std::uint64_t columns,
                                const std::function<float(test::Random&)>& value,
                                std::uint64_t seed) {
        HostMatrix m{1, rows, columns, std::vector<float>(rows * columns)};
        test::Random random(seed);
        for (float& v : m.values)
            v = value(random);
        return m;
    }

    /// Small integers: sums of their products are exact in any order.
    static HostMatrix integers(std::uint64_t rows, std::uint64_t columns, std::uint64_t seed) {
        return matrix_of(
            rows, columns,
            [](test::Random& random) { return static_cast<float>(random.below(31)) - 15; }, seed);
    }

private:
    static bool same(const std::uint8_t* a, const std::uint8_t* e, DType dtype) {
        if (std::memcmp(a, e, size_of(dtype)) == 0)
            return true;
        return is_nan(a, dtype) && is_nan(e, dtype);
    }
    static bool is_nan(const std::uint8_t* at, DType dtype) {
        std::uint32_t bits = 0;
        if (dtype == DType::F32)
            std::memcpy(&bits, at, 4);
        else if (dtype == DType::BF16)
            std::memcpy(reinterpret_cast<std::uint8_t*>(&bits) + 2, at, 2);
        return std::isnan(std::bit_cast<float>(bits));
    }
};

inline constexpr ScaleRule kRules[] = {ScaleRule::PowerOfTwo, ScaleRule::F32};

} // namespace bellows::testing
