// SPDX-License-Identifier: MIT
#pragma once

// What the tests of fp8 products share: operands of every kind with the values that they stand for,
// poison in rows that do not exist, and the comparison of a product with f64.

#include "support/op_test.hpp"
#include "verify/checks/product_bound.hpp"

#include <bellows/engine/matrix_images.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/fp8/tiles.hpp>

#include <optional>
#include <string>
#include <vector>

namespace bellows::testing {

using fp8::Blocks;
using fp8::Format;
using fp8::GroupedRows;
using fp8::GroupLayout;
using fp8::Operand;
using fp8::Quantized;
using fp8::Recipe;
using fp8::ScaleRule;

/// How an operand is stored.
struct Kind {
    std::optional<Recipe> recipe;
    DType dtype = DType::F32; ///< without a recipe

    std::string name() const { return recipe ? describe(*recipe) : to_string(dtype); }
};

inline const Kind kF32Kind{{}, DType::F32}, kBf16Kind{{}, DType::BF16};
inline Kind kind(Blocks blocks, Format format = Format::E4M3,
                 ScaleRule rule = ScaleRule::PowerOfTwo) {
    return {Recipe{blocks, format, rule}};
}

/// What an operand can be whose k runs along columns, or along rows; activations' own kinds first.
inline std::vector<Kind> kinds(bool k_along_rows) {
    const Blocks own = k_along_rows ? Blocks::Columns128 : Blocks::Rows128;
    std::vector<Kind> all = {kind(own),
                             kind(own, Format::E5M2, ScaleRule::F32),
                             kind(Blocks::Blocks128),
                             kind(Blocks::Blocks128, Format::E4M3, ScaleRule::F32),
                             kind(Blocks::PerTensor, Format::E5M2),
                             kBf16Kind,
                             kF32Kind};
    if (!k_along_rows)
        all.push_back(kind(Blocks::MX32));
    return all;
}

/// An operand on the device; `values` are what it stands for, also where `operand` is poisoned.
struct Input {
    std::vector<Buffer> buffers;
    std::optional<Operand> operand;
    std::vector<double> values;
};

class Fp8GemmTest : public OpTest {
protected:
    void TearDown() override {
        way_ = {};
        d_padding_ = 2;
        if (numerics_)
            use_gemm_class(device(), *numerics_);
        numerics_.reset();
    }

    /// Of the products that the checks record.
    inline static fp8::Way way_{};
    /// Rows of D begin at multiples of so many elements.
    inline static std::uint64_t d_padding_ = 2;

    /// Whether the device's own FP8 units can compute products; if so, the checks' are.
    static bool native() {
        way_ = fp8::Variant::Native;
        d_padding_ = 8;
        return fp8::why_not(device(), fp8::Variant::Native).empty();
    }

