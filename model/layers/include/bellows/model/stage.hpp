// SPDX-License-Identifier: MIT
#pragma once

// A pipeline stage: some consecutive layers of the model on one rank, with the embedding on the
// first stage, the head and the modules of multi-token prediction (MTP) on the last, and the slots
// that its micro-batches in flight go through. It hands nodes in when told to; the schedule decides
// when. One thread at a time.

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/model/embedding.hpp>
#include <bellows/model/gqa.hpp>
#include <bellows/model/head.hpp>
#include <bellows/model/layer_scratch.hpp>
#include <bellows/model/mla.hpp>
#include <bellows/model/moe_ffn.hpp>
#include <bellows/model/mtp_input.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>
#include <bellows/shape/config.hpp>
#include <bellows/shape/stages.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace bellows {

struct StageDesc {
    ModelConfig config;
    std::uint64_t stage = 0, num_stages = 1;
    std::uint64_t sequences = 1; ///< of a micro-batch
    std::uint64_t seq = 1;
    std::uint64_t num_slots = 1; ///< micro-batches in flight
    float loss_scale = 1;        ///< 1 / tokens of the global batch
    bool document_mask = false;  ///< attention stays within documents (documents_buffer())
    bool training = true;        ///< false: forward nodes to logits only, nothing for gradients
    QueueRole queue = QueueRole::Compute; ///< of its nodes that compute
    /// Scratch and queues of weight gradients, which several stages may share; null: they are as
    /// other nodes. Must outlive the stage.
    WeightGradientScratch* weight_gradients = nullptr;
};

/// What an MTP module takes from the host and gives it, of a micro-batch. Module k, from 0, of a
/// position i in its sequence: the token at i + k + 1 goes in, and the one at i + k + 2 is
/// predicted.
struct ModuleBuffers {
    Buffer tokens;  ///< [tokens] u32, below the vocabulary
    Buffer targets; ///< [tokens] u32; ops::kIgnoreTarget: no loss there
    Buffer factor;  ///< [1] f32: what the gradient of a token's loss is multiplied with
    Buffer loss;    ///< readback [2] f32, as Stage::loss_buffer()
};

class Stage {
public:
    /// exchange: of the rank's expert-parallel group; may be null where no layer has experts.
    /// slots: what its slots hold, as MoeFfn has it. Throws Error{InvalidArgument} when the
    /// exchange lacks, or gradients to train with.
    Stage(const StageDesc& desc, ParameterStore& parameters, ExpertExchange* exchange,
          ParameterStore* slots = nullptr);
    ~Stage();

    bool first() const noexcept;
    bool last() const noexcept;
    std::uint64_t tokens() const noexcept;
    QueueRole queue() const noexcept; ///< StageDesc::queue

    /// Nodes of a slot in the order of a plain run.
    const std::vector<const Node*>& nodes(std::uint64_t slot, NodeKind kind) const;
    /// Whether a parameter is of this stage's layers or ends.
    bool has(const ParameterInfo& info) const noexcept;
    /// Which of the weight-gradient nodes (an index into nodes()) is the last that adds to the
    /// gradient of a parameter of this stage; the same for all slots.
    std::size_t gradient_ready_after(const ParameterInfo& info) const;
    /// The nodes of a micro-batch's forward, or of its backward's halves, as an overlapped pair
    /// sees them; their times are 0.
    std::vector<PairNode> pair_nodes(NodeKind kind) const;

    /// [tokens] u32, written by the host: what enters the first stage, what the last one predicts.
    Buffer& token_buffer(std::uint64_t slot);
    Buffer& target_buffer(std::uint64_t slot);
    /// [sequences] u32, written by the host: those whose value is not 0 are spared by the capacity,
    /// none at first. Null where nothing is dropped: no capacity, no experts, no training.
    Buffer* spared_buffer(std::uint64_t slot);
    const ModelConfig& model() const noexcept;
    /// [tokens, 2] u32, written by the host, of every stage with StageDesc::document_mask: of each
    /// token the begin and the end of its document in the sequence.
    Buffer& documents_buffer(std::uint64_t slot);
    bool masks_documents() const noexcept;
    /// Readback [2] f32: the micro-batch's loss summed over its tokens (last stage).
    Buffer& loss_buffer(std::uint64_t slot);
    /// Of the MTP modules, the first one first (last stage, training).
    std::span<ModuleBuffers> module_buffers(std::uint64_t slot);
    /// Readback [tokens, vocabulary] f32 (last stage, not training).
    Buffer& logits_buffer(std::uint64_t slot);

    /// [tokens, hidden]: what enters and leaves, and their gradients.
    TensorView input(std::uint64_t slot) const;
    TensorView output(std::uint64_t slot) const;
    TensorView output_gradient(std::uint64_t slot) const;
    TensorView input_gradient(std::uint64_t slot) const;

    const std::vector<std::unique_ptr<MoeFfn>>& moe_layers() const noexcept;
    std::uint64_t moe_layer_index(std::size_t i) const; ///< its layer in the model

    struct Impl;

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
