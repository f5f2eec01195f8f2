// SPDX-License-Identifier: MIT
// Seeded faults for the test of the shader bank: each variant but the first breaks the accesses
// that the manifest declares in a way that qualifiers do not see. Never part of the bank.
#version 460
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_buffer_reference_uvec2 : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_GOOGLE_include_directive : require
#include "cheats.kernel.glsl"

layout(buffer_reference, scalar) buffer AnyWords { uint v[]; };

// Through a function and a variable, so that the address travels.
uvec2 moved(uvec2 address, uint words) {
    uint carry;
    uint low = uaddCarry(address.x, 4u * words, carry);
    return uvec2(low, address.y + carry);
}

void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i >= push.num_words)
        return;
    uint value = push.operands.source.v[i];
#if STORE_BY_CAST
    AnyWords(moved(uvec2(push.operands.source), i)).v[0] = value;
#elif LOAD_BY_CAST
    value += AnyWords(moved(uvec2(push.operands.destination), i)).v[0];
#elif STORE_BY_SELECTION
    uvec2 address = uvec2(push.operands.destination);
    for (uint k = 0u; k < value; ++k)
        address = k == 7u ? uvec2(push.operands.source) : moved(address, 1u);
    AnyWords(address).v[0] = value;
#elif STORE_ANYWHERE
    AnyWords(uvec2(value, push.num_words)).v[0] = value;
#endif
    push.operands.destination.v[i] = value;
}
