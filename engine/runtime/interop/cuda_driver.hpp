// SPDX-License-Identifier: MIT
#pragma once

// What Bellows uses of libcuda.so.1, opened at run time: no header and no library of that vendor is
// needed to build, none but the driver to run. Names, values and layouts are those of the driver's
// documented binary interface (CUDA 11.4 and later).

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace bellows::cuda {

using Result = int;  ///< 0: success
using Ordinal = int; ///< of a device
using Context = struct ContextOf*;
using Stream = struct StreamOf*;
using Event = struct EventOf*;
using Pointer = unsigned long long; ///< into memory of a device
using Allocation = unsigned long long;

constexpr Result kSuccess = 0, kNotReady = 600;
constexpr unsigned kNonBlocking = 1;       ///< of streams
constexpr unsigned kNoTiming = 2;          ///< of events
constexpr int kFileDescriptor = 1;         ///< a kind of handle that goes to other processes
constexpr int kPinned = 1, kOnDevice = 1;  ///< kinds of allocations and of places
constexpr int kReadWrite = 3;              ///< a kind of access
constexpr int kRecommendedGranularity = 1; ///< of two that there are

struct Uuid {
    unsigned char bytes[16];
};

struct Location {
    int type;
    int id;
};

struct AllocationProperties {
    int type;
    int handle_types;
    Location location;
    void* security;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
};
static_assert(sizeof(AllocationProperties) == 32);

struct AccessDescription {
    Location location;
    int flags;
};
static_assert(sizeof(AccessDescription) == 12);

struct Driver {
    /// Null, and why, where there is no such driver, or one too old.
    static std::shared_ptr<const Driver> open(std::string& why_not);
    /// Throws Error{Unsupported} with the driver's words for anything but success.
    void check(Result result, const char* doing) const;

    Result (*init)(unsigned flags);
    Result (*error_string)(Result result, const char** text);
    Result (*device_count)(int* count);
    Result (*device)(Ordinal* device, int index);
    Result (*device_uuid)(Uuid* uuid, Ordinal device);
    Result (*can_access_peer)(int* can, Ordinal device, Ordinal peer);
    Result (*retain_context)(Context* context, Ordinal device);
    Result (*release_context)(Ordinal device);
    Result (*push_context)(Context context);
    Result (*pop_context)(Context* context);
    Result (*granularity)(std::size_t* bytes, const AllocationProperties* properties, int which);
    Result (*create)(Allocation* made, std::size_t bytes, const AllocationProperties* properties,
                     unsigned long long flags);
    Result (*release)(Allocation allocation);
    Result (*export_handle)(void* handle, Allocation allocation, int kind,
                            unsigned long long flags);
    Result (*import_handle)(Allocation* made, void* handle, int kind);
    Result (*reserve)(Pointer* at, std::size_t bytes, std::size_t alignment, Pointer wanted,
                      unsigned long long flags);
    Result (*free_reserved)(Pointer at, std::size_t bytes);
    Result (*map)(Pointer at, std::size_t bytes, std::size_t offset, Allocation allocation,
                  unsigned long long flags);
    Result (*unmap)(Pointer at, std::size_t bytes);
    Result (*set_access)(Pointer at, std::size_t bytes, const AccessDescription* to,
                         std::size_t count);
    Result (*create_stream)(Stream* stream, unsigned flags);
    Result (*destroy_stream)(Stream stream);
    Result (*copy)(Pointer to, Pointer from, std::size_t bytes, Stream stream);
    Result (*create_event)(Event* event, unsigned flags);
    Result (*destroy_event)(Event event);
    Result (*record_event)(Event event, Stream stream);
    Result (*query_event)(Event event);
};

} // namespace bellows::cuda
