// SPDX-License-Identifier: MIT
#pragma once

// Which variant (gemm.hpp) computes which product, and in which tile (tiles.hpp): kinds of
// products, a table from kinds to both, and the measurement that a table is chosen from. Whoever
// records products holds the table and asks it for each, once for the workspace and the product.
// Variants of another numeric class give other bits: ranks that work on one model must use the same
// ones, and a run that is to repeat keeps them. Tiles decide no bits, only time on the device where
// they were measured: each device takes its own, and what a run keeps (describe) names none. Plain
// values, but for measure() and what takes a device: the thread that records.

#include <bellows/fp8/tiles.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows::fp8 {

/// What the rows of a product belong to.
enum class Grouping : std::uint8_t {
    Dense,
    Grouped,
    Masked,
    ByIds, ///< GroupLayout::Form::Ids; without an entry of its own the table's for Grouped counts
};

/// The operands.
enum class Pair : std::uint8_t {
    Fp8,     ///< fp8 by fp8, power-of-two scales
    Fp8F32,  ///< fp8 by fp8, at least one with f32 scales
    Bf16Fp8, ///< bf16 by fp8 with power-of-two scales
    Bf16,    ///< bf16 by bf16
};

/// Products that are computed alike.
struct ProductKind {
    /// Most rows of activations in a group: those of A and D, of tn those that are summed over.
    static constexpr std::array<std::uint64_t, 5> kMostRows = {8, 32, 127, 511, ~std::uint64_t{0}};

    GemmForm form = GemmForm::NT;
    Grouping grouping = Grouping::Dense;
    Pair pair = Pair::Fp8;
    std::uint8_t rows = 0; ///< the first of kMostRows that is not exceeded

    bool operator==(const ProductKind&) const = default;
};

/// The kind of the weight gradients of so many fp8 rows: of groups of them, if `rows` says so.
ProductKind weight_gradient_kind(std::uint64_t all_rows, const GroupedRows* rows = nullptr);
/// The kinds that can be chosen for, each once.
const std::vector<ProductKind>& product_kinds();
/// "nt.grouped.fp8.511"; of the last kMostRows "nt.grouped.fp8.more".
std::string to_string(const ProductKind& kind);
/// The kind of that name among product_kinds().
std::optional<ProductKind> product_kind(std::string_view name);

struct Measurement;

/// A table from kinds to variants and their tiles.
class Choice {
public:
    /// otherwise: for products without an entry; Variant::Device goes by the sizes.
    explicit Choice(Variant otherwise = Variant::Device);

    /// A tile that is named is the only one of that kind, whatever is measured: for tests and
    /// benchmarks, as text names none.
    void set(const ProductKind& kind, const Way& way);
    Variant at(const ProductKind& kind) const;
    Variant otherwise() const noexcept { return otherwise_; }

    /// From now on variants have the tiles that were fastest on this device: each in the place of
    /// the usual one that it was timed against, for products of that kind.
    void take_tiles(const std::vector<Measurement>& measurements);

    /// The variant that the product takes, never Device: the table's, or where that one cannot
    /// compute it, and where N (of tn, M or N) is below 128, Variant::Decoded. Arguments as those
    /// of gemm.hpp's products; none needs memory yet. Groups have GroupLayout::expected_rows. Two
    /// bf16 operands with few rows count as those of 511: their bits shall not depend on how many
    /// rows there are.
    Way way(const Device& device, GemmForm form, const Operand& a, const Operand& b,
            const TensorView& d, const GroupedRows* rows = nullptr) const;

    bool operator==(const Choice&) const = default;

private:
    struct NamedWay {
        ProductKind kind;
        Tile tile;

        bool operator==(const NamedWay&) const = default;
    };
    struct OtherTile {
        ProductKind kind;
        Variant variant;
        Tile usual, tile;

        bool operator==(const OtherTile&) const = default;
    };

    static constexpr std::size_t kPlaces = 3 * 4 * 4 * ProductKind::kMostRows.size();
    static std::size_t place_of(const ProductKind& kind);
    bool has(const ProductKind& kind) const;
    Tile tile(const ProductKind& kind, Variant variant,
              const std::vector<NamedTile>& possible) const;

    Variant otherwise_;
    std::array<Variant, kPlaces> table_{}; ///< Device: no entry
    std::vector<OtherTile> tiles_;
    std::vector<NamedWay> named_;
};

