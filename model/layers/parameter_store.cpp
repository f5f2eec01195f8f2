// SPDX-License-Identifier: MIT
#include "linear.hpp"

#include <bellows/base/error.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/model/parameter_store.hpp>

#include <algorithm>
#include <atomic>
#include <future>
#include <span>
#include <thread>
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

} // namespace

ParameterStore::ParameterStore(Device& device, std::vector<ParameterInfo> mine, DType activation,
                               bool training, LinearPrecision linear, MemorySource memory)
    : device_(&device), activation_(activation), linear_(linear), memory_(std::move(memory)) {
    int range = -1;
    for (ParameterInfo& info : in_stored_order(std::move(mine))) {
        if (stored_range_of(info) != range) {
            range = stored_range_of(info);
            ranges_.push_back({num_elements_, 0, range == 3, range == 0 || range == 3});
        }
        Parameter parameter;
        parameter.first = num_elements_;
        parameter.info = std::move(info);
        const std::uint64_t size = stored_elements(parameter.info);
        if (parameter.info.kind == ParameterKind::Expert && size != parameter.info.size())
            throw Error(ErrorCode::InvalidArgument,
                        parameter.info.name + " has " + std::to_string(parameter.info.size()) +
                            " elements; an expert's matrix must have a multiple of 16");
        num_elements_ += size;
        ranges_.back().count += size;
        by_name_[parameter.info.name] = parameters_.size();
        parameters_.push_back(std::move(parameter));
    }
    make_buffers(training);
    make_quantized();
    if (!training)
        return;
    clear_ = std::make_unique<Recording>(device, QueueRole::Compute, "clear gradients");
    clear_->fill(gradients_.buffer, 0);
}

BufferView ParameterStore::make_memory(std::string name, std::uint64_t bytes,
                                       MemoryCategory category) {
    bytes = std::max<std::uint64_t>(bytes, 16);
    if (memory_)
        return memory_(std::move(name), bytes, category);
    return own_memory_
        .emplace_back(*device_,
                      BufferDesc{.name = std::move(name), .bytes = bytes, .category = category})
        .view();
}

void ParameterStore::make_buffers(bool training) {
    for (const Parameter& parameter : parameters_) {
        if (!in_f32(parameter.info))
            continue;
        if (in_weights_.count == 0)
            in_weights_.first = parameter.first; // the others stand behind it
        in_weights_.count += stored_elements(parameter.info);
    }
    const auto make_f32 = [&](const char* name, std::uint64_t elements, MemoryCategory category) {
        return TensorView::contiguous(make_memory(name, elements * size_of(DType::F32), category),
                                      DType::F32, {elements});
    };
    weights_ = make_f32("weights", in_weights_.count, MemoryCategory::Weights);
    if (training)
        gradients_ = make_f32("gradients", num_elements_, MemoryCategory::Gradients);
    make_runs();
    for (Parameter& parameter : parameters_) {
        const auto& info = parameter.info;
        const std::uint64_t size = info.size();
        if (in_f32(info))
            parameter.weight = shaped(f32_weights(parameter.first, size), info.shape);
        if (!compute_.buffer)
            parameter.compute = parameter.weight;
        else if (!in_fp8(info))
            parameter.compute =
                shaped(bf16_runs(parameter.first, size).front().weights, info.shape);
        if (training && info.trainable())
            parameter.gradient = shaped(flat_gradients().rows(parameter.first, size), info.shape);
    }
}

/// And the bf16 weights, in their order.
void ParameterStore::make_runs() {
    const auto has_bf16 = [&](const Parameter& parameter) {
        return activation_ == DType::BF16 && !in_fp8(parameter.info);
    };
    std::uint64_t all = 0;
    for (const Parameter& parameter : parameters_)
        all += has_bf16(parameter) ? stored_elements(parameter.info) : 0;
    if (activation_ == DType::BF16)
        compute_ = TensorView::contiguous(
            make_memory("bf16 weights", all * size_of(DType::BF16), MemoryCategory::Weights),
            DType::BF16, {all});
    std::uint64_t until = 0; // of the bf16 weights
    for (const Parameter& parameter : parameters_) {
        const bool has = has_bf16(parameter);
        if (runs_.empty() || has != static_cast<bool>(runs_.back().weights.buffer))
            runs_.push_back({parameter.first, 0, {}});
        Bf16Run& run = runs_.back();
        run.count += stored_elements(parameter.info);
        if (!has)
            continue;
        until += stored_elements(parameter.info);
        run.weights = compute_.rows(until - run.count, run.count);
    }
}

