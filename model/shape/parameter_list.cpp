// SPDX-License-Identifier: MIT
#include <bellows/base/error.hpp>
#include <bellows/shape/parameter_list.hpp>
#include <bellows/shape/sharded_ranges.hpp>

#include <algorithm>
#include <utility>

namespace bellows {

ParameterList::ParameterList(std::vector<ParameterInfo> mine) {
    int range = -1;
    for (ParameterInfo& info : in_stored_order(std::move(mine))) {
        if (stored_range_of(info) != range) {
            range = stored_range_of(info);
            ranges_.push_back({num_elements_, 0, range == 3, range == 0 || range == 3});
        }
        const std::uint64_t size = stored_elements(info);
        if (info.kind == ParameterKind::Expert && size != info.size())
            throw Error(ErrorCode::InvalidArgument,
                        info.name + " has " + std::to_string(info.size()) +
                            " elements; an expert's matrix must have a multiple of 16");
        by_name_[info.name] = parameters_.size();
        parameters_.push_back({std::move(info), num_elements_});
        num_elements_ += size;
        ranges_.back().count += size;
    }
}

std::size_t ParameterList::index_of(const std::string& name) const {
    const auto found = by_name_.find(name);
    if (found == by_name_.end())
        throw Error(ErrorCode::InvalidArgument, "this rank has no parameter " + name);
    return found->second;
}

std::size_t ParameterList::first_expert(std::uint64_t layer, const std::string& matrix) const {
    const auto first = std::ranges::find_if(parameters_, [&](const ListedParameter& parameter) {
        return parameter.info.kind == ParameterKind::Expert &&
               parameter.info.layer == static_cast<std::int64_t>(layer) &&
               matrix_of(parameter.info) == matrix;
    });
    if (first == parameters_.end())
        throw Error(ErrorCode::InvalidArgument,
                    "this rank has no experts of layer " + std::to_string(layer));
    return static_cast<std::size_t>(first - parameters_.begin());
}

std::size_t ParameterList::together(std::size_t first) const {
    const ParameterInfo& info = parameters_[first].info;
    std::size_t end = first + 1;
    while (info.kind == ParameterKind::Expert && end < parameters_.size() &&
           parameters_[end].info.kind == ParameterKind::Expert &&
           parameters_[end].info.layer == info.layer &&
           matrix_of(parameters_[end].info) == matrix_of(info))
        ++end;
    return end - first;
}

std::size_t ParameterList::end_of_run(std::size_t begin, std::uint64_t most_elements) const {
    const int range = stored_range_of(parameters_[begin].info);
    std::uint64_t count = stored_elements(parameters_[begin].info);
    std::size_t end = begin + 1;
    for (; end < parameters_.size() && stored_range_of(parameters_[end].info) == range; ++end) {
        count += stored_elements(parameters_[end].info);
        if (count > most_elements)
            break;
    }
    return end;
}

std::vector<ParameterPart> ParameterList::parts(std::uint64_t first, std::uint64_t count) const {
    const std::uint64_t last = first + count;
    const auto whole = [&](const ListedParameter& parameter) {
        return parameter.first >= first && parameter.first + parameter.info.size() <= last;
    };
    std::vector<ParameterPart> parts;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
        const ListedParameter& parameter = parameters_[i];
        const std::uint64_t size = parameter.info.size(), end = parameter.first + size;
        if (end <= first || parameter.first >= last)
            continue;
        ParameterPart part{i, 1, whole(parameter), 0, size};
        if (!part.whole) {
            part.begin = std::max(first, parameter.first) - parameter.first;
            part.end = std::min(last, end) - parameter.first;
        } else if (parameter.info.kind == ParameterKind::Expert) {
            const std::size_t behind = i + together(i);
            while (i + 1 < behind && whole(parameters_[i + 1]))
                ++i;
            part.count = i + 1 - part.index;
        }
        parts.push_back(part);
    }
    return parts;
}

} // namespace bellows
