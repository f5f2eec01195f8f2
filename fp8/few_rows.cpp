// SPDX-License-Identifier: MIT
#include "operands.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/fp8/few_rows.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <bit>

namespace bellows::fp8 {

namespace {

constexpr std::uint64_t kUnitBytes = 16;

/// Elements of weights in 16 bytes.
std::uint64_t unit_of(const Operand& weights) {
    return kUnitBytes / size_of(weights.values.dtype);
}

/// Weights as kernels want them; strides in 16 bytes.
struct Weights {
    BufferView memory, scales;
    std::uint64_t matrices = 0, n = 0, k = 0, units = 0;
    std::uint32_t row = 0, batch = 0, scale_row = 0, scale_batch = 0;
};

Weights weights_of(const Operands& operands, const char* name, const Operand& weights, DType act) {
    operands.require(takes_few_rows(weights, act),
                     std::string(name) + " are " + describe(weights) + " by " + to_string(act) +
                         "; wanted are E4M3 codes in 128x128 blocks, or values of the same type "
                         "with a multiple of 16 bytes of k");
    Weights w;
    Matrix m;
    if (weights.quantized) {
        m = operands.codes(name, *weights.quantized, true);
        const Scales scales = operands.scales(name, *weights.quantized, m);
        w.scales = scales.memory;
        w.scale_row = scales.stride;
        w.scale_batch = scales.batch;
    } else {
        m = operands.activation(name, weights.values, true);
        w.scales = m.memory;
    }
    const std::uint64_t units_of_8 = 8 * size_of(weights.values.dtype);
    w.memory = m.memory;
    w.matrices = m.batch;
    w.n = m.rows;
    w.k = m.columns;
    w.units = div_up(m.columns, unit_of(weights));
    w.row = operands.u32("a row stride", m.stride8 * units_of_8 / kUnitBytes);
    w.batch = operands.u32("a batch stride", m.batch8 * units_of_8 / kUnitBytes);
    operands.u32("a matrix's size", w.n * w.row);
    return w;
}

/// Rows of activations. Strides in elements.
struct Rows {
    BufferView memory;
    std::uint64_t batch = 1, rows = 0, columns = 0, row = 0, of_batch = 0;
    bool whole = false; ///< at multiples of 16 bytes
};

Rows rows_of(const Operands& operands, const char* name, const TensorView& view, DType dtype,
             std::uint64_t multiple = 4) {
    const auto say = [&] { return std::string(name) + " is " + describe(view); };
    operands.require(view.dtype == dtype && (view.rank == 2 || view.rank == 3),
                     say() + ", wanted are 2 or 3 dimensions of " + to_string(dtype));
    Rows r;
    r.batch = view.rank == 3 ? view.extent[0] : 1;
    r.rows = view.extent[view.rank - 2];
    r.columns = view.extent[view.rank - 1];
    r.row = view.stride[view.rank - 2];
    r.of_batch = view.rank == 3 ? view.stride[0] : 0;
    const std::uint64_t size = size_of(dtype);
    operands.require(view.stride[view.rank - 1] == 1 && r.row % multiple == 0 &&
                         r.of_batch % multiple == 0 && view.buffer.offset % (multiple * size) == 0,
                     say() + "; its last stride must be 1, the others multiples of " +
                         std::to_string(multiple) + ", and so must be where it begins");
    operands.require(static_cast<bool>(view.buffer), std::string(name) + " has no memory");
    const std::uint64_t elements = (r.batch - 1) * r.of_batch + (r.rows - 1) * r.row + r.columns;
    operands.u32("the number of elements", elements);
    operands.require(
        r.batch > 0 && r.rows > 0 && r.columns > 0 && elements * size <= view.buffer.bytes,
        say() + ", its buffer view has " + std::to_string(view.buffer.bytes) + " bytes");
    // Kernels write words.
    r.memory = view.buffer.sub(0, std::min(round_up(elements * size, 4), view.buffer.bytes));
    r.whole = r.row * size % kUnitBytes == 0 && r.of_batch * size % kUnitBytes == 0 &&
              view.buffer.offset % kUnitBytes == 0;
    return r;
}

/// Whether kernels read so many of x's elements by 16 bytes.
bool whole_units(const Rows& x, std::uint64_t k, std::uint64_t unit) {
    return x.whole && k % unit == 0;
}

/// A row stride as kernels count it.
std::uint32_t x_stride(std::uint64_t elements, DType dtype, bool whole) {
    return static_cast<std::uint32_t>(whole ? elements * size_of(dtype) / kUnitBytes
                                            : elements / 4);
}

/// This is what a dispatch shares out among its invocations.
struct Work {
    std::uint64_t units;             ///< of a sum
    std::uint64_t results;           ///< of all rows and matrices that do not share weights
    std::uint64_t rows = 1;          ///< that do
    std::uint32_t of_each = 1;       ///< rows of weights that a result has
    std::uint64_t invocations = 512; ///< that a processor should have at least
    bool of_parts = false;           ///< a workgroup puts x together: few of them
};

/// Returns the cut that suits the device: an invocation takes four rows of weights, whose loads are
/// under way at the same time, and as many lanes as fill the device share a sum.
FewRowsCut cut_for(const DeviceInfo& info, FewRowsCut cut, const Work& work) {
    const auto usual = [](std::uint32_t& value, std::uint64_t otherwise) {
        value = value == 0 ? static_cast<std::uint32_t>(otherwise) : value;
    };
    if (info.is_cpu) {
        // An invocation has its own sums: no barrier, and x is the same for all of them.
        usual(cut.lanes, 1);
        usual(cut.columns, work.rows > 4 && work.of_each == 1 ? 2 : 4);
        usual(cut.groups, std::max<std::uint32_t>(8 / cut.lanes, 1));
        return cut;
    }
    constexpr std::uint64_t kLeastLanes = 32, kMostLanes = 256, kProcessors = 64;
    // Groups of gate and up share what a workgroup has staged of x.
    const std::uint64_t workgroup = work.of_each > 1 ? 256 : 128;
    const std::uint64_t wanted =
        work.invocations * (info.processors > 0 ? info.processors : kProcessors);
    const std::uint64_t most =
        std::clamp<std::uint64_t>(std::bit_ceil(work.units), 8, work.of_each > 1 ? 64 : kMostLanes);
    const auto groups = [&](std::uint64_t columns) {
        return div_up(work.results * work.of_each, columns);
    };
    if (work.of_parts) {
        // Large workgroups: each reads all parts of its head, and its shares read them side by
        // side.
        constexpr std::uint64_t kSharing = 512, kUsualLanes = 64;
        const std::uint64_t sharing =
            std::min<std::uint64_t>(kSharing, info.max_workgroup_invocations);
        usual(cut.columns, 4);
        usual(cut.lanes, std::min(most, kUsualLanes));
        usual(cut.groups, std::max<std::uint64_t>(sharing / cut.lanes, 1));
        return cut;
    }
    usual(cut.columns, work.of_each > 1 || groups(4) * most >= wanted / 2 ? 4 : 2);
    std::uint64_t lanes = std::min(kLeastLanes, most);
    while (lanes < most && groups(cut.columns) * lanes < wanted)
        lanes *= 2;
    usual(cut.lanes, lanes);
    usual(cut.groups, std::max<std::uint64_t>(workgroup / cut.lanes, 1));
    return cut;
}

template <class K>
typename K::Variant variant_of(const Device& device, DType act, bool codes, bool in_f16 = true) {
    using V = typename K::Variant;
    if (!codes)
        return act == DType::BF16 ? V::bf16_bf16 : V::f32_f32;
    const V wanted = act == DType::BF16 ? V::fp8_bf16_in_f16 : V::fp8_f32_in_f16;
    if (in_f16 && device.why_not(K::info(), static_cast<std::uint32_t>(wanted)).empty())
        return wanted;
    return act == DType::BF16 ? V::fp8_bf16 : V::fp8_f32;
}

/// The parts of kernels that all have.
template <class K>
void bind_weights(K& kernel, const Operands& operands, const Weights& w) {
    kernel.weights = w.memory;
    kernel.scales = w.scales;
    kernel.units = operands.u32("k", w.units);
    kernel.k4 = operands.u32("k", w.k / 4);
    kernel.w_row = w.row;
    kernel.w_batch = w.batch;
    kernel.scale_row = w.scale_row;
    kernel.scale_batch = w.scale_batch;
}

template <class K>
void bind_cut(K& kernel, const FewRowsCut& cut) {
    kernel.constants.local_size = cut.lanes * cut.groups;
    kernel.constants.lanes = cut.lanes;
    kernel.constants.columns = cut.columns;
}

std::uint32_t workgroups(const Operands& operands, const DeviceInfo& info, std::uint64_t n,
                         std::uint64_t of_each) {
    const std::uint64_t groups = div_up(n, of_each);
    operands.require(groups <= info.max_workgroup_count[0],
                     "n needs " + std::to_string(groups) +
                         " workgroups, more than this device can "
                         "start at once");
    return static_cast<std::uint32_t>(groups);
}

/// The ids of slots, checked: [rows, top_k] i32.
BufferView ids_of(const Operands& operands, const TensorView& ids) {
    operands.require(ids.dtype == DType::I32 && ids.rank == 2 && ids.is_contiguous() &&
                         ids.buffer.offset % 4 == 0 && ids.num_bytes() <= ids.buffer.bytes,
                     "ids are " + describe(ids) + ", wanted are i32 [rows, top_k]");
    operands.require(static_cast<bool>(ids.row_count), "ids have no row count");
    return ids.buffer.sub(0, ids.num_bytes());
}

/// Memory of a workgroup for x.
std::uint64_t staged_bytes(std::uint64_t rows, const Weights& w, std::uint64_t unit) {
    return rows * w.units * unit * sizeof(float);
}

constexpr std::uint64_t kMostStaged = 16 * 1024;

/// Whether x waits in workgroup memory with its norm's gain: where groups share it, which pays by
/// sparing them conversions.
bool stages(const FewRowsCut& cut, bool can, bool gain, std::uint64_t bytes) {
    return can && cut.staged != FewRowsCut::Staged::No &&
           (cut.staged == FewRowsCut::Staged::Yes ||
            (gain && cut.groups > 1 && bytes <= kMostStaged));
}

template <class K>
void bind_router(K& kernel, const Operands& operands, const FewRowsRouter& router,
                 std::uint64_t rows, std::uint64_t experts, BufferView otherwise) {
    const std::uint64_t top_k = router.ids.extent[1];
    ops::check_router_options("fp8::few_rows_routed", router.options, experts, top_k);
    operands.require(router.logits.rank == 2 && router.logits.extent[1] == experts &&
                         router.logits.extent[0] == rows && router.weights.rank == 2 &&
                         router.weights.extent[0] == rows && router.weights.extent[1] == top_k &&
                         experts <= ops::kMostSharedExperts && top_k <= ops::kMostSharedTopK,
                     "logits are " + describe(router.logits) + ", ids are " + describe(router.ids) +
                         ", weights are " + describe(router.weights));
    kernel.constants.by_ids = 2;
    kernel.constants.shared_experts = operands.u32("experts", experts);
    kernel.logits = operands.vector("logits", router.logits.reshaped({rows * experts}), DType::F32,
                                    rows * experts);
    kernel.bias =
        router.bias.buffer ? operands.vector("bias", router.bias, DType::F32, experts) : otherwise;
    kernel.chosen_weights = operands.vector("weights", router.weights.reshaped({rows * top_k}),
                                            DType::F32, rows * top_k);
    kernel.chosen = kernel.ids;
    kernel.ids = otherwise;
    kernel.groups = router.options.groups;
    kernel.group_top_k = router.options.group_top_k;
    kernel.group_score_top = router.options.group_score_top;
    kernel.use_softmax = router.options.score == ops::RouterOptions::Score::Softmax ? 1 : 0;
    kernel.normalise = router.options.normalise ? 1 : 0;
    kernel.has_bias = router.bias.buffer ? 1 : 0;
    kernel.route_scale = router.options.route_scale;
}

template <class K>
void bind_parts(K& kernel, const Operands& operands, const ops::PagedParts& parts, const Rows& x) {
    const std::uint64_t words = x.rows * ops::PagedPlan::kRowWords, k = x.columns;
    operands.require(parts.sums.rank == 3 && parts.sums.extent[1] == x.batch &&
                         parts.sums.extent[2] == k && parts.log_of_sums.rank == 2 &&
                         parts.log_of_sums.extent[0] == parts.sums.extent[0] &&
                         parts.log_of_sums.extent[1] == x.batch && parts.rows.rank == 2,
                     "parts are " + describe(parts.sums) + ", logs of their sums are " +
                         describe(parts.log_of_sums));
    kernel.parts =
        operands.vector("rows of the plan", parts.rows.reshaped({words}), DType::U32, words);
    const std::uint64_t sums = parts.log_of_sums.num_elements();
    if (sums > 0) {
        kernel.partial =
            operands.vector("parts", parts.sums.reshaped({sums * k}), DType::F32, sums * k, 16);
        kernel.partial_lse =
            operands.vector("logs of sums", parts.log_of_sums.reshaped({sums}), DType::F32, sums);
    }
    operands.u32("elements of parts", sums * k);
    kernel.heads = operands.u32("heads", x.batch);
}

void record_nt(Recording& recording, const Operands& operands, const TensorView& x,
               const Operand& weights, const TensorView* ids, const TensorView& y,
               const FewRowsForm& form, const FewRowsRouter* router = nullptr) {
    const DType act = x.dtype;
    operands.require(act == DType::F32 || act == DType::BF16,
                     "x is " + describe(x) + ", wanted is f32 or bf16");
    const bool swiglu = form.result == FewRowsForm::Result::Swiglu;
    const Weights w = weights_of(operands, "weights", weights, act);
    const Rows from = rows_of(operands, "x", x, act),
               to = rows_of(operands, "y", y, y.dtype == DType::F32 ? DType::F32 : act, 2);
    const std::uint64_t n = swiglu ? w.n / 2 : w.n;
    const std::uint64_t slots = ids != nullptr ? ids->num_elements() : from.rows;
    operands.require(
        from.columns == w.k && w.k % 4 == 0 && to.columns == n && (!swiglu || w.n % 2 == 0) &&
            to.rows == slots && from.rows <= kMostFewRows &&
            (ids != nullptr ? from.batch == 1 && to.batch == 1 && ids->extent[0] == from.rows
                            : from.batch == w.matrices && to.batch == w.matrices),
        "x is " + describe(x) + ", weights are " + describe(weights) + ", y is " + describe(y));
    const DeviceInfo& info = recording.device().info();
    const bool of_parts = static_cast<bool>(form.parts.rows.buffer);
    const std::uint64_t rows = ids != nullptr ? 1 : from.rows;
    operands.require(!of_parts || (ids == nullptr && !form.gain.buffer),
                     "parts of attention have no gain and no ids");
    const FewRowsCut cut = cut_for(info, form.cut,
                                   {.units = w.units,
                                    .results = n * (ids != nullptr ? slots : w.matrices),
                                    .rows = rows,
                                    .of_each = swiglu ? 2u : 1u,
                                    .of_parts = of_parts});
    operands.require(cut.columns % (swiglu ? 4 : 2) == 0,
                     "a cut of " + std::to_string(cut.columns) + " columns");
    const std::uint32_t outputs = swiglu ? cut.columns / 2 : cut.columns;
    using K = kernels::FewRowsNt;
    K kernel;
    // The variants that convert codes in f16 make the router's choice by subgroups.
    const bool in_f16_chooses =
        router == nullptr ||
        ops::router_by_subgroup(recording.device(), w.matrices, ids->extent[1]);
    kernel.variant =
        variant_of<K>(recording.device(), act, weights.quantized.has_value(), in_f16_chooses);
    kernel.constants.subgroup = std::max<std::uint32_t>(info.subgroup_size, 8);
    bind_weights(kernel, operands, w);
    bind_cut(kernel, cut);
    const bool whole = whole_units(from, w.k, unit_of(weights));
    kernel.constants.rows = static_cast<std::uint32_t>(rows);
    kernel.constants.whole = whole ? 1 : 0;
    kernel.constants.one_scale = 128 % outputs == 0 && (!swiglu || n % outputs == 0) ? 1 : 0;
    kernel.constants.y_f32 = y.dtype == DType::F32 ? 1 : 0;
    kernel.constants.epilogue = static_cast<std::uint32_t>(form.result);
    kernel.constants.by_ids = ids != nullptr ? 1 : 0;
    kernel.x = from.memory;
    kernel.x_row = x_stride(from.row, act, whole);
    kernel.x_batch = x_stride(from.of_batch, act, whole);
    kernel.y = to.memory;
    kernel.y_row = operands.u32("y's row stride", to.row);
    kernel.y_batch = operands.u32("y's batch stride", ids != nullptr ? to.row : to.of_batch);
    kernel.n = operands.u32("n", n);
    kernel.ids = kernel.count = kernel.gain = kernel.logits = kernel.bias = from.memory;
    kernel.parts = kernel.partial = kernel.partial_lse = from.memory;
    kernel.chosen = kernel.chosen_weights = to.memory;
    if (form.gain.buffer) {
        const bool bf16 = act == DType::BF16 && form.gain.dtype == DType::BF16;
        kernel.gain = operands.vector("gain", form.gain, bf16 ? DType::BF16 : DType::F32, w.k, 16);
        kernel.constants.gain = bf16 ? 2 : 1;
        kernel.eps = form.eps;
    }
    if (ids != nullptr) {
        kernel.ids = ids_of(operands, *ids);
        kernel.count = operands.row_count_or(*ids, kernel.ids);
        kernel.slots_per_row = operands.u32("top_k", ids->extent[1]);
        kernel.experts = operands.u32("experts", w.matrices);
    }
    if (router != nullptr)
        bind_router(kernel, operands, *router, from.rows, w.matrices, from.memory);
    const bool in_f16 = kernel.variant == K::Variant::fp8_bf16_in_f16 ||
                        kernel.variant == K::Variant::fp8_f32_in_f16;
    if (of_parts) {
        bind_parts(kernel, operands, form.parts, from);
        kernel.constants.staged = 2;
    } else if (stages(cut, in_f16, static_cast<bool>(form.gain.buffer),
                      staged_bytes(rows, w, unit_of(weights)))) {
        kernel.constants.staged = 1;
    }
    if (kernel.constants.staged != 0)
        kernel.constants.all_units = operands.u32("k", w.units);
    recording.dispatch(kernel, {workgroups(operands, info, n, std::uint64_t{outputs} * cut.groups),
                                operands.grid("slots", ids != nullptr ? slots : w.matrices)});
}

} // namespace

bool takes_few_rows(const Operand& weights, DType act) {
    const TensorView& view = weights.values;
    if (view.rank < 2 || (act != DType::F32 && act != DType::BF16))
        return false;
    if (weights.quantized)
        return weights.quantized->recipe.format == Format::E4M3 &&
               weights.quantized->recipe.blocks == Blocks::Blocks128 &&
               view.extent[view.rank - 1] % 4 == 0;
    return view.dtype == act && view.extent[view.rank - 1] % unit_of(weights) == 0 &&
           view.stride[view.rank - 2] % 8 == 0 && view.buffer.offset % kUnitBytes == 0 &&
           static_cast<bool>(view.buffer);
}

std::uint64_t few_rows_that_pay(const Device& device, const Operand& weights, DType act) {
    constexpr std::uint64_t kOfCodes = 2, kOfValues = 2;
    if (!takes_few_rows(weights, act))
        return 0;
    if (device.info().is_cpu || gemm_class(device).units == GemmClass::Units::None)
        return kMostFewRows;
    return weights.quantized ? kOfCodes : kOfValues;
}

void few_rows_nt(Recording& recording, const TensorView& x, const Operand& weights,
                 const TensorView& y, const FewRowsForm& form) {
    record_nt(recording, Operands("fp8::few_rows_nt"), x, weights, nullptr, y, form);
}

void few_rows_by_ids(Recording& recording, const TensorView& x, const Operand& weights,
                     const TensorView& ids, const TensorView& y, const FewRowsForm& form) {
    record_nt(recording, Operands("fp8::few_rows_by_ids"), x, weights, &ids, y, form);
}

void few_rows_routed(Recording& recording, const TensorView& x, const Operand& weights,
                     const FewRowsRouter& router, const TensorView& y, const FewRowsForm& form) {
    record_nt(recording, Operands("fp8::few_rows_routed"), x, weights, &router.ids, y, form,
              &router);
}

bool few_rows_choose(const Device& device, std::uint64_t experts, std::uint64_t top_k) {
    return !device.info().is_cpu && experts <= ops::kMostSharedExperts &&
           top_k <= ops::kMostSharedTopK;
}

bool few_rows_combine(const Device& device, std::uint64_t rows, std::uint64_t v_dim) {
    return !device.info().is_cpu && rows * v_dim * sizeof(float) <= kMostStaged;
}

void few_rows_experts(Recording& recording, const FewRowsExperts& e, const TensorView& y) {
    const Operands operands("fp8::few_rows_experts");
    const DType act = e.hidden.dtype;
    operands.require(act == DType::F32 || act == DType::BF16,
                     "hidden is " + describe(e.hidden) + ", wanted is f32 or bf16");
    const Weights w = weights_of(operands, "weights", e.weights, act);
    const Rows hidden = rows_of(operands, "hidden", e.hidden, act),
               to = rows_of(operands, "y", y, act, 2);
    const BufferView ids = ids_of(operands, e.ids);
    const std::uint64_t top_k = e.ids.extent[1];
    operands.require(hidden.columns == w.k && hidden.batch == 1 && to.batch == 1 &&
                         to.columns == w.n && e.ids.extent[0] == to.rows &&
                         hidden.rows == to.rows * top_k && to.rows <= kMostFewRows,
                     "hidden is " + describe(e.hidden) + ", weights are " + describe(e.weights) +
                         ", ids are " + describe(e.ids) + ", y is " + describe(y));
    const bool has_shared = static_cast<bool>(e.shared.buffer);
    Weights v;
    Rows shared;
    if (has_shared) {
        v = weights_of(operands, "shared_weights", e.shared_weights, act);
        shared = rows_of(operands, "shared", e.shared, act);
        operands.require(shared.columns == v.k && v.n == w.n && v.matrices == 1 &&
                             shared.rows == to.rows && shared.batch == 1 &&
                             e.shared_weights.quantized.has_value() ==
                                 e.weights.quantized.has_value(),
                         "shared is " + describe(e.shared) + ", its weights are " +
                             describe(e.shared_weights) + ", y is " + describe(y));
    }
    const DeviceInfo& info = recording.device().info();
    const FewRowsCut cut = cut_for(
        info, e.cut,
        {.units = top_k * w.units + v.units, .results = w.n * to.rows, .invocations = 1024});
    const std::uint64_t unit = unit_of(e.weights);
    const bool whole =
        whole_units(hidden, w.k, unit) && (!has_shared || whole_units(shared, v.k, unit));
    using K = kernels::FewRowsExperts;
    K kernel;
    kernel.variant = variant_of<K>(recording.device(), act, e.weights.quantized.has_value());
    bind_weights(kernel, operands, w);
    bind_cut(kernel, cut);
    kernel.constants.whole = whole ? 1 : 0;
    kernel.constants.one_scale = 128 % cut.columns == 0 ? 1 : 0;
    kernel.constants.y_f32 = act == DType::F32 ? 1 : 0;
    kernel.ids = ids;
    kernel.count = operands.row_count_or(e.ids, ids);
    kernel.choice_weights =
        operands.vector("choice_weights", e.choice_weights.reshaped({to.rows * top_k}), DType::F32,
                        to.rows * top_k);
    kernel.x = hidden.memory;
    kernel.x_row = x_stride(hidden.row, act, whole);
    kernel.shared_x = has_shared ? shared.memory : hidden.memory;
    kernel.shared_weights = has_shared ? v.memory : w.memory;
    kernel.shared_scales = has_shared ? v.scales : w.scales;
    kernel.shared_units = operands.u32("k", v.units);
    kernel.shared_k4 = operands.u32("k", v.k / 4);
    kernel.shared_x_row = x_stride(shared.row, act, whole);
    kernel.shared_w_row = v.row;
    kernel.shared_scale_row = v.scale_row;
    kernel.n = operands.u32("n", w.n);
    kernel.top_k = operands.u32("top_k", top_k);
    kernel.experts = operands.u32("experts", w.matrices);
    kernel.y = to.memory;
    kernel.y_row = operands.u32("y's row stride", to.row);
    recording.dispatch(kernel,
                       {workgroups(operands, info, w.n, std::uint64_t{cut.columns} * cut.groups),
                        static_cast<std::uint32_t>(to.rows)});
}

} // namespace bellows::fp8
