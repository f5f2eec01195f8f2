// SPDX-License-Identifier: MIT
#include "link_driver.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace bellows {
namespace {

constexpr std::uint64_t kPageBytes = 65536;

/// A file in memory, mapped.
class MappedFile final : public LinkMemory {
public:
    MappedFile(int file, std::uint64_t bytes) {
        void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (base == MAP_FAILED)
            throw Error(ErrorCode::OutOfMemory,
                        "cannot map " + std::to_string(bytes) + " bytes of memory");
        bytes_ = bytes;
        address_ = reinterpret_cast<std::uintptr_t>(base);
    }
    ~MappedFile() override { ::munmap(reinterpret_cast<void*>(address_), bytes_); }
};

/// Some bytes at each look.
class HostCopy final : public LinkCopy {
public:
    explicit HostCopy(std::vector<LinkRange> ranges) : ranges_(std::move(ranges)) {}

    bool done() override {
        std::uint64_t left = kBytesPerLook;
        while (next_ < ranges_.size() && left > 0) {
            LinkRange& range = ranges_[next_];
            const std::uint64_t now = std::min(left, range.bytes);
            std::memcpy(reinterpret_cast<void*>(range.to),
                        reinterpret_cast<const void*>(range.from), now);
            range = {range.to + now, range.from + now, range.bytes - now};
            left -= now;
            if (range.bytes == 0)
                ++next_;
        }
        return next_ == ranges_.size();
    }

private:
    static constexpr std::uint64_t kBytesPerLook = std::uint64_t{1} << 20;
    std::vector<LinkRange> ranges_;
    std::size_t next_ = 0;
};

class HostLinkDriver final : public LinkDriver {
public:
    std::string_view name() const noexcept override { return "host"; }
    std::string device_id() const override { return "host"; }
    bool reaches(std::string_view device_id) const override { return device_id == "host"; }

    LinkAllocation allocate(std::uint64_t bytes) override {
        const std::uint64_t whole = round_up(std::max<std::uint64_t>(bytes, 1), kPageBytes);
        LinkAllocation made;
        made.file = FileDescriptor(::memfd_create("bellows link", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        if (!made.file || ::ftruncate(made.file.get(), static_cast<off_t>(whole)) != 0 ||
            ::fcntl(made.file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
            throw Error(ErrorCode::OutOfMemory,
                        "cannot make a file of " + std::to_string(whole) + " bytes in memory");
        made.memory = std::make_shared<MappedFile>(made.file.get(), whole);
        made.host = {reinterpret_cast<std::byte*>(made.memory->address()), whole};
        return made;
    }

    std::shared_ptr<LinkMemory> open(FileDescriptor file, std::uint64_t bytes) override {
        struct stat status{};
        const int seals = ::fcntl(file.get(), F_GET_SEALS);
        if (::fstat(file.get(), &status) != 0 ||
            static_cast<std::uint64_t>(status.st_size) < bytes || seals < 0 ||
            (seals & F_SEAL_SHRINK) == 0)
            throw Error(ErrorCode::Unsupported, "a peer's memory is not what it says it is");
        return std::make_shared<MappedFile>(file.get(), bytes);
    }

    std::unique_ptr<LinkCopy> copy(std::size_t, std::vector<LinkRange> ranges) override {
        return std::make_unique<HostCopy>(std::move(ranges));
    }
};

} // namespace

std::unique_ptr<LinkDriver> make_host_link_driver() {
    return std::make_unique<HostLinkDriver>();
}

} // namespace bellows
