// SPDX-License-Identifier: MIT
#pragma once

// Sets a step's gradients to zero while the tokens of its first forward travel, when nothing else
// is there to compute. Owned by the trainer.

#include <bellows/engine/recording.hpp>
#include <bellows/model/node.hpp>
#include <bellows/model/parameter_store.hpp>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace bellows {

/// Of a forward's nodes those that compute and wait for an exchange, ascending.
std::vector<std::size_t> nodes_behind_exchanges(std::span<const Node* const> nodes);

class GradientClearing {
public:
    /// nodes: of the step's first forward; each of those behind an exchange has a piece ahead of
    /// it. Where none is all are cleared ahead of it. The parameters must outlive it.
    GradientClearing(const ParameterStore& parameters, std::span<const Node* const> nodes);

    /// A step begins: all is to be cleared.
    void begin() noexcept { next_ = 0; }
    /// A node of the first forward is about to be handed in; behind: when what it has computed so
    /// far will have ended, so that no piece runs ahead of that.
    void before(std::size_t node, const TimePoint& behind);
    /// Anything else is.
    void finish();

private:
    struct Piece {
        std::size_t before; ///< node
        std::unique_ptr<Recording> recording;
    };
    void hand_in(std::span<const TimePoint> waits);

    Device& device_;
    bool fills_ = true; ///< gaps: it is traced as part of the forward
    std::vector<Piece> pieces_;
    std::size_t next_ = 0;
};

} // namespace bellows
