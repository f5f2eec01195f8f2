// SPDX-License-Identifier: MIT
#pragma once

// What a Device is made of. One mutex guards hazard state, tickets and the pump; compiling
// pipelines and encoding command buffers happen outside it.

#include "allocator.hpp"
#include "device_mutex.hpp"
#include "gemm_choice.hpp"
#include "happens_before.hpp"
#include "instance.hpp"
#include "kernel_cache.hpp"
#include "pump.hpp"
#include "resource.hpp"
#include "spare_commands.hpp"
#include "ticket.hpp"
#include "trace_impl.hpp"
#include "vulkan.hpp"

#include <bellows/engine/device.hpp>

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <typeindex>
#include <vector>

namespace bellows {

struct Device::Impl {
    explicit Impl(Device& owner);

    Device& self;
    DeviceOptions options;
    DeviceInfo info;

    volk::VolkInstanceTable vki{};
    volk::VolkDeviceTable vk{};
    PFN_vkGetInstanceProcAddr get_instance_proc = nullptr;
    std::shared_ptr<const detail::Instance> own_instance; ///< null for an adopted device
    VkInstance instance = VK_NULL_HANDLE;
    VkPhysicalDevice physical_device = VK_NULL_HANDLE;
    VkDevice device = VK_NULL_HANDLE;
    VkDebugUtilsMessengerEXT messenger = VK_NULL_HANDLE;
    bool owns_device = true;
    bool has_memory_budget = false;
    std::function<void()> lock_queues, unlock_queues;

    /// Distinct VkQueues; each role names one of them.
    struct Queue {
        VkQueue handle = VK_NULL_HANDLE;
        std::uint32_t family = 0;
        std::uint32_t timestamp_bits = 0;
        detail::Timeline timeline;
        std::string last_reached; ///< the newest batch known to have ended
    };
    std::vector<std::unique_ptr<Queue>> queues;
    std::array<std::uint32_t, kNumQueueRoles> queue_of_role{};
    detail::SpareCommands spare_commands;
    std::vector<std::uint32_t> families; ///< distinct ones, for concurrent sharing
    std::map<VkSemaphore, detail::Timeline> external_timelines; ///< wrap_timeline()

    detail::DeviceMutex mutex;
    std::condition_variable_any changed; ///< some ticket left Held, or became final
    std::optional<Error> failure;        ///< the first; later submissions throw it
    std::uint64_t num_lane_jobs = 0;     ///< posted and not ended
    /// Messages of the validation layer, which come from any thread.
    struct Validation {
        std::mutex mutex;
        std::vector<std::string> messages;
        std::atomic<bool> any{false};

        void add(const char* message) {
            const std::scoped_lock lock(mutex);
            messages.emplace_back(message);
            any = true;
        }
        std::string first() {
            if (!any)
                return "";
            const std::scoped_lock lock(mutex);
            return messages.front();
        }
    };
    mutable Validation validation;

    std::unique_ptr<detail::Allocator> allocator;
    std::unique_ptr<detail::KernelCache> kernels;
    std::unique_ptr<HappensBefore> checker;
    std::unique_ptr<detail::Trace> trace;
    std::string traced_op; ///< of the tickets that are made
    std::unique_ptr<detail::Pump> pump;
    detail::GemmChoice gemm;
    /// What the ops remember of this device; a T is made by the first that asks for one. Any
    /// thread.
    template <class T>
    T& memory_of() {
        const std::scoped_lock lock(memories_mutex);
        std::shared_ptr<void>& memory = memories[std::type_index(typeid(T))];
        if (!memory)
            memory = std::make_shared<T>();
        return *static_cast<T*>(memory.get());
    }
    std::mutex memories_mutex;
    std::map<std::type_index, std::shared_ptr<void>> memories;
    std::atomic<std::int64_t> num_barriers{0}, num_waits{0}, num_releases{0}; ///< for faults
    std::atomic<std::int64_t> num_submissions{0};

    std::uint32_t queue_index(QueueRole role) const noexcept {
        return queue_of_role[static_cast<std::size_t>(role)];
    }
    VkSemaphore create_timeline() const;
    /// A lane's, of what has ended. Needs the mutex.
    void signal(const detail::Timeline& lane, const std::string& name);
    /// Needs the mutex.
    detail::TicketPtr new_ticket(std::string name);
    /// Throws the sticky failure, if there is one. Needs the mutex.
    void throw_if_failed() const;
    /// Records the first failure. Needs the mutex.
    void set_failure(const Error& error);
};

} // namespace bellows
