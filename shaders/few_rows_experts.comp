// SPDX-License-Identifier: MIT
// y += the sum of a row's choices, each of its weight times hidden * transpose(W of the expert), and of
// shared * transpose(V) where there are shared experts: what leaves experts for the residual stream, of
// up to eight rows. include/few_rows.glsl has the sums, whose k here goes through one choice after
// another and then through the shared part.
//   ids, choice_weights [rows, top_k]; x [rows * top_k, k], shared_x [rows, shared_k]
//   Rows from count[0] on are left alone; ids that are no expert's add nothing.
// Dispatch: x = ceil(n / (columns * local_size / lanes)), y = rows.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "few_rows_experts.kernel.glsl"
const uint rows = 1u, gain = 0u, staged = 0u, all_units = 1u;
#include "include/few_rows.glsl"

const uint kRowShift = whole != 0u || STORAGE_BF16 == 0 ? 4u : 3u;

// Makes `s` that of a choice, or of the shared part. False: there is nothing to add.
// absent: all ones where the row is.
bool set_part(inout Source s, uint part, uint row, uint first, uint absent) {
    bool of_expert = part < push.top_k;
    uint w_row = of_expert ? push.w_row : push.shared_w_row;
    uint scale_row = of_expert ? push.scale_row : push.shared_scale_row;
    if (of_expert) {
        uint slot = row * push.top_k + part, expert = uint(push.operands.ids.v[slot]) | absent;
        if (expert >= push.experts) {
            return false;
        }
        s.x = address_add(uvec2(push.operands.x), slot, push.x_row, kRowShift);
        s.weights = address_add(uvec2(push.operands.weights), expert, push.w_batch, 4u);
        s.scales = address_add(uvec2(push.operands.scales), expert, push.scale_batch, 2u);
        s.factor = push.operands.choice_weights.v[slot];
    } else if (absent != 0u) {
        return false;
    } else {
        s.x = address_add(uvec2(push.operands.shared_x), row, push.shared_x_row, kRowShift);
        s.weights = uvec2(push.operands.shared_weights);
        s.scales = uvec2(push.operands.shared_scales);
        s.factor = 1.0;
    }
    s.k4 = of_expert ? push.k4 : push.shared_k4;
    [[unroll]] for (uint c = 0u; c < columns; ++c) {
        uint at = min(first + c, push.n - 1u);
        weight_at[c] = at * w_row;
        scale_at[c] = at / 128u * scale_row;
    }
    return true;
}

void sum_up(uint lane, uint row, uint first, uint absent) {
    Source s;
    s.x_row = 0u;
    s.gains = uvec2(0u);
    uint parts = push.top_k + (push.shared_units > 0u ? 1u : 0u);
    if (lanes == 1u) {
        FOR_COUNTED(part, 0u, parts) {
            if (set_part(s, part, row, first, absent)) {
                uint units = part < push.top_k ? push.units : push.shared_units;
                FOR_COUNTED(unit, 0u, units) {
                    add_unit(s, unit);
                } NEXT_COUNTED(unit, units, 1u);
            }
        } NEXT_COUNTED(part, parts, 1u);
    } else {
        uint all = push.top_k * push.units + push.shared_units;
        FOR_COUNTED(at, lane, all) {
            uint part = min(at / push.units, push.top_k);
            if (set_part(s, part, row, first, absent)) {
                add_unit(s, at - part * push.units);
            }
        } NEXT_COUNTED(at, all, lanes);
    }
}

vec2 before(uint first, uint c, uint row) {
    if (first + c >= push.n) {
        return vec2(0.0);
    }
    uint at = row * push.y_row + first + c, count = min(push.n - first - c, 2u);
    return load_pair(uvec2(push.operands.y), at, count);
}

void finish(uint first, uint c, uint row, vec2 x) {
    if (first + c < push.n) {
        uint at = row * push.y_row + first + c, count = min(push.n - first - c, 2u);
        store_pair(uvec2(push.operands.y), at, count, x);
    }
}

void main() {
    uint row = gl_WorkGroupID.y;
    // Nobody waits for the count before ids are on their way.
    uint absent = row < push.operands.count.v[0] ? 0u : 0xFFFFFFFFu;
    uint lane = lanes == 1u ? 0u : gl_LocalInvocationIndex % lanes;
    uint group = gl_LocalInvocationIndex / lanes;
    uint first = (gl_WorkGroupID.x * kGroups + group) * columns;
    vec2 sum = vec2(0.0); // which comes on its way beside the weights
    if (lanes > 1u && 2u * lane < columns) {
        sum = before(first, 2u * lane, row);
    }
    clear_sums();
    sum_up(lane, row, first, absent);
    fold_sums();
    if (absent != 0u) {
        return;
    }
    if (lanes == 1u) {
        [[unroll]] for (uint c = 0u; c < columns; c += 2u) {
            finish(first, c, row, before(first, c, row) + vec2(sums[c], sums[c + 1u]));
        }
    } else {
        for (uint c = 2u * lane; c < columns; c += 2u * lanes) {
            if (c >= 2u * lanes) {
                sum = before(first, c, row);
            }
            finish(first, c, row, sum + vec2(folded(c, group), folded(c + 1u, group)));
        }
    }
}