    /// Streaming on matrix units, through workgroup memory or straight to registers, in the
    /// smallest tile where the kernel would not be taken by itself; nothing when the device cannot.
    static std::optional<fp8::Way> streaming_on_units(bool direct) {
        if (!fp8::why_not(device(), fp8::Variant::Packed).empty())
            return std::nullopt;
        const bool cpu = device().info().is_cpu;
        fp8::Way way = fp8::Variant::Streamed;
        if (!direct)
            way.tile = {
                .fragments_m = 1, .fragments_n = 1, .warps_n = 4, .step_k = 128, .ahead = 2};
        else if (cpu)
            way.tile = {.fragments_m = 1, .fragments_n = 1, .warps_n = 2, .warps_k = 2};
        return way;
    }
    /// Makes way_ streaming_on_units(), if it can.
    static bool stream_on_units(bool direct) {
        const auto way = streaming_on_units(direct);
        way_ = way.value_or(way_);
        return way.has_value();
    }
    /// Of Variant::Direct, on f16 where the device has no other units, every tile: on CPUs small
    /// ones, as high as one and as two of a work list. None when the device has no matrix units.
    static std::vector<fp8::Way> direct_on_units() {
        way_ = fp8::Variant::Direct;
        numerics_ = gemm_class(device()).name;
        // The device's own code leaves Variant::Direct nothing to do.
        if (gemm_class(device()).units == GemmClass::Units::None || gemm_class(device()).native)
            for (const GemmClass& c : gemm_classes(device()))
                if (c.units != GemmClass::Units::None && !c.native && c.why_not.empty())
                    use_gemm_class(device(), c.name);
        if (gemm_class(device()).units == GemmClass::Units::None) {
            EXPECT_NE(fp8::why_not(device(), fp8::Variant::Direct), "");
            return {};
        }
        std::vector<fp8::Way> ways;
        for (const auto& tile : device().info().is_cpu ? small_direct_tiles() : direct_tiles())
            ways.emplace_back(fp8::Variant::Direct, tile);
        return ways;
    }
    /// Whether streamed products serve these operands.
    static bool streams(const Kind& a, const Kind& b) {
        const auto by_128 = [](const Kind& kind) {
            return kind.recipe && kind.recipe->format == Format::E4M3 &&
                   (kind.recipe->blocks == Blocks::Rows128 ||
                    kind.recipe->blocks == Blocks::Blocks128);
        };
        const auto fits_bf16 = [](const Kind& kind) {
            return kind.recipe ? kind.recipe->rule == ScaleRule::PowerOfTwo
                               : kind.dtype == DType::BF16;
        };
        const bool sequential = gemm_class(device()).units == GemmClass::Units::None;
        const bool on_units = a.recipe && b.recipe && b.recipe->blocks == Blocks::Blocks128 &&
                              fp8::why_not(device(), fp8::Variant::Packed).empty() &&
                              !device().info().is_cpu;
        return by_128(b) && (by_128(a) || !a.recipe) &&
               (on_units || sequential || !fits_bf16(a) || !fits_bf16(b));
    }

    /// present: rows of a matrix that exist; the others hold NaN. offsets: of Columns128 blocks.
    static Input input(const Kind& kind, const std::vector<std::uint64_t>& extents,
                       const std::vector<float>& x, const TensorView& offsets = {},
                       const std::vector<bool>& present = {}) {
        const std::uint64_t columns = extents.back(),
                            rows = x.size() / std::max<std::uint64_t>(columns, 1);
        const DType dtype = kind.recipe ? DType::F32 : kind.dtype;
        std::vector<float> poisoned = x;
        for (std::size_t row = 0; row < present.size() && !kind.recipe; ++row)
            if (!present[row])
                std::fill_n(poisoned.begin() + static_cast<std::ptrdiff_t>(row * columns), columns,
                            std::nanf(""));
        Input in;
        OpTensor tensor = padded(dtype, extents, 8);
        write(tensor.view, poisoned);
        if (!kind.recipe) {
            in.operand = tensor.view;
            in.values = reference::to_double(x);
            in.buffers.push_back(std::move(tensor.buffer));
            return in;
        }
        const Quantized q = allocate(in, *kind.recipe, extents, offsets);
        const OpTensor decoded = padded(DType::F32, extents, 8);
        run([&](Recording& r) {
            fp8::quantize(r, tensor, q);
            fp8::dequantize(r, q, decoded);
        });
        in.values = reference::to_double(read(decoded.view));
        poison(q, rows, present);
        in.operand = q;
        return in;
    }
    /// Of random values, exact in the storage.
    static Input input(const Kind& kind, const std::vector<std::uint64_t>& extents,
                       std::uint64_t seed, const TensorView& offsets = {},
                       const std::vector<bool>& present = {}) {
        std::uint64_t count = 1;
        for (const std::uint64_t extent : extents)
            count *= extent;
        return input(kind, extents, random(kind.recipe ? DType::F32 : kind.dtype, count, seed),
                     offsets, present);
    }

    /// D, whose rows are longer than its columns.
    static OpTensor padded(DType dtype, const std::vector<std::uint64_t>& extents,
                           std::uint64_t multiple = d_padding_) {
        const std::uint64_t columns = extents.back();
        const std::uint64_t ld = (columns + multiple) / multiple * multiple;
        return extents.size() == 2 ? rig().head(dtype, {extents[0], ld}, columns)
                                   : rig().head(dtype, {extents[0], extents[1], ld}, columns);
    }

    static Buffer workspace_for(const Operand& a, const Operand& b) {
        return workspace(fp8::gemm_workspace_bytes(device(), a, b));
    }

