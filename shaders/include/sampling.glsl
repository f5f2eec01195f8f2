// SPDX-License-Identifier: MIT
// What the kernels of ops::sample share. Every sum is of integers and every choice by integer keys,
// so neither the order of the invocations nor how a row is split shows in the result.
//   Kernels have an operand `settings` and include math.glsl before.
#ifndef BELLOWS_SAMPLING_GLSL
#define BELLOWS_SAMPLING_GLSL

const uint kChunk = 2048u;      // columns of sample_chunks' workgroup
const uint kRecord = 8u;        // words that it leaves: kRecord… below
const uint kMostTop = 20u;      // and candidates (key, id) for the list of the likeliest
const uint kNoToken = 0xFFFFFFFFu;
#define kNan uintBitsToFloat(0x7FC00000u)
#define kInfinity uintBitsToFloat(0x7F800000u)

const uint kRecordMost = 0u;    // bits of the greatest logit
const uint kRecordSum = 1u;     // sum of e^(logit - greatest), fixed point, two words
const uint kRecordBestKey = 3u; // of the drawn token's score, or of the greatest changed logit
const uint kRecordBestId = 4u;
const uint kRecordBad = 5u;     // 1: NaN or +inf among the logits

// --- order-preserving keys -----------------------------------------------------------------------

// Greater x, greater key; 0 is below all. +0 and -0 have one key.
uint key_of(float x) {
    uint bits = floatBitsToUint(x);
    bits = bits == 0x80000000u ? 0u : bits;
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}
float value_of(uint key) {
    return uintBitsToFloat((key & 0x80000000u) != 0u ? key & 0x7FFFFFFFu : ~key);
}
bool is_bad(float x) {
    uint bits = floatBitsToUint(x);
    return (bits & 0x7FFFFFFFu) > 0x7F800000u || bits == 0x7F800000u;
}
bool is_forbidden(float x) {
    return floatBitsToUint(x) == 0xFF800000u;
}

// --- numbers of 64 bits: low word, high word -----------------------------------------------------

uvec2 add64(uvec2 a, uvec2 b) {
    uint carry;
    uint low = uaddCarry(a.x, b.x, carry);
    return uvec2(low, a.y + b.y + carry);
}
uvec2 subtract64(uvec2 a, uvec2 b) {
    uint borrow;
    uint low = usubBorrow(a.x, b.x, borrow);
    return uvec2(low, a.y - b.y - borrow);
}
bool less64(uvec2 a, uvec2 b) {
    return a.y != b.y ? a.y < b.y : a.x < b.x;
}

// n / 2^64 to 24 significant bits, cut off; exact in any rounding mode. Not of 0.
float fraction64(uvec2 n) {
    int top = n.y != 0u ? 32 + findMSB(n.y) : findMSB(n.x);
    uint shift = uint(63 - top); // left, so that the top bit is bit 63
    n = shift >= 32u ? uvec2(0u, n.x << (shift - 32u))
                     : (shift == 0u ? n : uvec2(n.x << shift, (n.y << shift) | (n.x >> (32u - shift))));
    return uintBitsToFloat((uint(126 - int(shift)) << 23) | ((n.y >> 8) & 0x007FFFFFu));
}

// Weights in fixed point, 40 bits behind the point; w in [0, 2^23].
uvec2 fixed40(float w) {
    precise float scaled = w * 256.0;
    precise float whole = floor(scaled);
    precise float rest = (scaled - whole) * 4294967296.0;
    return uvec2(uint(rest), uint(whole));
}
float from_fixed40(uvec2 n) {
    return (n.x | n.y) == 0u ? 0.0 : fraction64(n) * 16777216.0;
}

// --- settings ------------------------------------------------------------------------------------

struct Settings {
    float inverse; // 1 / temperature
    float top_p, min_p;
    uint top_k, position, seed_low, seed_high;
    bool greedy; // the likeliest token
    bool cut;    // there are thresholds
};

Settings settings_of(uint row) {
    uint at = 16u * row;
    Settings s;
    float temperature = uintBitsToFloat(push.operands.settings.v[at]);
    s.greedy = !(temperature >= 1e-5);
    precise float inverse = 1.0 / min(temperature, 1e30);
    s.inverse = inverse;
    s.top_p = uintBitsToFloat(push.operands.settings.v[at + 1u]);
    s.min_p = min(uintBitsToFloat(push.operands.settings.v[at + 2u]), 1.0);
    s.top_k = push.operands.settings.v[at + 3u];
    s.position = push.operands.settings.v[at + 7u];
    s.seed_low = push.operands.settings.v[at + 8u];
    s.seed_high = push.operands.settings.v[at + 9u];
    s.cut = !s.greedy && ((s.top_k > 0u && s.top_k < push.vocabulary) || s.top_p < 1.0 ||
                          s.min_p > 0.0);
    return s;
}

// --- draw ----------------------------------------------------------------------------------------

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011), its first two words.
uvec2 philox(uvec4 counter, uvec2 key) {
    [[unroll]] for (uint round = 0u; round < 10u; ++round) {
        uint high0, low0, high1, low1;
        umulExtended(0xD2511F53u, counter.x, high0, low0);
        umulExtended(0xCD9E8D57u, counter.z, high1, low1);
        counter = uvec4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key += uvec2(0x9E3779B9u, 0xBB67AE85u);
    }
    return counter.xy;
}

// An exponential variate of a token: -ln(1 - n / 2^64) for 64 random bits n, which is exact to a
// few ulp where it is small, and there it decides.
float exponential(Settings s, uint token) {
    uvec2 words = philox(uvec4(token, s.position, 0u, 0u), uvec2(s.seed_low, s.seed_high));
    uvec2 n = uvec2(words.x | 1u, words.y);
    if (n.y >= 0x40000000u) {
        precise float rest = float(0x01000000u - (n.y >> 8)) * 5.9604644775390625e-8;
        return -log_f32(rest);
    }
    return -log_scaled(-fraction64(n), 0.0);
}

// The token with the greatest score is drawn with the probability of its softmax (Gumbel's trick).
float score(Settings s, uint token, float logit) {
    precise float tempered = logit * s.inverse;
    precise float result = tempered - log_f32(exponential(s, token));
    return result;
}

// --- the best of a workgroup ---------------------------------------------------------------------

shared uint best_key, best_id;

// The greatest key that the invocations bring, with the lowest id that has it; key 0 brings none.
void workgroup_best(inout uint key, inout uint id) {
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        best_key = 0u;
        best_id = kNoToken;
    }
    barrier();
    atomicMax(best_key, key);
    barrier();
    if (key != 0u && key == best_key) {
        atomicMin(best_id, id);
    }
    barrier();
    key = best_key;
    id = best_id;
}

void take_better(inout uint key, inout uint id, uint other_key, uint other_id) {
    if (other_key > key || (other_key == key && other_id < id)) {
        key = other_key;
        id = other_id;
    }
}

shared uint total_low, total_high;

// The sum over the workgroup.
uvec2 workgroup_sum(uvec2 n) {
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        total_low = 0u;
        total_high = 0u;
    }
    barrier();
    uint before = atomicAdd(total_low, n.x);
    atomicAdd(total_high, n.y + (before + n.x < before ? 1u : 0u));
    barrier();
    return uvec2(total_low, total_high);
}

#endif
