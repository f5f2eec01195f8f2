// SPDX-License-Identifier: MIT
#pragma once

// The list of parameters that one rank holds: their order, the place of each in the flat buffers,
// the ranges that are reduced and updated alike, and which parameters stand together. A plain value
// without memory of a device: a store of weights is made after it, and an estimate may read it.

#include <bellows/shape/parameters.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace bellows {

/// A parameter and its place in the flat buffers.
struct ListedParameter {
    ParameterInfo info;
    std::uint64_t first = 0; ///< its first element, a multiple of 16
};

/// A run of parameters in the flat buffers.
struct ParameterRange {
    std::uint64_t first = 0, count = 0; ///< elements, padding included (padding is zero)
    bool expert = false;                ///< routed experts: reduced over the expert's replicas only
    bool weight_decay = false;
};

/// A part of a run of elements. It is one of three: a piece of one parameter, one whole parameter,
/// or several whole experts of one layer and matrix side by side.
struct ParameterPart {
    std::size_t index = 0;            ///< the parameter, or the first expert, in the list
    std::size_t count = 1;            ///< how many parameters; more than one of experts only
    bool whole = true;                ///< false: elements [begin, end) of one parameter
    std::uint64_t begin = 0, end = 0; ///< elements of parameter `index`: all if it is whole

    bool operator==(const ParameterPart&) const = default;
};

class ParameterList {
public:
    /// mine: this rank's part of parameters(config), in that order; the list has them
    /// in_stored_order(). Throws Error{InvalidArgument} when the matrix of an expert does not have
    /// a multiple of 16 elements, because experts stand side by side without padding.
    explicit ParameterList(std::vector<ParameterInfo> mine);

    /// In flat order.
    const std::vector<ListedParameter>& all() const noexcept { return parameters_; }
    std::size_t size() const noexcept { return parameters_.size(); }
    const ListedParameter& operator[](std::size_t index) const { return parameters_[index]; }
    /// The elements of the flat buffers, padding included.
    std::uint64_t num_elements() const noexcept { return num_elements_; }
    /// In flat order: replicated matrices, replicated gains, router biases (no gradient), experts.
    const std::vector<ParameterRange>& ranges() const noexcept { return ranges_; }

    bool has(const std::string& name) const noexcept { return by_name_.count(name) != 0; }
    /// Throws Error{InvalidArgument} naming the parameter that this rank does not have.
    std::size_t index_of(const std::string& name) const;
    /// The first expert's matrix `matrix` ("gate_up_proj" or "down_proj") of a layer; the others
    /// stand behind it. Throws Error{InvalidArgument} when this rank has no such experts.
    std::size_t first_expert(std::uint64_t layer, const std::string& matrix) const;
    /// How many parameters from `first` on are experts of one layer and matrix; 1 if `first` is no
    /// expert.
    std::size_t together(std::size_t first) const;

    /// The end of the longest run of parameters that begins with parameter `begin`, lies in one
    /// range and has at most so many elements, padding included. It has at least one parameter.
    std::size_t end_of_run(std::size_t begin, std::uint64_t most_elements) const;
    /// The parts of elements [first, first + count) in ascending order, without the padding. Whole
    /// experts that stand together are one part.
    std::vector<ParameterPart> parts(std::uint64_t first, std::uint64_t count) const;

private:
    std::vector<ListedParameter> parameters_;
    std::map<std::string, std::size_t> by_name_;
    std::vector<ParameterRange> ranges_;
    std::uint64_t num_elements_ = 0;
};

} // namespace bellows
