// SPDX-License-Identifier: MIT
// Products of a few rows of activations by rows of weights that are read once: what the kernels
// few_rows_nt and few_rows_experts share. `lanes` invocations side by side have the same `columns` rows
// of weights and all `rows` rows of x; they share out the sum over k by units of 16 bytes of weights,
// and fold what they have in workgroup memory. One lane (CPU drivers) takes all of k itself.
//   WEIGHT       0: f32, 1: bf16, 2: E4M3 codes with a scale for each 128 of k
//   CODES_F16    1: codes are converted as f16 numbers, subnormal ones too, by devices that can keep those,
//                and lanes are added by shuffles
//   STORAGE_BF16 of x, see activation.glsl
// The kernel declares the constants local_size, lanes, rows, columns, whole (1: k is a multiple of a
// unit, and rows of x begin at multiples of 16 bytes), gain (of an RMSNorm of x, 0: none, 1: f32,
// 2: bf16), one_scale (1: the scales of all columns stand in one row, or in two where HALVES_APART),
// staged (1: the kernel has left x * gain in staged_x, of `all_units` units a row).
// Order: of an invocation's units ascending, inside a unit ascending; then lanes as include/fold.glsl
// has it. It depends on `lanes` and the subgroup size alone.
// Shared memory: include/fold.glsl, of columns * rows values (and `rows` with a gain) for each
// local_size / lanes; 16 * FOURS * all_units * rows bytes where x is staged.
#ifndef BELLOWS_FEW_ROWS_GLSL
#define BELLOWS_FEW_ROWS_GLSL

#include "activation.glsl"
#include "fp8.glsl"
#include "rmsnorm.glsl"
#if CODES_F16
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#extension GL_EXT_spirv_intrinsics : require
#include "fp8_f16.glsl"
spirv_execution_mode(capabilities = [4464], 4459, 16); // DenormPreserve of f16
#endif

layout(local_size_x_id = 0) in;

#ifndef HALVES_APART // whether the second half of the columns stands elsewhere than the first
#define HALVES_APART false
#endif

#if WEIGHT == 2
#define FOURS 4u // of elements in a unit
#elif WEIGHT == 1
#define FOURS 2u
#else
#define FOURS 1u
#endif
#if STORAGE_BF16
#define X_LOADS (FOURS / 2u) // of 16 bytes of x in a unit
#else
#define X_LOADS FOURS
#endif

const uint kGroups = local_size / lanes;
const uint kSums = columns * rows;
const bool kSquaresOfLanes = gain != 0u && staged == 0u;
const uint kValues = kSums + (kSquaresOfLanes ? rows : 0u);
#define FOLD_VALUES (kValues * kGroups)
#define FOLD_LANES lanes
#define FOLD_BY_SUBGROUP CODES_F16
#include "fold.glsl"

// [rows][FOURS][all_units]: neighbouring invocations read what stands side by side.
shared vec4 staged_x[staged != 0u ? rows * FOURS * all_units : 1u];

float sums[kSums]; // [columns][rows]
float squares[rows];
uint nans[columns]; // bits of fp8_e4m3_nan_bits

void clear_sums() {
    [[unroll]] for (uint i = 0u; i < kSums; ++i) {
        sums[i] = 0.0;
    }
    [[unroll]] for (uint r = 0u; r < rows; ++r) {
        squares[r] = 0.0;
    }
    [[unroll]] for (uint c = 0u; c < columns; ++c) {
        nans[c] = 0u;
    }
}

// Four weights of a unit.
vec4 weight4(uvec4 unit, uint i) {
#if WEIGHT == 0
    return uintBitsToFloat(unit);
#elif WEIGHT == 1
    return bf16_unpack(i == 0u ? unit.xy : unit.zw);
#elif CODES_F16
    uvec2 pairs = halves(unit[i]);
    f16vec2 even = unpackFloat2x16(pairs.x), odd = unpackFloat2x16(pairs.y);
    return vec4(even.x, odd.x, even.y, odd.y);
#else
    return fp8_decode_finite4(FP8_E4M3, unit[i]);
#endif
}
// What weight4 leaves out of a code's value.
const float kWeightFactor = WEIGHT == 2 && CODES_F16 != 0 ? 256.0 : 1.0;

