// SPDX-License-Identifier: MIT
#pragma once

// Where a text is cut into segments, which are encoded one by one. A segment ends
//   * behind a line's newline and the newlines that follow it,
//   * with Cut::Words also in front of a space that stands behind another character,
//   * after kLongestSegment bytes at the latest: of a longer line in front of a space in its second
//     half, if there is one, else between two characters.
// Cuts depend on the text behind the last cut alone. With Cut::LineStarts there are no segments: a
// document is encoded as a whole, or block by block. Pure, any thread.

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace bellows::text {

inline constexpr std::size_t kLongestSegment = std::size_t{16} << 10;

enum class Cut : std::uint8_t { Lines, Words, LineStarts };

/// Where the segment ends that begins at `from`, a cut, which must lie inside the text.
std::size_t segment_end(std::string_view text, std::size_t from, Cut cut) noexcept;

/// A cut at `least` bytes or behind it, for blocks of about that size. text: a document from a cut
/// on. `whole`: the document ends with the text. Otherwise text holds at least `least` +
/// kLongestBlockTail bytes, and nothing behind these counts. With Cut::LineStarts it is the
/// beginning of a line that begins with no white space, else the space before a word, where the
/// expressions of byte-level tokenizers cut whatever stands around; else any character.
inline constexpr std::size_t kLongestBlockTail = 4 * kLongestSegment;
std::size_t block_end(std::string_view text, std::size_t least, bool whole, Cut cut) noexcept;

} // namespace bellows::text
