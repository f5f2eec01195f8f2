// SPDX-License-Identifier: MIT
// The tiles of FP8 products: which there are, and that every one of them gives the same bits.
#include "fp8/gemm_rig.hpp"

#include <bellows/fp8/choice.hpp>
#include <bellows/fp8/tiles.hpp>

#include <bit>
#include <set>

namespace bellows {
namespace {

using namespace testing;
using fp8::NamedTile;
using fp8::Tile;
using fp8::Variant;

struct Shape {
    std::uint64_t m, n, k;

    std::string name() const {
        return std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k);
    }
};

class Fp8Tiles : public Fp8GemmTest {
protected:
    /// D of each tile that the product can take, or of those that are named, must have the bits of
    /// the first one's, which is the usual one where none is named.
    static void expect_same_bits(Variant variant, GemmForm form, const Shape& s,
                                 Blocks blocks = Blocks::Blocks128,
                                 const std::vector<NamedTile>& named = {}) {
        SCOPED_TRACE(s.name());
        const bool tn = form == GemmForm::TN;
        const Input a = tn ? input(kind(Blocks::Columns128), {s.k, s.m}, 1)
                           : input(kind(Blocks::Rows128), {s.m, s.k}, 1);
        const Input b = tn                     ? input(kind(Blocks::Columns128), {s.k, s.n}, 2)
                        : form == GemmForm::NT ? input(kind(blocks), {s.n, s.k}, 2)
                                               : input(kind(blocks), {s.k, s.n}, 2);
        const Buffer scratch = workspace_for(*a.operand, *b.operand);
        const auto op = tn ? fp8::gemm_tn : form == GemmForm::NT ? fp8::gemm_nt : fp8::gemm_nn;
        auto all = named;
        if (named.empty())
            all = fp8::tiles(device(), variant, form, *a.operand, *b.operand,
                             padded(DType::F32, {s.m, s.n}).view);
        ASSERT_GT(all.size(), 1u);
        if (device().info().is_cpu) // whose compiler takes its time for each
            all.resize(2);
        std::vector<float> usual;
        for (const NamedTile& t : all) {
            const OpTensor d = padded(DType::F32, {s.m, s.n});
            run([&](Recording& r) {
                op(r, *a.operand, *b.operand, d, false, scratch.view(), {variant, t.tile});
            });
            const std::vector<float> values = read(d.view);
            if (usual.empty())
                usual = values;
            if (&t == all.data() && named.empty()) {
                run([&](Recording& r) {
                    op(r, *a.operand, *b.operand, d, false, scratch.view(), variant);
                });
                EXPECT_EQ(read(d.view), usual) << t.name << " is not the usual one";
            }
            EXPECT_EQ(values, usual) << t.name;
        }
    }

