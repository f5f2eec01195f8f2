// SPDX-License-Identifier: MIT
// What every kernel needs: references to buffers by address and loop hints. Nothing here asks for
// an optional device feature.
#ifndef BELLOWS_COMMON_GLSL
#define BELLOWS_COMMON_GLSL

#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_EXT_control_flow_attributes : require
#extension GL_KHR_shader_subgroup_ballot : require

uint div_up(uint value, uint divisor) {
    return (value + divisor - 1u) / divisor;
}

#endif
