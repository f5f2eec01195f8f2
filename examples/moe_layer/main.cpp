// SPDX-License-Identifier: MIT
// A program with its own Vulkan device and its own buffer that runs one MoE layer of Bellows on
// them and checks the result on the CPU. No language model, no MPI.
#include "moe_layer.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/vulkan_interop.hpp>

#include <vulkan/vulkan.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

constexpr std::uint64_t kTokens = 64, kHidden = 32, kFfn = 16, kExperts = 8, kTopK = 2;

/// What a host application has anyway.
struct Application {
    VkInstance instance = VK_NULL_HANDLE;
    VkPhysicalDevice physical_device = VK_NULL_HANDLE;
    VkDevice device = VK_NULL_HANDLE;
    VkQueue queue = VK_NULL_HANDLE;
    std::uint32_t family = 0;
    VkBuffer buffer = VK_NULL_HANDLE;
    VkDeviceMemory memory = VK_NULL_HANDLE;

    Application();
    ~Application();
    void create_device();
    void create_buffer(std::uint64_t bytes);
};

void expect(bool good, const char* what) {
    if (!good)
        throw bellows::Error(bellows::ErrorCode::Unsupported, what);
}

Application::Application() {
    VkApplicationInfo application{};
    application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
    application.apiVersion = VK_API_VERSION_1_3;
    VkInstanceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
    info.pApplicationInfo = &application;
    expect(vkCreateInstance(&info, nullptr, &instance) == VK_SUCCESS, "no Vulkan instance");
    std::uint32_t count = 1;
    vkEnumeratePhysicalDevices(instance, &count, &physical_device);
    expect(count == 1, "no Vulkan device");
    create_device();
    create_buffer(2 * kTokens * kHidden * 4);
}

void Application::create_device() {
    const bellows::RequiredFeatures wanted(instance, physical_device);
    expect(wanted.unmet().empty(), "the device lacks what Bellows needs");
    std::uint32_t count = 0;
    vkGetPhysicalDeviceQueueFamilyProperties(physical_device, &count, nullptr);
    std::vector<VkQueueFamilyProperties> families(count);
    vkGetPhysicalDeviceQueueFamilyProperties(physical_device, &count, families.data());
    while (family + 1 < count && !(families[family].queueFlags & VK_QUEUE_COMPUTE_BIT))
        ++family;
    const float priority = 1;
    VkDeviceQueueCreateInfo queue_info{};
    queue_info.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
    queue_info.queueFamilyIndex = family;
    queue_info.queueCount = 1;
    queue_info.pQueuePriorities = &priority;
    VkDeviceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
    info.pNext = wanted.features(); // the application's own features may follow
    info.queueCreateInfoCount = 1;
    info.pQueueCreateInfos = &queue_info;
    info.enabledExtensionCount = static_cast<std::uint32_t>(wanted.extensions().size());
    info.ppEnabledExtensionNames = wanted.extensions().data();
    expect(vkCreateDevice(physical_device, &info, nullptr, &device) == VK_SUCCESS, "no device");
    vkGetDeviceQueue(device, family, 0, &queue);
}

void Application::create_buffer(std::uint64_t bytes) {
    VkBufferCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    info.size = bytes;
    info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
    expect(vkCreateBuffer(device, &info, nullptr, &buffer) == VK_SUCCESS, "no buffer");
    VkMemoryRequirements needs{};
    vkGetBufferMemoryRequirements(device, buffer, &needs);
    VkMemoryAllocateFlagsInfo flags{};
    flags.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO;
    flags.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
    VkMemoryAllocateInfo allocate{};
    allocate.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
    allocate.pNext = &flags;
    allocate.allocationSize = needs.size;
    while (!(needs.memoryTypeBits >> allocate.memoryTypeIndex & 1))
        ++allocate.memoryTypeIndex;
    expect(vkAllocateMemory(device, &allocate, nullptr, &memory) == VK_SUCCESS, "no memory");
    expect(vkBindBufferMemory(device, buffer, memory, 0) == VK_SUCCESS, "memory does not bind");
}

Application::~Application() {
    vkDestroyBuffer(device, buffer, nullptr);
    vkFreeMemory(device, memory, nullptr);
    vkDestroyDevice(device, nullptr);
    vkDestroyInstance(instance, nullptr);
}

std::vector<float> values(std::uint64_t count, std::uint32_t seed) {
    std::vector<float> list(count);
    for (float& value : list) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(seed >> 8) / 16777216.0f - 0.5f;
    }
    return list;
}

