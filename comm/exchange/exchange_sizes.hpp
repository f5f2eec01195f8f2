// SPDX-License-Identifier: MIT
#pragma once

// What of a hop of an exchange follows from its configuration and this rank's place in the group:
// whose experts are whose, what records are, how much there is of everything. Plain values.

#include <bellows/base/error.hpp>
#include <bellows/comm/configuration.hpp>
#include <bellows/comm/topology.hpp>
#include <bellows/fp8/sizes.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {

/// Refuses what an exchange or handle is asked for. Throws Error{InvalidArgument}.
inline void require(bool good, const std::string& name, const std::string& message) {
    if (!good)
        throw Error(ErrorCode::InvalidArgument, name + ": " + message);
}

/// A row on the wire (shaders/include/exchange.glsl): what is said of a token, then words for each
/// of its choices, then what is left to a multiple of 16 or, of wider elements, 32 bytes.
struct Record {
    std::uint64_t row_bytes = 0; ///< elements, or codes and their scales, 16 bytes' multiples each
    std::uint64_t bytes = 0;
    DType dtype = DType::F32; ///< of the elements; F8E4M3: codes
    std::uint64_t rows = 1;   ///< one behind the other
    bool codes() const noexcept { return dtype == DType::F8E4M3; }
};

/// A hop. Where an exchange has slots, they are what its hops call experts.
struct ExchangeShape {
    ExchangeConfig config;              ///< of this hop
    std::uint64_t logical_experts = 0;  ///< of the exchange
    int position = 0;                   ///< of this rank in the group
    std::uint64_t ranks_per_member = 1; ///< whose experts a member of the group stands for
    /// Nodes that the tokens of a member come from; records keep that order. More than one: tokens
    /// are the rows of the hop before, not the caller's.
    std::uint64_t origins = 1;

    bool has_before() const noexcept { return origins > 1; }
    std::uint64_t group_size() const noexcept { return config.ranks.size(); }
    /// Ranks that share the experts out.
    std::uint64_t owners() const noexcept { return group_size() * ranks_per_member; }
    std::uint64_t experts_of(std::uint64_t at) const noexcept {
        return first_expert_of(at + 1) - first_expert_of(at);
    }
    std::uint64_t first_expert_of(std::uint64_t at) const noexcept;
    /// The experts of this rank, of which there may be none.
    std::uint64_t local_experts() const noexcept {
        return experts_of(static_cast<std::uint64_t>(position));
    }
    /// The same for buffers: those of a rank without experts have room for one.
    std::uint64_t own_experts() const noexcept;
    /// Rows of this rank's experts in the worst case.
    std::uint64_t capacity() const;
    /// Records that a member sends another are counted by origin.
    std::uint64_t routes() const noexcept { return group_size() * origins; }
    bool low_latency() const noexcept { return config.mode == ExchangeMode::LowLatency; }
    bool by_tokens() const noexcept { return config.layout == ExchangeLayout::RankMajor; }
    /// Tokens and gradients stay in the records that they came in.
    bool in_records() const noexcept { return config.layout != ExchangeLayout::ExpertMajor; }
    /// Rows stand at fixed places of their experts.
    bool masked() const noexcept { return low_latency() && !by_tokens(); }
    bool quantizes() const noexcept { return config.token_wire == DType::F8E4M3; }
    bool quantizes_gradients() const noexcept { return config.gradient_wire == DType::F8E4M3; }
    /// Sums are along a tree over experts.
    bool exact() const noexcept {
        return config.sums == ExchangeSums::Exact || config.sums == ExchangeSums::ExactPerChoice;
    }
    bool per_choice() const noexcept {
        return config.sums == ExchangeSums::PerChoice ||
               config.sums == ExchangeSums::ExactPerChoice;
    }
    /// Whether ids of experts become those of slots on their way in.
    bool translates() const noexcept { return config.slots_per_rank > 0 && !has_before(); }
    /// Records of a token that may go to one member.
    std::uint64_t records_per_member() const noexcept {
        return per_choice() && !low_latency() && !has_before() ? config.top_k : 1;
    }
    /// Results of this rank's own tokens are summed to where they come back to: they do not travel.
    bool sums_own_in_place() const noexcept {
        return !low_latency() && !by_tokens() && !has_before();
    }
    /// Of sums on their way back.
    DType sum_type() const noexcept;
    /// Of codes.
    fp8::Recipe recipe() const noexcept;
    /// Of dispatch.
    Record token_record() const;
    /// Outbound, of the backward of combine.
    Record gradient_record() const;
    /// Inbound.
    Record sum_record() const noexcept;
    /// Of a row of codes and scales.
    std::uint64_t quantized_bytes() const;
    /// Records that this rank can send or receive in one outbound leg.
    std::uint64_t most_sent() const noexcept;
    std::uint64_t most_received() const noexcept;
    /// Kernels reach 4 GiB of an operand. Throws Error{InvalidArgument} for more than that of
    /// records or rows, theirs or `widest` bytes wide.
    void require_addressable(std::uint64_t records, std::uint64_t rows,
                             std::uint64_t widest = 0) const;
    /// The position of another rank of the group that may be masked. Throws Error{InvalidArgument}.
    std::uint64_t maskable(int rank) const;
};

/// The configuration with what it leaves to be found out: the group's ranks. Throws
/// Error{InvalidArgument} naming the value that does not fit, Error{Unsupported} for an option that
/// this version does not have.
ExchangeConfig checked(const Topology& topology, int rank, ExchangeConfig config);

/// The hops of an exchange of a checked configuration as the rank takes part in them, the one
/// between nodes first. Throws Error{InvalidArgument} for what is too large.
std::vector<ExchangeShape> plan_hops(const Topology& topology, int rank,
                                     const ExchangeConfig& config);

/// Memory that a handle takes when it is made.
enum class HandlePart : std::uint8_t {
    SlotsChosen,
    RankSlots,
    RankIds,
    RankCounts,
    RankOffsets,
    RankRows,
    Counts,
    HostCounts,
    Quantized,
    RecordsToSend,
    RecordsBack,
    RecordCount,
    Records,
    RecordsToReturn,
    Rows,
    SlotIds,
    SlotWeights,
    SlotScalars,
    Workspace,
    ExpertCounts,
    Slots,
    ExpertOffsets,
    RowsPlaced,
    RowWeights,
};

struct HandleSize {
    HandlePart part;
    std::uint64_t bytes = 0;
};

/// Words of a table that slots are chosen from: of each expert where its slots begin among these
/// words and how many there are, then all slots.
constexpr std::uint64_t replica_words(std::uint64_t experts, std::uint64_t slots) {
    return 2 * experts + slots;
}

/// Bytes of HandlePart::RecordCount ahead of the counts of rows.
inline constexpr std::uint64_t kHandleCountsAt = 16;

/// All of a hop's.
std::vector<HandleSize> handle_sizes(const ExchangeShape& exchange);

/// The first of the experts of the rank at a position: contiguous blocks, as even as can be, the
/// first ones larger.
std::uint64_t first_expert(std::uint64_t at, std::uint64_t experts, std::uint64_t ranks);

} // namespace bellows
