// SPDX-License-Identifier: MIT
#pragma once

// Reads the fields of a protobuf message from untrusted bytes, strictly: what is cut off, has an
// impossible number or a wire type that no present version writes is refused. Pure, any thread.

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace bellows::text {

/// Why a model file is refused.
class BadModel : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

enum class WireType : std::uint8_t { Varint = 0, Fixed64 = 1, Bytes = 2, Fixed32 = 5 };

struct WireField {
    std::uint64_t number = 0;
    WireType type = WireType::Varint;
    std::uint64_t value = 0; ///< of a varint or fixed field
    std::string_view bytes;  ///< of a field of bytes: text or a message

    /// Throws BadModel unless the field has the type that `what` must have.
    void expect(WireType expected, const char* what) const;
};

class WireReader {
public:
    explicit WireReader(std::string_view message) : rest_(message) {}
    /// The next field; false at the end. Throws BadModel.
    bool next(WireField& field);

private:
    std::uint64_t varint();
    std::uint64_t fixed(std::size_t bytes);
    std::string_view take(std::uint64_t bytes);

    std::string_view rest_;
};

} // namespace bellows::text
