// SPDX-License-Identifier: MIT
// Constants of four bits each, as engine/matrix_images.hpp has them.
#ifndef BELLOWS_MATRIX_SLOTS_GLSL
#define BELLOWS_MATRIX_SLOTS_GLSL

uint nibble(uint all, uint i) {
    return all >> 4u * i & 15u;
}

// What the bits of an invocation's number add up to.
uint of_lane(uint weights) {
    uint sum = 0u;
    [[unroll]] for (uint bit = 0u; bit < 7u; ++bit) {
        uint weight = nibble(weights, bit);
        sum += weight == 0u ? 0u : (gl_SubgroupInvocationID >> bit & 1u) * weight;
    }
    return sum;
}

#endif
