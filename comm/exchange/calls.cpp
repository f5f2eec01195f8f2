// SPDX-License-Identifier: MIT
// The calls of an exchange: what they refuse, which legs of which hop they hand in, and their hook
// form. What a rank refuses or cannot do, all ranks hear of.

#include "legs.hpp"
#include "world/fail_together.hpp"

#include <bellows/base/error.hpp>

#include <functional>
#include <utility>

namespace bellows {

namespace {

using Handle = ExchangeHandle::Impl;

/// Every call but a dispatch needs what a dispatch has left.
void require_filled(const Handle& handle) {
    require(!handle.half_open, handle.name, "the hook of its last call has not been called yet");
    require(handle.filled, handle.name, "there was no dispatch, or its hook was given up");
}

void require_backward(const Handle& handle) {
    require(!handle.exchange.low_latency(), handle.name, "low-latency mode goes forward only");
    require_filled(handle);
}

void check_tensor(const Handle& handle, const char* what, const TensorView& tensor, DType dtype,
                  std::uint64_t rows, std::uint64_t columns) {
    const bool fits = tensor.rank == 2 && tensor.dtype == dtype && tensor.extent[0] == rows &&
                      tensor.extent[1] == columns && tensor.is_contiguous();
    require(fits, handle.name,
            what + std::string(" must be a contiguous ") + to_string(dtype) + " [" +
                std::to_string(rows) + ", " + std::to_string(columns) + "]");
}

/// x of dispatch or d_out of combine_backward: of the caller, or, where they travel so, codes in
/// their place.
void check_tokens(const Handle& handle, const char* what, const TensorView& tensor, bool as_codes,
                  std::uint64_t tokens) {
    if (as_codes && !handle.exchange.low_latency() && tensor.extent[0] == tokens &&
        handle.first_hop().stand_quantized(tensor))
        return;
    check_tensor(handle, what, tensor, handle.exchange.config.dtype, tokens,
                 handle.exchange.config.hidden);
}

/// results of combine or gradients of dispatch: of the caller, or where records are sent from.
void check_rows(const Handle& handle, const char* what, const TensorView& tensor) {
    const ExchangeConfig& c = handle.exchange.config;
    if (!handle.stand_in_records(tensor))
        check_tensor(handle, what, tensor, c.dtype, handle.capacity, c.hidden);
}

// Calls in halves. The handle is the last hop's; what it does first is the hop's before, if any.

const ExchangeHandlePtr& first_hop(const ExchangeHandlePtr& handle) {
    return handle->before ? handle->before : handle;
}

/// Of the hops' jobs: two, however many hops there are, drawn when nothing is refused any more, so
/// that all ranks draw alike, whichever form they use and wherever their groups lie.
struct Sequences {
    explicit Sequences(const Handle& handle)
        : first(handle.exchange.transport.next_sequence()),
          second(handle.exchange.transport.next_sequence()) {}
    std::uint64_t first, second;
};

Sequences begin_dispatch(const ExchangeHandlePtr& handle, const Tokens& tokens,
                         std::shared_ptr<ReceiveGate> gate) {
    Handle& h = *handle;
    const ExchangeConfig& c = h.exchange.whole;
    require(!h.half_open, h.name, "the hook of its last call has not been called yet");
    const std::uint64_t count = tokens.x.extent[0];
    require(count <= c.max_tokens, h.name,
            std::to_string(count) + " tokens, but max_tokens is " + std::to_string(c.max_tokens) +
                ": a dispatch is not cut into pieces, so set ExchangeConfig::max_tokens on every "
                "rank to the most that any of them hands in");
    check_tokens(h, "x", tokens.x, h.exchange.quantizes(), count);
    check_tensor(h, "topk_ids", tokens.ids, DType::I32, count, c.top_k);
    check_tensor(h, "topk_weights", tokens.weights, DType::F32, count, c.top_k);
    require(!tokens.ids.row_count, h.name,
            "topk_ids has a row_count, but the caller says how many tokens it hands in by the "
            "extents: hand in as many rows of it");
    const Sequences sequences(h);
    h.dispatched = true;
    h.filled = false;
    send_tokens(first_hop(handle), tokens,
                {.sequence = sequences.first,
                 .gate = std::move(gate),
                 .next = h.before ? handle : nullptr});
    return sequences;
}

/// From the hop between nodes to the one inside; nothing where there is one hop.
void pass_tokens_on(const ExchangeHandlePtr& handle, Sequences sequences) {
    if (!handle->before)
        return;
    Handle& before = *handle->before;
    take_tokens(before);
    send_tokens(handle, {before.tokens_in_records(), before.row_experts(), before.row_weights()},
                {.sequence = sequences.second});
}

TimePoint end_dispatch(Handle& h) {
    const TimePoint point = take_tokens(h);
    h.filled = true;
    return point;
}

Sequences begin_combine(const ExchangeHandlePtr& handle, const TensorView& results,
                        const TensorView& out, const CombineOptions& options,
                        std::shared_ptr<ReceiveGate> gate) {
    Handle& h = *handle;
    const ExchangeConfig& c = h.exchange.whole;
    require_filled(h);
    check_rows(h, "results", results);
    const std::uint64_t tokens = first_hop(handle)->tokens;
    check_tensor(h, "out", out, c.dtype, tokens, c.hidden);
    require(!options.second_bias.buffer || options.bias.buffer, h.name,
            "there is a second bias and no first one");
    require(!options.weighted || !h.exchange.by_tokens(), h.name,
            "rows of RankMajor come back as the caller has summed them: weighted is for rows by "
            "expert");
    require(!options.weighted || !h.stand_in_records(results), h.name,
            "results() are sums already: weighted is for sum_results()");
    for (const TensorView* bias : {&options.bias, &options.second_bias})
        if (bias->buffer)
            check_tensor(h, "bias", *bias, c.dtype, tokens, c.hidden);
    const Sequences sequences(h);
    send_results(handle, results, options.weighted || h.exchange.masked(),
                 {.sequence = sequences.first, .gate = std::move(gate)});
    return sequences;
}

/// And back.
void pass_sums_on(const ExchangeHandlePtr& handle, Sequences sequences) {
    if (!handle->before)
        return;
    const TensorView sums = handle->before->results_in_records();
    take_results(*handle, sums, {});
    send_results(handle->before, sums, false, {.sequence = sequences.second});
}

} // namespace

// ---- Calls -----------------------------------------------------------------------------------

/// The calls' common frame: what a rank refuses or cannot do, all ranks hear of.
template <class Call>
auto ExpertExchange::Impl::together(const ExchangeHandle& handle, const Call& call) {
    return fail_together(world.control(), group_size(), [&] {
        const ExchangeHandlePtr& pointer = handle.impl_;
        require(&pointer->exchange == this, pointer->name,
                "the handle belongs to another exchange than " + config.name);
        return call(pointer);
    });
}

TimePoint ExpertExchange::dispatch(ExchangeHandle& handle, const TensorView& x,
                                   const TensorView& topk_ids, const TensorView& topk_weights) {
    return impl_->together(handle, [&](const ExchangeHandlePtr& h) {
        const Sequences sequences = begin_dispatch(h, {x, topk_ids, topk_weights}, nullptr);
        pass_tokens_on(h, sequences);
        return end_dispatch(*h);
    });
}

TimePoint ExpertExchange::combine(ExchangeHandle& handle, const TensorView& results,
                                  const TensorView& out, bool accumulate) {
    return combine(handle, results, out, CombineOptions{.accumulate = accumulate});
}

TimePoint ExpertExchange::combine(ExchangeHandle& handle, const TensorView& results,
                                  const TensorView& out, const CombineOptions& options) {
    return impl_->together(handle, [&](const ExchangeHandlePtr& h) {
        const Sequences sequences = begin_combine(h, results, out, options, nullptr);
        pass_sums_on(h, sequences);
        return take_results(*first_hop(h), out, options);
    });
}

TimePoint ExpertExchange::combine_backward(ExchangeHandle& handle, const TensorView& d_out) {
    return impl_->together(handle, [&](const ExchangeHandlePtr& pointer) {
        Handle& h = *pointer;
        const ExchangeHandlePtr& first = first_hop(pointer);
        require_backward(h);
        check_tokens(h, "d_out", d_out, h.exchange.quantizes_gradients(), first->tokens);
        const Sequences sequences(h);
        send_gradients(first, d_out, {.sequence = sequences.first});
        if (h.before) {
            take_gradients(*h.before);
            send_gradients(pointer, h.before->gradients_in_records(),
                           {.sequence = sequences.second});
        }
        return take_gradients(h);
    });
}

TimePoint ExpertExchange::dispatch_backward(ExchangeHandle& handle, const TensorView& d_rows,
                                            const TensorView& d_row_weights, const TensorView& d_x,
                                            bool accumulate, const TensorView& d_topk_weights) {
    return impl_->together(handle, [&](const ExchangeHandlePtr& pointer) {
        Handle& h = *pointer;
        const std::uint64_t tokens = first_hop(pointer)->tokens;
        const ExchangeConfig& c = impl_->whole;
        require_backward(h);
        const bool summed = !h.exchange.by_tokens() && h.stand_in_records(d_rows);
        require(!summed || !d_row_weights.buffer, h.name,
                "results() hold the gradients of weights already: d_row_weights is for "
                "sum_row_gradients()");
        const bool scalars =
            static_cast<bool>(summed ? d_topk_weights.buffer : d_row_weights.buffer);
        check_rows(h, "d_rows", d_rows);
        if (scalars && h.exchange.by_tokens())
            check_tensor(h, "d_row_weights", d_row_weights, DType::F32, h.capacity, c.top_k);
        check_tensor(h, "d_x", d_x, c.dtype, tokens, c.hidden);
        if (scalars)
            check_tensor(h, "d_topk_weights", d_topk_weights, DType::F32, tokens, c.top_k);
        const TensorView d_weights = scalars ? d_topk_weights : TensorView{};
        const Sequences sequences(h);
        send_row_gradients(pointer, d_rows, d_row_weights, {.sequence = sequences.first});
        if (!h.before)
            return take_row_gradients(h, d_x, accumulate, d_weights);
        const TensorView sums = h.before->results_in_records();
        const TensorView of_slots =
            scalars ? h.before->slot_scalars.tensor(DType::F32, {h.before->capacity, c.top_k})
                    : TensorView{};
        take_row_gradients(h, sums, false, of_slots);
        send_row_gradients(h.before, sums, of_slots, {.sequence = sequences.second});
        return take_row_gradients(*h.before, d_x, accumulate, d_weights);
    });
}

// ---- What callers record themselves -----------------------------------------------------------

namespace {

void require_by_expert(const Handle& handle) {
    require(!handle.exchange.by_tokens(), handle.name,
            "rows of RankMajor are summed by the caller: it writes results() itself");
}

} // namespace

void ExchangeHandle::sum_results(Recording& recording, const TensorView& results,
                                 bool weighted) const {
    const Impl& h = *impl_;
    require_by_expert(h);
    check_tensor(h, "results", results, h.exchange.config.dtype, h.capacity,
                 h.exchange.config.hidden);
    record_sums(recording, h, results, weighted || h.exchange.masked());
}

void ExchangeHandle::sum_row_gradients(Recording& recording, const TensorView& d_rows,
                                       const TensorView& d_row_weights) const {
    const Impl& h = *impl_;
    require(!h.exchange.low_latency(), h.name, "low-latency mode goes forward only");
    require_by_expert(h);
    check_tensor(h, "d_rows", d_rows, h.exchange.config.dtype, h.capacity,
                 h.exchange.config.hidden);
    record_gradient_sums(recording, h, d_rows, d_row_weights);
}

// ---- The hook form ----------------------------------------------------------------------------

struct ExchangeHook::Impl {
    ExchangeHandlePtr handle;
    std::shared_ptr<ReceiveGate> gate;
    std::function<void()> pass_on; ///< what other ranks wait for
    std::function<TimePoint()> finish;
    bool called = false;

