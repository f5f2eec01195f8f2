// SPDX-License-Identifier: MIT
#pragma once

// The records of one leg between this rank's device and those that the device link reaches. The
// source tells each of them in which block of its memory its records stand; the destination copies
// them to where they belong and says so. Used by a lane.

#include "exchange_impl.hpp"

#include <bellows/comm/message.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace bellows {

/// Where some of a member's records stand.
struct RecordRun {
    std::uint64_t offset = 0, bytes = 0;
};
/// For each member of the group the runs of its records, in the order in which they travel. Both
/// ends have as many, of the same bytes.
using RecordRuns = std::vector<std::vector<RecordRun>>;

inline std::uint64_t total_bytes(const std::vector<RecordRun>& runs) {
    std::uint64_t bytes = 0;
    for (const RecordRun& run : runs)
        bytes += run.bytes;
    return bytes;
}

class LinkMoves {
public:
    /// without: the members that this leg does without; once one is, it stays so. came: is told of
    /// each member whose records are here.
    LinkMoves(ExpertExchange::Impl& exchange, std::uint64_t sequence,
              std::function<bool(std::uint64_t)> without, std::function<void(std::uint64_t)> came)
        : exchange_(exchange), sequence_(sequence), without_(std::move(without)),
          came_(std::move(came)) {}

    /// Once each, in either order; members that the link does not reach are left out. The transfers
    /// that are waited for are added to `sends` and `receives`, which live as long as this.
    void begin_out(const RecordRuns& runs, const std::shared_ptr<LinkBlock>& memory,
                   std::vector<Transfer>& sends);
    void begin_in(const RecordRuns& runs, const std::shared_ptr<LinkBlock>& memory,
                  std::vector<Transfer>& receives);
    /// Done: what has begun is here, and at the others, who know.
    Progress step();
    /// All that begin_in() was told of is.
    bool here() const noexcept { return here_; }
    /// When the first copy began, if one has.
    std::chrono::steady_clock::time_point first_copy() const noexcept { return first_copy_; }

private:
    /// What a source tells: the block's id and bytes, the records' bytes, then each run's offset;
    /// sealed.
    static constexpr std::size_t kId = 0, kBlockBytes = 1, kBytes = 2, kOffsets = 3;
    struct Out {
        std::uint64_t at = 0;
        std::vector<std::uint64_t> told;
        std::uint64_t taken = 0; ///< bytes, as the destination says
        std::size_t first_transfer = 0;
    };
    struct In {
        int rank = 0;
        std::uint64_t at = 0;
        std::vector<RecordRun> runs;
        std::vector<std::uint64_t> told;
        std::size_t transfer = 0;
        bool heard = false;                 ///< what is told
        std::shared_ptr<LinkMemory> source; ///< kept until the copy is done
        std::unique_ptr<LinkCopy> copy;
        std::chrono::steady_clock::time_point began{}; ///< the copy
        bool done = false;
        std::uint64_t taken = 0;
    };

    void begin_out(std::uint64_t at, const std::vector<RecordRun>& runs);
    bool step_out(Out& out);
    bool step_in(In& in, bool& changed);
    void begin_copy(In& in);
    bool try_copy(In& in, bool& changed);
    void trace(const In& in) const;
    bool test(Transfer& transfer, std::uint64_t at) const;

    ExpertExchange::Impl& exchange_;
    std::uint64_t sequence_;
    std::function<bool(std::uint64_t)> without_;
    std::function<void(std::uint64_t)> came_;
    std::vector<std::unique_ptr<Out>> out_; // their addresses are posted
    std::vector<std::unique_ptr<In>> in_;
    std::vector<Transfer>*sends_ = nullptr, *receives_ = nullptr;
    std::vector<std::pair<std::uint64_t, Transfer>> answers_; ///< to members
    std::shared_ptr<LinkBlock> from_, to_;
    std::chrono::steady_clock::time_point first_copy_{};
    bool here_ = false;
};

} // namespace bellows
