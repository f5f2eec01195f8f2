// SPDX-License-Identifier: MIT
#include "sentence_pieces.hpp"

#include <bellows/base/error.hpp>

#include <sentencepiece_processor.h>

namespace bellows::text {

namespace {

/// Behind a model: its normalizer_spec.add_dummy_prefix, which replaces the one before.
std::string with_prefix(const std::string& model, bool prefix) {
    constexpr char kNormalizerSpec = 3 << 3 | 2, kAddDummyPrefix = 3 << 3;
    return model + std::string{kNormalizerSpec, 2, kAddDummyPrefix, prefix ? '\1' : '\0'};
}

} // namespace

SentencePieces::SentencePieces(const std::string& model) : traits_(check_model(model)) {
    for (const bool prefix : {false, true}) {
        auto pieces = std::make_unique<sentencepiece::SentencePieceProcessor>();
        const auto status = pieces->LoadFromSerializedProto(
            prefix == traits_.adds_prefix ? model : with_prefix(model, prefix));
        if (!status.ok()) {
            throw BadModel("the library says " + in_quotes(status.message()));
        }
        by_prefix_[prefix ? 1 : 0] = std::move(pieces);
    }
    const auto& pieces = *by_prefix_[0];
    vocabulary_ = static_cast<std::uint32_t>(pieces.GetPieceSize());
    // A model without an end-of-sentence piece separates documents by whatever it has.
    for (const int id : {pieces.eos_id(), pieces.bos_id(), pieces.unk_id()}) {
        if (id >= 0 && id < pieces.GetPieceSize()) {
            end_of_document_ = static_cast<std::uint32_t>(id);
            break;
        }
    }
    if (traits_.collapses_spaces) {
        std::vector<int> ids;
        for (const char c : std::string_view(" \t\n\v\f\r")) {
            encode({&c, 1}, true, ids);
            if (ids.empty()) {
                spaces_ += c;
            }
        }
    }
}

SentencePieces::~SentencePieces() = default;

std::optional<std::uint32_t> SentencePieces::bos() const {
    const int id = by_prefix_[0]->bos_id();
    return id >= 0 ? std::optional(static_cast<std::uint32_t>(id)) : std::nullopt;
}

std::optional<std::uint32_t> SentencePieces::pad() const {
    const int id = by_prefix_[0]->pad_id();
    return id >= 0 ? std::optional(static_cast<std::uint32_t>(id)) : std::nullopt;
}

std::optional<std::uint32_t> SentencePieces::id_of(std::string_view piece) const {
    const int id = by_prefix_[0]->PieceToId({piece.data(), piece.size()});
    const bool known = id >= 0 && static_cast<std::uint32_t>(id) < vocabulary_ &&
                       by_prefix_[0]->IdToPiece(id) == piece;
    return known ? std::optional(static_cast<std::uint32_t>(id)) : std::nullopt;
}

bool SentencePieces::is_control(std::uint32_t id) const {
    return by_prefix_[0]->IsControl(static_cast<int>(id));
}

std::string SentencePieces::piece(std::uint32_t id) const {
    return by_prefix_[0]->IdToPiece(static_cast<int>(id));
}

bool SentencePieces::is_space(int byte) const noexcept {
    return byte >= 0 && spaces_.find(static_cast<char>(byte)) != std::string::npos;
}

bool SentencePieces::wants_prefix(int before, std::string_view segment) const noexcept {
    if (before < 0) {
        return traits_.adds_prefix;
    }
    // A space that the library strips off the segment or the one before it stands for the prefix.
    return traits_.collapses_spaces &&
           (is_space(before) ||
            (!segment.empty() && is_space(static_cast<unsigned char>(segment.front()))));
}

void SentencePieces::encode(std::string_view segment, bool prefix, std::vector<int>& ids) const {
    ids.clear();
    const auto status = by_prefix_[prefix ? 1 : 0]->Encode({segment.data(), segment.size()}, &ids);
    if (!status.ok()) {
        throw Error(ErrorCode::InvalidArgument,
                    "the tokenizer cannot encode the text: " + std::string(status.message()));
    }
}

std::string SentencePieces::decode(const std::vector<int>& ids) const {
    std::string text;
    const auto status = by_prefix_[traits_.adds_prefix ? 1 : 0]->Decode(ids, &text);
    if (!status.ok()) {
        throw Error(ErrorCode::InvalidArgument,
                    "the tokenizer cannot decode the tokens: " + std::string(status.message()));
    }
    return text;
}

} // namespace bellows::text
