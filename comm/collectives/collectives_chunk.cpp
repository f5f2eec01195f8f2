// SPDX-License-Identifier: MIT
// A chunk's way: out of the device, to the members that sum it, through the sum, to everyone, back
// into the device; a chunk skips what its plan does not ask for.

#include "collectives_impl.hpp"
#include "words.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <cstring>
#include <utility>

namespace bellows {

void record_member_sum(Recording& recording, const MemberSum& of) {
    const std::uint64_t offsets =
        of.own.offset | of.staged.offset | of.sum.offset | of.image.offset | of.stride;
    const std::uint64_t in_fours = offsets % 16 == 0 ? of.sum.bytes / 16 * 16 : 0;
    const bool cpu = recording.device().info().is_cpu;
    const auto dispatch = [&](std::uint64_t first, std::uint64_t bytes, std::uint64_t element) {
        if (bytes == 0)
            return;
        using Variant = kernels::SumRanks::Variant;
        const std::uint64_t local = cpu ? 8 : 128, per_group = cpu ? local * 16 : local;
        const std::uint64_t count = bytes / element;
        const BufferView own = of.own.sub(first, bytes), sum = of.sum.sub(first, bytes);
        recording.dispatch(
            kernels::SumRanks{.variant = element == 16 ? Variant::vec4 : Variant::scalar,
                              .constants = {.local_size = static_cast<std::uint32_t>(local)},
                              .own = own,
                              .staged =
                                  of.staged ? of.staged.sub(first, of.staged.bytes - first) : own,
                              .sum = sum,
                              .image = of.image ? of.image.sub(first, bytes) : sum,
                              .count = static_cast<std::uint32_t>(count),
                              .stride = static_cast<std::uint32_t>(of.stride / element),
                              .members = static_cast<std::uint32_t>(of.members),
                              .self = static_cast<std::uint32_t>(of.self),
                              .has_image = of.image ? 1u : 0u},
            {static_cast<std::uint32_t>(
                 std::clamp<std::uint64_t>((count + per_group - 1) / per_group, 1, 16384)),
             1, 1});
    };
    dispatch(0, in_fours, 16);
    dispatch(in_fours, of.sum.bytes - in_fours, 4);
}

// ---- Sums and gatherings -----------------------------------------------------------------------

ChunkTransfer::ChunkTransfer(CollectiveContext& context, StagingSlot& slot, bool linked,
                             const CollectiveTensors& tensors, ChunkPlan plan,
                             std::uint64_t sequence, std::uint32_t first_stream)
    : CollectiveChunk(context, slot, linked, sequence, first_stream), tensors_(tensors),
      source_(linked ? context.linked(tensors.source) : nullptr),
      target_(linked && tensors.own_in_place ? context.linked(tensors.target) : nullptr),
      plan_(std::move(plan)),
      out_(context.device, role_of_copies(context.device, linked, QueueRole::TransferOut),
           context.options.name + " out"),
      sum_(context.device, QueueRole::AsyncCompute, context.options.name + " sum"),
      in_(context.device, role_of_copies(context.device, linked, QueueRole::TransferIn),
          context.options.name + " in") {
    lay_out();
    record();
}

const char* ChunkTransfer::phase_name() const noexcept {
    switch (phase_) {
    case Phase::Start:
        return "staging memory";
    case Phase::Out:
        return "copy from the device";
    case Phase::Scatter:
        return "parts to sum";
    case Phase::Sum:
        return "sum";
    case Phase::Gather:
        return "gathering";
    case Phase::In:
    case Phase::Done:
        return "copy to the device";
    }
    return "";
}

bool ChunkTransfer::replicated() const noexcept {
    return plan_.pieces.empty() && plan_.parts.size() > 1 &&
           plan_.parts[0].begin == plan_.parts[1].begin && !plan_.parts[0].empty();
}

/// Whether gathered bytes go from the image into the target.
bool ChunkTransfer::fills_target() const noexcept {
    if (target_ != nullptr)
        return false;
    for (std::uint64_t member = 0; member < plan_.pieces.size(); ++member)
        if (!plan_.pieces[member].empty() && (member != context_.self() || !tensors_.own_in_place))
            return true;
    return false;
}

std::uint64_t ChunkTransfer::in_image(std::uint64_t target_byte) const noexcept {
    return target_byte - image_.begin;
}

/// Decides where everything stands in the slot.
void ChunkTransfer::lay_out() {
    if (!plan_.parts.empty()) {
        out_at_.resize(context_.members());
        for (std::uint64_t member = 0; member < context_.members(); ++member) {
            if (member == context_.self())
                continue;
            if (source_ != nullptr) {
                out_at_[member] = tensors_.source.offset + plan_.parts[member].begin;
                continue;
            }
            out_at_[member] = replicated() ? 0 : image_bytes_;
            image_bytes_ = round_up(out_at_[member] + plan_.parts[member].size(), 16);
        }
        incoming_stride_ = round_up(plan_.parts[context_.self()].size(), 16);
        incoming_bytes_ = (context_.members() - 1) * incoming_stride_;
    }
    if (!plan_.pieces.empty() && target_ == nullptr) {
        image_ = {plan_.pieces.front().begin, plan_.pieces.back().end};
        image_bytes_ = std::max(image_bytes_, round_up(image_.size(), 16) + 16);
        if (plan_.parts.empty()) {
            edge_at_ = round_up(plan_.pieces[context_.self()].size() + 8, 16);
            incoming_bytes_ = edge_at_ + 4;
        }
    }
}

// ---- Work of the device ----------------------------------------------------------------------

void ChunkTransfer::record() {
    if (!plan_.parts.empty()) {
        if (source_ == nullptr) // else the job waits for what writes it, and that is all
            record_scatter_out();
        if (!plan_.parts[context_.self()].empty())
            record_sum();
    } else if (target_ == nullptr) {
        record_own_piece();
        // Bytes behind the target that share its last word.
        if (const std::uint64_t tail = image_.end % kWordBytes; fills_target() && tail != 0)
            out_.copy(words_around(tensors_.target, image_.end - tail, tail),
                      slot_.incoming.buffer.view().sub(edge_at_, kWordBytes));
    }
    if (fills_target())
        record_in();
}

void ChunkTransfer::record_scatter_out() {
    if (replicated()) {
        const ByteRange& all = plan_.parts[0];
        out_.copy(tensors_.source.sub(all.begin, all.size()),
                  slot_.image.buffer.view().sub(0, all.size()));
        return;
    }
    // Neighbours in both places travel in one copy.
    std::uint64_t from = 0, to = 0, bytes = 0;
    const auto flush = [&] {
        if (bytes > 0)
            out_.copy(tensors_.source.sub(from, bytes), slot_.image.buffer.view().sub(to, bytes));
        bytes = 0;
    };
    for (std::uint64_t member = 0; member < context_.members(); ++member) {
        const ByteRange& part = plan_.parts[member];
        if (member == context_.self() || part.empty())
            continue;
        if (part.begin != from + bytes || out_at_[member] != to + bytes) {
            flush();
            from = part.begin;
            to = out_at_[member];
        }
        bytes += part.size();
    }
    flush();
}

void ChunkTransfer::record_own_piece() {
    const ByteRange& piece = plan_.pieces[context_.self()];
    if (piece.empty())
        return;
    const BufferView words = words_around(tensors_.source, plan_.take_from, piece.size());
    const std::uint64_t lead = tensors_.source.offset + plan_.take_from - words.offset;
    const std::uint64_t at = in_image(piece.begin);
    if (at % kWordBytes == lead) {
        out_.copy(words, slot_.image.buffer.view().sub(at - lead, words.bytes));
    } else {
        bounce_lead_ = lead;
        out_.copy(words, slot_.incoming.buffer.view().sub(0, words.bytes));
    }
}

void ChunkTransfer::record_sum() {
    const ByteRange& part = plan_.parts[context_.self()];
    const bool image = !plan_.pieces.empty() && target_ == nullptr;
    const std::uint64_t staged_bytes = (context_.members() - 1) * incoming_stride_;
    record_member_sum(
        sum_, {.own = tensors_.source.sub(part.begin, part.size()),
               .staged = staged_bytes > 0 ? slot_.incoming.buffer.view().sub(0, staged_bytes)
                                          : BufferView{},
               .sum = tensors_.target.sub(plan_.sum_at, part.size()),
               .image = image ? slot_.image.buffer.view().sub(in_image(part.begin), part.size())
                              : BufferView{},
               .stride = incoming_stride_,
               .members = context_.members(),
               .self = context_.self()});
}

void ChunkTransfer::record_in() {
    const auto copy = [&](std::uint64_t begin, std::uint64_t end) {
        if (begin == end)
            return;
        const BufferView words = words_around(tensors_.target, begin, end - begin);
        in_.copy(slot_.image.buffer.view().sub(in_image(begin), words.bytes), words);
    };
    const ByteRange& own = plan_.pieces[context_.self()];
    const bool whole_words = own.begin % kWordBytes == 0 && own.end % kWordBytes == 0;
    if (tensors_.own_in_place && whole_words && !own.empty()) {
        copy(image_.begin, own.begin);
        copy(own.end, image_.end);
    } else {
        copy(image_.begin, image_.end);
    }
}

// ---- Messages --------------------------------------------------------------------------------

void ChunkTransfer::post_scatter() {
    const std::uint64_t self = context_.self(), own_bytes = plan_.parts[self].size();
    for (std::uint64_t member = 0, row = 0; member < context_.members(); ++member) {
        if (member == self)
            continue;
        post(member, 0, slot_.incoming, {{row * incoming_stride_, own_bytes}}, Direction::Receive);
        post(member, 0, source_ != nullptr ? *source_ : slot_.image,
             {{out_at_[member], plan_.parts[member].size()}}, Direction::Send);
        ++row;
    }
}

void ChunkTransfer::post_gather() {
    const MessageBuffer& at = target_ != nullptr ? *target_ : slot_.image;
    const auto run_of = [&](std::uint64_t member) {
        const ByteRange& piece = plan_.pieces[member];
        return MemoryRun{target_ != nullptr ? tensors_.target.offset + piece.begin
                                            : in_image(piece.begin),
                         piece.size()};
    };
    for (std::uint64_t member = 0; member < context_.members(); ++member) {
        if (member == context_.self())
            continue;
        post(member, 1, at, {run_of(member)}, Direction::Receive);
        post(member, 1, at, {run_of(context_.self())}, Direction::Send);
    }
}

// ---- Phases ----------------------------------------------------------------------------------

/// Whether this member's piece stands where it is sent from: what was copied out in whole words is
/// moved there.
bool ChunkTransfer::own_piece_placed() {
    if (!bounce_lead_)
        return true;
    const ByteRange& piece = plan_.pieces[context_.self()];
    const std::uint64_t to = in_image(piece.begin);
    if (!linked_) {
        std::memcpy(slot_.image.buffer.mapped_as<std::byte>().data() + to,
                    slot_.incoming.buffer.mapped_as<std::byte>().data() + *bounce_lead_,
                    piece.size());
        return true;
    }
    if (!bounce_)
        bounce_ = context_.link->copy_from(
            context_.transport.rank(),
            {{slot_.image.block->address() + to, slot_.incoming.block->address() + *bounce_lead_,
              piece.size()}});
    return bounce_->done();
}

void ChunkTransfer::after_out() {
    if (plan_.parts.empty()) {
        post_gather();
        phase_ = Phase::Gather;
    } else {
        post_scatter();
        phase_ = Phase::Scatter;
    }
}

bool ChunkTransfer::advance(LaneContext& lane) {
    switch (phase_) {
    case Phase::Start:
        reserve_staging(lane);
        submitted_ = submit(lane, out_);
        phase_ = Phase::Out;
        return true;
    case Phase::Out:
        if (!submitted_.reached() || !own_piece_placed())
            return false;
        after_out();
        return true;
    case Phase::Scatter:
        if (!all_done())
            return false;
        submitted_ = submit(lane, sum_);
        phase_ = Phase::Sum;
        return true;
    case Phase::Sum:
        if (!submitted_.reached())
            return false;
        if (!plan_.pieces.empty())
            post_gather();
        phase_ = plan_.pieces.empty() ? Phase::Done : Phase::Gather;
        return true;
    case Phase::Gather:
        if (!all_done())
            return false;
        if (const std::uint64_t tail = image_.end % kWordBytes; fills_target() && tail != 0)
            std::memcpy(slot_.image.buffer.mapped_as<std::byte>().data() + in_image(image_.end),
                        slot_.incoming.buffer.mapped_as<std::byte>().data() + edge_at_ + tail,
                        kWordBytes - tail);
        submitted_ = submit(lane, in_);
        phase_ = Phase::In;
        return true;
    case Phase::In:
        if (!submitted_.reached())
            return false;
        phase_ = Phase::Done;
        return true;
    case Phase::Done:
        return false;
    }
    return false;
}

} // namespace bellows
