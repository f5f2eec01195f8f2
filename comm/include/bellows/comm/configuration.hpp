// SPDX-License-Identifier: MIT
#pragma once

// What exchanges and collectives are asked for. Plain values, without MPI: whoever plans a run
// reads them, too.

#include <bellows/base/dtype.hpp>
#include <bellows/fp8/sizes.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// How the results of a token's experts are summed on their way back.
enum class ExchangeSums : std::uint8_t {
    /// In f32 on each rank over its experts in ascending slot, rounded to sum_wire, then in f32
    /// over the ranks in the order of the token's slots; by node: over the node's ranks, rounded
    /// to sum_wire, then over the nodes. The bits depend on which experts share a rank and a node.
    Ranked,
    /// In f32 along the binary tree over the global expert id (a node is its lower half's sum plus
    /// its upper half's; what a token has not chosen is skipped), then onto out and the biases: the
    /// same bits whatever ranks and nodes there are, as long as the kernels that make the results
    /// give the same. Rows by expert only. Error{InvalidArgument} unless each rank, and by node
    /// each node, owns an aligned range of a power of two of experts, or of the last ones. With
    /// slots_per_rank the tree is over slots; see ExactPerChoice.
    Exact,
    /// Each choice's result travels alone, and the source sums them in f32 in the order of the
    /// token's choices: the same bits wherever experts live, as long as the kernels that make the
    /// results give the same. Tokens travel once for each choice, too; in LowLatency what comes
    /// back from each rank has room for all choices. Rows by expert only.
    PerChoice,
    /// Each choice's result travels alone, as f32, and the source sums them along Exact's tree over
    /// the global expert id: the bits of Exact, wherever experts live and whichever slot takes a
    /// token. LowLatency with rows by expert only; what comes back from each rank has room for all
    /// choices. A dispatch's ids stay as they are until its combine.
    ExactPerChoice,
};

enum class ExchangeMode : std::uint8_t {
    /// Training, prefill: the ranks tell each other how many rows come, memory is bound for them.
    HighThroughput,
    /// Decoding: fixed places for max_tokens tokens of each rank, nothing is told before, forward
    /// only. Every rank gets every token's record and takes what is for its experts.
    ///   ExpertMajor: rows are masked: those for local expert e are the first expert_counts()[e] of
    ///   rows e * spacing .. (e + 1) * spacing, spacing = ranks * max_tokens, in the order (source
    ///   rank, source token). Combine sums the results times their routing weights. A token that
    ///   chooses an expert twice has one row there, and the sum of the weights.
    ///   RankMajor: token t of source rank r is row r * max_tokens + t, for nobody where
    ///   row_experts() says so: what products by ids take (fp8::GroupLayout::by_ids), without a
    ///   copy.
    /// A handle is one half of a double buffer: with two of them the sends of a step fly under the
    /// compute of the one before.
    LowLatency,
};

/// What a received row is; HighThroughput.
enum class ExchangeLayout : std::uint8_t {
    /// A token for one local expert: rows are grouped by expert, each group beginning at a multiple
    /// of the alignment. What grouped products take.
    ExpertMajor,
    /// The same rows in the same order, but what came is left where it came, once per token: the
    /// token and gradient of row r are row row_slots()[r] / top_k of rows() and d_results(), which
    /// products by slots read there (fp8::GroupedRows, slots_per_a_row = top_k). Without padding:
    /// alignment is 1.
    ExpertSlots,
    /// A token, once, whatever number of its experts are here: rows stand where the network puts
    /// them, without a copy. The caller sums over the experts of a row.
    RankMajor,
};

struct ExchangeConfig {
    std::string name = "exchange"; ///< shown in errors and the trace
    std::vector<int> ranks{};      ///< the group, ascending; empty: the whole world
    std::uint64_t num_experts = 0; ///< of the layer; contiguous blocks belong to the ranks in order
    /// Not 0: every rank has so many slots for experts, which ExpertExchange::set_placement fills;
    /// before that, the contiguous blocks. Local experts are slots then, some of which may be
    /// empty.
    std::uint64_t slots_per_rank = 0;
    /// Tables of what the slots hold, one for each layer that goes by this exchange with experts of
    /// its own: ExchangeHandle::use_placement.
    std::uint64_t placements = 1;
    std::uint64_t top_k = 0;      ///< at most 64
    std::uint64_t hidden = 0;     ///< multiple of 8
    std::uint64_t max_tokens = 0; ///< most tokens that any rank of the group hands in
    DType dtype = DType::F32;     ///< of tokens and results on the device: F32 or BF16
    ExchangeMode mode = ExchangeMode::HighThroughput;
    ExchangeLayout layout = ExchangeLayout::ExpertMajor;
    std::uint32_t alignment = 1; ///< ExpertMajor: each expert's rows begin at a multiple of it
    /// Across nodes: a token travels once to each node, to the rank of the same place there, which
    /// passes it on; sums are made inside the node before they go back. Rows stand where they would
    /// stand without it. Only of HighThroughput, where the group has equally many ranks, more than
    /// one, on each of its nodes, one node's behind the other's, and each node has experts (and
    /// fewer than 16 million choices of tokens pass through a rank); see ExpertExchange::by_node().
    /// false: each rank sends to each. The same on every rank.
    bool by_node = true;
    /// In which type tokens travel to the experts: unset or dtype: as they are; F8E4M3: quantised
    /// by 1 x 128 before they travel, with the bits of fp8::quantize, and rows are codes. Others
    /// are Error{Unsupported} in this version.
    std::optional<DType> token_wire{};
    /// The same of gradients on their way to the experts (combine_backward), whose rows are codes
    /// then. Those on their way back are sums. LowLatency, which goes forward only, has none.
    std::optional<DType> gradient_wire{};
    fp8::ScaleRule token_scales = fp8::ScaleRule::PowerOfTwo; ///< of codes
    /// In which type partial sums travel back: dtype, or F32 for rows by expert, which is more
    /// exact where dtype is BF16, and twice the bytes. Unset: dtype, F32 for exact sums.
    std::optional<DType> sum_wire{};
    ExchangeSums sums = ExchangeSums::Ranked;
    /// Most workgroups of a kernel that packs or unpacks rows; 0: as many as serve. The bits do not
    /// depend on it. The small kernels that lay rows out are not bounded, nor copies of a rank's
    /// own records, nor what callers record themselves (ExchangeHandle::sum_results).
    std::uint32_t workgroups = 0;
    /// Most that is copied between device and host at once, while other pieces are on their way;
    /// the last ones are smaller. The same on every rank; a multiple of 16.
    std::uint64_t piece_bytes = std::uint64_t{4} << 20;
    /// Copies between device and host on CPU devices, too, whose memory would serve as it is: for
    /// tests.
    bool stage_always = false;
    std::chrono::milliseconds timeout{
        60'000}; ///< of one crossing of the network, once it has begun
};

/// The same on every rank of the group, except the name.
struct CollectivesOptions {
    std::string name = "collectives";     ///< shown in errors and the trace
    std::uint64_t chunk_bytes = 4u << 20; ///< tensors travel in chunks of about this size
    /// The same over a device link: large, as the host takes about as long between two steps of a
    /// chunk as the link takes for 16 MiB.
    std::uint64_t link_chunk_bytes = 32u << 20;
    std::uint32_t chunks_in_flight = 4;         ///< of one collective, at most 16
    std::uint32_t collectives_in_flight = 2;    ///< each has staging of its own
    std::uint64_t small_bytes = 16u << 10;      ///< up to here sums travel in one message to all
    std::chrono::milliseconds timeout{120'000}; ///< without any progress of the network
};

} // namespace bellows