/// A table in which all products of two bf16 operands that can be chosen for go one way; Decoded
/// otherwise.
Choice of_bf16(const Way& way);

/// In a line, with the numeric class of each variant on this device: "decoded", or
/// "decoded; packed [packed-f16-k16]: nt.dense.fp8.511 nt.dense.fp8.more".
std::string describe(Device& device, const Choice& choice);
/// The choice that describe() wrote, maybe for another device, in usual tiles. Throws
/// Error{Unsupported} when this device lacks a variant or has it in another numeric class,
/// Error{Corrupt} when it is no such text.
Choice parse_choice(Device& device, std::string_view text);

/// A tile of a variant at a product of some kind.
struct TileTime {
    Tile tile;
    std::string name;
    double seconds = 0; ///< 0: not timed
};

/// Tiles that were timed side by side, of which a variant usually takes the first.
struct TileTimes {
    std::uint64_t rows = 0;      ///< of each group
    std::vector<TileTime> tiles; ///< tiles()

    /// The fastest of those that are faster than the usual one by more than clocks waver, or null.
    const TileTime* faster() const;
};

/// A variant at a product of some kind.
struct VariantTime {
    Variant variant = Variant::Decoded;
    std::string numeric_class;
    std::string why_not; ///< "" when it can compute it
    double seconds = 0;  ///< in the usual tile; 0: not timed
    /// At Measurement::rows, then at fewer rows of the kind for which another tile is usual.
    std::vector<TileTimes> tiles{};

    /// At Measurement::rows in the fastest tile.
    double least_seconds() const;
};

/// The variants at one product of a kind.
struct Measurement {
    ProductKind kind;
    std::uint64_t groups = 1, rows = 0, n = 0, k = 0; ///< rows of each group; of tn D is [n, k]
    Variant usual = Variant::Decoded;                 ///< what Variant::Device takes
    std::vector<VariantTime> variants;                ///< all of kVariants

    double flops() const;
    double bytes() const; ///< each operand once
};

enum class Bits : std::uint8_t {
    Usual, ///< those of the numeric class of Measurement::usual: no clock decides them
    Any,
};

/// The fastest variant, each in its fastest tile; the usual one unless another is faster by more
/// than clocks waver.
Variant fastest(const Measurement& measurement, Bits bits);
/// A table of the fastest variants in their fastest tiles, Decoded otherwise, but for two bf16
/// operands.
Choice choose(const std::vector<Measurement>& measurements, Bits bits);
/// The same for two bf16 operands alone: of each Grouping what suits the most rows, for any number
/// of them. With Bits::Usual it is Direct on GPUs with matrix units of bf16.
Choice choose_of_bf16(const std::vector<Measurement>& measurements, Bits bits);
/// What choose() and choose_of_bf16() give with Bits::Usual without any clock.
Choice usual_choice(Device& device);
Choice usual_choice_of_bf16(Device& device);

/// A table in which the variant of forward products of two fp8 operands does not depend on how many
/// rows there are, so that neither do a row's bits: Native where the device has it, else Decoded.
Choice choice_for_any_rows(const Device& device);

/// Which variants are timed.
enum class Timed : std::uint8_t {
    None,  ///< only what is usual, and why not the others: the device does not work
    Usual, ///< those of the numeric class of the usual one
    All,
    Tiles, ///< all, and then their tiles
};

struct MeasureOptions {
    /// CPU drivers take seconds to compile kernels for matrix units that they only emulate.
    Timed timed = Timed::Tiles;
    /// Seconds after which further kinds are not timed, without those of compiling kernels; 0: 20.
    double limit = 0;
    /// Seconds after which tiles of further kinds are not timed, with those of compiling; 0: 30.
    double tile_limit = 0;
    /// Empty: product_kinds().
    std::vector<ProductKind> kinds{};
    /// total: kinds, twice where tiles are timed.
    std::function<void(std::uint64_t done, std::uint64_t total)> on_progress{};
};

/// Each kind at a product of usual size, a few hundred MiB on a GPU for a while. A kind for which
/// memory lacks is not timed. Waits.
std::vector<Measurement> measure(Device& device, const MeasureOptions& options = {});

} // namespace bellows::fp8
