// SPDX-License-Identifier: MIT
// A chunk of a list of moves: what others get is copied out of the device, one message goes to each
// member that gets something, and what has come is copied, or added up, into the target.

#include "collectives_impl.hpp"

#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

/// What this member gets in one place. Without terms where a message goes straight there.
struct MoveTransfer::Arrival {
    BufferView at;
    std::vector<BufferView> terms; ///< in the source or in `incoming`
    bool within = false;           ///< the only term stands in the source
};

MoveTransfer::MoveTransfer(CollectiveContext& context, StagingSlot& slot, bool linked,
                           const CollectiveTensors& tensors, const MovePlan& plan,
                           std::span<const MovePiece> pieces, bool sums, std::uint64_t sequence,
                           std::uint32_t first_stream)
    : CollectiveChunk(context, slot, linked, sequence, first_stream), tensors_(tensors),
      source_(linked ? context.linked(tensors.source) : nullptr),
      target_(linked && !sums ? context.linked(tensors.target) : nullptr),
      out_(context.device, role_of_copies(context.device, linked, QueueRole::TransferOut),
           context.options.name + " out"),
      within_(context.device, role_within(context.device, QueueRole::TransferIn),
              context.options.name + " within"),
      in_(context.device, role_of_copies(context.device, linked, QueueRole::TransferIn),
          context.options.name + " in"),
      sum_(context.device, QueueRole::AsyncCompute, context.options.name + " sum") {
    record(lay_out(plan, pieces));
}

const char* MoveTransfer::phase_name() const noexcept {
    switch (phase_) {
    case Phase::Start:
        return "staging memory";
    case Phase::Out:
        return "copy from the device";
    case Phase::Network:
        return "moving";
    case Phase::In:
    case Phase::Done:
        return "copy to the device";
    }
    return "";
}

/// Decides where everything stands in the slot, and records the way out of the source. Sender and
/// receiver of a message walk over the same pieces and terms in the same order.
std::vector<MoveTransfer::Arrival> MoveTransfer::lay_out(const MovePlan& plan,
                                                         std::span<const MovePiece> pieces) {
    const std::uint64_t self = context_.self();
    const auto for_each_term = [&](const auto& use) {
        for (const MovePiece& piece : pieces)
            for (const MoveTerm& term : plan.targets[piece.target].terms)
                use(piece, plan.targets[piece.target].to, term);
    };
    // Each message is contiguous in the staging memory.
    std::vector<std::uint64_t> out_at(context_.members(), 0), in_at(context_.members(), 0);
    for_each_term([&](const MovePiece& piece, std::uint64_t to, const MoveTerm& term) {
        if (term.from == self && to != self && source_ == nullptr)
            out_at[to] += piece.bytes;
        else if (to == self && term.from != self && target_ == nullptr)
            in_at[term.from] += piece.bytes;
    });
    for (std::uint64_t member = 0; member < context_.members(); ++member) {
        const std::uint64_t out = std::exchange(out_at[member], image_bytes_);
        const std::uint64_t in = std::exchange(in_at[member], incoming_bytes_);
        image_bytes_ = round_up(image_bytes_ + out, 16);
        incoming_bytes_ = round_up(incoming_bytes_ + in, 16);
    }

    sends_.resize(context_.members());
    receives_.resize(context_.members());
    const auto send = [&](std::uint64_t to, std::uint64_t from_byte, std::uint64_t bytes) {
        if (source_ != nullptr) {
            sends_[to].push_back({tensors_.source.offset + from_byte, bytes});
            return;
        }
        sends_[to].push_back({out_at[to], bytes});
        out_.copy(tensors_.source.sub(from_byte, bytes),
                  slot_.image.buffer.view().sub(out_at[to], bytes));
        out_at[to] += bytes;
    };
    const auto receive = [&](std::uint64_t from, Arrival& arrival) {
        const std::uint64_t bytes = arrival.at.bytes;
        if (target_ != nullptr) {
            receives_[from].push_back({arrival.at.offset, bytes});
            return;
        }
        receives_[from].push_back({in_at[from], bytes});
        arrival.terms.push_back(slot_.incoming.buffer.view().sub(in_at[from], bytes));
        in_at[from] += bytes;
    };
    std::vector<Arrival> arrivals;
    for (const MovePiece& piece : pieces) {
        const MoveTarget& target = plan.targets[piece.target];
        Arrival* arrival = nullptr;
        if (target.to == self)
            arrival = &arrivals.emplace_back(
                Arrival{tensors_.target.sub(target.to_byte + piece.first, piece.bytes), {}, false});
        for (const MoveTerm& term : target.terms) {
            const std::uint64_t from_byte = term.from_byte + piece.first;
            if (arrival == nullptr) {
                if (term.from == self)
                    send(target.to, from_byte, piece.bytes);
            } else if (term.from != self) {
                receive(term.from, *arrival);
            } else {
                arrival->terms.push_back(tensors_.source.sub(from_byte, piece.bytes));
                arrival->within = target.terms.size() == 1;
            }
        }
    }
    return arrivals;
}

void MoveTransfer::record(const std::vector<Arrival>& arrivals) {
    std::size_t most_terms = 0;
    for (const Arrival& arrival : arrivals) {
        most_terms = std::max(most_terms, arrival.terms.size());
        if (arrival.terms.size() == 1)
            (arrival.within ? within_ : in_).copy(arrival.terms.front(), arrival.at);
    }
    // The second term of each sum, then the third of each: sums do not wait for one another.
    for (std::size_t term = 1; term < most_terms; ++term)
        for (const Arrival& arrival : arrivals)
            if (term < arrival.terms.size())
                record_member_sum(sum_, {.own = term == 1 ? arrival.terms.front() : arrival.at,
                                         .staged = arrival.terms[term],
                                         .sum = arrival.at,
                                         .members = 2});
}

void MoveTransfer::post_messages() {
    for (std::uint64_t member = 0; member < context_.members(); ++member) {
        post(member, 0, target_ != nullptr ? *target_ : slot_.incoming,
             std::move(receives_[member]), Direction::Receive);
        post(member, 0, source_ != nullptr ? *source_ : slot_.image, std::move(sends_[member]),
             Direction::Send);
    }
}

bool MoveTransfer::advance(LaneContext& lane) {
    switch (phase_) {
    case Phase::Start:
        reserve_staging(lane);
        sent_ = submit(lane, out_);
        moved_within_ = submit(lane, within_);
        phase_ = Phase::Out;
        return true;
    case Phase::Out:
        if (!sent_.reached())
            return false;
        post_messages();
        phase_ = Phase::Network;
        return true;
    case Phase::Network:
        if (!all_done())
            return false;
        moved_in_ = submit(lane, in_);
        summed_ = submit(lane, sum_);
        phase_ = Phase::In;
        return true;
    case Phase::In:
        if (!moved_within_.reached() || !moved_in_.reached() || !summed_.reached())
            return false;
        phase_ = Phase::Done;
        return true;
    case Phase::Done:
        return false;
    }
    return false;
}

} // namespace bellows
