// SPDX-License-Identifier: MIT
#pragma once

// What the positions of sequences take in and predict. A line is a sequence with the token behind
// it, so it has one token more than positions. All functions are pure.

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

/// Sequences that stand behind each other.
struct TokenLines {
    std::vector<std::uint32_t> tokens; ///< [sequences, seq + 1]
    std::uint64_t seq = 0;
    /// Sequences from this one on only fill up what is computed: they predict nothing.
    std::uint64_t with_targets = std::numeric_limits<std::uint64_t>::max();
    /// The token that ends a document, where attention stays within documents.
    std::optional<std::uint32_t> end_of_document{};

    std::uint64_t sequences() const noexcept { return tokens.size() / (seq + 1); }
    std::span<const std::uint32_t> line(std::uint64_t sequence) const {
        return std::span(tokens).subspan(sequence * (seq + 1), seq + 1);
    }
};

/// Returns for each position the token that stands `ahead` of it, [sequences, seq]; where the line
/// ends before, its last.
std::vector<std::uint32_t> tokens_ahead(const TokenLines& lines, std::uint64_t ahead);

/// Returns for each position the token that it predicts, [sequences, seq]: the next one, and MTP
/// module k, from 0, the one k + 1 behind that. ops::kIgnoreTarget: none, as the line ends before,
/// or, of a module, as a document ends before the position that the module takes in.
std::vector<std::uint32_t> targets_of_model(const TokenLines& lines);
std::vector<std::uint32_t> targets_of_module(const TokenLines& lines, std::uint64_t module);
/// Returns how many positions of a line have such a target.
std::uint64_t predicted_by_module(std::span<const std::uint32_t> line, std::uint64_t module,
                                  std::optional<std::uint32_t> end_of_document);

} // namespace bellows
