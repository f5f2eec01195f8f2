// SPDX-License-Identifier: MIT
// Queries of latent attention, absorbed, of up to eight rows: each head's first part times W_UK, which
// then meets the cache's latents, beside its rotated second part, which meets the key parts.
//   q [rows, heads, 4 * (nope4 + rope4)], weights [heads, 4 * nope4, 4 * latent4] as q
//   y [rows, heads, 4 * (latent4 + rope4)], positions [rows], table [positions, 2 * rope4, 2]: rope.comp
// An invocation has 16 bytes of neighbouring columns, and every splits-th four of a head's first part;
// sums are f32, an invocation's ascending, then as include/fold.glsl has it.
// Dispatch: x = ceil(columns in 16 bytes / (local_size / splits)), and one more that rotates, as its
// loads follow one another; y = heads.
// Shared memory: include/fold.glsl; 4 * rows * UNIT values for each local_size / splits.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/rotary.glsl"
#include "mla_queries.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kColumns = local_size / splits; // in units of 16 bytes
#if STORAGE_BF16
#define FOURS 2u // of elements in a unit
#else
#define FOURS 1u
#endif
#define FOLD_VALUES (4u * FOURS * rows * kColumns)
#define FOLD_LANES splits
#define FOLD_BY_SUBGROUP 0
#include "include/fold.glsl"

vec4 sums[rows * FOURS];

vec4 weight4(uvec4 unit, uint i) {
#if STORAGE_BF16
    return bf16_unpack(i == 0u ? unit.xy : unit.zw);
#else
    return uintBitsToFloat(unit);
#endif
}

// Adds four rows of the head's weights.
void add_four(uvec2 weights, uint q_at, uint four, uint unit) {
    uvec4 w[4];
    vec4 q[rows];
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        w[e] = ReadUvec4(weights).v[(4u * four + e) * push.w_row + unit];
    }
    [[unroll]] for (uint r = 0u; r < rows; ++r) {
        q[r] = load4(push.operands.q.v[q_at + r * push.q_row4 + four]);
    }
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        [[unroll]] for (uint f = 0u; f < FOURS; ++f) {
            vec4 values = weight4(w[e], f);
            [[unroll]] for (uint r = 0u; r < rows; ++r) {
                sums[r * FOURS + f] = fma(values, vec4(q[r][e]), sums[r * FOURS + f]);
            }
        }
    }
}

void rotate(uint head, uint q_at, uint y_at) {
    for (uint i = gl_LocalInvocationIndex; i < rows * push.rope4; i += local_size) {
        uint row = i / push.rope4, c = i % push.rope4;
        vec4 angles = push.operands.table.v[push.operands.positions.v[row] * push.rope4 + c];
        vec4 x = load4(push.operands.q.v[q_at + row * push.q_row4 + push.nope4 + c]);
        push.operands.y.v[y_at + row * push.y_row4 + push.latent4 + c] =
            store4(rotated_by(x, angles.xz, angles.yw));
    }
}

void main() {
    uint column = gl_LocalInvocationIndex % kColumns, split = gl_LocalInvocationIndex / kColumns;
    split = splits == 1u ? 0u : split;
    uint unit = gl_WorkGroupID.x * kColumns + column, units = push.latent4 / FOURS;
    uint head = gl_WorkGroupID.y, q_at = head * push.q_head4, y_at = head * push.y_head4;
    if (gl_WorkGroupID.x == gl_NumWorkGroups.x - 1u) {
        rotate(head, q_at, y_at);
        return;
    }
    uvec2 weights = address_add(uvec2(push.operands.weights), head, push.w_batch, 4u);
    [[unroll]] for (uint i = 0u; i < rows * FOURS; ++i) {
        sums[i] = vec4(0.0);
    }
    FOR_COUNTED(four, split, push.nope4) {
        add_four(weights, q_at, four, min(unit, units - 1u));
    } NEXT_COUNTED(four, push.nope4, splits);
    if (splits > 1u) {
        [[unroll]] for (uint i = 0u; i < rows * FOURS; ++i) {
            [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                put_partial((4u * i + e) * kColumns + column, split, sums[i][e]);
            }
        }
        fold();
        for (uint i = gl_LocalInvocationIndex; i < rows * FOURS * kColumns; i += local_size) {
            uint of = i % kColumns, at = i / kColumns; // at: row and four
            uint to = gl_WorkGroupID.x * kColumns + of;
            vec4 x;
            [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                x[e] = folded((4u * at + e) * kColumns + of);
            }
            if (to < units) {
                push.operands.y.v[y_at + at / FOURS * push.y_row4 + to * FOURS + at % FOURS] = store4(x);
            }
        }
    } else if (unit < units) {
        [[unroll]] for (uint i = 0u; i < rows * FOURS; ++i) {
            push.operands.y.v[y_at + i / FOURS * push.y_row4 + unit * FOURS + i % FOURS] =
                store4(sums[i]);
        }
    }
}
