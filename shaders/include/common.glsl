// SPDX-License-Identifier: MIT
// What every kernel needs: references to buffers by address, loop hints, and the counted loop.
// Nothing here asks for an optional device feature.
#ifndef BELLOWS_COMMON_GLSL
#define BELLOWS_COMMON_GLSL

#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_ballot : require

// FOR_COUNTED(k, first, end) { … } NEXT_COUNTED(k, end, step): for (k = first; k < end; k += step)
// for bodies that load at an address which is the same for the whole subgroup, that is, one that
// depends on k, on other loop counters of this kind and on the workgroup only. Mesa 26's lavapipe
// runs the body of a loop that tests at its head (`for`, `while`) once more with an empty mask, and
// does not mask such loads: it would read element `end`, which may lie behind the last page, and
// read it even when the loop has nothing to do. A test at the end, behind a guard, is safe; so is a
// load at an address of the invocation's own, and any store. No `continue` in such a body: with one,
// the compiler moves the test to the head of the loop again.
#define FOR_COUNTED(k, first, end)                                                                 \
    {                                                                                              \
        uint k = (first);                                                                          \
        if (k < (end))                                                                             \
            do
#define NEXT_COUNTED(k, end, step)                                                                 \
    while ((k += (step)) < (end));                                                                 \
    }

uint div_up(uint value, uint divisor) {
    return (value + divisor - 1u) / divisor;
}

#endif