double dot(const float* a, const float* b, std::uint64_t count) {
    return std::inner_product(a, a + count, b, 0.0);
}

/// The layer on one token in f64: sigmoid scores, the best two, their weights normalised.
std::vector<double> reference(const float* x, const std::vector<float>& router,
                              const std::vector<float>& gate_up, const std::vector<float>& down) {
    std::vector<double> score(kExperts);
    for (std::uint64_t e = 0; e < kExperts; ++e)
        score[e] = 1 / (1 + std::exp(-dot(x, &router[e * kHidden], kHidden)));
    std::vector<std::uint64_t> order(kExperts);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::uint64_t a, std::uint64_t b) { return score[a] > score[b]; });
    const double sum = score[order[0]] + score[order[1]];
    std::vector<double> y(kHidden, 0.0);
    for (std::uint64_t k = 0; k < kTopK; ++k) {
        const std::uint64_t e = order[k];
        std::vector<float> hidden(kFfn);
        for (std::uint64_t i = 0; i < kFfn; ++i) {
            const double gate = dot(x, &gate_up[(e * 2 * kFfn + i) * kHidden], kHidden);
            const double up = dot(x, &gate_up[(e * 2 * kFfn + kFfn + i) * kHidden], kHidden);
            hidden[i] = static_cast<float>(gate / (1 + std::exp(-gate)) * up);
        }
        for (std::uint64_t i = 0; i < kHidden; ++i)
            y[i] += score[e] / sum * dot(hidden.data(), &down[(e * kHidden + i) * kFfn], kFfn);
    }
    return y;
}

int run() {
    using bellows::DType;
    Application application;
    bellows::ExternalDevice external;
    external.instance = application.instance;
    external.physical_device = application.physical_device;
    external.device = application.device;
    external.queues = {{application.queue, application.family, bellows::QueueRole::Compute}};
    const auto device = bellows::Device::adopt(external, {});

    const auto x = values(kTokens * kHidden, 1), router = values(kExperts * kHidden, 2);
    const auto gate_up = values(kExperts * 2 * kFfn * kHidden, 3);
    const auto down = values(kExperts * kHidden * kFfn, 4);
    // x and y stand in the application's own buffer.
    const std::uint64_t bytes = kTokens * kHidden * 4;
    bellows::Buffer own = bellows::wrap_buffer(*device, application.buffer, 2 * bytes, "own");
    const auto input =
        bellows::TensorView::contiguous(own.view().sub(0, bytes), DType::F32, {kTokens, kHidden});
    const auto output = bellows::TensorView::contiguous(own.view().sub(bytes, bytes), DType::F32,
                                                        {kTokens, kHidden});
    MoeLayer layer{*device, kTokens, kHidden, kFfn, kExperts, kTopK};
    const auto w_router = layer.tensor(DType::F32, {kExperts, kHidden});
    const auto w_gate_up = layer.tensor(DType::F32, {kExperts, 2 * kFfn, kHidden});
    const auto w_down = layer.tensor(DType::F32, {kExperts, kHidden, kFfn});
    device->upload(input.buffer, x);
    device->upload(w_router.buffer, router);
    device->upload(w_gate_up.buffer, gate_up);
    device->upload(w_down.buffer, down);

    bellows::Recording recording(*device, bellows::QueueRole::Compute, "MoE layer");
    layer.record(recording, input, w_router, w_gate_up, w_down, output);
    device->submit(recording).wait();

    std::vector<float> y(kTokens * kHidden);
    device->download(output.buffer, y);
    double worst = 0;
    for (std::uint64_t t = 0; t < kTokens; ++t) {
        const auto expected = reference(&x[t * kHidden], router, gate_up, down);
        for (std::uint64_t i = 0; i < kHidden; ++i) {
            const double error = std::abs(y[t * kHidden + i] - expected[i]);
            worst = std::isnan(error) ? HUGE_VAL : std::max(worst, error);
        }
    }
    std::printf("one MoE layer, %llu tokens, %llu experts, on %s: largest error %.1e\n",
                static_cast<unsigned long long>(kTokens), static_cast<unsigned long long>(kExperts),
                device->info().name.c_str(), worst);
    return worst < 1e-5 ? 0 : 1;
}

} // namespace

int main() {
    try {
        return run();
    } catch (const bellows::Error& error) {
        std::fprintf(stderr, "moe_layer: %s\n", error.what());
        return 3;
    }
}
