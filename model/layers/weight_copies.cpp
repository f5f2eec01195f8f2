// SPDX-License-Identifier: MIT
// What products read of matrices beside bf16 weights, made from them or from master weights: FP8
// codes, transposed bf16 copies and packed FP8 ones.
#include "linear.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/model/parameter_store.hpp>

#include <algorithm>

namespace bellows {

namespace {

constexpr std::uint64_t kFewRows = 256, kManyRows = 4096; // of an expert's, or of all

/// How a product goes whose operands have no memory yet: experts' where there is a batch of
/// weights, and d has the rows of all of them.
fp8::Variant variant_of(const fp8::Choice& products, const Device& device, GemmForm form,
                        const fp8::Operand& a, const fp8::Operand& weights, const TensorView& d) {
    const std::uint64_t experts = weights.values.rank == 3 ? weights.values.extent[0] : 0;
    if (experts == 0)
        return products.way(device, form, a, weights, d).variant;
    const auto offsets =
        TensorView::contiguous({nullptr, 0, (experts + 1) * 4}, DType::U32, {experts + 1});
    const fp8::GroupedRows rows{fp8::GroupLayout::prefix_sums(offsets, d.extent[0]), {}};
    return products.way(device, form, a, weights, d, &rows).variant;
}

TensorView bf16_nowhere(std::initializer_list<std::uint64_t> extents) {
    std::uint64_t bytes = size_of(DType::BF16);
    for (const std::uint64_t extent : extents)
        bytes *= extent;
    return TensorView::contiguous({nullptr, 0, bytes}, DType::BF16, extents);
}

fp8::Quantized codes_nowhere(const fp8::Recipe& recipe,
                             std::initializer_list<std::uint64_t> extents) {
    return fp8::make_quantized({nullptr, 0, fp8::quantized_bytes(recipe, extents)}, recipe,
                               extents);
}

} // namespace

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
    codes_ = make_memory("fp8 weights", codes, MemoryCategory::Weights);
    scales_ = make_memory("fp8 weights' scales", scales, MemoryCategory::Weights);
    codes = scales = 0;
    each([&](Parameter& parameter, std::uint64_t out, std::uint64_t in) {
        parameter.quantized =
            fp8::make_quantized(codes_.sub(codes, fp8::codes_bytes({out, in})),
                                scales_.sub(scales, fp8::scales_bytes(kWeightsRecipe, {out, in})),
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
    if (!training() || !compute_.buffer || linear_ != LinearPrecision::AsActivations ||
        !is_linear(info))
        return false;
    const std::uint64_t out = info.shape[0], in = info.shape[1];
    if (out % 4 != 0 || in % 4 != 0) // ops::transpose
        return false;
    const bool expert = info.kind == ParameterKind::Expert;
    const TensorView turned = expert ? bf16_nowhere({1, in, out}) : bf16_nowhere({in, out});
    const auto goes_direct = [&](std::uint64_t rows) {
        return variant_of(products_, *device_, GemmForm::NT, bf16_nowhere({rows, out}), turned,
                          bf16_nowhere({rows, in})) == fp8::Variant::Direct;
    };
    return goes_direct(1) || goes_direct(kManyRows);
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
            flat.rows(elements, info.size()).reshaped({info.shape[1], info.shape[0]});
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
    const fp8::Quantized weights = experts ? codes_nowhere(kWeightsRecipe, {count, out, in})
                                           : codes_nowhere(kWeightsRecipe, {out, in});
    const auto goes_packed = [&](GemmForm form, std::uint64_t rows) {
        const std::uint64_t from = form == GemmForm::NT ? in : out, to = in + out - from;
        return variant_of(products_, *device_, form, codes_nowhere(kRowsRecipe, {rows, from}),
                          weights, bf16_nowhere({rows, to})) == fp8::Variant::Packed;
    };
    for (const std::uint64_t rows : {kFewRows, kManyRows})
        for (const GemmForm form : {GemmForm::NT, GemmForm::NN})
            if (goes_packed(form, rows * count))
                return true;
    return false;
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
        parameter.quantized->scales.rows(begin / kScaleRows, div_up(count, kScaleRows));
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
        const std::size_t behind = i + together(i);
        std::size_t next = i + 1;
        while (next < behind && whole(parameters_[next]))
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

} // namespace bellows
