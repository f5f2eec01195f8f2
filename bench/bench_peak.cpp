// SPDX-License-Identifier: MIT
// What the device's units and memory give in loops that do nothing else: f32 FMAs and matrix
// products on registers, and 16-byte accesses to memory. Each loop's result is checked. `--help`
// lists the options.

#include "support/peaks.hpp"
#include "support/program.hpp"

namespace bellows::bench {
namespace {

constexpr const char* kHelp =
    R"(bench_peak: the ceilings of this device, in loops that do nothing else: f32 fused multiply-adds, every
kind of matrix product that it enumerates (bf16 and f16, f32 sums; on CPU drivers only checked), and
memory: copy, read, write, each the best of a few grids. GB/s count each byte once where it is read and
once where it is written.

  --mib N        buffers of the memory loops (default 1024, on CPU drivers 256)
)";

class BenchPeak : public Program {
    std::string help() const override { return kHelp; }

    void take(Arguments& arguments) override {
        if (const auto sizes = arguments.sizes("--mib", "N"); sizes && !sizes->empty())
            bytes_ = sizes->front().front() << 20;
    }

    void add(Device& device) override {
        add_peak("fma_f32", [&device] { return fma_peak(device); });
        for (const MatrixRow& row : matrix_rows(device))
            add_peak("matrix_" + name_of(row), [&device, row] { return matrix_peak(device, row); });
        for (const MemoryLoop loop : {MemoryLoop::Copy, MemoryLoop::Read, MemoryLoop::Write})
            add_peak("memory_" + name_of(loop),
                     [this, &device, loop] { return memory_peak(device, loop, bytes_); });
    }

    void add_peak(const std::string& name, const std::function<Ceiling()>& measured) {
        add_benchmark(name, [measured](benchmark::State& state) {
            for (auto _ : state) {
                const Ceiling peak = measured();
                state.SetIterationTime(peak.seconds);
                if (peak.rate > 0)
                    state.counters[peak.unit] = peak.rate;
                state.SetLabel(std::to_string(peak.groups) + " workgroups of " +
                               std::to_string(peak.local_size));
            }
        });
    }

    std::uint64_t bytes_ = 0; ///< 0: the usual
};

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    bellows::bench::BenchPeak program;
    return program.run(argc, argv);
}
