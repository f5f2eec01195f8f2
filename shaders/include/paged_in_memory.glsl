// SPDX-License-Identifier: MIT
// For paged_attention_coopmat.comp: scores and weights pass through workgroup memory, whichever
// elements of a matrix an invocation holds. The `parts` subgroups of a band share out its rows.

#define LANES_PER_ROW (LANES * parts / mma_m)
#define OWN (block / LANES_PER_ROW) // columns of a row whose weights an invocation computes

struct RowInMemory {
    uint row, own; // of the band; first column
    uint keys;     // that it sees
    float top, total;
} mine;

// Among the subgroups of a band.
void band_barrier() {
    if (parts == 1u) {
        subgroup_shared_barrier();
    } else {
        barrier();
    }
}

void begin_in_memory(Item item, uint first_pair, uint present) {
    uint lane = part() * LANES + gl_SubgroupInvocationID;
    mine.row = lane / LANES_PER_ROW;
    mine.own = lane % LANES_PER_ROW * OWN;
    mine.keys = item.keys + (first_pair + min(band() * mma_m + mine.row, present - 1u)) / group;
    mine.top = kLowest;
    mine.total = 0.0;
}

// Scores become weights, and times their values' scales those of each part.
void weigh_block(uint first) {
    uint row = SCORES_START + band() * parts * S_PART + mine.row * S_STRIDE;
    float scale = push.scale * kLog2E, scores[OWN], top = mine.top;
    [[unroll]] for (uint c = 0u; c < OWN; c += 2u) {
        vec2 two = vec2(0.0);
        [[unroll]] for (uint p = 0u; p < parts; ++p) {
            uvec4 four = memory[row + p * S_PART + (mine.own + c) / 4u];
            two += uintBitsToFloat((mine.own + c) % 4u == 0u ? four.xy : four.zw);
        }
        [[unroll]] for (uint e = 0u; e < 2u; ++e) {
            scores[c + e] = first + mine.own + c + e < mine.keys ? two[e] * scale : kLowest;
            top = max(top, scores[c + e]);
        }
    }
    [[unroll]] for (uint reach = 1u; reach < LANES_PER_ROW; reach *= 2u) {
        top = max(top, subgroupShuffleXor(top, reach));
    }
    float fading = fade(mine.top, top);
    mine.top = top;
    mine.total *= fading;
    [[unroll]] for (uint c = 0u; c < OWN; ++c) {
        scores[c] = first + mine.own + c < mine.keys ? exp2(scores[c] - top) : 0.0;
        mine.total += scores[c];
    }
    subgroup_shared_barrier(); // the row has been read
    [[unroll]] for (uint p = 0u; p < (kCodes ? parts : 1u); ++p) {
        [[unroll]] for (uint c = 0u; c < OWN; c += 2u) {
            uint at = mine.own + c;
            vec2 weights = vec2(scores[c], scores[c + 1u]);
            if (kCodes) {
                uvec4 four = memory[SCALES_START + (p * block + at) / 4u];
                vec2 scales = uintBitsToFloat(at % 4u == 0u ? four.xy : four.zw) * kLift;
                weights = mix(vec2(0.0), weights * scales, notEqual(weights, vec2(0.0)));
            }
            memory[row + p * S_PART + at / 8u][at / 2u % 4u] = matrix_pack(weights.xyxy).x;
        }
    }
    if (mine.own == 0u) {
        uint at = band() * mma_m + mine.row;
        memory[FADES_START + at / 4u][at % 4u] = floatBitsToUint(fading);
    }
}

void add_block() {
    uint at = band() * mma_m + gl_SubgroupInvocationID % mma_m;
    float fading = uintBitsToFloat(memory[FADES_START + at / 4u][at % 4u]);
    if (subgroupBallot(fading != 1.0) != uvec4(0)) {
        ACCUMULATOR fades; // of the rows, all columns alike
        coopMatLoad(fades, memory, FADES_START + band() * mma_m / 4u, 0u,
                    gl_CooperativeMatrixLayoutColumnMajor);
        [[unroll]] for (uint i = 0u; i < SUMS; ++i) {
            sums[i] *= fades;
        }
    }
    uint from = SCORES_START + (band() * parts + (kCodes ? part() : 0u)) * S_PART;
    [[unroll]] for (uint c = 0u; c < block; c += mma_k) {
        MATRIX_A weights;
        coopMatLoad(weights, memory, from + c / 8u, S_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
        add_sums(weights, c);
    }
}

// Entries first .. first + block - 1. busy: the subgroup's band has pairs.
void take_in_memory(uint first, bool busy) {
    if (busy) {
        [[unroll]] for (uint j = 0u; j < block / mma_n; ++j) {
            SCORE(score, j)
            coopMatStore(score, memory, SCORES_START + gl_SubgroupID * S_PART + j * mma_n / 4u,
                         S_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
        }
    }
    band_barrier();
    weigh_block(first);
    band_barrier();
    if (busy) {
        add_block();
    }
}

// What sums are still to be multiplied by takes the place of the fades.
void finish_in_memory(Item item, uint kv_head, uint first_pair, uint present) {
    float total = mine.total;
    [[unroll]] for (uint reach = 1u; reach < LANES_PER_ROW; reach *= 2u) {
        total += subgroupShuffleXor(total, reach);
    }
    uint pair = band() * mma_m + mine.row;
    if (mine.own == 0u) {
        memory[FADES_START + pair / 4u][pair % 4u] = floatBitsToUint(1.0 / (total * kLift));
        if (pair < present && sees_some(item, first_pair + pair)) {
            store_lse_of(item, kv_head, first_pair + pair, mine.top + log2(total));
        }
    }
}
