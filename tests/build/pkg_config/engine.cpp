// SPDX-License-Identifier: MIT
#include <bellows/engine/device.hpp>
#include <bellows/engine/vulkan_interop.hpp>

int main() {
    return bellows::Device::create({})->info().name.empty() ? 1 : 0;
}