// Four of x; `raw` as stored.
vec4 unpacked_x(uvec4 raw, uint i) {
#if STORAGE_BF16
    return bf16_unpack(i % 2u == 0u ? raw.xy : raw.zw);
#else
    return uintBitsToFloat(raw);
#endif
}

uvec4 read_x(uvec2 x, uint row_at, uint unit, uint i, uint k4) {
    if (whole != 0u) {
        return ReadUvec4(x).v[row_at + unit * X_LOADS + i];
    }
#if STORAGE_BF16
    uvec4 raw = uvec4(0u);
    [[unroll]] for (uint part = 0u; part < 2u; ++part) {
        uint at = unit * FOURS + 2u * i + part;
        uvec2 two = ReadUvec2(x).v[row_at + min(at, k4 - 1u)];
        raw[2u * part] = at < k4 ? two.x : 0u;
        raw[2u * part + 1u] = at < k4 ? two.y : 0u;
    }
    return raw;
#else
    uint at = unit * FOURS + i;
    uvec4 raw = ReadUvec4(x).v[row_at + min(at, k4 - 1u)];
    return at < k4 ? raw : uvec4(0u);
#endif
}

vec4 read_gain(uvec2 gains, uint four, uint k4) {
    uint at = whole != 0u ? four : min(four, k4 - 1u);
    return gain == 2u ? bf16_unpack(ReadUvec2(gains).v[at]) : ReadVec4(gains).v[at];
}

struct Source {
    uvec2 x; // rows of activations, x_row apart in units of 16 bytes, or of fours if not whole
    uint x_row;
    uvec2 gains;
    uvec2 weights;
    uvec2 scales;
    uint k4; // fours of k
    float factor;
};
uint weight_at[columns]; // where rows of weights begin, in units
uint scale_at[columns];
// Where x has to be made first, an invocation's first weights come meanwhile.
const bool kWeightsFirst = staged == 2u;
uvec4 ahead[columns];

void load_ahead(Source s, uint unit) {
    [[unroll]] for (uint c = 0u; c < columns; ++c) {
        ahead[c] = ReadUvec4(s.weights).v[weight_at[c] + unit];
    }
}

// Few rows have all of x's loads on their way at once, and scale sums of products; more leave their
// registers to sums, and scale weights.
const bool kOneByOne = rows > 2u;
const uint kAhead = kOneByOne ? 1u : X_LOADS;

