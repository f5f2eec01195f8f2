// SPDX-License-Identifier: MIT
#include "verify/reference/model.hpp"

namespace bellows::reference {
namespace {

struct Sizes {
    std::size_t rows, hidden, heads, kv_heads, dim, q, kv;

    Sizes(const ModelConfig& c, std::size_t rows_)
        : rows(rows_), hidden(c.hidden), heads(c.heads), kv_heads(c.kv_heads), dim(c.head_dim),
          q(heads * dim), kv(kv_heads * dim) {}
};

/// Of the projected heads, what the attention takes.
Vector finish_heads(View in, RmsNorm& norm, const ModelConfig& config, const Parameters& p,
                    const std::string& gain, const std::vector<std::int64_t>& at,
                    std::size_t heads) {
    const RopeShape turn = rope_shape(config, at.size(), heads, config.head_dim, 0);
    if (!config.qk_norm)
        return rope(in, at, turn);
    norm = rmsnorm_forward(in, p.at(gain), at.size() * heads, config.head_dim, config.norm_eps);
    return rope(norm.y, at, turn);
}

Vector finish_heads_backward(View d, View in, const RmsNorm& norm, const ModelConfig& config,
                             const Parameters& p, const std::string& gain,
                             const std::vector<std::int64_t>& at, std::size_t heads,
                             Parameters& g) {
    Vector turned = rope(d, at, rope_shape(config, at.size(), heads, config.head_dim, 0), true);
    if (!config.qk_norm)
        return turned;
    const std::size_t rows = at.size() * heads;
    g[gain] = rmsnorm_gain_grad(turned, in, norm.inv_rms, rows, config.head_dim);
    return rmsnorm_input_grad(turned, in, p.at(gain), norm.inv_rms, rows, config.head_dim);
}

} // namespace

Gqa gqa_forward(View x, const ModelConfig& config, const Parameters& p, const std::string& prefix,
                std::size_t batch, std::size_t seq) {
    const Sizes s(config, batch * seq);
    const auto at = positions(batch, seq);
    Gqa f;
    f.q_in = gemm_nt(x, p.at(prefix + "q_proj.weight"), s.rows, s.q, s.hidden);
    f.k_in = gemm_nt(x, p.at(prefix + "k_proj.weight"), s.rows, s.kv, s.hidden);
    f.v = gemm_nt(x, p.at(prefix + "v_proj.weight"), s.rows, s.kv, s.hidden);
    f.q = finish_heads(f.q_in, f.q_norm, config, p, prefix + "q_norm.weight", at, s.heads);
    f.k = finish_heads(f.k_in, f.k_norm, config, p, prefix + "k_norm.weight", at, s.kv_heads);
    f.attention = attention_forward(f.q, f.k, f.v, attention_shape(config, batch, seq));
    f.y = gemm_nt(f.attention.out, p.at(prefix + "o_proj.weight"), s.rows, s.hidden, s.q);
    return f;
}

Vector gqa_backward(View dy, View x, const Gqa& f, const ModelConfig& config, const Parameters& p,
                    const std::string& prefix, std::size_t batch, std::size_t seq, Parameters& g) {
    const Sizes s(config, batch * seq);
    const auto at = positions(batch, seq);
    g[prefix + "o_proj.weight"] = gemm_tn(dy, f.attention.out, s.hidden, s.q, s.rows);
    const Vector dout = gemm_nn(dy, p.at(prefix + "o_proj.weight"), s.rows, s.q, s.hidden);
    const AttentionGrads d =
        attention_input_grad(dout, f.q, f.k, f.v, attention_shape(config, batch, seq));
    Vector dx(s.rows * s.hidden, 0.0);
    const auto project_backward = [&](const char* name, View dout_, std::size_t columns) {
        const std::string weight = prefix + name;
        g[weight] = gemm_tn(dout_, x, columns, s.hidden, s.rows);
        accumulate(dx, gemm_nn(dout_, p.at(weight), s.rows, s.hidden, columns));
    };
    project_backward("q_proj.weight",
                     finish_heads_backward(d.dq, f.q_in, f.q_norm, config, p,
                                           prefix + "q_norm.weight", at, s.heads, g),
                     s.q);
    project_backward("k_proj.weight",
                     finish_heads_backward(d.dk, f.k_in, f.k_norm, config, p,
                                           prefix + "k_norm.weight", at, s.kv_heads, g),
                     s.kv);
    project_backward("v_proj.weight", d.dv, s.kv);
    return dx;
}

} // namespace bellows::reference
