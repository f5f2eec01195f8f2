// SPDX-License-Identifier: MIT
#pragma once

// Where the documents of a micro-batch begin and end. Pure functions.

#include <cstdint>
#include <span>
#include <vector>

namespace bellows {

/// Returns for each token the first token of its document in its sequence and the one behind its
/// last, counted from the sequence's first: [tokens, 2], as ops::AttentionOptions::documents. A
/// document ends with `end_of_document` or with its sequence; what a cut between sequences leaves
/// of a document is a document. seq divides the number of tokens.
std::vector<std::uint32_t> documents_of(std::span<const std::uint32_t> tokens, std::uint64_t seq,
                                        std::uint32_t end_of_document);

/// Returns how many keys the tokens see together: of each those of its document up to itself.
std::uint64_t visible_keys(std::span<const std::uint32_t> documents) noexcept;

} // namespace bellows