std::vector<Bf16Run> ParameterStore::bf16_runs(std::uint64_t first, std::uint64_t count) const {
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

const Parameter& ParameterStore::at(const std::string& name) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end())
        throw Error(ErrorCode::InvalidArgument, "this rank has no parameter " + name);
    return parameters_[found->second];
}

std::size_t ParameterStore::together(std::size_t first) const {
    const ParameterInfo& info = parameters_[first].info;
    std::size_t end = first + 1;
    while (info.kind == ParameterKind::Expert && end < parameters_.size() &&
           parameters_[end].info.kind == ParameterKind::Expert &&
           parameters_[end].info.layer == info.layer &&
           matrix_of(parameters_[end].info) == matrix_of(info))
        ++end;
    return end - first;
}

Parameter ParameterStore::experts(std::uint64_t layer, const std::string& matrix) const {
    const auto first = std::ranges::find_if(parameters_, [&](const Parameter& parameter) {
        return parameter.info.kind == ParameterKind::Expert &&
               parameter.info.layer == static_cast<std::int64_t>(layer) &&
               matrix_of(parameter.info) == matrix;
    });
    if (first == parameters_.end())
        throw Error(ErrorCode::InvalidArgument,
                    "this rank has no experts of layer " + std::to_string(layer));
    const auto index = static_cast<std::size_t>(first - parameters_.begin());
    Parameter all = side_by_side(*first, together(index));
    for (const PackedWeights& weights : packed_weights_)
        if (weights.first == index) {
            all.packed_nt = weights.nt;
            all.packed_nn = weights.nn;
        }
    return all;
}

std::vector<SentCopy> ParameterStore::sent_copies(std::uint64_t first,
                                                  std::span<const std::uint64_t> shares) const {
    std::vector<std::uint64_t> ends{first}; // of the parts before each, and of all
    for (const std::uint64_t share : shares)
        ends.push_back(ends.back() + share);
    std::vector<SentCopy> copies;
    /// at(e): where what belongs to the elements from e on begins.
    const auto add = [&](const TensorView& flat, const auto& at) {
        SentCopy copy;
        for (std::size_t i = 0; i + 1 < ends.size(); ++i)
            copy.counts.push_back(at(ends[i + 1]) - at(ends[i]));
        copy.whole = flat.rows(at(ends.front()), at(ends.back()) - at(ends.front()));
        if (copy.whole.num_elements() > 0)
            copies.push_back(std::move(copy));
    };
    if (compute_.buffer)
        for (const Bf16Run& run : bf16_runs(first, ends.back() - first)) {
            if (run.weights.buffer)
                add(run.weights, [&run](std::uint64_t element) {
                    return std::clamp(element, run.first, run.first + run.count) - run.first;
                });
        }
    else if (ends.back() > first)
        add(f32_weights(first, ends.back() - first),
            [first](std::uint64_t element) { return element - first; });
    const auto add_quantized = [&](const BufferView& all, auto part, std::uint64_t rows) {
        if (!all)
            return;
        const auto bytes = TensorView::contiguous(all, DType::U8, {all.bytes});
        add(bytes, [&, part, rows](std::uint64_t element) {
            for (const Parameter& parameter : parameters_) {
                if (!parameter.quantized ||
                    parameter.first + stored_elements(parameter.info) <= element)
                    continue;
                const TensorView& view = (*parameter.quantized).*part;
                const std::uint64_t row =
                    element > parameter.first
                        ? (element - parameter.first) / parameter.info.shape[1] / rows
                        : 0;
                return view.buffer.offset - all.offset + row * view.stride[0] * size_of(view.dtype);
            }
            return all.bytes;
        });
    };
    add_quantized(codes_, &fp8::Quantized::codes, 1);
    add_quantized(scales_, &fp8::Quantized::scales, kScaleRows);
    return copies;
}

