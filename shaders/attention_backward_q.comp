// SPDX-License-Identifier: MIT
// Causal attention, gradient of the queries:
//   p_ij = exp(s_ij - lse_i),  dp_ij = sum over d of grad_o[i][d] * v[j][d],
//   grad_q[i] = scale * sum over j <= i of p_ij * (dp_ij - delta_i) * k[j]
// q, k, v, lse, layouts, constants, dispatch and order: attention_forward.comp. per_invocation
// counts queries: 4 for a CPU (qk_dim <= 64), 1 for a GPU.
// grad_o   [tokens, heads, v_dim], grad_q [tokens, heads, qk_dim] in the variant's type; grad_q is
//          overwritten
// delta  [tokens, heads] f32 from attention_delta.comp
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"

#include "include/attention_types.glsl"

#include "attention_backward_q.kernel.glsl"

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
    HeadView grad_o = head_view(uvec2(push.operands.grad_o), sequence, push.seq, head,
                                push.grad_o_token, push.grad_o_head, v_dim);

    uint last = push.seq - 1u;
    uint tile = local_size * per_invocation;
    uint query[per_invocation];
    uint row[per_invocation]; // clamped: queries beyond the sequence are computed, never stored
    uint begin[per_invocation]; // of the query's document
    float lse[per_invocation];
    float delta[per_invocation];
    float sum[PART(qk_dim) * per_invocation];
    [[unroll]] for (uint c = 0u; c < per_invocation; ++c) {
        query[c] = gl_WorkGroupID.x * tile + gl_LocalInvocationIndex * per_invocation + c;
        row[c] = min(query[c], last);
        begin[c] = document_begin(sequence * push.seq + row[c]);
        uint index = (sequence * push.seq + row[c]) * push.heads + head;
        lse[c] = push.operands.lse.v[index] * kLog2E;
        delta[c] = push.operands.delta.v[index];
    }
    [[unroll]] for (uint i = 0u; i < PART(qk_dim) * per_invocation; ++i) {
        sum[i] = 0.0;
    }

    float scale = push.scale * kLog2E;
    uint end = min(push.seq, (gl_WorkGroupID.x + 1u) * tile);
    uint first =
        document_begin(sequence * push.seq + gl_WorkGroupID.x * tile) / kBlock * kBlock;
    do {
        float block[BLOCK_SIZE];
        float dp[BLOCK_SIZE];
        DOT_BLOCK(k, first, last, q, row, block)
        DOT_BLOCK(v, first, last, grad_o, row, dp)
        [[unroll]] for (uint c = 0u; c < per_invocation; ++c) {
            [[unroll]] for (uint b = 0u; b < kBlock; ++b) {
                uint i = b * per_invocation + c;
                bool sees = begin[c] <= first + b && first + b <= row[c];
                float p = sees ? exp2(fma(block[i], scale, -lse[c])) : 0.0;
                block[i] = p * (dp[i] - delta[c]);
            }
        }
        OUTER_BLOCK(k, first, last, part * PART(qk_dim), qk_dim, block, sum)
        first += kBlock;
    } while (first < end);

    HeadView grad_q = head_view(uvec2(push.operands.grad_q), sequence, push.seq, head,
                                push.grad_q_token, push.grad_q_head, qk_dim);
    STORE_COLUMNS(grad_q, part * PART(qk_dim), qk_dim, query, push.seq, push.scale, sum)
}
