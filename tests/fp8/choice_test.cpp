// SPDX-License-Identifier: MIT
// Which variant computes which product: names and tables, the choice from given times, and the
// measurement on a device.
#include "fp8/gemm_rig.hpp"

#include <bellows/fp8/choice.hpp>

#include <algorithm>
#include <set>

namespace bellows {
namespace {

using namespace testing;
using fp8::Bits;
using fp8::Choice;
using fp8::Measurement;
using fp8::ProductKind;
using fp8::Variant;
using fp8::VariantTime;
using fp8::Way;

const VariantTime& of(const Measurement& m, Variant variant) {
    return *std::find_if(m.variants.begin(), m.variants.end(),
                         [&](const VariantTime& v) { return v.variant == variant; });
}

/// Of [rows, columns]; nothing is stored.
Operand unbound(const Recipe& recipe, std::initializer_list<std::uint64_t> extents) {
    return fp8::make_quantized(BufferView{nullptr, 0, ~std::uint64_t{0}}, recipe, extents);
}
TensorView product(std::initializer_list<std::uint64_t> extents) {
    return TensorView::contiguous(BufferView{nullptr, 0, ~std::uint64_t{0}}, DType::BF16, extents);
}

class Fp8Choice : public Fp8GemmTest {
protected:
    /// What a dense product of [rows, 256] and [columns, 256] takes.
    static Variant taken(const Choice& choice, std::uint64_t rows, std::uint64_t columns) {
        return way(choice, rows, columns).variant;
    }
    static Way way(const Choice& choice, std::uint64_t rows, std::uint64_t columns) {
        return choice.way(device(), GemmForm::NT, unbound({}, {rows, 256}),
                          unbound({Blocks::Blocks128}, {columns, 256}), product({rows, columns}));
    }
};

TEST(Fp8ChoiceTable, KindsHaveNamesOfTheirOwn) {
    std::set<std::string> names;
    for (const ProductKind& kind : fp8::product_kinds()) {
        const std::string name = to_string(kind);
        EXPECT_TRUE(names.insert(name).second) << name;
        EXPECT_EQ(fp8::product_kind(name), kind) << name;
    }
    EXPECT_TRUE(names.contains("nt.masked.fp8.8"));
    EXPECT_TRUE(names.contains("tn.grouped.fp8.more"));
    EXPECT_FALSE(fp8::product_kind("nt.masked.fp8.9"));
}

TEST_F(Fp8Choice, ForAnyRowsTakesOneVariant) {
    const Choice choice = fp8::choice_for_any_rows(device());
    const Variant variant = taken(choice, 1, 512);
    EXPECT_TRUE(variant == Variant::Native || variant == Variant::Decoded) << to_string(variant);
    for (const std::uint64_t rows : {2, 8, 9, 32, 33, 127, 128, 511, 512, 4096})
        EXPECT_EQ(taken(choice, rows, 512), variant) << rows;
}

TEST(Fp8ChoiceTable, EachKindHasItsPlace) {
    Choice choice(Variant::Decoded);
    const auto& kinds = fp8::product_kinds();
    for (std::size_t i = 0; i < kinds.size(); i += 2)
        choice.set(kinds[i], Variant::Packed);
    for (std::size_t i = 0; i < kinds.size(); ++i)
        EXPECT_EQ(choice.at(kinds[i]), i % 2 == 0 ? Variant::Packed : Variant::Decoded)
            << to_string(kinds[i]);
    choice.set(kinds[0], Variant::Device);
    EXPECT_EQ(choice.at(kinds[0]), Variant::Decoded) << "no entry any more";
}

Measurement measured(double decoded, double packed, const char* packed_class = "other") {
    Measurement m;
    m.kind = fp8::product_kinds().front();
    m.variants = {{Variant::Decoded, "f32-sequential", "", decoded},
                  {Variant::Packed, packed_class, "", packed}};
    return m;
}

TEST(Fp8ChoiceTable, TheFastestWinsWithinItsNumericClass) {
    EXPECT_EQ(fp8::fastest(measured(2, 1), Bits::Any), Variant::Packed);
    EXPECT_EQ(fp8::fastest(measured(2, 1), Bits::Usual), Variant::Decoded) << "other bits";
    EXPECT_EQ(fp8::fastest(measured(2, 1, "f32-sequential"), Bits::Usual), Variant::Packed);
    EXPECT_EQ(fp8::fastest(measured(2, 1.99), Bits::Any), Variant::Decoded) << "clocks waver";
    EXPECT_EQ(fp8::fastest(measured(2, 0), Bits::Any), Variant::Decoded) << "not timed";
    EXPECT_EQ(fp8::fastest(measured(0, 1), Bits::Any), Variant::Decoded) << "not timed";
    Measurement impossible = measured(2, 1);
    impossible.variants[1].why_not = "it is not built";
    EXPECT_EQ(fp8::fastest(impossible, Bits::Any), Variant::Decoded);
    const Choice choice = fp8::choose({measured(2, 1)}, Bits::Any);
    EXPECT_EQ(choice.at(fp8::product_kinds()[0]), Variant::Packed);
    EXPECT_EQ(choice.at(fp8::product_kinds()[1]), Variant::Decoded);
}

/// Names are of no account.
VariantTime with_tiles(double seconds, const std::vector<double>& of_tiles) {
    VariantTime v{Variant::Packed, "f32-sequential", "", seconds};
    v.tiles.emplace_back();
    for (std::uint32_t i = 0; i < of_tiles.size(); ++i)
        v.tiles[0].tiles.push_back({{.fragments_m = i + 1}, "", of_tiles[i]});
    return v;
}

TEST(Fp8ChoiceTable, TheFastestTileWinsByMoreThanClocksWaver) {
    const auto fastest = [](const std::vector<double>& of_tiles) -> std::ptrdiff_t {
        const VariantTime v = with_tiles(1, of_tiles);
        const fp8::TileTime* faster = v.tiles[0].faster();
        return faster == nullptr ? 0 : faster - v.tiles[0].tiles.data();
    };
    EXPECT_EQ(fastest({2, 1.5, 1.4, 1.6}), 2);
    EXPECT_EQ(fastest({2, 1.99, 3}), 0) << "clocks waver";
    EXPECT_EQ(fastest({2, 0, 1.5}), 2) << "not timed";
    EXPECT_EQ(fastest({0, 0, 0}), 0) << "not timed";
    EXPECT_EQ(with_tiles(7, {2, 1.99}).least_seconds(), 7) << "that of the usual tile";
    EXPECT_EQ(with_tiles(7, {2, 1}).least_seconds(), 1);
}

TEST(Fp8ChoiceTable, VariantsCompeteInTheirFastestTiles) {
    Measurement m = measured(2, 3, "f32-sequential");
    m.variants[1] = with_tiles(3, {3, 1, 1.5});
    EXPECT_EQ(fp8::fastest(m, Bits::Usual), Variant::Packed);
    m.variants[1] = with_tiles(3, {3, 1.99, 2.5});
    EXPECT_EQ(fp8::fastest(m, Bits::Usual), Variant::Decoded) << "clocks waver";
    m.variants[1].why_not = "it is not built";
    EXPECT_EQ(fp8::fastest(m, Bits::Any), Variant::Decoded);
}

// Of bf16 the most rows decide for all: bits do not depend on how many there are.
TEST(Fp8ChoiceTable, Bf16ProductsHaveATableOfTheirOwn) {
    const auto of = [](const char* kind, double direct) {
        Measurement m = measured(2, direct);
        m.kind = *fp8::product_kind(kind);
        m.variants[1].variant = Variant::Direct;
        return m;
    };
    const std::vector<Measurement> all = {of("nt.grouped.bf16.511", 3),
                                          of("nt.grouped.bf16.more", 1), of("nt.dense.bf16.511", 1),
                                          of("nt.dense.bf16.more", 3)};
    EXPECT_EQ(fp8::fastest(all[1], Bits::Any), Variant::Direct);
    for (const Measurement& m : all)
        EXPECT_EQ(fp8::choose(all, Bits::Any).at(m.kind), Variant::Decoded);
    const Choice choice = fp8::choose_of_bf16(all, Bits::Any);
    for (const char* rows : {"511", "more"}) {
        EXPECT_EQ(choice.at(*fp8::product_kind(std::string("nt.grouped.bf16.") + rows)),
                  Variant::Direct);
        EXPECT_EQ(choice.at(*fp8::product_kind(std::string("nt.dense.bf16.") + rows)),
                  Variant::Decoded);
    }
    EXPECT_EQ(fp8::choose_of_bf16({measured(2, 1)}, Bits::Any), Choice(Variant::Decoded));
    EXPECT_EQ(fp8::of_bf16(Variant::Decoded), Choice(Variant::Decoded));
}

TEST(Fp8ChoiceTable, RatesCountEachOperandOnce) {
    Measurement m;
    m.kind = {GemmForm::NT, fp8::Grouping::Grouped, fp8::Pair::Bf16Fp8, 0};
    m.groups = 2, m.rows = 8, m.n = 64, m.k = 32;
    EXPECT_EQ(m.flops(), 2.0 * 2 * 8 * 64 * 32);
    EXPECT_EQ(m.bytes(), 2 * (2.0 * 8 * 32 + 64 * 32 + 2 * 8 * 64));
    m.kind.pair = fp8::Pair::Bf16;
    EXPECT_EQ(m.bytes(), 2 * (2.0 * 8 * 32 + 2 * 64 * 32 + 2 * 8 * 64));
    m.kind = {GemmForm::TN, fp8::Grouping::Grouped, fp8::Pair::Fp8, 0};
    EXPECT_EQ(m.bytes(), 2 * (8.0 * 64 + 8 * 32 + 2 * 4 * 64 * 32)) << "D is read and written";
}

TEST_F(Fp8Choice, ProductsTakeWhatTheTableSaysIfTheyCan) {
    const bool packs = fp8::why_not(device(), Variant::Packed).empty();
    const ProductKind dense{GemmForm::NT, fp8::Grouping::Dense, fp8::Pair::Fp8, 3};
    Choice choice(Variant::Decoded);
    choice.set(dense, Variant::Packed);
    const Variant wanted = packs ? Variant::Packed : Variant::Decoded;
    EXPECT_EQ(taken(choice, 128, 256), wanted);
    EXPECT_EQ(taken(choice, 511, 128), wanted);
    EXPECT_EQ(taken(choice, 127, 256), Variant::Decoded) << "fewer rows";
    EXPECT_EQ(taken(choice, 512, 256), Variant::Decoded) << "more rows";
    EXPECT_EQ(taken(choice, 256, 120), Variant::Decoded) << "few columns";
    const TensorView bf16 = product({256, 256});
    EXPECT_EQ(choice.way(device(), GemmForm::NT, bf16, unbound({Blocks::Blocks128}, {256, 256}),
                         product({256, 256})),
              Variant::Decoded)
        << "another pair";
    EXPECT_EQ(choice.way(device(), GemmForm::NT, bf16, bf16, product({256, 256})),
              Variant::Decoded);
    const bool direct = fp8::why_not(device(), Variant::Direct).empty();
    EXPECT_EQ(Choice(Variant::Direct).way(device(), GemmForm::NT, bf16, bf16, product({256, 256})),
              direct ? Variant::Direct : Variant::Decoded);
    // Of those that cannot be computed so.
    EXPECT_EQ(choice.way(device(), GemmForm::NT,
                         unbound({Blocks::Rows128, Format::E5M2}, {256, 256}),
                         unbound({Blocks::Blocks128}, {256, 256}), product({256, 256})),
              Variant::Decoded);
    EXPECT_NE(taken(Choice(), 256, 256), Variant::Device);
    EXPECT_EQ(taken(Choice(Variant::Decoded), 1 << 20, 1 << 10), Variant::Decoded);
}

TEST_F(Fp8Choice, Bf16ProductsGoOneWayWhateverTheirRows) {
    const bool direct = fp8::why_not(device(), Variant::Direct).empty();
    const Choice choice = fp8::of_bf16(Variant::Direct);
    for (const std::uint64_t rows : {1u, 100u, 300u, 5000u}) {
        const auto taken = [&](std::uint64_t n, std::uint64_t k) {
            return choice
                .way(device(), GemmForm::NT, product({rows, k}), product({n, k}),
                     product({rows, n}))
                .variant;
        };
        EXPECT_EQ(taken(256, 512), direct ? Variant::Direct : Variant::Decoded) << rows;
        EXPECT_EQ(taken(120, 512), Variant::Decoded) << "few columns";
        EXPECT_EQ(taken(256, 500), Variant::Decoded) << "no multiple of 8";
    }
    EXPECT_EQ(choice.way(device(), GemmForm::NN, product({256, 512}), product({512, 256}),
                         product({256, 256})),
              Variant::Decoded)
        << "it is nt alone";
    // A tile that is named is the only one, and other kinds do not have it.
    const fp8::Way named{Variant::Direct, {.fragments_m = 77}};
    EXPECT_EQ(fp8::of_bf16(named).way(device(), GemmForm::NT, product({256, 512}),
                                      product({256, 512}), product({256, 256})),
              Variant::Decoded)
        << "there is no such tile";
    EXPECT_NE(fp8::of_bf16(named), choice);
    Choice again = fp8::of_bf16(named);
    for (const ProductKind& kind : fp8::product_kinds())
        if (kind.pair == fp8::Pair::Bf16)
            again.set(kind, Variant::Direct);
    EXPECT_EQ(again, choice);
    EXPECT_EQ(describe(device(), fp8::of_bf16(named)), describe(device(), choice))
        << "a tile decides no bits";
}

TEST_F(Fp8Choice, GroupsHaveAsManyRowsAsIsExpected) {
    Choice choice(Variant::Decoded);
    for (const char* name : {"nt.grouped.fp8.32", "nt.masked.fp8.127"})
        choice.set(*fp8::product_kind(name), Variant::Streamed);
    const TensorView offsets = TensorView::contiguous(BufferView{nullptr, 0, 64}, DType::U32, {5});
    const TensorView counts = TensorView::contiguous(BufferView{nullptr, 0, 64}, DType::U32, {4});
    const auto taken_with = [&](GroupLayout layout, std::uint64_t expected) {
        layout.expected_rows = expected;
        const fp8::GroupedRows rows{layout, {}};
        const bool masked = layout.form == GroupLayout::Form::Masked;
        return choice.way(device(), GemmForm::NT,
                          masked ? unbound({}, {4, 1024, 256}) : unbound({}, {4096, 256}),
                          unbound({Blocks::Blocks128}, {4, 512, 256}),
                          masked ? product({4, 1024, 512}) : product({4096, 512}), &rows);
    };
    const GroupLayout grouped = GroupLayout::prefix_sums(offsets, 4096),
                      masked = GroupLayout::masked(counts, 1024);
    EXPECT_EQ(taken_with(grouped, 20), Variant::Streamed);
    EXPECT_EQ(taken_with(grouped, 8), Variant::Decoded);
    EXPECT_EQ(taken_with(grouped, 0), Variant::Decoded) << "1024 each";
    EXPECT_EQ(taken_with(masked, 100), Variant::Streamed);
    EXPECT_EQ(taken_with(masked, 0), Variant::Streamed) << "made for few";
    EXPECT_EQ(taken_with(masked, 1024), Variant::Decoded);
}

/// An older table has no entries for rows by ids.
TEST_F(Fp8Choice, RowsByIdsHaveEntriesOfTheirOwnOrThoseOfGroups) {
    const TensorView ids = TensorView::contiguous(BufferView{nullptr, 0, 96}, DType::I32, {8, 3});
    fp8::GroupedRows rows = fp8::unlisted_rows(GroupLayout::by_ids(ids, 4));
    const auto taken = [&](const Choice& choice, std::uint64_t expected) {
        rows.layout.expected_rows = expected;
        return choice
            .way(device(), GemmForm::NT, unbound({}, {8, 256}),
                 unbound({Blocks::Blocks128}, {4, 512, 256}), product({24, 512}), &rows)
            .variant;
    };
    Choice choice(Variant::Decoded);
    choice.set(*fp8::product_kind("nt.grouped.fp8.8"), Variant::Streamed);
    EXPECT_EQ(taken(choice, 6), Variant::Streamed);
    EXPECT_EQ(taken(choice, 20), Variant::Decoded);
    choice.set(*fp8::product_kind("nt.ids.fp8.32"), Variant::Streamed);
    EXPECT_EQ(taken(choice, 20), Variant::Streamed);
    EXPECT_EQ(fp8::parse_choice(device(), describe(device(), choice)), choice);
    EXPECT_FALSE(fp8::product_kind("nt.ids.fp8.511")) << "rows by ids are few";
}

/// As layers ask before there are operands.
TEST_F(Fp8Choice, WeightGradientsAreOfTheKindThatTheirRowsAreOf) {
    const TensorView offsets = TensorView::contiguous(BufferView{nullptr, 0, 64}, DType::U32, {5});
    fp8::GroupedRows rows{GroupLayout::prefix_sums(offsets, 4096), {}};
    EXPECT_EQ(to_string(fp8::weight_gradient_kind(4096)), "tn.dense.fp8.more");
    EXPECT_EQ(to_string(fp8::weight_gradient_kind(100)), "tn.dense.fp8.127");
    EXPECT_EQ(to_string(fp8::weight_gradient_kind(4096, &rows)), "tn.grouped.fp8.more");
    rows.layout.expected_rows = 511;
    EXPECT_EQ(to_string(fp8::weight_gradient_kind(4096, &rows)), "tn.grouped.fp8.511");
    const auto operand = [](std::uint64_t columns) {
        return unbound({.blocks = Blocks::Columns128}, {100, columns});
    };
    Choice choice(Variant::Decoded);
    choice.set(fp8::weight_gradient_kind(100), Variant::Packed);
    EXPECT_EQ(choice.way(device(), GemmForm::TN, operand(256), operand(512), product({256, 512})),
              fp8::why_not(device(), Variant::Packed).empty() ? Variant::Packed : Variant::Decoded);
}

TEST_F(Fp8Choice, WorkspacesSufficeForTheirVariant) {
    const Operand a = unbound({}, {300, 256}), b = unbound({Blocks::Blocks128}, {200, 256});
    const auto bytes = [&](Variant variant) {
        return fp8::gemm_workspace_bytes(device(), a, b, variant);
    };
    std::uint64_t most = 0;
    for (const Variant variant : fp8::kVariants)
        most = std::max(most, bytes(variant));
    EXPECT_EQ(bytes(Variant::Device), most);
    EXPECT_EQ(bytes(Variant::Decoded), 2 * 300 * 256 + 2 * 200 * 256);
}

TEST_F(Fp8Choice, GoesThroughText) {
    EXPECT_EQ(describe(device(), Choice(Variant::Decoded)), "decoded");
    EXPECT_EQ(describe(device(), Choice()), "device");
    EXPECT_EQ(fp8::parse_choice(device(), "device"), Choice());
    Choice choice(Variant::Decoded);
    const ProductKind kind = *fp8::product_kind("nt.dense.fp8.511");
    choice.set(kind, Variant::Packed);
    choice.set(*fp8::product_kind("nt.dense.fp8.more"), Variant::Packed);
    const std::string text = describe(device(), choice);
    EXPECT_EQ(text.rfind("decoded; packed [packed-f16", 0), 0u) << text;
    EXPECT_NE(text.find("]: nt.dense.fp8.511 nt.dense.fp8.more"), std::string::npos) << text;
    const auto expect_error = [](const std::string& wrong, ErrorCode code, const char* part) {
        try {
            (void)fp8::parse_choice(device(), wrong);
            ADD_FAILURE() << "taken: " << wrong;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), code) << error.what();
            EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
        }
    };
    if (fp8::why_not(device(), Variant::Packed).empty())
        EXPECT_EQ(fp8::parse_choice(device(), text), choice);
    else
        expect_error(text, ErrorCode::Unsupported, "nt.dense.fp8.511");
    expect_error("decoded; packed [packed-f16-k99]: nt.dense.fp8.511", ErrorCode::Unsupported,
                 "packed-f16-k99");
    expect_error("decoded; folded [f32]: nt.dense.fp8.511", ErrorCode::Unsupported, "folded");
    expect_error("", ErrorCode::Unsupported, "");
    expect_error("decoded; packed [x]: nt.dense", ErrorCode::Corrupt, "nothing");
    expect_error("decoded; packed", ErrorCode::Corrupt, "nothing");
}

