// SPDX-License-Identifier: MIT
#pragma once

// What a device's units and memory give in loops that do nothing else: the ceilings beside which
// other figures are shown. Each loop's result is checked; a wrong one throws Error{Internal}. Each
// call measures anew, for about a second on GPUs; programs ask once, through Program::measure.

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm_plan.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows::bench {

/// A rate that figures are shown as a share of, and the run that reached it.
struct Ceiling {
    std::string name;                         ///< "copy", "fma", "matrix", ...
    std::string unit;                         ///< the counter that it bounds: "GB/s" or "GFLOPS"
    double rate = 0;                          ///< in that unit; 0: unknown, no share is shown
    double seconds = 0;                       ///< of one run of the loop
    std::uint32_t groups = 0, local_size = 0; ///< of the grid that was fastest
};

/// "fma": f32 fused multiply-adds on registers, two operations each.
Ceiling fma_peak(Device& device);
/// The clock of a GPU that has little to do falls, and takes most of a second of work to rise. On a
/// CPU, nothing.
void raise_clock(Device& device);

/// A kind of matrix product of the device's matrix units, f32 sums.
struct MatrixRow {
    GemmClass::Units units = GemmClass::Units::None;
    MatrixShape shape;
};
/// "bf16_f32_16x16x16"
std::string name_of(const MatrixRow& row);
/// Every row that the device enumerates and a kernel of this build can run.
std::vector<MatrixRow> matrix_rows(const Device& device);
/// "matrix": products on registers. On CPU drivers, where compilers take the products out of the
/// loop, it is only checked and the rate is 0.
Ceiling matrix_peak(Device& device, const MatrixRow& row);
/// That of the device's numeric class; rate 0 for a class without units.
Ceiling matrix_peak(Device& device);

enum class MemoryLoop : std::uint8_t { Copy, Read, Write };
/// "copy", "read", "write"
std::string name_of(MemoryLoop kind);
/// Of that many bytes, by default several times the caches: 1 GiB on GPUs
/// that have it, 256 MiB on CPU drivers. Each byte counts once where it is read and once where it
/// is written. bytes: rounded up to 64 KiB.
Ceiling memory_peak(Device& device, MemoryLoop kind, std::uint64_t bytes = 0);
Ceiling copy_peak(Device& device);
Ceiling read_peak(Device& device);
Ceiling write_peak(Device& device);

/// Fills memory so that word w holds w + seed, mod 2^32. A multiple of 64 KiB.
void write_pattern(Device& device, BufferView memory, std::uint32_t seed);
/// Throws Error{Internal} that says how many words are not so.
void expect_pattern(Device& device, BufferView memory, std::uint32_t seed);

} // namespace bellows::bench
