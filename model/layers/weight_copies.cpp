// SPDX-License-Identifier: MIT
#include "weight_copies.hpp"

#include "linear.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/quantize.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <algorithm>
#include <array>

namespace bellows {

namespace {

constexpr std::array<std::uint64_t, 2> kUsualRows = {256, 4096}; // of an expert's, or of all

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

/// `count` experts' matrices that stand side by side, as one of [count, out, in].
Parameter side_by_side(const Parameter& first, std::uint64_t count) {
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
            batch(all.quantized->scales, fp8::scales_bytes(all.quantized->recipe, {out, in}));
    }
    if (all.turned.buffer) // each as large as the others, without padding between them
        all.turned = TensorView::contiguous({all.turned.buffer.resource, all.turned.buffer.offset,
                                             count * out * in * size_of(DType::BF16)},
                                            DType::BF16, {count, in, out});
    return all;
}

/// The FP8 codes and scales of elements [begin, end) of a matrix. These are whole rows, and the
/// first of them is a multiple of 128.
Parameter rows_of(const Parameter& parameter, std::uint64_t begin, std::uint64_t end) {
    Parameter part = parameter;
    const std::uint64_t columns = parameter.info.shape[1];
    const std::uint64_t row = begin / columns, count = end / columns - row;
    part.first += row * columns;
    part.quantized->codes = parameter.quantized->codes.rows(row, count);
    part.quantized->scales =
        parameter.quantized->scales.rows(row / kScaleRows, div_up(count, kScaleRows));
    return part;
}

} // namespace

WeightCopies::WeightCopies(Device& device, const ParameterList& list, const WeightForms& forms,
                           WeightMemory& memory, std::span<Parameter> parameters)
    : device_(&device), list_(&list), forms_(forms), parameters_(parameters) {
    if (forms.linear != LinearPrecision::Fp8)
        return;
    check_forms();
    make_quantized(memory);
}

void WeightCopies::check_forms() const {
    for (std::size_t i = 0, count = 0; i < parameters_.size(); i += count) {
        count = list_->together(i);
        if (!is_linear(parameters_[i].info))
            continue;
        const LinearForm form = forms_.form_of(parameters_[i].info);
        for (std::size_t j = i; j < i + count; ++j) {
            const ParameterInfo& info = parameters_[j].info;
            if (forms_.form_of(info) != form)
                throw Error(ErrorCode::InvalidArgument,
                            info.name + " and " + parameters_[i].info.name +
                                " are read by one product and must have the same LinearForm");
            if (forms_.training && form != LinearForm::PowerOfTwo)
                throw Error(ErrorCode::InvalidArgument,
                            info.name + ": training has FP8 weights of LinearForm::PowerOfTwo");
        }
    }
}

