// SPDX-License-Identifier: MIT
#include "verify/reference/model.hpp"

#include <algorithm>

namespace bellows::reference {
namespace {

const char* const kEmbedding = "model.embed_tokens.weight";

std::string layer_prefix(std::size_t layer) {
    return "model.layers." + std::to_string(layer) + ".";
}

const char* head_name(const ModelConfig& config) {
    return config.tied_embeddings ? kEmbedding : "lm_head.weight";
}

/// x + y.
Vector sum(View x, View y) {
    Vector out(x.begin(), x.end());
    accumulate(out, y);
    return out;
}

/// Runs one kind of model on one batch; the members are what every step needs.
class Runner {
public:
    Runner(const ModelConfig& config, const Parameters& parameters, const Batch& batch)
        : config_(config), p_(parameters), batch_(batch), rows_(batch.rows()),
          hidden_(config.hidden) {
        require_size("model: tokens", batch.tokens.size(), rows_);
        require_size("model: targets", batch.targets.size(), rows_);
    }

    LayerForward layer(std::size_t index, Vector x, const Routing* routing) const {
        const std::string prefix = layer_prefix(index);
        LayerForward f;
        f.x = std::move(x);
        f.norm1 = norm(f.x, prefix + "input_layernorm.weight");
        const std::string attention = prefix + "self_attn.";
        if (config_.is_mla())
            f.attention = mla_forward(f.norm1.y, config_, p_, attention, batch_.batch, batch_.seq);
        else
            f.grouped = gqa_forward(f.norm1.y, config_, p_, attention, batch_.batch, batch_.seq);
        f.middle = sum(f.x, config_.is_mla() ? f.attention.y : f.grouped.y);
        f.norm2 = norm(f.middle, prefix + "post_attention_layernorm.weight");
        if (config_.is_moe(index))
            moe(f, index, routing);
        else
            dense(f, prefix + "mlp.");
        return f;
    }

    Vector layer_backward(std::size_t index, const Vector& dy, const LayerForward& f,
                          Parameters& g) const {
        const std::string prefix = layer_prefix(index);
        const Vector dffn = config_.is_moe(index) ? experts_backward(dy, f, prefix + "mlp.", g)
                                                  : dense_backward(dy, f, prefix + "mlp.", g);
        Vector dmiddle =
            norm_backward(dffn, f.middle, f.norm2, prefix + "post_attention_layernorm.weight", g);
        accumulate(dmiddle, dy);
        const std::string attention = prefix + "self_attn.";
        const Vector dattention = config_.is_mla()
                                      ? mla_backward(dmiddle, f.norm1.y, f.attention, config_, p_,
                                                     attention, batch_.batch, batch_.seq, g)
                                      : gqa_backward(dmiddle, f.norm1.y, f.grouped, config_, p_,
                                                     attention, batch_.batch, batch_.seq, g);
        Vector dx = norm_backward(dattention, f.x, f.norm1, prefix + "input_layernorm.weight", g);
        accumulate(dx, dmiddle);
        return dx;
    }

    RmsNorm norm(const Vector& x, const std::string& name) const {
        return rmsnorm_forward(x, p_.at(name), rows_, hidden_, config_.norm_eps);
    }

    Vector norm_backward(const Vector& dy, const Vector& x, const RmsNorm& f,
                         const std::string& name, Parameters& g) const {
        g[name] = rmsnorm_gain_grad(dy, x, f.inv_rms, rows_, hidden_);
        return rmsnorm_input_grad(dy, x, p_.at(name), f.inv_rms, rows_, hidden_);
    }

private:
    void dense(LayerForward& f, const std::string& prefix) const {
        const std::size_t ffn = config_.dense_ffn;
        f.gate_up =
            gemm_nt(f.norm2.y, p_.at(prefix + "gate_up_proj.weight"), rows_, 2 * ffn, hidden_);
        const Vector act = swiglu_forward(f.gate_up, {}, rows_, ffn);
        f.y = sum(f.middle, gemm_nt(act, p_.at(prefix + "down_proj.weight"), rows_, hidden_, ffn));
    }

