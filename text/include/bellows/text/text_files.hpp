// SPDX-License-Identifier: MIT
#pragma once

// Which files a text is read from. Host only, any thread.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace bellows {

struct SkippedFile {
    std::filesystem::path path;
    std::string reason; ///< e.g. "binary", "symbolic link", "empty"
};

struct TextFile {
    std::filesystem::path path;
    std::uint64_t bytes = 0;
    std::int64_t modified = 0; ///< nanoseconds of the file system's clock
    bool named = false;        ///< by the user, not found in a folder: it must serve
};

/// Every file is a document.
struct TextFiles {
    std::vector<TextFile> files; ///< in the order in which they are read
    std::vector<SkippedFile> skipped;
    std::string named; ///< the paths as they were given, for messages

    std::uint64_t bytes() const noexcept;
};

/// Looks at names and sizes alone. Files come as they are named; folders recursively, their regular
/// files in byte order of their paths. Inside a folder, symbolic links, hidden and empty files are
/// skipped and listed. A file reached twice counts once. Throws Error{Io} for what cannot be looked
/// at or is no file, Error{InvalidArgument} if a path does not exist or no file is left.
TextFiles find_text(std::span<const std::filesystem::path> paths);

} // namespace bellows
