// SPDX-License-Identifier: MIT
// Rows from entries of a paged cache: (a[row], b[row]) = entry places[row], zeros for a place that
// the cache does not have. Operands as in cache_append.comp.
// Dispatch: an invocation per four elements, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "cache_gather.kernel.glsl"
#include "include/paged_entry.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint per_row = first4 + push.second4;
    uint items = push.rows * per_row;
    for (uint item = gl_GlobalInvocationID.x; item < items;
         item += gl_NumWorkGroups.x * local_size) {
        uint row = item / per_row, at = item % per_row;
        uint place = push.operands.places.v[row];
        vec4 x = vec4(0.0);
        if (place < push.num_places) {
            uvec2 entry = address_add(uvec2(push.operands.cache), place, push.units, 4u);
            x = load_entry(entry, at);
        }
        if (at < first4) {
            uint to = row * push.a_row4 + at / push.a_size4 * push.a_head4 + at % push.a_size4;
            push.operands.a.v[to] = store4(x);
        } else {
            uint of_b = at - first4;
            uint to = row * push.b_row4 + of_b / push.b_size4 * push.b_head4 + of_b % push.b_size4;
            push.operands.b.v[to] = store4(x);
        }
    }
}
