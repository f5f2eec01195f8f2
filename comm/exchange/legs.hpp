// SPDX-License-Identifier: MIT
#pragma once

// The legs of a hop, in halves: what sends, and what takes the result in, behind the leg's lane job
// even where nothing came. Each hands one recording in, made once per handle and set of tensors;
// which fit is the caller's matter.

#include "exchange_impl.hpp"

namespace bellows {

/// What a hop takes in: the caller's, or the rows of the hop before, as they travel.
struct Tokens {
    TensorView x, ids, weights;
};

void send_tokens(const ExchangeHandlePtr& handle, const Tokens& tokens, LegJob leg);
TimePoint take_tokens(ExchangeHandle::Impl& handle);

/// Of rows by expert, [capacity, hidden]: what send_results() and send_row_gradients() leave out if
/// they are handed results_in_records(). weighted: times their routing weights.
void record_sums(Recording& recording, const ExchangeHandle::Impl& handle,
                 const TensorView& results, bool weighted);
/// d_row_weights: or none.
void record_gradient_sums(Recording& recording, const ExchangeHandle::Impl& handle,
                          const TensorView& d_rows, const TensorView& d_row_weights);

/// results: [capacity, hidden] or results_in_records(). weighted: times their routing weights.
void send_results(const ExchangeHandlePtr& handle, const TensorView& results, bool weighted,
                  LegJob leg);
TimePoint take_results(ExchangeHandle::Impl& handle, const TensorView& out,
                       const CombineOptions& options);

void send_gradients(const ExchangeHandlePtr& handle, const TensorView& d_out, LegJob leg);
TimePoint take_gradients(ExchangeHandle::Impl& handle);

/// d_row_weights: of rows by expert or of each choice of a row's token; or none.
void send_row_gradients(const ExchangeHandlePtr& handle, const TensorView& d_rows,
                        const TensorView& d_row_weights, LegJob leg);
/// d_topk_weights: none if send_row_gradients had none.
TimePoint take_row_gradients(ExchangeHandle::Impl& handle, const TensorView& d_x, bool accumulate,
                             const TensorView& d_topk_weights);

} // namespace bellows
