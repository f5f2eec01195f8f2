// SPDX-License-Identifier: MIT
#include <bellows/engine/error.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/model/parameter_store.hpp>

#include <algorithm>
#include <atomic>
#include <future>
#include <span>
#include <thread>
#include <utility>

namespace bellows {

namespace {

constexpr std::uint64_t kAlignment = 16; // elements: 64 bytes of f32

/// Where a parameter stands among the ranges.
int range_of(const ParameterInfo& info) {
    if (info.kind == ParameterKind::Expert)
        return 3;
    if (!info.trainable())
        return 2;
    return info.weight_decay ? 0 : 1;
}

/// The last but one part of the name: "gate_up_proj" of "…experts.5.gate_up_proj.weight".
std::string matrix_of(const ParameterInfo& info) {
    const std::size_t end = info.name.rfind('.');
    const std::size_t begin = info.name.rfind('.', end - 1) + 1;
    return info.name.substr(begin, end - begin);
}

TensorView view_of(const Buffer& flat, DType dtype, std::uint64_t first,
                   const std::vector<std::uint64_t>& shape, std::uint64_t elements) {
    const BufferView part = flat.view().sub(first * size_of(dtype), elements * size_of(dtype));
    switch (shape.size()) {
    case 1:
        return TensorView::contiguous(part, dtype, {shape[0]});
    case 2:
        return TensorView::contiguous(part, dtype, {shape[0], shape[1]});
    default:
        throw Error(ErrorCode::Internal, "a parameter has one or two dimensions");
    }
}

constexpr std::uint64_t kScaleRows = 128; // of a matrix with scales of their own

constexpr fp8::Recipe kWeightsRecipe{fp8::Blocks::Blocks128, fp8::Format::E4M3,
                                     fp8::ScaleRule::PowerOfTwo};

} // namespace

std::uint64_t stored_elements(const ParameterInfo& info) noexcept {
    return (info.size() + kAlignment - 1) / kAlignment * kAlignment;
}

std::vector<ParameterInfo> in_stored_order(std::vector<ParameterInfo> parameters) {
    const auto key = [](const ParameterInfo& info) {
        const bool expert = info.kind == ParameterKind::Expert;
        // Experts of one layer and matrix side by side; all else keeps its order.
        return std::make_tuple(range_of(info), expert ? info.layer : 0,
                               expert ? matrix_of(info) : std::string(), expert ? info.expert : 0);
    };
    std::ranges::stable_sort(parameters, {}, key);
    return parameters;
}

std::uint64_t divisible_by(const ParameterInfo& info) noexcept {
    const bool matrix = info.shape.size() == 2 && info.weight_decay;
    return matrix ? std::min(stored_elements(info), kScaleRows * info.shape[1])
                  : stored_elements(info);
}

bool is_linear(const ParameterInfo& info) noexcept {
    return info.kind == ParameterKind::Attention || info.kind == ParameterKind::Ffn ||
           info.kind == ParameterKind::Expert;
}

ParameterStore::ParameterStore(Device& device, std::vector<ParameterInfo> mine, DType activation,
                               bool training, LinearPrecision linear)
    : device_(&device), activation_(activation), linear_(linear) {
    int range = -1;
    for (ParameterInfo& info : in_stored_order(std::move(mine))) {
        if (range_of(info) != range) {
            range = range_of(info);
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
    const std::uint64_t elements = std::max<std::uint64_t>(num_elements_, kAlignment);
    weights_ = Buffer(
        device, {.name = "weights", .bytes = elements * 4, .category = MemoryCategory::Weights});
    if (training)
        gradients_ = Buffer(
            device,
            {.name = "gradients", .bytes = elements * 4, .category = MemoryCategory::Gradients});
    if (activation_ == DType::BF16)
        compute_ = Buffer(
            device,
            {.name = "bf16 weights", .bytes = elements * 2, .category = MemoryCategory::Weights});
    for (Parameter& parameter : parameters_) {
        const auto& info = parameter.info;
        const std::uint64_t size = info.size();
        parameter.weight = view_of(weights_, DType::F32, parameter.first, info.shape, size);
        parameter.compute = compute_
                                ? view_of(compute_, DType::BF16, parameter.first, info.shape, size)
                                : parameter.weight;
        if (training && info.trainable())
            parameter.gradient = view_of(gradients_, DType::F32, parameter.first, info.shape, size);
    }
    make_quantized();
    if (!training)
        return;
    clear_ = std::make_unique<Recording>(device, QueueRole::Compute, "clear gradients");
    clear_->fill(gradients_.view(), 0);
}

void ParameterStore::make_quantized() {
    if (linear_ != LinearPrecision::Fp8)
        return;
    std::uint64_t codes = 0, scales = 0;
    const auto each = [&](const auto& visit) {
        for (Parameter& parameter : parameters_) {
            if (!is_linear(parameter.info))
                continue;
            const std::uint64_t out = parameter.info.shape[0], in = parameter.info.shape[1];
            visit(parameter, out, in);
            codes += fp8::codes_bytes({out, in});
            scales += fp8::scales_bytes(kWeightsRecipe, {out, in});
        }
    };
    each([](const Parameter& parameter, std::uint64_t out, std::uint64_t in) {
        if (out % 8 != 0 || in % 8 != 0)
            throw Error(ErrorCode::InvalidArgument,
                        parameter.info.name + " is " + std::to_string(out) + " x " +
                            std::to_string(in) +
                            "; FP8 needs multiples of 8: take other sizes, bf16 or f32");
    });
    codes_ = Buffer(*device_, {.name = "fp8 weights",
                               .bytes = std::max<std::uint64_t>(codes, 16),
                               .category = MemoryCategory::Weights});
    scales_ = Buffer(*device_, {.name = "fp8 weights' scales",
                                .bytes = std::max<std::uint64_t>(scales, 16),
                                .category = MemoryCategory::Weights});
    codes = scales = 0;
    each([&](Parameter& parameter, std::uint64_t out, std::uint64_t in) {
        parameter.quantized = fp8::make_quantized(
            codes_.view().sub(codes, fp8::codes_bytes({out, in})),
            scales_.view().sub(scales, fp8::scales_bytes(kWeightsRecipe, {out, in})),
            kWeightsRecipe, {out, in});
    });
}

void ParameterStore::use_products(const fp8::Choice& choice) {
    products_ = choice;
    make_turned();
}

/// By the sizes of the matrix alone: whether products of few or many rows by its transposed copy go
/// Direct.
bool ParameterStore::wants_turned(const ParameterInfo& info) const {
    if (!training() || !compute_ || linear_ != LinearPrecision::AsActivations || !is_linear(info))
        return false;
    const std::uint64_t out = info.shape[0], in = info.shape[1];
    if (out % 4 != 0 || in % 4 != 0) // ops::transpose
        return false;
    const auto bf16 = [](std::initializer_list<std::uint64_t> extents) {
        std::uint64_t bytes = size_of(DType::BF16);
        for (const std::uint64_t extent : extents)
            bytes *= extent;
        return TensorView::contiguous({nullptr, 0, bytes}, DType::BF16, extents);
    };
    const bool expert = info.kind == ParameterKind::Expert;
    const TensorView turned = expert ? bf16({1, in, out}) : bf16({in, out});
    const auto offsets = TensorView::contiguous({nullptr, 0, 2 * 4}, DType::U32, {2});
    const auto goes_direct = [&](std::uint64_t rows) {
        const fp8::GroupedRows of_experts{fp8::GroupLayout::prefix_sums(offsets, rows), {}};
        return products_
                   .way(*device_, GemmForm::NT, bf16({rows, out}), turned, bf16({rows, in}),
                        expert ? &of_experts : nullptr)
                   .variant == fp8::Variant::Direct;
    };
    return goes_direct(1) || goes_direct(4096);
}

void ParameterStore::make_turned() {
    std::uint64_t elements = 0;
    std::vector<Parameter*> wanting;
    for (Parameter& parameter : parameters_) {
        parameter.turned = {};
        if (!wants_turned(parameter.info))
            continue;
        wanting.push_back(&parameter);
        elements += stored_elements(parameter.info);
    }
    turned_ = {};
    if (elements == 0)
        return;
    turned_ = Buffer(*device_, {.name = "transposed bf16 weights",
                                .bytes = elements * size_of(DType::BF16),
                                .category = MemoryCategory::Weights});
    elements = 0;
    for (Parameter* parameter : wanting) {
        const ParameterInfo& info = parameter->info;
        parameter->turned =
            view_of(turned_, DType::BF16, elements, {info.shape[1], info.shape[0]}, info.size());
        elements += stored_elements(info);
    }
    Recording turn(*device_, QueueRole::Compute, "transpose weights");
    transpose(turn);
    device_->submit(turn).wait();
}

const Parameter& ParameterStore::at(const std::string& name) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end())
        throw Error(ErrorCode::InvalidArgument, "this rank has no parameter " + name);
    return parameters_[found->second];
}

Parameter ParameterStore::experts(std::uint64_t layer, const std::string& matrix) const {
    const Parameter* first = nullptr;
    std::uint64_t count = 0;
    for (const Parameter& parameter : parameters_)
        if (parameter.info.kind == ParameterKind::Expert &&
            parameter.info.layer == static_cast<std::int64_t>(layer) &&
            matrix_of(parameter.info) == matrix) {
            first = first ? first : &parameter;
            ++count;
        }
    if (first == nullptr)
        throw Error(ErrorCode::InvalidArgument,
                    "this rank has no experts of layer " + std::to_string(layer));
    return side_by_side(*first, count);
}

Parameter ParameterStore::side_by_side(const Parameter& first, std::uint64_t count) const {
    const std::uint64_t out = first.info.shape[0], in = first.info.shape[1];
    Parameter all = first;
    const auto widen = [&](const Buffer& flat, DType dtype) {
        return TensorView::contiguous(
            flat.view().sub(all.first * size_of(dtype), count * out * in * size_of(dtype)), dtype,
            {count, out, in});
    };
    all.weight = widen(weights_, DType::F32);
    all.compute = compute_ ? widen(compute_, DType::BF16) : all.weight;
    if (gradients_)
        all.gradient = widen(gradients_, DType::F32);
    if (all.quantized) { // each expert's part is as large
        const auto batch = [&](TensorView view, std::uint64_t bytes) {
            view.buffer.bytes = bytes * count;
            view.rank = 3;
            view.extent = {count, view.extent[0], view.extent[1]};
            view.stride = {bytes / size_of(view.dtype), view.stride[0], 1};
            return view;
        };
        all.quantized->codes = batch(all.quantized->codes, fp8::codes_bytes({out, in}));
        all.quantized->scales =
            batch(all.quantized->scales, fp8::scales_bytes(kWeightsRecipe, {out, in}));
    }
    if (all.turned.buffer) // each as large as the others, without padding between them
        all.turned = TensorView::contiguous({turned_.view().resource, all.turned.buffer.offset,
                                             count * out * in * size_of(DType::BF16)},
                                            DType::BF16, {count, in, out});
    return all;
}

Parameter ParameterStore::rows_of(const Parameter& parameter, std::uint64_t begin,
                                  std::uint64_t end) const {
    Parameter part = parameter;
    const std::uint64_t count = end - begin;
    part.weight = parameter.weight.rows(begin, count);
    part.compute = parameter.compute.rows(begin, count);
    if (part.quantized) {
        part.quantized->codes = parameter.quantized->codes.rows(begin, count);
        part.quantized->scales = parameter.quantized->scales.rows(
            begin / kScaleRows, (count + kScaleRows - 1) / kScaleRows);
    }
    return part;
}

template <class Has, class Visit>
void ParameterStore::for_each_copied(std::uint64_t first, std::uint64_t count, Has has,
                                     Visit visit) const {
    const std::uint64_t last = first + count;
    const auto whole = [&](const Parameter& parameter) {
        return parameter.first >= first && parameter.first + parameter.info.size() <= last;
    };
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        const Parameter& parameter = parameters_[i];
        const std::uint64_t end = parameter.first + parameter.info.size();
        if (end <= first || parameter.first >= last || !has(parameter))
            continue;
        if (!whole(parameter)) {
            const std::uint64_t columns = parameter.info.shape[1];
            visit(rows_of(parameter, (std::max(first, parameter.first) - parameter.first) / columns,
                          (std::min(last, end) - parameter.first) / columns));
            continue;
        }
        if (parameter.info.kind != ParameterKind::Expert) {
            visit(parameter);
            continue;
        }
        const auto continues = [&](const Parameter& next) {
            return whole(next) && next.info.kind == ParameterKind::Expert &&
                   next.info.layer == parameter.info.layer &&
                   matrix_of(next.info) == matrix_of(parameter.info);
        };
        std::size_t next = i + 1;
        while (next < parameters_.size() && continues(parameters_[next]))
            ++next;
        visit(side_by_side(parameter, next - i));
        i = next - 1;
    }
}

