// SPDX-License-Identifier: MIT
// Parameters from the tensors of a folder: values, or FP8 codes and scales as they stand there.
#include "names.hpp"
#include "stored_rows.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/checkpoint/hf_folder.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace bellows {

namespace {

std::uint64_t columns_of(const ParameterInfo& info) {
    return info.shape.size() == 2 ? info.shape[1] : 1;
}

[[noreturn]] void refuse_values(const HfTensor& tensor) {
    throw Error(ErrorCode::Corrupt, in_quotes(tensor.file) + ": tensor " + in_quotes(tensor.name) +
                                        " has an FP8 code or a scale that is no finite number");
}

} // namespace

const HfTensor& HfFolder::tensor(const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end())
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(folder_.string()) + " has no tensor " + in_quotes(name));
    return found->second;
}

StoredRows HfFolder::rows_of(const HfTensor& tensor, std::uint64_t columns) const {
    StoredRows rows;
    rows.type = tensor.type;
    rows.data = tensor.bytes.data();
    rows.columns = columns;
    rows.rows = tensor.bytes.size() * 8 / bits_of(tensor.type) / columns;
    if (tensor.type == StoredType::F8_E4M3) {
        const HfTensor& scales = tensors_.find(scales_name(tensor.name))->second;
        rows.scales = scales.bytes.data();
        rows.scale_type = scales.type;
    }
    return rows;
}

std::vector<HfFolder::RowRun> HfFolder::runs_of(const ParameterInfo& info, std::uint64_t first_row,
                                                std::uint64_t count) const {
    const std::uint64_t head = reordered_rows(config_.model, info);
    std::vector<HfPart> parts = parts_of(info);
    if (info.kind == ParameterKind::Expert)
        if (const HfPart fused = fused_part_of(config_.model, info);
            tensors_.contains(fused.tensor))
            parts = {fused};
    std::vector<RowRun> runs;
    std::uint64_t begin = 0; // of the part, among the parameter's rows
    for (const HfPart& part : parts) {
        const std::uint64_t from = std::max(first_row, begin);
        const std::uint64_t to = std::min(first_row + count, begin + part.rows);
        const HfTensor& there = tensor(part.tensor);
        if (from < to && head == 0)
            runs.push_back({&there, part.first_row + from - begin, from, to - from});
        for (std::uint64_t row = from; head > 0 && row < to; ++row)
            runs.push_back({&there, part.first_row + row_there(row, head), row, 1});
        begin += part.rows;
    }
    return runs;
}

template <class Out>
void HfFolder::read_as(const ParameterInfo& info, std::uint64_t first_row,
                       std::span<Out> out) const {
    const std::uint64_t columns = columns_of(info);
    for (const RowRun& run : runs_of(info, first_row, out.size() / columns))
        if (!read_rows(rows_of(*run.tensor, columns), run.first_row,
                       out.subspan((run.row - first_row) * columns, run.count * columns)))
            refuse_values(*run.tensor);
}

void HfFolder::read(const ParameterInfo& info, std::uint64_t first_row,
                    std::span<float> out) const {
    read_as(info, first_row, out);
}

void HfFolder::read(const ParameterInfo& info, std::uint64_t first_row,
                    std::span<std::uint16_t> out) const {
    read_as(info, first_row, out);
}

// --- Codes

bool HfFolder::blocks_line_up(const ParameterInfo& info) const {
    if (!is_linear(info))
        return false;
    if (const std::uint64_t head = reordered_rows(config_.model, info);
        head > 0 && kBlock % head != 0)
        return false;
    std::uint64_t begin = 0; // of the part, among the parameter's rows
    for (const HfPart& part : parts_of(info)) {
        const auto found = tensors_.find(part.tensor);
        if (found == tensors_.end() || found->second.type != StoredType::F8_E4M3 ||
            begin % kBlock != 0)
            return false;
        begin += part.rows;
    }
    return true;
}

void HfFolder::find_coded_experts() {
    std::set<std::pair<std::int64_t, std::string>> others;
    for (const ParameterInfo& info : parameters(config_.model))
        if (info.kind == ParameterKind::Expert)
            (blocks_line_up(info) ? coded_experts_ : others).emplace(info.layer, matrix_of(info));
    for (const auto& matrix : others)
        coded_experts_.erase(matrix);
}

bool HfFolder::has_codes(const ParameterInfo& info) const {
    return info.kind == ParameterKind::Expert
               ? coded_experts_.contains({info.layer, matrix_of(info)})
               : blocks_line_up(info);
}

void HfFolder::read_codes(const ParameterInfo& info, std::uint64_t first_row,
                          std::span<std::uint8_t> out) const {
    const std::uint64_t columns = columns_of(info);
    for (const RowRun& run : runs_of(info, first_row, out.size() / columns)) {
        const std::span<const std::uint8_t> codes(
            reinterpret_cast<const std::uint8_t*>(run.tensor->bytes.data()) +
                run.first_row * columns,
            run.count * columns);
        if (!are_numbers(codes))
            refuse_values(*run.tensor);
        std::ranges::copy(codes, out.begin() +
                                     static_cast<std::ptrdiff_t>((run.row - first_row) * columns));
    }
}

void HfFolder::read_scales(const ParameterInfo& info, std::span<float> out) const {
    const std::uint64_t columns = columns_of(info), across = div_up(columns, kBlock);
    std::uint64_t begin = 0; // of the part's blocks, among the parameter's
    for (const HfPart& part : parts_of(info)) {
        const HfTensor& there = tensor(part.tensor);
        const StoredRows stored = rows_of(there, columns);
        const std::uint64_t down = div_up(part.rows, kBlock);
        for (std::uint64_t i = 0; i < down * across; ++i) {
            const float scale = stored.scale(i / across, i % across);
            if (!std::isfinite(scale))
                refuse_values(there);
            out[begin * across + i] = scale;
        }
        begin += down;
    }
}

} // namespace bellows
