// SPDX-License-Identifier: MIT
#include "app/product_table.hpp"

#include "app/units.hpp"

#include <bellows/engine/gemm_plan.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

namespace bellows {

namespace {

/// Up to so many rows memory bounds a product rather than arithmetic.
constexpr std::uint64_t kBoundByMemory = 127;

constexpr const char* kTitle[] = {"nt: A times transposed B", "nn: A times B",
                                  "tn: transposed A times B"};
constexpr const char* kGrouping[] = {"", ", rows in groups", ", groups in blocks (masked)",
                                     ", rows by a router's ids"};
constexpr const char* kPair[] = {"fp8 x fp8", "fp8 x fp8, f32 scales", "bf16 x fp8", "bf16 x bf16"};

/// Reasons by letter, in the order in which they come up.
class Notes {
public:
    std::string letter(const std::string& reason) {
        const auto found = std::find(reasons_.begin(), reasons_.end(), reason);
        const auto index = static_cast<std::size_t>(found - reasons_.begin());
        if (found == reasons_.end())
            reasons_.push_back(reason);
        return index < 26 ? std::string(1, static_cast<char>('a' + index))
                          : std::to_string(index + 1);
    }
    std::string text() {
        std::string text;
        for (const std::string& reason : std::vector<std::string>(reasons_))
            text += "  (" + letter(reason) + ") " + reason + "\n";
        return text;
    }

private:
    std::vector<std::string> reasons_;
};

std::string padded(const std::string& text, std::size_t width) {
    return text + std::string(width - std::min(width, text.size()), ' ');
}

std::string rows_of(const fp8::ProductKind& kind) {
    const auto& most = fp8::ProductKind::kMostRows;
    return kind.rows + 1u == most.size() ? "more" : "up to " + std::to_string(most.at(kind.rows));
}

/// "23.1 GFLOPS"
std::string with_unit(double value, const char* unit) {
    std::string text = format_count(value);
    const std::size_t digits = text.find_first_not_of("0123456789.");
    text.insert(std::min(digits, text.size()), " ");
    return text + unit;
}

std::string rate_of(const fp8::Measurement& m, double seconds) {
    return fp8::ProductKind::kMostRows.at(m.kind.rows) <= kBoundByMemory
               ? with_unit(m.bytes() / seconds, "B/s")
               : with_unit(m.flops() / seconds, "FLOPS");
}

constexpr std::size_t kCellWidth = 15;

/// "*   12.3 us", "(a)".
std::string cell_of(const fp8::Measurement& m, const fp8::VariantTime& v, Notes& notes) {
    if (!v.why_not.empty())
        return "    (" + notes.letter(v.why_not) + ")";
    const bool chosen = v.variant == fp8::fastest(m, fp8::Bits::Usual);
    const bool fastest = v.variant == fp8::fastest(m, fp8::Bits::Any);
    const char* mark = chosen ? "*" : fastest ? "+" : " ";
    if (v.seconds <= 0)
        return std::string(mark) + "   not timed";
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), "%s%7.1f us", mark, v.least_seconds() * 1e6);
    return text.data();
}

/// Returns the rate of the variant that a run takes, as "812 GB/s", or "" if it was not timed.
std::string rate_of_chosen(const fp8::Measurement& m) {
    const fp8::Variant chosen = fp8::fastest(m, fp8::Bits::Usual);
    for (const fp8::VariantTime& v : m.variants)
        if (v.variant == chosen && v.why_not.empty() && v.seconds > 0)
            return rate_of(m, v.least_seconds());
    return "";
}

/// The names of tiles that are not the usual ones: "packed 64x128; streamed 16x64".
std::string tiles_of(const fp8::Measurement& m) {
    std::string text;
    for (const fp8::VariantTime& v : m.variants) {
        const fp8::TileTime* faster = v.tiles.empty() ? nullptr : v.tiles.front().faster();
        if (faster != nullptr)
            text += (text.empty() ? "" : "; ") + std::string(fp8::to_string(v.variant)) + " " +
                    faster->name;
    }
    return text;
}

std::string without_trailing(std::string line) {
    return line.erase(line.find_last_not_of(' ') + 1);
}

/// Variants that take such operands.
std::vector<fp8::VariantTime> columns_of(const fp8::Measurement& m) {
    const bool bf16 = m.kind.pair == fp8::Pair::Bf16;
    std::vector<fp8::VariantTime> columns = m.variants;
    std::erase_if(columns, [&](const auto& v) {
        return v.variant != fp8::Variant::Decoded && (v.variant == fp8::Variant::Direct) != bf16;
    });
    return columns;
}

std::string line_of(const fp8::Measurement& m, Notes& notes) {
    const bool tn = m.kind.form == GemmForm::TN;
    const std::string rows = std::to_string(m.rows), n = std::to_string(m.n),
                      k = std::to_string(m.k);
    std::string line = "  " + padded(rows_of(m.kind), 10) +
                       padded((m.groups > 1 ? std::to_string(m.groups) + "x" : "") +
                                  (tn ? n + "x" + k + "x" + rows : rows + "x" + n + "x" + k),
                              17);
    const std::string tiles = tiles_of(m), below(line.size(), ' ');
    for (const fp8::VariantTime& v : columns_of(m))
        line += padded(cell_of(m, v, notes), kCellWidth);
    line += rate_of_chosen(m);
    return without_trailing(line) + "\n" + (tiles.empty() ? "" : below + tiles + "\n");
}

std::string title_of(const fp8::Measurement& m) {
    std::string line = std::string("\n") + kTitle[static_cast<std::size_t>(m.kind.form)] +
                       kGrouping[static_cast<std::size_t>(m.kind.grouping)] + "; " +
                       kPair[static_cast<std::size_t>(m.kind.pair)] + "\n  " + padded("rows", 10) +
                       padded(m.groups > 1 ? "groups x MxNxK" : "MxNxK", 17);
    for (const fp8::VariantTime& v : columns_of(m))
        line += padded(std::string("   ") + fp8::to_string(v.variant), kCellWidth);
    return without_trailing(line) + "\n";
}

} // namespace

std::string format_product_times(const ProductTimes& times) {
    std::string text =
        "FP8 products, measured " + times.measured +
        (times.file.empty() ? "" : ", kept in\n  " + times.file.string()) + "\n" +
        "* what a run takes: the fastest of the usual numeric class; its rate at the "
        "end.  + faster, with\nother bits.  Below: tiles that were faster than the "
        "usual ones.\n";
    Notes notes;
    const fp8::Measurement* last = nullptr;
    for (const fp8::Measurement& m : times.products) {
        if (last == nullptr || last->kind.form != m.kind.form ||
            last->kind.grouping != m.kind.grouping || last->kind.pair != m.kind.pair)
            text += title_of(m);
        text += line_of(m, notes);
        last = &m;
    }
    const std::string reasons = notes.text();
    return text + (reasons.empty() ? "" : "\nnot possible:\n" + reasons);
}

} // namespace bellows