void ParameterStore::quantize(Recording& recording, std::uint64_t first,
                              std::uint64_t count) const {
    for_each_copied(
        first, count, [](const Parameter& p) { return p.quantized.has_value(); },
        [&](const Parameter& p) { fp8::quantize(recording, p.weight, *p.quantized); });
}

void ParameterStore::transpose(Recording& recording, std::uint64_t first,
                               std::uint64_t count) const {
    for_each_copied(
        first, count, [](const Parameter& p) { return static_cast<bool>(p.turned.buffer); },
        [&](const Parameter& p) { ops::transpose(recording, p.compute, p.turned); });
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
    // Of what computes in FP8 nothing else is read.
    std::vector<ParameterRange> runs;
    for (const Parameter& parameter : parameters_) {
        const std::uint64_t size = stored_elements(parameter.info);
        if (parameter.first < first || parameter.first >= ends.back() || parameter.quantized)
            continue;
        if (!runs.empty() && runs.back().first + runs.back().count == parameter.first)
            runs.back().count += size;
        else
            runs.push_back({parameter.first, size});
    }
    for (const ParameterRange& run : runs)
        add(compute_ ? flat_compute() : flat_weights(), [&run](std::uint64_t element) {
            return std::clamp(element, run.first, run.first + run.count);
        });
    const auto add_quantized = [&](const Buffer& buffer, auto part, std::uint64_t rows) {
        if (!buffer)
            return;
        add(buffer.tensor(DType::U8, {buffer.size()}), [&, part, rows](std::uint64_t element) {
            for (const Parameter& parameter : parameters_) {
                if (!parameter.quantized ||
                    parameter.first + stored_elements(parameter.info) <= element)
                    continue;
                const TensorView& view = (*parameter.quantized).*part;
                const std::uint64_t row =
                    element > parameter.first
                        ? (element - parameter.first) / parameter.info.shape[1] / rows
                        : 0;
                return view.buffer.offset + row * view.stride[0] * size_of(view.dtype);
            }
            return buffer.size();
        });
    };
    add_quantized(codes_, &fp8::Quantized::codes, 1);
    add_quantized(scales_, &fp8::Quantized::scales, kScaleRows);
    return copies;
}

