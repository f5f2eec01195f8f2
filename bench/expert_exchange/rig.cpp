// SPDX-License-Identifier: MIT
#include "expert_exchange/rig.hpp"

#include "expert_exchange/timing.hpp"
#include "reference/compare.hpp"

#include <algorithm>
#include <cstdio>

namespace bellows::bench {

namespace {

/// More elements of a tensor are checked in samples.
constexpr std::uint64_t kMostChecked = std::uint64_t{1} << 24;

std::unique_ptr<Device> make_device(const ExchangeOptions& options, int rank) {
    DeviceOptions device = DeviceOptions::from_environment({});
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
    config.workgroups = options.workgroups;
    config.timeout = kTimeLimit;
    return config;
}

template <class T>
void fill(Device& device, const TensorView& view, const std::vector<T>& values) {
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
      transport_(open_transport(world)), thread_(std::make_unique<HostThread>(*device_, "network")),
      exchange_(std::make_unique<ExpertExchange>(*device_, world, *transport_, *thread_,
                                                 config_of(options))),
      handle_(exchange_->create_handle("batch")), routing_(shape_, rank_),
      rows_(expected_rows(shape_, exchange_->first_local_expert(), exchange_->num_local_experts())),
      data_(std::make_unique<OpData>(*device_)) {
    const std::uint64_t tokens = shape_.tokens;
    x_ = data_->empty(shape_.dtype, {tokens, shape_.hidden});
    out_ = data_->empty(shape_.dtype, {tokens, shape_.hidden});
    d_x_ = data_->empty(shape_.dtype, {tokens, shape_.hidden});
    ids_ = data_->empty(DType::I32, {tokens, shape_.top_k});
    weights_ = data_->empty(DType::F32, {tokens, shape_.top_k});
    d_weights_ = data_->empty(DType::F32, {tokens, shape_.top_k});
    std::vector<float> x;
    x.reserve(tokens * shape_.hidden);
    for (std::uint64_t token = 0; token < tokens; ++token) {
        tokens_.push_back({-1, rank_, token, 0});
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
    fill(*device_, ids_, routing_.ids);
    fill(*device_, weights_, routing_.weights);
}

ExchangeRig::~ExchangeRig() = default;

void ExchangeRig::wait_idle() {
    device_->wait_idle(kTimeLimit);
}

void ExchangeRig::dispatch() {
    exchange_->dispatch(*handle_, x_, ids_, weights_).wait(kTimeLimit);
}

void ExchangeRig::combine() {
    exchange_->combine(*handle_, handle_->rows(), out_).wait(kTimeLimit);
}

void ExchangeRig::combine_backward() {
    exchange_->combine_backward(*handle_, x_).wait(kTimeLimit);
}

void ExchangeRig::dispatch_backward() {
    exchange_
        ->dispatch_backward(*handle_, handle_->d_results(), handle_->row_weights(), d_x_, false,
                            d_weights_)
        .wait(kTimeLimit);
}

std::vector<float> ExchangeRig::read(const TensorView& rows, std::uint64_t first,
                                     std::uint64_t count) const {
    const TensorView some = rows.rows(first, count);
    std::vector<float> values(some.num_elements());
    const BufferView bytes = some.buffer.sub(0, some.num_bytes());
    if (rows.dtype == DType::F32) {
        device_->download(bytes, std::as_writable_bytes(std::span(values)));
        return values;
    }
    std::vector<std::uint16_t> bits(values.size());
    device_->download(bytes, std::as_writable_bytes(std::span(bits)));
    std::transform(bits.begin(), bits.end(), values.begin(), reference::from_bf16);
    return values;
}

std::string ExchangeRig::wrong_layout() const {
    const std::uint64_t experts = exchange_->num_local_experts();
    std::vector<std::uint32_t> expected(experts), counts(experts), offsets(experts + 1);
    for (const RowSource& row : rows_)
        ++expected[static_cast<std::uint64_t>(row.expert) - exchange_->first_local_expert()];
    const auto counts_at = handle_->expert_counts().buffer.sub(0, experts * 4);
    const auto offsets_at = handle_->expert_offsets().buffer.sub(0, (experts + 1) * 4);
    device_->download(counts_at, std::as_writable_bytes(std::span(counts)));
    device_->download(offsets_at, std::as_writable_bytes(std::span(offsets)));
    std::uint32_t offset = 0;
    for (std::uint64_t e = 0; e <= experts; ++e) {
        const std::string expert = "[" + std::to_string(e) + "]";
        if (offsets[e] != offset)
            return is_not("expert_offsets" + expert, offsets[e], offset);
        if (e < experts && counts[e] != expected[e])
            return is_not("expert_counts" + expert, counts[e], expected[e]);
        offset += e < experts ? expected[e] : 0;
    }
    return "";
}

std::string ExchangeRig::wrong_rows(const TensorView& rows, const std::vector<RowSource>& sources,
                                    float factor) const {
    const std::uint64_t elements = sources.size() * shape_.hidden;
    const std::uint64_t step = elements / kMostChecked + 1;
    const std::uint64_t at_once =
        step > 1 ? 1 : std::max<std::uint64_t>(1, (1u << 20) / shape_.hidden);
    for (std::uint64_t first = 0; first < sources.size(); first += at_once) {
        if (!is_sample(sources, first, step) && at_once == 1)
            continue;
        const std::uint64_t count = std::min<std::uint64_t>(at_once, sources.size() - first);
        const std::vector<float> actual = read(rows, first, count);
        for (std::uint64_t row = first; row < first + count; ++row) {
            const std::vector<float> expected =
                token_values(shape_, sources[row].rank, sources[row].token);
            for (std::uint64_t column = 0; column < shape_.hidden; ++column) {
                const float is = actual[(row - first) * shape_.hidden + column];
                if (is != factor * expected[column])
                    return is_not(name_of(sources[row], row) + ", column " + std::to_string(column),
                                  is, factor * expected[column]);
            }
        }
    }
    return "";
}

std::string ExchangeRig::wrong_weights(const TensorView& weights,
                                       const std::vector<float>& expected) const {
    std::vector<float> actual(expected.size());
    if (!actual.empty())
        device_->download(weights.buffer.sub(0, actual.size() * 4),
                          std::as_writable_bytes(std::span(actual)));
    for (std::size_t i = 0; i < actual.size(); ++i)
        if (actual[i] != expected[i])
            return is_not("weight " + std::to_string(i), actual[i], expected[i]);
    return "";
}

std::string ExchangeRig::wrong_dispatch() const {
    if (const std::string layout = wrong_layout(); !layout.empty())
        return layout;
    std::vector<float> weights;
    for (const RowSource& row : rows_)
        weights.push_back(row.weight);
    if (const std::string wrong = wrong_weights(handle_->row_weights(), weights); !wrong.empty())
        return wrong;
    return wrong_rows(handle_->rows(), rows_, 1);
}

std::string ExchangeRig::wrong_combine() const {
    return wrong_rows(out_, tokens_, static_cast<float>(shape_.top_k));
}

std::string ExchangeRig::wrong_combine_backward() const {
    return wrong_rows(handle_->d_results(), rows_, 1);
}

std::string ExchangeRig::wrong_dispatch_backward() const {
    const std::string wrong = wrong_rows(d_x_, tokens_, static_cast<float>(shape_.top_k));
    return wrong.empty() ? wrong_weights(d_weights_, routing_.weights) : wrong;
}

} // namespace bellows::bench
