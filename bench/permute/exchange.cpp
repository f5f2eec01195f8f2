// SPDX-License-Identifier: MIT
// The kernels of the expert exchange (comm/exchange/legs.cpp), on one rank that receives what it
// has packed for all: as many records as a rank of an evenly loaded group does.
#include "permute/permutation.hpp"

#include "comm/exchange/grid.hpp"

#include <bellows/engine/words64.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::bench {

namespace {

struct Exchange : Permutation {
    explicit Exchange(const Permutation& p);

    void route(Recording& r) const;
    void pack(Recording& r, BufferView into) const;
    void unpack(Recording& r, const TensorView& to_ids, const TensorView& to_weights) const;
    void gather(Recording& r, const TensorView& into) const;
    void reduce(Recording& r, BufferView into) const;
    void combine(Recording& r, const TensorView& into, const TensorView& scalars) const;

    BufferView make_records() const { return data.bytes(most_records * record_bytes); }
    TensorView make_rows() const {
        return data.empty(
            act, {ops::moe_capacity(shape.tokens, shape.top_k, local_experts, kRowAlignment),
                  shape.hidden});
    }
    TensorView record_scalars(DType dtype) const {
        return data.empty(dtype, {most_records, shape.top_k});
    }

    template <class K>
    typename K::Variant variant() const {
        return row_variant<K>(data.device(), act == DType::BF16);
    }
    std::uint64_t units() const { return shape.hidden / 4 / wide; }
    static std::uint32_t u32(std::uint64_t value) { return static_cast<std::uint32_t>(value); }

    /// Where the record of the slot's token for the slot's rank stands.
    std::uint64_t record_of(std::uint64_t slot, const std::vector<double>& row_of_slot) const;
    std::uint64_t rank_of(std::uint64_t slot) const {
        return static_cast<std::uint64_t>(chosen[slot]) / local_experts;
    }
    double local_expert(std::uint64_t slot) const {
        return chosen[slot] - static_cast<double>(rank_of(slot) * local_experts);
    }
    std::vector<std::uint64_t> sampled_slots() const;
    /// How many of the token's slots stand in the record of `slot`.
    double share_of(std::uint64_t slot) const;
    TensorView hidden_of(BufferView all, std::uint64_t record) const {
        return TensorView::contiguous(all.sub(record * record_bytes, hidden_bytes), act,
                                      {1, shape.hidden});
    }
    TensorView words_of(BufferView all, std::uint64_t record, DType dtype) const {
        return TensorView::contiguous(
            all.sub(record * record_bytes + hidden_bytes, 8 * shape.top_k), dtype,
            {2 * shape.top_k});
    }
    double records_bytes() const { return static_cast<double>(num_records * hidden_bytes); }
    double routing_bytes() const { return static_cast<double>(num_records * 8 * shape.top_k); }

