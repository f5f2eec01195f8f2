// SPDX-License-Identifier: MIT
// Sums of rows by units (row_units.glsl), f32, in ascending order of k; kAtOnce units of an
// invocation share the loads of what each k stands for. Kernels include this after rows.glsl.
#ifndef BELLOWS_ROW_SUMS_GLSL
#define BELLOWS_ROW_SUMS_GLSL

#include "row_units.glsl"

const uint kAtOnce = 4u;

struct Sums {
    Elements of[kAtOnce];
};

// sum (+)= weight * row `at` (in units) of `rows`, for the units first + j * step.
void add_row(inout Sums sums, uvec2 rows, uint at, uint first, uint step, uint units,
             float weight) {
    Unit unit[kAtOnce];
    [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
        unit[j] = kNothing;
        if (first + j * step < units) {
            unit[j] = read_unit(rows, at + first + j * step);
        }
    }
    [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
        Elements e = elements(unit[j]);
        sums.of[j].low += weight * e.low;
        sums.of[j].high += weight * e.high;
    }
}

// Zeros, or what stands in row `at` of `rows`.
Sums first_sums(bool accumulate, uvec2 rows, uint at, uint first, uint step, uint units) {
    Sums sums;
    [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
        sums.of[j] = Elements(vec4(0), vec4(0));
        if (accumulate && first + j * step < units) {
            sums.of[j] = elements(read_unit(rows, at + first + j * step));
        }
    }
    return sums;
}

void store_sums(Sums sums, uvec2 rows, uint at, uint first, uint step, uint units) {
    [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
        if (first + j * step < units) {
            write_unit(rows, at + first + j * step, rounded(sums.of[j]));
        }
    }
}

#endif
