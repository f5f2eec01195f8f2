// SPDX-License-Identifier: MIT
// What Hopper's kernels are made of: barriers in shared memory, tensor maps and the copies that
// they describe, and products of warpgroups. Names follow the PTX instructions.
#pragma once

#include <cstdint>

namespace hopper {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// --- mbarriers: addresses are those of shared memory

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Arrives, and the phase also waits for so many bytes of copies.
__device__ __forceinline__ void arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; "
                 "@p bra done; bra again; done: }" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

// --- tensor maps

constexpr u32 kMapBytes = 128;

/// Three dimensions of elements, the first of them contiguous; boxes of 128 bytes x box_rows x 1 that
/// arrive in shared memory with the swizzle of 128 bytes, and zeros for what lies outside.
struct Matrices {
    u64 address;
    u32 columns, rows, count;
    u64 row_bytes, matrix_bytes; ///< multiples of 16
    u32 box_rows;
};

/// Writes a map into zeroed shared memory, with the fields that PTX documents and no others.
/// kElement: bytes of an element, 2: bf16, 1: codes.
template <u32 kElement>
__device__ __forceinline__ void write_map(u32 map, const Matrices& m) {
#define BELLOWS_REPLACE(field, type, constraint, value)                                            \
    asm volatile("tensormap.replace.tile." field ".shared::cta.b1024." type " [%0], %1;" ::"r"(    \
                     map),                                                                         \
                 constraint(value)                                                                 \
                 : "memory")
#define BELLOWS_REPLACE_AT(field, at, type, constraint, value)                                     \
    asm volatile("tensormap.replace.tile." field ".shared::cta.b1024." type " [%0], " at           \
                 ", %1;" ::"r"(map),                                                               \
                 constraint(value)                                                                 \
                 : "memory")
#define BELLOWS_REPLACE_CODE(field, code)                                                          \
    asm volatile("tensormap.replace.tile." field ".shared::cta.b1024.b32 [%0], " code ";" ::"r"(   \
                     map)                                                                          \
                 : "memory")
    BELLOWS_REPLACE("global_address", "b64", "l", m.address);
    BELLOWS_REPLACE("rank", "b32", "r", 2u); // less one
    BELLOWS_REPLACE_AT("box_dim", "0", "b32", "r", 128u / kElement);
    BELLOWS_REPLACE_AT("box_dim", "1", "b32", "r", m.box_rows);
    BELLOWS_REPLACE_AT("box_dim", "2", "b32", "r", 1u);
    BELLOWS_REPLACE_AT("global_dim", "0", "b32", "r", m.columns);
    BELLOWS_REPLACE_AT("global_dim", "1", "b32", "r", m.rows);
    BELLOWS_REPLACE_AT("global_dim", "2", "b32", "r", m.count);
    BELLOWS_REPLACE_AT("global_stride", "0", "b64", "l", m.row_bytes);
    BELLOWS_REPLACE_AT("global_stride", "1", "b64", "l", m.matrix_bytes);
    BELLOWS_REPLACE_AT("element_stride", "0", "b32", "r", 1u);
    BELLOWS_REPLACE_AT("element_stride", "1", "b32", "r", 1u);
    BELLOWS_REPLACE_AT("element_stride", "2", "b32", "r", 1u);
    if (kElement == 2)
        BELLOWS_REPLACE_CODE("elemtype", "0xA"); // bf16
    else
        BELLOWS_REPLACE_CODE("elemtype", "0x0"); // u8
    BELLOWS_REPLACE_CODE("interleave_layout", "0x0");
    BELLOWS_REPLACE_CODE("swizzle_mode", "0x3"); // 128 bytes
    BELLOWS_REPLACE_CODE("fill_mode", "0x0");
#undef BELLOWS_REPLACE
#undef BELLOWS_REPLACE_AT
#undef BELLOWS_REPLACE_CODE
}

/// Copies a map from shared to device memory and makes it ready for copies of this thread. A whole
/// warp calls.
__device__ __forceinline__ void publish_map(u64 map, u32 from) {
    asm volatile("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync."
                 "aligned [%0], [%1], 128;" ::"l"(map),
                 "r"(from)
                 : "memory");
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

/// The box at (column, row, matrix) into shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void load_box(u32 to, u64 map, u32 column, u32 row, u32 matrix,
                                         u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
                 "l"(map), "r"(column), "r"(row), "r"(matrix), "r"(barrier)
                 : "memory");
}

// --- wgmma

/// An operand in shared memory with the swizzle of 128 bytes. stride: from 8 rows of 128 bytes to
/// the next 8. lead: from 64 columns to the next 64, where memory has k as its rows.
__device__ __forceinline__ u64 descriptor(u32 address, u32 lead, u32 stride) {
    return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(lead >> 4) << 16 |
           static_cast<u64>(stride >> 4) << 32 | static_cast<u64>(1) << 62;
}
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Until all but so many groups have ended.
template <int kLeft>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

#define BELLOWS_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BELLOWS_OUT16(i)                                                                           \
    BELLOWS_OUT4(i), BELLOWS_OUT4(i + 4), BELLOWS_OUT4(i + 8), BELLOWS_OUT4(i + 12)
#define BELLOWS_OUT32(i) BELLOWS_OUT16(i), BELLOWS_OUT16(i + 16)
#define BELLOWS_LIST32                                                                             \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "   \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BELLOWS_LIST64                                                                             \
    BELLOWS_LIST32                                                                                 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BELLOWS_LIST128                                                                            \
    BELLOWS_LIST64                                                                                 \
    ", %64, %65, %66, %67, "                                                                       \
    "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, "   \
    "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "     \
    "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "   \
    "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

/// d += a b for 64 rows, all columns and 16 of k. kAByK: memory has k as the rows of A.
template <bool kAByK, bool kBByK>
__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" BELLOWS_LIST32
                 "}, %32, %33, 1, 1, 1, %34, %35;"
                 : BELLOWS_OUT32(0)
                 : "l"(a), "l"(b), "n"(kAByK), "n"(kBByK));
}
template <bool kAByK, bool kBByK>
__device__ __forceinline__ void multiply(float (&d)[128], u64 a, u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" BELLOWS_LIST128
                 "}, %128, %129, 1, 1, 1, %130, %131;"
                 : BELLOWS_OUT32(0), BELLOWS_OUT32(32), BELLOWS_OUT32(64), BELLOWS_OUT32(96)
                 : "l"(a), "l"(b), "n"(kAByK), "n"(kBByK));
}

/// d = a b, or d += a b, for 64 rows, all columns and 32 codes of k, both e4m3.
__device__ __forceinline__ void multiply_codes(float (&d)[64], u64 a, u64 b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" BELLOWS_LIST64
                 "}, %64, %65, p, 1, 1;}"
                 : BELLOWS_OUT32(0), BELLOWS_OUT32(32)
                 : "l"(a), "l"(b), "r"(static_cast<u32>(add)));
}

// --- words of four bytes

/// Copies one, while this thread goes on.
__device__ __forceinline__ void copy_word(u32 to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
/// Copies four, at multiples of 16 bytes.
__device__ __forceinline__ void copy_words(u32 to, const float* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// Arrives when this thread's copies of words have arrived.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ float read_shared(u32 from) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
    return x;
}
__device__ __forceinline__ float2 read_shared2(u32 from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
}

/// Writes to shared memory before it become visible to copies and products behind it.
__device__ __forceinline__ void fence_shared_writes() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

} // namespace hopper