// A variant may have another numeric class for other kinds of products.
TEST_F(Fp8Choice, AllThatIsPossibleGoesThroughText) {
    for (const Variant variant : {Variant::Packed, Variant::Streamed}) {
        Choice choice(Variant::Decoded);
        for (const Measurement& m : fp8::measure(device(), {.timed = fp8::Timed::None}))
            for (const fp8::VariantTime& v : m.variants)
                if (v.variant == variant && v.why_not.empty())
                    choice.set(m.kind, variant);
        EXPECT_EQ(fp8::parse_choice(device(), describe(device(), choice)), choice);
    }
}

TEST_F(Fp8Choice, MeasuresEveryKind) {
    const std::uint64_t before = device().memory_report().bytes;
    std::uint64_t told = 0;
    const auto all =
        fp8::measure(device(), {.timed = fp8::Timed::Usual,
                                .limit = 600,
                                .on_progress = [&](std::uint64_t done, std::uint64_t total) {
                                    EXPECT_EQ(done, ++told);
                                    EXPECT_EQ(total, fp8::product_kinds().size());
                                }});
    EXPECT_EQ(told, fp8::product_kinds().size());
    ASSERT_EQ(all.size(), fp8::product_kinds().size());
    for (std::size_t i = 0; i < all.size(); ++i) {
        const Measurement& m = all[i];
        const std::string name = to_string(m.kind);
        EXPECT_EQ(m.kind, fp8::product_kinds()[i]);
        ASSERT_EQ(m.variants.size(), fp8::kVariants.size());
        const std::string usual = of(m, m.usual).numeric_class;
        EXPECT_GT(of(m, m.usual).seconds, 0) << name;
        for (const VariantTime& v : m.variants) {
            const bool timed = v.why_not.empty() && v.numeric_class == usual;
            EXPECT_EQ(v.seconds > 0, timed) << name << " " << to_string(v.variant);
            EXPECT_FALSE(v.numeric_class.empty());
        }
        EXPECT_LE(m.rows, ProductKind::kMostRows[m.kind.rows]) << name;
        // 1 GFLOPS to 10 PFLOPS: no time is of something else.
        if (m.rows >= 96) {
            EXPECT_GT(m.flops() / of(m, m.usual).seconds, 1e8) << name;
            EXPECT_LT(m.flops() / of(m, m.usual).seconds, 1e16) << name;
        }
    }
    device().wait_idle();
    EXPECT_EQ(device().memory_report().bytes, before);
    const Choice choice = fp8::choose(all, Bits::Usual);
    EXPECT_EQ(fp8::parse_choice(device(), describe(device(), choice)), choice);
}

