// SPDX-License-Identifier: MIT
#pragma once

// The one exception type of the library. Every failure that a caller can meet is an `Error`; the
// library never prints, aborts or exits. Messages carry the values and the way out.

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>

namespace bellows {

enum class ErrorCode {
    InvalidArgument, ///< the caller's values do not fit together; nothing was changed
    Io,              ///< a file or socket could not be read or written
    Corrupt,         ///< a file's content contradicts itself
    Unsupported,     ///< this device, driver or build lacks something; the message says what
    OutOfMemory,     ///< host or device memory; the message says how much was asked for
    DeviceLost,      ///< the Vulkan device is gone
    Vulkan,          ///< any other failed Vulkan call; detail() is its VkResult
    Mpi,             ///< a failed MPI call; detail() is its error code
    Timeout,         ///< a bounded wait ran out
    PeerLost,        ///< another rank died or left; rank() names it
    Diverged,        ///< the numbers of a training run are not finite any more
    Aborted,         ///< released because something else had failed or the run was ended
    Internal,        ///< a broken invariant: a bug in Bellows
};

/// The code's name as it stands in the enum, e.g. "PeerLost".
const char* to_string(ErrorCode code) noexcept;

class Error : public std::exception {
public:
    /// rank: the rank that the error is about (the lost peer, say), or -1.
    /// detail: the VkResult or MPI error code behind it, or 0.
    Error(ErrorCode code, std::string message, int rank = -1, std::int64_t detail = 0);

    ErrorCode code() const noexcept { return code_; }
    int rank() const noexcept { return rank_; }
    std::int64_t detail() const noexcept { return detail_; }
    const std::string& message() const noexcept { return message_; }
    const char* what() const noexcept override { return message_.c_str(); }

private:
    ErrorCode code_;
    int rank_;
    std::int64_t detail_;
    std::string message_;
};

/// An untrusted text for a message: in double quotes on one line, control characters as \xNN, cut
/// after 120 bytes.
std::string in_quotes(std::string_view text);

} // namespace bellows
