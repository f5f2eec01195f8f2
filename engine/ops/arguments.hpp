// SPDX-License-Identifier: MIT
#pragma once

// What the ops share: checks of tensors with messages that show them, and the grids of kernels
// that go by rows (shaders/include/rows.glsl) or by groups of four elements.

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/engine/tensor.hpp>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace bellows {
struct DeviceInfo;
}

namespace bellows::ops {

/// "bf16 [3, 4]", with strides where it is not contiguous.
std::string describe(const TensorView& view);

/// Checks of the arguments of the op `op`. All throw Error{InvalidArgument}.
class Arguments {
public:
    explicit Arguments(const char* op) : op_(op) {}

    [[noreturn]] void fail(const std::string& message) const;
    void require(bool condition, const std::string& message) const {
        if (!condition) {
            fail(message);
        }
    }
    /// Element type and extents, with contiguous strides.
    void tensor(const char* name, const TensorView& view, DType dtype,
                std::initializer_list<std::uint64_t> extents) const;
    /// The same with free outer strides: the last stride is 1, the others multiples of 4.
    void strided(const char* name, const TensorView& view, DType dtype,
                 std::initializer_list<std::uint64_t> extents) const;
    void rank(const char* name, const TensorView& view, std::uint32_t rank) const;
    /// f32 or bf16.
    void activation(const char* name, const TensorView& view) const;
    void contiguous(const char* name, const TensorView& view) const;
    /// Contiguous, any shape, so many elements.
    void flat(const char* name, const TensorView& view, std::uint64_t elements) const;
    void multiple_of_4(const char* what, std::uint64_t value) const;
    void workspace(BufferView workspace, std::uint64_t bytes) const;
    std::uint32_t u32(const char* what, std::uint64_t value) const;
    /// value / 4 of a multiple of 4.
    std::uint32_t groups_of_4(const char* what, std::uint64_t value) const;
    /// The memory from the first to the last element of a view that a kernel accesses by groups of
    /// four elements (or one by one: group = 1); checks its alignment.
    BufferView memory(const char* name, const TensorView& view, std::uint64_t group = 4) const;
    /// The memory of an optional operand; `otherwise` where it is left out, because kernels may
    /// only be given valid addresses.
    BufferView memory_or(const char* name, const TensorView& view, BufferView otherwise,
                         std::uint64_t group = 4) const;
    /// The device-side row count of a view that has one for all rows, or `otherwise`.
    BufferView row_count_or(const TensorView& view, BufferView otherwise) const;

private:
    void same(const char* name, const TensorView& view, DType dtype,
              std::initializer_list<std::uint64_t> extents) const;
    const char* op_;
};

/// Workgroups that every device can start along an axis.
inline constexpr std::uint64_t kMaxGroups = 65535;

/// Calls part(of) for parts of flat tensors that a kernel reaches, in order; of(tensor) is that
/// part of a tensor of as many elements, or nothing where the tensor is left out.
template <class Part>
void in_parts(std::uint64_t elements, const Part& part) {
    constexpr std::uint64_t kMost = kKernelReach / 4;
    for (std::uint64_t first = 0; first < elements; first += kMost)
        part([&](const TensorView& tensor) {
            return tensor.buffer
                       ? tensor.reshaped({elements}).rows(first, std::min(kMost, elements - first))
                       : tensor;
        });
}

/// Kernels whose rows are summed keep one form per device, so that a row's bits do not depend on
/// the number of rows.
enum class RowWork : std::uint8_t { Elementwise, Reduction, WholeWorkgroup };

struct RowPlan {
    std::uint32_t local_size = 8;
    std::uint32_t row_per_workgroup = 0;
    Groups groups;
};

RowPlan plan_rows(const Recording& recording, std::uint64_t rows, std::uint64_t columns4,
                  RowWork work);
/// Workgroups of such a plan for so many rows.
std::uint32_t row_groups(const RowPlan& plan, std::uint64_t rows);
/// Constant `wide` of kernels with shaders/include/row_units.glsl.
std::uint32_t fours_at_once(std::initializer_list<TensorView> views);

struct FlatPlan {
    std::uint32_t local_size = 8;
    Groups groups;
};

/// Grid-stride kernels: `items` shared out with about `per_invocation` each.
FlatPlan plan_flat(const Recording& recording, std::uint64_t items, std::uint64_t per_invocation);
/// Kernels of shaders/include/flat.glsl over `elements` / 4 groups of four.
struct RunPlan {
    std::uint32_t local_size = 8;
    std::uint32_t run = 16;
    Groups groups;
};
RunPlan plan_runs(const Recording& recording, std::uint64_t elements);
/// One invocation per item, no loop over items in the kernel. Throws when that needs too many.
FlatPlan plan_exact(const Recording& recording, std::uint64_t items);

/// sums [columns] = (sums +) the rows of x [rows, columns], ascending; f32, columns a multiple
/// of 4.
void add_rows(Recording& recording, const Arguments& arguments, BufferView x, std::uint64_t rows,
              std::uint64_t columns, BufferView sums, bool accumulate);

/// True on drivers where kernels do better to load shared operands once per subgroup of 8 and pass
/// them round: lavapipe before Mesa 26, which loads a uniform address once per invocation.
bool shares_loads(const DeviceInfo& info);

/// K::Variant::f32 or bf16.
template <class K>
typename K::Variant storage_variant(DType dtype) {
    return dtype == DType::BF16 ? K::Variant::bf16 : K::Variant::f32;
}

} // namespace bellows::ops
