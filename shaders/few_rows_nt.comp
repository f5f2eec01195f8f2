// SPDX-License-Identifier: MIT
// y (+)= x * transpose(W) of up to eight rows of x, with RMSNorm ahead of it or SwiGLU behind it, of one
// matrix, of each of a batch, or of the expert of each slot of a router's choices: include/few_rows.glsl.
// With a gain, x stands for RMSNorm(x) * gain: sums are of x * gain, and the norm multiplies them.
// epilogue 0: stored, 1: added to what stands in y, 2: y[i] = silu(gate) * up of rows i and n + i of W.
// by_ids 1: workgroups of y = s have slot s: row s / slots_per_row of x, row s of y, the matrix ids[s].
//           Slots of rows from count[0] on, and ids that are no expert's, have nothing done.
// Dispatch: x = ceil(n / (columns * local_size / lanes)), with SwiGLU half the columns; y: batches or slots.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/swiglu.glsl"
#include "few_rows_nt.kernel.glsl"
#define HALVES_APART (epilogue == 2u)
#include "include/few_rows.glsl"

const uint kOutputs = epilogue == 2u ? columns / 2u : columns; // of a group

float value(uint c, uint r, uint group) {
    return lanes == 1u ? sums[c * rows + r] : folded(c * rows + r, group);
}

float norm_of(uint r, uint group) {
    if (gain == 0u) {
        return 1.0;
    }
    return rms_inverse(lanes == 1u ? squares[r] : folded(kSums + r, group), push.k4, push.eps);
}

// Outputs o and o + 1 of a group whose first is `first`, for row r.
void finish(uvec2 y, uint first, uint o, uint r, uint group) {
    if (first + o >= push.n) {
        return;
    }
    float norm = norm_of(r, group);
    uint at = r * push.y_row + first + o, count = min(push.n - first - o, 2u);
    vec2 x = vec2(value(o, r, group), value(o + 1u, r, group)) * norm;
    if (epilogue == 2u) {
        vec2 up = vec2(value(kOutputs + o, r, group), value(kOutputs + o + 1u, r, group)) * norm;
        x = swiglu4(vec4(x, 0.0, 0.0), vec4(up, 0.0, 0.0), 1.0).xy;
    } else if (epilogue == 1u) {
        x += load_pair(y, at, count);
    }
    store_pair(y, at, count, x);
}

void main() {
    uint lane = lanes == 1u ? 0u : gl_LocalInvocationIndex % lanes;
    uint group = gl_LocalInvocationIndex / lanes;
    uint first = (gl_WorkGroupID.x * kGroups + group) * kOutputs;
    uint matrix = gl_WorkGroupID.y, x_skip = matrix * push.x_batch;
    if (by_ids != 0u) {
        uint row = gl_WorkGroupID.y / push.slots_per_row;
        if (row >= push.operands.count.v[0]) {
            return;
        }
        matrix = uint(push.operands.ids.v[gl_WorkGroupID.y]);
        if (matrix >= push.experts) {
            return;
        }
        x_skip = row * push.x_row;
    }
    Source s;
    s.x = address_add(uvec2(push.operands.x), x_skip, 1u, whole != 0u || STORAGE_BF16 == 0 ? 4u : 3u);
    s.x_row = push.x_row;
    s.gains = uvec2(push.operands.gain);
    s.weights = address_add(uvec2(push.operands.weights), matrix, push.w_batch, 4u);
    s.scales = address_add(uvec2(push.operands.scales), matrix, push.scale_batch, 2u);
    s.k4 = push.k4;
    s.factor = 1.0;
    [[unroll]] for (uint c = 0u; c < columns; ++c) {
        uint row = min(first + c % kOutputs, push.n - 1u) + c / kOutputs * push.n;
        weight_at[c] = row * push.w_row;
        scale_at[c] = row / 128u * push.scale_row;
    }
    clear_sums();
    FOR_COUNTED(unit, lane, push.units) {
        add_unit(s, unit);
    } NEXT_COUNTED(unit, push.units, lanes);
    fold_sums();

    uvec2 y = address_add(uvec2(push.operands.y), gl_WorkGroupID.y, push.y_batch, y_f32 != 0u ? 2u : 1u);
    const uint kPairs = kOutputs / 2u;
    if (lanes == 1u) {
        [[unroll]] for (uint i = 0u; i < rows * kPairs; ++i) {
            finish(y, first, i % kPairs * 2u, i / kPairs, 0u);
        }
    } else {
        for (uint i = lane; i < rows * kPairs; i += lanes) {
            finish(y, first, i % kPairs * 2u, i / kPairs, group);
        }
    }
}