    Vector dense_backward(const Vector& dy, const LayerForward& f, const std::string& prefix,
                          Parameters& g) const {
        const std::size_t ffn = config_.dense_ffn;
        const Vector act = swiglu_forward(f.gate_up, {}, rows_, ffn);
        g[prefix + "down_proj.weight"] = gemm_tn(dy, act, hidden_, ffn, rows_);
        const Vector dact = gemm_nn(dy, p_.at(prefix + "down_proj.weight"), rows_, ffn, hidden_);
        const Vector dgate_up = swiglu_input_grad(dact, f.gate_up, {}, rows_, ffn).dx;
        g[prefix + "gate_up_proj.weight"] = gemm_tn(dgate_up, f.norm2.y, 2 * ffn, hidden_, rows_);
        return gemm_nn(dgate_up, p_.at(prefix + "gate_up_proj.weight"), rows_, hidden_, 2 * ffn);
    }

    ExpertPartition one_rank() const { return {config_.routed_experts, 1}; }

    void moe(LayerForward& f, std::size_t index, const Routing* routing) const {
        const MoeWeights weights = moe_weights(config_, p_, layer_prefix(index) + "mlp.");
        const MoeShape shape = moe_shape(config_);
        std::vector<std::vector<std::int32_t>> fixed;
        if (routing)
            fixed.push_back(routing->at(index));
        f.moe = moe_forward({f.norm2.y}, weights, shape, one_rank(), routing ? &fixed : nullptr);
        f.y = sum(f.middle, f.moe.tokens[0].y);
        const RankTokens& tokens = f.moe.tokens[0];
        if (config_.has_balance_loss()) { // the batch is one micro-batch
            const BalanceShape balance = balance_shape(config_);
            const std::size_t runs = config_.balances_sequences() ? batch_.batch : 1;
            f.balance = balance_loss(
                tokens.scores,
                balance_counts(tokens.scores, tokens.experts, shape.router, balance, runs),
                shape.router, balance, rows_);
        }
        if (config_.router_z_loss > 0)
            f.z_loss =
                router_z_loss(tokens.logits, config_.routed_experts, rows_, config_.router_z_loss);
    }

    Vector experts_backward(const Vector& dy, const LayerForward& f, const std::string& prefix,
                            Parameters& g) const {
        const MoeWeights weights = moe_weights(config_, p_, prefix);
        std::vector<Vector> dscores, dlogits;
        if (!f.balance.dscores.empty())
            dscores.push_back(f.balance.dscores);
        if (!f.z_loss.dlogits.empty())
            dlogits.push_back(f.z_loss.dlogits);
        MoeGrads grads = moe_backward({dy}, {f.norm2.y}, f.moe, weights, moe_shape(config_),
                                      one_rank(), dscores, dlogits);
        g[prefix + "gate.weight"] = std::move(grads.weights.router);
        for (std::size_t e = 0; e < config_.routed_experts; ++e) {
            const std::string expert = prefix + "experts." + std::to_string(e) + ".";
            g[expert + "gate_up_proj.weight"] = std::move(grads.weights.gate_up[e]);
            g[expert + "down_proj.weight"] = std::move(grads.weights.down[e]);
        }
        if (config_.shared_experts > 0) {
            g[prefix + "shared_experts.gate_up_proj.weight"] =
                std::move(grads.weights.shared_gate_up);
            g[prefix + "shared_experts.down_proj.weight"] = std::move(grads.weights.shared_down);
        }
        return std::move(grads.dx[0]);
    }

