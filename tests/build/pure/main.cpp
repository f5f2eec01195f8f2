// SPDX-License-Identifier: MIT
// What a rank of DeepSeek-V3's shape takes on 2048 devices, without a device.
#include <bellows/plan/memory_estimate.hpp>
#include <bellows/schedule/simulate.hpp>
#include <bellows/shape/presets.hpp>

#include <cstdio>

int main() {
    const bellows::ModelConfig model = bellows::load_model("v3-671b");
    bellows::TrainingShape shape;
    shape.precision = bellows::Precision::FP8;
    shape.pipeline = bellows::ScheduleKind::DualPipe;
    shape.pp = 16;
    shape.ep = 64;
    shape.seq = 4096;
    shape.micro_batches = 40;
    shape.batch = 5120;
    const bellows::RunLayout layout = bellows::resolve_layout(model, shape, 2048);
    const bellows::MemoryEstimate memory = bellows::estimate_memory(model, shape, layout, 0);
    std::printf("dp %u, a rank takes %s\n", layout.dp,
                bellows::describe_memory(memory.bytes).c_str());
    return layout.dp == 128 && memory.total() > 0 ? 0 : 1;
}
