// SPDX-License-Identifier: MIT
// How many slots of a workgroup's block go to each expert (or route), for the placement that follows
// (moe_layout.comp). Integer sums in workgroup memory: the order of the atomics is invisible. Included
// after the constants local_size and counters, how many are counted at most; 0: none.
#ifndef BELLOWS_BLOCK_COUNTS_GLSL
#define BELLOWS_BLOCK_COUNTS_GLSL

shared uint block_counts[counters + 1u];

// Behind whatever read them before.
void clear_counts() {
    barrier();
    for (uint i = gl_LocalInvocationIndex; i < counters; i += local_size) {
        block_counts[i] = 0u;
    }
    barrier();
}

void count(uint counter) {
    atomicAdd(block_counts[counter], 1u);
}

#endif
