// SPDX-License-Identifier: MIT
// How the groups of four elements of flat tensors are shared out: a workgroup takes runs of
// run * local_size neighbouring ones (both constants of the kernel that includes this after its
// generated header), so that it reads memory in order. Grid-stride.
// FOR_FLAT(i, count) { … } END_FLAT
#ifndef BELLOWS_FLAT_GLSL
#define BELLOWS_FLAT_GLSL

layout(local_size_x_id = 0) in;

#define FOR_FLAT(i, count)                                                                         \
    for (uint flat_first = gl_WorkGroupID.x * run * local_size; flat_first < (count);         \
         flat_first += gl_NumWorkGroups.x * run * local_size) {                               \
        uint flat_end = min(flat_first + run * local_size, (count));                          \
        for (uint i = flat_first + gl_LocalInvocationIndex; i < flat_end; i += local_size)
#define END_FLAT }

#endif
