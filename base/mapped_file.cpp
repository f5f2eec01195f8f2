// SPDX-License-Identifier: MIT
#include <bellows/base/mapped_file.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <cerrno>
#include <cstdint>
#include <utility>

#include <sys/mman.h>
#include <sys/stat.h>

namespace bellows {

MappedFile::MappedFile(const std::filesystem::path& path) {
    std::uint64_t size = 0;
    const FileHandle file = open_regular_file(path, size);
    if (size == 0) {
        return;
    }
    void* const base = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
    if (base == MAP_FAILED) {
        throw Error(ErrorCode::Io, errno_message("map", path, errno));
    }
    bytes_ = {static_cast<const std::byte*>(base), size};
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {
}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
    if (this != &other) {
        const MappedFile old(std::move(*this));
        bytes_ = std::exchange(other.bytes_, {});
    }
    return *this;
}

MappedFile::~MappedFile() {
    if (!bytes_.empty()) {
        ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
    }
}

} // namespace bellows
