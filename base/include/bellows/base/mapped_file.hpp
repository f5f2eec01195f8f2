// SPDX-License-Identifier: MIT
#pragma once

// A whole file, mapped for reading: its pages are the system's, shared by all processes that map
// it, and take no memory of the process. Host only; const members may be called from any thread.

#include <cstddef>
#include <filesystem>
#include <span>

namespace bellows {

class MappedFile {
public:
    MappedFile() = default;
    /// The file must not become shorter while it is mapped: reading what is gone ends the process.
    /// A file that is renamed or removed stays mapped as it was. Throws Error{Io} if it cannot be
    /// read or is no regular file.
    explicit MappedFile(const std::filesystem::path& path);
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&& other) noexcept;
    ~MappedFile();

    std::span<const std::byte> bytes() const noexcept { return bytes_; }

private:
    std::span<const std::byte> bytes_;
};

} // namespace bellows
