// SPDX-License-Identifier: MIT
#include <bellows/fp8/choice.hpp>

#include "operands.hpp"
#include "product.hpp"
#include "product_case.hpp"
#include "tiles.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <map>

namespace bellows::fp8 {

namespace {

constexpr const char* kForms[] = {"nt", "nn", "tn"};
constexpr const char* kGroupings[] = {"dense", "grouped", "masked", "ids"};
constexpr const char* kPairs[] = {"fp8", "fp8_f32", "bf16_fp8", "bf16"};

/// Below, tiles of units are mostly empty, and measurements at usual sizes say little.
constexpr std::uint64_t kLeastColumns = 128;
/// The first of kMostRows that products of two bf16 operands have entries for.
constexpr std::uint8_t kLeastRowsOfBf16 = 3;
/// The first so many of kMostRows have entries for rows by ids.
constexpr std::uint8_t kRowSizesByIds = 3;
/// By how much clocks waver.
constexpr double kMargin = 1.03;

std::vector<ProductKind> make_kinds() {
    std::vector<ProductKind> kinds;
    const auto add = [&](GemmForm form, Grouping grouping, Pair pair, std::uint8_t first,
                         std::uint8_t end) {
        for (std::uint8_t rows = first; rows < end; ++rows)
            kinds.push_back({form, grouping, pair, rows});
    };
    constexpr auto kAll = static_cast<std::uint8_t>(ProductKind::kMostRows.size());
    for (const Grouping grouping : {Grouping::Dense, Grouping::Grouped, Grouping::Masked})
        add(GemmForm::NT, grouping, Pair::Fp8, 0, kAll);
    // Rows stand by ids where they are few.
    add(GemmForm::NT, Grouping::ByIds, Pair::Fp8, 0, kRowSizesByIds);
    // Gradients are of training, which has many rows.
    for (const GemmForm form : {GemmForm::NN, GemmForm::TN})
        for (const Grouping grouping : {Grouping::Dense, Grouping::Grouped})
            add(form, grouping, Pair::Fp8, 2, kAll);
    // Decoding has few.
    for (const Pair pair : {Pair::Fp8F32, Pair::Bf16Fp8})
        for (const Grouping grouping : {Grouping::Dense, Grouping::Grouped, Grouping::Masked})
            add(GemmForm::NT, grouping, pair, 0, 3);
    // Weights of a checkpoint with f32 scales meet many rows in prefill.
    for (const Grouping grouping : {Grouping::Dense, Grouping::Grouped})
        add(GemmForm::NT, grouping, Pair::Fp8F32, 3, kAll);
    for (const Grouping grouping : {Grouping::Dense, Grouping::Grouped})
        add(GemmForm::NT, grouping, Pair::Bf16, kLeastRowsOfBf16, kAll);
    return kinds;
}

std::optional<Pair> pair_of(const Operand& a, const Operand& b) {
    const auto bf16 = [](const Operand& o) { return o.values.dtype == DType::BF16; };
    if (!b.quantized)
        return bf16(a) && bf16(b) ? std::optional(Pair::Bf16) : std::nullopt;
    const auto f32 = [](const Operand& o) { return o.quantized->recipe.rule == ScaleRule::F32; };
    if (a.quantized)
        return f32(a) || f32(b) ? Pair::Fp8F32 : Pair::Fp8;
    return bf16(a) && !f32(b) ? std::optional(Pair::Bf16Fp8) : std::nullopt;
}

std::uint8_t size_of_groups(Pair pair, std::uint64_t rows) {
    const auto& most = ProductKind::kMostRows;
    const auto size =
        static_cast<std::uint8_t>(std::lower_bound(most.begin(), most.end(), rows) - most.begin());
    return pair == Pair::Bf16 ? std::max(size, kLeastRowsOfBf16) : size;
}

std::vector<ProductKind> kinds_of_bf16() {
    std::vector<ProductKind> kinds = product_kinds();
    std::erase_if(kinds, [](const ProductKind& kind) { return kind.pair != Pair::Bf16; });
    return kinds;
}

/// Nothing for products that are not chosen for.
std::optional<ProductKind> kind_of(const Product& p) {
    const Extents d = extents_of(p.d);
    const bool tn = p.form == GemmForm::TN;
    const auto pair = pair_of(p.a, p.b);
    if (!pair || d.columns < kLeastColumns || (tn && d.rows < kLeastColumns))
        return std::nullopt;
    const std::uint8_t rows = size_of_groups(*pair, expected_rows(p));
    const bool by_ids = p.rows != nullptr && p.rows->layout.form == GroupLayout::Form::Ids &&
                        p.form == GemmForm::NT && *pair == Pair::Fp8 && rows < kRowSizesByIds;
    return ProductKind{p.form,
                       masked(p)           ? Grouping::Masked
                       : by_ids            ? Grouping::ByIds
                       : p.rows != nullptr ? Grouping::Grouped
                                           : Grouping::Dense,
                       *pair, rows};
}

Variant known_variant(std::string_view name) {
    if (const auto variant = variant_of(name))
        return *variant;
    throw Error(ErrorCode::Unsupported, "this version has no way of computing products called \"" +
                                            std::string(name) + "\"");
}

const VariantTime* find(const Measurement& m, Variant variant) {
    const auto found = std::find_if(m.variants.begin(), m.variants.end(),
                                    [&](const VariantTime& v) { return v.variant == variant; });
    return found == m.variants.end() ? nullptr : &*found;
}

/// `text` up to the separator, which goes with it; all of it where there is none.
std::string_view take(std::string_view& text, std::string_view separator) {
    const std::size_t end = std::min(text.find(separator), text.size());
    const std::string_view part = text.substr(0, end);
    text.remove_prefix(std::min(end + separator.size(), text.size()));
    return part;
}

[[noreturn]] void fail_corrupt(std::string_view text) {
    throw Error(ErrorCode::Corrupt,
                "\"" + std::string(text.substr(0, 80)) + "\" says nothing about products");
}

void require_class(const VariantTime& v, std::string_view kind, std::string_view wanted) {
    const std::string what = "products " + std::string(kind) + " cannot be computed as \"" +
                             to_string(v.variant) + "\" of numeric class " + std::string(wanted);
    if (!v.why_not.empty())
        throw Error(ErrorCode::Unsupported, what + ": " + v.why_not);
    if (v.numeric_class != wanted)
        throw Error(ErrorCode::Unsupported, what + ": here it has " + v.numeric_class);
}

} // namespace

ProductKind weight_gradient_kind(std::uint64_t all_rows, const GroupedRows* rows) {
    return {GemmForm::TN, rows == nullptr ? Grouping::Dense : Grouping::Grouped, Pair::Fp8,
            size_of_groups(Pair::Fp8, rows == nullptr ? all_rows : expected_rows(rows->layout))};
}

const std::vector<ProductKind>& product_kinds() {
    static const std::vector<ProductKind> kinds = make_kinds();
    return kinds;
}

std::string to_string(const ProductKind& kind) {
    const auto word = [](const auto& names, auto value) {
        return std::string(names[static_cast<std::size_t>(value)]) + ".";
    };
    return word(kForms, kind.form) + word(kGroupings, kind.grouping) + word(kPairs, kind.pair) +
           (kind.rows + 1u == ProductKind::kMostRows.size()
                ? "more"
                : std::to_string(ProductKind::kMostRows.at(kind.rows)));
}

std::optional<ProductKind> product_kind(std::string_view name) {
    for (const ProductKind& kind : product_kinds())
        if (to_string(kind) == name)
            return kind;
    return std::nullopt;
}

// --- The table

Choice::Choice(Variant otherwise) : otherwise_(otherwise) {
    table_.fill(Variant::Device);
}

std::size_t Choice::place_of(const ProductKind& kind) {
    return ((static_cast<std::size_t>(kind.form) * 4 + static_cast<std::size_t>(kind.grouping)) *
                4 +
            static_cast<std::size_t>(kind.pair)) *
               ProductKind::kMostRows.size() +
           kind.rows;
}

void Choice::set(const ProductKind& kind, const Way& way) {
    table_.at(place_of(kind)) = way.variant == otherwise_ ? Variant::Device : way.variant;
    std::erase_if(named_, [&](const NamedWay& named) { return named.kind == kind; });
    if (way.tile != Tile{})
        named_.push_back({kind, way.tile});
}

bool Choice::has(const ProductKind& kind) const {
    return table_.at(place_of(kind)) != Variant::Device;
}

Variant Choice::at(const ProductKind& kind) const {
    const Variant entry = table_.at(place_of(kind));
    return entry == Variant::Device ? otherwise_ : entry;
}

void Choice::take_tiles(const std::vector<Measurement>& measurements) {
    tiles_.clear();
    for (const Measurement& m : measurements)
        for (const VariantTime& v : m.variants)
            for (const TileTimes& t : v.tiles)
                if (const TileTime* faster = t.faster())
                    tiles_.push_back({m.kind, v.variant, t.tiles.front().tile, faster->tile});
}

Way Choice::way(const Device& device, GemmForm form, const Operand& a, const Operand& b,
                const TensorView& d, const GroupedRows* rows) const {
    const Product p = product_of(form, a, b, d, rows);
    if (a.transposed || b.transposed) // nothing else reads them
        return Variant::Native;
    auto kind = kind_of(p);
    if (kind && kind->grouping == Grouping::ByIds && !has(*kind))
        kind->grouping = Grouping::Grouped;
    Variant wanted = kind ? at(*kind) : otherwise_;
    if (wanted == Variant::Device)
        wanted = usual_variant(device, p);
    const auto named = std::find_if(named_.begin(), named_.end(),
                                    [&](const NamedWay& n) { return n.kind == kind; });
    if (named != named_.end())
        return why_not(device, p, {wanted, named->tile}).empty() ? Way{wanted, named->tile}
                                                                 : Way{Variant::Decoded};
    if (!kind || !why_not(device, p, wanted).empty())
        return Variant::Decoded;
    if (tiles_.empty())
        return wanted;
    return {wanted, tile(*kind, wanted, tiles_of(device, p, wanted))};
}

/// Tile{} for the usual one.
Tile Choice::tile(const ProductKind& kind, Variant variant,
                  const std::vector<NamedTile>& possible) const {
    const auto other = std::find_if(tiles_.begin(), tiles_.end(), [&](const OtherTile& o) {
        return o.kind == kind && o.variant == variant && !possible.empty() &&
               o.usual == possible.front().tile;
    });
    return other != tiles_.end() && contains(possible, other->tile) ? other->tile : Tile{};
}

std::string describe(Device& device, const Choice& choice) {
    std::string text = to_string(choice.otherwise());
    for (const Variant variant : kVariants) {
        std::map<std::string, std::string> kinds; // of a numeric class
        for (const ProductKind& kind : product_kinds())
            if (variant != choice.otherwise() && choice.at(kind) == variant)
                kinds[find(ProductCase(device, kind).facts(), variant)->numeric_class] +=
                    " " + to_string(kind);
        for (const auto& [numerics, names] : kinds)
            text += std::string("; ") + to_string(variant) + " [" + numerics + "]:" + names;
    }
    return text;
}

Choice parse_choice(Device& device, std::string_view text) {
    const std::string_view whole = text;
    Choice choice(known_variant(take(text, "; ")));
    while (!text.empty()) {
        std::string_view part = take(text, "; ");
        const Variant variant = known_variant(take(part, " ["));
        const std::string_view numerics = take(part, "]: ");
        if (part.empty())
            fail_corrupt(whole);
        while (!part.empty()) {
            const std::string_view name = take(part, " ");
            const auto kind = product_kind(name);
            if (!kind)
                fail_corrupt(whole);
            const ProductCase product(device, *kind);
            require_class(*find(product.facts(), variant), name, numerics);
            choice.set(*kind, variant);
        }
    }
    return choice;
}

// --- Choosing

double Measurement::flops() const {
    return 2 * static_cast<double>(groups * rows) * static_cast<double>(n) * static_cast<double>(k);
}

double Measurement::bytes() const {
    const double a = static_cast<double>(groups * rows),
                 weights = static_cast<double>(groups * n * k);
    if (kind.form == GemmForm::TN)
        return a * static_cast<double>(n + k) + 4 * 2 * weights;
    const double a_bytes = kind.pair == Pair::Bf16Fp8 || kind.pair == Pair::Bf16 ? 2 : 1,
                 weight_bytes = kind.pair == Pair::Bf16 ? 2 : 1;
    return a_bytes * a * static_cast<double>(k) + weight_bytes * weights +
           2 * a * static_cast<double>(n);
}

const TileTime* TileTimes::faster() const {
    const TileTime* best = nullptr;
    for (const TileTime& t : tiles)
        if (t.seconds > 0 && (best != nullptr ? t.seconds < best->seconds
                                              : t.seconds * kMargin < tiles.front().seconds))
            best = &t;
    return best;
}

double VariantTime::least_seconds() const {
    const TileTime* faster = tiles.empty() ? nullptr : tiles.front().faster();
    return faster == nullptr ? seconds : faster->seconds;
}

Variant fastest(const Measurement& m, Bits bits) {
    const VariantTime* usual = find(m, m.usual);
    if (usual == nullptr || !(usual->seconds > 0))
        return m.usual;
    const VariantTime* best = usual;
    for (const VariantTime& v : m.variants) {
        const bool may = bits == Bits::Any || v.numeric_class == usual->numeric_class;
        const double margin = best == usual ? kMargin : 1;
        if (may && v.why_not.empty() && v.seconds > 0 &&
            v.least_seconds() * margin < best->least_seconds())
            best = &v;
    }
    return best->variant;
}

Choice choose(const std::vector<Measurement>& measurements, Bits bits) {
    Choice choice(Variant::Decoded);
    for (const Measurement& m : measurements)
        if (m.kind.pair != Pair::Bf16)
            choice.set(m.kind, fastest(m, bits));
    choice.take_tiles(measurements);
    return choice;
}

Choice of_bf16(const Way& way) {
    Choice choice(Variant::Decoded);
    for (const ProductKind& kind : kinds_of_bf16())
        choice.set(kind, way);
    return choice;
}

Choice choose_of_bf16(const std::vector<Measurement>& measurements, Bits bits) {
    Choice choice(Variant::Decoded);
    for (const Measurement& m : measurements) {
        if (m.kind.pair != Pair::Bf16 || m.kind.rows + 1u != ProductKind::kMostRows.size())
            continue;
        for (const ProductKind& kind : kinds_of_bf16())
            if (kind.form == m.kind.form && kind.grouping == m.kind.grouping)
                choice.set(kind, fastest(m, bits));
    }
    choice.take_tiles(measurements);
    return choice;
}

Choice usual_choice(Device& device) {
    return choose(measure(device, {.timed = Timed::None}), Bits::Usual);
}

Choice usual_choice_of_bf16(Device& device) {
    return choose_of_bf16(measure(device, {.timed = Timed::None, .kinds = kinds_of_bf16()}),
                          Bits::Usual);
}

Choice choice_for_any_rows(const Device& device) {
    Choice choice(Variant::Decoded);
    if (!why_not(device, Variant::Native).empty())
        return choice;
    for (const ProductKind& kind : product_kinds())
        if (kind.form == GemmForm::NT && (kind.pair == Pair::Fp8 || kind.pair == Pair::Fp8F32))
            choice.set(kind, Variant::Native);
    return choice;
}

} // namespace bellows::fp8
