// SPDX-License-Identifier: MIT
// Four elements of a weight that is stored as f32, or as bf16 if the variant defines GAIN_BF16=1.
#ifndef BELLOWS_GAIN_GLSL
#define BELLOWS_GAIN_GLSL

#if GAIN_BF16
#define GAIN4 uvec2
#else
#define GAIN4 vec4
#endif

#endif
