// SPDX-License-Identifier: MIT
// Sums of rows by units (row_units.glsl), f32, in ascending order of k; kAtOnce units of an
// invocation share the loads of what each k stands for. The rows of records are of the storage, or
// (SUMS_F32) f32 where it is bf16: twice as long. Kernels include this after rows.glsl.
#ifndef BELLOWS_ROW_SUMS_GLSL
#define BELLOWS_ROW_SUMS_GLSL

#include "row_units.glsl"

#ifndef SUMS_F32
#define SUMS_F32 0
#endif

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

// The elements of unit `at` of records.
Elements record_elements(uvec2 records, uint at) {
#if SUMS_F32
    Elements e = Elements(ReadVec4(records).v[at * wide], vec4(0));
    if (wide == 2u) {
        e.high = ReadVec4(records).v[at * wide + 1u];
    }
    return e;
#else
    return elements(read_unit(records, at));
#endif
}

void store_record_elements(uvec2 records, uint at, Elements e) {
#if SUMS_F32
    WriteVec4(records).v[at * wide] = e.low;
    if (wide == 2u) {
        WriteVec4(records).v[at * wide + 1u] = e.high;
    }
#else
    write_unit(records, at, rounded(e));
#endif
}

// add_row and store_sums where the row is a record's.
void add_record(inout Sums sums, uvec2 records, uint at, uint first, uint step, uint units) {
#if SUMS_F32
    [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
        if (first + j * step < units) {
            Elements e = record_elements(records, at + first + j * step);
            sums.of[j].low += e.low;
            sums.of[j].high += e.high;
        }
    }
#else
    add_row(sums, records, at, first, step, units, 1.0);
#endif
}

void store_record(Sums sums, uvec2 records, uint at, uint first, uint step, uint units) {
    [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
        if (first + j * step < units) {
            store_record_elements(records, at + first + j * step, sums.of[j]);
        }
    }
}

#endif
