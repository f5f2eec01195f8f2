// SPDX-License-Identifier: MIT
// Causal attention, forward, in one pass over the keys (no score matrix in memory):
//   s_ij = scale * sum over d of q[i][h][d] * k[j][h][d]   for j <= i in the same sequence
//   lse[i][h] = log(sum over j of exp(s_ij)),   o[i][h] = sum over j of exp(s_ij - lse) * v[j][h]
// Token i of sequence b is row b * seq + i; tokens = sequences * seq.
//
// q [tokens, heads, qk_dim], k [tokens, heads / group, qk_dim], v [tokens, heads / group, v_dim],
// o [tokens, heads, v_dim], f32 or bf16 (variant); head h of q uses head h / group of k and v;
//       element (t, h, d) at t * <x>_token + h * <x>_head + d, strides counted in elements; a
//       sequence spans less than 2^32 elements. o starts at a multiple of 4 bytes, and if it is bf16
//       its strides are even (the backward passes ask the same of gradients); o overlaps no input.
// lse   [tokens, heads] f32, dense: natural logarithm, for the backward passes
// documents [tokens, 2] u32, read with by_document alone: the first token of the document that a
//       token is of, and the one behind its last, both within the sequence and ascending. Then the
//       keys of a query are those of its document, and tiles leave others out.
// Constants  local_size      invocations per workgroup: 8 for a CPU, 32 or 64 for a GPU
//            aligned         1 if qk_dim, v_dim and all strides are multiples of 4 and tensors
//                            start at a multiple of four elements' bytes. 0 serves everything, same
//                            bits.
//            share_rows      1: eight invocations load keys together and pass them round; needs
//                            local_size = 8 and a subgroup size of 8. Faster on lavapipe before
//                            Mesa 26, slower from there on. Same bits.
//            per_invocation  queries per invocation: 4 for a CPU (v_dim <= 64), 1 for a GPU
//            qk_dim, v_dim   head sizes, at least 1
//            parts           split of the outputs among workgroups, same bits: ceil(outputs / 80);
//                            outputs: v_dim, in backward_q qk_dim, in backward_kv qk_dim + v_dim
//            group           heads of q that share one of k and v; divides heads
//            by_document     1: `documents` counts
// Dispatch   x = ceil(seq / (local_size * per_invocation)), y = heads * parts, z = sequences.
// Order      keys ascend in blocks of 8 from the sequence's first on, so a row's bits depend on
//            nothing but its own q and the keys and values up to it, and with documents on where
//            its own begins. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"

#include "include/attention_types.glsl"

#include "attention_forward.kernel.glsl"

#include "include/attention_documents.glsl"
#include "include/attention_tile.glsl"

layout(local_size_x_id = 0) in;


void main() {
    uint head = gl_WorkGroupID.y / parts;
    uint part = gl_WorkGroupID.y % parts;
    uint sequence = gl_WorkGroupID.z;
    HeadView q = head_view(uvec2(push.operands.q), sequence, push.seq, head, push.q_token,
                           push.q_head, qk_dim);
    HeadView k = head_view(uvec2(push.operands.k), sequence, push.seq, head / group, push.k_token,
                           push.k_head, qk_dim);
    HeadView v = head_view(uvec2(push.operands.v), sequence, push.seq, head / group, push.v_token,
                           push.v_head, v_dim);

    uint last = push.seq - 1u;
    uint tile = local_size * per_invocation;
    uint query[per_invocation];
    uint row[per_invocation]; // clamped: queries beyond the sequence are computed, never stored
    uint begin[per_invocation]; // of the query's document
    float top[per_invocation];
    float total[per_invocation];
    float sum[PART(v_dim) * per_invocation];
    [[unroll]] for (uint c = 0u; c < per_invocation; ++c) {
        query[c] = gl_WorkGroupID.x * tile + gl_LocalInvocationIndex * per_invocation + c;
        row[c] = min(query[c], last);
        begin[c] = document_begin(sequence * push.seq + row[c]);
        top[c] = kLowest;
        total[c] = 0.0;
    }
    [[unroll]] for (uint i = 0u; i < PART(v_dim) * per_invocation; ++i) {
        sum[i] = 0.0;
    }

    float scale = push.scale * kLog2E; // powers of two: exp2 needs no multiplication
    uint end = min(push.seq, (gl_WorkGroupID.x + 1u) * tile);
    uint first =
        document_begin(sequence * push.seq + gl_WorkGroupID.x * tile) / kBlock * kBlock;
    do {
        float block[BLOCK_SIZE];
        DOT_BLOCK(k, first, last, q, row, block)
        [[unroll]] for (uint c = 0u; c < per_invocation; ++c) {
            float new_top = top[c];
            [[unroll]] for (uint b = 0u; b < kBlock; ++b) {
                uint i = b * per_invocation + c;
                bool sees = begin[c] <= first + b && first + b <= row[c];
                block[i] = sees ? block[i] * scale : kLowest;
                new_top = max(new_top, block[i]);
            }
            float correction = exp2(top[c] - new_top);
            total[c] *= correction;
            [[unroll]] for (uint b = 0u; b < kBlock; ++b) {
                uint i = b * per_invocation + c;
                bool none = by_document != 0u && block[i] == kLowest; // maybe of the whole row
                block[i] = none ? 0.0 : exp2(block[i] - new_top);
                total[c] += block[i];
            }
            [[unroll]] for (uint d = 0u; d < PART(v_dim); ++d) {
                sum[d * per_invocation + c] *= correction;
            }
            top[c] = new_top;
        }
        OUTER_BLOCK(v, first, last, part * PART(v_dim), v_dim, block, sum)
        first += kBlock;
    } while (first < end);

    HeadView o = head_view(uvec2(push.operands.o), sequence, push.seq, head, push.o_token,
                           push.o_head, v_dim);
    [[unroll]] for (uint c = 0u; c < per_invocation; ++c) {
        float inverse = 1.0 / total[c];
        [[unroll]] for (uint d = 0u; d < PART(v_dim); ++d) {
            sum[d * per_invocation + c] *= inverse;
        }
        if (part == 0u && query[c] < push.seq) {
            uint token = sequence * push.seq + query[c];
            push.operands.lse.v[token * push.heads + head] = (top[c] + log2(total[c])) * kLn2;
        }
    }
    STORE_COLUMNS(o, part * PART(v_dim), v_dim, query, push.seq, 1.0, sum)
}
