// SPDX-License-Identifier: MIT
#include "model_check.hpp"

#include "bpe/utf8.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bellows::text {

namespace {

// The numbers of sentencepiece_model.proto.
enum Model : std::uint64_t { kPiece = 1, kTrainer = 2, kNormalizer = 3, kDenormalizer = 5 };
enum Piece : std::uint64_t { kText = 1, kScore = 2, kType = 3 };
enum Trainer : std::uint64_t { kModelType = 3, kSpaceAsSuffix = 24, kUnknownSurface = 44 };
enum Normalizer : std::uint64_t { kCharsmap = 2, kAddPrefix = 3, kRemoveSpaces = 4 };
enum PieceType : std::uint64_t { kUnknown = 2, kControl = 3, kUserDefined = 4, kLastPieceType = 6 };

constexpr std::uint64_t kLastModelType = 4;
constexpr std::uint64_t kMostPieces = std::uint64_t{1} << 22;
/// The library's trie recurses once per byte.
constexpr std::size_t kLongestPiece = 4096;
constexpr std::size_t kLongestSurface = 4096;
constexpr float kLargestScore = 1e9F;
/// The library finds all user-defined pieces that a text begins with, and has room for this many.
constexpr std::size_t kMostNested = 64;

/// Fields that occur again replace what came before, as the library reads them.
struct NormalizerSpec {
    std::optional<std::string_view> charsmap;
    std::optional<bool> adds_prefix;
    std::optional<bool> collapses_spaces;
};

struct Checked {
    std::uint64_t pieces = 0;
    std::uint64_t unknown = 0;
    std::vector<std::string_view> user_defined;
    bool crosses = false;
    bool space_is_suffix = false;
    NormalizerSpec normalizer;
    NormalizerSpec denormalizer;
};

/// Whether a space stands behind another character.
bool crosses_words(std::string_view piece) {
    const std::size_t first = piece.find_first_not_of(kSpaceSign);
    return first != std::string_view::npos && piece.find(kSpaceSign, first) != std::string::npos;
}

void check_piece(std::string_view message, Checked& checked) {
    const std::string name = "piece " + std::to_string(checked.pieces);
    std::string_view text;
    std::uint64_t type = 1;
    WireReader reader(message);
    for (WireField field; reader.next(field);) {
        if (field.number == kText) {
            field.expect(WireType::Bytes, "a piece's text");
            text = field.bytes;
        } else if (field.number == kScore) {
            field.expect(WireType::Fixed32, "a piece's score");
            const auto score = std::bit_cast<float>(static_cast<std::uint32_t>(field.value));
            if (!(std::abs(score) <= kLargestScore)) {
                throw BadModel(name + " has the score " + std::to_string(score));
            }
        } else if (field.number == kType) {
            field.expect(WireType::Varint, "a piece's type");
            type = field.value;
        }
    }
    if (text.empty()) {
        throw BadModel(name + " is empty");
    }
    if (text.size() > kLongestPiece) {
        throw BadModel(name + " has " + std::to_string(text.size()) + " bytes");
    }
    if (!is_utf8(text) || text.find('\0') != std::string_view::npos) {
        throw BadModel(name + " is no text in UTF-8");
    }
    if (type == 0 || type > kLastPieceType) {
        throw BadModel(name + " has the unknown type " + std::to_string(type));
    }
    if (++checked.pieces > kMostPieces) {
        throw BadModel("it has more than " + std::to_string(kMostPieces) + " pieces");
    }
    checked.unknown += type == kUnknown;
    if (type == kUserDefined) {
        checked.user_defined.push_back(text);
    }
    checked.crosses = checked.crosses || (type != kControl && crosses_words(text));
}

void check_trainer(std::string_view message, Checked& checked) {
    WireReader reader(message);
    for (WireField field; reader.next(field);) {
        if (field.number == kModelType) {
            field.expect(WireType::Varint, "the model type");
            if (field.value == 0 || field.value > kLastModelType) {
                throw BadModel("it has the unknown model type " + std::to_string(field.value));
            }
        } else if (field.number == kSpaceAsSuffix) {
            field.expect(WireType::Varint, "treat_whitespace_as_suffix");
            checked.space_is_suffix = field.value != 0;
        } else if (field.number == kUnknownSurface) {
            field.expect(WireType::Bytes, "unk_surface");
            if (field.bytes.size() > kLongestSurface) {
                throw BadModel("unk_surface has " + std::to_string(field.bytes.size()) + " bytes");
            }
        }
    }
}

void read_normalizer(std::string_view message, NormalizerSpec& spec) {
    WireReader reader(message);
    for (WireField field; reader.next(field);) {
        if (field.number == kCharsmap) {
            field.expect(WireType::Bytes, "precompiled_charsmap");
            spec.charsmap = field.bytes;
        } else if (field.number == kAddPrefix) {
            field.expect(WireType::Varint, "add_dummy_prefix");
            spec.adds_prefix = field.value != 0;
        } else if (field.number == kRemoveSpaces) {
            field.expect(WireType::Varint, "remove_extra_whitespaces");
            spec.collapses_spaces = field.value != 0;
        }
    }
}

void check_nesting(std::vector<std::string_view> pieces) {
    std::sort(pieces.begin(), pieces.end());
    std::vector<std::string_view> open; // each begins with the one before it
    for (const std::string_view piece : pieces) {
        while (!open.empty() && !piece.starts_with(open.back())) {
            open.pop_back();
        }
        open.push_back(piece);
        if (open.size() > kMostNested) {
            throw BadModel("a user-defined piece begins with more than " +
                           std::to_string(kMostNested - 1) + " others");
        }
    }
}

} // namespace

ModelTraits check_model(std::string_view model) {
    Checked checked;
    WireReader reader(model);
    for (WireField field; reader.next(field);) {
        switch (field.number) {
        case kPiece:
            field.expect(WireType::Bytes, "a piece");
            check_piece(field.bytes, checked);
            break;
        case kTrainer:
            field.expect(WireType::Bytes, "trainer_spec");
            check_trainer(field.bytes, checked);
            break;
        case kNormalizer:
            field.expect(WireType::Bytes, "normalizer_spec");
            read_normalizer(field.bytes, checked.normalizer);
            break;
        case kDenormalizer:
            field.expect(WireType::Bytes, "denormalizer_spec");
            read_normalizer(field.bytes, checked.denormalizer);
            break;
        default:
            break;
        }
    }
    if (checked.unknown != 1) {
        throw BadModel("it has " + std::to_string(checked.unknown) +
                       " pieces for what is unknown, not one");
    }
    check_nesting(std::move(checked.user_defined));
    for (const NormalizerSpec* spec : {&checked.normalizer, &checked.denormalizer}) {
        if (!spec->charsmap.value_or("").empty()) {
            check_charsmap(*spec->charsmap);
        }
    }
    ModelTraits traits;
    traits.adds_prefix = checked.normalizer.adds_prefix.value_or(true);
    traits.collapses_spaces = checked.normalizer.collapses_spaces.value_or(true);
    traits.pieces_cross_words = checked.crosses || checked.space_is_suffix;
    return traits;
}

} // namespace bellows::text
