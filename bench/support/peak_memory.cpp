// SPDX-License-Identifier: MIT
// The memory loops of peaks.hpp.
#include "support/peak_loop.hpp"
#include "support/peaks.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/words64.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <numeric>

namespace bellows::bench {

namespace {

using Kernel = kernels::PeakMemory;
constexpr std::uint64_t kUnit = 64 * 1024; // bytes of a block of the largest workgroup

/// local_size and run of the kernel.
struct Grid {
    std::uint32_t local_size, run;
};
constexpr Grid kGpuGrids[] = {{128, 1}, {256, 1}, {1024, 1}, {256, 8}};
constexpr Grid kCpuGrids[] = {{8, 64}, {8, 512}, {32, 256}};

std::span<const Grid> grids(const Device& device) {
    return device.info().is_cpu ? std::span<const Grid>(kCpuGrids) : kGpuGrids;
}

/// A kernel that goes through `bytes` of memory, still without its operands, and its workgroups.
struct Loop {
    Loop(const Device& device, Kernel::Variant variant, const Grid& grid, std::uint64_t bytes,
         std::uint32_t seed = 0) {
        const std::uint64_t blocks = bytes / (std::uint64_t{4} * 16 * grid.local_size);
        kernel.variant = variant;
        kernel.constants.local_size = grid.local_size;
        kernel.count = static_cast<std::uint32_t>(bytes / 16);
        kernel.run = grid.run;
        kernel.seed = seed;
        while ((blocks + kernel.run - 1) / kernel.run > device.info().max_workgroup_count[0])
            kernel.run *= 2;
        groups = static_cast<std::uint32_t>((blocks + kernel.run - 1) / kernel.run);
    }

    void run(Device& device) const {
        Recording recording(device, QueueRole::Compute, "pattern");
        recording.dispatch(kernel, {groups});
        device.submit(recording).wait();
    }

    Kernel kernel;
    std::uint32_t groups;
};

/// The words that the workgroups of a reading loop have written, added up.
std::uint32_t total(Device& device, BufferView sums) {
    std::vector<std::uint32_t> words(sums.bytes / 4);
    device.download(sums, std::span<std::uint32_t>(words));
    return std::accumulate(words.begin(), words.end(), std::uint32_t{0});
}

/// Of the pattern with seed 0: 0 + 1 + ... + words - 1.
std::uint32_t pattern_sum(std::uint64_t bytes) {
    const std::uint64_t words = bytes / 4;
    return static_cast<std::uint32_t>(words / 2 * (words - 1)); // even words
}

/// Those that the device runs, on CPUs also in words of 64 bits.
std::vector<Kernel::Variant> variants_of(const Device& device, MemoryLoop kind) {
    using Variant = Kernel::Variant;
    static constexpr Variant kWords[] = {Variant::copy, Variant::read, Variant::write};
    static constexpr Variant kWords64[] = {Variant::copy_words64, Variant::read_words64,
                                           Variant::write_words64};
    const auto at = static_cast<std::size_t>(kind);
    std::vector<Variant> variants{kWords[at]};
    if (serves_words64<Kernel>(device, kWords64[at]))
        variants.push_back(kWords64[at]);
    return variants;
}

void check_result(Device& device, MemoryLoop kind, BufferView destination, std::uint64_t bytes) {
    if (kind != MemoryLoop::Read)
        return expect_pattern(device, destination, 0);
    const std::uint32_t sum = total(device, destination), expected = pattern_sum(bytes);
    if (sum != expected)
        throw Error(ErrorCode::Internal, "the words that a loop has read add up to " +
                                             std::to_string(sum) + " instead of " +
                                             std::to_string(expected));
}

std::uint64_t usual_bytes(const Device& device) {
    constexpr std::uint64_t kMiB = 1024 * 1024;
    const std::uint64_t wanted = (device.info().is_cpu ? 256 : 1024) * kMiB;
    return std::min(wanted, device.info().memory_bytes / 8);
}

} // namespace

void write_pattern(Device& device, BufferView memory, std::uint32_t seed) {
    const Buffer none(device, {.name = "none", .bytes = 16});
    Loop loop(device, Kernel::Variant::write, grids(device)[1], memory.bytes, seed);
    loop.kernel.source = none.view();
    loop.kernel.destination = memory;
    loop.run(device);
}

void expect_pattern(Device& device, BufferView memory, std::uint32_t seed) {
    Loop loop(device, Kernel::Variant::check, grids(device)[1], memory.bytes, seed);
    const Buffer counts(device, {.name = "counts", .bytes = std::uint64_t{loop.groups} * 16});
    loop.kernel.source = memory;
    loop.kernel.destination = counts.view();
    loop.run(device);
    if (const std::uint32_t wrong = total(device, counts.view()); wrong != 0)
        throw Error(ErrorCode::Internal, std::to_string(wrong) + " of " +
                                             std::to_string(memory.bytes / 4) +
                                             " words of memory do not hold what was written");
}

std::string name_of(MemoryLoop kind) {
    static constexpr const char* kNames[] = {"copy", "read", "write"};
    return kNames[static_cast<std::size_t>(kind)];
}

Ceiling memory_peak(Device& device, MemoryLoop kind, std::uint64_t bytes) {
    bytes = ((bytes == 0 ? usual_bytes(device) : bytes) + kUnit - 1) / kUnit * kUnit;
    const bool reads = kind != MemoryLoop::Write, writes = kind != MemoryLoop::Read;
    const double moved = static_cast<double>(bytes) * (reads && writes ? 2 : 1);
    // A reading loop writes a sum per workgroup; there are never more of them than fit.
    const Buffer source(device, {.name = "source", .bytes = reads ? bytes : 16}),
        destination(device, {.name = "destination", .bytes = writes ? bytes : bytes / 128});
    if (reads)
        write_pattern(device, source.view(), 0);
    Ceiling best{name_of(kind), "GB/s"};
    const auto time = [&](const Grid& grid, Kernel::Variant variant) {
        Loop loop(device, variant, grid, bytes);
        loop.kernel.source = source.view();
        loop.kernel.destination =
            writes ? destination.view() : destination.view().sub(0, loop.groups * 16ull);
        if (writes)
            write_pattern(device, destination.view(), 1);
        const double seconds = loop_seconds(device, loop.kernel, loop.groups);
        check_result(device, kind, loop.kernel.destination, bytes);
        if (const double rate = 1e-9 * moved / seconds; rate > best.rate)
            best = {best.name, best.unit, rate, seconds, loop.groups, grid.local_size};
    };
    for (const Grid& grid : grids(device))
        if (grid.local_size <= device.info().max_workgroup_invocations)
            for (const Kernel::Variant variant : variants_of(device, kind))
                time(grid, variant);
    return best;
}

Ceiling copy_peak(Device& device) {
    return memory_peak(device, MemoryLoop::Copy);
}
Ceiling read_peak(Device& device) {
    return memory_peak(device, MemoryLoop::Read);
}
Ceiling write_peak(Device& device) {
    return memory_peak(device, MemoryLoop::Write);
}

} // namespace bellows::bench
