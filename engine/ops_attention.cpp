// SPDX-License-Identifier: MIT
#include "ops_check.hpp"

#include <bellows/engine/attention.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::ops {

namespace {

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
    std::uint32_t local_size, per_invocation, share_rows;
    Groups groups;
};

AttentionPlan plan(const Recording& recording, const Arguments& arguments, const Shape& shape,
                   const AttentionOptions& options, bool small_heads, bool aligned) {
    const DeviceInfo& info = recording.device().info();
    AttentionPlan p{};
    p.local_size = info.is_cpu ? 8 : 32;
    p.per_invocation = info.is_cpu && small_heads ? 4 : 1;
    p.share_rows = aligned && shares_loads(info) ? 1 : 0;
    p.groups = {arguments.u32("blocks", div_up(options.seq, p.local_size * p.per_invocation)),
                arguments.u32("heads", shape.heads),
                arguments.u32("sequences", shape.tokens / options.seq)};
    return p;
}

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
    const AttentionPlan p = plan(recording, arguments, shape, options, shape.v_dim <= 64, aligned);
    recording.dispatch(
        kernels::AttentionForward{.variant = storage_variant<kernels::AttentionForward>(q.dtype),
                                  .constants = {.local_size = p.local_size,
                                                .aligned = aligned ? 1u : 0u,
                                                .share_rows = p.share_rows,
                                                .per_invocation = p.per_invocation,
                                                .qk_dim = arguments.u32("qk_dim", shape.qk_dim),
                                                .v_dim = arguments.u32("v_dim", shape.v_dim)},
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

std::uint64_t attention_dgrad_workspace_bytes(std::uint64_t tokens, std::uint64_t heads) {
    return 4 * tokens * heads;
}

void attention_dgrad(Recording& recording, const TensorView& d_o, const TensorView& q,
                     const TensorView& k, const TensorView& v, const TensorView& o,
                     const TensorView& lse, const AttentionGradients& gradients,
                     const AttentionOptions& options, BufferView workspace) {
    const Arguments arguments("attention_dgrad");
    const Shape shape = check_shape(arguments, q, v, options);
    const Heads hq = heads(arguments, "q", q, q.dtype, shape, shape.qk_dim);
    const Heads hk = heads(arguments, "k", k, q.dtype, shape, shape.qk_dim);
    const Heads hv = heads(arguments, "v", v, q.dtype, shape, shape.v_dim);
    const Heads ho = heads(arguments, "o", o, q.dtype, shape, shape.v_dim);
    const Heads hdo = heads(arguments, "d_o", d_o, q.dtype, shape, shape.v_dim);
    const Heads hdq = heads(arguments, "dq", gradients.dq, q.dtype, shape, shape.qk_dim);
    const Heads hdk = heads(arguments, "dk", gradients.dk, q.dtype, shape, shape.qk_dim);
    const Heads hdv = heads(arguments, "dv", gradients.dv, q.dtype, shape, shape.v_dim);
    arguments.tensor("lse", lse, DType::F32, {shape.tokens, shape.heads});
    const std::uint64_t delta_bytes = attention_dgrad_workspace_bytes(shape.tokens, shape.heads);
    arguments.workspace(workspace, delta_bytes);
    if (shape.tokens == 0 || shape.heads == 0) {
        return;
    }
    const BufferView delta = workspace.sub(0, delta_bytes);
    const BufferView lse_memory = arguments.memory("lse", lse, 1);
    const auto qk_dim = arguments.u32("qk_dim", shape.qk_dim);
    const auto v_dim = arguments.u32("v_dim", shape.v_dim);
    const auto num_heads = arguments.u32("heads", shape.heads);
    const auto seq = arguments.u32("seq", options.seq);
    const bool inputs_aligned = hq.aligned && hk.aligned && hv.aligned && hdo.aligned;
    const bool q_aligned = inputs_aligned && hdq.aligned;
    const bool kv_aligned = inputs_aligned && hdk.aligned && hdv.aligned;

    recording.dispatch(
        kernels::AttentionDelta{
            .variant = storage_variant<kernels::AttentionDelta>(q.dtype),
            .constants = {.aligned = ho.aligned && hdo.aligned ? 1u : 0u, .v_dim = v_dim},
            .o = ho.memory,
            .grad_o = hdo.memory,
            .delta = delta,
            .tokens = arguments.u32("tokens", shape.tokens),
            .heads = num_heads,
            .o_token = ho.token,
            .o_head = ho.head,
            .grad_o_token = hdo.token,
            .grad_o_head = hdo.head},
        {arguments.u32("blocks", div_up(shape.tokens * shape.heads, 64))});

    const AttentionPlan pq =
        plan(recording, arguments, shape, options, shape.qk_dim <= 64, q_aligned);
    recording.dispatch(
        kernels::AttentionBackwardQ{.variant =
                                        storage_variant<kernels::AttentionBackwardQ>(q.dtype),
                                    .constants = {.local_size = pq.local_size,
                                                  .aligned = q_aligned ? 1u : 0u,
                                                  .share_rows = pq.share_rows,
                                                  .per_invocation = pq.per_invocation,
                                                  .qk_dim = qk_dim,
                                                  .v_dim = v_dim},
                                    .q = hq.memory,
                                    .k = hk.memory,
                                    .v = hv.memory,
                                    .grad_o = hdo.memory,
                                    .lse = lse_memory,
                                    .delta = delta,
                                    .grad_q = hdq.memory,
                                    .seq = seq,
                                    .heads = num_heads,
                                    .q_token = hq.token,
                                    .q_head = hq.head,
                                    .k_token = hk.token,
                                    .k_head = hk.head,
                                    .v_token = hv.token,
                                    .v_head = hv.head,
                                    .grad_o_token = hdo.token,
                                    .grad_o_head = hdo.head,
                                    .grad_q_token = hdq.token,
                                    .grad_q_head = hdq.head,
                                    .scale = options.scale},
        pq.groups);

    const AttentionPlan pk =
        plan(recording, arguments, shape, options, shape.qk_dim + shape.v_dim <= 96, kv_aligned);
    recording.dispatch(
        kernels::AttentionBackwardKv{.variant =
                                         storage_variant<kernels::AttentionBackwardKv>(q.dtype),
                                     .constants = {.local_size = pk.local_size,
                                                   .aligned = kv_aligned ? 1u : 0u,
                                                   .share_rows = pk.share_rows,
                                                   .per_invocation = pk.per_invocation,
                                                   .qk_dim = qk_dim,
                                                   .v_dim = v_dim},
                                     .q = hq.memory,
                                     .k = hk.memory,
                                     .v = hv.memory,
                                     .grad_o = hdo.memory,
                                     .lse = lse_memory,
                                     .delta = delta,
                                     .grad_k = hdk.memory,
                                     .grad_v = hdv.memory,
                                     .seq = seq,
                                     .heads = num_heads,
                                     .q_token = hq.token,
                                     .q_head = hq.head,
                                     .k_token = hk.token,
                                     .k_head = hk.head,
                                     .v_token = hv.token,
                                     .v_head = hv.head,
                                     .grad_o_token = hdo.token,
                                     .grad_o_head = hdo.head,
                                     .grad_k_token = hdk.token,
                                     .grad_k_head = hdk.head,
                                     .grad_v_token = hdv.token,
                                     .grad_v_head = hdv.head,
                                     .scale = options.scale},
        pk.groups);
}

} // namespace bellows::ops