// Adds unit `unit` of k.
void add_unit(Source s, uint unit) {
    uvec4 codes[columns];
    float scale[columns];
    uvec4 raw[rows * kAhead];
    [[unroll]] for (uint c = 0u; c < columns; ++c) {
        if (kWeightsFirst) {
            codes[c] = ahead[c];
        } else {
            codes[c] = ReadUvec4(s.weights).v[weight_at[c] + unit];
        }
    }
    if (staged == 0u) {
        [[unroll]] for (uint i = 0u; i < rows * kAhead; ++i) {
            raw[i] = read_x(s.x, i / kAhead * s.x_row, unit, i % kAhead, s.k4);
        }
    }
    [[unroll]] for (uint c = 0u; c < columns; ++c) {
        scale[c] = s.factor;
#if WEIGHT == 2
        if (one_scale == 0u || c == 0u || (HALVES_APART && c == columns / 2u)) {
            scale[c] *= ReadFloat(s.scales).v[scale_at[c] + unit / 8u];
        } else {
            scale[c] = scale[c - 1u];
        }
        nans[c] |= fp8_e4m3_nan_bits(codes[c]);
#endif
    }
    float dots[kOneByOne ? 1u : kSums];
    if (!kOneByOne) {
        [[unroll]] for (uint i = 0u; i < kSums; ++i) {
            dots[i] = 0.0;
        }
    }
    [[unroll]] for (uint f = 0u; f < FOURS; ++f) {
        const uint load = f / (FOURS / X_LOADS);
        if (staged == 0u && kOneByOne && f > 0u && f % (FOURS / X_LOADS) == 0u) {
            [[unroll]] for (uint r = 0u; r < rows; ++r) {
                raw[r] = read_x(s.x, r * s.x_row, unit, load, s.k4);
            }
        }
        vec4 x[rows];
        vec4 g = kSquaresOfLanes ? read_gain(s.gains, unit * FOURS + f, s.k4) : vec4(1.0);
        [[unroll]] for (uint r = 0u; r < rows; ++r) {
            if (staged != 0u) {
                x[r] = staged_x[(r * FOURS + f) * all_units + unit];
            } else {
                x[r] = unpacked_x(raw[r * kAhead + load % kAhead], f);
            }
            if (kSquaresOfLanes) {
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    squares[r] = fma(x[r][e], x[r][e], squares[r]);
                }
                x[r] *= g;
            }
        }
        [[unroll]] for (uint c = 0u; c < columns; ++c) {
            vec4 w = weight4(codes[c], f);
            if (kOneByOne) {
                w *= scale[c];
            }
            [[unroll]] for (uint r = 0u; r < rows; ++r) {
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    if (kOneByOne) {
                        sums[c * rows + r] = fma(w[e], x[r][e], sums[c * rows + r]);
                    } else {
                        dots[c * rows + r] = fma(w[e], x[r][e], dots[c * rows + r]);
                    }
                }
            }
        }
    }
    if (!kOneByOne) {
        [[unroll]] for (uint i = 0u; i < kSums; ++i) {
            sums[i] = fma(scale[i / rows], dots[i], sums[i]);
        }
    }
}

// Behind the last unit: all lanes call it. NaN codes take effect; with several lanes, the sums of the
// workgroup's groups are there to be read.
void fold_sums() {
    [[unroll]] for (uint i = 0u; i < kSums; ++i) {
        sums[i] *= kWeightFactor;
        if (WEIGHT == 2 && (nans[i / rows] & 0x80808080u) != 0u) {
            sums[i] = uintBitsToFloat(FP8_NAN);
        }
    }
    if (lanes == 1u) {
        return;
    }
    uint lane = gl_LocalInvocationIndex % lanes, group = gl_LocalInvocationIndex / lanes;
    [[unroll]] for (uint i = 0u; i < kSums; ++i) {
        put_partial(i * kGroups + group, lane, sums[i]);
    }
    if (kSquaresOfLanes) {
        [[unroll]] for (uint r = 0u; r < rows; ++r) {
            put_partial((kSums + r) * kGroups + group, lane, squares[r]);
        }
    }
    fold();
}

// With several lanes, the whole sum `value` of a group.
float folded(uint value, uint group) {
    return folded(value * kGroups + group);
}

// --- Results: y f32 (y_f32 1) or as x; elements `at` and the next, of which `count` (1, 2) are there.

vec2 load_pair(uvec2 y, uint at, uint count) {
    if (y_f32 != 0u) {
        return vec2(ReadFloat(y).v[at], count > 1u ? ReadFloat(y).v[at + 1u] : 0.0);
    }
    uint word = ReadUint(y).v[at / 2u];
    return vec2(bf16_low(word), bf16_high(word));
}

void store_pair(uvec2 y, uint at, uint count, vec2 x) {
    if (y_f32 != 0u) {
        WriteFloat(y).v[at] = x.x;
        if (count > 1u) {
            WriteFloat(y).v[at + 1u] = x.y;
        }
        return;
    }
    uint word = bf16_code(x.x) | bf16_code(x.y) << 16;
    if (count == 1u) { // the other half is somebody else's
        word = word & 0xFFFFu | WriteUint(y).v[at / 2u] & 0xFFFF0000u;
    }
    WriteUint(y).v[at / 2u] = word;
}

#endif
