// SPDX-License-Identifier: MIT
#pragma once

// What a vendor's driver does for a device link: memory of this device that other processes of the
// node open, and copies from theirs. One implementation is CUDA's; one is for devices whose memory
// is the host's. Any thread.

#include <bellows/comm/file_descriptor.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// Memory as copies see it, this rank's or a peer's. It stays while anybody has it open.
class LinkMemory {
public:
    virtual ~LinkMemory() = default;
    std::uint64_t bytes() const noexcept { return bytes_; }
    std::uint64_t address() const noexcept { return address_; }

protected:
    std::uint64_t bytes_ = 0;
    std::uint64_t address_ = 0;
};

/// Memory of this rank's device: what makes it a Buffer, and what lets others in.
struct LinkAllocation {
    std::shared_ptr<LinkMemory> memory;
    FileDescriptor file;         ///< what peers open
    std::span<std::byte> host{}; ///< where host memory serves the device; else it imports `file`
};

struct LinkRange {
    std::uint64_t to = 0, from = 0; ///< addresses
    std::uint64_t bytes = 0;
};

/// Copies under way; its destructor waits for those that have begun, which takes no longer than the
/// bytes need, and no longer than ten seconds where the driver has come to a stop.
class LinkCopy {
public:
    virtual ~LinkCopy() = default;
    /// Never blocks. True once all bytes are there, for all that begins from then on. Throws what
    /// the driver says.
    virtual bool done() = 0;
};

class LinkDriver {
public:
    virtual ~LinkDriver() = default;
    virtual std::string_view name() const noexcept = 0;
    /// What peers ask reaches() of theirs with.
    virtual std::string device_id() const = 0;
    /// Whether it copies straight from the memory of that device of another process.
    virtual bool reaches(std::string_view device_id) const = 0;
    /// At least so many bytes. Throws Error{OutOfMemory}.
    virtual LinkAllocation allocate(std::uint64_t bytes) = 0;
    /// A peer's memory. Throws Error{Unsupported}.
    virtual std::shared_ptr<LinkMemory> open(FileDescriptor file, std::uint64_t bytes) = 0;
    /// Copies that share a queue come one after the other. The memory stays until they are done.
    virtual std::unique_ptr<LinkCopy> copy(std::size_t queue, std::vector<LinkRange> ranges) = 0;
};

/// For the device with this UUID (DeviceInfo::uuid). Null, and why, where CUDA's driver does not
/// serve it.
std::unique_ptr<LinkDriver> make_cuda_link_driver(const std::string& device_uuid,
                                                  std::string& why_not);
/// For devices whose memory is the host's, which need none: the path for tests without a GPU.
std::unique_ptr<LinkDriver> make_host_link_driver();

} // namespace bellows
