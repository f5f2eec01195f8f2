// SPDX-License-Identifier: MIT
// The four legs of a hop on the device: what is packed before the bytes move and unpacked after.
// Each recording is made once per handle and set of tensors, and replayed.

#include "legs.hpp"

#include "counts.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/words64.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <array>
#include <utility>

namespace bellows {

namespace {

using Handle = ExchangeHandle::Impl;

/// What the kernels of a leg have in common. `dtype` is that of what they read or write beside
/// records, in memory as aligned as `tensor`, and of the records but where they are wider.
struct Shape {
    Shape(const Handle& handle, const Record& record, DType dtype, BufferView tensor = {})
        : device(handle.exchange.device), grid(handle.exchange.grid()),
          bf16(dtype == DType::BF16 || record.codes()),
          wider(dtype == DType::BF16 && record.dtype == DType::F32),
          wide(bf16 && tensor.offset % 16 == 0 ? 2 : 1),
          units(u32(record.row_bytes / record_unit_bytes())), top_k(u32(config(handle).top_k)),
          record_units(u32(record.bytes / record_unit_bytes())),
          record_words(u32(record.bytes / 4)), hidden_words(u32(record.row_bytes / 4)),
          experts(u32(config(handle).num_experts)), owners(u32(handle.exchange.owners())),
          ranks_per_member(u32(handle.exchange.ranks_per_member)) {}

