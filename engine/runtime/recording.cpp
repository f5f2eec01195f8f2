// SPDX-License-Identifier: MIT
#include "recording_impl.hpp"

#include "device_impl.hpp"

#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace bellows {

using detail::check;
using detail::range_of;

const char* to_string(QueueRole role) noexcept {
    switch (role) {
    case QueueRole::Compute:
        return "compute";
    case QueueRole::ComputeBeside:
        return "compute_beside";
    case QueueRole::ComputeDeferred:
        return "compute_deferred";
    case QueueRole::ComputeDeferredBeside:
        return "compute_deferred_beside";
    case QueueRole::TransferIn:
        return "transfer_in";
    case QueueRole::TransferOut:
        return "transfer_out";
    case QueueRole::AsyncCompute:
        return "async_compute";
    case QueueRole::AsyncForwardOut:
        return "async_forward_out";
    case QueueRole::AsyncForwardIn:
        return "async_forward_in";
    case QueueRole::AsyncBackwardOut:
        return "async_backward_out";
    case QueueRole::AsyncBackwardIn:
        return "async_backward_in";
    }
    return "unknown";
}

namespace {

constexpr std::uint64_t kBlockAlignment = 16;
constexpr std::uint64_t kScratchAlignment = 256;

bool writes(Access access) noexcept {
    return access != Access::Read;
}

void require(bool good, const std::string& recording, const char* operation, const char* reason) {
    if (!good)
        throw Error(ErrorCode::InvalidArgument,
                    std::string(operation) + " in " + recording + ": " + reason);
}

/// A destroyed buffer keeps its memory while work that was handed in before may use it; such work
/// (a lane job) may still record.
void require_alive(const BufferView& view, const std::string& recording, const char* operation) {
    if (view && !view.resource->alive && !view.resource->bound)
        throw Error(ErrorCode::InvalidArgument, std::string(operation) + " in " + recording +
                                                    " names buffer " + view.resource->name +
                                                    ", which has been destroyed");
}

} // namespace

Recording::Impl::Impl(Device& owner, QueueRole queue_role, std::string recording_name)
    : device(owner), impl(owner.impl()), role(queue_role), name(std::move(recording_name)) {
}

Recording::Impl::~Impl() {
    if (last_run != nullptr && !last_run->final_state()) {
        try {
            TimePoint(last_run).wait();
        } catch (const Error& error) {
            // Failures are reported to whoever waits for the run; here it only has to be over. What
            // does not end is given up for all, so that no other recording waits for it again.
            if (error.code() == ErrorCode::Timeout) {
                const std::scoped_lock lock(impl.mutex);
                impl.pump->lose_device(VK_TIMEOUT, "destroying " + name + ", which does not end");
            }
        }
    }
    if (queries != VK_NULL_HANDLE)
        impl.vk.vkDestroyQueryPool(impl.device, queries, nullptr);
    // What the commands of a large recording take is given back to the driver.
    constexpr std::size_t kSmall = 4;
    const bool over =
        last_run == nullptr || last_run->state.load() == detail::Ticket::State::Reached;
    if (commands.pool != VK_NULL_HANDLE &&
        !(over && operations.size() <= kSmall && impl.spare_commands.keep(family(), commands)))
        impl.vk.vkDestroyCommandPool(impl.device, commands.pool, nullptr);
}

bool Recording::Impl::computes() const {
    for (std::size_t i = 0; i < kNumQueueRoles; ++i) {
        const auto other = static_cast<QueueRole>(i);
        if (takes_dispatches(other) && impl.queue_index(other) == impl.queue_index(role))
            return true;
    }
    return false;
}

std::uint32_t Recording::Impl::family() const {
    return impl.queues[impl.queue_index(role)]->family;
}

bool Recording::Impl::conflicts(std::span<const OperandUse> operation_uses) const {
    for (const OperandUse& use : operation_uses) {
        if (!use.view)
            continue;
        for (const OperandUse& earlier : since_barrier_)
            if (earlier.view.resource == use.view.resource &&
                (writes(use.access) || writes(earlier.access)) &&
                range_of(use.view).overlaps(range_of(earlier.view)))
                return true;
    }
    return false;
}

