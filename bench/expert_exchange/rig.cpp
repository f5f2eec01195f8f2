// SPDX-License-Identifier: MIT
#include "expert_exchange/rig.hpp"

#include "app/trace_file.hpp"
#include "ranks/timing.hpp"
#include "verify/reference/compare.hpp"

#include <bellows/fp8/quantize.hpp>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <set>

namespace bellows::bench {

namespace {

/// More elements of a tensor are checked in samples.
constexpr std::uint64_t kMostChecked = std::uint64_t{1} << 24;

std::unique_ptr<Device> make_device(const ExchangeOptions& options, int rank) {
    DeviceOptions device = DeviceOptions::from_environment({});
    device.trace = options.trace || options.beside;
    if (!options.devices.empty())
        device.select = options.devices[static_cast<std::size_t>(rank) % options.devices.size()];
    return Device::create(device);
}

ExchangeConfig config_of(const ExchangeOptions& options) {
    ExchangeConfig config;
    config.num_experts = options.shape.experts;
    config.top_k = options.shape.top_k;
    config.hidden = options.shape.hidden;
    config.max_tokens = options.shape.tokens;
    config.dtype = options.shape.dtype;
    if (options.shape.codes)
        config.token_wire = DType::F8E4M3;
    if (options.shape.low_latency)
        config.mode = ExchangeMode::LowLatency;
    if (options.shape.by_rank)
        config.layout = ExchangeLayout::RankMajor;
    config.sum_wire = options.shape.sum_dtype;
    if (options.shape.exact_sums)
        config.sums = ExchangeSums::Exact;
    config.by_node = !options.flat;
    config.workgroups = options.workgroups;
    if (options.piece_kib > 0)
        config.piece_bytes = options.piece_kib << 10;
    config.timeout = kTimeLimit;
    return config;
}

template <class T>
void fill(Device& device, const TensorView& view, const std::vector<T>& values) {
    if (!values.empty())
        device.upload(view.buffer.sub(0, values.size() * sizeof(T)), std::span(values));
}

std::string is_not(const std::string& what, double actual, double expected) {
    char text[80];
    std::snprintf(text, sizeof text, " is %.9g, expected %.9g", actual, expected);
    return what + text;
}

std::string name_of(const RowSource& source, std::uint64_t row) {
    const std::string token =
        "token " + std::to_string(source.token) + " of rank " + std::to_string(source.rank);
    return source.expert < 0 ? token
                             : "row " + std::to_string(row) + " (expert " +
                                   std::to_string(source.expert) + ", " + token + ")";
}

/// Whether a row is one of the samples: each step-th, and where experts begin and end.
bool is_sample(const std::vector<RowSource>& rows, std::uint64_t row, std::uint64_t step) {
    return row % step == 0 || row + 1 == rows.size() || rows[row - 1].expert != rows[row].expert ||
           rows[row + 1].expert != rows[row].expert;
}

} // namespace

ExchangeRig::ExchangeRig(World& world, const ExchangeOptions& options)
    : shape_(options.shape), rank_(world.rank()), device_(make_device(options, rank_)),
      transport_(
          open_transport(world, {.device = device_.get(), .device_link = options.device_link})),
      thread_(std::make_unique<HostThread>(*device_, "network")),
      exchange_(std::make_unique<ExpertExchange>(*device_, world, *transport_, *thread_,
                                                 config_of(options))),
      handle_(exchange_->create_handle("batch")), routing_(shape_, rank_),
      rows_((shape_.by_rank ? expected_tokens : expected_rows)(
          shape_, exchange_->first_local_expert(), exchange_->num_local_experts())),
      data_(std::make_unique<OpData>(*device_)) {
    const std::uint64_t tokens = shape_.tokens_of(rank_);
    const auto empty = [&](DType dtype, std::uint64_t columns) {
        return data_->empty(dtype, {shape_.tokens, columns}).rows(0, tokens);
    };
    x_ = empty(shape_.dtype, shape_.hidden);
    out_ = empty(shape_.dtype, shape_.hidden);
    d_x_ = empty(shape_.dtype, shape_.hidden);
    ids_ = empty(DType::I32, shape_.top_k);
    weights_ = empty(DType::F32, shape_.top_k);
    d_weights_ = empty(DType::F32, shape_.top_k);
    std::vector<float> x;
    x.reserve(tokens * shape_.hidden);
    for (std::uint64_t token = 0; token < tokens; ++token) {
        tokens_.push_back({-1, rank_, token, 0, times_summed(token)});
        const std::vector<float> values = token_values(shape_, rank_, token);
        x.insert(x.end(), values.begin(), values.end());
    }
    if (shape_.dtype == DType::F32) {
        fill(*device_, x_, x);
    } else {
        std::vector<std::uint16_t> bits(x.size());
        std::transform(x.begin(), x.end(), bits.begin(), reference::bf16_bits);
        fill(*device_, x_, bits);
    }
    if (masked())
        results_ = data_->empty(shape_.dtype, {handle_->capacity(), shape_.hidden});
    else if (shape_.by_rank)
        results_ = handle_->results();
    else if (shape_.codes)
        results_ = handle_->add_row_tensor("results", shape_.dtype, shape_.hidden);
    else
        results_ = handle_->rows();
    fill(*device_, ids_, routing_.ids);
    fill(*device_, weights_, routing_.weights);
}

ExchangeRig::~ExchangeRig() = default;

float ExchangeRig::times_summed(std::uint64_t token) const {
    if (masked()) {
        const auto first =
            routing_.weights.begin() + static_cast<std::ptrdiff_t>(token * shape_.top_k);
        return std::accumulate(first, first + static_cast<std::ptrdiff_t>(shape_.top_k), 0.0f);
    }
    if (!shape_.by_rank)
        return static_cast<float>(shape_.top_k);
    std::set<int> owners;
    for (std::uint64_t k = 0; k < shape_.top_k; ++k)
        owners.insert(owner(static_cast<std::uint64_t>(routing_.ids[token * shape_.top_k + k])));
    return static_cast<float>(owners.size());
}

std::string ExchangeRig::device_link() const {
    const std::string name(transport_->device_link_name());
    return name.empty() ? "none: " + transport_->why_no_device_link() : name;
}

void ExchangeRig::wait_idle() {
    device_->wait_idle(kTimeLimit);
}

void ExchangeRig::write_trace(World& world, const std::string& path,
                              const std::function<void()>& once) {
    for (int i = 0; i < 3; ++i) { // the last of some that follow each other
        world.control().barrier(kTimeLimit, "a traced repeat");
        device_->take_trace();
        once();
        wait_idle();
    }
    bellows::write_trace(path, device_->take_trace(), world);
}

void ExchangeRig::dispatch() {
    exchange_->dispatch(*handle_, x_, ids_, weights_).wait(kTimeLimit);
}

void ExchangeRig::combine() {
    exchange_->combine(*handle_, results_, out_).wait(kTimeLimit);
}

void ExchangeRig::dispatch_around(const std::function<TimePoint()>& between) {
    ExchangeHook hook = exchange_->dispatch_send(*handle_, x_, ids_, weights_);
    const TimePoint meanwhile = between();
    hook().wait(kTimeLimit);
    meanwhile.wait(kTimeLimit);
}

void ExchangeRig::combine_around(const std::function<TimePoint()>& between) {
    ExchangeHook hook = exchange_->combine_send(*handle_, results_, out_);
    const TimePoint meanwhile = between();
    hook().wait(kTimeLimit);
    meanwhile.wait(kTimeLimit);
}

void ExchangeRig::combine_backward() {
    exchange_->combine_backward(*handle_, x_).wait(kTimeLimit);
}

void ExchangeRig::dispatch_backward() {
    exchange_
        ->dispatch_backward(*handle_, shape_.by_rank ? results_ : handle_->d_results(),
                            handle_->row_weights(), d_x_, false, d_weights_)
        .wait(kTimeLimit);
}

void ExchangeRig::fill_results() {
    if (rows_.empty() || (!shape_.by_rank && !shape_.codes && !shape_.low_latency))
        return;
    const std::uint64_t there = shape_.low_latency ? handle_->capacity() : rows_.size();
    Recording recording(*device_, QueueRole::Compute, "results");
    if (shape_.codes)
        fp8::dequantize(recording, handle_->quantized_rows(), results_);
    else
        ops::copy(recording, handle_->rows().rows(0, there), results_.rows(0, there));
    device_->submit(recording).wait(kTimeLimit);
}

std::vector<float> ExchangeRig::read(const TensorView& rows, std::uint64_t first,
                                     std::uint64_t count) const {
    const std::uint64_t step = rows.stride[0] * size_of(rows.dtype),
                        row_bytes = rows.extent[1] * size_of(rows.dtype);
    std::vector<std::byte> bytes((count - 1) * step + row_bytes);
    device_->download(rows.rows(first, count).buffer.sub(0, bytes.size()), std::span(bytes));
    std::vector<float> values;
    for (std::uint64_t row = 0; row < count; ++row)
        for (std::uint64_t at = row * step; at < row * step + row_bytes;
             at += size_of(rows.dtype)) {
            float value = 0;
            std::uint16_t half = 0;
            if (rows.dtype == DType::F32)
                std::memcpy(&value, &bytes[at], sizeof value);
            else if (rows.dtype == DType::BF16)
                std::memcpy(&half, &bytes[at], sizeof half);
            else
                value = fp8::decode(fp8::Format::E4M3, static_cast<std::uint8_t>(bytes[at]));
            values.push_back(rows.dtype == DType::BF16 ? reference::from_bf16(half) : value);
        }
    return values;
}

std::vector<float> ExchangeRig::read_codes(std::uint64_t first, std::uint64_t count) const {
    const fp8::Quantized rows = handle_->quantized_rows();
    std::vector<float> values = read(rows.codes, first, count);
    const std::vector<float> scales = read(rows.scales, first, count);
    const std::uint64_t blocks = (shape_.hidden + 127) / 128;
    for (std::size_t i = 0; i < values.size(); ++i)
        values[i] *= scales[i / shape_.hidden * blocks + i % shape_.hidden / 128];
    return values;
}

std::vector<std::uint64_t> ExchangeRig::places() const {
    std::vector<std::uint64_t> places;
    for (std::size_t row = 0; row < rows_.size(); ++row) {
        const RowSource& source = rows_[row];
        if (!shape_.low_latency)
            places.push_back(row);
        else if (shape_.by_rank)
            places.push_back(static_cast<std::uint64_t>(source.rank) * shape_.tokens +
                             source.token);
        else if (row > 0 && rows_[row - 1].expert == source.expert)
            places.push_back(places.back() + 1);
        else
            places.push_back(
                (static_cast<std::uint64_t>(source.expert) - exchange_->first_local_expert()) *
                handle_->spacing());
    }
    return places;
}

std::string ExchangeRig::wrong_layout() const {
    if (shape_.low_latency && shape_.by_rank)
        return "";
    const std::uint64_t experts = exchange_->num_local_experts();
    std::vector<std::uint32_t> expected(experts), counts(experts), offsets(experts + 1);
    for (int rank = 0; rank < static_cast<int>(shape_.ranks); ++rank)
        for (const std::int32_t id : Routing(shape_, rank).ids) {
            const auto local = static_cast<std::uint64_t>(id) - exchange_->first_local_expert();
            if (local < experts)
                ++expected[local];
        }
    const auto counts_at = handle_->expert_counts().buffer.sub(0, experts * 4);
    device_->download(counts_at, std::as_writable_bytes(std::span(counts)));
    for (std::uint64_t e = 0; e < experts; ++e)
        if (counts[e] != expected[e])
            return is_not("expert_counts[" + std::to_string(e) + "]", counts[e], expected[e]);
    if (shape_.by_rank || shape_.low_latency)
        return "";
    const auto offsets_at = handle_->expert_offsets().buffer.sub(0, (experts + 1) * 4);
    device_->download(offsets_at, std::as_writable_bytes(std::span(offsets)));
    std::uint32_t offset = 0;
    for (std::uint64_t e = 0; e <= experts; ++e) {
        if (offsets[e] != offset)
            return is_not("expert_offsets[" + std::to_string(e) + "]", offsets[e], offset);
        offset += e < experts ? expected[e] : 0;
    }
    return "";
}

std::string ExchangeRig::wrong_tensor(const TensorView& rows,
                                      const std::vector<RowSource>& sources) const {
    return wrong_rows(
        [&](std::uint64_t first, std::uint64_t count) { return read(rows, first, count); },
        sources);
}

std::string ExchangeRig::wrong_rows(const Read& read_some,
                                    const std::vector<RowSource>& sources) const {
    const std::uint64_t elements = sources.size() * shape_.hidden;
    const std::uint64_t step = elements / kMostChecked + 1;
    const std::uint64_t at_once =
        step > 1 ? 1 : std::max<std::uint64_t>(1, (1u << 20) / shape_.hidden);
    for (std::uint64_t first = 0; first < sources.size(); first += at_once) {
        if (!is_sample(sources, first, step) && at_once == 1)
            continue;
        const std::uint64_t count = std::min<std::uint64_t>(at_once, sources.size() - first);
        const std::vector<float> actual = read_some(first, count);
        for (std::uint64_t row = first; row < first + count; ++row) {
            const std::vector<float> expected =
                token_values(shape_, sources[row].rank, sources[row].token);
            for (std::uint64_t column = 0; column < shape_.hidden; ++column) {
                const float is = actual[(row - first) * shape_.hidden + column];
                if (is != sources[row].times * expected[column])
                    return is_not(name_of(sources[row], row) + ", column " + std::to_string(column),
                                  is, sources[row].times * expected[column]);
            }
        }
    }
    return "";
}

std::string ExchangeRig::wrong_weights(const TensorView& weights,
                                       const std::vector<float>& expected,
                                       const std::vector<std::uint64_t>& places) const {
    if (places.empty())
        return "";
    const std::uint64_t each = expected.size() / places.size();
    std::vector<float> actual((places.back() + 1) * each);
    device_->download(weights.buffer.sub(0, actual.size() * 4),
                      std::as_writable_bytes(std::span(actual)));
    for (std::size_t i = 0; i < expected.size(); ++i)
        if (const float is = actual[places[i / each] * each + i % each]; is != expected[i])
            return is_not("weight " + std::to_string(i), is, expected[i]);
    return "";
}

std::string ExchangeRig::wrong_dispatch() const {
    if (const std::string layout = wrong_layout(); !layout.empty())
        return layout;
    const std::vector<std::uint64_t> at = places();
    if (const std::string wrong =
            masked() ? "" : wrong_weights(handle_->row_weights(), row_weights(), at);
        !wrong.empty())
        return wrong;
    const auto read_rows = [&](std::uint64_t first, std::uint64_t count) {
        return shape_.codes ? read_codes(first, count) : read(handle_->rows(), first, count);
    };
    if (!shape_.low_latency)
        return wrong_rows(read_rows, rows_);
    return wrong_rows(
        [&](std::uint64_t first, std::uint64_t count) {
            std::vector<float> values;
            for (std::uint64_t row = first; row < first + count; ++row) {
                const std::vector<float> one = read_rows(at[row], 1);
                values.insert(values.end(), one.begin(), one.end());
            }
            return values;
        },
        rows_);
}

std::vector<float> ExchangeRig::row_weights() const {
    std::vector<float> weights;
    std::vector<Routing> of_rank;
    for (int rank = 0; shape_.by_rank && rank < static_cast<int>(shape_.ranks); ++rank)
        of_rank.emplace_back(shape_, rank);
    const std::uint64_t first = exchange_->first_local_expert();
    for (const RowSource& row : rows_) {
        if (!shape_.by_rank) {
            weights.push_back(row.weight);
            continue;
        }
        const Routing& routing = of_rank[static_cast<std::size_t>(row.rank)];
        for (std::uint64_t slot = row.token * shape_.top_k; slot < (row.token + 1) * shape_.top_k;
             ++slot) {
            const auto local = static_cast<std::uint64_t>(routing.ids[slot]) - first;
            weights.push_back(local < exchange_->num_local_experts() ? routing.weights[slot] : 0);
        }
    }
    return weights;
}

std::string ExchangeRig::wrong_combine() const {
    return wrong_tensor(out_, tokens_);
}

std::string ExchangeRig::wrong_combine_backward() const {
    return wrong_tensor(handle_->d_results(), rows_);
}

std::string ExchangeRig::wrong_dispatch_backward() const {
    if (const std::string wrong = wrong_tensor(d_x_, tokens_); !wrong.empty())
        return wrong;
    std::vector<std::uint64_t> all(shape_.tokens_of(rank_));
    std::iota(all.begin(), all.end(), std::uint64_t{0});
    return wrong_weights(d_weights_, routing_.weights, all);
}

} // namespace bellows::bench