    /// DESIGN §3's two gates. terms: of each sum.
    static void expect_product(const std::vector<float>& actual,
                               const std::vector<double>& expected,
                               const std::vector<double>& magnitudes,
                               const std::vector<std::uint64_t>& shape, std::uint64_t terms,
                               DType storage) {
        // A device's own FP8 units keep some 13 bits of the sums of 128.
        const bool native =
            (way_.variant == fp8::Variant::Native || way_.variant == fp8::Variant::Device) &&
            fp8::why_not(device(), fp8::Variant::Native).empty();
        EXPECT_LE(reference::calc_diff(actual, expected), storage == DType::BF16 ? 5e-6
                                                          : native               ? 1e-7
                                                                                 : 1e-9);
        const auto rounded = checks::product_bound(terms, magnitudes, storage);
        const auto bound = [&](std::uint64_t i, double value) {
            return rounded(i, value) + (native ? 0x1p-12 * magnitudes[i] : 0);
        };
        const auto comparison = reference::compare_elements(actual, expected, shape, bound);
        EXPECT_TRUE(comparison.good) << comparison.text;
    }

    static void expect_untouched(const std::vector<float>& values, const char* what) {
        std::uint64_t touched = 0;
        for (const float value : values)
            touched += untouched(value) ? 0 : 1;
        EXPECT_EQ(touched, 0u) << what;
    }

    /// The message of the Error{InvalidArgument} that `record` throws must have all `words`.
    static void expect_refused(const std::function<void(Recording&)>& record,
                               const std::vector<std::string>& words) {
        Recording recording(device(), QueueRole::Compute, "refused");
        try {
            record(recording);
            ADD_FAILURE() << "not refused: " << words.front();
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
            for (const std::string& word : words)
                EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
                    << "\"" << word << "\" is not in: " << error.what();
        }
        EXPECT_EQ(recording.num_operations(), 0u);
    }

private:
    inline static std::optional<std::string> numerics_; ///< to be gone back to

    static std::vector<fp8::Tile> direct_tiles() {
        const Buffer memory = workspace(256 * 256 * 2);
        const auto bf16 = TensorView::contiguous(memory.view(), DType::BF16, {256, 256});
        std::vector<fp8::Tile> tiles;
        for (const auto& named :
             fp8::tiles(device(), fp8::Variant::Direct, GemmForm::NT, bf16, bf16, bf16))
            tiles.push_back(named.tile);
        EXPECT_FALSE(tiles.empty());
        return tiles;
    }
    static std::vector<fp8::Tile> small_direct_tiles() {
        const GemmClass& c = gemm_class(device());
        const auto slots = matrix_slots(device(), c.shape, c.units);
        EXPECT_TRUE(slots);
        const std::uint32_t k = slots ? 8 * c.shape.k / slots->per_k : 0; // of a segment
        return {{1, 2, 2, 2, 1, k, 3, 1}, {2, 3, 2, 2, 1, k, 3, 1}, {1, 4, 4, 1, 1, k, 3, 1}};
    }

    static Quantized allocate(Input& in, const Recipe& recipe, const std::vector<std::uint64_t>& e,
                              const TensorView& offsets) {
        const bool columns = recipe.blocks == Blocks::Columns128;
        const std::uint64_t groups = columns && offsets.buffer ? offsets.extent[0] - 1 : 0;
        const auto make = [&](std::initializer_list<std::uint64_t> extents) {
            in.buffers.push_back(workspace(fp8::quantized_bytes(recipe, extents, groups)));
            return fp8::make_quantized(in.buffers.back().view(), recipe, extents,
                                       columns ? offsets : TensorView{});
        };
        return e.size() == 2 ? make({e[0], e[1]}) : make({e[0], e[1], e[2]});
    }

    static void poison(const Quantized& q, std::uint64_t rows, const std::vector<bool>& present) {
        if (present.empty() || q.codes.buffer.bytes == 0)
            return;
        const std::uint64_t stride = q.codes.stride[q.codes.rank - 2];
        auto codes = read_back<std::uint8_t>(device(), q.codes.buffer);
        for (std::uint64_t row = 0; row < rows; ++row)
            if (!present[row])
                std::fill_n(codes.begin() + static_cast<std::ptrdiff_t>(row * stride), stride,
                            fp8::kNanCode);
        device().upload(q.codes.buffer, std::span<const std::uint8_t>(codes));
    }
};

} // namespace bellows::testing
