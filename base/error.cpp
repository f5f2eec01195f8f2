// SPDX-License-Identifier: MIT
#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>

#include <utility>

namespace bellows {

const char* to_string(ErrorCode code) noexcept {
    switch (code) {
    case ErrorCode::InvalidArgument:
        return "InvalidArgument";
    case ErrorCode::Io:
        return "Io";
    case ErrorCode::Corrupt:
        return "Corrupt";
    case ErrorCode::Unsupported:
        return "Unsupported";
    case ErrorCode::OutOfMemory:
        return "OutOfMemory";
    case ErrorCode::DeviceLost:
        return "DeviceLost";
    case ErrorCode::Vulkan:
        return "Vulkan";
    case ErrorCode::Mpi:
        return "Mpi";
    case ErrorCode::Timeout:
        return "Timeout";
    case ErrorCode::PeerLost:
        return "PeerLost";
    case ErrorCode::Diverged:
        return "Diverged";
    case ErrorCode::Aborted:
        return "Aborted";
    case ErrorCode::Internal:
        return "Internal";
    }
    return "unknown";
}

Error::Error(ErrorCode code, std::string message, int rank, std::int64_t detail)
    : code_(code), rank_(rank), detail_(detail), message_(std::move(message)) {
}

std::string in_quotes(std::string_view text) {
    constexpr std::size_t kLongest = 120;
    return '"' + bounded(text, kLongest) + '"';
}

} // namespace bellows
