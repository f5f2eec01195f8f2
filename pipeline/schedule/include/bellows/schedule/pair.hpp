// SPDX-License-Identifier: MIT
#pragma once

// An overlapped pair: the forward of one micro-batch and the backward of another, cut into their
// layers' nodes and interleaved so that the tokens of one travel while the other computes. No
// Vulkan, no MPI; pure functions.
//
// Nodes of a part are handed in in their order (but for fill_backward()). Compute nodes run one at
// a time, each as soon as what it needs has ended and the device is free, the one first that could
// begin first (of several at once the one handed in first), or in three rows that take less than
// that together; exchange nodes run one at a time in the order in which they are handed in, beside
// the compute nodes. A node needs all of its part before
// it, but for what PairNode tells.

#include <bellows/schedule/simulate.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

enum class NodeResource : std::uint8_t { Compute, Exchange };

struct PairNode {
    std::string name; ///< "ATTN(F)", "DISPATCH(B)", "MLP(W)"
    NodeResource resource = NodeResource::Compute;
    double seconds = 0;
    /// Of a compute node right behind an exchange node: it needs not that one but what that one
    /// needs. The node behind it needs both. Elsewhere it says nothing.
    bool beside_exchange = false;
    /// Of a weight gradient: it needs the input gradients before this index, and no other weight
    /// gradient.
    std::size_t after = 0;
};

struct PairNodes {
    std::vector<PairNode> forward, input_gradient, weight_gradient; ///< each in its order

    /// Forward's, InputGradient's or WeightGradient's.
    const std::vector<PairNode>& of(OpKind kind) const noexcept {
        return kind == OpKind::Forward         ? forward
               : kind == OpKind::InputGradient ? input_gradient
                                               : weight_gradient;
    }
    std::vector<PairNode>& of(OpKind kind) noexcept {
        return const_cast<std::vector<PairNode>&>(std::as_const(*this).of(kind));
    }
};

/// Whose next node is handed in, one after the other: Forward, InputGradient or WeightGradient.
using PairOrder = std::vector<OpKind>;

/// Node names in the order of a pair of layers, e.g. "MLP(B) MLP(W) MLP(F) ATTN(B) …", repeated for
/// the layers of a chunk.
using PairPattern = std::vector<std::string>;

/// The forward, then the input gradients, then the weight gradients.
PairOrder one_after_the_other(const PairNodes& nodes);

/// The pair of `layers` such layers: a forward of layer l stands beside a backward of layer
/// layers - 1 - l.
PairNodes repeated(const PairNodes& layer, std::size_t layers);

/// Goes round the pattern; each name hands in its part's nodes up to and with the next one of that
/// name, where there is one; before a weight gradient the input gradients that it needs; and behind
/// it the exchanges up to the next node that the pattern names, so that those which it does not
/// name start early. What the pattern leaves over comes one after the other. Throws
/// Error{InvalidArgument} for a name that no node could have (its end, "(F)", "(B)" or "(W)", says
/// which part it is of), for an empty pattern, and for a weight gradient that needs more input
/// gradients than there are.
PairOrder interleave(const PairNodes& nodes, const PairPattern& pattern);

/// Throws Error{InvalidArgument} unless each node is there once and a weight gradient comes after
/// what it needs.
void verify(const PairNodes& nodes, const PairOrder& order);

struct PairTimes {
    std::vector<OpTime> nodes; ///< in the order of handing in
    double time = 0;           ///< of the pair
    double compute = 0, exchange = 0;
    double hidden = 0; ///< of the exchange, while something computes
};

/// Throws Error{InvalidArgument} as verify() does and for times that are negative or not finite.
PairTimes simulate_pair(const PairNodes& nodes, const PairOrder& order);

/// On a device with queues for them: forwards, input gradients and weight gradients compute in
/// three rows, each in its order. While n of them do, each node takes 1 + (n - 1) * crowding times
/// as long as alone: at 0 as long as alone, at 1 as long as one after the other. Throws like the
/// other, and for a crowding that is not in [0, 1].
PairTimes simulate_pair(const PairNodes& nodes, const PairOrder& order, double crowding);

/// The crowding at which compute nodes whose exchanges take no time take `seconds` in all; the
/// nearest end of [0, 1] where none does. Throws like simulate_pair().
double crowding_of(const PairNodes& nodes, const PairOrder& order, double seconds);

/// The pattern of the shortest repeated(layer, layers) that a search of some milliseconds finds, of
/// equals one near DeepSeek-V3's; the same for the same nodes, and never longer than
/// one_after_the_other(). Throws like interleave() and simulate_pair(), and for no nodes.
PairPattern choose_pattern(const PairNodes& layer, std::size_t layers = 4);

/// A node of a backward that is alone: InputGradient or WeightGradient, and its place among those.
struct BackwardNode {
    OpKind kind = OpKind::InputGradient;
    std::size_t index = 0;
    bool operator==(const BackwardNode&) const = default;
};

/// The order in which such a backward hands its nodes in: the input gradients in theirs, and before
/// each that waits for an exchange the weight gradients that fill what this leaves free best, as
/// long as none holds the input gradients up for longer than it saves by these times (an exchange's
/// may have waits for other ranks in them, which it then counts as free). The others come last, in
/// their order. nodes.forward does not matter. Throws like interleave() and simulate_pair().
std::vector<BackwardNode> fill_backward(const PairNodes& nodes);

/// "MLP(B) MLP(W) …" and back. Throws Error{InvalidArgument} for a name without "(F)", "(B)",
/// "(W)".
std::string to_text(const PairPattern& pattern);
PairPattern parse_pattern(const std::string& text);

/// The nodes of one MoE layer of the DeepSeek-V3 kind; all times are 0.
PairNodes moe_layer_nodes();

/// Throws Error{InvalidArgument} for a name that is none of moe_layer_nodes().
void check_names(const PairPattern& pattern);

/// How the pairs of a run go.
struct PairMode {
    enum class Kind : std::uint8_t {
        Auto,    ///< interleaved as measured where ranks exchange experts' tokens, else apart
        Apart,   ///< each half when its input is there
        Pattern, ///< interleaved by `pattern`
    };
    Kind kind = Kind::Auto;
    PairPattern pattern{};
    bool operator==(const PairMode&) const = default;
};

/// "auto", "apart", or the pattern, and back. Throws Error{InvalidArgument} for an empty pattern
/// and as parse_pattern() and check_names() do.
std::string to_text(const PairMode& mode);
PairMode parse_pair_mode(const std::string& text);

} // namespace bellows
