// SPDX-License-Identifier: MIT
#include <bellows/train/optimizer.hpp>

#include <bellows/base/error.hpp>

#include <algorithm>
#include <ranges>
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

/// One part of all that is trained.
std::vector<UpdatePart> everything(const ParameterStore& parameters) {
    UpdatePart all;
    for (const ParameterRange& range : parameters.list().ranges())
        for (const Parameter& parameter : parameters.all())
            if (parameter.first == range.first && parameter.info.trainable())
                all.push_back({range.first, range.count, range.weight_decay});
    return {std::move(all)};
}

} // namespace

Optimizer::Optimizer(ParameterStore& parameters, const OptimizerOptions& options)
    : Optimizer(parameters, everything(parameters), options) {
}

Optimizer::Optimizer(ParameterStore& parameters, std::vector<UpdatePart> parts,
                     const OptimizerOptions& options)
    : parameters_(parameters), options_(options) {
    for (const UpdatePart& part : parts) {
        parts_.emplace_back();
        for (const UpdatedRange& range : part) {
            parts_.back().push_back({range, num_elements_});
            num_elements_ += range.count;
        }
    }
    Device& device = parameters.device();
    const auto make_f32 = [&](const char* name) {
        return make(device, name, num_elements_ * 4, MemoryKind::Device, MemoryCategory::Optimizer);
    };
    first_moments_ = make_f32("first moments");
    second_moments_ = make_f32("second moments");
    if (!parameters.f32_weights(0, parameters.num_elements()).buffer)
        masters_ = make_f32("master weights");
    scalars_ = make(device, "optimiser scalars", 12, MemoryKind::Upload);
    clip_ = make(device, "clip coefficient", 4, MemoryKind::Upload);
    Recording clear(device, QueueRole::Compute, "clear moments");
    clear.fill(first_moments_.view(), 0);
    clear.fill(second_moments_.view(), 0);
    if (masters_)
        clear.fill(masters_.view(), 0);
    for (const auto& part : parts_)
        for (const auto& [range, at] : part)
            for (const Bf16Run& run : parameters.bf16_runs(range.first, range.count))
                if (run.weights.buffer && !stored(range).buffer)
                    ops::cast(clear, run.weights,
                              masters_.tensor(DType::F32, {num_elements_})
                                  .rows(at + run.first - range.first, run.count));
    device.submit(clear).wait();
    record_norm();
    for (const auto& part : parts_) {
        updates_.push_back(
            std::make_unique<Recording>(device, QueueRole::ComputeDeferred, "AdamW"));
        for (const Placed& placed : part)
            record(*updates_.back(), placed);
    }
}

void Optimizer::record_norm() {
    Device& device = parameters_.device();
    const auto counted = [](const Placed& placed) { return placed.range.counted; };
    std::uint64_t count = 0;
    for (const auto& part : parts_)
        for (const Placed& placed : part | std::views::filter(counted))
            count += ops::num_partials(placed.range.count);
    if (count == 0)
        return;
    partials_ = make(device, "partial squares", count * 4);
    sum_ = make(device, "sum of squares", 8);
    workspace_ = make(device, "sum workspace", ops::sum_pairs_workspace_bytes(count));
    host_sum_ = make(device, "sum of squares on the host", 8, MemoryKind::Readback);
    const auto record = [&] {
        norm_.push_back(
            std::make_unique<Recording>(device, QueueRole::ComputeDeferred, "gradient norm"));
        return norm_.back().get();
    };
    const TensorView partials = partials_.tensor(DType::F32, {count});
    const TensorView gradients = parameters_.flat_gradients();
    std::uint64_t first = 0;
    for (const auto& part : parts_) {
        if (std::ranges::none_of(part, counted))
            continue;
        Recording& of_part = *record();
        for (const Placed& placed : part | std::views::filter(counted)) {
            const UpdatedRange& range = placed.range;
            const std::uint64_t parts = ops::num_partials(range.count);
            ops::sum_squares_partials(of_part, gradients.rows(range.first, range.count),
                                      partials.rows(first, parts));
            first += parts;
        }
    }
    Recording& all = *record();
    ops::sum_pairs(all, partials, sum_.tensor(DType::F32, {2}), workspace_.view());
    all.copy(sum_.view().sub(0, 8), host_sum_.view().sub(0, 8));
}

void Optimizer::record(Recording& update, const Placed& placed) const {
    const UpdatedRange& range = placed.range;
    ops::AdamwOptions adamw = options_.adamw;
    if (!range.weight_decay)
        adamw.weight_decay = 0;
    for (const Bf16Run& run : parameters_.bf16_runs(range.first, range.count)) {
        const std::uint64_t skip = run.first - range.first;
        const auto moments = [&](const Buffer& buffer) {
            return buffer.tensor(DType::F32, {num_elements_}).rows(placed.at + skip, run.count);
        };
        ops::adamw(update, masters(placed).rows(skip, run.count),
                   parameters_.flat_gradients().rows(run.first, run.count), moments(first_moments_),
                   moments(second_moments_), run.weights, scalars_.tensor(DType::F32, {3}),
                   clip_.tensor(DType::F32, {1}), adamw);
    }
    parameters_.quantize(update, range.first, masters(placed));
    if (!range.in_part)
        parameters_.make_copies(update, range.first, range.count);
}

