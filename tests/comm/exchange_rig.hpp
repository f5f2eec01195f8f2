// SPDX-License-Identifier: MIT
#pragma once

// An exchange of a case with plain references, to the bit, for what arrives and what comes back:
// every form in which rows travel and arrive.

#include "exchange_case.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"
#include "support/transport_options.hpp"
#include "verify/reference/compare.hpp"

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/comm/mpi_interop.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace bellows::testing {

/// A received row: the token and, in ExpertMajor, the choice that it is for; token < 0: padding.
struct RowOrigin {
    int rank = 0;
    std::int64_t token = -1;
    std::uint64_t k = 0;
};

inline TransportOptions transport_options(const ExchangeCase& c, Device& device) {
    TransportOptions options = testing::transport_options(device, c.linked);
    options.share_memory = !c.over_mpi;
    return options;
}

class ExchangeRig {
public:
    explicit ExchangeRig(const ExchangeCase& c)
        : c_(c), nodes_(c.ranks_per_node > 0 ? joined(c.ranks_per_node) : nullptr),
          device_(make_device()),
          transport_(open_transport(ranks(), transport_options(c, *device_))),
          thread_(std::make_unique<HostThread>(*device_, "network")),
          exchange_(std::make_unique<ExpertExchange>(*device_, ranks(), *transport_, *thread_,
                                                     config_of(c))),
          handle_(exchange_->create_handle("batch")) {
        for (int rank = 0; rank < world().size(); ++rank)
            inputs_.emplace_back(rank, c);
        x_ = tensor(c.dtype, {mine().tokens, c.hidden}, mine().x);
        ids_ = tensor(DType::I32, {mine().tokens, c.top_k}, mine().ids);
        weights_ = tensor(DType::F32, {mine().tokens, c.top_k}, mine().weights);
        out_ = tensor(c.dtype, {mine().tokens, c.hidden}, {});
        std::vector<float> negative = mine().x;
        for (float& value : negative)
            value = -value;
        d_out_ = tensor(c.dtype, {mine().tokens, c.hidden}, negative);
        d_weights_ = tensor(DType::F32, {mine().tokens, c.top_k}, {});
        place();
    }

    const ExchangeCase& of() const { return c_; }
    World& ranks() const { return nodes_ ? *nodes_ : world(); }
    bool by_tokens() const { return c_.layout == ExchangeLayout::RankMajor; }
    const ExchangeInput& mine() const { return inputs_[static_cast<std::size_t>(world().rank())]; }
    ExchangeHandle& handle() { return *handle_; }

    /// Low latency: masks all these ranks and no others.
    void do_without(const std::set<int>& ranks) {
        for (int rank = 0; rank < world().size(); ++rank)
            if (rank != world().rank())
                ranks.contains(rank) ? exchange_->mask_rank(rank) : exchange_->unmask_rank(rank);
        without_ = ranks;
        rows_.clear();
        places_.clear();
        place();
    }
    /// On rank 0 all others, on the others rank 0.
    static std::set<int> others_than_0() {
        std::set<int> ranks;
        for (int rank = 1; rank < world().size(); ++rank)
            ranks.insert(rank);
        return world().rank() == 0 ? ranks : std::set<int>{0};
    }
    void dispatch() { exchange_->dispatch(*handle_, x_, ids_, weights_).wait(); }
    /// Of what the caller has quantised itself.
    void dispatch_codes() {
        const fp8::Quantized codes = handle_->outgoing_codes(mine().tokens);
        record([&](Recording& r) { quantize(r, x_, codes); });
        exchange_->dispatch(*handle_, codes.codes, ids_, weights_).wait();
    }
    bool gradient_codes_arrived() {
        const fp8::Quantized codes = handle_->outgoing_codes(mine().tokens);
        record([&](Recording& r) { quantize(r, d_out_, codes); });
        exchange_->combine_backward(*handle_, codes.codes).wait();
        return codes_arrived(handle_->quantized_d_results(), -1);
    }
    Device& device() { return *device_; }
    ExpertExchange& exchange() { return *exchange_; }
    Transport& transport() { return *transport_; }
    const TensorView& x() const { return x_; }
    const TensorView& out() const { return out_; }
    const TensorView& ids() const { return ids_; }
    const TensorView& weights() const { return weights_; }

    bool rows_arrived() const {
        return c_.codes ? codes_arrived(handle_->quantized_rows())
                        : values_arrived(handle_->rows());
    }
    bool gradients_arrived() {
        const bool ended = ends([&] { return exchange_->combine_backward(*handle_, d_out_); });
        return ended && (c_.codes ? codes_arrived(handle_->quantized_d_results(), -1)
                                  : values_arrived(handle_->d_results(), -1));
    }
    /// Whether a leg has ended when its time point is reached, even on a rank that gets nothing.
    bool ends(const std::function<TimePoint()>& leg) {
        const double before = exchange_->stats().seconds_waited;
        leg().wait();
        return exchange_->stats().seconds_waited > before;
    }
    bool told() const {
        std::vector<std::uint32_t> counts(exchange_->num_local_experts());
        std::vector<float> weights;
        std::vector<std::int32_t> experts;
        for (const RowOrigin& row : rows_)
            for (std::uint64_t k = 0; k < c_.top_k; ++k) {
                const std::int32_t expert =
                    row.token < 0 || (!by_tokens() && k != row.k) ? -1 : local(row, k);
                experts.push_back(expert);
                if (expert >= 0)
                    ++counts[static_cast<std::size_t>(expert)];
                if (by_tokens() || k == 0)
                    weights.push_back(weight_of(row, by_tokens() ? k : row.k));
            }
        // Rows of RankMajor in low latency stand apart from each other.
        const auto at_places = [&]<class T>(const TensorView& view,
                                            const std::vector<T>& expected) {
            const std::uint64_t each = expected.size() / std::max<std::size_t>(rows_.size(), 1);
            std::vector<T> actual;
            for (const std::uint64_t place : places_) {
                const std::vector<T> row =
                    download<T>(view.buffer.sub(place * each * sizeof(T), each * sizeof(T)), each);
                actual.insert(actual.end(), row.begin(), row.end());
            }
            return actual == expected;
        };
        bool good = true;
        if (!by_tokens() || !c_.low_latency)
            good = whole<std::uint32_t>(handle_->expert_counts()) == counts;
        if (!by_tokens() && !c_.low_latency) {
            std::vector<std::uint32_t> offsets = {0};
            for (const std::uint32_t count : counts)
                offsets.push_back(offsets.back() +
                                  (count + c_.alignment - 1) / c_.alignment * c_.alignment);
            good = good && whole<std::uint32_t>(handle_->expert_offsets()) == offsets;
        }
        if (by_tokens() || !c_.low_latency)
            good = good && at_places(handle_->row_weights(), weights);
        if (by_tokens())
            good = good && at_places(handle_->row_experts(), experts);
        return good;
    }

    /// Rows that come back as they came: every token times the ranks, or experts, that it has.
    bool came_back(const TensorView& results, bool accumulate) {
        write_results(results);
        const bool ended =
            ends([&] { return exchange_->combine(*handle_, results, out_, accumulate); });
        return ended && summed(accumulate ? 2.0f : 1.0f);
    }
    /// With the tokens themselves as biases, and (weighted) times the routing weights.
    bool combined(const TensorView& results, bool weighted, int biases) {
        write_results(results);
        CombineOptions options;
        options.weighted = weighted;
        if (biases > 0)
            options.bias = x_;
        if (biases > 1)
            options.second_bias = x_;
        exchange_->combine(*handle_, results, out_, options).wait();
        return summed(1, weighted, static_cast<float>(biases));
    }
    /// The same where the caller has summed them itself.
    bool sums_came_back(const TensorView& results, bool weighted) {
        write_results(results);
        record([&](Recording& r) { handle_->sum_results(r, results, weighted); });
        exchange_->combine(*handle_, handle_->results(), out_, true).wait();
        exchange_->combine(*handle_, handle_->results(), out_).wait();
        return summed(1, weighted);
    }
    /// As they are, or summed by the caller itself.
    bool gradients_came_back(const TensorView& results, const TensorView& d_row_weights,
                             bool by_caller = false) {
        write_results(results);
        std::vector<float> of_rows;
        for (const RowOrigin& row : rows_)
            for (std::uint64_t k = 0; k < (by_tokens() ? c_.top_k : 1); ++k)
                of_rows.push_back(-2 * weight_of(row, by_tokens() ? k : row.k));
        upload(d_row_weights.buffer, of_rows);
        if (by_caller)
            record([&](Recording& r) { handle_->sum_row_gradients(r, results, d_row_weights); });
        const bool ended = ends([&] {
            return exchange_->dispatch_backward(*handle_, by_caller ? handle_->results() : results,
                                                by_caller ? TensorView{} : d_row_weights, out_,
                                                false, d_weights_);
        });
        std::vector<float> expected = mine().weights;
        for (std::size_t i = 0; i < expected.size(); ++i)
            expected[i] *= mine().ids[i] < 0 ? 0 : -2;
        return ended && summed(1) &&
               download<float>(d_weights_.buffer, expected.size()) == expected;
    }

    /// How often a token of this rank has experts on another node.
    std::uint64_t tokens_to_other_nodes() const {
        const Topology& topology = ranks().topology();
        std::uint64_t count = 0;
        for (std::uint64_t t = 0; t < mine().tokens; ++t) {
            std::set<int> nodes;
            for (std::uint64_t k = 0; k < c_.top_k; ++k)
                if (const std::int32_t id = mine().ids[t * c_.top_k + k]; id >= 0)
                    nodes.insert(
                        topology.node(exchange_->owners(static_cast<std::uint64_t>(id)).front()));
            nodes.erase(ranks().node());
            count += nodes.size();
        }
        return count;
    }

    TensorView caller_rows(DType dtype, std::uint64_t columns) {
        return tensor(dtype, {handle_->capacity(), columns}, {});
    }

private:
    static std::unique_ptr<World> joined(int ranks_per_node) {
        WorldOptions options;
        options.ranks_per_node = ranks_per_node;
        return std::make_unique<World>(join_world(MPI_COMM_WORLD, options));
    }
    static ExchangeConfig config_of(const ExchangeCase& c) {
        ExchangeConfig config;
        config.num_experts = c.experts;
        config.top_k = c.top_k;
        config.hidden = c.hidden;
        config.max_tokens = c.max_tokens;
        config.dtype = c.dtype;
        config.layout = c.layout;
        config.alignment = c.alignment;
        if (c.codes)
            config.token_wire = config.gradient_wire = DType::F8E4M3;
        config.token_scales = c.scales;
        if (c.wide_sums)
            config.sum_wire = DType::F32;
        if (c.exact)
            config.sums = ExchangeSums::Exact;
        if (c.low_latency)
            config.mode = ExchangeMode::LowLatency;
        config.stage_always = c.staged;
        config.piece_bytes = c.staged ? c.piece_bytes : config.piece_bytes;
        return config;
    }

    static void quantize(Recording& recording, const TensorView& x, const fp8::Quantized& codes) {
        if (x.extent[0] > 0)
            fp8::quantize(recording, x, codes);
    }
    /// Hands in what the caller records itself.
    template <class Work>
    void record(const Work& work) {
        recordings_.push_back(
            std::make_unique<Recording>(*device_, QueueRole::Compute, "of the caller"));
        work(*recordings_.back());
        device_->submit(*recordings_.back());
    }

    /// Values as they are stored.
    std::vector<std::byte> stored(DType dtype, const std::vector<float>& values) const {
        std::vector<std::byte> bytes(values.size() * size_of(dtype));
        for (std::size_t i = 0; i < values.size(); ++i) {
            const std::uint16_t half = reference::bf16_bits(values[i]);
            if (dtype == DType::BF16)
                std::memcpy(&bytes[2 * i], &half, 2);
            else
                std::memcpy(&bytes[4 * i], &values[i], 4);
        }
        return bytes;
    }
    template <class T>
    TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents,
                      const std::vector<T>& values) {
        std::uint64_t elements = 1;
        for (const std::uint64_t extent : extents)
            elements *= extent;
        buffers_.push_back(std::make_unique<Buffer>(
            *device_, BufferDesc{.name = "tensor",
                                 .bytes = std::max<std::uint64_t>(elements * size_of(dtype), 16)}));
        if constexpr (std::is_same_v<T, float>) {
            const std::vector<std::byte> bytes = stored(dtype, values);
            upload(buffers_.back()->view(), bytes);
        } else {
            upload(buffers_.back()->view(), values);
        }
        return buffers_.back()->tensor(dtype, extents);
    }
    TensorView tensor(DType dtype, std::initializer_list<std::uint64_t> extents,
                      std::initializer_list<float>) {
        return tensor(dtype, extents, std::vector<float>());
    }
    template <class T>
    void upload(BufferView view, const std::vector<T>& values) {
        if (!values.empty())
            device_->upload(view.sub(0, values.size() * sizeof(T)), std::span(values));
    }
    template <class T>
    std::vector<T> download(BufferView view, std::uint64_t count) const {
        std::vector<T> values(count);
        if (count > 0)
            device_->download(view.sub(0, count * sizeof(T)),
                              std::as_writable_bytes(std::span(values)));
        return values;
    }
    template <class T>
    std::vector<T> whole(const TensorView& tensor) const {
        return download<T>(tensor.buffer, tensor.num_elements());
    }
    /// Where what came for each row stands.
    std::vector<std::uint64_t> arrival_places() const {
        if (c_.layout != ExchangeLayout::ExpertSlots)
            return places_;
        std::vector<std::uint64_t> places;
        for (const std::int32_t slot :
             download<std::int32_t>(handle_->row_slots().buffer, rows_.size()))
            places.push_back(static_cast<std::uint64_t>(slot) / c_.top_k);
        return places;
    }
    /// The rows that are there, without what stands between them.
    std::vector<std::byte> rows_of(const TensorView& view) const {
        const std::uint64_t bytes = view.extent[1] * size_of(view.dtype),
                            step = view.stride[0] * size_of(view.dtype);
        if (rows_.empty())
            return {};
        const std::vector<std::uint64_t> places = arrival_places();
        const auto all = download<std::byte>(
            view.buffer, *std::max_element(places.begin(), places.end()) * step + bytes);
        std::vector<std::byte> dense;
        for (const std::uint64_t row : places)
            dense.insert(dense.end(), all.begin() + static_cast<std::ptrdiff_t>(row * step),
                         all.begin() + static_cast<std::ptrdiff_t>(row * step + bytes));
        return dense;
    }

public:
    /// The values of the rows' tokens, or (exact) what their experts make of them, into a tensor of
    /// this shape.
    void write_results(const TensorView& view) {
        std::vector<float> results = expected_values();
        for (std::size_t row = 0; c_.exact && row < rows_.size(); ++row)
            for (std::uint64_t c = 0; c < c_.hidden && rows_[row].token >= 0; ++c)
                results[row * c_.hidden + c] =
                    made(of(rows_[row]), at(rows_[row]), rows_[row].k, c);
        const std::vector<std::byte> values = stored(view.dtype, results);
        const std::uint64_t bytes = view.extent[1] * size_of(view.dtype),
                            step = view.stride[0] * size_of(view.dtype);
        for (std::size_t row = 0; row < rows_.size(); ++row)
            device_->upload(view.buffer.sub(places_[row] * step, bytes),
                            std::span(values).subspan(row * bytes, bytes));
    }
    bool summed(float times, bool weighted = false, float biases = 0) const {
        std::vector<float> expected = mine().x;
        if (c_.exact)
            return holds(exact_sums(times, weighted || c_.low_latency, biases));
        for (std::uint64_t t = 0; t < mine().tokens; ++t) {
            const float factor = times * copies(t, weighted) + biases;
            for (std::uint64_t c = 0; c < c_.hidden; ++c)
                expected[t * c_.hidden + c] =
                    factor == 0 ? 0 : expected[t * c_.hidden + c] * factor;
        }
        return holds(expected);
    }

private:
    bool holds(const std::vector<float>& out) const {
        const std::vector<std::byte> bytes = stored(c_.dtype, out);
        return download<std::byte>(out_.buffer, bytes.size()) == bytes;
    }
    /// What the expert of a choice makes of an element of a token.
    float made(const ExchangeInput& input, std::uint64_t token, std::uint64_t k,
               std::uint64_t column) const {
        const auto expert = static_cast<float>(input.ids[token * c_.top_k + k]);
        return held(c_.dtype, input.x[token * c_.hidden + column] * (1 + expert / 3));
    }
    /// By the definition, over all experts, whoever has them; times 2: onto the same sums.
    std::vector<float> exact_sums(float times, bool weighted, float biases) const {
        std::vector<float> sums;
        for (std::uint64_t t = 0; t < mine().tokens; ++t)
            for (std::uint64_t c = 0; c < c_.hidden; ++c) {
                const float tree =
                    tree_sum(t, c, weighted, 0, std::bit_ceil(c_.experts)).value_or(0);
                float sum = times > 1 ? held(c_.dtype, 0 + tree) : 0;
                for (float bias = 0; bias < biases; ++bias)
                    sum += mine().x[t * c_.hidden + c];
                sums.push_back(sum + tree);
            }
        return sums;
    }
    /// Over experts first .. first + count; none if the token has none of them.
    std::optional<float> tree_sum(std::uint64_t token, std::uint64_t column, bool weighted,
                                  std::uint64_t first, std::uint64_t count) const {
        if (count > 1) {
            const std::uint64_t half = count / 2;
            const auto low = tree_sum(token, column, weighted, first, half);
            const auto high = tree_sum(token, column, weighted, first + half, half);
            return low && high ? *low + *high : low ? low : high;
        }
        for (std::uint64_t k = 0; k < c_.top_k; ++k)
            if (const std::int32_t id = mine().ids[token * c_.top_k + k];
                id == static_cast<std::int32_t>(first) &&
                !without_.contains(exchange_->owners(first).front()))
                return (weighted ? mine().weights[token * c_.top_k + k] : 1) *
                       made(mine(), token, k, column);
        return std::nullopt;
    }
    /// The tokens, or (-1) the gradients, which are what the tokens are with the other sign.
    std::vector<float> expected_values(float sign = 1) const {
        std::vector<float> values;
        for (const RowOrigin& row : rows_)
            for (std::uint64_t c = 0; c < c_.hidden; ++c)
                values.push_back(row.token < 0 ? 0 : sign * of(row).x[at(row) * c_.hidden + c]);
        return values;
    }
    bool values_arrived(const TensorView& view, float sign = 1) const {
        return rows_of(view) == stored(c_.dtype, expected_values(sign));
    }
    bool codes_arrived(const fp8::Quantized& rows, float sign = 1) const {
        std::vector<std::byte> codes, scales;
        for (const RowOrigin& row : rows_)
            for (std::uint64_t first = 0; first < c_.hidden; first += 128) {
                const std::uint64_t end = std::min(first + 128, c_.hidden);
                float amax = 0;
                for (std::uint64_t c = first; c < end && row.token >= 0; ++c)
                    amax = std::max(amax, std::abs(of(row).x[at(row) * c_.hidden + c]));
                float scale = 0;
                if (row.token >= 0)
                    scale = fp8::block_scale(fp8::Format::E4M3, c_.scales, amax);
                for (std::uint64_t c = first; c < end; ++c)
                    codes.push_back(static_cast<std::byte>(
                        row.token < 0 ? 0
                                      : fp8::encode(fp8::Format::E4M3,
                                                    sign * of(row).x[at(row) * c_.hidden + c] *
                                                        fp8::inverse_scale(c_.scales, scale))));
                const auto* bytes = reinterpret_cast<const std::byte*>(&scale);
                scales.insert(scales.end(), bytes, bytes + 4);
            }
        return rows_of(rows.codes) == codes && rows_of(rows.scales) == scales;
    }
    const ExchangeInput& of(const RowOrigin& row) const {
        return inputs_[static_cast<std::size_t>(row.rank)];
    }
    static std::uint64_t at(const RowOrigin& row) { return static_cast<std::uint64_t>(row.token); }
    /// The local expert of a choice of the row's token, -1 for none.
    std::int32_t local(const RowOrigin& row, std::uint64_t k) const {
        const std::int32_t expert = of(row).ids[at(row) * c_.top_k + k];
        const auto first = static_cast<std::int32_t>(exchange_->first_local_expert());
        const auto count = static_cast<std::int32_t>(exchange_->num_local_experts());
        return expert >= first && expert < first + count ? expert - first : -1;
    }
    /// Masked rows: of a token that chooses an expert twice the first time.
    bool has_row(const RowOrigin& row) const {
        bool first = true;
        for (std::uint64_t k = 0; k < row.k; ++k)
            first = first && local(row, k) != local(row, row.k);
        return first || !c_.low_latency;
    }
    float weight_of(const RowOrigin& row, std::uint64_t k) const {
        return row.token < 0 || local(row, k) < 0 ? 0 : of(row).weights[at(row) * c_.top_k + k];
    }
    /// Rows of a token of this rank, everywhere, or the sum of their weights.
    float copies(std::uint64_t token, bool weighted) const {
        float count = 0;
        std::vector<int> owners;
        for (std::uint64_t k = 0; k < c_.top_k; ++k)
            if (const std::int32_t id = mine().ids[token * c_.top_k + k]; id >= 0) {
                const int owner = exchange_->owners(static_cast<std::uint64_t>(id)).front();
                if (without_.contains(owner))
                    continue;
                const bool known = std::find(owners.begin(), owners.end(), owner) != owners.end();
                if (weighted || (c_.low_latency && !by_tokens()))
                    count += mine().weights[token * c_.top_k + k];
                else
                    count += by_tokens() && known ? 0.0f : 1.0f;
                owners.push_back(owner);
            }
        return count;
    }

    void place() {
        const auto tokens = [&](const auto& each) {
            for (int rank = 0; rank < world().size(); ++rank)
                for (std::uint64_t t = 0;
                     t < inputs_[static_cast<std::size_t>(rank)].tokens && !without_.contains(rank);
                     ++t)
                    each(RowOrigin{rank, static_cast<std::int64_t>(t), 0});
        };
        if (by_tokens()) {
            tokens([&](const RowOrigin& row) {
                for (std::uint64_t k = 0; k < c_.top_k; ++k)
                    if (local(row, k) >= 0) {
                        places_.push_back(c_.low_latency ? static_cast<std::uint64_t>(row.rank) *
                                                                   exchange_->config().max_tokens +
                                                               static_cast<std::uint64_t>(row.token)
                                                         : rows_.size());
                        rows_.push_back(row);
                        return;
                    }
            });
            return;
        }
        for (std::uint64_t e = 0; e < exchange_->num_local_experts(); ++e) {
            std::uint64_t place = c_.low_latency ? e * handle_->spacing() : rows_.size();
            const auto add = [&](const RowOrigin& row) {
                rows_.push_back(row);
                places_.push_back(place++);
            };
            tokens([&](RowOrigin row) {
                for (row.k = 0; row.k < c_.top_k; ++row.k)
                    if (local(row, row.k) == static_cast<std::int32_t>(e) && has_row(row))
                        add(row);
            });
            while (!c_.low_latency && rows_.size() % c_.alignment != 0)
                add({});
        }
    }

    ExchangeCase c_;
    std::unique_ptr<World> nodes_; ///< simulated ones
    std::unique_ptr<Device> device_;
    std::unique_ptr<Transport> transport_;
    std::unique_ptr<HostThread> thread_;
    std::unique_ptr<ExpertExchange> exchange_;
    std::unique_ptr<ExchangeHandle> handle_;
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::vector<std::unique_ptr<Recording>> recordings_;
    std::vector<ExchangeInput> inputs_; ///< of every rank
    std::set<int> without_;             ///< masked ranks
    std::vector<RowOrigin> rows_;
    std::vector<std::uint64_t> places_; ///< of rows_ in tensors
    TensorView x_, ids_, weights_, out_, d_out_, d_weights_;
};

