// SPDX-License-Identifier: MIT
// Gradient of the router's weights with respect to its logits (the selection itself has none).
// With D = sum of the chosen scores (or 1): ds_k = scale / D * (dw_k - sum_j dw_j s_j / D), then
// through the sigmoid, dl = ds s (1 - s), or the softmax, dl = s (ds - sum_j ds_j s_j).
// With the constant `balance`, ds_e grows by the gradient of balance_weight * sum_e c_e s_e / S, where
// S = sum_e s_e and c are the counts of the token's run of run_tokens tokens: balance_weight / S *
// (c_e - sum_j c_j s_j / S). Its dot product with s is 0, so the softmax passes it on as it is.
// With `devices`, c_e of an expert of device g is balance_weight * c_e + device_weight * (slots of g) +
// communication_weight * (tokens of g), without another balance_weight; balance_counts.comp has the
// order of the counts. With `accumulated` all that is divided by the tokens counted over run_tokens.
// With the constant `z_loss`, dl_e grows by the gradient of z_weight * z^2, z = log sum_j exp l_j:
// 2 z_weight z exp(l_e - z).
//   d_topk_weights [tokens, top_k] f32, topk_ids [tokens, top_k] i32, scores [tokens, experts] f32
//   counts [runs, run_counts] u32, logits, d_logits [tokens, experts] f32
// Dispatch: see include/rows.glsl; a row is a token, its columns the experts. The invocations of a
// workgroup sum over the few chosen experts each for itself; shared memory, 4 * local_size bytes,
// serves the balance and the z loss alone.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "router_dgrad.kernel.glsl"
#include "include/rows.glsl"

float chosen_score(uint row, uint slot) {
    return push.operands.scores.v[row + uint(push.operands.topk_ids.v[slot])];
}

// What the balance adds to ds: factor * (c_e - mean).
struct Balance {
    uint first; // of the run's counts
    float factor;
    float mean;
};

// c_e.
float balance_coefficient(uint first, uint expert) {
    float c = float(push.operands.counts.v[first + expert]);
    if (devices != 0u) {
        uint device = first + push.experts + expert / (push.experts / max(devices, 1u));
        c = push.balance_weight * c + push.device_weight * float(push.operands.counts.v[device]) +
            push.communication_weight * float(push.operands.counts.v[device + devices]);
    }
    return c;
}

// Of one run's counts, over the tokens that they are of.
float accumulated_share(uint first) {
    uint tokens = push.operands.counts.v[first + push.run_counts - 1u];
    return float(push.run_tokens) / float(max(tokens, 1u));
}

Balance balance_of(uint token, uint row) {
    Balance of = Balance(0u, 0.0, 0.0);
    if (balance != 0u) {
        of.first = token / push.run_tokens * push.run_counts;
        float total = 0.0;
        float weighted = 0.0;
        FOR_COLUMNS(e, push.experts) {
            float score = push.operands.scores.v[row + e];
            total += score;
            weighted += score * balance_coefficient(of.first, e);
        } NEXT_COLUMN(e, push.experts);
        total = row_sum(total) + 1e-20;
        of.mean = row_sum(weighted) / total;
        of.factor = (devices != 0u ? 1.0 : push.balance_weight) / total;
        if (accumulated != 0u) {
            of.factor *= accumulated_share(of.first);
        }
    }
    return of;
}

float balance_gradient(Balance of, uint expert) {
    if (balance == 0u) {
        return 0.0;
    }
    return of.factor * (balance_coefficient(of.first, expert) - of.mean);
}

// What the z loss adds to dl: factor * exp(l_e - most).
struct ZLoss {
    float most;
    float factor;
};

ZLoss z_loss_of(uint row) {
    ZLoss of = ZLoss(0.0, 0.0);
    if (z_loss != 0u) {
        float most = uintBitsToFloat(0xFF800000u);
        FOR_COLUMNS(e, push.experts) {
            most = max(most, push.operands.logits.v[row + e]);
        } NEXT_COLUMN(e, push.experts);
        of.most = row_max(most);
        float sum = 0.0;
        FOR_COLUMNS(e, push.experts) {
            sum += exp_f32(push.operands.logits.v[row + e] - of.most);
        } NEXT_COLUMN(e, push.experts);
        sum = row_sum(sum);
        of.factor = 2.0 * push.z_weight * (of.most + log_f32(sum)) / sum;
    }
    return of;
}

float z_gradient(ZLoss of, uint at) {
    return of.factor * exp_f32(push.operands.logits.v[at] - of.most);
}

void main() {
    FOR_ROWS(token, push.tokens) {
        uint row = token * push.experts;
        uint first_slot = token * push.top_k;
        Balance of = balance_of(token, row);
        ZLoss z = z_loss_of(row);
        float sum = 0.0;
        float dot_scores = 0.0;
        FOR_COUNTED(k, 0u, push.top_k) {
            float score = chosen_score(row, first_slot + k);
            sum += score;
            dot_scores += push.operands.d_topk_weights.v[first_slot + k] * score;
        } NEXT_COUNTED(k, push.top_k, 1u);
        float divisor = push.normalise != 0u ? sum + 1e-20 : 1.0;
        float shift = push.normalise != 0u ? dot_scores / divisor : 0.0;
        float factor = push.route_scale / divisor;
        // sum_j ds_j s_j
        float inner = factor * (dot_scores - shift * sum);

        FOR_COLUMNS(e, push.experts) {
            float rest = push.use_softmax != 0u ? -inner * push.operands.scores.v[row + e] : 0.0;
            if (balance != 0u) {
                float score = push.operands.scores.v[row + e];
                rest += balance_gradient(of, e) * score *
                        (push.use_softmax != 0u ? 1.0 : 1.0 - score);
            }
            if (z_loss != 0u) {
                rest += z_gradient(z, row + e);
            }
            push.operands.d_logits.v[row + e] = rest;
        } NEXT_COLUMN(e, push.experts);
        FOR_COUNTED(k, 0u, push.top_k) {
            uint slot = first_slot + k;
            uint expert = uint(push.operands.topk_ids.v[slot]);
            float score = push.operands.scores.v[row + expert];
            float d_score = factor * (push.operands.d_topk_weights.v[slot] - shift);
            if (balance != 0u) {
                d_score += balance_gradient(of, expert);
            }
            float d_logit = push.use_softmax != 0u ? score * (d_score - inner)
                                                   : d_score * score * (1.0 - score);
            if (z_loss != 0u) {
                d_logit += z_gradient(z, row + expert);
            }
            // Whoever wrote the rest of this expert writes over it.
            if (expert % column_step() == column_first()) {
                push.operands.d_logits.v[row + expert] = d_logit;
            }
        } NEXT_COUNTED(k, push.top_k, 1u);
    } NEXT_ROW(token, push.tokens);
}