void Recording::Impl::add(Operation operation, std::span<const OperandUse> operation_uses,
                          std::span<const std::uint32_t> push) {
    const bool serial = impl.options.sync == SyncMode::Serial && !operations.empty();
    if (conflicts(operation_uses) || serial) {
        since_barrier_.clear();
        operation.barrier_before = impl.num_barriers++ != impl.options.faults.drop_barrier;
    }
    operation.first_use = static_cast<std::uint32_t>(uses.size());
    operation.num_uses = static_cast<std::uint32_t>(operation_uses.size());
    operation.first_push = static_cast<std::uint32_t>(push_words.size());
    operation.num_push = static_cast<std::uint32_t>(push.size());
    operation.label = static_cast<std::uint32_t>(labels.size() - 1);
    operation.table_offset = table_bytes;
    const std::uint64_t addresses = operation.num_operands + (operation.native != nullptr ? 1 : 0);
    table_bytes += round_up(addresses * 8, kBlockAlignment);
    if (operation.native != nullptr) {
        operation.scratch_offset = scratch_bytes;
        scratch_bytes += round_up(operation.native->scratch_bytes, kScratchAlignment);
    }
    uses.insert(uses.end(), operation_uses.begin(), operation_uses.end());
    since_barrier_.insert(since_barrier_.end(), operation_uses.begin(), operation_uses.end());
    push_words.insert(push_words.end(), push.begin(), push.end());
    operations.push_back(operation);
    if (operation.kind == Kind::DispatchIndirect)
        order_grid();
}

/// Has the first barrier behind the last writer of the last operation's grid order that, too.
/// Others do not: grids are read by a stage of their own, and waiting for it doubles what a barrier
/// costs (4 us in place of 2 on an H200).
void Recording::Impl::order_grid() {
    const Operation& last = operations.back();
    const BufferView& grid = uses[last.first_use + last.num_uses - 1].view;
    const auto writes_grid = [&](const OperandUse& use) {
        return use.view && writes(use.access) && use.view.resource == grid.resource &&
               range_of(use.view).overlaps(range_of(grid));
    };
    std::size_t barrier = operations.size(); // the first behind what has been looked at
    for (std::size_t i = operations.size(); i-- > 0;) {
        const auto first = uses.begin() + operations[i].first_use;
        if (i + 1 < operations.size() &&
            std::any_of(first, first + operations[i].num_uses, writes_grid)) {
            if (barrier < operations.size())
                operations[barrier].barrier_to_grid = true;
            return;
        }
        if (operations[i].barrier_to_grid)
            return; // it orders what was written before
        if (operations[i].barrier_before)
            barrier = i;
    }
}

const std::vector<Recording::Impl::OperandUse>& Recording::Impl::accesses() {
    if (merged_uses_ == uses.size())
        return merged_;
    merged_.clear();
    for (const OperandUse& use : uses) {
        if (!use.view)
            continue;
        const auto same = [&](const OperandUse& other) {
            return other.view.resource == use.view.resource &&
                   other.view.offset == use.view.offset && other.view.bytes == use.view.bytes;
        };
        const auto found = std::find_if(merged_.begin(), merged_.end(), same);
        if (found == merged_.end())
            merged_.push_back(use);
        else if (writes(use.access))
            found->access = Access::ReadWrite;
    }
    merged_uses_ = uses.size();
    return merged_;
}

