// SPDX-License-Identifier: MIT
// Entries of a paged cache of latents from rows as they are projected: entry places[row] =
// (RMSNorm(latent), rotated key part), with the bits of rmsnorm_forward, rope and cache_append one
// after another; nothing for a place that the cache does not have.
//   kv [rows, 4 * (first4 + second4)] with a row stride: the latent, then the key part
//   gain [4 * first4], table [positions, 2 * second4, 2] f32: cos, sin
//   positions, places [rows] u32; cache [places] entries: include/paged_entry.glsl
// Dispatch: see include/rows.glsl; sums over a row have the order of rmsnorm_forward's.
// Shared memory: 4 * local_size bytes, of FP8 4 for each 128 of the latent beside them.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/gain.glsl"
#include "include/rmsnorm.glsl"
#include "include/rotary.glsl"
#include "cache_append_normalised.kernel.glsl"
#include "include/rows.glsl"
#include "include/paged_entry.glsl"

const uint kBlocks = storage == kStoredFp8 ? first4 / 32u : 1u;
shared uint block_most[row_per_workgroup != 0u ? kBlocks : 1u];

// What activations hold of x.
vec4 rounded(vec4 x) {
    return load4(store4(x));
}

float inverse_of(uint x_at) {
    vec4 squares = vec4(0);
    FOR_COLUMNS(c, first4) {
        squares = add_squares(squares, load4(push.operands.kv.v[x_at + c]));
    } NEXT_COLUMN(c, first4);
    return rms_inverse(row_sum(sum4(squares)), first4, push.eps);
}

// A workgroup's invocation loads ahead of the sum what it needs behind it, in its first columns.
vec4 own_gain = vec4(0.0), own_angles = vec4(0.0);

vec4 normalised(uint x_at, uint c, float inv_rms) {
    vec4 x = load4(push.operands.kv.v[x_at + c]), gain = own_gain;
    if (row_per_workgroup == 0u || c != gl_LocalInvocationIndex) {
        gain = load4(push.operands.gain.v[c]);
    }
    return rounded(rms_scaled(x, inv_rms, gain));
}

vec4 angles_of(uint angles_at, uint c) {
    if (row_per_workgroup == 0u || c != gl_LocalInvocationIndex) {
        return push.operands.table.v[angles_at + c];
    }
    return own_angles;
}

uint magnitude(vec4 x) {
    uvec4 bits = floatBitsToUint(abs(x));
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

void store_code(uvec2 entry, uint c, vec4 y, float scale) {
    WriteUint(entry).v[c] = fp8_encode_any4(FP8_E4M3, y, fp8_inverse(FP8_F32, scale));
    if (c % 32u == 0u) {
        WriteFloat(entry).v[first4 + c / 32u] = scale;
    }
}

void codes_by_invocation(uvec2 entry, uint x_at, float inv_rms) {
    FOR_COUNTED(first, 0u, first4) {
        uint most = 0u;
        FOR_COUNTED(c, first, first + 32u) {
            most = max(most, magnitude(normalised(x_at, c, inv_rms)));
        } NEXT_COUNTED(c, first + 32u, 1u);
        float scale = fp8_scale(FP8_E4M3, FP8_F32, most);
        FOR_COUNTED(c, first, first + 32u) {
            store_code(entry, c, normalised(x_at, c, inv_rms), scale);
        } NEXT_COUNTED(c, first + 32u, 1u);
    } NEXT_COUNTED(first, first4, 32u);
}

void codes_by_workgroup(uvec2 entry, uint x_at, float inv_rms) {
    for (uint b = gl_LocalInvocationIndex; b < kBlocks; b += local_size) {
        block_most[b] = 0u;
    }
    barrier();
    for (uint c = gl_LocalInvocationIndex; c < first4; c += local_size) {
        atomicMax(block_most[c / 32u], magnitude(normalised(x_at, c, inv_rms)));
    }
    barrier();
    for (uint c = gl_LocalInvocationIndex; c < first4; c += local_size) {
        float scale = fp8_scale(FP8_E4M3, FP8_F32, block_most[c / 32u]);
        store_code(entry, c, normalised(x_at, c, inv_rms), scale);
    }
    barrier();
}

void store(uint row, uvec2 entry, float inv_rms, uint angles_at) {
    uint x_at = row * push.kv_row4;
    if (storage != kStoredFp8) {
        FOR_COLUMNS(c, first4) {
            store_entry(entry, c, normalised(x_at, c, inv_rms));
        } NEXT_COLUMN(c, first4);
    } else if (row_per_workgroup != 0u) {
        codes_by_workgroup(entry, x_at, inv_rms);
    } else {
        codes_by_invocation(entry, x_at, inv_rms);
    }
    FOR_COLUMNS(c, push.second4) {
        vec4 angles = angles_of(angles_at, c);
        vec4 x = load4(push.operands.kv.v[x_at + first4 + c]);
        store_entry(entry, first4 + c, rounded(rotated_by(x, angles.xz, angles.yw)));
    } NEXT_COLUMN(c, push.second4);
}

void append(uint row, uint place) {
    uint position = push.operands.positions.v[row];
    uint angles_at = (place < push.num_places ? position : 0u) * push.second4;
    if (row_per_workgroup != 0u) {
        if (gl_LocalInvocationIndex < push.second4) {
            own_angles = push.operands.table.v[angles_at + gl_LocalInvocationIndex];
        }
        if (gl_LocalInvocationIndex < first4) {
            own_gain = load4(push.operands.gain.v[gl_LocalInvocationIndex]);
        }
    }
    float inv_rms = inverse_of(row * push.kv_row4);
    if (row_per_workgroup == 0u || place < push.num_places) {
        store(row, address_add(uvec2(push.operands.cache), place, push.units, 4u), inv_rms, angles_at);
    }
}

void main() {
    FOR_ROWS(row, push.rows) {
        uint place = push.operands.places.v[row];
        if (row_per_workgroup != 0u || place < push.num_places) {
            append(row, place);
        }
    } NEXT_ROW(row, push.rows);
}
