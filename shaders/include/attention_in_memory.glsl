// SPDX-License-Identifier: MIT
// For attention_coopmat.glsl: scores and weights pass through the subgroup's part of workgroup
// memory, whichever elements of a matrix an invocation holds. LANES_PER_ROW of them share a row.

#define OWN (block / LANES_PER_ROW) // columns of a row whose weights an invocation computes

struct RowInMemory {
    uint row; // of the invocation, and where its part of the columns is
    uint lane_row, part;
    uint bound; // of the row's document: its first key, or the query behind its last
#if ROLE == 0
    float top, total;
#elif ROLE == 1
    float lse, delta;
#endif
};
RowInMemory mine;

void begin_in_memory(uint first_of_warp, uint statistics) {
    mine.lane_row = gl_SubgroupInvocationID / LANES_PER_ROW;
    mine.part = gl_SubgroupInvocationID % LANES_PER_ROW;
    // Those beyond the last are computed, never stored.
    mine.row = min(first_of_warp + mine.lane_row, push.seq - 1u);
#if ROWS_ARE_QUERIES
    mine.bound = document_begin(token_of(mine.row));
#else
    mine.bound = document_end(token_of(mine.row));
#endif
#if ROLE == 0
    mine.top = kLowest;
    mine.total = 0.0;
#elif ROLE == 1
    uint index = statistics + mine.row * push.heads;
    mine.lse = push.operands.lse.v[index] * kLog2E;
    mine.delta = push.operands.delta.v[index];
#endif
}

void take_in_memory(uint first) {
    uint s_start = SCRATCH_START + gl_SubgroupID * SCRATCH_PART, dp_start = s_start + S_PART,
         w_start = dp_start + S_PART;
    [[unroll]] for (uint j = 0u; j < block / mma_n; ++j) {
        SCORE(s, x, qk_dim / mma_k, 0u, X_STRIDE, j)
        coopMatStore(s, memory, s_start + j * mma_n / 4u, S_STRIDE,
                     gl_CooperativeMatrixLayoutRowMajor);
#if NEEDS_DP
        SCORE(dp, y, v_dim / mma_k, Y_START, Y_STRIDE, j)
        coopMatStore(dp, memory, dp_start + j * mma_n / 4u, S_STRIDE,
                     gl_CooperativeMatrixLayoutRowMajor);
#endif
    }
    subgroup_shared_barrier();
    float scale = push.scale * kLog2E;
    uint s_row = s_start + mine.lane_row * S_STRIDE, own = mine.part * OWN;
#if ROLE == 0
    float new_top = mine.top;
    [[unroll]] for (uint c = 0u; c < OWN; c += 4u) {
        vec4 s = uintBitsToFloat(memory[s_row + (own + c) / 4u]) * scale;
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            uint other = first + own + c + e;
            new_top = mine.bound <= other && other <= mine.row ? max(new_top, s[e]) : new_top;
        }
    }
    [[unroll]] for (uint reach = 1u; reach < LANES_PER_ROW; reach *= 2u) {
        new_top = max(new_top, subgroupShuffleXor(new_top, reach));
    }
    float correction = exp2(mine.top - new_top);
    mine.top = new_top;
    mine.total *= correction;
#endif
    [[unroll]] for (uint octet = 0u; octet < OWN; octet += 8u) {
        vec4 w[2];
        [[unroll]] for (uint quad = 0u; quad < 2u; ++quad) {
            uint c = own + octet + 4u * quad;
            vec4 s = uintBitsToFloat(memory[s_row + c / 4u]);
#if NEEDS_DP
            vec4 dp = uintBitsToFloat(memory[s_row + S_PART + c / 4u]);
#endif
#if !ROWS_ARE_QUERIES
            vec4 lse = uintBitsToFloat(memory[STATISTICS_START + c / 4u]);
#if NEEDS_DP
            vec4 delta = uintBitsToFloat(memory[STATISTICS_START + (block + c) / 4u]);
#endif
#endif
            [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                uint other = first + c + e;
#if ROLE == 0
                bool sees = mine.bound <= other && other <= mine.row;
                float p = sees ? exp2(fma(s[e], scale, -mine.top)) : 0.0;
                mine.total += p;
#elif ROLE == 1
                bool sees = mine.bound <= other && other <= mine.row;
                float p = sees ? exp2(fma(s[e], scale, -mine.lse)) : 0.0;
                p *= dp[e] - mine.delta;
#else
                bool sees = mine.row <= other && other < mine.bound;
                float p = sees ? exp2(fma(s[e], scale, -lse[e])) : 0.0;
#if NEEDS_DP
                p *= dp[e] - delta[e];
#endif
#endif
                w[quad][e] = p;
            }
        }
        memory[w_start + mine.lane_row * W_STRIDE + (own + octet) / 8u] =
            uvec4(matrix_pack(w[0]), matrix_pack(w[1]));
    }
#if ROLE == 0
    // What the sums so far count for, as a matrix of equal columns.
    bool fades = subgroupBallot(correction < 1.0) != uvec4(0);
    if (fades) {
        for (uint quad = mine.part; quad < mma_n / 4u; quad += LANES_PER_ROW) {
            memory[dp_start + mine.lane_row * (mma_n / 4u) + quad] =
                floatBitsToUint(vec4(correction));
        }
    }
#endif
    subgroup_shared_barrier();
#if ROLE == 0
    if (fades) {
        ACCUMULATOR factors;
        coopMatLoad(factors, memory, dp_start, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
            sums[i] *= factors;
        }
    }
#endif
    [[unroll]] for (uint c = 0u; c < block; c += mma_k) {
        MATRIX_A w;
        coopMatLoad(w, memory, w_start + c / 8u, W_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
        add_sums(w, c);
    }
}

#if ROLE == 0
float finish_in_memory(uint first_of_warp, uint statistics) {
    float total = mine.total;
    [[unroll]] for (uint reach = 1u; reach < LANES_PER_ROW; reach *= 2u) {
        total += subgroupShuffleXor(total, reach);
    }
    if (mine.part == 0u && first_of_warp + mine.lane_row < push.seq) {
        push.operands.lse.v[statistics + mine.row * push.heads] = (mine.top + log2(total)) * kLn2;
    }
    return 1.0 / total;
}
#endif
