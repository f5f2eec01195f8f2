// SPDX-License-Identifier: MIT
// Causal attention, gradients of keys and values:
//   p_ij = exp(s_ij - lse_i),  dp_ij = sum over d of grad_o[i][d] * v[j][d],
//   grad_v[j] = sum over i >= j of p_ij * grad_o[i]
//   grad_k[j] = scale * sum over i >= j of p_ij * (dp_ij - delta_i) * q[i]
// q, k, v, lse, layouts, constants and dispatch: attention_forward.comp, except that an invocation
// owns per_invocation keys (4 for a CPU with qk_dim + v_dim <= 96, else 1), y = heads / group *
// parts, and the group's heads ascend, in each of them queries.
// grad_o [tokens, heads, v_dim], grad_k and grad_v as k and v, in the variant's type; the latter two
//        are overwritten
// delta  [tokens, heads] f32 from attention_delta.comp
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"

#include "include/attention_types.glsl"

#include "attention_backward_kv.kernel.glsl"

#include "include/attention_documents.glsl"
#include "include/attention_tile.glsl"

layout(local_size_x_id = 0) in;


void main() {
    uint kv_head = gl_WorkGroupID.y / parts;
    uint part = gl_WorkGroupID.y % parts;
    uint sequence = gl_WorkGroupID.z;
    HeadView k = head_view(uvec2(push.operands.k), sequence, push.seq, kv_head, push.k_token,
                           push.k_head, qk_dim);
    HeadView v = head_view(uvec2(push.operands.v), sequence, push.seq, kv_head, push.v_token,
                           push.v_head, v_dim);

    uint last = push.seq - 1u;
    uint tile = local_size * per_invocation;
    uint key[per_invocation];
    uint row[per_invocation]; // clamped: keys beyond the sequence are computed, never stored
    uint end[per_invocation]; // of the key's document
    float sum_k[PART(qk_dim) * per_invocation];
    float sum_v[PART(v_dim) * per_invocation];
    [[unroll]] for (uint c = 0u; c < per_invocation; ++c) {
        key[c] = gl_WorkGroupID.x * tile + gl_LocalInvocationIndex * per_invocation + c;
        row[c] = min(key[c], last);
        end[c] = document_end(sequence * push.seq + row[c]);
    }
    [[unroll]] for (uint i = 0u; i < PART(qk_dim) * per_invocation; ++i) {
        sum_k[i] = 0.0;
    }
    [[unroll]] for (uint i = 0u; i < PART(v_dim) * per_invocation; ++i) {
        sum_v[i] = 0.0;
    }

    uint last_key = min((gl_WorkGroupID.x + 1u) * tile - 1u, last);
    uint last_query = min(document_end(sequence * push.seq + last_key) - 1u, last);
    float scale = push.scale * kLog2E;
    uint member = 0u; // of the group
    do {
        uint head = kv_head * group + member;
        HeadView q = head_view(uvec2(push.operands.q), sequence, push.seq, head, push.q_token,
                               push.q_head, qk_dim);
        HeadView grad_o = head_view(uvec2(push.operands.grad_o), sequence, push.seq, head,
                                    push.grad_o_token, push.grad_o_head, v_dim);
        uint statistics = sequence * push.seq * push.heads + head;
        uint first = gl_WorkGroupID.x * tile / kBlock * kBlock;
        do {
            float p[BLOCK_SIZE];
            float ds[BLOCK_SIZE];
            DOT_BLOCK(q, first, last, k, row, p)
            DOT_BLOCK(grad_o, first, last, v, row, ds)
            [[unroll]] for (uint b = 0u; b < kBlock; ++b) {
                uint query = first + b;
                uint index = statistics + min(query, last) * push.heads;
                float lse = push.operands.lse.v[index] * kLog2E;
                float delta = push.operands.delta.v[index];
                [[unroll]] for (uint c = 0u; c < per_invocation; ++c) {
                    uint i = b * per_invocation + c;
                    bool seen = row[c] <= query && query < end[c];
                    p[i] = seen ? exp2(fma(p[i], scale, -lse)) : 0.0;
                    ds[i] = p[i] * (ds[i] - delta);
                }
            }
            OUTER_BLOCK(grad_o, first, last, part * PART(v_dim), v_dim, p, sum_v)
            OUTER_BLOCK(q, first, last, part * PART(qk_dim), qk_dim, ds, sum_k)
            first += kBlock;
        } while (first <= last_query);
        ++member;
    } while (member < group);

    HeadView grad_k = head_view(uvec2(push.operands.grad_k), sequence, push.seq, kv_head,
                                push.grad_k_token, push.grad_k_head, qk_dim);
    HeadView grad_v = head_view(uvec2(push.operands.grad_v), sequence, push.seq, kv_head,
                                push.grad_v_token, push.grad_v_head, v_dim);
    STORE_COLUMNS(grad_k, part * PART(qk_dim), qk_dim, key, push.seq, push.scale, sum_k)
    STORE_COLUMNS(grad_v, part * PART(v_dim), v_dim, key, push.seq, 1.0, sum_v)
}
