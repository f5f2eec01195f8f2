// SPDX-License-Identifier: MIT
#include "base/records/checksum.hpp"
#include "safetensors_header.hpp"

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/safetensors.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace bellows {

SafetensorsReader::SafetensorsReader(std::filesystem::path path) : path_(std::move(path)) {
    const std::string file = in_quotes(path_.string());
    file_ = FileHandle(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat info{};
    if (file_.get() < 0 || ::fstat(file_.get(), &info) != 0) {
        throw Error(ErrorCode::Io, errno_message("open", path_, errno));
    }
    if (!S_ISREG(info.st_mode)) {
        throw Error(ErrorCode::Io, file + " is not a regular file");
    }
    file_bytes_ = static_cast<std::uint64_t>(info.st_size);
    if (file_bytes_ < kLengthBytes) {
        throw Error(ErrorCode::Corrupt, file + " holds " + std::to_string(file_bytes_) +
                                            " bytes, too few for a safetensors file");
    }
    const std::string header = read_header();
    place_tensors(header);
    take_checksums(header);
}

std::string SafetensorsReader::read_header() const {
    const std::string file = in_quotes(path_.string());
    std::array<unsigned char, kLengthBytes> raw{};
    read_exactly(file_.get(), raw.data(), raw.size(), 0, path_);
    std::uint64_t header_bytes = 0;
    for (std::size_t i = raw.size(); i-- > 0;) {
        header_bytes = header_bytes << 8 | raw[i];
    }
    if (header_bytes > kLargestHeader || header_bytes > file_bytes_ - kLengthBytes) {
        throw Error(ErrorCode::Corrupt, file + " claims a header of " +
                                            std::to_string(header_bytes) + " bytes in a file of " +
                                            std::to_string(file_bytes_));
    }
    std::string text(header_bytes, '\0');
    read_exactly(file_.get(), text.data(), text.size(), kLengthBytes, path_);
    return text;
}

void SafetensorsReader::place_tensors(std::string_view text) {
    const std::string file = in_quotes(path_.string());
    SafetensorsHeader header = parse_safetensors_header(text, file);

    std::sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    const std::uint64_t data = kLengthBytes + text.size();
    std::uint64_t expected = 0;
    for (SafetensorsHeader::Entry& entry : header.tensors) {
        const std::string which = file + ": tensor " + in_quotes(entry.name);
        std::uint64_t bytes = 0;
        if (!checked_bytes_of(entry, bytes)) {
            throw Error(ErrorCode::Corrupt,
                        which + " has no whole number of bytes, or more than 64 bits count");
        }
        if (entry.begin != expected || entry.end < entry.begin ||
            entry.end - entry.begin != bytes) {
            throw Error(ErrorCode::Corrupt, which + " stands at [" + std::to_string(entry.begin) +
                                                ", " + std::to_string(entry.end) +
                                                "); its shape needs " + std::to_string(bytes) +
                                                " bytes and it should begin at " +
                                                std::to_string(expected));
        }
        if (entry.end > file_bytes_ - data) {
            throw Error(ErrorCode::Corrupt, which + " ends at " + std::to_string(entry.end) +
                                                ", behind the file's " +
                                                std::to_string(file_bytes_ - data) +
                                                " bytes of data: the file is truncated");
        }
        expected = entry.end;
        index_.emplace(entry.name, tensors_.size());
        Tensor& tensor = tensors_.emplace_back();
        static_cast<StoredTensor&>(tensor) = std::move(static_cast<StoredTensor&>(entry));
        tensor.offset = data + entry.begin;
        tensor.bytes = bytes;
    }
    if (expected != file_bytes_ - data) {
        throw Error(ErrorCode::Corrupt, file + " has " +
                                            std::to_string(file_bytes_ - data - expected) +
                                            " bytes behind its last tensor");
    }
    metadata_ = std::move(header.metadata);
}

void SafetensorsReader::take_checksums(std::string_view header) {
    const std::string file = in_quotes(path_.string());
    const auto parse = [&](const std::string& key, const std::string& hex) {
        std::uint32_t value = 0;
        const auto [end, error] = std::from_chars(hex.data(), hex.data() + hex.size(), value, 16);
        if (error != std::errc() || end != hex.data() + hex.size() || hex32(value) != hex) {
            throw Error(ErrorCode::Corrupt,
                        file + ": " + in_quotes(key) + " is no check sum: " + in_quotes(hex));
        }
        return value;
    };
    header_checksum_ = crc32_of(header.data(), header.size());
    for (const auto& [key, value] : metadata_) {
        if (key.starts_with(kTensorChecksumPrefix)) {
            checksums_[key.substr(kTensorChecksumPrefix.size())] = parse(key, value);
        }
    }
    const auto own = metadata_.find(std::string(kHeaderChecksumKey));
    if (own != metadata_.end()) {
        const std::uint32_t claimed = parse(own->first, own->second);
        // A name or value cannot contain this text: its quotes would be escaped.
        const std::string entry = "\"" + own->first + "\":\"";
        std::string zeroed(header);
        const std::size_t at = zeroed.find(entry);
        if (at != std::string::npos) {
            zeroed.replace(at + entry.size(), own->second.size(), hex32(0));
        }
        if (crc32_of(zeroed.data(), zeroed.size()) != claimed) {
            throw Error(ErrorCode::Corrupt, file + ": the header does not fit its check sum: the "
                                                   "file was damaged or changed");
        }
        has_checksums_ = std::all_of(tensors_.begin(), tensors_.end(), [&](const Tensor& tensor) {
            return checksums_.contains(tensor.name);
        });
    }
    std::erase_if(metadata_, [](const auto& item) { return item.first.starts_with("bellows."); });
}

const SafetensorsReader::Tensor* SafetensorsReader::find(std::string_view name) const noexcept {
    const auto at = index_.find(name);
    return at == index_.end() ? nullptr : &tensors_[at->second];
}

const SafetensorsReader::Tensor& SafetensorsReader::require(std::string_view name) const {
    if (const Tensor* tensor = find(name)) {
        return *tensor;
    }
    throw Error(ErrorCode::InvalidArgument,
                in_quotes(path_.string()) + " holds no tensor " + in_quotes(name));
}

void SafetensorsReader::check_sum(const Tensor& tensor, std::uint32_t sum) const {
    const auto claimed = checksums_.find(tensor.name);
    if (claimed != checksums_.end() && claimed->second != sum) {
        throw Error(ErrorCode::Corrupt, in_quotes(path_.string()) + ": tensor " +
                                            in_quotes(tensor.name) + " has check sum " +
                                            hex32(sum) + ", not " + hex32(claimed->second) +
                                            ": the file was damaged or changed");
    }
}

void SafetensorsReader::read(std::string_view name, std::span<std::byte> out) const {
    const Tensor& tensor = require(name);
    if (out.size() != tensor.bytes) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(path_.string()) + ": tensor " + in_quotes(name) + " has " +
                        std::to_string(tensor.bytes) + " bytes, not " + std::to_string(out.size()));
    }
    read_exactly(file_.get(), out.data(), out.size(), tensor.offset, path_);
    check_sum(tensor, crc32_of(out.data(), out.size()));
}

void SafetensorsReader::read(std::string_view name, std::uint64_t piece_bytes,
                             const Sink& sink) const {
    const Tensor& tensor = require(name);
    if (piece_bytes == 0) {
        throw Error(ErrorCode::InvalidArgument, "a piece must have at least one byte");
    }
    std::vector<std::byte> piece(std::min(piece_bytes, tensor.bytes));
    std::uint32_t sum = 0;
    for (std::uint64_t at = 0; at < tensor.bytes;) {
        const std::uint64_t bytes = std::min(piece_bytes, tensor.bytes - at);
        read_exactly(file_.get(), piece.data(), bytes, tensor.offset + at, path_);
        sum = crc32_of(piece.data(), bytes, sum);
        sink(at, {piece.data(), bytes});
        at += bytes;
    }
    check_sum(tensor, sum);
}

void SafetensorsReader::verify() const {
    constexpr std::uint64_t kPiece = std::uint64_t{4} << 20;
    for (const Tensor& tensor : tensors_) {
        read(tensor.name, kPiece, [](std::uint64_t, std::span<const std::byte>) {});
    }
}

} // namespace bellows