    static const ExchangeConfig& config(const Handle& handle) { return handle.exchange.config; }
    static std::uint32_t u32(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
    std::uint64_t unit_bytes() const { return bf16 ? 8 * wide : 16; }
    std::uint64_t record_unit_bytes() const { return unit_bytes() * (wider ? 2 : 1); }
    /// Units from a row of a matrix to the next.
    std::uint32_t stride(const TensorView& rows) const {
        return u32(rows.stride[0] * size_of(rows.dtype) / unit_bytes());
    }

    template <class K>
    typename K::Variant variant() const {
        if constexpr (requires { K::Variant::bf16_sums_f32; })
            if (wider)
                return K::Variant::bf16_sums_f32;
        return row_variant<K>(device, bf16);
    }
    /// Returns the width of the tree of a kernel that sums, at the source or before it. Results
    /// that stand apart are summed at the source.
    std::uint32_t tree(const Handle& handle, bool at_source) const {
        return handle.exchange.exact() && (at_source || apart(handle) == 0) ? top_k : 0;
    }
    static std::uint32_t per_choice(const Handle& handle) {
        return handle.exchange.per_choice() ? 1 : 0;
    }
    /// Whether choices' results stand side by side in a record.
    static std::uint32_t apart(const Handle& handle) {
        return handle.exchange.sum_record().rows > 1 ? 1 : 0;
    }

    const Device& device;
    ExchangeGrid grid;
    bool bf16;  ///< or codes, which kernels only move
    bool wider; ///< records, sums of bf16 in f32
    std::uint32_t wide, units, top_k, record_units, record_words, hidden_words, experts, owners,
        ranks_per_member;
};

/// ids.row_count, or memory that is not looked at.
BufferView token_count(const TensorView& ids) {
    return ids.row_count ? ids.row_count : ids.buffer;
}
std::uint32_t has_token_count(const TensorView& ids) {
    return ids.row_count ? 1 : 0;
}

/// x as it travels in the records: quantised there where it enters the exchange, unless it is.
TensorView as_sent(Recording& recording, const Handle& handle, const Record& record,
                   const TensorView& x) {
    if (!record.codes() || handle.before)
        return x;
    const std::uint64_t rows = x.extent[0];
    if (x.dtype != DType::F8E4M3)
        fp8::quantize(recording, x, handle.outgoing_codes(rows));
    return TensorView::contiguous(handle.quantized.view().sub(0, rows * record.row_bytes),
                                  DType::F8E4M3, {rows, record.row_bytes});
}

/// x: the rows of the record, 16 bytes' multiples; ids.row_count is honoured.
void pack_records(Recording& recording, const Handle& handle, const Record& record,
                  const TensorView& x, const TensorView& ids, const TensorView& weights) {
    const Shape shape(handle, record, x.dtype, x.buffer);
    const std::uint64_t tokens = ids.extent[0];
    const bool routing = static_cast<bool>(weights.buffer);
    recording.dispatch(kernels::ExchangePack{.variant = shape.variant<kernels::ExchangePack>(),
                                             .constants = {shape.grid.local_size(), shape.wide,
                                                           shape.grid.spread(shape.units).at_once},
                                             .x = x.buffer,
                                             .topk_ids = ids.buffer,
                                             .token_count = token_count(ids),
                                             .topk_weights = routing ? weights.buffer : ids.buffer,
                                             .slot_to_row = handle.sent_slots(tokens).buffer,
                                             .records = handle.send_records.view(),
                                             .words = handle.send_records.view(),
                                             .tokens = Shape::u32(tokens),
                                             .units = shape.units,
                                             .x_units = shape.stride(x),
                                             .top_k = shape.top_k,
                                             .record_units = shape.record_units,
                                             .record_words = shape.record_words,
                                             .hidden_words = shape.hidden_words,
                                             .experts = shape.experts,
                                             .ranks = shape.owners,
                                             .ranks_per_member = shape.ranks_per_member,
                                             .has_routing = routing ? 1u : 0u,
                                             .has_token_count = has_token_count(ids),
                                             .per_choice = Shape::per_choice(handle)},
                       shape.grid.sources(tokens, shape.units));
}

/// Rows in expert order; ExpertMajor and low latency, which leaves the others as they are.
void gather_rows(Recording& recording, const Handle& handle, const Record& record,
                 const Buffer& rows) {
    const Shape shape(handle, record, record.dtype);
    const bool masked = handle.exchange.masked(); // there is no padding to clear, nor a map of it
    const BufferView slots = handle.slot_to_row.view();
    recording.dispatch(
        kernels::ExchangeGather{.variant = shape.variant<kernels::ExchangeGather>(),
                                .constants = {shape.grid.local_size(), shape.wide,
                                              shape.grid.spread(shape.units).at_once},
                                .records = handle.received.view(),
                                .row_to_slot = masked ? slots : handle.row_to_slot.view(),
                                .slot_to_row = slots,
                                .row_count = masked ? handle.record_count.view()
                                                    : handle.receive_layout().row_count(),
                                .record_count = handle.record_count.view(),
                                .out_rows = rows.view(),
                                .rows = masked ? 0 : Shape::u32(handle.row_to_slot.size() / 4),
                                .num_records = Shape::u32(handle.exchange.most_received()),
                                .units = shape.units,
                                .top_k = shape.top_k,
                                .record_units = shape.record_units},
        shape.grid.gathers(handle.exchange.most_received(), masked ? 0 : handle.capacity,
                           shape.units));
}

/// Whether the device has nothing left to do for the records to return.
bool summed(const Handle& handle, const TensorView& rows, BufferView scalars) {
    return handle.stand_in_records(rows) && !scalars;
}

/// scalars: [most_received, top_k] of the slots, or none. weighted: rows times routing weights.
void reduce_rows(Recording& recording, const Handle& handle, const TensorView& rows,
                 BufferView scalars, bool weighted, ExchangeGrid grid) {
    const bool in_place = handle.stand_in_records(rows);
    const Shape shape(handle, handle.exchange.sum_record(), rows.dtype, rows.buffer);
    const bool by_tokens = handle.exchange.by_tokens();
    const bool own = handle.exchange.sums_own_in_place();
    const BufferView own_records = own ? handle.back_records.view() : handle.returned.view();
    recording.dispatch(
        kernels::ExchangeReduce{
            .variant = shape.variant<kernels::ExchangeReduce>(),
            .constants = {grid.local_size(), shape.wide, shape.tree(handle, /*at_source=*/false),
                          Shape::apart(handle)},
            .rows = rows.buffer,
            .slot_to_row = by_tokens ? handle.slot_ids.view() : handle.slot_to_row.view(),
            .slot_experts = handle.slot_ids.view(),
            .slot_scalars = scalars    ? scalars
                            : weighted ? handle.slot_weights.view()
                                       : handle.slot_scalars.view(),
            .record_count = handle.record_count.view(),
            .records = handle.returned.view(),
            .words = handle.returned.view(),
            .own_range = handle.own_range(),
            .own_records = own_records,
            .own_words = own_records,
            .num_records = Shape::u32(handle.exchange.most_received()),
            .units = in_place ? 0 : shape.units,
            .top_k = shape.top_k,
            .record_units = shape.record_units,
            .record_words = shape.record_words,
            .hidden_words = shape.hidden_words,
            .row_is_record = by_tokens ? 1u : 0u,
            .weighted = weighted ? 1u : 0u,
            .has_scalars = scalars ? 1u : 0u,
            .has_own = own ? 1u : 0u},
        grid.rows(handle.exchange.most_received()));
}

/// The same of gradients. of_rows: of rows by expert or of each choice of a row's token; or none.
void reduce_gradients(Recording& recording, const Handle& handle, const TensorView& rows,
                      const TensorView& of_rows, ExchangeGrid grid) {
    BufferView scalars = of_rows.buffer;
    if (scalars && !handle.exchange.by_tokens()) {
        const ExpertExchange::Impl& exchange = handle.exchange;
        scalars = handle.slot_scalars.view();
        ops::moe_scalars_to_slots(recording, of_rows, handle.receive_layout(),
                                  handle.slot_scalars.tensor(DType::F32, {exchange.most_received(),
                                                                          exchange.config.top_k}));
    }
    reduce_rows(recording, handle, rows, scalars, false, grid);
}

/// Of what the caller records among its own work: as many workgroups as serve.
ExchangeGrid whole_grid(const Handle& handle) {
    return {handle.exchange.device.info().is_cpu, 0};
}

std::uint32_t num_biases(const CombineOptions& options) {
    return options.second_bias.buffer ? 2 : options.bias.buffer ? 1 : 0;
}

/// Where there is none, memory that is not looked at.
BufferView bias_or(const TensorView& bias, const TensorView& otherwise) {
    return bias.buffer ? bias.buffer : otherwise.buffer;
}

/// To as many tokens as there are of this hop's.
void combine_records(Recording& recording, const Handle& handle, const TensorView& out,
                     const CombineOptions& options, const TensorView& scalars) {
    BufferView least_aligned = out.buffer;
    for (const TensorView* bias : {&options.bias, &options.second_bias})
        if (bias->buffer.offset % 16 != 0)
            least_aligned = bias->buffer;
    const Shape shape(handle, handle.exchange.sum_record(), out.dtype, least_aligned);
    recording.dispatch(
        kernels::ExchangeCombine{.variant = shape.variant<kernels::ExchangeCombine>(),
                                 .constants = {shape.grid.local_size(), shape.wide,
                                               shape.tree(handle, /*at_source=*/true),
                                               Shape::per_choice(handle) + Shape::apart(handle)},
                                 .records = handle.back_records.view(),
                                 .words = handle.back_records.view(),
                                 .slot_to_row = handle.sent_slots(out.extent[0]).buffer,
                                 .topk_ids = handle.summed_ids.buffer,
                                 .token_count = token_count(handle.topk_ids),
                                 .first_bias = bias_or(options.bias, out),
                                 .second_bias = bias_or(options.second_bias, out),
                                 .out_tokens = out.buffer,
                                 .scalars =
                                     scalars.buffer ? scalars.buffer : handle.slot_scalars.view(),
                                 .tokens = Shape::u32(out.extent[0]),
                                 .units = shape.units,
                                 .out_units = shape.stride(out),
                                 .top_k = shape.top_k,
                                 .record_units = shape.record_units,
                                 .record_words = shape.record_words,
                                 .hidden_words = shape.hidden_words,
                                 .experts = shape.experts,
                                 .ranks = shape.owners,
                                 .ranks_per_member = shape.ranks_per_member,
                                 .biases = num_biases(options),
                                 .has_scalars = scalars.buffer ? 1u : 0u,
                                 .accumulate = options.accumulate ? 1u : 0u,
                                 .has_token_count = has_token_count(handle.topk_ids)},
        shape.grid.rows(out.extent[0]));
}

/// The recording for these tensors, made by `record` at the first call. On a queue of its own, so
/// that it waits neither behind what computes nor behind another exchange that cannot go on yet.
template <class Record>
Recording& cached(RecordingCache& cache, const Handle& handle, QueueRole role, const char* what,
                  std::vector<BufferView> key, Record record) {
    key.push_back({nullptr, handle.exchange.workgroups, 0});
    if (Recording* found = cache.find(key))
        return *found;
    // The smaller a call, the more the way between two queues weighs.
    if (handle.exchange.low_latency())
        role = QueueRole::Compute;
    auto made = std::make_unique<Recording>(handle.exchange.device, role, handle.name + " " + what);
    record(*made);
    return cache.keep(std::move(key), std::move(made));
}

/// Where nothing is counted, blocks may be of any size.
ops::MoeBlocks uncounted(const ExchangeGrid& grid, std::uint64_t slots) {
    const std::uint64_t size = grid.shared_size();
    return {size, (slots + size - 1) / size};
}

/// rank_ids, spacing: as the kernel's. counts: null if nothing is counted.
void route(Recording& recording, const Handle& handle, const TensorView& ids,
           const Buffer& rank_ids, std::uint64_t spacing, const BlockCounts* counts) {
    const Record record = handle.exchange.token_record();
    const Shape shape(handle, record, record.dtype);
    const Handle* before = handle.before.get();
    const ops::MoeBlocks blocks =
        counts ? counts->blocks : uncounted(shape.grid, ids.extent[0] * ids.extent[1]);
    const std::uint32_t routes = Shape::u32(handle.exchange.routes());
    const BufferView to = rank_ids.view().sub(0, ids.num_bytes());
    recording.dispatch(
        kernels::ExchangeRoute{.constants = {.local_size = shape.grid.shared_size(),
                                             .counters = counts ? routes + shape.experts : 0},
                               .topk_ids = ids.buffer,
                               .token_count = token_count(ids),
                               .origins = before ? before->first_rows() : ids.buffer,
                               .rank_ids = to,
                               .route_counts = counts ? counts->routes : to,
                               .loads = counts ? counts->loads : to,
                               .tokens = Shape::u32(ids.extent[0]),
                               .top_k = shape.top_k,
                               .experts = shape.experts,
                               .ranks = shape.owners,
                               .ranks_per_member = shape.ranks_per_member,
                               .num_origins = Shape::u32(handle.exchange.origins),
                               .spacing = Shape::u32(spacing),
                               .routes = routes,
                               .blocks = Shape::u32(blocks.count),
                               .block_slots = Shape::u32(blocks.slots),
                               .has_token_count = has_token_count(ids),
                               .per_choice = Shape::per_choice(handle)},
        shape.grid.shared(blocks.count));
}

/// The ids by which the hops know the experts: slots, where an exchange has such.
TensorView choose_slots(Recording& recording, const Handle& handle, const TensorView& ids) {
    if (!handle.exchange.translates())
        return ids;
    const std::uint64_t tokens = ids.extent[0], top_k = ids.extent[1];
    const TensorView slots = handle.slots_chosen.tensor(DType::I32, {tokens, top_k});
    const ExpertExchange::Impl& exchange = handle.exchange;
    const ExchangeGrid grid = exchange.grid();
    if (tokens > 0)
        recording.dispatch(
            kernels::ExchangeReplicas{.constants = {.local_size = grid.local_size()},
                                      .topk_ids = ids.buffer,
                                      .replicas = exchange.replica_tables[handle.placement].view(),
                                      .slots = slots.buffer,
                                      .tokens = Shape::u32(tokens),
                                      .top_k = Shape::u32(top_k),
                                      .experts = Shape::u32(exchange.logical_experts),
                                      .source = Shape::u32(exchange.source_position())},
            grid.items(tokens * top_k));
    return slots;
}

/// What a leg ends with: behind its lane job, even where a recording uses nothing that came.
TimePoint submit_behind_leg(const Handle& handle, Recording& recording, const TimePoint& too = {}) {
    return handle.exchange.device.submit(recording, std::array{handle.last_leg, too});
}

void record_dispatch_pack(Recording& recording, const Handle& handle, const Tokens& in) {
    const Record record = handle.exchange.token_record();
    recording.label("DISPATCH");
    const TensorView ids = choose_slots(recording, handle, in.ids);
    const std::uint64_t tokens = ids.extent[0];
    const ops::MoeLayout layout = handle.send_layout(tokens);
    const TensorView rank_ids =
        handle.rank_ids.tensor(DType::I32, {tokens, handle.exchange.config.top_k})
            .with_row_count(ids.row_count);
    const BlockCounts counts(handle, tokens);
    if (tokens > 0)
        route(recording, handle, ids, handle.rank_ids, 0, &counts);
    else
        recording.fill(counts.all, 0);
    recording.copy(counts.all, handle.host_counts.view().sub(0, counts.all.bytes));
    if (tokens == 0)
        return;
    ops::moe_layout(recording, rank_ids, layout, counts.routes, {.counted = true});
    pack_records(recording, handle, record, as_sent(recording, handle, record, in.x), ids,
                 in.weights);
}

/// Low latency: tokens in their order, the same for all ranks, where this rank's own arrive.
void record_tokens(Recording& recording, const Handle& handle, const Tokens& in) {
    const auto& [x, experts, weights] = in;
    const ExpertExchange::Impl& exchange = handle.exchange;
    const Record record = exchange.token_record();
    const Shape shape(handle, record, record.dtype);
    const std::uint64_t tokens = x.extent[0], most = exchange.config.max_tokens;
    const BufferView memory = handle.own_records(handle.received, record);
    recording.label("DISPATCH");
    const TensorView ids = choose_slots(recording, handle, experts);
    recording.dispatch(kernels::ExchangeLabel{.constants = {.local_size = shape.grid.local_size()},
                                              .topk_ids = ids.buffer,
                                              .topk_weights = weights.buffer,
                                              .words = memory,
                                              .tokens = Shape::u32(tokens),
                                              .records = Shape::u32(most),
                                              .top_k = shape.top_k,
                                              .record_words = shape.record_words,
                                              .hidden_words = shape.hidden_words},
                       shape.grid.items(most * shape.top_k));
    if (tokens == 0)
        return;
    if (record.codes())
        fp8::quantize(recording, x, exchange.quantized(memory, tokens, record.bytes));
    else
        ops::copy(recording, x, exchange.plain(memory, record.dtype, tokens, record.bytes));
}

/// The first of the ids that stand in records for experts of this rank.
std::uint32_t first_id(const ExpertExchange::Impl& exchange) {
    const auto position = static_cast<std::uint64_t>(exchange.position);
    return exchange.low_latency() ? Shape::u32(exchange.first_expert_of(position)) : 0;
}

/// Routing of what has come, and where masked rows stand.
void place_masked(Recording& recording, const Handle& handle, const Shape& shape) {
    const ExpertExchange::Impl& exchange = handle.exchange;
    const std::uint64_t experts = exchange.local_experts();
    recording.dispatch(kernels::ExchangePlace{.constants = {.local_size = shape.grid.shared_size()},
                                              .words = handle.received.view(),
                                              .topk_ids = handle.slot_ids.view(),
                                              .topk_weights = handle.slot_weights.view(),
                                              .slot_to_row = handle.slot_to_row.view(),
                                              .counts = handle.counts.view(),
                                              .records = Shape::u32(exchange.most_received()),
                                              .top_k = shape.top_k,
                                              .record_words = shape.record_words,
                                              .hidden_words = shape.hidden_words,
                                              .first = first_id(exchange),
                                              .experts = Shape::u32(experts),
                                              .spacing = Shape::u32(exchange.most_received())},
                       shape.grid.shared(experts + 1));
}

/// The same of other rows; by expert, their weights too.
void place(Recording& recording, const Handle& handle, const Shape& shape) {
    const ExpertExchange::Impl& exchange = handle.exchange;
    const std::uint64_t most = exchange.most_received(), top_k = exchange.config.top_k;
    const TensorView ids = handle.slot_ids.tensor(DType::I32, {most, top_k})
                               .with_row_count(handle.record_count.view().sub(0, 4));
    const TensorView weights = handle.slot_weights.tensor(DType::F32, {most, top_k});
    const bool placed = !exchange.by_tokens();
    const ops::MoeBlocks blocks =
        placed ? ops::moe_blocks(most * top_k) : uncounted(shape.grid, most * top_k);
    recording.dispatch(
        kernels::ExchangeUnpack{
            .constants = {.local_size = shape.grid.shared_size(),
                          .counters = placed ? Shape::u32(exchange.own_experts()) : 0},
            .words = handle.received.view(),
            .record_count = handle.record_count.view(),
            .topk_ids = ids.buffer,
            .topk_weights = weights.buffer,
            .expert_counts = placed ? handle.workspace.view() : ids.buffer,
            .records = Shape::u32(most),
            .top_k = shape.top_k,
            .record_words = shape.record_words,
            .hidden_words = shape.hidden_words,
            .first = first_id(exchange),
            .experts = Shape::u32(exchange.local_experts()),
            .blocks = Shape::u32(blocks.count),
            .block_slots = Shape::u32(blocks.slots)},
        shape.grid.shared(blocks.count));
    if (placed)
        ops::moe_layout(
            recording, ids, handle.receive_layout(), handle.workspace.view(),
            {.counted = true,
             .slot_values = weights,
             .row_values = handle.weights_of_rows.tensor(DType::F32, {handle.capacity})});
}

void record_dispatch_unpack(Recording& recording, const Handle& handle) {
    const ExpertExchange::Impl& exchange = handle.exchange;
    const Record record = exchange.token_record();
    const Shape shape(handle, record, record.dtype);
    recording.label("DISPATCH");
    if (exchange.masked())
        place_masked(recording, handle, shape);
    else
        place(recording, handle, shape);
    if (exchange.low_latency() && handle.tokens > 0)
        // Where what comes back from each rank will stand: beside the above, as nobody waits here.
        route(recording, handle, handle.topk_ids, handle.rank_slot_to_row,
              exchange.config.max_tokens, nullptr);
    if (!exchange.in_records())
        gather_rows(recording, handle, record, handle.rows);
}

} // namespace

void send_tokens(const ExchangeHandlePtr& handle, const Tokens& tokens, LegJob leg) {
    Handle& h = *handle;
    const bool low_latency = h.exchange.low_latency();
    h.topk_ids = h.summed_ids = tokens.ids;
    h.tokens = tokens.ids.extent[0];
    if (h.exchange.translates()) {
        h.exchange.heed_masks();
        h.topk_ids = h.slots_chosen.tensor(DType::I32, {h.tokens, h.exchange.config.top_k});
        if (h.exchange.config.sums != ExchangeSums::ExactPerChoice)
            h.summed_ids = h.topk_ids;
    }
    h.exchange.device.submit(cached(
        h.pack_dispatch, h, QueueRole::AsyncForwardOut, "pack",
        {tokens.x.buffer, tokens.ids.buffer, tokens.weights.buffer, {nullptr, h.placement, 0}},
        [&](Recording& recording) {
            (low_latency ? record_tokens : record_dispatch_pack)(recording, h, tokens);
        }));
    leg.name = h.name + " DISPATCH(F)";
    leg.learn = !low_latency;
    // The lane may look when the handle has the next call's tokens already.
    leg.blocks = blocks_of(h, h.tokens).count;
    post_outbound(handle, std::move(leg));
}

TimePoint take_tokens(Handle& h) {
    const BufferView ids = h.exchange.low_latency() ? h.topk_ids.buffer : BufferView{};
    return submit_behind_leg(h, cached(h.unpack_dispatch, h, QueueRole::AsyncForwardIn, "unpack",
                                       {ids}, [&](Recording& r) { record_dispatch_unpack(r, h); }));
}

void send_results(const ExchangeHandlePtr& handle, const TensorView& results, bool weighted,
                  LegJob leg) {
    Handle& h = *handle;
    const bool sum = !summed(h, results, {}), low_latency = h.exchange.low_latency();
    if (sum || low_latency)
        h.exchange.device.submit(
            cached(h.reduce_forward, h, QueueRole::AsyncForwardOut, "reduce",
                   {results.buffer, {nullptr, weighted, sum}}, [&](Recording& recording) {
                       recording.label("COMBINE");
                       if (sum)
                           reduce_rows(recording, h, results, {}, weighted, h.exchange.grid());
                       if (!low_latency)
                           return;
                       const Record record = h.exchange.sum_record();
                       recording.copy(h.own_records(h.returned, record),
                                      h.own_records(h.back_records, record));
                   }));
    leg.name = h.name + " COMBINE(F)";
    post_inbound(handle, std::move(leg));
}

TimePoint take_results(Handle& h, const TensorView& out, const CombineOptions& options) {
    return submit_behind_leg(h,
                             cached(h.finish_forward, h, QueueRole::AsyncForwardIn,
                                    options.accumulate ? "sum onto" : "sum",
                                    {out.buffer,
                                     h.summed_ids.buffer,
                                     options.bias.buffer,
                                     options.second_bias.buffer,
                                     {nullptr, options.accumulate, 0}},
                                    [&](Recording& recording) {
                                        recording.label("COMBINE");
                                        if (out.extent[0] > 0)
                                            combine_records(recording, h, out, options, {});
                                    }),
                             std::exchange(h.sum_after, {}));
}

void record_sums(Recording& recording, const Handle& handle, const TensorView& results,
                 bool weighted) {
    reduce_rows(recording, handle, results, {}, weighted, whole_grid(handle));
}

void record_gradient_sums(Recording& recording, const Handle& handle, const TensorView& d_rows,
                          const TensorView& d_row_weights) {
    reduce_gradients(recording, handle, d_rows, d_row_weights, whole_grid(handle));
}

void send_gradients(const ExchangeHandlePtr& handle, const TensorView& d_out, LegJob leg) {
    Handle& h = *handle;
    h.exchange.device.submit(
        cached(h.pack_backward, h, QueueRole::AsyncBackwardOut, "pack gradients",
               {d_out.buffer, h.topk_ids.buffer}, [&](Recording& recording) {
                   recording.label("DISPATCH(B)");
                   const Record record = h.exchange.gradient_record();
                   if (d_out.extent[0] > 0)
                       pack_records(recording, h, record, as_sent(recording, h, record, d_out),
                                    h.topk_ids, {});
               }));
    leg.name = h.name + " DISPATCH(B)";
    post_outbound(handle, std::move(leg));
}

TimePoint take_gradients(Handle& h) {
    return submit_behind_leg(
        h, cached(h.unpack_backward, h, QueueRole::AsyncBackwardIn, "unpack gradients", {},
                  [&](Recording& recording) {
                      recording.label("DISPATCH(B)");
                      if (!h.exchange.in_records())
                          gather_rows(recording, h, h.exchange.gradient_record(), h.gradients);
                  }));
}

void send_row_gradients(const ExchangeHandlePtr& handle, const TensorView& d_rows,
                        const TensorView& d_row_weights, LegJob leg) {
    Handle& h = *handle;
    if (!summed(h, d_rows, d_row_weights.buffer))
        h.exchange.device.submit(
            cached(h.reduce_backward, h, QueueRole::AsyncBackwardOut, "reduce gradients",
                   {d_rows.buffer, d_row_weights.buffer}, [&](Recording& recording) {
                       recording.label("COMBINE(B)");
                       reduce_gradients(recording, h, d_rows, d_row_weights, h.exchange.grid());
                   }));
    leg.name = h.name + " COMBINE(B)";
    post_inbound(handle, std::move(leg));
}

TimePoint take_row_gradients(Handle& h, const TensorView& d_x, bool accumulate,
                             const TensorView& d_topk_weights) {
    return submit_behind_leg(
        h, cached(h.finish_backward, h, QueueRole::AsyncBackwardIn, "sum gradients",
                  {d_x.buffer, d_topk_weights.buffer, h.topk_ids.buffer, {nullptr, accumulate, 0}},
                  [&](Recording& recording) {
                      recording.label("COMBINE(B)");
                      if (d_x.extent[0] > 0)
                          combine_records(recording, h, d_x, {.accumulate = accumulate},
                                          d_topk_weights);
                  }));
}

} // namespace bellows