TensorView ParameterStore::f32_weights(std::uint64_t first, std::uint64_t count) const {
    if (first < in_weights_.first || first + count > in_weights_.first + in_weights_.count)
        return {};
    return weights_.rows(first - in_weights_.first, count);
}

void ParameterStore::initialise(std::uint64_t seed, const MasterSink& masters) {
    constexpr unsigned kMostThreads = 16; // a host's ranks do this at once
    const unsigned threads = std::min(std::thread::hardware_concurrency(), kMostThreads);
    for (std::size_t begin = 0, end = 0; begin < parameters_.size(); begin = end) {
        const std::uint64_t first = parameters_[begin].first;
        std::uint64_t count = 0;
        for (; end < parameters_.size() &&
               stored_range_of(parameters_[end].info) == stored_range_of(parameters_[begin].info);
             ++end) {
            const std::uint64_t more = stored_elements(parameters_[end].info);
            if (end > begin && count + more > kInitialisedAtOnce)
                break;
            count += more;
        }
        std::vector<float> values(count, 0.0f);
        std::atomic<std::size_t> next{begin};
        const auto fill = [&] {
            for (std::size_t i = next++; i < end; i = next++)
                fill_initial_values(parameters_[i].info, seed,
                                    std::span(values).subspan(parameters_[i].first - first,
                                                              parameters_[i].info.size()));
        };
        std::vector<std::future<void>> others;
        for (unsigned i = 1; i < threads; ++i)
            others.push_back(std::async(std::launch::async, fill));
        fill();
        for (std::future<void>& other : others)
            other.get();
        write(first, values);
        if (masters)
            masters(first, values);
    }
    if (training())
        clear_gradients().wait();
}

void ParameterStore::write(std::uint64_t first, std::span<const float> values) {
    const std::uint64_t count = values.size();
    TensorView f32 = f32_weights(first, count);
    Buffer passing;
    if (!f32.buffer) {
        passing = Buffer(*device_, {.name = "weights on their way",
                                    .bytes = std::max<std::uint64_t>(count * 4, 16),
                                    .category = MemoryCategory::Scratch});
        f32 = passing.tensor(DType::F32, {count});
    }
    device_->upload(f32.buffer, values);
    Recording copies(*device_, QueueRole::Compute, "copies of weights");
    for (const Bf16Run& run : bf16_runs(first, count))
        if (run.weights.buffer)
            ops::cast(copies, f32.rows(run.first - first, run.count), run.weights);
    quantize(copies, first, f32);
    make_copies(copies, first, count);
    if (copies.num_operations() > 0)
        device_->submit(copies).wait();
}

void ParameterStore::upload(const std::string& name, std::span<const float> values) {
    const Parameter& parameter = at(name);
    if (values.size() != parameter.info.size())
        throw Error(ErrorCode::InvalidArgument,
                    name + " has " + std::to_string(parameter.info.size()) + " elements, not " +
                        std::to_string(values.size()));
    write(parameter.first, values);
}

std::vector<float> ParameterStore::download(const std::string& name) const {
    const Parameter& parameter = at(name);
    if (!parameter.weight.buffer)
        throw Error(ErrorCode::InvalidArgument,
                    name + " is not kept in f32; whoever trains it has its master weight");
    std::vector<float> values(parameter.info.size());
    device_->download(parameter.weight.buffer, std::span<float>(values));
    return values;
}

std::vector<float> ParameterStore::download_gradient(const std::string& name) const {
    const Parameter& parameter = at(name);
    if (!parameter.gradient.buffer)
        throw Error(ErrorCode::InvalidArgument, name + " has no gradient: it is not trained");
    std::vector<float> values(parameter.info.size());
    device_->download(parameter.gradient.buffer, std::span<float>(values));
    return values;
}

TimePoint ParameterStore::clear_gradients() {
    if (!clear_)
        throw Error(ErrorCode::InvalidArgument,
                    "these weights have no gradients; make the store for training");
    return device_->submit(*clear_);
}

} // namespace bellows
