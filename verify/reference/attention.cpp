// SPDX-License-Identifier: MIT
#include "verify/reference/ops.hpp"

#include <cmath>
#include <stdexcept>

namespace bellows::reference {
namespace {

/// One head of one sequence: reads rows of q, k, v and knows how far each query sees.
class Head {
public:
    Head(const AttentionShape& shape, std::size_t batch, std::size_t head)
        : shape_(shape), batch_(batch), head_(head) {}

    std::size_t visible(std::size_t query) const {
        return query + 1 + shape_.keys - shape_.queries;
    }
    std::size_t first_visible(std::size_t query) const {
        return shape_.begins.empty() ? 0 : shape_.begins.at(batch_ * shape_.queries + query);
    }
    std::size_t q_at(std::size_t query) const {
        return ((batch_ * shape_.queries + query) * shape_.heads + head_) * shape_.qk_dim;
    }
    std::size_t k_at(std::size_t key) const { return kv_row(key) * shape_.qk_dim; }
    std::size_t v_at(std::size_t key) const { return kv_row(key) * shape_.v_dim; }
    std::size_t out_at(std::size_t query) const {
        return ((batch_ * shape_.queries + query) * shape_.heads + head_) * shape_.v_dim;
    }

    /// The softmax over the visible keys and its log-sum-exp; 0 for those of documents before.
    Vector probabilities(View q, View k, std::size_t query, double& lse) const {
        const std::size_t begin = first_visible(query);
        Vector p(visible(query), 0.0);
        double largest = -INFINITY, sum = 0;
        for (std::size_t j = begin; j < p.size(); ++j) {
            double dot = 0;
            for (std::size_t c = 0; c < shape_.qk_dim; ++c)
                dot += q[q_at(query) + c] * k[k_at(j) + c];
            p[j] = shape_.scale * dot;
            largest = std::max(largest, p[j]);
        }
        for (std::size_t j = begin; j < p.size(); ++j)
            sum += std::exp(p[j] - largest);
        lse = largest + std::log(sum);
        for (std::size_t j = begin; j < p.size(); ++j)
            p[j] = std::exp(p[j] - lse);
        return p;
    }

private:
    std::size_t kv_row(std::size_t key) const {
        const std::size_t kv_heads = shape_.heads / shape_.group();
        return (batch_ * shape_.keys + key) * kv_heads + head_ / shape_.group();
    }

    const AttentionShape& shape_;
    std::size_t batch_, head_;
};

void check(View q, View k, View v, const AttentionShape& s) {
    require_size("attention: q", q.size(), s.batch * s.queries * s.heads * s.qk_dim);
    if (s.kv_heads != 0 && s.heads % s.kv_heads != 0)
        throw std::invalid_argument("attention: kv_heads does not divide heads");
    const std::size_t kv_heads = s.heads / s.group();
    require_size("attention: k", k.size(), s.batch * s.keys * kv_heads * s.qk_dim);
    require_size("attention: v", v.size(), s.batch * s.keys * kv_heads * s.v_dim);
    if (s.keys < s.queries)
        throw std::invalid_argument("attention: fewer keys than queries");
}

} // namespace

Attention attention_forward(View q, View k, View v, const AttentionShape& s) {
    check(q, k, v, s);
    Attention out{Vector(s.batch * s.queries * s.heads * s.v_dim, 0.0),
                  Vector(s.batch * s.heads * s.queries)};
    for (std::size_t b = 0; b < s.batch; ++b) {
        for (std::size_t h = 0; h < s.heads; ++h) {
            const Head head(s, b, h);
            for (std::size_t i = 0; i < s.queries; ++i) {
                const Vector p =
                    head.probabilities(q, k, i, out.lse[(b * s.heads + h) * s.queries + i]);
                for (std::size_t j = 0; j < p.size(); ++j)
                    for (std::size_t c = 0; c < s.v_dim; ++c)
                        out.out[head.out_at(i) + c] += p[j] * v[head.v_at(j) + c];
            }
        }
    }
    return out;
}

AttentionGrads attention_input_grad(View dout, View q, View k, View v, const AttentionShape& s) {
    check(q, k, v, s);
    require_size("attention: dout", dout.size(), s.batch * s.queries * s.heads * s.v_dim);
    AttentionGrads grads{Vector(q.size(), 0.0), Vector(k.size(), 0.0), Vector(v.size(), 0.0)};
    for (std::size_t b = 0; b < s.batch; ++b) {
        for (std::size_t h = 0; h < s.heads; ++h) {
            const Head head(s, b, h);
            for (std::size_t i = 0; i < s.queries; ++i) {
                double lse = 0;
                const Vector p = head.probabilities(q, k, i, lse);
                Vector dp(p.size(), 0.0);
                double expected = 0; // Σ p·dp, equal to dout·out
                for (std::size_t j = 0; j < p.size(); ++j) {
                    for (std::size_t c = 0; c < s.v_dim; ++c) {
                        dp[j] += dout[head.out_at(i) + c] * v[head.v_at(j) + c];
                        grads.dv[head.v_at(j) + c] += p[j] * dout[head.out_at(i) + c];
                    }
                    expected += p[j] * dp[j];
                }
                for (std::size_t j = 0; j < p.size(); ++j) {
                    const double dscore = s.scale * p[j] * (dp[j] - expected);
                    for (std::size_t c = 0; c < s.qk_dim; ++c) {
                        grads.dq[head.q_at(i) + c] += dscore * k[head.k_at(j) + c];
                        grads.dk[head.k_at(j) + c] += dscore * q[head.q_at(i) + c];
                    }
                }
            }
        }
    }
    return grads;
}

} // namespace bellows::reference
