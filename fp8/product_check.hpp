// SPDX-License-Identifier: MIT
#pragma once

// Whether the arguments of a product fit together. What does not throws Error{InvalidArgument} with
// what all of them are.

#include "operands.hpp"
#include "product.hpp"

#include <string>

namespace bellows::fp8 {

/// Checks of one op's arguments.
class ProductCheck {
public:
    /// The product must outlive the object.
    ProductCheck(const char* op, const Product& product) : operands_(op), p_(product) {}

    void require(bool condition, const std::string& message) const {
        operands_.require(condition, message);
    }
    /// The same with the shapes of all.
    void fits(bool condition, const std::string& message) const;
    void storage_and_ranks(std::uint32_t a, std::uint32_t b, std::uint32_t d) const;
    /// Dense, and grouped products but for the groups.
    void sizes() const;
    /// by_group: the tensor that has one matrix for each group.
    void groups(const TensorView& by_group) const;

    /// [groups, max_m, columns] as [groups * max_m, columns].
    TensorView flat(const char* name, const TensorView& view) const;
    Operand flat(const Operand& operand) const;

private:
    void operand(const char* name, const Operand& o, bool k_along_rows) const;
    void fits_groups(const std::string& operand, const TensorView& offsets) const;

    Operands operands_;
    const Product& p_;
};

} // namespace bellows::fp8
