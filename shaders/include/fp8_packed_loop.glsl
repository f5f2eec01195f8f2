// SPDX-License-Identifier: MIT
// The main loop of fp8_packed_gemm.comp, written out for the first OWN of a subgroup's fragments_m
// matrices along m; LOOP(name) names its functions.

void LOOP(multiply_step)() {
    [[unroll]] for (uint depth = 0u; depth < DEPTHS; ++depth) {
        MATRIX_A a[fragments_m];
        [[unroll]] for (uint i = 0u; i < OWN; ++i) {
            a[i] = matrix_a(i, depth);
        }
        [[unroll]] for (uint j = 0u; j < fragments_n; ++j) {
            MATRIX_B b = matrix_b(j, depth);
            [[unroll]] for (uint i = 0u; i < OWN; ++i) {
                sums[j * fragments_m + i] = coopMatMulAdd(a[i], b, sums[j * fragments_m + i]);
            }
        }
    }
}

void LOOP(fetch_a)(Tile t, uint step) {
    [[unroll]] for (uint i = 0u; i < OWN; ++i) {
        [[unroll]] for (uint u = 0u; u < UNITS_A; ++u) {
            a_next[i * UNITS_A + u] = a_memory.v[t.a + step * (A_BLOCK / 4u) + unit_a(i, u)];
        }
    }
}

// Loads run ahead of what is multiplied, those of A by a step and those of B by b_ahead, into the
// next block.
void LOOP(multiply_block)(Tile t, uint block, uint next) {
    // Many factors would take the registers that loads ahead need.
    if (own_scales != 0u) {
        fetch_factors(t, block);
    }
    [[unroll]] for (uint i = 0u; i < FACTORS; ++i) {
        factors[i] = next_factors[i];
    }
    if (own_scales == 0u) {
        fetch_factors(t, next);
    }
    for (uint first = 0u; first < 4u; first += at_once) {
        [[unroll]] for (uint part = 0u; part < at_once; ++part) {
            [[unroll]] for (uint i = 0u; i < OWN * UNITS_A; ++i) {
                a_image[i] = a_next[i];
            }
            [[unroll]] for (uint i = 0u; i < PARTS_B; ++i) {
                b_image[i] = b_next[i];
            }
            [[unroll]] for (uint i = PARTS_B; i < b_ahead * PARTS_B; ++i) {
                b_next[i - PARTS_B] = b_next[i];
            }
            uint step = first + part, ahead = step + b_ahead;
            LOOP(fetch_a)(t, step < 3u ? block * 4u + step + 1u : next * 4u);
            fetch_b(t, b_ahead - 1u, ahead < 4u ? block * 4u + ahead : next * 4u + ahead - 4u);
            LOOP(multiply_step)();
        }
    }
}

// Two blocks at a time, because where a loop begins anew nothing overlaps; what the last steps load
// ahead is not needed.
void LOOP(multiply)(Tile t, Place p) {
    uint last = t.blocks - 1u, block = p.warp_k;
    uint first = min(block, last);
    fetch_factors(t, first);
    LOOP(fetch_a)(t, first * 4u);
    [[unroll]] for (uint s = 0u; s < b_ahead; ++s) {
        fetch_b(t, s, first * 4u + s);
    }
    if (at_once == 4u) {
        for (; block + warps_k < t.blocks; block += 2u * warps_k) {
            LOOP(multiply_block)(t, block, block + warps_k);
            LOOP(multiply_block)(t, block + warps_k, min(block + 2u * warps_k, last));
        }
    }
    for (; block < t.blocks; block += warps_k) {
        LOOP(multiply_block)(t, block, min(block + warps_k, last));
    }
}
