// SPDX-License-Identifier: MIT
// Two neighbouring pairs turned by their angles, (cos, sin) each: y[2i] = x[2i] cos - x[2i+1] sin,
// y[2i+1] = x[2i] sin + x[2i+1] cos. The compiler may not contract it: every kernel that holds it
// gives the same bits.
#ifndef BELLOWS_ROTARY_GLSL
#define BELLOWS_ROTARY_GLSL

vec4 rotated_by(vec4 x, vec2 cosine, vec2 sine) {
    precise vec2 even = x.xz * cosine - x.yw * sine;
    precise vec2 odd = x.xz * sine + x.yw * cosine;
    return vec4(even.x, odd.x, even.y, odd.y);
}

#endif