    const ModelConfig& config_;
    const Parameters& p_;
    const Batch& batch_;
    std::size_t rows_, hidden_;
};

} // namespace

MoeWeights moe_weights(const ModelConfig& config, const Parameters& p, const std::string& prefix) {
    MoeWeights w;
    w.router = p.at(prefix + "gate.weight");
    if (config.router_bias)
        w.bias = p.at(prefix + "gate.e_score_correction_bias");
    for (std::size_t e = 0; e < config.routed_experts; ++e) {
        const std::string expert = prefix + "experts." + std::to_string(e) + ".";
        w.gate_up.push_back(p.at(expert + "gate_up_proj.weight"));
        w.down.push_back(p.at(expert + "down_proj.weight"));
    }
    if (config.shared_experts > 0) {
        w.shared_gate_up = p.at(prefix + "shared_experts.gate_up_proj.weight");
        w.shared_down = p.at(prefix + "shared_experts.down_proj.weight");
    }
    return w;
}

namespace {

/// What a head adds to its model or module: logits, the loss and, times `weight`, its gradient.
double head_forward(const Vector& normed, const Vector& matrix, const ModelConfig& config,
                    std::span<const std::int32_t> targets, double weight, Vector& logits,
                    Vector& dlogits) {
    logits = gemm_nt(normed, matrix, targets.size(), config.vocabulary, config.hidden);
    const auto count = static_cast<double>(
        std::count_if(targets.begin(), targets.end(), [](auto t) { return t >= 0; }));
    const double mean = count > 0 ? 1 / count : 0;
    CrossEntropy loss = cross_entropy(logits, targets, config.vocabulary, weight * mean);
    dlogits = std::move(loss.dlogits);
    return loss.sum * mean;
}

/// The tokens and targets of module k, from 0: those k + 1 positions later. Where a sequence ends
/// before, its last token goes in, and nothing is predicted.
void shift(ModuleForward& module, const Batch& batch, std::size_t k) {
    for (std::size_t row = 0; row < batch.rows(); ++row) {
        const std::size_t first = row / batch.seq * batch.seq, last = first + batch.seq - 1;
        module.tokens.push_back(batch.targets[std::min(row + k, last)]);
        module.targets.push_back(row + k + 1 <= last ? batch.targets[row + k + 1] : -1);
    }
}

/// The columns of [rows, columns] from `first` on.
Vector columns_of(View x, std::size_t columns, std::size_t first, std::size_t count) {
    Vector out;
    for (std::size_t at = first; at < x.size(); at += columns)
        out.insert(out.end(), x.begin() + static_cast<std::ptrdiff_t>(at),
                   x.begin() + static_cast<std::ptrdiff_t>(at + count));
    return out;
}

Vector side_by_side(View left, View right, std::size_t columns) {
    Vector out;
    for (std::size_t at = 0; at < left.size(); at += columns)
        for (const View side : {left, right})
            out.insert(out.end(), side.begin() + static_cast<std::ptrdiff_t>(at),
                       side.begin() + static_cast<std::ptrdiff_t>(at + columns));
    return out;
}

} // namespace

ModelForward model_forward(const ModelConfig& config, const Parameters& p, const Batch& batch,
                           const Routing* routing, double mtp_weight) {
    const Runner runner(config, p, batch);
    ModelForward out;
    Vector x = embedding_forward(p.at(kEmbedding), batch.tokens, config.hidden);
    for (std::size_t i = 0; i < config.layers; ++i) {
        out.layers.push_back(runner.layer(i, std::move(x), routing));
        const LayerForward& layer = out.layers.back();
        x = layer.y;
        out.balance_loss += layer.balance.loss();
        out.z_loss += layer.z_loss.loss;
        if (config.is_moe(i))
            out.routing[i] = layer.moe.tokens[0].experts;
    }
    out.final_norm = runner.norm(x, "model.norm.weight");
    const Vector& head = p.at(head_name(config));
    out.loss =
        head_forward(out.final_norm.y, head, config, batch.targets, 1, out.logits, out.dlogits);
    for (std::size_t k = 0; k < config.mtp_depth; ++k) {
        const std::string prefix = layer_prefix(config.layers + k);
        ModuleForward m;
        shift(m, batch, k);
        m.embedded = embedding_forward(p.at(kEmbedding), m.tokens, config.hidden);
        m.state = k == 0 ? out.final_norm.y : out.modules.back().norm.y;
        m.embedding_norm = runner.norm(m.embedded, prefix + "enorm.weight");
        m.state_norm = runner.norm(m.state, prefix + "hnorm.weight");
        m.both = side_by_side(m.embedding_norm.y, m.state_norm.y, config.hidden);
        m.layer = runner.layer(config.layers + k,
                               gemm_nt(m.both, p.at(prefix + "eh_proj.weight"), batch.rows(),
                                       config.hidden, 2 * config.hidden),
                               routing);
        out.balance_loss += m.layer.balance.loss();
        out.z_loss += m.layer.z_loss.loss;
        if (config.is_moe(config.layers + k))
            out.routing[config.layers + k] = m.layer.moe.tokens[0].experts;
        m.norm = runner.norm(m.layer.y, prefix + "shared_head.norm.weight");
        m.loss =
            head_forward(m.norm.y, head, config, m.targets,
                         mtp_weight / static_cast<double>(config.mtp_depth), m.logits, m.dlogits);
        out.modules.push_back(std::move(m));
    }
    return out;
}

ModelGrads model_backward(const ModelConfig& config, const Parameters& p, const Batch& batch,
                          const ModelForward& f) {
    const Runner runner(config, p, batch);
    const std::size_t rows = batch.rows();
    const Vector& head = p.at(head_name(config));
    ModelGrads grads;
    Parameters& g = grads.parameters;
    Vector dhead = gemm_tn(f.dlogits, f.final_norm.y, config.vocabulary, config.hidden, rows);
    Vector of_modules(config.vocabulary * config.hidden); // what they add to the embedding's
    Vector dstate(rows * config.hidden);                  // of the state that a module gives on
    for (std::size_t k = config.mtp_depth; k-- > 0;) {
        const ModuleForward& m = f.modules[k];
        const std::string prefix = layer_prefix(config.layers + k);
        accumulate(dhead, gemm_tn(m.dlogits, m.norm.y, config.vocabulary, config.hidden, rows));
        accumulate(dstate, gemm_nn(m.dlogits, head, rows, config.hidden, config.vocabulary));
        const Vector dlayer =
            runner.norm_backward(dstate, m.layer.y, m.norm, prefix + "shared_head.norm.weight", g);
        const Vector din = runner.layer_backward(config.layers + k, dlayer, m.layer, g);
        const std::string matrix = prefix + "eh_proj.weight";
        g[matrix] = gemm_tn(din, m.both, config.hidden, 2 * config.hidden, rows);
        const Vector dboth = gemm_nn(din, p.at(matrix), rows, 2 * config.hidden, config.hidden);
        dstate =
            runner.norm_backward(columns_of(dboth, 2 * config.hidden, config.hidden, config.hidden),
                                 m.state, m.state_norm, prefix + "hnorm.weight", g);
        const Vector dembedded =
            runner.norm_backward(columns_of(dboth, 2 * config.hidden, 0, config.hidden), m.embedded,
                                 m.embedding_norm, prefix + "enorm.weight", g);
        accumulate(of_modules,
                   embedding_weight_grad(dembedded, m.tokens, config.vocabulary, config.hidden));
    }
    Vector dnormed = gemm_nn(f.dlogits, head, rows, config.hidden, config.vocabulary);
    accumulate(dnormed, dstate);
    grads.dhidden.resize(config.layers + 1);
    grads.dhidden[config.layers] =
        runner.norm_backward(dnormed, f.layers.back().y, f.final_norm, "model.norm.weight", g);
    for (std::size_t i = config.layers; i-- > 0;)
        grads.dhidden[i] = runner.layer_backward(i, grads.dhidden[i + 1], f.layers[i], g);
    g[kEmbedding] =
        embedding_weight_grad(grads.dhidden[0], batch.tokens, config.vocabulary, config.hidden);
    accumulate(g[kEmbedding], of_modules);
    if (config.tied_embeddings)
        accumulate(g[kEmbedding], dhead);
    else
        g["lm_head.weight"] = std::move(dhead);
    return grads;
}

} // namespace bellows::reference
