// SPDX-License-Identifier: MIT
// A handle: the buffers that it takes, and how callers and legs see them.

#include "exchange_impl.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <iterator>
#include <utility>

namespace bellows {

Recording* RecordingCache::find(const std::vector<BufferView>& key) {
    const auto same = [](const BufferView& a, const BufferView& b) {
        return a.resource == b.resource && a.offset == b.offset && a.bytes == b.bytes;
    };
    for (auto& [kept_key, recording] : kept_)
        if (std::equal(key.begin(), key.end(), kept_key.begin(), kept_key.end(), same))
            return recording.get();
    return nullptr;
}

Recording& RecordingCache::keep(std::vector<BufferView> key, std::unique_ptr<Recording> recording) {
    kept_.emplace_back(std::move(key), std::move(recording));
    return *kept_.back().second;
}

namespace {

/// Where a handle keeps its parts.
struct HandleBuffer {
    HandlePart part;
    Buffer ExchangeHandle::Impl::* buffer;
    const char* what;
    MemoryKind kind = MemoryKind::Device;
    WireMemory ExchangeHandle::Impl::* memory = nullptr; ///< of records that travel
    bool receives = false;                               ///< those
};

const HandleBuffer& buffer_of(HandlePart part) {
    using Handle = ExchangeHandle::Impl;
    static constexpr HandleBuffer kBuffers[] = {
        {HandlePart::SlotsChosen, &Handle::slots_chosen, "slots chosen"},
        {HandlePart::RankSlots, &Handle::rank_slot_to_row, "rank slots"},
        {HandlePart::RankIds, &Handle::rank_ids, "rank ids"},
        {HandlePart::RankCounts, &Handle::rank_counts, "rank counts"},
        {HandlePart::RankOffsets, &Handle::rank_offsets, "rank offsets"},
        {HandlePart::RankRows, &Handle::rank_row_to_slot, "rank rows"},
        {HandlePart::Counts, &Handle::block_counts, "counts"},
        {HandlePart::HostCounts, &Handle::host_counts, "counts", MemoryKind::Readback},
        {HandlePart::Quantized, &Handle::quantized, "quantised"},
        {HandlePart::RecordsToSend, &Handle::send_records, "records to send", MemoryKind::Device,
         &Handle::send_memory},
        {HandlePart::RecordsBack, &Handle::back_records, "records back", MemoryKind::Device,
         &Handle::back_memory, true},
        {HandlePart::RecordCount, &Handle::record_count, "record count", MemoryKind::Upload},
        {HandlePart::Records, &Handle::received, "records", MemoryKind::Device,
         &Handle::received_memory},
        {HandlePart::RecordsToReturn, &Handle::returned, "records to return", MemoryKind::Device,
         &Handle::returned_memory},
        {HandlePart::Rows, &Handle::rows, "rows"},
        {HandlePart::SlotIds, &Handle::slot_ids, "slot ids"},
        {HandlePart::SlotWeights, &Handle::slot_weights, "slot weights"},
        {HandlePart::SlotScalars, &Handle::slot_scalars, "slot scalars"},
        {HandlePart::Workspace, &Handle::workspace, "workspace"},
        {HandlePart::ExpertCounts, &Handle::counts, "expert counts"},
        {HandlePart::Slots, &Handle::slot_to_row, "slots"},
        {HandlePart::ExpertOffsets, &Handle::offsets, "expert offsets"},
        {HandlePart::RowsPlaced, &Handle::row_to_slot, "rows placed"},
        {HandlePart::RowWeights, &Handle::weights_of_rows, "row weights"},
    };
    return *std::ranges::find(kBuffers, part, &HandleBuffer::part);
}

/// A matrix at the start of `memory` whose rows, of whole 16 bytes, stand row_stride bytes from
/// each other.
TensorView strided_rows(BufferView memory, DType dtype, std::uint64_t rows, std::uint64_t columns,
                        std::uint64_t row_stride) {
    TensorView view;
    const std::uint64_t row_bytes = round_up(columns * size_of(dtype), 16);
    view.buffer = memory.sub(0, rows == 0 ? 0 : (rows - 1) * row_stride + row_bytes);
    view.dtype = dtype;
    view.rank = 2;
    view.extent = {rows, columns};
    view.stride = {row_stride / size_of(dtype), 1};
    return view;
}

} // namespace

std::uint64_t ExpertExchange::handle_bytes() const {
    return exchange_handle_bytes(impl_->world.topology(), impl_->world.rank(), impl_->whole);
}

fp8::Quantized ExpertExchange::Impl::quantized(BufferView memory, std::uint64_t rows,
                                               std::uint64_t row_stride) const {
    const std::uint64_t codes = fp8::codes_bytes({1, config.hidden});
    const std::uint64_t blocks = fp8::scales_shape(recipe(), {1, config.hidden}).extent[1];
    return {.codes = strided_rows(memory, DType::F8E4M3, rows, config.hidden, row_stride),
            .scales = strided_rows(memory.sub(codes, memory.bytes - codes), DType::F32, rows,
                                   blocks, row_stride),
            .recipe = recipe(),
            .group_offsets = {}};
}

TensorView ExpertExchange::Impl::plain(BufferView memory, DType dtype, std::uint64_t rows,
                                       std::uint64_t row_stride) const {
    return strided_rows(memory, dtype, rows, config.hidden, row_stride);
}

ExchangeHandle::Impl::Impl(std::shared_ptr<ExpertExchange::Impl> of, std::string handle_name)
    : owner(std::move(of)), exchange(*owner), name(std::move(handle_name)),
      before(exchange.before ? std::make_shared<Impl>(exchange.before, name + " between nodes")
                             : nullptr),
      lane(exchange.thread.add_lane(name)), capacity(exchange.capacity()) {
    const std::uint64_t members = exchange.group_size();
    for (const HandleSize& size : handle_sizes(exchange)) {
        const HandleBuffer& made = buffer_of(size.part);
        this->*made.buffer =
            made.memory != nullptr
                ? make_wire(made.what, size.bytes, made.receives, this->*made.memory)
                : Buffer(exchange.device, {.name = name + " " + made.what,
                                           .bytes = size.bytes,
                                           .kind = made.kind,
                                           .category = MemoryCategory::Communication});
    }
    blank_received.resize(members);
    blank_back.resize(members);
    // What is as large as what arrives, or as what the hop before brings.
    const auto declare = [&](Buffer& buffer, const char* what, MemoryKind kind,
                             MemoryCategory category) {
        buffer = Buffer::declare(exchange.device,
                                 {.name = name + " " + what, .kind = kind, .category = category});
    };
    const auto declare_wire = [&](Buffer& buffer, const char* what) {
        declare(buffer, what, exchange.zero_copy() ? MemoryKind::Readback : MemoryKind::Device,
                MemoryCategory::Communication);
    };
    const auto declare_rows = [&](Buffer& buffer, const char* what) {
        declare(buffer, what, MemoryKind::Device, MemoryCategory::Activations);
    };
    if (before) {
        declare_wire(send_records, "records to send");
        declare_wire(back_records, "records back");
    }
    if (exchange.low_latency()) {
        const auto words = record_count.mapped_as<std::uint32_t>();
        words[0] = static_cast<std::uint32_t>(exchange.most_received());
        sent_rows.assign(members, exchange.config.max_tokens);
        received_rows = sent_rows;
    } else {
        declare_wire(received, "records received");
        declare_wire(returned, "records to return");
        if (!exchange.in_records())
            declare_rows(rows, "rows");
    }
    if (exchange.in_records())
        declare_wire(gradients, "result gradients");
    else
        declare_rows(gradients, "result gradients");
}

Buffer ExchangeHandle::Impl::make_staging(const char* what, std::uint64_t bytes) const {
    return Buffer(exchange.device, {.name = name + what,
                                    .bytes = bytes,
                                    .kind = MemoryKind::Readback,
                                    .category = MemoryCategory::Communication});
}

Buffer ExchangeHandle::Impl::make_wire(const std::string& what, std::uint64_t bytes, bool receives,
                                       WireMemory& memory) const {
    const std::string of = name + " " + what;
    if (exchange.link != nullptr) {
        memory.link = exchange.link->allocate(bytes, exchange.gone);
        return memory.link->make_buffer(exchange.device, of);
    }
    // What is sent from memory that the node's ranks share is not copied to be sent.
    if (exchange.zero_copy() && !receives)
        memory.shared = exchange.share(bytes);
    if (memory.shared)
        return Buffer::import_host(exchange.device, memory.shared.bytes(), of);
    return Buffer(exchange.device,
                  {.name = of,
                   .bytes = bytes,
                   .kind = exchange.zero_copy() ? MemoryKind::Readback : MemoryKind::Device,
                   .category = MemoryCategory::Communication});
}

BufferView ExchangeHandle::Impl::own_records(const Buffer& all, const Record& record) const {
    const std::uint64_t bytes = exchange.config.max_tokens * record.bytes;
    return all.view().sub(static_cast<std::uint64_t>(exchange.position) * bytes, bytes);
}

TensorView ExchangeHandle::Impl::sent_slots(std::uint64_t num_tokens) const {
    return rank_slot_to_row.tensor(DType::I32, {num_tokens, exchange.config.top_k});
}

ops::MoeLayout ExchangeHandle::Impl::send_layout(std::uint64_t num_tokens) const {
    const ExchangeConfig& c = exchange.config;
    const std::uint64_t routes = exchange.routes();
    return {.counts = rank_counts.tensor(DType::U32, {routes}),
            .offsets = rank_offsets.tensor(DType::U32, {routes + 1}),
            .row_to_slot = rank_row_to_slot.tensor(
                DType::I32, {ops::moe_capacity(num_tokens, c.top_k, routes, 1)}),
            .slot_to_row = sent_slots(num_tokens),
            .alignment = 1};
}

ops::MoeLayout ExchangeHandle::Impl::receive_layout() const {
    const std::uint64_t local = exchange.own_experts();
    const ExchangeConfig& c = exchange.config;
    const std::uint64_t most_in = exchange.most_received();
    return {.counts = counts.tensor(DType::U32, {local}),
            .offsets = offsets.tensor(DType::U32, {local + 1}),
            .row_to_slot = row_to_slot.tensor(
                DType::I32, {ops::moe_capacity(most_in, c.top_k, local, c.alignment)}),
            .slot_to_row = slot_to_row.tensor(DType::I32, {most_in, c.top_k}),
            .alignment = c.alignment};
}

BufferView ExchangeHandle::Impl::received_count() const {
    return exchange.masked() ? BufferView{} : record_count.view().sub(0, 4); // see expert_counts()
}

BufferView ExchangeHandle::Impl::row_count() const {
    return exchange.masked() || exchange.by_tokens() ? received_count()
                                                     : receive_layout().row_count();
}

BufferView ExchangeHandle::Impl::arrived_count() const {
    return exchange.in_records() ? received_count() : row_count();
}

BufferView ExchangeHandle::Impl::first_rows() const {
    const std::uint64_t members = exchange.group_size();
    return record_count.view().sub(record_count.size() - members * 4, members * 4);
}

namespace {

TensorView rows_in_records(const ExchangeHandle::Impl& handle, const Buffer& memory,
                           const Record& record) {
    const std::uint64_t columns = record.row_bytes / size_of(record.dtype);
    return strided_rows(memory.view(), record.dtype, handle.most_arriving(), columns, record.bytes)
        .with_row_count(handle.arrived_count());
}

} // namespace

TensorView ExchangeHandle::Impl::tokens_in_records() const {
    return rows_in_records(*this, received, exchange.token_record());
}

TensorView ExchangeHandle::Impl::gradients_in_records() const {
    return rows_in_records(*this, gradients, exchange.gradient_record());
}

TensorView ExchangeHandle::Impl::row_experts() const {
    return slot_ids.tensor(DType::I32, {capacity, exchange.config.top_k})
        .with_row_count(row_count());
}

TensorView ExchangeHandle::Impl::row_weights() const {
    const TensorView weights =
        exchange.by_tokens() ? slot_weights.tensor(DType::F32, {capacity, exchange.config.top_k})
                             : weights_of_rows.tensor(DType::F32, {capacity});
    return weights.with_row_count(row_count());
}

TensorView ExchangeHandle::Impl::results_in_records() const {
    const Record record = exchange.sum_record();
    return exchange.plain(returned.view(), record.dtype, exchange.most_received(), record.bytes)
        .with_row_count(received_count());
}

fp8::Quantized ExchangeHandle::Impl::quantized_rows(const Buffer& memory,
                                                    const Record& record) const {
    fp8::Quantized arrived = exchange.quantized(
        memory.view(), most_arriving(), exchange.in_records() ? record.bytes : record.row_bytes);
    arrived.codes.row_count = arrived.scales.row_count = arrived_count();
    return arrived;
}

TensorView ExchangeHandle::Impl::plain_rows(const Buffer& memory, const Record& record) const {
    return exchange
        .plain(memory.view(), record.dtype, most_arriving(),
               exchange.in_records() ? record.bytes : record.row_bytes)
        .with_row_count(arrived_count());
}

fp8::Quantized ExchangeHandle::Impl::outgoing_codes(std::uint64_t num_tokens) const {
    return exchange.quantized(quantized.view(), num_tokens, exchange.quantized_bytes());
}

namespace {

bool same_rows(const TensorView& a, const TensorView& b) {
    return a.buffer.resource == b.buffer.resource && a.buffer.offset == b.buffer.offset &&
           a.dtype == b.dtype && a.rank == b.rank && a.extent == b.extent && a.stride == b.stride;
}

} // namespace

bool ExchangeHandle::Impl::stand_quantized(const TensorView& tensor) const {
    return same_rows(tensor, outgoing_codes(tensor.extent[0]).codes);
}

bool ExchangeHandle::Impl::stand_in_records(const TensorView& tensor) const {
    return same_rows(tensor, results_in_records());
}

void ExchangeHandle::Impl::finish() {
    if (before)
        before->finish();
    try {
        last_sent.wait(exchange.config.timeout + std::chrono::seconds(10));
    } catch (...) {
        // Whoever had to know of a failure has been told.
    }
    for (RecordingCache* cache :
         {&pack_dispatch, &pack_backward, &unpack_dispatch, &unpack_backward, &reduce_forward,
          &reduce_backward, &finish_forward, &finish_backward})
        cache->clear();
}

ExchangeHandle::ExchangeHandle(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
}

// The recordings end on this thread, which may wait; the lane's jobs keep the rest.
ExchangeHandle::~ExchangeHandle() {
    impl_->finish();
}

TensorView ExchangeHandle::add_row_tensor(std::string name, DType dtype, std::uint64_t columns,
                                          MemoryCategory category) {
    require(!impl_->dispatched, impl_->name, "row tensors are added before the first dispatch");
    require(!impl_->exchange.low_latency(), impl_->name,
            "a low-latency handle's rows are there at all times: make a tensor of capacity() rows");
    ExchangeHandle::Impl::RowTensor tensor;
    tensor.buffer = std::make_unique<Buffer>(Buffer::declare(
        impl_->exchange.device, {.name = impl_->name + " " + name, .category = category}));
    tensor.row_bytes = columns * size_of(dtype);
    impl_->row_tensors.push_back(std::move(tensor));
    return impl_->row_tensors.back()
        .buffer->tensor(dtype, {impl_->capacity, columns})
        .with_row_count(impl_->row_count());
}

TensorView ExchangeHandle::rows() const {
    const ExpertExchange::Impl& exchange = impl_->exchange;
    if (exchange.quantizes())
        return quantized_rows().codes;
    return impl_->plain_rows(exchange.in_records() ? impl_->received : impl_->rows,
                             exchange.token_record());
}

fp8::Quantized ExchangeHandle::quantized_rows() const {
    const ExpertExchange::Impl& exchange = impl_->exchange;
    require(exchange.quantizes(), impl_->name,
            "tokens travel as they are: set ExchangeConfig::token_wire to F8E4M3 for codes");
    return impl_->quantized_rows(exchange.in_records() ? impl_->received : impl_->rows,
                                 exchange.token_record());
}

fp8::Quantized ExchangeHandle::outgoing_codes(std::uint64_t tokens) const {
    const ExpertExchange::Impl& exchange = impl_->exchange;
    require(!exchange.low_latency(), impl_->name,
            "low-latency tokens are quantised where they are sent from");
    require(exchange.quantizes() || exchange.quantizes_gradients(), impl_->name,
            "rows travel as they are: set ExchangeConfig::token_wire or gradient_wire to F8E4M3 "
            "for codes");
    require(tokens <= exchange.whole.max_tokens, impl_->name,
            std::to_string(tokens) + " tokens, but max_tokens is " +
                std::to_string(exchange.whole.max_tokens));
    return impl_->first_hop().outgoing_codes(tokens);
}

TensorView ExchangeHandle::results() const {
    return impl_->results_in_records();
}

TensorView ExchangeHandle::d_results() const {
    require(!impl_->exchange.low_latency(), impl_->name, "low-latency mode goes forward only");
    if (impl_->exchange.quantizes_gradients())
        return quantized_d_results().codes;
    return impl_->plain_rows(impl_->gradients, impl_->exchange.gradient_record());
}

fp8::Quantized ExchangeHandle::quantized_d_results() const {
    require(!impl_->exchange.low_latency(), impl_->name, "low-latency mode goes forward only");
    require(impl_->exchange.quantizes_gradients(), impl_->name,
            "gradients travel as they are: set ExchangeConfig::gradient_wire to F8E4M3 for codes");
    return impl_->quantized_rows(impl_->gradients, impl_->exchange.gradient_record());
}

std::uint64_t ExchangeHandle::spacing() const {
    require(impl_->exchange.masked(), impl_->name, "only masked rows have a spacing");
    return impl_->exchange.most_received();
}

TensorView ExchangeHandle::row_weights() const {
    require(!impl_->exchange.masked(), impl_->name,
            "low-latency combine applies the weights itself");
    return impl_->row_weights();
}

TensorView ExchangeHandle::row_experts() const {
    require(impl_->exchange.by_tokens(), impl_->name, "rows by expert: see expert_offsets()");
    return impl_->row_experts();
}

TensorView ExchangeHandle::row_slots() const {
    require(impl_->exchange.config.layout == ExchangeLayout::ExpertSlots, impl_->name,
            "only rows of ExpertSlots are found by slots");
    return impl_->receive_layout().row_to_slot.with_row_count(impl_->row_count());
}

TensorView ExchangeHandle::expert_offsets() const {
    require(!impl_->exchange.by_tokens() && !impl_->exchange.low_latency(), impl_->name,
            impl_->exchange.by_tokens()
                ? "rows of RankMajor do not stand by expert: see row_experts()"
                : "low-latency rows of expert e begin at e * spacing()");
    // On a rank without experts the layout has a group all the same, which stays empty.
    return impl_->offsets.tensor(DType::U32, {impl_->exchange.local_experts() + 1});
}

TensorView ExchangeHandle::expert_counts() const {
    const ExpertExchange::Impl& exchange = impl_->exchange;
    const std::uint64_t local = exchange.local_experts();
    if (!exchange.by_tokens())
        return impl_->counts.tensor(DType::U32, {local});
    require(!exchange.low_latency(), impl_->name,
            "nobody has counted low-latency rows by source rank: see row_experts()");
    return TensorView::contiguous(impl_->record_count.view().sub(kHandleCountsAt, local * 4),
                                  DType::U32, {local});
}

std::uint64_t ExchangeHandle::capacity() const {
    return impl_->capacity;
}

void ExchangeHandle::use_placement(std::uint64_t number) {
    const std::uint64_t tables = impl_->exchange.whole.placements;
    require(number < tables, impl_->name,
            "placement " + std::to_string(number) + ", but ExchangeConfig::placements is " +
                std::to_string(tables));
    impl_->first_hop().placement = number;
}

} // namespace bellows
