// SPDX-License-Identifier: MIT
#pragma once

// Device memory. `Buffer` owns an allocation; destroying it is deferred until all submitted work
// that uses it has been reached. A buffer may be declared before its size is known and bound
// later, by an exchange's host lane for example; what was recorded with its views follows.
// Thread-safe per device; one buffer is bound and released by one thread at a time.

#include <bellows/base/memory_sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace bellows {

class Device;

enum class MemoryKind : std::uint8_t {
    Device,   ///< fastest for the device; not mapped
    Upload,   ///< mapped, written by the host in order, read by the device
    Readback, ///< mapped and cached, written by the device, read by the host
};

struct BufferDesc {
    std::string name; ///< shown in reports, errors and the trace
    std::uint64_t bytes = 0;
    MemoryKind kind = MemoryKind::Device;
    MemoryCategory category = MemoryCategory::Scratch;
};

/// Device memory behind an opaque file descriptor (VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT),
/// which stays the caller's.
struct OpaqueMemory {
    int file = -1;
    std::uint64_t bytes = 0; ///< of the whole allocation
};

class Buffer {
public:
    Buffer() = default;
    /// Allocates at once. Throws Error{OutOfMemory} with the sizes, the largest category and what
    /// can be done about it.
    Buffer(Device& device, BufferDesc desc);
    /// Declares a buffer whose memory is bound later; desc.bytes is ignored.
    static Buffer declare(Device& device, BufferDesc desc);
    /// Host memory of the caller, which the device reads and writes where it stands: mapped, and
    /// other processes that share it see what is written. Its address and size are multiples of
    /// DeviceInfo::host_import_alignment; it must outlive the buffer and all work that uses it.
    /// Throws Error{Unsupported} for a device that takes no such memory, Error{InvalidArgument}.
    static Buffer import_host(Device& device, std::span<std::byte> memory, std::string name,
                              MemoryCategory category = MemoryCategory::Communication);
    /// Memory of the same physical device that another API of its driver, or another process, has
    /// made. It lives for as long as anybody has it. Throws Error{Unsupported} for a device that
    /// takes no such memory (DeviceInfo::imports_opaque_memory), Error{OutOfMemory} where the
    /// driver refuses it.
    static Buffer import_opaque(Device& device, OpaqueMemory memory, std::string name,
                                MemoryCategory category = MemoryCategory::Communication);
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) noexcept;
    ~Buffer();

    /// Gives a declared buffer memory for `bytes` bytes; views keep their offsets. What it had
    /// before is released. Throws Error{InvalidArgument} while pending work uses the buffer: a
    /// lane job binds it then (LaneContext::bind).
    void bind(std::uint64_t bytes);
    /// The same to the memory of `lender`, which keeps it, at the latest until work that uses it
    /// through this buffer has been reached. Uses through the one and the other are not ordered:
    /// that is the caller's part. Throws Error{InvalidArgument}, too, if the lender has no memory,
    /// or lends it already.
    void bind(const Buffer& lender);
    /// Whether another is bound to its memory, or work that used it through that one is pending.
    bool lent() const noexcept;
    /// Gives the memory back once the work submitted so far has been reached; the views stay
    /// declared and may be bound again.
    void unbind();

    bool bound() const noexcept;
    std::uint64_t size() const noexcept;
    /// The whole buffer; of a declared one, a view without an end (bytes = 2^64 - 1).
    BufferView view() const noexcept;
    TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents) const;
    /// Upload and Readback only: the mapping. The caller orders its accesses by time points and
    /// declares them (Lane::Job::accesses) when the device may use the memory at that time.
    void* mapped() const noexcept;
    template <class T>
    std::span<T> mapped_as() const noexcept {
        return {static_cast<T*>(mapped()), size() / sizeof(T)};
    }
    explicit operator bool() const noexcept { return resource_ != nullptr; }

private:
    Device* device_ = nullptr;
    Resource* resource_ = nullptr;
};

/// Sizes as asked for; what rounding and the pool of released buffers add is in held_bytes.
struct MemoryReport {
    struct Line {
        std::uint64_t bytes = 0;
        std::uint64_t peak_bytes = 0;
        std::uint64_t num_buffers = 0;
    };
    std::array<Line, kNumMemoryCategories> categories{};
    std::uint64_t bytes = 0;
    std::uint64_t peak_bytes = 0;
    std::uint64_t held_bytes = 0;   ///< what the device has given to Bellows, all heaps
    std::uint64_t pooled_bytes = 0; ///< of them, released and kept for the next request
    std::uint64_t device_bytes = 0; ///< size of the largest device-local heap
    /// What the driver lets this process have of that heap at present, and what the process has of
    /// it by the driver's account (VK_EXT_memory_budget). Where it does not say: the heap's size
    /// and what Bellows holds.
    std::uint64_t budget_bytes = 0;
    std::uint64_t used_bytes = 0;
    bool has_budget = false; ///< the driver does say

    const Line& of(MemoryCategory category) const noexcept {
        return categories[static_cast<std::size_t>(category)];
    }
    /// The one with most bytes.
    MemoryCategory largest() const noexcept;
    /// Bytes, and the most that they were.
    MemorySizes sizes() const noexcept;
    MemorySizes peaks() const noexcept;
};

} // namespace bellows
