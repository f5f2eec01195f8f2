// SPDX-License-Identifier: MIT
// For paged_attention_coopmat.comp: a block of entries on its way from the cache to workgroup memory,
// as elements of matrices.

uvec4 codes_of(uvec4 octet) {
    return uvec4(matrix_codes(octet.x), matrix_codes(octet.y), matrix_codes(octet.z),
                 matrix_codes(octet.w));
}

// The values of four codes of E4M3, which are exact: the first and third, then the second and fourth.
// A code's bits at the place of the element's give its value but for codes of the least exponent.
#if MATRIX_BF16
const uint kCodeShift = 4u, kCodeBase = 0x3C003C00u;
#else
const uint kCodeShift = 7u, kCodeBase = 0x20002000u;
#endif
uvec2 normal_values(uint codes) {
    uint even = ((codes & 0x007F007Fu) << kCodeShift) + kCodeBase;
    uint odd = ((codes >> 8u & 0x007F007Fu) << kCodeShift) + kCodeBase;
    return uvec2(even | codes << 8u & 0x80008000u, odd | codes & 0x80008000u);
}
uvec2 any_values(uint codes) {
    vec4 values = fp8_decode_finite4(FP8_E4M3, codes).xzyw;
#if MATRIX_BF16
    uvec4 bits = floatBitsToUint(values);
    return uvec2(bits.x >> 16 | bits.y & 0xFFFF0000u, bits.z >> 16 | bits.w & 0xFFFF0000u);
#else
    return matrix_pack(values);
#endif
}

// The order of columns in which values of codes stand, of four elements of bf16.
uvec2 in_order_of_codes(uvec2 four) {
    return uvec2(four.x & 0xFFFFu | four.y << 16, four.x >> 16 | four.y & 0xFFFF0000u);
}

void put_codes(uint to, uvec4 codes) {
    uvec4 exponents = codes & 0x78787878u;
    uvec4 least = (exponents - 0x01010101u) & ~exponents & 0x80808080u; // at least where they are 0
    if ((least.x | least.y | least.z | least.w) == 0u) {
        memory[to] = uvec4(normal_values(codes.x), normal_values(codes.y));
        memory[to + 1u] = uvec4(normal_values(codes.z), normal_values(codes.w));
    } else {
        memory[to] = uvec4(any_values(codes.x), any_values(codes.y));
        memory[to + 1u] = uvec4(any_values(codes.z), any_values(codes.w));
    }
}

// What is read of the cache, 16 bytes of it at a time.
#define CODE_UNITS (VALUE / 16u)
#define X_UNITS (kCodes ? CODE_UNITS + 1u + (KEY - VALUE) / 8u : KEY / 8u)
#define Y_UNITS (kLatent ? 0u : VALUE / 8u)
#define TOKEN_UNITS (X_UNITS + Y_UNITS)
#define FETCHES ((block * TOKEN_UNITS + local_size - 1u) / local_size)
uvec4 fetched[FETCHES];

// Number `at` of those of entry number `token` from an address on.
uvec4 load_unit(uvec2 from, uint kv_head, uint token, uint at) {
    if (!kCodes) {
        uint unit = at < X_UNITS ? kv_head * X_UNITS + at
                                 : first_value4 / 2u + kv_head * Y_UNITS + at - X_UNITS;
        return ReadUvec4(from).v[token * units + unit];
    }
    if (at <= CODE_UNITS || parts == 4u) { // whose scales are 16 bytes
        return ReadUvec4(from).v[token * units + at];
    }
    uint word = 4u * token * units + VALUE / 4u + parts + 4u * (at - CODE_UNITS - 1u);
    return uvec4(ReadUint(from).v[word], ReadUint(from).v[word + 1u], ReadUint(from).v[word + 2u],
                 ReadUint(from).v[word + 3u]);
}

void fetch(Item item, uint kv_head, uint first, uint end) {
    first = min(first, end - 1u) / block * block;
    uvec2 from = entry_address(block_address(item, first / kCacheBlock), first % kCacheBlock);
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {
        uint unit = min(gl_LocalInvocationIndex + i * local_size, block * TOKEN_UNITS - 1u);
        uint token = min(unit / TOKEN_UNITS, end - first - 1u);
        fetched[i] = load_unit(from, kv_head, token, unit % TOKEN_UNITS);
    }
}

void put_unit(uint token, uint at, uvec4 unit) {
    uint to = token * X_STRIDE;
    if (!kCodes) {
        memory[at < X_UNITS ? to + at : Y_START + token * Y_STRIDE + at - X_UNITS] = codes_of(unit);
    } else if (at < CODE_UNITS) {
        put_codes(to + 2u * at, unit);
    } else if (at > CODE_UNITS) {
        memory[to + VALUE / 8u + at - CODE_UNITS - 1u] = codes_of(unit);
    } else {
        [[unroll]] for (uint p = 0u; p < 4u; ++p) {
            if (p < parts) {
                memory[SCALES_START + (p * block + token) / 4u][token % 4u] = unit[p];
            }
        }
    }
}

// What stands behind the last key may be anything: zeros, as 0 times it must be 0.
void put(uint first, uint end) {
    [[unroll]] for (uint i = 0u; i < FETCHES; ++i) {
        uint unit = gl_LocalInvocationIndex + i * local_size;
        if (unit < block * TOKEN_UNITS) {
            uint token = unit / TOKEN_UNITS;
            put_unit(token, unit % TOKEN_UNITS, token < end - first ? fetched[i] : uvec4(0));
        }
    }
}
