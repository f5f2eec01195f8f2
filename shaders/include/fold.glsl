// SPDX-License-Identifier: MIT
// FOLD_VALUES sums, each over FOLD_LANES (a power of two) invocations of a workgroup: by shuffles
// inside a subgroup and then in the order of the subgroups (FOLD_BY_SUBGROUP 1, for lanes side by side
// in full subgroups), or in workgroup memory, 16 at a time. The order depends on FOLD_LANES and the
// subgroup size alone. Kernels define all three, constants, and include this; local_size is the
// workgroup's. With one lane there is nothing to fold.
// Shared memory: 4 * FOLD_VALUES * FOLD_LANES bytes with more than one lane, by subgroups an eighth.
#ifndef BELLOWS_FOLD_GLSL
#define BELLOWS_FOLD_GLSL

#if FOLD_BY_SUBGROUP
#extension GL_KHR_shader_subgroup_shuffle : require

const uint kLeastSubgroup = 8u;
shared float partial[FOLD_VALUES * (FOLD_LANES > kLeastSubgroup ? FOLD_LANES / kLeastSubgroup : 1u)];

uint fold_parts() {
    return max(FOLD_LANES / gl_SubgroupSize, 1u);
}

// All lanes call it.
void put_partial(uint value, uint lane, float x) {
    for (uint reach = 1u; reach < min(FOLD_LANES, gl_SubgroupSize); reach <<= 1u) {
        x += subgroupShuffleXor(x, reach);
    }
    if (lane % gl_SubgroupSize == 0u) {
        partial[value * fold_parts() + lane / gl_SubgroupSize] = x;
    }
}

// All invocations call it when they have put theirs.
void fold() {
    if (FOLD_LANES > gl_SubgroupSize) {
        barrier();
    } else {
        subgroupMemoryBarrierShared();
        subgroupBarrier();
    }
}

// A value of the invocation's own lanes.
float folded(uint value) {
    float sum = partial[value * fold_parts()];
    for (uint i = 1u; i < fold_parts(); ++i) {
        sum += partial[value * fold_parts() + i];
    }
    return sum;
}

#else

shared float partial[FOLD_LANES > 1u ? FOLD_VALUES * FOLD_LANES : 1u];

void put_partial(uint value, uint lane, float x) {
    partial[value * FOLD_LANES + lane] = x;
}

void fold() {
    const uint all = uint(findMSB(FOLD_LANES));
    uint left = all; // lanes that are left, and how many stay of them, as powers of two
    barrier();
    do {
        uint stay = left - min(left, 4u), lanes_stay = 1u << stay, ways = 1u << left - stay;
        for (uint i = gl_LocalInvocationIndex; i < FOLD_VALUES << stay; i += local_size) {
            uint at = (i >> stay << all) + (i & lanes_stay - 1u);
            float sum = partial[at];
            for (uint j = 1u; j < ways; ++j) {
                sum += partial[at + (j << stay)];
            }
            partial[at] = sum;
        }
        barrier();
        left = stay;
    } while (left > 0u);
}

float folded(uint value) {
    return partial[value * FOLD_LANES];
}

#endif

#endif