void Recording::Impl::fill_table() {
    std::uint64_t epochs = 1; // each only rises, so does their sum
    for (const OperandUse& use : uses)
        epochs += use.view ? use.view.resource->epoch : 0;
    if (filled_operations_ == operations.size() && filled_epochs_ == epochs)
        return;
    auto* table = static_cast<std::byte*>(table_.mapped());
    for (const Operation& operation : operations) {
        for (std::uint32_t i = 0; i < operation.num_operands; ++i) {
            const BufferView& view = uses[operation.first_use + i].view;
            std::uint64_t address = 0;
            if (view) {
                const Resource& resource = *view.resource;
                if (!resource.bound)
                    require(false, name, operation.name,
                            ("buffer " + resource.name + " has no memory").c_str());
                if (view.offset > resource.allocation.bytes)
                    require(false, name, operation.name,
                            ("buffer " + resource.name + " is too small for its view").c_str());
                address = resource.allocation.address + view.offset;
            }
            std::memcpy(table + operation.table_offset + i * 8, &address, 8);
        }
        if (operation.native != nullptr && operation.native->scratch_bytes > 0) {
            const std::uint64_t address =
                native_scratch_.view().resource->allocation.address + operation.scratch_offset;
            std::memcpy(table + operation.table_offset + operation.num_operands * 8, &address, 8);
        }
    }
    filled_operations_ = operations.size();
    filled_epochs_ = epochs;
}

std::uint64_t Recording::Impl::handle_epochs() const {
    std::uint64_t sum = 1;
    for (const Operation& operation : operations)
        if (operation.kind != Kind::Dispatch && operation.kind != Kind::Native)
            for (std::uint32_t i = 0; i < operation.num_uses; ++i) {
                const BufferView& view = uses[operation.first_use + i].view;
                if (view)
                    sum += view.resource->epoch;
            }
    return sum;
}

void Recording::Impl::allocate_table() {
    if (table_.size() < table_bytes)
        table_ = Buffer(
            device,
            {.name = "parameters of " + name, .bytes = table_bytes, .kind = MemoryKind::Upload});
    if (native_scratch_.size() < scratch_bytes)
        native_scratch_ = Buffer(device, {.name = "scratch of native kernels of " + name,
                                          .bytes = scratch_bytes,
                                          .category = MemoryCategory::Scratch});
}

void Recording::Impl::prepare() {
    if (queries != VK_NULL_HANDLE)
        impl.vk.vkResetQueryPool(impl.device, queries, 0, 2 * num_queries);
    const std::uint64_t epochs = handle_epochs(); // each epoch only rises, so does their sum
    if (encoded_operations_ == operations.size() && encoded_epochs_ == epochs)
        return;
    encode();
    encoded_operations_ = operations.size();
    encoded_epochs_ = epochs;
}

namespace {

/// Stages of a recording's operations, and their accesses that a barrier orders.
struct Scope {
    VkPipelineStageFlags2 stages = 0, grid_stages = 0;
    VkAccessFlags2 reads = 0, writes = 0;

    void add(Recording::Impl::Kind kind) {
        using Kind = Recording::Impl::Kind;
        if (kind == Kind::Copy || kind == Kind::Fill) {
            stages |= VK_PIPELINE_STAGE_2_ALL_TRANSFER_BIT;
            reads |= VK_ACCESS_2_TRANSFER_READ_BIT;
            writes |= VK_ACCESS_2_TRANSFER_WRITE_BIT;
            return;
        }
        stages |= VK_PIPELINE_STAGE_2_COMPUTE_SHADER_BIT;
        reads |= VK_ACCESS_2_SHADER_STORAGE_READ_BIT;
        writes |= VK_ACCESS_2_SHADER_STORAGE_WRITE_BIT;
        if (kind == Kind::DispatchIndirect)
            grid_stages = VK_PIPELINE_STAGE_2_DRAW_INDIRECT_BIT;
    }
};

} // namespace

void Recording::Impl::make_commands() {
    commands = impl.spare_commands.take(family());
    if (commands.pool != VK_NULL_HANDLE)
        return;
    VkCommandPoolCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO;
    info.queueFamilyIndex = family();
    check(impl.vk.vkCreateCommandPool(impl.device, &info, nullptr, &commands.pool),
          "creating the command pool of " + name);
    VkCommandBufferAllocateInfo allocate{};
    allocate.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO;
    allocate.commandPool = commands.pool;
    allocate.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    allocate.commandBufferCount = 1;
    const VkResult result =
        impl.vk.vkAllocateCommandBuffers(impl.device, &allocate, &commands.buffer);
    if (result != VK_SUCCESS)
        impl.vk.vkDestroyCommandPool(impl.device, std::exchange(commands.pool, {}), nullptr);
    check(result, "allocating the command buffer of " + name);
}

