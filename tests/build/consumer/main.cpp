// SPDX-License-Identifier: MIT

// Uses the engine from outside the house: lists the kernels and runs one of them on the first
// device that serves.

#include <bellows/engine/device.hpp>
#include <bellows/engine/vulkan_interop.hpp>
#include <bellows/kernels/kernels.hpp>

#include <cstdint>
#include <iostream>
#include <vector>

int main() {
    for (const bellows::KernelInfo* kernel : bellows::kernels::all())
        std::cout << kernel->name << " (" << kernel->variants.size() << " variants)\n";
    try {
        const auto device = bellows::Device::create({});
        bellows::Buffer words(*device, {.name = "words", .bytes = 1000 * sizeof(std::uint32_t)});
        bellows::Recording recording(*device, bellows::QueueRole::Compute, "fill");
        recording.dispatch(
            bellows::kernels::FillWords{
                .destination = words.view(), .num_words = 1000, .value = 0x2a},
            {4});
        device->submit(recording).wait();
        std::vector<std::uint32_t> values(1000);
        device->download(words.view(), std::span<std::uint32_t>(values));
        for (const std::uint32_t value : values)
            if (value != 0x2a)
                return 1;
        std::cout << "consumer: filled on " << device->info().name << "\n";
        return 0;
    } catch (const bellows::Error& error) {
        std::cerr << "consumer: " << error.what() << "\n";
        return 1;
    }
}