// What a kind was measured with says nothing about products that usually have another tile.
TEST_F(Fp8Choice, AMeasuredTileTakesThePlaceOfTheUsualOne) {
    const ProductKind kind = *fp8::product_kind("nt.dense.fp8.127");
    auto all = fp8::measure(device(), {.timed = fp8::Timed::None, .kinds = {kind}});
    ASSERT_EQ(all.size(), 1u);
    const auto packed = std::find_if(all[0].variants.begin(), all[0].variants.end(),
                                     [](auto& v) { return v.variant == Variant::Packed; });
    if (!packed->why_not.empty()) {
        EXPECT_TRUE(packed->tiles.empty());
        return;
    }
    std::vector<fp8::TileTime>& tiles = packed->tiles.front().tiles;
    ASSERT_GT(tiles.size(), 1u);
    tiles[0].seconds = 2;
    tiles[1].seconds = 1;
    const Way best{Variant::Packed, tiles[1].tile};
    Choice choice(Variant::Packed);
    EXPECT_EQ(way(choice, all[0].rows, 256), Variant::Packed);
    choice.take_tiles(all);
    EXPECT_EQ(way(choice, all[0].rows, 256), best);
    EXPECT_EQ(way(choice, 40, 256), Variant::Packed) << "another tile, the same kind";
    EXPECT_EQ(way(choice, 256, 256), Variant::Packed) << "the same tile, another kind";
    EXPECT_EQ(way(choice, all[0].rows, 64), Variant::Decoded);
    EXPECT_EQ(describe(device(), choice), "packed") << "a tile decides no bits";
    Choice decoded(Variant::Decoded);
    decoded.take_tiles(all);
    EXPECT_EQ(way(decoded, all[0].rows, 256), Variant::Decoded) << "a variant without that tile";
    // Tiles of another device are none here.
    tiles[1].tile.fragments_m = 77;
    choice.take_tiles(all);
    EXPECT_EQ(way(choice, all[0].rows, 256), Variant::Packed);
}

