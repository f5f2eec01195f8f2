// SPDX-License-Identifier: MIT
#pragma once

// Small file helpers: read whole files with a limit and write them durably. Host only, any thread.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace bellows {

/// A regular file's whole content. Throws Error{Io} if it cannot be read, is no regular file or
/// holds more than `limit` bytes.
std::string read_file(const std::filesystem::path& path, std::uint64_t limit);

/// Writes a new or replaced file and waits until it is on the disk. Throws Error{Io}.
void write_file_durably(const std::filesystem::path& path, std::string_view content);

/// Makes renames and new names inside the folder durable. Throws Error{Io}.
void sync_directory(const std::filesystem::path& directory);

/// "cannot <verb> <path>: <text of errno>".
std::string errno_message(std::string_view verb, const std::filesystem::path& path, int error);

/// A file descriptor that closes itself.
class FileHandle {
public:
    FileHandle() = default;
    explicit FileHandle(int fd) noexcept : fd_(fd) {}
    FileHandle(FileHandle&& other) noexcept : fd_(other.release()) {}
    FileHandle& operator=(FileHandle&& other) noexcept;
    ~FileHandle();

    int get() const noexcept { return fd_; }
    int release() noexcept;

private:
    int fd_ = -1;
};

/// Opens a regular file for reading, and how many bytes it holds. Throws Error{Io} if it cannot be
/// opened or is none; a FIFO does not stop it.
FileHandle open_regular_file(const std::filesystem::path& path, std::uint64_t& bytes);

/// Opens or makes the file and locks it until the handle or the process ends. If another process
/// has it locked, the handle is empty (get() < 0) and `holder` becomes what that process wrote: its
/// id. Throws Error{Io}.
FileHandle lock_file(const std::filesystem::path& path, std::string& holder);

/// Writes all bytes or throws Error{Io} that names `path`.
void write_all(int fd, const void* data, std::uint64_t bytes, const std::filesystem::path& path);
/// The same at `offset`, as several threads can at once.
void write_at(int fd, const void* data, std::uint64_t bytes, std::uint64_t offset,
              const std::filesystem::path& path);

/// Reads exactly `bytes` at `offset`; a shorter file gives Error{Corrupt}, a failure Error{Io}.
void read_exactly(int fd, void* data, std::uint64_t bytes, std::uint64_t offset,
                  const std::filesystem::path& path);

} // namespace bellows