const Optimizer::Placed* Optimizer::find(const Parameter& parameter) const noexcept {
    for (const auto& part : parts_)
        for (const Placed& placed : part)
            if (placed.range.first < parameter.first + parameter.info.size() &&
                parameter.first < placed.range.first + placed.range.count)
                return &placed;
    return nullptr;
}

Share Optimizer::updated(const Parameter& parameter) const noexcept {
    const Placed* const placed = find(parameter);
    if (placed == nullptr)
        return {};
    const std::uint64_t first = std::max(placed->range.first, parameter.first);
    const std::uint64_t end = std::min(placed->range.first + placed->range.count,
                                       parameter.first + parameter.info.size());
    return {first - parameter.first, end - first};
}

bool Optimizer::stands_for(const Parameter& parameter) const noexcept {
    const Placed* const placed = find(parameter);
    return placed != nullptr && placed->range.counted && placed->range.first <= parameter.first;
}

double Optimizer::local_squares() {
    if (norm_.empty())
        return 0;
    TimePoint last;
    for (const auto& recording : norm_)
        last = parameters_.device().submit(*recording);
    last.wait(options_.timeout);
    const auto pair = host_sum_.mapped_as<const float>();
    return static_cast<double>(pair[0]) + static_cast<double>(pair[1]);
}

void Optimizer::update(std::uint64_t step, double lr, double clip) {
    for (TimePoint& part : updated_)
        part.wait(options_.timeout); // it reads the scalars
    const auto scalars = ops::adamw_scalars(options_.adamw, lr, step);
    std::copy(scalars.begin(), scalars.end(), scalars_.mapped_as<float>().begin());
    clip_.mapped_as<float>()[0] = static_cast<float>(clip);
    updated_.clear();
    for (const auto& part : updates_)
        updated_.push_back(parameters_.device().submit(*part));
}

TensorView Optimizer::masters(const Placed& placed) const {
    const TensorView kept = parameters_.f32_weights(placed.range.first, placed.range.count);
    return kept.buffer
               ? kept
               : masters_.tensor(DType::F32, {num_elements_}).rows(placed.at, placed.range.count);
}

void Optimizer::upload_masters(std::uint64_t first, std::span<const float> values) {
    for (const auto& part : parts_)
        for (const Placed& placed : part) {
            const UpdatedRange& range = placed.range;
            const std::uint64_t begin = std::max(first, range.first);
            const std::uint64_t end = std::min(first + values.size(), range.first + range.count);
            if (begin < end && !stored(range).buffer)
                parameters_.device().upload(
                    masters(placed).rows(begin - range.first, end - begin).buffer,
                    values.subspan(begin - first, end - begin));
        }
}

BufferView Optimizer::moment(const Parameter& parameter, Parted what) const {
    const Placed* const placed = find(parameter);
    if (placed == nullptr)
        return {};
    const Share part = updated(parameter);
    return moments_of(what).view().sub(
        (placed->at + parameter.first + part.first - placed->range.first) * 4, part.count * 4);
}

std::vector<float> Optimizer::download(const Parameter& parameter, Parted what) const {
    std::vector<float> values(updated(parameter).count);
    if (!values.empty())
        parameters_.device().download(moment(parameter, what), std::span<float>(values));
    return values;
}

void Optimizer::upload(const Parameter& parameter, Parted what, std::span<const float> values) {
    if (const Share part = updated(parameter); values.size() != part.count)
        throw Error(ErrorCode::InvalidArgument, "this rank updates " + std::to_string(part.count) +
                                                    " elements of " + parameter.info.name +
                                                    ", not " + std::to_string(values.size()));
    if (!values.empty())
        parameters_.device().upload(moment(parameter, what), values);
}

void Optimizer::replace_gradients(Parted what) {
    if (what == Parted::Gradients)
        return;
    Recording copies(parameters_.device(), QueueRole::Compute, "parted");
    const TensorView gradients = parameters_.flat_gradients();
    for (const auto& part : parts_)
        for (const Placed& placed : part) {
            const BufferView from =
                what == Parted::Masters
                    ? masters(placed).buffer
                    : moments_of(what).view().sub(placed.at * 4, placed.range.count * 4);
            copies.copy(from, gradients.rows(placed.range.first, placed.range.count).buffer);
        }
    parameters_.device().submit(copies).wait(options_.timeout);
}

} // namespace bellows