TEST_F(Fp8Choice, MeasuresTiles) {
    const bool packs = fp8::why_not(device(), Variant::Packed).empty();
    std::uint64_t told = 0;
    const auto all =
        fp8::measure(device(), {.limit = 600,
                                .tile_limit = 600,
                                .kinds = {*fp8::product_kind("nt.dense.fp8.8")},
                                .on_progress = [&](std::uint64_t, std::uint64_t total) {
                                    EXPECT_EQ(total, 2u);
                                    ++told;
                                }});
    EXPECT_EQ(told, 2u);
    const VariantTime& packed = of(all[0], Variant::Packed);
    EXPECT_EQ(!packed.tiles.empty() && packed.tiles[0].tiles.size() > 1, packs);
    for (const VariantTime& v : all[0].variants)
        for (const fp8::TileTimes& times : v.tiles)
            for (const fp8::TileTime& t : times.tiles)
                EXPECT_EQ(t.seconds > 0, times.tiles.size() > 1)
                    << to_string(v.variant) << " " << t.name;
    const auto late = fp8::measure(
        device(),
        {.limit = 600, .tile_limit = 1e-9, .kinds = {*fp8::product_kind("nt.dense.fp8.8")}});
    for (const fp8::TileTimes& times : of(late[0], Variant::Packed).tiles)
        for (const fp8::TileTime& t : times.tiles)
            EXPECT_EQ(t.seconds, 0) << "there was no time";
}

TEST_F(Fp8Choice, WithoutTimeTheUsualIsTaken) {
    const auto all = fp8::measure(device(), {.limit = 1e-9});
    for (const Measurement& m : fp8::measure(device(), {.timed = fp8::Timed::None})) {
        for (const VariantTime& v : m.variants)
            EXPECT_EQ(v.seconds, 0);
        EXPECT_EQ(fp8::fastest(m, Bits::Any), m.usual);
    }
    EXPECT_EQ(of(all.back(), Variant::Decoded).seconds, 0) << "there was no time left";
}

} // namespace
} // namespace bellows
