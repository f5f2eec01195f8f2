// SPDX-License-Identifier: MIT
#pragma once

// A training run of some thousand parameters, for tests that need a Trainer.

#include <bellows/train/train_config.hpp>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace bellows {

/// Two layers, one of them with experts.
inline RunConfig small_run() {
    RunConfig run;
    ModelConfig& m = run.model;
    m.vocabulary = 64;
    m.hidden = 32;
    m.layers = 2;
    m.dense_layers = 1;
    m.heads = 2;
    m.kv_lora_rank = 16;
    m.qk_nope_head_dim = 8;
    m.qk_rope_head_dim = 8;
    m.v_head_dim = 8;
    m.dense_ffn = 32;
    m.moe_ffn = 16;
    m.routed_experts = 4;
    m.top_k = 2;
    run.train.batch = 4;
    run.train.seq = 8;
    return run;
}

/// What a run's checkpoints are made of.
struct SavedRun {
    RunConfig config;
    RunLayout layout{};
    std::filesystem::path out;
    std::string config_text() const { return to_toml(config); }
};

/// Matrices of which some are too narrow for fp8::Variant::Direct.
inline ModelConfig wide_model() {
    ModelConfig m = small_run().model;
    m.hidden = 136;
    m.dense_ffn = 152;
    m.moe_ffn = 72;
    m.shared_experts = 1;
    return m;
}

/// A SequenceSource: anything below the vocabulary.
inline void fill_sequence(std::uint64_t step, std::uint64_t index,
                          std::span<std::uint32_t> tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<std::uint32_t>((step + index * 7 + i * i) % 64);
}

} // namespace bellows
