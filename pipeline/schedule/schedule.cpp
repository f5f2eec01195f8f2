// SPDX-License-Identifier: MIT
#include <bellows/base/error.hpp>
#include <bellows/schedule/schedule.hpp>

#include <algorithm>
#include <array>
#include <utility>

namespace bellows {

namespace {

constexpr std::array<const char*, kNumScheduleKinds> kKindNames = {
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev"};

char letter(OpKind kind) {
    static constexpr std::string_view kLetters = "FBIW";
    const auto index = static_cast<std::size_t>(kind);
    return index < kLetters.size() ? kLetters[index] : '?';
}

} // namespace

const char* to_string(ScheduleKind kind) noexcept {
    const auto index = static_cast<std::size_t>(kind);
    return index < kKindNames.size() ? kKindNames[index] : "?";
}

ScheduleKind parse_schedule_kind(std::string_view name) {
    const auto found = std::find(kKindNames.begin(), kKindNames.end(), name);
    if (found != kKindNames.end())
        return static_cast<ScheduleKind>(found - kKindNames.begin());
    std::string all;
    for (const char* kind : kKindNames)
        all += (all.empty() ? "" : ", ") + std::string(kind);
    throw Error(ErrorCode::InvalidArgument,
                "there is no schedule " + in_quotes(name) + ", there are: " + all);
}

std::string to_text(const ScheduleOp& op) {
    std::string text(1, letter(op.kind));
    return op.kind == OpKind::WeightGradient ? text : text + std::to_string(op.phase);
}

std::string to_name(const ScheduleOp& op) {
    return letter(op.kind) + std::to_string(op.phase) + ".m" + std::to_string(op.micro_batch);
}

std::string to_text(const Schedule& schedule) {
    std::string text;
    for (const auto& ops : schedule.ops) {
        for (std::size_t i = 0; i < ops.size(); ++i)
            text += (i == 0 ? "" : ops[i - 1].with_next ? "&" : " ") + to_text(ops[i]);
        text += '\n';
    }
    return text;
}

bool Schedule::has_pairs() const noexcept {
    return std::ranges::any_of(ops, [](const std::vector<ScheduleOp>& of_rank) {
        return std::ranges::any_of(of_rank, &ScheduleOp::with_next);
    });
}

std::uint64_t Schedule::peak_in_flight(std::uint64_t rank, std::uint64_t phase) const {
    if (rank >= ops.size() || rank >= chunks.size() || phase >= chunks[rank].size())
        throw Error(ErrorCode::InvalidArgument, "a schedule of " + std::to_string(ops.size()) +
                                                    " ranks has no chunk " + std::to_string(phase) +
                                                    " on rank " + std::to_string(rank));
    std::uint64_t now = 0, peak = 0;
    for (const ScheduleOp& op : ops[rank]) {
        if (op.phase != phase)
            continue;
        if (forward_only && peak == 2)
            break;
        now += op.kind == OpKind::Forward ? 1 : 0;
        peak = std::max(peak, now);
        const bool ends = op.kind == OpKind::Backward || op.kind == OpKind::WeightGradient;
        now -= ends && now > 0 ? 1 : 0;
    }
    return peak;
}

HighWater Schedule::high_water(std::uint64_t rank) const {
    if (rank >= ops.size())
        throw Error(ErrorCode::InvalidArgument, "a schedule of " + std::to_string(ops.size()) +
                                                    " ranks has no rank " + std::to_string(rank));
    HighWater peak;
    std::uint64_t activations = 0, deferred = 0;
    for (const ScheduleOp& op : ops[rank]) {
        switch (op.kind) {
        case OpKind::Forward:
            activations = std::min<std::uint64_t>(activations + 1, forward_only ? 2 : ~0ull);
            break;
        case OpKind::InputGradient:
            ++deferred;
            [[fallthrough]];
        case OpKind::Backward:
            activations -= activations > 0 ? 1 : 0;
            break;
        case OpKind::WeightGradient:
            deferred -= deferred > 0 ? 1 : 0;
            break;
        }
        peak.activations = std::max(peak.activations, activations);
        peak.deferred = std::max(peak.deferred, deferred);
        peak.both = std::max(peak.both, activations + deferred);
    }
    return peak;
}

Schedule split_backwards(Schedule schedule) {
    for (auto& ops : schedule.ops) {
        std::vector<ScheduleOp> split;
        for (std::size_t i = 0; i < ops.size(); ++i) {
            if (ops[i].kind != OpKind::Backward || (i > 0 && ops[i - 1].with_next)) {
                split.push_back(ops[i]);
                continue;
            }
            split.push_back({OpKind::InputGradient, ops[i].phase, ops[i].micro_batch});
            split.push_back({OpKind::WeightGradient, ops[i].phase, ops[i].micro_batch});
        }
        ops = std::move(split);
    }
    return schedule;
}

Schedule forwards_of(Schedule schedule) {
    schedule.forward_only = true;
    for (auto& ops : schedule.ops) {
        std::erase_if(ops, [](const ScheduleOp& op) { return op.kind != OpKind::Forward; });
        for (ScheduleOp& op : ops)
            op.with_next = false;
    }
    return schedule;
}

std::vector<std::vector<ChunkPlace>> chunk_places(const Schedule& schedule) {
    std::vector<std::vector<ChunkPlace>> places(schedule.num_streams,
                                                std::vector<ChunkPlace>(schedule.num_stages));
    for (std::uint64_t rank = 0; rank < schedule.chunks.size(); ++rank)
        for (std::uint32_t phase = 0; phase < schedule.chunks[rank].size(); ++phase) {
            const ScheduleChunk& chunk = schedule.chunks[rank][phase];
            places[chunk.stream][chunk.stage] = {rank, phase};
        }
    return places;
}

} // namespace bellows
