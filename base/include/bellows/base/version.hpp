// SPDX-License-Identifier: MIT
#pragma once

namespace bellows {

/// Of the command and of what it writes into reports.
inline constexpr const char* kVersion = "0.1.0";

} // namespace bellows
