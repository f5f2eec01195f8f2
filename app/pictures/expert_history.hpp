// SPDX-License-Identifier: MIT
#pragma once

// This gathers what experts.svg shows of a run, step by step and in bounded memory: columns of
// equally many steps, and rows of equally many experts. One thread at a time uses it.

#include <bellows/train/metrics.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace bellows {

class ExpertHistory {
public:
    /// Layers and moves beyond these are left out; more steps share a column, more experts a row.
    static constexpr std::size_t kMostLayers = 64, kMostColumns = 200, kMostRows = 64,
                                 kMostExperts = 65536, kMostMovesTold = 4;

    struct Mean {
        double sum = 0;
        std::uint64_t count = 0;
        void add(double value) noexcept;
        void add(const Mean& other) noexcept;
        double value() const noexcept { return sum / static_cast<double>(count); }
    };
    /// Some steps of a layer.
    struct Column {
        /// By row: the load of its fullest expert divided by the mean of all experts, summed over
        /// the steps that have loads.
        std::vector<double> loads;
        std::uint64_t steps_with_loads = 0;
        Mean experts, ranks; ///< the largest load divided by the mean
        std::uint64_t moves = 0;
        std::vector<std::string> told; ///< the first moves
        void add(Column&& other);
    };
    struct Layer {
        std::uint64_t experts = 0; ///< 0: no step has their loads
        std::uint64_t experts_per_row = 1, rows = 0, steps_with_loads = 0;
        std::vector<Column> columns; ///< the last ones may be missing
        ExpertBalance last{};        ///< of the last step, without loads
    };

    /// Steps in ascending order; others are left out, and so are figures that cannot be.
    void add(const StepMetrics& step);
    /// Half as many columns, each of two as they were.
    void halve();
    /// Halves as long as many columns would have no loads, because few steps have.
    void fit_to_loads();

    bool empty() const noexcept { return layers_.empty(); }
    const std::map<std::uint64_t, Layer>& layers() const noexcept { return layers_; }
    bool left_layers_out() const noexcept { return left_layers_out_; }
    std::uint64_t first_step() const noexcept { return first_; }
    std::uint64_t last_step() const noexcept { return last_; }
    std::uint64_t steps_per_column() const noexcept { return width_; }
    std::size_t columns() const noexcept;

private:
    Layer* layer_of(std::uint64_t layer);
    Column& column_of(Layer& layer, std::uint64_t step) const;
    static void add_loads(Layer& layer, Column& column, const std::vector<std::uint64_t>& loads);

    std::map<std::uint64_t, Layer> layers_;
    std::uint64_t first_ = 0, last_ = 0, width_ = 1;
    bool left_layers_out_ = false;
};

} // namespace bellows
