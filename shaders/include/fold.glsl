// SPDX-License-Identifier: MIT
// FOLD_VALUES sums, each over FOLD_LANES (a power of two) invocations of a workgroup, eight at a time:
// the order depends on FOLD_LANES alone. Kernels define both, constants, and include this; local_size
// is the workgroup's. With one lane there is nothing to fold.
// Shared memory: 4 * FOLD_VALUES * FOLD_LANES bytes with more than one lane.
#ifndef BELLOWS_FOLD_GLSL
#define BELLOWS_FOLD_GLSL

shared float partial[FOLD_LANES > 1u ? FOLD_VALUES * FOLD_LANES : 1u];

void put_partial(uint value, uint lane, float x) {
    partial[value * FOLD_LANES + lane] = x;
}

// All invocations call it when they have put theirs.
void fold() {
    barrier();
    uint left = FOLD_LANES;
    do {
        uint ways = min(left, 8u), width = left / ways;
        for (uint i = gl_LocalInvocationIndex; i < FOLD_VALUES * width; i += local_size) {
            uint at = i / width * FOLD_LANES + i % width;
            float sum = partial[at];
            for (uint j = 1u; j < ways; ++j) {
                sum += partial[at + j * width];
            }
            partial[at] = sum;
        }
        barrier();
        left = width;
    } while (left > 1u);
}

float folded(uint value) {
    return partial[value * FOLD_LANES];
}

#endif
