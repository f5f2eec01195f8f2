// SPDX-License-Identifier: MIT
// y (+)= x * transpose(W) of up to eight rows of x, with RMSNorm ahead of it or SwiGLU behind it, of one
// matrix, of each of a batch, or of the expert of each slot of a router's choices: include/few_rows.glsl.
// With a gain, x stands for RMSNorm(x) * gain: sums are of x * gain, and the norm multiplies them.
// epilogue 0: stored, 1: added to what stands in y, 2: y[i] = silu(gate) * up of rows i and n + i of W.
// by_ids 1: workgroups of y = s have slot s: row s / slots_per_row of x, row s of y, the matrix ids[s].
//           Slots of rows from count[0] on, and ids that are no expert's, have nothing done.
// by_ids 2: the same where ids are still to be chosen: every workgroup makes its row's choice from the
//           logits [rows, experts] (include/router_choice.glsl), those of x = 0 write their slot's id and
//           weight.
// staged 1: the workgroup first puts x * gain in its memory, for all of its groups.
// staged 2: x is what attention's parts amount to (include/paged_parts.glsl), for head y of `heads`;
//           x itself where parts has one part for a row, zeros where it has none. Where a workgroup has
//           more invocations than a row has fours, shares of them take parts of the row side by side.
// Dispatch: x = ceil(n / (columns * local_size / lanes)), with SwiGLU half the columns; y: batches or slots.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/swiglu.glsl"
#include "few_rows_nt.kernel.glsl"
#define HALVES_APART (epilogue == 2u)
#include "include/few_rows.glsl"
#include "include/paged_parts.glsl"
#define ROUTER_BY_SUBGROUP CODES_F16
void keep_score(uint expert, float score) {}
#include "include/router_choice.glsl"

const uint kOutputs = epilogue == 2u ? columns / 2u : columns; // of a group

float value(uint c, uint r, uint group) {
    return lanes == 1u ? sums[c * rows + r] : folded(c * rows + r, group);
}

#if FOLD_BY_SUBGROUP
// Of each subgroup's share of a staged row.
shared float staged_squares[gain != 0u && staged != 0u ? rows * local_size / kLeastSubgroup : 1u];
#endif

vec4 part_of_x(Source s, uint r, uint four) {
#if STORAGE_BF16
    return bf16_unpack(ReadUvec2(s.x).v[r * s.x_row * (whole != 0u ? 2u : 1u) + four]);
#else
    return ReadVec4(s.x).v[r * s.x_row + four];
#endif
}

// Invocations that have the same four columns share out a row's parts.
const uint kFours = staged == 2u ? FOURS * all_units : 1u;
const uint kSpan = kFours < local_size ? kFours : local_size, kShares = local_size / kSpan;
shared vec4 share_sums[staged == 2u ? kShares * kSpan : 1u];
shared float share_logs[staged == 2u ? kShares : 1u];

// What a row's parts amount to. All invocations call it; those of the first share have the result.
vec4 part_of_attention(Source s, uint r, uint four) {
    uint count = push.operands.parts.v[2u * r + 1u], share = gl_LocalInvocationIndex / kSpan;
    if (count <= 1u) {
        return count == 0u ? vec4(0.0) : part_of_x(s, r, four);
    }
    uint of_share = (count + kShares - 1u) / kShares, begin = min(share * of_share, count);
    Parts parts = Parts(uvec2(push.operands.partial), uvec2(push.operands.partial_lse),
                        push.operands.parts.v[2u * r] + begin, min(of_share, count - begin),
                        push.heads, gl_WorkGroupID.y, push.k4);
    float own_log = -3.0e38;
    vec4 own = vec4(0.0);
    if (parts.count > 0u && share < kShares) {
        own = combine_parts(parts, four, own_log);
    }
    if (kShares == 1u) {
        return own;
    }
    barrier(); // nobody reads another row's sums any more
    if (share < kShares) {
        share_sums[gl_LocalInvocationIndex] = own;
        share_logs[share] = own_log; // all invocations of a share have the same
    }
    barrier();
    float top = own_log, total = 0.0;
    for (uint i = 0u; i < kShares; ++i) {
        top = max(top, share_logs[i]);
    }
    vec4 sum = vec4(0.0);
    for (uint i = 0u; i < kShares; ++i) {
        float power = exp2(share_logs[i] - top);
        total += power;
        sum = fma(share_sums[i * kSpan + gl_LocalInvocationIndex % kSpan], vec4(power), sum);
    }
    return sum * (1.0 / total);
}