    ExchangeGrid grid;
    std::uint32_t wide; ///< fours of elements that kernels move at once
    std::uint64_t local_experts, hidden_bytes, record_bytes, most_records, num_records = 0;
    TensorView rank_ids;
    ops::MoeLayout sent, received;
    BufferView records; ///< as packed and received
    TensorView record_ids, record_weights;
    TensorView rows;                                ///< in expert order
    BufferView returned;                            ///< reduced records
    BufferView sent_counts, loads, received_counts; ///< of each block of slots
};

Exchange::Exchange(const Permutation& p)
    : Permutation(p), grid{data.device().info().is_cpu, 0}, wide(p.act == DType::BF16 ? 2 : 1),
      local_experts(shape.experts / kExchangeRanks), hidden_bytes(shape.hidden * size_of(act)),
      record_bytes((hidden_bytes + 8 * shape.top_k + 15) / 16 * 16),
      most_records(shape.tokens * std::min(shape.top_k, kExchangeRanks)),
      rank_ids(data.empty(DType::I32, {shape.tokens, shape.top_k})),
      sent(layout(shape.tokens, kExchangeRanks, 1)),
      received(layout(most_records, local_experts, kRowAlignment)), records(make_records()),
      record_ids(record_scalars(DType::I32).with_row_count(sent.row_count())),
      record_weights(record_scalars(DType::F32)), rows(make_rows()), returned(make_records()),
      sent_counts(layout_scratch(shape.tokens, kExchangeRanks)),
      loads(layout_scratch(shape.tokens, shape.experts)),
      received_counts(layout_scratch(most_records, local_experts)) {
    run([&](Recording& r) {
        route(r);
        ops::moe_layout(r, rank_ids, sent, sent_counts, {.counted = true});
        pack(r, records);
        unpack(r, record_ids, record_weights);
        ops::moe_layout(r, record_ids, received, received_counts, {.counted = true});
        gather(r, rows);
        reduce(r, returned);
    });
    num_records = static_cast<std::uint64_t>(data.read(sent.offsets).back());
}

void Exchange::route(Recording& r) const {
    const ops::MoeBlocks blocks = ops::moe_blocks(shape.tokens * shape.top_k);
    r.dispatch(
        kernels::ExchangeRoute{.constants = {.local_size = grid.shared_size(),
                                             .counters = u32(kExchangeRanks + shape.experts)},
                               .topk_ids = ids.buffer,
                               .token_count = ids.buffer,
                               .origins = ids.buffer,
                               .rank_ids = rank_ids.buffer,
                               .route_counts = sent_counts,
                               .loads = loads,
                               .tokens = u32(shape.tokens),
                               .top_k = u32(shape.top_k),
                               .experts = u32(shape.experts),
                               .ranks = u32(kExchangeRanks),
                               .ranks_per_member = 1,
                               .num_origins = 1,
                               .routes = u32(kExchangeRanks),
                               .blocks = u32(blocks.count),
                               .block_slots = u32(blocks.slots)},
        grid.shared(blocks.count));
}

void Exchange::pack(Recording& r, BufferView into) const {
    r.dispatch(
        kernels::ExchangePack{.variant = variant<kernels::ExchangePack>(),
                              .constants = {grid.local_size(), wide, grid.spread(units()).at_once},
                              .x = x.buffer,
                              .topk_ids = ids.buffer,
                              .token_count = ids.buffer,
                              .topk_weights = weights.buffer,
                              .slot_to_row = sent.slot_to_row.buffer,
                              .records = into,
                              .words = into,
                              .tokens = u32(shape.tokens),
                              .units = u32(shape.hidden / 4 / wide),
                              .x_units = u32(shape.hidden / 4 / wide),
                              .top_k = u32(shape.top_k),
                              .record_units = u32(record_bytes / (4 * size_of(act)) / wide),
                              .record_words = u32(record_bytes / 4),
                              .hidden_words = u32(hidden_bytes / 4),
                              .experts = u32(shape.experts),
                              .ranks = u32(kExchangeRanks),
                              .ranks_per_member = 1,
                              .has_routing = 1},
        grid.sources(shape.tokens, units()));
}

void Exchange::unpack(Recording& r, const TensorView& to_ids, const TensorView& to_weights) const {
    const ops::MoeBlocks blocks = ops::moe_blocks(most_records * shape.top_k);
    r.dispatch(kernels::ExchangeUnpack{.constants = {.local_size = grid.shared_size(),
                                                     .counters = u32(local_experts)},
                                       .words = records,
                                       .record_count = sent.row_count(),
                                       .topk_ids = to_ids.buffer,
                                       .topk_weights = to_weights.buffer,
                                       .expert_counts = received_counts,
                                       .records = u32(most_records),
                                       .top_k = u32(shape.top_k),
                                       .record_words = u32(record_bytes / 4),
                                       .hidden_words = u32(hidden_bytes / 4),
                                       .first = 0,
                                       .experts = u32(local_experts),
                                       .blocks = u32(blocks.count),
                                       .block_slots = u32(blocks.slots)},
               grid.shared(blocks.count));
}

void Exchange::gather(Recording& r, const TensorView& into) const {
    r.dispatch(
        kernels::ExchangeGather{
            .variant = variant<kernels::ExchangeGather>(),
            .constants = {grid.local_size(), wide, grid.spread(units()).at_once},
            .records = records,
            .row_to_slot = received.row_to_slot.buffer,
            .slot_to_row = received.slot_to_row.buffer,
            .row_count = received.row_count(),
            .record_count = sent.row_count(),
            .out_rows = into.buffer,
            .rows = u32(into.extent[0]),
            .num_records = u32(most_records),
            .units = u32(shape.hidden / 4 / wide),
            .top_k = u32(shape.top_k),
            .record_units = u32(record_bytes / (4 * size_of(act)) / wide)},
        grid.gathers(most_records, into.extent[0], units()));
}

void Exchange::reduce(Recording& r, BufferView into) const {
    r.dispatch(
        kernels::ExchangeReduce{.variant = variant<kernels::ExchangeReduce>(),
                                .constants = {grid.local_size(), wide},
                                .rows = rows.buffer,
                                .slot_to_row = received.slot_to_row.buffer,
                                .slot_experts = received.slot_to_row.buffer,
                                .slot_scalars = record_weights.buffer,
                                .record_count = sent.row_count(),
                                .records = into,
                                .words = into,
                                .own_range = ids.buffer,
                                .own_records = into,
                                .own_words = into,
                                .num_records = u32(most_records),
                                .units = u32(shape.hidden / 4 / wide),
                                .top_k = u32(shape.top_k),
                                .record_units = u32(record_bytes / (4 * size_of(act)) / wide),
                                .record_words = u32(record_bytes / 4),
                                .hidden_words = u32(hidden_bytes / 4),
                                .has_scalars = 1},
        grid.rows(most_records));
}

void Exchange::combine(Recording& r, const TensorView& into, const TensorView& scalars) const {
    r.dispatch(
        kernels::ExchangeCombine{.variant = variant<kernels::ExchangeCombine>(),
                                 .constants = {grid.local_size(), wide},
                                 .records = returned,
                                 .words = returned,
                                 .slot_to_row = sent.slot_to_row.buffer,
                                 .topk_ids = ids.buffer,
                                 .token_count = ids.buffer,
                                 .first_bias = into.buffer,
                                 .second_bias = into.buffer,
                                 .out_tokens = into.buffer,
                                 .scalars = scalars.buffer,
                                 .tokens = u32(shape.tokens),
                                 .units = u32(shape.hidden / 4 / wide),
                                 .out_units = u32(shape.hidden / 4 / wide),
                                 .top_k = u32(shape.top_k),
                                 .record_units = u32(record_bytes / (4 * size_of(act)) / wide),
                                 .record_words = u32(record_bytes / 4),
                                 .hidden_words = u32(hidden_bytes / 4),
                                 .experts = u32(shape.experts),
                                 .ranks = u32(kExchangeRanks),
                                 .ranks_per_member = 1,
                                 .biases = 0,
                                 .has_scalars = 1,
                                 .accumulate = 0},
        grid.rows(shape.tokens));
}

std::vector<std::uint64_t> Exchange::sampled_slots() const {
    std::vector<std::uint64_t> slots;
    for (const std::uint64_t t : samples(shape.tokens))
        for (std::uint64_t k = 0; k < shape.top_k; ++k)
            slots.push_back(t * shape.top_k + k);
    return slots;
}

std::uint64_t Exchange::record_of(std::uint64_t slot,
                                  const std::vector<double>& row_of_slot) const {
    std::uint64_t first = slot / shape.top_k * shape.top_k;
    while (rank_of(first) != rank_of(slot))
        ++first;
    return static_cast<std::uint64_t>(row_of_slot[first]);
}

double Exchange::share_of(std::uint64_t slot) const {
    const std::uint64_t first = slot / shape.top_k * shape.top_k;
    double share = 0;
    for (std::uint64_t other = first; other < first + shape.top_k; ++other)
        share += rank_of(other) == rank_of(slot) ? 1 : 0;
    return share;
}

/// Calls `check(slot, record)` for the slots of some tokens until it finds something wrong.
std::string
check_slots(const Exchange& e,
            const std::function<std::string(std::uint64_t slot, std::uint64_t record)>& check) {
    const auto rows = e.data.read(e.sent.slot_to_row);
    for (const std::uint64_t slot : e.sampled_slots())
        if (const std::string wrong = check(slot, e.record_of(slot, rows)); !wrong.empty())
            return wrong;
    return "";
}

} // namespace

