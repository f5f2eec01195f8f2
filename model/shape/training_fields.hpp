// SPDX-License-Identifier: MIT
#pragma once

// The keys of a TrainingShape in the `[train]` table, for whoever reads or writes that table.

#include <bellows/shape/expert_placement.hpp>
#include <bellows/shape/layout.hpp>

#include <string>

namespace bellows {

inline const char* to_text(ScheduleKind kind) {
    return to_string(kind);
}
inline void from_text(ScheduleKind& kind, const std::string& text) {
    try {
        kind = parse_schedule_kind(text);
    } catch (const Error& error) {
        throw Error(ErrorCode::InvalidArgument, in_quotes(text) + ": " + error.message());
    }
}
inline void from_text(PairMode& mode, const std::string& text) {
    mode = parse_pair_mode(text);
}

/// Calls visit(key, field, least, most) for every field.
template <class Shape, class Visit>
void for_each_shape_field(Shape& s, Visit&& visit) {
    visit("batch", s.batch, 1, 1 << 24);
    visit("batch_start", s.batch_start, 0, 1 << 24);
    visit("batch_increment", s.batch_increment, 0, 1 << 24);
    visit("batch_ramp_steps", s.batch_ramp_steps, 0, std::uint64_t{1} << 32);
    visit("micro_batches", s.micro_batches, 1, 1 << 16);
    visit("seq", s.seq, 1, 1 << 24);
    visit("document_mask", s.document_mask, 0, 1);
    visit("precision", s.precision, 0, 0);
    visit("pipeline", s.pipeline, 0, 0);
    visit("pairs", s.pairs, 0, 0);
    visit("pp", s.pp, 1, 1 << 16);
    visit("dp", s.dp, 0, 1 << 20);
    visit("ep", s.ep, 0, 1 << 20);
    visit("eplb_every", s.eplb_every, 0, std::uint64_t{1} << 32);
    visit("eplb_slots", s.eplb_slots, 0, kMostExpertSlots);
    visit("expert_sums", s.expert_sums, 0, 0);
}

} // namespace bellows
