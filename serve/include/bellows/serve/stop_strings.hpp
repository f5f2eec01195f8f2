// SPDX-License-Identifier: MIT
#pragma once

// The text of an answer whose tokens come one by one: what may be shown, and whether a stop string
// has ended it. The result is the same however the text is split into tokens. One thread at a time.

#include <bellows/text/stream_decoder.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows {

class AnswerText {
public:
    /// The tokenizer must outlive it. stop: as Request::stop. special_tokens: they give text, too.
    AnswerText(const Tokenizer& tokenizer, std::vector<std::string> stop,
               bool special_tokens = false);

    /// The text, complete UTF-8, that the tokens add to what may be shown. Characters that are not
    /// complete and text that may be the beginning of a stop string are held back. When a stop
    /// string is complete, the text before it is shown and the answer has ended: of those that are
    /// complete at the same byte, the longest counts. Ids outside the vocabulary give
    /// Error{InvalidArgument}.
    std::string add(std::span<const std::uint32_t> ids);
    /// The answer ends without a stop string: what was held back, with U+FFFD for a character that
    /// is not complete.
    std::string finish();

    /// Whether a stop string is complete. Then nothing more is shown.
    bool stopped() const noexcept { return stopped_; }
    /// The stop string that ended the answer, or "".
    const std::string& stop() const noexcept { return stop_; }

private:
    std::string pass(const std::string& text);
    bool may_begin_stop(std::string_view text) const noexcept;

    StreamDecoder decoder_;
    std::vector<std::string> stops_;
    std::string held_; ///< the longest end of the text that begins a stop string
    std::string stop_;
    bool stopped_ = false;
};

} // namespace bellows
