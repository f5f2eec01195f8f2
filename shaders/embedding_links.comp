// SPDX-License-Identifier: MIT
// Chains the tokens of equal id in ascending order: next[t] = the next token with the same id, or
// `tokens`; has_previous[t] = 1 unless t is the first of its chain. Each token has at most one
// predecessor, so no two invocations write the same word.
//   ids [tokens] u32, next, has_previous [tokens] u32, the latter filled with 0 before
// Dispatch: one invocation per token, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "embedding_links.kernel.glsl"

layout(local_size_x_id = 0) in;

uint find_next(uint token, uint id) {
    uint other = token + 1u;
    for (; other < push.tokens && other % 4u != 0u; ++other) {
        if (push.operands.ids.v[other / 4u][other % 4u] == id) {
            return other;
        }
    }
    for (; other + 4u <= push.tokens; other += 4u) {
        bvec4 found = equal(push.operands.ids.v[other / 4u], uvec4(id));
        if (any(found)) {
            return other + (found.x ? 0u : (found.y ? 1u : (found.z ? 2u : 3u)));
        }
    }
    for (; other < push.tokens; ++other) {
        if (push.operands.ids.v[other / 4u][other % 4u] == id) {
            return other;
        }
    }
    return push.tokens;
}

void main() {
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint token = gl_GlobalInvocationID.x; token < push.tokens; token += step) {
        uint id = push.operands.ids.v[token / 4u][token % 4u];
        uint other = find_next(token, id);
        push.operands.next.v[token] = other;
        if (other < push.tokens) {
            push.operands.has_previous.v[other] = 1u;
        }
    }
}
