// SPDX-License-Identifier: MIT
#include "linear.hpp"

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

bool kept_in_f32(const ParameterInfo& info) noexcept {
    return info.kind != ParameterKind::Expert && !(info.trainable() && info.weight_decay);
}

bool is_linear(const ParameterInfo& info) noexcept {
    return info.kind == ParameterKind::Attention || info.kind == ParameterKind::Ffn ||
           info.kind == ParameterKind::Expert;
}

ParameterStore::ParameterStore(Device& device, std::vector<ParameterInfo> mine, DType activation,
                               bool training, LinearPrecision linear, const MemorySource& gradients)
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
    make_buffers(training, gradients);
    make_quantized();
    if (!training)
        return;
    clear_ = std::make_unique<Recording>(device, QueueRole::Compute, "clear gradients");
    clear_->fill(gradients_.buffer, 0);
}

void ParameterStore::make_buffers(bool training, const MemorySource& gradients) {
    for (const Parameter& parameter : parameters_) {
        if (!in_f32(parameter.info))
            continue;
        if (in_weights_.count == 0)
            in_weights_.first = parameter.first; // the others stand behind it
        in_weights_.count += stored_elements(parameter.info);
    }
    const auto make = [&](const char* name, std::uint64_t elements, DType dtype,
                          MemoryCategory category) {
        return Buffer(*device_,
                      {.name = name,
                       .bytes = std::max<std::uint64_t>(elements, kAlignment) * size_of(dtype),
                       .category = category});
    };
    weights_ = make("weights", in_weights_.count, DType::F32, MemoryCategory::Weights);
    if (training) {
        if (!gradients)
            own_gradients_ =
                make("gradients", num_elements_, DType::F32, MemoryCategory::Gradients);
        gradients_ = TensorView::contiguous(
            gradients ? gradients(std::max(num_elements_, kAlignment) * size_of(DType::F32))
                      : own_gradients_.view(),
            DType::F32, {num_elements_});
    }
    make_runs();
    for (Parameter& parameter : parameters_) {
        const auto& info = parameter.info;
        const std::uint64_t size = info.size();
        if (in_f32(info))
            parameter.weight = shaped(f32_weights(parameter.first, size), info.shape);
        if (!compute_)
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
        compute_ = Buffer(*device_, {.name = "bf16 weights",
                                     .bytes = std::max(all, kAlignment) * size_of(DType::BF16),
                                     .category = MemoryCategory::Weights});
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
        run.weights = compute_.tensor(DType::BF16, {all}).rows(until - run.count, run.count);
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

void ParameterStore::make_quantized() {
    if (linear_ != LinearPrecision::Fp8)
        return;
    std::uint64_t codes = 0, scales = 0;
    const auto each = [&](const auto& visit) {
        for (Parameter& parameter : parameters_) {
            if (!in_fp8(parameter.info))
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
    make_packed();
    Recording copies(*device_, QueueRole::Compute, "copies of weights");
    make_copies(copies);
    if (copies.num_operations() > 0)
        device_->submit(copies).wait();
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
    const TensorView flat = turned_.tensor(DType::BF16, {elements});
    elements = 0;
    for (Parameter* parameter : wanting) {
        const ParameterInfo& info = parameter->info;
        parameter->turned =
            shaped(flat.rows(elements, info.size()), {info.shape[1], info.shape[0]});
        elements += stored_elements(info);
    }
}

/// By the sizes of the matrices alone: whether products of many rows with them, or of fewer, are
/// Packed. Where sizes decide on the variant, what is prepacked would, too: nothing is, then.
bool ParameterStore::wants_packed(std::size_t index) const {
    const ParameterInfo& info = parameters_[index].info;
    if (!training() || !in_fp8(info) || products_.otherwise() == fp8::Variant::Device)
        return false;
    const std::uint64_t out = info.shape[0], in = info.shape[1], count = together(index);
    const bool experts = info.kind == ParameterKind::Expert;
    const auto nowhere = [](const fp8::Recipe& recipe,
                            std::initializer_list<std::uint64_t> extents) {
        return fp8::make_quantized({nullptr, 0, fp8::quantized_bytes(recipe, extents)}, recipe,
                                   extents);
    };
    const fp8::Quantized weights =
        experts ? nowhere(kWeightsRecipe, {count, out, in}) : nowhere(kWeightsRecipe, {out, in});
    const auto offsets =
        TensorView::contiguous({nullptr, 0, (count + 1) * 4}, DType::U32, {count + 1});
    const auto goes_packed = [&](GemmForm form, std::uint64_t rows) {
        const fp8::GroupedRows of_experts{fp8::GroupLayout::prefix_sums(offsets, rows), {}};
        const std::uint64_t from = form == GemmForm::NT ? in : out, to = in + out - from;
        const auto d = TensorView::contiguous({nullptr, 0, 2 * rows * to}, DType::BF16, {rows, to});
        return products_
                   .way(*device_, form, nowhere(kRowsRecipe, {rows, from}), weights, d,
                        experts ? &of_experts : nullptr)
                   .variant == fp8::Variant::Packed;
    };
    for (const std::uint64_t rows : {256, 4096})
        for (const GemmForm form : {GemmForm::NT, GemmForm::NN})
            if (goes_packed(form, rows * count))
                return true;
    return false;
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

void ParameterStore::make_packed() {
    constexpr std::uint64_t kAlignedTo = 256;
    packed_weights_.clear();
    packed_ = {};
    std::uint64_t bytes = 0;
    for (std::size_t i = 0; i < parameters_.size(); i += together(i)) {
        parameters_[i].packed_nt = parameters_[i].packed_nn = {};
        if (!wants_packed(i))
            continue;
        const fp8::Quantized codes = *side_by_side(parameters_[i], together(i)).quantized;
        packed_weights_.push_back({i, together(i), codes, {{}, GemmForm::NT}, {{}, GemmForm::NN}});
        const std::uint64_t of_each =
            (fp8::prepacked_bytes(*device_, codes) + kAlignedTo - 1) / kAlignedTo * kAlignedTo;
        for (fp8::Prepacked* packed : {&packed_weights_.back().nt, &packed_weights_.back().nn}) {
            packed->memory = {nullptr, bytes, of_each};
            bytes += of_each;
        }
    }
    if (bytes == 0)
        return;
    packed_ =
        Buffer(*device_,
               {.name = "packed fp8 weights", .bytes = bytes, .category = MemoryCategory::Weights});
    for (PackedWeights& weights : packed_weights_) {
        for (fp8::Prepacked* packed : {&weights.nt, &weights.nn})
            packed->memory = packed_.view().sub(packed->memory.offset, packed->memory.bytes);
        if (parameters_[weights.first].info.kind == ParameterKind::Expert)
            continue; // one of them alone is no product's operand
        parameters_[weights.first].packed_nt = weights.nt;
        parameters_[weights.first].packed_nn = weights.nn;
    }
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
    Parameter all = side_by_side(*first, count);
    for (const PackedWeights& weights : packed_weights_)
        if (&parameters_[weights.first] == first) {
            all.packed_nt = weights.nt;
            all.packed_nn = weights.nn;
        }
    return all;
}

Parameter ParameterStore::side_by_side(const Parameter& first, std::uint64_t count) const {
    const std::uint64_t out = first.info.shape[0], in = first.info.shape[1];
    Parameter all = first;
    for (TensorView* const view : {&all.weight, &all.compute, &all.gradient})
        if (view->buffer) {
            BufferView buffer = view->buffer;
            buffer.bytes = count * out * in * size_of(view->dtype);
            *view = TensorView::contiguous(buffer, view->dtype, {count, out, in});
        }
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
    part.first += begin * parameter.info.shape[1];
    part.quantized->codes = parameter.quantized->codes.rows(begin, count);
    part.quantized->scales =
        parameter.quantized->scales.rows(begin / kScaleRows, (count + kScaleRows - 1) / kScaleRows);
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
                              const TensorView& masters) const {
    for_each_copied(
        first, masters.num_elements(), [](const Parameter& p) { return p.quantized.has_value(); },
        [&](const Parameter& p) {
            const TensorView& codes = p.quantized->codes; // of a matrix or several
            const TensorView values = masters.rows(p.first - first, codes.num_elements());
            fp8::quantize(recording,
                          codes.rank == 2 ? values.reshaped({codes.extent[0], codes.extent[1]})
                                          : values.reshaped({codes.extent[0], codes.extent[1],
                                                             codes.extent[2]}),
                          *p.quantized);
        });
}

void ParameterStore::make_copies(Recording& recording, std::uint64_t first,
                                 std::uint64_t count) const {
    for_each_copied(
        first, count, [](const Parameter& p) { return static_cast<bool>(p.turned.buffer); },
        [&](const Parameter& p) { ops::transpose(recording, p.compute, p.turned); });
    for (const PackedWeights& weights : packed_weights_) {
        std::size_t begin = weights.first, end = weights.first + weights.count;
        while (begin < end && parameters_[begin].first < first)
            ++begin;
        while (begin < end && parameters_[end - 1].first >= first + count)
            --end;
        if (begin < end)
            for (const fp8::Prepacked* packed : {&weights.nt, &weights.nn})
                fp8::prepack(recording, weights.codes, packed->form, packed->memory,
                             begin - weights.first, end - begin);
    }
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
    if (compute_)
        for (const Bf16Run& run : bf16_runs(first, ends.back() - first)) {
            if (run.weights.buffer)
                add(run.weights, [&run](std::uint64_t element) {
                    return std::clamp(element, run.first, run.first + run.count) - run.first;
                });
        }
    else if (ends.back() > first)
        add(f32_weights(first, ends.back() - first),
            [first](std::uint64_t element) { return element - first; });
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

TensorView ParameterStore::f32_weights(std::uint64_t first, std::uint64_t count) const {
    if (first < in_weights_.first || first + count > in_weights_.first + in_weights_.count)
        return {};
    return weights_.tensor(DType::F32, {in_weights_.count}).rows(first - in_weights_.first, count);
}

void ParameterStore::initialise(std::uint64_t seed, const MasterSink& masters) {
    constexpr unsigned kMostThreads = 16; // a host's ranks do this at once
    const unsigned threads = std::min(std::thread::hardware_concurrency(), kMostThreads);
    for (std::size_t begin = 0, end = 0; begin < parameters_.size(); begin = end) {
        const std::uint64_t first = parameters_[begin].first;
        std::uint64_t count = 0;
        for (; end < parameters_.size() &&
               range_of(parameters_[end].info) == range_of(parameters_[begin].info);
             ++end) {
            const std::uint64_t more = stored_elements(parameters_[end].info);
            if (end > begin && count + more > kElementsAtOnce)
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
