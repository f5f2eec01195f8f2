// SPDX-License-Identifier: MIT
#pragma once

// A layer is a list of typed nodes, not a function: attention, dispatch, experts, combine, each as
// forward, input-gradient and weight-gradient. A schedule decides when each node of which
// micro-batch is handed in; the order in which they are handed in is the order in which they take
// effect. A slot is one micro-batch in flight through one layer: it owns the activations that its
// nodes exchange, and its work is recorded once and replayed. One thread at a time.

#include <bellows/engine/device.hpp>
#include <bellows/engine/tensor.hpp>
#include <bellows/schedule/pair.hpp>
#include <bellows/shape/layer.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

/// A node of a slot: what its layer declares of it, and how it is handed in.
struct Node : NodeInfo {
    /// Hands the node's work in, a compute node's behind `waits`, too; never waits for the network.
    std::function<TimePoint(std::span<const TimePoint> waits)> submit{};
};

/// The tensors that a layer's slot reads and writes; the caller owns them. All but `documents` are
/// [tokens, hidden] in the activations' type.
struct LayerTensors {
    TensorView x;  ///< what enters
    TensorView y;  ///< what leaves
    TensorView dy; ///< gradient of y; left out: forward nodes alone, and nothing kept for others
    TensorView dx; ///< gradient of x, written by the input-gradient nodes
    /// [tokens, 2] u32: which tokens see each other (ops::AttentionOptions::documents); without
    /// memory all of a sequence.
    TensorView documents{};
    bool training() const noexcept { return static_cast<bool>(dy.buffer); }
};

class LayerSlot {
public:
    virtual ~LayerSlot() = default;

    /// In the order of a plain run. Input-gradient nodes follow the forward ones, weight-gradient
    /// nodes come any time after the input-gradient nodes of the slot and before its next forward.
    const std::vector<Node>& nodes(NodeKind kind) const {
        return nodes_[static_cast<std::size_t>(kind)];
    }

protected:
    void add_node(Node node) {
        nodes_[static_cast<std::size_t>(node.kind)].push_back(std::move(node));
    }
    /// A compute node that replays a recording, which the slot owns.
    void add_recording(const NodeInfo& node, Recording recording);

private:
    std::vector<Node> nodes_[3];
    std::vector<std::unique_ptr<Recording>> recordings_;
};

/// The nodes of slots behind each other in the order of a plain run: forward ones from the first
/// slot to the last, gradients back. The slots own them.
class NodeLists {
public:
    NodeLists() = default;
    explicit NodeLists(std::span<const std::unique_ptr<LayerSlot>> slots);

    const std::vector<const Node*>& of(NodeKind kind) const {
        return nodes_[static_cast<std::size_t>(kind)];
    }
    /// By slot, which of the weight-gradient nodes is the last up to and with its own.
    const std::vector<std::size_t>& last_weight_gradient() const noexcept {
        return last_weight_gradient_;
    }
    /// As an overlapped pair sees them; their times are 0.
    std::vector<PairNode> pair_nodes(NodeKind kind) const;

private:
    std::vector<const Node*> nodes_[3];
    std::vector<std::size_t> last_weight_gradient_;
    std::vector<std::size_t> after_; ///< of each weight gradient: input gradients before it
};

/// What every slot needs to know.
struct SlotDesc {
    std::string name;         ///< e.g. "layer 3 slot 1", for errors, memory and the trace
    std::uint64_t tokens = 0; ///< of the micro-batch: sequences * seq
    std::uint64_t seq = 0;    ///< of a sequence; divides tokens
    LayerTensors tensors;
    float loss_scale = 1; ///< what the loss of a token is multiplied with: 1 / tokens of the batch
    /// [sequences] u32: of sequences whose value is not 0 a capacity drops no choice. Nothing: it
    /// may of any.
    TensorView spared{};
};

class Layer {
public:
    virtual ~Layer() = default;
    virtual std::unique_ptr<LayerSlot> create_slot(const SlotDesc& desc) = 0;
};

} // namespace bellows
