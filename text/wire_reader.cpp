// SPDX-License-Identifier: MIT
#include "wire_reader.hpp"

namespace bellows::text {

void WireField::expect(WireType expected, const char* what) const {
    if (type != expected) {
        throw BadModel(std::string(what) + " has the wrong type");
    }
}

bool WireReader::next(WireField& field) {
    constexpr std::uint64_t kLargestNumber = (std::uint64_t{1} << 29) - 1;
    if (rest_.empty()) {
        return false;
    }
    const std::uint64_t key = varint();
    field = {};
    field.number = key >> 3;
    if (field.number == 0 || field.number > kLargestNumber) {
        throw BadModel("a field has the impossible number " + std::to_string(field.number));
    }
    switch (key & 7) {
    case 0:
        field.type = WireType::Varint;
        field.value = varint();
        return true;
    case 1:
        field.type = WireType::Fixed64;
        field.value = fixed(8);
        return true;
    case 2:
        field.type = WireType::Bytes;
        field.bytes = take(varint());
        return true;
    case 5:
        field.type = WireType::Fixed32;
        field.value = fixed(4);
        return true;
    default:
        throw BadModel("a field has the unknown wire type " + std::to_string(key & 7));
    }
}

std::uint64_t WireReader::varint() {
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        const auto byte = static_cast<unsigned char>(take(1).front());
        value |= std::uint64_t{byte & 0x7fu} << shift;
        if (byte < 0x80) {
            if (shift == 63 && byte > 1) {
                break;
            }
            return value;
        }
    }
    throw BadModel("a number has more than 64 bits");
}

std::uint64_t WireReader::fixed(std::size_t bytes) {
    const std::string_view taken = take(bytes);
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes; ++i) {
        value |= std::uint64_t{static_cast<unsigned char>(taken[i])} << (8 * i);
    }
    return value;
}

std::string_view WireReader::take(std::uint64_t bytes) {
    if (bytes > rest_.size()) {
        throw BadModel("it is cut off: " + std::to_string(bytes) + " bytes are announced, " +
                       std::to_string(rest_.size()) + " are left");
    }
    const std::string_view taken = rest_.substr(0, bytes);
    rest_.remove_prefix(bytes);
    return taken;
}

} // namespace bellows::text
