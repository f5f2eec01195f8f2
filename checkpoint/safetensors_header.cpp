// SPDX-License-Identifier: MIT
#include "safetensors_header.hpp"

#include <bellows/base/error.hpp>

#include <nlohmann/json.hpp>

#include <array>
#include <optional>
#include <set>

namespace bellows {

namespace {

using Json = nlohmann::json;

struct TypeInfo {
    const char* name;
    std::uint64_t bits;
};

constexpr std::array<TypeInfo, 22> kTypes = {
    {{"BOOL", 8},    {"U8", 8},          {"I8", 8},          {"F8_E4M3", 8}, {"F8_E5M2", 8},
     {"I16", 16},    {"U16", 16},        {"F16", 16},        {"BF16", 16},   {"I32", 32},
     {"U32", 32},    {"F32", 32},        {"I64", 64},        {"U64", 64},    {"F64", 64},
     {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"C64", 64},    {"F4", 4},
     {"F6_E2M3", 6}, {"F6_E3M2", 6}}};

std::optional<StoredType> parse_type(std::string_view text) {
    for (int i = 0; i <= static_cast<int>(StoredType::F6_E3M2); ++i) {
        const auto type = static_cast<StoredType>(i);
        if (text == to_string(type)) {
            return type;
        }
    }
    return std::nullopt;
}

/// Receives the parser's events. Depth 1 holds names, depth 2 a tensor's fields or metadata, the
/// arrays of shape and data_offsets lie at depth 3; anything else is refused where it stands.
class HeaderHandler : public nlohmann::json_sax<Json> {
public:
    HeaderHandler(SafetensorsHeader& out, const std::string& file) : out_(out), file_(file) {}

    bool start_object(std::size_t) override {
        if (depth_ == 2 || in_array_) {
            fail("holds an object where a value belongs");
        }
        if (++depth_ == 2) {
            fields_.clear();
            in_metadata_ = name_ == "__metadata__";
            if (!in_metadata_) {
                out_.tensors.emplace_back().name = name_;
            }
        }
        return true;
    }

    bool end_object() override {
        if (depth_ == 2 && !in_metadata_ && fields_.size() != 3) {
            fail("lacks one of dtype, shape and data_offsets");
        }
        --depth_;
        return true;
    }

    bool key(std::string& text) override {
        if (depth_ == 1) {
            name_ = text;
            if (!names_.insert(text).second) {
                fail("stands there twice");
            }
        } else if (field_ = text; !fields_.insert(text).second) {
            fail("has the key " + in_quotes(text) + " twice");
        }
        return true;
    }

    bool string(std::string& text) override {
        if (depth_ == 2 && in_metadata_ && !in_array_) {
            out_.metadata[field_] = text;
            return true;
        }
        if (depth_ != 2 || in_array_ || field_ != "dtype") {
            fail_value();
        }
        const std::optional<StoredType> type = parse_type(text);
        if (!type) {
            fail("has the unknown dtype " + in_quotes(text));
        }
        out_.tensors.back().type = *type;
        return true;
    }

    bool start_array(std::size_t) override {
        const bool expected = field_ == "shape" || field_ == "data_offsets";
        if (depth_ != 2 || in_metadata_ || in_array_ || !expected) {
            fail_value();
        }
        in_array_ = true;
        offsets_.clear();
        return true;
    }

    bool number_unsigned(number_unsigned_t value) override {
        constexpr std::size_t kMostDimensions = 64;
        if (!in_array_ || offsets_.size() == kMostDimensions) {
            fail_value();
        }
        offsets_.push_back(value);
        return true;
    }

    bool end_array() override {
        in_array_ = false;
        auto& tensor = out_.tensors.back();
        if (field_ == "shape") {
            tensor.shape = offsets_;
        } else if (offsets_.size() != 2) {
            fail("has " + std::to_string(offsets_.size()) + " data_offsets, not two");
        } else {
            tensor.begin = offsets_[0];
            tensor.end = offsets_[1];
        }
        return true;
    }

    bool null() override { return fail_value(); }
    bool boolean(bool) override { return fail_value(); }
    // Negative, fractional, and too large for 64 bits: none is a size.
    bool number_integer(number_integer_t) override { return fail_value(); }
    bool number_float(number_float_t, const string_t&) override { return fail_value(); }
    bool binary(binary_t&) override { return fail_value(); }

    bool parse_error(std::size_t at, const std::string&,
                     const nlohmann::detail::exception&) override {
        throw Error(ErrorCode::Corrupt,
                    file_ + ": the header is not JSON (byte " + std::to_string(at) + ")");
    }

private:
    [[noreturn]] void fail(const std::string& what) const {
        throw Error(ErrorCode::Corrupt,
                    file_ + ": the header's entry " + in_quotes(name_) + " " + what);
    }

    [[noreturn]] bool fail_value() const {
        if (depth_ < 2) {
            throw Error(ErrorCode::Corrupt, file_ + ": the header is not an object of tensors");
        }
        fail("has a value that does not belong under " + in_quotes(field_));
    }

    SafetensorsHeader& out_;
    const std::string& file_;
    int depth_ = 0;
    bool in_array_ = false;
    bool in_metadata_ = false;
    std::string name_;
    std::string field_;
    std::set<std::string> names_;
    std::set<std::string> fields_;
    std::vector<std::uint64_t> offsets_;
};

} // namespace

const char* to_string(StoredType type) noexcept {
    return kTypes[static_cast<std::size_t>(type)].name;
}

std::uint64_t bits_of(StoredType type) noexcept {
    return kTypes[static_cast<std::size_t>(type)].bits;
}

std::uint64_t bytes_of(const StoredTensor& tensor) {
    std::uint64_t bytes = 0;
    if (!checked_bytes_of(tensor, bytes)) {
        throw Error(ErrorCode::InvalidArgument,
                    "tensor " + in_quotes(tensor.name) +
                        " has no whole number of bytes, or more than 64 bits count");
    }
    return bytes;
}

bool checked_bytes_of(const StoredTensor& tensor, std::uint64_t& out) noexcept {
    constexpr std::uint64_t kByte = 8;
    out = bits_of(tensor.type);
    for (const std::uint64_t extent : tensor.shape) {
        if (__builtin_mul_overflow(out, extent, &out)) {
            return false;
        }
    }
    const bool whole = out % kByte == 0;
    out /= kByte;
    return whole;
}

SafetensorsHeader parse_safetensors_header(std::string_view text, const std::string& file) {
    if (text.empty() || text.front() != '{') {
        throw Error(ErrorCode::Corrupt, file + ": the header does not begin with '{'");
    }
    SafetensorsHeader header;
    HeaderHandler handler(header, file);
    Json::sax_parse(text, &handler);
    return header;
}

std::string format_safetensors_header(const SafetensorsHeader& header) {
    nlohmann::ordered_json json = nlohmann::ordered_json::object();
    if (!header.metadata.empty()) {
        json["__metadata__"] = header.metadata;
    }
    for (const SafetensorsHeader::Entry& tensor : header.tensors) {
        json[tensor.name] = {{"dtype", to_string(tensor.type)},
                             {"shape", tensor.shape},
                             {"data_offsets", {tensor.begin, tensor.end}}};
    }
    std::string text;
    try {
        text = json.dump();
    } catch (const Json::exception&) {
        throw Error(ErrorCode::InvalidArgument,
                    "a tensor's name or a metadata string is not UTF-8");
    }
    text.resize((text.size() + 7) / 8 * 8, ' ');
    return text;
}

} // namespace bellows
