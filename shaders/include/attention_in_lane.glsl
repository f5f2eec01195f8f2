// SPDX-License-Identifier: MIT
// For attention_coopmat.glsl: weights stay in the invocations that hold their scores, where these
// hold the same places of a matrix A as of a sum (MatrixSlots::like_a), an even number of them. An
// invocation holds elements of lane_rows rows; those whose numbers differ in bits that `lane_row`
// gives no weight share them.

#include "lane_places.glsl"

struct RowInLane {
    uint row;
    uint bound; // of the row's document: its first key, or the query behind its last
#if ROLE == 0
    float top, total;
#elif ROLE == 1
    float lse, delta;
#endif
};
RowInLane held[lane_rows];

void begin_in_lane(uint first_of_warp, uint statistics) {
    [[unroll]] for (uint r = 0u; r < lane_rows; ++r) {
        // Those beyond the last are computed, never stored.
        held[r].row = min(first_of_warp + row_in_lane(r), push.seq - 1u);
#if ROWS_ARE_QUERIES
        held[r].bound = document_begin(token_of(held[r].row));
#else
        held[r].bound = document_end(token_of(held[r].row));
#endif
#if ROLE == 0
        held[r].top = kLowest;
        held[r].total = 0.0;
#elif ROLE == 1
        uint index = statistics + held[r].row * push.heads;
        held[r].lse = push.operands.lse.v[index] * kLog2E;
        held[r].delta = push.operands.delta.v[index];
#endif
    }
}

#if MATRIX_BF16
#define MATRIX_PAIR(codes) uintBitsToBFloat16EXT(unpack16(codes))
#else
#define MATRIX_PAIR(codes) unpackFloat2x16(codes)
#endif
// Weights as a sum has them, as a matrix A.
#define AS_A(w, p)                                                                                 \
    MATRIX_A w;                                                                                    \
    [[unroll]] for (uint e_ = 0u; e_ < ELEMENTS; e_ += 2u) {                                       \
        vec2 two_ = vec2(p[nibble(lane_a, e_)], p[nibble(lane_a, e_ + 1u)]);                       \
        uint codes_ = matrix_pack(two_.xyxy).x;                                                    \
        w[e_] = MATRIX_PAIR(codes_).x;                                                             \
        w[(e_ + 1u) % ELEMENTS] = MATRIX_PAIR(codes_).y;                                           \
    }

#if ROLE == 0
void take_in_lane(uint first) {
    float scale = push.scale * kLog2E;
    float scores[block / mma_n * ELEMENTS];
    [[unroll]] for (uint j = 0u; j < block / mma_n; ++j) {
        SCORE(s, x, qk_dim / mma_k, 0u, X_STRIDE, j)
        [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
            uint other = first + j * mma_n + column_in_lane(e);
            uint r = nibble(lane_row_place, e);
            bool sees = held[r].bound <= other && other <= held[r].row;
            scores[j * ELEMENTS + e] = sees ? s[e] * scale : kLowest;
        }
    }
    float correction[lane_rows];
    bool fades = false;
    [[unroll]] for (uint r = 0u; r < lane_rows; ++r) {
        float top = held[r].top;
        [[unroll]] for (uint i = 0u; i < block / mma_n * ELEMENTS; ++i) {
            top = nibble(lane_row_place, i % ELEMENTS) == r ? max(top, scores[i]) : top;
        }
        OVER_ROW(top, max)
        correction[r] = exp2(held[r].top - top);
        held[r].top = top;
        held[r].total *= correction[r];
        fades = fades || correction[r] < 1.0;
    }
    if (subgroupBallot(fades) != uvec4(0)) {
        [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
            [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
                sums[i][e] *= correction[nibble(lane_row_place, e)];
            }
        }
    }
    [[unroll]] for (uint j = 0u; j < block / mma_n; ++j) {
        float p[ELEMENTS];
        [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
            uint r = nibble(lane_row_place, e);
            float score = scores[j * ELEMENTS + e];
            bool none = by_document != 0u && score == kLowest; // maybe of the whole row
            p[e] = none ? 0.0 : exp2(score - held[r].top);
            held[r].total += p[e];
        }
        AS_A(w, p)
        add_sums(w, j * mma_k);
    }
}

float finish_in_lane(uint first_of_warp, uint statistics) {
    float factor[lane_rows];
    [[unroll]] for (uint r = 0u; r < lane_rows; ++r) {
        float total = held[r].total;
        OVER_ROW(total, plus)
        if (of_lane(lane_column) == 0u && first_of_warp + row_in_lane(r) < push.seq) {
            push.operands.lse.v[statistics + held[r].row * push.heads] =
                (held[r].top + log2(total)) * kLn2;
        }
        factor[r] = 1.0 / total;
    }
    [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
        [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
            sums[i][e] *= factor[nibble(lane_row_place, e)];
        }
    }
    return 1.0;
}
#else
void take_in_lane(uint first) {
    float scale = push.scale * kLog2E;
    [[unroll]] for (uint j = 0u; j < block / mma_n; ++j) {
        SCORE(s, x, qk_dim / mma_k, 0u, X_STRIDE, j)
#if NEEDS_DP
        SCORE(dp, y, v_dim / mma_k, Y_START, Y_STRIDE, j)
#endif
        float p[ELEMENTS];
        [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
            uint r = nibble(lane_row_place, e), c = j * mma_n + column_in_lane(e);
            uint other = first + c;
#if ROLE == 1
            bool sees = held[r].bound <= other && other <= held[r].row;
            p[e] = sees ? exp2(fma(s[e], scale, -held[r].lse)) : 0.0;
            p[e] *= dp[e] - held[r].delta;
#else
            float lse = uintBitsToFloat(memory[STATISTICS_START + c / 4u][c % 4u]);
            bool sees = held[r].row <= other && other < held[r].bound;
            p[e] = sees ? exp2(fma(s[e], scale, -lse)) : 0.0;
#if NEEDS_DP
            p[e] *= dp[e] - uintBitsToFloat(memory[STATISTICS_START + (block + c) / 4u][c % 4u]);
#endif
#endif
        }
        AS_A(w, p)
        add_sums(w, j * mma_k);
    }
}
#endif
