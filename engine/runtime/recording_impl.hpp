// SPDX-License-Identifier: MIT
#pragma once

#include "resource.hpp"
#include "spare_commands.hpp"
#include "vulkan.hpp"

#include <bellows/engine/device.hpp>

#include <array>
#include <memory>
#include <vector>

namespace bellows {

struct Recording::Impl {
    enum class Kind : std::uint8_t { Dispatch, DispatchIndirect, Native, Copy, Fill };

    struct OperandUse {
        BufferView view;
        Access access = Access::Read;
    };
    struct Operation {
        Kind kind = Kind::Dispatch;
        const char* name = "";
        VkPipeline pipeline = VK_NULL_HANDLE;
        VkCuFunctionNVX function = VK_NULL_HANDLE; ///< in its place, of Kind::Native
        const NativeCode* native = nullptr;
        std::uint64_t scratch_offset = 0; ///< of a native kernel, in native_scratch_
        Groups groups;
        std::uint32_t fill_word = 0;
        std::uint64_t burst_bytes = 0;             ///< of a copy
        std::uint32_t first_use = 0, num_uses = 0; ///< in `uses`
        std::uint32_t num_operands = 0;            ///< of them, the first in the parameter block
        std::uint64_t table_offset = 0;
        std::uint32_t first_push = 0, num_push = 0; ///< in `push_words`
        std::uint32_t label = 0;                    ///< in `labels`
        bool barrier_before = false;
        bool barrier_to_grid = false; ///< that barrier orders grids of indirect dispatches, too
    };

    Impl(Device& device, QueueRole role, std::string name);
    ~Impl();

    void add(Operation operation, std::span<const OperandUse> operation_uses,
             std::span<const std::uint32_t> push);
    /// Makes room for the parameter table; not under the device's mutex.
    void allocate_table();
    /// Command buffer for the current binding of buffers that commands name by handle.
    void prepare();
    /// Writes the addresses of all operands into the parameter table, if it has not those of now.
    /// Needs the device's mutex.
    void fill_table();
    /// Accesses of the whole recording, merged per resource and range.
    const std::vector<OperandUse>& accesses();

    Device& device;
    Device::Impl& impl;
    QueueRole role;
    std::string name;
    std::vector<Operation> operations;
    std::vector<OperandUse> uses;
    std::vector<std::uint32_t> push_words;
    std::vector<std::string> labels{""};
    std::uint64_t table_bytes = 0;
    std::uint64_t scratch_bytes = 0; ///< of all native kernels
    detail::TicketPtr last_run;
    VkQueryPool queries = VK_NULL_HANDLE;
    std::uint32_t num_queries = 0; ///< operations with a pair of timestamps
    detail::PooledCommands commands;

    /// Whether its queue takes dispatches, too.
    bool computes() const;

private:
    std::uint32_t family() const;
    void make_commands();
    bool conflicts(std::span<const OperandUse> operation_uses) const;
    void order_grid();
    void encode();
    void encode_operation(const Operation& operation);
    void encode_barrier(VkMemoryBarrier2 barrier);
    BufferView use(const Operation& operation, std::uint32_t i) const;
    VkBuffer handle(const Operation& operation, std::uint32_t i) const;
    void encode_native(const Operation& operation);
    void encode_copy(const Operation& operation);
    std::uint64_t handle_epochs() const;

    Buffer table_;
    Buffer native_scratch_;
    std::uint64_t encoded_operations_ = 0;
    std::uint64_t encoded_epochs_ = 0;
    std::uint64_t filled_operations_ = 0; ///< whose addresses stand in the table, as of
    std::uint64_t filled_epochs_ = 0;     ///< these
    std::vector<OperandUse> since_barrier_;
    std::vector<OperandUse> merged_;
    std::uint64_t merged_uses_ = 0;
};

} // namespace bellows
