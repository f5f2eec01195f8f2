// SPDX-License-Identifier: MIT
// Entries of a paged cache from rows: entry places[row] = (a[row], b[row]), each of all its heads;
// nothing for a place that the cache does not have.
//   a [rows, a_heads, a_size], b [rows, b_heads, b_size] with row and head strides, places [rows]
//   u32, cache [places] entries: include/paged_entry.glsl
//   with `rotate` a is rotated first, as rope.comp does it: table [positions, a_size / 2, 2] f32,
//   positions [rows] u32
// Items of a row: each four of elements; in FP8 each 128 of the first part, then each four of b.
// Dispatch: an invocation per item, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/rotary.glsl"
#include "cache_append.kernel.glsl"
#include "include/paged_entry.glsl"

layout(local_size_x_id = 0) in;

vec4 load_a(uint row, uint at) {
    uint head = at / push.a_size4, c = at % push.a_size4;
    vec4 x = load4(push.operands.a.v[row * push.a_row4 + head * push.a_head4 + c]);
    if (rotate == 0u) {
        return x;
    }
    uint position = push.operands.positions.v[row];
    vec4 angles = push.operands.table.v[position * push.a_size4 + c];
    return load4(store4(rotated_by(x, angles.xz, angles.yw)));
}

vec4 load_b(uint row, uint at) {
    uint head = at / push.b_size4;
    return load4(push.operands.b.v[row * push.b_row4 + head * push.b_head4 + at % push.b_size4]);
}

void append_codes(uvec2 entry, uint row, uint block) {
    uvec4 most = uvec4(0u);
    for (uint i = 0u; i < 32u; ++i) {
        most = max(most, floatBitsToUint(abs(load_a(row, 32u * block + i))));
    }
    float scale = fp8_scale(FP8_E4M3, FP8_F32, max(max(most.x, most.y), max(most.z, most.w)));
    float inverse = fp8_inverse(FP8_F32, scale);
    for (uint i = 0u; i < 32u; ++i) {
        WriteUint(entry).v[32u * block + i] =
            fp8_encode_any4(FP8_E4M3, load_a(row, 32u * block + i), inverse);
    }
    WriteFloat(entry).v[first4 + block] = scale;
}

void main() {
    uint a_items = storage == kStoredFp8 ? first4 / 32u : first4;
    uint per_row = a_items + push.second4;
    uint items = push.rows * per_row;
    for (uint item = gl_GlobalInvocationID.x; item < items;
         item += gl_NumWorkGroups.x * local_size) {
        uint row = item / per_row, at = item % per_row;
        uint place = push.operands.places.v[row];
        if (place < push.num_places) {
            uvec2 entry = address_add(uvec2(push.operands.cache), place, push.units, 4u);
            if (at >= a_items) {
                store_entry(entry, first4 + at - a_items, load_b(row, at - a_items));
            } else if (storage == kStoredFp8) {
                append_codes(entry, row, at);
            } else {
                store_entry(entry, at, load_a(row, at));
            }
        }
    }
}
