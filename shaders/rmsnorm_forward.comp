// SPDX-License-Identifier: MIT
// y = x * inv_rms * gain, inv_rms = 1 / sqrt(mean(x^2) + eps).
//   x, y [rows, columns] with row strides, gain [columns], inv_rms [rows] f32
// Dispatch: see include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/gain.glsl"
#include "include/rmsnorm.glsl"
#include "rmsnorm_forward.kernel.glsl"
#include "include/rows.glsl"

void main() {
    FOR_ROWS(row, push.rows) {
        uint x_at = row * push.x_stride4;
        vec4 squares = vec4(0);
        FOR_COLUMNS(c, push.columns4) {
            vec4 x = load4(push.operands.x.v[x_at + c]);
            squares = add_squares(squares, x);
        } NEXT_COLUMN(c, push.columns4);
        float inv_rms = rms_inverse(row_sum(sum4(squares)), push.columns4, push.eps);
        if (row_leader()) {
            push.operands.inv_rms.v[row] = inv_rms;
        }
        FOR_COLUMNS(c, push.columns4) {
            vec4 x = load4(push.operands.x.v[x_at + c]);
            vec4 y = rms_scaled(x, inv_rms, load4(push.operands.gain.v[c]));
            push.operands.y.v[row * push.y_stride4 + c] = store4(y);
        } NEXT_COLUMN(c, push.columns4);
    } NEXT_ROW(row, push.rows);
}