    /// Of streamed products on matrix units: on CPUs, where they have none, small ones.
    static std::vector<NamedTile> small_stream_tiles(bool direct) {
        const auto way = streaming_on_units(direct);
        if (!way || !device().info().is_cpu)
            return {};
        Tile other = way->tile;
        other.ahead = 3 - other.ahead;
        Tile tall = other; // its loads have another order
        tall.fragments_m = direct ? 2 : 7;
        return {{way->tile, "small"}, {other, "another"}, {tall, "tall"}};
    }
};

void expect_names_of_their_own(const std::vector<NamedTile>& all, std::size_t longest) {
    std::set<std::string> names;
    EXPECT_LE(all.size(), fp8::kMostOtherTiles + 1);
    for (const NamedTile& t : all) {
        EXPECT_TRUE(names.insert(t.name).second) << t.name;
        EXPECT_LE(t.name.size(), longest) << t.name;
        EXPECT_NE(t.tile, Tile{});
    }
}

TEST_F(Fp8Tiles, HaveNamesOfTheirOwn) {
    for (const fp8::Measurement& m : fp8::measure(device(), {.timed = fp8::Timed::None}))
        for (const fp8::VariantTime& v : m.variants) {
            SCOPED_TRACE(to_string(m.kind) + " " + to_string(v.variant));
            std::set<std::string> usual;
            for (const fp8::TileTimes& times : v.tiles) {
                EXPECT_LE(times.rows, m.rows);
                EXPECT_TRUE(usual.insert(times.tiles.front().name).second) << "timed twice";
                std::vector<NamedTile> all;
                for (const fp8::TileTime& t : times.tiles)
                    all.push_back({t.tile, t.name});
                // Direct is the last column of its table.
                expect_names_of_their_own(all, v.variant == Variant::Direct ? 44 : 21);
            }
            const bool packed = v.variant == Variant::Packed && v.why_not.empty();
            EXPECT_TRUE(!packed || v.tiles.at(0).rows == m.rows);
            EXPECT_TRUE(!packed || m.kind.rows != 0 || v.tiles.at(0).tiles.size() > 1)
                << "nothing to choose among";
            EXPECT_TRUE(v.tiles.empty() || v.why_not.empty());
            EXPECT_TRUE(v.tiles.empty() || v.variant != Variant::Decoded);
        }
}

TEST_F(Fp8Tiles, OfPackedOperandsGiveTheSameBits) {
    if (!fp8::why_not(device(), Variant::Packed).empty())
        return;
    const bool cpu = device().info().is_cpu;
    expect_same_bits(Variant::Packed, GemmForm::NT, {7, 37, 300});
    expect_same_bits(Variant::Packed, GemmForm::TN, {130, 260, 200});
    if (cpu)
        return;
    for (const Blocks blocks : {Blocks::Blocks128, Blocks::Rows128})
        for (const std::uint64_t rows : {1u, 17u, 24u, 33u, 64u, 70u, 129u, 300u})
            expect_same_bits(Variant::Packed, GemmForm::NT, {rows, 333, 1300}, blocks);
    expect_same_bits(Variant::Packed, GemmForm::NN, {20, 136, 520});
    expect_same_bits(Variant::Packed, GemmForm::NN, {200, 136, 520});
    expect_same_bits(Variant::Packed, GemmForm::NT, {20, 600, 4200});
}

/// Four tiles of B (on CPUs two) by as many times the subgroups, some of whose columns are beyond
/// the last; a workgroup of still more is refused.
TEST_F(Fp8Tiles, OfManySubgroupsGiveTheSameBits) {
    if (!fp8::why_not(device(), Variant::Packed).empty())
        return;
    const Shape s{20, 600, 300};
    const Input a = input(kind(Blocks::Rows128), {s.m, s.k}, 1),
                b = input(kind(Blocks::Blocks128), {s.n, s.k}, 2);
    Tile few = fp8::tiles(device(), Variant::Packed, GemmForm::NT, *a.operand, *b.operand,
                          padded(DType::F32, {s.m, s.n}).view)
                   .front()
                   .tile;
    const bool cpu = device().info().is_cpu;
    if (cpu) // whose compiler takes its time
        few.fragments_m = few.ahead = 1;
    Tile many = few;
    many.warps_n *= cpu ? 2 : 4;
    expect_same_bits(Variant::Packed, GemmForm::NT, s, Blocks::Blocks128,
                     {{few, "few"}, {many, "many"}});
    Tile more = many;
    more.warps_n *= 2;
    const std::uint32_t subgroups = more.warps_m * more.warps_n * more.warps_k;
    EXPECT_TRUE(!cpu || subgroups > device().info().max_workgroup_subgroups);
    const OpTensor d = padded(DType::F32, {s.m, s.n});
    const Buffer scratch = workspace_for(*a.operand, *b.operand);
    expect_refused(
        [&](Recording& r) {
            fp8::gemm_nt(r, *a.operand, *b.operand, d, false, scratch.view(),
                         {Variant::Packed, more});
        },
        {"the tile is none"});
}

TEST_F(Fp8Tiles, OfStreamedWeightsGiveTheSameBits) {
    const bool cpu = device().info().is_cpu;
    for (const bool direct : {false, true}) {
        if (!streaming_on_units(direct))
            return;
        SCOPED_TRACE(direct ? "straight to registers" : "through workgroup memory");
        const std::vector<std::uint64_t> rows =
            cpu      ? std::vector<std::uint64_t>{19}
            : direct ? std::vector<std::uint64_t>{1, 5, 11, 16}
                     : std::vector<std::uint64_t>{17, 24, 31, 48, 64, 101};
        for (const std::uint64_t m : rows)
            expect_same_bits(Variant::Streamed, GemmForm::NT, {m, cpu ? 72u : 300u, 1300},
                             Blocks::Blocks128, small_stream_tiles(direct));
    }
}

/// Groups of 3, 0, 19 and 1 rows, each in a block of its own.
TEST_F(Fp8Tiles, OfGroupsGiveTheSameBits) {
    const std::uint64_t groups = 4, most = 20, n = 72, k = 400;
    const bool cpu = device().info().is_cpu;
    std::vector<Variant> variants;
    if (streaming_on_units(true)) // on CPUs one kernel must do
        variants.push_back(Variant::Streamed);
    if (!variants.empty() && !cpu)
        variants.push_back(Variant::Packed);
    const Buffer counts = workspace(groups * 4);
    const std::uint32_t rows_of_groups[] = {3, 0, 19, 1};
    device().upload(counts.view(), std::span<const std::uint32_t>(rows_of_groups));
    const fp8::GroupedRows rows = fp8::unlisted_rows(
        GroupLayout::masked(TensorView::contiguous(counts.view(), DType::U32, {groups}), most));
    const Input a = input(kind(Blocks::Rows128), {groups, most, k}, 1),
                b = input(kind(Blocks::Blocks128), {groups, n, k}, 2);
    const Buffer scratch =
        workspace(fp8::gemm_workspace_bytes(device(), *a.operand, *b.operand, rows));
    for (const Variant variant : variants) {
        const auto bits = [&](const Tile& tile) {
            const OpTensor d = padded(DType::F32, {groups, most, n});
            run([&](Recording& r) {
                fp8::m_grouped_gemm_nt_masked(r, *a.operand, *b.operand, d, rows, false,
                                              scratch.view(), {variant, tile});
            });
            std::vector<std::uint32_t> all;
            for (const float value : read(d.view))
                all.push_back(std::bit_cast<std::uint32_t>(value)); // untouched ones, too
            return all;
        };
        const auto tiles = cpu ? small_stream_tiles(true)
                               : fp8::tiles(device(), variant, GemmForm::NT, *a.operand, *b.operand,
                                            padded(DType::F32, {groups, most, n}).view, &rows);
        EXPECT_GT(tiles.size(), 1u);
        const auto usual = bits(cpu ? tiles.front().tile : Tile{});
        for (const NamedTile& t : tiles)
            EXPECT_EQ(bits(t.tile), usual) << to_string(variant) << " " << t.name;
    }
}

TEST_F(Fp8Tiles, GoWithAVariantThatHasSome) {
    const Shape s{8, 136, 256};
    const Input a = input(kind(Blocks::Rows128), {s.m, s.k}, 1),
                b = input(kind(Blocks::Blocks128), {s.n, s.k}, 2);
    const OpTensor d = padded(DType::F32, {s.m, s.n});
    const Buffer scratch = workspace_for(*a.operand, *b.operand);
    EXPECT_TRUE(fp8::tiles(device(), Variant::Decoded, GemmForm::NT, *a.operand, *b.operand, d.view)
                    .empty());
    for (const Variant variant : {Variant::Decoded, Variant::Device})
        expect_refused(
            [&](Recording& r) {
                fp8::gemm_nt(r, *a.operand, *b.operand, d, false, scratch.view(),
                             {variant, {.fragments_m = 1}});
            },
            {variant == Variant::Device ? "a tile goes with a variant" : "it has no tiles"});
}

TEST_F(Fp8Tiles, ThatNoKernelCanRunAreRefused) {
    const Shape s{8, 136, 256};
    const Input a = input(kind(Blocks::Rows128), {s.m, s.k}, 1),
                b = input(kind(Blocks::Blocks128), {s.n, s.k}, 2);
    const Input x = input(kBf16Kind, {s.m, s.k}, 1), w = input(kBf16Kind, {s.n, s.k}, 2);
    const OpTensor d = padded(DType::F32, {s.m, s.n});
    const Buffer scratch = workspace_for(*a.operand, *b.operand);
    if (!fp8::why_not(device(), Variant::Packed).empty())
        return;
    std::vector<fp8::Way> ways = direct_on_units();
    if (!ways.empty())
        ways.erase(ways.begin() + 1, ways.end());
    const auto packed =
        fp8::tiles(device(), Variant::Packed, GemmForm::NT, *a.operand, *b.operand, d.view);
    ways.emplace_back(Variant::Packed, packed.at(0).tile);
    ways.push_back(streaming_on_units(false).value());
    if (device().info().is_cpu)
        ways.push_back(streaming_on_units(true).value());
    using Number = std::uint32_t Tile::*;
    for (const fp8::Way& way : ways) {
        const bool direct = way.variant == Variant::Direct;
        const auto record = [&](const Tile& tile) {
            return [&, tile](Recording& r) {
                fp8::gemm_nt(r, *(direct ? x : a).operand, *(direct ? w : b).operand, d, false,
                             scratch.view(), {way.variant, tile});
            };
        };
        for (const Number number :
             {&Tile::fragments_m, &Tile::fragments_n, &Tile::warps_m, &Tile::warps_n,
              &Tile::warps_k, &Tile::step_k, &Tile::stages, &Tile::ahead})
            for (const std::uint32_t wrong : {number == &Tile::step_k ? 77u : 0u, ~0u}) {
                SCOPED_TRACE(to_string(way.variant));
                Tile tile = way.tile;
                tile.*number = wrong;
                expect_refused(record(tile), {"the tile is none"});
            }
    }
}

} // namespace
} // namespace bellows
