// SPDX-License-Identifier: MIT
#pragma once

// A product of some kind and usual size: what can compute it, and after allocate() its recording.
// Owned by measure(); the thread that records.

#include "product.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/fp8/choice.hpp>

#include <optional>
#include <utility>
#include <vector>

namespace bellows::fp8 {

/// Masked operands as they are computed: groups one below the other.
Product product_of(GemmForm form, const Operand& a, const Operand& b, const TensorView& d,
                   const GroupedRows* rows);

class ProductCase {
public:
    /// rows: of each group, those of usual size or fewer of the kind.
    ProductCase(Device& device, const ProductKind& kind, std::optional<std::uint64_t> rows = {});

    /// Kind, sizes, what is usual, why not the others, and tiles for so many rows; nothing
    /// timed.
    const Measurement& facts() const noexcept { return facts_; }
    /// Gives the operands memory and values. Throws Error{OutOfMemory}.
    void allocate();
    /// The repetition `index`; different ones read different weights, so that caches do not help.
    void record(Recording& recording, const Way& way, std::uint64_t index) const;

private:
    BufferView declare(std::uint64_t bytes);
    Operand operand(bool quantized, Blocks blocks, std::initializer_list<std::uint64_t> extents);
    Operand transposed(std::initializer_list<std::uint64_t> extents);
    /// The operands as the variant reads them.
    const Operand& a(Variant variant) const;
    const Operand& b(Variant variant, std::uint64_t index) const;
    Product product(Variant variant) const;
    void make_rows();
    void make_operands();
    void find_variants();
    void fill();

    Device& device_;
    Measurement facts_;
    std::vector<std::pair<Buffer, std::uint64_t>> buffers_; ///< without memory before allocate()
    std::vector<BufferView> values_;                        ///< random ones are needed
    std::vector<BufferView> scales_;
    std::vector<std::uint32_t> layout_words_;
    TensorView layout_values_;
    std::optional<GroupedRows> rows_;
    Recording make_list_;
    Operand a_ = TensorView{};
    std::vector<Operand> b_;
    std::optional<Operand> transposed_a_, transposed_b_; ///< of tn
    TensorView d_;
    BufferView workspace_;
};

} // namespace bellows::fp8