Workload exchange_pack(const Permutation& p) {
    const Exchange e(p);
    const BufferView packed = e.make_records();
    const auto check = [=](std::uint64_t slot, std::uint64_t record) {
        const std::uint64_t k = slot % e.shape.top_k;
        const auto ids = e.data.read(e.words_of(packed, record, DType::I32)),
                   floats = e.data.read(e.words_of(packed, record, DType::F32));
        return e.compare_row("x", e.hidden_of(packed, record), 0, 1, slot / e.shape.top_k) +
               compare("id", slot, ids[k], e.local_expert(slot), 0) +
               compare("weight", slot, floats[e.shape.top_k + k], e.factors[slot], 0);
    };
    return {[=](Recording& r) { e.pack(r, packed); }, [=] { return check_slots(e, check); },
            bytes_of({e.x, e.ids, e.weights}) + e.records_bytes() + e.routing_bytes(), 0};
}

Workload exchange_unpack(const Permutation& p) {
    const Exchange e(p);
    const TensorView ids = e.record_scalars(DType::I32), weights = e.record_scalars(DType::F32);
    const auto verify = [=] {
        const auto got_ids = e.data.read(ids), got_weights = e.data.read(weights);
        return check_slots(e, [&](std::uint64_t slot, std::uint64_t record) {
            const std::uint64_t at = record * e.shape.top_k + slot % e.shape.top_k;
            return compare("id", at, got_ids[at], e.local_expert(slot), 0) +
                   compare("weight", at, got_weights[at], e.factors[slot], 0);
        });
    };
    return {[=](Recording& r) { e.unpack(r, ids, weights); }, verify, 2 * e.routing_bytes(), 0};
}

