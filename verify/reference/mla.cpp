// SPDX-License-Identifier: MIT
#include "verify/reference/model.hpp"

#include <bellows/shape/rope.hpp>

namespace bellows::reference {
namespace {

struct Sizes {
    std::size_t rows, hidden, heads, q_rank, kv_rank, nope, rope, v, qk;

    Sizes(const ModelConfig& c, std::size_t rows_)
        : rows(rows_), hidden(c.hidden), heads(c.heads), q_rank(c.q_lora_rank),
          kv_rank(c.kv_lora_rank), nope(c.qk_nope_head_dim), rope(c.qk_rope_head_dim),
          v(c.v_head_dim), qk(nope + rope) {}
};

/// Columns [first, first + count) of x [rows, columns].
Vector columns_of(View x, std::size_t columns, std::size_t first, std::size_t count) {
    Vector out;
    for (std::size_t at = 0; at < x.size(); at += columns)
        for (std::size_t c = first; c < first + count; ++c)
            out.push_back(x[at + c]);
    return out;
}

/// Writes part [rows, count] into those columns of x.
void put_columns(Vector& x, std::size_t columns, std::size_t first, View part, std::size_t count) {
    for (std::size_t row = 0; row < part.size() / count; ++row)
        for (std::size_t c = 0; c < count; ++c)
            x[row * columns + first + c] = part[row * count + c];
}

void project_queries(Mla& f, View x, const ModelConfig& config, const Parameters& p,
                     const std::string& prefix, const Sizes& s) {
    const std::size_t out = s.heads * s.qk;
    if (s.q_rank == 0) {
        f.q = gemm_nt(x, p.at(prefix + "q_proj.weight"), s.rows, out, s.hidden);
        return;
    }
    f.q_a = gemm_nt(x, p.at(prefix + "q_a_proj.weight"), s.rows, s.q_rank, s.hidden);
    f.q_latent = rmsnorm_forward(f.q_a, p.at(prefix + "q_a_layernorm.weight"), s.rows, s.q_rank,
                                 config.latent_eps());
    f.q = gemm_nt(f.q_latent.y, p.at(prefix + "q_b_proj.weight"), s.rows, out, s.q_rank);
}

Vector project_queries_backward(View dq, View x, const Mla& f, const Parameters& p,
                                const std::string& prefix, const Sizes& s, Parameters& g) {
    const std::size_t out = s.heads * s.qk;
    if (s.q_rank == 0) {
        g[prefix + "q_proj.weight"] = gemm_tn(dq, x, out, s.hidden, s.rows);
        return gemm_nn(dq, p.at(prefix + "q_proj.weight"), s.rows, s.hidden, out);
    }
    g[prefix + "q_b_proj.weight"] = gemm_tn(dq, f.q_latent.y, out, s.q_rank, s.rows);
    const Vector dlatent = gemm_nn(dq, p.at(prefix + "q_b_proj.weight"), s.rows, s.q_rank, out);
    g[prefix + "q_a_layernorm.weight"] =
        rmsnorm_gain_grad(dlatent, f.q_a, f.q_latent.inv_rms, s.rows, s.q_rank);
    const Vector dq_a = rmsnorm_input_grad(dlatent, f.q_a, p.at(prefix + "q_a_layernorm.weight"),
                                           f.q_latent.inv_rms, s.rows, s.q_rank);
    g[prefix + "q_a_proj.weight"] = gemm_tn(dq_a, x, s.q_rank, s.hidden, s.rows);
    return gemm_nn(dq_a, p.at(prefix + "q_a_proj.weight"), s.rows, s.hidden, s.q_rank);
}

} // namespace

std::vector<std::int64_t> positions(std::size_t batch, std::size_t seq) {
    std::vector<std::int64_t> out(batch * seq);
    for (std::size_t row = 0; row < out.size(); ++row)
        out[row] = static_cast<std::int64_t>(row % seq);
    return out;
}

RopeShape rope_shape(const ModelConfig& config, std::size_t rows, std::size_t heads,
                     std::size_t head_dim, std::size_t offset) {
    return {.rows = rows,
            .heads = heads,
            .head_dim = head_dim,
            .offset = offset,
            .dim = config.rope_head_dim(),
            .frequencies = rope_frequencies(config),
            .amplitude = rope_amplitude(config)};
}

AttentionShape attention_shape(const ModelConfig& config, std::size_t batch, std::size_t seq) {
    return {.batch = batch,
            .queries = seq,
            .keys = seq,
            .heads = config.heads,
            .qk_dim = config.qk_head_dim(),
            .v_dim = config.value_head_dim(),
            .scale = config.attention_scale(),
            .kv_heads = config.kv_heads};
}

Mla mla_forward(View x, const ModelConfig& config, const Parameters& p, const std::string& prefix,
                std::size_t batch, std::size_t seq) {
    const Sizes s(config, batch * seq);
    const auto at = positions(batch, seq);
    Mla f;
    project_queries(f, x, config, p, prefix, s);
    f.q = rope(f.q, at, rope_shape(config, s.rows, s.heads, s.qk, s.nope));

    const std::size_t kv_a = s.kv_rank + s.rope, kv_b = s.nope + s.v;
    f.kv_a = gemm_nt(x, p.at(prefix + "kv_a_proj_with_mqa.weight"), s.rows, kv_a, s.hidden);
    f.kv_latent = rmsnorm_forward(columns_of(f.kv_a, kv_a, 0, s.kv_rank),
                                  p.at(prefix + "kv_a_layernorm.weight"), s.rows, s.kv_rank,
                                  config.latent_eps());
    const Vector kv = gemm_nt(f.kv_latent.y, p.at(prefix + "kv_b_proj.weight"), s.rows,
                              s.heads * kv_b, s.kv_rank);
    const Vector k_rope = rope(columns_of(f.kv_a, kv_a, s.kv_rank, s.rope), at,
                               rope_shape(config, s.rows, 1, s.rope, 0));
    f.k.resize(s.rows * s.heads * s.qk);
    put_columns(f.k, s.qk, 0, columns_of(kv, kv_b, 0, s.nope), s.nope);
    for (std::size_t h = 0; h < s.heads; ++h)
        put_columns(f.k, s.heads * s.qk, h * s.qk + s.nope, k_rope, s.rope);
    f.v = columns_of(kv, kv_b, s.nope, s.v);

    f.attention = attention_forward(f.q, f.k, f.v, attention_shape(config, batch, seq));
    f.y = gemm_nt(f.attention.out, p.at(prefix + "o_proj.weight"), s.rows, s.hidden, s.heads * s.v);
    return f;
}

Vector mla_backward(View dy, View x, const Mla& f, const ModelConfig& config, const Parameters& p,
                    const std::string& prefix, std::size_t batch, std::size_t seq, Parameters& g) {
    const Sizes s(config, batch * seq);
    const auto at = positions(batch, seq);
    const std::size_t v_out = s.heads * s.v;
    g[prefix + "o_proj.weight"] = gemm_tn(dy, f.attention.out, s.hidden, v_out, s.rows);
    const Vector dout = gemm_nn(dy, p.at(prefix + "o_proj.weight"), s.rows, v_out, s.hidden);
    const AttentionGrads d =
        attention_input_grad(dout, f.q, f.k, f.v, attention_shape(config, batch, seq));

    const Vector dq = rope(d.dq, at, rope_shape(config, s.rows, s.heads, s.qk, s.nope), true);
    Vector dx = project_queries_backward(dq, x, f, p, prefix, s, g);

    const std::size_t kv_a = s.kv_rank + s.rope, kv_b = s.nope + s.v;
    Vector dkv(s.rows * s.heads * kv_b), dk_rope(s.rows * s.rope, 0.0), dkv_a(s.rows * kv_a);
    put_columns(dkv, kv_b, 0, columns_of(d.dk, s.qk, 0, s.nope), s.nope);
    put_columns(dkv, kv_b, s.nope, d.dv, s.v);
    for (std::size_t h = 0; h < s.heads; ++h) // one rotated key part serves all heads
        accumulate(dk_rope, columns_of(d.dk, s.heads * s.qk, h * s.qk + s.nope, s.rope));

    g[prefix + "kv_b_proj.weight"] = gemm_tn(dkv, f.kv_latent.y, s.heads * kv_b, s.kv_rank, s.rows);
    const Vector dlatent =
        gemm_nn(dkv, p.at(prefix + "kv_b_proj.weight"), s.rows, s.kv_rank, s.heads * kv_b);
    const Vector latent_in = columns_of(f.kv_a, kv_a, 0, s.kv_rank);
    const Vector& gain = p.at(prefix + "kv_a_layernorm.weight");
    g[prefix + "kv_a_layernorm.weight"] =
        rmsnorm_gain_grad(dlatent, latent_in, f.kv_latent.inv_rms, s.rows, s.kv_rank);
    put_columns(
        dkv_a, kv_a, 0,
        rmsnorm_input_grad(dlatent, latent_in, gain, f.kv_latent.inv_rms, s.rows, s.kv_rank),
        s.kv_rank);
    put_columns(dkv_a, kv_a, s.kv_rank,
                rope(dk_rope, at, rope_shape(config, s.rows, 1, s.rope, 0), true), s.rope);
    const Vector& w = p.at(prefix + "kv_a_proj_with_mqa.weight");
    g[prefix + "kv_a_proj_with_mqa.weight"] = gemm_tn(dkv_a, x, kv_a, s.hidden, s.rows);
    accumulate(dx, gemm_nn(dkv_a, w, s.rows, s.hidden, kv_a));
    return dx;
}

} // namespace bellows::reference
