// SPDX-License-Identifier: MIT
#include "weight_storage.hpp"

#include <bellows/base/error.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

namespace {

TensorView shaped(const TensorView& flat, const std::vector<std::uint64_t>& shape) {
    switch (shape.size()) {
    case 1:
        return flat.reshaped({shape[0]});
    case 2:
        return flat.reshaped({shape[0], shape[1]});
    default:
        throw Error(ErrorCode::Internal, "a parameter has one or two dimensions");
    }
}

/// With the gradient of a head that is the embedding, of which a model has one.
std::uint64_t gradient_elements(const ParameterList& list) {
    std::uint64_t elements = list.num_elements();
    for (const ListedParameter& parameter : list.all())
        elements += parameter.info.both_ends ? stored_elements(parameter.info) : 0;
    return elements;
}

} // namespace

WeightMemory::WeightMemory(Device& device, MemorySource source)
    : device_(&device), source_(std::move(source)) {
}

BufferView WeightMemory::make(std::string name, std::uint64_t bytes, MemoryCategory category) {
    bytes = std::max<std::uint64_t>(bytes, 16);
    if (source_)
        return source_(std::move(name), bytes, category);
    return own_
        .emplace_back(*device_,
                      BufferDesc{.name = std::move(name), .bytes = bytes, .category = category})
        .view();
}

void add_sent_copy(std::vector<SentCopy>& copies, const TensorView& flat,
                   std::span<const std::uint64_t> ends,
                   const std::function<std::uint64_t(std::uint64_t)>& at) {
    SentCopy copy;
    for (std::size_t i = 0; i + 1 < ends.size(); ++i)
        copy.counts.push_back(at(ends[i + 1]) - at(ends[i]));
    copy.whole = flat.rows(at(ends.front()), at(ends.back()) - at(ends.front()));
    if (copy.whole.num_elements() > 0)
        copies.push_back(std::move(copy));
}

WeightStorage::WeightStorage(Device& device, const ParameterList& list, const WeightForms& forms,
                             WeightMemory& memory, std::span<Parameter> parameters)
    : device_(&device) {
    for (const ListedParameter& parameter : list.all()) {
        if (!forms.in_f32(parameter.info))
            continue;
        if (f32_count_ == 0)
            f32_first_ = parameter.first; // the others stand behind it
        f32_count_ += stored_elements(parameter.info);
    }
    const auto make_f32 = [&](const char* name, std::uint64_t elements, MemoryCategory category) {
        return TensorView::contiguous(memory.make(name, elements * size_of(DType::F32), category),
                                      DType::F32, {elements});
    };
    f32_ = make_f32("weights", f32_count_, MemoryCategory::Weights);
    if (forms.training)
        gradients_ = make_f32("gradients", gradient_elements(list), MemoryCategory::Gradients);
    make_bf16_weights(list, forms, memory);
    for (Parameter& parameter : parameters) {
        const ParameterInfo& info = parameter.info;
        const std::uint64_t size = info.size();
        if (forms.in_f32(info))
            parameter.weight = shaped(f32_weights(parameter.first, size), info.shape);
        if (!bf16_.buffer)
            parameter.compute = parameter.weight;
        else if (forms.in_bf16(info))
            parameter.compute =
                shaped(bf16_runs(parameter.first, size).front().weights, info.shape);
        if (forms.training && info.trainable())
            parameter.gradient = shaped(gradients_.rows(parameter.first, size), info.shape);
        if (forms.training && info.both_ends) {
            parameter.head_gradient_first = list.num_elements();
            parameter.head_gradient =
                shaped(gradients_.rows(parameter.head_gradient_first, size), info.shape);
        }
    }
    if (!forms.training)
        return;
    clear_ = std::make_unique<Recording>(device, QueueRole::Compute, "clear gradients");
    clear_->fill(gradients_.buffer, 0);
}

/// Makes the runs of elements, too, which have such weights or have none.
void WeightStorage::make_bf16_weights(const ParameterList& list, const WeightForms& forms,
                                      WeightMemory& memory) {
    std::uint64_t all = 0;
    for (const ListedParameter& parameter : list.all())
        all += forms.in_bf16(parameter.info) ? stored_elements(parameter.info) : 0;
    if (forms.activation == DType::BF16)
        bf16_ = TensorView::contiguous(
            memory.make("bf16 weights", all * size_of(DType::BF16), MemoryCategory::Weights),
            DType::BF16, {all});
    std::uint64_t until = 0; // of the bf16 weights
    for (const ListedParameter& parameter : list.all()) {
        const bool has = forms.in_bf16(parameter.info);
        if (runs_.empty() || has != static_cast<bool>(runs_.back().weights.buffer))
            runs_.push_back({parameter.first, 0, {}});
        Bf16Run& run = runs_.back();
        run.count += stored_elements(parameter.info);
        if (!has)
            continue;
        until += stored_elements(parameter.info);
        run.weights = bf16_.rows(until - run.count, run.count);
    }
}

TensorView WeightStorage::f32_weights(std::uint64_t first, std::uint64_t count) const {
    if (first < f32_first_ || first + count > f32_first_ + f32_count_)
        return {};
    return f32_.rows(first - f32_first_, count);
}

std::vector<Bf16Run> WeightStorage::bf16_runs(std::uint64_t first, std::uint64_t count) const {
    std::vector<Bf16Run> runs;
    for (const Bf16Run& run : runs_) {
        const std::uint64_t begin = std::max(first, run.first);
        const std::uint64_t end = std::min(first + count, run.first + run.count);
        if (begin < end)
            runs.push_back({begin, end - begin,
                            run.weights.buffer ? run.weights.rows(begin - run.first, end - begin)
                                               : TensorView{}});
    }
    return runs;
}

TimePoint WeightStorage::clear_gradients() {
    if (!clear_)
        throw Error(ErrorCode::InvalidArgument,
                    "these weights have no gradients; make the store for training");
    return device_->submit(*clear_);
}

void WeightStorage::add_sent_copies(std::vector<SentCopy>& copies,
                                    std::span<const std::uint64_t> ends) const {
    const std::uint64_t first = ends.front(), count = ends.back() - first;
    if (!bf16_.buffer) {
        if (count > 0)
            add_sent_copy(copies, f32_weights(first, count), ends,
                          [first](std::uint64_t element) { return element - first; });
        return;
    }
    for (const Bf16Run& run : bf16_runs(first, count))
        if (run.weights.buffer)
            add_sent_copy(copies, run.weights, ends, [&run](std::uint64_t element) {
                return std::clamp(element, run.first, run.first + run.count) - run.first;
            });
}

} // namespace bellows