void WeightCopies::make_quantized(WeightMemory& memory) {
    // Both recipes have as many scales.
    std::uint64_t codes = 0, scales = 0;
    const auto each = [&](const auto& visit) {
        for (Parameter& parameter : parameters_) {
            if (!forms_.in_fp8(parameter.info))
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
    codes_ = memory.make("fp8 weights", codes, MemoryCategory::Weights);
    scales_ = memory.make("fp8 weights' scales", scales, MemoryCategory::Weights);
    codes = scales = 0;
    each([&](Parameter& parameter, std::uint64_t out, std::uint64_t in) {
        const bool stored = forms_.form_of(parameter.info) == LinearForm::StoredCodes;
        has_f32_scales_ = has_f32_scales_ || stored;
        const fp8::Recipe& recipe = stored ? kStoredWeightsRecipe : kWeightsRecipe;
        parameter.quantized = fp8::make_quantized(
            codes_.sub(codes, fp8::codes_bytes({out, in})),
            scales_.sub(scales, fp8::scales_bytes(recipe, {out, in})), recipe, {out, in});
    });
}

void WeightCopies::use_products(const fp8::Choice& choice) {
    products_ = choice;
    make_turned();
    make_packed();
    Recording copies(*device_, QueueRole::Compute, "copies of weights");
    make_copies(copies, 0, list_->num_elements());
    if (copies.num_operations() > 0)
        device_->submit(copies).wait();
}

/// By the sizes of the matrix alone: whether products of few or many rows by its transposed copy go
/// Direct.
bool WeightCopies::wants_turned(const ParameterInfo& info) const {
    if (!forms_.training || !forms_.in_bf16(info) || !is_linear(info))
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
    return goes_direct(1) || goes_direct(kUsualRows.back());
}

void WeightCopies::make_turned() {
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

/// By the sizes of the matrices alone: how products of many rows with them, and of fewer, are
/// computed. Where sizes decide on the variant, what is prepacked would, too: nothing is, then.
WeightCopies::WantedCopies WeightCopies::wanted_copies(std::size_t index) const {
    const ParameterInfo& info = parameters_[index].info;
    if (!forms_.training || !forms_.in_fp8(info) || products_.otherwise() == fp8::Variant::Device)
        return {};
    const std::uint64_t out = info.shape[0], in = info.shape[1], count = list_->together(index);
    const bool experts = info.kind == ParameterKind::Expert;
    const fp8::Quantized weights = experts ? codes_nowhere(kWeightsRecipe, {count, out, in})
                                           : codes_nowhere(kWeightsRecipe, {out, in});
    const auto goes = [&](GemmForm form, fp8::Variant variant) {
        const std::uint64_t from = form == GemmForm::NT ? in : out, to = in + out - from;
        return std::any_of(kUsualRows.begin(), kUsualRows.end(), [&](std::uint64_t rows) {
            rows *= count;
            return variant_of(products_, *device_, form, codes_nowhere(kRowsRecipe, {rows, from}),
                              weights, bf16_nowhere({rows, to})) == variant;
        });
    };
    WantedCopies wanted;
    if (goes(GemmForm::NT, fp8::Variant::Packed) || goes(GemmForm::NN, fp8::Variant::Packed))
        wanted.nt = wanted.nn = fp8::Variant::Packed;
    if (goes(GemmForm::NN, fp8::Variant::Native))
        wanted.nn = fp8::Variant::Native;
    return wanted;
}

void WeightCopies::make_packed() {
    constexpr std::uint64_t kAlignedTo = 256;
    packed_weights_.clear();
    packed_ = {};
    std::uint64_t bytes = 0;
    for (std::size_t i = 0, count = 0; i < parameters_.size(); i += count) {
        count = list_->together(i);
        parameters_[i].packed_nt = parameters_[i].packed_nn = {};
        const WantedCopies wanted = wanted_copies(i);
        if (!wanted.nt && !wanted.nn)
            continue;
        const fp8::Quantized codes = *side_by_side(parameters_[i], count).quantized;
        packed_weights_.push_back({i, count, codes, {}, {}});
        const auto place = [&](std::optional<fp8::Prepacked>& to, GemmForm form,
                               std::optional<fp8::Variant> variant) {
            if (!variant)
                return;
            const std::uint64_t each =
                round_up(fp8::prepacked_bytes(*device_, codes, form, *variant), kAlignedTo);
            to = fp8::Prepacked{{nullptr, bytes, each}, form, *variant};
            bytes += each;
        };
        place(packed_weights_.back().nt, GemmForm::NT, wanted.nt);
        place(packed_weights_.back().nn, GemmForm::NN, wanted.nn);
    }
    if (bytes == 0)
        return;
    packed_ =
        Buffer(*device_,
               {.name = "packed fp8 weights", .bytes = bytes, .category = MemoryCategory::Weights});
    for (PackedWeights& weights : packed_weights_) {
        for (auto* packed : {&weights.nt, &weights.nn})
            if (*packed)
                (*packed)->memory =
                    packed_.view().sub((*packed)->memory.offset, (*packed)->memory.bytes);
        if (parameters_[weights.first].info.kind == ParameterKind::Expert)
            continue; // one of them alone is no product's operand
        parameters_[weights.first].packed_nt = weights.nt;
        parameters_[weights.first].packed_nn = weights.nn;
    }
}

Parameter WeightCopies::view_of(const ParameterPart& part) const {
    const Parameter& parameter = parameters_[part.index];
    if (!part.whole)
        return rows_of(parameter, part.begin, part.end);
    return parameter.info.kind == ParameterKind::Expert ? side_by_side(parameter, part.count)
                                                        : parameter;
}

Parameter WeightCopies::experts(std::size_t first) const {
    Parameter all = side_by_side(parameters_[first], list_->together(first));
    for (const PackedWeights& weights : packed_weights_)
        if (weights.first == first) {
            all.packed_nt = weights.nt;
            all.packed_nn = weights.nn;
        }
    return all;
}

void WeightCopies::quantize(Recording& recording, std::uint64_t first,
                            const TensorView& masters) const {
    for (const ParameterPart& part : list_->parts(first, masters.num_elements())) {
        if (!parameters_[part.index].quantized)
            continue;
        const Parameter matrices = view_of(part); // one or several
        const TensorView& codes = matrices.quantized->codes;
        const TensorView values = masters.rows(matrices.first - first, codes.num_elements());
        fp8::quantize(recording,
                      codes.rank == 2
                          ? values.reshaped({codes.extent[0], codes.extent[1]})
                          : values.reshaped({codes.extent[0], codes.extent[1], codes.extent[2]}),
                      *matrices.quantized);
    }
}

void WeightCopies::make_copies(Recording& recording, std::uint64_t first,
                               std::uint64_t count) const {
    for (const ParameterPart& part : list_->parts(first, count)) {
        if (!parameters_[part.index].turned.buffer)
            continue;
        const Parameter matrices = view_of(part);
        ops::transpose(recording, matrices.compute, matrices.turned);
    }
    for (const PackedWeights& weights : packed_weights_) {
        std::size_t begin = weights.first, end = weights.first + weights.count;
        while (begin < end && (*list_)[begin].first < first)
            ++begin;
        while (begin < end && (*list_)[end - 1].first >= first + count)
            --end;
        if (begin < end)
            for (const auto* packed : {&weights.nt, &weights.nn})
                if (*packed)
                    fp8::prepack(recording, weights.codes, (*packed)->form, (*packed)->memory,
                                 begin - weights.first, end - begin, (*packed)->variant);
    }
}

void WeightCopies::add_sent_copies(std::vector<SentCopy>& copies,
                                   std::span<const std::uint64_t> ends) const {
    const auto add = [&](const BufferView& all, auto part, std::uint64_t rows) {
        if (!all)
            return;
        const auto bytes = TensorView::contiguous(all, DType::U8, {all.bytes});
        add_sent_copy(copies, bytes, ends, [&, part, rows](std::uint64_t element) {
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
    add(codes_, &fp8::Quantized::codes, 1);
    add(scales_, &fp8::Quantized::scales, kScaleRows);
}

} // namespace bellows
