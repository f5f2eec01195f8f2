// SPDX-License-Identifier: MIT
#include "app/optimizer.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace bellows {

namespace {

Buffer make(Device& device, const char* name, std::uint64_t bytes,
            MemoryKind kind = MemoryKind::Device,
            MemoryCategory category = MemoryCategory::Scratch) {
    return Buffer(device, {.name = name,
                           .bytes = std::max<std::uint64_t>(bytes, 16),
                           .kind = kind,
                           .category = category});
}

bool trained(const ParameterStore& parameters, const ParameterRange& range) {
    for (const Parameter& parameter : parameters.all())
        if (parameter.first == range.first)
            return parameter.info.trainable();
    return false;
}

} // namespace

Optimizer::Optimizer(ParameterStore& parameters, const OptimizerOptions& options)
    : parameters_(parameters), options_(options) {
    Device& device = parameters.device();
    const std::uint64_t bytes = parameters.num_elements() * 4;
    first_moments_ =
        make(device, "first moments", bytes, MemoryKind::Device, MemoryCategory::Optimizer);
    second_moments_ =
        make(device, "second moments", bytes, MemoryKind::Device, MemoryCategory::Optimizer);
    scalars_ = make(device, "optimiser scalars", 12, MemoryKind::Upload);
    clip_ = make(device, "clip coefficient", 4, MemoryKind::Upload);
    Recording clear(device, QueueRole::Compute, "clear moments");
    clear.fill(first_moments_.view(), 0);
    clear.fill(second_moments_.view(), 0);
    device.submit(clear).wait();
    record_norm();
    record_update();
}

void Optimizer::record_norm() {
    Device& device = parameters_.device();
    std::vector<ParameterRange> counted;
    std::uint64_t count = 0;
    for (const ParameterRange& range : parameters_.ranges())
        if (trained(parameters_, range) &&
            (range.expert ? options_.count_experts : options_.count_replicated)) {
            counted.push_back(range);
            count += ops::num_partials(range.count);
        }
    if (counted.empty())
        return;
    partials_ = make(device, "partial squares", count * 4);
    sum_ = make(device, "sum of squares", 8);
    workspace_ = make(device, "sum workspace", ops::sum_pairs_workspace_bytes(count));
    host_sum_ = make(device, "sum of squares on the host", 8, MemoryKind::Readback);
    norm_ = std::make_unique<Recording>(device, QueueRole::Compute, "gradient norm");
    const TensorView partials = partials_.tensor(DType::F32, {count});
    const TensorView gradients = parameters_.flat_gradients();
    std::uint64_t first = 0;
    for (const ParameterRange& range : counted) {
        const std::uint64_t parts = ops::num_partials(range.count);
        ops::sum_squares_partials(*norm_, gradients.rows(range.first, range.count),
                                  partials.rows(first, parts));
        first += parts;
    }
    ops::sum_pairs(*norm_, partials, sum_.tensor(DType::F32, {2}), workspace_.view());
    norm_->copy(sum_.view().sub(0, 8), host_sum_.view().sub(0, 8));
}

void Optimizer::record_update() {
    Device& device = parameters_.device();
    update_ = std::make_unique<Recording>(device, QueueRole::Compute, "AdamW");
    const auto part = [](const TensorView& flat, const ParameterRange& range) {
        return flat.buffer ? flat.rows(range.first, range.count) : TensorView{};
    };
    const std::uint64_t all = parameters_.num_elements();
    for (const ParameterRange& range : parameters_.ranges()) {
        if (!trained(parameters_, range))
            continue;
        ops::AdamwOptions adamw = options_.adamw;
        if (!range.weight_decay)
            adamw.weight_decay = 0;
        ops::adamw(*update_, part(parameters_.flat_weights(), range),
                   part(parameters_.flat_gradients(), range),
                   part(first_moments_.tensor(DType::F32, {all}), range),
                   part(second_moments_.tensor(DType::F32, {all}), range),
                   part(parameters_.flat_compute(), range), scalars_.tensor(DType::F32, {3}),
                   clip_.tensor(DType::F32, {1}), adamw);
    }
    parameters_.make_copies(*update_);
}

double Optimizer::local_squares() {
    if (!norm_)
        return 0;
    parameters_.device().submit(*norm_).wait(options_.timeout);
    const auto pair = host_sum_.mapped_as<const float>();
    return static_cast<double>(pair[0]) + static_cast<double>(pair[1]);
}

TimePoint Optimizer::update(std::uint64_t step, double lr, double clip) {
    last_update_.wait(options_.timeout); // it reads the scalars
    const auto scalars = ops::adamw_scalars(options_.adamw, lr, step);
    std::copy(scalars.begin(), scalars.end(), scalars_.mapped_as<float>().begin());
    clip_.mapped_as<float>()[0] = static_cast<float>(clip);
    last_update_ = parameters_.device().submit(*update_);
    return last_update_;
}

BufferView Optimizer::moment(const Parameter& parameter, bool second) const {
    return (second ? second_moments_ : first_moments_)
        .view()
        .sub(parameter.first * 4, parameter.info.size() * 4);
}

std::vector<float> Optimizer::download(const Parameter& parameter, bool second) const {
    std::vector<float> values(parameter.info.size());
    parameters_.device().download(moment(parameter, second), std::span<float>(values));
    return values;
}

void Optimizer::upload(const Parameter& parameter, bool second, std::span<const float> values) {
    parameters_.device().upload(moment(parameter, second), values);
}

} // namespace bellows
