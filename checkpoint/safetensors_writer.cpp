// SPDX-License-Identifier: MIT
#include "base/records/checksum.hpp"
#include "safetensors_header.hpp"

#include <bellows/base/error.hpp>
#include <bellows/checkpoint/safetensors.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <limits>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

namespace bellows {

static_assert(std::endian::native == std::endian::little, "tensor bytes are stored as they lie");

namespace {

std::array<unsigned char, kLengthBytes> length_bytes(std::uint64_t value) {
    std::array<unsigned char, kLengthBytes> out{};
    for (unsigned char& byte : out) {
        byte = static_cast<unsigned char>(value);
        value >>= 8;
    }
    return out;
}

/// Takes the room at once, so that a full disk shows before the first byte. Where the file system
/// cannot (EOPNOTSUPP), the writes will tell.
void reserve(int fd, std::uint64_t bytes, const std::filesystem::path& path) {
    if (bytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(path.string()) + " would hold " + std::to_string(bytes) + " bytes");
    }
    while (::fallocate(fd, 0, 0, static_cast<off_t>(bytes)) != 0) {
        if (errno == EOPNOTSUPP || errno == ENOSYS) {
            return;
        }
        if (errno != EINTR) {
            throw Error(
                ErrorCode::Io,
                errno_message("reserve " + std::to_string(bytes) + " bytes for", path, errno));
        }
    }
}

} // namespace

SafetensorsWriter::SafetensorsWriter(std::filesystem::path path, std::vector<StoredTensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(std::move(path)), tensors_(std::move(tensors)), metadata_(metadata),
      checksums_(tensors_.size(), 0), pieces_(tensors_.size()) {
    std::uint64_t total = 0;
    for (const StoredTensor& tensor : tensors_) {
        begins_.push_back(total);
        if (tensor.name == "__metadata__" ||
            !index_.emplace(tensor.name, begins_.size() - 1).second) {
            throw Error(ErrorCode::InvalidArgument,
                        "two tensors are named " + in_quotes(tensor.name));
        }
        if (__builtin_add_overflow(total, bytes_of(tensor), &total)) {
            throw Error(ErrorCode::InvalidArgument, "the tensors' bytes leave 64 bits");
        }
    }
    for (const auto& [key, value] : metadata_) {
        if (key.starts_with("bellows.")) {
            throw Error(ErrorCode::InvalidArgument,
                        "the metadata key " + in_quotes(key) + " is reserved");
        }
    }
    const std::string header = header_text();
    if (header.size() > kLargestHeader) {
        throw Error(ErrorCode::InvalidArgument,
                    "the header would hold " + std::to_string(header.size()) +
                        " bytes, more than " + std::to_string(kLargestHeader));
    }
    file_ = FileHandle(::open(path_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (file_.get() < 0) {
        throw Error(ErrorCode::Io, errno_message("create", path_, errno));
    }
    header_bytes_ = kLengthBytes + header.size();
    try {
        reserve(file_.get(), header_bytes_ + total, path_);
        write_all(file_.get(), length_bytes(header.size()).data(), kLengthBytes, path_);
        write_all(file_.get(), header.data(), header.size(), path_);
    } catch (...) {
        ::unlink(path_.c_str());
        throw;
    }
    skip_empty_tensors();
}

SafetensorsWriter::~SafetensorsWriter() {
    if (!finished_) {
        ::unlink(path_.c_str());
    }
}

std::string SafetensorsWriter::header_text() const {
    SafetensorsHeader header;
    header.metadata = metadata_;
    std::uint64_t at = 0;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        auto& entry = header.tensors.emplace_back();
        static_cast<StoredTensor&>(entry) = tensors_[i];
        entry.begin = at;
        entry.end = at += bytes_of(tensors_[i]);
        header.metadata[std::string(kTensorChecksumPrefix) + entry.name] = hex32(checksums_[i]);
    }
    // The sum covers the header with zeros in its own place; both texts have the same length.
    std::string& own = header.metadata[std::string(kHeaderChecksumKey)];
    own = hex32(0);
    std::string text = format_safetensors_header(header);
    own = hex32(crc32_of(text.data(), text.size()));
    return format_safetensors_header(header);
}

void SafetensorsWriter::skip_empty_tensors() {
    while (current_ < tensors_.size() && bytes_of(tensors_[current_]) == written_) {
        ++current_;
        written_ = 0;
    }
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes) {
    if (bytes.empty()) {
        return;
    }
    if (current_ == tensors_.size() || tensors_[current_].name != name) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(path_.string()) + ": got bytes of tensor " + in_quotes(name) +
                        (current_ == tensors_.size()
                             ? " after the last"
                             : " while " + in_quotes(tensors_[current_].name) + " is due"));
    }
    const std::uint64_t left = bytes_of(tensors_[current_]) - written_;
    if (bytes.size() > left) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(path_.string()) + ": tensor " + in_quotes(name) + " lacks " +
                        std::to_string(left) + " bytes and got " + std::to_string(bytes.size()));
    }
    write_piece(name, written_, bytes);
    written_ += bytes.size();
    skip_empty_tensors();
}

void SafetensorsWriter::write_piece(std::string_view name, std::uint64_t at,
                                    std::span<const std::byte> bytes) {
    const auto found = index_.find(name);
    if (found == index_.end()) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(path_.string()) + " has no tensor " + in_quotes(name));
    }
    const std::size_t tensor = found->second;
    const std::uint64_t size = bytes_of(tensors_[tensor]);
    if (at > size || bytes.size() > size - at) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(path_.string()) + ": tensor " + in_quotes(name) + " has " +
                        std::to_string(size) + " bytes and got " + std::to_string(bytes.size()) +
                        " from " + std::to_string(at) + " on");
    }
    if (bytes.empty()) {
        return;
    }
    write_at(file_.get(), bytes.data(), bytes.size(), header_bytes_ + begins_[tensor] + at, path_);
    const Piece piece{at, bytes.size(), crc32_of(bytes.data(), bytes.size())};
    const std::lock_guard lock(mutex_);
    pieces_[tensor].push_back(piece);
}

std::uint32_t SafetensorsWriter::joined_checksum(std::size_t tensor) {
    std::vector<Piece>& pieces = pieces_[tensor];
    std::ranges::sort(pieces, {}, &Piece::at);
    std::uint64_t end = 0;
    std::uint32_t sum = 0;
    bool whole = true;
    for (const Piece& piece : pieces) {
        whole = whole && piece.at == end;
        end += piece.bytes;
        sum = crc32_joined(sum, piece.checksum, piece.bytes);
    }
    const std::uint64_t size = bytes_of(tensors_[tensor]);
    if (!whole || end != size) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(path_.string()) + ": tensor " + in_quotes(tensors_[tensor].name) +
                        (end < size ? " is incomplete, " : " got bytes twice, ") +
                        std::to_string(end) + " of " + std::to_string(size) + " bytes");
    }
    return sum;
}

void SafetensorsWriter::finish() {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
        checksums_[i] = joined_checksum(i);
    }
    const std::string header = header_text();
    write_at(file_.get(), header.data(), header.size(), kLengthBytes, path_);
    if (::fsync(file_.get()) != 0 || ::close(file_.release()) != 0) {
        throw Error(ErrorCode::Io, errno_message("write", path_, errno));
    }
    finished_ = true;
}

} // namespace bellows