TensorView ParameterStore::flat_weights() const {
    return weights_.tensor(DType::F32, {num_elements_});
}

TensorView ParameterStore::flat_compute() const {
    return compute_ ? compute_.tensor(DType::BF16, {num_elements_}) : TensorView{};
}

TensorView ParameterStore::flat_gradients() const {
    return gradients_ ? gradients_.tensor(DType::F32, {num_elements_}) : TensorView{};
}

void ParameterStore::initialise(std::uint64_t seed) {
    std::vector<float> flat(num_elements_, 0.0f);
    std::atomic<std::size_t> next{0};
    const auto fill = [&] {
        for (std::size_t i = next++; i < parameters_.size(); i = next++) {
            const Parameter& parameter = parameters_[i];
            fill_initial_values(parameter.info, seed,
                                std::span(flat).subspan(parameter.first, parameter.info.size()));
        }
    };
    constexpr unsigned kMostThreads = 16; // a host's ranks do this at once
    std::vector<std::future<void>> others;
    for (unsigned i = 1; i < std::min(std::thread::hardware_concurrency(), kMostThreads); ++i)
        others.push_back(std::async(std::launch::async, fill));
    fill();
    for (std::future<void>& other : others)
        other.get();
    device_->upload(flat_weights().buffer, std::span<const float>(flat));
    if (compute_ || codes_) {
        Recording cast(*device_, QueueRole::Compute, "cast weights");
        if (compute_)
            ops::cast(cast, flat_weights(), flat_compute());
        quantize(cast);
        transpose(cast);
        device_->submit(cast).wait();
    }
    if (training())
        clear_gradients().wait();
}

void ParameterStore::upload(const std::string& name, std::span<const float> values) {
    const Parameter& parameter = at(name);
    device_->upload(parameter.weight.buffer, values);
    if (compute_ || parameter.quantized) {
        Recording cast(*device_, QueueRole::Compute, "cast " + name);
        if (compute_)
            ops::cast(cast, parameter.weight, parameter.compute);
        if (parameter.quantized)
            fp8::quantize(cast, parameter.weight, *parameter.quantized);
        if (parameter.turned.buffer)
            ops::transpose(cast, parameter.compute, parameter.turned);
        device_->submit(cast).wait();
    }
}

std::vector<float> ParameterStore::download(const std::string& name) const {
    const Parameter& parameter = at(name);
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
