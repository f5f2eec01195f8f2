// SPDX-License-Identifier: MIT
#include <bellows/base/error.hpp>

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
    constexpr const char* kHex = "0123456789abcdef";
    std::string out = "\"";
    for (const char c : text.substr(0, kLongest)) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7f) {
            out += "\\x";
            out += kHex[byte >> 4];
            out += kHex[byte & 15];
        } else {
            out += c;
        }
    }
    return out + (text.size() > kLongest ? "…\"" : "\"");
}

} // namespace bellows
