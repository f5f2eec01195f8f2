// SPDX-License-Identifier: MIT
#pragma once

// The checks that a sentencepiece model must pass before the library sees it: the library trusts
// its models and reads out of bounds where they are broken. Pure, any thread.

#include "wire_reader.hpp"

#include <cstdint>
#include <string_view>

namespace bellows::text {

/// What a model's own settings mean for cutting a text into parts.
struct ModelTraits {
    bool adds_prefix = true;        ///< a space before the text (add_dummy_prefix)
    bool collapses_spaces = true;   ///< and strips them at both ends (remove_extra_whitespaces)
    bool pieces_cross_words = true; ///< a piece has a space behind another character
};

/// The sentencepiece sign for a space, U+2581.
inline constexpr std::string_view kSpaceSign = "\xe2\x96\x81";

/// model: the whole file. Throws BadModel that says what is wrong.
ModelTraits check_model(std::string_view model);

/// The table of a normaliser (precompiled_charsmap): a double-array trie whose every walk stays
/// inside, and normalised strings that end inside. Throws BadModel.
void check_charsmap(std::string_view charsmap);

} // namespace bellows::text
