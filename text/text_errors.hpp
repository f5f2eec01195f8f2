// SPDX-License-Identifier: MIT
#pragma once

#include <bellows/text/text_files.hpp>

#include <bellows/base/error.hpp>

#include <cstdint>
#include <string>

namespace bellows::text {

[[noreturn]] inline void throw_no_text(const TextFiles& text, std::uint64_t skipped) {
    throw Error(ErrorCode::InvalidArgument,
                "no text in " + text.named + " (" + std::to_string(skipped) +
                    " files skipped as empty, binary, hidden or links)");
}

} // namespace bellows::text
