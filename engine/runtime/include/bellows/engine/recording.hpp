// SPDX-License-Identifier: MIT
#pragma once

// A recording: a list of dispatches, copies and fills for one queue role, made once and submitted
// any number of times. Barriers between its operations are derived from the accesses that kernels
// declare. It holds no tensor addresses: they stand in its parameter table, which is filled when
// it is submitted, so buffers may be bound after recording. One thread at a time.

#include <bellows/engine/kernel_info.hpp>
#include <bellows/engine/memory.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace bellows {

class Device;

/// A queue runs what it has been given in that order, and waits with the rest where one has to
/// wait. Roles that a device has no queue of their own for share one.
enum class QueueRole : std::uint8_t {
    Compute,
    /// A second row of work that needs nothing of Compute's, as the layers of another micro-batch:
    /// one has the device's whole where the other's kernels end or begin.
    ComputeBeside,
    /// What nobody waits for soon, as weight gradients: it fills what those two leave free.
    ComputeDeferred,
    /// A second row of that, as experts' weight gradients beside all others.
    ComputeDeferredBeside,
    TransferIn,  ///< copies from the host
    TransferOut, ///< and to it
    /// What is ready when it is handed in, beside Compute.
    AsyncCompute,
    /// What an exchange packs (Out) and unpacks (In) beside Compute, of forwards and of backwards:
    /// what has come does not wait behind what cannot leave yet, nor one direction for the other.
    AsyncForwardOut,
    AsyncForwardIn,
    AsyncBackwardOut,
    AsyncBackwardIn,
};
inline constexpr std::size_t kNumQueueRoles = 11;
/// The others are for copies and fills.
constexpr bool takes_dispatches(QueueRole role) noexcept {
    return role != QueueRole::TransferIn && role != QueueRole::TransferOut;
}
const char* to_string(QueueRole role) noexcept;

struct Groups {
    std::uint32_t x = 1, y = 1, z = 1;
};

class Recording {
public:
    Recording(Device& device, QueueRole role, std::string name);
    Recording(Recording&&) noexcept;
    Recording& operator=(Recording&&) noexcept;
    ~Recording();

    /// K: a kernel struct of <bellows/kernels/kernels.hpp>. Throws Error{Unsupported} when this
    /// device or build lacks the variant, Error{InvalidArgument} for a grid over its limits.
    template <class K>
    void dispatch(const K& kernel, Groups groups) {
        const auto operands = kernel.operands();
        const auto push = kernel.push_words();
        const auto constants = kernel.constant_values();
        add_dispatch({K::info(), kernel.variant_index(), constants, operands, push}, groups, {});
    }
    /// The grid stands on the device: three u32 at the start of `arguments`.
    template <class K>
    void dispatch_indirect(const K& kernel, BufferView arguments) {
        const auto operands = kernel.operands();
        const auto push = kernel.push_words();
        const auto constants = kernel.constant_values();
        add_dispatch({K::info(), kernel.variant_index(), constants, operands, push}, {}, arguments);
    }
    /// Same size, no overlap, multiples of 4 bytes. In bursts, which follow one another: a copy to
    /// the host at its full rate can hold up what runs beside it in the caches, and shorter bursts
    /// leave it room.
    void copy(BufferView source, BufferView destination, std::uint64_t burst_bytes = UINT64_MAX);
    void fill(BufferView destination, std::uint32_t word);
    /// Names what follows in the trace, e.g. "ATTN(F).m3".
    void label(std::string text);

    Device& device() const noexcept;
    QueueRole role() const noexcept;
    const std::string& name() const noexcept;
    std::uint64_t num_operations() const noexcept;

    struct Impl;
    Impl& impl() const noexcept { return *impl_; }

private:
    struct KernelCall {
        const KernelInfo& info;
        std::uint32_t variant;
        std::span<const std::uint32_t> constants;
        std::span<const BufferView> operands;
        std::span<const std::uint32_t> push;
    };
    void add_dispatch(const KernelCall& call, Groups groups, BufferView indirect);

    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
