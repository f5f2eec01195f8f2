// SPDX-License-Identifier: MIT
// For paged_attention_coopmat.comp: weights stay in the invocations that hold their scores, where
// these hold the same places of a matrix A as of a sum (MatrixSlots::like_a), an even number of them.
// An invocation holds elements of lane_rows rows; those whose numbers differ in bits that `lane_row`
// gives no weight share them.

#include "lane_places.glsl"

struct RowInLane {
    uint keys; // that it sees
    float top, total;
} held[lane_rows];

void begin_in_lane(Item item, uint first_pair, uint present) {
    [[unroll]] for (uint r = 0u; r < lane_rows; ++r) {
        uint pair = min(band() * mma_m + row_in_lane(r), present - 1u);
        held[r].keys = item.keys + (first_pair + pair) / group;
        held[r].top = kLowest;
        held[r].total = 0.0;
    }
}

#if MATRIX_BF16
#define MATRIX_PAIR(codes) uintBitsToBFloat16EXT(unpack16(codes))
#else
#define MATRIX_PAIR(codes) unpackFloat2x16(codes)
#endif

// Entries first .. first + block - 1. Before the first that a row sees there is none that it does
// not see, so the weights of what it does not see are 0 wherever its results are stored.
void take_in_lane(uint first) {
    float scale = push.scale * kLog2E;
    float scores[block / mma_n * ELEMENTS];
    [[unroll]] for (uint j = 0u; j < block / mma_n; ++j) {
        SCORE(score, j)
        [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
            uint token = first + j * mma_n + column_in_lane(e);
            bool sees = token < held[nibble(lane_row_place, e)].keys;
            scores[j * ELEMENTS + e] = sees ? score[e] * scale : kLowest;
        }
    }
    float fading[lane_rows];
    bool fades = false;
    [[unroll]] for (uint r = 0u; r < lane_rows; ++r) {
        float top = held[r].top;
        [[unroll]] for (uint i = 0u; i < block / mma_n * ELEMENTS; ++i) {
            top = nibble(lane_row_place, i % ELEMENTS) == r ? max(top, scores[i]) : top;
        }
        OVER_ROW(top, max)
        fading[r] = fade(held[r].top, top);
        held[r].top = top;
        held[r].total *= fading[r];
        fades = fades || fading[r] != 1.0;
    }
    if (subgroupBallot(fades) != uvec4(0)) {
        [[unroll]] for (uint i = 0u; i < SUMS; ++i) {
            [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
                sums[i][e] *= fading[nibble(lane_row_place, e)];
            }
        }
    }
    [[unroll]] for (uint j = 0u; j < block / mma_n; ++j) {
        float p[ELEMENTS];
        [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
            uint r = nibble(lane_row_place, e);
            p[e] = exp2(scores[j * ELEMENTS + e] - held[r].top);
            held[r].total += p[e];
        }
        MATRIX_A weights; // as the sum has them
        [[unroll]] for (uint e = 0u; e < ELEMENTS; e += 2u) {
            vec2 two = vec2(p[nibble(lane_a, e)], p[nibble(lane_a, e + 1u)]);
            uint codes = matrix_pack(two.xyxy).x;
            weights[e] = MATRIX_PAIR(codes).x;
            weights[(e + 1u) % ELEMENTS] = MATRIX_PAIR(codes).y;
        }
        add_sums(weights, j * mma_k);
    }
}

void finish_in_lane(Item item, uint kv_head, uint first_pair, uint present) {
    float factor[lane_rows];
    [[unroll]] for (uint r = 0u; r < lane_rows; ++r) {
        float total = held[r].total;
        OVER_ROW(total, plus)
        uint pair = band() * mma_m + row_in_lane(r);
        if (of_lane(lane_column) == 0u && pair < present && sees_some(item, first_pair + pair)) {
            store_lse_of(item, kv_head, first_pair + pair, held[r].top + log2(total));
        }
        factor[r] = 1.0 / total;
    }
    [[unroll]] for (uint i = 0u; i < SUMS; ++i) {
        [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
            sums[i][e] *= factor[nibble(lane_row_place, e)];
        }
    }
}
