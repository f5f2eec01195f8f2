// SPDX-License-Identifier: MIT
#include "arguments.hpp"
#include "attention_tile.hpp"
#include "runtime/device_impl.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/attention.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <initializer_list>
#include <optional>

namespace bellows::ops {

namespace {

/// Registers hold that many sums; wider heads are split among workgroups.
constexpr std::uint64_t kOutputsPerPart = 80;

struct Shape {
    std::uint64_t tokens, heads, kv_heads, qk_dim, v_dim;

    /// Heads of queries that share one of keys and values.
    std::uint32_t group() const { return static_cast<std::uint32_t>(heads / kv_heads); }
};

/// One tensor [tokens, heads, size] as the kernels want it.
struct Heads {
    BufferView memory;
    std::uint32_t token = 0, head = 0; ///< strides in elements
    bool aligned = false;              ///< allows accesses by four elements
    bool aligned8 = false;             ///< and by eight of bf16
};

/// [tokens, num_heads, size].
Heads check_heads(const Arguments& arguments, const char* name, const TensorView& view, DType dtype,
                  std::uint64_t tokens, std::uint64_t num_heads, std::uint64_t size) {
    const bool fits = view.rank == 3 && view.dtype == dtype && view.extent[0] == tokens &&
                      view.extent[1] == num_heads && view.extent[2] == size &&
                      (size <= 1 || view.stride[2] == 1);
    arguments.require(fits, std::string(name) + " is " + describe(view) + ", wanted is " +
                                to_string(dtype) + " [" + std::to_string(tokens) + ", " +
                                std::to_string(num_heads) + ", " + std::to_string(size) +
                                "] with last stride 1");
    arguments.require(dtype == DType::F32 || (view.stride[0] % 2 == 0 && view.stride[1] % 2 == 0),
                      std::string(name) + " is " + describe(view) +
                          "; outer strides of bf16 must be even");
    Heads h;
    h.memory = arguments.memory(name, view, dtype == DType::BF16 ? 2 : 1);
    h.token = arguments.u32("a token stride", view.stride[0]);
    h.head = arguments.u32("a head stride", view.stride[1]);
    const auto by_groups_of = [&](std::uint64_t count) {
        return size % count == 0 && h.token % count == 0 && h.head % count == 0 &&
               view.buffer.offset % (count * size_of(dtype)) == 0;
    };
    h.aligned = by_groups_of(4);
    h.aligned8 = by_groups_of(8);
    return h;
}

Shape check_shape(const Arguments& arguments, const TensorView& q, const TensorView& v,
                  const AttentionOptions& options) {
    arguments.rank("q", q, 3);
    arguments.rank("v", v, 3);
    arguments.activation("q", q);
    const Shape shape{q.extent[0], q.extent[1], v.extent[1], q.extent[2], v.extent[2]};
    arguments.require(shape.qk_dim > 0 && shape.v_dim > 0, "heads of size 0");
    arguments.require(shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0,
                      std::to_string(shape.kv_heads) + " heads of keys and values do not divide " +
                          std::to_string(shape.heads) + " of queries");
    arguments.require(options.seq > 0 && shape.tokens % options.seq == 0,
                      std::to_string(shape.tokens) + " tokens are not whole sequences of " +
                          std::to_string(options.seq));
    return shape;
}

/// local_size, columns per invocation and grid of one kernel.
struct AttentionPlan {
    std::uint32_t local_size, per_invocation, share_rows, parts;
    Groups groups;
};

/// heads: whose rows the kernel sums up; outputs: elements of such a row.
AttentionPlan plan(const Recording& recording, const Arguments& arguments, const Shape& shape,
                   const AttentionOptions& options, std::uint64_t heads, std::uint64_t outputs,
                   bool small, bool aligned) {
    const DeviceInfo& info = recording.device().info();
    AttentionPlan p{};
    p.local_size = info.is_cpu ? 8 : 32;
    p.per_invocation = info.is_cpu && small ? 4 : 1;
    p.share_rows = aligned && shares_loads(info) ? 1 : 0;
    p.parts = static_cast<std::uint32_t>(div_up(outputs, kOutputsPerPart));
    p.groups = {arguments.u32("blocks", div_up(options.seq, p.local_size * p.per_invocation)),
                arguments.u32("heads", heads * p.parts),
                arguments.u32("sequences", shape.tokens / options.seq)};
    return p;
}

/// The constants that the three large kernels share.
template <class K>
typename K::Constants constants(const AttentionPlan& p, const Shape& shape, bool aligned) {
    return {.local_size = p.local_size,
            .aligned = aligned ? 1u : 0u,
            .share_rows = p.share_rows,
            .per_invocation = p.per_invocation,
            .qk_dim = static_cast<std::uint32_t>(shape.qk_dim),
            .v_dim = static_cast<std::uint32_t>(shape.v_dim),
            .parts = p.parts,
            .group = shape.group()};
}

/// The variant of kernels on the matrix units that the device takes for products of bf16.
template <class K>
typename K::Variant units_variant(const Device& device) {
    return device.impl().gemm.gemm_class.units == GemmClass::Units::BF16 ? K::Variant::bf16
                                                                         : K::Variant::f16;
}

/// On matrix units, where the device takes such for the tensors.
std::optional<AttentionTile> tile_for(const Recording& recording, DType dtype, const Shape& shape,
                                      std::uint64_t seq,
                                      std::initializer_list<const Heads*> tensors) {
    using Kernel = kernels::AttentionCoopmatForward; // the others ask for no more
    const Device& device = recording.device();
    const auto variant = static_cast<std::uint32_t>(units_variant<Kernel>(device));
    if (dtype != DType::BF16 || !device.why_not(Kernel::info(), variant).empty() ||
        !std::ranges::all_of(tensors, &Heads::aligned8))
        return std::nullopt;
    const GemmClass& gemm_class = device.impl().gemm.gemm_class;
    std::optional<MatrixSlots> slots;
    if (gemm_class.units != GemmClass::Units::None && !passes_weights_through_memory(device))
        slots = matrix_slots(device, gemm_class.shape, gemm_class.units);
    return attention_tile(device.info(), gemm_class, shape.qk_dim, shape.v_dim, seq, slots);
}

template <class K>
void set_tile(K& kernel, const Recording& recording, const AttentionTile& tile,
              const Shape& shape) {
    const Device& device = recording.device();
    kernel.variant = units_variant<K>(device);
    kernel.constants = {.local_size = tile.local_size(device.info()),
                        .mma_m = tile.shape.m,
                        .mma_n = tile.shape.n,
                        .mma_k = tile.shape.k,
                        .warps = tile.warps,
                        .block = AttentionTile::kBlock,
                        .qk_dim = static_cast<std::uint32_t>(shape.qk_dim),
                        .v_dim = static_cast<std::uint32_t>(shape.v_dim),
                        .group = shape.group()};
    if (tile.in_lane)
        set_lanes(kernel.constants, tile.shape, *tile.in_lane, device.info().subgroup_size);
}

Groups tile_groups(const Arguments& arguments, const AttentionTile& tile, const Shape& shape,
                   std::uint64_t heads, const AttentionOptions& options) {
    return {arguments.u32("blocks", div_up(options.seq, tile.rows())),
            arguments.u32("heads", heads), arguments.u32("sequences", shape.tokens / options.seq)};
}

/// Some memory where there are no documents: it is not read then.
BufferView documents_memory(const Arguments& arguments, const Shape& shape,
                            const AttentionOptions& options, const BufferView& other) {
    if (!options.documents.buffer)
        return other;
    arguments.tensor("documents", options.documents, DType::U32, {shape.tokens, 2});
    return arguments.memory("documents", options.documents, 1);
}

/// What attention_dgrad's kernels read and write, checked.
struct BackwardTensors {
    DType dtype;
    Shape shape;
    Heads q, k, v, o, d_o, dq, dk, dv;
    BufferView lse, delta, documents;
    bool aligned;
};

} // namespace

void attention_forward(Recording& recording, const TensorView& q, const TensorView& k,
                       const TensorView& v, const TensorView& o, const TensorView& lse,
                       const AttentionOptions& options) {
    const Arguments arguments("attention_forward");
    const Shape shape = check_shape(arguments, q, v, options);
    const auto part = [&](const char* name, const TensorView& view, std::uint64_t count,
                          std::uint64_t size) {
        return check_heads(arguments, name, view, q.dtype, shape.tokens, count, size);
    };
    const Heads hq = part("q", q, shape.heads, shape.qk_dim);
    const Heads hk = part("k", k, shape.kv_heads, shape.qk_dim);
    const Heads hv = part("v", v, shape.kv_heads, shape.v_dim);
    const Heads ho = part("o", o, shape.heads, shape.v_dim);
    arguments.tensor("lse", lse, DType::F32, {shape.tokens, shape.heads});
    if (shape.tokens == 0 || shape.heads == 0) {
        return;
    }
    const BufferView documents = documents_memory(arguments, shape, options, hq.memory);
    const std::uint32_t by_document = options.documents.buffer ? 1 : 0;
    const auto operands = [&]<class K>(K kernel) {
        kernel.q = hq.memory;
        kernel.k = hk.memory;
        kernel.v = hv.memory;
        kernel.o = ho.memory;
        kernel.lse = arguments.memory("lse", lse, 1);
        kernel.documents = documents;
        kernel.seq = arguments.u32("seq", options.seq);
        kernel.heads = arguments.u32("heads", shape.heads);
        kernel.q_token = hq.token;
        kernel.q_head = hq.head;
        kernel.k_token = hk.token;
        kernel.k_head = hk.head;
        kernel.v_token = hv.token;
        kernel.v_head = hv.head;
        kernel.o_token = ho.token;
        kernel.o_head = ho.head;
        kernel.scale = options.scale;
        return kernel;
    };
    if (const auto tile = tile_for(recording, q.dtype, shape, options.seq, {&hq, &hk, &hv, &ho})) {
        auto kernel = operands(kernels::AttentionCoopmatForward());
        set_tile(kernel, recording, *tile, shape);
        kernel.constants.by_document = by_document;
        recording.dispatch(kernel, tile_groups(arguments, *tile, shape, shape.heads, options));
        return;
    }
    const bool aligned = hq.aligned && hk.aligned && hv.aligned && ho.aligned;
    const AttentionPlan p = plan(recording, arguments, shape, options, shape.heads, shape.v_dim,
                                 shape.v_dim <= 64, aligned);
    auto kernel = operands(kernels::AttentionForward());
    kernel.variant = storage_variant<kernels::AttentionForward>(q.dtype);
    kernel.constants = constants<kernels::AttentionForward>(p, shape, aligned);
    kernel.constants.by_document = by_document;
    recording.dispatch(kernel, p.groups);
}

namespace {

void record_delta(Recording& recording, const Arguments& arguments, const BackwardTensors& in) {
    const std::uint64_t rows = in.shape.tokens * in.shape.heads;
    recording.dispatch(
        kernels::AttentionDelta{.variant = storage_variant<kernels::AttentionDelta>(in.dtype),
                                .constants = {.aligned = in.o.aligned && in.d_o.aligned ? 1u : 0u,
                                              .v_dim = static_cast<std::uint32_t>(in.shape.v_dim)},
                                .o = in.o.memory,
                                .grad_o = in.d_o.memory,
                                .delta = in.delta,
                                .tokens = arguments.u32("tokens", in.shape.tokens),
                                .heads = arguments.u32("heads", in.shape.heads),
                                .o_token = in.o.token,
                                .o_head = in.o.head,
                                .grad_o_token = in.d_o.token,
                                .grad_o_head = in.d_o.head},
        {arguments.u32("blocks", div_up(rows, 64))});
}

/// A gradient kernel with those of the operands and strides that it has.
template <class K>
K backward_kernel(const BackwardTensors& in, const AttentionOptions& options) {
    K kernel;
    kernel.q = in.q.memory;
    kernel.k = in.k.memory;
    if constexpr (requires { kernel.v; }) {
        kernel.v = in.v.memory;
        kernel.v_token = in.v.token;
        kernel.v_head = in.v.head;
        kernel.delta = in.delta;
    }
    kernel.grad_o = in.d_o.memory;
    kernel.lse = in.lse;
    kernel.documents = in.documents;
    kernel.seq = static_cast<std::uint32_t>(options.seq);
    kernel.heads = static_cast<std::uint32_t>(in.shape.heads);
    kernel.q_token = in.q.token;
    kernel.q_head = in.q.head;
    kernel.k_token = in.k.token;
    kernel.k_head = in.k.head;
    kernel.grad_o_token = in.d_o.token;
    kernel.grad_o_head = in.d_o.head;
    kernel.scale = options.scale;
    if constexpr (requires { kernel.grad_q; }) {
        kernel.grad_q = in.dq.memory;
        kernel.grad_q_token = in.dq.token;
        kernel.grad_q_head = in.dq.head;
    }
    if constexpr (requires { kernel.grad_k; }) {
        kernel.grad_k = in.dk.memory;
        kernel.grad_k_token = in.dk.token;
        kernel.grad_k_head = in.dk.head;
    }
    if constexpr (requires { kernel.grad_v; }) {
        kernel.grad_v = in.dv.memory;
        kernel.grad_v_token = in.dv.token;
        kernel.grad_v_head = in.dv.head;
    }
    return kernel;
}

void record_dq(Recording& recording, const Arguments& arguments, const BackwardTensors& in,
               const AttentionOptions& options) {
    const bool aligned = in.aligned && in.dq.aligned;
    const AttentionPlan p = plan(recording, arguments, in.shape, options, in.shape.heads,
                                 in.shape.qk_dim, in.shape.qk_dim <= 64, aligned);
    auto kernel = backward_kernel<kernels::AttentionBackwardQ>(in, options);
    kernel.variant = storage_variant<kernels::AttentionBackwardQ>(in.dtype);
    kernel.constants = constants<kernels::AttentionBackwardQ>(p, in.shape, aligned);
    kernel.constants.by_document = options.documents.buffer ? 1 : 0;
    recording.dispatch(kernel, p.groups);
}

void record_dkv(Recording& recording, const Arguments& arguments, const BackwardTensors& in,
                const AttentionOptions& options) {
    const bool aligned = in.aligned && in.dk.aligned && in.dv.aligned;
    const std::uint64_t outputs = in.shape.qk_dim + in.shape.v_dim;
    const AttentionPlan p = plan(recording, arguments, in.shape, options, in.shape.kv_heads,
                                 outputs, outputs <= 96, aligned);
    auto kernel = backward_kernel<kernels::AttentionBackwardKv>(in, options);
    kernel.variant = storage_variant<kernels::AttentionBackwardKv>(in.dtype);
    kernel.constants = constants<kernels::AttentionBackwardKv>(p, in.shape, aligned);
    kernel.constants.by_document = options.documents.buffer ? 1 : 0;
    recording.dispatch(kernel, p.groups);
}

/// One of the gradients on matrix units.
template <class K>
void record_on_units(Recording& recording, const Arguments& arguments, const BackwardTensors& in,
                     const AttentionTile& tile, std::uint64_t heads,
                     const AttentionOptions& options) {
    auto kernel = backward_kernel<K>(in, options);
    set_tile(kernel, recording, tile, in.shape);
    kernel.constants.by_document = options.documents.buffer ? 1 : 0;
    recording.dispatch(kernel, tile_groups(arguments, tile, in.shape, heads, options));
}

} // namespace

void attention_dgrad(Recording& recording, const TensorView& d_o, const TensorView& q,
                     const TensorView& k, const TensorView& v, const TensorView& o,
                     const TensorView& lse, const AttentionGradients& gradients,
                     const AttentionOptions& options, BufferView workspace) {
    const Arguments arguments("attention_dgrad");
    BackwardTensors in{};
    in.dtype = q.dtype;
    in.shape = check_shape(arguments, q, v, options);
    const auto part = [&](const char* name, const TensorView& view, std::uint64_t count,
                          std::uint64_t size) {
        return check_heads(arguments, name, view, q.dtype, in.shape.tokens, count, size);
    };
    const std::uint64_t heads = in.shape.heads, kv_heads = in.shape.kv_heads;
    in.q = part("q", q, heads, in.shape.qk_dim);
    in.k = part("k", k, kv_heads, in.shape.qk_dim);
    in.v = part("v", v, kv_heads, in.shape.v_dim);
    in.o = part("o", o, heads, in.shape.v_dim);
    in.d_o = part("d_o", d_o, heads, in.shape.v_dim);
    in.aligned = in.q.aligned && in.k.aligned && in.v.aligned && in.d_o.aligned;
    in.dq = part("dq", gradients.dq, heads, in.shape.qk_dim);
    in.dk = part("dk", gradients.dk, kv_heads, in.shape.qk_dim);
    in.dv = part("dv", gradients.dv, kv_heads, in.shape.v_dim);
    arguments.tensor("lse", lse, DType::F32, {in.shape.tokens, in.shape.heads});
    const std::uint64_t delta_bytes =
        attention_dgrad_workspace_bytes(in.shape.tokens, in.shape.heads);
    arguments.workspace(workspace, delta_bytes);
    if (in.shape.tokens == 0 || in.shape.heads == 0) {
        return;
    }
    in.lse = arguments.memory("lse", lse, 1);
    in.delta = workspace.sub(0, delta_bytes);
    in.documents = documents_memory(arguments, in.shape, options, in.q.memory);
    record_delta(recording, arguments, in);
    if (const auto tile = tile_for(recording, in.dtype, in.shape, options.seq,
                                   {&in.q, &in.k, &in.v, &in.d_o, &in.dq, &in.dk, &in.dv})) {
        record_on_units<kernels::AttentionCoopmatGradQ>(recording, arguments, in, *tile, heads,
                                                        options);
        record_on_units<kernels::AttentionCoopmatGradK>(recording, arguments, in, *tile, kv_heads,
                                                        options);
        record_on_units<kernels::AttentionCoopmatGradV>(recording, arguments, in, *tile, kv_heads,
                                                        options);
        return;
    }
    record_dq(recording, arguments, in, options);
    record_dkv(recording, arguments, in, options);
}

} // namespace bellows::ops
