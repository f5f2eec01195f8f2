// SPDX-License-Identifier: MIT
// Softmax cross-entropy with its gradient: loss = log(sum exp(logits)) - logits[target],
// d_logits = scale * (softmax(logits) - onehot(target)). Target 0xFFFFFFFF: ignored, both are 0.
// Any other target outside the vocabulary: loss and gradient are NaN.
// Where there is a factor [1] f32, it is part of the scale.
//   logits, d_logits [rows, vocab] with row strides of whole groups of four, may be the same
//   memory; targets [rows] u32; loss [rows] f32
// Dispatch: see include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/math.glsl"
#include "cross_entropy.kernel.glsl"
#include "include/rows.glsl"

const float kLowest = -3.4e38;

// Columns behind the vocabulary (only in the last group of four) have the lowest logit.
vec4 load_logits(uint at, uint c) {
    vec4 x = load4(push.operands.logits.v[at + c]);
    uvec4 column = uvec4(4u * c) + uvec4(0u, 1u, 2u, 3u);
    return mix(x, vec4(kLowest), greaterThanEqual(column, uvec4(push.vocab)));
}

void write_gradient(uint row, uint at, float most, float sum, uint target) {
    bool ignored = target == 0xFFFFFFFFu;
    float scale = push.scale;
    if (push.with_factor != 0u) {
        scale *= push.operands.factor.v[0];
    }
    float factor = scale / sum;
    if (!ignored && target >= push.vocab) {
        factor = uintBitsToFloat(0x7FC00000u);
    }
    FOR_COLUMNS(c, div_up(push.vocab, 4u)) {
        vec4 d = factor * exp_f32(load_logits(at, c) - vec4(most));
        uvec4 column = uvec4(4u * c) + uvec4(0u, 1u, 2u, 3u);
        d -= mix(vec4(0), vec4(scale), equal(column, uvec4(target)));
        d = ignored ? vec4(0) : d;
        push.operands.d_logits.v[row * push.d_stride4 + c] = store4(d);
    } NEXT_COLUMN(c, div_up(push.vocab, 4u));
}

void main() {
    uint columns4 = div_up(push.vocab, 4u);
    FOR_ROWS(row, push.rows) {
        uint at = row * push.stride4;
        vec4 most4 = vec4(kLowest);
        FOR_COLUMNS(c, columns4) {
            most4 = max(most4, load_logits(at, c));
        } NEXT_COLUMN(c, columns4);
        float most = row_max(max(max(most4.x, most4.y), max(most4.z, most4.w)));
        vec4 sum4s = vec4(0);
        FOR_COLUMNS(c, columns4) {
            sum4s += exp_f32(load_logits(at, c) - vec4(most));
        } NEXT_COLUMN(c, columns4);
        uint target = push.operands.targets.v[row];
        float loss = 0.0;
        if (target < push.vocab) {
            loss = most - load4(push.operands.logits.v[at + target / 4u])[target % 4u];
        }
        // After this sum nobody of this row reads another's columns again: d_logits may be logits.
        float sum = row_sum(sum4(sum4s));
        if (row_leader()) {
            loss = target < push.vocab ? loss + log_f32(sum)
                                       : (target == 0xFFFFFFFFu ? 0.0 : uintBitsToFloat(0x7FC00000u));
            push.operands.loss.v[row] = loss;
        }
        if (push.with_gradient != 0u) {
            write_gradient(row, at, most, sum, target);
        }
    } NEXT_ROW(row, push.rows);
}