/// A dispatch and a combine, and both gradients, from the caller's memory and from the records'.
inline void check_there_and_back(ExchangeRig& rig) {
    const ExchangeCase& c = rig.of();
    const TensorView results = rig.caller_rows(c.dtype, c.hidden);
    rig.dispatch();
    ALL_RANKS_TRUE(rig.rows_arrived());
    ALL_RANKS_TRUE(rig.told());
    if (!rig.by_tokens()) // first: what others leave is what the caller's sums would be
        ALL_RANKS_TRUE(rig.sums_came_back(results, false));
    ALL_RANKS_TRUE(rig.came_back(results, false));
    if (rig.by_tokens())
        ALL_RANKS_TRUE(rig.came_back(rig.handle().results(), !c.low_latency));
    ALL_RANKS_TRUE(rig.combined(results, false, 2));
    if (c.low_latency)
        return;
    if (!rig.by_tokens() && c.dtype == DType::F32) { // there its sums are exact
        ALL_RANKS_TRUE(rig.sums_came_back(results, true));
        ALL_RANKS_TRUE(rig.combined(results, true, 1));
    }
    const TensorView d_row_weights = rig.caller_rows(DType::F32, rig.by_tokens() ? c.top_k : 1);
    const TensorView d_weights =
        rig.by_tokens() ? d_row_weights : d_row_weights.reshaped({rig.handle().capacity()});
    ALL_RANKS_TRUE(rig.gradients_arrived());
    if (c.layout != ExchangeLayout::ExpertMajor)
        ALL_RANKS_TRUE(rig.rows_arrived()); // they are still there
    if (!rig.by_tokens())
        ALL_RANKS_TRUE(rig.gradients_came_back(results, d_weights, true));
    ALL_RANKS_TRUE(rig.gradients_came_back(results, d_weights));
    if (c.codes) {
        rig.dispatch_codes();
        ALL_RANKS_TRUE(rig.rows_arrived());
        ALL_RANKS_TRUE(rig.gradient_codes_arrived());
    }
    if (rig.by_tokens())
        ALL_RANKS_TRUE(rig.gradients_came_back(rig.handle().results(), d_weights));
}

} // namespace bellows::testing
