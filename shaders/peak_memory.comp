// SPDX-License-Identifier: MIT
// The rates at which the device streams memory, 16 bytes an access: the ceilings that kernels which
// move bytes are shown as a share of. In word w of a buffer of the pattern stands w + seed.
//   copy   destination[i] = source[i]
//   read   destination[workgroup] = sum of the workgroup's source[i]
//   write  destination = the pattern
//   check  destination[workgroup] = how many words of the workgroup's source[i] are not the pattern
// Sums are those of u32, by component.
//   source [count] uvec4, destination [count] or [workgroups] uvec4; count is a multiple of
//   4 * local_size
// Dispatch: as many workgroups as cover count; each takes `run` neighbouring blocks of
// 4 * local_size, so that on CPUs it goes through memory in order.
// Shared memory: read and check: 16 * local_size bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/words64.glsl"
#include "peak_memory.kernel.glsl"

#define COPY 0
#define READ 1
#define WRITE 2
#define CHECK 3

layout(local_size_x_id = 0) in;

const uint kAtOnce = 4u;

uvec4 pattern(uint i) {
    return 4u * i + uvec4(0u, 1u, 2u, 3u) + push.seed;
}

#if LOOP == READ || LOOP == CHECK
shared uvec4 partial[local_size];

void store_sum(uvec4 sum) {
    uint lane = gl_LocalInvocationIndex;
    partial[lane] = sum;
    barrier();
    for (uint width = local_size / 2u; width > 0u; width /= 2u) {
        if (lane < width) {
            partial[lane] += partial[lane + width];
        }
        barrier();
    }
    if (lane == 0u) {
        push.operands.destination.v[gl_WorkGroupID.x] = partial[0];
    }
}
#endif

void main() {
    uint block = kAtOnce * local_size;
    uint begin = gl_WorkGroupID.x * push.run * block;
    uint end = min(begin + push.run * block, push.count);
    uvec4 sum = uvec4(0u);
    for (uint first = begin + gl_LocalInvocationIndex; first < end; first += block) {
        uvec4 value[kAtOnce];
        [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
            uint i = first + j * local_size;
#if LOOP == WRITE
            value[j] = pattern(i);
#else
            value[j] = read_uvec4(uvec2(push.operands.source), i);
#endif
        }
        [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
            uint i = first + j * local_size;
#if LOOP == READ
            sum += value[j];
#elif LOOP == CHECK
            sum += uvec4(notEqual(value[j], pattern(i)));
#else
            write_uvec4(uvec2(push.operands.destination), i, value[j]);
#endif
        }
    }
#if LOOP == READ || LOOP == CHECK
    store_sum(sum);
#endif
}