void Recording::Impl::encode() {
    if (commands.pool == VK_NULL_HANDLE)
        make_commands();
    const VkCommandBuffer buffer = commands.buffer;
    check(impl.vk.vkResetCommandPool(impl.device, commands.pool, 0), "resetting " + name);
    VkCommandBufferBeginInfo begin{};
    begin.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO;
    check(impl.vk.vkBeginCommandBuffer(buffer, &begin), "beginning " + name);
    const auto count = static_cast<std::uint32_t>(operations.size());
    if (impl.trace && num_queries != count) {
        if (queries != VK_NULL_HANDLE)
            impl.vk.vkDestroyQueryPool(impl.device, queries, nullptr);
        queries = impl.trace->create_queries(impl.queue_index(role), count);
        num_queries = count;
        if (queries != VK_NULL_HANDLE)
            impl.vk.vkResetQueryPool(impl.device, queries, 0, 2 * count);
    }
    // A barrier orders all operations before it against all after it; `before` has those since the
    // last one.
    Scope all, before;
    for (const Operation& operation : operations)
        all.add(operation.kind);
    for (std::uint32_t i = 0; i < count; ++i) {
        if (operations[i].barrier_before) {
            VkMemoryBarrier2 barrier{};
            barrier.srcStageMask = before.stages | before.grid_stages;
            barrier.srcAccessMask = before.writes;
            barrier.dstStageMask = all.stages;
            barrier.dstAccessMask = all.reads | all.writes;
            if (operations[i].barrier_to_grid) {
                barrier.dstStageMask |= all.grid_stages;
                barrier.dstAccessMask |= VK_ACCESS_2_INDIRECT_COMMAND_READ_BIT;
            }
            before = {};
            encode_barrier(barrier);
        }
        if (queries != VK_NULL_HANDLE)
            impl.vk.vkCmdWriteTimestamp2(buffer, VK_PIPELINE_STAGE_2_ALL_COMMANDS_BIT, queries,
                                         2 * i);
        before.add(operations[i].kind);
        encode_operation(operations[i]);
        if (queries != VK_NULL_HANDLE)
            impl.vk.vkCmdWriteTimestamp2(buffer, VK_PIPELINE_STAGE_2_ALL_COMMANDS_BIT, queries,
                                         2 * i + 1);
    }
    // Whatever comes after it on its queue comes after it, and the host may read what was written
    // once the time point is reached. One barrier, here: another at the begin of what comes next
    // would take a GPU 6 us more.
    Scope next;
    next.add(Kind::Copy);
    if (computes())
        next.add(Kind::DispatchIndirect);
    VkMemoryBarrier2 last{};
    last.srcStageMask = all.stages;
    last.srcAccessMask = all.writes;
    last.dstStageMask = next.stages | next.grid_stages | VK_PIPELINE_STAGE_2_HOST_BIT;
    last.dstAccessMask = next.reads | next.writes | VK_ACCESS_2_HOST_READ_BIT;
    if (next.grid_stages != 0)
        last.dstAccessMask |= VK_ACCESS_2_INDIRECT_COMMAND_READ_BIT;
    encode_barrier(last);
    check(impl.vk.vkEndCommandBuffer(buffer), "ending " + name);
}

void Recording::Impl::encode_barrier(VkMemoryBarrier2 barrier) {
    barrier.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER_2;
    VkDependencyInfo dependency{};
    dependency.sType = VK_STRUCTURE_TYPE_DEPENDENCY_INFO;
    dependency.memoryBarrierCount = 1;
    dependency.pMemoryBarriers = &barrier;
    impl.vk.vkCmdPipelineBarrier2(commands.buffer, &dependency);
}

BufferView Recording::Impl::use(const Operation& operation, std::uint32_t i) const {
    return uses[operation.first_use + i].view;
}

VkBuffer Recording::Impl::handle(const Operation& operation, std::uint32_t i) const {
    const auto& resource = *use(operation, i).resource;
    require(resource.bound, name, operation.name,
            ("buffer " + resource.name + " has no memory").c_str());
    return resource.allocation.buffer;
}

