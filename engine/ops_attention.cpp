// SPDX-License-Identifier: MIT
#include "ops_check.hpp"

#include <bellows/engine/attention.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::ops {

namespace {

/// Registers hold that many sums; wider heads are split among workgroups.
constexpr std::uint64_t kOutputsPerPart = 80;

struct Shape {
    std::uint64_t tokens, heads, qk_dim, v_dim;
};

/// One tensor [tokens, heads, size] as the kernels want it.
struct Heads {
    BufferView memory;
    std::uint32_t token = 0, head = 0; ///< strides in elements
    bool aligned = false;              ///< allows accesses by four elements
};

Heads heads(const Arguments& arguments, const char* name, const TensorView& view, DType dtype,
            const Shape& shape, std::uint64_t size) {
    const bool fits = view.rank == 3 && view.dtype == dtype && view.extent[0] == shape.tokens &&
                      view.extent[1] == shape.heads && view.extent[2] == size &&
                      (size <= 1 || view.stride[2] == 1);
    arguments.require(fits, std::string(name) + " is " + describe(view) + ", wanted is " +
                                to_string(dtype) + " [" + std::to_string(shape.tokens) + ", " +
                                std::to_string(shape.heads) + ", " + std::to_string(size) +
                                "] with last stride 1");
    arguments.require(dtype == DType::F32 || (view.stride[0] % 2 == 0 && view.stride[1] % 2 == 0),
                      std::string(name) + " is " + describe(view) +
                          "; outer strides of bf16 must be even");
    Heads h;
    h.memory = arguments.memory(name, view, dtype == DType::BF16 ? 2 : 1);
    h.token = arguments.u32("a token stride", view.stride[0]);
    h.head = arguments.u32("a head stride", view.stride[1]);
    h.aligned = size % 4 == 0 && h.token % 4 == 0 && h.head % 4 == 0 &&
                view.buffer.offset % (4 * size_of(dtype)) == 0;
    return h;
}

Shape check_shape(const Arguments& arguments, const TensorView& q, const TensorView& v,
                  const AttentionOptions& options) {
    arguments.rank("q", q, 3);
    arguments.rank("v", v, 3);
    arguments.activation("q", q);
    const Shape shape{q.extent[0], q.extent[1], q.extent[2], v.extent[2]};
    arguments.require(shape.qk_dim > 0 && shape.v_dim > 0, "heads of size 0");
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

/// outputs: elements of a row that an invocation of the kernel sums up.
AttentionPlan plan(const Recording& recording, const Arguments& arguments, const Shape& shape,
                   const AttentionOptions& options, std::uint64_t outputs, bool small,
                   bool aligned) {
    const DeviceInfo& info = recording.device().info();
    AttentionPlan p{};
    p.local_size = info.is_cpu ? 8 : 32;
    p.per_invocation = info.is_cpu && small ? 4 : 1;
    p.share_rows = aligned && shares_loads(info) ? 1 : 0;
    p.parts = static_cast<std::uint32_t>(div_up(outputs, kOutputsPerPart));
    p.groups = {arguments.u32("blocks", div_up(options.seq, p.local_size * p.per_invocation)),
                arguments.u32("heads", shape.heads * p.parts),
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
            .parts = p.parts};
}

/// What attention_dgrad's kernels read, checked.
struct BackwardInputs {
    DType dtype;
    Shape shape;
    Heads q, k, v, o, d_o;
    BufferView lse, delta;
    bool aligned;
};

} // namespace

void attention_forward(Recording& recording, const TensorView& q, const TensorView& k,
                       const TensorView& v, const TensorView& o, const TensorView& lse,
                       const AttentionOptions& options) {
    const Arguments arguments("attention_forward");
    const Shape shape = check_shape(arguments, q, v, options);
    const Heads hq = heads(arguments, "q", q, q.dtype, shape, shape.qk_dim);
    const Heads hk = heads(arguments, "k", k, q.dtype, shape, shape.qk_dim);
    const Heads hv = heads(arguments, "v", v, q.dtype, shape, shape.v_dim);
    const Heads ho = heads(arguments, "o", o, q.dtype, shape, shape.v_dim);
    arguments.tensor("lse", lse, DType::F32, {shape.tokens, shape.heads});
    if (shape.tokens == 0 || shape.heads == 0) {
        return;
    }
    const bool aligned = hq.aligned && hk.aligned && hv.aligned && ho.aligned;
    const AttentionPlan p =
        plan(recording, arguments, shape, options, shape.v_dim, shape.v_dim <= 64, aligned);
    recording.dispatch(
        kernels::AttentionForward{.variant = storage_variant<kernels::AttentionForward>(q.dtype),
                                  .constants =
                                      constants<kernels::AttentionForward>(p, shape, aligned),
                                  .q = hq.memory,
                                  .k = hk.memory,
                                  .v = hv.memory,
                                  .o = ho.memory,
                                  .lse = arguments.memory("lse", lse, 1),
                                  .seq = arguments.u32("seq", options.seq),
                                  .heads = arguments.u32("heads", shape.heads),
                                  .q_token = hq.token,
                                  .q_head = hq.head,
                                  .k_token = hk.token,
                                  .k_head = hk.head,
                                  .v_token = hv.token,
                                  .v_head = hv.head,
                                  .o_token = ho.token,
                                  .o_head = ho.head,
                                  .scale = options.scale},
        p.groups);
}

namespace {

void record_delta(Recording& recording, const Arguments& arguments, const BackwardInputs& in) {
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

/// The operands and strides that both gradient kernels have in common.
template <class K>
K backward_kernel(const BackwardInputs& in, const AttentionOptions& options) {
    K kernel;
    kernel.variant = storage_variant<K>(in.dtype);
    kernel.q = in.q.memory;
    kernel.k = in.k.memory;
    kernel.v = in.v.memory;
    kernel.grad_o = in.d_o.memory;
    kernel.lse = in.lse;
    kernel.delta = in.delta;
    kernel.seq = static_cast<std::uint32_t>(options.seq);
    kernel.heads = static_cast<std::uint32_t>(in.shape.heads);
    kernel.q_token = in.q.token;
    kernel.q_head = in.q.head;
    kernel.k_token = in.k.token;
    kernel.k_head = in.k.head;
    kernel.v_token = in.v.token;
    kernel.v_head = in.v.head;
    kernel.grad_o_token = in.d_o.token;
    kernel.grad_o_head = in.d_o.head;
    kernel.scale = options.scale;
    return kernel;
}

void record_dq(Recording& recording, const Arguments& arguments, const BackwardInputs& in,
               const Heads& dq, const AttentionOptions& options) {
    const bool aligned = in.aligned && dq.aligned;
    const AttentionPlan p = plan(recording, arguments, in.shape, options, in.shape.qk_dim,
                                 in.shape.qk_dim <= 64, aligned);
    auto kernel = backward_kernel<kernels::AttentionBackwardQ>(in, options);
    kernel.constants = constants<kernels::AttentionBackwardQ>(p, in.shape, aligned);
    kernel.grad_q = dq.memory;
    kernel.grad_q_token = dq.token;
    kernel.grad_q_head = dq.head;
    recording.dispatch(kernel, p.groups);
}

void record_dkv(Recording& recording, const Arguments& arguments, const BackwardInputs& in,
                const Heads& dk, const Heads& dv, const AttentionOptions& options) {
    const bool aligned = in.aligned && dk.aligned && dv.aligned;
    const std::uint64_t outputs = in.shape.qk_dim + in.shape.v_dim;
    const AttentionPlan p =
        plan(recording, arguments, in.shape, options, outputs, outputs <= 96, aligned);
    auto kernel = backward_kernel<kernels::AttentionBackwardKv>(in, options);
    kernel.constants = constants<kernels::AttentionBackwardKv>(p, in.shape, aligned);
    kernel.grad_k = dk.memory;
    kernel.grad_v = dv.memory;
    kernel.grad_k_token = dk.token;
    kernel.grad_k_head = dk.head;
    kernel.grad_v_token = dv.token;
    kernel.grad_v_head = dv.head;
    recording.dispatch(kernel, p.groups);
}

} // namespace

std::uint64_t attention_dgrad_workspace_bytes(std::uint64_t tokens, std::uint64_t heads) {
    return 4 * tokens * heads;
}

void attention_dgrad(Recording& recording, const TensorView& d_o, const TensorView& q,
                     const TensorView& k, const TensorView& v, const TensorView& o,
                     const TensorView& lse, const AttentionGradients& gradients,
                     const AttentionOptions& options, BufferView workspace) {
    const Arguments arguments("attention_dgrad");
    BackwardInputs in{};
    in.dtype = q.dtype;
    in.shape = check_shape(arguments, q, v, options);
    const auto part = [&](const char* name, const TensorView& view, std::uint64_t size) {
        return heads(arguments, name, view, q.dtype, in.shape, size);
    };
    in.q = part("q", q, in.shape.qk_dim);
    in.k = part("k", k, in.shape.qk_dim);
    in.v = part("v", v, in.shape.v_dim);
    in.o = part("o", o, in.shape.v_dim);
    in.d_o = part("d_o", d_o, in.shape.v_dim);
    in.aligned = in.q.aligned && in.k.aligned && in.v.aligned && in.d_o.aligned;
    const Heads dq = part("dq", gradients.dq, in.shape.qk_dim);
    const Heads dk = part("dk", gradients.dk, in.shape.qk_dim);
    const Heads dv = part("dv", gradients.dv, in.shape.v_dim);
    arguments.tensor("lse", lse, DType::F32, {in.shape.tokens, in.shape.heads});
    const std::uint64_t delta_bytes =
        attention_dgrad_workspace_bytes(in.shape.tokens, in.shape.heads);
    arguments.workspace(workspace, delta_bytes);
    if (in.shape.tokens == 0 || in.shape.heads == 0) {
        return;
    }
    in.lse = arguments.memory("lse", lse, 1);
    in.delta = workspace.sub(0, delta_bytes);
    record_delta(recording, arguments, in);
    record_dq(recording, arguments, in, dq, options);
    record_dkv(recording, arguments, in, dk, dv, options);
}

} // namespace bellows::ops