Workload exchange_gather(const Permutation& p) {
    const Exchange e(p);
    const TensorView rows = e.make_rows();
    const auto verify = [=] {
        const auto map = e.data.read(e.received.slot_to_row);
        return check_slots(e, [&](std::uint64_t slot, std::uint64_t record) {
            const double row = map[record * e.shape.top_k + slot % e.shape.top_k];
            return e.compare_row("row", rows, static_cast<std::uint64_t>(row), 1,
                                 slot / e.shape.top_k);
        });
    };
    return {[=](Recording& r) { e.gather(r, rows); }, verify,
            e.records_bytes() + e.row_bytes(e.received), 0};
}

Workload exchange_reduce(const Permutation& p) {
    const Exchange e(p);
    const BufferView reduced = e.make_records();
    const auto check = [=](std::uint64_t slot, std::uint64_t record) {
        const auto scalars = e.data.read(e.words_of(reduced, record, DType::F32));
        return e.compare_row("sum", e.hidden_of(reduced, record), 0, e.share_of(slot),
                             slot / e.shape.top_k) +
               compare("scalar", slot, scalars[slot % e.shape.top_k], e.factors[slot], 0);
    };
    return {[=](Recording& r) { e.reduce(r, reduced); }, [=] { return check_slots(e, check); },
            e.slot_bytes() + e.records_bytes(), 0};
}

Workload exchange_combine(const Permutation& p) {
    const Exchange e(p);
    const TensorView y = e.data.empty(e.act, {e.shape.tokens, e.shape.hidden}),
                     scalars = e.data.empty(DType::F32, {e.shape.tokens, e.shape.top_k});
    const auto verify = [=] {
        const auto got = e.data.read(scalars);
        return check_slots(e, [&](std::uint64_t slot, std::uint64_t) {
            const std::uint64_t token = slot / e.shape.top_k;
            return e.compare_row("y", y, token, static_cast<double>(e.shape.top_k), token) +
                   compare("scalar", slot, got[slot], e.factors[slot], 0);
        });
    };
    return {[=](Recording& r) { e.combine(r, y, scalars); }, verify,
            e.records_bytes() + bytes_of({y, scalars}), 0};
}

} // namespace bellows::bench