void Recording::Impl::encode_copy(const Operation& operation) {
    const BufferView source = use(operation, 0), destination = use(operation, 1);
    const VkBuffer from = handle(operation, 0), to = handle(operation, 1);
    VkMemoryBarrier2 in_turn{};
    in_turn.srcStageMask = in_turn.dstStageMask = VK_PIPELINE_STAGE_2_ALL_TRANSFER_BIT;
    std::uint64_t done = 0;
    while (done < source.bytes) {
        if (done > 0)
            encode_barrier(in_turn);
        const std::uint64_t bytes = std::min(operation.burst_bytes, source.bytes - done);
        const VkBufferCopy region{source.offset + done, destination.offset + done, bytes};
        impl.vk.vkCmdCopyBuffer(commands.buffer, from, to, 1, &region);
        done += bytes;
    }
}

/// The kernel's only parameter is what GLSL has as its push constants.
void Recording::Impl::encode_native(const Operation& operation) {
    std::array<std::byte, detail::kPushConstantBytes> push{};
    const std::uint64_t block = table_.view().resource->allocation.address + operation.table_offset;
    std::memcpy(push.data(), &block, 8);
    std::memcpy(push.data() + 8, push_words.data() + operation.first_push, operation.num_push * 4);
    const void* parameter = push.data();
    VkCuLaunchInfoNVX launch{};
    launch.sType = VK_STRUCTURE_TYPE_CU_LAUNCH_INFO_NVX;
    launch.function = operation.function;
    launch.gridDimX = operation.groups.x;
    launch.gridDimY = operation.groups.y;
    launch.gridDimZ = operation.groups.z;
    launch.blockDimX = operation.native->threads;
    launch.blockDimY = launch.blockDimZ = 1;
    launch.sharedMemBytes = operation.native->shared_bytes;
    launch.paramCount = 1;
    launch.pParams = &parameter;
    impl.vk.vkCmdCuLaunchKernelNVX(commands.buffer, &launch);
}

void Recording::Impl::encode_operation(const Operation& operation) {
    switch (operation.kind) {
    case Kind::Dispatch:
    case Kind::DispatchIndirect: {
        impl.vk.vkCmdBindPipeline(commands.buffer, VK_PIPELINE_BIND_POINT_COMPUTE,
                                  operation.pipeline);
        std::array<std::byte, detail::kPushConstantBytes> push{};
        const std::uint64_t block =
            table_.view().resource->allocation.address + operation.table_offset;
        std::memcpy(push.data(), &block, 8);
        std::memcpy(push.data() + 8, push_words.data() + operation.first_push,
                    operation.num_push * 4);
        impl.vk.vkCmdPushConstants(commands.buffer, impl.kernels->layout(),
                                   VK_SHADER_STAGE_COMPUTE_BIT, 0, 8 + operation.num_push * 4,
                                   push.data());
        if (operation.kind == Kind::Dispatch)
            impl.vk.vkCmdDispatch(commands.buffer, operation.groups.x, operation.groups.y,
                                  operation.groups.z);
        else
            impl.vk.vkCmdDispatchIndirect(commands.buffer,
                                          handle(operation, operation.num_operands),
                                          use(operation, operation.num_operands).offset);
        break;
    }
    case Kind::Native:
        encode_native(operation);
        break;
    case Kind::Copy:
        encode_copy(operation);
        break;
    case Kind::Fill:
        impl.vk.vkCmdFillBuffer(commands.buffer, handle(operation, 0), use(operation, 0).offset,
                                use(operation, 0).bytes, operation.fill_word);
        break;
    }
}

Recording::Recording(Device& device, QueueRole role, std::string name)
    : impl_(std::make_unique<Impl>(device, role, std::move(name))) {
}
Recording::Recording(Recording&&) noexcept = default;
Recording& Recording::operator=(Recording&&) noexcept = default;
Recording::~Recording() = default;

