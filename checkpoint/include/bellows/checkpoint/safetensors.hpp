// SPDX-License-Identifier: MIT
#pragma once

// The safetensors file format: 8 bytes of header length, a JSON header, the tensors' bytes without
// gaps (https://github.com/huggingface/safetensors). Written and read in a stream, with 64-bit
// sizes; files are hostile input. What we write also carries CRC-32 sums in `__metadata__`
// ("bellows.crc32.<tensor>" and "bellows.header_crc32", the header's own with that value as zeros),
// which other readers ignore. Host only; one object belongs to one thread, but for what says
// otherwise.

#include <bellows/base/files.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

enum class StoredType : std::uint8_t {
    BOOL,
    U8,
    I8,
    F8_E4M3,
    F8_E5M2,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    I64,
    U64,
    F64,
    F8_E8M0,
    F8_E4M3FNUZ,
    F8_E5M2FNUZ,
    C64,
    F4, ///< from here on several elements share a byte
    F6_E2M3,
    F6_E3M2
};

/// The name in the file, e.g. "BF16".
const char* to_string(StoredType type) noexcept;
/// Of one element.
std::uint64_t bits_of(StoredType type) noexcept;

struct StoredTensor {
    std::string name;
    StoredType type = StoredType::F32;
    std::vector<std::uint64_t> shape; ///< row-major; empty: a scalar
};

/// shape × size of the type. Throws Error{InvalidArgument} if that is no whole number, or its bits
/// leave 64 bits.
std::uint64_t bytes_of(const StoredTensor& tensor);

/// Writes one file, front to back or piece by piece. Until finish() has returned the file is not
/// valid, and the destructor removes it.
class SafetensorsWriter {
public:
    /// Creates (or replaces) the file and reserves its room on the disk. Throws Error{Io},
    /// Error{InvalidArgument} for names used twice or keys that begin with "bellows.".
    SafetensorsWriter(std::filesystem::path path, std::vector<StoredTensor> tensors,
                      const std::map<std::string, std::string>& metadata = {});
    SafetensorsWriter(const SafetensorsWriter&) = delete;
    SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;
    ~SafetensorsWriter();

    /// The next bytes of `name`, little-endian. Tensors come in the order given, each in as many
    /// pieces as the caller likes. Throws Error{InvalidArgument} out of order, Error{Io}.
    void write(std::string_view name, std::span<const std::byte> bytes);
    /// Bytes of `name` from its byte `at` on, in any order, each once; from any thread, several at
    /// once. Throws Error{InvalidArgument} for an unknown name or bytes outside the tensor,
    /// Error{Io}.
    void write_piece(std::string_view name, std::uint64_t at, std::span<const std::byte> bytes);
    /// Writes the check sums and waits for the disk. Throws Error{InvalidArgument} if bytes are
    /// missing or came twice, Error{Io}.
    void finish();

private:
    /// What has been written of a tensor.
    struct Piece {
        std::uint64_t at = 0, bytes = 0;
        std::uint32_t checksum = 0;
    };

    void skip_empty_tensors();
    std::uint32_t joined_checksum(std::size_t tensor);
    std::string header_text() const;

    std::filesystem::path path_;
    std::vector<StoredTensor> tensors_;
    std::map<std::string_view, std::size_t> index_; ///< tensors by name
    std::vector<std::uint64_t> begins_;             ///< of tensors, behind the header
    std::map<std::string, std::string> metadata_;
    std::vector<std::uint32_t> checksums_;
    FileHandle file_;
    std::mutex mutex_;                       ///< of pieces_
    std::vector<std::vector<Piece>> pieces_; ///< by tensor
    std::size_t current_ = 0;                // tensor being written
    std::uint64_t written_ = 0;              // of its bytes
    std::uint64_t header_bytes_ = 0;
    bool finished_ = false;
};

/// Reads one file. Every number of the header has been checked against the file after
/// construction; tensor bytes are checked against their sums as they are read.
class SafetensorsReader {
public:
    struct Tensor : StoredTensor {
        std::uint64_t offset = 0; ///< of its first byte in the file
        std::uint64_t bytes = 0;
    };
    using Sink = std::function<void(std::uint64_t offset, std::span<const std::byte> bytes)>;

    /// Throws Error{Io} if the file cannot be read, Error{Corrupt} if it contradicts itself.
    explicit SafetensorsReader(std::filesystem::path path);

    const std::filesystem::path& path() const noexcept { return path_; }
    /// In the order of their bytes in the file.
    const std::vector<Tensor>& tensors() const noexcept { return tensors_; }
    /// Null if there is none of that name.
    const Tensor* find(std::string_view name) const noexcept;
    /// Without our own keys.
    const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
    std::uint64_t file_bytes() const noexcept { return file_bytes_; }
    /// True if the header and every tensor have a check sum. Such a header has been verified.
    bool has_checksums() const noexcept { return has_checksums_; }
    /// CRC-32 of the header: with has_checksums() it pins every byte of the file.
    std::uint32_t header_checksum() const noexcept { return header_checksum_; }

    /// The whole tensor; out.size() must be its bytes (else Error{InvalidArgument}). Throws
    /// Error{Corrupt} if the sum does not fit, Error{InvalidArgument} for an unknown name.
    void read(std::string_view name, std::span<std::byte> out) const;
    /// The same in pieces of at most `piece_bytes`. The sink has seen all bytes when a wrong sum
    /// throws: use nothing of it then.
    void read(std::string_view name, std::uint64_t piece_bytes, const Sink& sink) const;
    /// Reads every tensor once to check its sum. Throws Error{Corrupt}.
    void verify() const;

private:
    const Tensor& require(std::string_view name) const;
    void check_sum(const Tensor& tensor, std::uint32_t sum) const;
    std::string read_header() const;
    void place_tensors(std::string_view header);
    void take_checksums(std::string_view header);

    std::filesystem::path path_;
    FileHandle file_;
    std::uint64_t file_bytes_ = 0;
    std::vector<Tensor> tensors_;
    std::map<std::string, std::size_t, std::less<>> index_;
    std::map<std::string, std::string> metadata_;
    std::map<std::string, std::uint32_t, std::less<>> checksums_;
    std::uint32_t header_checksum_ = 0;
    bool has_checksums_ = false;
};

} // namespace bellows
