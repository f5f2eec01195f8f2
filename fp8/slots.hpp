// SPDX-License-Identifier: MIT
#pragma once

// Grouped products whose operands stand by slots (GroupedRows::slots), for ways of computing them
// that want rows in the order of groups: those of A are copied there before and those of D back
// afterwards.

#include "product.hpp"

namespace bellows::fp8 {

/// Whether A or D stands by slots.
bool by_slots(const Product& product);
/// "" when such an A can be copied row by row, else why not.
std::string why_not_copied(const Product& product);
/// Memory of the copies for a layout of so many rows; of_d: D stands by slots.
std::uint64_t copies_bytes(const Operand& a, const Operand& b, std::uint64_t rows, bool of_d);
/// `a` with so many rows, of no memory: what sizes of workspaces depend on.
Operand with_rows(const Operand& a, std::uint64_t rows);

class InGroups {
public:
    /// Records the copying of A; the copies take copies_bytes of `memory`. of_d: D is copied, too;
    /// else the product's D stands by slots as before.
    InGroups(Recording& recording, const char* op, const Product& product, bool of_d,
             BufferView memory);
    InGroups(const InGroups&) = delete;
    InGroups& operator=(const InGroups&) = delete;

    /// The product in the order of groups.
    const Product& product() const { return product_; }
    /// Records the copying of D, after the product.
    void put_back(Recording& recording) const;

private:
    const char* op_;
    const Product& by_slots_;
    GroupedRows rows_;
    Product product_;
    bool of_d_;
};

} // namespace bellows::fp8