    template <class Call>
    auto together(const Call& part) const {
        const ExpertExchange::Impl& exchange = handle->exchange;
        return fail_together(exchange.world.control(), exchange.group_size(), part);
    }

    Impl(ExchangeHandlePtr of, std::shared_ptr<ReceiveGate> closed, std::function<void()> on,
         std::function<TimePoint()> end)
        : handle(std::move(of)), gate(std::move(closed)), pass_on(std::move(on)),
          finish(std::move(end)) {
        handle->half_open = true;
    }
    ~Impl() {
        open();
        try {
            if (!called)
                together(pass_on);
        } catch (...) {
            // The other ranks have been told, or wait no longer than their time limit.
        }
    }
    void open() noexcept {
        handle->half_open = false;
        gate->open = true;
    }
    TimePoint call() {
        open();
        called = true;
        return together([this] {
            pass_on();
            return finish();
        });
    }
};

namespace {

/// In serial mode nothing that is handed in between the halves could run: it is open at once.
std::shared_ptr<ReceiveGate> make_gate(const Device& device) {
    auto gate = std::make_shared<ReceiveGate>();
    gate->open = device.options().sync == SyncMode::Serial;
    return gate;
}

} // namespace

ExchangeHook ExpertExchange::dispatch_send(ExchangeHandle& handle, const TensorView& x,
                                           const TensorView& topk_ids,
                                           const TensorView& topk_weights) {
    return impl_->together(handle, [&](const ExchangeHandlePtr& h) {
        auto gate = make_gate(impl_->device);
        const Sequences sequences = begin_dispatch(h, {x, topk_ids, topk_weights}, gate);
        return ExchangeHook(std::make_unique<ExchangeHook::Impl>(
            h, std::move(gate), [h, sequences] { pass_tokens_on(h, sequences); },
            [h] { return end_dispatch(*h); }));
    });
}

ExchangeHook ExpertExchange::combine_send(ExchangeHandle& handle, const TensorView& results,
                                          const TensorView& out, bool accumulate) {
    return combine_send(handle, results, out, CombineOptions{.accumulate = accumulate});
}

ExchangeHook ExpertExchange::combine_send(ExchangeHandle& handle, const TensorView& results,
                                          const TensorView& out, const CombineOptions& options) {
    return impl_->together(handle, [&](const ExchangeHandlePtr& h) {
        auto gate = make_gate(impl_->device);
        const Sequences sequences = begin_combine(h, results, out, options, gate);
        return ExchangeHook(std::make_unique<ExchangeHook::Impl>(
            h, std::move(gate), [h, sequences] { pass_sums_on(h, sequences); },
            [h, out, options] { return take_results(*first_hop(h), out, options); }));
    });
}

ExchangeHook::ExchangeHook(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
}
ExchangeHook::ExchangeHook(ExchangeHook&&) noexcept = default;
ExchangeHook& ExchangeHook::operator=(ExchangeHook&&) noexcept = default;
ExchangeHook::~ExchangeHook() = default;

TimePoint ExchangeHook::operator()() {
    if (!impl_)
        throw Error(ErrorCode::InvalidArgument, "the hook of an exchange is called once");
    return std::unique_ptr<Impl>(std::move(impl_))->call();
}

} // namespace bellows
