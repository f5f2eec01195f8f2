// SPDX-License-Identifier: MIT
// The n candidates with the greatest keys in descending order, equals by ascending id.
//   Kernels define before: uvec2 candidate(uint base, uint i), a key and an id, key 0 for none;
//   void keep_candidate(uint at, uint key, uint id).
#ifndef BELLOWS_SAMPLING_TOP_GLSL
#define BELLOWS_SAMPLING_TOP_GLSL

// The best of the invocation's own candidates behind the last one that was taken.
uvec2 own_best(uint base, uint count, uint last_key, uint last_id) {
    uint key = 0u, id = kNoToken;
    FOR_COUNTED(i, gl_LocalInvocationIndex, count) {
        uvec2 c = candidate(base, i);
        if (c.x < last_key || (c.x == last_key && c.y > last_id)) {
            take_better(key, id, c.x, c.y);
        }
    } NEXT_COUNTED(i, count, local_size);
    return uvec2(key, id);
}

// Of the `count` candidates from `base` on; keep_candidate() gets at, at + 1, …
void top_candidates(uint base, uint count, uint n, uint at) {
    uvec2 own = own_best(base, count, 0xFFFFFFFFu, 0u);
    FOR_COUNTED(k, 0u, n) {
        uint key = own.x, id = own.y;
        workgroup_best(key, id);
        if (gl_LocalInvocationIndex == 0u) {
            keep_candidate(at + k, key, id);
        }
        if (key != 0u && own.y == id) {
            own = own_best(base, count, key, id);
        }
    } NEXT_COUNTED(k, n, 1u);
}

#endif
