// SPDX-License-Identifier: MIT
// The results of a row's parts as one, by the logs of their sums: what attention over a paged cache
// (include/paged_attention.glsl) leaves where a row has several parts.
//   partial [partials, heads, 4 * value4] f32, partial_lse [partials, heads] f32, base 2
// Parts are taken in ascending order; loads of several are under way at once.
#ifndef BELLOWS_PAGED_PARTS_GLSL
#define BELLOWS_PAGED_PARTS_GLSL

#include "storage.glsl"

struct Parts {
    uvec2 partial, partial_lse;
    uint first, count, heads, head, value4;
};

// Four columns from 4 * c on; log_sum: of all parts, base 2.
#define COMBINE_PARTS(name, kAtOnce)                                                               \
    vec4 name(Parts parts, uint c, out float log_sum) {                                            \
        float top = -3.0e38, total = 0.0;                                                          \
        vec4 sum = vec4(0.0);                                                                      \
        for (uint begin = 0u; begin < parts.count; begin += kAtOnce) {                             \
            float lse[kAtOnce];                                                                    \
            vec4 x[kAtOnce];                                                                       \
            [[unroll]] for (uint i = 0u; i < kAtOnce; ++i) {                                       \
                uint part = parts.first + min(begin + i, parts.count - 1u);                        \
                uint from = part * parts.heads + parts.head;                                       \
                lse[i] = ReadFloat(parts.partial_lse).v[from];                                     \
                x[i] = ReadVec4(parts.partial).v[from * parts.value4 + c];                         \
            }                                                                                      \
            float new_top = top;                                                                   \
            [[unroll]] for (uint i = 0u; i < kAtOnce; ++i) {                                       \
                new_top = max(new_top, lse[i]); /* beyond the last part its own once more */       \
            }                                                                                      \
            float fade = exp2(top - new_top);                                                      \
            total *= fade;                                                                         \
            sum *= fade;                                                                           \
            [[unroll]] for (uint i = 0u; i < kAtOnce; ++i) {                                       \
                if (begin + i < parts.count) {                                                     \
                    float power = exp2(lse[i] - new_top);                                          \
                    total += power;                                                                \
                    sum = fma(x[i], vec4(power), sum);                                             \
                }                                                                                  \
            }                                                                                      \
            top = new_top;                                                                         \
        }                                                                                          \
        log_sum = top + log2(total);                                                               \
        return sum * (1.0 / total);                                                                \
    }

COMBINE_PARTS(combine_few_parts, 8u)
COMBINE_PARTS(combine_many_parts, 16u)

vec4 combine_parts(Parts parts, uint c, out float log_sum) {
    return parts.count <= 8u ? combine_few_parts(parts, c, log_sum)
                             : combine_many_parts(parts, c, log_sum);
}

#endif
