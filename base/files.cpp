// SPDX-License-Identifier: MIT
#include <bellows/base/files.hpp>

#include <bellows/base/error.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

namespace bellows {

namespace {

constexpr std::uint64_t kLargestTransfer = std::uint64_t{1} << 30;

} // namespace

FileHandle& FileHandle::operator=(FileHandle&& other) noexcept {
    if (this != &other) {
        const FileHandle old(std::exchange(fd_, other.release()));
    }
    return *this;
}

FileHandle::~FileHandle() {
    if (fd_ >= 0) {
        ::close(fd_);
    }
}

int FileHandle::release() noexcept {
    return std::exchange(fd_, -1);
}

std::string errno_message(std::string_view verb, const std::filesystem::path& path, int error) {
    return "cannot " + std::string(verb) + " " + in_quotes(path.string()) + ": " +
           std::generic_category().message(error);
}

FileHandle lock_file(const std::filesystem::path& path, std::string& holder) {
    FileHandle file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (file.get() < 0) {
        throw Error(ErrorCode::Io, errno_message("open", path, errno));
    }
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
        const int error = errno;
        if (error != EWOULDBLOCK) {
            throw Error(ErrorCode::Io, errno_message("lock", path, error));
        }
        char text[24] = {};
        const ssize_t size = ::pread(file.get(), text, sizeof text - 1, 0);
        holder.assign(text, size > 0 ? std::strspn(text, "0123456789") : 0);
        return FileHandle();
    }
    const std::string mine = std::to_string(::getpid()) + "\n"; // it serves without this text, too
    if (::ftruncate(file.get(), 0) == 0) {
        [[maybe_unused]] const ssize_t written = ::pwrite(file.get(), mine.data(), mine.size(), 0);
    }
    return file;
}

namespace {

/// write(at, most): what a system call has written, or -1.
template <class Write>
void write_whole(const void* data, std::uint64_t bytes, const std::filesystem::path& path,
                 Write write) {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
        const ssize_t n = write(at, std::min(bytes, kLargestTransfer));
        if (n < 0) {
            if (errno == EINTR) {
                continue;
            }
            throw Error(ErrorCode::Io, errno_message("write", path, errno));
        }
        at += n;
        bytes -= static_cast<std::uint64_t>(n);
    }
}

} // namespace

void write_all(int fd, const void* data, std::uint64_t bytes, const std::filesystem::path& path) {
    write_whole(data, bytes, path,
                [&](const char* at, std::uint64_t most) { return ::write(fd, at, most); });
}

void write_at(int fd, const void* data, std::uint64_t bytes, std::uint64_t offset,
              const std::filesystem::path& path) {
    const auto* const begin = static_cast<const char*>(data);
    write_whole(data, bytes, path, [&](const char* at, std::uint64_t most) {
        return ::pwrite(fd, at, most, static_cast<off_t>(offset) + (at - begin));
    });
}

void read_exactly(int fd, void* data, std::uint64_t bytes, std::uint64_t offset,
                  const std::filesystem::path& path) {
    auto* at = static_cast<char*>(data);
    while (bytes > 0) {
        const ssize_t n =
            ::pread(fd, at, std::min(bytes, kLargestTransfer), static_cast<off_t>(offset));
        if (n < 0) {
            if (errno == EINTR) {
                continue;
            }
            throw Error(ErrorCode::Io, errno_message("read", path, errno));
        }
        if (n == 0) {
            throw Error(ErrorCode::Corrupt, in_quotes(path.string()) + " ends at byte " +
                                                std::to_string(offset) + ", " +
                                                std::to_string(bytes) + " bytes too early");
        }
        at += n;
        offset += static_cast<std::uint64_t>(n);
        bytes -= static_cast<std::uint64_t>(n);
    }
}

FileHandle open_regular_file(const std::filesystem::path& path, std::uint64_t& bytes) {
    // Non-blocking, so that a FIFO is refused below and does not stop us here.
    FileHandle fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (fd.get() < 0) {
        throw Error(ErrorCode::Io, errno_message("open", path, errno));
    }
    struct stat info{};
    if (::fstat(fd.get(), &info) != 0) {
        throw Error(ErrorCode::Io, errno_message("read", path, errno));
    }
    if (!S_ISREG(info.st_mode)) {
        throw Error(ErrorCode::Io, in_quotes(path.string()) + " is not a regular file");
    }
    bytes = static_cast<std::uint64_t>(info.st_size);
    return fd;
}

std::string read_file(const std::filesystem::path& path, std::uint64_t limit) {
    std::uint64_t bytes = 0;
    const FileHandle fd = open_regular_file(path, bytes);
    if (bytes > limit) {
        throw Error(ErrorCode::Io, in_quotes(path.string()) + " holds " + std::to_string(bytes) +
                                       " bytes, more than the " + std::to_string(limit) +
                                       " that such a file may hold");
    }
    std::string content(bytes, '\0');
    read_exactly(fd.get(), content.data(), bytes, 0, path);
    return content;
}

void write_file_durably(const std::filesystem::path& path, std::string_view content) {
    FileHandle fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (fd.get() < 0) {
        throw Error(ErrorCode::Io, errno_message("create", path, errno));
    }
    write_all(fd.get(), content.data(), content.size(), path);
    if (::fsync(fd.get()) != 0 || ::close(fd.release()) != 0) {
        throw Error(ErrorCode::Io, errno_message("write", path, errno));
    }
}

void sync_directory(const std::filesystem::path& directory) {
    const FileHandle fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // Some network file systems cannot sync a folder (EINVAL); nothing more can be asked of them.
    if (fd.get() < 0 || (::fsync(fd.get()) != 0 && errno != EINVAL)) {
        throw Error(ErrorCode::Io, errno_message("sync", directory, errno));
    }
}

} // namespace bellows
