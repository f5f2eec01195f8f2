// SPDX-License-Identifier: MIT
// Where the elements of a matrix of sums stand in the invocations of a subgroup, for kernels of
// attention whose weights stay there (MatrixSlots). Kernels define before: LANES, nibble(), of_lane()
// and the constants mma_*, lane_row*, lane_column*.
#ifndef BELLOWS_LANE_PLACES_GLSL
#define BELLOWS_LANE_PLACES_GLSL

#define ELEMENTS (mma_m * mma_n / LANES) // of a matrix, in an invocation

uint row_in_lane(uint r) {
    return nibble(lane_row_slot, r) + of_lane(lane_row);
}
uint column_in_lane(uint e) {
    return nibble(lane_column_slot, nibble(lane_column_place, e)) + of_lane(lane_column);
}

// Of the invocations that share a row.
#define OVER_ROW(x, JOIN)                                                                          \
    [[unroll]] for (uint bit_ = 0u; bit_ < 7u; ++bit_) {                                           \
        if (1u << bit_ < LANES && nibble(lane_row, bit_) == 0u) {                                  \
            x = JOIN(x, subgroupShuffleXor(x, 1u << bit_));                                        \
        }                                                                                          \
    }
float plus(float a, float b) {
    return a + b;
}

#endif
