// SPDX-License-Identifier: MIT
#pragma once

// Device memory of CUDA's driver that Vulkan and other processes open, too: from the driver's
// virtual memory management, exported as a file descriptor.

#include "cuda_driver.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace bellows::cuda {

/// A device's primary context, and what is the same for all of its memory.
struct Card {
    /// Null, and why, where there is no such driver or it does not know the device. device_uuid: 32
    /// hexadecimal digits (DeviceInfo::uuid). Throws Error{Unsupported} where the driver fails.
    static std::shared_ptr<const Card> open(const std::string& device_uuid, std::string& why_not);

    std::shared_ptr<const Driver> driver;
    Ordinal device = -1;
    Context context = nullptr;
    std::map<std::string, Ordinal> devices; ///< all that this process sees, by UUID
    std::uint64_t granularity = 0;          ///< of allocations, in bytes

    Card() = default;
    Card(const Card&) = delete;
    Card& operator=(const Card&) = delete;
    ~Card();
};
using CardPtr = std::shared_ptr<const Card>;

/// Makes the card's context this thread's, for a while.
class Current {
public:
    explicit Current(const Card& card);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

private:
    const Driver& driver_;
};

/// An allocation, mapped for its card.
class Memory {
public:
    /// At least `bytes`, rounded up to the granularity. Throws Error{OutOfMemory}.
    static std::unique_ptr<Memory> allocate(CardPtr card, std::uint64_t bytes);
    /// What export_file() of another Memory, maybe of another process, gave; `bytes` is its size.
    static std::unique_ptr<Memory> open(CardPtr card, int file, std::uint64_t bytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    Pointer address() const noexcept { return address_; }
    std::uint64_t bytes() const noexcept { return bytes_; }
    /// A new descriptor, which is the caller's to close.
    int export_file() const;

private:
    Memory(CardPtr card, Allocation allocation, std::uint64_t bytes);
    void drop() noexcept;

    CardPtr card_;
    Allocation allocation_;
    Pointer address_ = 0;
    std::uint64_t bytes_ = 0;
    bool mapped_ = false;
};

/// Copies between two places of the card's memory and waits, at most for `timeout_ms`. Throws
/// Error{Timeout}, Error{Unsupported}.
void copy_and_wait(const Card& card, Pointer to, Pointer from, std::uint64_t bytes,
                   std::int64_t timeout_ms = 60'000);

} // namespace bellows::cuda