Device& Recording::device() const noexcept {
    return impl_->device;
}
QueueRole Recording::role() const noexcept {
    return impl_->role;
}
const std::string& Recording::name() const noexcept {
    return impl_->name;
}
std::uint64_t Recording::num_operations() const noexcept {
    return impl_->operations.size();
}
void Recording::label(std::string text) {
    impl_->labels.push_back(std::move(text));
}

void Recording::add_dispatch(const KernelCall& call, Groups groups, BufferView indirect) {
    const char* name = call.info.name.data();
    require(call.operands.size() == call.info.operands.size(), impl_->name, name,
            "wrong number of operands");
    require(8 + call.push.size_bytes() <= detail::kPushConstantBytes, impl_->name, name,
            "too many push constants");
    const auto& most = impl_->impl.info.max_workgroup_count;
    require(groups.x <= most[0] && groups.y <= most[1] && groups.z <= most[2], impl_->name, name,
            "the grid is over the device's limit");
    if (!indirect && (groups.x == 0 || groups.y == 0 || groups.z == 0))
        return;
    std::vector<Impl::OperandUse> operation_uses;
    for (std::size_t i = 0; i < call.operands.size(); ++i) {
        require_alive(call.operands[i], impl_->name, name);
        operation_uses.push_back({call.operands[i], call.info.operands[i].access});
    }
    Impl::Operation operation;
    operation.name = name;
    operation.num_operands = static_cast<std::uint32_t>(call.operands.size());
    operation.groups = groups;
    if (indirect) {
        require_alive(indirect, impl_->name, name);
        operation.kind = Impl::Kind::DispatchIndirect;
        operation_uses.push_back({{indirect.resource, indirect.offset, 12}, Access::Read});
    }
    const NativeCode& native = call.info.variants[call.variant].native;
    if (native.text.empty()) {
        operation.pipeline = impl_->impl.kernels->pipeline(call.info, call.variant, call.constants);
    } else {
        require(!indirect, impl_->name, name, "native kernels have no grid on the device");
        operation.kind = Impl::Kind::Native;
        operation.function = impl_->impl.kernels->function(call.info, call.variant);
        operation.native = &native;
    }
    impl_->add(operation, operation_uses, call.push);
}

void Recording::copy(BufferView source, BufferView destination, std::uint64_t burst_bytes) {
    require(source && destination, impl_->name, "copy", "a view has no buffer");
    require(source.bytes == destination.bytes, impl_->name, "copy", "the sizes differ");
    require(source.bytes % 4 == 0 && source.offset % 4 == 0 && destination.offset % 4 == 0,
            impl_->name, "copy", "sizes and offsets must be multiples of 4 bytes");
    require(burst_bytes == UINT64_MAX || (burst_bytes > 0 && burst_bytes % 4 == 0), impl_->name,
            "copy", "a burst must be a multiple of 4 bytes, and not none");
    require(source.resource != destination.resource ||
                !range_of(source).overlaps(range_of(destination)),
            impl_->name, "copy", "the ranges overlap");
    require_alive(source, impl_->name, "copy");
    require_alive(destination, impl_->name, "copy");
    if (source.bytes == 0)
        return;
    Impl::Operation operation;
    operation.kind = Impl::Kind::Copy;
    operation.name = "copy";
    operation.burst_bytes = burst_bytes;
    const std::array<Impl::OperandUse, 2> uses{
        {{source, Access::Read}, {destination, Access::Write}}};
    impl_->add(operation, uses, {});
}

void Recording::fill(BufferView destination, std::uint32_t word) {
    require(static_cast<bool>(destination), impl_->name, "fill", "the view has no buffer");
    require(destination.bytes % 4 == 0 && destination.offset % 4 == 0, impl_->name, "fill",
            "sizes and offsets must be multiples of 4 bytes");
    require_alive(destination, impl_->name, "fill");
    if (destination.bytes == 0)
        return;
    Impl::Operation operation;
    operation.kind = Impl::Kind::Fill;
    operation.name = "fill";
    operation.fill_word = word;
    const std::array<Impl::OperandUse, 1> uses{{{destination, Access::Write}}};
    impl_->add(operation, uses, {});
}

} // namespace bellows