// All invocations call it; a barrier must follow.
void stage_attention(Source s) {
    [[unroll]] for (uint r = 0u; r < rows; ++r) {
        for (uint begin = 0u; begin < kFours; begin += kSpan) {
            uint four = begin + gl_LocalInvocationIndex % kSpan;
            vec4 x = part_of_attention(s, r, min(four, s.k4 - 1u));
            if (gl_LocalInvocationIndex < kSpan && four < kFours) {
                staged_x[(r * FOURS + four % FOURS) * all_units + four / FOURS] =
                    four < s.k4 ? x : vec4(0.0);
            }
        }
    }
}

// All invocations call it; a barrier must follow.
void stage_x(Source s) {
    [[unroll]] for (uint r = 0u; r < rows; ++r) {
        float own = 0.0;
        for (uint four = gl_LocalInvocationIndex; four < FOURS * all_units; four += local_size) {
            vec4 x = vec4(0.0);
            if (four < s.k4) {
                x = part_of_x(s, r, four);
                if (gain != 0u) {
                    own += dot(x, x);
                    x *= read_gain(s.gains, four, s.k4);
                }
            }
            staged_x[(r * FOURS + four % FOURS) * all_units + four / FOURS] = x;
        }
#if FOLD_BY_SUBGROUP
        if (gain != 0u) {
            for (uint reach = 1u; reach < gl_SubgroupSize; reach <<= 1u) {
                own += subgroupShuffleXor(own, reach);
            }
            uint parts = local_size / gl_SubgroupSize;
            staged_squares[r * parts + gl_LocalInvocationIndex / gl_SubgroupSize] = own;
        }
#endif
    }
}

float norm_of(uint r, uint group) {
    if (gain == 0u) {
        return 1.0;
    }
#if FOLD_BY_SUBGROUP
    if (staged != 0u) {
        uint parts = local_size / gl_SubgroupSize;
        float sum = staged_squares[r * parts];
        for (uint i = 1u; i < parts; ++i) {
            sum += staged_squares[r * parts + i];
        }
        return rms_inverse(sum, push.k4, push.eps);
    }
#endif
    return rms_inverse(lanes == 1u ? squares[r] : folded(kSums + r, group), push.k4, push.eps);
}

// What outputs o and o + 1 of a group whose first is `first`, for row r, are added to.
vec2 before(uvec2 y, uint first, uint o, uint r) {
    if (epilogue != 1u || first + o >= push.n) {
        return vec2(0.0);
    }
    return load_pair(y, r * push.y_row + first + o, min(push.n - first - o, 2u));
}

void finish(uvec2 y, uint first, uint o, uint r, uint group, vec2 sum) {
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
        x += sum;
    }
    store_pair(y, at, count, x);
}

// Makes the weights of `s` those of a matrix, from its rows' `first` on.
void find_weights(inout Source s, uint matrix, uint first) {
    s.weights = address_add(uvec2(push.operands.weights), matrix, push.w_batch, 4u);
    s.scales = address_add(uvec2(push.operands.scales), matrix, push.scale_batch, 2u);
    [[unroll]] for (uint c = 0u; c < columns; ++c) {
        uint row = min(first + c % kOutputs, push.n - 1u) + c / kOutputs * push.n;
        weight_at[c] = row * push.w_row;
        scale_at[c] = row / 128u * push.scale_row;
    }
}

