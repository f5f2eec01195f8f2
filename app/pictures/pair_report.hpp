// SPDX-License-Identifier: MIT
#pragma once

// `bellows schedule --pair`: an overlapped pair of MoE layers and what becomes of it, as text,
// JSON, a picture or a trace. Pure functions.

#include <bellows/schedule/pair.hpp>

#include <cstddef>
#include <optional>
#include <string>

namespace bellows {

struct PairOptions {
    PairNodes layer; ///< the forward's and the backward's
    std::size_t layers = 4;
    std::optional<PairPattern> order; ///< unset: choose_pattern()'s
};

/// "attn.f=1,router.f=0.1,dispatch.f=1,shared.f=0.3,mlp.f=1,combine.f=1,dispatch.b=…,mlp.w=…", any
/// of a MoE layer's nodes. What a backward's is not told costs what the forward's does; dispatch.f
/// what combine.f does and the other way round, or each exchange a quarter of what all compute
/// nodes do, so that both are as long. Throws Error{InvalidArgument}.
PairNodes parse_pair_costs(const std::string& text);

/// A pair with its order and times.
struct PairReport {
    explicit PairReport(const PairOptions& options);

    PairNodes layer, nodes; ///< one layer's, all
    std::size_t layers;
    bool chosen; ///< or given
    PairPattern pattern;
    PairOrder order;
    PairTimes times, apart; ///< in that order, and one after the other
    /// What no order is shorter than: the longer of compute and exchange.
    double bound() const;
};

std::string pair_text(const PairReport& report);
std::string pair_json(const PairReport& report);
/// A row that computes and one that exchanges.
std::string pair_svg(const PairReport& report);
/// For chrome://tracing or ui.perfetto.dev: a unit of time is a millisecond.
std::string pair_trace(const PairReport& report);

} // namespace bellows
