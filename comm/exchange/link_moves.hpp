// SPDX-License-Identifier: MIT
#pragma once

// The records of one leg between this rank's device and those that the device link reaches: a
// message for each of them, which leaves out who is lost meanwhile. Used by a lane.

#include "exchange_impl.hpp"
#include "transport/link_transfer.hpp"

#include <bellows/comm/message.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace bellows {

/// For each member of the group the runs of its records, in the order in which they travel. Both
/// ends have as many, of the same bytes.
using RecordRuns = std::vector<std::vector<MemoryRun>>;

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
    struct Out {
        std::uint64_t at = 0;
        std::size_t transfer = 0;
    };
    struct In {
        std::uint64_t at = 0, bytes = 0;
        std::size_t transfer = 0;
        std::chrono::steady_clock::time_point began{}; ///< the copy
        bool done = false;
    };

    void begin_out(std::uint64_t at, const std::vector<MemoryRun>& runs,
                   const std::shared_ptr<LinkBlock>& memory);
    bool step_out(const Out& out);
    bool step_in(In& in, bool& changed);
    bool arrived(In& in);
    void trace(const In& in) const;
    int rank_of(std::uint64_t at) const noexcept { return exchange_.config.ranks[at]; }
    Tag tag() const noexcept;

    ExpertExchange::Impl& exchange_;
    std::uint64_t sequence_;
    std::function<bool(std::uint64_t)> without_;
    std::function<void(std::uint64_t)> came_;
    std::vector<Out> out_;
    std::vector<std::unique_ptr<In>> in_; // their addresses are known to copies
    std::vector<Transfer>*sends_ = nullptr, *receives_ = nullptr;
    std::chrono::steady_clock::time_point first_copy_{};
    bool here_ = false;
};

} // namespace bellows