// The expert of a row's choice, of which the first workgroup tells.
uint choose_matrix(uint row, uint choice) {
    Router router = Router(push.experts, push.slots_per_row, push.groups, push.group_top_k,
                           push.group_score_top, push.use_softmax != 0u, push.normalise != 0u,
                           push.has_bias != 0u, push.route_scale, uvec2(push.operands.bias));
    uvec2 logits = address_add(uvec2(push.operands.logits), row, push.experts, 2u);
    Choice chosen = choose_experts(router, logits, choice);
    if (gl_WorkGroupID.x == 0u && gl_LocalInvocationIndex == 0u) {
        push.operands.chosen.v[gl_WorkGroupID.y] = int(chosen.expert);
        push.operands.chosen_weights.v[gl_WorkGroupID.y] =
            chosen.score * weight_factor(router, chosen.sum);
    }
    return chosen.expert;
}

void main() {
    uint lane = lanes == 1u ? 0u : gl_LocalInvocationIndex % lanes;
    uint group = gl_LocalInvocationIndex / lanes;
    uint first = (gl_WorkGroupID.x * kGroups + group) * kOutputs;
    uint matrix = gl_WorkGroupID.y, x_skip = matrix * push.x_batch, absent = 0u;
    if (by_ids != 0u) {
        uint row = gl_WorkGroupID.y / push.slots_per_row;
        if (by_ids == 1u) {
            matrix = uint(push.operands.ids.v[gl_WorkGroupID.y]);
            absent = uint(matrix >= push.experts);
        }
        absent |= uint(row >= push.operands.count.v[0]); // both loads are under way at once
        x_skip = row * push.x_row;
    }
    Source s;
    s.x = address_add(uvec2(push.operands.x), x_skip, 1u, whole != 0u || STORAGE_BF16 == 0 ? 4u : 3u);
    s.x_row = push.x_row;
    s.gains = uvec2(push.operands.gain);
    s.k4 = push.k4;
    s.factor = 1.0;
    if (kWeightsFirst) {
        find_weights(s, matrix, first);
        load_ahead(s, min(lane, push.units - 1u));
    }
    if (staged == 1u) {
        stage_x(s);
    } else if (staged == 2u) {
        stage_attention(s);
    }
    if (absent != 0u) {
        return;
    }
    if (by_ids == 2u) {
        matrix = choose_matrix(gl_WorkGroupID.y / push.slots_per_row, gl_WorkGroupID.y % push.slots_per_row);
    }
    if (staged != 0u) {
        barrier();
    }
    if (!kWeightsFirst) {
        find_weights(s, matrix, first);
    }
    uvec2 y = address_add(uvec2(push.operands.y), gl_WorkGroupID.y, push.y_batch, y_f32 != 0u ? 2u : 1u);
    const uint kPairs = kOutputs / 2u;
    vec2 sum = vec2(0.0); // which comes on its way beside the weights
    if (lanes > 1u && lane < rows * kPairs) {
        sum = before(y, first, lane % kPairs * 2u, lane / kPairs);
    }
    clear_sums();
    FOR_COUNTED(unit, lane, push.units) {
        add_unit(s, unit);
        if (kWeightsFirst) {
            load_ahead(s, min(unit + lanes, push.units - 1u));
        }
    } NEXT_COUNTED(unit, push.units, lanes);
    fold_sums();

    if (lanes == 1u) {
        [[unroll]] for (uint i = 0u; i < rows * kPairs; ++i) {
            uint o = i % kPairs * 2u, r = i / kPairs;
            finish(y, first, o, r, 0u, before(y, first, o, r));
        }
    } else {
        for (uint i = lane; i < rows * kPairs; i += lanes) {
            uint o = i % kPairs * 2u, r = i / kPairs;
            if (i >= lanes) {
                sum = before(y, first, o, r);
            }
            finish(y, first, o, r, group, sum);
        }
    }
}
