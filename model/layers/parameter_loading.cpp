// SPDX-License-Identifier: MIT
// ParameterStore::load(): how stored weights come to the device.
#include "parameter_store_impl.hpp"
#include "row_pieces.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/fp8/sizes.hpp>
#include <bellows/shape/layer.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <algorithm>

namespace bellows {

namespace {

/// The memory of consecutive views: with what is between their first and their last byte.
BufferView from_to(const BufferView& first, const BufferView& last) {
    return {first.resource, first.offset, last.offset + last.bytes - first.offset};
}

/// Elements of zeros that follow a parameter's rows in memory, where they end at `row`.
std::uint64_t padding_behind(const ParameterInfo& info, std::uint64_t row) {
    return row < info.shape.front() ? 0 : stored_elements(info) - info.size();
}

/// Codes from a source that knows nothing of the padding between rows.
void take_codes(const CodeSource& source, const ParameterInfo& info, std::uint64_t first_row,
                std::span<std::uint8_t> to) {
    const std::uint64_t columns = info.shape[1], pitch = fp8::codes_shape({1, columns}).stride[0];
    if (pitch == columns)
        return source.codes(info, first_row, to);
    for (std::uint64_t row = 0; row * pitch < to.size(); ++row) {
        const auto mine = to.subspan(row * pitch, pitch);
        source.codes(info, first_row + row, mine.first(columns));
        std::ranges::fill(mine.subspan(columns), std::uint8_t{0});
    }
}

} // namespace

ParameterStore::Impl::Passage ParameterStore::Impl::passage_of(std::size_t index, bool bf16,
                                                               bool codes) const {
    const ParameterInfo& info = list[index].info;
    const std::optional<fp8::Quantized>& quantized = parameters[index].quantized;
    if (codes && quantized && quantized->recipe == kStoredWeightsRecipe)
        return Passage::Codes;
    if (bf16 && !forms.training && !forms.in_f32(info) && forms.in_bf16(info))
        return Passage::Bf16;
    return Passage::Values;
}

void ParameterStore::Impl::load_large(const ListedParameter& parameter, const RowSource& source,
                                      const MasterSink& masters,
                                      const std::function<void(std::uint64_t)>& on_progress) {
    const ParameterInfo& info = parameter.info;
    const std::uint64_t rows = info.shape.front(), columns = info.size() / rows;
    const std::uint64_t step =
        std::max<std::uint64_t>(kInitialisedAtOnce / columns / kScaleRows, 1) * kScaleRows;
    std::vector<float> values;
    for (std::uint64_t row = 0; row < rows; row += step) {
        const std::uint64_t count = std::min(step, rows - row);
        values.resize(count * columns + padding_behind(info, row + count));
        const auto mine = std::span(values).first(count * columns);
        std::ranges::fill(std::span(values).subspan(mine.size()), 0.0f);
        std::vector<RowPiece<float>> pieces;
        add_pieces(pieces, info, row, count, columns, mine);
        fill(pieces, source);
        const std::uint64_t first = parameter.first + row * columns;
        write_part(first, values);
        if (masters)
            masters(first, values);
        if (on_progress)
            on_progress(first + values.size());
    }
    make_copies(parameter.first, info.size());
}

void ParameterStore::Impl::load_values(std::size_t begin, std::size_t end, const RowSource& source,
                                       const MasterSink& masters) {
    const std::uint64_t first = list[begin].first;
    const ListedParameter& last = list[end - 1];
    std::vector<float> values(last.first + stored_elements(last.info) - first, 0.0f);
    std::vector<RowPiece<float>> pieces;
    for (std::size_t i = begin; i < end; ++i) {
        const ParameterInfo& info = list[i].info;
        const std::uint64_t rows = info.shape.front();
        add_pieces(pieces, info, 0, rows, info.size() / rows,
                   std::span(values).subspan(list[i].first - first, info.size()));
    }
    fill(pieces, source);
    write(first, values);
    if (masters)
        masters(first, values);
}

void ParameterStore::Impl::load_bf16(std::size_t begin, std::size_t end,
                                     const Bf16RowSource& source, WeightUpload& upload) {
    const auto send = [&](std::uint64_t first, std::uint64_t count, const auto& add) {
        const auto values = upload.next<std::uint16_t>(count);
        std::vector<RowPiece<std::uint16_t>> pieces;
        add(pieces, values);
        fill(pieces, source);
        upload.send(storage.bf16_runs(first, count).front().weights.buffer);
    };
    const ParameterInfo& only = list[begin].info;
    const std::uint64_t rows = only.shape.front(), columns = only.size() / rows;
    if (only.size() > kInitialisedAtOnce) { // it is alone
        const std::uint64_t of_padding = div_up(padding_behind(only, rows), columns);
        const std::uint64_t step =
            std::max(kInitialisedAtOnce / columns, of_padding + 1) - of_padding;
        for (std::uint64_t row = 0; row < rows; row += step) {
            const std::uint64_t count = std::min(step, rows - row);
            send(list[begin].first + row * columns,
                 count * columns + padding_behind(only, row + count),
                 [&](auto& pieces, auto values) {
                     const auto mine = values.first(count * columns);
                     std::ranges::fill(values.subspan(mine.size()), std::uint16_t{0});
                     add_pieces(pieces, only, row, count, columns, mine);
                 });
        }
        return;
    }
    const std::uint64_t first = list[begin].first;
    const ListedParameter& last = list[end - 1];
    send(first, last.first + stored_elements(last.info) - first, [&](auto& pieces, auto values) {
        for (std::size_t i = begin; i < end; ++i) {
            const ParameterInfo& info = list[i].info;
            const auto mine = values.subspan(list[i].first - first, stored_elements(info));
            std::ranges::fill(mine.subspan(info.size()), std::uint16_t{0});
            add_pieces(pieces, info, 0, info.shape.front(), info.size() / info.shape.front(),
                       mine.first(info.size()));
        }
    });
}

void ParameterStore::Impl::load_codes(std::size_t begin, std::size_t end, const CodeSource& source,
                                      WeightUpload& upload) {
    using Piece = RowPiece<std::uint8_t>;
    const auto fill_codes = [&](const std::vector<Piece>& pieces) {
        fill<std::uint8_t>(pieces, [&](const ParameterInfo& info, std::uint64_t first_row,
                                       std::span<std::uint8_t> codes) {
            take_codes(source, info, first_row, codes);
        });
    };
    const auto pitch_of = [&](std::size_t i) { return parameters[i].quantized->codes.stride[0]; };
    const fp8::Quantized &first = *parameters[begin].quantized,
                         &last = *parameters[end - 1].quantized;
    const ParameterInfo& only = list[begin].info;
    if (only.size() > kInitialisedAtOnce) { // it is alone
        const std::uint64_t rows = only.shape.front(), pitch = pitch_of(begin);
        const std::uint64_t step = std::max<std::uint64_t>(kInitialisedAtOnce / pitch, 1);
        for (std::uint64_t row = 0; row < rows; row += step) {
            const std::uint64_t count = std::min(step, rows - row);
            std::vector<Piece> pieces;
            add_pieces(pieces, only, row, count, pitch, upload.next<std::uint8_t>(count * pitch));
            fill_codes(pieces);
            upload.send(first.codes.buffer.sub(row * pitch, count * pitch));
        }
    } else {
        const BufferView all = from_to(first.codes.buffer, last.codes.buffer);
        const auto codes = upload.next<std::uint8_t>(all.bytes);
        std::vector<Piece> pieces;
        for (std::size_t i = begin; i < end; ++i) {
            const BufferView& mine = parameters[i].quantized->codes.buffer;
            add_pieces(pieces, list[i].info, 0, list[i].info.shape.front(), pitch_of(i),
                       codes.subspan(mine.offset - all.offset, mine.bytes));
        }
        fill_codes(pieces);
        upload.send(all);
    }
    const BufferView all = from_to(first.scales.buffer, last.scales.buffer);
    const auto scales = upload.next<float>(all.bytes / sizeof(float));
    std::ranges::fill(scales, 0.0f); // also what stands between them
    for (std::size_t i = begin; i < end; ++i) {
        const TensorView& mine = parameters[i].quantized->scales;
        source.scales(list[i].info,
                      scales.subspan((mine.buffer.offset - all.offset) / sizeof(float),
                                     mine.extent[0] * mine.extent[1]));
    }
    upload.send(all);
}

void ParameterStore::load(const RowSource& source, const MasterSink& masters,
                          const std::function<void(std::uint64_t elements)>& on_progress,
                          const Bf16RowSource& bf16, const CodeSource& codes) {
    const ParameterList& list = impl_->list;
    const bool as_kept = !masters && (bf16 || codes);
    // Of bf16; codes take as much at most, where rows are padded.
    WeightUpload upload(impl_->device, as_kept ? std::min(kInitialisedAtOnce, num_elements()) *
                                                     size_of(DType::BF16)
                                               : 0);
    const auto passage_of = [&](std::size_t index) {
        return masters ? Impl::Passage::Values
                       : impl_->passage_of(index, static_cast<bool>(bf16), bool(codes));
    };
    for (std::size_t begin = 0, end = 0; begin < list.size(); begin = end) {
        const Impl::Passage passage = passage_of(begin);
        const std::size_t most = list.end_of_run(begin, kInitialisedAtOnce);
        for (end = begin + 1; end < most && passage_of(end) == passage;)
            ++end;
        const ParameterInfo& info = list[begin].info;
        if (passage == Impl::Passage::Codes) {
            impl_->load_codes(begin, end, codes, upload);
        } else if (passage == Impl::Passage::Bf16) {
            impl_->load_bf16(begin, end, bf16, upload);
        } else if (info.size() > kInitialisedAtOnce && info.shape.size() == 2) {
            impl_->load_large(list[begin], source, masters, on_progress);
            continue; // it has told its progress
        } else {
            impl_->load_values(begin, end, source, masters);
        }
        if (on_progress)
            on_progress(list[end - 1].first + stored_elements(list[end - 1].info));
    }
    upload.wait();
}

} // namespace bellows
