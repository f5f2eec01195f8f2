// SPDX-License-Identifier: MIT
// Input gradient of y = x * inv_rms * gain: with g = dy * gain,
// dx = inv_rms * g - x * inv_rms^3 * mean(g * x) (+ dx).
//   dy, x, dx [rows, columns] with row strides, gain [columns], inv_rms [rows] f32
// Dispatch: see include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/gain.glsl"
#include "rmsnorm_dgrad.kernel.glsl"
#include "include/rows.glsl"

void main() {
    FOR_ROWS(row, push.rows) {
        uint dy_at = row * push.dy_stride4;
        uint x_at = row * push.x_stride4;
        uint dx_at = row * push.dx_stride4;
        vec4 products = vec4(0);
        FOR_COLUMNS(c, push.columns4) {
            vec4 g = load4(push.operands.dy.v[dy_at + c]) * load4(push.operands.gain.v[c]);
            products += g * load4(push.operands.x.v[x_at + c]);
        } NEXT_COLUMN(c, push.columns4);
        float inv_rms = push.operands.inv_rms.v[row];
        float mean = row_sum(sum4(products)) / float(4u * push.columns4);
        float shrink = mean * inv_rms * inv_rms * inv_rms;
        FOR_COLUMNS(c, push.columns4) {
            vec4 g = load4(push.operands.dy.v[dy_at + c]) * load4(push.operands.gain.v[c]);
            vec4 dx = g * inv_rms - load4(push.operands.x.v[x_at + c]) * shrink;
            if (push.accumulate != 0u) {
                dx += load4(push.operands.dx.v[dx_at + c]);
            }
            push.operands.dx.v[dx_at + c] = store4(dx);
        } NEXT_COLUMN(c, push.columns4);
    } NEXT_ROW(row, push.rows);
}
